"""What holds the values: the interface of an engine, and the one that keeps them in memory.

An engine maps keys to :class:`Item` within a budget of bytes. It knows nothing of connections or commands; the server
calls it from one thread at a time. Every engine passes ``tests/storage/engine_conformance.py``.

The budget counts, for each entry, the key, the value and :data:`ENTRY_OVERHEAD_BYTES`, and in addition values that
were removed but are still being sent: memory that is in use is counted, wherever it hangs.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from shadowserve.errors import ShadowServeError
from storage_kv._key_index import KeyIndex

__all__ = [
    "ENTRY_OVERHEAD_BYTES",
    "Engine",
    "EngineStatistics",
    "Item",
    "MemoryEngine",
    "OutOfBudgetError",
    "wall_clock_ms",
]

ENTRY_OVERHEAD_BYTES: Final = 640
"""What an entry costs beside its key and value: the item, its slots in the table and in the key index, object headers,
the allocator's rounding and a possible expiry. Measured with CPython 3.11: 400 to 530 bytes, depending on how full
the tables are; ``tests/storage/test_engine_memory.py`` holds it."""


class OutOfBudgetError(ShadowServeError):
    """A value does not fit the budget, even if everything that may be evicted is."""


class Item:
    """One stored value.

    Attributes:
        value: its bytes; never changed after it was stored.
        head_bytes: length of the record's head if the value is a valid record, else 0.
        expires_at_ms: Unix time in milliseconds, or None.
    """

    __slots__ = ("cost", "expires_at_ms", "head_bytes", "holds", "serial", "stored", "value")

    def __init__(self, value: bytes | memoryview, head_bytes: int, expires_at_ms: int | None) -> None:
        """Make an item that no engine holds yet; the other attributes are the engine's own bookkeeping."""
        self.value = value
        self.head_bytes = head_bytes
        self.expires_at_ms = expires_at_ms
        self.cost = 0
        self.holds = 0
        self.serial = 0
        self.stored = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What an engine has done and holds; counters never decrease.

    Attributes:
        keys: entries, expired ones that were not noticed yet included.
        expiring_keys: entries with an expiry.
        budget_bytes: what it may use.
        used_bytes: what it uses, by the accounting that the module describes; held_bytes included.
        held_bytes: of values removed but still being sent.
        peak_bytes: most that was ever used.
        records: entries that are valid records.
        record_bytes: bytes of their values.
        evicted_keys: removed to make room.
        evicted_bytes: bytes of their keys and values.
        expired_keys: removed because their time had come.
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


class Engine(Protocol):
    """What the server needs of an engine. Absent and expired are the same to every method."""

    def get(self, key: bytes) -> Item | None:
        """Return the item of ``key`` and count this as a use of it; None if absent."""

    def peek(self, key: bytes) -> Item | None:
        """Return the item of ``key`` without counting this as a use."""

    def put(
        self, key: bytes, value: bytes | memoryview, *, head_bytes: int = 0, expires_at_ms: int | None = None
    ) -> None:
        """Store a value under ``key`` in place of what is there, evicting others if need be.

        The engine keeps ``value`` itself: the caller does not change it afterwards.

        Raises:
            OutOfBudgetError: it does not fit; nothing has changed.
        """

    def remove(self, key: bytes) -> bool:
        """Remove ``key``; return whether it was there."""

    def set_expiry(self, key: bytes, expires_at_ms: int | None) -> bool:
        """Set or clear the expiry of ``key``; return whether it was there. A time in the past removes it."""

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and keys; as SCAN promises, whatever changes in between."""

    def clear(self) -> None:
        """Remove everything."""

    def sweep(self, keys_max: int) -> int:
        """Remove at most ``keys_max`` expired entries that nobody asked for; return how many were."""

    def hold(self, item: Item) -> None:
        """Keep an item's bytes valid, and counted, until as many calls of release()."""

    def release(self, item: Item) -> None:
        """Undo one hold()."""

    def __len__(self) -> int:
        """Return the number of entries, expired ones that were not noticed yet included."""

    def statistics(self) -> EngineStatistics:
        """Return counters and sizes."""


def wall_clock_ms() -> int:
    """Return Unix time in milliseconds: what expiry times are in, because clients may give them so (EXAT)."""
    return time.time_ns() // 1_000_000


