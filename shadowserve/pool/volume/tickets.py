"""Tickets: the outcome of a change that is not durable yet; and why a change is refused."""

import threading
from collections.abc import Callable, Iterable

from shadowserve import errors
from shadowserve.errors import ShadowServeError


class OutOfBudgetError(ShadowServeError):
    """A value does not fit the budget or the tenant's quota, even after evicting all that may be evicted."""


class BusyError(errors.BusyError):
    """Too many writes are in progress; try again when ``again`` is settled."""

    def __init__(self, message: str, again: "Ticket") -> None:
        """``again`` settles without an error as soon as there may be room."""
        super().__init__(message)
        self.again = again


class Ticket:
    """A change that is not durable yet. The pool settles it once, with or without an error, in any thread."""

    __slots__ = ("_done", "_error", "_lock", "_settled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._done: list[Callable[[Exception | None], None]] = []

    @classmethod
    def of(cls, *tickets: "Ticket") -> "Ticket":
        """Return a ticket that settles with the last of ``tickets``, with the first error among them."""
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
        return self._settled

    @property
    def failed(self) -> bool:
        return self._error is not None

    def then(self, done: Callable[[Exception | None], None]) -> None:
        """Call ``done`` with None or the error, exactly once: now if it is settled, or in the settling thread."""
        with self._lock:
            if not self._settled:
                self._done.append(done)
                return
        done(self._error)

    def settle(self, error: Exception | None = None) -> None:
        """Settle: the change is durable, or ``error`` tells why it will not be. Once, and without the pool's lock."""
        with self._lock:
            assert not self._settled, "a ticket was settled twice"
            self._settled, self._error = True, error
            waiting, self._done = self._done, []
        for done in waiting:
            done(error)


def joined(tickets: Iterable[Ticket | None]) -> Ticket | None:
    """Return a ticket that settles with the last of several, with the first error; None if there are none."""
    waiting = [ticket for ticket in tickets if ticket is not None]
    if len(waiting) < 2:
        return waiting[0] if waiting else None
    return Ticket.of(*waiting)


def when_settled(ticket: Ticket | None, done: Callable[[Exception | None], None]) -> None:
    """Call ``done`` when a ticket settles, with its error; now if there is none."""
    if ticket is None:
        done(None)
    else:
        ticket.then(done)
