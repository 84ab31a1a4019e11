"""A link into the local tiers' memory: the records that wait for it, and the throughput that it reaches."""

import asyncio
import time
from collections.abc import Hashable
from typing import Final, NamedTuple

from shadowserve.pool.prefetch_policy import Hop

_WINDOW_S: Final = 2.0
"""Seconds of transfer after which older measurements count half: throughput and competing users change in seconds."""
UNKNOWN: Final = Hop(1e9)
"""Assumed throughput before the first measurement; a link that is not measured carries one record first."""


class QueuedRecord(NamedTuple):
    """A record that waits for a link: the request that it is prefetched for, its key, and its size in bytes."""

    request: Hashable
    key: bytes
    size: int


class LinkEstimator:
    """A queue of records for one link, and an estimate of the link's throughput."""

    def __init__(self, label: str, concurrency: int) -> None:
        self.label = label
        self.concurrency = concurrency
        self.queued_bytes = 0  # bytes of records that wait or are in progress
        self.carried_bytes = 0
        self.carried_s = 0.0
        self.assumed = UNKNOWN  # throughput until the first measurement
        self._queue: asyncio.Queue[QueuedRecord | None] = asyncio.Queue()
        self._transfers = 0
        self._measured_at = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def measured(self) -> bool:
        return self._bytes > 0 and self._seconds > 0

    @property
    def throughput(self) -> Hop:
        return Hop(self._bytes / self._seconds) if self.measured else self.assumed

    def enqueue(self, record: QueuedRecord) -> None:
        self.queued_bytes += record.size
        self._queue.put_nowait(record)

    async def next(self) -> QueuedRecord | None:
        """Wait for the next record; None after :meth:`close`."""
        return await self._queue.get()

    def close(self) -> None:
        """Drop the queue and end its readers. Transfers in progress continue."""
        while not self._queue.empty():
            self._queue.get_nowait()
        for _ in range(self.concurrency):
            self._queue.put_nowait(None)

    def begin_transfer(self) -> None:
        if not self._transfers:
            self._measured_at = time.monotonic()
        self._transfers += 1

    def end_transfer(self, size: int) -> None:
        now = time.monotonic()
        passed, self._measured_at = now - self._measured_at, now
        self._transfers -= 1
        self.carried_s += passed
        self.carried_bytes += size
        self._seconds += passed
        self._bytes += size
        if self._seconds > _WINDOW_S:
            self._seconds, self._bytes = self._seconds / 2, self._bytes / 2
