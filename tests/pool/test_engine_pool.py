"""A pool does what every store must: over memory alone, over a simulated device and over a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_conformance import EngineConformance
from engine_driver import Clock
from pool_support import configuration, file_pool, simulated_pool
from simulated_device import SimulatedDevice

from shadowserve.pool.arena import BLOCK_BYTES, object_blocks
from shadowserve.pool.contract import Engine
from shadowserve.pool.engine import PoolEngine
from shadowserve.pool.volume.changes import OutOfBudgetError

MIB = 1 << 20
DEVICE_BYTES = 160 * MIB


class DeviceConformance(EngineConformance):
    """Objects lie in whole blocks."""

    def cost(self, key: bytes, size: int) -> int:
        return object_blocks(size) * BLOCK_BYTES


class TestPoolOfMemory(EngineConformance):
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        config = configuration(memory_budget_bytes=DEVICE_BYTES)
        return PoolEngine(config, budget_bytes=budget_bytes, clock_ms=clock_ms, measure=False)

    def test_a_held_value_stays_valid_and_counted_after_it_is_removed(self) -> None:
        engine = self.drive(10 * self.cost(b"a", 1000), Clock())
        engine.put(b"a", b"x" * 1000)
        first, second = engine.open(b"a"), engine.open(b"a")
        assert first is not None and second is not None
        engine.remove(b"a")
        engine.put(b"a", b"y" * 1000)
        assert engine.statistics().held_bytes == self.cost(b"a", 1000)
        assert engine.statistics().used_bytes == 2 * self.cost(b"a", 1000)
        first.release()
        assert engine.statistics().held_bytes == self.cost(b"a", 1000)
        second.release()
        assert engine.statistics().held_bytes == 0
        assert engine.statistics().used_bytes == self.cost(b"a", 1000)

    def test_held_values_are_not_evicted_since_that_would_free_nothing(self) -> None:
        engine = self.drive(2 * self.cost(b"a", 1000), Clock())
        engine.put(b"a", b"x" * 1000)
        engine.put(b"b", b"x" * 1000)
        first = engine.open(b"a")
        assert first is not None
        engine.put(b"c", b"x" * 1000)
        assert engine.keys() == {b"a", b"c"}
        second = engine.open(b"c")
        assert second is not None
        before = engine.statistics()
        with pytest.raises(OutOfBudgetError):
            engine.put(b"d", b"x" * 1000)
        assert engine.statistics() == before
        first.release()
        engine.put(b"d", b"x" * 1000)
        assert engine.keys() == {b"c", b"d"}
        second.release()

    def test_the_clock_is_read_only_where_something_expires(self) -> None:
        clock = Clock()
        engine = self.drive(1 << 20, clock)
        engine.put(b"a", b"1")
        clock.now_ms = -1
        assert engine.get(b"a") is not None


class TestPoolOfASimulatedDevice(DeviceConformance):
    # One: the index knows the order of uses of several devices' objects by the second only.
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        return simulated_pool([SimulatedDevice(DEVICE_BYTES)], budget_bytes=budget_bytes, clock_ms=clock_ms)


class TestPoolOfAFile(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.made = 0

    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        self.made += 1
        path = self.folder / str(self.made)
        return file_pool([path], DEVICE_BYTES, budget_bytes=budget_bytes, clock_ms=clock_ms)
