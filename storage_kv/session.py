"""The state of one client that commands read and change: everything except its socket."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shadowserve.pool.types import DEFAULT_TENANT, Address
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import UNAUTHENTICATED, Account
from storage_kv.access.rules import User
from storage_kv.command_spans import CommandSpans

Argument: TypeAlias = bytes | memoryview
"""An argument of a command: a memoryview for a value that was received in place, otherwise bytes."""


@dataclass(slots=True)
class Transaction:
    """The commands of a client since MULTI, with the number and size of all their arguments.

    ``failed``: a command could not be queued, so EXEC executes none, and ``commands`` is empty.
    """

    commands: list[list[Argument]] = field(default_factory=list)
    arguments: int = 0
    size_bytes: int = 0
    failed: bool = False

    @property
    def held_bytes(self) -> int:
        """Approximate memory use, Python's own of each argument included."""
        return self.size_bytes + 64 * self.arguments

    def fail(self) -> None:
        self.failed = True
        self.commands, self.arguments, self.size_bytes = [], 0, 0


@dataclass(slots=True)
class Watch:
    """The keys of WATCH: whether each qualified key existed, and whether one of them has changed since."""

    existed: dict[Address, bool] = field(default_factory=dict)
    failed: bool = False


@dataclass(slots=True)
class ClientInfo:
    """Facts of a client for CLIENT LIST, and the time of its last activity. Times are of ``time.monotonic()``."""

    local_address: str
    file_descriptor: int
    created_s: float = field(default_factory=time.monotonic)
    last_command: str = "NULL"
    last_active_s: float = field(default_factory=time.monotonic)
    unauthenticated_since_s: float = field(default_factory=time.monotonic)
    pending_output_bytes: int = 0
    name: bytes = b""
    library_name: bytes = b""
    library_version: bytes = b""
    no_evict: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionHooks:
    """Calls from a session to its connection.

    ``admit`` counts bytes that a request holds for longer than its command is executed, in an account of their own. It
    returns None where there is no room; the connection is notified when there may be. Needs the node's lock.
    """

    finish: Callable[[], None] = lambda: None  # ends the connection when its replies are sent; from any thread
    abort: Callable[[], None] = lambda: None  # ends the connection without sending its replies; from any thread
    admit: Callable[[int], Account | None] = lambda size: None


@dataclass(slots=True, eq=False)
class Session:
    """One client. Node.begin() sets its user; before, it may do nothing or, if ``authenticated``, everything."""

    id: int  # unique in the process; CLIENT ID
    address: str
    info: ClientInfo = field(default_factory=lambda: ClientInfo("", -1))
    authenticated: bool = False
    hooks: ConnectionHooks = ConnectionHooks()
    protocol: int = 2  # 2 or 3
    closing: bool = False  # no more commands are executed; the connection ends when the replies are sent
    replies: bool = True  # False after CLIENT REPLY OFF
    skip: int = 0  # number of commands whose replies are still to be dropped, CLIENT REPLY SKIP included
    user: User = field(init=False)
    tenant: int = DEFAULT_TENANT  # id of the tenant whose keys it sees; only AUTH changes it
    limiter: RateLimiter | None = None
    weight: float = 1.0  # share weight of its tenant
    pause_until_s: float = 0.0  # nothing is read or executed before this time of ``time.monotonic()``; 0.0 for no pause
    pause_holds_replies: bool = False  # no replies are sent during the pause either
    transaction: Transaction | None = None
    executing: deque[list[Argument]] = field(default_factory=deque)  # by EXEC, before any other command of the client
    executing_bytes: int = 0  # size of the commands at EXEC
    watch: Watch = field(default_factory=Watch)
    slot_tenant: str | None = None  # tenant whose connection slot it uses; None for none
    spans: CommandSpans | None = None  # commands that belong to the span of KV.TRACE; None for none

    def __post_init__(self) -> None:
        self.user = _UNRESTRICTED if self.authenticated else _FORBIDDEN

    @property
    def share(self) -> int:
        return self.tenant if self.authenticated else UNAUTHENTICATED

    @property
    def user_name(self) -> bytes:
        """Name of the user, for logs; empty for a client that has not authenticated."""
        return self.user.name if self.authenticated else b""

    @property
    def queued_bytes(self) -> int:
        """Approximate memory of the commands that wait for EXEC, or that EXEC has yet to execute."""
        if self.transaction is not None:
            return self.transaction.held_bytes
        return self.executing_bytes if self.executing else 0

    def reset(self) -> None:
        """Return to the state of a new connection, except for the user: RESET."""
        self.info.name = b""
        self.info.no_evict = False
        self.protocol = 2
        self.replies = True
        self.skip = 0
        self.tenant = DEFAULT_TENANT
        self.transaction = None
        self.watch = Watch()
        if self.spans is not None:
            self.spans.end()
        self.spans = None

    def qualify(self, argument: Argument) -> Address:
        """Return the address in the store of a key as the client names it."""
        return self.tenant, bytes(argument)


_FORBIDDEN: Final = User(b"default")
_UNRESTRICTED: Final = User(b"default")
for _rule in (b"allkeys", b"allcommands"):
    _UNRESTRICTED.apply(_rule, {})
