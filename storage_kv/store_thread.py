"""The thread that drives an engine: it waits for devices, has their completions dealt with, and ends the engine.

An engine's methods are called by whoever serves a client. What devices have done is dealt with here, so that no
client's thread waits for a device, and a device that stands still delays nobody but those who asked for what is on it.
"""

import logging
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from shadowserve.pool.contract import Engine

__all__ = ["EngineThread"]

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.1
"""Of poll() where nothing happens: for what an engine does as time passes."""

_BREATH_S: Final = 0.001
"""Between two parts of long work: who has waited for the lock meanwhile is sure to get it."""

_CLOSING_S: Final = 10.0
"""Beyond the time to drain, until a process gives up an engine that does not end: what is durable is so already."""


class EngineThread:
    """Drives one engine, which has been started, until stop()."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread, if the engine has anything to be driven for."""
        self._engine = engine
        self._descriptors = engine.descriptors()
        self._stop = threading.Event()
        self._drain_s = 0.0
        self._handed: deque[Callable[[], None]] = deque()
        self._wake = select.epoll()
        for descriptor in self._descriptors:
            self._wake.register(descriptor, select.EPOLLIN)
        # A daemon: a device that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def hand(self, function: Callable[[], None]) -> None:
        """Have a function called in this thread, after its next poll()."""
        self._handed.append(function)

    def stop(self, drain_s: float) -> bool:
        """Have the engine drained within ``drain_s`` and closed; return whether it was. Waits for it."""
        self._drain_s = drain_s
        self._stop.set()
        self._thread.join(drain_s + _CLOSING_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        engine = self._engine
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
                more = engine.poll()
                while self._handed:
                    self._handed.popleft()()
            except Exception:  # a bug of ours must not leave every client waiting
                _log.exception("engine_poll_failed")
                self._stop.wait(_INTERVAL_S)
        try:
            engine.drain(self._drain_s)
        except Exception:
            _log.exception("engine_drain_failed")
        try:
            engine.close()
        except Exception:
            _log.exception("engine_close_failed")
        self._wake.close()
