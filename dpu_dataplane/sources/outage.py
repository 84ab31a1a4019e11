"""Whether storage can be asked, what callers are told while it cannot, and how long to wait before the next attempt.

While storage is known to be away, calls fail at once. Callers wait only for an attempt that nothing has preceded: the
first one, or the one that follows a connection which held. Whatever an attempt fails for, a refused connection,
handshake or password, the next one comes later, up to a bound.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from shadowserve.errors import StorageError

__all__ = ["BACKOFF_FIRST", "BACKOFF_MAX", "CAUSES_TOLD_MAX", "STABLE_TIME", "Outage"]

BACKOFF_FIRST: Final = 0.05
BACKOFF_MAX: Final = 4.0
"""Seconds, before chance: a server that is back is found within some 5, and one that refuses our certificate or
password, for as long as nobody looks, has little work with it."""
CAUSES_TOLD_MAX: Final = 8
"""Different causes of one outage that are logged; after so many it is clear that something flaps."""
STABLE_TIME: Final = 1.0
"""Seconds that a connection must have held for the next failure not to count as the same outage."""


class Outage:
    """The outage that there may be, of one way to storage.

    Attributes:
        failure: of the last attempt; ``None`` while storage can be asked, and before the first attempt has ended.
    """

    def __init__(
        self, logger: logging.Logger, meanwhile: str, clock: Callable[[], float] = lambda: time.monotonic()
    ) -> None:
        """Know nothing yet.

        Args:
            logger: gets a warning for each cause.
            meanwhile: what that warning says of the time until the outage is over.
            clock: seconds that only grow.
        """
        self.failure: StorageError | None = None
        self._logger = logger
        self._meanwhile = meanwhile
        self._clock = clock
        self._told: set[str] = set()  # causes of this outage that the log has
        self._settled = asyncio.Event()  # storage can be asked, or is known to be away
        self._over_at: float | None = None
        self._backoff = BACKOFF_FIRST

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    async def settled(self) -> None:
        """Wait until storage can be asked, or is known to be away."""
        await self._settled.wait()

    def begin(self, error: StorageError) -> None:
        """Take note that an attempt failed, or that a connection did not hold; whoever waits is told."""
        self.lose()
        if str(error) not in self._told and len(self._told) < CAUSES_TOLD_MAX:
            self._told.add(str(error))
            self._logger.warning("%s (trying again; until then %s)", error, self._meanwhile)
        self.failure = error
        self._settled.set()
        self._settled = asyncio.Event()

    def end(self) -> None:
        """Take note that storage can be asked."""
        self.failure = None
        self._over_at = self._clock()
        self._settled.set()

    def lose(self) -> bool:
        """Take note that storage can be asked no more; callers wait for the next attempt until :meth:`begin`.

        Return whether it could be asked for so long that what follows is another outage.
        """
        held = self._over_at is not None and self._clock() - self._over_at >= STABLE_TIME
        if held:
            self._told.clear()
            self._backoff = BACKOFF_FIRST
        self._over_at = None
        self._settled.clear()
        return held

    def pause(self) -> float:
        """Return how many seconds to wait before the next attempt: twice as many each time, with some chance."""
        seconds = self._backoff * random.uniform(0.8, 1.2)
        self._backoff = min(2 * self._backoff, BACKOFF_MAX)
        return seconds
