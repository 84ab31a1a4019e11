"""The KV cache manager: fetches the KV of prompts in the background of a serving engine (ShadowServe section 4.1).

Two queues. *Fetching* holds jobs that wait for the data plane; one background loop takes them one at a time, in a
pluggable order. *Completion* holds jobs that have ended. The engine's scheduler meets both once in each iteration, in
:meth:`KVCacheManager.exchange`: it hands over the jobs it has intercepted and takes back those that have ended, in one
atomic step, and is never blocked by either.

A job wants chunks of one or several *parts*: layers whose chunks have one shape. It runs in batches: the data plane
delivers chunks into one half of the registration, and while the next batch arrives in the other half, the engine's
``scatter`` moves the first into paged KV memory. Where the data plane says in the registration how far a batch is, its
chunks are moved as they arrive. Where it does not, each batch takes half of what is left: the last one's scattering is
hidden behind nothing. Each job has exactly one outcome, by its deadline: how many leading chunks of each part are in
place, and the reason why not all.
"""

import itertools
import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall, FetchPart
from host_control.disaggregation import Available
from host_control.layer_fetch import LayerFetch
from host_control.placing import Placer
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = [
    "ORDERS",
    "FetchJob",
    "FetchOrder",
    "FetchResult",
    "KVCacheManager",
    "Scatter",
    "first_in_first_out",
    "shortest_job_first",
]

_logger = logging.getLogger(__name__)
_CANCEL_INTERVAL: Final = 0.05
"""Seconds between two Cancel calls for one job: the first may overtake the Fetch that it is meant for."""
_WAIT_INTERVAL: Final = 0.05
"""Seconds between two looks for queued jobs that are out of time, which nobody publishes."""
_PARTS_MAX: Final = 64
"""Parts that one Fetch may name (proto/dataplane.proto)."""
_ROUND_BYTES_MIN: Final = 32 << 20
"""A batch costs some milliseconds, whatever it moves: less than scattering so much on a CPU takes."""
_SCATTER_BYTES_MIN: Final = 8 << 20
"""Less of a batch is not worth scattering while more of it arrives."""
_LOOK_INTERVAL: Final = 0.005
"""Seconds between two looks whether a call has ended, or shall, while no chunk of it arrives."""


