"""The ways to fetch chunks: in batches, and into pages that devices place (:mod:`host_control.layer_fetch`: by layers).

Each mover moves some chunks of a :class:`~host_control.fetch.Fetch` when asked, and ends the fetch when no move
follows.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall, FetchPart
from host_control.fetch import Fetch, Placer, Scatter
from host_control.progress import WordProgress, follow
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from host_control.transfer import Reason
from shadowserve.errors import ConfigurationError, DataPlaneError

_logger = logging.getLogger(__name__)

_CANCEL_INTERVAL_S: Final = 0.05
"""Between two Cancel calls for one job: the first may overtake the Fetch that it is meant for."""
_SHARDS_MAX: Final = 64
"""Shards that one Fetch may name (proto/dataplane.proto)."""
_BATCH_BYTES_MIN: Final = 32 << 20
"""A batch costs some milliseconds, whatever its size: less than a CPU takes to scatter this many bytes."""
_SCATTER_BYTES_MIN: Final = 8 << 20
"""Fewer bytes of a batch are not worth scattering while more of it arrives."""
_LOOK_INTERVAL_S: Final = 0.005
"""Between two looks at a call's end and at cancellation, while no chunk arrives."""
_PATIENCE_S: Final = 0.2
"""A batch that brings nothing for this time gives way to layerwise jobs; twice that after each time without a chunk."""


@dataclass(frozen=True)
class _Run:
    shard: int
    first: int
    count: int
    offset: int


@dataclass
class _Delivered:
    """Chunks of a batch that are in registered memory and not scattered yet."""

    fetch: Fetch
    memory: Memory = field(repr=False)
    runs: list[_Run]


