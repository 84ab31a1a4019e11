"""Objects of a bucket in little memory: some 110 bytes for an object, and 25 for each of its records.

Python objects would take ten times as much. What does not change of an object is one ``bytes``, and the rest is in
arrays. Records and names are found in sorted arrays of hashes, which are keyed, so that clients cannot choose equal
ones. Keys of records are not kept: keys with equal 64-bit hashes are confused, and the check of the record finds that.
"""

import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.layout import Contents, ObjectName

_SHARDS_LOG2: Final = 12
_SHARD_SHIFT: Final = 64 - _SHARDS_LOG2
_LOW_BITS: Final = 32
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_HASH_MASK: Final = (1 << 64) - 1
_FIXED: Final = struct.Struct("<20sIHI")  # digest of the name, tenant, partition, bytes of its records
_FIXED_BYTES: Final = _FIXED.size
_PAIR: Final = struct.Struct("<II").unpack_from
_USE: Final = np.dtype([("number", "u4"), ("tenant", "u4"), ("size", "i8"), ("used_s", "f8")])
FREE, KNOWN, HIDDEN = 0, 1, 2
"""States of a number: no object has it, or a known or a hidden one."""
_PER_RECORD: Final = 16  # hashes (u64), then offsets (u32), then lengths of headers (u32)


class Row(NamedTuple):
    """Parts of an object that do not change."""

    digest: bytes
    tenant: int
    partition: int
    records_bytes: int


class Found(NamedTuple):
    """A record of a known object. The object's row is read when it is asked for: most callers only want lengths."""

    number: int
    offset: int
    length: int
    header_bytes: int
    data: bytes

    @property
    def row(self) -> Row:
        return Row(*_FIXED.unpack_from(self.data))


def keyed_hash(salt: bytes, data: bytes) -> int:
    """Return a 64-bit hash that only this process can compute."""
    return hash(salt + data) & _HASH_MASK


def keyed_hashes(salt: bytes, keys: Iterable[bytes]) -> list[int]:
    """Return the keyed hash of each key."""
    return [hash(salt + key) & _HASH_MASK for key in keys]


class _HashedNumbers:
    """Numbers by 64-bit hashes, of which 44 bits count, in 8 bytes each."""

    def __init__(self) -> None:
        self._shards = [array("Q") for _ in range(1 << _SHARDS_LOG2)]

    def add(self, hashes: Iterable[int], number: int) -> list[int]:
        """Add a number for each hash; return those hashes that may have others."""
        shards, shared, find = self._shards, [], bisect_left
        for hashed in hashes:
            shard = shards[hashed >> _SHARD_SHIFT]
            entry = (hashed & _LOW_MASK) << _LOW_BITS | number
            at = find(shard, entry)
            # Neighbours with the same bits of the hash differ only in the bits of the number.
            if (at and shard[at - 1] ^ entry <= _LOW_MASK) or (at < len(shard) and shard[at] ^ entry <= _LOW_MASK):
                shared.append(hashed)
            shard.insert(at, entry)
        return shared

    def remove(self, hashes: Iterable[int], number: int) -> None:
        for hashed in hashes:
            shard = self._shards[hashed >> _SHARD_SHIFT]
            del shard[bisect_left(shard, (hashed & _LOW_MASK) << _LOW_BITS | number)]

    def find(self, hashed: int) -> list[int]:
        """Return all numbers of a hash, and perhaps others; while another thread changes something, perhaps none."""
        shard, low = self._shards[hashed >> _SHARD_SHIFT], hashed & _LOW_MASK
        at, found = bisect_left(shard, low << _LOW_BITS), []
        try:
            while (entry := shard[at]) >> _LOW_BITS == low:
                found.append(entry & _LOW_MASK)
                at += 1
        except IndexError:
            pass
        return found


