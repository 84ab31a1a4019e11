"""The engine that keeps values in memory, and nothing after its end.

The budget counts, for each entry, the key, the value and :data:`ENTRY_OVERHEAD_BYTES`, and in addition values that
were removed but are still being sent: memory that is in use is counted, wherever it hangs.
"""

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from storage_kv.engine import (
    DEFAULT_TENANT,
    TENANT_BYTES,
    TENANTS_MAX,
    EngineStatistics,
    Item,
    Lease,
    OutOfBudgetError,
    Ticket,
    wall_clock_ms,
)
from storage_kv.engines import buffers
from storage_kv.engines.account import Account, MemoryItem, Walk

__all__ = ["ENTRY_OVERHEAD_BYTES", "MemoryEngine"]

ENTRY_OVERHEAD_BYTES: Final = 640
"""What an entry costs beside its key and value: the item, its slots in the table and in the key index, object headers,
the allocator's rounding and a possible expiry. Measured with CPython 3.11: 400 to 600 bytes, depending on how full
the tables are; ``tests/storage/test_engine_memory.py`` holds it."""


class MemoryEngine:
    """Values in memory, within a budget; the least recently used go first.

    Eviction happens on writes, and when a bound is lowered. Items that are being sent are passed over: evicting them
    would free nothing.
    """

    def __init__(self, budget_bytes: int, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        """Make an empty engine.

        Args:
            budget_bytes: most that keys, values, overheads and held values may take together.
            clock_ms: Unix time in milliseconds.
        """
        self._budget_bytes = budget_bytes
        self._clock_ms = clock_ms
        self._names = {"": DEFAULT_TENANT}
        self._accounts: dict[bytes, Account] = {bytes(TENANT_BYTES): Account()}  # by the prefix of their keys
        self._expiries: list[tuple[int, int, bytes]] = []  # heap of (time, serial, key); stale entries are skipped
        self._uses = 0  # so far: the time by which the accounts' entries are compared
        self._used_bytes = 0
        self._peak_bytes = 0
        self._expiring_keys = 0

    # ---- Reading

    def get(self, key: bytes) -> MemoryItem | None:
        """See :meth:`Engine.get`."""
        return next(self.get_each(key[:TENANT_BYTES], (key[TENANT_BYTES:],)))

    def get_each(self, prefix: bytes, keys: Iterable[bytes | memoryview]) -> Iterator[MemoryItem | None]:
        """See :meth:`Engine.get_each`."""
        items = (self._accounts.get(prefix) or self._open_account(prefix)).items
        for name in keys:
            key = prefix + name
            item = items.get(key)
            if item is None or (item.expires_at_ms is not None and self._expire(key, item)):
                yield None
            else:
                items.move_to_end(key)
                self._uses = item.used = self._uses + 1
                yield item

    def peek(self, key: bytes) -> MemoryItem | None:
        """See :meth:`Engine.peek`."""
        account = self._accounts.get(key[:TENANT_BYTES])
        item = None if account is None else account.items.get(key)
        if item is None or (item.expires_at_ms is not None and self._expire(key, item)):
            return None
        return item

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """See :meth:`Engine.read`: every item has its value, so this is for those who do not look."""
        assert item.value is not None
        done(Lease(memoryview(item.value)[start:end]))

    def hold(self, item: Item) -> None:
        """See :meth:`Engine.hold`."""
        assert isinstance(item, MemoryItem)
        item.holds += 1

    def release(self, item: Item) -> None:
        """See :meth:`Engine.release`."""
        assert isinstance(item, MemoryItem) and item.holds > 0, "released more often than held"
        item.holds -= 1
        if item.holds == 0 and not item.stored:
            item.account.held_bytes -= item.cost
            item.account.used_bytes -= item.cost
            self._used_bytes -= item.cost

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        """See :meth:`Engine.allocate`."""
        if size + ENTRY_OVERHEAD_BYTES > self._budget_bytes:
            raise MemoryError("command not allowed when used memory > 'maxmemory'.")
        return buffers.allocate(size)

    def discard(self, buffer: memoryview) -> None:
        """See :meth:`Engine.discard`: it goes with the last view of it."""

    def put(
        self,
        key: bytes,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """See :meth:`Engine.put`."""
        account = self._accounts.get(key[:TENANT_BYTES]) or self._open_account(key[:TENANT_BYTES])
        old = account.items.get(key)
        length = len(value)
        if old is not None and not (head_bytes or parent or account.has_quota) and expires_at_ms is None:
            more = length - old.length
            is_simple = not (old.holds or old.head_bytes or old.parent or old.pinned_until_ms)
            if is_simple and old.expires_at_ms is None and self._used_bytes + more <= self._budget_bytes:
                # Giving it another value is half the work of putting another item in its place.
                old.value = value
                self._uses = old.used = self._uses + 1
                account.items.move_to_end(key)
                if more:
                    old.length = length
                    old.cost += more
                    self._use(account, more)
                return None
        cost = len(key) + length + ENTRY_OVERHEAD_BYTES
        if self._used_bytes + cost > self._budget_bytes or account.has_quota:
            self._make_room(account, cost, old)
        self._uses = used = self._uses + 1
        item = MemoryItem(account, length, head_bytes, expires_at_ms, value, cost, parent, used)
        self._enter(key, item, old)
        return None

    def _enter(self, key: bytes, item: MemoryItem, old: MemoryItem | None) -> None:
        """Put an item for which there is room into the table, in place of ``old``."""
        account = item.account
        item.stored = True
        if old is not None:
            item.serial = old.serial
            self._forget(old)
            account.items[key] = item
            account.items.move_to_end(key)
        else:
            item.serial = account.index.add(key)
            account.items[key] = item
        self._use(account, item.cost)
        if item.head_bytes:
            account.records += 1
            account.record_bytes += item.length
        if item.parent:
            account.adopt(item.parent)
        if item.expires_at_ms is not None:
            self._remember_expiry(key, item, item.expires_at_ms)

    def _use(self, account: Account, more_bytes: int) -> None:
        """Count that much more, or less if it is negative."""
        self._used_bytes += more_bytes
        account.used_bytes += more_bytes
        if self._used_bytes > self._peak_bytes:
            self._peak_bytes = self._used_bytes
        if account.used_bytes > account.peak_bytes:
            account.peak_bytes = account.used_bytes

    def settling(self, key: bytes) -> Ticket | None:
        """See :meth:`Engine.settling`: nothing is more durable than it is at once."""
        return None

    def remove(self, key: bytes) -> bool:
        """See :meth:`Engine.remove`."""
        item = self.peek(key)
        if item is None:
            return False
        self._drop(key, item)
        return True

    def set_expiry(self, key: bytes, expires_at_ms: int | None) -> bool:
        """See :meth:`Engine.set_expiry`."""
        item = self.peek(key)
        if item is None:
            return False
        if expires_at_ms is not None and expires_at_ms <= self._clock_ms():
            self._drop(key, item)
            return True
        if item.expires_at_ms is not None:
            self._expiring_keys -= 1
            item.account.expiring_keys -= 1
        item.expires_at_ms = expires_at_ms
        if expires_at_ms is not None:
            self._remember_expiry(key, item, expires_at_ms)
        return True

    def pin(self, key: bytes, until_ms: int) -> bool:
        """See :meth:`Engine.pin`."""
        item = self.peek(key)
        if item is None:
            return False
        until_ms = until_ms if until_ms > self._clock_ms() else 0
        item.account.pinned_keys += (until_ms > 0) - (item.pinned_until_ms > 0)
        item.pinned_until_ms = until_ms
        return True

    def clear(self, tenant: int | None) -> None:
        """See :meth:`Engine.clear`."""
        if tenant is None:
            for account in self._accounts.values():
                self._clear(account)
            self._expiries.clear()
        elif (found := self._accounts.get(tenant.to_bytes(TENANT_BYTES, "big"))) is not None:
            self._clear(found)
            self._tidy_expiries()

    def barrier(self) -> Ticket | None:
        """See :meth:`Engine.barrier`."""
        return None

    def sweep(self, keys_max: int) -> int:
        """See :meth:`Engine.sweep`."""
        now = self._clock_ms()
        swept = 0
        while self._expiries and self._expiries[0][0] <= now and swept < keys_max:
            expires_at_ms, serial, key = heapq.heappop(self._expiries)
            item = self._accounts[key[:TENANT_BYTES]].items.get(key)
            if item is not None and item.serial == serial and item.expires_at_ms == expires_at_ms:
                item.account.expired_keys += 1
                self._drop(key, item)
            swept += 1  # stale ones count too: they bound the time as well
        return swept

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """See :meth:`Engine.scan`."""
        account = self._accounts.get(tenant.to_bytes(TENANT_BYTES, "big"))
        if account is None:
            return 0, []
        following, keys = account.index.page(cursor, count)
        return following, [key[TENANT_BYTES:] for key in keys if self.peek(key) is not None]

    def count(self, tenant: int) -> int:
        """See :meth:`Engine.count`."""
        account = self._accounts.get(tenant.to_bytes(TENANT_BYTES, "big"))
        return 0 if account is None else len(account.items)

    def tenant(self, name: str) -> int:
        """See :meth:`Engine.tenant`."""
        found = self._names.get(name)
        if found is None:
            found = len(self._names)
            if found == TENANTS_MAX:
                raise OutOfBudgetError(f"tenant {name!r} cannot be added: there are {TENANTS_MAX} already")
            self._names[name] = found
        return found

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """See :meth:`Engine.set_quota`."""
        prefix = tenant.to_bytes(TENANT_BYTES, "big")
        account = self._accounts.get(prefix) or self._open_account(prefix)
        account.quota_bytes, account.quota_keys = bytes_max, keys_max
        account.has_quota = bytes_max is not None or keys_max is not None
        walk = Walk(account, self._clock_ms(), None)
        while self._beyond_quota(account, 0, 0, walk) and walk.peek() is not None:
            walk.take()
        walk.for_quota = len(walk.taken)
        self._evict(walk)

    def set_budget(self, budget_bytes: int) -> None:
        """See :meth:`Engine.set_budget`."""
        self._budget_bytes = budget_bytes
        walks, _ = self._plan(self._used_bytes - budget_bytes, None)
        for walk in walks:
            self._evict(walk)

    def statistics(self, tenant: int | None = None) -> EngineStatistics:
        """See :meth:`Engine.statistics`."""
        budget_bytes, peak_bytes = self._budget_bytes, self._peak_bytes
        accounts = list(self._accounts.values())
        if tenant is not None:
            found = self._accounts.get(tenant.to_bytes(TENANT_BYTES, "big")) or Account()
            accounts, peak_bytes = [found], found.peak_bytes
            budget_bytes = min(budget_bytes, budget_bytes if found.quota_bytes is None else found.quota_bytes)
        evicted = sum(account.evicted_keys for account in accounts)
        for_quota = sum(account.evicted_for_quota for account in accounts)
        return EngineStatistics(
            keys=sum(len(account.items) for account in accounts),
            expiring_keys=sum(account.expiring_keys for account in accounts),
            budget_bytes=budget_bytes,
            used_bytes=sum(account.used_bytes for account in accounts),
            held_bytes=sum(account.held_bytes for account in accounts),
            peak_bytes=peak_bytes,
            records=sum(account.records for account in accounts),
            record_bytes=sum(account.record_bytes for account in accounts),
            evicted_keys=evicted,
            evictions={"budget": evicted - for_quota, "quota": for_quota},
            evicted_bytes=sum(account.evicted_bytes for account in accounts),
            expired_keys=sum(account.expired_keys for account in accounts),
            pinned_keys=sum(account.pinned_keys for account in accounts),
        )

    # ---- Life: nothing to wait for, nothing to keep

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Engine.start`."""

    def descriptors(self) -> list[int]:
        """See :meth:`Engine.descriptors`."""
        return []

    def poll(self) -> None:
        """See :meth:`Engine.poll`."""

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Engine.drain`."""

    def close(self) -> None:
        """See :meth:`Engine.close`."""

    # ---- Making room

    def _open_account(self, prefix: bytes) -> Account:
        account = self._accounts[prefix] = Account()
        return account

    def _make_room(self, account: Account, cost: int, old: MemoryItem | None) -> None:
        """Evict until ``cost`` more bytes fit, those of ``old`` being replaced; or raise and change nothing."""
        freed = old.cost if old is not None and old.holds == 0 else 0
        missing = self._used_bytes - freed + cost - self._budget_bytes
        has_quota = account.has_quota
        if missing <= 0 and not has_quota:
            return
        if cost > self._budget_bytes:
            raise OutOfBudgetError(f"a value of {cost} bytes can never fit a budget of {self._budget_bytes} bytes")
        own: Walk | None = None
        if has_quota:
            own = Walk(account, self._clock_ms(), old)
            while self._beyond_quota(account, cost - freed, old is None, own):
                if own.peek() is None:
                    raise OutOfBudgetError("the tenant's quota is used up, and nothing of it may be evicted")
                missing -= own.take()
            own.for_quota = len(own.taken)
        walks, missing = self._plan(missing, old, account, cost - freed, own)
        if missing > 0:
            raise OutOfBudgetError(f"{missing} bytes are missing: the rest of the budget is held by replies under way")
        for walk in walks:
            self._evict(walk)

    def _beyond_quota(self, account: Account, more_bytes: int, more_keys: int, walk: Walk) -> bool:
        """Return whether a tenant has too much when so much more comes and what the walk has taken goes."""
        too_large = (
            account.quota_bytes is not None and account.used_bytes + more_bytes - walk.taken_bytes > account.quota_bytes
        )
        too_many = (
            account.quota_keys is not None and len(account.items) + more_keys - len(walk.taken) > account.quota_keys
        )
        return too_large or too_many

    def _plan(
        self,
        missing: int,
        spared: MemoryItem | None,
        writer: Account | None = None,
        more_bytes: int = 0,
        own: Walk | None = None,
    ) -> tuple[list[Walk], int]:
        """Choose what goes to gain ``missing`` bytes; return the walks that have taken it, and what is missing still.

        Args:
            missing: bytes to gain.
            spared: an entry that stays.
            writer: the tenant that is about to have ``more_bytes`` more.
            more_bytes: see writer.
            own: a walk through the writer's that has taken some already.
        """
        if missing <= 0:
            return [own] if own is not None else [], missing
        now_ms = self._clock_ms()
        walks = [
            own if own is not None and account is writer else Walk(account, now_ms, spared)
            for account in self._accounts.values()
            if account.items
        ]
        share = self._budget_bytes // max(len(walks), 1)
        while missing > 0:
            best: tuple[bool, int] | None = None
            chosen: Walk | None = None
            for walk in walks:
                if (item := walk.peek()) is None:
                    continue
                uses = walk.account.used_bytes - walk.taken_bytes + (more_bytes if walk.account is writer else 0)
                rank = (uses <= share, item.used)
                if best is None or rank < best:
                    best, chosen = rank, walk
            if chosen is None:
                break
            missing -= chosen.take()
        return walks, missing

    def _evict(self, walk: Walk) -> None:
        account = walk.account
        account.evicted_for_quota += walk.for_quota
        for key, item in walk.taken:
            account.evicted_keys += 1
            account.evicted_bytes += len(key) + item.length
            self._drop(key, item)

    # ---- Bookkeeping

    def _expire(self, key: bytes, item: MemoryItem) -> bool:
        """Remove ``item`` if its time has come; return whether it had."""
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        item.account.expired_keys += 1
        self._drop(key, item)
        return True

    def _drop(self, key: bytes, item: MemoryItem) -> None:
        del item.account.items[key]
        item.account.index.remove(item.serial)
        self._forget(item)

    def _clear(self, account: Account) -> None:
        for item in account.items.values():
            self._forget(item)
        account.items.clear()
        account.index.clear()

    def _forget(self, item: MemoryItem) -> None:
        """Take an item that is no longer in the table out of the accounts, or into those of held ones."""
        account = item.account
        item.stored = False
        if item.head_bytes:
            account.records -= 1
            account.record_bytes -= item.length
        if item.parent:
            account.disown(item.parent)
        if item.pinned_until_ms:
            account.pinned_keys -= 1
        if item.expires_at_ms is not None:
            self._expiring_keys -= 1
            account.expiring_keys -= 1
        if item.holds:
            account.held_bytes += item.cost
        else:
            account.used_bytes -= item.cost
            self._used_bytes -= item.cost

    def _remember_expiry(self, key: bytes, item: MemoryItem, expires_at_ms: int) -> None:
        self._expiring_keys += 1
        item.account.expiring_keys += 1
        heapq.heappush(self._expiries, (expires_at_ms, item.serial, key))
        self._tidy_expiries()

    def _tidy_expiries(self) -> None:
        # Each change of an expiry leaves a stale entry behind. Rebuilding at twice the live ones keeps that linear.
        if len(self._expiries) > 64 + 2 * self._expiring_keys:
            self._expiries = [
                (item.expires_at_ms, item.serial, key)
                for account in self._accounts.values()
                for key, item in account.items.items()
                if item.expires_at_ms is not None
            ]
            heapq.heapify(self._expiries)