class BatchMover:
    """Moves chunks in batches, through the halves of the registered memory in turn.

    While a batch arrives in one half, the batch before it is scattered from the other. Where the data plane tells in
    the memory how far a batch is, its chunks are scattered as they arrive. Where it does not, each batch takes half of
    what is left, so that as little as possible is scattered after the last one.

    Args:
        condition: Lock of the manager, which is notified of cancellations.
        complete: Called with a fetch that has ended, once everything delivered for it is scattered.
        layers: Wanted layers of each shard's chunks; by default all.
        hurried: Tells if a layerwise job is queued.
        batch_bytes_min: A batch leaves no fewer bytes than this for the next one.
        scatter_bytes_min: Fewer bytes are not scattered before the batch is over.
        scatter_parts: Number of parts of what is left of a batch, of which one is scattered at a time.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        scatter: Scatter,
        *,
        condition: threading.Condition,
        complete: Callable[[Fetch], None],
        layers: Sequence[slice] | None,
        hurried: Callable[[], bool],
        batch_bytes_min: int = _BATCH_BYTES_MIN,
        scatter_bytes_min: int = _SCATTER_BYTES_MIN,
        scatter_parts: int = 3,
        purpose: Any,
    ) -> None:
        self._client = client
        self._registration = registration
        self._scatter = scatter
        self._condition = condition
        self._complete = complete
        self._hurried = hurried
        self.layers = layers or [slice(None)] * len(registration.shapes)
        self._batch_bytes_min, self._scatter_bytes_min = batch_bytes_min, scatter_bytes_min
        self._scatter_parts = scatter_parts
        self._purpose = purpose
        self._chunk_bytes = [shape.raw_bytes for shape in registration.shapes]
        self._half_bytes = registration.size // 2
        if self._half_bytes < max(self._chunk_bytes):
            raise ConfigurationError(
                f"fetch memory of {registration.size} bytes does not hold two chunks of {max(self._chunk_bytes)}; "
                "raise host.fetch_buffer_bytes"
            )
        self._delivered: _Delivered | None = None
        self._half = 0
        self._grown_s = 0.0  # when the batch began, or its last chunk arrived
        self._job_prefix = secrets.token_hex(8)
        self._job_numbers = itertools.count()

    @property
    def has_delivered(self) -> bool:
        return self._delivered is not None

    def move(self, fetch: Fetch) -> bool:
        """Fetch one batch, and scatter the one before it meanwhile; return True if other moves may follow."""
        told_at = next(iter(self._registration.progress_offsets), None)
        if not (runs := self._plan(fetch, halving=told_at is None)):
            if fetch.available is not None and not fetch.all_delivered:
                self.end(fetch, fetch.available.ended, "chunks that it waited for have not come")
            else:
                self.end(fetch, Reason.COMPLETE)
            return False
        try:
            memory = self._registration.acquire(fetch.left_s)
            call, job_id, progress = self._start(fetch, memory, runs, told_at)
        except DataPlaneError as error:
            self.end(fetch, error.outcome, str(error))
            return False
        self.flush()
        placed, self._grown_s = list(fetch.placed), time.monotonic()
        scattered = 0 if progress is None else self._scatter_arriving(call, progress, fetch, memory, runs)
        answer, gave_way = self._wait(call, job_id, fetch)
        if answer.reason == Reason.INVALID_ANSWER:  # then nothing is believed, not the progress either
            fetch.placed, scattered = placed, 0
        self._registration.settle(answer)
        moved = self._take(fetch, memory, runs, scattered, answer)
        if gave_way and answer.reason == Reason.CANCELLED:
            fetch.stalls += not moved
            return True
        return self._goes_on(fetch, answer, moved=moved)

    def _goes_on(self, fetch: Fetch, answer: FetchAnswer, *, moved: bool) -> bool:
        if answer.reason == Reason.UNKNOWN_MEMORY and not moved and not fetch.retried:
            fetch.retried = True  # the data plane has restarted: register again, once
            return True
        if answer.reason == Reason.BATCH_FULL and not moved:
            self.end(
                fetch, Reason.INVALID_ANSWER, "the data plane's buffers are full, and the first chunk did not come"
            )
            return False
        if answer.reason == Reason.BATCH_FULL or (answer.reason == Reason.COMPLETE and not fetch.all_delivered):
            return True
        self.end(fetch, answer.reason, answer.detail)
        return False

    def _plan(self, fetch: Fetch, *, halving: bool) -> list[_Run]:
        """Return the next batch: shard after shard, all or half of what is left, as far as one half has room."""
        shards = list(zip(fetch.wanted(), fetch.delivered, self._chunk_bytes, strict=True))
        left = sum(wanted * size for wanted, _, size in shards)
        aim = min(max(-(-left // 2), self._batch_bytes_min) if halving else left, self._half_bytes)
        runs: list[_Run] = []
        begin, taken = self._half * self._half_bytes, 0
        for shard, (wanted, done, size) in enumerate(shards):
            room = (self._half_bytes if not taken else aim) - taken
            count = min(wanted, max(-(-(aim - taken) // size), 0), room // size)
            if count > 0 and len(runs) < _SHARDS_MAX:
                runs.append(_Run(shard, done, count, begin + taken))
                taken += count * size
        return runs

    def _start(
        self, fetch: Fetch, memory: Memory, runs: Sequence[_Run], told_at: int | None
    ) -> tuple[FetchCall, str, WordProgress | None]:
        progress = None
        if told_at is not None:  # before the data plane writes there
            progress = WordProgress(memory.memory[told_at : told_at + PROGRESS_BYTES])
        memory_id, shapes, keys = self._registration.memory_id, self._registration.shapes, fetch.job.keys
        job_id = f"{self._job_prefix}-{next(self._job_numbers)}"
        parts = [
            FetchPart.whole(
                shapes[run.shard],
                memory_id,
                keys[run.shard][run.first : run.first + run.count],
                run.offset,
                layers=self.layers[run.shard],
                layout=run.shard,
            )
            for run in runs
        ]
        timeout = max(fetch.left_s, 0.001)
        call = self._client.start_fetch(job_id, parts, timeout, progress=told_at, purpose=self._purpose)
        return call, job_id, progress

    def _scatter_arriving(
        self, call: FetchCall, progress: WordProgress, fetch: Fetch, memory: Memory, runs: Sequence[_Run]
    ) -> int:
        """Scatter the leading chunks of a batch as they arrive; return how many of each run are scattered.

        A part of what is left at a time, so that it is in place before the next part arrives: each scatter costs the
        engine's core a fixed time, and the last one is not hidden behind the network.
        """
        most, scattered = max(run.count for run in runs), 0
        least = -(-self._scatter_bytes_min // sum(self._chunk_bytes[run.shard] for run in runs))

        def stops() -> bool:
            return fetch.cancelled or bool(fetch.scatter_error) or self._gives_way(fetch)

        for count in follow(call, progress, most, _LOOK_INTERVAL_S, stops):
            self._grown_s = time.monotonic()
            if count == most or count - scattered >= max(least, -(-(most - scattered) // self._scatter_parts)):
                self._delivered = _Delivered(fetch, memory, self._between(runs, scattered, count))
                self.flush()
                scattered = count
        return scattered

    def _between(self, runs: Iterable[_Run], begin: int, end: int) -> list[_Run]:
        return [
            _Run(run.shard, run.first + begin, count, run.offset + begin * self._chunk_bytes[run.shard])
            for run in runs
            if (count := min(run.count, end) - begin) > 0
        ]

    def _gives_way(self, fetch: Fetch) -> bool:
        """Tell if a batch should end early: it stalls, and a step of the engine waits for layerwise jobs."""
        return time.monotonic() - self._grown_s > _PATIENCE_S * 2**fetch.stalls and self._hurried()

    def _wait(self, call: FetchCall, job_id: str, fetch: Fetch) -> tuple[FetchAnswer, bool]:
        """Return a batch's answer, and whether it gave way to layerwise jobs."""

        def wake() -> None:
            with self._condition:
                self._condition.notify_all()

        call.on_done(wake)
        gave_way = False
        with self._condition:
            # The call has a deadline of its own, so this ends.
            while not (call.done() or fetch.cancelled or gave_way):
                self._condition.wait(_LOOK_INTERVAL_S if self._hurried() else None)
                gave_way = self._gives_way(fetch)
        while not call.done():
            self._client.cancel(job_id)
            with self._condition:
                self._condition.wait_for(call.done, _CANCEL_INTERVAL_S)
        return call.result(), gave_way

    def _take(self, fetch: Fetch, memory: Memory, runs: Sequence[_Run], scattered: int, answer: FetchAnswer) -> bool:
        """Record a batch's delivered chunks, of which some are scattered; return True if it moved any chunk."""
        fetch.count_moved(answer)
        left = []
        for run, count in zip(runs, answer.chunks, strict=True):
            delivered = min(max(scattered, count), run.count)
            fetch.delivered[run.shard] += delivered
            left += self._between([run], scattered, delivered)
        if scattered or left:
            self._half ^= 1
        self._delivered = _Delivered(fetch, memory, left) if left else None
        return bool(scattered or left)

    def flush(self) -> None:
        """Scatter what is delivered; complete its fetch if no batch follows."""
        delivered, self._delivered = self._delivered, None
        if delivered is None:
            return
        fetch, memory = delivered.fetch, delivered.memory
        if not fetch.cancelled and not fetch.scatter_error:
            try:
                for run in delivered.runs:
                    chunks = memory.view(run.offset, run.count * self._chunk_bytes[run.shard])
                    self._scatter(fetch.job, run.shard, run.first, chunks)
                fetch.scatter_error = self._registration.check(memory)
                for run in delivered.runs if not fetch.scatter_error else ():
                    fetch.placed[run.shard] += run.count
            except Exception as error:
                _logger.exception("scattering for request %s failed", fetch.job.request_id)
                fetch.scatter_error = f"{type(error).__name__}: {error}"
        if fetch.ending:
            self._complete(fetch)

    def end(self, fetch: Fetch, reason: str, detail: str = "") -> None:
        """End a fetch: its outcome is due once what is delivered for it is scattered."""
        fetch.ending = fetch.ending or reason
        fetch.detail = detail
        if self._delivered is None or self._delivered.fetch is not fetch:
            self._complete(fetch)


