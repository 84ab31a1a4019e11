"""The pool as a source: alone, or as a tier above another source."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import Job
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Cold, Found, Stored, Unanswered
from dpu_dataplane.sources.source import Delivered, Encoded, Failure, Resources, Source, WaitingRequest
from dpu_dataplane.sources.tiers.local_hits import LocalHits, ReadThroughFill
from dpu_dataplane.sources.tiers.pages import DevicePageLoader
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve.errors import StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.proto import dataplane_pb2 as pb

_PIN_MAX_S: Final = 600
"""Longest pin in a pool that is alone, as on a storage node by default."""

logger = logging.getLogger(__name__)


class TieredSource(Source):
    """A pool above another source, or alone: one host that serves itself.

    One batch reads from both. Records from below stay in the pool, new records go to both. The source below is the
    authority on what is stored; while it is unreachable, the pool serves alone.
    """

    has_tiers = True

    def __init__(self, config: DataPlaneConfig, below: Source | None, resources: Resources) -> None:
        self._below = below
        self._resources = resources
        self._metrics = resources.metrics
        self._tiers = tiers = Tiers(config, resources)
        self._prefetcher = Prefetcher(tiers, below, config, resources)
        self.page_loader = DevicePageLoader(tiers, self._prefetcher, resources) if tiers.has_devices else None
        self.name = tiers.name if below is None else below.name
        self.publishes_here = below is None
        self._open = False

    @property
    def connected(self) -> bool:
        """True if the source below can be reached; without one, if the pool is open."""
        return self._open if self._below is None else self._below.connected

    async def start(self) -> None:
        await self._tiers.start()
        if self._below is not None:
            await self._below.start()
        self._prefetcher.start()
        self._open = True

    async def close(self) -> None:
        self._open = False
        await self._prefetcher.close()
        if self._below is not None:
            await self._below.close()
        await self._tiers.close()

    # ---- Lookups

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look in the pool and ask below for what it lacks, at the same time; then ask for failed reads of devices."""
        errors: list[StorageError] = []
        found, reads = await self._tiers.look_up(keys)
        absent = [index for index, each in enumerate(found) if each is None]
        await asyncio.gather(self._tiers.await_headers(reads), self._find_below(keys, absent, found, errors))
        if reads:
            asked = set(absent)
            lost = [index for index, each in enumerate(found) if not isinstance(each, Stored) and index not in asked]
            await self._find_below(keys, lost, found, errors)
        if errors and not any(isinstance(each, Stored) for each in found):
            raise errors[0]
        return found

    async def _find_below(
        self, keys: Sequence[bytes], indexes: Sequence[int], found: list[Found], errors: list[StorageError]
    ) -> None:
        """Look some keys up below; an error is Unanswered, and added to ``errors``."""
        if not indexes or self._below is None:
            return
        try:
            answers = await self._below.find([keys[index] for index in indexes])
        except StorageError as error:
            errors.append(error)
            answers = [Unanswered.of(error)] * len(indexes)
        for index, answer in zip(indexes, answers, strict=True):
            found[index] = answer

    async def find_stored(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Ask below, since other hosts rely on its records; ask the pool while that is unreachable."""
        if self._below is not None:
            try:
                return await self._below.find_stored(keys)
            except StorageUnavailableError:
                pass
        found, reads = await self._tiers.look_up(keys)
        await self._tiers.await_headers(reads)
        return found

    async def find_warm(self, keys: Sequence[bytes], *, headers: bool) -> Sequence[Found]:
        found = list(await self.find(keys))
        cold = [index for index, each in enumerate(found) if isinstance(each, Cold)]
        if self._below is not None:
            warm = await self._below.find_warm([keys[index] for index in cold], headers=headers)
            for index, each in zip(cold, warm, strict=True):
                found[index] = each
        return found

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        return self._below is not None and await self._below.publish(keys, lasts_ms)

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        return None if self._below is None else await self._below.published(keys)

    async def pin(self, keys: Sequence[bytes], seconds: int) -> bool:
        """Pin records below, and then in the pool as far as its share of pins reaches; in the pool if it is alone."""
        if self._below is None:
            if seconds > _PIN_MAX_S:
                raise StorageRefusedError(f"local tiers pin records for up to {_PIN_MAX_S} s, not {seconds}")
            await self._tiers.pin(keys, seconds)
            return True
        if not seconds:
            await self._tiers.pin(keys, 0)
        if not await self._below.pin(keys, seconds):
            return False
        if seconds:
            try:
                await self._tiers.pin(keys, seconds)
            except StorageRefusedError as error:
                logger.debug("pins: %s", error)
        return True

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        if self._below is not None and (absent := [key for key in keys if not self._tiers.has(key)]):
            await self._below.prefetch(absent)

    def expect(self, requests: Sequence[WaitingRequest]) -> None:
        self._prefetcher.expect(requests)

    # ---- Bytes

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        if self._below is None:
            return await super().receive(job, key, first, memory)
        return await self._below.receive(job, key, first, memory)

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        """Deliver from both in the same batches. Pieces that the pool has lost are delivered from below."""
        async with self._prefetcher.pausing_for(job, plan.keys):
            while True:
                with LocalHits(self._tiers, plan, self._metrics) as hits:
                    self._prefetcher.note_use(hits.resident)
                    done = await self._deliver_joined(job, hits)
                    hits.count(done)
                    lost = hits.drop_lost(done.results) if self._below is not None else []
                for piece in lost:
                    done.results[piece] = Result.SKIPPED
                    done.failures.pop(piece, None)
                if not lost or done.failures or done.stop is not None or (done.results == Result.OK).any():
                    return done.padded(len(plan.pieces))

    async def _deliver_joined(self, job: Job, hits: LocalHits) -> Delivered:
        """Deliver the local hits together with pieces from below, and keep what comes from there."""
        if self._below is None or hits.local.all():
            return await self._deliver_local(job, hits)
        fill = ReadThroughFill(self._tiers, hits.plan, hits.local)
        done: Delivered | None = None
        try:
            done = await self._below.deliver(job, replace(hits.plan, hooks=[fill, hits]))
        except StorageError as error:
            if not hits.local.any():
                raise
            done = await self._deliver_local(job, hits, error)
        finally:
            fill.finish(None if done is None else done.results)
        return done

    async def _deliver_local(self, job: Job, hits: LocalHits, error: StorageError | None = None) -> Delivered:
        """Deliver what the pool has, without a socket. Other pieces fail with ``error``, or else are not stored."""
        plan = hits.plan
        table = plan.pieces
        done = Delivered(np.full(len(table), Result.SKIPPED, np.uint32))
        ends: dict[int, int] = {}  # of each group, the first chunk that the pool lacks
        groups, chunks = table["group"].tolist(), table["chunk"].tolist()
        lacking = np.flatnonzero(~hits.local).tolist()
        for piece in lacking:
            ends[groups[piece]] = min(chunks[piece], ends.get(groups[piece], chunks[piece]))
        useful = [piece for piece in range(len(table)) if chunks[piece] < ends.get(groups[piece], chunks[piece] + 1)]
        if useful:
            batch = replace(plan, hooks=[hits]).batch(useful)
            fetching, fetch = self._resources.fetching, self._resources.pipeline.fetch
            try:
                with job.interruptible(batch.cancel):
                    await asyncio.get_running_loop().run_in_executor(fetching, fetch, batch)
            finally:
                batch.release()
            self._metrics.totals["batches"] += 1
            done.results[useful] = batch.pieces["result"]
        for piece in lacking:
            if chunks[piece] == ends[groups[piece]]:
                done.results[piece] = Result.NOT_FOUND if error is None else Result.DISCONNECTED
                done.failures[piece] = Failure(Result(int(done.results[piece])), error)
        for piece in np.flatnonzero((done.results != Result.OK) & (done.results != Result.SKIPPED)).tolist():
            done.failures.setdefault(piece, Failure(Result(int(done.results[piece]))))
        return done

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Put a record into the pool, and below, unless it is plain, of a preempted request, or to be kept elsewhere.

        Above another source the pool takes it if it has room now; alone it waits for room.
        """
        if record.keep == pb.KEEP_STORAGE and self._below is not None:
            return await self._below.put(job, key, record)
        local = await self._tiers.put(job, key, record, wait=self._below is None)
        only_local = record.saved or record.plain or record.keep == pb.KEEP_LOCAL
        if local and only_local:
            return Result.OK, ""
        if self._below is None:
            refusal = f"{self._tiers.name} have no room for it; give them more memory, or devices"
            return (Result.OK, "") if local else (Result.REFUSED, refusal)
        if record.plain or record.keep == pb.KEEP_LOCAL:
            return Result.REFUSED, f"{self._tiers.name} have no room for it just now"
        try:
            return await self._below.put(job, key, record)
        except StorageUnavailableError as error:
            if not local:
                raise
            logger.debug("record %s is in the local tiers only: %s", key.hex(), error)
            return Result.OK, ""

    async def delete(self, key: bytes) -> None:
        self._tiers.drop(key)
        if self._below is not None:
            await self._below.delete(key)
