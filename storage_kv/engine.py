"""What the server needs of an engine: the protocol, and the small classes that both sides meet in.

An engine maps keys to :class:`Item` within budgets. It knows nothing of connections or commands. Its methods are called
one at a time, with the node's lock held, and never wait for a device; what takes longer comes later: a read through its
callback, a write's durability through its :class:`Ticket`, room for more through ``ready`` and :class:`BusyError`.
Nor does a method take longer as more is stored: what concerns many entries is done :data:`ENTRIES_PER_HOLD` at a time,
the rest in poll(), which gives the lock up in between.
Every engine passes ``tests/storage/engine_conformance.py``.

Keys are *qualified*: two bytes, big-endian, of the tenant's id, then the client's key (:func:`qualified`). No client
can choose the first two, so that another tenant's key is to every engine simply another key.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from shadowserve import errors
from shadowserve.errors import ShadowServeError

__all__ = [
    "DEFAULT_TENANT",
    "ENTRIES_PER_HOLD",
    "KEY_BYTES_MAX",
    "PARENT_BYTES",
    "TENANTS_MAX",
    "TENANT_BYTES",
    "BusyError",
    "Engine",
    "EngineStatistics",
    "Item",
    "Lease",
    "OutOfBudgetError",
    "PinShareError",
    "PinnedEntries",
    "Ticket",
    "qualified",
    "tenant_of",
    "wall_clock_ms",
]

TENANT_BYTES: Final = 2
"""Of the tenant's id in front of each key."""

TENANTS_MAX: Final = 1 << 16

DEFAULT_TENANT: Final = 0
"""The tenant of clients that belong to none; its name is empty."""

ENTRIES_PER_HOLD: Final = 250
"""Entries that one hold of the node's lock touches at most, so that it is no longer than 10 ms: the longest that is
done to one is its eviction, which takes the pool up to 30 us."""

KEY_BYTES_MAX: Final = (64 << 10) - 64
"""Of a client's key; the server refuses to store under longer ones. An object on a device has room for a name of 64
KiB, of which an engine may use 64 bytes for itself."""

PARENT_BYTES: Final = 32
"""Of the name of a chunk, which its key spells in hexadecimal digits behind ``kv:``."""


class OutOfBudgetError(ShadowServeError):
    """A value does not fit the budget or the tenant's quota, even if everything that may be evicted is."""


class PinShareError(ShadowServeError):
    """A pin would take more than its tenant, or all together, may have pinned."""


class BusyError(errors.BusyError):
    """Too many writes are under way; trying again makes sense once ``again`` is settled."""

    def __init__(self, message: str, again: "Ticket") -> None:
        """Make one; ``again`` is settled without an error as soon as there may be room."""
        super().__init__(message)
        self.again = again


class Item:
    """What is known of a stored value without touching a device; good until the node's lock is released.

    Engines derive their own from it. An item with a value stays valid for longer between hold() and release().

    Attributes:
        length: bytes of the value.
        head_bytes: length of the record's head if the value is a valid record, else 0.
        expires_at_ms: Unix time in milliseconds, or None.
        value: the bytes, never changed after they were stored; None where they are not in memory: ``Engine.read()``
            brings them.
    """

    __slots__ = ("expires_at_ms", "head_bytes", "length", "value")

    def __init__(
        self, length: int, head_bytes: int, expires_at_ms: int | None, value: bytes | memoryview | None
    ) -> None:
        """Make an item."""
        self.length = length
        self.head_bytes = head_bytes
        self.expires_at_ms = expires_at_ms
        self.value = value


class Lease:
    """Bytes of a value in memory, valid until ``release()``.

    Attributes:
        view: the bytes.
    """

    __slots__ = ("_arguments", "_released", "view")

    def __init__(self, view: memoryview, released: Callable[..., None] | None = None, *arguments: Any) -> None:
        """Make one; release() calls ``released`` with ``arguments``, with the node's lock held."""
        self.view = view
        self._released = released
        self._arguments = arguments

    def release(self) -> None:
        """Give the bytes back: once, with the node's lock held."""
        released, self._released = self._released, None
        if released is not None:
            released(*self._arguments)


