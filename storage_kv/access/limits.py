"""Rate limits of a tenant: token buckets that may go into debt, shared by its clients.

A command is charged after its execution, when its bytes are known. While a bucket is below zero the tenant's clients
wait. Nothing is queued: their connections are not read, so their own buffers fill.
"""

from math import inf
from typing import Final

from storage_kv.config import TenantLimits

_BURST_S: Final = 1.0  # size of a bucket, in seconds of its rate


class RateLimiter:
    """The buckets of one tenant. Needs the node's lock."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        """Create full buckets; ``now_s`` is of the clock that all calls use."""
        rates = (limits.commands_per_s, limits.bytes_per_s)
        self._buckets = [[float(rate), rate * _BURST_S] if rate else None for rate in rates]
        self._filled_s = now_s
        self.bytes_per_s = float(limits.bytes_per_s or inf)  # byte rate of all its clients; infinite for no limit
        self.has_limits = any(self._buckets)
        self.commands = 0  # number of charged commands
        self.moved_bytes = 0  # number of charged bytes, received and sent
        self.throttled = 0  # number of times that a client had to wait

    def charge(self, commands: int, moved_bytes: int) -> None:
        self.commands += commands
        self.moved_bytes += moved_bytes
        for bucket, used in zip(self._buckets, (commands, moved_bytes), strict=True):
            if bucket is not None:
                bucket[1] -= used

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until no bucket is below zero; 0.0 for none."""
        elapsed_s, self._filled_s = max(0.0, now_s - self._filled_s), now_s
        wait_s = 0.0
        for bucket in self._buckets:
            if bucket is not None:
                rate, tokens = bucket
                bucket[1] = tokens = min(tokens + rate * elapsed_s, rate * _BURST_S)
                wait_s = max(wait_s, -tokens / rate)
        return wait_s
