"""Hosts: whom the data plane works for, how many at a time, and since when.

A host is a machine that serves (all of its processes are one host), as its Hello names it, together with the name in
its TLS certificate where there is one. It gets a session, which it sends with every call. What a host makes, no other
host can use: destinations, jobs and recordings are found under their owner only.

A data plane on a DPU belongs to the one host that the card is in, and a second one is most likely a mistake in an
address. So ``hosts_max`` is 1, and the second host is told who was there first.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import grpc

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.destinations import DestinationTable
from dpu_dataplane.validation import InvalidCall
from shadowserve.proto import HELLO_KEY, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["HelloRequired", "Host", "HostTable"]

_SESSION_BYTES: Final = 16


class HelloRequired(InvalidCall):
    """A call of nobody that this data plane knows; the status carries ``HELLO_KEY``."""

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
        owner: its name among the owners of destinations, jobs and recordings.
        session: that its calls carry.
        calls: in progress.
        used_at: monotonic time of the last call's beginning or end.
        decides: it has said what it decided for a prompt.
    """

    def __init__(self, identity: str, request: pb.HelloRequest, peer: str) -> None:
        self.identity = identity
        self.owner = _owner(identity, request)
        self.session = secrets.token_bytes(_SESSION_BYTES)
        self.process = request.process
        self.peer = peer
        self.since = datetime.now(UTC)
        self.calls = 0
        self.used_at = time.monotonic()
        self.decides = False

    def __str__(self) -> str:
        certificate = f", certificate of '{self.identity}'" if self.identity else ""
        return f"{self.process or 'a process without a name'} at {self.peer}{certificate}"


def _owner(identity: str, request: pb.HelloRequest) -> str:
    return f"{identity}\n{request.host}"


def _identity(context: Any) -> str:
    """Return the names in the caller's TLS certificate, empty without one."""
    return ", ".join(sorted(name.decode(errors="replace") for name in context.peer_identities() or ()))


class HostTable:
    """All hosts that are connected. Used on the event loop's thread alone."""

    def __init__(self, config: DataPlaneConfig, destinations: DestinationTable) -> None:
        self._hosts_max = config.hosts_max
        self._idle_max = config.destination_idle
        self._destinations = destinations
        self._hosts: dict[bytes, Host] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def knows(self, session: bytes) -> bool:
        """Return whether a session is one of a host that is connected."""
        return session in self._hosts

    def enter(self, request: pb.HelloRequest, context: Any) -> tuple[Host, bool]:
        """Return the host that says Hello, and whether it is new.

        Raises:
            InvalidCall: as many others as may be are connected; the message says who, and what to do.
        """
        identity = _identity(context)
        owner = _owner(identity, request)
        for host in self._hosts.values():
            if host.owner == owner:
                host.used_at = time.monotonic()
                return host, False
        self.expire(time.monotonic())
        if len(self._hosts) >= self._hosts_max:
            raise InvalidCall(self._refusal(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        host = Host(identity, request, context.peer())
        self._hosts[host.session] = host
        return host, True

    def _refusal(self) -> str:
        others = "; ".join(
            f"{host}, since {host.since:%Y-%m-%d %H:%M:%S} UTC, {self._destinations.count(host.owner)} segments, last "
            f"call {time.monotonic() - host.used_at:.0f} s ago"
            for host in self._hosts.values()
        )
        return (
            f"this data plane serves hosts_max: {self._hosts_max}, and another host is connected ({others}); give each "
            f"host a data plane of its own, raise hosts_max, or stop the engine there: it is forgotten once it has no "
            f"segment and {self._idle_max:g} s without a call have passed, or with a restart of this data plane"
        )

    @contextlib.contextmanager
    def call(self, context: Any) -> Iterator[Host]:
        """Return the host that makes a call, for the length of the call.

        Raises:
            HelloRequired: the call has no session, or one that is not known, or not the caller's.
        """
        session = next((value for key, value in context.invocation_metadata() or () if key == SESSION_KEY), b"")
        host = self._hosts.get(session if isinstance(session, bytes) else b"")
        if host is None or host.identity != _identity(context):
            raise HelloRequired
        host.calls += 1
        host.used_at = time.monotonic()
        try:
            yield host
        finally:
            host.calls -= 1
            host.used_at = time.monotonic()

    def expire(self, now: float) -> None:
        """Forget destinations, and then hosts, that have been idle for ``destination_idle``."""
        self._destinations.expire(now)
        for session, host in list(self._hosts.items()):
            if not host.calls and not self._destinations.count(host.owner) and now - host.used_at >= self._idle_max:
                del self._hosts[session]
