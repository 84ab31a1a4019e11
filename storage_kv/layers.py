"""Replies to KV.LAYERS: the records of a prefix, layer by layer. One thread works on all of them.

A request is a :class:`Stream`. Its states and the queues that hold it here::

    _new -> _working: add up the sizes of its records
         -> _waiting: until its tenant may keep that many bytes in memory
         -> _working: hold records in memory, start to read the others, or the headers of large ones
         -> _reading: until all reads have ended
         -> _working: find the layers in each record
         -> _active:  send layer after layer, when it is in memory and the shaper allows it
         -> _ending:  until the connection has sent all of it; then it is released

The reply begins with the sizes of all records, so their headers come first. Small records are read whole before that,
the layers of large ones while others are sent (layer_ranges.py). A layer is one part of the reply that points to the
records: only small pieces are copied. It is resolved when the layer before the last has been sent, so a client that
does not read delays only itself.

Tenants take turns, then clients (fair_queue.py), for work on some keys and for room in memory. A stream that cannot be
sent within ``layers_timeout_s`` is refused at once. One that takes longer, or whose client reads more slowly than
``layers_bits_per_s_min``, ends with an error.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from shadowserve.fair_queue import FairQueue
from shadowserve.pool.volume.tickets import BusyError, Ticket
from shadowserve.resp import encode_error
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import Account, MemoryBudget
from storage_kv.layer_stream import WINDOW_S_MIN, Stream, memory_of
from storage_kv.node import Node
from storage_kv.reply import CommandError, Part
from storage_kv.session import Session
from storage_kv.shaper import Link, Shaper

_log = logging.getLogger(__name__)

KEYS_MAX: Final = 8192
"""Keys in one request: 128K tokens in chunks of 16."""
LAYERS_MAX: Final = 1024
"""Layers in one request; a model has about a hundred."""
_STREAMS_OF_TENANT_MAX: Final = 256
"""Streams of one tenant that keep records in memory: each costs the thread some microseconds a layer."""
_CHECK_INTERVAL_S: Final = 1.0  # interval of the checks for late and slow streams
_PACE_S: Final = 5.0  # time for which a client may read more slowly than the lowest rate
_SOON_S: Final = 0.1  # the node's load has what a stream's limit lets it send in this time,
_READ_S: Final = 1.0  # and at most what its client has read in this one
_ERROR_GRACE_S: Final = 5.0  # time for a client to read what was sent before an error; then its connection is aborted


class _Room:
    """Waits for room in a tenant's share of the lent budget, for the tenant's next stream."""

    moved_bytes = 0

    def __init__(self, lent: MemoryBudget, share: int, wake: Callable[[], None]) -> None:
        self._account = Account(lent, self, share)
        self._wake = wake
        self._waits = False

    def admits(self, size: int) -> bool:
        """Return True if there is room; otherwise wake the thread when there may be. Needs the node's lock."""
        if not self._waits:
            self._waits = not self._account.admit(size)
        return not self._waits

    def on_room(self) -> None:
        self._waits = False
        self._wake()

    def evict(self, held_bytes: int) -> None:
        """Do nothing: it holds nothing."""


