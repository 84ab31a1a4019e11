"""What the index says of an object, and what is known of it besides."""

from typing import Final

from shadowserve.native import IndexEntry, ObjectFields
from shadowserve.pool.arena import BLOCK_BYTES, Buffer, object_blocks
from shadowserve.pool.terms import Item

MEMORY_ONLY: Final = 255
"""The index's number of the device of objects that are in memory alone; ``extent`` says what they take there beside
their values."""


class Entry:
    """What the index said of an object, and its slot there."""

    __slots__ = ("device", "extent", "fields", "generation", "key", "length", "slot", "tenant")

    def __init__(self, slot: int, fields: IndexEntry) -> None:
        self.slot = slot
        self.fields = fields
        self.key = fields.key
        self.tenant = fields.tenant
        self.device = fields.device
        self.extent = fields.extent
        self.length = fields.length
        self.generation = fields.generation

    @property
    def blocks(self) -> int:
        """Blocks of 4 KiB that it takes."""
        return object_blocks(self.length)

    @property
    def size(self) -> int:
        """Bytes of these; in memory alone, bytes that it counts for there."""
        return object_blocks(self.length) * BLOCK_BYTES if self.device != MEMORY_ONLY else self.length + self.extent

    @property
    def header(self) -> ObjectFields:
        """What the object's header says, if it is the object."""
        fields = self.fields
        return ObjectFields(
            self.key, self.tenant, self.length, self.generation, head_length=fields.head_length, flags=fields.flags
        )


class PoolItem(Item):
    """What is known of an object: what the index says, and where its bytes lie in memory."""

    __slots__ = ("buffer", "entry")

    def __init__(self, entry: Entry, buffer: Buffer | None) -> None:
        """Describe an entry; ``buffer`` has its bytes."""
        fields = entry.fields
        self.length = entry.length
        self.head_bytes = fields.head_length
        self.expires_at_ms = fields.expires_at_ms or None
        self.value = None if buffer is None else buffer.value(0, entry.length)
        self.entry = entry
        self.buffer = buffer

    @property
    def kept(self) -> Buffer | None:
        """See :attr:`Item.kept`."""
        return self.buffer
