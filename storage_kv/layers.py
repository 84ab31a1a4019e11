"""A whole prefix in one request, answered layer by layer (KV.LAYERS).

A request is a :class:`Stream`: which records it wants, which layers of them, in which order. One thread does the work
of all streams, so that no client's thread looks a thousand keys up or waits for when a layer may go. It finds what
there is, holds what is in memory, has the rest read with one read an object, and waits for these: layer 0 needs all of
them, and before anything is sent it is clear which chunks are there. Then it gives layer after layer to the connection,
when the shaper says so, as one part that points to where the records are: nothing is copied, unless the pieces are
small.

What streams keep in memory counts against their tenant's share. Those for which there is no room wait, in turn by
tenant, then by client (turns.py), before they have taken anything; and the thread works on some keys of each tenant in
turn. A layer is given when the one before the last has been sent: a client that does not read holds up itself.

A stream ends. What could not be sent within ``layers_timeout_s`` is refused before anything is sent, and what is late
all the same is answered with an error; so is a client that takes less than ``layers_bits_per_s_min``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from shadowserve.pool.volume.changes import BusyError, Ticket
from shadowserve.resp import encode_error
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import Account, Bound
from storage_kv.layer_stream import WINDOW_S_MIN, Stream, memory_of
from storage_kv.node import CommandError, Node, Part
from storage_kv.session import Session
from storage_kv.shaper import Link, Shaper
from storage_kv.turns import Turns

_log = logging.getLogger(__name__)

KEYS_MAX: Final = 8192
"""Of one request: 128K tokens in chunks of 16."""
LAYERS_MAX: Final = 1024
"""Of one request; a record has 65,535 at most, and a model some hundred."""
_OF_TENANT_MAX: Final = 256
"""Streams of one tenant that keep records in memory at one time: each costs the thread some microseconds a layer."""
_LOOK_S: Final = 1.0
"""How often is looked for streams that are late or slow."""
_PACED_S: Final = 5.0
"""For which a client may take nothing, or less than the least rate."""
_LAST_WORDS_S: Final = 5.0
"""For a client that has been answered an error in place of layers to take what was given before; then it is cut."""


class _Room:
    """Waits for room in a tenant's share of what may be lent, for whichever of its streams is next."""

    moved_bytes = 0

    def __init__(self, lent: Bound, share: int, wake: Callable[[], None]) -> None:
        self._account = Account(lent, self, share)
        self._wake = wake
        self._waits = False

    def admits(self, size: int) -> bool:
        """Return whether there is room now; else the thread is woken when there may be. With the node's lock held."""
        if not self._waits:
            self._waits = not self._account.admit(size)
        return not self._waits

    def on_memory(self) -> None:
        self._waits = False
        self._wake()

    def end_for_memory(self, held_bytes: int) -> None:
        """Do nothing: it holds nothing itself."""


