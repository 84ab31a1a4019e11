"""What the pool tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shadowserve.latency import LatencyHistogram


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatistics:
    """Of one device; counters since the pool was opened.

    Attributes:
        name: its path.
        state: ``"ok"``, ``"avoided"`` (it failed a write lately) or ``"gone"``.
        reason: why it is gone; empty if it is not.
        bandwidth_bytes_per_s: as configured or measured.
        share: of the objects, by it; memory has the rest.
        placed_bytes: of objects that were placed here, memory's among them by turns.
        capacity_bytes: that objects may take.
        used_bytes: that they take.
        objects: how many.
        reads: operations for clients.
        read_bytes: that they brought.
        reading: reads under way.
        written_bytes: since the volume was made, log and snapshots included.
        written_today_bytes: since midnight, UTC.
        errors: operations that failed.
        busy: times that it was too busy for one, or the system short of something, and the operation was begun again.
        quarantined_bytes: of extents that are kept out of use.
        scrubbed_bytes: checked in the background.
        wear_refused: objects that went elsewhere because of write_bytes_per_day.
        wear_budget_bytes: that may be written in a day; None for no limit.
        latencies: of its operations, by ``read``, ``write``..., where the device counts them.
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
        """Whether it is read and written."""
        return self.state != "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStatistics:
    """Of the tier below, a bucket; counters since the start.

    Attributes:
        state: ``"ok"``, ``"away"`` (it failed, and is left alone for a while) or ``"unknown"`` (not listed yet).
        lists: times that all of it was listed.
        objects: that are known.
        records: in these.
        bytes: of these objects.
        requests: ranges that were read for clients.
        read_records: that these brought, sound.
        read_bytes: that they had.
        reading: records that are waited for.
        failed_reads: requests and records that failed, by reason.
        written_objects: by this node.
        written_bytes: of these.
        present_objects: that another node had written already.
        failed_writes: objects that could not be written or deleted, by reason.
        waiting_records: that wait to be written.
        held_back: evictions that had to wait for the bucket (``write: evicted``).
        missed_records: that were evicted before they were written, or for which the backlog had no room.
        swept_objects: deleted because of bytes_max.
        failing_s: for how long reads, writes or deletions have failed; 0 where they do not.
        last_error: why they do.
        deleting: removals that wait for the bucket.
        foreign_objects: under the prefix that are none of ours; they are left alone.
        left_out_objects: that are there, and not known because of chunks_max.
        crowded_out_reads: reads that were a miss since others of their tenant were before them.
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
        """Whether it is left alone."""
        return self.state == "away"

    @property
    def up(self) -> bool:
        """Whether it has been listed, and neither reads nor writes nor deletions fail."""
        return self.lists > 0 and not self.failing_s

    def __str__(self) -> str:
        """Say how it is."""
        held = f"{self.records} records in {self.objects} objects of {self.bytes >> 20} MiB"
        waits = f"{self.reading} reads, {self.waiting_records} writes and {self.deleting} removals wait"
        if self.up:
            return f"reachable: {held}; {waits}"
        if self.failing_s:
            return f"away for {self.failing_s:.0f} s: {self.last_error}; {waits}"
        return f"not listed yet; {waits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a store has done and holds, all of it or for one tenant; counters never decrease.

    Of a tenant it has what comes before ``devices``. Two are equal if they agree in that.

    Attributes:
        keys: entries, expired ones that were not noticed yet included.
        expiring_keys: entries with an expiry.
        pinned_keys: entries with a pin, ended ones that were not noticed yet included.
        pinned_bytes: of ``used_bytes``, theirs.
        budget_bytes: what it may use; for a tenant its quota, or the budget without one.
        used_bytes: what it uses, by the accounting that the store describes; held_bytes included.
        held_bytes: of values removed but still being sent.
        peak_bytes: most that was ever used.
        records: entries that are valid records.
        record_bytes: bytes of their values.
        evicted_keys: removed to make room.
        evictions: of these, how many for each cause: ``quota``, a tenant has more than its quota; ``budget``, all have
            more than the store may hold; of a store with devices also ``device``, one is full or has as much as it
            may, and ``memory``, of what lies in memory alone.
        evicted_bytes: bytes of their keys and values.
        expired_keys: removed because their time had come.
        lost_keys: dropped because their bytes could not be read, or were not what had been stored.
        lost: of these, how many for each reason; of a store as a whole only.
        failed_writes: values that could not be made durable; their writers have been told.
        devices: of each.
        cold: of the bucket below, if there is one.
        memory_bytes: of all arenas.
        memory_used_bytes: of these, in use.
        memory_held_bytes: of these, of values that were removed but are still being sent.
        memory_share: memory's share of the objects.
        memory_bandwidth_bytes_per_s: that it is by.
        memory_objects: entries that are in memory.
        memory_hits: times that an object was there.
        memory_misses: times that it was not.
        promotions: copies that moved to the main queue.
        copies_dropped: copies that went to make room.
        waiting_reads: reads that wait for memory or their device.
        writing_bytes: of objects that are not durable yet.
        held_back: objects that were stored in memory alone (admission).
        orchestration_ns: time spent in looking up, placing and grouping, without any I/O: the three that follow.
        lookup_ns: in finding keys.
        placement_ns: in choosing homes, and evicting for them.
        grouping_ns: in planning reads, finding memory for them, and taking them back.
        submission_ns: in handing reads to devices and taking them back: calls into the kernel, which count as I/O.
        verify_ns: in checking what was read and its device had not checked, apart from the lock.
        lookups: keys looked up.
        shared_reads: requests that another one's read served.
        partial_reads: reads of parts of objects.
        scrub_passes: times that the scrub passed all entries.
        scrub_rotten: objects that it found not to be what had been stored.
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