@dataclass(frozen=True, kw_only=True)
class FetchJob:
    """The chunks that one request wants.

    Attributes:
        request_id: of the engine; one job of a request at a time.
        keys: of the chunks of each part, in prefix order; none of a part that nothing is wanted of.
        places: which chunk of all that are loaded each of these is, where some parts want others than the rest do.
        target: whatever ``scatter`` needs to know; never looked at here.
        available: how many chunks are near already, where others still store the rest, or object storage brings it:
            :meth:`KVCacheManager.exchange` is told of that, and until then the job waits, and others go on.
        layerwise: fetch layer by layer, so that :meth:`KVCacheManager.wait_layer` returns as each is in place. Only of
            one part with all its layers, and no more chunks than the registration holds.
        window_s: seconds that the engine will compute with each layer, if that is known; else 0.
    """

    request_id: str
    keys: tuple[tuple[bytes, ...], ...]
    places: tuple[Sequence[int], ...] = ()
    target: Any = None
    available: Available | None = None
    layerwise: bool = False
    window_s: float = 0.0

    @property
    def chunks(self) -> int:
        """Chunks of all parts together."""
        return sum(map(len, self.keys))


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """The one outcome of a job.

    Attributes:
        job: what was asked for.
        chunks: leading chunks that are in place, of each part.
        reason: ``"complete"``, or why there are not more: an ``Outcome`` of the wire in lower case, or
            ``"unreachable"``, ``"refused"``, ``"invalid_answer"``, ``"breaker_open"``, ``"no_memory"``,
            ``"scatter_failed"``, ``"closed"``; or why no more of it was stored (:class:`Available`).
        detail: a sentence, or empty.
        fetched_bytes: over the wire.
        delivered_bytes: into the registration.
        seconds: from the hand-over.
        waited: of these, until it had its turn.
    """

    job: FetchJob
    chunks: tuple[int, ...]
    reason: str
    detail: str = ""
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every chunk is in place."""
        return sum(self.chunks) == self.job.chunks


class Scatter(Protocol):
    """Moves chunks from the registration into an engine's paged KV memory; returns once they are in place."""

    def __call__(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        """Place chunks ``first``, ``first + 1``, ... of a part of ``job``, which lie in ``chunks`` one after the other.

        ``chunks`` is what the registration's ``Memory.arrived`` gives: a memoryview, or a tensor on the GPU.
        """


@dataclass(eq=False)
class _Progress:
    """A job on its way through the manager."""

    job: FetchJob
    enqueued_at: float
    deadline: float
    chunks: list[int]  # in place, of each part
    landed: list[int]  # that have arrived, in place or not
    there: Available | None  # that can be fetched by now, of each part; None: all
    begun: float = 0.0  # when it had its turn; 0 while it waits
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    layers: int = 0  # leading ones that are in place of all chunks, where it is fetched layer by layer
    cancelled: bool = False
    reason: str = ""  # set once no further batch follows
    detail: str = ""
    scatter_error: str = ""
    retried: bool = False
    place_from: int | None = None  # chunks from this one on are yet to be placed, if they can be

    def wanted(self) -> list[int]:
        """Return how many chunks of each part there are to fetch by now."""
        there = list(map(len, self.job.keys))
        if self.place_from is not None:
            there = [min(count, self.place_from) for count in there]
        elif self.there is not None:
            places = self.job.places or [range(count) for count in there]
            there = [bisect_left(each, self.there.chunks) for each in places]
        return [max(count - done, 0) for count, done in zip(there, self.landed, strict=True)]

    def waits(self) -> bool:
        """Return whether there is nothing to do until more of it is there."""
        return self.there is not None and not self.there.ended and not any(self.wanted()) and not self.all_landed()

    def all_landed(self) -> bool:
        """Return whether nothing is left to fetch."""
        return sum(self.landed) == self.job.chunks


@dataclass(frozen=True)
class _Run:
    """Consecutive chunks of a part, and where they lie in the registration."""

    part: int
    first: int
    count: int
    offset: int


@dataclass
class _Landed:
    """What has arrived in a batch and is not yet scattered."""

    progress: _Progress
    memory: Memory = field(repr=False)
    runs: list[_Run]


FetchOrder = Callable[[Sequence[FetchJob]], int]
"""Chooses the next job: index into the fetching queue, which is in order of arrival and not empty."""


def first_in_first_out(queue: Sequence[FetchJob]) -> int:
    """Take the oldest job, as the paper does."""
    return 0


def shortest_job_first(queue: Sequence[FetchJob]) -> int:
    """Take the job with the fewest chunks, the oldest of equals.

    It lowers the mean waiting time. A long job can be overtaken without end while shorter ones keep coming; it does
    not wait beyond its deadline, and is recomputed then.
    """
    return min(range(len(queue)), key=lambda index: queue[index].chunks)


ORDERS: Final[dict[str, FetchOrder]] = {"fifo": first_in_first_out, "sjf": shortest_job_first}


class KVCacheManager:
    """Fetches in the background; all public methods may be called from any thread and return at once.

    Args:
        client: of the data plane.
        registration: that chunks arrive in; at least two of its largest large. The manager owns it from now on.
        scatter: called in the manager's thread.
        scatter_layers: the same for jobs that go layer by layer: of their leading chunks, which lie in memory, it moves
            layers, from one up to another; others are not there yet.
        layers: of each part's chunks, that are wanted; by default all.
        order: of the fetching queue.
        placer: of jobs of one part whose chunks are all there; what it leaves is fetched.
        fetch_timeout_s: seconds from hand-over to outcome.
        batch_bytes_min: a batch does not leave chunks for the next one to be smaller than this.
        scatter_bytes_min: of a batch that is not over, less than this is not scattered alone.
        purpose: what is fetched for, of the wire's.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        scatter: Scatter,
        *,
        scatter_layers: Callable[[FetchJob, Any, tuple[int, int]], None] | None = None,
        layers: Sequence[slice] | None = None,
        order: FetchOrder = first_in_first_out,
        placer: Placer | None = None,
        fetch_timeout_s: float = 10.0,
        batch_bytes_min: int = _ROUND_BYTES_MIN,
        scatter_bytes_min: int = _SCATTER_BYTES_MIN,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> None:
        self._client = client
        self._registration = registration
        self._scatter, self._scatter_layers = scatter, scatter_layers
        self._layers = layers or [slice(None)] * len(registration.shapes)
        self._order = order
        self._placer = placer
        self._fetch_timeout = fetch_timeout_s
        self._chunk_bytes = [shape.raw_bytes for shape in registration.shapes]
        self._half_bytes = registration.size // 2
        self._purpose = purpose
        self._batch_bytes_min, self._scatter_bytes_min = batch_bytes_min, scatter_bytes_min
        if self._half_bytes < max(self._chunk_bytes):
            raise ConfigurationError(
                f"a registration of {registration.size} bytes does not hold two chunks of "
                f"{max(self._chunk_bytes)}; raise host.fetch_buffer_bytes"
            )
        self._condition = threading.Condition()
        self._fetching: list[_Progress] = []
        self._completion: list[FetchResult] = []
        self._outstanding: dict[str, _Progress] = {}
        self._closing = False
        self._landed: _Landed | None = None
        self._half = 0
        self._job_prefix = secrets.token_hex(8)
        self._job_numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="shadowserve-fetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    def exchange(
        self,
        jobs: Iterable[FetchJob] = (),
        cancel: Iterable[str] = (),
        available: Mapping[str, Available] = MappingProxyType({}),
    ) -> list[FetchResult]:
        """Hand over intercepted jobs and take those that have ended; one atomic step.

        Args:
            jobs: for the fetching queue.
            cancel: requests whose job should end early. It still has its outcome, once its memory is quiet.
            available: of requests whose job waits for more, how much is there by now.

        Returns:
            Outcomes since the last exchange, in order of completion.

        Raises:
            ValueError: a job of a request whose last job has no outcome yet; nothing is handed over then.
        """
        now = time.monotonic()
        with self._condition:
            new = list(jobs)
            for job in new:
                if job.request_id in self._outstanding:
                    raise ValueError(f"request {job.request_id} has a fetch job already")
            for job in new:
                none, ends = [0] * len(job.keys), now + self._fetch_timeout
                progress = _Progress(job, now, ends, list(none), list(none), job.available)
                self._outstanding[job.request_id] = progress
                self._fetching.append(progress)
            for request_id in cancel:
                if (running := self._outstanding.get(request_id)) is not None:
                    running.cancelled = True
            for request_id, more in available.items():
                if (running := self._outstanding.get(request_id)) is not None:
                    running.there = more
            if self._outstanding:  # the engine calls this in each step: without a job the loop sleeps on
                self._sweep(now)
                self._condition.notify_all()
            completed, self._completion = self._completion, []
            return completed

    @property
    def idle(self) -> bool:
        """Whether there is neither a job nor an outcome that nobody has taken."""
        return not (self._outstanding or self._completion)

    def wait(self, request_ids: Iterable[str]) -> None:
        """Block until nothing is written for these requests any more; each of their jobs ends by its deadline.

        What they ended in comes with the next :meth:`exchange`. For engines that fetch synchronously.
        """
        self.wait_layer(request_ids, 1 << 62)  # of all layers

    def wait_any(self, timeout: float) -> None:
        """Block until there are outcomes to be taken, or a job waits to be told of more, at most so many seconds."""
        with self._condition:
            jobs = self._outstanding
            self._condition.wait_for(lambda: self._completion or any(job.waits() for job in jobs.values()), timeout)

    def wait_layer(self, request_ids: Iterable[str], layer: int) -> None:
        """Block until a layer is in place of all that these requests load, or their job has ended, by its deadline."""
        waiting = set(request_ids)
        with self._condition:
            while any(self._outstanding[name].layers <= layer for name in waiting & self._outstanding.keys()):
                self._condition.wait(_WAIT_INTERVAL)
                self._sweep(time.monotonic())

    def close(self, timeout: float = 5.0) -> list[FetchResult]:
        """End all jobs with reason ``"closed"``, and the loop; return the outcomes that nobody took.

        Args:
            timeout: seconds; a loop that is stuck longer is left to die with the process.
        """
        with self._condition:
            self._closing = True
            for progress in self._outstanding.values():
                progress.cancelled = True
            self._condition.notify_all()
        self._thread.join(timeout)
        self._registration.close()
        with self._condition:
            completed, self._completion = self._completion, []
            return completed

    # ------------------------------------------------------------------ the background fetching loop

    def _run(self) -> None:
        self._connect_early()
        while True:
            progress = self._next()
            if progress is None:
                return
            try:
                if self._placer is not None and progress.there is None and len(progress.job.keys) == 1:
                    progress.place_from = self._placer.first(progress.job)
                if progress.job.layerwise:
                    self._fetch_layers(progress)
                else:
                    self._fetch(progress)
            except Exception as error:  # the loop must outlive any bug; the job is recomputed
                _logger.exception("fetching for request %s failed", progress.job.request_id)
                self._end(progress, "internal", f"{type(error).__name__}: {error}")
                self._registration.retire(release=True)

    def _connect_early(self) -> None:
        # So that the first request does not pay for making and registering the memory.
        try:
            self._registration.acquire(self._fetch_timeout)
        except (DataPlaneError, ConfigurationError) as error:
            _logger.warning("shadowserve: not connected yet: %s", error)

    def _next(self) -> _Progress | None:
        """Return the next job, or ``None`` when closing and done."""
        while True:
            with self._condition:
                self._sweep(time.monotonic())
                if ready := [progress for progress in self._fetching if not progress.waits()]:
                    progress = ready[self._choose(ready)]
                    self._fetching.remove(progress)
                    progress.begun = progress.begun or time.monotonic()
                    return progress
                if self._landed is None:
                    if self._closing:
                        return None
                    self._condition.wait()
                    continue
            # Nothing else to start: finish what has landed.
            self._flush()

    def _choose(self, ready: Sequence[_Progress]) -> int:
        try:
            index = self._order([progress.job for progress in ready])
            return index if 0 <= index < len(ready) else 0
        except Exception:  # of a plugged-in order: fetching goes on without it
            _logger.exception("the fetch order failed; taking the oldest job")
            return 0

    def _fetch(self, progress: _Progress) -> None:
        while True:
            left = progress.deadline - time.monotonic()
            if progress.cancelled or progress.scatter_error or left <= 0:
                self._end(progress, "cancelled" if progress.cancelled else "deadline")
                return
            if progress.place_from is not None and progress.landed[0] >= progress.place_from:
                if not self._place(progress):
                    return
                continue
            if progress.waits():
                self._flush()  # what waits has nothing under way, and may be ended at any time
                if not progress.scatter_error:
                    with self._condition:
                        self._fetching.insert(0, progress)
                        self._condition.notify_all()
                    return
                continue
            told_at = self._registration.progress_offset
            if not (runs := self._round(progress, halving=told_at is None)):
                # Nothing was wanted, or no more of it will be there.
                if progress.there is not None and not progress.all_landed():
                    self._end(progress, progress.there.ended, "chunks that it waited for have not come")
                else:
                    self._end(progress, "complete")
                return
            try:
                memory = self._registration.acquire(left)
                left = progress.deadline - time.monotonic()
                call, job_id = self._start(progress.job, memory, runs, max(left, 0.001), told_at)
            except DataPlaneError as error:
                self._end(progress, error.outcome, str(error))
                return
            except ConfigurationError as error:
                self._end(progress, "no_memory", str(error))
                return
            self._flush()  # scatter the last batch, or the last job's, while this one arrives
            known = list(progress.chunks)
            taken = 0 if told_at is None else self._follow(call, progress, memory, runs, told_at)
            answer = self._wait(call, job_id, progress)
            if answer.reason == "invalid_answer":  # of who answers so nothing is believed
                progress.chunks, taken = known, 0
            if not answer.quiet or answer.reason == "unknown_memory":
                self._registration.retire(release=not answer.quiet)
            arrived = self._land(progress, memory, runs, taken, answer)
            if answer.reason == "unknown_memory" and not arrived and not progress.retried:
                progress.retried = True  # the daemon has restarted: register again, once
                continue
            if not arrived and answer.reason == "batch_full":
                detail = "the buffers are said to be full, and the first chunk is not there"
                self._end(progress, "invalid_answer", detail)
                return
            if answer.reason == "batch_full" or (answer.reason == "complete" and not progress.all_landed()):
                continue
            self._end(progress, answer.reason, answer.detail)
            return

    def _place(self, progress: _Progress) -> bool:
        """Have chunks from here on placed, as far as they can be; return whether what is left may be fetched."""
        assert self._placer is not None
        self._flush()  # chunks count as a prefix
        job, first, after = progress.job, progress.landed[0], progress.job.chunks
        if progress.scatter_error or first == after:
            progress.place_from = None
            return True
        progress.place_from = None

        def told(layers: int) -> None:
            if after - first == job.chunks:
                self._tell(progress, layers)

        placed = self._placer.place(job, range(first, after), progress.deadline, lambda: progress.cancelled, told)
        progress.landed[0] += placed.chunks
        progress.chunks[0] += placed.chunks
        progress.fetched_bytes += placed.moved_bytes
        progress.delivered_bytes += placed.moved_bytes
        if placed.reason:
            self._end(progress, placed.reason, placed.detail)
        elif placed.chunks == after - first:
            progress.place_from = progress.landed[0]
        return not placed.reason

    def _tell(self, progress: _Progress, layers: int) -> None:
        with self._condition:
            progress.layers = max(progress.layers, layers)
            self._condition.notify_all()

    def _fetch_layers(self, progress: _Progress) -> None:
        self._flush()  # it takes both halves
        if progress.place_from == 0 and not self._place(progress):
            return
        if progress.all_landed():
            self._end(progress, "complete")
            return
        progress.place_from = None
        job, scatter = progress.job, self._scatter_layers
        assert scatter is not None, "a job in the order of layers, and nothing that moves them"
        fetch = LayerFetch(
            self._client,
            self._registration,
            job.keys[0],
            progress.deadline,
            cancelled=lambda: progress.cancelled,
            scatter=lambda chunks, layers: scatter(job, chunks, layers),
            told=lambda layers: self._tell(progress, layers),
            window_s=job.window_s,
        )
        progress.chunks[0], reason, detail = fetch.run()
        progress.fetched_bytes += fetch.fetched_bytes
        progress.delivered_bytes += fetch.delivered_bytes
        self._end(progress, reason, detail)

    def _round(self, progress: _Progress, *, halving: bool) -> list[_Run]:
        """Return what the next batch fetches: part after part, all or half of what is left, as far as there is room."""
        parts = list(zip(progress.wanted(), progress.landed, self._chunk_bytes, strict=True))
        left = sum(wanted * size for wanted, _, size in parts)
        aim = min(max(-(-left // 2), self._batch_bytes_min) if halving else left, self._half_bytes)
        runs: list[_Run] = []
        begin, taken = self._half * self._half_bytes, 0
        for part, (wanted, done, size) in enumerate(parts):
            room = (self._half_bytes if not taken else aim) - taken
            count = min(wanted, max(-(-(aim - taken) // size), 0), room // size)
            if count > 0 and len(runs) < _PARTS_MAX:
                runs.append(_Run(part, done, count, begin + taken))
                taken += count * size
        return runs

    def _start(
        self, job: FetchJob, memory: Memory, runs: Sequence[_Run], timeout: float, told_at: int | None
    ) -> tuple[FetchCall, str]:
        if told_at is not None:
            memory.memory[told_at : told_at + PROGRESS_BYTES] = bytes(PROGRESS_BYTES)
        shapes, memory_id = self._registration.shapes, self._registration.memory_id
        job_id = f"{self._job_prefix}-{next(self._job_numbers)}"
        parts = [
            FetchPart.whole(
                shapes[run.part],
                memory_id,
                job.keys[run.part][run.first : run.first + run.count],
                run.offset,
                layers=self._layers[run.part],
                layout=run.part,
            )
            for run in runs
        ]
        return self._client.start_fetch(job_id, parts, timeout, progress=told_at, purpose=self._purpose), job_id

    def _follow(self, call: FetchCall, progress: _Progress, memory: Memory, runs: Sequence[_Run], told_at: int) -> int:
        """Scatter leading chunks of a batch as a word says that they are there; return how many of each part.

        A third of what is left at a time, so that it is in place before the next third is there: each costs the
        engine's core something, and the last is hidden behind nothing.
        """
        from shadowserve import native  # an engine loads the C core only where it has to

        word = memory.memory[told_at : told_at + PROGRESS_BYTES]
        most, there, taken = max(run.count for run in runs), 0, 0
        least = -(-self._scatter_bytes_min // sum(self._chunk_bytes[run.part] for run in runs))
        while taken < most and not (call.done() or progress.cancelled or progress.scatter_error):
            there = min(native.progress_wait(word, there, _LOOK_INTERVAL), most)
            if there == most or there - taken >= max(least, -(-(most - taken) // 3)):
                self._landed = _Landed(progress, memory, self._between(runs, taken, there))
                self._flush()
                taken = there
        return taken

    def _between(self, runs: Iterable[_Run], begin: int, end: int) -> list[_Run]:
        """Return the chunks of runs from one of each run's own up to another."""
        cut = [(run, min(run.count, end) - begin, begin * self._chunk_bytes[run.part]) for run in runs]
        return [_Run(run.part, run.first + begin, count, run.offset + skip) for run, count, skip in cut if count > 0]

    def _wait(self, call: FetchCall, job_id: str, progress: _Progress) -> FetchAnswer:
        def wake() -> None:
            with self._condition:
                self._condition.notify_all()

        call.on_done(wake)
        with self._condition:
            # The call has a deadline of its own, so this ends.
            self._condition.wait_for(lambda: call.done() or progress.cancelled)
        while not call.done():
            self._client.cancel(job_id)
            with self._condition:
                self._condition.wait_for(call.done, _CANCEL_INTERVAL)
        return call.result()

    def _land(self, progress: _Progress, memory: Memory, runs: Sequence[_Run], taken: int, answer: FetchAnswer) -> bool:
        """Take note of what a batch has brought, of which so many chunks are scattered; return whether that is any."""
        progress.fetched_bytes += answer.fetched_bytes
        progress.delivered_bytes += answer.delivered_bytes
        left = []
        for run, count in zip(runs, answer.chunks, strict=True):
            arrived = min(max(taken, count), run.count)
            progress.landed[run.part] += arrived
            left += self._between([run], taken, arrived)
        if taken or left:
            self._half ^= 1
        self._landed = _Landed(progress, memory, left) if left else None
        return bool(taken or left)

    def _flush(self) -> None:
        """Scatter what has landed; complete its job if no further batch follows."""
        landed, self._landed = self._landed, None
        if landed is None:
            return
        progress = landed.progress
        if not progress.cancelled and not progress.scatter_error:
            try:
                for run in landed.runs:
                    length = run.count * self._chunk_bytes[run.part]
                    self._scatter(progress.job, run.part, run.first, landed.memory.arrived(run.offset, length))
                if landed.memory.whole():
                    for run in landed.runs:
                        progress.chunks[run.part] += run.count
                else:
                    progress.scatter_error = "the memory that chunks arrive in was made shorter; it is given up"
                    _logger.error("shadowserve: %s", progress.scatter_error)
                    self._registration.lost(landed.memory)
            except Exception as error:
                _logger.exception("scattering for request %s failed", progress.job.request_id)
                progress.scatter_error = f"{type(error).__name__}: {error}"
        if progress.reason:
            self._complete(progress)

    def _end(self, progress: _Progress, reason: str, detail: str = "") -> None:
        """No further batch follows; the outcome is due once what has landed is in place."""
        progress.reason = progress.reason or reason
        progress.detail = detail
        if self._landed is None or self._landed.progress is not progress:
            self._complete(progress)

    def _complete(self, progress: _Progress) -> None:
        reason, detail = progress.reason, progress.detail
        if progress.scatter_error:
            reason, detail = "scatter_failed", progress.scatter_error
        if progress.cancelled:
            reason = "closed" if self._closing else "cancelled"
        now = time.monotonic()
        result = FetchResult(
            job=progress.job,
            chunks=tuple(progress.chunks),
            reason=reason,
            detail=detail,
            fetched_bytes=progress.fetched_bytes,
            delivered_bytes=progress.delivered_bytes,
            seconds=now - progress.enqueued_at,
            waited=(progress.begun or now) - progress.enqueued_at,
        )
        with self._condition:
            self._completion.append(result)  # first: :attr:`idle` takes no lock
            del self._outstanding[progress.job.request_id]
            self._condition.notify_all()

    def _sweep(self, now: float) -> None:
        """End queued jobs that are cancelled or out of time, though the loop be stuck. The lock is held."""
        for progress in [p for p in self._fetching if p.cancelled or p.deadline <= now]:
            self._fetching.remove(progress)
            progress.reason = "deadline"
            self._complete(progress)
