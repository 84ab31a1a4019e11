"""Identity: which KV a vLLM engine computes for which request. What changes KV changes the key; nothing else does.

``table`` lists every input and its effect on the key. ``namespace`` combines the inputs that all requests of an engine
share: ``weights`` finds the loaded files, ``content`` hashes them. ``requests`` handles the inputs of single requests,
``adapters`` their LoRA adapters. Where an input cannot be identified, all of them raise ``UncacheableError``, and the
engine or the request runs without the cache. docs/design/identity.md shows the table.
"""
