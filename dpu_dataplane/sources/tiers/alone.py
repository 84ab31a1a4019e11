"""Tiers as the only source: one host that serves itself."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.source import Delivered, Encoded, Expected, Failure, Found, Order, Source
from dpu_dataplane.sources.tiers.pages import DevicePages
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.supplies import Supplies
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve import native
from shadowserve.errors import StorageError
from shadowserve.native import Result

__all__ = ["TiersAlone", "deliver_near"]


async def deliver_near(
    job: Job,
    supplies: Supplies,
    pipeline: native.Pipeline,
    fetching: Executor,
    metrics: Metrics,
    error: StorageError | None = None,
) -> Delivered:
    """Deliver what the pool has of an order. What it lacks fails: with ``error``, or since it is not stored."""
    table = supplies.order.pieces
    done = Delivered(np.full(len(table), Result.SKIPPED, np.uint32))
    ends: dict[int, int] = {}  # of each group, the first chunk that is not near
    groups, chunks = table["group"].tolist(), table["chunk"].tolist()
    for index in np.flatnonzero(~supplies.near).tolist():
        ends[groups[index]] = min(chunks[index], ends.get(groups[index], chunks[index]))
    useful = [index for index in range(len(table)) if groups[index] not in ends or chunks[index] < ends[groups[index]]]
    if useful:
        pieces = table[useful]
        batch_ = supplies.make_batch(pieces)
        try:
            with job.interruptible(batch_.cancel):
                await asyncio.get_running_loop().run_in_executor(fetching, pipeline.fetch, batch_)
        finally:
            batch_.release()
        metrics.batches += 1
        done.results[useful] = pieces["result"]
    for index in np.flatnonzero(~supplies.near).tolist():
        if chunks[index] == ends[groups[index]]:
            done.results[index] = Result.NOT_FOUND if error is None else Result.DISCONNECTED
            done.failures[index] = Failure(Result(int(done.results[index])), error)
    for index in np.flatnonzero((done.results != Result.OK) & (done.results != Result.SKIPPED)).tolist():
        done.failures.setdefault(index, Failure(Result(int(done.results[index]))))
    return done


class TiersAlone(Source):
    """A pool, and nothing below it.

    Args:
        tiers: with the pool.
        prefetching: from its devices into its memory.
        pipeline: that bytes go to.
        fetching: thread for its calls that fetch.
        metrics: to count in.
        budget: that loads of pages are held to.
        drain_s: that the end may take.
    """

    publishes_here = keeps_plain = True

    def __init__(
        self,
        tiers: Tiers,
        prefetching: Prefetcher,
        pipeline: native.Pipeline,
        fetching: Executor,
        metrics: Metrics,
        budget: InterferenceBudget,
        drain_s: float,
    ) -> None:
        self.name = tiers.name
        self.placing = DevicePages(tiers, prefetching, budget, metrics)
        self._tiers = tiers
        self._prefetcher = prefetching
        self._pipeline = pipeline
        self._fetching = fetching
        self._metrics = metrics
        self._drain_s = drain_s
        self._open = False

    @property
    def connected(self) -> bool:
        """Whether the pool is open."""
        return self._open

    async def start(self) -> None:
        """Open the pool."""
        await self._tiers.start()
        self._prefetcher.start()
        self._open = True

    async def close(self) -> None:
        """Close the pool."""
        self._open = False
        await self._prefetcher.close()
        await self._tiers.close(self._drain_s)

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look in the pool; devices bring heads that are not remembered."""
        found, reads = await self._tiers.look(keys)
        await self._tiers.await_heads(reads)
        return found

    def expect(self, requests: Sequence[Expected]) -> None:
        """Have devices bring what they fetch."""
        self._prefetcher.expect(requests)

    async def deliver(self, job: Job, order: Order) -> Delivered:
        """Run one batch, without a socket."""
        async with self._prefetcher.giving_way(job, order.keys):
            with Supplies(self._tiers, order, self._metrics) as supplies:
                self._prefetcher.note_use(supplies.resident)
                done = await deliver_near(job, supplies, self._pipeline, self._fetching, self._metrics)
                supplies.count(done)
        return done.of(len(order.pieces))

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put a record into the pool; devices have it soon after."""
        if await self._tiers.put(job, key, record, wait=True):
            return Result.OK, ""
        return Result.REFUSED, f"{self.name} have no room for it; give them more memory, or devices"

    async def delete(self, key: bytes) -> None:
        """Remove a record."""
        self._tiers.drop(key)
