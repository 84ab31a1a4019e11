"""Every kind of pool passes the conformance suite: memory only, a simulated device, a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pool_support import configuration, file_pool, simulated_pool
from simulated_device import SimulatedDevice
from store_conformance import StoreConformance
from store_driver import Clock, Driver

from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.pool import Pool
from shadowserve.pool.volume.format import BLOCK_BYTES, blocks_of
from shadowserve.pool.volume.tickets import OutOfBudgetError

MIB = 1 << 20
DEVICE_BYTES = 160 * MIB


class DeviceConformance(StoreConformance):
    """Objects occupy whole blocks."""

    def cost(self, key: bytes, size: int) -> int:
        return blocks_of(size) * BLOCK_BYTES


class TestPoolOfMemory(StoreConformance):
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Pool:
        config = configuration(memory_budget_bytes=DEVICE_BYTES)
        return MemoryPool(config, budget_bytes=budget_bytes, clock_ms=clock_ms, measure=False)

    def test_held_values_count_against_their_own_tenants_quota_only(self) -> None:
        size = self.cost(b"a", 1000)
        store = self.drive(20 * size, Clock())
        one, two = (store.tenant(name) for name in ("one", "two"))
        for tenant in (one, two):
            store.call(store.store.set_quota, tenant, 4 * size, None)
        held = []
        for _ in range(3):
            store.put(b"a", b"x" * 1000, one)
            held.append(store.open(b"a", tenant=one))
            store.remove(b"a", one)
        assert store.statistics(one).held_bytes == store.statistics(one).used_bytes == 3 * size
        store.put(b"large", b"y" * (1000 + size), two)
        store.remove(b"large", two)
        for key in (b"a", b"b", b"c", b"d"):
            store.put(key, b"y" * 1000, two)
        assert store.keys(two) == {b"a", b"b", b"c", b"d"} and store.statistics(two).held_bytes == 0
        store.put(b"a", b"z" * 1000, one)
        store.put(b"b", b"z" * 1000, one)
        assert store.keys(one) == {b"b"}
        with pytest.raises(OutOfBudgetError, match=f"{3 * size} of them held by replies"):
            store.put(b"b", b"z" * (1000 + size), one)
        for reading in held:
            reading.release()
        assert store.statistics(one).used_bytes == size and store.statistics().held_bytes == 0
        store.put(b"a", b"z" * 1000, one)
        assert store.keys(one) == {b"a", b"b"}

    def test_objects_max_reserves_index_entries_for_a_larger_budget(self) -> None:
        store = Driver(MemoryPool(configuration(memory_budget_bytes=MIB, objects_max=5_000), measure=False))
        store.call(store.store.follow, configuration(memory_budget_bytes=8 * MIB))
        store.put_each(range(5_000), b"")
        assert store.count() == 5_000 and store.statistics().evicted_keys == 0

    def test_held_values_are_not_evicted(self) -> None:
        store = self.drive(2 * self.cost(b"a", 1000), Clock())
        store.put(b"a", b"x" * 1000)
        store.put(b"b", b"x" * 1000)
        first = store.open(b"a")
        store.put(b"c", b"x" * 1000)
        assert store.keys() == {b"a", b"c"}
        second = store.open(b"c")
        before = store.statistics()
        with pytest.raises(OutOfBudgetError):
            store.put(b"d", b"x" * 1000)
        assert store.statistics() == before
        first.release()
        store.put(b"d", b"x" * 1000)
        assert store.keys() == {b"c", b"d"}
        second.release()

    def test_reads_without_an_expiry_do_not_read_the_clock(self) -> None:
        clock = Clock()
        store = self.drive(1 << 20, clock)
        store.put(b"a", b"1")
        clock.now_ms = -1
        assert store.get(b"a") is not None


class TestPoolOfASimulatedDevice(DeviceConformance):
    # One device: for objects of several devices, the index orders uses by the second only.
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Pool:
        return simulated_pool([SimulatedDevice(DEVICE_BYTES)], budget_bytes=budget_bytes, clock_ms=clock_ms)


class TestPoolOfAFile(DeviceConformance):
    test_no_hold_of_the_lock_grows_with_the_number_of_entries = None  # the same code

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.made = 0

    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Pool:
        self.made += 1
        path = self.folder / str(self.made)
        return file_pool([path], DEVICE_BYTES, budget_bytes=budget_bytes, clock_ms=clock_ms)
