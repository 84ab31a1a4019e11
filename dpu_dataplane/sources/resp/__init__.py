"""Servers that speak the Redis protocol as a source: one, ours or Redis itself, several of ours, or a cluster's nodes.

Questions (``server.py``, ``several.py``, ``cluster.py``) and bytes (``ranges.py``, ``puts.py``) go over connections of
their own; ``source.py`` puts them together.
"""

__all__: list[str] = []
