"""Statistics of a pool. Counters never decrease."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shadowserve.latency import LatencyHistogram
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.opening import Opened
from shadowserve.pool.placement import Placement
from shadowserve.pool.reads import Reader
from shadowserve.pool.space import EVICTION_CAUSES
from shadowserve.pool.writes import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """Of one device; counters since the pool was opened.

    Attributes:
        latencies: Latencies of operations, by ``read``, ``write``..., where the device counts them.
    """

    name: str
    state: str = "ok"  # ``"ok"``, ``"avoided"`` (a write has failed lately) or ``"gone"``
    reason: str = ""  # why it is gone; empty otherwise
    bandwidth_bytes_per_s: float = 0.0  # configured or measured
    share: float = 0.0  # share of the objects; memory has the rest
    placed_bytes: int = 0  # bytes of objects that were placed here, including those of memory's share
    capacity_bytes: int = 0  # most bytes of objects
    used_bytes: int = 0  # present bytes of objects
    objects: int = 0
    reads: int = 0  # reads for clients
    read_bytes: int = 0
    reading: int = 0  # reads in progress
    written_bytes: int = 0  # since the volume was made, log and snapshots included
    written_today_bytes: int = 0  # since midnight, UTC
    errors: int = 0  # failed operations
    quarantined_bytes: int = 0  # bytes of extents that are kept out of use
    scrubbed_bytes: int = 0  # bytes checked in the background
    wear_refused: int = 0  # objects that went elsewhere because of write_bytes_per_day
    wear_budget_bytes: int | None = None  # most bytes written in a day; None for no limit
    busy: int = 0  # operations that were tried again since the device was too busy, or the system short of something
    latencies: Mapping[str, LatencyHistogram] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """True while the device is read and written."""
        return self.state != "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStatistics:
    """Of the lower tier, a bucket; counters since the start.

    Attributes:
        state: ``"ok"``, ``"away"`` (not used for a while after failures) or ``"unknown"`` (not listed yet).
        failed_writes: Objects that could not be written or deleted, by reason.
    """

    state: str = "unknown"
    lists: int = 0  # complete lists of the bucket
    objects: int = 0  # known objects
    records: int = 0  # records in these
    bytes: int = 0  # bytes of these objects
    requests: int = 0  # ranges that were read for clients
    read_records: int = 0  # sound records in these
    read_bytes: int = 0
    reading: int = 0  # records that clients wait for
    failed_reads: Mapping[str, int] = field(default_factory=dict)  # failed requests and records, by reason
    written_objects: int = 0  # objects that this node has written
    written_bytes: int = 0
    present_objects: int = 0  # objects that another node had written already
    failed_writes: Mapping[str, int] = field(default_factory=dict)
    waiting_records: int = 0  # records that wait to be written
    held_back: int = 0  # evictions that waited for the bucket (``write: evicted``)
    missed_records: int = 0  # records that were evicted before they were written, or that the backlog had no room for
    swept_objects: int = 0  # objects that were deleted because of bytes_max
    failing_s: float = 0.0  # time since reads, writes or deletions began to fail; 0 while they succeed
    last_error: str = ""  # why they fail
    deleting: int = 0  # removals that wait for the bucket
    foreign_objects: int = 0  # objects under the prefix that ShadowServe has not written; it leaves them alone
    left_out_objects: int = 0  # objects that are not known because of chunks_max
    crowded_out_reads: int = 0  # reads that were a miss since other reads of their tenant came first

    @property
    def away(self) -> bool:
        """True while the bucket is not used."""
        return self.state == "away"

    @property
    def up(self) -> bool:
        """True if it was listed, and reads, writes and deletions succeed."""
        return self.lists > 0 and not self.failing_s

    def __str__(self) -> str:
        held = f"{self.records} records in {self.objects} objects of {self.bytes >> 20} MiB"
        waits = f"{self.reading} reads, {self.waiting_records} writes and {self.deleting} removals wait"
        if self.up:
            return f"reachable: {held}; {waits}"
        if self.failing_s:
            return f"away for {self.failing_s:.0f} s: {self.last_error}; {waits}"
        return f"not listed yet; {waits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of a pool, or of one tenant; counters never decrease.

    A tenant has the fields before ``devices``; two statistics are equal if these fields are.

    Attributes:
        evictions: Evictions by cause: ``quota``, the tenant has more than its quota; ``budget``, all have more than the
            pool may hold; with devices also ``device``, a device is full or at its limit, and ``memory``, for objects
            of memory alone.
        memory_share: Memory's share of the objects, by its measured bandwidth.
        orchestration_ns: Time to look up, place and group, without I/O: lookup_ns + placement_ns + grouping_ns.
        submission_ns: Time to pass reads to devices and back: calls into the kernel, which count as I/O.
    """

    keys: int = 0  # entries, including those that have expired without notice
    expiring_keys: int = 0  # entries with an expiry
    budget_bytes: int = 0  # most bytes; for a tenant its quota, or the budget without one
    used_bytes: int = 0  # used bytes, held_bytes included
    held_bytes: int = 0  # bytes of removed values that are still being sent
    peak_bytes: int = 0  # most bytes ever used
    records: int = 0  # entries that are valid records
    record_bytes: int = 0  # bytes of their values
    evicted_keys: int = 0  # evicted entries
    evicted_bytes: int = 0  # bytes of their keys and values
    expired_keys: int = 0  # entries that have expired
    pinned_keys: int = 0  # entries with a pin, including pins that have ended without notice
    pinned_bytes: int = 0  # their part of ``used_bytes``
    lost_keys: int = 0  # entries that were dropped because their bytes could not be read, or were wrong
    failed_writes: int = 0  # values that could not be made durable; their writers got an error
    evictions: Mapping[str, int] = field(compare=False, default_factory=dict)
    lost: Mapping[str, int] = field(compare=False, default_factory=dict)  # lost_keys by reason; of a whole pool only
    devices: tuple[DeviceStatistics, ...] = field(compare=False, default=())
    cold: ColdStatistics | None = field(compare=False, default=None)  # statistics of the bucket, if there is one
    memory_bytes: int = field(compare=False, default=0)  # bytes of all arenas
    memory_used_bytes: int = field(compare=False, default=0)  # used bytes of the arenas
    memory_held_bytes: int = field(compare=False, default=0)  # bytes of removed values that are still being sent
    memory_share: float = field(compare=False, default=1.0)
    memory_objects: int = field(compare=False, default=0)  # entries in memory
    promotions: int = field(compare=False, default=0)  # copies that moved to the main queue
    copies_dropped: int = field(compare=False, default=0)  # copies that were dropped for room
    waiting_reads: int = field(compare=False, default=0)  # reads that wait for memory or their device
    writing_bytes: int = field(compare=False, default=0)  # bytes of objects that are not durable yet
    held_back: int = field(compare=False, default=0)  # objects that were stored in memory alone (admission)
    orchestration_ns: int = field(compare=False, default=0)
    lookup_ns: int = field(compare=False, default=0)  # time to find keys
    placement_ns: int = field(compare=False, default=0)  # time to choose devices, and to evict for that
    grouping_ns: int = field(compare=False, default=0)  # time to plan reads, find memory for them, and take them back
    submission_ns: int = field(compare=False, default=0)
    lookups: int = field(compare=False, default=0)  # looked-up keys
    shared_reads: int = field(compare=False, default=0)  # requests that were served by another request's read
    partial_reads: int = field(compare=False, default=0)  # reads of a part of an object
    scrub_passes: int = field(compare=False, default=0)  # rounds of the scrubber through all objects
    scrub_rotten: int = field(compare=False, default=0)  # damaged objects that it has found

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of extents of all devices that are kept out of use."""
        return sum(device.quarantined_bytes for device in self.devices)

    @property
    def scrubbed_bytes(self) -> int:
        """Bytes of all devices that were checked in the background."""
        return sum(device.scrubbed_bytes for device in self.devices)

    @property
    def wear_refused(self) -> int:
        """Objects that went to another device than theirs because of write_bytes_per_day."""
        return sum(device.wear_refused for device in self.devices)


def entry_statistics(core: Core, tenant: int | None, keys: int, budget_bytes: int) -> Statistics:
    """Return the statistics of a tenant, or what the pool (None) has in common with one."""
    if tenant is None:
        totals, counters = core.index.totals(), core.counters.everyones
        held_bytes, pinned_bytes = core.held_bytes, core.pins.total_bytes
    else:
        totals, counters = core.index.totals(tenant), core.counters.tenants[tenant]
        held_bytes, pinned_bytes = core.held_bytes_of(tenant), core.pins.bytes_of(tenant)
    causes = EVICTION_CAUSES if core.disks else ("budget", "quota")
    return Statistics(
        keys=keys,
        expiring_keys=totals.expiring,
        pinned_keys=core.pins.count(tenant),
        pinned_bytes=pinned_bytes,
        budget_bytes=budget_bytes,
        used_bytes=totals.bytes + held_bytes,
        held_bytes=held_bytes,
        peak_bytes=totals.bytes + held_bytes,
        records=totals.records,
        record_bytes=counters.record_bytes,
        evicted_keys=counters.evictions.total(),
        evictions={cause: counters.evictions[cause] for cause in causes},
        evicted_bytes=counters.evicted_bytes,
        expired_keys=counters.expired_keys,
        lost_keys=counters.lost_keys,
        failed_writes=counters.failed_writes,
    )


def pool_statistics(opened: Opened, reader: Reader, writer: Writer, keys: int, peak_bytes: int) -> Statistics:
    """Return the statistics of the whole pool, without the lower tier's and the scrubber's."""
    core, placement = opened.core, opened.placement
    counters, arenas, copies = core.counters, core.arenas, core.memory_cache
    found = entry_statistics(core, None, keys, opened.space.capacity_bytes)
    return replace(
        found,
        peak_bytes=max(peak_bytes, found.used_bytes),
        devices=(
            *(_device_statistics(core, placement, disk) for disk in core.disks),
            *(DeviceStatistics(name=name, state="gone", reason=reason) for name, reason in opened.absent),
        ),
        memory_bytes=arenas.size,
        memory_used_bytes=arenas.used_bytes,
        memory_held_bytes=arenas.held_bytes,
        memory_share=placement.bandwidth_shares.shares[0],
        memory_objects=len(copies),
        promotions=copies.promotions,
        copies_dropped=copies.dropped,
        waiting_reads=reader.waiting,
        writing_bytes=writer.bytes_under_way,
        lost=dict(counters.lost),
        held_back=core.held_back,
        orchestration_ns=counters.lookup_ns + counters.placement_ns + counters.grouping_ns,
        lookup_ns=counters.lookup_ns,
        placement_ns=counters.placement_ns,
        grouping_ns=counters.grouping_ns,
        submission_ns=counters.submission_ns,
        lookups=counters.lookups,
        shared_reads=counters.shared_reads,
        partial_reads=counters.partial_reads,
    )


def _device_statistics(core: Core, placement: Placement, disk: Disk) -> DeviceStatistics:
    totals = core.index.totals(device=disk.number)
    state = "ok" if disk.avoided_until_ms <= core.clock_ms() else "avoided"
    return DeviceStatistics(
        name=disk.name,
        state=state if disk.gone is None else "gone",
        reason=disk.gone or "",
        bandwidth_bytes_per_s=disk.meter.bytes_per_s,
        share=placement.bandwidth_shares.shares[disk.number + 1],
        placed_bytes=placement.pool.placed_bytes[disk.number + 1] + placement.devices.placed_bytes[disk.number],
        capacity_bytes=disk.capacity_bytes,
        used_bytes=totals.bytes,
        objects=totals.objects,
        reads=disk.reads,
        read_bytes=disk.read_bytes,
        reading=disk.reading,
        written_bytes=disk.write_budget.total_bytes,
        written_today_bytes=disk.write_budget.day_bytes,
        errors=disk.errors,
        busy=disk.volume.busy,
        quarantined_bytes=disk.quarantine.bytes,
        scrubbed_bytes=disk.scrubbed_bytes,
        wear_refused=disk.write_budget.refused,
        wear_budget_bytes=disk.write_budget.budget_bytes,
        latencies=disk.volume.device.latencies,
    )
