"""Bandwidths of the devices, and the share of the objects that each gets.

The paper's equation 1: a device of bandwidth b gets the share b / sum of all b. Short reads of the device measure it at
the start, clients' reads after that, while it is busy: a single read shows its latency, not how many fit in parallel.
"""

from collections.abc import Sequence
from typing import Final

BUSY_DEPTH: Final = 4
"""Reads in progress that make a device busy: enough to hide one behind the other on any SSD."""
_WINDOW_BYTES: Final = 64 << 20
"""Bytes of one sample: tens of milliseconds of an SSD, longer than the bursts of throttling and of its cache."""
_WEIGHT: Final = 0.2
"""Weight of a new sample in the average: after three samples, half of a change has arrived."""
_CHANGE_MIN: Final = 0.05
"""Relative change of a bandwidth that changes the shares. Measurements of one device differ by as much."""


class BandwidthMeter:
    """Rate of one device while it is busy, from the times of its reads."""

    __slots__ = ("_busy_ns", "_busy_until_ns", "_bytes", "bytes_per_s", "fixed", "samples")

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.fixed = bytes_per_s is not None  # the rate is configured and never changes
        self.bytes_per_s = bytes_per_s or 0.0  # decaying average; 0 before the first sample
        self.samples = 0  # number of samples in it
        self._bytes = 0
        self._busy_ns = 0
        self._busy_until_ns = 0

    def note(self, length: int, begin_ns: int, end_ns: int, depth: int) -> None:
        """Count a read of ``length`` bytes that began as one of ``depth`` reads in progress."""
        if self.fixed:
            return
        begins_ns = max(begin_ns, self._busy_until_ns)
        self._busy_until_ns = max(end_ns, self._busy_until_ns)
        if depth < BUSY_DEPTH:
            return
        self._bytes += length
        self._busy_ns += max(end_ns - begins_ns, 0)
        if self._bytes >= _WINDOW_BYTES and self._busy_ns > 0:
            self.sample(self._bytes / self._busy_ns * 1e9)
            self._bytes = self._busy_ns = 0

    def sample(self, bytes_per_s: float) -> None:
        if self.fixed:
            return
        weight = _WEIGHT if self.samples else 1.0
        self.bytes_per_s += weight * (bytes_per_s - self.bytes_per_s)
        self.samples += 1


class BandwidthShares:
    """Computes shares from bandwidths.

    Attributes:
        shares: Shares of the devices, with the sum 1; equal while no bandwidth is known.
    """

    def __init__(self, meters: Sequence[BandwidthMeter]) -> None:
        self.meters = list(meters)
        self._decide()

    def update(self) -> bool:
        """Compute the shares again if a bandwidth has changed enough; return whether it has."""
        for meter, old in zip(self.meters, self._bandwidths, strict=True):
            if abs(meter.bytes_per_s - old) > _CHANGE_MIN * old:
                self._decide()
                return True
        return False

    def _decide(self) -> None:
        self._bandwidths = [meter.bytes_per_s for meter in self.meters]
        known = [value for value in self._bandwidths if value > 0]
        # An unmeasured device counts as the slowest known one: it is used, and thus measured.
        assumed = [value or (min(known) if known else 1.0) for value in self._bandwidths]
        total = sum(assumed)
        self.shares = [value / total for value in assumed] if total else []
