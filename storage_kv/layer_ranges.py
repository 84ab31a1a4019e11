"""Large records of a KV.LAYERS request that are not in memory: layers are sent while later ones are read.

First their headers are read, which say where the layers are. Then the layers are read in groups of some MiB per record.
Where the tenant has room for all records, the store reads each one whole, from its beginning on, and keeps it.
Otherwise only ranges are read, some groups ahead of what the connection has sent, and nothing is kept.

Each range that is read is checked against the header's checksums. A record that cannot be read, was replaced, or is
damaged has no bytes in the layers from then on.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from shadowserve import native, record
from shadowserve.errors import CorruptRecordError, ShadowServeError
from shadowserve.pool.entries import parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import ENTRIES_PER_HOLD, Address, Item, Lease
from storage_kv.node import Node

FAR_BYTES_MIN: Final = 2 << 20
"""Smaller records are read whole before the first layer: requests to a device or a bucket have a cost."""
_PART_BYTES: Final = 1 << 20
PARTS_MAX: Final = 8
"""A group has about ``_PART_BYTES`` of each record, or an eighth of it."""
_PART_BYTES_MIN: Final = 128 << 10
_GROUPS_AHEAD: Final = 4
"""Without room for all records: groups for which there is room. They are as small as that takes, to a limit."""
_COPY_COST: Final = 8
"""Cost of a range that is copied, in ranges that are not copied, in one hold of the lock."""
_READ_BYTES: Final = 64 << 10
"""Memory that the read of a header takes besides its bytes: a device reads whole blocks."""
RANGES_MAX: Final = 1 << 19
"""Most ranges of one request: 64 for each of 8192 records. Layers that do not follow each other have a range each."""
RANGE_BYTES: Final = 10
"""Memory of a range before it is read: its record, first byte and end."""
LEASE_BYTES: Final = 250
"""Memory of a range that is being read or was read, beside its bytes."""

Bytes = bytes | memoryview
Table = npt.NDArray[np.uint32]


class _Far:
    """One record."""

    __slots__ = ("address", "cold", "header_bytes", "is_lost", "length", "lease", "manifest", "offsets")

    def __init__(self, address: Address, item: Item) -> None:
        self.address, self.length, self.header_bytes = address, item.length, item.header_bytes
        self.cold = item if item.is_cold else None
        self.lease: Lease | None = None  # of the header
        self.is_lost = False

    def find_layers(self) -> npt.NDArray[np.int64]:
        """Return the bounds of the layers; ShadowServeError if the header is not the one of this record."""
        if self.lease is None:
            raise CorruptRecordError("the header could not be read")
        header = record.parse_header(self.lease.view)
        header.expect(parse_key(self.address)[1])
        if (header.header_length, header.record_length) != (self.header_bytes, self.length):
            raise CorruptRecordError("the header has other lengths than the store says")
        self.manifest = header.slices
        self.offsets = self.manifest["offset"].astype(np.int64)
        return record.layer_bounds(self.lease.view)

    def is_of(self, value: memoryview) -> bool:
        """Return whether a value of the same length begins with this record's header, which has its checksums."""
        return self.lease is not None and bytes(value[: self.header_bytes]) == bytes(self.lease.view)

    def is_sound(self, begin: int, data: Bytes) -> bool:
        """Return whether bytes that begin at a slice are those of the slices of this record."""
        view, end = memoryview(data), begin + len(data)
        first, last = self.offsets.searchsorted([begin, end]).tolist()
        bounds = [*self.offsets[first:last].tolist(), end]
        return bounds[0] == begin and all(
            native.crc32(view[at - begin : behind - begin]) == checksum
            for at, behind, checksum in zip(bounds[:-1], bounds[1:], self.manifest["checksum"][first:last], strict=True)
        )


class Sources(dict[int, Bytes | None]):
    """Bytes of the records of a request for some layers: of far ones their ranges, of the others all of them."""

    __slots__ = ("records",)

    def __init__(self, records: Sequence[Bytes | None]) -> None:
        self.records = records

    def __missing__(self, index: int) -> Bytes | None:
        return self.records[index]


