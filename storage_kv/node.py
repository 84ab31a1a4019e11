"""What all clients of a storage node share, and what they are answered: everything but sockets.

A command's handler takes the :class:`Node`, the client's :class:`Session` and the arguments, and returns a
:data:`Reply`. None of this does I/O, so tests can run commands without a server.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

from shadowserve.errors import ShadowServeError
from shadowserve.incidents import Incidents
from shadowserve.pool.pool import Pool
from shadowserve.pool.terms import DEFAULT_TENANT, ENTRIES_PER_HOLD, Address, Item, Lease
from storage_kv.access.attempts import Attempts, caller_of
from storage_kv.access.audit import AuditLog
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import Bound
from storage_kv.access.places import Places
from storage_kv.access.rules import User
from storage_kv.access.users import Denial, Users
from storage_kv.config import StorageConfig, TenantLimits
from storage_kv.operate.command_statistics import CommandStatistics
from storage_kv.operate.reconfigure import Reconfiguration
from storage_kv.prefetch import Prefetches
from storage_kv.publications import Publications
from storage_kv.session import Session
from storage_kv.shaper import Others

_log = logging.getLogger(__name__)

REFERENCE_BYTES_MIN: Final = 16 << 10
"""Values from this size on are sent from where they are stored; smaller ones are copied into the reply, since a buffer
of its own in the gathering write costs about as much as copying 16 KiB."""

_PIECE_BYTES: Final = 64 << 10
"""Of many values, at a time: about a quarter of a millisecond."""

_RESERVED_PLACES: Final = 8
"""One in so many places is for tenants that have no more than their part of these."""

T = TypeVar("T")


class CommandError(ShadowServeError):
    """A command cannot be done; the message is the error reply, its code included: ``ERR syntax error``."""


class Outgoing:
    """A part of a stored value in a reply: sent from where it is; its item is held, or its lease kept, till then.

    Attributes:
        is_layer: it is one of a reply to KV.LAYERS.
    """

    __slots__ = ("source", "view")

    is_layer: ClassVar[bool] = False

    def __init__(self, view: memoryview, source: Item | Lease) -> None:
        self.view = view
        self.source = source

    @property
    def size(self) -> int:
        """Bytes that are sent."""
        return len(self.view)

    def rest(self, offset: int, count: int) -> "list[bytes | memoryview]":
        """Return what is behind ``offset``, in at most ``count`` stretches, or its beginning."""
        return [self.view[offset:] if offset else self.view]

    @property
    def pinned(self) -> int:
        """What tells what is kept in memory from everything else that is."""
        return id(self.source.kept)

    @property
    def pinned_bytes(self) -> int:
        """How much is kept in memory so that these bytes can be sent."""
        return self.source.length if isinstance(self.source, Item) else len(self.source.view)

    def hold(self, store: Pool) -> None:
        """Keep the bytes until release(); a lease does so from its beginning. With the node's lock held."""
        if isinstance(self.source, Item):
            store.hold(self.source)

    def release(self, store: Pool) -> None:
        """Let go of the bytes. With the node's lock held."""
        if isinstance(self.source, Item):
            store.release(self.source)
        else:
            self.source.release()


Ready: TypeAlias = bytes | Outgoing


