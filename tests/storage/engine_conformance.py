"""What every engine must do. A test module of an engine derives from EngineConformance and says how to make one."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
from engine_driver import Clock, Driver, Reading
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage_kv.engine import TENANT_BYTES, Engine, OutOfBudgetError
from storage_kv.memory_engine import ENTRY_OVERHEAD_BYTES


def cost(key: bytes, size: int) -> int:
    return TENANT_BYTES + len(key) + size + ENTRY_OVERHEAD_BYTES


class EngineConformance(ABC):
    """The suite. Budgets are given in bytes; engines may need no more than :func:`cost` for an entry."""

    @abstractmethod
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        """Return an empty engine."""

    def drive(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Driver:
        return Driver(self.make(budget_bytes, clock_ms))

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
        engine = self.drive(3 * cost(b"a", 100), Clock())
        for key in (b"a", b"b", b"c"):
            engine.put(key, b"x" * 100)
        assert engine.get(b"a") is not None  # b is the oldest now
        assert engine.peek(b"b") is not None  # and looking without using does not change that
        engine.put(b"d", b"x" * 100)
        assert engine.peek(b"b") is None
        assert all(engine.peek(key) is not None for key in (b"a", b"c", b"d"))
        statistics = engine.statistics()
        assert statistics.evicted_keys == 1 and statistics.evicted_bytes == 103

    def test_a_large_value_evicts_as_many_as_it_needs(self) -> None:
        engine = self.drive(4 * cost(b"a", 1000), Clock())
        for key in (b"a", b"b", b"c", b"d"):
            engine.put(key, b"x" * 1000)
        engine.put(b"e", b"y" * 1800)  # one is not enough, two are
        assert [key for key in (b"a", b"b", b"c", b"d") if engine.peek(key)] == [b"c", b"d"]
        assert engine.value(b"e") == b"y" * 1800
        assert engine.statistics().used_bytes <= 4 * cost(b"a", 1000)

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
        engine = self.drive(cost(b"a", 1000), Clock())
        for size in (1000, 10, 1000, 0, 1000):
            engine.put(b"a", b"x" * size)
            assert engine.statistics().used_bytes == cost(b"a", size)
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
            engine.set_expiry(b"a", clock.now_ms + 10 + number)
        clock.now_ms += 20_000
        swept = 0
        while count := engine.sweep(1000):
            swept += count
        assert engine.count() == 0 and swept < 1000

    def test_scanning_returns_each_key_that_stays_exactly_once(self) -> None:
        engine = self.drive(1 << 24, Clock())
        for number in range(1000):
            engine.put(b"stays%d" % number, b"1")
            engine.put(b"goes%d" % number, b"1")
        found: list[bytes] = []
        cursor, step = 0, 0
        while True:
            cursor, keys = engine.scan(cursor, 17)
            found += keys
            if cursor == 0:
                break
            for number in range(step * 20, step * 20 + 20):  # everything changes while the scan goes on
                engine.remove(b"goes%d" % number)
                engine.get(b"stays%d" % number)
                engine.put(b"stays%d" % (number * 7 % 1000), b"2")
            engine.put(b"comes%d" % step, b"1")
            step += 1
        stays = [key for key in found if key.startswith(b"stays")]
        assert sorted(stays) == sorted(b"stays%d" % number for number in range(1000))
        assert len(set(found)) == len(found)

    def test_scanning_an_empty_engine_or_with_an_old_cursor_ends(self) -> None:
        engine = self.drive(1 << 20, Clock())
        assert engine.scan(0, 10) == (0, [])
        assert engine.scan(1 << 63, 10) == (0, [])

    def test_a_value_being_read_stays_valid_after_it_is_removed(self) -> None:
        engine = self.drive(10 * cost(b"a", 1000), Clock())
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
        assert engine.statistics().used_bytes == cost(b"a", 1000)

    def test_records_are_counted(self) -> None:
        engine = self.drive(1 << 20, Clock())
        engine.put(b"a", b"x" * 100, head_bytes=10)
        engine.put(b"b", b"x" * 100)
        item = engine.peek(b"a")
        assert item is not None and item.head_bytes == 10
        assert (engine.statistics().records, engine.statistics().record_bytes) == (1, 100)
        engine.put(b"a", b"plain")
        assert (engine.statistics().records, engine.statistics().record_bytes) == (0, 0)

    def test_any_sequence_of_calls_agrees_with_a_dictionary(self) -> None:
        make = self.make

        class Machine(EngineMachine):
            def create(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
                return make(budget_bytes, clock_ms)

        test = Machine.TestCase  # type: ignore[attr-defined]
        test.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
        test("runTest").debug()


KEYS = st.sampled_from([b"a", b"b", b"c", b"dd", b"eee", b"ffff"])
BUDGET = 4 * cost(b"a", 500)


class EngineMachine(RuleBasedStateMachine):
    """Random calls against a model: what is there must be right, within the budget; what is gone must have a reason."""

    def create(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        """Return the engine to try."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.engine = Driver(self.create(BUDGET, self.clock))
        self.model: dict[bytes, tuple[bytes, int | None]] = {}
        self.held: list[tuple[Reading, bytes]] = []

    @rule(key=KEYS, size=st.integers(0, 2500), ttl=st.none() | st.integers(1, 100))
    def put(self, key: bytes, size: int, ttl: int | None) -> None:
        value = (key * size)[:size]
        expires = None if ttl is None else self.clock.now_ms + ttl
        try:
            self.engine.put(key, value, expires_at_ms=expires)
        except OutOfBudgetError:
            assert cost(key, size) > BUDGET or self.held
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
        live = sum(cost(key, len(self.model[key][0])) for key in keys)
        assert statistics.used_bytes == live + statistics.held_bytes
        assert statistics.used_bytes <= BUDGET and statistics.keys == len(keys) == self.engine.count()
        if not self.held:
            assert statistics.held_bytes == 0
