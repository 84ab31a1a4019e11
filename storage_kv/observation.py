"""What an engine lets those who operate it see, beyond its totals: devices, arenas, causes, scrubbing.

An engine that has any of this offers ``observe() -> Observation``, which only reads counters and is called with the
node's lock held or not. For one that has not, :func:`observe` returns an empty one. ``metrics.py`` makes the metrics.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "LATENCY_SECONDS",
    "ArenaObservation",
    "DeviceObservation",
    "LatencyHistogram",
    "Observation",
    "ScrubObservation",
    "observe",
]

LATENCY_SECONDS: Final = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds of the buckets of device operations: from a read out of a device's cache to a device that retries."""


class LatencyHistogram:
    """Counts of durations by bucket; cheap enough for every operation, and read without a lock.

    Attributes:
        bounds_ns: upper bounds of the buckets; one more bucket is beyond the last.
        counts: of each bucket.
        sum_ns: of all durations.
    """

    __slots__ = ("bounds_ns", "counts", "sum_ns")

    def __init__(self, bounds_s: Sequence[float] = LATENCY_SECONDS) -> None:
        """Make an empty one."""
        self.bounds_ns = tuple(round(1e9 * bound) for bound in bounds_s)
        self.counts = [0] * (len(self.bounds_ns) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def count(self) -> int:
        """How many durations."""
        return sum(self.counts)

    def quantile_ns(self, share: float) -> float:
        """Return about what ``share`` of the durations are below, within their bucket; 0 without any."""
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
        """Return Prometheus's buckets: upper bound in seconds, and how many are at most that."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds_ns, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else repr(bound / 1e9), total))
        return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceObservation:
    """One device. Bytes are of requests as the device saw them; times are Unix time in seconds.

    Attributes:
        name: short and stable, such as the last part of its path; the label of its metrics.
        healthy: it is read and written.
        capacity_bytes: what it can hold.
        used_bytes: what is held, rounded to blocks.
        read_bytes: read since the start.
        written_bytes: written since the start.
        errors: requests that it failed.
        queue_depth: requests that it has now.
        waiting: requests that wait for it.
        bandwidth_bytes_per_s: as last measured, for placement.
        wear_bytes_today: written in the present day's window of the wear budget.
        wear_budget_bytes: bytes that may be written a day, None for no budget.
        latencies: by operation: ``read``, ``write``, ``flush``.
    """

    name: str
    healthy: bool = True
    capacity_bytes: int = 0
    used_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    errors: int = 0
    queue_depth: int = 0
    waiting: int = 0
    bandwidth_bytes_per_s: float = 0.0
    wear_bytes_today: int = 0
    wear_budget_bytes: int | None = None
    latencies: Mapping[str, LatencyHistogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaObservation:
    """One arena of host memory.

    Attributes:
        name: its label, such as ``node0``.
        capacity_bytes: its size.
        used_bytes: of it in use.
        copies: objects that it holds a copy of.
        promoted: objects that were copied in because they were hot.
    """

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    copies: int = 0
    promoted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubObservation:
    """What the background scrub has done.

    Attributes:
        objects: verified.
        bytes: verified.
        rotten: found to differ from what was stored, and dropped.
        passes: rounds over everything that are complete.
    """

    objects: int = 0
    bytes: int = 0
    rotten: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All of it.

    Attributes:
        devices: one for each.
        arenas: one for each.
        evictions: keys that went, by cause, such as ``budget``, ``quota``, ``device``.
        admission: values by what became of them, such as ``stored``, ``held_back``.
        scrub: the background scrub.
        quarantined: objects or extents that are kept out of use because they are faulty.
        busy_refusals: writes that were told to wait since too many were under way.
        writes_pending: values that are not durable yet.
        reads_pending: reads that devices have not answered.
        recovery_seconds: what finding everything again took at the start.
        recovered_objects: how many there were.
    """

    devices: Sequence[DeviceObservation] = ()
    arenas: Sequence[ArenaObservation] = ()
    evictions: Mapping[str, int] = field(default_factory=dict)
    admission: Mapping[str, int] = field(default_factory=dict)
    scrub: ScrubObservation = field(default_factory=ScrubObservation)
    quarantined: int = 0
    busy_refusals: int = 0
    writes_pending: int = 0
    reads_pending: int = 0
    recovery_seconds: float = 0.0
    recovered_objects: int = 0


_NOTHING: Final = Observation()


def observe(engine: object) -> Observation:
    """Return what ``engine`` shows; an empty observation if it shows nothing."""
    look = getattr(engine, "observe", None)
    found = look() if look is not None else _NOTHING
    assert isinstance(found, Observation)
    return found
