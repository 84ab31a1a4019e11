"""Threads for work that is too long for an event loop: the check of a large record. Tenants take turns (turns.py)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from storage_kv.session import Session
from storage_kv.turns import Turns


class _Work(NamedTuple):
    function: Callable[[], Any]
    future: "Future[Any]"
    weight: float


class Workers:
    """A few threads, and what waits for them.

    A tenant has no more than its turns, however much it has waiting; a client no more than its own of these.
    """

    def __init__(self, count: int) -> None:
        """Start so many threads."""
        self._turns: Turns[_Work] = Turns()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads: Final = [
            threading.Thread(target=self._run, name=f"verify-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, session: Session, function: Callable[[], Any]) -> "Future[Any]":
        """Have a function called for a client, and return what it will return."""
        future: Future[Any] = Future()
        with self._changed:
            if not self._stopped:
                self._turns.add(session.tenant, session.id, _Work(function, future, session.weight))
                self._changed.notify()
                return future
        future.cancel()
        return future

    def stop(self) -> None:
        """End when what has begun is done; what has not is cancelled."""
        with self._changed:
            self._stopped = True
            waiting, self._turns = list(self._turns), Turns()
            self._changed.notify_all()
        for work in waiting:
            work.future.cancel()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            _do(work)
            del work  # or what it was of would be kept for as long as nothing happens

    def _next(self) -> _Work | None:
        with self._changed:
            while not self._turns and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            tenant = self._turns.tenants()[0]
            work = self._turns.first(tenant)
            assert work is not None
            self._turns.charge(tenant, 1, work.weight)
            return work


def _do(work: _Work) -> None:
    try:
        result = work.function()
    except BaseException as error:
        work.future.set_exception(error)
    else:
        work.future.set_result(result)
