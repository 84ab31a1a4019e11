"""One request for layers: the memory that it keeps, and the parts of its reply.

A stream may have thousands of keys and a thousand layers, so it keeps few bytes for each: names in one buffer, starts
and lengths of pieces in two arrays. The buffers of a layer are made as the kernel takes them, some hundred KiB at a
time.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from shadowserve import record
from shadowserve.errors import ShadowServeError
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import ENTRIES_PER_HOLD, Item, Lease
from shadowserve.resp import encode_array_header, encode_bulk_header, encode_error
from storage_kv.access.memory import Account
from storage_kv.egress import Demand
from storage_kv.layer_ranges import LEASE_BYTES, PARTS_MAX, RANGE_BYTES, RANGES_MAX, FarRecords, Sources, release_all
from storage_kv.node import Node
from storage_kv.reply import REFERENCE_BYTES_MIN, DeferredReply, ValueSlice
from storage_kv.session import Session
from storage_kv.shaper import Flow

WINDOW_S_MIN: Final = 1e-4
"""Used in place of a window of 0: such a reader waits for every byte."""
_AHEAD: Final = 2  # limit of the layers that the connection has and has not sent: the one being sent, and the next

_STREAM_BYTES: Final = 4 << 10
_KEY_BYTES: Final = 512  # memory of a key beside its name: its held record, reads, its number in the reply
_LAYER_BYTES: Final = 384  # memory of a layer: its part of the reply
_PIECE_BYTES: Final = 8  # memory of a layer of a record: start and length

_WINDOW_BYTES: Final = 1 << 20  # large pieces in one call of the kernel: twice what it takes
_JOINED_BYTES: Final = 256 << 10  # small pieces that are joined at a time


def memory_of(names: Sequence[bytes], layers: Sequence[int]) -> int:
    """Return the memory of a request beside the records."""
    keys, count = len(names), len(layers)
    gaps = sum(layer != before + 1 for before, layer in pairwise(layers))
    ranges, leases = (min(keys * each, RANGES_MAX) for each in (count, min(count, gaps + 1 + PARTS_MAX)))
    of_keys = sum(map(len, names)) + keys * (_KEY_BYTES + _PIECE_BYTES * count)
    return _STREAM_BYTES + of_keys + count * _LAYER_BYTES + ranges * RANGE_BYTES + leases * LEASE_BYTES


class _Part(DeferredReply):
    """The first element or a layer of a stream's reply."""

    __slots__ = ("_stream",)
    is_lent: ClassVar[bool] = False

    def __init__(self, node: Node, expects: int, stream: "Stream") -> None:
        super().__init__(node.lock, node.store, expects)
        self._stream = stream

    def abandon(self) -> None:
        super().abandon()
        self._stream.on_abandoned()


