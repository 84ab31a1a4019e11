"""The engine that keeps values in memory, and nothing after its end.

The budget counts, for each entry, the key, the value and :data:`ENTRY_OVERHEAD_BYTES`, and in addition values that
were removed but are still being sent: memory that is in use is counted, wherever it hangs.

No call takes longer as there are more entries. What was cleared, and what is beyond a bound that was lowered, goes in
poll(), a part at a time; room for a value is made by so many evictions, and then its writer has to come again.
"""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shadowserve.clock import wall_clock_ms
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.ordered import Ordered
from shadowserve.pool.pins import Pins
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.terms import DEFAULT_TENANT, ENTRIES_PER_HOLD, TENANTS_MAX, Address, Item, Lease, PinnedEntries
from shadowserve.pool.volume.changes import BusyError, OutOfBudgetError, Ticket
from shadowserve.pool.weights import Weights
from storage_kv.engines import buffers
from storage_kv.engines.account import Account, Counts, MemoryItem

__all__ = ["ENTRY_OVERHEAD_BYTES", "MemoryEngine"]

ENTRY_OVERHEAD_BYTES: Final = 640
"""What an entry costs beside its key and value: the item, its slots in the table and in the key index, object headers,
the allocator's rounding and a possible expiry. Measured with CPython 3.11: 400 to 600 bytes, depending on how full
the tables are; ``tests/storage/test_engine_memory.py`` holds it."""

_HELD_LOOKS: Final = 64
"""Entries of one tenant that are passed over, because they are being sent, in search of one to evict."""
_GIVERS: Final = 16
"""Tenants that are asked for something to evict before all are."""


