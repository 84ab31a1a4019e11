"""Readiness of many sockets in one thread, and functions handed over from others.

Why not asyncio's loop: for each event it makes handles, contexts and lists, and to begin and to end waiting for room in
a socket it goes through two layers of tables. A reply of 2 MiB has five events. What connections need of a loop is no
more than this file.
"""

import heapq
import itertools
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["READ", "WRITE", "EventLoop"]

_log = logging.getLogger(__name__)

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_EVENTS_PER_TURN: Final = 64
"""Of sockets; what they have answered is sent when all of them have been dealt with, so it is not for long."""


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
        self._soon: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._later_numbers = itertools.count()  # two of the same time are in the order of their calls
        self._stopped = False
        try:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self.add(self._wake, READ, self._on_wake)

    def add(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler`` with what there is whenever there is one of ``events`` (READ, WRITE), an error or an end."""
        self._epoll.register(descriptor, events)
        self._handlers[descriptor] = handler

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor that was added."""
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> None:
        """Wait for a descriptor no more; before it is closed. Events that have been collected are dropped."""
        del self._handlers[descriptor]
        self._epoll.unregister(descriptor)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call ``function`` after the handlers of the present events; from a handler, in the same turn."""
        self._soon.append(function)

    def call_at(self, time_s: float, function: Callable[[], None]) -> None:
        """Call ``function`` once ``time.monotonic()`` has reached ``time_s``; it cannot be taken back."""
        heapq.heappush(self._later, (time_s, next(self._later_numbers), function))

    def call_threadsafe(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the loop's thread, soon; from any thread, until the loop is closed."""
        self._soon.append(function)
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        handlers, soon, later = self._handlers, self._soon, self._later
        while not self._stopped:
            patience_s: float = 0 if soon else -1
            if later:
                patience_s = 0 if soon else max(0, later[0][0] - time.monotonic())
            handler = function = None  # or what they belong to would be kept for as long as nothing happens
            for descriptor, events in self._epoll.poll(patience_s, _EVENTS_PER_TURN):
                handler = handlers.get(descriptor)  # none if a handler before it has removed this one
                if handler is not None:
                    try:  # as _guarded() does: this is where most calls are made
                        handler(events)
                    except Exception:
                        _log.exception("callback_failed function=%r", handler)
            while later and later[0][0] <= time.monotonic():
                _guarded(heapq.heappop(later)[2])
            for _ in range(len(soon)):  # what these add has its turn after the next events
                function = soon.popleft()
                try:
                    function()
                except Exception:
                    _log.exception("callback_failed function=%r", function)

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
