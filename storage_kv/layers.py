"""A whole prefix in one request, answered layer by layer (KV.LAYERS).

A request is a :class:`_Stream`: which records it wants, which layers of them, in which order. One thread does the work
of all streams, so that no client's thread looks a thousand keys up or waits for when a layer may go. It finds what
there is, holds what is in memory, has the rest read with one read an object, and waits for these: layer 0 needs all of
them, and before anything is sent it is clear which chunks are there. Then it gives layer after layer to the connection,
when the shaper says so, as one part that points to where the records are: nothing is copied, unless the pieces are
small.

What streams keep in memory together is bounded; beyond it they wait for each other, in their order, before they have
taken anything. A layer is given when the one before the last has been sent: a client that does not read holds up
itself.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from shadowserve import record
from shadowserve.errors import ShadowServeError
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address, Item, Lease
from shadowserve.resp import encode, encode_array_header, encode_bulk_header, encode_error
from storage_kv.egress import Demand
from storage_kv.node import REFERENCE_BYTES_MIN, Node, Part, Pending, Strip
from storage_kv.session import Session
from storage_kv.shaper import Flow, Link, Shaper

__all__ = ["KEYS_MAX", "LAYERS_MAX", "WINDOW_S_MIN", "LayerStreams"]

_log = logging.getLogger(__name__)

KEYS_MAX: Final = 8192
"""Of one request: 128K tokens in chunks of 16."""
LAYERS_MAX: Final = 1024
"""Of one request; a record has 65,535 at most, and a model some hundred."""
WINDOW_S_MIN: Final = 1e-4
"""What a window of no length is taken for: such a reader waits for every byte."""
_AHEAD: Final = 2
"""Layers that are given to a connection and not sent yet: one that is being sent, and the next."""


class _Part(Pending):
    """The head or a layer of a stream's reply."""

    __slots__ = ("_stream",)

    def __init__(self, node: Node, expects: int, stream: "_Stream") -> None:
        super().__init__(node, expects)
        self._stream = stream

    def abandon(self) -> None:
        super().abandon()
        self._stream.leave()


