"""Store: chunks from a region to records in storage; the path backwards, at lower priority than fetching.

Chunks that storage holds already are skipped. The rest are encoded a batch at a time, as many as there are threads that
encode, as far ahead as the store buffer takes, while those of the batches before are put: one after the other, so that
what was put when a job ends early is a prefix of them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from dpu_dataplane.batches import ALIGNMENT, Buffers, StorePlan, encoded_bound, plan_store
from dpu_dataplane.catalog import Catalog, Fault, inspect_head
from dpu_dataplane.interference import TURN_S, InterferenceBudget
from dpu_dataplane.jobs import ENDINGS, Job, Stop, Turnstile, ending_of
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.registrations import Registration
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Cold, Encoded, Found, Source, Stored, Unanswered
from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout
from shadowserve.errors import StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import encode_head

__all__ = ["Storer"]

_OUTCOMES = {
    Result.NOT_FINITE: pb.OUTCOME_NOT_STORABLE,
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


@dataclass
class _Progress:
    """What a store goes by from its first chunk to its last, and what it has done so far."""

    parents: Mapping[bytes, bytes]
    lasts_ms: int
    codec: native.Codec
    slice_bytes: int
    plain: bool  # for devices to bring to where it is used
    mover: Mover
    held: dict[int, int] = field(default_factory=dict)  # bytes of each record that storage now holds, by its position


def _bound(layout: ChunkLayout, progress: _Progress) -> int:
    """Return how many bytes of the store buffer a chunk takes at most."""
    return -(-encoded_bound(layout, progress.codec, progress.slice_bytes) // ALIGNMENT) * ALIGNMENT


def _answered(found: Sequence[Found]) -> int:
    """Return how many leading chunks storage has said something of."""
    return next((index for index, each in enumerate(found) if isinstance(each, Unanswered)), len(found))


def _unanswered(key: bytes, found: Found) -> StorageError:
    assert isinstance(found, Unanswered)
    kind = StorageRefusedError if found.refused else StorageUnavailableError
    return kind(f"chunk {key.hex()}: {found.reason}")


class Storer:
    """Runs stores, one at a time.

    Args:
        pipeline: encodes, in the thread of ``executor``.
        executor: of one thread.
        catalog, source: what storage holds, and how records get there.
        buffers: of the pipeline.
        metrics: counts.
        codec: that new records have.
        slice_bytes: most bytes of symbols in a slice.
        queue: of stores.
        budget: that stores are held to.
        batch_chunks: that are encoded at a time, if the buffer takes twice as many.
    """

    def __init__(
        self,
        pipeline: native.Pipeline,
        executor: Executor,
        catalog: Catalog,
        source: Source,
        buffers: Buffers,
        metrics: Metrics,
        codec: native.Codec,
        slice_bytes: int,
        queue: Turnstile,
        budget: InterferenceBudget,
        batch_chunks: int,
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._catalog = catalog
        self._source = source
        self._buffers = buffers
        self._metrics = metrics
        self._codec = codec
        self._slice_bytes = slice_bytes
        self._budget = budget
        self._batch_chunks = batch_chunks
        self.queue = queue

    async def run(
        self,
        job: Job,
        registration: Registration,
        layout: ChunkLayout,
        offset: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes] = (),
        lasts_ms: int = 0,
        *,
        plain: bool = False,
        mover: Mover = Mover.STORE,
    ) -> pb.StoreResponse:
        """Store chunks that lie one after the other from ``offset``. Returns once nothing reads the region any more.

        ``parents`` are the chunks before each of them in its prompt, empty for a prompt's first; none at all where the
        host does not tell. After ``lasts_ms`` nobody needs them any more; 0: they are stored for good. ``plain`` ones
        are not compressed, and stay in tiers of this machine where there are any. ``mover`` says what for, for the
        interference budget.

        Raises:
            QueueFull: too many stores wait.
        """
        codec, slice_bytes = (native.Codec.NONE, DECODED_BYTES_MAX) if plain else (self._codec, self._slice_bytes)
        progress = _Progress(dict(zip(keys, parents, strict=bool(parents))), lasts_ms, codec, slice_bytes, plain, mover)
        try:
            async with self.queue.turn(job):
                for first in range(0, len(keys), QUESTION_KEYS_MAX):
                    await self._store(job, registration, layout, offset, keys, first, progress)
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        except ENDINGS as error:
            outcome, detail = ending_of(error)
        return pb.StoreResponse(
            stored=pack(np.isin(np.arange(len(keys)), list(progress.held))),
            outcome=outcome,
            detail=detail,
            raw_bytes=len(progress.held) * layout.raw_bytes,
            stored_bytes=sum(progress.held.values()),
        )

    async def _store(
        self,
        job: Job,
        registration: Registration,
        layout: ChunkLayout,
        offset: int,
        keys: Sequence[bytes],
        first: int,
        progress: _Progress,
    ) -> None:
        """Store the chunks from ``first`` on that one question is enough for."""
        part = keys[first : first + QUESTION_KEYS_MAX]
        held = self._source.find(part) if progress.plain else self._source.held(part)
        found = await job.within(held, "asking storage what it holds")
        room = self._buffers.store // _bound(layout, progress)
        batch_max = max(1, min(self._batch_chunks, room // 2))
        index, answered = 0, _answered(found)
        free = list(range(max(1, room // batch_max)))
        puts: deque[tuple[asyncio.Task[None], int]] = deque()  # on their way, and which place of the buffer they have
        try:
            while index < answered:
                batch: list[int] = []
                rate = self._budget.rate
                most = max(min(int(rate * TURN_S) // layout.raw_bytes, batch_max), 1) if rate else batch_max
                while index < answered and len(batch) < most:
                    length = await self._held_length(job, layout, part[index], found[index])
                    if length is None:
                        batch.append(first + index)
                    else:
                        progress.held[first + index] = length
                        self._catalog.available(part[index])
                    index += 1
                if batch:
                    while puts and (puts[0][0].done() or not free):
                        ended, place = puts.popleft()
                        free.append(place)
                        await ended
                    place = free.pop()  # the one given back last, of which most is still in a cache
                    at = place * batch_max
                    async with self._budget.turn(progress.mover, len(batch) * layout.raw_bytes, job):
                        encoded = await self._encode(job, registration, layout, offset, keys, batch, at, progress)
                    before = puts[-1][0] if puts else None
                    put = self._put_batch(before, job, *encoded, layout, keys, batch, progress)
                    puts.append((asyncio.create_task(put), place))
        finally:
            if puts:
                await puts[-1][0]  # what it ends with is of earlier chunks, and comes first
        if answered < len(part):
            raise _unanswered(part[answered], found[answered])

    async def _held_length(self, job: Job, layout: ChunkLayout, key: bytes, stored: Found) -> int | None:
        """Return the length of the record that storage holds, None where there is none that is any good.

        A faulty record would keep its place against a new one, records being immutable, so it is deleted first; unless
        it is good for others, which ends the job. A cold record counts without its head: its node checks it on its way.
        """
        suspect = self._catalog.is_quarantined(layout.namespace, key)
        if isinstance(stored, Cold):
            if not suspect:
                return stored.length
            await job.within(self._source.delete(key), "deleting a faulty record")
            return None
        if not isinstance(stored, Stored):
            return None
        judged = inspect_head(stored, key, layout.namespace, self._catalog.codecs)
        if not isinstance(judged, Fault) and not suspect:
            return stored.length
        if isinstance(judged, Fault) and not judged.replaceable:
            raise Stop(judged.outcome, f"chunk {key.hex()} cannot be stored over what is there: {judged.reason}")
        await job.within(self._source.delete(key), "deleting a faulty record")
        return None

    async def _encode(
        self,
        job: Job,
        registration: Registration,
        layout: ChunkLayout,
        offset: int,
        keys: Sequence[bytes],
        batch: Sequence[int],
        place: int,
        progress: _Progress,
    ) -> tuple[StorePlan, native.Batch]:
        """Encode a batch into the store buffer, ``place`` chunks from its beginning. The round is to be released."""
        of = [keys[index] for index in batch]
        bound = _bound(layout, progress)
        plan = plan_store(of, batch, layout, progress.codec, bound, progress.slice_bytes, place)
        round_ = native.Batch(
            pieces=plan.pieces,
            slices=plan.slices,
            groups=[native.Group.of(layout, registration.region(offset, len(keys) * layout.raw_bytes))],
            deadline_ns=job.deadline_ns,
        )
        try:
            with job.interruptible(round_.cancel):
                encoding = asyncio.get_running_loop().run_in_executor(self._executor, self._pipeline.encode, round_)
                failure = await encoding
            registration.check_whole()  # else zeros would be stored in the place of what is gone
            if failure is not Result.OK and all(result is Result.OK for result in round_.results):
                raise self._stop(keys[batch[0]], failure, "")
        except BaseException:
            round_.release()
            raise
        return plan, round_

    async def _put_batch(
        self,
        before: asyncio.Task[None] | None,
        job: Job,
        plan: StorePlan,
        round_: native.Batch,
        layout: ChunkLayout,
        keys: Sequence[bytes],
        batch: Sequence[int],
        progress: _Progress,
    ) -> None:
        """Put a batch's records in the order of their chunks, once those ``before`` have been."""
        try:
            if before is not None:
                await before
            for position, (index, result) in enumerate(zip(batch, round_.results, strict=True)):
                if result is not Result.OK:
                    raise self._stop(keys[index], result, "")
                progress.held[index] = await self._put(job, round_, plan, position, layout, keys[index], progress)
        finally:
            round_.release()

    async def _put(
        self,
        job: Job,
        round_: native.Batch,
        plan: StorePlan,
        position: int,
        layout: ChunkLayout,
        key: bytes,
        progress: _Progress,
    ) -> int:
        """Put one record. Return its bytes."""
        manifest, parent = plan.manifest_of(position), progress.parents.get(key, b"")
        head = encode_head(key, progress.codec, layout, manifest, parent=parent, in_blocks=progress.plain)
        record = Encoded(round_, position, head, progress.lasts_ms, progress.plain)
        result, text = await self._source.put(job, key, record)
        if result is not Result.OK:
            job.check()
            raise self._stop(key, result, text)
        size = len(head) + int(plan.pieces[position]["body_length"])
        self._catalog.pardon(layout.namespace, key)
        self._catalog.available(key)
        self._metrics.stored_raw_bytes += layout.raw_bytes
        self._metrics.stored_bytes += size
        return size

    def _stop(self, key: bytes, result: Result, text: str) -> Stop:
        outcome = _OUTCOMES.get(result, pb.OUTCOME_INTERNAL)
        detail = f"chunk {key.hex()}: {text or native.result_text(result)}"
        if outcome == pb.OUTCOME_INTERNAL:
            logger.error("storing failed with %s at %s", result.name, detail)
        return Stop(outcome, detail)
