"""The conformance suite of pools. A test module derives from StoreConformance and implements make()."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machine import drive
from store_driver import Clock, Driver, Reading
from work_meter import WORK_MAX, WorkMeter

from shadowserve.keys import storage_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import ENTRIES_PER_HOLD, ENTRY_OVERHEAD_BYTES, PinShareError
from shadowserve.pool.volume.tickets import OutOfBudgetError


class StoreConformance(ABC):
    """The suite. Budgets are in bytes; cost() returns the bytes that an entry counts for."""

    MANY = 3_000
    """Number of entries that distinguishes work on all entries from work on some."""
    PIN_UNIT_MS = 1000
    """Resolution of a pin's end."""

    def cost(self, key: bytes, size: int) -> int:
        """Return the bytes that an entry with a value of ``size`` bytes counts for."""
        return len(key) + size + ENTRY_OVERHEAD_BYTES

    @abstractmethod
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Pool:
        """Return an empty pool."""

    @pytest.fixture(autouse=True)
    def _stops(self) -> Iterator[None]:
        """Stop every pool of a test."""
        self.driven: list[Driver] = []
        yield
        for driver in self.driven:
            driver.stop()

    def drive(self, budget_bytes: int, clock_ms: Callable[[], int], lock: WorkMeter | None = None) -> Driver:
        self.driven.append(Driver(self.make(budget_bytes, clock_ms), lock=lock))
        return self.driven[-1]

    def fill(self, store: Driver, count: int, tenant: int = 0, size: int = 0, **named: Any) -> None:
        """Store ``count`` entries, and wait until all are durable."""
        changes = [store.put_soon(b"%d" % number, b"x" * size, tenant, **named) for number in range(count)]
        assert {change.wait() for change in changes} == {None}

    def test_get_returns_the_stored_value(self) -> None:
        store = self.drive(1 << 20, Clock())
        for value in (b"", b"x", bytes(range(256)) * 40, memoryview(b"view" * 100)):
            store.put(b"key", value)
            assert store.value(b"key") == bytes(value)
        assert store.value(b"other") is None and store.peek(b"other") is None
        assert store.count() == 1

    def test_remove_and_clear(self) -> None:
        store = self.drive(1 << 20, Clock())
        store.put(b"a", b"1")
        store.put(b"b", b"2")
        assert store.remove(b"a") and not store.remove(b"a")
        assert store.value(b"a") is None and store.value(b"b") == b"2"
        store.clear()
        assert store.count() == 0 and store.value(b"b") is None
        assert store.statistics().used_bytes == 0

    def test_the_least_recently_used_entry_is_evicted_first(self) -> None:
        store = self.drive(3 * self.cost(b"a", 100), Clock())
        for key in (b"a", b"b", b"c"):
            store.put(key, b"x" * 100)
        assert store.get(b"a") is not None  # b is now the oldest
        assert store.peek(b"b") is not None  # peek() does not change the order
        store.put(b"d", b"x" * 100)
        assert store.peek(b"b") is None
        assert all(store.peek(key) is not None for key in (b"a", b"c", b"d"))
        statistics = store.statistics()
        assert statistics.evicted_keys == 1 and statistics.evicted_bytes == 101
        assert statistics.evictions["quota"] == 0 and sum(statistics.evictions.values()) == 1

    def test_a_large_value_evicts_as_many_as_it_needs(self) -> None:
        store = self.drive(4 * self.cost(b"a", 8000), Clock())
        for key in (b"a", b"b", b"c", b"d"):
            store.put(key, b"x" * 8000)
        store.put(b"e", b"y" * 14400)  # one eviction is not enough, two are
        assert [key for key in (b"a", b"b", b"c", b"d") if store.peek(key)] == [b"c", b"d"]
        assert store.value(b"e") == b"y" * 14400
        assert store.statistics().used_bytes <= 4 * self.cost(b"a", 8000)

    def test_a_value_larger_than_the_budget_is_refused_and_changes_nothing(self) -> None:
        store = self.drive(10_000, Clock())
        store.put(b"a", b"1")
        before = store.statistics()
        with pytest.raises(OutOfBudgetError):
            store.put(b"b", b"x" * 10_000)
        with pytest.raises(OutOfBudgetError):
            store.put(b"a", b"x" * 10_000)
        assert store.statistics() == before and store.value(b"a") == b"1"

    def test_overwriting_gives_back_what_the_old_value_used(self) -> None:
        store = self.drive(self.cost(b"a", 1000), Clock())
        for size in (1000, 10, 1000, 0, 1000):
            store.put(b"a", b"x" * size)
            assert store.statistics().used_bytes == self.cost(b"a", size)
        assert store.statistics().evicted_keys == 0

    def test_an_expired_entry_is_absent_to_everything(self) -> None:
        clock = Clock()
        store = self.drive(1 << 20, clock)
        for key in (b"get", b"peek", b"remove", b"scan", b"expire"):
            store.put(key, b"1", expires_at_ms=clock.now_ms + 10)
        store.put(b"stays", b"1")
        clock.now_ms += 9
        assert store.get(b"get") is not None
        clock.now_ms += 1
        assert store.get(b"get") is None
        assert store.peek(b"peek") is None
        assert not store.remove(b"remove")
        assert not store.set_expiry(b"expire", None)
        assert store.scan(0, 100) == (0, [b"stays"])
        assert store.statistics().expired_keys == 5 and store.count() == 1

    def test_expiry_can_be_set_changed_and_cleared(self) -> None:
        clock = Clock()
        store = self.drive(1 << 20, clock)
        store.put(b"a", b"1")
        assert store.set_expiry(b"a", clock.now_ms + 10) and store.statistics().expiring_keys == 1
        assert store.set_expiry(b"a", clock.now_ms + 100) and store.statistics().expiring_keys == 1
        clock.now_ms += 50
        assert store.set_expiry(b"a", None) and store.statistics().expiring_keys == 0
        clock.now_ms += 1000
        assert store.value(b"a") == b"1"
        assert store.set_expiry(b"a", clock.now_ms) and store.peek(b"a") is None
        assert not store.set_expiry(b"none", None)

    def test_sweep_removes_expired_entries_without_a_read(self) -> None:
        clock = Clock()
        store = self.drive(1 << 22, clock)
        for number in range(100):
            store.put(b"%d" % number, b"1", expires_at_ms=clock.now_ms + 1 + number)
        store.put(b"0", b"stays")  # the previous expiry is removed
        clock.now_ms += 50
        assert store.sweep(10) == 10
        while store.sweep(10):
            pass
        assert store.count() == 51 and store.value(b"0") == b"stays"
        assert store.statistics().expired_keys == 49

    def test_repeated_changes_of_an_expiry_use_no_memory(self) -> None:
        clock = Clock()
        store = self.drive(1 << 20, clock)
        store.put(b"a", b"1")
        for number in range(10_000):
            store.call(store.store.set_expiry, (0, b"a"), clock.now_ms + 10 + number)
        clock.now_ms += 20_000
        swept = 0
        while count := store.sweep(1000):
            swept += count
        assert store.count() == 0 and swept < 1000

    def test_scanning_returns_each_key_that_stays_exactly_once(self) -> None:
        store = self.drive(1 << 24, Clock())
        for number in range(300):
            store.put_soon(b"stays%d" % number, b"1")
            store.put_soon(b"goes%d" % number, b"1")
        found: list[bytes] = []
        cursor, step = 0, 0
        while True:
            cursor, keys = store.scan(cursor, 17)
            found += keys
            if cursor == 0:
                break
            for number in range(step * 20, step * 20 + 20):  # all keys change during the scan
                store.call(store.store.remove, (0, b"goes%d" % number))
                store.get(b"stays%d" % number)
                store.put_soon(b"stays%d" % (number * 7 % 300), b"2")
            store.put_soon(b"comes%d" % step, b"1")
            step += 1
        stays = [key for key in found if key.startswith(b"stays")]
        assert sorted(stays) == sorted(b"stays%d" % number for number in range(300))
        assert len(set(found)) == len(found)

    def test_scan_ends_in_an_empty_pool_and_with_an_old_cursor(self) -> None:
        store = self.drive(1 << 20, Clock())
        assert store.scan(0, 10) == (0, [])
        assert store.scan(1 << 63, 10) == (0, [])

    def test_a_value_being_read_stays_valid_after_it_is_removed(self) -> None:
        store = self.drive(10 * self.cost(b"a", 1000), Clock())
        store.put(b"a", b"x" * 1000)
        first, second = store.open(b"a"), store.open(b"a")
        store.remove(b"a")
        store.put(b"a", b"y" * 1000)
        assert first.wait() == second.wait() == b"x" * 1000
        first.release()
        assert second.wait() == b"x" * 1000
        second.release()
        assert store.statistics().held_bytes == 0
        assert store.statistics().used_bytes == self.cost(b"a", 1000)

    def test_records_are_counted(self) -> None:
        store = self.drive(1 << 20, Clock())
        store.put(b"a", b"x" * 100, header_bytes=10)
        store.put(b"b", b"x" * 100)
        assert store.peek(b"a").header_bytes == 10
        assert (store.statistics().records, store.statistics().record_bytes) == (1, 100)
        store.put(b"a", b"plain")
        assert (store.statistics().records, store.statistics().record_bytes) == (0, 0)

    def test_tenants_are_listed_by_name(self) -> None:
        store = self.drive(1 << 20, Clock())
        ids = {name: store.tenant(name) for name in ("b", "a")}
        assert dict(store.call(store.store.tenants)) == {"": 0, **ids}

    def test_tenants_have_separate_keys(self) -> None:
        store = self.drive(1 << 20, Clock())
        one, two = store.tenant("one"), store.tenant("two")
        assert len({0, one, two}) == 3 and store.tenant("one") == one
        assert store.tenant("") == 0
        for tenant, value in ((0, b"none"), (one, b"first"), (two, b"second")):
            store.put(b"a", value, tenant)
        store.put(b"b", b"x", one, header_bytes=1)
        assert [store.value(b"a", tenant=tenant) for tenant in (0, one, two)] == [b"none", b"first", b"second"]
        assert store.keys(one) == {b"a", b"b"} and store.keys(two) == {b"a"} and store.keys(999) == set()
        assert [store.count(tenant) for tenant in (0, one, two, 999)] == [1, 2, 1, 0]
        assert store.statistics(one).keys == 2 and store.statistics(one).records == 1
        assert store.statistics().used_bytes == sum(store.statistics(each).used_bytes for each in (0, one, two))
        assert store.remove(b"a", two) and not store.remove(b"b", two)
        store.clear(one)
        assert store.count(one) == 0 and store.value(b"a") == b"none" and store.statistics(one).used_bytes == 0

    def test_a_tenant_beyond_its_quota_evicts_its_own_entries_only(self) -> None:
        store = self.drive(100 * self.cost(b"a", 1000), Clock())
        one = store.tenant("one")
        store.put(b"a", b"x" * 1000)
        store.call(store.store.set_quota, one, 3 * self.cost(b"a", 1000), None)
        for key in (b"a", b"b", b"c", b"d"):
            store.put(key, b"x" * 1000, one)
        assert store.keys(one) == {b"b", b"c", b"d"} and store.keys() == {b"a"}
        assert store.statistics(one).budget_bytes == 3 * self.cost(b"a", 1000)
        with pytest.raises(OutOfBudgetError):
            store.put(b"a", b"x" * 20_000, one)
        assert store.keys(one) == {b"b", b"c", b"d"}
        store.call(store.store.set_quota, one, None, 2)
        assert store.keys(one) == {b"c", b"d"}
        store.put(b"c", b"new", one)  # replaces an existing value
        store.put(b"e", b"x", one)
        assert store.keys(one) == {b"c", b"e"} and store.keys() == {b"a"}
        assert store.statistics(one).evicted_keys == 3 and store.statistics(0).evicted_keys == 0
        assert {cause: count for cause, count in store.statistics().evictions.items() if count} == {"quota": 3}

    def test_beyond_the_budget_the_largest_tenant_evicts_first(self) -> None:
        store = self.drive(6 * self.cost(b"a", 1000), Clock())
        one = store.tenant("one")
        store.put(b"old", b"x" * 900)
        for key in (b"a", b"b", b"c", b"d", b"e"):
            store.put(key, b"x" * 1000, one)
        store.put(b"new", b"x" * 900)  # tenant 0 has the oldest value, and less than its share
        assert store.keys() == {b"old", b"new"} and store.keys(one) == {b"b", b"c", b"d", b"e"}
        store.put(b"f", b"x" * 1000, one)
        assert store.keys() == {b"old", b"new"} and store.keys(one) == {b"c", b"d", b"e", b"f"}

    def test_a_pinned_entry_stays_until_its_pin_ends(self) -> None:
        clock, unit = Clock(), self.PIN_UNIT_MS
        store = self.drive(2 * self.cost(b"a", 1000), clock)
        store.put(b"a", b"x" * 1000)
        store.put(b"b", b"x" * 1000)
        assert store.pin(b"a", clock.now_ms + 100 * unit) and not store.pin(b"none", clock.now_ms + 100 * unit)
        assert store.statistics().pinned_keys == 1
        store.put(b"c", b"x" * 1000)
        assert store.keys() == {b"a", b"c"}
        assert store.pin(b"c", clock.now_ms + 50 * unit)
        with pytest.raises(OutOfBudgetError):
            store.put(b"d", b"x" * 1000)
        assert store.keys() == {b"a", b"c"}
        clock.now_ms += 60 * unit
        store.put(b"d", b"x" * 1000)
        assert store.keys() == {b"a", b"d"}
        assert store.pin(b"a", 0)
        store.put(b"e", b"x" * 1000)  # the policy chooses the victim of the two
        assert b"e" in store.keys() and store.count() == 2
        assert store.pin(b"e", clock.now_ms + 100 * unit) and store.remove(b"e")  # a pin is no lock
        assert store.statistics().pinned_keys == 0

    def test_a_chunk_is_evicted_after_its_descendants(self) -> None:
        names = [bytes([number + 1]) * 32 for number in range(6)]
        keys = [storage_key(name) for name in names]
        store = self.drive(4 * self.cost(keys[0], 1000), Clock())

        def put(number: int, parent: int | None) -> None:
            store.put(keys[number], b"x" * 1000, parent=b"" if parent is None else names[parent])

        put(0, None)
        put(1, 0)
        put(2, 1)
        put(3, 0)
        for number in (2, 1, 3):  # the root is what was used least
            store.get(keys[number])
        put(4, None)
        # Which leaf goes is the policy's business: the one used least, or one below what was used least.
        assert store.count() == 4 and {keys[0], keys[1], keys[4]} < store.keys()
        put(5, None)
        assert store.count() == 4 and {keys[0], keys[4], keys[5]} < store.keys()
        store.get(keys[4])
        store.put(b"large", b"x" * 2100)  # the last child, and then its parent without children
        assert store.keys().isdisjoint({keys[1], keys[2], keys[3]})
        store.remove(keys[0])
        assert store.value(keys[4]) is not None

    def test_chunks_with_circular_parents_can_be_evicted(self) -> None:
        names = [bytes([number + 1]) * 32 for number in range(3)]
        budget_bytes = 3 * self.cost(storage_key(names[0]), 1000)
        store = self.drive(budget_bytes, Clock())
        for number, name in enumerate(names):
            store.put(storage_key(name), b"x" * 1000, parent=names[(number + 1) % 3] if number < 2 else names[2])
        store.put(storage_key(names[1]), b"x" * 1000, parent=names[0])
        store.put(b"large", b"x" * (budget_bytes - 2200))
        assert store.keys() == {b"large"}

    # ---- One tenant's pins

    def test_pins_of_one_tenant_leave_room_for_others(self) -> None:
        clock, unit = Clock(), self.PIN_UNIT_MS
        store = self.drive(16 * self.cost(b"00", 1000), clock)
        store.call(store.store.set_pin_shares, 0.25, 0.5)
        tenants = [store.tenant(name) for name in ("one", "two", "three")]
        until_ms = clock.now_ms + 100 * unit

        def pin_all(tenant: int) -> int:
            pinned = 0
            for number in range(16):
                store.put(b"%02d" % number, b"x" * 1000, tenant)
                try:
                    pinned += store.pin(b"%02d" % number, until_ms, tenant)
                except PinShareError:
                    continue
            return pinned

        bytes_max = 4 * self.cost(b"00", 1000)
        assert pin_all(tenants[0]) == 4 and store.statistics(tenants[0]).pinned_keys == 4
        assert store.statistics(tenants[0]).pinned_bytes == bytes_max
        for number in range(40):  # pins of one tenant do not block a SET of another
            store.put(b"%d" % (100 + number), b"x" * 1000, tenants[1])
        assert pin_all(tenants[1]) == 4
        assert pin_all(tenants[2]) == 0  # all together have half
        assert store.statistics().pinned_bytes == 2 * bytes_max
        assert sorted(store.call(store.store.pinning_tenants, 9)) == tenants[:2]
        assert store.call(store.store.pinned, tenants[1]) == (4, bytes_max, bytes_max)
        assert store.call(store.store.unpin_some, tenants[0]) == 4 and pin_all(tenants[2]) == 4
        clock.now_ms += 200 * unit
        until_ms = clock.now_ms + 100 * unit
        assert pin_all(tenants[0]) == 4
        assert store.call(store.store.unpin_some, None) == 4 and store.statistics().pinned_keys == 0

    def test_pins_count_against_the_share_of_a_quota(self) -> None:
        clock = Clock()
        store = self.drive(100 * self.cost(b"0", 1000), clock)
        one = store.tenant("one")
        store.call(store.store.set_pin_shares, 0.5, 1.0)
        store.call(store.store.set_quota, one, 4 * self.cost(b"0", 1000), None)
        store.put_each(range(4), b"x" * 1000, one)
        assert store.pin(b"0", clock.now_ms + 10**6, one) and store.pin(b"1", clock.now_ms + 10**6, one)
        with pytest.raises(PinShareError):
            store.pin(b"2", clock.now_ms + 10**6, one)
        assert store.pin(b"0", clock.now_ms + 2 * 10**6, one)  # which it has already
        store.put(b"0", b"new", one)  # a pin ends with the old value
        assert store.pin(b"2", clock.now_ms + 10**6, one)
        for number in range(10):
            store.put(b"%d" % (10 + number), b"x" * 1000, one)
        assert {b"1", b"2"} < store.keys(one)

    def test_a_pin_of_the_last_chunk_does_not_pin_the_chain(self) -> None:
        clock = Clock()
        names = [bytes([number + 1]) * 32 for number in range(8)]
        keys = [storage_key(name) for name in names]
        store = self.drive(8 * self.cost(keys[0], 1000), clock)
        store.call(store.store.set_pin_shares, 0.25, 0.5)
        for number, key in enumerate(keys):
            store.put(key, b"x" * 1000, parent=names[number - 1] if number else b"")
        assert store.pin(keys[7], clock.now_ms + 10**6)
        other = store.tenant("other")
        store.put_each(range(20), b"x" * 1000, other)
        assert store.peek(keys[7]) is not None and len(store.keys(other)) >= 3

    # ---- Everything in parts

    def test_no_hold_of_the_lock_grows_with_the_number_of_entries(self) -> None:
        clock, meter, many = Clock(), WorkMeter(), self.MANY
        store = self.drive(10 * many * self.cost(b"10000", 100), clock, meter)
        one = store.tenant("one")
        tenants = [store.tenant(f"t{number}") for number in range(1_000)]
        longest: dict[str, int] = {}

        def measure(what: str, function: Callable[..., Any], *arguments: Any) -> None:
            meter.begin()
            function(*arguments)
            longest[what] = meter.end()

        def until(condition: Callable[[], bool]) -> None:
            drive(store.store.poll, condition)

        self.fill(store, many, one)
        for tenant in tenants[: many // 4]:
            store.put_soon(b"a", b"", tenant)
        measure("flush", store.clear, one)
        measure("after flush", until, lambda: store.statistics(one).used_bytes == 0)
        self.fill(store, many, one)
        measure("statistics", lambda: [store.statistics(), store.count(one), store.statistics(one)])
        measure("scan", store.scan, 0, 100_000, one)
        until_ms = clock.now_ms + 10**7
        for number in range(0, many, 2):
            store.call(store.store.pin, (one, b"%d" % number), until_ms)
        measure("quota", store.call, store.store.set_quota, one, None, 3 * many // 4)
        measure("after quota", until, lambda: store.count(one) <= 3 * many // 4)
        measure("set", lambda: [store.put(b"%d" % number, b"", one) for number in range(many, many + 20)])
        measure("unpin", lambda: store.call(store.store.unpin_some, one))
        store.call(store.store.set_quota, one, None, None)
        until(lambda: store.call(store.store.unpin_some, None) == 0)
        used = store.statistics().used_bytes
        measure("budget", store.call, store.store.set_budget, used // 2)
        measure("after budget", until, lambda: store.statistics().used_bytes <= used // 2)
        measure("large", store.put, b"large", bytes(used // 4))
        self.fill(store, many // 2, 0, expires_at_ms=clock.now_ms + 10)
        clock.now_ms += 1_000
        measure("sweep", until, lambda: store.sweep(ENTRIES_PER_HOLD) == 0)
        measure("flush all", store.clear)
        measure("after flush all", until, lambda: store.statistics().used_bytes == 0)
        assert max(longest.values()) < WORK_MAX, longest

    def test_cleared_entries_are_absent_at_once_and_later_ones_stay(self) -> None:
        store = self.drive(10 * self.MANY * self.cost(b"10000", 100), Clock())
        one = store.tenant("one")
        self.fill(store, self.MANY, one)
        store.put(b"a", b"another's")
        with store.lock:
            store.store.clear(one)
            assert store.store.count(one) == 0 and store.store.statistics(one).keys == 0
            assert store.store.get((one, b"1")) is None and store.store.peek((one, b"7")) is None
            assert not store.store.remove((one, b"2")) and not store.store.pin((one, b"3"), 1)
            cursor, keys = store.store.scan(one, 0, 1000)
            while cursor:
                cursor, more = store.store.scan(one, cursor, 1000)
                keys += more
            assert keys == []
        for number in range(4, 8):
            store.put(b"%d" % number, b"new", one, parent=b"p" * 32)
        store.clear(999)
        assert store.count(one) == 4 and store.keys(one) == {b"4", b"5", b"6", b"7"}
        store.pump(lambda: store.statistics(one).used_bytes <= 4 * self.cost(b"4", 3))
        assert store.count(one) == 4 and store.value(b"5", tenant=one) == b"new"
        with store.lock:
            store.store.clear(one)
            store.store.clear(None)
        assert store.count() == store.count(one) == 0 == store.statistics().keys
        store.pump(lambda: store.statistics().used_bytes == 0)

    def test_a_cursor_reveals_nothing_about_other_tenants(self) -> None:
        store = self.drive(1 << 24, Clock())
        one, two = (store.tenant(name) for name in ("one", "two"))

        def cursors() -> list[int]:
            for number in range(50):
                store.remove(b"%d" % number, one)
            for number in range(50):
                store.put_soon(b"%d" % number, b"x", one)
            found: list[int] = []
            while True:
                cursor, keys = store.scan(found[-1] if found else 0, 7, one)
                if not cursor:
                    return found
                assert len(keys) == 7
                found.append(cursor)

        first, second = cursors(), cursors()
        for number in range(100):
            store.put_soon(b"%d" % number, b"x", two)
        third = cursors()
        moved = [after - before for before, after in zip(first, second, strict=True)]
        assert [after - before for before, after in zip(second, third, strict=True)] == moved

    def test_ranges_of_a_value_are_read(self) -> None:
        store = self.drive(1 << 24, Clock())
        value = bytes(range(251)) * 1200  # several units of checksums, and no multiple of anything
        store.put(b"a", value)
        size = len(value)
        for start, end in ((0, size), (0, 1), (size - 1, size), (65_535, 65_537), (70_000, 200_001), (5, 5)):
            assert store.value(b"a", start, end) == value[start:end]

    def test_overwriting_or_removing_an_entry_does_not_change_reads_in_progress(self) -> None:
        store = self.drive(1 << 24, Clock())
        for change in ("evict", "put", "remove", "clear"):
            store.put(b"a", b"old" * 50_000)
            readings = [store.open(b"a", start, start + 100_000) for start in (0, 10_000, 50_000)]
            later = None
            if change == "put":
                later = store.put_soon(b"a", b"new" * 50_000)
            elif change == "remove":
                store.call(store.store.remove, (0, b"a"))
            elif change == "clear":
                store.call(store.store.clear, None)
            else:
                store.call(store.store.set_budget, 1000)
                store.call(store.store.set_budget, 1 << 24)
            for reading, start in zip(readings, (0, 10_000, 50_000), strict=True):
                assert reading.wait() == (b"old" * 50_000)[start : start + 100_000]
                reading.release()
            assert later is None or later.wait() is None
            store.settle(store.call(store.store.barrier))
            if change != "evict":  # what is in memory and being sent may stay
                assert store.value(b"a") == (b"new" * 50_000 if change == "put" else None)

    def test_many_concurrent_writes_become_durable(self) -> None:
        store = self.drive(1 << 28, Clock())
        changes = [store.put_soon(b"%d" % number, b"v" * (1 << 20)) for number in range(100)]
        assert [change.wait() for change in changes] == [None] * 100
        for number in range(100):
            assert store.call(store.store.settling, (0, b"%d" % number)) is None
            assert store.value(b"%d" % number, 10, 20) == b"v" * 10

    def test_the_budget_can_be_changed_at_any_time(self) -> None:
        store = self.drive(10 * self.cost(b"a", 1000), Clock())
        store.put_each(range(10), b"x" * 1000)
        store.call(store.store.set_budget, 4 * self.cost(b"a", 1000))
        assert store.keys() == {b"6", b"7", b"8", b"9"}
        assert store.statistics().budget_bytes == 4 * self.cost(b"a", 1000)
        store.call(store.store.set_budget, 6 * self.cost(b"a", 1000))
        store.put_each(range(3), b"x" * 900, name=b"new")
        assert store.count() == 6

    def test_buffers_are_stored_or_discarded(self) -> None:
        store = self.drive(1 << 24, Clock())
        for size in (0, 100, 40_000, 3 << 20):
            buffer = store.call(store.store.allocate, size, lambda: None)
            assert len(buffer) == size
            buffer[:] = b"v" * size
            store.put(b"a", buffer)
            store.call(store.store.discard, buffer)
            assert store.value(b"a") == b"v" * size
            other = store.call(store.store.allocate, size, lambda: None)
            store.call(store.store.discard, other)

    def test_any_sequence_of_calls_agrees_with_a_dictionary(self) -> None:
        class Machine(StoreMachine):
            suite = self

        test = Machine.TestCase
        test.settings = settings(max_examples=30, stateful_step_count=40)
        test("runTest").debug()


KEYS = st.sampled_from([b"a", b"b", b"c", b"dd", b"eee", b"ffff"])


class StoreMachine(RuleBasedStateMachine):
    """Random calls against a model: present values are right and within the budget; absent ones have a reason."""

    suite: StoreConformance

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.budget_bytes = 4 * self.suite.cost(b"a", 500)
        self.store = Driver(self.suite.make(self.budget_bytes, self.clock))
        self.model: dict[bytes, tuple[bytes, int | None]] = {}
        self.held: list[tuple[Reading, bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for reading, _ in self.held:
                reading.release()
            self.store.stop()

    @rule(key=KEYS, size=st.integers(0, 2500), ttl=st.none() | st.integers(1, 100))
    def put(self, key: bytes, size: int, ttl: int | None) -> None:
        value = (key * size)[:size]
        expires = None if ttl is None else self.clock.now_ms + ttl
        try:
            self.store.put(key, value, expires_at_ms=expires)
        except OutOfBudgetError:
            assert self.suite.cost(key, size) > self.budget_bytes or self.held
            return
        self.model[key] = (value, expires)

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        item = self.store.get(key)
        if item is not None:
            value, expires = self.model[key]
            assert item.length == len(value)
            assert item.expires_at_ms == expires and (expires is None or expires > self.clock.now_ms)

    @rule(key=KEYS)
    def read(self, key: bytes) -> None:
        reading = self.store.open(key)
        if reading is not None:
            value = self.model[key][0]
            if len(self.held) < 2:
                self.held.append((reading, value))
            else:
                assert reading.wait() == value
                reading.release()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        reading, value = self.held.pop(0)
        assert reading.wait() == value
        reading.release()

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if self.store.remove(key):
            assert key in self.model
        self.model.pop(key, None)

    @rule(key=KEYS, ttl=st.none() | st.integers(-5, 100))
    def expire(self, key: bytes, ttl: int | None) -> None:
        expires = None if ttl is None else self.clock.now_ms + ttl
        if self.store.set_expiry(key, expires):
            self.model[key] = (self.model[key][0], expires)

    @rule(step_ms=st.integers(1, 60))
    def wait(self, step_ms: int) -> None:
        self.clock.now_ms += step_ms

    @rule()
    def sweep(self) -> None:
        while self.store.sweep(3):
            pass
        assert all(expires is None or expires > self.clock.now_ms
                   for key, (_, expires) in self.model.items() if self.store.peek(key))  # fmt: skip

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()
        assert self.store.count() == 0

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        _, keys = self.store.scan(0, 100)
        statistics = self.store.statistics()
        live = sum(self.suite.cost(key, len(self.model[key][0])) for key in keys)
        assert statistics.used_bytes == live + statistics.held_bytes
        assert statistics.used_bytes <= self.budget_bytes and statistics.keys == len(keys) == self.store.count()
        if not self.held:
            assert statistics.held_bytes == 0
