"""The engine that keeps values in memory."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from engine_conformance import EngineConformance
from engine_driver import Clock
from machine import NEVER_S

from shadowserve.pool.contract import Engine
from shadowserve.pool.volume.changes import OutOfBudgetError
from storage_kv.engines.buffers import MAPPED_BYTES_MIN, allocate
from storage_kv.engines.memory import ENTRY_OVERHEAD_BYTES, MemoryEngine


class TestMemoryEngine(EngineConformance):
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        return MemoryEngine(budget_bytes, clock_ms)

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


MEASURE = """
import os
from storage_kv.engines.memory import MemoryEngine
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
engine = MemoryEngine(1 << 40)
before = resident()
expiry = 1 << 50
for number in range(COUNT):
    engine.put((0, b"key%09d" % number), b"v" * 100 + b"%d" % number, expires_at_ms=expiry + number)
print((resident() - before) / COUNT - 12 - 106)
"""


def test_the_stated_overhead_of_an_entry_covers_the_measured_one() -> None:
    # 90,000 just after the tables have grown is close to the worst; expiry is in it.
    for count in (60_000, 90_000):
        program = MEASURE.replace("COUNT", str(count))
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=NEVER_S, check=True
        )
        overhead = float(done.stdout)
        assert ENTRY_OVERHEAD_BYTES / 3 < overhead <= ENTRY_OVERHEAD_BYTES, f"{overhead} bytes with {count} entries"


def test_buffers_have_their_size_and_can_be_written() -> None:
    for size in (0, 1, 4096, MAPPED_BYTES_MIN - 1, MAPPED_BYTES_MIN, MAPPED_BYTES_MIN + 1, 5 << 20):
        buffer = allocate(size)
        assert len(buffer) == size and not buffer.readonly and buffer.format == "B"
        if size:
            buffer[0] = buffer[size - 1] = 7
            assert bytes(buffer[size - 1 :]) == b"\7"


def test_clock_is_read_only_where_something_expires() -> None:
    clock = Clock()
    engine = MemoryEngine(1 << 20, clock)
    engine.put((0, b"a"), b"1")
    clock.now_ms = -1
    assert engine.get((0, b"a")) is not None
