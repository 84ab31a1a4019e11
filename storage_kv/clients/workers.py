"""Threads for work that is too long for an event loop: verifying a large record. Tenants take turns (fair_queue.py)."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Final, NamedTuple

from shadowserve.fair_queue import FairQueue
from storage_kv.session import Session


class _Work(NamedTuple):
    function: Callable[[], Any]
    future: "Future[Any]"
    weight: float


class Workers:
    """A pool of threads with one fair queue: tenants take turns, and clients take turns within their tenant."""

    def __init__(self, count: int) -> None:
        self._queue: FairQueue[_Work] = FairQueue()
        self._lock = Lock()
        self._pool: Final = ThreadPoolExecutor(count, "verify")

    def submit(self, session: Session, function: Callable[[], Any]) -> "Future[Any]":
        work = _Work(function, Future(), session.weight)
        with self._lock:
            try:
                self._pool.submit(self._do_next)
            except RuntimeError:  # stopped
                work.future.cancel()
            else:
                self._queue.add(session.tenant, session.id, work)
        return work.future

    def stop(self) -> None:
        """Finish running work, cancel waiting work, and end."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            for work in self._queue:
                work.future.cancel()

    def _do_next(self) -> None:
        with self._lock:
            found = self._queue.peek()
            assert found is not None
            tenant, work = found
            self._queue.charge(tenant, 1, work.weight)
        try:
            result = work.function()
        except BaseException as error:
            work.future.set_exception(error)
        else:
            work.future.set_result(result)
