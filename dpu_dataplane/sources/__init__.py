"""Where stored bytes come from and go to: the seam (``source.py``), what is behind it, and which one is configured.

The rest of the data plane knows ``source.py`` and, where the daemon is put together, ``selection.py``.
"""

__all__: list[str] = []
