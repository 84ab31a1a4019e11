"""The time of day."""

import time

__all__ = ["wall_clock_ms"]


def wall_clock_ms() -> int:
    """Return Unix time in milliseconds: what expiry times are in, because clients may give them so (EXAT)."""
    return time.time_ns() // 1_000_000
