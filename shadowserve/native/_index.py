"""The index of what is stored, and the allocator of blocks: the tables of the storage engine, in C."""

import enum
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shadowserve.native._library import check, ffi, lib

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
    "IndexFlag",
    "IndexPlace",
    "IndexPolicy",
    "IndexRecordKind",
    "IndexPurge",
    "IndexTotals",
    "ReplayCounts",
    "blocks_of",
]

INDEX_KEY_BYTES: Final = 32
ANY: Final = -1
"""Of a tenant or a device: each one."""
NO_PARENT: Final = bytes(INDEX_KEY_BYTES)

INDEX_RECORD_DTYPE: Final = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("device", "u1"),
        ("name_blocks", "u1"),
        ("tenant", "<u2"),
        ("reserved", "<u2"),
        ("extent", "<u4"),
        ("length", "<u4"),
        ("header_length", "<u4"),
        ("accessed_s", "<u4"),
        ("pinned_until_s", "<u4"),
        ("generation", "<u4"),
        ("expires_at_ms", "<u8"),
        ("key", "u1", INDEX_KEY_BYTES),
        ("parent", "u1", INDEX_KEY_BYTES),
        ("padding", "u1", 24),
    ]
)
"""One record of a device's log and snapshot (``struct ss_index_record``), 128 bytes."""

_NULL: Final = ffi.NULL
_RIVALS_AT_ONCE: Final = 256
_RECORD: Final = struct.Struct("<BBBBHxxIIIIIIQ32s32s24x")
_PLACE: Final = struct.Struct("<IIII")


class IndexPolicy(enum.IntEnum):
    """What is evicted next (``enum ss_index_policy``)."""

    LRU = 0
    S3FIFO = 1
    FREQUENCY = 2


class IndexRecordKind(enum.IntEnum):
    """What a record says (``enum ss_index_record_kind``)."""

    PUT = 1
    REMOVE = 2
    EXPIRE = 3
    PIN = 4
    CLEAR = 5
    NAME = 6
    TENANT = 7


class IndexFlag(enum.IntFlag):
    """What an object is (``enum ss_index_flags``)."""

    RECORD = 1
    NAMED = 2
    EVERY_TENANT = 0x80
    """Of a CLEAR record only."""


# A flag's own operators are functions of Python, and these are needed for each put.
_PUT: Final = int(IndexRecordKind.PUT)
_NAMED: Final = int(IndexFlag.NAMED)


class IndexPurge(enum.IntEnum):
    """Which objects cannot stay (``enum ss_index_purge``)."""

    UNPROVEN = 0
    NAMELESS = 1


class IndexEntry(NamedTuple):
    """What is known of an object. Its fields are those of a PUT record, in its order."""

    kind: int
    flags: int
    device: int
    name_blocks: int
    """By how many blocks a long name makes the object larger."""
    tenant: int
    extent: int
    """First 4 KiB block on the device; in memory alone (device 255) bytes that it takes beside its value."""
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
        """How many 4 KiB blocks it takes on its device."""
        return blocks_of(self.length) + self.name_blocks

    def pack(self) -> bytes:
        """Return the 128 bytes of the record."""
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> "IndexEntry":
        """Return what 128 bytes say, of any kind of record."""
        return cls._make(_RECORD.unpack(record))


class IndexPlace(NamedTuple):
    """Where an object lies: of an :class:`IndexEntry`, what a reader of its device needs."""

    slot: int
    extent: int
    generation: int
    device: int


class IndexTotals(NamedTuple):
    """Sums over objects."""

    objects: int
    bytes: int
    """With headers, each object rounded up to 4 KiB; in memory alone its length and its ``extent``."""
    records: int
    expiring: int
    name_records: int
    """That their names take in a log or a snapshot."""


class ReplayCounts(NamedTuple):
    """What became of records that were replayed."""

    applied: int
    ignored: int
    """Of kinds that are the volume's own, or about objects that are not there."""
    refused: int
    """With an impossible field."""


def blocks_of(length: int, name_length: int = 0) -> int:
    """Return how many 4 KiB blocks an object takes whose value, and whose name behind it, have so many bytes."""
    return int(lib.ss_index_blocks(length, name_length))


