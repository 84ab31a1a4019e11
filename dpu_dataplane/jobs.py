"""Jobs: one Fetch or Store each, with a deadline and a way to end it early.

A job's steps on the event loop run under :meth:`Job.within`, which ends them on cancellation or at the deadline. Its
steps on threads are never abandoned: :meth:`Job.interruptible` registers how to make such a step return soon, and the
job waits for it, since only then is the caller's memory quiet.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from shadowserve.errors import StorageRefusedError, StorageUnavailableError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["ENDINGS", "Job", "JobTable", "QueueFull", "Stop", "Turnstile", "ending_of"]

_T = TypeVar("_T")


class Stop(Exception):
    """Ends a job with an outcome.

    Attributes:
        outcome: an Outcome.
        detail: one sentence.
    """

    def __init__(self, outcome: pb.Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


ENDINGS: Final = (Stop, StorageUnavailableError, StorageRefusedError)
"""What ends a call that storage is asked in; :func:`ending_of` says with which outcome."""


def ending_of(error: Exception) -> tuple[pb.Outcome, str]:
    """Return outcome and detail of a call that one of ENDINGS has ended."""
    if isinstance(error, Stop):
        return error.outcome, error.detail
    refused = isinstance(error, StorageRefusedError)
    return (pb.OUTCOME_STORAGE_REFUSED if refused else pb.OUTCOME_STORAGE_UNAVAILABLE), str(error)


class QueueFull(Exception):
    """As many jobs wait as may."""


class Job:
    """One Fetch or Store in progress."""

    def __init__(self, owner: str, job_id: str, timeout: float) -> None:
        self.owner = owner
        self.job_id = job_id
        self.timeout = timeout
        self.deadline_ns = time.monotonic_ns() + int(timeout * 1e9)
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interrupts: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled.done()

    def cancel(self) -> None:
        """Make the job end soon with OUTCOME_CANCELLED. Only from the event loop's thread."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)
            for interrupt in self._interrupts:
                interrupt()

    def check(self) -> None:
        """Raise Stop if the job is cancelled or its time is up."""
        if self.cancelled:
            raise Stop(pb.OUTCOME_CANCELLED, "cancelled")
        if time.monotonic_ns() >= self.deadline_ns:
            raise self._late()

    def _late(self, doing: str = "") -> Stop:
        return Stop(pb.OUTCOME_DEADLINE, f"not done within {self.timeout:g} s{doing and ', while '}{doing}")

    async def within(self, step: Coroutine[Any, Any, _T], doing: str) -> _T:
        """Return what ``step`` returns; on cancellation or at the deadline end it and raise Stop.

        Args:
            step: to run.
            doing: what it does, for the message: ``"asking storage"``.
        """
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
        """While in this context, :meth:`cancel` calls ``interrupt``, which must make a step on a thread return soon."""
        self.check()
        self._interrupts.append(interrupt)
        try:
            yield
        finally:
            self._interrupts.remove(interrupt)


class JobTable:
    """Jobs in progress by their sessions, and by the ids that those have given them."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[bytes, str], Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @contextlib.contextmanager
    def enter(self, session: bytes, owner: str, job_id: str, timeout: float) -> Iterator[Job]:
        """Make a job of a session of a host and keep it findable.

        Raises:
            KeyError: a job of that session and id is in progress.
        """
        if (session, job_id) in self._jobs:
            raise KeyError(job_id)
        job = self._jobs[session, job_id] = Job(owner, job_id, timeout)
        try:
            yield job
        finally:
            del self._jobs[session, job_id]

    def cancel(self, session: bytes, job_id: str) -> bool:
        """Cancel a session's job; return whether there was one."""
        job = self._jobs.get((session, job_id))
        if job is not None:
            job.cancel()
        return job is not None

    def cancel_all(self) -> None:
        """Cancel every job."""
        for job in self._jobs.values():
            job.cancel()


class Turnstile:
    """One job at a time, first come first served, with a bound on how many wait, of which each host has its share."""

    def __init__(self, waiting_max: int, hosts_max: int = 1) -> None:
        self._waiting_max = waiting_max
        self._share = max(1, waiting_max // hosts_max)
        self._waiting: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return self._waiting.total()

    @contextlib.asynccontextmanager
    async def turn(self, job: Job) -> AsyncIterator[None]:
        """Wait for the job's turn, and keep it.

        Raises:
            QueueFull: too many wait, of all or of this host.
            Stop: cancelled, or out of time, while waiting.
        """
        if self._lock.locked() and self._is_full(job):
            raise QueueFull
        with self._counted(job):
            await job.within(self._lock.acquire(), "waiting for its turn")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def aside(self, job: Job) -> Iterator[None]:
        """Count a job among those that wait, while it waits for something else than its turn.

        Raises:
            QueueFull: too many wait, of all or of this host.
        """
        if self._is_full(job):
            raise QueueFull
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
