"""The state that all clients of a storage node share, without sockets.

A command's handler gets the :class:`Node`, the client's :class:`Session` and the arguments, and returns a
:data:`~storage_kv.reply.Reply`. Tests can run commands without a server.
"""

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from shadowserve.incidents import Incidents
from shadowserve.pool.changes import Changes
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import DEFAULT_TENANT, Address, Item, Lease
from storage_kv.access.audit import AuditLog
from storage_kv.access.authentication_throttle import AuthenticationThrottle, network_of
from storage_kv.access.limits import RateLimiter
from storage_kv.access.memory import MemoryBudget
from storage_kv.access.rules import User
from storage_kv.access.users import Denial, Users
from storage_kv.config import StorageConfig, TenantLimits
from storage_kv.connection_slots import ConnectionSlots
from storage_kv.counters import Counters
from storage_kv.fleet import Fleet
from storage_kv.link_load import LinkLoad
from storage_kv.pending_keys import PendingKeys
from storage_kv.reconfiguration import Reconfiguration
from storage_kv.session import Session, Watch

_log = logging.getLogger(__name__)

_PREFETCH_S: Final = 1.0
"""Limit of the bucket's time that a tenant's running prefetches may take. It bounds their memory, and how long reads
wait behind them, well within ``s3.timeout_s``. A client repeats its request for more."""


@dataclass(slots=True)
class ServerInfo:
    """Facts of the running server: start (``time.monotonic()``), port, expiry of the certificate (0 without TLS)."""

    started_s: float = field(default_factory=time.monotonic)
    port: int = 0
    certificate_expires_s: float = 0.0


