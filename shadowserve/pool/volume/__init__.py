"""One device, and what survives on it: a volume. Nothing here knows that there are others, or memory beside it.

A volume keeps objects in extents of blocks, and a log of what has become of them, so that a restart, or a loss of power
at any moment, finds every object that somebody was told of, or none of it. docs/storage-format.md has every byte, and
the order that makes this so.

- ``device`` is what a volume needs of a device, ``pages`` memory for its own blocks, ``patience`` begins again what a
  device was too busy for, ``changes`` are what a change is called until it is durable, and why one is refused.
- ``format`` reads and writes every structure; ``texts`` are the keys' names as records of the log.
- ``volume`` writes objects and frees extents; ``log`` makes that durable, in groups; ``snapshot`` writes the index out
  beside everything else, so that the log can begin anew.
- ``recovery`` reads snapshot and log when a volume is opened, ``tail`` what the log's end leaves in doubt; ``mending``
  makes the log's two copies alike before anything builds upon them; ``verification`` checks all of it offline.
- ``formatting`` makes a volume of an empty device, and ``foreign`` says what is on one that is not empty.
"""

__all__: list[str] = []
