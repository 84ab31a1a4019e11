"""The index of stored objects, and the block allocator: the tables of the storage engine, in C."""

import enum
import os
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shadowserve.native._library import Owner, check, ffi, lib, numpy_dtype

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

__all__ = [
    "ANY",
    "INDEX_KEY_BYTES",
    "INDEX_RECORD_DTYPE",
    "NO_PARENT",
    "Extents",
    "Index",
    "IndexEntry",
    "RecordFlag",
    "IndexPlace",
    "IndexPolicy",
    "RecordKind",
    "IndexPurge",
    "IndexTotals",
    "ReplayCounts",
    "blocks_of",
]

INDEX_KEY_BYTES: Final = 32
ANY: Final = -1
"""All tenants, or all devices."""
NO_PARENT: Final = bytes(INDEX_KEY_BYTES)

INDEX_RECORD_DTYPE: Final = numpy_dtype("struct ss_index_record", "u1")
"""One record of a device's log and snapshot (``struct ss_index_record``), 128 bytes."""

_NULL: Final = ffi.NULL
_SUPERSEDED_AT_ONCE: Final = 256
_RECORD: Final = struct.Struct("<BBBBHxxIIIIIIQ32s32s24x")
_PLACE: Final = struct.Struct("<IIII")


class IndexPolicy(enum.IntEnum):
    """Eviction policy (``enum ss_index_policy``)."""

    LRU = 0
    S3FIFO = 1
    FREQUENCY = 2


class RecordKind(enum.IntEnum):
    """Kind of a record (``enum ss_index_record_kind``)."""

    PUT = 1
    REMOVE = 2
    EXPIRE = 3
    PIN = 4
    CLEAR = 5
    NAME = 6
    TENANT = 7


class RecordFlag(enum.IntFlag):
    """Flags of an object (``enum ss_index_flags``)."""

    RECORD = 1
    NAMED = 2
    EVERY_TENANT = 0x80
    """Only in a CLEAR record."""


# Operators of enum.IntFlag are slow Python functions. These plain integers are needed for each put.
_PUT: Final = int(RecordKind.PUT)
_NAMED: Final = int(RecordFlag.NAMED)


class IndexPurge(enum.IntEnum):
    """Objects to remove after recovery (``enum ss_index_purge``)."""

    UNPROVEN = 0
    NAMELESS = 1


class IndexEntry(NamedTuple):
    """Index entry of an object. The fields are those of a PUT record, in the same order."""

    kind: int
    flags: int
    device: int
    name_blocks: int
    """Additional blocks for a long name."""
    tenant: int
    extent: int
    """First 4 KiB block on the device; for an object only in memory (device 255): bytes in addition to the value."""
    length: int
    """Bytes of the value."""
    header_length: int
    accessed_s: int
    pinned_until_s: int
    generation: int
    expires_at_ms: int
    """0: never."""
    key: bytes
    parent: bytes
    """:data:`NO_PARENT` for none."""

    @property
    def blocks(self) -> int:
        """Number of 4 KiB blocks on the device."""
        return blocks_of(self.length) + self.name_blocks

    def pack(self) -> bytes:
        """Return the 128 bytes of the record."""
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> "IndexEntry":
        """Return the entry of a record of any kind, 128 bytes."""
        return cls._make(_RECORD.unpack(record))


class IndexPlace(NamedTuple):
    """Position of an object: the fields of an :class:`IndexEntry` that a reader of its device needs."""

    slot: int
    extent: int
    generation: int
    device: int


class IndexTotals(NamedTuple):
    """Sums over objects."""

    objects: int
    bytes: int
    """Bytes with headers, each object rounded up to 4 KiB; for an object only in memory: ``length`` plus ``extent``."""
    records: int
    expiring: int
    name_records: int
    """Number of records that the names take in a log or a snapshot."""


class ReplayCounts(NamedTuple):
    """Results of a replay of records."""

    applied: int
    ignored: int
    """Records of the volume's own kinds, or of absent objects."""
    refused: int
    """Records with an invalid field."""


def blocks_of(length: int, name_length: int = 0) -> int:
    """Return the number of 4 KiB blocks of an object with a value and a name of these lengths."""
    return int(lib.ss_index_blocks(length, name_length))


