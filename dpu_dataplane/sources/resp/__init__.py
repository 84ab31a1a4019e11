"""Servers that speak the Redis protocol as a source: one of them, ours or Redis itself, or the nodes of a cluster.

Questions (``server.py``, ``cluster.py``) and bytes (``ranges.py``, ``puts.py``) go over connections of their own;
``source.py`` puts them together.
"""

__all__: list[str] = []
