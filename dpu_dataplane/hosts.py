"""Connected hosts and their sessions.

A host is a serving machine: the name in its Hello and the name in its TLS certificate, if any. Limits are per host. The
name in a Hello is not verified, so it grants no access: registered memory and jobs belong to a session, a random token
that the caller sends with every call, and keeps when it reconnects.

A data plane on a DPU serves the host with the card; a second host is most likely a wrong address. So ``hosts_max`` is 1
by default, and the refusal names the connected host.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import grpc

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.registrations import Registrations
from dpu_dataplane.validation import InvalidCall
from shadowserve.proto import HELLO_KEY, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb

_SESSION_BYTES: Final = 16
SESSIONS_MAX: Final = 256
"""Most sessions of a host: an engine has one for its scheduler and one for each worker."""


class HelloRequired(InvalidCall):
    """A call without a known session; the status has the metadata ``HELLO_KEY``."""

    metadata = ((HELLO_KEY, "required"),)

    def __init__(self) -> None:
        super().__init__(
            "unknown session: this data plane has restarted, or the host was idle for too long, or it sent no Hello; "
            "send Hello and register again (clients of this release do), or install the same release of ShadowServe on "
            "both sides",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


@dataclass(eq=False)
class Host:
    """One host."""

    identity: str  # names in its certificate
    owner: str  # its name, for shares of limits
    process: str
    peer: str
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    sessions: "dict[bytes, Session]" = field(default_factory=dict)  # of its processes; the last used one at the end
    used_at: float = field(default_factory=time.monotonic)  # last begin or end of a call
    decides: bool = False  # it reports its decisions

    def __str__(self) -> str:
        certificate = f", certificate of '{self.identity}'" if self.identity else ""
        return f"{self.process or 'a process without a name'} at {self.peer}{certificate}"


@dataclass(eq=False, slots=True)
class Session:
    """One process of a host."""

    host: Host
    token: bytes = field(default_factory=lambda: secrets.token_bytes(_SESSION_BYTES))  # random, in its calls
    calls: int = 0  # in progress
    used_at: float = field(default_factory=time.monotonic)  # last begin or end of a call

    @property
    def owner(self) -> str:
        return self.host.owner

    def use(self) -> None:
        self.used_at = self.host.used_at = time.monotonic()
        self.host.sessions[self.token] = self.host.sessions.pop(self.token)


def _token(context: Any) -> bytes:
    """Return the session that a call names; empty without one."""
    token = next((value for key, value in context.invocation_metadata() or () if key == SESSION_KEY), b"")
    return token if isinstance(token, bytes) else b""


def _identity(context: Any) -> str:
    """Return the names in the caller's TLS certificate; empty without one."""
    return ", ".join(sorted(name.decode(errors="replace") for name in context.peer_identities() or ()))


class HostTable:
    """Connected hosts and their sessions. Used on the event loop's thread only.

    ``on_removed`` is called with the owner of a removed host.
    """

    def __init__(
        self, config: DataPlaneConfig, registrations: Registrations, on_removed: Callable[[str], None]
    ) -> None:
        self._hosts_max = config.hosts_max
        self._idle_max = config.registration_idle_s
        self._registrations = registrations
        self._on_removed = on_removed
        self._hosts: dict[str, Host] = {}
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def owner_of(self, context: Any) -> str:
        """Return the owner of a call's session; empty for an unknown session."""
        session = self._sessions.get(_token(context))
        return "" if session is None else session.owner

    def enter(self, request: pb.HelloRequest, context: Any) -> tuple[Session, bool]:
        """Return the session of a process after its Hello, and whether its host is new; InvalidCall without room."""
        identity = _identity(context)
        owner = f"{identity}\n{request.host}"
        host, new = self._hosts.get(owner), False
        if host is None:
            self.expire(time.monotonic())
            if len(self._hosts) >= self._hosts_max:
                raise InvalidCall(self._refusal(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            host, new = Host(identity, owner, request.process, context.peer()), True
            self._hosts[owner] = host
        session = host.sessions.get(request.session)
        if session is None:
            self._make_room(host)
            session = Session(host)
            self._sessions[session.token] = host.sessions[session.token] = session
        session.use()
        return session, new

    def _make_room(self, host: Host) -> None:
        """Remove the session that was idle for longest, if the host has SESSIONS_MAX; InvalidCall if all are in use."""
        if len(host.sessions) < SESSIONS_MAX:
            return
        idle = next((each for each in host.sessions.values() if self._is_idle(each)), None)
        if idle is None:
            raise InvalidCall(
                f"this host has {SESSIONS_MAX} sessions, the limit, and all of them have registered memory or "
                "calls in progress; stop an engine there",
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        self._remove(idle)

    def _is_idle(self, session: Session) -> bool:
        return not session.calls and not self._registrations.has_any(session.token)

    def _remove(self, session: Session) -> None:
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
            f"host a data plane of its own, raise hosts_max, or stop the engine there: the host is removed once it has "
            f"no segment and {self._idle_max:g} s without a call have passed, or with a restart of this data plane"
        )

    @contextlib.contextmanager
    def call(self, context: Any) -> Iterator[Session]:
        """Return the session of a call while in this context; HelloRequired without a session of this certificate."""
        session = self._sessions.get(_token(context))
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
        """Remove registrations, then sessions, then hosts that were idle for ``registration_idle_s``."""
        self._registrations.expire(now)
        for session in list(self._sessions.values()):
            if now - session.used_at >= self._idle_max and self._is_idle(session):
                self._remove(session)
        for host in list(self._hosts.values()):
            if not host.sessions and now - host.used_at >= self._idle_max:
                del self._hosts[host.owner]
                self._on_removed(host.owner)
