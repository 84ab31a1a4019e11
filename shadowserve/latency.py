"""Latency histograms for Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

LATENCY_SECONDS: Final = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds of the buckets for device operations, from a cache hit to a device that retries."""


class LatencyHistogram:
    """Counts of durations by bucket. Cheap enough for every operation; reading needs no lock.

    Attributes:
        bounds_ns: Upper bounds of the buckets; one more bucket follows the last bound.
    """

    __slots__ = ("bounds_ns", "counts", "sum_ns")

    def __init__(self, bounds_s: Sequence[float] = LATENCY_SECONDS) -> None:
        self.bounds_ns = tuple(round(1e9 * bound) for bound in bounds_s)
        self.counts = [0] * (len(self.bounds_ns) + 1)  # number of durations per bucket
        self.sum_ns = 0  # sum of all durations

    def add(self, duration_ns: int) -> None:
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_ns(self, share: float) -> float:
        """Return the estimated quantile ``share`` (0 to 1) of the durations; 0 if there are none."""
        target = share * self.count
        below = 0
        for index, count in enumerate(self.counts):
            if count and below + count >= target:
                low = self.bounds_ns[index - 1] if index else 0
                high = self.bounds_ns[index] if index < len(self.bounds_ns) else low
                return low + (high - low) * (target - below) / count
            below += count
        return 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus' buckets: upper bound in seconds, and the number of durations up to it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds_ns, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else repr(bound / 1e9), total))
        return buckets
