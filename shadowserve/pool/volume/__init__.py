"""One device, and what survives on it: a volume. Nothing here knows that there are others, or memory beside it.

A volume keeps objects in extents of blocks, and a log of what has become of them, so that a restart, or a loss of power
at any moment, finds every object that somebody was told of, or none of it. docs/storage-format.md has every byte, and
the order that makes this so. ``README.md`` one folder up says what is where.
"""
