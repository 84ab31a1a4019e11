"""The pool organizer: how fast each device reads, and so which share of the objects it is given.

The paper's equation 1: a device of bandwidth b gets the share b / sum of all b. The bandwidth is measured when the
pool opens, with short reads of the device's own region, and from then on by what the reads of clients show. Only
reads that found the device busy count: one read at a time shows how long a read takes, not how much fits in parallel.
What the configuration says about a device's bandwidth stands, and is not measured.
"""

from collections.abc import Sequence
from typing import Final

BUSY_DEPTH: Final = 4
"""Reads under way from which on a device counts as busy: enough to hide one behind the other on any SSD."""
_WINDOW_BYTES: Final = 64 << 20
"""Bytes of one sample: tens of milliseconds of an SSD, past the bursts that throttling and its own cache allow."""
_WEIGHT: Final = 0.2
"""Of a new sample in the average: a device that has become slower is half believed after three."""
_CHANGE_MIN: Final = 0.05
"""Change of a bandwidth that gives new shares. Measurements of one device differ by as much."""


class BandwidthMeter:
    """Bytes a second of one device while it is busy, from the times of its reads.

    Attributes:
        bytes_per_s: the decaying average; 0 before anything is known.
        samples: how many it is made of.
        fixed: whether it was configured, and so does not change.
    """

    __slots__ = ("_busy_ns", "_busy_until_ns", "_bytes", "bytes_per_s", "fixed", "samples")

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.fixed = bytes_per_s is not None
        self.bytes_per_s = bytes_per_s or 0.0
        self.samples = 0
        self._bytes = 0
        self._busy_ns = 0
        self._busy_until_ns = 0

    def note(self, length: int, begin_ns: int, end_ns: int, depth: int) -> None:
        """Count a read of ``length`` bytes, one of ``depth`` that were under way when it was handed over."""
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
        """Take one measurement into the average."""
        if self.fixed:
            return
        weight = _WEIGHT if self.samples else 1.0
        self.bytes_per_s += weight * (bytes_per_s - self.bytes_per_s)
        self.samples += 1


class BandwidthShares:
    """Turns the bandwidths of several devices into shares.

    Attributes:
        shares: each device's share, together one; the same for all while nothing is known.
    """

    def __init__(self, meters: Sequence[BandwidthMeter]) -> None:
        self.meters = list(meters)
        self._decide()

    def update(self) -> bool:
        """Decide anew if a bandwidth has changed enough; return whether it had."""
        for meter, old in zip(self.meters, self._bandwidths, strict=True):
            if abs(meter.bytes_per_s - old) > _CHANGE_MIN * old:
                self._decide()
                return True
        return False

    def _decide(self) -> None:
        self._bandwidths = [meter.bytes_per_s for meter in self.meters]
        known = [value for value in self._bandwidths if value > 0]
        # A device that could not be measured counts as the slowest of the others: it is used, and so gets measured.
        assumed = [value or (min(known) if known else 1.0) for value in self._bandwidths]
        total = sum(assumed)
        self.shares = [value / total for value in assumed] if total else []
