"""Readiness of many sockets in one thread, and functions handed over from other threads.

asyncio's loop makes handles, contexts and lists for each event, of which a reply of 2 MiB has five. Work is queued in
lanes, one for each tenant that has clients here. A single lane runs in order of arrival. Several lanes take turns of a
millisecond or one call, however much waits in the others.
"""

import functools
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_log = logging.getLogger(__name__)

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_EVENTS_PER_TURN: Final = 64
"""Limit of socket events in a turn; replies are sent at its end, so this bounds their delay."""
_TURN_S: Final = 0.001  # turn of one of several lanes: for events, and as long again for functions to be called soon


@dataclass(slots=True, eq=False)
class Lane:
    """Queued work for the clients of one tenant: unhandled events by descriptor, and functions to be called."""

    tenant: int
    clients: int = 0
    events: OrderedDict[int, int] = field(default_factory=OrderedDict)
    soon: deque[Callable[[], None]] = field(default_factory=deque)


class EventLoop:
    """Waits for sockets and calls their handlers, in the thread that calls ``run()``.

    All methods except ``call_threadsafe()`` belong to that thread.
    """

    def __init__(self) -> None:
        """Create a loop that does not run yet; raise OSError if no descriptors are left."""
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._lane_of: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._ready: dict[Lane, None] = {}  # lanes with work, the next one first
        self._soon: deque[Callable[[], None]] = deque()
        self._handed: deque[tuple[Callable[[], None], Lane | None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None], Lane | None]] = []
        self._later_numbers = itertools.count()  # order of calls at the same time
        self._stopped = False
        try:
            self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self.add(self._waker, READ, self._on_wake)

    def enter(self, tenant: int) -> Lane:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = Lane(tenant)
        lane.clients += 1
        return lane

    def move(self, descriptor: int, old: Lane, tenant: int) -> Lane:
        """Move a client and its events to the lane of another tenant; return that lane."""
        lane = self.enter(tenant)
        if descriptor in self._lane_of:
            self._lane_of[descriptor] = lane
            events = old.events.pop(descriptor, 0)
            if events:
                lane.events[descriptor] = events
                self._ready[lane] = None
        self.leave(old)
        return lane

    def leave(self, lane: Lane) -> None:
        """Remove a client from its lane; work that is queued in it is still done."""
        lane.clients -= 1
        if not lane.clients:
            del self._lanes[lane.tenant]

    def add(self, descriptor: int, events: int, handler: Callable[[int], None], lane: Lane | None = None) -> None:
        """Call ``handler`` with the present events while one of ``events``, an error or a hang-up is present."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler
        if lane is not None:
            self._lane_of[descriptor] = lane

    def modify(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Stop waiting for a descriptor, before it is closed. Its collected events are dropped."""
        del self._handlers[descriptor]
        lane = self._lane_of.pop(descriptor, None)
        if lane is not None:
            lane.events.pop(descriptor, None)
        self._epoll.unregister(descriptor)

    def call_soon(self, function: Callable[[], None], lane: Lane | None = None) -> None:
        """Call ``function`` after the handlers of the present events; from a handler, in the same turn."""
        if lane is None or len(self._lanes) <= 1:
            self._soon.append(function)
        else:
            lane.soon.append(function)
            self._ready[lane] = None

    def call_at(self, time_s: float, function: Callable[[], None], lane: Lane | None = None) -> None:
        """Call ``function`` when ``time.monotonic()`` has reached ``time_s``; it cannot be cancelled."""
        heapq.heappush(self._later, (time_s, next(self._later_numbers), function, lane))

    def call_threadsafe(self, function: Callable[[], None], lane: Lane | None = None) -> None:
        """Call ``function`` soon in the loop's thread; from any thread, until the loop is closed."""
        self._handed.append((function, lane))
        os.eventfd_write(self._waker, 1)

    def run(self) -> None:
        handlers, soon, handed, later, ready = self._handlers, self._soon, self._handed, self._later, self._ready
        while not self._stopped:
            timeout_s: float = 0 if soon or handed or ready else -1
            if later and timeout_s:
                timeout_s = max(0, later[0][0] - time.monotonic())
            if len(self._lanes) > 1 or ready:
                self._collect(timeout_s)
            else:
                handler = None  # keeps no reference to a connection while the loop waits
                for descriptor, events in self._epoll.poll(timeout_s, _EVENTS_PER_TURN):
                    handler = handlers.get(descriptor)  # None if an earlier handler has removed it
                    if handler is not None:
                        try:  # inlined _guarded(): the hot path
                            handler(events)
                        except Exception:
                            _log.exception("callback_failed function=%r", handler)
                handler = None
            while later and later[0][0] <= time.monotonic():
                self.call_soon(*heapq.heappop(later)[2:])
            while handed:
                self.call_soon(*handed.popleft())
            function: Callable[[], None] | None = None
            for _ in range(len(soon)):  # functions that these add run after the next events
                function = soon.popleft()
                try:
                    function()
                except Exception:
                    _log.exception("callback_failed function=%r", function)
            function = None  # as above
            if ready:
                for lane in list(ready):
                    self._serve(lane)

    def _collect(self, timeout_s: float) -> None:
        for descriptor, events in self._epoll.poll(timeout_s, max(_EVENTS_PER_TURN, len(self._handlers))):
            lane = self._lane_of.get(descriptor)
            if lane is not None:
                lane.events[descriptor] = events
                self._ready[lane] = None
            elif (handler := self._handlers.get(descriptor)) is not None:
                _guarded(functools.partial(handler, events))

    def _serve(self, lane: Lane) -> None:
        events, soon, handlers = lane.events, lane.soon, self._handlers
        ends_s = time.monotonic() + _TURN_S
        while events:
            descriptor, happened = events.popitem(last=False)
            handler = handlers.get(descriptor)
            if handler is not None:
                _guarded(functools.partial(handler, happened))
            if time.monotonic() >= ends_s:
                break
        ends_s = time.monotonic() + _TURN_S
        for _ in range(len(soon)):
            _guarded(soon.popleft())
            if time.monotonic() >= ends_s:
                break
        if not (events or soon):
            self._ready.pop(lane, None)

    def _on_wake(self, events: int) -> None:
        os.eventfd_read(self._waker)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        """Close the descriptors. No thread may use the loop any more."""
        self._epoll.close()
        os.close(self._waker)


class Signal:
    """Runs a step in a loop when any thread sends the signal, until disconnect(); the loop may be closed after that."""

    def __init__(self, loop: EventLoop, lane: Lane, step: Callable[[], None]) -> None:
        self._loop = loop
        self.lane = lane
        self._step: Callable[[], None] | None = step
        self._lock = threading.Lock()
        self._is_sent = False

    def send(self, _: object = None) -> None:
        """Run the step soon; several sends before it runs count as one."""
        with self._lock:
            if self._step is not None and not self._is_sent:
                self._is_sent = True
                self._loop.call_threadsafe(self._run, self.lane)

    def disconnect(self) -> None:
        with self._lock:
            self._step = None

    def _run(self) -> None:
        with self._lock:
            self._is_sent = False
            step = self._step
        if step is not None:
            step()


def _guarded(function: Callable[[], None]) -> None:
    """Call a function; an exception must not end the thread."""
    try:
        function()
    except Exception:
        _log.exception("callback_failed function=%r", function)
