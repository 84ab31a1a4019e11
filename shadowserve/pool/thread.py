"""The thread that drives a pool: it waits for devices, processes their completions, and ends the pool.

Other threads call the pool's methods. So no client's thread waits for a device, and a slow device delays only requests
for its own objects.
"""

import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from shadowserve.pool.pool import Pool

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.1
"""Longest time between two polls, for the pool's periodic work."""

_BREATH_S: Final = 0.001
"""Pause between two parts of long work: a thread that waits for the lock gets it."""

_CLOSING_S: Final = 10.0
"""Time beyond draining until the process gives up a store that does not end; durable data is safe by then."""


class PoolThread:
    """Drives one started store until stop()."""

    def __init__(self, store: Pool) -> None:
        self._store = store
        self._descriptors = store.descriptors()
        self._stop = threading.Event()
        self._drain_s = 0.0
        self._handed: deque[Callable[[], None]] = deque()
        self._wake = select.epoll()
        for descriptor in self._descriptors:
            self._wake.register(descriptor, select.EPOLLIN)
        # A daemon thread: a device that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def hand(self, function: Callable[[], None]) -> None:
        """Call a function in this thread, after its next poll()."""
        self._handed.append(function)

    def stop(self, drain_s: float) -> bool:
        """Drain the store within ``drain_s`` and close it; wait for that, and return whether it has ended."""
        self._drain_s = drain_s
        self._stop.set()
        self._thread.join(drain_s + _CLOSING_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        store = self._store
        more = False
        while not self._stop.is_set():
            try:
                if more:
                    self._stop.wait(_BREATH_S)
                elif self._descriptors:
                    self._wake.poll(_INTERVAL_S)
                else:
                    self._stop.wait(_INTERVAL_S)
                more = False
                more = store.poll()
                while self._handed:
                    self._handed.popleft()()
            except Exception:  # a bug must not end this thread
                _log.exception("store_poll_failed")
                self._stop.wait(_INTERVAL_S)
        try:
            store.drain(self._drain_s)
        except Exception:
            _log.exception("store_drain_failed")
        try:
            store.close()
        except Exception:
            _log.exception("store_close_failed")
        self._wake.close()
