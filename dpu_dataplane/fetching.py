"""Fetch: one round from heads to delivered chunks, and what to do when it does not go as planned.

A fetch ends with the leading chunks that were delivered and verified, and one outcome. Two things are tried twice, once
each: what does not pass its checks is read again, head and body, since it may have been replaced after its head was
remembered, or damaged on the way; and connections that broke (an idle one that the server closed, a
server that was restarted) are made again. In a cluster, what a replica does not have is asked of its master once more.
Everything else is a miss with its reason.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpu_dataplane.catalog import Catalog, Fault
from dpu_dataplane.destinations import Destination
from dpu_dataplane.jobs import Job, Stop, Turnstile
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.rounds import Buffers, FetchPlan, plan_fetch
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Delivered, Order, Source
from dpu_dataplane.tracing import Tracer
from shadowserve import native
from shadowserve.errors import StorageRefusedError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["FetchRegion", "Fetcher"]

_STALE_HINTS = (Result.CHECKSUM, Result.BAD_DATA, Result.NOT_FOUND, Result.PROTOCOL, Result.NOT_SUPPORTED)
_OUTCOMES = {
    Result.CHECKSUM: pb.OUTCOME_CORRUPT,
    Result.BAD_DATA: pb.OUTCOME_CORRUPT,
    Result.NOT_FOUND: pb.OUTCOME_ABSENT,
    Result.REFUSED: pb.OUTCOME_STORAGE_REFUSED,
    Result.REDIRECTED: pb.OUTCOME_STORAGE_REFUSED,
    Result.PROTOCOL: pb.OUTCOME_STORAGE_UNAVAILABLE,
    Result.DISCONNECTED: pb.OUTCOME_STORAGE_UNAVAILABLE,
    Result.DEADLINE: pb.OUTCOME_DEADLINE,
    Result.CANCELLED: pb.OUTCOME_CANCELLED,
    Result.NOT_SUPPORTED: pb.OUTCOME_UNSUPPORTED_CODEC,
    Result.DEVICE: pb.OUTCOME_DEVICE,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchRegion:
    """Where to: ``length`` bytes from ``offset`` of a destination."""

    destination: Destination
    offset: int
    length: int


@dataclass
class _Progress:
    """What a fetch has done so far."""

    done: int = 0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    fresh: bool = False
    reconnected: bool = False
    authoritative: bool = False
    found: list[bool] = field(default_factory=list)  # of the keys of the plan in hand: was its head only remembered


class Fetcher:
    """Runs fetches, one round at a time."""

    def __init__(
        self,
        executor: Executor,
        catalog: Catalog,
        source: Source,
        buffers: Buffers,
        metrics: Metrics,
        queue: Turnstile,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._executor = executor
        self._catalog = catalog
        self._source = source
        self._buffers = buffers
        self._metrics = metrics
        self.queue = queue

    async def run(self, job: Job, region: FetchRegion, keys: Sequence[bytes]) -> pb.FetchResponse:
        """Deliver the leading chunks that are stored, sound, and fit region and buffers.

        Returns once nothing touches the region any more.

        Raises:
            QueueFull: too many fetches wait.
        """
        progress = _Progress()
        try:
            with self._tracer.fetch(job.owner, len(keys)):
                async with contextlib.AsyncExitStack() as stack:
                    with self._tracer.step(job.owner, "turn"):
                        await stack.enter_async_context(self.queue.turn(job))
                    outcome, detail = await self._run(job, region, keys, progress)
        except Stop as stop:
            outcome, detail = stop.outcome, stop.detail
        except StorageUnavailableError as error:
            outcome, detail = pb.OUTCOME_STORAGE_UNAVAILABLE, str(error)
        except StorageRefusedError as error:
            outcome, detail = pb.OUTCOME_STORAGE_REFUSED, str(error)
        self._metrics.fetched_bytes += progress.fetched_bytes
        self._metrics.delivered_bytes += progress.delivered_bytes
        return pb.FetchResponse(
            delivered=pack(np.arange(len(keys)) < progress.done),
            outcome=outcome,
            detail=detail,
            fetched_bytes=progress.fetched_bytes,
            delivered_bytes=progress.delivered_bytes,
        )

    async def _run(
        self, job: Job, region: FetchRegion, keys: Sequence[bytes], progress: _Progress
    ) -> tuple[pb.Outcome, str]:
        """Try until the outcome is clear; each turn of the loop gets further, or uses up one of the two retries."""
        layout = region.destination.layout
        wanted = keys[: min(region.length // layout.raw_bytes, QUESTION_KEYS_MAX)]
        while True:
            left = wanted[progress.done :]
            if not left:
                full = len(wanted) < len(keys)
                return (pb.OUTCOME_ROUND_FULL, "the region is full") if full else (pb.OUTCOME_COMPLETE, "")
            with self._tracer.step(job.owner, "heads", len(left)):
                found = await job.within(self._catalog.find(left, fresh=progress.fresh), "asking storage for heads")
            progress.found = [remembered for _, remembered in found]
            loop = asyncio.get_running_loop()
            with self._tracer.step(job.owner, "plan", len(left)):
                plan = await loop.run_in_executor(
                    self._executor, plan_fetch, left, found, layout, self._buffers, self._catalog.codecs
                )
            if len(plan.chunks):
                done = await self._round(job, region, plan, left, progress)
                if done.result is not Result.OK:
                    if not await self._try_again(job, done, left, progress):
                        return self._failed(region, left[done.count], done)
                    continue
                progress.found = progress.found[done.count :]
                left = left[done.count :]
            if plan.full:
                return pb.OUTCOME_ROUND_FULL, "the buffers hold no more"
            if plan.unanswered is not None:
                refused = plan.unanswered.refused
                outcome = pb.OUTCOME_STORAGE_REFUSED if refused else pb.OUTCOME_STORAGE_UNAVAILABLE
                return outcome, f"chunk {left[0].hex()}: {plan.unanswered.reason}"
            if plan.absent or plan.fault is not None:
                if not progress.found[0] or progress.fresh:
                    return self._ended(region, left[0], plan.fault)
                progress.fresh = True

    async def _round(
        self, job: Job, region: FetchRegion, plan: FetchPlan, keys: Sequence[bytes], progress: _Progress
    ) -> Delivered:
        """Run a plan, and count what it delivered."""
        layout = region.destination.layout
        begin = region.offset + progress.done * layout.raw_bytes
        with self._tracer.step(job.owner, "round", len(plan.chunks)):
            order = Order(
                keys[: len(plan.chunks)],
                plan.chunks,
                lambda chunks: self._make_round(job, region.destination, begin, plan, chunks),
                progress.authoritative,
            )
            done = await self._source.deliver(job, order)
        progress.done += done.count
        progress.fetched_bytes += done.received_bytes
        progress.delivered_bytes += done.count * layout.raw_bytes
        if done.stop is not None:
            raise done.stop
        return done

    def _make_round(
        self, job: Job, destination: Destination, offset: int, plan: FetchPlan, chunks: npt.NDArray[np.void]
    ) -> native.Round:
        layout = destination.layout
        return native.Round(
            pieces=chunks,
            slices=plan.slices,
            groups=[native.Group.of(layout, destination.region(offset, len(plan.chunks) * layout.raw_bytes))],
            deadline_ns=job.deadline_ns,
        )

    async def _try_again(self, job: Job, done: Delivered, left: Sequence[bytes], progress: _Progress) -> bool:
        """Decide whether what failed at ``left[done.count]`` is worth another try, and prepare it."""
        result, count = done.result, done.count
        damaged = result in (Result.CHECKSUM, Result.BAD_DATA)  # perhaps only on the way here
        if result in _STALE_HINTS and (damaged or progress.found[count]) and not progress.fresh:
            self._catalog.forget(left[count:])
            progress.fresh = True
            return True
        if done.copy and not progress.authoritative:
            progress.authoritative = True
            return True
        if done.recover is not None and not progress.reconnected:
            progress.reconnected = True
            await job.within(done.recover(), "looking for a node of the cluster")
            return True
        return False

    def _failed(self, region: FetchRegion, key: bytes, done: Delivered) -> tuple[pb.Outcome, str]:
        """Return what a round's failure at ``key`` means, and see to it that a corrupt record is not offered again."""
        result = done.result
        self._catalog.forget([key])
        if done.error is not None:
            refused = isinstance(done.error, StorageRefusedError)
            outcome = pb.OUTCOME_STORAGE_REFUSED if refused else pb.OUTCOME_STORAGE_UNAVAILABLE
            return outcome, f"chunk {key.hex()}: {done.error}"
        outcome = _OUTCOMES.get(result, pb.OUTCOME_INTERNAL)
        detail = f"chunk {key.hex()}: {native.result_text(result)}"
        if done.said:
            detail += f" ({done.said})"
        if outcome == pb.OUTCOME_CORRUPT:
            self._catalog.condemn(region.destination.layout.namespace, key, Fault(outcome, native.result_text(result)))
        elif outcome == pb.OUTCOME_INTERNAL:
            logger.error("a round failed with %s at %s", result.name, detail)
        return outcome, detail

    def _ended(self, region: FetchRegion, key: bytes, fault: Fault | None) -> tuple[pb.Outcome, str]:
        """Return the outcome of a fetch whose next chunk is absent, or faulty by its head."""
        self._catalog.forget([key])
        if fault is None:
            return pb.OUTCOME_ABSENT, f"chunk {key.hex()} is not stored"
        self._catalog.condemn(region.destination.layout.namespace, key, fault)
        return fault.outcome, f"chunk {key.hex()}: {fault.reason}"
