"""Fetch: one batch from heads to delivered pieces, and what to do when it does not go as planned.

A fetch ends with the set of pieces that were delivered and verified, and one outcome. Two things are tried twice, once
each: what does not pass its checks is read again, head and body, since it may have been replaced after its head was
remembered, or damaged on the way; and connections that broke (an idle one that the server closed, a
server that was restarted) are made again. In a cluster, what a replica does not have is asked of its master once more.
Everything else is a miss with its reason: it costs its group the chunks from there on, and other groups nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dpu_dataplane.batches import Buffers, End, FetchPlan, Wanted, plan_fetch
from dpu_dataplane.catalog import Catalog, Fault
from dpu_dataplane.interference import TURN_S, InterferenceBudget
from dpu_dataplane.jobs import ENDINGS, Job, Turnstile, ending_of
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.progress import LayerProgress
from dpu_dataplane.registrations import Registration
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Cold, Failure, Found, Order, Source, Stored
from dpu_dataplane.tracing import Tracer
from shadowserve import native
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.native import Result
from shadowserve.pieces import Flags, leading_chunks, leading_layers, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["FetchPart", "Fetcher"]

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

_FRESH: Final = "what is remembered of heads is forgotten"
_AUTHORITATIVE: Final = "copies are not asked any more"
_RECOVERED: Final = "it was found out who has what now"

logger = logging.getLogger(__name__)


class FetchPart:
    """What a fetch wants of one group, and how far it is.

    Args:
        registration: that it goes to.
        layout: of the chunks.
        offset: of the first chunk's place.
        length: bytes from there on that chunks go to.
        keys: of the chunks.
        wanted: pieces, as the wire has a set of them by layer and chunk; nothing for all.

    Raises:
        ValueError: the set is of other layers or chunks.

    Attributes:
        wanted: pieces, by layer and chunk.
        delivered: pieces that are in place.
        left: pieces that may still be had and have a place.
        outside: whether pieces are wanted that have none.
    """

    def __init__(
        self,
        registration: Registration,
        layout: ChunkLayout,
        offset: int,
        length: int,
        keys: Sequence[bytes],
        wanted: bytes,
    ) -> None:
        self.registration, self.offset, self.length = registration, offset, length
        self.layout = layout
        self.keys = keys
        self._wanted = wanted
        self.wanted = np.zeros((0, 0), np.bool_)
        unpack(wanted, self.layout.layers, len(keys))
        self.delivered = self.left = np.zeros((0, 0), np.bool_)
        self.outside = False

    def begin(self, chunks_max: int, layers_max: int) -> None:
        """Make the sets, which calls that wait for their turn take no memory for; of the first wanted ones at most."""
        shape = self.layout.layers, len(self.keys)
        self.wanted = unpack(self._wanted, *shape) if self._wanted else np.ones(shape, np.bool_)
        self.delivered = np.zeros(shape, np.bool_)
        self.left = self.wanted.copy()
        self.end(self.length // self.layout.raw_bytes)
        wanted = np.flatnonzero(self.wanted.any(axis=0))
        if len(wanted) > chunks_max:
            self.end(int(wanted[chunks_max]))
        wanted = np.flatnonzero(self.wanted.any(axis=1))
        if len(wanted) > layers_max:
            self.left[int(wanted[layers_max]) :] = False
        self.outside = bool((self.wanted & ~self.left).any())

    def end(self, chunk: int) -> None:
        """Give up what is behind a chunk, and itself."""
        self.left[:, chunk:] = False

    def with_pieces(self, layers: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint32]) -> Flags:
        """Return what is in place, and some pieces: the first layer and the one behind the last of each, its chunk."""
        there = self.delivered.copy()
        counts = layers[:, 1] - layers[:, 0]
        of = np.repeat(np.arange(len(layers)), counts)
        before = np.cumsum(counts) - counts
        there[layers[of, 0] + np.arange(len(of)) - before[of], chunks[of]] = True
        return there

    def take(self, layers: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint32]) -> None:
        """Take note of pieces that are in place."""
        self.delivered = self.with_pieces(layers, chunks)
        self.left &= ~self.delivered

    def group(self) -> native.Group:
        """Return where a batch's pieces go, and as what."""
        return native.Group.of(self.layout, self.registration.region(self.offset, self.length))


class _Ending(NamedTuple):
    outcome: pb.Outcome
    detail: str


