"""What is asked of whatever holds values: the protocol.

A store maps keys to :class:`Item` within budgets. It knows nothing of connections or commands. Its methods are called
one at a time, with the pool's lock held, and never wait for a device; what takes longer comes later: a read through its
callback, a write's durability through its :class:`Ticket`, room for more through ``ready`` and :class:`BusyError`.
Nor does a method take longer as more is stored: what concerns many entries is done :data:`ENTRIES_PER_HOLD` at a time,
the rest in poll(), which gives the lock up in between.
Every store passes ``tests/pool/store_conformance.py``.

A key comes with its tenant's id (:data:`Address`): whoever serves several chooses it for them, so that another tenant's
key is another key.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from shadowserve.pool.config import PoolConfig
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import Address, Item, Lease, PinnedEntries
from shadowserve.pool.volume.changes import Ticket

__all__ = ["Store"]


class Store(Protocol):
    """An store. Absent and expired are the same to every method.

    All methods but start(), poll(), drain(), close() and descriptors() are called with the pool's lock held and never
    wait for a device. Callbacks that a store is given are called once, from any thread, without the lock; those of
    read() may also come inside the call.

    Eviction takes the least recently used (or what the store's policy takes for it) with these rules: a tenant beyond
    its own quota evicts its own entries only; beyond the whole budget, whoever uses most of it gives first. An entry
    with present children (entries put with its name as ``parent``) never goes before them, unless these are pinned and
    nothing else is left; a pinned one never goes before its pin ends.
    """

    # ---- Reading

    def get(self, address: Address) -> Item | None:
        """Return the item of ``address`` and count this as a use of it; None if absent."""

    def peek(self, address: Address) -> Item | None:
        """Return the item of ``address`` without counting this as a use."""

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """Bring the bytes ``[start, end)`` of an item whose value is None, 0 <= start < end <= length.

        Whatever happens to the entry meanwhile, ``done`` gets what the item's value was, or None: the bytes are not to
        be had (a device error, a failed check); the store has counted why and dropped the entry. Never wrong bytes.
        Never refused: a store that can only do so many at a time lets the others wait.
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
        address: Address,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """Store a value in place of what is there, evicting others if need be; a pin goes with the old.

        The store keeps ``value`` itself: the caller does not change it afterwards. It can be read at once.

        Args:
            address: where to.
            value: what.
            head_bytes: length of the record's head, 0 if the value is no record.
            expires_at_ms: Unix time in milliseconds, or None.
            parent: the name (32 bytes) of the chunk before this one, of the same tenant; empty for none.

        Returns:
            None if it is as durable as this store makes it, else a ticket: settled when it is, or with the error for
            the writer; the entry is then gone.

        Raises:
            OutOfBudgetError: it does not fit; nothing has changed.
            BusyError: too many writes are under way, or more has to be evicted than one hold of the lock does; some
                may have been. Else nothing has changed.
        """

    def settling(self, address: Address) -> Ticket | None:
        """Return the ticket of the entry of ``address`` while it is not settled: its value may yet be lost."""

    def remove(self, address: Address) -> bool:
        """Remove ``address``; return whether it was there."""

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """Set or clear the expiry of ``address``; return whether it was there. A time in the past removes it."""

    def pin(self, address: Address, until_ms: int) -> bool:
        """Keep ``address`` from eviction until then (Unix time; 0 or the past unpins); return whether it was there.

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
        """Return the next cursor, 0 at the end, and keys; as SCAN promises, whatever changes in between.

        A cursor depends on this tenant's keys alone, so that it tells nothing of others.
        """

    def count(self, tenant: int) -> int:
        """Return a tenant's number of entries, expired ones that were not noticed yet included."""

    def tenant(self, name: str) -> int:
        """Return the id of a tenant, given out on first use and kept as long as the store keeps values; "" has 0."""

    def tenants(self) -> Mapping[str, int]:
        """Return the ids of the tenants that have one, by their names."""

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """Bound what a tenant may use; None for no bound. What is beyond it goes soon, as far as it may."""

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. What is beyond it goes soon, as far as it may."""

    def follow(self, config: PoolConfig) -> None:
        """Take over what a new configuration says of memory, of devices' budgets, and of the scrub.

        Raises:
            ConfigurationError: it names a device that is not there.
        """

    def statistics(self, tenant: int | None = None) -> Statistics:
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
        """Deal with what devices have completed. Called without the lock, from the one thread that drives the store.

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
