"""One request for layers: what it keeps in memory, counted before it is taken, and the parts of its reply.

A stream may name thousands of keys and a thousand layers, so what it remembers of each is some bytes: names in one
buffer, where pieces begin and how long they are in two arrays. What a layer is sent from is made as the kernel takes
it, some hundred KiB at a time.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from shadowserve import record
from shadowserve.errors import ShadowServeError
from shadowserve.pool.pool import Pool
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Item, Lease
from shadowserve.resp import encode_array_header, encode_bulk_header
from storage_kv.access.memory import Account
from storage_kv.egress import Demand
from storage_kv.node import REFERENCE_BYTES_MIN, Node, Outgoing, Pending
from storage_kv.session import Session
from storage_kv.shaper import Flow

WINDOW_S_MIN: Final = 1e-4
"""What a window of no length is taken for: such a reader waits for every byte."""
_AHEAD: Final = 2
"""Layers that are given to a connection and not sent yet: one that is being sent, and the next."""

_STREAM_BYTES: Final = 4 << 10
_KEY_BYTES: Final = 448
"""Of a key, beside its name: what is held of its record, a read of it, its number in the reply."""
_LAYER_BYTES: Final = 384
"""Of a layer: its part of the reply."""
_PIECE_BYTES: Final = 8
"""Of a layer of a record: where it begins, and its length."""

_WINDOW_BYTES: Final = 1 << 20
"""Of large pieces, given to the kernel at a time: twice what it takes."""
_JOINED_BYTES: Final = 256 << 10
"""Of small pieces, joined at a time."""


def memory_of(names: Sequence[bytes], layers: int) -> int:
    """Return how many bytes of memory a request may make the node hold beside the records."""
    keys = len(names)
    of_keys = sum(map(len, names)) + keys * (_KEY_BYTES + _PIECE_BYTES * layers)
    return _STREAM_BYTES + of_keys + layers * _LAYER_BYTES


class _Part(Pending):
    """The beginning or a layer of a stream's reply."""

    __slots__ = ("_stream",)
    is_lent: ClassVar[bool] = False

    def __init__(self, node: Node, expects: int, stream: "Stream") -> None:
        super().__init__(node, expects)
        self._stream = stream

    def abandon(self) -> None:
        super().abandon()
        self._stream.leave()


