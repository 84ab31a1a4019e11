"""What the parts of the pool share: the index, the memory, the devices, and how an entry goes.

Everything here is called with the pool's lock held.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shadowserve.native import ANY, Index
from shadowserve.pool.admission import Admission
from shadowserve.pool.arena import Arenas
from shadowserve.pool.clears import Clears
from shadowserve.pool.copies import Copies
from shadowserve.pool.disk import Disk, Place, Quarantined
from shadowserve.pool.entries import MEMORY_ONLY, Entry
from shadowserve.pool.heap import Heap
from shadowserve.pool.pins import Pins
from shadowserve.pool.volume.volume import Call, VolumeError
from shadowserve.pool.wake import Wake
from shadowserve.pool.weights import Weights
from shadowserve.pool.writing import Left, Writes

__all__ = ["Core", "Counters", "TenantCounters"]

_NOT_THE_EXTENTS: Final = frozenset({"device_gone", "no_memory", "stale", "stranger"})
"""Reasons for which an object was dropped, but which say nothing against its extent."""


@dataclass(slots=True)
class TenantCounters:
    """What has become of a tenant's objects, and the bytes of those that are records."""

    evictions: Counter[str] = field(default_factory=Counter)
    evicted_bytes: int = 0
    expired_keys: int = 0
    lost_keys: int = 0
    failed_writes: int = 0
    record_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """What the pool has done since it was opened; none ever decreases.

    Attributes:
        lookups: keys looked up.
        lookup_ns: time spent in finding keys in the index and in memory.
        placement_ns: time spent in choosing devices and extents, evictions for them included.
        grouping_ns: time spent in planning reads, finding memory for them, and taking them back.
        submission_ns: time spent in handing them to the devices and back: calls into the kernel.
        verify_ns: time spent in checking what was read and its device had not checked; apart from the pool's lock.
        shared_reads: requests that were served by another one's read.
        partial_reads: reads of a part of an object.
        copied_bytes: of values that were stored from other memory than the pool's.
        busy_writes: puts that were turned away for the moment.
        lost: entries dropped because of their bytes, by reason.
        everyones: the sums over all tenants.
    """

    lookups: int = 0
    lookup_ns: int = 0
    placement_ns: int = 0
    grouping_ns: int = 0
    submission_ns: int = 0
    verify_ns: int = 0
    shared_reads: int = 0
    partial_reads: int = 0
    copied_bytes: int = 0
    busy_writes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    tenants: defaultdict[int, TenantCounters] = field(default_factory=lambda: defaultdict(TenantCounters))
    everyones: TenantCounters = field(default_factory=TenantCounters)

    def of(self, tenant: int) -> tuple[TenantCounters, TenantCounters]:
        """Return a tenant's counters and those of all: whoever counts for the one counts for the others, too."""
        return self.tenants[tenant], self.everyones