class Index(Owner):
    """All objects of a storage node by tenant and key, with the eviction queues. Not thread-safe.

    A slot is an object's number, from 1, until the object is removed. Methods that take a slot do nothing if the slot
    has no object. Keys have 32 bytes.
    """

    destructor = "ss_index_close"

    def __init__(self, objects_max: int, policy: IndexPolicy = IndexPolicy.LRU, seed: int | None = None) -> None:
        """Reserve addresses for ``objects_max`` objects, 1 to 2^30; memory is allocated as objects are inserted.

        ``seed`` is that of the hash, 64 bits; None: a random one, so that no client can choose keys that collide.
        """
        self.objects_max, most = objects_max, min(max(objects_max, 0), 0xFFFFFFFF)
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        operation = f"making an index for {objects_max} objects"
        super().__init__("ss_index", lambda pointer: lib.ss_index_open(most, policy, seed, pointer), operation)
        self._slot = ffi.new("uint32_t *")
        self._record = ffi.new("struct ss_index_record *")
        self._buffer = ffi.buffer(self._record)

    def __len__(self) -> int:
        return self.totals().objects

    def find(self, tenant: int, key: bytes) -> int:
        """Return the object's slot; 0: absent. This does not count as a use."""
        if len(key) != INDEX_KEY_BYTES:
            raise _wrong_key(key)
        return int(lib.ss_index_find(self._object, tenant, key))

    def get(self, tenant: int, key: bytes, now_s: int = 0) -> tuple[int, IndexEntry] | None:
        """Return an object's slot and entry; None: absent. With ``now_s`` this counts as a use of the object."""
        if len(key) != INDEX_KEY_BYTES:
            raise _wrong_key(key)
        slot = lib.ss_index_get(self._object, tenant, key, now_s, self._record)
        return (slot, self._entry()) if slot else None

    def places(self, tenant: int, keys: bytes, lengths: Sequence[int], now_ms: int) -> list[IndexPlace]:
        """Return the positions of the leading chunks that are on devices, and count a use of each.

        The list ends before the first chunk that is absent, has another length than ``lengths`` says, is only in
        memory, or has expired. ``keys`` follow each other without gaps.
        """
        count = len(lengths)
        if len(keys) != count * INDEX_KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes are no {count} index keys, of {INDEX_KEY_BYTES} bytes each")
        places = ffi.new("struct ss_index_place[]", count)
        lengths = ffi.new("uint32_t[]", lengths)
        found = lib.ss_index_places(self._object, tenant, keys, lengths, count, now_ms, places)
        return list(map(IndexPlace._make, _PLACE.iter_unpack(ffi.buffer(places, found * _PLACE.size))))

    def find_many(self, tenant: int, keys: "bytes | memoryview | NDArray[np.uint8]") -> "NDArray[np.uint32]":
        """Return the slot of each key; 0: absent. The keys follow each other without gaps."""
        content = ffi.from_buffer("uint8_t[]", keys)
        slots = np.empty(len(content) // INDEX_KEY_BYTES, np.uint32)
        pointer = ffi.cast("uint32_t *", ffi.from_buffer("uint8_t[]", slots))
        lib.ss_index_find_many(self._object, tenant, content, len(slots), pointer)
        return slots

    def read(self, slot: int) -> IndexEntry:
        """Return the entry of an object. Raises KeyError if the slot has none."""
        if lib.ss_index_read(self._object, slot, self._record):
            raise KeyError(slot)
        return self._entry()

    def _entry(self) -> IndexEntry:
        return tuple.__new__(IndexEntry, _RECORD.unpack_from(self._buffer))  # as _make(), in half of its time

    def holds(self, slot: int, key: bytes, generation: int) -> bool:
        """Return whether the slot has the object with this key, of this put; faster than :meth:`read`."""
        if lib.ss_index_read(self._object, slot, self._record):
            return False
        return bool(self._record.generation == generation and ffi.buffer(self._record.key)[:] == key)

    def insert(
        self,
        tenant: int,
        key: bytes,
        name: bytes | None = None,
        *,
        device: int,
        extent: int = 0,
        length: int,
        now_s: int,
        header_length: int = 0,
        name_blocks: int = 0,
        flags: int = 0,
        expires_at_ms: int = 0,
        pinned_until_s: int = 0,
        generation: int = 0,
        parent: bytes = NO_PARENT,
    ) -> int:
        """Insert an object, or replace the object with the same key; return its slot.

        With ``name``, the text of its key, the object also gets the flag NAMED; ``name_blocks`` is the number of blocks
        of this text on the device. NativeError with ``Result.NO_SPACE``: the index has ``objects_max`` objects.
        """
        _RECORD.pack_into(
            self._buffer,
            0,
            _PUT,
            flags if name is None else flags | _NAMED,
            device,
            name_blocks,
            tenant,
            extent,
            length,
            header_length,
            now_s,
            pinned_until_s,
            generation,
            expires_at_ms,
            key,
            parent or NO_PARENT,
        )
        text, text_length = (_NULL, 0) if name is None else (name, len(name))
        code = lib.ss_index_insert(self._object, self._record, text, text_length, now_s, self._slot)
        if code:
            check(code, f"putting an object into an index of at most {self.objects_max}")
        return self._slot[0]  # type: ignore[no-any-return]

    def set_name(self, slot: int, name: bytes) -> None:
        """Store the text of the key of an object with the flag NAMED."""
        check(lib.ss_index_set_name(self._object, slot, name, len(name)), f"keeping a key of {len(name)} bytes")

    def name(self, slot: int) -> bytes | None:
        """Return the text of an object's key; None if it is not named, or has no text."""
        text = lib.ss_index_name(self._object, slot, self._slot)
        return None if text == ffi.NULL else ffi.buffer(text, self._slot[0])[:]

    def remove(self, slot: int) -> None:
        """Remove an object. Its children keep their place in the chain, and it can be inserted again."""
        lib.ss_index_remove(self._object, slot)

    def evict(self, slot: int) -> None:
        """Remove an object, and add its key to the ghost queue."""
        lib.ss_index_evict(self._object, slot)

    def clear(self, tenant: int = ANY, device: int = ANY) -> int:
        """Remove all objects of a tenant on a device; return their number."""
        return int(lib.ss_index_clear(self._object, tenant, device))

    def touch(self, slot: int, now_s: int) -> None:
        lib.ss_index_touch(self._object, slot, now_s)

    def touch_each(self, slots: "array[int]", now_s: int) -> None:
        """Count uses of several objects, in their order. ``slots`` has items of 32 bits."""
        lib.ss_index_touch_each(self._object, ffi.from_buffer("uint32_t[]", slots), len(slots), now_s)

    def set_expiry(self, slot: int, expires_at_ms: int) -> None:
        """Set the time of expiry; 0: never."""
        lib.ss_index_expire(self._object, slot, expires_at_ms)

    def resize(self, slot: int, length: int) -> None:
        """Set the length of the new value of an object that is only in memory."""
        code = lib.ss_index_resize(self._object, slot, length)
        if code:
            check(code, f"giving an object a value of {length} bytes")

    def pin(self, slot: int, until_s: int) -> None:
        """Protect the object from eviction until ``until_s``; 0 ends the protection."""
        lib.ss_index_pin(self._object, slot, until_s)

    def victim(self, now_s: int, device: int = ANY, tenant: int = ANY) -> int:
        """Return the slot of the next object to evict; 0: none. It may be on another device (the end of a chain)."""
        return lib.ss_index_victim(self._object, device, tenant, now_s)

    def ghost(self, tenant: int, key: bytes) -> bool:
        """Return whether the ghost queue has the key."""
        return bool(lib.ss_index_ghost(self._object, tenant, key))

    def scan(self, tenant: int, cursor: int, max_slots: int, max_lines: int) -> tuple[int, list[int]]:
        """Return the next cursor, 0 at the end, and slots of a tenant's objects, in an order that never changes.

        ``max_lines`` is the most lines of the table to read, about ten objects each.
        """
        slots = ffi.new("uint32_t[]", max_slots)
        position = ffi.new("uint64_t *", cursor)
        count = lib.ss_index_scan(self._object, tenant, position, slots, max_slots, max_lines)
        return int(position[0]), list(slots[0:count])

    def expired(self, now_ms: int, max_slots: int) -> list[int]:
        """Return the slots of at most ``max_slots`` objects that have expired."""
        slots = ffi.new("uint32_t[]", max_slots)
        return list(slots[0 : lib.ss_index_expired(self._object, now_ms, slots, max_slots)])

    def totals(self, tenant: int = ANY, device: int = ANY) -> IndexTotals:
        """Sum up a tenant's objects on a device."""
        totals = ffi.new("struct ss_index_totals *")
        lib.ss_index_totals(self._object, tenant, device, totals)
        return IndexTotals(totals.objects, totals.bytes, totals.records, totals.expiring, totals.name_records)

    def used_bytes(self, tenant: int = ANY) -> int:
        """Return the bytes of a tenant's objects, as totals() does, but ten times as fast."""
        return int(lib.ss_index_bytes(self._object, tenant))

    def memory_bytes(self) -> int:
        return int(lib.ss_index_memory(self._object))

    def replay(self, device: int, blocks: int, records: "NDArray[np.void] | bytes | memoryview") -> ReplayCounts:
        """Apply contiguous records of a device's snapshot or log, in order.

        The device field of the records is ignored. Objects beyond ``blocks``, the device's 4 KiB blocks, are refused.
        NativeError with ``Result.NO_SPACE``: the records have more than ``objects_max`` objects.
        """
        content = ffi.from_buffer("uint8_t[]", records)
        counts = ffi.new("struct ss_index_counts *")
        pointer = ffi.cast("struct ss_index_record *", content)
        code = lib.ss_index_replay(
            self._object, device, blocks, pointer, len(content) // INDEX_RECORD_DTYPE.itemsize, counts
        )
        check(code, f"replaying the log of device {device} into an index of at most {self.objects_max} objects")
        return ReplayCounts(counts.applied, counts.ignored, counts.refused)

    def replayed(self) -> None:
        """Sort the queues, after the last record of the last device."""
        check(lib.ss_index_replayed(self._object), "ordering the queues of the index")

    def purge(self, device: int, what: IndexPurge) -> int:
        """Remove objects on a device after recovery; return their number."""
        return int(lib.ss_index_purge(self._object, device, what))

    def reserve(self, device: int, extents: "Extents") -> int:
        """Reserve the extents of all objects on a device; drop overlapping objects, and return their number."""
        dropped = ffi.new("uint64_t *")
        code = lib.ss_index_reserve(self._object, device, extents._object, dropped)
        check(code, f"reserving the extents of device {device}")
        return int(dropped[0])

    def dump(self, cursor: int, records: "NDArray[np.void]", device: int = ANY) -> tuple[int, int]:
        """Store PUT records of the next objects on a device into ``records``.

        Return the next cursor (0 at first, and again after the last), and the number of stored records, which may be 0.
        """
        content = ffi.from_buffer("uint8_t[]", records, require_writable=True)
        self._slot[0] = cursor
        pointer = ffi.cast("struct ss_index_record *", content)
        count = lib.ss_index_dump(self._object, device, self._slot, pointer, len(records))
        return int(self._slot[0]), int(count)

    def dump_all(self, at_once: int) -> "Iterator[NDArray[np.void]]":
        """Yield the PUT records of all objects, at most ``at_once`` in an array, which the next one overwrites."""
        records, cursor, is_first = np.zeros(at_once, INDEX_RECORD_DTYPE), 0, True
        while cursor or is_first:
            is_first = False
            cursor, count = self.dump(cursor, records)
            yield records[:count]

    def dump_names(self, puts: "NDArray[np.void]") -> bytes:
        """Return the NAME records of the objects of a dump() that have names."""
        content = ffi.cast("struct ss_index_record *", ffi.from_buffer("uint8_t[]", puts))
        count = lib.ss_index_dump_names(self._object, content, len(puts), ffi.NULL, 0)
        records = bytearray(count * INDEX_RECORD_DTYPE.itemsize)
        pointer = ffi.cast("struct ss_index_record *", ffi.from_buffer("uint8_t[]", records))
        lib.ss_index_dump_names(self._object, content, len(puts), pointer, count)
        return bytes(records)

    def superseded(self, device: int) -> list[tuple[int, bytes]]:
        """Return tenant and key of each put in a device's log that a later put of another device supersedes."""
        found: list[tuple[int, bytes]] = []
        records = ffi.new("struct ss_index_record[]", _SUPERSEDED_AT_ONCE)
        self._slot[0] = 0
        while True:
            count = lib.ss_index_superseded(self._object, device, self._slot, records, _SUPERSEDED_AT_ONCE)
            found += [(records[at].tenant, bytes(ffi.buffer(records[at].key))) for at in range(count)]
            if not self._slot[0]:
                return found


def _wrong_key(key: bytes) -> ValueError:
    return ValueError(f"an index key has {INDEX_KEY_BYTES} bytes, not {len(key)}")


class Extents(Owner):
    """Allocator of runs of blocks of a device or an arena. Not thread-safe."""

    destructor = "ss_extents_close"

    def __init__(self, blocks: int) -> None:
        self.blocks, most = blocks, min(max(blocks, 0), 0xFFFFFFFF)
        operation = f"making an allocator of {blocks} blocks"
        super().__init__("ss_extents", lambda pointer: lib.ss_extents_open(most, pointer), operation)

    def allocate(self, count: int) -> int | None:
        """Return the first of ``count`` blocks; None if no free run is long enough."""
        first = int(lib.ss_extents_allocate(self._object, count))
        return None if first == 0xFFFFFFFF else first

    def free(self, first: int, count: int) -> None:
        """Free blocks. NativeError: a block is already free, or does not exist."""
        code = lib.ss_extents_free(self._object, first, count)
        if code:
            check(code, f"freeing {count} blocks at {first} of {self.blocks}")

    def reserve(self, first: int, count: int) -> None:
        """Reserve these blocks. NativeError: a block is already reserved, or does not exist."""
        code = lib.ss_extents_reserve(self._object, first, count)
        check(code, f"reserving {count} blocks at {first} of {self.blocks}")

    @property
    def free_blocks(self) -> int:
        return int(lib.ss_extents_free_blocks(self._object))