class _Layer(ValueSlice):
    """A layer: some bytes of its own, then a piece of each record that has one, of its bytes in ``sources``."""

    __slots__ = ("_begins", "_ends", "_front", "_indices", "_size", "_sources", "_stream")
    is_layer: ClassVar[bool] = True

    def __init__(
        self,
        stream: "Stream",
        front: bytes,
        sources: Sequence[bytes | memoryview | None] | Sources,
        indices: npt.NDArray[np.integer],
        begins: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        self._stream, self._front, self._indices, self._begins = stream, front, indices, begins
        self._sources = sources
        self._ends = len(front) + np.cumsum(lengths, dtype=np.int64)
        self._size = int(self._ends[-1]) + len(_TAIL) if len(indices) else len(front)

    @property
    def size(self) -> int:
        return self._size

    def buffers(self, offset: int, count: int) -> list[bytes | memoryview]:
        """Return the first bytes behind ``offset`` in at most ``count`` buffers."""
        if offset:  # it is being sent
            self._stream.partly_sent_bytes = offset
        front, ends = self._front, self._ends
        found: list[bytes | memoryview] = []
        if offset < len(front):
            found.append(memoryview(front)[offset:] if offset else front)
            offset = len(front)
        if not len(ends) or len(found) == count:
            return found
        first = int(ends.searchsorted(offset, "right"))
        if first < len(ends):
            found += self._pieces(offset, first, count - len(found))
            return found
        found.append(memoryview(_TAIL)[offset - int(ends[-1]) :])
        return found

    def _pieces(self, offset: int, first: int, count: int) -> list[bytes | memoryview]:
        """Return buffers from the piece at ``offset`` on, with the layer's end if that is reached."""
        ends = self._ends
        last = min(int(ends.searchsorted(offset + _JOINED_BYTES)) + 1, len(ends))
        joined = int(ends[last - 1]) - offset < REFERENCE_BYTES_MIN * (last - first)
        if not joined:
            last = min(int(ends.searchsorted(offset + _WINDOW_BYTES)) + 1, len(ends), first + count)
        begins, behind = self._begins[first:last].tolist(), ends[first:last].tolist()
        views: list[bytes | memoryview] = []
        at = int(ends[first - 1]) if first else len(self._front)
        for index, begin, end in zip(self._indices[first:last].tolist(), begins, behind, strict=True):
            record_bytes = self._sources[index]
            assert record_bytes is not None
            views.append(memoryview(record_bytes)[begin + max(0, offset - at) : begin + end - at])
            at = end
        is_last = last == len(ends)
        if joined:
            return [b"".join([*views, _TAIL] if is_last else views)]
        if is_last and len(views) < count:
            views.append(_TAIL)
        return views

    @property
    def pin_key(self) -> int:
        return id(self._stream)

    @property
    def pinned_bytes(self) -> int:
        return self._stream.reserved_bytes

    def hold(self, store: Pool) -> None:
        """Do nothing: the stream holds the records."""

    def release(self, store: Pool) -> None:
        self._stream.on_sent()


_TAIL: Final = b"\r\n"
_NONE: Final = np.zeros(0, np.uint32)


class StreamRecords:
    """The records of a request: their sizes, their bytes in memory, and the layers in them.

    Used by the thread of all streams, some keys at a time.
    """

    def __init__(
        self, node: Node, session: Session, names: Sequence[bytes], layers: Sequence[int], wake: Callable[[], None]
    ) -> None:
        self.node, self.session, self.tenant = node, session, session.tenant
        self.keys = len(names)
        self.layers = np.array(layers, np.uint16)
        self._names = b"".join(names)
        self._name_ends = np.cumsum([len(name) for name in names], dtype=np.uint32)
        self.position = 0  # index of the next key to work on
        self.lost = 0  # number of failed reads
        self.sized_bytes = 0  # size of the records, of the keys added up so far
        self.reserved_bytes = self._kept_bytes = 0
        self.is_reserved = False  # it may keep records in memory, at most ``reserved_bytes``
        self._held: list[Item | Lease] = []
        self.records: list[bytes | memoryview | None] = []  # bytes in memory, of a far record its header
        self._begins: npt.NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
        self._lengths = self._begins
        self.bits: list[int] = []  # size of each layer in bits, once known
        self.error = b""  # error reply for all layers that are not resolved; empty for none
        self._wake = wake
        self.far = FarRecords(node, session.id, layers, wake)  # the records that are read while others are sent

    @property
    def reads(self) -> int:
        return self.far.reads

    def _address(self, index: int) -> tuple[int, bytes]:
        begin = int(self._name_ends[index - 1]) if index else 0
        return self.tenant, self._names[begin : int(self._name_ends[index])]

    def work_on_keys(self) -> None:
        """Work on some more keys; ``position`` equals ``keys`` when all are done.

        The first pass adds up the sizes of the records. The second one, when there is room for them, holds those in
        memory and reads the others, or their headers. The third one finds the layers in each record.
        """
        begin, end = self.position, min(self.position + ENTRIES_PER_HOLD, self.keys)
        if not len(self._name_ends):  # the third pass
            self._find_layers(begin, end)
        else:
            with self.node.lock:
                if self.is_reserved:
                    for index in range(begin, end):
                        self._hold_or_read(index)
                else:
                    self._add_up(begin, end)
        self.position = end

    def _add_up(self, begin: int, end: int) -> None:
        for index in range(begin, end):
            address = self._address(index)
            item = self.node.store.peek(address)
            if item is not None:
                self.sized_bytes += item.length
                if self.far.has(index, address, item):
                    self.far.add_up(index, item)

    def reserve(self, size: int) -> None:
        """Start the second pass: there is room for the records, or for ``size`` bytes of them."""
        self.is_reserved, self.reserved_bytes, self.position = True, size, 0
        self.far.reserve(size - (self.sized_bytes - self.far.needed_bytes))
        self.records = [None] * self.keys

    def _hold_or_read(self, index: int) -> None:
        store, address = self.node.store, self._address(index)
        item = store.peek(address)
        is_far = item is not None and self.far.has(index, address, item)
        kept_bytes = 0 if item is None else self.far.kept_bytes(item) if is_far else item.length
        if self._kept_bytes + kept_bytes > self.reserved_bytes:
            item = None  # stored after the first pass, and there is no room for it
            self.node.counters.misses += 1
        else:
            self.node.store.client = self.session.id  # for the fair order of reads from a bucket
            item = self.node.read(address)
        if item is None or not item.header_bytes:
            return
        self._kept_bytes += kept_bytes
        if is_far and self.far.has(index, address, item):
            self.far.read_header(index, address, item)
            return
        if item.value is not None:
            store.hold(item)
            self._held.append(item)
            self.records[index] = item.value
            return
        self.far.begun()

        def done(lease: Lease | None) -> None:
            if lease is None:
                self.lost += 1
            else:
                self._held.append(lease)
                self.records[index] = lease.view
            self.far.ended()

        store.read(item, 0, item.length, done)

    def begin_layout(self) -> None:
        """Start the third pass: all records are in memory."""
        self._names, self._name_ends, self.position = b"", np.zeros(0, np.uint32), 0
        self._count_lost(self.lost)
        self._begins = np.zeros((len(self.layers), self.keys), np.uint32)
        self._lengths = np.zeros((len(self.layers), self.keys), np.uint32)

    def _count_lost(self, lost: int) -> None:
        """Count records that were no hits after all."""
        if lost:
            with self.node.lock:
                self.node.counters.hits -= lost
                self.node.counters.misses += lost
                self.node.counters.lost_values += lost

    def _find_layers(self, begin: int, end: int) -> None:
        for index in range(begin, end):
            value = self.records[index]
            try:
                found = self.far.find_layers(index)
                if found is not None:
                    self.records[index], bounds = found
                elif value is not None:
                    bounds = record.layer_bounds(value)
                else:
                    continue
            except ShadowServeError:  # it was valid when it was stored: damage, so a miss
                self.records[index] = None
                continue
            there = self.layers < len(bounds) - 1
            wanted = self.layers[there].astype(np.int64)
            self._begins[there, index] = bounds[wanted]
            self._lengths[there, index] = bounds[wanted + 1] - bounds[wanted]
        if end < self.keys:
            return
        self._count_lost(self.far.lost_headers)
        if why := self.far.plan(self._begins, self._lengths, self.reserved_bytes - self._kept_bytes):
            self.error = encode_error(f"OOM {why}")
        self.bits = (8 * (self._lengths.sum(1, dtype=np.int64) + 4 * self.keys)).tolist()

    def is_there(self, layer: int) -> bool:
        """Return whether the bytes of a layer are in memory. A record that was lost has none in it and behind it."""
        if not self.far:
            return True
        if not self.far.is_there(layer):
            return False
        if lost := self.far.take_lost():
            self._count_lost(len(lost))
            self._lengths[layer:, lost] = 0
            left = 8 * (self._lengths[layer:].sum(1, dtype=np.int64) + 4 * self.keys)
            self.bits[layer:] = left.tolist()
        return True

    def release(self) -> bool:
        """Release some records; return True if all are released. Needs the node's lock."""
        held, self._held = self._held[:ENTRIES_PER_HOLD], self._held[ENTRIES_PER_HOLD:]
        release_all(self.node.store, held)
        if not self.far.release(ENTRIES_PER_HOLD - len(held)):
            return False
        self.records = []
        self._begins = self._lengths = np.zeros((0, 0), np.uint32)
        return True


class Stream(StreamRecords):
    """One request: its reply and its place in the schedule."""

    def __init__(
        self,
        node: Node,
        session: Session,
        names: Sequence[bytes],
        layers: Sequence[int],
        account: Account,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(node, session, names, layers, wake)
        self.account = account  # account of its memory beside the records
        self.share = session.share
        self.limit, self.window_s = inf, WINDOW_S_MIN
        self.ends_s = inf  # deadline, of ``time.monotonic()``
        self.flow: Flow | None = None
        self.resolved = 0  # number of layers whose parts are resolved
        self.sent = 0  # number of layers that are sent or dropped
        self.partly_sent_bytes = 0  # sent bytes of the layer that is being sent
        self.unsent_bits = 0  # size of the layers that are not resolved, as it was known at the start
        self.soon_bits_max = inf  # most bits of them that count in the node's load
        self.abandoned = False
        self.is_ended = False  # all its parts are resolved
        self.is_active = False  # its layers are being sent
        self.has_link_share = False  # its flow is in the shaper
        self.abort_s = 0.0  # when its connection is aborted if it has not sent all; 0.0 for never
        self._unread_s, self._unread_bits = 0.0, 0
        self.head = _Part(node, 16 * self.keys, self)  # the first element of the reply
        self.parts = [_Part(node, 4 * self.keys, self) for _ in layers]

    # ---- Called by connections

    def on_abandoned(self) -> None:
        self.abandoned = True
        self._wake()

    def on_sent(self) -> None:
        """Record that a layer is sent or dropped. Needs the node's lock."""
        if not self.abandoned and not self.error and self.bits:
            self.node.counters.layers_sent += 1
            self.node.counters.layer_bytes_sent += self.bits[self.sent] // 8
        self.sent += 1
        self.far.sent = self.sent
        self.partly_sent_bytes = 0
        self._wake()

    # ---- Called by the thread of all streams

    def begin_reply(self) -> None:
        """Create the flow, and resolve the first element: the number of bytes that follow for each key."""
        self.unsent_bits = sum(self.bits)
        layer_bytes = self.unsent_bits / 8 / len(self.layers)
        demand = Demand(layer_bytes, self.window_s, len(self.layers))
        self.flow = Flow(demand, self.limit, self.tenant, self.session.weight)
        null = b"_\r\n" if self.session.protocol == 3 else b"$-1\r\n"
        totals = self._lengths.sum(0, dtype=np.int64).tolist()
        answer = [encode_array_header(1 + len(self.layers)), encode_array_header(self.keys)]
        answer += [
            null if value is None else b":%d\r\n" % total for total, value in zip(totals, self.records, strict=True)
        ]
        self.head.resolve([b"".join(answer)])

    def layer(self, number: int) -> ValueSlice:
        """Return a layer: the lengths of its pieces as 32-bit numbers, then the pieces in the order of the keys."""
        lengths = self._lengths[number]
        table = lengths.astype("<u4").tobytes()
        size = self.bits[number] // 8
        indices = np.flatnonzero(lengths)
        front = encode_bulk_header(size) + table + (b"" if len(indices) else _TAIL)
        sources: list[bytes | memoryview | None] | Sources = self.far.sources() if self.far else self.records
        return _Layer(self, front, sources, indices, self._begins[number][indices], lengths[indices])

    def resolve_next(self) -> None:
        layer = self.layer(self.resolved)
        self.unsent_bits -= self.bits[self.resolved]
        self.resolved += 1
        self.parts[self.resolved - 1].resolve([layer])

    def end(self) -> None:
        """Resolve the remaining parts: with the error, once for a reply that has not begun, or else empty."""
        self.is_ended, self.is_active = True, False
        front = self.error
        if self.head.parts is None:
            self.head.failed = bool(front)
            self.head.resolve([front])
            front = b""
        while self.resolved < len(self.parts):
            self.resolved += 1
            self.parts[self.resolved - 1].resolve([_Layer(self, front, (), _NONE, _NONE, _NONE)])

    def release(self) -> bool:
        is_released = super().release()
        if is_released:
            self.account.close()
        return is_released

    def next_bits(self) -> int:
        """Return the size in bits of the next layer; 0 while it is not there, or the connection has enough, or all."""
        if self.resolved == len(self.parts) or self.resolved - self.sent >= _AHEAD or not self.is_there(self.resolved):
            return 0
        return self.bits[self.resolved]

    def pace(self, now_s: float, after_s: float) -> float:
        """Return at how many bits per second the client reads; infinite if layers wait for less than ``after_s``."""
        if self.resolved == self.sent or not self.bits:
            self._unread_s = 0.0
            return inf
        taken = sum(self.bits[: self.sent]) + 8 * self.partly_sent_bytes
        if not self._unread_s:
            self._unread_s, self._unread_bits = now_s, taken
        elapsed_s = now_s - self._unread_s
        return inf if elapsed_s < after_s else (taken - self._unread_bits) / elapsed_s

    @property
    def rate_max(self) -> float:
        """Highest rate in bits per second by the limits of the request and of its tenant; infinite for none."""
        limiter = self.session.limiter
        return min(self.limit, inf if limiter is None else 8 * limiter.bytes_per_s)

    @property
    def is_over(self) -> bool:
        """True if no more layers are to be resolved."""
        return self.abandoned or bool(self.error) or self.resolved == len(self.parts)