class Core:
    """The pool's state.

    Attributes:
        writes: those under way.
        waker: has the pool's thread look after the pool.
        heap: has the values of a pool without devices; None where there are devices, whose arenas have them.
        pins: which entries are pinned, by slot.
        clears: what was cleared, and is in the index still.
        weights: who has how many bytes.
    """

    def __init__(
        self,
        index: Index,
        clears: Clears,
        arenas: Arenas,
        heap: Heap | None,
        disks: list[Disk],
        admission: Admission,
        waker: Wake,
        clock_ms: Callable[[], int],
    ) -> None:
        """Join the parts."""
        self.waker = waker
        self.index = index
        self.arenas = arenas
        self.heap = heap
        self.copies = Copies(arenas)
        self.disks = disks
        self.admission = admission
        self.clock_ms = clock_ms
        self.ticks: Callable[[], int] = time.perf_counter_ns
        self.counters = Counters()
        self.generation = 1
        self.pins: Pins[int] = Pins()
        self.clears = clears
        self.weights: Weights[int] = Weights()
        self.writes = Writes()

    # ---- the pool's thread

    def step_disks(self, now_ms: int) -> list[Call]:
        """Take back what devices have done; return what is to be called without the lock."""
        calls: list[Call] = []
        for disk in self.disks:
            calls += disk.step(now_ms)
        return calls

    def refusal(self) -> VolumeError | None:
        """Return why nothing can be changed: there were devices, and none is left. None if it can."""
        if not self.disks or any(disk.gone is None for disk in self.disks):
            return None
        return VolumeError(f"no device is left to write to: {self.disks[0].gone}")

    # ---- Entries

    def entry(self, slot: int) -> Entry | None:
        """Return what the index says of a slot; None where there is nothing."""
        try:
            return Entry(slot, self.index.read(slot))
        except KeyError:
            return None

    @property
    def objects(self) -> int:
        """How many there are, those that were cleared and are not gone yet included."""
        return len(self.index) if self.heap is None else len(self.heap)

    @property
    def held_bytes(self) -> int:
        """Bytes of the budget that only those need who send them; with devices, the budget is of their room."""
        return 0 if self.heap is None else self.heap.held_bytes

    def is_in_use(self, entry: Entry) -> bool:
        """Return whether somebody sends what is in memory alone: if the entry goes, that frees nothing."""
        if entry.device != MEMORY_ONLY:
            return False
        kept = self.copies.peek(entry.slot) if self.heap is None else self.heap.at(entry.slot)
        return kept is not None and kept.users > 1

    def is_current(self, entry: Entry) -> bool:
        """Return whether the index still has what ``entry`` was read from."""
        return self.index.holds(entry.slot, entry.key, entry.generation)

    def unsure(self, tenant: int, key: bytes, *, but: Disk | None = None) -> list[Disk]:
        """Return the devices whose logs must become durable before anybody relies on a new value of a key.

        After a power cut they could bring back an older one: at once where the new one's device is missing, or once
        the new one has gone. ``but``: the device that has the new one, whose log has them in their order.
        """
        return [disk for disk in self.disks if not disk.is_sure_of(tenant, key, own=disk is but)]

    def next_generation(self) -> int:
        """Return the number of the next put."""
        self.generation = self.generation % 0xFFFF_FFFF + 1
        return self.generation

    def disk_of(self, entry: Entry) -> Disk | None:
        """Return the device that holds an object; None for memory alone."""
        return None if entry.device == MEMORY_ONLY else self.disks[entry.device]

    def forget(
        self, entry: Entry, *, remember: bool = False, quarantine: str | None = None, logged: bool = False
    ) -> None:
        """Remove an entry: from the log of its device, its extent, its memory, the index.

        Args:
            entry: what the index has now.
            remember: put it into the ghost queue.
            quarantine: why its extent must not be used again before it was tested; None for no reason.
            logged: whether the log says so already.
        """
        disk = self.disk_of(entry)
        if self.clears.under_way:
            if self.clears.covers(entry.tenant, entry.generation):
                logged, remember = True, False
            else:
                self.clears.count_change(entry.tenant, -1)
        write = self.writes.cancel(entry.slot, False)
        if disk is not None and disk.gone is None:
            place = (entry.extent, entry.size)
            if not logged and (write is None or write.submitted or write.replaced is not None):
                disk.log_removal(entry.tenant, entry.key)
            if write is not None and write.replaced is not None:
                disk.free(write.replaced)
            if quarantine is None:
                disk.free(place)
            else:
                disk.quarantine.append(Quarantined(*place, quarantine, self.clock_ms()))
        if write is not None:
            self.leave(entry.tenant, entry.key, write.left, logged=logged)
        self._take_leave(entry)
        if remember:
            self.index.evict(entry.slot)
        else:
            self.index.remove(entry.slot)
        self.weigh(entry.tenant)

    def weigh(self, tenant: int) -> None:
        """Take note of what a tenant has now."""
        self.weights.set(tenant, self.index.used_bytes(tenant))

    def clear(self, tenant: int | None) -> None:
        """Have nobody find a tenant's entries any more, or anyone's; step_clears() removes them."""
        for disk in self.disks:
            disk.log_clear(tenant)
        if self.heap is not None:
            self.heap.clear(tenant)
        self.clears.begin(ANY if tenant is None else tenant, self.generation)

    def step_clears(self, looks: int) -> int:
        """Look at so many entries for what was cleared, and remove it; return how many were."""
        removed = 0
        for _ in range(looks):
            slot = self.clears.next_slot()
            if not slot:
                break
            entry = self.entry(slot)
            if entry is not None and self.clears.covers(entry.tenant, entry.generation):
                self.forget(entry)
                removed += 1
        return removed

    def replace(self, old: Entry, disk: Disk | None) -> tuple[Place | None, list[Left]]:
        """Take leave of what an entry was: its slot in the index has been given to a put on ``disk`` already.

        Returns:
            What lies on ``disk`` under the key, for the log's record of the new object to free; and what lies on other
            devices, to take leave of when the new object is durable.
        """
        self._take_leave(old)
        write = self.writes.cancel(old.slot, True)
        home = self.disk_of(old)
        left = [] if write is None else write.left
        if home is not None and home.gone is None:
            place: Place | None = (old.extent, old.size)
            if write is not None and not write.submitted:
                home.free((old.extent, old.size))
                place = write.replaced
            else:
                home.volume.hold(old.fields.pack())
            if place is not None:
                left.append(Left(home, place))
        own = next((each for each in left if each.disk is disk), None)
        if own is None:
            return None, left
        left.remove(own)
        return own.place, left

    def leave(self, tenant: int, key: bytes, left: list[Left], *, logged: bool = False) -> None:
        """Have devices forget what an object has left behind; ``logged``: their logs say so already."""
        for disk, place in left:
            if not logged:
                disk.log_removal(tenant, key)
            disk.free(place)

    def _take_leave(self, entry: Entry) -> None:
        if self.heap is None:
            self.copies.drop(entry.slot)
        else:
            self.heap.drop(entry.slot)
        self.pins.drop(entry.tenant, entry.slot)
        if entry.fields.head_length:
            for counters in self.counters.of(entry.tenant):
                counters.record_bytes -= entry.length

    def expire(self, entry: Entry) -> None:
        """Remove an entry whose time has come."""
        for counters in self.counters.of(entry.tenant):
            counters.expired_keys += 1
        self.forget(entry)

    def lose(self, entry: Entry, reason: str) -> None:
        """Drop an entry whose bytes are not to be had; ``reason`` is counted."""
        self.count_lost(reason, entry.tenant, 1)
        self.forget(entry, quarantine=None if reason in _NOT_THE_EXTENTS else reason)

    def count_lost(self, reason: str, tenant: int, count: int) -> None:
        """Count entries of a tenant that were dropped."""
        self.counters.lost[reason] = self.counters.lost.get(reason, 0) + count
        for counters in self.counters.of(tenant):
            counters.lost_keys += count

    # ---- Time

    def now_s(self) -> int:
        """Return Unix time in seconds, as the index has it."""
        return self.clock_ms() // 1000