@dataclass
class _Progress:
    """What a fetch has done so far.

    Attributes:
        word: where to say how far it is: how many leading layers are in place, or chunks in the order of chunks.
        window_s: seconds that the caller computes with each layer; 0 where it does not know.
        mover: of the bytes, for the interference budget.
        asked: group and chunk of each key that heads were asked for, and whether its head was only remembered.
        tried: second tries that were made.
        cold: keys of records that are in object storage alone, for which it gives up its turn.
        drawn: that was done, or there were none.
        endings: of groups, as they came.
    """

    parts: Sequence[FetchPart]
    layerwise: bool
    word: native.Region | None = None
    window_s: float = 0.0
    mover: Mover = Mover.FETCH
    fetched_bytes: int = 0
    tried: frozenset[str] = frozenset()
    cold: Sequence[bytes] = ()
    drawn: bool = False
    asked: dict[tuple[int, int], bool] = field(default_factory=dict)
    endings: list[_Ending] = field(default_factory=list)

    def next_chunks(self) -> list[tuple[int, int]]:
        """Return group and chunk of what is left, as many as one question is enough for, chunk by chunk."""
        left = [np.flatnonzero(part.left.any(axis=0)) for part in self.parts]
        groups = np.repeat(np.arange(len(left)), [len(chunks) for chunks in left])
        chunks = np.concatenate(left)
        order = np.lexsort((groups, chunks))[:QUESTION_KEYS_MAX]
        return list(zip(groups[order].tolist(), chunks[order].tolist(), strict=True))

    def told(self, plan: FetchPlan, pieces: npt.NDArray[np.void]) -> native.Progress | None:
        """Return how far the fetch is before a batch of some of a plan's pieces, and how far that can bring it."""
        if self.word is None:
            return None
        mine = np.isin(plan.pieces["slice_first"], pieces["slice_first"])
        brought = []
        for group, part in enumerate(self.parts):
            of = mine & (plan.pieces["group"] == group)
            brought.append(part.with_pieces(plan.layers[of], plan.pieces["chunk"][of]))
        before, after = (self._leading(there) for there in ([part.delivered for part in self.parts], brought))
        return native.Progress(word=self.word, first=before, end=after)

    def _leading(self, there: Sequence[Flags]) -> int:
        """Return how many leading layers, or chunks of every part, that makes."""
        if self.layerwise:
            return leading_layers(there[0], self.parts[0].wanted)
        counts = [leading_chunks(each, part.wanted) for each, part in zip(there, self.parts, strict=True)]
        ends = [len(part.keys) for part in self.parts]
        return min((count for count, end in zip(counts, ends, strict=True) if count < end), default=max(ends))

    def ending(self) -> _Ending:
        """Return what a fetch that has nothing left ends with."""
        if self.endings:
            return self.endings[0]
        if any(part.outside for part in self.parts):
            return _Ending(pb.OUTCOME_BATCH_FULL, "the region is full")
        return _Ending(pb.OUTCOME_COMPLETE, "")