@dataclass(slots=True)
class Node:
    """One storage node.

    The ``lock`` is held while the store, the counters or the sessions are used. Its holder waits for nothing. Commands
    run under it, so that each is atomic.
    """

    reconfiguration: Reconfiguration
    users: Users
    store: Pool
    clock_ms: Callable[[], int]
    counters: Counters = field(default_factory=Counters)
    sessions: dict[int, Session] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: secrets.token_hex(20))
    server: ServerInfo = field(default_factory=ServerInfo)
    lock: threading.Lock = field(default_factory=threading.Lock)
    audit: AuditLog = field(default_factory=AuditLog)
    auth_throttle: AuthenticationThrottle = field(default_factory=AuthenticationThrottle)
    watchers: dict[Address, set[Session]] = field(default_factory=dict)  # sessions that watch a qualified key
    log_limiter: Incidents = field(default_factory=Incidents)  # limits repeated log lines that any client can cause
    fleet: Fleet = field(default_factory=lambda: Fleet(None))
    slots: ConnectionSlots = field(init=False)
    memory: MemoryBudget = field(init=False)  # memory budget of incoming requests and copied replies
    lent: MemoryBudget = field(init=False)  # memory budget of stored values that are being sent
    load: LinkLoad = field(default_factory=LinkLoad)
    pending_keys: PendingKeys = field(init=False)
    prefetches: "Prefetches" = field(init=False)
    streams: Any = None  # LayerStreams for KV.LAYERS, of a module above this one; None while no server runs
    changes: Changes | None = None  # logs of the keys that came and went; None if ``events_bytes_max`` is 0
    limiters: dict[str, RateLimiter] = field(init=False)  # rate limiters by name of tenant

    def __post_init__(self) -> None:
        self.slots = ConnectionSlots(lambda: self.config, self.has_tenants)
        self.memory = MemoryBudget(lambda: self.config.clients_memory_bytes, self.count_tenants, is_own_memory=True)
        self.lent = MemoryBudget(lambda: self.config.lent_bytes_max, self.count_tenants, is_own_memory=False)
        self.pending_keys = PendingKeys(self.count_tenants)
        self.prefetches = Prefetches(self)
        now_s = time.monotonic()
        self.limiters = {name: RateLimiter(limits, now_s) for name, limits in self.config.tenants.items()}
        for key in ("memory_budget_bytes", "devices", "scrub_bytes_per_s"):
            self.reconfiguration.follow(key, self._follow_pool)
        for key in ("pin_share", "pin_share_of_tenant"):
            self.reconfiguration.follow(key, self._follow_pin_shares)
        self.reconfiguration.follow("tenants", self._follow_tenants)

    @property
    def config(self) -> StorageConfig:
        return self.reconfiguration.config

    @property
    def load_us(self) -> int:
        """Time that the bytes which wait for clients need on the link, in microseconds. Needs the lock."""
        return self.load.microseconds(self.config.egress_bits_per_s)

    def _follow_tenants(self, old: StorageConfig, new: StorageConfig) -> None:
        """Set the new limits of tenants; tenants without an entry have none."""
        now_s = time.monotonic()
        for name in {**old.tenants, **new.tenants}:
            self._set_quota(name, new.tenants.get(name, TenantLimits()))
        self.limiters = {
            # A limiter keeps its debt unless its limits have changed.
            name: self.limiters[name] if old.tenants.get(name) == limits else RateLimiter(limits, now_s)
            for name, limits in new.tenants.items()
        }
        for session in self.sessions.values():
            self.set_limits(session)

    def _follow_pool(self, old: StorageConfig, new: StorageConfig) -> None:
        self.store.follow(new)

    def _follow_pin_shares(self, old: StorageConfig, new: StorageConfig) -> None:
        self.store.set_pin_shares(new.pin_share_of_tenant, new.pin_share)

    def _set_quota(self, name: str, limits: TenantLimits) -> None:
        self.store.set_quota(self.tenant_id(name), limits.bytes_max, limits.keys_max)

    def apply_quotas(self) -> None:
        """Set the quotas of all tenants in the store, and log its changes, once it has started."""
        with self.lock:
            self._follow_pin_shares(self.config, self.config)
            for name, limits in self.config.tenants.items():
                self._set_quota(name, limits)
            if self.config.events_bytes_max:
                self.changes = self.store.log_changes(int(self.config.events_bytes_max))

    # ---- Tenants and sessions

    def tenant_id(self, name: str) -> int:
        """Return the store's id of a tenant; the empty name is the default tenant."""
        return self.store.tenant(name) if name else DEFAULT_TENANT

    def has_tenants(self) -> bool:
        """Return True if enabled users belong to more than one tenant."""
        users = iter(self.users.by_name.values())
        first = next((user.tenant for user in users if user.enabled), "")
        return any(user.enabled and user.tenant != first for user in users)

    def count_tenants(self) -> int:
        """Return among how many tenants shared limits are divided: those with clients, and one newcomer."""
        return max(2, len(self.slots.by_tenant) + 1) if self.has_tenants() else 1

    def begin(self, session: Session) -> None:
        """Bind a session to the default user, authenticated if that user needs no password."""
        session.user = self.users.default
        session.authenticated = self.users.anyone_enters
        session.info.unauthenticated_since_s = time.monotonic()
        self._bind_tenant(session)

    def bind(self, session: Session, user: User) -> None:
        session.user = user
        session.authenticated = True
        self._bind_tenant(session)

    def _bind_tenant(self, session: Session) -> None:
        if self.streams is not None:
            self.streams.others.leave(session)
        session.tenant = self.tenant_id(session.user.tenant)
        self.slots.enter(session)
        self.set_limits(session)

    def set_limits(self, session: Session) -> None:
        limits = self.config.tenants.get(session.user.tenant)
        session.weight = 1.0 if limits is None else limits.weight
        limiter = self.limiters.get(session.user.tenant)
        session.limiter = limiter if limiter is not None and limiter.has_limits else None

    def admit_by_certificate(self, session: Session, name: str) -> None:
        """Bind a session to the user that its client's certificate names, if that user exists and is enabled."""
        user = self.users.by_name.get(name.encode())
        is_known = user is not None and user.enabled
        if user is not None and is_known:
            self.bind(session, user)
        else:
            self.warn_limited("certificate_names_no_user", session.address, name[:128])
        outcome = "ok" if is_known else "failed"
        self.audit.write("authentication", session, outcome=outcome, user=name.encode(), by="certificate")

    def leave(self, session: Session) -> None:
        self.unwatch(session)
        self.pending_keys.leave(session.id)
        if self.streams is not None:
            self.streams.others.leave(session)

    def open_sessions(self) -> list[Session]:
        """Return the sessions that are not closing; a killed client disappears at once, as in Redis."""
        return [session for session in self.sessions.values() if not session.closing]

    def end_sessions(self, users: Collection[User]) -> None:
        """End the sessions of users when their replies are sent; from now on they execute nothing."""
        for session in self.sessions.values():
            if any(session.user is user for user in users):
                end_session(session)

    # ---- Logs

    def warn_limited(self, event: str, address: str, reason: str) -> None:
        """Log a warning that any client can cause; repetitions are counted and logged once a minute."""
        if self.log_limiter.note(event, network_of(address), reason, time.monotonic()):
            _log.warning(event + " address=%s reason=%r", address, reason)

    def deny(self, session: Session, reason: str, object: bytes, client: bytes) -> None:
        context = "toplevel" if session.transaction is None and not session.executing else "multi"
        self.users.deny(Denial(reason, object, session.user.name, client, context))

    # ---- Keys

    def watch(self, session: Session, key: Address) -> None:
        """Make a session's next EXEC fail if a qualified key changes before it."""
        session.watch.existed.setdefault(key, self.store.peek(key) is not None)
        self.watchers.setdefault(key, set()).add(session)

    def unwatch(self, session: Session) -> None:
        for key in session.watch.existed:
            sessions = self.watchers[key]
            sessions.discard(session)
            if not sessions:
                del self.watchers[key]
        session.watch = Watch()

    def fail_watchers(self, keys: Iterable[Address]) -> None:
        """Fail the next EXEC of the sessions that watch one of these qualified keys."""
        for key in keys:
            for session in self.watchers.get(key, ()):
                session.watch.failed = True

    def read(self, key: Address, *, touch: bool = True, lookup: bool = False) -> Item | None:
        """Return the item of a qualified key for a reading command, and count a hit or a miss.

        ``touch`` counts as a use of the item. ``lookup``: the command does not return the value, and is counted so.
        """
        item = self.store.get(key) if touch else self.store.peek(key)
        if item is None:
            self.counters.misses += 1
            self.counters.lookup_misses += lookup
        else:
            self.counters.hits += 1
            self.counters.lookup_hits += lookup
        return item


