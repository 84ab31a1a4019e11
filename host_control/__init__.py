"""Code of the serving process: the KV cache manager and the engine adapters.

``README.md`` beside this file says what is where, and in which order to read it.
"""

__all__: list[str] = []
