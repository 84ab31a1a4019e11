"""How fast a tenant's clients may go: token buckets that go into debt.

A command is executed first and charged after: what it moves is known only then. A bucket below zero makes the client
wait until the debt is earned back. Nothing is queued here: the client's connection is not read, so that its own
buffers fill and it waits. A tenant's clients share its buckets.
"""

from math import inf
from typing import Final

from storage_kv.config import TenantLimits

_BURST_S: Final = 1.0
"""What may be saved up, in seconds of the rate."""


class RateLimiter:
    """The buckets of one tenant; used with the node's lock held.

    Attributes:
        limits: whether there are any.
        bytes_per_s: what its clients may move together; infinite for no limit.
        commands: that were charged.
        moved_bytes: that were charged, received and sent.
        throttled: how often a client had to wait.
    """

    __slots__ = ("_buckets", "_filled_s", "bytes_per_s", "commands", "limits", "moved_bytes", "throttled")

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        """Make full buckets.

        Args:
            limits: of the tenant.
            now_s: by the clock that all calls use.
        """
        rates = (limits.commands_per_s, limits.bytes_per_s)
        self._buckets = [[float(rate), rate * _BURST_S] if rate else None for rate in rates]
        self._filled_s = now_s
        self.bytes_per_s = float(limits.bytes_per_s or inf)
        self.limits = any(self._buckets)
        self.commands = self.moved_bytes = self.throttled = 0

    def charge(self, commands: int, moved_bytes: int) -> None:
        """Take what has been used, perhaps more than there is."""
        self.commands += commands
        self.moved_bytes += moved_bytes
        for bucket, used in zip(self._buckets, (commands, moved_bytes), strict=True):
            if bucket is not None:
                bucket[1] -= used

    def wait_s(self, now_s: float) -> float:
        """Return how many seconds it takes until all debts are earned back; 0.0 without any."""
        elapsed_s, self._filled_s = max(0.0, now_s - self._filled_s), now_s
        wait_s = 0.0
        for bucket in self._buckets:
            if bucket is not None:
                rate, tokens = bucket
                bucket[1] = tokens = min(tokens + rate * elapsed_s, rate * _BURST_S)
                wait_s = max(wait_s, -tokens / rate)
        return wait_s
