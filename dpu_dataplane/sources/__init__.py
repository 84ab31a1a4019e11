"""Sources: places where records are stored; ``source.py`` is their interface."""
