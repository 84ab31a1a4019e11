"""Outages of storage: the error for callers, and the back-off between attempts to connect.

During a known outage calls fail at once. Callers wait only for an attempt without a failure before it: the first one,
or the first one after a stable connection. Each failed attempt, whatever the reason, doubles the delay up to a bound.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from shadowserve.errors import StorageError

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 4.0
"""Delays before jitter. A server that returns is found within some 5 s, and one that rejects our certificate or
password has little work with it."""
CAUSES_LOGGED_MAX: Final = 8  # different causes of one outage that are logged; more of them say nothing new
STABLE_S: Final = 1.0
"""Duration after which a connection counts as stable: the next failure begins another outage."""


class Outage:
    """The state of one connection to storage; ``meanwhile`` is the consequence of an outage, for the log."""

    def __init__(
        self, logger: logging.Logger, meanwhile: str, clock: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        self.failure: StorageError | None = None
        self._logger = logger
        self._meanwhile = meanwhile
        self._clock = clock
        self._logged: set[str] = set()  # causes of this outage
        self._known = asyncio.Event()  # connected, or known to be unreachable
        self._connected_at: float | None = None
        self._backoff_s = BACKOFF_FIRST_S

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    async def wait_known(self) -> None:
        await self._known.wait()

    def fail(self, error: StorageError) -> None:
        """Record that an attempt failed or a connection broke; waiting callers return."""
        self.disconnect()
        if str(error) not in self._logged and len(self._logged) < CAUSES_LOGGED_MAX:
            self._logged.add(str(error))
            self._logger.warning("%s (trying again; until then %s)", error, self._meanwhile)
        self.failure = error
        self._known.set()
        self._known = asyncio.Event()

    def recover(self) -> None:
        self.failure = None
        self._connected_at = self._clock()
        self._known.set()

    def disconnect(self) -> bool:
        """Record the end of a connection, and return if it was stable. Callers wait until :meth:`fail`."""
        stable = self._connected_at is not None and self._clock() - self._connected_at >= STABLE_S
        if stable:
            self._logged.clear()
            self._backoff_s = BACKOFF_FIRST_S
        self._connected_at = None
        self._known.clear()
        return stable

    def next_delay_s(self) -> float:
        """Return the delay before the next attempt: twice the last one, with jitter."""
        seconds = self._backoff_s * random.uniform(0.8, 1.2)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        return seconds
