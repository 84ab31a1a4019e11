"""The engine that keeps values in memory."""

import subprocess
import sys
from collections.abc import Callable

from engine_conformance import Clock, EngineConformance
from machine import NEVER_S

from storage_kv.buffers import MAPPED_BYTES_MIN, allocate
from storage_kv.engine import ENTRY_OVERHEAD_BYTES, Engine, MemoryEngine


class TestMemoryEngine(EngineConformance):
    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        return MemoryEngine(budget_bytes, clock_ms)


MEASURE = """
import os
from storage_kv.engine import MemoryEngine
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
engine = MemoryEngine(1 << 40)
before = resident()
expiry = 1 << 50
for number in range(COUNT):
    engine.put(b"key%09d" % number, b"v" * 100 + b"%d" % number, expires_at_ms=expiry + number)
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
    engine.put(b"a", b"1")
    clock.now_ms = -1
    assert engine.get(b"a") is not None
