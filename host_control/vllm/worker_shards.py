"""The records that a worker reads and writes: its shards of each shard layout, and their chunk layouts."""

from collections.abc import Iterable
from typing import Final

from host_control.lookup import SAVED
from host_control.vllm.shards import Shard
from shadowserve.chunk import ChunkLayout

OTHER_LAYOUTS: Final = 1
"""Key of the manager that fetches records of all other shard layouts."""
_BUFFER_CHUNKS_MAX: Final = 128
"""Larger buffers bring nothing: a batch of 64 chunks hides its round trip many times over."""


def manager_key(shard_layout: int) -> int:
    """Return the key of the manager that fetches records of a shard layout: 0 (own), ``SAVED`` or all others."""
    return shard_layout if shard_layout in (0, SAVED) else OTHER_LAYOUTS


class WorkerShards:
    """Shards of a worker by shard layout: 0 is its own, ``SAVED`` holds saves of preempted requests."""

    def __init__(self) -> None:
        self.parts: dict[int, list[Shard]] = {}
        self.shapes: dict[int, list[ChunkLayout]] = {}

    def layouts_of(self, key: int) -> list[int]:
        """Return the shard layouts whose records the manager with this key fetches."""
        return [layout for layout in self.parts if manager_key(layout) == key]

    def first_of(self, shard_layout: int) -> int:
        """Return the index of a shard layout's first shard among all shards of its manager."""
        return sum(len(self.parts[each]) for each in self.layouts_of(manager_key(shard_layout)) if each < shard_layout)

    def chunk_bytes(self, shard_layout: int = 0) -> int:
        """Return the bytes of one chunk of every shard of a layout."""
        return sum(shape.raw_bytes for shape in self.shapes.get(shard_layout, ()))

    def buffer_chunks(self, shard_layout: int, configured_bytes: int) -> int:
        """Return the number of chunks that a buffer holds."""
        return min(max(configured_bytes // self.chunk_bytes(shard_layout), 2), _BUFFER_CHUNKS_MAX)

    def buffer_bytes(self, shard_layouts: Iterable[int], configured_bytes: int) -> int:
        """Return the size of one buffer for chunks of several shard layouts."""
        return max(self.buffer_chunks(each, configured_bytes) * self.chunk_bytes(each) for each in shard_layouts)