class LayerStreams:
    """All streams of a node, and their thread; ``others`` are the rates of all other replies."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shaper = Shaper(self._link)
        self.others = self._shaper.others
        self._changed = threading.Condition()
        self._has_changed = self._stopped = False
        self._new: list[Stream] = []
        self._working: FairQueue[Stream] = FairQueue()
        self._waiting: FairQueue[Stream] = FairQueue()
        self._rooms: dict[int, _Room] = {}  # by tenant
        self._reading: list[Stream] = []
        self._lines: dict[int, deque[Stream]] = {}  # streams of each session, in the order of its requests
        self._active: list[Stream] = []
        self._ending: list[Stream] = []
        self._of_tenant: dict[int, int] = {}  # number of streams with records in memory
        self.active = self._unadmitted = 0
        self._checked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="layers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No connection may be served any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def open(
        self, session: Session, names: Sequence[bytes], layers: Sequence[int], limit: float, window_s: float
    ) -> list[Part]:
        """Start a request for layers of records, both in their order; return the parts of its reply.

        ``limit``: highest rate in bits per second, infinite for none. ``window_s``: time that the client computes with
        each layer. Needs the node's lock.
        """
        memory, size = self._node.memory, memory_of(names, layers)
        used, used_max = memory.used_by(session.share), memory.share(session.share)
        if used + size > used_max:
            # Waiting could deadlock: waiting requests hold memory too.
            raise CommandError(
                f"OOM this request needs {size} bytes of memory, and its tenant holds {used} of {used_max} "
                "(clients_memory_bytes_max): ask for fewer keys or layers, or try again"
            )
        account = session.hooks.admit(size)
        if account is None:
            raise BusyError("no memory for a request for layers", Ticket())
        stream = Stream(self._node, session, names, layers, account, self._wake)
        stream.limit, stream.window_s = limit, max(window_s, WINDOW_S_MIN)
        stream.ends_s = time.monotonic() + self._node.config.layers_timeout_s
        self._node.counters.layer_streams += 1
        with self._changed:
            self._new.append(stream)
            self._has_changed = True
            self._changed.notify()
        return [stream.head, *stream.parts]

    @property
    def waiting(self) -> int:
        return len(self._new) + self._unadmitted

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
                new, self._new = self._new, []
                if self._stopped:
                    break
            for stream in new:
                self._working.add(stream.tenant, stream.session.id, stream)
                self._lines.setdefault(stream.session.id, deque()).append(stream)
            self._unadmitted += len(new)
            del new  # keeps no reference to them while the thread waits
            try:
                wait_s = self._step()
            except Exception:  # a bug outside of one stream's work: no client may wait forever
                self._fail_all()
                wait_s = 0.0
        with self._node.lock:
            for stream in [*new, *self._all()]:
                while not stream.reads and not stream.release():  # running reads still write; the process ends soon
                    pass

    def _all(self) -> list[Stream]:
        return [*self._working, *self._waiting, *self._reading, *self._active, *self._ending]

    def _run_step(self, stream: Stream, work: Callable[[], object]) -> bool:
        """Do some work of a stream; return True if it succeeded. A bug costs only this stream."""
        try:
            work()
        except Exception:
            self._fail([stream])
        return not stream.error

    def _fail(self, streams: Sequence[Stream]) -> None:
        """Fail streams because of the exception that is being handled."""
        _log.exception("layers_failed")
        for stream in streams:
            stream.error = encode_error(
                "ERR KV.LAYERS failed because of a bug; the server's log has the details. Request the records with GET"
            )
        with self._node.lock:
            self._node.counters.layer_streams_failed += len(streams)

    def _fail_all(self) -> None:
        streams = [stream for stream in self._all() if not stream.is_ended]
        self._fail(streams)
        self._working, self._waiting = FairQueue(), FairQueue()
        self._reading, self._active, self._lines = [], [], {}
        self._shaper.clear()
        for stream in streams:
            stream.has_link_share = False
            self._finish(stream)

    def _step(self) -> float:
        """Do the work that is possible now; return the seconds until there may be more without a notification."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._check(now_s)
        self._release_sent()
        self._work_on_keys()
        self._admit_waiting()
        for stream in [each for each in self._reading if not each.reads]:
            self._reading.remove(stream)
            if self._run_step(stream, stream.begin_layout) and not stream.abandoned:
                self._working.add(stream.tenant, stream.session.id, stream)
            else:
                self._finish(stream)
        has_more = [stream for stream in self._active if self._works_ahead(stream)]
        wait_s = self._send_layers()
        soon_bits = sum(min(stream.unsent_bits, stream.soon_bits_max) for stream in self._active)
        self._node.load.layers_bytes = int(soon_bits / 8)
        if self._working or has_more:
            return 0.0
        return min(wait_s, _CHECK_INTERVAL_S) if self.active or self._unadmitted or self._ending else inf

    def _works_ahead(self, stream: Stream) -> bool:
        """Begin reads for later layers, and release sent ones; return True if more is to do at once."""
        more = False

        def begin() -> None:
            nonlocal more
            more = stream.far.work(stream.records)

        return self._run_step(stream, begin) and more

    # ---- Beginning

    def _work_on_keys(self) -> None:
        """Work on some keys of one stream of each tenant."""
        for tenant in self._working.tenants():
            stream = self._working.first(tenant)
            assert stream is not None
            is_done = (
                stream.is_over or not self._run_step(stream, stream.work_on_keys) or stream.position == stream.keys
            )
            self._working.charge(tenant, 1, stream.session.weight, done=is_done)
            if not is_done:
                continue
            if stream.is_over:
                self._finish(stream)
            elif stream.bits:
                self._begin_flow(stream)
            elif stream.is_reserved:
                self._reading.append(stream)
            else:
                self._waiting.add(tenant, stream.session.id, stream)

    def _admit_waiting(self) -> None:
        for tenant in self._waiting.tenants():
            while (stream := self._waiting.first(tenant)) is not None:
                if not (stream.is_over or self._reserve(stream)):
                    break
                self._waiting.charge(tenant, stream.sized_bytes, stream.session.weight)
                if stream.is_over:
                    self._finish(stream)
                else:
                    self._working.add(tenant, stream.session.id, stream)

    def _reserve(self, stream: Stream) -> bool:
        """Return True if a stream need not wait any more: its records are counted, or it has an error."""
        tenant, lent = stream.tenant, self._node.lent
        if self._of_tenant.get(tenant, 0) >= _STREAMS_OF_TENANT_MAX:
            return False
        size, far = stream.sized_bytes, stream.far
        near = size - far.needed_bytes
        with self._node.lock:
            size_max = lent.share(stream.share)
            if near + far.possible_bytes > size_max:
                text = f"OOM these records have {size} bytes, and at most {size_max} can be sent at a time"
                stream.error = encode_error(text + ": request fewer keys")
                return True
            if size > size_max or not lent.has_room(stream.share, size):
                size = min(near + far.least_bytes, size_max)
            room = self._rooms.get(tenant)
            if room is None:
                room = self._rooms[tenant] = _Room(lent, stream.share, self._wake)
            if not room.admits(size):
                return False
            lent.pin(id(stream), size, stream.share)
        stream.reserve(size)
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1
        self.active += 1
        self._unadmitted -= 1
        return True

    # ---- Sending

    def _begin_flow(self, stream: Stream) -> None:
        """Start to send a stream whose layers are known, unless it could not be sent in time."""
        rate = stream.rate_max
        needs_s, left_s = sum(stream.bits) / rate, stream.ends_s - time.monotonic()
        if needs_s > left_s:
            self._give_up(
                stream, f"it needs {needs_s:.1f} s at {rate:.0f} bits per second, and {left_s:.1f} s are left"
            )
            self._finish(stream)
        elif self._run_step(stream, stream.begin_reply):
            stream.is_active, stream.soon_bits_max = True, rate * _SOON_S
            self._active.append(stream)
            self._begin_next(stream.session.id)
        else:
            self._finish(stream)

    def _begin_next(self, session: int) -> None:
        """Let the first unfinished stream of a session enter the shaper, if its layers are known."""
        line = self._lines.get(session)
        while line and line[0].is_over:
            line.popleft()
        if not line:
            self._lines.pop(session, None)
        elif line[0].flow is not None and not line[0].has_link_share:
            line[0].has_link_share = True
            self._shaper.enter(line[0].flow, time.monotonic())

    def _send_layers(self) -> float:
        while self._active:
            now_s = time.monotonic()
            throttled: dict[RateLimiter, float] = {}
            by_flow = {}
            for stream in self._active:
                if stream.has_link_share:
                    assert stream.flow is not None
                    wait_s = self._throttled_s(stream.session.limiter, now_s, throttled)
                    stream.flow.next_bits = 0 if wait_s else stream.next_bits()
                    by_flow[stream.flow] = stream
            ready = self._shaper.ready(now_s)
            for flow in ready:
                self._shaper.spend(flow)
                self._run_step(by_flow[flow], by_flow[flow].resolve_next)
            over = [each for each in self._active if each.is_over]
            for stream in over:
                self._active.remove(stream)
                self._finish(stream)
            if not ready and not over:
                throttled_s = min((wait_s for wait_s in throttled.values() if wait_s), default=inf)
                return min(throttled_s, self._shaper.wait_s(now_s))
        return inf

    def _throttled_s(self, limiter: RateLimiter | None, now_s: float, known: dict[RateLimiter, float]) -> float:
        if limiter is None:
            return 0.0
        if limiter not in known:
            with self._node.lock:
                known[limiter] = limiter.wait_s(now_s)
        return known[limiter]

    # ---- The end

    def _check(self, now_s: float) -> None:
        """Fail streams that are late or slow; finish those whose client has disconnected."""
        least = self._node.config.layers_bits_per_s_min
        for stream in self._all():
            if not stream.abort_s:
                stream.soon_bits_max = min(stream.rate_max * _SOON_S, stream.pace(now_s, _READ_S) * _READ_S)
                if now_s > stream.ends_s:
                    self._give_up(stream, f"it took longer than {self._node.config.layers_timeout_s:g} s")
                elif (pace := stream.pace(now_s, _PACE_S)) < least:
                    self._give_up(stream, f"its client reads {pace:.0f} bits per second; the minimum is {least:.0f}")
            if stream.is_over and not stream.is_active:
                if stream in self._reading:
                    self._reading.remove(stream)
                self._finish(stream)  # a queue skips it at its turn

    def _give_up(self, stream: Stream, why: str) -> None:
        """Answer the rest of a stream with an error; abort its connection if the client does not read that."""
        stream.error = encode_error(f"TIMEOUT KV.LAYERS has ended: {why}")
        stream.abort_s = time.monotonic() + _ERROR_GRACE_S
        with self._node.lock:
            self._node.counters.layer_streams_closed += 1
            self._node.warn_limited("layers_closed", stream.session.address, why)

    def _finish(self, stream: Stream) -> None:
        """Resolve the rest of a stream; it is released when all is sent."""
        if stream.is_ended:
            return
        if stream.has_link_share:
            stream.has_link_share = False
            assert stream.flow is not None
            self._shaper.leave(stream.flow)
        stream.end()
        self._ending.append(stream)
        self._begin_next(stream.session.id)

    def _release_sent(self) -> None:
        """Release streams that are sent; abort connections that do not read an error."""
        now_s = time.monotonic()
        ended = [stream for stream in self._ending if stream.sent == len(stream.parts) and not stream.reads]
        for stream in self._ending:
            if stream.abort_s and now_s > stream.abort_s and stream.sent < len(stream.parts):
                stream.session.hooks.abort()
        if not ended:
            return
        self._ending = [stream for stream in self._ending if stream not in ended]
        for stream in ended:
            is_released = False
            while not is_released:
                with self._node.lock:
                    is_released = stream.release()
                    if is_released and stream.is_reserved:
                        self._node.lent.unpin(id(stream))
            if not stream.is_reserved:
                self._unadmitted -= 1
                continue
            self.active -= 1
            self._of_tenant[stream.tenant] -= 1
            if not self._of_tenant[stream.tenant]:
                del self._of_tenant[stream.tenant]
                self._rooms.pop(stream.tenant, None)