class LayerStreams:
    """All streams of a node, and the thread that serves them."""

    def __init__(self, node: Node) -> None:
        """Begin nothing before :meth:`start`."""
        self._node = node
        self._shaper = Shaper(self._link)
        self.others = self._shaper.others
        self._changed = threading.Condition()
        self._has_changed = self._stopped = False
        self._new: list[Stream] = []
        self._working: Turns[Stream] = Turns()  # their keys are gone through, some at a time
        self._waiting: Turns[Stream] = Turns()  # for room
        self._rooms: dict[int, _Room] = {}  # of tenants of which a stream has waited for room
        self._reading: list[Stream] = []  # what they want is on its way
        self._lines: dict[int, deque[Stream]] = {}  # of each session, in the order of its requests
        self._active: list[Stream] = []
        self._ending: list[Stream] = []
        self._of_tenant: dict[int, int] = {}  # how many streams keep records in memory
        self._admitted = self._unadmitted = 0
        self._looked_s = 0.0
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
        self, session: Session, names: Sequence[bytes], layers: Sequence[int], limit: float, window_s: float
    ) -> list[Part]:
        """Return the parts of a reply to a request for layers of records; with the node's lock held.

        Args:
            session: whose it is.
            names: of the records, in the order of the prefix.
            layers: numbers, in the order in which they are wanted.
            limit: bits a second at most; infinite for no limit.
            window_s: seconds that the client computes with each layer.

        Raises:
            CommandError: its tenant would hold more memory than it may.
            BusyError: other tenants hold so much that there is no room yet.
        """
        memory, size = self._node.memory, memory_of(names, len(layers))
        used, used_max = memory.used_by(session.share), memory.share(session.share)
        if used + size > used_max:
            # To wait would not do: what waits is held as well, and what it waits for might be held by such as wait.
            raise CommandError(
                f"OOM this request takes {size} bytes of memory, and its tenant holds {used} of {used_max} "
                "(clients_memory_bytes_max): ask for fewer keys or layers, or try again"
            )
        account = session.admit(size)
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
    def active(self) -> int:
        """Requests that are being answered."""
        return self._admitted

    @property
    def waiting(self) -> int:
        """Requests that wait for others to end."""
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
            del new  # or they would be kept for as long as nothing happens
            try:
                wait_s = self._step()
            except Exception:  # a bug of ours, and not in one stream's work: no client may be left waiting
                self._fail_all()
                wait_s = 0.0
        with self._node.lock:
            for stream in [*new, *self._alive()]:
                if not stream.reads:  # what is on its way still ends in the stream, and the process ends soon
                    stream.release()

    def _alive(self) -> list[Stream]:
        """Return all streams but those that have come since the last step."""
        return [*self._working, *self._waiting, *self._reading, *self._active, *self._ending]

    def _does(self, stream: Stream, work: Callable[[], object]) -> bool:
        """Return whether some of a stream's work was done; a bug of ours costs this stream alone."""
        try:
            work()
        except Exception:
            self._fail([stream])
        return not stream.error

    def _fail(self, streams: Sequence[Stream]) -> None:
        """Take note that streams cannot be gone on with, within the handling of an error."""
        _log.exception("layers_failed")
        for stream in streams:
            stream.error = encode_error("ERR KV.LAYERS failed, and the server's log says why: ask for the records")
        with self._node.lock:
            self._node.counters.layer_streams_failed += len(streams)

    def _fail_all(self) -> None:
        streams = [stream for stream in self._alive() if not stream.is_ended]
        self._fail(streams)
        self._working, self._waiting = Turns(), Turns()
        self._reading, self._active, self._lines = [], [], {}
        self._shaper.clear()
        for stream in streams:
            stream.flows = False
            self._let_go(stream)

    def _step(self) -> float:
        """Do what can be done now; return the seconds until there may be more to do without anybody's word."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look(now_s)
        self._end_some()
        self._work_some()
        self._admit_some()
        for stream in [each for each in self._reading if not each.reads]:
            self._reading.remove(stream)
            if self._does(stream, stream.begin_plan) and not stream.abandoned:
                self._working.add(stream.tenant, stream.session.id, stream)
            else:
                self._let_go(stream)
        wait_s = self._send_some()
        if self._working:
            return 0.0
        return min(wait_s, _LOOK_S) if self._admitted or self._unadmitted or self._ending else inf

    # ---- Beginning

    def _work_some(self) -> None:
        """Go through some keys of a stream of each tenant."""
        for tenant in self._working.tenants():
            stream = self._working.first(tenant)
            assert stream is not None
            is_done = stream.is_over or not self._does(stream, stream.go_on) or stream.position == stream.keys
            self._working.charge(tenant, 1, stream.session.weight, takes=is_done)
            if not is_done:
                continue
            if stream.is_over:
                self._let_go(stream)
            elif stream.is_planned:
                self._begin_flow(stream)
            elif stream.is_reserved:
                self._reading.append(stream)
            else:
                self._waiting.add(tenant, stream.session.id, stream)

    def _admit_some(self) -> None:
        """Begin those that wait, in turn, as far as there is room for what they keep."""
        for tenant in self._waiting.tenants():
            while (stream := self._waiting.first(tenant)) is not None:
                if not (stream.is_over or self._reserve(stream)):
                    break
                self._waiting.charge(tenant, stream.sized_bytes, stream.session.weight)
                if stream.is_over:
                    self._let_go(stream)
                else:
                    self._working.add(tenant, stream.session.id, stream)

    def _reserve(self, stream: Stream) -> bool:
        """Return whether a stream waits no more: what it keeps is counted, or it has an error."""
        tenant, lent = stream.tenant, self._node.lent
        if self._of_tenant.get(tenant, 0) >= _OF_TENANT_MAX:
            return False
        size = stream.sized_bytes
        with self._node.lock:
            size_max = lent.share(stream.share)
            if size > size_max:
                text = f"OOM these records have {size} bytes, and at most {size_max} are sent at a time"
                stream.error = encode_error(text + ": ask for fewer keys")
                return True
            room = self._rooms.get(tenant)
            if room is None:
                room = self._rooms[tenant] = _Room(lent, stream.share, self._wake)
            if not room.admits(size):
                return False
            lent.pin(id(stream), size, stream.share)
        stream.reserve()
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1
        self._admitted += 1
        self._unadmitted -= 1
        return True

    # ---- Sending

    def _begin_flow(self, stream: Stream) -> None:
        """Begin to send a stream whose layers are known, unless it could not be sent in time."""
        limiter = stream.session.limiter
        rate = min(stream.limit, inf if limiter is None else 8 * limiter.bytes_per_s)
        needs_s, left_s = sum(stream.bits) / rate, stream.ends_s - time.monotonic()
        if needs_s > left_s:
            self._close(stream, f"it takes {needs_s:.1f} s at {rate:.0f} bits a second, and {left_s:.1f} s are left")
            self._let_go(stream)
        elif self._does(stream, stream.begin_reply):
            stream.is_active = True
            self._active.append(stream)
            self._begin_next(stream.session.id)
        else:
            self._let_go(stream)

    def _begin_next(self, session: int) -> None:
        """Let the first of a session's streams that are not over have its part of the link, if it is known."""
        line = self._lines.get(session)
        while line and line[0].is_over:
            line.popleft()
        if not line:
            self._lines.pop(session, None)
        elif line[0].flow is not None and not line[0].flows:
            line[0].flows = True
            self._shaper.enter(line[0].flow, time.monotonic())

    def _send_some(self) -> float:
        while self._active:
            now_s = time.monotonic()
            throttled: dict[RateLimiter, float] = {}
            by_flow = {}
            for stream in self._active:
                if stream.flows:
                    assert stream.flow is not None
                    wait_s = self._throttled_s(stream.session.limiter, now_s, throttled)
                    stream.flow.next_bits = 0 if wait_s else stream.next_bits()
                    by_flow[stream.flow] = stream
            ready = self._shaper.ready(now_s)
            for flow in ready:
                self._shaper.spend(flow)
                self._does(by_flow[flow], by_flow[flow].give)
            over = [each for each in self._active if each.is_over]
            for stream in over:
                self._active.remove(stream)
                self._let_go(stream)
            if not ready and not over:
                throttled_s = min((wait_s for wait_s in throttled.values() if wait_s), default=inf)
                return min(throttled_s, self._shaper.wait_s(now_s))
        return inf

    def _throttled_s(self, limiter: RateLimiter | None, now_s: float, known: dict[RateLimiter, float]) -> float:
        """Return for how long the rates of a tenant let nothing more be sent."""
        if limiter is None:
            return 0.0
        if limiter not in known:
            with self._node.lock:
                known[limiter] = limiter.wait_s(now_s)
        return known[limiter]

    # ---- The end

    def _look(self, now_s: float) -> None:
        """Close streams that are late, or whose clients take too little; let go of those that nobody waits for."""
        least = self._node.config.layers_bits_per_s_min
        for stream in self._alive():
            if not stream.cut_s:
                if now_s > stream.ends_s:
                    self._close(stream, f"it has taken longer than {self._node.config.layers_timeout_s:g} s")
                elif (pace := stream.pace(now_s, _PACED_S)) < least:
                    self._close(stream, f"its client takes {pace:.0f} bits a second, and {least:.0f} are the least")
            if stream.is_over and not stream.is_active:
                if stream in self._reading:
                    self._reading.remove(stream)
                self._let_go(stream)  # where it waits, it is passed over when its turn comes

    def _close(self, stream: Stream, why: str) -> None:
        """Give a stream up: what is not given yet is answered with an error, and soon its connection is cut."""
        stream.error = encode_error(f"TIMEOUT KV.LAYERS is given up: {why}")
        stream.cut_s = time.monotonic() + _LAST_WORDS_S
        with self._node.lock:
            self._node.counters.layer_streams_closed += 1
            self._node.tell("layers_closed", stream.session.address, why)

    def _let_go(self, stream: Stream) -> None:
        """End a stream once what it has given is sent; one that has ended is let be."""
        if stream.is_ended:
            return
        if stream.flows:
            stream.flows = False
            assert stream.flow is not None
            self._shaper.leave(stream.flow)
        stream.end()
        self._ending.append(stream)
        self._begin_next(stream.session.id)

    def _end_some(self) -> None:
        """Release what those that have ended kept."""
        now_s = time.monotonic()
        ended = [stream for stream in self._ending if stream.sent == len(stream.parts) and not stream.reads]
        for stream in self._ending:
            if stream.cut_s and now_s > stream.cut_s and stream.sent < len(stream.parts):
                stream.session.cut()
        if not ended:
            return
        self._ending = [stream for stream in self._ending if stream not in ended]
        for stream in ended:
            with self._node.lock:
                stream.release()
                if stream.is_reserved:
                    self._node.lent.unpin(id(stream))
            if not stream.is_reserved:
                self._unadmitted -= 1
                continue
            self._admitted -= 1
            self._of_tenant[stream.tenant] -= 1
            if not self._of_tenant[stream.tenant]:
                del self._of_tenant[stream.tenant]
                self._rooms.pop(stream.tenant, None)