@dataclass(slots=True)
class _Remains:
    """What a tenant had when it was cleared."""

    queues: tuple[OrderedDict[bytes, MemoryItem], ...]

    def pop(self) -> tuple[bytes, MemoryItem] | None:
        for queue in self.queues:
            if queue:
                return queue.popitem(last=False)
        return None


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
        self._lock = threading.Lock()
        self._wake_descriptor: int | None = None
        self._names = {"": DEFAULT_TENANT}
        self._all = Counts()
        self._accounts: dict[int, Account] = {}
        self._weights: Weights[Account] = Weights()  # where there are several
        self._open_account(DEFAULT_TENANT)
        self._expiries: Ordered[tuple[bytes, MemoryItem]] = Ordered()
        self._pins: Pins[tuple[bytes, MemoryItem]] = Pins()
        self._uses = 0  # so far: the time by which entries are compared
        self._remains: deque[_Remains] = deque()
        self._room: list[Ticket] = []  # settled by the next poll()
        self._beyond: dict[Account, None] = {}  # tenants that may have more than their quota
        self._is_beyond = False  # whether all may have more than the budget
        self._allowance = ENTRIES_PER_HOLD  # that a lowered bound may evict at once until the next poll()

    # ---- Reading

    def get(self, address: Address) -> MemoryItem | None:
        """See :meth:`Engine.get`."""
        tenant, key = address
        account = self._accounts.get(tenant) or self._open_account(tenant)
        item = account.items.get(key)  # a clear between two puts others in its place
        if item is not None and item.expires_at_ms is None:  # most often
            account.items.move_to_end(key)
        else:
            item = item or account.find(key)
            if item is None or (item.expires_at_ms is not None and self._expire(key, item)):
                return None
            account.use(key)
        self._uses = item.used = self._uses + 1
        return item

    def peek(self, address: Address) -> MemoryItem | None:
        """See :meth:`Engine.peek`."""
        tenant, key = address
        account = self._accounts.get(tenant)
        item = None if account is None else account.find(key)
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
        if item.holds == 1 and item.stored and not item.pinned_until_ms:
            _stick(item, 1)

    def release(self, item: Item) -> None:
        """See :meth:`Engine.release`."""
        assert isinstance(item, MemoryItem) and item.holds > 0, "released more often than held"
        item.holds -= 1
        if item.holds:
            return
        if not item.stored:
            for counts in item.account.both:
                counts.held_bytes -= item.cost
            self._use(item.account, -item.cost)
        elif not item.pinned_until_ms:
            _stick(item, -1)

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
        address: Address,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        """See :meth:`Engine.put`."""
        tenant, key = address
        account = self._accounts.get(tenant) or self._open_account(tenant)
        old = account.items.get(key)
        length = len(value)
        if old is None:
            old = account.find(key)
        elif not (head_bytes or parent or account.has_quota) and expires_at_ms is None:
            more = length - old.length
            is_simple = not (old.holds or old.head_bytes or old.parent)
            if is_simple and old.expires_at_ms is None and self._all.used_bytes + more <= self._budget_bytes:
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
        if self._all.used_bytes + cost > self._budget_bytes or account.has_quota:
            self._make_room(account, cost, key, old)
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
            account.take(key)
            self._forget(key, old)
        else:
            item.serial = account.index.add(key)
        account.add(key, item)
        for counts in account.both:
            counts.keys += 1
            if item.head_bytes:
                counts.records += 1
                counts.record_bytes += item.length
        self._use(account, item.cost)
        if item.parent:
            account.adopt(item.parent)
        if item.expires_at_ms is not None:
            self._remember_expiry(key, item, item.expires_at_ms)

    def _use(self, account: Account, more_bytes: int) -> None:
        """Count that much more, or less if it is negative."""
        for counts in account.both:
            used_bytes = counts.used_bytes = counts.used_bytes + more_bytes
            if used_bytes > counts.peak_bytes:
                counts.peak_bytes = used_bytes
        if len(self._accounts) > 1:
            self._weights.set(account, account.counts.used_bytes)

    def settling(self, address: Address) -> Ticket | None:
        """See :meth:`Engine.settling`: nothing is more durable than it is at once."""
        return None

    def remove(self, address: Address) -> bool:
        """See :meth:`Engine.remove`."""
        item, key = self.peek(address), address[1]
        if item is None:
            return False
        self._drop(key, item)
        return True

    def set_expiry(self, address: Address, expires_at_ms: int | None) -> bool:
        """See :meth:`Engine.set_expiry`."""
        item, key = self.peek(address), address[1]
        if item is None:
            return False
        if expires_at_ms is not None and expires_at_ms <= self._clock_ms():
            self._drop(key, item)
            return True
        self._forget_expiry(item)
        item.expires_at_ms = expires_at_ms
        if expires_at_ms is not None:
            self._remember_expiry(key, item, expires_at_ms)
        return True

    # ---- Pins

    def pin(self, address: Address, until_ms: int) -> bool:
        """See :meth:`Engine.pin`."""
        item, key = self.peek(address), address[1]
        if item is None:
            return False
        if until_ms <= self._clock_ms():
            self._unpin(key, item)
            return True
        account = item.account
        self._end_pins(ENTRIES_PER_HOLD)
        self._pins.check(
            account.number, (key, item), item.cost, quota_bytes=account.quota_bytes, budget_bytes=self._budget_bytes
        )
        self._pin(key, item, until_ms)
        return True

    def _pin(self, key: bytes, item: MemoryItem, until_ms: int) -> None:
        if not item.pinned_until_ms:
            item.account.take(key)
            item.account.pinned[key] = item
            if not item.holds:
                _stick(item, 1)
        item.pinned_until_ms = until_ms
        self._pins.add(item.account.number, (key, item), item.cost, until_ms)

    def _unpin(self, key: bytes, item: MemoryItem) -> None:
        """Let an entry take part again; the end of its pin counts as a use of it."""
        if not item.pinned_until_ms:
            return
        item.pinned_until_ms = 0
        account = item.account
        self._pins.drop(account.number, (key, item))
        if not item.holds:
            _stick(item, -1)
        if account.pinned.get(key) is item:  # else it was cleared
            del account.pinned[key]
            self._uses = item.used = self._uses + 1
            account.add(key, item)

    def _end_pins(self, count_max: int) -> int:
        """Unpin entries whose pin has ended, so many at most; return how many."""
        now_ms = self._clock_ms()
        for number in range(count_max):
            ended = self._pins.ended(now_ms)
            if ended is None:
                return number
            self._unpin(*ended[1])
        return count_max

    def set_pin_shares(self, of_tenant: float, of_all: float) -> None:
        """See :meth:`Engine.set_pin_shares`."""
        self._pins.of_tenant, self._pins.of_all = of_tenant, of_all

    def unpin_some(self, tenant: int | None) -> int:
        """See :meth:`Engine.unpin_some`."""
        some = self._pins.some(tenant, ENTRIES_PER_HOLD)
        for _, (key, item) in some:
            self._unpin(key, item)
        return len(some)

    def pinned(self, tenant: int) -> PinnedEntries:
        """See :meth:`Engine.pinned`."""
        account = self._accounts.get(tenant)
        quota_bytes = None if account is None else account.quota_bytes
        return self._pins.entries(tenant, quota_bytes=quota_bytes, budget_bytes=self._budget_bytes)

    def pinning_tenants(self, count_max: int) -> list[int]:
        """See :meth:`Engine.pinning_tenants`."""
        return self._pins.tenants(count_max)

    # ---- Removing much

    def clear(self, tenant: int | None) -> None:
        """See :meth:`Engine.clear`. Few entries go at once; of many the table does, and they themselves in poll()."""
        found = None if tenant is None else self._accounts.get(tenant)
        for account in self._accounts.values() if tenant is None else [found] if found is not None else []:
            keys = account.counts.keys
            if not keys:
                continue
            self._remains.append(_Remains((account.items, account.parents, account.pinned)))
            for counts in account.both:
                counts.keys -= keys
            account.begin_anew()
        self._allowance -= self._drain_remains(self._allowance)
        self._tell()

    def _drain_remains(self, count_max: int) -> int:
        """Forget so many cleared entries at most; return how many."""
        for number in range(count_max):
            popped = None
            while self._remains and (popped := self._remains[0].pop()) is None:
                self._remains.popleft()
            if popped is None:
                return number
            self._forget(*popped, cleared=True)
        return count_max

    def barrier(self) -> Ticket | None:
        """See :meth:`Engine.barrier`: nothing is more durable than it is at once."""
        return None

    def sweep(self, keys_max: int) -> int:
        """See :meth:`Engine.sweep`; pins that have ended are looked at, too."""
        now_ms = self._clock_ms()
        swept = 0
        while swept < keys_max and (first := self._expiries.first()) is not None and first[0] >> 64 <= now_ms:
            key, item = first[1]
            if item.account.find(key) is item:
                for counts in item.account.both:
                    counts.expired_keys += 1
                self._drop(key, item)
            else:  # it was cleared
                self._expiries.remove(first[0])
            swept += 1
        return swept + self._end_pins(keys_max - swept)

    # ---- Tenants, sizes

    def scan(self, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """See :meth:`Engine.scan`."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0, []
        following, keys = account.index.page(cursor, min(count, ENTRIES_PER_HOLD))
        return following, [key for key in keys if self.peek((tenant, key)) is not None]

    def count(self, tenant: int) -> int:
        """See :meth:`Engine.count`."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.counts.keys

    def tenant(self, name: str) -> int:
        """See :meth:`Engine.tenant`."""
        found = self._names.get(name)
        if found is None:
            found = len(self._names)
            if found == TENANTS_MAX:
                raise OutOfBudgetError(f"tenant {name!r} cannot be added: there are {TENANTS_MAX} already")
            self._names[name] = found
        return found

    def tenants(self) -> Mapping[str, int]:
        """See :meth:`Engine.tenants`."""
        return self._names

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """See :meth:`Engine.set_quota`."""
        account = self._accounts.get(tenant) or self._open_account(tenant)
        account.quota_bytes, account.quota_keys = bytes_max, keys_max
        account.has_quota = bytes_max is not None or keys_max is not None
        self._beyond[account] = None
        self._allowance -= self._trim(self._allowance)
        self._tell()

    def set_budget(self, budget_bytes: int) -> None:
        """See :meth:`Engine.set_budget`."""
        self._budget_bytes = budget_bytes
        self._is_beyond = True
        self._allowance -= self._trim(self._allowance)
        self._tell()

    def follow(self, config: PoolConfig) -> None:
        """See :meth:`Engine.follow`: its memory is its budget."""
        self.set_budget(int(config.memory_budget_bytes))

    def statistics(self, tenant: int | None = None) -> Statistics:
        """See :meth:`Engine.statistics`."""
        counts, budget_bytes, pinned_bytes = self._all, self._budget_bytes, self._pins.total_bytes
        if tenant is not None:
            found = self._accounts.get(tenant)
            counts = Counts() if found is None else found.counts
            pinned_bytes = self._pins.bytes_of(tenant)
            if found is not None and found.quota_bytes is not None:
                budget_bytes = min(budget_bytes, found.quota_bytes)
        return Statistics(
            keys=counts.keys,
            expiring_keys=counts.expiring_keys,
            budget_bytes=budget_bytes,
            used_bytes=counts.used_bytes,
            held_bytes=counts.held_bytes,
            peak_bytes=counts.peak_bytes,
            records=counts.records,
            record_bytes=counts.record_bytes,
            evicted_keys=counts.evicted_keys,
            evictions={"budget": counts.evicted_keys - counts.evicted_for_quota, "quota": counts.evicted_for_quota},
            evicted_bytes=counts.evicted_bytes,
            expired_keys=counts.expired_keys,
            pinned_keys=self._pins.count(tenant),
            pinned_bytes=pinned_bytes,
        )

    # ---- Life

    def start(self, lock: threading.Lock) -> None:
        """See :meth:`Engine.start`."""
        self._lock = lock
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def descriptors(self) -> list[int]:
        """See :meth:`Engine.descriptors`."""
        return [] if self._wake_descriptor is None else [self._wake_descriptor]

    def poll(self) -> bool:
        """See :meth:`Engine.poll`: goes on with what was cleared, and with what is beyond a bound."""
        if self._wake_descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_descriptor)
        with self._lock:
            done = self._drain_remains(ENTRIES_PER_HOLD)
            done += self._trim(ENTRIES_PER_HOLD - done)
            self._allowance = ENTRIES_PER_HOLD - done
            settled, self._room = self._room, []
            more = bool(self._remains or self._beyond or self._is_beyond)
        for ticket in settled:
            ticket.settle()
        return more

    def _tell(self) -> None:
        """Have poll() called, if there is something to do."""
        more = self._remains or self._beyond or self._is_beyond or self._room
        if more and self._wake_descriptor is not None:
            os.eventfd_write(self._wake_descriptor, 1)

    def drain(self, timeout_s: float) -> None:
        """See :meth:`Engine.drain`."""

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        if self._wake_descriptor is not None:
            os.close(self._wake_descriptor)
            self._wake_descriptor = None

    # ---- Making room

    def _open_account(self, tenant: int) -> Account:
        account = self._accounts[tenant] = Account(tenant, self._all)
        if len(self._accounts) == 2:  # from now on weights count
            for each in self._accounts.values():
                self._weights.set(each, each.counts.used_bytes)
        return account

    def _make_room(self, account: Account, cost: int, key: bytes, old: MemoryItem | None) -> None:
        """Evict until ``cost`` more bytes fit, those of ``old`` being replaced; or raise."""
        freed = old.cost if old is not None and old.holds == 0 else 0
        more, more_keys = cost - freed, int(old is None)
        missing = self._all.used_bytes + more - self._budget_bytes
        if missing <= 0 and not account.has_quota:
            return
        own_max = self._budget_bytes if account.quota_bytes is None else min(self._budget_bytes, account.quota_bytes)
        if cost > own_max:
            raise OutOfBudgetError(f"a value of {cost} bytes can never fit {own_max} bytes")
        looks = ENTRIES_PER_HOLD - (self._end_pins(ENTRIES_PER_HOLD) if len(self._pins) else 0)
        self._check_room(account, more, more_keys, old)
        if old is not None:
            account.use(key)
        while account.has_quota and looks > 0 and self._beyond_quota(account, more, more_keys) > 0:
            looks -= 1
            if not self._drain_remains(1) and not self._evict(account, old, for_quota=True):
                break
        everyone, most = self._all, self._budget_bytes - more
        while everyone.used_bytes > most and looks > 0:
            looks -= 1
            if not (self._remains and self._drain_remains(1)) and not self._evict_anyones(account, more, old):
                break
        if everyone.used_bytes > most or (account.has_quota and self._beyond_quota(account, more, more_keys) > 0):
            again = Ticket()
            self._room.append(again)
            self._tell()
            raise BusyError("more has to be evicted than is at a time", again)

    def _check_room(self, account: Account, more: int, more_keys: int, old: MemoryItem | None) -> None:
        """Raise OutOfBudgetError if so much more does not fit even if all that may be evicted is."""
        if self._remains:  # nobody knows yet what of it is being sent
            return
        own_bytes, own_keys = (old.cost, 1) if old is not None and not (old.holds or old.pinned_until_ms) else (0, 0)
        own = account.counts
        # What is left when all goes that may, in bytes and in keys.
        least, least_keys = own.held_bytes + own.stuck_bytes + own_bytes, own.stuck_keys + own_keys
        if account.quota_bytes is not None and least + more > account.quota_bytes:
            raise OutOfBudgetError("the tenant's quota is used up by what is pinned or being sent")
        if account.quota_keys is not None and least_keys + more_keys > account.quota_keys:
            raise OutOfBudgetError("the tenant's quota of keys is used up by what is pinned or being sent")
        everyone = self._all
        if everyone.held_bytes + everyone.stuck_bytes + own_bytes + more > self._budget_bytes:
            raise OutOfBudgetError("the rest of the budget is held by replies under way, or pinned")

    @staticmethod
    def _beyond_quota(account: Account, more_bytes: int, more_keys: int) -> int:
        """Return by how much a tenant has too much, in bytes or keys, when so much more comes."""
        counts = account.counts
        by_bytes = 0 if account.quota_bytes is None else counts.used_bytes + more_bytes - account.quota_bytes
        by_keys = 0 if account.quota_keys is None else counts.keys + more_keys - account.quota_keys
        return max(by_bytes, by_keys)

    def _evict_anyones(self, writer: Account | None, more: int, spared: MemoryItem | None) -> bool:
        """Evict one entry of whoever has most; return whether there was one that may go.

        Args:
            writer: the tenant that is about to have ``more`` bytes more.
            more: see writer.
            spared: an entry that stays.
        """
        if len(self._accounts) == 1:
            return self._evict(writer or next(iter(self._accounts.values())), spared)
        for count in (_GIVERS, ENTRIES_PER_HOLD):
            givers = list(self._weights.heaviest_first(count))
            if writer is not None and (not givers or _used_bytes(writer) + more >= _used_bytes(givers[0])):
                givers.insert(0, writer)
            if any(self._evict(giver, spared) for giver in givers):
                return True
        return False

    def _evict(self, account: Account, spared: MemoryItem | None, *, for_quota: bool = False) -> bool:
        """Evict one of a tenant's entries; return whether there was one that may go."""
        victim = account.victim(_HELD_LOOKS, spared)
        if victim is None:
            return False
        key, item = victim
        for counts in account.both:
            counts.evicted_keys += 1
            counts.evicted_for_quota += for_quota
            counts.evicted_bytes += len(key) + item.length
        self._drop(key, item)
        return True

    def _trim(self, count_max: int) -> int:
        """Evict so many entries at most that are beyond quotas and budget; return how many."""
        done = 0
        while self._beyond and done < count_max:
            account = next(iter(self._beyond))
            while done < count_max and self._beyond_quota(account, 0, 0) > 0:
                if not self._evict(account, None, for_quota=True):
                    break
                done += 1
            else:
                if done == count_max:
                    break
            del self._beyond[account]
        while self._is_beyond and not self._beyond and done < count_max:
            if self._all.used_bytes <= self._budget_bytes or not self._evict_anyones(None, 0, None):
                self._is_beyond = False
            else:
                done += 1
        return done

    # ---- Bookkeeping

    def _expire(self, key: bytes, item: MemoryItem) -> bool:
        """Remove ``item`` if its time has come; return whether it had."""
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        for counts in item.account.both:
            counts.expired_keys += 1
        self._drop(key, item)
        return True

    def _drop(self, key: bytes, item: MemoryItem) -> None:
        item.account.take(key)
        item.account.index.remove(item.serial)
        self._forget(key, item)

    def _forget(self, key: bytes, item: MemoryItem, *, cleared: bool = False) -> None:
        """Take an item that is no longer in the table out of the counts, or into those of held ones.

        ``cleared``: it left with all others, so that its key and its parent count no more.
        """
        account = item.account
        item.stored = False
        if item.pinned_until_ms or item.holds:
            _stick(item, -1)
        if item.pinned_until_ms:
            self._pins.drop(account.number, (key, item))
        self._forget_expiry(item)
        for counts in account.both:
            counts.keys -= not cleared
            if item.head_bytes:
                counts.records -= 1
                counts.record_bytes -= item.length
            if item.holds:
                counts.held_bytes += item.cost
        if item.parent and not cleared:
            account.disown(item.parent)
        if not item.holds:
            self._use(account, -item.cost)

    def _remember_expiry(self, key: bytes, item: MemoryItem, expires_at_ms: int) -> None:
        for counts in item.account.both:
            counts.expiring_keys += 1
        self._expiries.add(_expiry_number(item, expires_at_ms), (key, item))

    def _forget_expiry(self, item: MemoryItem) -> None:
        if item.expires_at_ms is None:
            return
        for counts in item.account.both:
            counts.expiring_keys -= 1
        self._expiries.remove(_expiry_number(item, item.expires_at_ms))


def _used_bytes(account: Account) -> int:
    return account.counts.used_bytes


def _stick(item: MemoryItem, sign: int) -> None:
    """Count an entry as one that may not be evicted, or no more."""
    for counts in item.account.both:
        counts.stuck_bytes += sign * item.cost
        counts.stuck_keys += sign


def _expiry_number(item: MemoryItem, expires_at_ms: int) -> int:
    """Return what an expiry is ordered by: its time, and what makes it unique."""
    return max(expires_at_ms, 0) << 64 | item.account.number << 48 | item.serial
