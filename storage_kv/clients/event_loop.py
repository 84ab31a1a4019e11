"""Readiness of many sockets in one thread, and functions handed over from others.

Why not asyncio's loop: for each event it makes handles, contexts and lists, and to begin and to end waiting for room in
a socket it goes through two layers of tables. A reply of 2 MiB has five events. What connections need of a loop is no
more than this file.

What a loop has to do is in lanes, one for each tenant that has clients here. With one lane, all goes in the order in
which it comes. With several, each has a millisecond or a call in turn, whatever waits in the others: a tenant's two
thousand busy clients are two thousand in its own lane.
"""

import functools
import heapq
import itertools
import logging
import os
import select
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_EVENTS_PER_TURN: Final = 64
"""Of sockets; what they have answered is sent when all of them have been dealt with, so it is not for long."""
_TURN_S: Final = 0.001
"""Of a lane, where there are several: for events, and as long again for what they have left to be done soon."""


class Lane:
    """What waits to be done for the clients of one tenant; changed in the loop's thread.

    Attributes:
        tenant: whose clients they are.
        clients: how many have entered.
        events: of descriptors, which have not been handled.
        soon: functions to be called.
    """

    __slots__ = ("clients", "events", "soon", "tenant")

    def __init__(self, tenant: int) -> None:
        self.tenant = tenant
        self.clients = 0
        self.events: OrderedDict[int, int] = OrderedDict()
        self.soon: deque[Callable[[], None]] = deque()


class EventLoop:
    """Waits for sockets and calls their handlers, in the one thread that calls ``run()``.

    All methods but ``call_threadsafe()`` belong to that thread.
    """

    def __init__(self) -> None:
        """Make a loop that does not run yet.

        Raises:
            OSError: no descriptors are left.
        """
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._lane_of: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._ready: dict[Lane, None] = {}  # that have something to be done, the one whose turn it is first
        self._soon: deque[Callable[[], None]] = deque()
        self._handed: deque[tuple[Callable[[], None], Lane | None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None], Lane | None]] = []
        self._later_numbers = itertools.count()  # two of the same time are in the order of their calls
        self._stopped = False
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self.add(self._wake, READ, self._on_wake)

    def enter(self, tenant: int) -> Lane:
        """Return the lane of a tenant, for one more of its clients."""
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = Lane(tenant)
        lane.clients += 1
        return lane

    def move(self, descriptor: int, old: Lane, tenant: int) -> Lane:
        """Return the lane of another tenant, which a client enters, with its descriptor, from an old one."""
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
        """Take note that a client has left; what it has to be done still is."""
        lane.clients -= 1
        if not lane.clients:
            del self._lanes[lane.tenant]

    def add(self, descriptor: int, events: int, handler: Callable[[int], None], lane: Lane | None = None) -> None:
        """Call ``handler`` with what there is whenever there is one of ``events`` (READ, WRITE), an error or an end."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler
        if lane is not None:
            self._lane_of[descriptor] = lane

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor that was added."""
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Wait for a descriptor no more; before it is closed. Events that have been collected are dropped."""
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
        """Call ``function`` once ``time.monotonic()`` has reached ``time_s``; it cannot be taken back."""
        heapq.heappush(self._later, (time_s, next(self._later_numbers), function, lane))

    def call_threadsafe(self, function: Callable[[], None], lane: Lane | None = None) -> None:
        """Call ``function`` in the loop's thread, soon; from any thread, until the loop is closed."""
        self._handed.append((function, lane))
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        handlers, soon, handed, later, ready = self._handlers, self._soon, self._handed, self._later, self._ready
        while not self._stopped:
            patience_s: float = 0 if soon or handed or ready else -1
            if later and patience_s:
                patience_s = max(0, later[0][0] - time.monotonic())
            if len(self._lanes) > 1 or ready:
                self._collect(patience_s)
            else:
                handler = None  # or what it belongs to would be kept for as long as nothing happens
                for descriptor, events in self._epoll.poll(patience_s, _EVENTS_PER_TURN):
                    handler = handlers.get(descriptor)  # none if a handler before it has removed this one
                    if handler is not None:
                        try:  # as _guarded() does: this is where most calls are made
                            handler(events)
                        except Exception:
                            _log.exception("callback_failed function=%r", handler)
                handler = None
            while later and later[0][0] <= time.monotonic():
                self.call_soon(*heapq.heappop(later)[2:])
            while handed:
                self.call_soon(*handed.popleft())
            function: Callable[[], None] | None = None
            for _ in range(len(soon)):  # what these add has its turn after the next events
                function = soon.popleft()
                try:
                    function()
                except Exception:
                    _log.exception("callback_failed function=%r", function)
            function = None  # as above
            if ready:
                for lane in list(ready):
                    self._serve(lane)

    def _collect(self, patience_s: float) -> None:
        """Put what has happened into the lanes."""
        for descriptor, events in self._epoll.poll(patience_s, max(_EVENTS_PER_TURN, len(self._handlers))):
            lane = self._lane_of.get(descriptor)
            if lane is not None:
                lane.events[descriptor] = events
                self._ready[lane] = None
            elif (handler := self._handlers.get(descriptor)) is not None:
                _guarded(functools.partial(handler, events))

    def _serve(self, lane: Lane) -> None:
        """Give a lane its turn."""
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
        os.eventfd_read(self._wake)

    def stop(self) -> None:
        """Let ``run()`` return at the end of this turn."""
        self._stopped = True

    def close(self) -> None:
        """Give the descriptors back, once nothing runs or calls the loop any more."""
        self._epoll.close()
        os.close(self._wake)


def _guarded(function: Callable[[], None]) -> None:
    """Call a function; a bug in it must not end the thread."""
    try:
        function()
    except Exception:
        _log.exception("callback_failed function=%r", function)
