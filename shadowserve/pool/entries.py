"""Index entry of an object, and the place of its bytes in memory."""

from typing import Final

from shadowserve.native import IndexEntry, ObjectFields
from shadowserve.pool.arena import BLOCK_BYTES, Buffer, object_blocks
from shadowserve.pool.types import Item

MEMORY_ONLY: Final = 255
"""Device number of objects that are in memory alone. Their ``extent`` is the memory that they take besides the
value."""


class Entry:
    """An object's fields in the index, and its slot there."""

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
        return object_blocks(self.length)

    @property
    def size(self) -> int:
        """Bytes of these blocks; for memory alone, bytes that count against the budget."""
        return self.blocks * BLOCK_BYTES if self.device != MEMORY_ONLY else self.length + self.extent

    @property
    def header(self) -> ObjectFields:
        """Expected fields of the object's header."""
        fields = self.fields
        return ObjectFields(
            self.key, self.tenant, self.length, self.generation, header_length=fields.header_length, flags=fields.flags
        )


class PoolItem(Item):
    """An object with the index's fields and its memory."""

    __slots__ = ("buffer", "entry")

    def __init__(self, entry: Entry, buffer: Buffer | None) -> None:
        fields = entry.fields
        self.length = entry.length
        self.header_bytes = fields.header_length
        self.expires_at_ms = fields.expires_at_ms or None
        self.value = None if buffer is None else buffer.value(0, entry.length)
        self.entry = entry
        self.buffer = buffer

    @property
    def kept(self) -> Buffer | None:
        return self.buffer
