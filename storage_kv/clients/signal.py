"""How other threads wake what an event loop drives."""

import threading
from collections.abc import Callable

from storage_kv.clients.event_loop import EventLoop, Lane


class Signal:
    """Has a step done by a loop, whoever asks, until it is cut: nobody calls a loop that has been closed.

    Attributes:
        lane: of the loop, in which it is done.
    """

    __slots__ = ("_lock", "_loop", "_sent", "_step", "lane")

    def __init__(self, loop: EventLoop, lane: Lane, step: Callable[[], None]) -> None:
        self._loop = loop
        self.lane = lane
        self._step: Callable[[], None] | None = step
        self._lock = threading.Lock()
        self._sent = False

    def send(self, _: object = None) -> None:
        """Have the step done soon; once, however many ask for it before it is begun."""
        with self._lock:
            if self._step is not None and not self._sent:
                self._sent = True
                self._loop.call_threadsafe(self._begin, self.lane)

    def cut(self) -> None:
        """Do nothing any more, whoever calls."""
        with self._lock:
            self._step = None

    def _begin(self) -> None:
        with self._lock:
            self._sent = False
            step = self._step
        if step is not None:
            step()
