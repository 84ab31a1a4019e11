"""Deletion of objects from the bucket. Tenants take turns; the ticket of a removal settles when it is done."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.fair_queue import FairQueue
from shadowserve.pool.cold.breaker import Breaker
from shadowserve.pool.cold.bucket import BucketError
from shadowserve.pool.cold.index_objects import parse_index_name
from shadowserve.pool.cold.layout import parse_name
from shadowserve.pool.cold.part import Shared, ThreadedPart
from shadowserve.pool.volume.tickets import Ticket, when_settled

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 4


class _Job:
    """Objects to delete, and a ticket. ``find`` returns more names, and may take long."""

    def __init__(
        self, names: Iterable[str], deadline_s: float, find: Callable[[], Iterable[str]] | None = None
    ) -> None:
        self.names = list(names)
        self.names.reverse()  # they are taken from the end
        self.ticket = Ticket()
        self.deadline_s = deadline_s
        self.find = find


class Deletions(ThreadedPart):
    """Deletes objects. Only start(), delete_one() and delete_some() wait, and must be called without locks."""

    def __init__(self, shared: Shared) -> None:
        """While the breaker of deletions is open, they fail at once."""
        super().__init__(shared)
        self._queue: FairQueue[_Job] = FairQueue()
        self._unread: dict[str, Ticket] = {}  # by tenant, while its marked objects of unknown contents are deleted
        self._clears: dict[str | None, _Job] = {}  # by tenant, which wait for the next list of the bucket
        self._waited_for: dict[_Job, None] = {}

    def start(self) -> None:
        self._start_threads("delete", 1, self._run_clears)
        self._start_threads("delete", _AT_ONCE, self._run)

    @property
    def waiting(self) -> int:
        return len(self._waited_for)

    def delete(self, tenant: str, names: Iterable[str]) -> Ticket:
        """Delete marked objects of a tenant; return a ticket.

        It settles within ``timeout_s``: with an error if the objects are not deleted by then; the deletion continues.
        """
        return self._enqueue(tenant, _Job(names, self._clock_s() + self._config.timeout_s))

    def delete_unread(self, tenant: str) -> Ticket:
        """Delete all marked objects of a tenant whose contents are unknown, as delete()."""
        with self._changed:
            ticket = self._unread.get(tenant)
        if ticket is None or ticket.settled:
            ends_s = self._clock_s() + self._config.timeout_s
            ticket = self._enqueue(tenant, _Job((), ends_s, lambda: self._catalog.marked_unread(tenant)))
            with self._changed:
                self._unread[tenant] = ticket
        return ticket

    def clear(self, tenant: str | None) -> Ticket:
        """Delete all objects of a tenant, or of all, within ``list_timeout_s``, as delete().

        One list of the bucket, as names begin with partitions, finds those of all tenants that wait for it.
        """
        job = _Job((), self._clock_s() + self._config.list_timeout_s)
        if self._refuse(job):
            return job.ticket
        with self._changed:
            waiting = self._clears.get(tenant)
            if waiting is not None and waiting in self._waited_for:
                return waiting.ticket
            self._clears[tenant] = job
            self._waited_for[job] = None
            self._changed.notify_all()
        return job.ticket

    def _refuse(self, job: _Job) -> bool:
        """Settle a job, which no caller knows yet, with an error if the bucket is away; return whether it is."""
        if is_away := self._breakers.delete.away:
            job.ticket.settle(self._breakers.delete.refusal("delete"))
        return is_away

    def _enqueue(self, tenant: str | None, job: _Job) -> Ticket:
        if not self._refuse(job):
            with self._changed:
                self._queue.add(tenant, 0, job)
                self._waited_for[job] = None
                self._changed.notify_all()
        return job.ticket

    def step(self) -> None:
        """Settle tickets whose deadline has passed; called often, without a lock."""
        now_s = self._clock_s()
        with self._changed:
            late = [job for job in self._waited_for if job.deadline_s <= now_s]
        for job in late:
            self._answer(job, ShadowServeError("cannot delete all of it in time; the deletion continues"))

    def _answer(self, job: _Job, failure: Exception | None) -> None:
        with self._changed:
            if job not in self._waited_for:
                return  # its deadline has passed
            del self._waited_for[job]
        job.ticket.settle(failure)

    # ---- The threads that delete

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            tenant, job, name = taken
            self._continue(tenant, job, self._try(self._breakers.delete, self._work, job, name))

    def _try(self, breaker: Breaker, work: Callable[..., None], *arguments: object) -> ShadowServeError | None:
        """Work unless the bucket is away; return why that has failed."""
        if breaker.away:
            return breaker.refusal("delete")
        try:
            work(*arguments)
        except BucketError as error:
            # The objects stay hidden, and the next list deletes them; a restart before that finds them again.
            breaker.failed(error.reason, error)
            return error
        except Exception as error:  # a bug must not end this thread
            _log.exception("s3_delete_failed")
            return ShadowServeError(f"cannot delete: {error}")
        return None

    def _work(self, job: _Job, name: str | None) -> None:
        if job.find is not None:
            job.names.extend(job.find())
            job.find = None
        elif name is not None:
            self.delete_one(name)

    def _next(self) -> tuple[str | None, _Job, str | None] | None:
        with self._changed:
            while not self._closed:
                if (found := self._queue.peek()) is not None:
                    tenant, job = found
                    self._queue.charge(tenant, 1.0)
                    return tenant, job, job.names.pop() if job.names and job.find is None else None
                self._changed.wait()
        return None

    def _run_clears(self) -> None:
        while jobs := self._next_clears():
            failure = self._try(self._breakers.clear, self._find_all, jobs)
            for tenant, job in jobs.items():
                if failure is not None or not job.names:
                    self._answer(job, failure)
                    continue
                # A job has one thread at a time. One thread is left for other tenants.
                parts = [_Job(job.names[part :: _AT_ONCE - 1], job.deadline_s) for part in range(_AT_ONCE - 1)]
                tickets = [self._enqueue(tenant, part) for part in parts if part.names]
                Ticket.of(*tickets).then(partial(self._answer, job))

    def _next_clears(self) -> dict[str | None, _Job]:
        with self._changed:
            while not self._clears and not self._closed:
                self._changed.wait()
            taken, self._clears = self._clears, {}
            return {} if self._closed else taken

    def _find_all(self, jobs: Mapping[str | None, _Job]) -> None:
        """List the bucket; mark the objects of the jobs' tenants, and let the jobs have them."""
        for listed in self._bucket.list():
            if (parts := parse_name(listed.name)) is not None:
                wanted = [jobs[tenant] for tenant in (None, parts.tenant) if tenant in jobs]
                if wanted:
                    self._catalog.mark_object(listed.name)
            else:
                wanted = [jobs[None]] if None in jobs and parse_index_name(listed.name) is not None else []
            for job in wanted:
                job.names.append(listed.name)
        self._breakers.clear.succeeded()

    def delete_one(self, name: str) -> None:
        """Delete an index object, or an object if it is still marked; BucketError if that fails."""
        is_index = parse_index_name(name) is not None
        if not is_index and not self._catalog.is_marked(name):
            return
        self._bucket.delete(name)
        self._breakers.delete.succeeded()
        if not is_index:
            self._catalog.note_deleted(name)

    def delete_some(self, names: Iterable[str]) -> int:
        """Delete objects until one deletion fails; return how many were deleted."""
        count = 0
        for name in names:
            try:
                self.delete_one(name)
            except BucketError as error:
                self._breakers.delete.failed(error.reason, error)
                break
            count += 1
        return count

    def _continue(self, tenant: str | None, job: _Job, failure: ShadowServeError | None) -> None:
        if failure is None and job.names:
            with self._changed:
                self._queue.add(tenant, 0, job)
                self._changed.notify_all()
            return
        self._answer(job, failure)


class DelayedRemovals:
    """Removals of records that wait for the first list of their partition, before which its contents are unknown."""

    def __init__(self, timeout_s: float, clock_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, str, bytes, Ticket]] = []

    def add(self, tenant: str, key: bytes) -> Ticket:
        ticket = Ticket()
        with self._lock:
            self._waiting.append((self._clock_s() + self._timeout_s, tenant, key, ticket))
        return ticket

    def begin(self, remove: Callable[[str, bytes], Ticket | None], is_listed: Callable[[bytes], bool]) -> None:
        """Begin the removals of records whose partition was listed."""
        with self._lock:
            begun_now = [each for each in self._waiting if is_listed(each[2])]
            self._waiting = [each for each in self._waiting if not is_listed(each[2])]
        for _, tenant, key, ticket in begun_now:
            when_settled(remove(tenant, key), ticket.settle)

    def expire(self, error: ShadowServeError, *, all_of_them: bool) -> None:
        """Settle removals that have waited too long, or all of them, with an error."""
        now_s = self._clock_s()
        with self._lock:
            late = [each for each in self._waiting if all_of_them or each[0] <= now_s]
            self._waiting = [each for each in self._waiting if each not in late] if late else self._waiting
        for *_, ticket in late:
            ticket.settle(error)
