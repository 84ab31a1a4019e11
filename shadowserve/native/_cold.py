"""Objects of a bucket: the checks of what describes them, and the table of those that are known, in C."""

import enum
import os
import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shadowserve.native._index import INDEX_KEY_BYTES
from shadowserve.native._library import Owner, Result, check, ffi, lib, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COLD_OBJECT",
    "COLD_OBJECT_DTYPE",
    "COLD_ROW_DTYPE",
    "ColdFound",
    "ColdRow",
    "ColdState",
    "ColdSums",
    "ColdTable",
    "read_cold_footer",
    "read_cold_index",
]

COLD_OBJECT: Final = struct.Struct("<IIIIIIHxx20s")
"""An object by its entries and its footer (``struct ss_cold_object``): bytes of the object, position of its entries,
their number, bytes of the tenant's name, hour of the last use, bytes of the longest record, partition, digest."""
COLD_OBJECT_DTYPE: Final = numpy_dtype("struct ss_cold_object")
COLD_ROW_DTYPE: Final = numpy_dtype("struct ss_cold_row")
"""The table's entry of an object (``struct ss_cold_row``)."""

_OBJECT_BYTES_MIN: Final = 96
_DIGEST_BYTES: Final = 20
_ROW: Final = struct.Struct("<dIIIIIHBx20s4x")
_FOUND: Final = struct.Struct("<IIIIIHxx20s")
_ROWS_AT_ONCE: Final = 16_384
_HOLDERS_AT_ONCE: Final = 16


class ColdState(enum.IntEnum):
    """State of an object (``enum ss_cold_state``)."""

    FREE = 0
    KNOWN = 1
    HIDDEN = 2


class ColdRow(NamedTuple):
    """The table's entry of an object."""

    written_s: float
    number: int
    tenant: int
    size: int
    seen: int
    used_h: int
    partition: int
    state: int
    digest: bytes


class ColdFound(NamedTuple):
    """A record of a known object."""

    number: int
    offset: int
    length: int
    header_bytes: int
    tenant: int
    partition: int
    digest: bytes


class ColdSums(NamedTuple):
    """Objects, their records and their bytes."""

    objects: int
    records: int
    bytes: int


def read_cold_footer(footer: bytes) -> "bytes | str":
    """Return a description of the object with these entries and this footer; else a text: what is wrong with them."""
    found = ffi.new("struct ss_cold_object *")
    fault = lib.ss_cold_read_footer(footer, len(footer), found)
    return ffi.buffer(found)[:] if fault == ffi.NULL else ffi.string(fault).decode()


