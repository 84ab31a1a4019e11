"""A volume: one device, and what survives on it. Nothing here knows of other devices, or of the pool's memory.

A volume keeps objects in extents of blocks, and a log of changes. After a restart, or a loss of power at any moment,
each acknowledged object is there, or was dropped as a whole. docs/reference/volume-format.md describes every byte, and
the order of writes that guarantees this. ``README.md`` in the parent folder lists the files.
"""
