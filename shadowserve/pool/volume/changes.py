"""What becomes of a change: it is durable, it will be, or it is refused."""

import threading
from collections.abc import Callable

from shadowserve import errors
from shadowserve.errors import ShadowServeError


class OutOfBudgetError(ShadowServeError):
    """A value does not fit the budget or the tenant's quota, even if everything that may be evicted is."""


class BusyError(errors.BusyError):
    """Too many writes are under way; trying again makes sense once ``again`` is settled."""

    def __init__(self, message: str, again: "Ticket") -> None:
        """``again`` is settled without an error as soon as there may be room."""
        super().__init__(message)
        self.again = again


class Ticket:
    """A change that is not durable yet. A store settles it; whoever waits for it hears so, from whatever thread."""

    __slots__ = ("_done", "_error", "_lock", "_settled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._done: list[Callable[[Exception | None], None]] = []

    @classmethod
    def of(cls, *tickets: "Ticket") -> "Ticket":
        """Return one that is settled when all of ``tickets`` are, with the first error among them."""
        whole = cls()
        lock = threading.Lock()
        missing, failure = len(tickets), None

        def done(error: Exception | None) -> None:
            nonlocal missing, failure
            with lock:
                missing, failure = missing - 1, failure or error
                if missing:
                    return
            whole.settle(failure)

        for ticket in tickets:
            ticket.then(done)
        return whole

    @property
    def settled(self) -> bool:
        """Whether it is settled, with or without an error."""
        return self._settled

    @property
    def failed(self) -> bool:
        """Whether it is settled with an error."""
        return self._error is not None

    def then(self, done: Callable[[Exception | None], None]) -> None:
        """Call ``done`` with None or the error: exactly once, at once if it is settled, else in the settling thread."""
        with self._lock:
            if not self._settled:
                self._done.append(done)
                return
        done(self._error)

    def settle(self, error: Exception | None = None) -> None:
        """Say that the change is durable, or why it will never be. Once, without the pool's lock."""
        with self._lock:
            assert not self._settled, "a ticket was settled twice"
            self._settled, self._error = True, error
            waiting, self._done = self._done, []
        for done in waiting:
            done(error)
