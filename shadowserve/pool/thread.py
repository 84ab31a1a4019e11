"""The thread that drives a pool: it waits for devices, has their completions dealt with, and ends the pool.

A pool's methods are called by whoever serves a client. What devices have done is dealt with here, so that no
client's thread waits for a device, and a device that stands still delays nobody but those who asked for what is on it.
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
"""Of poll() where nothing happens: for what a store does as time passes."""

_BREATH_S: Final = 0.001
"""Between two parts of long work: who has waited for the lock meanwhile is sure to get it."""

_CLOSING_S: Final = 10.0
"""Beyond the time to drain, until a process gives up a store that does not end: what is durable is so already."""


class PoolThread:
    """Drives one store, which has been started, until stop()."""

    def __init__(self, store: Pool) -> None:
        """Start the thread, if the store has anything to be driven for."""
        self._store = store
        self._descriptors = store.descriptors()
        self._stop = threading.Event()
        self._drain_s = 0.0
        self._handed: deque[Callable[[], None]] = deque()
        self._wake = select.epoll()
        for descriptor in self._descriptors:
            self._wake.register(descriptor, select.EPOLLIN)
        # A daemon: a device that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def hand(self, function: Callable[[], None]) -> None:
        """Have a function called in this thread, after its next poll()."""
        self._handed.append(function)

    def stop(self, drain_s: float) -> bool:
        """Have the store drained within ``drain_s`` and closed; return whether it was. Waits for it."""
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
            except Exception:  # a bug of ours must not leave every client waiting
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
