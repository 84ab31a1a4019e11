"""Fetch: from a call's parts to delivered pieces, batch by batch, with retries, each at most once.

A record that fails its checks is read again with its header: it may have been replaced, or damaged on the way. A broken
connection is made again. In a cluster, a chunk that a replica lacks is read from its master. Every other failure is a
miss with its reason. It costs its group the chunks from there on, and other groups nothing.
"""

import asyncio
import contextlib
import logging
import mmap
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from dpu_dataplane.batches import Buffers, plan_fetch
from dpu_dataplane.catalog import Catalog
from dpu_dataplane.interference import TURN_S
from dpu_dataplane.jobs import ENDINGS, Job, JobQueue, Stop, ending_of, outcome_of, storage_outcome
from dpu_dataplane.plan import PROGRESS_BYTES, FetchPart, FetchPlan, GroupEnd
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.found import Cold, Fault, Found, Stored
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Delivered, Failure, Resources, Source
from dpu_dataplane.tracing import Tracer
from shadowserve import native, spans
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.native import Result
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier

_STALE_HINTS: Final = (Result.CHECKSUM, Result.BAD_DATA, Result.NOT_FOUND, Result.PROTOCOL, Result.NOT_SUPPORTED)
# The retries: each happens once.
_FRESH: Final = "read headers again"
_AUTHORITATIVE: Final = "read from masters"
_RECOVERED: Final = "update the map of nodes"

_WAIT_S: Final = 0.01
"""The thread's longest wait: it delays the next fetch's first layers by as much after a fetch that ended early."""
_COLD_TURN_S: Final = 0.5
"""Turn of a fetch of cold records while others wait for theirs: a slow bucket, or one that stalls, costs them this."""
_LOOK_INTERVAL_S: Final = 0.05  # between two looks for others that wait, after that time

logger = logging.getLogger(__name__)


class _Ending(NamedTuple):
    outcome: pb.Outcome
    detail: str


