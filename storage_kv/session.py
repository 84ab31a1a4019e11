"""What a storage node remembers of one client: everything but its socket."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shadowserve.pool.terms import DEFAULT_TENANT, Address
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import STRANGERS, Account
from storage_kv.access.rules import User

Argument: TypeAlias = bytes | memoryview
"""Of a command. Values that were received in place are memoryviews, all else is bytes."""


@dataclass(slots=True)
class Transaction:
    """What a client has sent since MULTI.

    Attributes:
        commands: with their arguments, in order; none any more once it has failed.
        arguments: of all of them.
        size_bytes: of these.
        failed: a command could not be queued, so that EXEC will execute none.
    """

    commands: list[list[Argument]] = field(default_factory=list)
    arguments: int = 0
    size_bytes: int = 0
    failed: bool = False

    @property
    def held_bytes(self) -> int:
        """About what it makes the node hold, Python's own of each argument included."""
        return self.size_bytes + 64 * self.arguments

    def fail(self) -> None:
        self.failed = True
        self.commands, self.arguments, self.size_bytes = [], 0, 0


class Session:
    """One client: what it said about itself, and what it may do.

    Attributes:
        id: unique in the process, as CLIENT ID.
        protocol: 2 or 3.
        closing: the connection ends when what has been answered so far is sent.
        replies: False after CLIENT REPLY OFF.
        finish: ends its connection, soon, once what it has been answered is sent; from any thread.
        cut: ends its connection, soon, as it is; from any thread.
        admit: counts so many bytes that a request holds for longer than its command is executed, in an account of
            their own; None where there is no room, and its connection hears when there may be. With the node's lock.
        user: whose rules hold for it; of a connection that has not authenticated, the default user.
        tenant: id of the tenant whose keys it sees; nothing that the client sends can change it but AUTH.
        limiter: of its tenant; None for no limits.
        weight: of its tenant, where several share something.
        pause_until_s: nothing more is read or executed before, by ``time.monotonic()``; 0.0 for no pause.
        pause_holds_replies: and what has been answered is not sent before.
        skip: commands whose replies are still to be dropped, CLIENT REPLY SKIP itself included.
        transaction: what MULTI has begun; None outside of it.
        executing: what EXEC has left to execute, before anything else that the client has sent.
        executing_bytes: what that held when EXEC came.
        watched: the keys of WATCH, qualified, and whether each was there.
        watch_failed: one of them has been changed since.
        place: tenant among whose places it is counted; None where it is not.
        stranger_since_s: when it began not to be authenticated.
    """

    __slots__ = (
        "address",
        "admit",
        "authenticated",
        "closing",
        "created_s",
        "cut",
        "executing",
        "executing_bytes",
        "file_descriptor",
        "finish",
        "id",
        "last_command",
        "last_command_s",
        "library_name",
        "library_version",
        "local_address",
        "name",
        "limiter",
        "no_evict",
        "pause_holds_replies",
        "pause_until_s",
        "pending_output_bytes",
        "place",
        "protocol",
        "replies",
        "skip",
        "stranger_since_s",
        "tenant",
        "transaction",
        "user",
        "watch_failed",
        "watched",
        "weight",
    )

    def __init__(
        self, id: int, *, address: str, local_address: str, file_descriptor: int, authenticated: bool = False
    ) -> None:
        """Make the session of a client that has just connected; Node.begin() says whose it is.

        Without that, it may do nothing or, ``authenticated``, everything, as the default tenant.
        """
        self.id = id
        self.address = address
        self.local_address = local_address
        self.file_descriptor = file_descriptor
        self.created_s = self.last_command_s = time.monotonic()
        self.pending_output_bytes = 0
        self.closing = False
        self.last_command = "NULL"
        self.library_name = b""
        self.library_version = b""
        self.finish: Callable[[], None] = lambda: None
        self.cut: Callable[[], None] = lambda: None
        self.admit: Callable[[int], Account | None] = lambda size: None
        self.pause_until_s = 0.0
        self.pause_holds_replies = False
        self.user = _ANYTHING if authenticated else _NOTHING
        self.authenticated = authenticated
        self.limiter: RateLimiter | None = None
        self.weight = 1.0
        self.executing: deque[list[Argument]] = deque()
        self.executing_bytes = 0
        self.place: str | None = None
        self.stranger_since_s = self.created_s
        self.reset()

    @property
    def share(self) -> int:
        """Whose share of memory it uses."""
        return self.tenant if self.authenticated else STRANGERS

    @property
    def user_name(self) -> bytes:
        """Name of the user, for logs; of a connection that has not authenticated, none."""
        return self.user.name if self.authenticated else b""

    @property
    def queued_bytes(self) -> int:
        """About what commands hold that wait for EXEC, or that it has yet to execute."""
        if self.transaction is not None:
            return self.transaction.held_bytes
        return self.executing_bytes if self.executing else 0

    def reset(self) -> None:
        """Return to the state of a new connection but for the user, as RESET does."""
        self.name = b""
        self.protocol = 2
        self.replies = True
        self.skip = 0
        self.no_evict = False
        self.tenant = DEFAULT_TENANT
        self.transaction: Transaction | None = None
        self.watched: dict[Address, bool] = {}
        self.watch_failed = False

    def qualify(self, argument: Argument) -> Address:
        """Return what the engine calls a client's key."""
        return self.tenant, bytes(argument)


_NOTHING: Final = User(b"default")
_ANYTHING: Final = User(b"default")
for _rule in (b"allkeys", b"allcommands"):
    _ANYTHING.apply(_rule, {})
