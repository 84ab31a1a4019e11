"""Threads for work that is too long for an event loop: verifying a large record. Tenants take turns (fair_queue.py)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
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
        self._changed = threading.Condition()
        self._stopped = False
        self._threads: Final = [
            threading.Thread(target=self._run, name=f"verify-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, session: Session, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._changed:
            if not self._stopped:
                self._queue.add(session.tenant, session.id, _Work(function, future, session.weight))
                self._changed.notify()
                return future
        future.cancel()
        return future

    def stop(self) -> None:
        """Finish running work, cancel waiting work, and end."""
        with self._changed:
            self._stopped = True
            waiting, self._queue = list(self._queue), FairQueue()
            self._changed.notify_all()
        for work in waiting:
            work.future.cancel()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            _do(work)
            del work  # keeps no reference to its arguments while the thread waits

    def _next(self) -> _Work | None:
        with self._changed:
            while not self._queue and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            found = self._queue.peek()
            assert found is not None
            tenant, work = found
            self._queue.charge(tenant, 1, work.weight)
            return work


def _do(work: _Work) -> None:
    try:
        result = work.function()
    except BaseException as error:
        work.future.set_exception(error)
    else:
        work.future.set_result(result)
