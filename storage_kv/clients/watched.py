"""A socket that an event loop watches, and whose every step is guarded."""

import logging
import socket
from abc import abstractmethod
from collections.abc import Callable

from storage_kv.clients.event_loop import READ, WRITE, EventLoop, Lane
from storage_kv.session import Session

_log = logging.getLogger(__name__)


class Watched:
    """What a connection does with its loop; those derived from it say what they wait for.

    Attributes:
        session: whose socket it is.
    """

    __slots__ = ("_closed", "_descriptor", "_interest", "_lane", "_lingering", "_loop", "_socket", "session")

    session: Session

    def __init__(self, sock: socket.socket, loop: EventLoop, lane: Lane) -> None:
        self._loop = loop
        self._lane = lane
        self._socket = sock
        self._descriptor = sock.fileno()
        self._interest = 0  # what the loop waits for
        self._lingering = self._closed = False

    @abstractmethod
    def _on_readable(self) -> None: ...

    @abstractmethod
    def _on_writable(self) -> None: ...

    @abstractmethod
    def _on_lingering(self) -> None: ...

    @abstractmethod
    def _interest_now(self) -> int: ...

    @abstractmethod
    def abort(self) -> None:
        """End at once, whatever is under way."""

    def _on_event(self, events: int) -> None:
        """Read or write; an error or the peer's end wakes whatever waits, to find it out for itself."""
        interest = self._interest
        try:
            if events & ~WRITE and interest & READ:
                if self._lingering:
                    self._on_lingering()
                else:
                    self._on_readable()
            if events & ~READ and interest & WRITE and not self._closed:
                self._on_writable()
        except Exception:
            self._fail_by_bug()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step. A bug of ours must cost this client its connection, not all of them the server."""
        try:
            step()
        except Exception:
            self._fail_by_bug()

    def _fail_by_bug(self) -> None:
        _log.exception("connection_failed address=%s", self.session.address)
        self.abort()

    def _update_interest(self) -> None:
        interest = self._interest_now()
        if interest != self._interest:
            self._watch(interest)

    def _watch(self, interest: int) -> None:
        if interest == self._interest:
            return
        if self._interest == 0:
            self._loop.add(self._descriptor, interest, self._on_event, self._lane)
        elif interest:
            self._loop.modify(self._descriptor, interest)
        else:  # waiting for nothing, it would still be woken by the peer's end, over and over
            self._loop.remove(self._descriptor)
        self._interest = interest

    def _unwatch(self) -> None:
        """Wait for nothing any more, and close the socket."""
        if self._interest:
            self._loop.remove(self._descriptor)
            self._interest = 0
        self._loop.leave(self._lane)
        self._socket.close()
