"""What every engine must do. A test module of an engine derives from EngineConformance and says how to make one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_driver import Clock, Driver, Reading
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from work_meter import WORK_MAX, WorkMeter

from shadowserve.pool.contract import Engine
from shadowserve.pool.heap import ENTRY_OVERHEAD_BYTES
from shadowserve.pool.terms import ENTRIES_PER_HOLD, PinShareError
from shadowserve.pool.volume.changes import OutOfBudgetError


class EngineConformance(ABC):
    """The suite. Budgets are given in bytes; engines say with self.cost() what an entry needs."""

    MANY = 3_000
    """Entries of which there are enough to tell work on each of them from work on some."""
    PIN_UNIT_MS = 1000
    """How exactly the engine keeps the end of a pin."""

    def cost(self, key: bytes, size: int) -> int:
        """Return what an entry with a client's key and a value of ``size`` bytes counts for."""
        return len(key) + size + ENTRY_OVERHEAD_BYTES

    @abstractmethod
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        """Return an empty engine."""

    @pytest.fixture(autouse=True)
    def _stops(self) -> Iterator[None]:
        """Stop every engine that a test has begun to drive."""
        self.driven: list[Driver] = []
        yield
        for driver in self.driven:
            driver.stop()

    def drive(self, budget_bytes: int, clock_ms: Callable[[], int], lock: WorkMeter | None = None) -> Driver:
        self.driven.append(Driver(self.make(budget_bytes, clock_ms), lock=lock))
        return self.driven[-1]

    def fill(self, engine: Driver, count: int, tenant: int = 0, size: int = 0, **named: Any) -> None:
        """Store so many entries, and wait until all are durable."""
        changes = [engine.put_soon(b"%d" % number, b"x" * size, tenant, **named) for number in range(count)]
        assert {change.wait() for change in changes} == {None}

    def test_a_value_is_read_back_as_it_was_stored(self) -> None:
        engine = self.drive(1 << 20, Clock())
        for value in (b"", b"x", bytes(range(256)) * 40, memoryview(b"view" * 100)):
            engine.put(b"key", value)
            assert engine.value(b"key") == bytes(value)
        assert engine.value(b"other") is None and engine.peek(b"other") is None
        assert engine.count() == 1

    def test_removing_and_clearing(self) -> None:
        engine = self.drive(1 << 20, Clock())
        engine.put(b"a", b"1")
        engine.put(b"b", b"2")
        assert engine.remove(b"a") and not engine.remove(b"a")
        assert engine.value(b"a") is None and engine.value(b"b") == b"2"
        engine.clear()
        assert engine.count() == 0 and engine.value(b"b") is None
        assert engine.statistics().used_bytes == 0

    def test_the_least_recently_used_is_evicted_first(self) -> None:
        engine = self.drive(3 * self.cost(b"a", 100), Clock())
        for key in (b"a", b"b", b"c"):
            engine.put(key, b"x" * 100)
        assert engine.get(b"a") is not None  # b is the oldest now
        assert engine.peek(b"b") is not None  # and looking without using does not change that
        engine.put(b"d", b"x" * 100)
        assert engine.peek(b"b") is None
        assert all(engine.peek(key) is not None for key in (b"a", b"c", b"d"))
        statistics = engine.statistics()
        assert statistics.evicted_keys == 1 and statistics.evicted_bytes == 101
        assert statistics.evictions["quota"] == 0 and sum(statistics.evictions.values()) == 1

    def test_several_are_got_each_when_it_is_asked_for(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 20, clock)
        engine.put(b"a", b"of another tenant", engine.call(engine.engine.tenant, "other"))
        engine.put(b"b", b"bb")
        engine.put(b"c", b"ccc", expires_at_ms=clock.now_ms + 10)
        engine.put(b"d", b"dddd")
        names = (b"a", b"b", memoryview(b"c"), b"b", b"c", b"d", b"d")
        each = engine.engine.get_each(0, names)
        lengths: list[int | None] = []
        for number in range(len(names)):
            if number == 4:
                clock.now_ms += 20
            elif number == 6:
                assert engine.remove(b"d")
            item = engine.call(next, each)
            lengths.append(None if item is None else item.length)
        assert lengths == [None, 2, 3, 2, None, 4, None]

    def test_getting_several_uses_each(self) -> None:
        engine = self.drive(3 * self.cost(b"a", 100), Clock())
        for key in (b"a", b"b", b"c"):
            engine.put(key, b"x" * 100)
        assert engine.call(list, engine.engine.get_each(0, (b"a", b"c")))
        engine.put(b"d", b"x" * 100)
        assert [key for key in (b"a", b"b", b"c", b"d") if engine.peek(key) is None] == [b"b"]

    def test_a_large_value_evicts_as_many_as_it_needs(self) -> None:
        engine = self.drive(4 * self.cost(b"a", 8000), Clock())
        for key in (b"a", b"b", b"c", b"d"):
            engine.put(key, b"x" * 8000)
        engine.put(b"e", b"y" * 14400)  # one is not enough, two are
        assert [key for key in (b"a", b"b", b"c", b"d") if engine.peek(key)] == [b"c", b"d"]
        assert engine.value(b"e") == b"y" * 14400
        assert engine.statistics().used_bytes <= 4 * self.cost(b"a", 8000)

    def test_a_value_larger_than_the_budget_is_refused_and_changes_nothing(self) -> None:
        engine = self.drive(10_000, Clock())
        engine.put(b"a", b"1")
        before = engine.statistics()
        with pytest.raises(OutOfBudgetError):
            engine.put(b"b", b"x" * 10_000)
        with pytest.raises(OutOfBudgetError):
            engine.put(b"a", b"x" * 10_000)
        assert engine.statistics() == before and engine.value(b"a") == b"1"

    def test_overwriting_gives_back_what_the_old_value_used(self) -> None:
        engine = self.drive(self.cost(b"a", 1000), Clock())
        for size in (1000, 10, 1000, 0, 1000):
            engine.put(b"a", b"x" * size)
            assert engine.statistics().used_bytes == self.cost(b"a", size)
        assert engine.statistics().evicted_keys == 0

    def test_an_expired_entry_is_absent_to_everything(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 20, clock)
        for key in (b"get", b"peek", b"remove", b"scan", b"expire"):
            engine.put(key, b"1", expires_at_ms=clock.now_ms + 10)
        engine.put(b"stays", b"1")
        clock.now_ms += 9
        assert engine.get(b"get") is not None
        clock.now_ms += 1
        assert engine.get(b"get") is None
        assert engine.peek(b"peek") is None
        assert not engine.remove(b"remove")
        assert not engine.set_expiry(b"expire", None)
        assert engine.scan(0, 100) == (0, [b"stays"])
        assert engine.statistics().expired_keys == 5 and engine.count() == 1

    def test_expiry_can_be_set_changed_and_cleared(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 20, clock)
        engine.put(b"a", b"1")
        assert engine.set_expiry(b"a", clock.now_ms + 10) and engine.statistics().expiring_keys == 1
        assert engine.set_expiry(b"a", clock.now_ms + 100) and engine.statistics().expiring_keys == 1
        clock.now_ms += 50
        assert engine.set_expiry(b"a", None) and engine.statistics().expiring_keys == 0
        clock.now_ms += 1000
        assert engine.value(b"a") == b"1"
        assert engine.set_expiry(b"a", clock.now_ms) and engine.peek(b"a") is None
        assert not engine.set_expiry(b"none", None)

    def test_sweeping_finds_what_nobody_asks_for(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 22, clock)
        for number in range(100):
            engine.put(b"%d" % number, b"1", expires_at_ms=clock.now_ms + 1 + number)
        engine.put(b"0", b"stays")  # the expiry that it had is void
        clock.now_ms += 50
        assert engine.sweep(10) == 10
        while engine.sweep(10):
            pass
        assert engine.count() == 51 and engine.value(b"0") == b"stays"
        assert engine.statistics().expired_keys == 49

    def test_changing_expiry_again_and_again_takes_no_memory(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 20, clock)
        engine.put(b"a", b"1")
        for number in range(10_000):
            engine.call(engine.engine.set_expiry, (0, b"a"), clock.now_ms + 10 + number)
        clock.now_ms += 20_000
        swept = 0
        while count := engine.sweep(1000):
            swept += count
        assert engine.count() == 0 and swept < 1000

    def test_scanning_returns_each_key_that_stays_exactly_once(self) -> None:
        engine = self.drive(1 << 24, Clock())
        for number in range(300):
            engine.put_soon(b"stays%d" % number, b"1")
            engine.put_soon(b"goes%d" % number, b"1")
        found: list[bytes] = []
        cursor, step = 0, 0
        while True:
            cursor, keys = engine.scan(cursor, 17)
            found += keys
            if cursor == 0:
                break
            for number in range(step * 20, step * 20 + 20):  # everything changes while the scan goes on
                engine.call(engine.engine.remove, (0, b"goes%d" % number))
                engine.get(b"stays%d" % number)
                engine.put_soon(b"stays%d" % (number * 7 % 300), b"2")
            engine.put_soon(b"comes%d" % step, b"1")
            step += 1
        stays = [key for key in found if key.startswith(b"stays")]
        assert sorted(stays) == sorted(b"stays%d" % number for number in range(300))
        assert len(set(found)) == len(found)

    def test_scanning_an_empty_engine_or_with_an_old_cursor_ends(self) -> None:
        engine = self.drive(1 << 20, Clock())
        assert engine.scan(0, 10) == (0, [])
        assert engine.scan(1 << 63, 10) == (0, [])

    def test_a_value_being_read_stays_valid_after_it_is_removed(self) -> None:
        engine = self.drive(10 * self.cost(b"a", 1000), Clock())
        engine.put(b"a", b"x" * 1000)
        first, second = engine.open(b"a"), engine.open(b"a")
        assert first is not None and second is not None
        engine.remove(b"a")
        engine.put(b"a", b"y" * 1000)
        assert first.wait() == second.wait() == b"x" * 1000
        first.release()
        assert second.wait() == b"x" * 1000
        second.release()
        assert engine.statistics().held_bytes == 0
        assert engine.statistics().used_bytes == self.cost(b"a", 1000)

    def test_records_are_counted(self) -> None:
        engine = self.drive(1 << 20, Clock())
        engine.put(b"a", b"x" * 100, head_bytes=10)
        engine.put(b"b", b"x" * 100)
        item = engine.peek(b"a")
        assert item is not None and item.head_bytes == 10
        assert (engine.statistics().records, engine.statistics().record_bytes) == (1, 100)
        engine.put(b"a", b"plain")
        assert (engine.statistics().records, engine.statistics().record_bytes) == (0, 0)

    def test_all_tenants_can_be_named(self) -> None:
        engine = self.drive(1 << 20, Clock())
        ids = {name: engine.call(engine.engine.tenant, name) for name in ("b", "a")}
        assert dict(engine.call(engine.engine.tenants)) == {"": 0, **ids}

    def test_tenants_have_keys_of_their_own(self) -> None:
        engine = self.drive(1 << 20, Clock())
        one, two = engine.call(engine.engine.tenant, "one"), engine.call(engine.engine.tenant, "two")
        assert len({0, one, two}) == 3 and engine.call(engine.engine.tenant, "one") == one
        assert engine.call(engine.engine.tenant, "") == 0
        for tenant, value in ((0, b"none"), (one, b"first"), (two, b"second")):
            engine.put(b"a", value, tenant)
        engine.put(b"b", b"x", one, head_bytes=1)
        assert [engine.value(b"a", tenant=tenant) for tenant in (0, one, two)] == [b"none", b"first", b"second"]
        assert engine.keys(one) == {b"a", b"b"} and engine.keys(two) == {b"a"} and engine.keys(999) == set()
        assert [engine.count(tenant) for tenant in (0, one, two, 999)] == [1, 2, 1, 0]
        assert engine.statistics(one).keys == 2 and engine.statistics(one).records == 1
        assert engine.statistics().used_bytes == sum(engine.statistics(each).used_bytes for each in (0, one, two))
        assert engine.remove(b"a", two) and not engine.remove(b"b", two)
        engine.clear(one)
        assert engine.count(one) == 0 and engine.value(b"a") == b"none" and engine.statistics(one).used_bytes == 0

    def test_a_tenant_beyond_its_quota_evicts_its_own_only(self) -> None:
        engine = self.drive(100 * self.cost(b"a", 1000), Clock())
        one = engine.call(engine.engine.tenant, "one")
        engine.put(b"a", b"x" * 1000)
        engine.call(engine.engine.set_quota, one, 3 * self.cost(b"a", 1000), None)
        for key in (b"a", b"b", b"c", b"d"):
            engine.put(key, b"x" * 1000, one)
        assert engine.keys(one) == {b"b", b"c", b"d"} and engine.keys() == {b"a"}
        assert engine.statistics(one).budget_bytes == 3 * self.cost(b"a", 1000)
        with pytest.raises(OutOfBudgetError):
            engine.put(b"a", b"x" * 20_000, one)
        assert engine.keys(one) == {b"b", b"c", b"d"}
        engine.call(engine.engine.set_quota, one, None, 2)
        assert engine.keys(one) == {b"c", b"d"}
        engine.put(b"c", b"new", one)  # in place of one that is there
        engine.put(b"e", b"x", one)
        assert engine.keys(one) == {b"c", b"e"} and engine.keys() == {b"a"}
        assert engine.statistics(one).evicted_keys == 3 and engine.statistics(0).evicted_keys == 0
        assert {cause: count for cause, count in engine.statistics().evictions.items() if count} == {"quota": 3}

    def test_beyond_the_budget_whoever_has_most_gives_first(self) -> None:
        engine = self.drive(6 * self.cost(b"a", 1000), Clock())
        one = engine.call(engine.engine.tenant, "one")
        engine.put(b"old", b"x" * 900)
        for key in (b"a", b"b", b"c", b"d", b"e"):
            engine.put(key, b"x" * 1000, one)
        engine.put(b"new", b"x" * 900)  # tenant 0 has the oldest, and less than its share
        assert engine.keys() == {b"old", b"new"} and engine.keys(one) == {b"b", b"c", b"d", b"e"}
        engine.put(b"f", b"x" * 1000, one)
        assert engine.keys() == {b"old", b"new"} and engine.keys(one) == {b"c", b"d", b"e", b"f"}

    def test_a_pinned_entry_stays_until_its_pin_ends(self) -> None:
        clock, unit = Clock(), self.PIN_UNIT_MS
        engine = self.drive(2 * self.cost(b"a", 1000), clock)
        engine.put(b"a", b"x" * 1000)
        engine.put(b"b", b"x" * 1000)
        assert engine.pin(b"a", clock.now_ms + 100 * unit) and not engine.pin(b"none", clock.now_ms + 100 * unit)
        assert engine.statistics().pinned_keys == 1
        engine.put(b"c", b"x" * 1000)
        assert engine.keys() == {b"a", b"c"}
        assert engine.pin(b"c", clock.now_ms + 50 * unit)
        with pytest.raises(OutOfBudgetError):
            engine.put(b"d", b"x" * 1000)
        assert engine.keys() == {b"a", b"c"}
        clock.now_ms += 60 * unit
        engine.put(b"d", b"x" * 1000)
        assert engine.keys() == {b"a", b"d"}
        assert engine.pin(b"a", 0)
        engine.put(b"e", b"x" * 1000)  # which of the two goes is the policy's business
        assert b"e" in engine.keys() and engine.count() == 2
        assert engine.pin(b"e", clock.now_ms + 100 * unit) and engine.remove(b"e")  # a pin is no lock
        assert engine.statistics().pinned_keys == 0

    def test_a_chunk_never_goes_before_its_descendants(self) -> None:
        names = [bytes([number + 1]) * 32 for number in range(6)]
        keys = [b"kv:" + name.hex().encode() for name in names]
        engine = self.drive(4 * self.cost(keys[0], 1000), Clock())

        def put(number: int, parent: int | None) -> None:
            engine.put(keys[number], b"x" * 1000, parent=b"" if parent is None else names[parent])

        put(0, None)
        put(1, 0)
        put(2, 1)
        put(3, 0)
        for number in (2, 1, 3):  # the root is what was used least
            engine.get(keys[number])
        put(4, None)
        # Which leaf goes is the policy's business: the one used least, or one below what was used least.
        assert engine.count() == 4 and {keys[0], keys[1], keys[4]} < engine.keys()
        put(5, None)
        assert engine.count() == 4 and {keys[0], keys[4], keys[5]} < engine.keys()
        engine.get(keys[4])
        engine.put(b"large", b"x" * 2100)  # the last child, and then its parent, which has none left
        assert engine.keys().isdisjoint({keys[1], keys[2], keys[3]})
        engine.remove(keys[0])
        assert engine.value(keys[4]) is not None

    def test_chunks_that_name_each_other_as_parents_can_go(self) -> None:
        names = [bytes([number + 1]) * 32 for number in range(3)]
        engine = self.drive(3 * self.cost(b"kv:" + 64 * b"a", 1000), Clock())
        for number, name in enumerate(names):
            key = b"kv:" + name.hex().encode()
            engine.put(key, b"x" * 1000, parent=names[(number + 1) % 3] if number < 2 else names[2])
        engine.put(b"kv:" + names[1].hex().encode(), b"x" * 1000, parent=names[0])
        engine.put(b"large", b"x" * (3 * self.cost(b"kv:" + 64 * b"a", 1000) - 2200))
        assert engine.keys() == {b"large"}

    # ---- One tenant's pins

    def test_a_tenant_that_pins_all_it_may_leaves_the_others_room(self) -> None:
        clock, unit = Clock(), self.PIN_UNIT_MS
        engine = self.drive(16 * self.cost(b"00", 1000), clock)
        engine.call(engine.engine.set_pin_shares, 0.25, 0.5)
        tenants = [engine.call(engine.engine.tenant, name) for name in ("one", "two", "three")]
        until_ms = clock.now_ms + 100 * unit

        def pin_all(tenant: int) -> int:
            pinned = 0
            for number in range(16):
                engine.put(b"%02d" % number, b"x" * 1000, tenant)
                try:
                    pinned += engine.pin(b"%02d" % number, until_ms, tenant)
                except PinShareError:
                    continue
            return pinned

        assert pin_all(tenants[0]) == 4 and engine.statistics(tenants[0]).pinned_keys == 4
        assert engine.statistics(tenants[0]).pinned_bytes == 4 * self.cost(b"00", 1000)
        for number in range(40):  # whatever it has pinned, a SET of another goes on
            engine.put(b"%d" % (100 + number), b"x" * 1000, tenants[1])
        assert pin_all(tenants[1]) == 4
        assert pin_all(tenants[2]) == 0  # all together have half
        assert engine.statistics().pinned_bytes == 8 * self.cost(b"00", 1000)
        assert sorted(engine.call(engine.engine.pinning_tenants, 9)) == tenants[:2]
        assert engine.call(engine.engine.pinned, tenants[1]) == (
            4,
            4 * self.cost(b"00", 1000),
            4 * self.cost(b"00", 1000),
        )
        assert engine.call(engine.engine.unpin_some, tenants[0]) == 4 and pin_all(tenants[2]) == 4
        clock.now_ms += 200 * unit
        until_ms = clock.now_ms + 100 * unit
        assert pin_all(tenants[0]) == 4
        assert engine.call(engine.engine.unpin_some, None) == 4 and engine.statistics().pinned_keys == 0

    def test_what_is_pinned_counts_against_the_share_of_a_quota(self) -> None:
        clock = Clock()
        engine = self.drive(100 * self.cost(b"0", 1000), clock)
        one = engine.call(engine.engine.tenant, "one")
        engine.call(engine.engine.set_pin_shares, 0.5, 1.0)
        engine.call(engine.engine.set_quota, one, 4 * self.cost(b"0", 1000), None)
        for number in range(4):
            engine.put(b"%d" % number, b"x" * 1000, one)
        assert engine.pin(b"0", clock.now_ms + 10**6, one) and engine.pin(b"1", clock.now_ms + 10**6, one)
        with pytest.raises(PinShareError):
            engine.pin(b"2", clock.now_ms + 10**6, one)
        assert engine.pin(b"0", clock.now_ms + 2 * 10**6, one)  # which it has already
        engine.put(b"0", b"new", one)  # a pin goes with the old value
        assert engine.pin(b"2", clock.now_ms + 10**6, one)
        for number in range(10):
            engine.put(b"%d" % (10 + number), b"x" * 1000, one)
        assert {b"1", b"2"} < engine.keys(one)

    def test_the_pin_of_the_end_of_a_chain_does_not_keep_all_of_it(self) -> None:
        clock = Clock()
        names = [bytes([number + 1]) * 32 for number in range(8)]
        keys = [b"kv:" + name.hex().encode() for name in names]
        engine = self.drive(8 * self.cost(keys[0], 1000), clock)
        engine.call(engine.engine.set_pin_shares, 0.25, 0.5)
        for number, key in enumerate(keys):
            engine.put(key, b"x" * 1000, parent=names[number - 1] if number else b"")
        assert engine.pin(keys[7], clock.now_ms + 10**6)
        other = engine.call(engine.engine.tenant, "other")
        for number in range(20):
            engine.put(b"%d" % number, b"x" * 1000, other)
        assert engine.peek(keys[7]) is not None and len(engine.keys(other)) >= 3

    # ---- Everything in parts

    def test_no_hold_of_the_lock_grows_with_what_is_stored(self) -> None:
        clock, meter, many = Clock(), WorkMeter(), self.MANY
        engine = self.drive(10 * many * self.cost(b"10000", 100), clock, meter)
        one = engine.call(engine.engine.tenant, "one")
        tenants = [engine.call(engine.engine.tenant, f"t{number}") for number in range(1_000)]
        longest: dict[str, int] = {}

        def measure(what: str, function: Callable[..., Any], *arguments: Any) -> None:
            meter.begin()
            function(*arguments)
            longest[what] = meter.end()

        def until(condition: Callable[[], bool]) -> None:
            for _ in range(100_000):  # counted, since all this work takes its time
                if condition():
                    return
                engine.engine.poll()
            raise AssertionError("it did not happen")

        self.fill(engine, many, one)
        for tenant in tenants[: many // 4]:
            engine.put_soon(b"a", b"", tenant)
        measure("flush", engine.clear, one)
        measure("after flush", until, lambda: engine.statistics(one).used_bytes == 0)
        self.fill(engine, many, one)
        measure("statistics", lambda: [engine.statistics(), engine.count(one), engine.statistics(one)])
        measure("scan", engine.scan, 0, 100_000, one)
        until_ms = clock.now_ms + 10**7
        for number in range(0, many, 2):
            engine.call(engine.engine.pin, (one, b"%d" % number), until_ms)
        measure("quota", engine.call, engine.engine.set_quota, one, None, 3 * many // 4)
        measure("after quota", until, lambda: engine.count(one) <= 3 * many // 4)
        measure("set", lambda: [engine.put(b"%d" % number, b"", one) for number in range(many, many + 20)])
        measure("unpin", lambda: engine.call(engine.engine.unpin_some, one))
        engine.call(engine.engine.set_quota, one, None, None)
        until(lambda: engine.call(engine.engine.unpin_some, None) == 0)
        used = engine.statistics().used_bytes
        measure("budget", engine.call, engine.engine.set_budget, used // 2)
        measure("after budget", until, lambda: engine.statistics().used_bytes <= used // 2)
        measure("large", engine.put, b"large", bytes(used // 4))
        self.fill(engine, many // 2, 0, expires_at_ms=clock.now_ms + 10)
        clock.now_ms += 1_000
        measure("sweep", until, lambda: engine.sweep(ENTRIES_PER_HOLD) == 0)
        measure("flush all", engine.clear)
        measure("after flush all", until, lambda: engine.statistics().used_bytes == 0)
        assert max(longest.values()) < WORK_MAX, longest

    def test_what_is_cleared_is_gone_at_once_and_what_comes_after_stays(self) -> None:
        engine = self.drive(10 * self.MANY * self.cost(b"10000", 100), Clock())
        one = engine.call(engine.engine.tenant, "one")
        self.fill(engine, self.MANY, one)
        engine.put(b"a", b"another's")
        with engine.lock:
            engine.engine.clear(one)
            assert engine.engine.count(one) == 0 and engine.engine.statistics(one).keys == 0
            assert engine.engine.get((one, b"1")) is None and engine.engine.peek((one, b"7")) is None
            assert not engine.engine.remove((one, b"2")) and not engine.engine.pin((one, b"3"), 1)
            cursor = 0
            while True:
                cursor, keys = engine.engine.scan(one, cursor, 1000)
                assert keys == []
                if cursor == 0:
                    break
        for number in range(4, 8):
            engine.put(b"%d" % number, b"new", one, parent=b"p" * 32)
        engine.clear(999)
        assert engine.count(one) == 4 and engine.keys(one) == {b"4", b"5", b"6", b"7"}
        engine.pump(lambda: engine.statistics(one).used_bytes <= 4 * self.cost(b"4", 3))
        assert engine.count(one) == 4 and engine.value(b"5", tenant=one) == b"new"
        with engine.lock:
            engine.engine.clear(one)
            engine.engine.clear(None)
        assert engine.count() == engine.count(one) == 0 == engine.statistics().keys
        engine.pump(lambda: engine.statistics().used_bytes == 0)

    def test_a_cursor_tells_nothing_of_what_others_do(self) -> None:
        engine = self.drive(1 << 24, Clock())
        one, two = (engine.call(engine.engine.tenant, name) for name in ("one", "two"))

        def cursors() -> list[int]:
            for number in range(50):
                engine.remove(b"%d" % number, one)
            for number in range(50):
                engine.put_soon(b"%d" % number, b"x", one)
            found: list[int] = []
            while True:
                cursor, keys = engine.scan(found[-1] if found else 0, 7, one)
                if not cursor:
                    return found
                assert len(keys) == 7
                found.append(cursor)

        first, second = cursors(), cursors()
        for number in range(100):
            engine.put_soon(b"%d" % number, b"x", two)
        third = cursors()
        moved = [after - before for before, after in zip(first, second, strict=True)]
        assert [after - before for before, after in zip(second, third, strict=True)] == moved

    def test_parts_of_a_value_are_read_as_they_were_stored(self) -> None:
        engine = self.drive(1 << 24, Clock())
        value = bytes(range(251)) * 1200  # several units of checksums, and no multiple of anything
        engine.put(b"a", value)
        size = len(value)
        for start, end in ((0, size), (0, 1), (size - 1, size), (65_535, 65_537), (70_000, 200_001), (5, 5)):
            assert engine.value(b"a", start, end) == value[start:end]

    def test_overwriting_or_removing_what_is_being_read_changes_nothing_of_what_is_read(self) -> None:
        engine = self.drive(1 << 24, Clock())
        for change in ("evict", "put", "remove", "clear"):
            engine.put(b"a", b"old" * 50_000)
            readings = [engine.open(b"a", start, start + 100_000) for start in (0, 10_000, 50_000)]
            later = None
            if change == "put":
                later = engine.put_soon(b"a", b"new" * 50_000)
            elif change == "remove":
                engine.call(engine.engine.remove, (0, b"a"))
            elif change == "clear":
                engine.call(engine.engine.clear, None)
            else:
                engine.call(engine.engine.set_budget, 1000)
                engine.call(engine.engine.set_budget, 1 << 24)
            for reading, start in zip(readings, (0, 10_000, 50_000), strict=True):
                assert reading is not None and reading.wait() == (b"old" * 50_000)[start : start + 100_000]
                reading.release()
            assert later is None or later.wait() is None
            engine.settle(engine.call(engine.engine.barrier))
            if change != "evict":  # what is in memory and being sent may stay
                assert engine.value(b"a") == (b"new" * 50_000 if change == "put" else None)

    def test_many_writes_at_once_are_all_durable_in_the_end(self) -> None:
        engine = self.drive(1 << 28, Clock())
        changes = [engine.put_soon(b"%d" % number, b"v" * (1 << 20)) for number in range(100)]
        assert [change.wait() for change in changes] == [None] * 100
        for number in range(100):
            assert engine.call(engine.engine.settling, (0, b"%d" % number)) is None
            assert engine.value(b"%d" % number, 10, 20) == b"v" * 10

    def test_the_budget_can_be_changed_at_any_time(self) -> None:
        engine = self.drive(10 * self.cost(b"a", 1000), Clock())
        for number in range(10):
            engine.put(b"%d" % number, b"x" * 1000)
        engine.call(engine.engine.set_budget, 4 * self.cost(b"a", 1000))
        assert engine.keys() == {b"6", b"7", b"8", b"9"}
        assert engine.statistics().budget_bytes == 4 * self.cost(b"a", 1000)
        engine.call(engine.engine.set_budget, 6 * self.cost(b"a", 1000))
        for number in range(3):
            engine.put(b"new%d" % number, b"x" * 900)
        assert engine.count() == 6

    def test_buffers_are_stored_or_given_back(self) -> None:
        engine = self.drive(1 << 24, Clock())
        for size in (0, 100, 40_000, 3 << 20):
            buffer = engine.call(engine.engine.allocate, size, lambda: None)
            assert buffer is not None and len(buffer) == size
            buffer[:] = b"v" * size
            engine.put(b"a", buffer)
            engine.call(engine.engine.discard, buffer)
            assert engine.value(b"a") == b"v" * size
            other = engine.call(engine.engine.allocate, size, lambda: None)
            assert other is not None
            engine.call(engine.engine.discard, other)

    def test_any_sequence_of_calls_agrees_with_a_dictionary(self) -> None:
        class Machine(EngineMachine):
            suite = self

        test = Machine.TestCase  # type: ignore[attr-defined]
        test.settings = settings(max_examples=30, stateful_step_count=40)
        test("runTest").debug()


KEYS = st.sampled_from([b"a", b"b", b"c", b"dd", b"eee", b"ffff"])


class EngineMachine(RuleBasedStateMachine):
    """Random calls against a model: what is there must be right, within the budget; what is gone must have a reason."""

    suite: EngineConformance

    def cost(self, key: bytes, size: int) -> int:
        return self.suite.cost(key, size)

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.budget_bytes = 4 * self.cost(b"a", 500)
        self.engine = Driver(self.suite.make(self.budget_bytes, self.clock))
        self.model: dict[bytes, tuple[bytes, int | None]] = {}
        self.held: list[tuple[Reading, bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for reading, _ in self.held:
                reading.release()
            self.engine.stop()

    @rule(key=KEYS, size=st.integers(0, 2500), ttl=st.none() | st.integers(1, 100))
    def put(self, key: bytes, size: int, ttl: int | None) -> None:
        value = (key * size)[:size]
        expires = None if ttl is None else self.clock.now_ms + ttl
        try:
            self.engine.put(key, value, expires_at_ms=expires)
        except OutOfBudgetError:
            assert self.cost(key, size) > self.budget_bytes or self.held
            return
        self.model[key] = (value, expires)

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        item = self.engine.get(key)
        if item is not None:
            value, expires = self.model[key]
            assert item.length == len(value)
            assert item.expires_at_ms == expires and (expires is None or expires > self.clock.now_ms)

    @rule(key=KEYS)
    def read(self, key: bytes) -> None:
        reading = self.engine.open(key)
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
        if self.engine.remove(key):
            assert key in self.model
        self.model.pop(key, None)

    @rule(key=KEYS, ttl=st.none() | st.integers(-5, 100))
    def expire(self, key: bytes, ttl: int | None) -> None:
        expires = None if ttl is None else self.clock.now_ms + ttl
        if self.engine.set_expiry(key, expires):
            self.model[key] = (self.model[key][0], expires)

    @rule(step_ms=st.integers(1, 60))
    def wait(self, step_ms: int) -> None:
        self.clock.now_ms += step_ms

    @rule()
    def sweep(self) -> None:
        while self.engine.sweep(3):
            pass
        assert all(expires is None or expires > self.clock.now_ms
                   for key, (_, expires) in self.model.items() if self.engine.peek(key))  # fmt: skip

    @rule()
    def clear(self) -> None:
        self.engine.clear()
        self.model.clear()
        assert self.engine.count() == 0

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        _, keys = self.engine.scan(0, 100)
        statistics = self.engine.statistics()
        live = sum(self.cost(key, len(self.model[key][0])) for key in keys)
        assert statistics.used_bytes == live + statistics.held_bytes
        assert statistics.used_bytes <= self.budget_bytes and statistics.keys == len(keys) == self.engine.count()
        if not self.held:
            assert statistics.held_bytes == 0
