"""Store: chunks from a region to records in storage; the path backwards, at lower priority than fetching.

Chunks that storage holds already are skipped. The rest are encoded a batch at a time, as many as the store buffer
takes, and put one after the other, so that what was put when a job ends early is a prefix of them.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from dpu_dataplane.catalog import Catalog, Fault, inspect_head
from dpu_dataplane.destinations import Destination
from dpu_dataplane.jobs import Job, Stop, Turnstile
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.rounds import ALIGNMENT, Buffers, StorePlan, encoded_bound, plan_store
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Encoded, Found, Source, Stored, Unanswered
from shadowserve import native
from shadowserve.chunk import ChunkLayout
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
    held: dict[int, int] = field(default_factory=dict)  # bytes of each record that storage now holds, by its position


def _answered(found: Sequence[Found]) -> int:
    """Return how many leading chunks storage has said something of."""
    return next((index for index, each in enumerate(found) if isinstance(each, Unanswered)), len(found))


def _unanswered(key: bytes, found: Found) -> StorageError:
    assert isinstance(found, Unanswered)
    kind = StorageRefusedError if found.refused else StorageUnavailableError
    return kind(f"chunk {key.hex()}: {found.reason}")


class Storer:
    """Runs stores, one at a time."""

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
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._catalog = catalog
        self._source = source
        self._buffers = buffers
        self._metrics = metrics
        self._codec = codec
        self._slice_bytes = slice_bytes
        self.queue = queue

    async def run(
        self, job: Job, destination: Destination, offset: int, keys: Sequence[bytes], parents: Sequence[bytes] = ()
    ) -> pb.StoreResponse:
        """Store chunks that lie one after the other from ``offset``. Returns once nothing reads the region any more.

        ``parents`` are the chunks before each of them in its prompt, empty for a prompt's first; none at all where the
        host does not tell.

        Raises:
            QueueFull: too many stores wait.
        """
        progress = _Progress(dict(zip(keys, parents, strict=bool(parents))))
        try:
            async with self.queue.turn(job):
                for first in range(0, len(keys), QUESTION_KEYS_MAX):
                    await self._store(job, destination, offset, keys, first, progress)
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        except Stop as stop:
            outcome, detail = stop.outcome, stop.detail
        except StorageUnavailableError as error:
            outcome, detail = pb.OUTCOME_STORAGE_UNAVAILABLE, str(error)
        except StorageRefusedError as error:
            outcome, detail = pb.OUTCOME_STORAGE_REFUSED, str(error)
        return pb.StoreResponse(
            stored=pack(np.isin(np.arange(len(keys)), list(progress.held))),
            outcome=outcome,
            detail=detail,
            raw_bytes=len(progress.held) * destination.layout.raw_bytes,
            stored_bytes=sum(progress.held.values()),
        )

    async def _store(
        self, job: Job, destination: Destination, offset: int, keys: Sequence[bytes], first: int, progress: _Progress
    ) -> None:
        """Store the chunks from ``first`` on that one question is enough for."""
        layout = destination.layout
        part = keys[first : first + QUESTION_KEYS_MAX]
        found = await job.within(self._source.held(part), "asking storage what it holds")
        bound = encoded_bound(layout, self._codec, self._slice_bytes)
        batch_max = max(1, self._buffers.store // (-(-bound // ALIGNMENT) * ALIGNMENT))
        index, answered = 0, _answered(found)
        while index < answered:
            batch: list[int] = []
            while index < answered and len(batch) < batch_max:
                length = await self._held_length(job, layout, part[index], found[index])
                if length is None:
                    batch.append(first + index)
                else:
                    progress.held[first + index] = length
                index += 1
            if batch:
                await self._encode_and_put(job, destination, offset, keys, batch, progress)
        if answered < len(part):
            raise _unanswered(part[answered], found[answered])

    async def _held_length(self, job: Job, layout: ChunkLayout, key: bytes, stored: Found) -> int | None:
        """Return the length of the record that storage holds, None where there is none that is any good.

        A faulty record would keep its place against a new one, records being immutable, so it is deleted first; unless
        it is good for others, which ends the job.
        """
        if not isinstance(stored, Stored):
            return None
        judged = inspect_head(stored, key, layout.namespace, self._catalog.codecs)
        suspect = self._catalog.is_quarantined(layout.namespace, key)
        if not isinstance(judged, Fault) and not suspect:
            return stored.length
        if isinstance(judged, Fault) and not judged.replaceable:
            raise Stop(judged.outcome, f"chunk {key.hex()} cannot be stored over what is there: {judged.reason}")
        await job.within(self._source.delete(key), "deleting a faulty record")
        return None

    async def _encode_and_put(
        self,
        job: Job,
        destination: Destination,
        offset: int,
        keys: Sequence[bytes],
        batch: Sequence[int],
        progress: _Progress,
    ) -> None:
        """Encode a batch, then put its records in the order of their chunks."""
        layout = destination.layout
        bound = encoded_bound(layout, self._codec, self._slice_bytes)
        plan = plan_store([keys[index] for index in batch], batch, layout, self._codec, bound, self._slice_bytes)
        round_ = native.Round(
            pieces=plan.pieces,
            slices=plan.slices,
            groups=[native.Group.of(layout, destination.region(offset, len(keys) * layout.raw_bytes))],
            deadline_ns=job.deadline_ns,
        )
        try:
            loop = asyncio.get_running_loop()
            with job.interruptible(round_.cancel):
                failure = await loop.run_in_executor(self._executor, self._pipeline.encode, round_)
            destination.check_whole()  # else zeros would be stored in the place of what is gone
            results = round_.results
            if failure is not Result.OK and all(result is Result.OK for result in results):
                raise self._stop(keys[batch[0]], failure, "")
            for position, (index, result) in enumerate(zip(batch, results, strict=True)):
                if result is not Result.OK:
                    raise self._stop(keys[index], result, "")
                parent = progress.parents.get(keys[index], b"")
                progress.held[index] = await self._put(job, round_, plan, position, layout, keys[index], parent)
        finally:
            round_.release()

    async def _put(
        self,
        job: Job,
        round_: native.Round,
        plan: StorePlan,
        position: int,
        layout: ChunkLayout,
        key: bytes,
        parent: bytes,
    ) -> int:
        """Put one record. Return its bytes."""
        head = encode_head(key, self._codec, layout, plan.manifest_of(position), parent=parent)
        result, text = await self._source.put(job, key, Encoded(round_, position, head))
        if result is not Result.OK:
            job.check()
            raise self._stop(key, result, text)
        size = len(head) + int(plan.pieces[position]["body_length"])
        self._catalog.pardon(layout.namespace, key)
        self._metrics.stored_raw_bytes += layout.raw_bytes
        self._metrics.stored_bytes += size
        return size

    def _stop(self, key: bytes, result: Result, text: str) -> Stop:
        outcome = _OUTCOMES.get(result, pb.OUTCOME_INTERNAL)
        detail = f"chunk {key.hex()}: {text or native.result_text(result)}"
        if outcome == pb.OUTCOME_INTERNAL:
            logger.error("storing failed with %s at %s", result.name, detail)
        return Stop(outcome, detail)