class _Group:
    """Consecutive layers ``[first, last)`` of the request, in which a record has at most one range."""

    __slots__ = ("asked", "begins", "ends", "first", "held", "last", "lost", "records", "size", "sources", "waiting")

    def __init__(self, first: int, last: int, begins: Table, ends: Table) -> None:
        found = np.flatnonzero(ends > begins)
        self.first, self.last = first, last
        # Numbers of the far records that have a range, and its first byte and end:
        self.records, self.begins, self.ends = found.astype(np.uint16), begins[found], ends[found]
        self.size = int(self.ends.sum(dtype=np.int64) - self.begins.sum(dtype=np.int64))
        self.asked = 0  # number of records whose range is being read or was read
        self.waiting = len(found)  # number of records whose range has not come
        self.sources: Sources | None = None  # None before the first read and after the last layer
        self.held: list[Item | Lease] = []
        self.lost: list[int] = []


class FarRecords:
    """The far records of one request. Used by the thread of all streams; callbacks of reads come in any thread."""

    def __init__(self, node: Node, client: int, layers: Sequence[int], wake: Callable[[], None]) -> None:
        self._node, self._client, self._wake = node, client, wake
        self._layers = layers
        self._count = self._header_bytes = 0
        self.needed_bytes = 0  # size of the far records so far
        self._keeps = True
        self._added: set[int] = set()
        self._records: dict[int, _Far] = {}
        self._indices: list[int] = []
        self._groups: list[_Group] = []
        self._part_bytes = self._room = self._ahead_bytes = 0
        self._asked = self._sending = self._released = 0  # groups
        self._came: list[Callable[[], None]] = []  # answers that wait for the end of a hold of the node's lock
        self._lock = threading.Lock()
        self.reads = 0  # number of running reads of the whole stream
        self.sent = 0  # number of layers that were sent

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, index: int, address: Address, item: Item) -> bool:
        """Return whether a record is one of these. Without room for all, it is one although it has come to memory."""
        is_large = item.header_bytes > 0 and item.length >= FAR_BYTES_MIN
        is_away = item.value is None or (not self._keeps and index in self._added)
        return is_away and is_large and parse_key(address)[2] is None

    # ---- Room

    def add_up(self, index: int, item: Item) -> None:
        self._added.add(index)
        self._count += 1
        self._header_bytes += item.header_bytes + _READ_BYTES
        self.needed_bytes += item.length

    @property
    def least_bytes(self) -> int:
        """Return the bytes of reads that must have room."""
        return min(self.needed_bytes, self._header_bytes + self._count * _GROUPS_AHEAD * self._part())

    def _part(self) -> int:
        return max(_PART_BYTES, self.needed_bytes // max(1, self._count) // PARTS_MAX)

    @property
    def possible_bytes(self) -> int:
        """Return the fewest bytes with which the records can be sent."""
        return min(self.needed_bytes, self._header_bytes + self._count * _GROUPS_AHEAD * _PART_BYTES_MIN)

    def reserve(self, size: int) -> None:
        """Choose how to read, with room for ``size`` bytes."""
        self._keeps, self._part_bytes = size >= self.needed_bytes, self._part()
        if not self._keeps:
            room = (size - self._header_bytes) // (self._count * _GROUPS_AHEAD)
            self._part_bytes = max(1, min(self._part_bytes, room))

    # ---- Headers

    def kept_bytes(self, item: Item) -> int:
        return item.length if self._keeps else item.header_bytes + _READ_BYTES

    def read_header(self, index: int, address: Address, item: Item) -> None:
        """Begin to read a record of the request. Needs the node's lock."""
        far = self._records[index] = _Far(address, item)
        if item.value is not None:
            far.lease = Lease(memoryview(bytes(memoryview(item.value)[: item.header_bytes])))
            return

        def done(lease: Lease | None) -> None:
            far.lease = lease
            self.ended()

        self.begun()
        self._node.store.read(item, 0, item.header_bytes, done, in_parts=not self._keeps, ahead=self._keeps)

    def begun(self) -> None:
        with self._lock:
            self.reads += 1

    def ended(self) -> None:
        with self._lock:
            self.reads -= 1
            wakes = not self.reads
        if wakes:
            self._wake()

    def find_layers(self, index: int) -> tuple[memoryview, npt.NDArray[np.int64]] | None:
        """Return the header of a far record, and the bounds of its layers; None for another record.

        Raises:
            ShadowServeError: The header is unsound or could not be read: the record is lost.
        """
        far = self._records.get(index)
        if far is None:
            return None
        far.is_lost = True
        try:
            bounds = far.find_layers()
        except ShadowServeError:
            if far.lease is not None:
                self._report_damage(far)
            raise
        far.is_lost = False
        assert far.lease is not None
        return far.lease.view, bounds

    def _report_damage(self, far: _Far) -> None:
        """Report that bytes of a record are wrong, unless the bucket's reader has checked them."""
        if far.cold is not None and not self._keeps:
            self._node.store.report_damage(far.cold)

    @property
    def lost_headers(self) -> int:
        """Number of records whose header was unsound or could not be read; before the first range is read."""
        return sum(far.is_lost for far in self._records.values())

    # ---- Groups

    def plan(self, begins: Table, lengths: Table, room: int) -> str:
        """Divide the layers into groups; return why that is impossible, empty if it is possible.

        ``begins`` and ``lengths`` are by layer and record of the request. ``begins`` of far records become those in
        their ranges.
        """
        self._room = room
        self._indices = [index for index, far in self._records.items() if not far.is_lost]
        if not self._indices:
            return ""
        far = np.array(self._indices)
        sizes = lengths[:, far].sum(1, dtype=np.int64).tolist()
        first, total = 0, 0
        target = max(1, self._part_bytes * len(far) - self._header_bytes)  # the first group and headers come together
        for layer, size in enumerate([*sizes, 0]):
            is_last = layer == len(sizes)
            follows = not is_last and layer > first and self._layers[layer] == self._layers[layer - 1] + 1
            if layer > first and (not follows or total + size > target):
                self._add_group(first, layer, begins, lengths, far)
                first, total = layer, 0
                if len(self._groups) * len(far) > RANGES_MAX:
                    return f"these layers are more than {RANGES_MAX} ranges: request them in order, or fewer keys"
            total += size
        if self._keeps or max(group.size for group in self._groups) <= room:
            return ""
        return f"one layer of these records has more than {room} bytes: request fewer keys"

    def _add_group(self, first: int, last: int, begins: Table, lengths: Table, far: npt.NDArray[np.intp]) -> None:
        start = begins[first, far].copy()
        end = start + lengths[first:last, far].sum(0, dtype=np.uint32)
        begins[first:last, far] -= start
        self._groups.append(_Group(first, last, start, end))

    def work(self, records: Sequence[Bytes | None]) -> bool:
        """Release what was sent, and begin further reads as far as there is room; return True if more is to do now.

        ``records``: the near records of the request. Holds the node's lock for a limited time.
        """
        if self._asked == len(self._groups) and not self._has_sent:
            return False
        with self._node.lock:
            left = self._release_sent(ENTRIES_PER_HOLD)
            more = left <= 0 or self._read_more(records, left)
        came, self._came = self._came, []
        for call in came:
            call()
        return more

    def _read_more(self, records: Sequence[Bytes | None], left: int) -> bool:
        self._node.store.client = self._client
        while self._asked < len(self._groups) and left > 0:
            group = self._groups[self._asked]
            if group.sources is None:
                is_next = self._asked == self._released
                if not (self._keeps or is_next or self._ahead_bytes + group.size <= self._room):
                    return False
                self._ahead_bytes += group.size
                group.sources = Sources(records)
                left -= 1
            while group.asked < len(group.records) and left > 0:
                left -= self._read(group, group.sources, group.asked)
                group.asked += 1
            self._asked += group.asked == len(group.records)
        return self._asked < len(self._groups)

    def _read(self, group: _Group, sources: Sources, number: int) -> int:
        """Begin to read the range of a record; return its cost. Needs the node's lock."""
        begin, end = int(group.begins[number]), int(group.ends[number])
        index = self._indices[group.records[number]]
        far, store = self._records[index], self._node.store

        def done(held: Item | Lease | None, data: Bytes | None, *, is_checked: bool = False) -> None:
            is_sound = data is not None and (is_checked or far.is_sound(begin, data))
            if data is not None and not is_sound:
                self._report_damage(far)
            with self._lock:
                if held is not None:
                    group.held.append(held)
                sources[index] = data if is_sound else None
                if not is_sound:
                    group.lost.append(index)
                group.waiting -= 1
                self.reads -= 1
                wakes = not (group.waiting and self.reads)
            if wakes:
                self._wake()

        thread = threading.get_ident()

        def read(lease: Lease | None) -> None:
            call = partial(done, lease, None if lease is None else lease.view)
            if threading.get_ident() == thread:  # within store.read(): the check must not hold the lock
                self._came.append(call)
            else:
                call()

        self.begun()
        item = None if far.is_lost else store.peek(far.address)
        if item is None or item.length != far.length:
            done(None, None)
        elif item.value is None:
            store.read(item, begin, end, read, in_parts=not self._keeps, ahead=self._keeps)
        elif not far.is_of(memoryview(item.value)):  # it was replaced
            done(None, None)
        elif self._keeps:
            store.hold(item)
            done(item, memoryview(item.value)[begin:end], is_checked=True)
        else:  # there is no room to hold all of it
            done(None, bytes(memoryview(item.value)[begin:end]), is_checked=True)
            return _COPY_COST
        return 1

    def sources(self) -> Sources:
        """Return the bytes of all records for the last layer of :meth:`is_there`."""
        sources = self._groups[self._sending].sources
        assert sources is not None
        return sources

    def is_there(self, layer: int) -> bool:
        """Return whether all ranges of a layer have come, or are lost. Layers are asked for in their order."""
        while self._groups[self._sending].last <= layer:
            self._sending += 1
        group = self._groups[self._sending]
        return group.sources is not None and not group.waiting

    def take_lost(self) -> list[int]:
        """Return the records that were lost in the group of the last layer of :meth:`is_there`."""
        group = self._groups[self._sending]
        lost, group.lost = [index for index in group.lost if not self._records[index].is_lost], []
        for index in lost:
            self._records[index].is_lost = True
        return lost

    # ---- The end

    @property
    def _has_sent(self) -> bool:
        """Return whether all layers of a group were sent that is not released."""
        if self._released == len(self._groups):
            return False
        group = self._groups[self._released]
        return group.last <= self.sent and group.sources is not None and not group.waiting

    def _release_sent(self, left: int) -> int:
        """Release at most ``left`` ranges of groups that were sent; return how many more are allowed now."""
        while self._has_sent and left > 0:
            group = self._groups[self._released]
            left -= 1 + self._release(group, left)
            if not group.held:
                group.sources = None
                self._ahead_bytes -= group.size
                self._released += 1
        return left

    def release(self, left: int) -> int:
        """Release at most ``left`` ranges and headers; return how many more are allowed, 0 if some are left.

        No read may be running. Needs the node's lock.
        """
        while self._groups and left > 0:
            left -= 1 + self._release(self._groups[-1], left)
            if not self._groups[-1].held:
                self._groups.pop()
        while not self._groups and self._records and left > 0:
            _, far = self._records.popitem()
            left -= 1
            if far.lease is not None:
                far.lease.release()
        return max(0, left)

    def _release(self, group: _Group, count: int) -> int:
        """Release at most ``count`` ranges of a group; return their number."""
        held, group.held = group.held[:count], group.held[count:]
        release_all(self._node.store, held)
        return len(held)


def release_all(store: Pool, held: Sequence[Item | Lease]) -> None:
    """Release items and leases. Needs the node's lock."""
    for each in held:
        if isinstance(each, Item):
            store.release(each)
        else:
            each.release()