class Ticket:
    """A change that is not durable yet. An engine settles it; whoever waits for it hears so, from whatever thread."""

    __slots__ = ("_done", "_error", "_lock", "_settled")

    def __init__(self) -> None:
        """Make one that is not settled."""
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._done: list[Callable[[Exception | None], None]] = []

    @classmethod
    def of(cls, *tickets: "Ticket") -> "Ticket":
        """Return one that is settled when all of ``tickets`` are, with the last error among them."""
        whole = cls()
        lock = threading.Lock()
        missing, failure = len(tickets), None

        def done(error: Exception | None) -> None:
            nonlocal missing, failure
            with lock:
                missing, failure = missing - 1, error or failure
                if missing:
                    return
            whole.settle(failure)

        for ticket in tickets:
            ticket.then(done)
        return whole

    @property
    def settled(self) -> bool:
        """Whether it is settled, with or without an error."""
        return self._settled

    def then(self, done: Callable[[Exception | None], None]) -> None:
        """Call ``done`` with None or the error: exactly once, at once if it is settled, else in the settling thread."""
        with self._lock:
            if not self._settled:
                self._done.append(done)
                return
        done(self._error)

    def settle(self, error: Exception | None = None) -> None:
        """Say that the change is durable, or why it will never be. Once, without the node's lock."""
        with self._lock:
            assert not self._settled, "a ticket was settled twice"
            self._settled, self._error = True, error
            waiting, self._done = self._done, []
        for done in waiting:
            done(error)