class _Stream:
    """One request.

    Attributes:
        bounds: of each layer and key, where its piece begins and ends.
        bytes: of all records that it keeps in memory.
        head: the reply's beginning.
        parts: its layers, in their order; those behind ``given`` are not known yet.
        flow: once all that it wants is in memory.
        error: reply to what is not given yet, where it cannot be: a bug of ours.
    """

    def __init__(
        self, node: Node, session: Session, keys: Sequence[Address], layers: Sequence[int], wake: Callable[[], None]
    ) -> None:
        self.node = node
        self.session = session
        self.keys = keys
        self.layers = layers
        self.limit, self.window_s = inf, WINDOW_S_MIN
        self.bytes = 0
        self.flow: Flow | None = None
        self.given = 0
        self.sent = 0
        self.abandoned = False
        self.error = b""
        self.reads = 0  # that are under way
        self.lost = 0  # that failed
        self.reserved_bytes = 0
        self.held: list[Item | Lease] = []
        self.records: list[memoryview | None] = [None] * len(keys)
        self.bounds: npt.NDArray[np.int64] = np.zeros((0, 0, 2), np.int64)
        self.bits: list[int] = []  # of each layer
        self._wake = wake
        self.head = _Part(node, 16 * len(keys), self)
        self.parts = [_Part(node, 4 * len(keys), self) for _ in layers]

    # ---- Told by others, with the node's lock held or not

    def leave(self) -> None:
        """Nobody wants the rest of it."""
        self.abandoned = True
        self._wake()

    def note_sent(self) -> None:
        """A layer is sent, or dropped; with the node's lock held."""
        if not self.abandoned and not self.error and self.bits:
            self.node.counters.layers_sent += 1
            self.node.counters.layer_bytes_sent += self.bits[self.sent] // 8
        self.sent += 1
        self._wake()

    # ---- By the thread of all streams

    def gather(self) -> None:
        """Hold what is in memory, and begin to read what is not."""
        for begin in range(0, len(self.keys), ENTRIES_PER_HOLD):
            if self.abandoned:
                return
            with self.node.lock:
                for place in range(begin, min(begin + ENTRIES_PER_HOLD, len(self.keys))):
                    self._take(place)

    def _take(self, place: int) -> None:
        store = self.node.store
        item = self.node.read(self.keys[place])
        if item is None or not item.head_bytes:
            return
        self.bytes += item.length
        if item.value is not None:
            store.hold(item)
            self.held.append(item)
            value = item.value
            self.records[place] = value if isinstance(value, memoryview) else memoryview(value)
            return
        self.reads += 1

        def done(lease: Lease | None) -> None:
            if lease is None:
                self.lost += 1
            else:
                self.held.append(lease)
                self.records[place] = lease.view
            self._read_ended()

        store.read(item, 0, item.length, done)

    def _read_ended(self) -> None:
        with _reads_lock:
            self.reads -= 1
            ended = not self.reads
        if ended:
            self._wake()

    def plan(self) -> None:
        """Find out where the layers of each record are, now that all of them are in memory."""
        if self.lost:
            with self.node.lock:  # they were no hits after all
                self.node.counters.hits -= self.lost
                self.node.counters.misses += self.lost
                self.node.counters.lost += self.lost
        self.bounds = np.zeros((len(self.layers), len(self.keys), 2), np.int64)
        wanted = np.array(self.layers)
        for place, view in enumerate(self.records):
            if view is None:
                continue
            try:
                ends = record.layer_bounds(view)
            except ShadowServeError:  # it was checked when it was stored; so it is damage, and a miss
                self.records[place] = None
                continue
            there = wanted < len(ends) - 1
            self.bounds[there, place, 0] = ends[wanted[there]]
            self.bounds[there, place, 1] = ends[wanted[there] + 1]
        lengths = self.bounds[:, :, 1] - self.bounds[:, :, 0]
        self.bits = (8 * (lengths.sum(1) + 4 * len(self.keys))).tolist()
        layer_bytes = sum(self.bits) / 8 / len(self.layers)
        self.flow = Flow(Demand(layer_bytes, self.window_s, len(self.layers)), self.limit)
        totals = lengths.sum(0).tolist()
        there_is = [total if view is not None else None for total, view in zip(totals, self.records, strict=True)]
        answer = encode_array_header(1 + len(self.layers)) + encode(there_is, self.session.protocol)
        self.head.resolve([answer])

    def layer(self, number: int) -> Strip:
        """Return a layer: the lengths of its pieces, 32 bits each, and the pieces, in the order of the keys."""
        bounds = self.bounds[number]
        lengths = bounds[:, 1] - bounds[:, 0]
        table = lengths.astype("<u4").tobytes()
        size = int(lengths.sum())
        views: list[bytes | memoryview] = [encode_bulk_header(len(table) + size) + table]
        pieces = [
            view[begin:end]
            for view, (begin, end) in zip(self.records, bounds.tolist(), strict=True)
            if view is not None and end > begin
        ]
        if pieces and size < REFERENCE_BYTES_MIN * len(pieces):
            views = [b"".join([*views, *pieces])]
        else:
            views += pieces
        return Strip([*views, b"\r\n"], self, self.bytes, self.note_sent)

    def give(self) -> None:
        """Give the next layer to the connection."""
        layer = self.layer(self.given)
        self.given += 1
        self.parts[self.given - 1].resolve([layer])

    def end(self, reply: bytes) -> None:
        """Answer ``reply`` to what is not given: to all of it, or in place of each layer; nothing where nobody asks."""
        layer = [reply] if reply else []
        if self.head.parts is None:
            self.head.failed = bool(reply)
            self.head.resolve([reply])
            layer = []
        while self.given < len(self.parts):
            self.given += 1
            self.parts[self.given - 1].resolve([Strip(layer, self, self.bytes, self.note_sent)])

    def release(self) -> None:
        """Let go of the records; with the node's lock held."""
        for held in self.held:
            if isinstance(held, Item):
                self.node.store.release(held)
            else:
                held.release()
        self.held, self.records = [], []

    def next_bits(self) -> int:
        """Return the bits of the next layer; 0 while the connection has enough, or all of them."""
        if self.given == len(self.parts) or self.given - self.sent >= _AHEAD:
            return 0
        return self.bits[self.given]

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is to be sent."""
        return self.abandoned or bool(self.error) or self.given == len(self.parts)


_reads_lock: Final = threading.Lock()


class LayerStreams:
    """All streams of a node, and the thread that serves them."""

    def __init__(self, node: Node) -> None:
        """Begin nothing before :meth:`start`."""
        self._node = node
        self._shaper = Shaper(self._link)
        self.others = self._shaper.others
        self._changed = threading.Condition()
        self._has_changed = self._stopped = False
        self._new: list[_Stream] = []
        self._waiting: deque[_Stream] = deque()
        self._reading: list[_Stream] = []
        self._active: list[_Stream] = []
        self._ending: list[_Stream] = []
        self._reserved_bytes = 0
        self._thread = threading.Thread(target=self._run, name="layers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, once no connection is served any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def begin(
        self, session: Session, keys: Sequence[Address], layers: Sequence[int], limit: float, window_s: float
    ) -> list[Part]:
        """Return the parts of a reply to a request for layers of records; with the node's lock held.

        Args:
            session: whose it is.
            keys: of the records, qualified, in the order of the prefix.
            layers: numbers, in the order in which they are wanted.
            limit: bits a second at most; infinite for no limit.
            window_s: seconds that the client computes with each layer.
        """
        stream = _Stream(self._node, session, keys, layers, self._wake)
        stream.limit, stream.window_s = limit, max(window_s, WINDOW_S_MIN)
        self._node.counters.layer_streams += 1
        with self._changed:
            self._new.append(stream)
            self._has_changed = True
            self._changed.notify()
        return [stream.head, *stream.parts]

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return len(self._reading) + len(self._active) + len(self._ending)

    @property
    def waiting(self) -> int:
        """Requests that wait for others to end."""
        return len(self._new) + len(self._waiting)

    def _wake(self) -> None:
        with self._changed:
            if not self._has_changed:
                self._has_changed = True
                self._changed.notify()

    def _link(self) -> Link:
        config = self._node.config
        budget = config.egress_bits_per_s
        return Link(budget, config.egress_policy, config.egress_margin * budget, config.egress_epoch_s)

    # ---- The thread

    def _run(self) -> None:
        wait_s = inf
        while True:
            with self._changed:
                if not self._has_changed and not self._stopped:
                    self._changed.wait(None if wait_s == inf else wait_s)
                self._has_changed = False
                self._waiting += self._new
                self._new = []
                if self._stopped:
                    break
            try:
                wait_s = self._step()
            except Exception:  # a bug of ours, and not in one stream's work: no client may be left waiting
                self._fail_all()
                wait_s = 0.0
        streams = [*self._waiting, *self._reading, *self._active, *self._ending]
        with self._node.lock:
            for stream in streams:
                stream.release()

    def _does(self, stream: _Stream, work: Callable[[], None]) -> bool:
        """Return whether some of a stream's work was done; a bug of ours costs this stream alone."""
        try:
            work()
        except Exception:
            self._fail([stream])
        return not stream.error

    def _fail(self, streams: Sequence[_Stream]) -> None:
        """Take note that streams cannot be gone on with, within the handling of an error."""
        _log.exception("layers_failed")
        for stream in streams:
            stream.error = encode_error("ERR KV.LAYERS failed, and the server's log says why: ask for the records")
        with self._node.lock:
            self._node.counters.layer_streams_failed += len(streams)

    def _fail_all(self) -> None:
        streams = [*self._waiting, *self._reading, *self._active]
        self._fail(streams)
        self._waiting.clear()
        self._reading, self._active = [], []
        self._shaper.clear()
        for stream in streams:
            self._let_go(stream, stream.error)

    def _step(self) -> float:
        """Do what can be done now; return the seconds until there may be more to do without anybody's word."""
        self._end_some()
        self._admit_some()
        for stream in [each for each in self._reading if not each.reads]:
            self._reading.remove(stream)
            if stream.abandoned or not self._does(stream, stream.plan):
                self._let_go(stream, stream.error)
                continue
            self._active.append(stream)
            assert stream.flow is not None
            self._shaper.enter(stream.flow, time.monotonic())
        return self._send_some()

    def _send_some(self) -> float:
        while True:
            now_s = time.monotonic()
            throttled_s = inf
            by_flow = {}
            for stream in self._active:
                assert stream.flow is not None
                wait_s = self._throttled_s(stream, now_s)
                throttled_s = min(throttled_s, wait_s or inf)
                stream.flow.next_bits = 0 if wait_s else stream.next_bits()
                by_flow[stream.flow] = stream
            ready = self._shaper.ready(now_s)
            for flow in ready:
                self._shaper.spend(flow)
                self._does(by_flow[flow], by_flow[flow].give)
            for stream in [each for each in self._active if each.is_over]:
                assert stream.flow is not None
                self._active.remove(stream)
                self._shaper.leave(stream.flow)
                self._let_go(stream, stream.error)
            if not ready:
                return min(throttled_s, self._shaper.wait_s(now_s))

    def _throttled_s(self, stream: _Stream, now_s: float) -> float:
        """Return for how long the rates of a stream's tenant let nothing more be sent."""
        limiter = stream.session.limiter
        if limiter is None:
            return 0.0
        with self._node.lock:
            return limiter.wait_s(now_s)

    def _admit_some(self) -> None:
        """Begin those that wait, in their order, as far as there is room for what they keep."""
        while self._waiting:
            stream = self._waiting[0]
            if not stream.abandoned and not stream.bytes:
                stream.bytes = self._size_of(stream)
            bytes_max = self._node.lent.share(stream.session.share)
            if stream.abandoned:
                self._let_go(stream, b"")
            elif stream.bytes > bytes_max:
                text = f"OOM these records have {stream.bytes} bytes, and at most {bytes_max} are sent at a time"
                self._let_go(stream, encode_error(text + ": ask for fewer keys"))
            elif self._reserved_bytes and self._reserved_bytes + stream.bytes > bytes_max:
                return
            else:
                self._reserve(stream)
                stream.bytes = 0
                if self._does(stream, stream.gather):
                    self._reading.append(stream)
                else:
                    self._let_go(stream, stream.error)
            self._waiting.popleft()

    def _size_of(self, stream: _Stream) -> int:
        size = 0
        for begin in range(0, len(stream.keys), ENTRIES_PER_HOLD):
            with self._node.lock:
                for key in stream.keys[begin : begin + ENTRIES_PER_HOLD]:
                    item = self._node.store.peek(key)
                    size += 0 if item is None else item.length
        return size

    def _reserve(self, stream: _Stream) -> None:
        self._reserved_bytes += stream.bytes
        stream.reserved_bytes = stream.bytes
        with self._node.lock:
            self._node.lent.pin(id(stream), stream.bytes, stream.session.share)

    def _let_go(self, stream: _Stream, reply: bytes) -> None:
        """End a stream once what it has given is sent."""
        stream.end(reply)
        self._ending.append(stream)

    def _end_some(self) -> None:
        """Release what those that have ended kept."""
        ended = [stream for stream in self._ending if stream.sent == len(stream.parts) and not stream.reads]
        if not ended:
            return
        self._ending = [stream for stream in self._ending if stream not in ended]
        for stream in ended:
            with self._node.lock:
                stream.release()
                if stream.reserved_bytes:
                    self._node.lent.unpin(id(stream))
            self._reserved_bytes -= stream.reserved_bytes