@dataclass
class Fetch:
    """A Fetch call and its progress."""

    parts: Sequence[FetchPart]  # wanted chunks, one part for each group
    layerwise: bool  # in the order of layers, not of chunks
    word: native.Region | None = None
    on_layers: Callable[[int], None] | None = None
    window_s: float = 0.0  # seconds that the engine computes with each layer; 0 if not known
    mover: Mover = Mover.FETCH  # mover of the bytes, for the interference budget
    fetched_bytes: int = 0  # stored bytes read
    tier_bytes: int = 0  # of these, from local tiers
    retries: frozenset[str] = frozenset()  # retries made
    cold: Mapping[bytes, bytes] = field(default_factory=dict)  # cold records to wait for: namespaces by key
    is_cold: bool = False  # its records are still on their way from object storage
    goes_on: bool = False  # it has let others have their turn, and takes another one
    waited: bool = False  # the fetch has waited for cold records, or there were none
    cached: dict[tuple[int, int], bool] = field(default_factory=dict)
    endings: list[_Ending] = field(default_factory=list)  # endings of groups, in the order in which they happened

    def remaining_chunks(self) -> list[tuple[int, int]]:
        """Return group and chunk of remaining pieces, chunk by chunk, as many as one lookup takes."""
        remaining = [np.flatnonzero(part.remaining.any(axis=0)) for part in self.parts]
        groups = np.repeat(np.arange(len(remaining)), [len(chunks) for chunks in remaining])
        chunks = np.concatenate(remaining)
        order = np.lexsort((groups, chunks))[:QUESTION_KEYS_MAX]
        return list(zip(groups[order].tolist(), chunks[order].tolist(), strict=True))

    def limits(self, rate: int) -> tuple[int, int]:
        """Return the most chunks and layers of each part: all, or beside a decoding engine a turn's at ``rate``."""
        chunks = max(len(part.keys) for part in self.parts)
        layers = max(part.layout.layers for part in self.parts)
        if not rate:
            return chunks, layers
        size = int(rate * TURN_S)
        if self.layerwise:
            return chunks, max(size // sum(len(part.keys) * part.piece_bytes for part in self.parts), 1)
        return max(size // sum(part.layout.raw_bytes for part in self.parts), 1), layers

    def delivered_bytes(self) -> int:
        return sum(int(part.delivered.sum()) * part.piece_bytes for part in self.parts)

    def ending(self) -> _Ending:
        if self.endings:
            return self.endings[0]
        if any(part.truncated for part in self.parts):
            return _Ending(pb.OUTCOME_BATCH_FULL, "the region is full")
        return _Ending(pb.OUTCOME_COMPLETE, "")


class LayerProgress:
    """Layer progress of the fetch that has its turn, for calls that report it in a stream.

    The C core writes the number of leading layers into a word. Callers without shared memory use one word in this
    process, and a thread that waits for its changes.
    """

    def __init__(self, pipeline: native.Pipeline) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._registered = native.RegisteredMemory.local(pipeline, self._memory)
        self._thread = ThreadPoolExecutor(1, "progress")

    @contextlib.asynccontextmanager
    async def follow(self, layers: int, on_layers: Callable[[int], None]) -> AsyncIterator[native.Region]:
        """Provide the word while in this context; call ``on_layers`` with its changes, on the event loop."""
        self._memory[:PROGRESS_BYTES] = bytes(PROGRESS_BYTES)
        reporting = asyncio.create_task(self._report(layers, on_layers))
        try:
            yield self._registered.region(0, PROGRESS_BYTES)
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting

    async def _report(self, layers: int, on_layers: Callable[[int], None]) -> None:
        loop, reported = asyncio.get_running_loop(), 0
        while reported < layers:
            now = await loop.run_in_executor(self._thread, native.progress_wait, self._memory, reported, _WAIT_S)
            if now > reported:
                reported = now
                on_layers(reported)

    def close(self) -> None:
        """End the thread, before the pipeline is closed. No fetch may be in progress."""
        self._thread.shutdown()
        self._registered.close()
        self._memory.close()


@dataclass(frozen=True)
class Fetcher:
    """Runs Fetch calls, one batch at a time."""

    resources: Resources
    catalog: Catalog
    source: Source
    buffers: Buffers
    queue: JobQueue
    tracer: Tracer
    progress: LayerProgress

    async def fetch(self, job: Job, fetch: Fetch) -> pb.FetchResponse:
        """Deliver the leading pieces that are stored, sound, and fit the regions and buffers.

        Beside an engine that decodes, the call ends early with OUTCOME_BATCH_FULL, because other calls wait. Returns
        once nothing reads or writes the regions any more. QueueFullError if too many fetches wait.
        """
        metrics, began_s, was_cold = self.resources.metrics, time.monotonic(), False
        try:
            with self.tracer.fetch(job.owner, sum(len(part.keys) for part in fetch.parts)):
                outcome, detail = await self._fetch_in_turn(job, fetch)
                while fetch.cold or fetch.goes_on:
                    if fetch.cold:
                        was_cold = True
                        await self._wait_for_cold(job, fetch)
                    outcome, detail = await self._fetch_in_turn(job, fetch)
        except ENDINGS as error:
            outcome, detail = ending_of(error)
        delivered_bytes = fetch.delivered_bytes()
        metrics.totals["fetched_bytes"] += fetch.fetched_bytes
        metrics.totals["delivered_bytes"] += delivered_bytes
        if fetch.fetched_bytes and not was_cold:
            pace = metrics.local_pace if 2 * fetch.tier_bytes >= fetch.fetched_bytes else metrics.storage_pace
            pace.add(fetch.fetched_bytes, (now_s := time.monotonic()) - began_s, now_s)
        return pb.FetchResponse(
            delivered=[pack(part.delivered) for part in fetch.parts],
            outcome=outcome,
            detail=detail,
            fetched_bytes=fetch.fetched_bytes,
            delivered_bytes=delivered_bytes,
        )

    async def _fetch_in_turn(self, job: Job, fetch: Fetch) -> _Ending:
        """Wait for the turn, and run batches until the outcome is known, or others get their turn."""
        async with contextlib.AsyncExitStack() as stack:
            with self.tracer.step(job.owner, "turn"):
                await stack.enter_async_context(self.queue.turn(job, again=fetch.goes_on))
            limits = fetch.limits(self.resources.budget.rate)
            if fetch.on_layers is not None:
                follow = self.progress.follow(fetch.parts[0].layout.layers, fetch.on_layers)
                fetch.word = await stack.enter_async_context(follow)
            for part in fetch.parts if not fetch.goes_on else ():
                part.start(*limits)
            fetch.goes_on = False
            return await self._fetch_batches(job, fetch)

    async def _fetch_batches(self, job: Job, fetch: Fetch) -> _Ending:
        """Look up, plan and run batches. Each iteration delivers something, ends a group, or uses up one retry."""
        while (chunks := fetch.remaining_chunks()) and not fetch.goes_on:
            keys = [fetch.parts[group].keys[chunk] for group, chunk in chunks]
            fresh = _FRESH in fetch.retries
            with self.tracer.step(job.owner, "headers", len(keys)):
                lookup = self.catalog.find(keys, fresh=fresh, waiting=fetch.waited, headers=fetch.layerwise)
                found = await job.within(lookup, "asking storage for headers")
            if any(isinstance(answer, Cold) for answer, _ in found):
                fetch.cold = {  # other fetches have their turn until these records are nearer
                    key: fetch.parts[group].layout.namespace
                    for (group, _), key, (answer, _) in zip(chunks, keys, found, strict=True)
                    if isinstance(answer, Cold)
                }
                break
            fetch.waited = True
            fetch.is_cold = any(isinstance(answer, Stored) and answer.tier == Tier.COLD for answer, _ in found)
            fetch.cached = {chunk: cached for chunk, (_, cached) in zip(chunks, found, strict=True)}
            with self.tracer.step(job.owner, "plan", len(keys)):
                plan = await self._plan(fetch, {chunk: each for chunk, (each, _) in zip(chunks, found, strict=True)})
            records = {key: answer for key, (answer, _) in zip(keys, found, strict=True) if isinstance(answer, Stored)}
            if len(plan.pieces) and await self._fetch_batch(job, fetch, replace(plan, records=records)):
                continue
            retry = [self._end_group(fetch, group, end, fresh) for group, end in plan.ends.items()]
            if any(retry):
                fetch.retries |= {_FRESH}
            elif plan.full and any(part.delivered.any() for part in fetch.parts) and fetch.remaining_chunks():
                return _Ending(pb.OUTCOME_BATCH_FULL, "the buffers hold no more")
        return fetch.ending()

    async def _wait_for_cold(self, job: Job, fetch: Fetch) -> None:
        """Wait, without a turn, until object storage has brought the cold records that it can bring, or their headers
        in layer order, which begins while the rest comes."""
        with self.queue.aside(job), contextlib.suppress(StorageError), spans.span("dpu.cold", count=len(fetch.cold)):
            finding = self.catalog.find(list(fetch.cold), fresh=False, headers=fetch.layerwise)
            found = await job.within(finding, "waiting for object storage")
            if fetch.layerwise:
                for (key, namespace), (answer, _) in zip(fetch.cold.items(), found, strict=True):
                    self.catalog.keep(key, namespace, answer)
        fetch.waited, fetch.cold = True, {}

    async def _plan(self, fetch: Fetch, found: Mapping[tuple[int, int], Found]) -> FetchPlan:
        of_part: list[dict[int, Found]] = [{} for _ in fetch.parts]
        for (group, chunk), answer in found.items():
            of_part[group][chunk] = answer
        for part, answers in zip(fetch.parts, of_part, strict=True):
            part.found = answers
        return await asyncio.get_running_loop().run_in_executor(
            self.resources.fetching, plan_fetch, fetch.parts, fetch.layerwise, self.buffers, self.catalog.codecs
        )

    async def _fetch_batch(self, job: Job, fetch: Fetch, plan: FetchPlan) -> bool:
        """Deliver a plan through the source; return whether a failure is worth a retry."""
        groups, chunks = plan.pieces["group"], plan.pieces["chunk"]
        sizes = np.array([part.piece_bytes for part in fetch.parts], np.int64)
        moved = (plan.layers[:, 1] - plan.layers[:, 0]) * sizes[groups]
        async with self.resources.budget.turn(fetch.mover, int(moved.sum()), job) as turn:
            with self.tracer.step(job.owner, "batch", len(plan.pieces)):
                plan = replace(
                    plan,
                    deadline_ns=job.deadline_ns,
                    rate=turn.rate,
                    word=fetch.word,
                    authoritative=_AUTHORITATIVE in fetch.retries,
                    window_s=fetch.window_s,
                )
                done, interrupted = await self._deliver(job, fetch, plan)
            in_place = done.results == Result.OK
            turn.moved_bytes = int(moved[in_place].sum())
        fetch.fetched_bytes += done.received_bytes
        fetch.tier_bytes += done.tier_bytes
        for group, part in enumerate(fetch.parts):
            mine = in_place & (groups == group)
            part.mark_delivered(plan.layers[mine], chunks[mine])
        if done.stop is not None:
            raise done.stop
        if interrupted and not done.failures:
            fetch.goes_on = bool(fetch.remaining_chunks())
            return True
        assert in_place.any() or done.failures, f"{self.source.name} neither delivered anything nor failed"
        firsts: dict[int, tuple[int, Failure]] = {}  # of each group, its first chunk with a failure
        for piece, failure in done.failures.items():
            group, chunk = int(groups[piece]), int(chunks[piece])
            if group not in firsts or chunk < firsts[group][0]:
                firsts[group] = chunk, failure
        retries = [await self._handle_failure(job, fetch, group, *first) for group, first in firsts.items()]
        fetch.retries |= set(filter(None, retries))
        return any(retries)

    async def _deliver(self, job: Job, fetch: Fetch, plan: FetchPlan) -> tuple[Delivered, bool]:
        """Deliver a plan through the source; return whether it ended early, because others waited for their turn."""
        if not fetch.is_cold:
            return await self.source.deliver(job, plan), False
        turn = job.part()
        ending = asyncio.create_task(self._end_cold_turn(turn))
        try:
            with job.interruptible(turn.cancel):
                done = await self.source.deliver(turn, plan)
        except Stop as stop:
            done = Delivered(np.full(len(plan.pieces), Result.SKIPPED, np.uint32), stop=stop)
        finally:
            ending.cancel()
        if job.cancelled or not turn.cancelled:
            return done, False
        failures = {piece: each for piece, each in done.failures.items() if each.result is not Result.CANCELLED}
        return replace(done, failures=failures, stop=None), True

    async def _end_cold_turn(self, turn: Job) -> None:
        await asyncio.sleep(_COLD_TURN_S)
        while not self.queue.others_want(turn) and not self.resources.budget.wanted:
            await asyncio.sleep(_LOOK_INTERVAL_S)
        turn.cancel()

    async def _handle_failure(self, job: Job, fetch: Fetch, group: int, chunk: int, failure: Failure) -> str:
        """Prepare a retry and return its name; without one, end the group at the chunk."""
        part, result = fetch.parts[group], failure.result
        damaged = result in (Result.CHECKSUM, Result.BAD_DATA)  # perhaps only on the way here
        stale = result in _STALE_HINTS and (damaged or fetch.cached[group, chunk])
        if stale and _FRESH not in fetch.retries:
            self.catalog.forget(part.keys[chunk:])
            return _FRESH
        if failure.from_replica and _AUTHORITATIVE not in fetch.retries:
            return _AUTHORITATIVE
        if failure.recover is not None and _RECOVERED not in fetch.retries:
            await job.within(failure.recover(), "looking for a node of the cluster")
            return _RECOVERED
        part.drop_from(chunk)
        fetch.endings.append(self._ending_of_failure(part, part.keys[chunk], failure))
        return ""

    def _ending_of_failure(self, part: FetchPart, key: bytes, failure: Failure) -> _Ending:
        """Convert a failure; a corrupt record goes into quarantine."""
        result, error = failure.result, failure.error
        self.catalog.forget([key])
        if error is not None:
            refused = isinstance(error, StorageRefusedError)
            return _Ending(storage_outcome(refused=refused), f"chunk {key.hex()}: {error}")
        outcome = outcome_of(result)
        detail = f"chunk {key.hex()}: {native.result_text(result)}"
        if failure.reply:
            detail += f" ({failure.reply})"
        if outcome == pb.OUTCOME_CORRUPT:
            self.catalog.quarantine(part.layout.namespace, key, Fault(outcome, native.result_text(result)))
        elif outcome == pb.OUTCOME_INTERNAL:
            logger.error("a batch failed with %s at %s", result.name, detail)
        return _Ending(outcome, detail)

    def _end_group(self, fetch: Fetch, group: int, end: GroupEnd, fresh: bool) -> bool:
        """End a group where its headers end it. If that header came from the cache, return True: look it up again."""
        part, key = fetch.parts[group], fetch.parts[group].keys[end.chunk]
        if not part.remaining[:, end.chunk].any():
            return False  # it has ended before that chunk
        if end.unanswered is None and fetch.cached[group, end.chunk] and not fresh:
            return True
        part.drop_from(end.chunk)
        if end.unanswered is not None:
            outcome = storage_outcome(refused=end.unanswered.refused)
            fetch.endings.append(_Ending(outcome, f"chunk {key.hex()}: {end.unanswered.reason}"))
            return False
        self.catalog.forget([key])
        if end.fault is None:
            fetch.endings.append(_Ending(pb.OUTCOME_ABSENT, f"chunk {key.hex()} is not stored"))
        else:
            self.catalog.quarantine(part.layout.namespace, key, end.fault)
            fetch.endings.append(_Ending(end.fault.outcome, f"chunk {key.hex()}: {end.fault.reason}"))
        return False
