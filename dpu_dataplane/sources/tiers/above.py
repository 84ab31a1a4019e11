"""Tiers above another source: what is near is taken from there, in the same batches as what is not.

What comes from below stays above, what is stored goes to both. The source below has the last word on what is stored;
while it is away the tiers serve alone.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.source import Cold, Delivered, Encoded, Expected, Found, Order, Source, Stored, Unanswered
from dpu_dataplane.sources.tiers.alone import deliver_near
from dpu_dataplane.sources.tiers.keeping import Keeping
from dpu_dataplane.sources.tiers.pages import DevicePages
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.supplies import Supplies
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve import native
from shadowserve.errors import StorageError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.pieces import Flags

__all__ = ["TiersAbove"]

logger = logging.getLogger(__name__)


class TiersAbove(Source):
    """A pool above another source.

    Args:
        tiers: with the pool.
        below: the other one.
        prefetching: from devices and from below into the pool's memory.
        pipeline: that bytes go to.
        fetching: thread for its calls that fetch.
        metrics: to count in.
        budget: that loads of pages are held to.
        drain_s: that the end may take.
    """

    keeps_plain = True

    def __init__(
        self,
        tiers: Tiers,
        below: Source,
        prefetching: Prefetcher,
        pipeline: native.Pipeline,
        fetching: Executor,
        metrics: Metrics,
        budget: InterferenceBudget,
        drain_s: float,
    ) -> None:
        self.name = below.name
        self.placing = DevicePages(tiers, prefetching, budget, metrics)
        self._tiers = tiers
        self._below = below
        self._prefetcher = prefetching
        self._pipeline = pipeline
        self._fetching = fetching
        self._metrics = metrics
        self._drain_s = drain_s

    @property
    def connected(self) -> bool:
        """Whether the source below can be asked."""
        return self._below.connected

    async def start(self) -> None:
        """Open the pool, and begin to reach the source below."""
        await self._tiers.start()
        await self._below.start()
        self._prefetcher.start()

    async def close(self) -> None:
        """Close both."""
        await self._prefetcher.close()
        await self._below.close()
        await self._tiers.close(self._drain_s)

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look in the pool, and ask below for what it lacks, at the same time; then for what it could not bring."""
        errors: list[StorageError] = []
        found, reads = await self._tiers.look(keys)
        absent = [index for index, each in enumerate(found) if each is None]
        await asyncio.gather(self._tiers.await_heads(reads), self._ask(keys, absent, found, errors))
        if reads:
            asked = set(absent)
            lost = [index for index, each in enumerate(found) if not isinstance(each, Stored) and index not in asked]
            await self._ask(keys, lost, found, errors)
        if errors and not any(isinstance(each, Stored) for each in found):
            raise errors[0]
        return found

    async def _ask(
        self, keys: Sequence[bytes], indexes: Sequence[int], found: list[Found], errors: list[StorageError]
    ) -> None:
        """Find some keys below; what it cannot be asked is unanswered, and among the errors."""
        if not indexes:
            return
        try:
            answers = await self._below.find([keys[index] for index in indexes])
        except StorageError as error:
            errors.append(error)
            answers = [Unanswered.of(error)] * len(indexes)
        for index, answer in zip(indexes, answers, strict=True):
            found[index] = answer

    async def held(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Ask below, since others rely on that; while it is away, what the pool has counts."""
        try:
            return await self._below.held(keys)
        except StorageUnavailableError:
            found, reads = await self._tiers.look(keys)
            await self._tiers.await_heads(reads)
            return found

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Tell the source below."""
        return await self._below.publish(keys, lasts_ms)

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Ask the source below."""
        return await self._below.published(keys)

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Find, and have the source below wait for what it has in object storage alone."""
        found = list(await self.find(keys))
        cold = [index for index, each in enumerate(found) if isinstance(each, Cold)]
        for index, each in zip(cold, await self._below.heads([keys[index] for index in cold]), strict=True):
            found[index] = each
        return found

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Tell the source below of what the pool lacks."""
        if absent := [key for key in keys if not self._tiers.has(key)]:
            await self._below.prefetch(absent)

    def expect(self, requests: Sequence[Expected]) -> None:
        """Have what they fetch brought into memory, from devices and from below."""
        self._prefetcher.expect(requests)

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        """Have the source below hand it out."""
        return await self._below.receive(job, key, first, memory)

    async def deliver(self, job: Job, order: Order) -> Delivered:
        """Deliver from both in the same batches; what the pool turns out not to have, from below."""
        async with self._prefetcher.giving_way(job, order.keys):
            while True:
                with Supplies(self._tiers, order, self._metrics) as supplies:
                    self._prefetcher.note_use(supplies.resident)
                    done = await self._deliver(job, supplies)
                    supplies.count(done)
                    lost = supplies.lost(done.results)
                for index in lost:
                    done.results[index] = Result.SKIPPED
                    done.failures.pop(index, None)
                if not lost or done.failures or done.stop is not None or (done.results == Result.OK).any():
                    return done.of(len(order.pieces))

    async def _deliver(self, job: Job, supplies: Supplies) -> Delivered:
        if supplies.near.all():
            return await deliver_near(job, supplies, self._pipeline, self._fetching, self._metrics)
        keeping = Keeping(self._tiers, supplies, supplies.order.found)
        done: Delivered | None = None
        try:
            done = await self._below.deliver(job, replace(supplies.order, make_batch=supplies.make_batch))
        except StorageError as error:
            if not supplies.near.any():
                raise
            done = await deliver_near(job, supplies, self._pipeline, self._fetching, self._metrics, error)
        finally:
            keeping.settle(None if done is None else done.results)
        return done

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put a record into the pool, if it has room just now, and below, unless it is not for long, or plain."""
        near = await self._tiers.put(job, key, record, wait=False)
        if near and record.lasts_ms:
            return Result.OK, ""
        if record.plain:
            return (Result.OK, "") if near else (Result.REFUSED, f"{self._tiers.name} have no room for it just now")
        try:
            return await self._below.put(job, key, record)
        except StorageUnavailableError as error:
            if not near:
                raise
            logger.debug("record %s is in the tiers alone: %s", key.hex(), error)
            return Result.OK, ""

    async def delete(self, key: bytes) -> None:
        """Delete a record from both."""
        self._tiers.drop(key)
        await self._below.delete(key)
