"""The KV cache manager: fetches the KV of prompts in the background of a serving engine (ShadowServe section 4.1).

The *fetch queue* holds jobs; one background thread takes them one at a time, in a configurable order. The layerwise
ones go together, before the next batch of any other, and a batch that stalls gives way to them: a step of the engine
waits for them. The *completion queue* holds outcomes. The engine's scheduler meets both once in each step, in
:meth:`KVCacheManager.exchange`.

A job wants chunks of one or several *shards*: layers whose chunks have one shape. Movers bring them. Each job has
exactly one outcome, by its deadline: how many leading chunks of each shard are in place, and why not all.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

from host_control.client import DataPlaneClient
from host_control.disaggregation import Available
from host_control.fetch import Fetch, FetchJob, FetchResult, Placer, Scatter
from host_control.layer_fetch import LayerMover, ScatterLayers
from host_control.movers import BatchMover, PageMover
from host_control.registered_memory import RegisteredMemory
from host_control.transfer import Event, Reason, State
from shadowserve import spans
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["FetchJob", "FetchResult", "KVCacheManager"]

_logger = logging.getLogger(__name__)
_SWEEP_INTERVAL_S: Final = 0.05
"""Between two looks for queued jobs that are out of time, while the engine waits for a layer."""


class KVCacheManager:
    """Fetches in the background. All public methods may be called from any thread and return at once.

    Args:
        registration: Memory that chunks arrive in, at least two of the largest. The manager owns it from now on.
        scatter: Moves chunks into paged memory; called in the manager's thread.
        scatter_layers: Moves layers of a job's chunks into paged memory; for layerwise jobs.
        layers: Wanted layers of each shard's chunks; by default all.
        order: The oldest job first, as in the paper, or the one with the fewest chunks.
        placer: Places chunks without registered memory, for jobs of one shard of which all chunks are available.
        fetch_timeout_s: Seconds from hand-over to outcome.
        limits: ``batch_bytes_min``, ``scatter_bytes_min``, ``scatter_parts`` of
            :class:`~host_control.movers.BatchMover`.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        scatter: Scatter,
        *,
        scatter_layers: ScatterLayers | None = None,
        layers: Sequence[slice] | None = None,
        order: Literal["fifo", "sjf"] = "fifo",
        placer: Placer | None = None,
        fetch_timeout_s: float = 10.0,
        purpose: Any = pb.PURPOSE_REQUEST,
        **limits: int,
    ) -> None:
        self._registration = registration
        self._order = order
        self._fetch_timeout = fetch_timeout_s
        self._condition = threading.Condition()
        self._batches = BatchMover(
            client,
            registration,
            scatter,
            condition=self._condition,
            complete=self._complete,
            layers=layers,
            hurried=self._has_streams,
            purpose=purpose,
            **limits,
        )
        self._pages = PageMover(placer, self._batches, self._tell) if placer is not None else None
        self._layers = (
            LayerMover(client, registration, scatter_layers, self._batches, self._tell) if scatter_layers else None
        )
        self._queue: list[Fetch] = []
        self._completion: list[FetchResult] = []
        self._outstanding: dict[str, Fetch] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shadowserve-fetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    def exchange(
        self,
        jobs: Iterable[FetchJob] = (),
        cancel: Iterable[str] = (),
        available: Mapping[str, Available] = MappingProxyType({}),
    ) -> list[FetchResult]:
        """Hand over jobs and take the outcomes since the last exchange, in one atomic step.

        Args:
            cancel: Requests whose job should end early. Its outcome still comes, once nothing writes for it.
            available: Chunks that are available by now, of requests whose job waits for more.

        Raises:
            ValueError: A request's last job has no outcome yet; nothing is handed over then.
        """
        now = time.monotonic()
        with self._condition:
            new = list(jobs)
            for job in new:
                if job.request_id in self._outstanding:
                    raise ValueError(f"request {job.request_id} has a fetch job already")
            for job in new:
                self._enqueue(job, now)
            for request_id in cancel:
                if (fetch := self._outstanding.get(request_id)) is not None:
                    fetch.cancelled = True
            for request_id, more in available.items():
                if (fetch := self._outstanding.get(request_id)) is not None:
                    fetch.available = more
            if self._outstanding:  # the engine calls this in each step: without a job the thread sleeps on
                self._sweep(now)
                self._condition.notify_all()
            completed, self._completion = self._completion, []
            return completed

    def _enqueue(self, job: FetchJob, now: float) -> None:
        none = [0] * len(job.keys)
        fetch = self._outstanding[job.request_id] = Fetch(
            state=State.QUEUED,
            job=job,
            span=spans.begin("transfer", job.context, chunks=job.chunks),
            enqueued_at=now,
            deadline=now + self._fetch_timeout,
            available=job.available,
            placed=list(none),
            delivered=list(none),
        )
        self._queue.append(fetch)

    @property
    def idle(self) -> bool:
        """There is neither a job nor an outcome that was not taken."""
        return not (self._outstanding or self._completion)

    def wait(self, request_ids: Iterable[str], layer: int | None = None) -> int:
        """Block until a layer (None: all) is in place of all that these requests load, or their job has ended.

        Each job ends by its deadline. Its outcome comes with the next :meth:`exchange`. Return the number of layers
        beyond this one that are in place of all running jobs; 0 without any.
        """
        waiting = set(request_ids)
        with self._condition:
            while any(
                layer is None or self._outstanding[name].layers <= layer for name in waiting & self._outstanding.keys()
            ):
                self._condition.wait(_SWEEP_INTERVAL_S)
                self._sweep(time.monotonic())
            running = [self._outstanding[name].layers for name in waiting & self._outstanding.keys()]
            return min(running) - (layer or 0) - 1 if running else 0

    def wait_any(self, timeout: float) -> None:
        """Block until there are outcomes, or a job waits for more available chunks, at most ``timeout`` seconds."""
        with self._condition:
            fetches = self._outstanding
            self._condition.wait_for(
                lambda: self._completion or any(each.waits() for each in fetches.values()), timeout
            )

    def close(self, timeout: float = 5.0) -> list[FetchResult]:
        """End all jobs with reason ``closed``, and the thread; return the outcomes that were not taken.

        A thread that is stuck longer than ``timeout`` seconds dies with the process.
        """
        with self._condition:
            self._closing = True
            for fetch in self._outstanding.values():
                fetch.cancelled = True
            self._condition.notify_all()
        self._thread.join(timeout)
        self._registration.close()
        with self._condition:
            completed, self._completion = self._completion, []
            return completed

    # ------------------------------------------------------------------ the background thread

    def _run(self) -> None:
        self._connect_early()
        while fetches := self._next():
            with self._surviving(fetches):
                if fetches[0].job.layerwise:
                    self._move_layers(fetches)
                    continue
                (fetch,) = fetches
                self._prepare(fetch)
                with spans.use(fetch.span.context):
                    while self._advance(fetch):
                        if streams := self._take_streams():
                            with self._surviving(streams):
                                self._move_layers(streams)

    @contextlib.contextmanager
    def _surviving(self, fetches: Sequence[Fetch]) -> Iterator[None]:
        """Survive any bug; the jobs are recomputed."""
        try:
            yield
        except Exception as error:
            for fetch in fetches:
                if not fetch.ending:
                    _logger.exception("fetching for request %s failed", fetch.job.request_id)
                    self._batches.end(fetch, Reason.INTERNAL, f"{type(error).__name__}: {error}")
            self._registration.retire(release=True)

    def _connect_early(self) -> None:
        # So that the first request does not pay for allocating and registering the memory.
        try:
            self._registration.acquire(self._fetch_timeout)
        except DataPlaneError as error:
            _logger.warning("shadowserve: not connected yet: %s", error)

    def _next(self) -> list[Fetch]:
        """Wait for fetches: all layerwise ones, or one other. Return none to end the thread."""
        while True:
            with self._condition:
                self._sweep(time.monotonic())
                if streams := self._take_streams():
                    return streams
                if ready := [fetch for fetch in self._queue if not fetch.waits()]:
                    return [self._take(self._choose(ready))]
                if not self._batches.has_delivered:
                    if self._closing:
                        return []
                    self._condition.wait()
                    continue
            # There is nothing else to start: scatter what the last batch delivered.
            self._batches.flush()

    def _has_streams(self) -> bool:
        with self._condition:
            return any(each.job.layerwise for each in self._queue)

    def _take_streams(self) -> list[Fetch]:
        with self._condition:
            return [self._take(fetch) for fetch in [each for each in self._queue if each.job.layerwise]]

    def _take(self, fetch: Fetch) -> Fetch:
        self._queue.remove(fetch)
        fetch.on(Event.START)
        fetch.started_at = fetch.started_at or time.monotonic()
        return fetch

    def _prepare(self, fetch: Fetch) -> None:
        if self._pages is not None:
            self._pages.prepare(fetch)

    def _choose(self, ready: Sequence[Fetch]) -> Fetch:
        """Return the oldest fetch, with ``sjf`` of those with the fewest chunks."""
        return min(ready, key=lambda fetch: fetch.job.chunks) if self._order == "sjf" else ready[0]

    def _advance(self, fetch: Fetch) -> bool:
        """Make the next move of a fetch; return False once it has ended or waits in the queue again."""
        if fetch.cancelled or fetch.scatter_error or fetch.left_s <= 0:
            self._batches.end(fetch, Reason.CANCELLED if fetch.cancelled else Reason.DEADLINE)
            return False
        if self._pages is not None and self._pages.is_due(fetch):
            return self._pages.move(fetch)
        if fetch.waits():
            return self._put_back(fetch)
        return self._batches.move(fetch)

    def _move_layers(self, fetches: Sequence[Fetch]) -> None:
        """Move layerwise fetches to their end: first what devices hold from the first chunk on."""
        assert self._layers is not None, "a layerwise job, and no function that scatters layers"
        for fetch in fetches:
            self._prepare(fetch)
            if fetch.pages_from == 0:
                self._advance(fetch)
            fetch.pages_from = None
        self._layers.move([fetch for fetch in fetches if not fetch.ending])

    def _put_back(self, fetch: Fetch) -> bool:
        """Queue a fetch again, whose next chunks are not available yet; other fetches go first."""
        self._batches.flush()  # a queued fetch has nothing in flight, and may be ended at any time
        if fetch.scatter_error:
            return True
        with self._condition:
            fetch.on(Event.QUEUE)
            self._queue.insert(0, fetch)
            self._condition.notify_all()
        return False

    def _tell(self, fetch: Fetch, layers: int) -> None:
        with self._condition:
            fetch.layers = max(fetch.layers, layers)
            self._condition.notify_all()

    def _complete(self, fetch: Fetch) -> None:
        reason, detail = fetch.ending, fetch.detail
        if fetch.scatter_error:
            reason, detail = Reason.SCATTER_FAILED, fetch.scatter_error
        if fetch.cancelled:
            reason = Reason.CLOSED if self._closing else Reason.CANCELLED
        now = time.monotonic()
        result = FetchResult(
            job=fetch.job,
            chunks=tuple(fetch.placed),
            reason=reason,
            detail=detail,
            fetched_bytes=fetch.fetched_bytes,
            delivered_bytes=fetch.delivered_bytes,
            seconds=now - fetch.enqueued_at,
            waited=(fetch.started_at or now) - fetch.enqueued_at + fetch.others_s,
        )
        fetch.on(Event.CANCEL if fetch.cancelled else Event.COMPLETE if result.complete else Event.FALL_SHORT)
        fetch.span.end(
            reason=reason,
            detail=detail,
            fetched_bytes=result.fetched_bytes,
            queued_s=result.waited,
            placed_chunks=min(result.chunks, default=0),
        )
        with self._condition:
            self._completion.append(result)  # first: :attr:`idle` takes no lock
            del self._outstanding[fetch.job.request_id]
            self._condition.notify_all()

    def _sweep(self, now: float) -> None:
        """End queued jobs that are cancelled or out of time, even if the thread is stuck. The lock is held."""
        for fetch in [each for each in self._queue if each.cancelled or each.deadline <= now]:
            self._queue.remove(fetch)
            fetch.ending = Reason.DEADLINE
            self._complete(fetch)
