"""The memory overhead of a pool without devices."""

import subprocess
import sys

from machine import NEVER_S

from shadowserve.pool.types import ENTRY_OVERHEAD_BYTES

MEASURE = """
import os
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.memory_pool import MemoryPool
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
engine = MemoryPool.open(PoolConfig(memory_budget_bytes=1000 * COUNT))
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