class Fetcher:
    """Runs fetches, one batch at a time."""

    def __init__(
        self,
        executor: Executor,
        catalog: Catalog,
        source: Source,
        buffers: Buffers,
        metrics: Metrics,
        queue: Turnstile,
        tracer: Tracer,
        progress: LayerProgress,
        budget: InterferenceBudget,
    ) -> None:
        self._progress = progress
        self._budget = budget
        self._tracer = tracer
        self._executor = executor
        self._catalog = catalog
        self._source = source
        self._buffers = buffers
        self._metrics = metrics
        self.queue = queue

    async def run(
        self,
        job: Job,
        parts: Sequence[FetchPart],
        layerwise: bool,
        word: native.Region | None = None,
        window_s: float = 0.0,
        mover: Mover = Mover.FETCH,
        tell: Callable[[int], None] | None = None,
    ) -> pb.FetchResponse:
        """Deliver the leading pieces, in their order, that are stored, sound, and fit regions and buffers.

        Returns once nothing touches the regions any more.

        Args:
            job: whose.
            parts: that are wanted.
            layerwise: layer by layer, not chunk by chunk.
            word: where to say meanwhile how many leading layers are in place, of one part; or chunks, of every part.
            window_s: seconds that the caller computes with each layer; 0 where it does not know.
            mover: of the bytes, for the interference budget. Beside an engine that decodes a call ends early, with
                OUTCOME_BATCH_FULL: others wait for its end.
            tell: takes meanwhile how many leading layers are in place of one part, where there is no ``word``.

        Raises:
            QueueFull: too many fetches wait.
        """
        progress = _Progress(parts, layerwise, word, window_s, mover)
        try:
            with self._tracer.fetch(job.owner, sum(len(part.keys) for part in parts)):
                while True:
                    async with contextlib.AsyncExitStack() as stack:
                        with self._tracer.step(job.owner, "turn"):
                            await stack.enter_async_context(self.queue.turn(job))
                        most = _most(parts, self._budget.rate, layerwise=layerwise)
                        if tell is not None:
                            told = self._progress.told(parts[0].layout.layers, tell)
                            progress.word = await stack.enter_async_context(told)
                        for part in parts:
                            part.begin(*most)
                        outcome, detail = await self._run(job, progress)
                    if not progress.cold:
                        break
                    await self._draw_near(job, progress)
        except ENDINGS as error:
            outcome, detail = ending_of(error)
        delivered_bytes = sum(int(part.delivered.sum()) * part.layout.raw_bytes // part.layout.layers for part in parts)
        self._metrics.fetched_bytes += progress.fetched_bytes
        self._metrics.delivered_bytes += delivered_bytes
        return pb.FetchResponse(
            delivered=[pack(part.delivered) for part in parts],
            outcome=outcome,
            detail=detail,
            fetched_bytes=progress.fetched_bytes,
            delivered_bytes=delivered_bytes,
        )

    async def _run(self, job: Job, progress: _Progress) -> _Ending:
        """Try until the outcome is clear; each turn of the loop gets further, or uses up one of the second tries."""
        parts = progress.parts
        while chunks := progress.next_chunks():
            keys = [parts[group].keys[chunk] for group, chunk in chunks]
            with self._tracer.step(job.owner, "heads", len(keys)):
                fresh = _FRESH in progress.tried
                asked = self._catalog.find(keys, fresh=fresh, waiting=progress.drawn)
                found = await job.within(asked, "asking storage for heads")
            if cold := [key for key, (each, _) in zip(keys, found, strict=True) if isinstance(each, Cold)]:
                progress.cold = cold
                break  # others have their turn until these are nearer
            progress.drawn = True
            progress.asked = {place: remembered for place, (_, remembered) in zip(chunks, found, strict=True)}
            with self._tracer.step(job.owner, "plan", len(keys)):
                plan = await self._plan(progress, {place: each for place, (each, _) in zip(chunks, found, strict=True)})
            stored = {key: each for key, (each, _) in zip(keys, found, strict=True) if isinstance(each, Stored)}
            if len(plan.pieces) and await self._round(job, progress, plan, stored):
                continue
            again = [self._end(progress, group, end, fresh) for group, end in plan.ends.items()]
            if any(again):
                progress.tried |= {_FRESH}
            elif plan.full and any(part.delivered.any() for part in parts) and progress.next_chunks():
                return _Ending(pb.OUTCOME_BATCH_FULL, "the buffers hold no more")
        return progress.ending()

    async def _draw_near(self, job: Job, progress: _Progress) -> None:
        """Wait, without a turn, until object storage has brought what is cold, as far as it can be had."""
        with self.queue.aside(job), contextlib.suppress(StorageError):
            await job.within(self._catalog.find(progress.cold, fresh=False), "waiting for object storage")
        progress.drawn, progress.cold = True, []

    async def _plan(self, progress: _Progress, found: Mapping[tuple[int, int], Found]) -> FetchPlan:
        of: list[dict[int, Found]] = [{} for _ in progress.parts]
        for (group, chunk), each in found.items():
            of[group][chunk] = each
        wanted = [
            Wanted(part.keys, part.layout, part.left, mine) for part, mine in zip(progress.parts, of, strict=True)
        ]
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, plan_fetch, wanted, progress.layerwise, self._buffers, self._catalog.codecs
        )

    def _order(
        self,
        job: Job,
        progress: _Progress,
        plan: FetchPlan,
        places: Sequence[tuple[int, int]],
        stored: Mapping[bytes, Stored],
        rate: int,
    ) -> Order:
        """Return what the source is to deliver of a plan, at so many bytes a second; 0: no bound."""
        return Order(
            [progress.parts[group].keys[chunk] for group, chunk in places],
            plan.pieces,
            lambda pieces: native.Batch(
                pieces=pieces,
                slices=plan.slices,
                groups=[part.group() for part in progress.parts],
                deadline_ns=job.deadline_ns,
                progress=progress.told(plan, pieces),
                rate=rate,
            ),
            _AUTHORITATIVE in progress.tried,
            progress.layerwise,
            progress.window_s,
            stored,
        )

    async def _round(self, job: Job, progress: _Progress, plan: FetchPlan, stored: Mapping[bytes, Stored]) -> bool:
        """Run a plan, and take note of what it delivered; return whether what failed is worth another try."""
        groups, chunks = plan.pieces["group"], plan.pieces["chunk"]
        places = list(zip(groups.tolist(), chunks.tolist(), strict=True))
        sizes = [part.layout.raw_bytes // part.layout.layers for part in progress.parts]
        moved = (plan.layers[:, 1] - plan.layers[:, 0]) * np.array(sizes, np.int64)[groups]
        async with self._budget.turn(progress.mover, int(moved.sum()), job) as turn:
            with self._tracer.step(job.owner, "batch", len(plan.pieces)):
                order = self._order(job, progress, plan, places, stored, turn.rate)
                done = await self._source.deliver(job, order)
            in_place = done.results == Result.OK
            turn.moved_bytes = int(moved[in_place].sum())
        progress.fetched_bytes += done.received_bytes
        for group, part in enumerate(progress.parts):
            mine = in_place & (groups == group)
            part.take(plan.layers[mine], chunks[mine])
        if done.stop is not None:
            raise done.stop
        assert in_place.any() or done.failures, f"{self._source.name} neither delivered anything nor failed"
        firsts: dict[int, tuple[int, Failure]] = {}
        for index, failure in done.failures.items():
            group, chunk = places[index]
            if group not in firsts or chunk < firsts[group][0]:
                firsts[group] = chunk, failure
        remedies = [await self._failed(job, progress, group, *first) for group, first in firsts.items()]
        progress.tried |= set(filter(None, remedies))
        return any(remedies)

    async def _failed(self, job: Job, progress: _Progress, group: int, chunk: int, failure: Failure) -> str:
        """End a group at a chunk that failed, or prepare another try, and return which."""
        part, result = progress.parts[group], failure.result
        damaged = result in (Result.CHECKSUM, Result.BAD_DATA)  # perhaps only on the way here
        stale = result in _STALE_HINTS and (damaged or progress.asked[group, chunk])
        if stale and _FRESH not in progress.tried:
            self._catalog.forget(part.keys[chunk:])
            return _FRESH
        if failure.copy and _AUTHORITATIVE not in progress.tried:
            return _AUTHORITATIVE
        if failure.recover is not None and _RECOVERED not in progress.tried:
            await job.within(failure.recover(), "looking for a node of the cluster")
            return _RECOVERED
        part.end(chunk)
        progress.endings.append(self._judged(part, part.keys[chunk], failure))
        return ""

    def _judged(self, part: FetchPart, key: bytes, failure: Failure) -> _Ending:
        """Return what a failure at ``key`` means, and see to it that a corrupt record is not offered again."""
        result, error = failure.result, failure.error
        self._catalog.forget([key])
        if error is not None:
            return _Ending(_storage_outcome(isinstance(error, StorageRefusedError)), f"chunk {key.hex()}: {error}")
        outcome = _OUTCOMES.get(result, pb.OUTCOME_INTERNAL)
        detail = f"chunk {key.hex()}: {native.result_text(result)}"
        if failure.said:
            detail += f" ({failure.said})"
        if outcome == pb.OUTCOME_CORRUPT:
            self._catalog.condemn(part.layout.namespace, key, Fault(outcome, native.result_text(result)))
        elif outcome == pb.OUTCOME_INTERNAL:
            logger.error("a batch failed with %s at %s", result.name, detail)
        return _Ending(outcome, detail)

    def _end(self, progress: _Progress, group: int, end: End, fresh: bool) -> bool:
        """End a group where its heads say so, unless only a remembered one does; return whether to ask again."""
        part, key = progress.parts[group], progress.parts[group].keys[end.chunk]
        if not part.left[:, end.chunk].any():
            return False  # it ended before that
        if end.unanswered is None and progress.asked[group, end.chunk] and not fresh:
            return True
        part.end(end.chunk)
        if end.unanswered is not None:
            outcome = _storage_outcome(end.unanswered.refused)
            progress.endings.append(_Ending(outcome, f"chunk {key.hex()}: {end.unanswered.reason}"))
            return False
        self._catalog.forget([key])
        if end.fault is None:
            progress.endings.append(_Ending(pb.OUTCOME_ABSENT, f"chunk {key.hex()} is not stored"))
        else:
            self._catalog.condemn(part.layout.namespace, key, end.fault)
            progress.endings.append(_Ending(end.fault.outcome, f"chunk {key.hex()}: {end.fault.reason}"))
        return False


def _most(parts: Sequence[FetchPart], rate: int, *, layerwise: bool) -> tuple[int, int]:
    """Return how many chunks, and layers, of each part a call may deliver beside an engine that decodes.

    One at least; all of both where nothing decodes. Others wait for the call's end.
    """
    chunks, layers = max(len(part.keys) for part in parts), max(part.layout.layers for part in parts)
    if not rate:
        return chunks, layers
    size = int(rate * TURN_S)
    if layerwise:
        each = sum(len(part.keys) * part.layout.raw_bytes // part.layout.layers for part in parts)
        return chunks, max(size // each, 1)
    return max(size // sum(part.layout.raw_bytes for part in parts), 1), layers


def _storage_outcome(refused: bool) -> pb.Outcome:
    return pb.OUTCOME_STORAGE_REFUSED if refused else pb.OUTCOME_STORAGE_UNAVAILABLE