class ObjectTable:
    """Objects by number. Only :meth:`find` may run while another thread changes something.

    Attributes:
        states: ``FREE``, ``KNOWN`` or ``HIDDEN`` for each number.
        sizes: Bytes.
        written_s, seen, used_h: When it was written; the last list with it; the hour in which it was used last.
    """

    def __init__(self) -> None:
        self.states = bytearray()
        self.written_s = array("d")
        self.seen = array("I")
        self.used_h = array("I")
        self.sizes = array("I")
        self._tenants = array("I")
        self._partitions = array("H")
        self._columns: tuple[Any, ...] = (
            self.written_s, self.seen, self.used_h, self.sizes, self._tenants, self._partitions
        )  # fmt: skip
        self._data: list[bytes] = []
        self._free: list[int] = []
        self._records = _HashedNumbers()
        self._names = _HashedNumbers()

    def insert(
        self, tenant: int, contents: Contents, hashes: Sequence[int], times: tuple[float, int, int]
    ) -> tuple[int, Sequence[int]]:
        """Add an object, whose state is FREE until the caller sets it. ``times``: written_s, seen, used_h.

        Return its number, and the hashes of those records that may be in other objects too.
        """
        parts, count = contents.parts, len(hashes)
        end = contents.offsets[-1] + contents.lengths[-1]
        data = _FIXED.pack(parts.digest, tenant, parts.partition, end) + struct.pack(
            f"<{count}Q{2 * count}I", *hashes, *contents.offsets, *contents.header_bytes
        )
        values = (*times, contents.size, tenant, parts.partition)
        if self._free:
            number = self._free.pop()
            self._data[number] = data
            for column, value in zip(self._columns, values, strict=True):
                column[number] = value
        else:
            number = len(self._data)
            self._data.append(data)
            self.states.append(FREE)
            for column, value in zip(self._columns, values, strict=True):
                column.append(value)
        self._names.add((keyed_hash(b"", parts.digest),), number)
        return number, self._records.add(hashes, number)

    def remove(self, number: int) -> None:
        self._records.remove(self.hashes(number), number)
        self._names.remove((keyed_hash(b"", self.row(number).digest),), number)
        self.states[number], self._data[number] = FREE, b""
        self._free.append(number)

    def tenant(self, number: int) -> int:
        """Return the tenant of an object."""
        return self._tenants[number]

    def row(self, number: int) -> Row:
        return Row(*_FIXED.unpack_from(self._data[number]))

    def hashes(self, number: int) -> tuple[int, ...]:
        """Return the hashes of an object's records."""
        data = self._data[number]
        return struct.unpack_from(f"<{(len(data) - _FIXED.size) // _PER_RECORD}Q", data, _FIXED.size)

    def number_of(self, parts: ObjectName) -> int | None:
        """Return the number of the object whose name has this digest, which no other name has."""
        for number in self._names.find(keyed_hash(b"", parts.digest)):
            if self._data[number].startswith(parts.digest):
                return number
        return None

    def holders(self, hashed: int) -> list[int]:
        """Return the objects with a record."""
        return [each for each in self._records.find(hashed) if _index(self._data[each], hashed) is not None]

    def find(self, hashed: int) -> Found | None:
        """Return a record of a known object."""
        for number in self._records.find(hashed):
            data = self._data[number]
            if self.states[number] == KNOWN and (index := _index(data, hashed)) is not None:
                count = (len(data) - _FIXED_BYTES) // _PER_RECORD
                at = _FIXED_BYTES + 8 * count + 4 * index
                offset, end = _PAIR(data, at)  # behind the last offset is another number
                if index + 1 == count:
                    end = Row(*_FIXED.unpack_from(data)).records_bytes
                return Found(number, offset, end - offset, _PAIR(data, at + 4 * count - 4)[1], data)
        return None

    def select(
        self, *, tenant: int = 0, partitions: Collection[int] | None = None, seen_before: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of a tenant's objects, or of those in partitions, in any state but FREE."""
        if not self._data:
            return np.empty(0, np.int64)
        if partitions is not None:
            numbers: npt.NDArray[np.int64] = self._in(partitions)
        else:
            numbers = np.flatnonzero(np.frombuffer(self._tenants, np.uint32) == tenant)
        numbers = numbers[np.frombuffer(self.states, np.uint8)[numbers] != FREE]
        if seen_before is not None:
            numbers = numbers[np.frombuffer(self.seen, np.uint32)[numbers] < seen_before]
        return numbers

    def _in(self, partitions: Collection[int]) -> npt.NDArray[np.int64]:
        """Return the numbers in partitions, free ones too. One partition takes a millisecond for 4 million numbers."""
        of_each = np.frombuffer(self._partitions, np.uint16)
        if len(partitions) == 1:
            return np.flatnonzero(of_each == next(iter(partitions)))
        included = np.zeros(PARTITIONS, np.bool_)
        included[[*partitions]] = True
        return np.flatnonzero(included[of_each])

    def uses(self, partitions: Collection[int]) -> npt.NDArray[np.void]:
        """Return the number, tenant, bytes and time of the last use of each known object in partitions."""
        if not self._data:
            return np.empty(0, _USE)
        numbers = self._in(partitions)
        numbers = numbers[np.frombuffer(self.states, np.uint8)[numbers] == KNOWN]
        found = np.empty(len(numbers), _USE)
        found["number"] = numbers
        found["tenant"] = np.frombuffer(self._tenants, np.uint32)[numbers]
        found["size"] = np.frombuffer(self.sizes, np.uint32)[numbers]
        used_s = np.frombuffer(self.used_h, np.uint32)[numbers] * 3600.0
        found["used_s"] = np.maximum(np.frombuffer(self.written_s, np.float64)[numbers], used_s)
        return found


def _index(data: bytes, hashed: int) -> int | None:
    """Return the index of a record in an object's data."""
    wanted = hashed.to_bytes(8, "little")
    end = (len(data) + _FIXED_BYTES) // 2
    at = data.find(wanted, _FIXED_BYTES, end)
    while at >= 0 and (at - _FIXED_BYTES) % 8:
        at = data.find(wanted, at + 1, end)
    return (at - _FIXED_BYTES) // 8 if at >= 0 else None