class _Layer(Outgoing):
    """A layer: bytes of its own, and a piece of each record, one behind the other.

    Args:
        stream: which keeps the records.
        front: bytes before the pieces.
        places: of the records, in the stream's order, those that have a piece.
        begins: where each piece begins in its record.
        lengths: of the pieces.
    """

    __slots__ = ("_begins", "_ends", "_front", "_places", "_size", "_stream")
    is_layer: ClassVar[bool] = True

    def __init__(
        self,
        stream: "Stream",
        front: bytes,
        places: npt.NDArray[np.integer],
        begins: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        self._stream, self._front, self._places, self._begins = stream, front, places, begins
        self._ends = len(front) + np.cumsum(lengths, dtype=np.int64)
        self._size = int(self._ends[-1]) + len(_TAIL) if len(places) else len(front)

    @property
    def size(self) -> int:
        return self._size

    def rest(self, offset: int, count: int) -> list[bytes | memoryview]:
        """Return what is behind ``offset``, in at most ``count`` stretches, or its beginning: not all if it is much."""
        if offset:  # it is the one that is being sent
            self._stream.taken_bytes = offset
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
        """Return pieces from one that ``offset`` is in, and the layer's end if that is reached."""
        ends = self._ends
        last = min(int(ends.searchsorted(offset + _JOINED_BYTES)) + 1, len(ends))
        joined = int(ends[last - 1]) - offset < REFERENCE_BYTES_MIN * (last - first)
        if not joined:
            last = min(int(ends.searchsorted(offset + _WINDOW_BYTES)) + 1, len(ends), first + count)
        records = self._stream.records
        begins, behind = self._begins[first:last].tolist(), ends[first:last].tolist()
        views: list[bytes | memoryview] = []
        at = int(ends[first - 1]) if first else len(self._front)
        for place, begin, end in zip(self._places[first:last].tolist(), begins, behind, strict=True):
            record_bytes = records[place]
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
    def pinned(self) -> int:
        return id(self._stream)

    @property
    def pinned_bytes(self) -> int:
        return self._stream.reserved_bytes

    def hold(self, store: Pool) -> None:
        """Do nothing: the stream holds what it is of."""

    def release(self, store: Pool) -> None:
        self._stream.note_sent()


_TAIL: Final = b"\r\n"
_NONE: Final = np.zeros(0, np.uint32)


class Stream:
    """One request.

    Attributes:
        tenant: whose records it is for, and in whose turn it goes on.
        keys: how many it names.
        layers: their numbers, in the order in which they are wanted.
        account: of what it holds beside the records.
        ends_s: when it must be over, by ``time.monotonic()``.
        limit: bits a second at most.
        position: of the key that is gone through next.
        sized_bytes: of the records that it wants, as far as they have been gone through.
        is_reserved: it has been admitted, and may keep records in memory.
        reserved_bytes: of these at most.
        reads: that are under way.
        records: what is in memory, of each key.
        bits: of each layer, once all that it wants is in memory.
        head: the reply's beginning.
        parts: its layers, in their order; those behind ``given`` are not known yet.
        sent: how many of them have been sent, or dropped.
        taken_bytes: of the one that is being sent.
        flow: once all that it wants is in memory.
        is_active: its layers are known, and it is not over.
        flows: it has its part of the link.
        error: reply to what is not given yet, where it cannot be.
        is_ended: nothing more of it is to be given.
        cut_s: when its connection is cut if it has not been sent; 0.0 for never.
    """

    def __init__(
        self,
        node: Node,
        session: Session,
        names: Sequence[bytes],
        layers: Sequence[int],
        account: Account,
        wake: Callable[[], None],
    ) -> None:
        self.node, self.session, self.account = node, session, account
        self.tenant, self._share = session.tenant, session.share
        self.keys = len(names)
        self.layers = np.array(layers, np.uint16)
        self._names = b"".join(names)
        self._name_ends = np.cumsum([len(name) for name in names], dtype=np.uint32)
        self.limit, self.window_s, self.ends_s = inf, WINDOW_S_MIN, inf
        self.flow: Flow | None = None
        self.position = self.given = self.sent = self.taken_bytes = self.reserved_bytes = 0
        self.abandoned = self.is_ended = self.is_reserved = self.is_active = self.flows = False
        self.cut_s = 0.0
        self.error = b""
        self.reads = 0
        self.lost = 0  # reads that failed
        self.sized_bytes = self._kept_bytes = 0
        self._looks_for_layers = False
        self._held: list[Item | Lease] = []
        self.records: list[bytes | memoryview | None] = []
        self._begins: npt.NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
        self._lengths = self._begins
        self.bits: list[int] = []
        self._unread_s, self._unread_bits = 0.0, 0
        self._wake = wake
        self.head = _Part(node, 16 * self.keys, self)
        self.parts = [_Part(node, 4 * self.keys, self) for _ in layers]

    @property
    def share(self) -> int:
        """Whose share of memory it uses."""
        return self._share

    # ---- Told by others, with the node's lock held or not

    def leave(self) -> None:
        """Take note that nobody wants the rest of it."""
        self.abandoned = True
        self._wake()

    def note_sent(self) -> None:
        """Take note that a layer is sent, or dropped; with the node's lock held."""
        if not self.abandoned and not self.error and self.bits:
            self.node.counters.layers_sent += 1
            self.node.counters.layer_bytes_sent += self.bits[self.sent] // 8
        self.sent += 1
        self.taken_bytes = 0
        self._wake()

    # ---- By the thread of all streams, some keys at a time

    def _address(self, place: int) -> tuple[int, bytes]:
        begin = int(self._name_ends[place - 1]) if place else 0
        return self.tenant, self._names[begin : int(self._name_ends[place])]

    def go_on(self) -> None:
        """Go through some more keys; when ``position`` is behind the last, all of them are done.

        First, the bytes of the records are added up. Once there is room for them they are held, if they are in memory,
        else they are read. Once they are there, it is found out where their layers are.
        """
        begin, end = self.position, min(self.position + ENTRIES_PER_HOLD, self.keys)
        if self._looks_for_layers:
            self._plan(begin, end)
        else:
            with self.node.lock:
                if self.is_reserved:
                    self._gather(begin, end)
                else:
                    self._add_up(begin, end)
        self.position = end

    def _add_up(self, begin: int, end: int) -> None:
        for place in range(begin, end):
            item = self.node.store.peek(self._address(place))
            self.sized_bytes += 0 if item is None else item.length

    def reserve(self) -> None:
        """Take note that there is room for what was added up."""
        self.is_reserved, self.reserved_bytes, self.position = True, self.sized_bytes, 0
        self.records = [None] * self.keys

    def _gather(self, begin: int, end: int) -> None:
        for place in range(begin, end):
            self._take(place)

    def _take(self, place: int) -> None:
        store, address = self.node.store, self._address(place)
        item = store.peek(address)
        if item is not None and self._kept_bytes + item.length > self.reserved_bytes:
            item = None  # there is more than was added up: it has been stored since, and that was too late
            self.node.counters.misses += 1
        else:
            self.node.store.client = self.session.id  # so that a cold read has the turn of this client
            item = self.node.read(address)
        if item is None or not item.head_bytes:
            return
        self._kept_bytes += item.length
        if item.value is not None:
            store.hold(item)
            self._held.append(item)
            self.records[place] = item.value
            return
        self.reads += 1

        def done(lease: Lease | None) -> None:
            if lease is None:
                self.lost += 1
            else:
                self._held.append(lease)
                self.records[place] = lease.view
            with _reads_lock:
                self.reads -= 1
                ended = not self.reads
            if ended:
                self._wake()

        store.read(item, 0, item.length, done)

    def begin_plan(self) -> None:
        """Prepare to look at each record, now that all of them are in memory."""
        self._names, self._name_ends, self.position = b"", np.zeros(0, np.uint32), 0
        self._looks_for_layers = True
        if self.lost:
            with self.node.lock:  # they were no hits after all
                self.node.counters.hits -= self.lost
                self.node.counters.misses += self.lost
                self.node.counters.lost += self.lost
        self._begins = np.zeros((len(self.layers), self.keys), np.uint32)
        self._lengths = np.zeros((len(self.layers), self.keys), np.uint32)

    @property
    def is_planned(self) -> bool:
        """Whether it is known where all layers are."""
        return self.flow is not None

    def _plan(self, begin: int, end: int) -> None:
        for place in range(begin, end):
            value = self.records[place]
            if value is None:
                continue
            try:
                bounds = record.layer_bounds(value)
            except ShadowServeError:  # it was checked when it was stored; so it is damage, and a miss
                self.records[place] = None
                continue
            there = self.layers < len(bounds) - 1
            wanted = self.layers[there].astype(np.int64)
            self._begins[there, place] = bounds[wanted]
            self._lengths[there, place] = bounds[wanted + 1] - bounds[wanted]
        if end < self.keys:
            return
        self.bits = (8 * (self._lengths.sum(1, dtype=np.int64) + 4 * self.keys)).tolist()
        layer_bytes = sum(self.bits) / 8 / len(self.layers)
        demand = Demand(layer_bytes, self.window_s, len(self.layers))
        self.flow = Flow(demand, self.limit, self.tenant, self.session.weight)

    def begin_reply(self) -> None:
        """Give the reply's beginning: of each key how many bytes follow."""
        null = b"_\r\n" if self.session.protocol == 3 else b"$-1\r\n"
        totals = self._lengths.sum(0, dtype=np.int64).tolist()
        answer = [encode_array_header(1 + len(self.layers)), encode_array_header(self.keys)]
        answer += [
            null if value is None else b":%d\r\n" % total for total, value in zip(totals, self.records, strict=True)
        ]
        self.head.resolve([b"".join(answer)])

    def layer(self, number: int) -> Outgoing:
        """Return a layer: the lengths of its pieces, 32 bits each, and the pieces, in the order of the keys."""
        lengths = self._lengths[number]
        table = lengths.astype("<u4").tobytes()
        size = self.bits[number] // 8
        places = np.flatnonzero(lengths)
        front = encode_bulk_header(size) + table + (b"" if len(places) else _TAIL)
        return _Layer(self, front, places, self._begins[number][places], lengths[places])

    def give(self) -> None:
        """Give the next layer to the connection."""
        layer = self.layer(self.given)
        self.given += 1
        self.parts[self.given - 1].resolve([layer])

    def end(self) -> None:
        """Answer the error to what is not given: to all of it, or in place of each layer; else nothing."""
        self.is_ended, self.is_active = True, False
        front = self.error
        if self.head.parts is None:
            self.head.failed = bool(front)
            self.head.resolve([front])
            front = b""
        while self.given < len(self.parts):
            self.given += 1
            self.parts[self.given - 1].resolve([_Layer(self, front, _NONE, _NONE, _NONE)])

    def release(self) -> None:
        """Let go of everything; with the node's lock held."""
        for held in self._held:
            if isinstance(held, Item):
                self.node.store.release(held)
            else:
                held.release()
        self._held, self.records = [], []
        self._begins = self._lengths = np.zeros((0, 0), np.uint32)
        self.account.close()

    def next_bits(self) -> int:
        """Return the bits of the next layer; 0 while the connection has enough, or all of them."""
        if self.given == len(self.parts) or self.given - self.sent >= _AHEAD:
            return 0
        return self.bits[self.given]

    def pace(self, now_s: float, after_s: float) -> float:
        """Return how many bits a second the client takes while there is something to take; infinite if not known yet.

        Args:
            now_s: the time.
            after_s: for how long there must have been something without a break.
        """
        if self.given == self.sent or not self.bits:
            self._unread_s = 0.0
            return inf
        taken = sum(self.bits[: self.sent]) + 8 * self.taken_bytes
        if not self._unread_s:
            self._unread_s, self._unread_bits = now_s, taken
        elapsed_s = now_s - self._unread_s
        return inf if elapsed_s < after_s else (taken - self._unread_bits) / elapsed_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is to be given."""
        return self.abandoned or bool(self.error) or self.given == len(self.parts)


_reads_lock: Final = threading.Lock()
