"""Jobs: a Fetch or Store each, with a deadline and cancellation.

Steps on the event loop run under :meth:`Job.within`, which ends them on cancellation or at the deadline. Steps on
threads are not abandoned: :meth:`Job.interruptible` makes such a step return soon, and the job waits for it. Only then
does nothing access the caller's memory any more.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

import grpc

from shadowserve.errors import ShadowServeError, StorageRefusedError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.proto import dataplane_pb2 as pb

_T = TypeVar("_T")

_OUTCOMES: Final = {
    Result.CHECKSUM: pb.OUTCOME_CORRUPT,
    Result.BAD_DATA: pb.OUTCOME_CORRUPT,
    Result.NOT_FOUND: pb.OUTCOME_ABSENT,
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


def outcome_of(result: Result) -> pb.Outcome:
    """Return the outcome of a call that ends with a result of the pipeline."""
    return _OUTCOMES.get(result, pb.OUTCOME_INTERNAL)


def storage_outcome(*, refused: bool) -> pb.Outcome:
    """Return the outcome of a call that storage did not answer."""
    return pb.OUTCOME_STORAGE_REFUSED if refused else pb.OUTCOME_STORAGE_UNAVAILABLE


class Stop(Exception):
    """Ends a job with an outcome, and a sentence that explains it."""

    def __init__(self, outcome: pb.Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


ENDINGS: Final = (Stop, StorageUnavailableError, StorageRefusedError)
"""Exceptions that end a call with an outcome, see :func:`ending_of`."""


def ending_of(error: Exception) -> tuple[pb.Outcome, str]:
    """Return the outcome and detail of a call that one of ENDINGS has ended."""
    if isinstance(error, Stop):
        return error.outcome, error.detail
    return storage_outcome(refused=isinstance(error, StorageRefusedError)), str(error)


class CallError(ShadowServeError):
    """Ends a call with a gRPC status instead of an answer."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    metadata: tuple[tuple[str, str], ...] = ()  # trailing metadata of the answer


class QueueFullError(CallError):
    """The queue has no room for another job."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self) -> None:
        super().__init__("the queue is full: treat it as a miss, or raise fetch_queue")


class JobExistsError(CallError):
    """The session has a job with this id in progress."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Job:
    """One Fetch or Store in progress."""

    def __init__(self, owner: str, job_id: str, timeout: float, session: bytes = b"") -> None:
        self.owner = owner
        self.session = session
        self.job_id = job_id
        self.timeout = timeout
        self.deadline_ns = time.monotonic_ns() + int(timeout * 1e9)
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupts: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.done()

    def cancel(self) -> None:
        """End the job soon with OUTCOME_CANCELLED; on the event loop's thread."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)
            for interrupt in self._interrupts:
                interrupt()

    def part(self) -> "Job":
        """Return a job with the same deadline, for a part of this one that may be cancelled alone."""
        part = Job(self.owner, self.job_id, self.timeout, self.session)
        part.deadline_ns = self.deadline_ns
        return part

    def check(self) -> None:
        """Raise Stop if the job is cancelled or past its deadline."""
        if self.cancelled:
            raise Stop(pb.OUTCOME_CANCELLED, "cancelled")
        if time.monotonic_ns() >= self.deadline_ns:
            raise self._late()

    def _late(self, doing: str = "") -> Stop:
        return Stop(pb.OUTCOME_DEADLINE, f"not done within {self.timeout:g} s{doing and ', while '}{doing}")

    async def within(self, step: Coroutine[Any, Any, _T], doing: str) -> _T:
        """Run a step; on cancellation or at the deadline, cancel it and raise Stop, which says what it was doing."""
        task: asyncio.Future[Any] = asyncio.ensure_future(step)
        remaining = max(0.0, (self.deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            ended: set[asyncio.Future[Any]] = {task, self._cancelled}
            await asyncio.wait(ended, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            result: _T = task.result()
            return result
        raise Stop(pb.OUTCOME_CANCELLED, f"cancelled while {doing}") if self.cancelled else self._late(doing)

    @contextlib.contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """While in this context, :meth:`cancel` calls ``interrupt``, which makes a step on a thread return soon."""
        self.check()
        self._interrupts.append(interrupt)
        try:
            yield
        finally:
            self._interrupts.remove(interrupt)


class JobTable:
    """Jobs in progress, by session and job id."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[bytes, str], Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @contextlib.contextmanager
    def enter(self, session: bytes, owner: str, job_id: str, timeout: float) -> Iterator[Job]:
        """Add a job while in this context; JobExistsError if the session has one with this id."""
        if (session, job_id) in self._jobs:
            raise JobExistsError(f"job_id {job_id!r} is in use by a job in progress")
        job = self._jobs[session, job_id] = Job(owner, job_id, timeout, session)
        try:
            yield job
        finally:
            del self._jobs[session, job_id]

    def cancel(self, session: bytes, job_id: str) -> bool:
        job = self._jobs.get((session, job_id))
        if job is not None:
            job.cancel()
        return job is not None

    def cancel_all(self) -> None:
        for job in self._jobs.values():
            job.cancel()


class JobQueue:
    """A queue for one job at a time, first in first out; its bounded length is divided equally among hosts."""

    def __init__(self, waiting_max: int, hosts_max: int = 1) -> None:
        self._waiting_max = waiting_max
        self._share = max(1, waiting_max // hosts_max)
        self._waiting: Counter[str] = Counter()
        self._lock = asyncio.Lock()
        self._wanted: Counter[bytes] = Counter()  # jobs that wait for their turn, by session

    @property
    def waiting(self) -> int:
        return self._waiting.total()

    def others_want(self, job: Job) -> bool:
        """Return whether jobs of other sessions wait for their turn; those of one session keep their order."""
        return self._wanted.total() > self._wanted[job.session]

    @contextlib.asynccontextmanager
    async def turn(self, job: Job, *, again: bool = False) -> AsyncIterator[None]:
        """Wait for the job's turn, and keep it while in this context.

        QueueFullError if too many jobs wait, unless it has had a turn and waits ``again``.
        """
        if self._lock.locked() and self._is_full(job) and not again:
            raise QueueFullError
        self._wanted[job.session] += 1
        try:
            with self._counted(job):
                await job.within(self._lock.acquire(), "waiting for its turn")
        finally:
            self._wanted[job.session] -= 1
            self._wanted += Counter()  # drops the sessions without one
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def aside(self, job: Job) -> Iterator[None]:
        """Count a job as waiting while it waits for something else than its turn; QueueFullError if too many wait."""
        if self._is_full(job):
            raise QueueFullError
        with self._counted(job):
            yield

    def _is_full(self, job: Job) -> bool:
        return self.waiting >= self._waiting_max or self._waiting[job.owner] >= self._share

    @contextlib.contextmanager
    def _counted(self, job: Job) -> Iterator[None]:
        self._waiting[job.owner] += 1
        try:
            yield
        finally:
            self._waiting[job.owner] -= 1
            if not self._waiting[job.owner]:
                del self._waiting[job.owner]
