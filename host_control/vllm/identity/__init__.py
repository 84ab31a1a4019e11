"""Identity: which KV a vLLM engine computes for which request. What changes KV changes the key; nothing else does.

``table`` lists every input and says what it does to the key. Of what an engine's requests have in common ``namespace``
makes one name: ``weights`` says which files hold what was loaded, ``content`` what is in them, ``positions`` what the
context's length does. ``requests`` names what is a request's own, ``adapters`` among it. What cannot be named is served
without the cache. docs/identity.md has the table.
"""
