"""The ways up into the tiers' memory, and what each of them really carries."""

import asyncio
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

from shadowserve.pool.prefetch_policy import Hop

__all__ = ["UNKNOWN", "Carried", "Carrier"]

_WINDOW_S: Final = 2.0
"""Of carrying, after which what was measured before counts half: links change within seconds, and so do their users."""
UNKNOWN: Final = Hop(1e9)
"""What a hop is taken for before anything has passed; then it carries one record first, to be measured."""


class Carried(NamedTuple):
    """A record on its way, or about to be."""

    name: Hashable
    """Of the request that it is for."""
    key: bytes
    size: int
    """Bytes, as far as is known."""


class Carrier:
    """One hop: who waits to be carried over it, and how fast that goes.

    Args:
        label: for metrics.
        at_a_time: records under way.

    Attributes:
        promised: bytes that wait, or are under way.
        carried_bytes, carried_s: so far: bytes, and seconds in which at least one record was under way.
        assumed: what it carries, as long as nothing was measured.
    """

    def __init__(self, label: str, at_a_time: int) -> None:
        self.label = label
        self.at_a_time = at_a_time
        self.promised = 0
        self.carried_bytes = 0
        self.carried_s = 0.0
        self.assumed = UNKNOWN
        self._waiting: asyncio.Queue[Carried | None] = asyncio.Queue()
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def measured(self) -> bool:
        """Whether anything has passed yet."""
        return self._bytes > 0 and self._seconds > 0

    @property
    def hop(self) -> Hop:
        """What it carries now."""
        return Hop(self._bytes / self._seconds) if self.measured else self.assumed

    def promise(self, record: Carried) -> None:
        """Have a record carried after all before it."""
        self.promised += record.size
        self._waiting.put_nowait(record)

    async def next(self) -> Carried | None:
        """Return what is to be carried next; None: nothing is any more."""
        return await self._waiting.get()

    def end(self) -> None:
        """Have nothing carried any more, but what is under way."""
        while not self._waiting.empty():
            self._waiting.get_nowait()
        for _ in range(self.at_a_time):
            self._waiting.put_nowait(None)

    def begin(self) -> None:
        """Some bytes are under way from now on."""
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way += 1

    def ended(self, size: int) -> None:
        """They are over, and so many have come."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self._under_way -= 1
        self.carried_s += passed
        self.carried_bytes += size
        self._seconds += passed
        self._bytes += size
        if self._seconds > _WINDOW_S:
            self._seconds, self._bytes = self._seconds / 2, self._bytes / 2