@dataclass
class PageMover:
    """Lets devices place chunks straight into paged memory, where they hold them.

    ``batches`` moves all other chunks; ``tell`` receives the number of leading layers of a fetch that are in place.
    """

    placer: Placer
    batches: BatchMover
    tell: Callable[[Fetch, int], None]

    def prepare(self, fetch: Fetch) -> None:
        if fetch.available is None and len(fetch.job.keys) == 1:
            fetch.pages_from = self.placer.first(fetch.job)

    def is_due(self, fetch: Fetch) -> bool:
        return fetch.pages_from is not None and fetch.delivered[0] >= fetch.pages_from

    def move(self, fetch: Fetch) -> bool:
        """Place the chunks from here on that devices hold; return True if other moves may follow."""
        self.batches.flush()  # chunks count as a prefix
        job, first, end = fetch.job, fetch.delivered[0], fetch.job.chunks
        fetch.pages_from = None
        if fetch.scatter_error or first == end:
            return True

        def on_layers(layers: int) -> None:
            if first == 0:
                self.tell(fetch, layers)

        answer = self.placer.place(job, range(first, end), fetch.deadline, lambda: fetch.cancelled, on_layers)
        if answer is None:
            return True
        if not answer.quiet:
            self.batches.end(fetch, answer.reason, answer.detail)
            return False
        (placed,) = answer.chunks
        fetch.delivered[0] += placed
        fetch.placed[0] += placed
        fetch.count_moved(answer)
        if placed == end - first:
            fetch.pages_from = fetch.delivered[0]
        return True
