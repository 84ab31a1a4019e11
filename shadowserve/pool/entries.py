"""Keys, and what the index has of each object.

A chunk's key is ``kv:`` and 64 hexadecimal digits, which are its 32 bytes in the index. Any other key has its SHA-256,
and its text is kept for SCAN and for the log.
"""

import hashlib
from binascii import unhexlify
from typing import Final

from shadowserve.keys import STORAGE_PREFIX
from shadowserve.native import IndexEntry, ObjectFields, RecordFlag
from shadowserve.pool.arena import Buffer
from shadowserve.pool.types import Address, Item
from shadowserve.pool.volume.format import BLOCK_BYTES, blocks_of, object_fields

CHUNK_KEY_BYTES: Final = len(STORAGE_PREFIX) + 64
"""Length of a chunk's key."""


ParsedKey = tuple[int, bytes, bytes | None]
"""Tenant, the index's key, and the text; None as the text of a chunk's key."""


def parse_key(address: Address) -> ParsedKey:
    """Return the index's key of an address."""
    tenant, text = address
    key = chunk_of(text)
    return (tenant, hashlib.sha256(text).digest(), text) if key is None else (tenant, key, None)


def chunk_of(text: bytes) -> bytes | None:
    """Return the 32 bytes of a chunk's key; None for any other key."""
    if len(text) == CHUNK_KEY_BYTES and text.startswith(STORAGE_PREFIX) and text.islower():  # the prefix has letters
        try:  # suppress() would take twice the time, for each put
            return unhexlify(text[3:])
        except ValueError:
            return None
    return None


NAMED: Final = int(RecordFlag.NAMED)  # an int, since operators of IntFlag are slow
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
        return blocks_of(self.length)

    @property
    def size(self) -> int:
        """Bytes of these blocks; for memory alone, bytes that count against the budget."""
        return self.blocks * BLOCK_BYTES if self.device != MEMORY_ONLY else self.length + self.extent

    @property
    def header(self) -> ObjectFields:
        """Expected fields of the object's header."""
        return object_fields(self.fields)


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
