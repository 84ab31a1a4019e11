"""What an engine lets those who operate it see, beyond its totals: devices, arenas, causes, scrubbing.

An engine that has any of this offers ``observe() -> Observation``, which only reads counters and is called with the
node's lock held or not. For one that has not, :func:`observe` returns an empty one. ``metrics.py`` makes the metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shadowserve.latency import LatencyHistogram

__all__ = [
    "ArenaObservation",
    "DeviceObservation",
    "Observation",
    "ScrubObservation",
    "observe",
]


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
        dropped: copies that went to make room.
    """

    name: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    copies: int = 0
    promoted: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubObservation:
    """What the background scrub has done.

    Attributes:
        bytes: verified.
        rotten: found to differ from what was stored, and dropped.
        passes: rounds over everything that are complete.
    """

    bytes: int = 0
    rotten: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All of it.

    Attributes:
        devices: one for each.
        arenas: one for each.
        evictions: keys removed to make room, by cause: ``budget``, ``quota``, ``device``, ``memory``.
        admission: values by what became of them, such as ``stored``, ``held_back``.
        scrub: the background scrub.
        lost: entries dropped because of their bytes, by reason.
        quarantined_bytes: of extents that are kept out of use because they are faulty.
        writing_bytes: of values that are not durable yet.
        reads_pending: reads that wait for memory or their device.
    """

    devices: Sequence[DeviceObservation] = ()
    arenas: Sequence[ArenaObservation] = ()
    evictions: Mapping[str, int] = field(default_factory=dict)
    admission: Mapping[str, int] = field(default_factory=dict)
    scrub: ScrubObservation = field(default_factory=ScrubObservation)
    lost: Mapping[str, int] = field(default_factory=dict)
    quarantined_bytes: int = 0
    writing_bytes: int = 0
    reads_pending: int = 0


def observe(engine: object) -> Observation:
    """Return what ``engine`` shows; an empty observation if it shows nothing."""
    look = getattr(engine, "observe", None)
    if look is not None:
        found = look()
        assert isinstance(found, Observation)
        return found
    statistics = getattr(engine, "statistics", None)
    totals = statistics() if statistics is not None else None
    if hasattr(totals, "devices"):
        return _of_totals(totals)
    return Observation() if totals is None else Observation(evictions=totals.evictions, lost=totals.lost)


def _of_totals(totals: Any) -> Observation:
    """Return what the totals of an engine with devices say (``PoolStatistics``)."""
    devices: Sequence[Any] = totals.devices
    return Observation(
        devices=[
            DeviceObservation(
                name=each.name,
                healthy=each.state != "gone",
                capacity_bytes=each.capacity_bytes,
                used_bytes=each.used_bytes,
                read_bytes=each.read_bytes,
                written_bytes=each.written_bytes,
                errors=each.errors,
                queue_depth=each.reading,
                bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
                wear_bytes_today=each.written_today_bytes,
                wear_budget_bytes=getattr(each, "wear_budget_bytes", None),
                latencies=getattr(each, "latencies", {}),
            )
            for each in devices
        ],
        arenas=[
            ArenaObservation(
                name="memory",
                capacity_bytes=totals.memory_bytes,
                used_bytes=totals.memory_used_bytes,
                copies=totals.memory_objects,
                promoted=totals.promotions,
                dropped=totals.copies_dropped,
            )
        ],
        evictions=totals.evictions,
        admission={
            "held_back": totals.held_back,
            "wear_refused": sum(each.wear_refused for each in devices),
        },
        scrub=ScrubObservation(
            bytes=sum(each.scrubbed_bytes for each in devices),
            rotten=getattr(totals, "scrub_rotten", 0),
            passes=getattr(totals, "scrub_passes", 0),
        ),
        lost=totals.lost,
        quarantined_bytes=sum(each.quarantined_bytes for each in devices),
        writing_bytes=totals.writing_bytes,
        reads_pending=totals.waiting_reads,
    )
