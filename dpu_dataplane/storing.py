"""Store: from chunks in registered memory to records in storage, at lower priority than fetching.

Chunks that storage has are skipped. The others are encoded batch by batch, each with as many chunks as there are
encoding threads, as far ahead as the store buffer allows. Meanwhile the records of earlier batches are put, one after
the other: when a job ends early, the records that it has put are the leading ones.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from dpu_dataplane.batches import ALIGNMENT, Buffers, StorePlan, encoded_bound, exact_vectors, plan_store
from dpu_dataplane.catalog import Catalog
from dpu_dataplane.interference import TURN_S
from dpu_dataplane.jobs import ENDINGS, Job, JobQueue, Stop, ending_of, outcome_of
from dpu_dataplane.registrations import Registration
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.found import Cold, Fault, Found, Stored, Unanswered, inspect_header
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Encoded, Resources, Source
from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, Quantizer
from shadowserve.native import Result
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import encode_header

logger = logging.getLogger(__name__)


@dataclass
class Store:
    """A Store call and its progress."""

    registration: Registration  # registered memory with the chunks
    layout: ChunkLayout
    offset: int  # offset of the first chunk; the chunks are contiguous
    keys: Sequence[bytes]
    parents: Sequence[bytes] = ()  # key of the chunk before each, empty for a prompt's first one; none if not known
    positions: Sequence[int] = ()  # of each chunk's first token in its prompt, for ``weighted``
    lasts_ms: int = 0  # lifetime of the records; 0 for no end
    plain: bool = False  # the records are not compressed, and stay in local tiers if there are any
    keep: int = pb.KEEP_ALL  # where the records are kept
    mover: Mover = Mover.STORE  # mover of the bytes, for the interference budget
    stored: dict[int, int] = field(default_factory=dict)  # length of each record in storage, by index of its key

    def parent_of(self, index: int) -> bytes:
        return self.parents[index] if self.parents else b""


@dataclass
class _EncodedBatch:
    """A batch in the store buffer: indexes of its keys, the plan, and the batch, which has to be released."""

    indexes: Sequence[int]
    plan: StorePlan
    batch: native.Batch


@dataclass(frozen=True)
class Storer:
    """Runs Store calls, one at a time."""

    resources: Resources
    encoding: Executor  # thread of the pipeline's calls that encode
    catalog: Catalog
    source: Source
    buffers: Buffers
    queue: JobQueue
    codec: native.Codec  # of new records
    slice_bytes: int  # most bytes of symbols in a slice
    batch_chunks: int

    async def store(self, job: Job, store: Store) -> pb.StoreResponse:
        """Store chunks; QueueFullError if too many stores wait. Returns once nothing reads the region any more."""
        keys = store.keys
        try:
            if store.keep == pb.KEEP_LOCAL and not self.source.has_tiers:
                raise Stop(pb.OUTCOME_STORAGE_REFUSED, "this data plane has no local tiers; configure dpu.tiers")
            async with self.queue.turn(job):
                for first in range(0, len(keys), QUESTION_KEYS_MAX):
                    await self._store_keys(job, store, range(first, min(first + QUESTION_KEYS_MAX, len(keys))))
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        except ENDINGS as error:
            outcome, detail = ending_of(error)
        return pb.StoreResponse(
            stored=pack(np.isin(np.arange(len(keys)), list(store.stored))),
            outcome=outcome,
            detail=detail,
            raw_bytes=len(store.stored) * store.layout.raw_bytes,
            stored_bytes=sum(store.stored.values()),
        )

    async def _store_keys(self, job: Job, store: Store, indexes: range) -> None:
        """Store the chunks of one lookup: encode batches, and put them meanwhile."""
        keys = store.keys[indexes.start : indexes.stop]
        local = store.plain or store.keep == pb.KEEP_LOCAL
        lookup = self.source.find(keys) if local else self.source.find_stored(keys)
        found = await job.within(lookup, "asking storage which records it has")
        unanswered = next((index for index, each in enumerate(found) if isinstance(each, Unanswered)), None)
        answered = indexes if unanswered is None else indexes[:unanswered]
        capacity = self.buffers.store // self._chunk_bound(store)
        batch_max = max(1, min(self.batch_chunks, capacity // 2))
        free = list(range(max(1, capacity // batch_max)))  # parts of the store buffer
        puts: deque[tuple[asyncio.Task[None], int]] = deque()  # in progress, with their parts of the buffer
        remaining = iter(answered)
        try:
            while batch := await self._next_batch(job, store, remaining, found, indexes.start, batch_max):
                while puts and (puts[0][0].done() or not free):
                    task, part = puts.popleft()
                    free.append(part)
                    await task
                part = free.pop()  # the one freed last: most of it is still in a cache
                async with self.resources.budget.turn(store.mover, len(batch) * store.layout.raw_bytes, job):
                    encoded = await self._encode(job, store, batch, part * batch_max)
                put = self._put_batch(puts[-1][0] if puts else None, job, store, encoded)
                puts.append((asyncio.create_task(put), part))
        finally:
            if puts:
                await puts[-1][0]  # its error is about earlier chunks, so it goes first
        if unanswered is not None:
            missing = found[unanswered]
            assert isinstance(missing, Unanswered)
            raise missing.error(f"chunk {keys[unanswered].hex()}")

    def _chunk_bound(self, store: Store) -> int:
        return -(-encoded_bound(store.layout, *self._encoding(store)) // ALIGNMENT) * ALIGNMENT

    def _encoding(self, store: Store) -> tuple[native.Codec, int]:
        return (native.Codec.NONE, DECODED_BYTES_MAX) if store.plain else (self.codec, self.slice_bytes)

    async def _next_batch(
        self, job: Job, store: Store, remaining: Iterator[int], found: Sequence[Found], first: int, batch_max: int
    ) -> list[int]:
        """Return the indexes of the next chunks to encode; empty at the end. Count chunks that storage has already."""
        rate = self.resources.budget.rate
        limit = max(min(int(rate * TURN_S) // store.layout.raw_bytes, batch_max), 1) if rate else batch_max
        batch: list[int] = []
        for index in remaining:
            length = await self._stored_length(job, store.layout, store.keys[index], found[index - first])
            if length is None:
                batch.append(index)
                if len(batch) == limit:
                    break
            else:
                store.stored[index] = length
                self.catalog.available(store.keys[index])
        return batch

    async def _stored_length(self, job: Job, layout: ChunkLayout, key: bytes, stored: Found) -> int | None:
        """Return the length of the record that storage holds; None without a usable record.

        Records are immutable, so a faulty record is deleted first. If it is faulty for this caller only, the job ends.
        The header of a cold record is not checked here: its node checks it when it brings the record.
        """
        if not isinstance(stored, Stored | Cold):
            return None
        faulty = self.catalog.is_quarantined(layout.namespace, key)
        if isinstance(stored, Stored):
            fault = inspect_header(stored, key, layout.namespace, self.catalog.codecs)
            if isinstance(fault, Fault):
                if not fault.replaceable:
                    raise Stop(fault.outcome, f"chunk {key.hex()} cannot replace the stored record: {fault.reason}")
                faulty = True
        if not faulty:
            return stored.length
        await job.within(self.source.delete(key), "deleting a faulty record")
        return None

    async def _encode(self, job: Job, store: Store, indexes: Sequence[int], first: int) -> _EncodedBatch:
        keys = [store.keys[index] for index in indexes]
        codec, slice_bytes = self._encoding(store)
        positions = [store.positions[index] for index in indexes] if store.positions else []
        bound = self._chunk_bound(store)
        plan = plan_store(keys, indexes, store.layout, codec, bound, slice_bytes, first, positions)
        group = store.registration.group(store.layout, store.offset, len(store.keys) * store.layout.raw_bytes)
        batch = native.Batch(
            pieces=plan.pieces,
            slices=plan.slices,
            groups=[group],
            deadline_ns=job.deadline_ns,
        )
        try:
            with job.interruptible(batch.cancel):
                encoding = asyncio.get_running_loop().run_in_executor(
                    self.encoding, self.resources.pipeline.encode, batch
                )
                result = await encoding
            store.registration.check_whole()  # else zeros would be stored for memory that is gone
            if result is not Result.OK and all(each is Result.OK for each in batch.results):
                raise self._stop(keys[0], result, "")
        except BaseException:
            batch.release()
            raise
        return _EncodedBatch(indexes, plan, batch)

    async def _put_batch(
        self, previous: asyncio.Task[None] | None, job: Job, store: Store, encoded: _EncodedBatch
    ) -> None:
        """Put a batch's records in the order of their chunks, after the previous batch."""
        try:
            if previous is not None:
                await previous
            for position, result in enumerate(encoded.batch.results):
                index = encoded.indexes[position]
                if result is not Result.OK:
                    raise self._stop(store.keys[index], result, "")
                store.stored[index] = await self._put(job, store, encoded, position)
        finally:
            encoded.batch.release()

    async def _put(self, job: Job, store: Store, encoded: _EncodedBatch, position: int) -> int:
        index, layout = encoded.indexes[position], store.layout
        key, (codec, _) = store.keys[index], self._encoding(store)
        manifest, parent = encoded.plan.manifest_of(position), store.parent_of(index)
        header = encode_header(key, codec, layout, manifest, parent=parent, in_blocks=store.plain)
        record = Encoded(
            encoded.batch,
            position,
            header,
            store.lasts_ms,
            store.plain,
            saved=store.mover is Mover.PREEMPTION_SAVE and store.lasts_ms > 0,
            keep=store.keep,
        )
        result, text = await self.source.put(job, key, record)
        if result is not Result.OK:
            job.check()
            raise self._stop(key, result, text)
        size = len(header) + int(encoded.plan.pieces[position]["body_length"])
        self.catalog.release(layout.namespace, key)
        self.catalog.available(key)
        if layout.quantizer is Quantizer.WEIGHTED:
            self.resources.metrics.totals["quantized_vectors"] += int(manifest["tokens"].sum())
            self.resources.metrics.totals["exact_vectors"] += exact_vectors(layout, manifest)
        self.resources.metrics.totals["stored_raw_bytes"] += layout.raw_bytes
        self.resources.metrics.totals["stored_bytes"] += size
        return size

    def _stop(self, key: bytes, result: Result, text: str) -> Stop:
        outcome = outcome_of(result)
        detail = f"chunk {key.hex()}: {text or native.result_text(result)}"
        if outcome == pb.OUTCOME_INTERNAL:
            logger.error("storing failed with %s at %s", result.name, detail)
        return Stop(outcome, detail)
