"""Statistics of a pool. Counters never decrease."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shadowserve.latency import LatencyHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """Of one device; counters since the pool was opened.

    Attributes:
        state: ``"ok"``, ``"avoided"`` (a write has failed lately) or ``"gone"``.
        reason: Why it is gone; empty otherwise.
        bandwidth_bytes_per_s: Configured or measured.
        share: Share of the objects; memory has the rest.
        placed_bytes: Bytes of objects that were placed here, including those of memory's share.
        capacity_bytes: Most bytes of objects.
        used_bytes: Present bytes of objects.
        objects: Number of objects.
        reads: Reads for clients.
        reading: Reads in progress.
        written_bytes: Since the volume was made, log and snapshots included.
        written_today_bytes: Since midnight, UTC.
        errors: Failed operations.
        busy: Operations that were tried again since the device was too busy, or the system short of something.
        quarantined_bytes: Bytes of extents that are kept out of use.
        scrubbed_bytes: Bytes checked in the background.
        wear_refused: Objects that went elsewhere because of write_bytes_per_day.
        wear_budget_bytes: Most bytes written in a day; None for no limit.
        latencies: Latencies of operations, by ``read``, ``write``..., where the device counts them.
    """

    name: str
    state: str = "ok"
    reason: str = ""
    bandwidth_bytes_per_s: float = 0.0
    share: float = 0.0
    placed_bytes: int = 0
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    reads: int = 0
    read_bytes: int = 0
    reading: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    errors: int = 0
    quarantined_bytes: int = 0
    scrubbed_bytes: int = 0
    wear_refused: int = 0
    wear_budget_bytes: int | None = None
    busy: int = 0
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
        lists: Complete lists of the bucket.
        objects: Known objects.
        records: Records in these.
        bytes: Bytes of these objects.
        requests: Ranges that were read for clients.
        read_records: Sound records in these.
        reading: Records that clients wait for.
        failed_reads: Failed requests and records, by reason.
        written_objects: Objects that this node has written.
        present_objects: Objects that another node had written already.
        failed_writes: Objects that could not be written or deleted, by reason.
        waiting_records: Records that wait to be written.
        held_back: Evictions that waited for the bucket (``write: evicted``).
        missed_records: Records that were evicted before they were written, or that the backlog had no room for.
        swept_objects: Objects that were deleted because of bytes_max.
        failing_s: Time since reads, writes or deletions began to fail; 0 while they succeed.
        last_error: Why they fail.
        deleting: Removals that wait for the bucket.
        foreign_objects: Objects under the prefix that ShadowServe has not written; it leaves them alone.
        left_out_objects: Objects that are not known because of chunks_max.
        crowded_out_reads: Reads that were a miss since other reads of their tenant came first.
    """

    state: str = "unknown"
    lists: int = 0
    objects: int = 0
    records: int = 0
    bytes: int = 0
    requests: int = 0
    read_records: int = 0
    read_bytes: int = 0
    reading: int = 0
    failed_reads: Mapping[str, int] = field(default_factory=dict)
    written_objects: int = 0
    written_bytes: int = 0
    present_objects: int = 0
    failed_writes: Mapping[str, int] = field(default_factory=dict)
    waiting_records: int = 0
    held_back: int = 0
    missed_records: int = 0
    swept_objects: int = 0
    failing_s: float = 0.0
    last_error: str = ""
    deleting: int = 0
    foreign_objects: int = 0
    left_out_objects: int = 0
    crowded_out_reads: int = 0

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
        keys: Entries, including those that have expired without notice.
        expiring_keys: Entries with an expiry.
        pinned_keys: Entries with a pin, including pins that have ended without notice.
        pinned_bytes: Their part of ``used_bytes``.
        budget_bytes: Most bytes; for a tenant its quota, or the budget without one.
        used_bytes: Used bytes, held_bytes included.
        held_bytes: Bytes of removed values that are still being sent.
        peak_bytes: Most bytes ever used.
        records: Entries that are valid records.
        record_bytes: Bytes of their values.
        evicted_keys: Evicted entries.
        evictions: Evictions by cause: ``quota``, the tenant has more than its quota; ``budget``, all have more than the
            pool may hold; with devices also ``device``, a device is full or at its limit, and ``memory``, for objects
            of memory alone.
        evicted_bytes: Bytes of their keys and values.
        expired_keys: Entries that have expired.
        lost_keys: Entries that were dropped because their bytes could not be read, or were wrong.
        lost: These by reason; of a whole pool only.
        failed_writes: Values that could not be made durable; their writers got an error.
        cold: Statistics of the bucket, if there is one.
        memory_bytes: Bytes of all arenas.
        memory_used_bytes: Used bytes of the arenas.
        memory_held_bytes: Bytes of removed values that are still being sent.
        memory_share: Memory's share of the objects, by ``memory_bandwidth_bytes_per_s``.
        memory_objects: Entries in memory.
        memory_hits: Look-ups of objects in memory.
        memory_misses: Look-ups of other objects.
        promotions: Copies that moved to the main queue.
        copies_dropped: Copies that were dropped for room.
        waiting_reads: Reads that wait for memory or their device.
        writing_bytes: Bytes of objects that are not durable yet.
        held_back: Objects that were stored in memory alone (admission).
        orchestration_ns: Time to look up, place and group, without I/O: the sum of the next three.
        lookup_ns: Time to find keys.
        placement_ns: Time to choose devices, and to evict for that.
        grouping_ns: Time to plan reads, find memory for them, and take them back.
        submission_ns: Time to pass reads to devices and back: calls into the kernel, which count as I/O.
        verify_ns: Time to check what no device has checked, without the lock.
        lookups: Looked-up keys.
        shared_reads: Requests that were served by another request's read.
        partial_reads: Reads of a part of an object.
        scrub_passes: Rounds of the scrubber through all objects.
        scrub_rotten: Damaged objects that it has found.
    """

    keys: int = 0
    expiring_keys: int = 0
    budget_bytes: int = 0
    used_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    records: int = 0
    record_bytes: int = 0
    evicted_keys: int = 0
    evicted_bytes: int = 0
    expired_keys: int = 0
    pinned_keys: int = 0
    pinned_bytes: int = 0
    lost_keys: int = 0
    failed_writes: int = 0
    evictions: Mapping[str, int] = field(compare=False, default_factory=dict)
    lost: Mapping[str, int] = field(compare=False, default_factory=dict)
    devices: tuple[DeviceStatistics, ...] = field(compare=False, default=())
    cold: ColdStatistics | None = field(compare=False, default=None)
    memory_bytes: int = field(compare=False, default=0)
    memory_used_bytes: int = field(compare=False, default=0)
    memory_held_bytes: int = field(compare=False, default=0)
    memory_share: float = field(compare=False, default=1.0)
    memory_bandwidth_bytes_per_s: float = field(compare=False, default=0.0)
    memory_objects: int = field(compare=False, default=0)
    memory_hits: int = field(compare=False, default=0)
    memory_misses: int = field(compare=False, default=0)
    promotions: int = field(compare=False, default=0)
    copies_dropped: int = field(compare=False, default=0)
    waiting_reads: int = field(compare=False, default=0)
    writing_bytes: int = field(compare=False, default=0)
    held_back: int = field(compare=False, default=0)
    orchestration_ns: int = field(compare=False, default=0)
    lookup_ns: int = field(compare=False, default=0)
    placement_ns: int = field(compare=False, default=0)
    grouping_ns: int = field(compare=False, default=0)
    submission_ns: int = field(compare=False, default=0)
    verify_ns: int = field(compare=False, default=0)
    lookups: int = field(compare=False, default=0)
    shared_reads: int = field(compare=False, default=0)
    partial_reads: int = field(compare=False, default=0)
    scrub_passes: int = field(compare=False, default=0)
    scrub_rotten: int = field(compare=False, default=0)

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