class Pending:
    """A part of a reply that is not known yet: it keeps its place, and what is behind it waits for it.

    Whoever finds it out calls resolve(), from any thread. A connection calls attach() to hear of it, or abandon() when
    it does not want it any more. What it resolves to is held.

    Attributes:
        is_lent: a connection counts what it expects as lent; else whoever makes it has counted that.
        expects: about how many bytes it will be.
        failed: set before resolve(): what it resolves to is an error.
        lost: set before resolve(): a value that had been counted as a hit could not be read.
        parts: what it resolved to; None until then.
    """

    __slots__ = ("_abandoned", "_lock", "_node", "_notify", "expects", "failed", "lost", "parts")

    is_lent: ClassVar[bool] = True

    def __init__(self, node: "Node", expects: int) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._notify: Callable[[], None] | None = None
        self._abandoned = False
        self.expects = expects
        self.failed = False
        self.lost = False
        self.parts: list[Ready] | None = None

    def resolve(self, parts: list[Ready]) -> None:
        """Give the part: once, without the node's lock, but for a call before anybody can have abandoned it."""
        with self._lock:
            self.parts = parts
            if self._notify is not None:
                self._notify()  # with the lock held: after abandon() it is called no more
            abandoned = self._abandoned
        if abandoned:
            with self._node.lock:
                self._node.drop(parts)

    def attach(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called when it is resolved, in whatever thread, or at once if it is already.

        It must not wait for anything, since resolve() waits for it.
        """
        with self._lock:
            self._notify = notify
            if self.parts is not None:
                notify()

    def abandon(self) -> None:
        """Let go of what it resolves to, now or when it does; with the node's lock held."""
        with self._lock:
            self._abandoned = self.parts is None
            self._notify = None
            parts, self.parts = self.parts, []
        if parts:
            self._node.drop(parts)


Part: TypeAlias = bytes | Outgoing | Pending


class More:
    """A reply of which only the beginning is made, or nothing yet: what follows is made later.

    So the lock is held for some keys at a time, a client that asks for everything and reads nothing makes the node hold
    little, and what takes long is done in another thread. The client's next commands wait; others' come in between.

    Attributes:
        parts: the beginning.
        rest: makes what follows of what ``work`` has returned, with the node's lock held. BusyError: it has done
            nothing, and is to be called again later.
        work: runs before in another thread, and touches nothing but its own arguments; None for nothing.
    """

    __slots__ = ("parts", "rest", "work")

    def __init__(
        self, parts: "list[Part]", rest: "Callable[[Any], Reply]", work: Callable[[], Any] | None = None
    ) -> None:
        self.parts = parts
        self.rest = rest
        self.work = work

    @classmethod
    def of(
        cls, parts: "list[Part]", items: Iterator[T], reply_to: "Callable[[T], bytes | list[Part]]"
    ) -> "list[Part] | More":
        """Return ``parts`` and the reply to each item, some at a time: each is what it is when its turn comes."""
        size = count = 0
        for item in items:
            piece = reply_to(item)
            count += 1
            if isinstance(piece, bytes):
                parts.append(piece)
                size += len(piece)
            else:
                parts += piece
                size += _PIECE_BYTES // 4  # counts like copying a quarter of what may be copied
            if size >= _PIECE_BYTES or count == ENTRIES_PER_HOLD:
                return cls(parts, lambda _: cls.of([], items, reply_to))
        return parts


Reply: TypeAlias = bytes | list[Part] | More


class Streams(Protocol):
    """What answers requests for layers, and knows what is left of the link for everybody else."""

    others: Others

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for others to end."""
        ...

    def begin(
        self, session: Session, names: Sequence[bytes], layers: Sequence[int], limit: float, window_s: float
    ) -> list[Part]:
        """Return the parts of the reply; see :meth:`storage_kv.layers.LayerStreams.begin`."""


@dataclass(slots=True)
class Counters:
    """What the node has done since it started, or since CONFIG RESETSTAT.

    Attributes:
        by_command: by full names.
    """

    connections: int = 0
    connections_rejected: int = 0
    connections_denied: int = 0
    commands: int = 0
    errors: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    hits: int = 0
    misses: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    lost: int = 0
    records_stored: int = 0
    records_kept: int = 0
    records_refused: int = 0
    meta_keys: int = 0
    layer_streams: int = 0
    layer_streams_failed: int = 0
    layer_streams_closed: int = 0
    layers_sent: int = 0
    layer_bytes_sent: int = 0
    stalled_clients: int = 0
    idle_clients: int = 0
    protocol_errors: int = 0
    http_refused: int = 0
    strangers_closed: int = 0
    strangers_displaced: int = 0
    greedy_clients: int = 0
    authentication_failures: int = 0
    denied_commands: int = 0
    denied_keys: int = 0
    tls_failures: int = 0
    throttled: int = 0
    unknown_commands: int = 0
    busy: int = 0
    by_command: dict[str, CommandStatistics] = field(default_factory=dict)

    def of(self, command: str) -> CommandStatistics:
        found = self.by_command.get(command)
        if found is None:
            found = self.by_command[command] = CommandStatistics()
        return found


@dataclass(slots=True)
class Node:
    """One storage node.

    Attributes:
        lock: held by whoever uses the store, the counters or the sessions; nobody waits for anything while holding it.
            Commands are executed under it, so that each sees and leaves a whole.
        watchers: of each qualified key, the sessions that watch it.
        reconfiguration: what the configuration is, and how it changes, with the lock held.
        incidents: what strangers do, for the log.
        places: who has a connection.
        memory: of requests on their way in and replies that are copied out.
        lent: of stored values that are being sent.
        publications: what clients are about to store.
        prefetches: what comes from the bucket before its bytes are asked for.
        streams: what answers KV.LAYERS, while a server runs.
    """

    reconfiguration: Reconfiguration
    users: Users
    store: Pool
    clock_ms: Callable[[], int]
    counters: Counters = field(default_factory=Counters)
    sessions: dict[int, Session] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: secrets.token_hex(20))
    started_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    process_id: int = field(default_factory=os.getpid)
    port: int = 0
    audit: AuditLog = field(default_factory=AuditLog)
    certificate_expires_s: float = 0.0
    attempts: Attempts = field(default_factory=Attempts)
    watchers: dict[Address, set[Session]] = field(default_factory=dict)
    incidents: Incidents = field(default_factory=Incidents)
    places: Places = field(default_factory=Places)
    memory: Bound = field(init=False)
    lent: Bound = field(init=False)
    publications: Publications = field(init=False)
    prefetches: Prefetches = field(init=False)
    streams: Streams | None = None
    limiters: dict[str, RateLimiter] = field(init=False)
    _tenants: dict[str, TenantLimits] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Bound(lambda: self.config.clients_memory_bytes, self.count_tenants, is_ours=True)
        self.lent = Bound(lambda: self.config.lent_bytes_max, self.count_tenants, is_ours=False)
        self.publications = Publications(self.count_tenants)
        self.prefetches = Prefetches(self)
        now_s = time.monotonic()
        self.limiters = {name: RateLimiter(limits, now_s) for name, limits in self.config.tenants.items()}
        self._tenants = self.config.tenants
        for key in ("memory_budget_bytes", "devices", "scrub_bytes_per_s"):
            self.reconfiguration.follow(key, self._follow_pool)
        for key in ("pin_share", "pin_share_of_tenant"):
            self.reconfiguration.follow(key, self._follow_pins)
        self.reconfiguration.follow("tenants", self._follow_tenants)

    @property
    def config(self) -> StorageConfig:
        return self.reconfiguration.config

    def _follow_pool(self, config: StorageConfig) -> None:
        self.store.follow(config)

    def _follow_tenants(self, config: StorageConfig) -> None:
        """Give tenants their new limits; those that are named no more have none."""
        now_s = time.monotonic()
        for name in {**self._tenants, **config.tenants}:
            limits = config.tenants.get(name, TenantLimits())
            tenant = self.store.tenant(name) if name else DEFAULT_TENANT
            self.store.set_quota(tenant, limits.bytes_max, limits.keys_max)
        self.limiters = {
            # What a tenant has used up stays used up unless its limits have changed.
            name: self.limiters[name] if self._tenants.get(name) == limits else RateLimiter(limits, now_s)
            for name, limits in config.tenants.items()
        }
        self._tenants = config.tenants
        for session in self.sessions.values():
            self.limit(session)

    def _follow_pins(self, config: StorageConfig) -> None:
        self.store.set_pin_shares(config.pin_share_of_tenant, config.pin_share)

    def apply_quotas(self) -> None:
        """Tell the store, once it has started, what tenants may hold and pin."""
        with self.lock:
            self.store.set_pin_shares(self.config.pin_share_of_tenant, self.config.pin_share)
            for name, limits in self.config.tenants.items():
                tenant = self.store.tenant(name) if name else DEFAULT_TENANT
                self.store.set_quota(tenant, limits.bytes_max, limits.keys_max)

    def has_tenants(self) -> bool:
        """Return whether there are users of more than one tenant."""
        users = iter(self.users.by_name.values())
        first = next((user.tenant for user in users if user.enabled), "")
        return any(user.enabled and user.tenant != first for user in users)

    def count_tenants(self) -> int:
        """Return among how many tenants what is shared is to be shared: those with clients, and one more to come."""
        return max(2, len(self.places.by_tenant) + 1) if self.has_tenants() else 1

    def has_place(self, tenant: str) -> bool:
        """Return whether one more client of a tenant may connect."""
        limits, places, all_places = self.config.tenants.get(tenant), self.places, self.config.connections_max
        taken = places.by_tenant.get(tenant, 0)
        most = None if limits is None else limits.connections_max
        if most is not None:
            return taken < most
        reserved = all_places // _RESERVED_PLACES
        is_modest = taken * self.count_tenants() < reserved
        if places.authenticated >= all_places - reserved and not is_modest and self.has_tenants():
            return False
        return 2 * taken < all_places or (taken < all_places and not self.has_tenants())

    def begin(self, session: Session) -> None:
        """Make a session that of the default user, let in if that one needs no password."""
        session.user = self.users.default
        session.authenticated = self.users.anyone_enters
        session.stranger_since_s = time.monotonic()
        self._bind_tenant(session)

    def bind(self, session: Session, user: User) -> None:
        """Make a session that of a user who has shown to be it, and of the user's tenant."""
        session.user = user
        session.authenticated = True
        self._bind_tenant(session)

    def _bind_tenant(self, session: Session) -> None:
        name = session.user.tenant
        if self.streams is not None:
            self.streams.others.leave(session)
        session.tenant = self.store.tenant(name) if name else DEFAULT_TENANT
        self.places.enter(session)
        self.limit(session)

    def limit(self, session: Session) -> None:
        """Hold a session to the present rates and weight of its tenant."""
        limits = self.config.tenants.get(session.user.tenant)
        session.weight = 1.0 if limits is None else limits.weight
        limiter = self.limiters.get(session.user.tenant)
        session.limiter = limiter if limiter is not None and limiter.limits else None

    def admit_by_certificate(self, session: Session, name: str) -> None:
        """Make a session that of the user whom its client's certificate names, if there is one and it is on."""
        user = self.users.by_name.get(name.encode())
        known = user is not None and user.enabled
        if user is not None and known:
            self.bind(session, user)
        else:
            self.tell("certificate_names_no_user", session.address, name[:128])
        outcome = "ok" if known else "failed"
        self.audit.write("authentication", session, outcome=outcome, user=name.encode(), by="certificate")

    def tell(self, event: str, address: str, reason: str) -> None:
        """Log what a stranger does, where it is news; the rest is told with a count, once a minute."""
        if self.incidents.note(event, caller_of(address), reason, time.monotonic()):
            _log.warning(event + " address=%s reason=%r", address, reason)

    def deny(self, session: Session, reason: str, object: bytes, client: bytes) -> None:
        """Take note that something was denied to a session, for ACL LOG."""
        context = "toplevel" if session.transaction is None and not session.executing else "multi"
        self.users.denials.add(Denial(reason, object, session.user.name, client, context))

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are not being ended: one that was killed is gone for all to see, as in Redis."""
        return [session for session in self.sessions.values() if not session.closing]

    def end_sessions(self, users: Collection[User]) -> None:
        """End the sessions of users, once what they have been answered is sent; from now on they execute nothing."""
        for session in self.sessions.values():
            if any(session.user is user for user in users):
                session.closing = True  # at once: its thread may be about to execute a command that has come already
                session.finish()

    def watch(self, session: Session, key: Address) -> None:
        """Have a session's next EXEC fail if a qualified key changes before it."""
        session.watched.setdefault(key, self.store.peek(key) is not None)
        self.watchers.setdefault(key, set()).add(session)

    def unwatch(self, session: Session) -> None:
        for key in session.watched:
            sessions = self.watchers[key]
            sessions.discard(session)
            if not sessions:
                del self.watchers[key]
        session.watched, session.watch_failed = {}, False

    def changed(self, keys: Iterable[Address]) -> None:
        """Tell those who watch qualified keys that they have changed."""
        for key in keys:
            for session in self.watchers.get(key, ()):
                session.watch_failed = True

    def drop(self, parts: Iterable[Part]) -> None:
        """Let go of parts that are held and will not be sent; with the lock held."""
        for part in parts:
            if isinstance(part, Outgoing):
                part.release(self.store)
            elif isinstance(part, Pending):
                part.abandon()

    def read(self, key: Address, *, touch: bool = True, lookup: bool = False) -> Item | None:
        """Return the item of a qualified key for a command that reads, counting a hit or a miss.

        Args:
            key: of the item.
            touch: it counts as used.
            lookup: the command asks about the value, and does not answer with it; counted apart as well.
        """
        item = self.store.get(key) if touch else self.store.peek(key)
        if item is None:
            self.counters.misses += 1
            self.counters.lookup_misses += lookup
        else:
            self.counters.hits += 1
            self.counters.lookup_hits += lookup
        return item