def end_session(session: Session) -> None:
    """End a session when its replies are sent. It executes nothing from now on, not even a command that has arrived."""
    session.closing = True
    session.hooks.finish()


class Prefetches:
    """Reads from the bucket that no reply waits for. Needs the node's lock."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()  # protects the next two: reads end in other threads
        self._running: set[Address] = set()
        self._bytes: defaultdict[int, int] = defaultdict(int)  # of the running reads, by tenant

    def begin(self, address: Address, item: Item) -> bool:
        """Start to read a cold record unless that runs already; return False if its tenant has reached the limit."""
        tenant, size = address[0], item.length
        with self._lock:
            if address in self._running:
                return True
            mine = self._bytes[tenant]
            if mine and self._seconds(mine + size) > _PREFETCH_S:
                return False
            self._running.add(address)
            self._bytes[tenant] = mine + size
        self._node.store.read(item, 0, 1, lambda lease: self._ended(address, size, lease))
        return True

    def _seconds(self, size: int) -> float:
        store = self._node.store
        return float((store.expected_s(size) or 0.0) - (store.expected_s(0) or 0.0))

    def _ended(self, address: Address, size: int, lease: Lease | None) -> None:
        with self._lock:
            self._running.discard(address)
            self._bytes[address[0]] -= size
            if not self._bytes[address[0]]:
                del self._bytes[address[0]]
        if lease is not None:  # read() never calls this with a lease, so the lock is free
            with self._node.lock:
                lease.release()