class MemoryEngine:
    """Values in memory, within a budget; the least recently used go first.

    Eviction happens on writes only. Items that are being sent are passed over: evicting them would free nothing.
    """

    def __init__(self, budget_bytes: int, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        """Make an empty engine.

        Args:
            budget_bytes: most that keys, values, overheads and held values may take together.
            clock_ms: Unix time in milliseconds.
        """
        self._budget_bytes = budget_bytes
        self._clock_ms = clock_ms
        self._items: OrderedDict[bytes, Item] = OrderedDict()  # least recently used first
        self._index = KeyIndex()
        self._expiries: list[tuple[int, int, bytes]] = []  # heap of (time, serial, key); stale entries are skipped
        self._expiring_keys = 0
        self._used_bytes = 0
        self._held_bytes = 0
        self._peak_bytes = 0
        self._records = 0
        self._record_bytes = 0
        self._evicted_keys = 0
        self._evicted_bytes = 0
        self._expired_keys = 0

    def __len__(self) -> int:
        """See :meth:`Engine.__len__`."""
        return len(self._items)

    def get(self, key: bytes) -> Item | None:
        """See :meth:`Engine.get`."""
        item = self._items.get(key)
        if item is None:
            return None
        if item.expires_at_ms is not None and self._expire(key, item):
            return None
        self._items.move_to_end(key)
        return item

    def peek(self, key: bytes) -> Item | None:
        """See :meth:`Engine.peek`."""
        item = self._items.get(key)
        if item is None or (item.expires_at_ms is not None and self._expire(key, item)):
            return None
        return item

    def put(
        self, key: bytes, value: bytes | memoryview, *, head_bytes: int = 0, expires_at_ms: int | None = None
    ) -> None:
        """See :meth:`Engine.put`."""
        cost = len(key) + len(value) + ENTRY_OVERHEAD_BYTES
        old = self._items.get(key)
        self._make_room(cost, key, old)
        item = Item(value, head_bytes, expires_at_ms)
        item.cost = cost
        item.stored = True
        if old is not None:
            item.serial = old.serial
            self._forget(old)
        else:
            item.serial = self._index.add(key)
        self._items[key] = item
        self._items.move_to_end(key)
        self._used_bytes += cost
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        if head_bytes:
            self._records += 1
            self._record_bytes += len(value)
        if expires_at_ms is not None:
            self._remember_expiry(key, item, expires_at_ms)

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
        item.expires_at_ms = expires_at_ms
        if expires_at_ms is not None:
            self._remember_expiry(key, item, expires_at_ms)
        return True

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """See :meth:`Engine.scan`."""
        following, keys = self._index.page(cursor, count)
        return following, [key for key in keys if self.peek(key) is not None]

    def clear(self) -> None:
        """See :meth:`Engine.clear`."""
        for item in self._items.values():
            self._forget(item)
        self._items.clear()
        self._index.clear()
        self._expiries.clear()

    def sweep(self, keys_max: int) -> int:
        """See :meth:`Engine.sweep`."""
        now = self._clock_ms()
        swept = 0
        while self._expiries and self._expiries[0][0] <= now and swept < keys_max:
            expires_at_ms, serial, key = heapq.heappop(self._expiries)
            item = self._items.get(key)
            if item is not None and item.serial == serial and item.expires_at_ms == expires_at_ms:
                self._expired_keys += 1
                self._drop(key, item)
            swept += 1  # stale ones count too: they bound the time as well
        return swept

    def hold(self, item: Item) -> None:
        """See :meth:`Engine.hold`."""
        item.holds += 1

    def release(self, item: Item) -> None:
        """See :meth:`Engine.release`."""
        assert item.holds > 0, "released more often than held"
        item.holds -= 1
        if item.holds == 0 and not item.stored:
            self._held_bytes -= item.cost
            self._used_bytes -= item.cost

    def statistics(self) -> EngineStatistics:
        """See :meth:`Engine.statistics`."""
        return EngineStatistics(
            keys=len(self._items),
            expiring_keys=self._expiring_keys,
            budget_bytes=self._budget_bytes,
            used_bytes=self._used_bytes,
            held_bytes=self._held_bytes,
            peak_bytes=self._peak_bytes,
            records=self._records,
            record_bytes=self._record_bytes,
            evicted_keys=self._evicted_keys,
            evicted_bytes=self._evicted_bytes,
            expired_keys=self._expired_keys,
        )

    def _make_room(self, cost: int, key: bytes, old: Item | None) -> None:
        """Evict until ``cost`` more bytes fit, what ``key`` holds now being replaced; or raise and change nothing."""
        freed = old.cost if old is not None and old.holds == 0 else 0
        missing = self._used_bytes - freed + cost - self._budget_bytes
        if missing <= 0:
            return
        if cost > self._budget_bytes:
            raise OutOfBudgetError(f"a value of {cost} bytes can never fit a budget of {self._budget_bytes} bytes")
        victims: list[tuple[bytes, Item]] = []
        for candidate, item in self._items.items():
            if item.holds or item is old:
                continue
            victims.append((candidate, item))
            missing -= item.cost
            if missing <= 0:
                break
        else:
            raise OutOfBudgetError(f"{missing} bytes are missing: the rest of the budget is held by replies under way")
        for candidate, item in victims:
            self._evicted_keys += 1
            self._evicted_bytes += item.cost - ENTRY_OVERHEAD_BYTES
            self._drop(candidate, item)

    def _expire(self, key: bytes, item: Item) -> bool:
        """Remove ``item`` if its time has come; return whether it had."""
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        self._expired_keys += 1
        self._drop(key, item)
        return True

    def _drop(self, key: bytes, item: Item) -> None:
        del self._items[key]
        self._index.remove(item.serial)
        self._forget(item)

    def _forget(self, item: Item) -> None:
        """Take an item that is no longer in the table out of the accounts, or into those of held ones."""
        item.stored = False
        if item.head_bytes:
            self._records -= 1
            self._record_bytes -= len(item.value)
        if item.expires_at_ms is not None:
            self._expiring_keys -= 1
        if item.holds:
            self._held_bytes += item.cost
        else:
            self._used_bytes -= item.cost

    def _remember_expiry(self, key: bytes, item: Item, expires_at_ms: int) -> None:
        self._expiring_keys += 1
        heapq.heappush(self._expiries, (expires_at_ms, item.serial, key))
        # Each change of an expiry leaves a stale entry behind. Rebuilding at twice the live ones keeps that linear.
        if len(self._expiries) > 64 + 2 * self._expiring_keys:
            self._expiries = [
                (item.expires_at_ms, item.serial, key)
                for key, item in self._items.items()
                if item.expires_at_ms is not None
            ]
            heapq.heapify(self._expiries)
