"""Collects the pool's statistics from its parts."""

from shadowserve.pool.core import Core, TenantCounters
from shadowserve.pool.disk import Disk
from shadowserve.pool.opening import Opened
from shadowserve.pool.placement import Placement
from shadowserve.pool.reads import Reader
from shadowserve.pool.space import EVICTION_CAUSES
from shadowserve.pool.statistics import DeviceStatistics, Statistics
from shadowserve.pool.writes import Writer


def tenant_statistics(core: Core, tenant: int, budget_bytes: int) -> Statistics:
    """Return the statistics of one tenant."""
    totals = core.index.totals(tenant)
    counters, held = core.counters.tenants[tenant], core.held_bytes_of(tenant)
    return Statistics(
        keys=totals.objects,
        expiring_keys=totals.expiring,
        pinned_keys=core.pins.count(tenant),
        pinned_bytes=core.pins.bytes_of(tenant),
        budget_bytes=budget_bytes,
        used_bytes=totals.bytes + held,
        held_bytes=held,
        peak_bytes=totals.bytes + held,
        records=totals.records,
        record_bytes=counters.record_bytes,
        evicted_keys=counters.evictions.total(),
        evictions=_by_cause(core, counters),
        evicted_bytes=counters.evicted_bytes,
        expired_keys=counters.expired_keys,
        lost_keys=counters.lost_keys,
        failed_writes=counters.failed_writes,
    )


def pool_statistics(opened: Opened, reader: Reader, writer: Writer, peak_bytes: int) -> Statistics:
    """Return the statistics of the whole pool."""
    core = opened.core
    totals, counters, arenas, copies = core.index.totals(), core.counters, core.arenas, core.memory_cache
    summed = counters.everyones
    placement = opened.placement
    held = core.held_bytes
    return Statistics(
        keys=totals.objects,
        expiring_keys=totals.expiring,
        pinned_keys=core.pins.count(None),
        pinned_bytes=core.pins.total_bytes,
        budget_bytes=opened.space.capacity_bytes,
        used_bytes=totals.bytes + held,
        held_bytes=held,
        peak_bytes=max(peak_bytes, totals.bytes + held),
        records=totals.records,
        record_bytes=summed.record_bytes,
        evicted_keys=summed.evictions.total(),
        evictions=_by_cause(core, summed),
        evicted_bytes=summed.evicted_bytes,
        expired_keys=summed.expired_keys,
        lost_keys=summed.lost_keys,
        failed_writes=summed.failed_writes,
        devices=(
            *(_device_statistics(core, placement, disk) for disk in core.disks),
            *(DeviceStatistics(name=name, state="gone", reason=reason) for name, reason in opened.absent),
        ),
        memory_bytes=arenas.size,
        memory_used_bytes=arenas.used_bytes,
        memory_held_bytes=arenas.held_bytes,
        memory_share=placement.bandwidth_shares.shares[0],
        memory_bandwidth_bytes_per_s=placement.bandwidth_shares.meters[0].bytes_per_s,
        memory_objects=len(copies),
        memory_hits=copies.hits,
        memory_misses=copies.misses,
        promotions=copies.promotions,
        copies_dropped=copies.dropped,
        waiting_reads=reader.waiting,
        writing_bytes=writer.bytes_under_way,
        lost=dict(counters.lost),
        held_back=core.admission.held_back,
        orchestration_ns=counters.lookup_ns + counters.placement_ns + counters.grouping_ns,
        lookup_ns=counters.lookup_ns,
        placement_ns=counters.placement_ns,
        grouping_ns=counters.grouping_ns,
        submission_ns=counters.submission_ns,
        verify_ns=counters.verify_ns,
        lookups=counters.lookups,
        shared_reads=counters.shared_reads,
        partial_reads=counters.partial_reads,
    )


def _by_cause(core: Core, counters: TenantCounters) -> dict[str, int]:
    causes = EVICTION_CAUSES if core.disks else ("budget", "quota")
    return {cause: counters.evictions[cause] for cause in causes}


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