class PinnedEntries(NamedTuple):
    """What a tenant keeps from eviction, ended pins that were not noticed yet included; and how much it may."""

    keys: int
    bytes: int
    bytes_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What an engine has done and holds, all of it or for one tenant; counters never decrease.

    Attributes:
        keys: entries, expired ones that were not noticed yet included.
        expiring_keys: entries with an expiry.
        pinned_keys: entries with a pin, ended ones that were not noticed yet included.
        pinned_bytes: of ``used_bytes``, theirs.
        budget_bytes: what it may use; for a tenant its quota, or the budget without one.
        used_bytes: what it uses, by the accounting that the engine describes; held_bytes included.
        held_bytes: of values removed but still being sent.
        peak_bytes: most that was ever used.
        records: entries that are valid records.
        record_bytes: bytes of their values.
        evicted_keys: removed to make room.
        evictions: of these, how many for each cause: ``quota``, a tenant has more than its quota; ``budget``, all have
            more than the engine may hold; of an engine with devices also ``device``, one is full or has as much as it
            may, and ``memory``, of what lies in memory alone.
        evicted_bytes: bytes of their keys and values.
        expired_keys: removed because their time had come.
        lost_keys: dropped because their bytes could not be read, or were not what had been stored.
        lost: of these, how many for each reason; of an engine as a whole only.
        failed_writes: values that could not be made durable; their writers have been told.
    """

    keys: int
    expiring_keys: int
    budget_bytes: int
    used_bytes: int
    held_bytes: int
    peak_bytes: int
    records: int
    record_bytes: int
    evicted_keys: int
    evicted_bytes: int
    expired_keys: int
    pinned_keys: int = 0
    pinned_bytes: int = 0
    lost_keys: int = 0
    failed_writes: int = 0
    evictions: Mapping[str, int] = field(compare=False, default_factory=dict)
    lost: Mapping[str, int] = field(compare=False, default_factory=dict)


class Engine(Protocol):
    """What the server needs of an engine. Absent and expired are the same to every method.

    All methods but start(), poll(), drain(), close() and descriptors() are called with the node's lock held and never
    wait for a device. Callbacks that an engine is given are called once, from any thread, without the lock; those of
    read() may also come inside the call.

    Eviction takes the least recently used (or what the engine's policy takes for it) with these rules: a tenant beyond
    its own quota evicts its own entries only; beyond the whole budget, whoever uses most of it gives first. An entry
    with present children (entries put with its name as ``parent``) never goes before them, unless these are pinned and
    nothing else is left; a pinned one never goes before its pin ends.
    """

    # ---- Reading

    def get(self, key: bytes) -> Item | None:
        """Return the item of ``key`` and count this as a use of it; None if absent."""

    def get_each(self, prefix: bytes, keys: Iterable[bytes | memoryview]) -> Iterator[Item | None]:
        """Yield what get() returns for each of a tenant's keys, behind its ``prefix``, when it is asked for."""

    def peek(self, key: bytes) -> Item | None:
        """Return the item of ``key`` without counting this as a use."""

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """Bring the bytes ``[start, end)`` of an item whose value is None, 0 <= start < end <= length.

        Whatever happens to the entry meanwhile, ``done`` gets what the item's value was, or None: the bytes are not to
        be had (a device error, a failed check); the engine has counted why and dropped the entry. Never wrong bytes.
        Never refused: an engine that can only do so many at a time lets the others wait.
        """

    def hold(self, item: Item) -> None:
        """Keep the bytes of an item with a value valid, and counted, until as many calls of release()."""

    def release(self, item: Item) -> None:
        """Undo one hold()."""

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """Return a writable buffer to receive a value of ``size`` bytes in, which put() then takes.

        None: there is no room now; ``ready`` is called when to try again.

        Raises:
            MemoryError: there will never be.
        """

    def discard(self, buffer: memoryview) -> None:
        """Take a buffer of allocate() back unless put() has taken it; its user is done with it in either case."""

    def put(
        self,
        key: bytes,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """Store a value under ``key`` in place of what is there, evicting others if need be; a pin goes with the old.

        The engine keeps ``value`` itself: the caller does not change it afterwards. It can be read at once.

        Args:
            key: where to.
            value: what.
            head_bytes: length of the record's head, 0 if the value is no record.
            expires_at_ms: Unix time in milliseconds, or None.
            parent: the name (32 bytes) of the chunk before this one, of the same tenant; empty for none.

        Returns:
            None if it is as durable as this engine makes it, else a ticket: settled when it is, or with the error for
            the writer; the entry is then gone.

        Raises:
            OutOfBudgetError: it does not fit; nothing has changed.
            BusyError: too many writes are under way, or more has to be evicted than one hold of the lock does; some
                may have been. Else nothing has changed.
        """

    def settling(self, key: bytes) -> Ticket | None:
        """Return the ticket of the entry of ``key`` while it is not settled: its value may yet be lost."""

    def remove(self, key: bytes) -> bool:
        """Remove ``key``; return whether it was there."""

    def set_expiry(self, key: bytes, expires_at_ms: int | None) -> bool:
        """Set or clear the expiry of ``key``; return whether it was there. A time in the past removes it."""

    def pin(self, key: bytes, until_ms: int) -> bool:
        """Keep ``key`` from eviction until then (Unix time; 0 or the past unpins); return whether it was there.

        Raises:
            PinShareError: its tenant, or all together, would have too much pinned; nothing has changed.
        """

    def set_pin_shares(self, of_tenant: float, of_all: float) -> None:
        """Bound what pins may take: shares of a tenant's quota (of the budget without one), and of the budget.

        What is pinned already stays so. Without a call both are 1.
        """

    def unpin_some(self, tenant: int | None) -> int:
        """Unpin up to :data:`ENTRIES_PER_HOLD` entries of a tenant, or of all; return how many these were."""

    def pinned(self, tenant: int) -> PinnedEntries:
        """Return what a tenant has pinned."""

    def pinning_tenants(self, count_max: int) -> list[int]:
        """Return ids of some tenants that have pinned something."""

    def clear(self, tenant: int | None) -> None:
        """Remove everything of a tenant, or of all: at once nobody finds it any more, and by and by it is gone."""

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when every remove, set_expiry, pin and clear so far is durable; None if all are.

        It settles with an error when one of them could not be written. What was cleared is then gone.
        """

    def sweep(self, keys_max: int) -> int:
        """Remove at most ``keys_max`` expired entries that nobody asked for; return how many were looked at."""

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and clients' keys; as SCAN promises, whatever changes in between.

        A cursor depends on this tenant's keys alone, so that it tells nothing of others.
        """

    def count(self, tenant: int) -> int:
        """Return a tenant's number of entries, expired ones that were not noticed yet included."""

    def tenant(self, name: str) -> int:
        """Return the id of a tenant, given out on first use and kept as long as the engine keeps values; "" has 0."""

    def tenants(self) -> Mapping[str, int]:
        """Return the ids of the tenants that have one, by their names."""

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """Bound what a tenant may use; None for no bound. What is beyond it goes soon, as far as it may."""

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. What is beyond it goes soon, as far as it may."""

    def statistics(self, tenant: int | None = None) -> EngineStatistics:
        """Return counters and sizes, of all or of one tenant."""

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """Begin; before any other call, without the lock. ``lock`` is the node's, for poll() and threads to take.

        Raises:
            ConfigurationError: a device or folder cannot be used.
        """

    def descriptors(self) -> list[int]:
        """Return what to wait for: poll() is called when one of them is readable. After start(), always the same."""

    def poll(self) -> bool:
        """Deal with what devices have completed. Called without the lock, from the one thread that drives the engine.

        It comes when a descriptor is readable and at least every 100 ms.

        Returns:
            Whether it has left something undone so that others get the lock: it is called again a moment later.
        """

    def drain(self, timeout_s: float) -> None:
        """Make everything durable and leave what makes the next start quick; no calls but poll()'s own come any more.

        Called without the lock, from the thread that called poll(), which this does for itself from now on. It returns
        within ``timeout_s`` whatever devices do.
        """

    def close(self) -> None:
        """Give everything back; from the same thread, after drain() or without it (then as after a crash)."""


def qualified(tenant: int, key: bytes) -> bytes:
    """Return what an engine calls a client's key."""
    return tenant.to_bytes(TENANT_BYTES, "big") + key


def tenant_of(key: bytes) -> int:
    """Return the tenant of a qualified key."""
    return int.from_bytes(key[:TENANT_BYTES], "big")


def wall_clock_ms() -> int:
    """Return Unix time in milliseconds: what expiry times are in, because clients may give them so (EXAT)."""
    return time.time_ns() // 1_000_000