class Index:
    """All objects of a storage node by tenant and key, with what to evict next. Not for several threads at a time.

    A slot is an object's number, from 1, while it is there. Methods that take one do nothing for a slot without
    an object.
    """

    def __init__(self, objects_max: int, policy: IndexPolicy = IndexPolicy.LRU, seed: int | None = None) -> None:
        """Reserve addresses for ``objects_max`` objects; memory is taken as they come.

        Args:
            objects_max: 1 to 2^30.
            policy: of eviction.
            seed: 64 bits; without it a random one, so that no client can choose keys that collide.

        Raises:
            NativeError: there are no addresses, or ``objects_max`` is out of range.
        """
        pointer = ffi.new("struct ss_index **")
        self._index: Any = ffi.NULL
        self.objects_max = objects_max
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        code = lib.ss_index_open(min(max(objects_max, 0), 0xFFFFFFFF), policy, seed, pointer)
        check(code, f"making an index for {objects_max} objects")
        self._index = pointer[0]
        self._slot = ffi.new("uint32_t *")
        self._record = ffi.new("struct ss_index_record *")
        self._buffer = ffi.buffer(self._record)

    def close(self) -> None:
        """Give the memory back. Twice is harmless; nothing else may be called after it."""
        index, self._index = self._index, ffi.NULL
        if index != ffi.NULL:
            lib.ss_index_close(index)

    def __del__(self) -> None:
        if getattr(self, "_index", None) and lib is not None:
            self.close()

    def __len__(self) -> int:
        return self.totals().objects

    def find(self, tenant: int, key: bytes) -> int:
        """Return the object's slot; 0: absent. Not a use of it. ``key`` has 32 bytes."""
        if len(key) != INDEX_KEY_BYTES:
            raise _wrong_key(key)
        return int(lib.ss_index_find(self._index, tenant, key))

    def get(self, tenant: int, key: bytes, now_s: int = 0) -> tuple[int, IndexEntry] | None:
        """Return an object's slot and what is known of it; None: absent. With ``now_s`` it is a use of the object."""
        if len(key) != INDEX_KEY_BYTES:
            raise _wrong_key(key)
        slot = lib.ss_index_get(self._index, tenant, key, now_s, self._record)
        return (slot, self._entry()) if slot else None

    def places(self, tenant: int, keys: bytes, lengths: Sequence[int], now_ms: int) -> list[IndexPlace]:
        """Return where the leading ones of many chunks lie on devices, and count a use of each.

        Those are before the first that is absent, of another length, in memory alone, or has expired.

        Args:
            tenant: whose.
            keys: of 32 bytes each, one behind the other.
            lengths: that they are expected to have.
            now_ms: Unix time in milliseconds.
        """
        count = len(lengths)
        if len(keys) != count * INDEX_KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes are no {count} index keys, of {INDEX_KEY_BYTES} bytes each")
        places = ffi.new("struct ss_index_place[]", count)
        lengths = ffi.new("uint32_t[]", lengths)
        found = lib.ss_index_places(self._index, tenant, keys, lengths, count, now_ms, places)
        return list(map(IndexPlace._make, _PLACE.iter_unpack(ffi.buffer(places, found * _PLACE.size))))

    def find_many(self, tenant: int, keys: "bytes | memoryview | NDArray[np.uint8]") -> "NDArray[np.uint32]":
        """Return the slot of each of many keys, which lie one behind the other; 0: absent."""
        content = ffi.from_buffer("uint8_t[]", keys)
        slots = np.empty(len(content) // INDEX_KEY_BYTES, np.uint32)
        pointer = ffi.cast("uint32_t *", ffi.from_buffer("uint8_t[]", slots))
        lib.ss_index_find_many(self._index, tenant, content, len(slots), pointer)
        return slots

    def read(self, slot: int) -> IndexEntry:
        """Return what is known of an object.

        Raises:
            KeyError: there is none at this slot.
        """
        if lib.ss_index_read(self._index, slot, self._record):
            raise KeyError(slot)
        return self._entry()

    def _entry(self) -> IndexEntry:
        return tuple.__new__(IndexEntry, _RECORD.unpack_from(self._buffer))  # as _make(), in half of its time

    def holds(self, slot: int, key: bytes, generation: int) -> bool:
        """Return whether at a slot is an object with this key, of this put: sooner told than read."""
        if lib.ss_index_read(self._index, slot, self._record):
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
        """Put an object in, or replace the one with its key; return its slot.

        With a ``name``, its key's text, it has the flag NAMED as well; ``name_blocks`` are those that the text takes on
        the device.

        Raises:
            NativeError: with ``Result.NO_SPACE`` when there are ``objects_max`` objects.
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
        code = lib.ss_index_insert(self._index, self._record, text, text_length, now_s, self._slot)
        if code:
            check(code, f"putting an object into an index of at most {self.objects_max}")
        return self._slot[0]  # type: ignore[no-any-return]

    def set_name(self, slot: int, name: bytes) -> None:
        """Keep the text of an object's key, which has the flag NAMED.

        Raises:
            NativeError: there is no memory for it, or no such object.
        """
        check(lib.ss_index_set_name(self._index, slot, name, len(name)), f"keeping a key of {len(name)} bytes")

    def name(self, slot: int) -> bytes | None:
        """Return the text of an object's key; None for one that is not named, or has none."""
        text = lib.ss_index_name(self._index, slot, self._slot)
        return None if text == ffi.NULL else ffi.buffer(text, self._slot[0])[:]

    def remove(self, slot: int) -> None:
        """Forget an object. Its children keep its place, and it may come back."""
        lib.ss_index_remove(self._index, slot)

    def evict(self, slot: int) -> None:
        """Forget an object, but remember in the ghost queue that it was there."""
        lib.ss_index_evict(self._index, slot)

    def clear(self, tenant: int = ANY, device: int = ANY) -> int:
        """Forget all objects of a tenant on a device; return how many."""
        return int(lib.ss_index_clear(self._index, tenant, device))

    def touch(self, slot: int, now_s: int) -> None:
        """Count a use."""
        lib.ss_index_touch(self._index, slot, now_s)

    def touch_each(self, slots: "array[int]", now_s: int) -> None:
        """Count uses of several objects, in their order. ``slots`` has items of 32 bits."""
        lib.ss_index_touch_each(self._index, ffi.from_buffer("uint32_t[]", slots), len(slots), now_s)

    def set_expiry(self, slot: int, expires_at_ms: int) -> None:
        """Set when it expires; 0: never."""
        lib.ss_index_expire(self._index, slot, expires_at_ms)

    def resize(self, slot: int, length: int) -> None:
        """Say how long the new value of an object in memory alone is.

        Raises:
            NativeError: there is no such object in memory alone, or it is a record and has a longer head.
        """
        code = lib.ss_index_resize(self._index, slot, length)
        if code:
            check(code, f"giving an object a value of {length} bytes")

    def pin(self, slot: int, until_s: int) -> None:
        """Keep it from being a victim before ``until_s``; 0 ends that."""
        lib.ss_index_pin(self._index, slot, until_s)

    def victim(self, now_s: int, device: int = ANY, tenant: int = ANY) -> int:
        """Return the slot of what to evict next; 0: nothing. It may lie on another device (the end of a chain)."""
        return lib.ss_index_victim(self._index, device, tenant, now_s)

    def ghost(self, tenant: int, key: bytes) -> bool:
        """Return whether the key was evicted or remembered lately."""
        return bool(lib.ss_index_ghost(self._index, tenant, key))

    def scan(self, tenant: int, cursor: int, max_slots: int, max_lines: int) -> tuple[int, list[int]]:
        """Return the next cursor, 0 at the end, and slots of a tenant's objects, in an order that nothing changes.

        Args:
            tenant: whose; :data:`ANY` for everybody's.
            cursor: where to go on, 64 bits; 0 at first.
            max_slots: at most so many.
            max_lines: of the table that are looked at, some ten objects each.
        """
        slots = ffi.new("uint32_t[]", max_slots)
        position = ffi.new("uint64_t *", cursor)
        count = lib.ss_index_scan(self._index, tenant, position, slots, max_slots, max_lines)
        return int(position[0]), list(slots[0:count])

    def expired(self, now_ms: int, max_slots: int) -> list[int]:
        """Return the slots of at most so many objects that have expired."""
        slots = ffi.new("uint32_t[]", max_slots)
        return list(slots[0 : lib.ss_index_expired(self._index, now_ms, slots, max_slots)])

    def totals(self, tenant: int = ANY, device: int = ANY) -> IndexTotals:
        """Sum up a tenant's objects on a device."""
        totals = ffi.new("struct ss_index_totals *")
        lib.ss_index_totals(self._index, tenant, device, totals)
        return IndexTotals(totals.objects, totals.bytes, totals.records, totals.expiring, totals.name_records)

    def used_bytes(self, tenant: int = ANY) -> int:
        """Return the bytes of a tenant's objects, as totals() does, in a tenth of its time."""
        return int(lib.ss_index_bytes(self._index, tenant))

    def memory_bytes(self) -> int:
        """Return the memory in use."""
        return int(lib.ss_index_memory(self._index))

    def replay(self, device: int, blocks: int, records: "NDArray[np.void] | bytes | memoryview") -> ReplayCounts:
        """Apply records (:data:`INDEX_RECORD_DTYPE`) of a device's snapshot or log, in order.

        Args:
            device: whose they are; the records' own device is not looked at.
            blocks: of 4 KiB that the device has; objects that reach beyond are refused.
            records: contiguous.

        Raises:
            NativeError: with ``Result.NO_SPACE`` for more than ``objects_max`` objects.
        """
        content = ffi.from_buffer("uint8_t[]", records)
        counts = ffi.new("struct ss_index_counts *")
        pointer = ffi.cast("struct ss_index_record *", content)
        code = lib.ss_index_replay(
            self._index, device, blocks, pointer, len(content) // INDEX_RECORD_DTYPE.itemsize, counts
        )
        check(code, f"replaying the log of device {device} into an index of at most {self.objects_max} objects")
        return ReplayCounts(counts.applied, counts.ignored, counts.refused)

    def replayed(self) -> None:
        """Put the queues in order, after the last record of the last device."""
        check(lib.ss_index_replayed(self._index), "ordering the queues of the index")

    def purge(self, device: int, what: IndexPurge) -> int:
        """Remove the objects on a device that cannot stay; return how many."""
        return int(lib.ss_index_purge(self._index, device, what))

    def reserve(self, device: int, extents: "Extents") -> int:
        """Reserve the extents of all objects on a device; return how many were dropped since they overlap."""
        dropped = ffi.new("uint64_t *")
        code = lib.ss_index_reserve(self._index, device, extents._extents, dropped)
        check(code, f"reserving the extents of device {device}")
        return int(dropped[0])

    def dump(self, cursor: int, records: "NDArray[np.void]", device: int = ANY) -> tuple[int, int]:
        """Store PUT records of the next objects on a device into ``records``.

        Returns:
            The next cursor (0 at first, and again after the last), and how many were stored, perhaps none.
        """
        content = ffi.from_buffer("uint8_t[]", records, require_writable=True)
        self._slot[0] = cursor
        pointer = ffi.cast("struct ss_index_record *", content)
        count = lib.ss_index_dump(self._index, device, self._slot, pointer, len(records))
        return int(self._slot[0]), int(count)

    def dump_names(self, puts: "NDArray[np.void]") -> bytes:
        """Return the NAME records of those objects, as dump() stored them, that have names."""
        content = ffi.cast("struct ss_index_record *", ffi.from_buffer("uint8_t[]", puts))
        count = lib.ss_index_dump_names(self._index, content, len(puts), ffi.NULL, 0)
        records = bytearray(count * INDEX_RECORD_DTYPE.itemsize)
        pointer = ffi.cast("struct ss_index_record *", ffi.from_buffer("uint8_t[]", records))
        lib.ss_index_dump_names(self._index, content, len(puts), pointer, count)
        return bytes(records)

    def superseded(self, device: int) -> list[tuple[int, bytes]]:
        """Return tenant and key of each put that a device's log still has, but that lost to another device's."""
        found: list[tuple[int, bytes]] = []
        records = ffi.new("struct ss_index_record[]", _RIVALS_AT_ONCE)
        self._slot[0] = 0
        while True:
            count = lib.ss_index_superseded(self._index, device, self._slot, records, _RIVALS_AT_ONCE)
            found += [(records[at].tenant, bytes(ffi.buffer(records[at].key))) for at in range(count)]
            if not self._slot[0]:
                return found


def _wrong_key(key: bytes) -> ValueError:
    return ValueError(f"an index key has {INDEX_KEY_BYTES} bytes, not {len(key)}")


class Extents:
    """Runs of free blocks of a device or an arena. Not for several threads at a time."""

    def __init__(self, blocks: int) -> None:
        """Make an allocator of so many blocks, all of them free."""
        pointer = ffi.new("struct ss_extents **")
        self._extents: Any = ffi.NULL
        check(lib.ss_extents_open(min(max(blocks, 0), 0xFFFFFFFF), pointer), f"making an allocator of {blocks} blocks")
        self._extents = pointer[0]
        self.blocks = blocks

    def close(self) -> None:
        """Give the memory back. Twice is harmless; nothing else may be called after it."""
        extents, self._extents = self._extents, ffi.NULL
        if extents != ffi.NULL:
            lib.ss_extents_close(extents)

    def __del__(self) -> None:
        if getattr(self, "_extents", None) and lib is not None:
            self.close()

    def allocate(self, count: int) -> int | None:
        """Return the first of ``count`` blocks; None where no free run is that long."""
        first = int(lib.ss_extents_allocate(self._extents, count))
        return None if first == 0xFFFFFFFF else first

    def free(self, first: int, count: int) -> None:
        """Give blocks back.

        Raises:
            NativeError: one of them is free already, or does not exist.
        """
        code = lib.ss_extents_free(self._extents, first, count)
        if code:
            check(code, f"freeing {count} blocks at {first} of {self.blocks}")

    def reserve(self, first: int, count: int) -> None:
        """Take these blocks.

        Raises:
            NativeError: one of them is taken already, or does not exist.
        """
        code = lib.ss_extents_reserve(self._extents, first, count)
        check(code, f"reserving {count} blocks at {first} of {self.blocks}")

    @property
    def free_blocks(self) -> int:
        """How many blocks are free."""
        return int(lib.ss_extents_free_blocks(self._extents))
