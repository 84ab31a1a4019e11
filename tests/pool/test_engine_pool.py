"""The pool does what every engine must, over memory alone, over a simulated device and over a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_conformance import EngineConformance
from pool_support import configuration, file_pool, simulated_pool
from simulated_device import SimulatedDevice

from shadowserve.pool.arena import BLOCK_BYTES, object_blocks
from shadowserve.pool.contract import Engine
from shadowserve.pool.engine import PoolEngine

MIB = 1 << 20
DEVICE_BYTES = 160 * MIB


class PoolConformance(EngineConformance):
    """Objects lie in whole blocks, and the index counts pins in seconds."""

    PIN_UNIT_MS = 1000

    def cost(self, key: bytes, size: int) -> int:
        return object_blocks(size) * BLOCK_BYTES


class TestPoolOfMemory(PoolConformance):
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        config = configuration(memory_budget_bytes=DEVICE_BYTES)
        return PoolEngine(config, budget_bytes=budget_bytes, clock_ms=clock_ms, measure=False)


class TestPoolOfASimulatedDevice(PoolConformance):
    # One: the index knows the order of uses of several devices' objects by the second only.
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        return simulated_pool([SimulatedDevice(DEVICE_BYTES)], budget_bytes=budget_bytes, clock_ms=clock_ms)


class TestPoolOfAFile(PoolConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.made = 0

    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        self.made += 1
        path = self.folder / str(self.made)
        return file_pool([path], DEVICE_BYTES, budget_bytes=budget_bytes, clock_ms=clock_ms)
