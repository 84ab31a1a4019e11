"""Wall clock."""

import time


def wall_clock_ms() -> int:
    """Return Unix time in milliseconds, the unit of expiry times."""
    return time.time_ns() // 1_000_000