def read_cold_index(body: bytes, partition: int) -> "NDArray[np.void] | str":
    """Return descriptions of the objects of an index object; else a text: what is wrong with it."""
    found = np.empty(len(body) // _OBJECT_BYTES_MIN, COLD_OBJECT_DTYPE)
    count = ffi.new("size_t *")
    fault = lib.ss_cold_read_index(body, len(body), partition, _objects(found), len(found), count)
    return found[: count[0]] if fault == ffi.NULL else ffi.string(fault).decode()


def _objects(given: "bytes | NDArray[np.void]") -> Any:
    return ffi.cast("struct ss_cold_object *", ffi.from_buffer("uint8_t[]", given))


class ColdTable(Owner):
    """Objects of a bucket by number, by name's digest, and by their records. Any thread may call any method."""

    destructor = "ss_cold_close"

    def __init__(self) -> None:
        seed = int.from_bytes(os.urandom(8), "little")
        super().__init__("ss_cold_table", lambda pointer: lib.ss_cold_open(seed, pointer), "making a table of objects")

    def insert(
        self,
        tenant: int,
        data: bytes,
        objects: "bytes | NDArray[np.void]",
        positions: Sequence[int],
        written_s: Sequence[float],
        *,
        seen: int,
        state: ColdState,
    ) -> "tuple[NDArray[np.uint32], ColdSums]":
        """Insert those ``objects`` at ``positions``, of a tenant, that ``data`` has the entries of.

        Return the number of each, 0 for an object that the table has already, and what is known now and was not before.
        """
        numbers = np.empty(len(positions), np.uint32)
        sums = ffi.new("struct ss_cold_sums *")
        code = lib.ss_cold_insert(
            self._object,
            tenant,
            data,
            _objects(objects),
            ffi.new("uint32_t[]", positions),
            len(positions),
            ffi.new("double[]", written_s),
            seen,
            int(state),
            ffi.cast("uint32_t *", ffi.from_buffer("uint8_t[]", numbers)),
            sums,
        )
        check(code, "inserting objects of a bucket")
        return numbers, ColdSums(sums.objects, sums.records, sums.bytes)

    def remove(self, number: int) -> None:
        lib.ss_cold_remove(self._object, number)

    def number_of(self, digest: bytes) -> int:
        """Return the number of the object with a name's digest; 0: none."""
        _check_length(digest, _DIGEST_BYTES)
        return lib.ss_cold_number(self._object, digest)

    def see(self, digest: bytes, seen: int, written_s: float) -> tuple[int, int]:
        """Note that list ``seen`` has an object, and if it is known, when it was written; return number and state."""
        _check_length(digest, _DIGEST_BYTES)
        state, number = divmod(lib.ss_cold_see(self._object, digest, seen, written_s), 1 << 32)
        return number, state

    def row(self, number: int) -> ColdRow | None:
        """Return the entry of an object; None for a number without one."""
        row = ffi.new("struct ss_cold_row *")
        return _row(row) if lib.ss_cold_row(self._object, number, row) == Result.OK else None

    def records(self, number: int) -> int:
        return lib.ss_cold_records(self._object, number)

    def use(self, number: int, used_h: int) -> None:
        """Note the hour in which an object was used."""
        lib.ss_cold_use(self._object, number, used_h)

    def set_state(self, number: int, state: ColdState) -> tuple[ColdRow, int]:
        """Make an object known or hidden; return how it was before, and its records that no other known object has."""
        before = ffi.new("struct ss_cold_row *")
        count = lib.ss_cold_set_state(self._object, number, int(state), before)
        return _row(before), count

    def find(self, tenant: int, key: bytes) -> ColdFound | None:
        """Return a record of a known object."""
        _check_length(key, INDEX_KEY_BYTES)
        found = ffi.new("struct ss_cold_found *")
        if lib.ss_cold_find(self._object, tenant, key, found):
            return None
        return ColdFound._make(_FOUND.unpack_from(ffi.buffer(found)))

    def holders(self, tenant: int, key: bytes) -> list[int]:
        """Return the objects with a record, in any state."""
        _check_length(key, INDEX_KEY_BYTES)
        room = _HOLDERS_AT_ONCE
        while True:
            numbers = ffi.new("uint32_t[]", room)
            count = lib.ss_cold_holders(self._object, tenant, key, numbers, room)
            if count <= room:
                return list(numbers[0:count])
            room = count

    def select(
        self,
        *,
        tenant: int | None = None,
        partitions: Collection[int] | None = None,
        seen_before: int | None = None,
        is_known: bool = False,
    ) -> "NDArray[np.void]":
        """Return the entries of a tenant's objects, of those in partitions, or of those not seen since a list.

        One partition takes a fifth of a millisecond for a million objects.
        """
        if partitions is not None and not partitions:
            return np.empty(0, COLD_ROW_DTYPE)
        included = ffi.new("uint16_t[]", [] if partitions is None else list(partitions))
        wanted = ffi.new("struct ss_cold_filter *")
        wanted.partitions, wanted.partition_count = included, len(included)
        wanted.tenant = -1 if tenant is None else tenant
        wanted.seen_before = (1 << 64) - 1 if seen_before is None else seen_before
        wanted.is_known = is_known
        cursor, found = ffi.new("uint32_t *"), []
        rows = np.empty(_ROWS_AT_ONCE, COLD_ROW_DTYPE)
        while True:
            pointer = ffi.cast("struct ss_cold_row *", ffi.from_buffer("uint8_t[]", rows))
            count = lib.ss_cold_select(self._object, wanted, cursor, pointer, len(rows))
            if count:
                found.append(rows[:count].copy())
            if not cursor[0]:
                return np.concatenate(found) if found else rows[:0]

    def memory_bytes(self) -> int:
        return int(lib.ss_cold_memory(self._object))


def _check_length(given: bytes, length: int) -> None:
    if len(given) != length:
        raise ValueError(f"{len(given)} bytes instead of {length}")


def _row(row: Any) -> ColdRow:
    return ColdRow._make(_ROW.unpack_from(ffi.buffer(row)))
