"""Hosts and sessions: whom the data plane works for, how many at a time, and since when.

A host is a machine that serves, as its Hello names it, together with the name in its TLS certificate where there is
one. Limits are for hosts: ``hosts_max``, and the shares that hosts have of queues, memory and messages.

The name is the caller's own word. So it gives access to nothing: each Hello gets a session of its own, a random token
that the caller sends with every call. Registered memory and jobs belong to a session. A caller that comes back shows
the session that it had, and gets it again.

A data plane on a DPU belongs to the one host that the card is in, and a second one is most likely a mistake in an
address. So ``hosts_max`` is 1, and the refusal of a second host says which host is connected.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import grpc

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.registrations import Registrations
from dpu_dataplane.validation import InvalidCall
from shadowserve.proto import HELLO_KEY, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["SESSIONS_MAX", "HelloRequired", "Host", "HostTable", "Session"]

_SESSION_BYTES: Final = 16
SESSIONS_MAX: Final = 256
"""Of one host: an engine has one for its scheduler and one for each worker."""


class HelloRequired(InvalidCall):
    """A call without a session that this data plane knows; the status carries ``HELLO_KEY``."""

    metadata = ((HELLO_KEY, "required"),)

    def __init__(self) -> None:
        super().__init__(
            "this data plane does not know the caller: it has restarted, forgot a host that was idle, or was never "
            "told Hello; say Hello and register again (clients of this release do), or install the same release of "
            "ShadowServe on both sides",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


class Host:
    """One host.

    Attributes:
        owner: its name, by which its shares of the limits are counted.
        since: when it connected.
        sessions: of its processes; the one that was used last at the end.
        used_at: monotonic time of the last call's beginning or end.
        decides: it has said what it decided for a prompt.
    """

    def __init__(self, identity: str, request: pb.HelloRequest, peer: str) -> None:
        self.identity = identity
        self.owner = _owner(identity, request)
        self.process = request.process
        self.peer = peer
        self.since = datetime.now(UTC)
        self.sessions: dict[bytes, Session] = {}
        self.used_at = time.monotonic()
        self.decides = False

    def __str__(self) -> str:
        certificate = f", certificate of '{self.identity}'" if self.identity else ""
        return f"{self.process or 'a process without a name'} at {self.peer}{certificate}"


class Session:
    """One process of a host.

    Attributes:
        host: that it is of.
        token: that its calls carry; random.
        calls: in progress.
        used_at: monotonic time of the last call's beginning or end.
    """

    __slots__ = ("calls", "host", "token", "used_at")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.token = secrets.token_bytes(_SESSION_BYTES)
        self.calls = 0
        self.used_at = time.monotonic()

    @property
    def owner(self) -> str:
        """The name of its host, by which shares of the limits are counted."""
        return self.host.owner

    def use(self) -> None:
        """Note that it is in use."""
        self.used_at = self.host.used_at = time.monotonic()
        self.host.sessions[self.token] = self.host.sessions.pop(self.token)


def _owner(identity: str, request: pb.HelloRequest) -> str:
    return f"{identity}\n{request.host}"


def _identity(context: Any) -> str:
    """Return the names in the caller's TLS certificate, empty without one."""
    return ", ".join(sorted(name.decode(errors="replace") for name in context.peer_identities() or ()))


class HostTable:
    """All hosts that are connected, and their sessions. Used on the event loop's thread alone.

    Args:
        config: of the data plane.
        registrations: that sessions have registered.
        gone: called with the owner of a host that is forgotten.
    """

    def __init__(self, config: DataPlaneConfig, registrations: Registrations, gone: Callable[[str], None]) -> None:
        self._hosts_max = config.hosts_max
        self._idle_max = config.registration_idle_s
        self._registrations = registrations
        self._gone = gone
        self._hosts: dict[str, Host] = {}
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def owner_of(self, token: bytes) -> str:
        """Return the owner of a session, empty where it is of no host that is connected."""
        session = self._sessions.get(token)
        return "" if session is None else session.owner

    def enter(self, request: pb.HelloRequest, context: Any) -> tuple[Session, bool]:
        """Return the session of a process that says Hello, and whether its host is new.

        Raises:
            InvalidCall: as many others as may be are connected; the message says which, and what to do.
        """
        identity = _identity(context)
        owner = _owner(identity, request)
        host, new = self._hosts.get(owner), False
        if host is None:
            self.expire(time.monotonic())
            if len(self._hosts) >= self._hosts_max:
                raise InvalidCall(self._refusal(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            host, new = Host(identity, request, context.peer()), True
            self._hosts[owner] = host
        session = host.sessions.get(request.session)
        if session is None:
            self._make_room(host)
            session = Session(host)
            self._sessions[session.token] = host.sessions[session.token] = session
        session.use()
        return session, new

    def _make_room(self, host: Host) -> None:
        """Forget the session of a host that was idle for longest, if the host has as many as it may.

        Raises:
            InvalidCall: all of them have calls in progress, or registered memory.
        """
        if len(host.sessions) < SESSIONS_MAX:
            return
        idle = next((each for each in host.sessions.values() if self._is_idle(each)), None)
        if idle is None:
            raise InvalidCall(
                f"this host has {SESSIONS_MAX} sessions, as many as may be, and all of them have registered memory or "
                "calls in progress; stop an engine there",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        self._forget(idle)

    def _is_idle(self, session: Session) -> bool:
        return not session.calls and not self._registrations.has_any(session.token)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.token]
        del session.host.sessions[session.token]

    def _refusal(self) -> str:
        others = "; ".join(
            f"{host}, since {host.since:%Y-%m-%d %H:%M:%S} UTC, {self._registrations.count(host.owner)} segments, last "
            f"call {time.monotonic() - host.used_at:.0f} s ago"
            for host in self._hosts.values()
        )
        return (
            f"this data plane serves hosts_max: {self._hosts_max}, and another host is connected ({others}); give each "
            f"host a data plane of its own, raise hosts_max, or stop the engine there: it is forgotten once it has no "
            f"segment and {self._idle_max:g} s without a call have passed, or with a restart of this data plane"
        )

    @contextlib.contextmanager
    def call(self, context: Any) -> Iterator[Session]:
        """Return the session that makes a call, for the length of the call.

        Raises:
            HelloRequired: the call has no session, or one that is not known, or not the caller's.
        """
        token = next((value for key, value in context.invocation_metadata() or () if key == SESSION_KEY), b"")
        session = self._sessions.get(token if isinstance(token, bytes) else b"")
        if session is None or session.host.identity != _identity(context):
            raise HelloRequired
        session.calls += 1
        session.use()
        try:
            yield session
        finally:
            session.calls -= 1
            session.used_at = session.host.used_at = time.monotonic()

    def expire(self, now: float) -> None:
        """Forget registrations, then sessions, then hosts, that have been idle for ``registration_idle_s``."""
        self._registrations.expire(now)
        for session in list(self._sessions.values()):
            if now - session.used_at >= self._idle_max and self._is_idle(session):
                self._forget(session)
        for host in list(self._hosts.values()):
            if not host.sessions and now - host.used_at >= self._idle_max:
                del self._hosts[host.owner]
                self._gone(host.owner)
