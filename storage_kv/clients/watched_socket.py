"""A client's socket that an event loop watches, and the phases of its life.

    HANDSHAKE --TLS handshake done--> OPEN --replies sent, closing--> LINGERING --client closes, timeout--> CLOSED

A plain connection begins with OPEN. An error or abort() leads from every phase to CLOSED.
"""

import enum
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

from storage_kv.clients.event_loop import READ, WRITE, EventLoop
from storage_kv.clients.transport import Transport
from storage_kv.session import Session

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Phase of a connection."""

    HANDSHAKE = "TLS handshake"
    OPEN = "open"
    LINGERING = "sending side closed"
    CLOSED = "closed"


HANDSHAKE: Final = Phase.HANDSHAKE
OPEN: Final = Phase.OPEN
LINGERING: Final = Phase.LINGERING
CLOSED: Final = Phase.CLOSED


class WatchedSocket:
    """The part of a connection that talks to its event loop.

    Attributes:
        session: Session of the client.
    """

    __slots__ = ("_descriptor", "_interest", "_lane", "_loop", "_phase", "_transport", "session")

    first_phase: ClassVar[Phase] = OPEN

    def __init__(self, transport: Transport, session: Session, loop: EventLoop) -> None:
        self.session = session
        self._transport = transport
        self._loop = loop
        self._lane = loop.enter(session.share)
        self._descriptor = transport.socket.fileno()
        self._interest = 0  # events that the loop waits for
        self._phase = self.first_phase

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
        """End at once."""

    def _on_event(self, events: int) -> None:
        """Read or write. An error or the peer's end counts as both: the call on the socket then reports it."""
        interest = self._interest
        try:
            if events & ~WRITE and interest & READ:
                if self._phase is LINGERING:
                    self._on_lingering()
                else:
                    self._on_readable()
            if events & ~READ and interest & WRITE and self._phase is not CLOSED:
                self._on_writable()
        except Exception:
            self._fail_by_bug()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. A bug costs this client its connection, not all clients the server."""
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
        else:  # a descriptor without interest would still be reported at the peer's end, again and again
            self._loop.remove(self._descriptor)
        self._interest = interest

    def _unwatch(self) -> None:
        """Leave the loop and close the socket."""
        if self._interest:
            self._loop.remove(self._descriptor)
            self._interest = 0
        self._loop.leave(self._lane)
        self._transport.socket.close()
