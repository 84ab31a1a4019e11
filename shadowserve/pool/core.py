"""What the parts of the pool share: the index, the memory, the devices, and how an entry goes.

Everything here is called with the pool's lock held.
"""

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from shadowserve.native import ANY, Index
from shadowserve.pool.arena import Arenas
from shadowserve.pool.clears import Clears
from shadowserve.pool.copies import Copies
from shadowserve.pool.disk import Disk, Extent, Quarantined
from shadowserve.pool.entries import MEMORY_ONLY, Entry
from shadowserve.pool.keys import CHUNK_KEY_BYTES
from shadowserve.pool.next_use import NextUse
from shadowserve.pool.pins import Pins
from shadowserve.pool.usage_ranking import UsageRanking
from shadowserve.pool.volume.volume import Call, VolumeError
from shadowserve.pool.write_states import Left, Writes

_NOT_THE_EXTENTS: Final = frozenset({"device_gone", "no_memory", "stale", "stranger"})
"""Reasons for which an object was dropped, but which say nothing against its extent."""


class Waker:
    """A descriptor that becomes readable when there is something to do that no device publishes.

    Attributes:
        descriptor: to wait for.
    """

    def __init__(self) -> None:
        """close() gives the descriptor back."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False

    def wake(self) -> None:
        """Have the descriptor readable; from any thread."""
        os.eventfd_write(self.descriptor, 1)
        self._awake = True  # not before: reset() would look for it in vain, and never again

    def reset(self) -> None:
        """Take back wake()."""
        if self._awake:
            self._awake = False
            with contextlib.suppress(BlockingIOError):  # the wake() before this one has taken it
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


AdmissionPolicy = Literal["all", "second_hit"]


class Admission:
    """Decides.

    Attributes:
        policy: what by.
        held_back: objects that were stored in memory alone.
        admitted_later: of these, those that got a home after all.
    """

    def __init__(self, policy: AdmissionPolicy, index: Index) -> None:
        self.policy: AdmissionPolicy = policy
        self._index = index
        self.held_back = 0
        self.admitted_later = 0

    def admits(self, tenant: int, key: bytes) -> bool:
        """Return whether an object that is being stored gets a home on a device at once."""
        if self.policy == "all" or self._index.ghost(tenant, key):
            return True
        self.held_back += 1
        return False


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
        pins: which entries are pinned, by slot.
        next_use: what goes next, with what requests wait for.
        clears: what was cleared, and is in the index still.
        weights: who has how many bytes.
        ticks: clock of the counters of time, in ns.
        held_bytes: of the budget, what only those need who send it; with devices, the budget is of their room.
        may_write, may_scrub: whether so many bytes of a device may be written, or scrubbed, now. Who answers no wakes
            the pool when to ask again.
    """

    def __init__(
        self,
        index: Index,
        clears: Clears,
        arenas: Arenas,
        disks: list[Disk],
        admission: Admission,
        waker: Waker,
        clock_ms: Callable[[], int],
        ticks: Callable[[], int],
    ) -> None:
        self.waker = waker
        self.index = index
        self.arenas = arenas
        self.copies = Copies(arenas)
        self.disks = disks
        self.admission = admission
        self.clock_ms = clock_ms
        self.ticks = ticks
        self.counters = Counters()
        self.generation = 1
        self.pins = Pins()
        self.next_use = NextUse(index, self.pins.has)
        self.clears = clears
        self.usage_ranking = UsageRanking(index.used_bytes)
        self.writes = Writes()
        self.held_bytes = 0
        self.may_write: Callable[[int], bool] = lambda size: True
        self.may_scrub: Callable[[int], bool] = lambda size: True

    # ---- the pool's thread

    def turn(self) -> None:
        """Do what is to be done ten times a second."""

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
        return len(self.index)

    def used_bytes(self) -> int:
        """Return the bytes of the budget that are used."""
        return self.index.used_bytes()

    def held_bytes_of(self, tenant: int) -> int:
        """Return a tenant's part of ``held_bytes``."""
        return 0

    def freed_bytes(self, entry: Entry) -> int:
        """Return how much of the budget becomes free when an entry is replaced."""
        return entry.size

    def count_uses(self) -> None:
        """Have the index know of all uses so far: before an entry comes, before one goes, where there are many."""

    def is_current(self, entry: Entry) -> bool:
        """Return whether the index still has what ``entry`` was read from."""
        return self.index.holds(entry.slot, entry.key, entry.generation)

    def unsure(self, tenant: int, key: bytes, *, but: Disk | None = None) -> list[Disk]:
        """Return the devices whose logs must become durable before anybody relies on a new value of a key.

        After a power cut they could bring back an older one: at once where the new one's device is missing, or once
        the new one has gone. ``but``: the device that has the new one, whose log has them in their order.
        """
        return [disk for disk in self.disks if not disk.log.is_durable(tenant, key, own=disk is but)]

    def next_generation(self) -> int:
        """Return the number of the next put."""
        self.generation = self.generation % 0xFFFF_FFFF + 1
        return self.generation

    def disk_of(self, entry: Entry) -> Disk | None:
        """Return the device that holds an object; None for memory alone."""
        return None if entry.device == MEMORY_ONLY else self.disks[entry.device]

    def forget(self, entry: Entry, *, remember: bool = False, quarantine: str | None = None) -> None:
        """Remove an entry: from the log of its device, its extent, its memory, the index.

        Args:
            entry: what the index has now.
            remember: put it into the ghost queue.
            quarantine: why its extent must not be used again before it was tested; None for no reason.
        """
        disk, logged = self.disk_of(entry), False
        if self.clears.under_way:
            if self.clears.covers(entry.tenant, entry.generation):
                logged, remember = True, False  # the log says so already
            else:
                self.clears.count_change(entry.tenant, -1)
        write = self.writes.cancel(entry.slot, False)
        if disk is not None and disk.gone is None:
            place = (entry.extent, entry.size)
            if not logged and (write is None or write.submitted or write.replaced is not None):
                disk.log.remove(entry.tenant, entry.key)
            if write is not None and write.replaced is not None:
                disk.free(write.replaced)
            if quarantine is None:
                disk.free(place)
            else:
                disk.quarantine.waiting.append(Quarantined(*place, quarantine, self.clock_ms()))
        if write is not None:
            self.leave(entry.tenant, entry.key, write.left, logged=logged)
        self._take_leave(entry.slot, entry.tenant, entry.length, entry.fields.head_length)
        if remember:
            self.index.evict(entry.slot)
        else:
            self.index.remove(entry.slot)
        self.usage_ranking.note(entry.tenant)

    def evict(self, slot: int, cause: str) -> bool:
        """Evict an entry; return whether that was of use: not where somebody sends what is in memory alone."""
        entry = Entry(slot, self.index.read(slot))
        if entry.device == MEMORY_ONLY:
            kept = self.copies.peek(slot)
            if kept is not None and kept.users > 1:
                return False
        name = self.index.name(slot)
        self.count_eviction(entry.tenant, cause, entry.length + (CHUNK_KEY_BYTES if name is None else len(name)))
        self.forget(entry, remember=True)
        return True

    def count_eviction(self, tenant: int, cause: str, size: int) -> None:
        """Count an entry whose key and value have ``size`` bytes."""
        for counters in self.counters.of(tenant):
            counters.evictions[cause] += 1
            counters.evicted_bytes += size

    def pin(self, slot: int, until_s: int) -> None:
        """Have an entry stay until then; 0 ends that."""
        self.index.pin(slot, until_s)

    def set_expiry(self, slot: int, expires_at_ms: int | None) -> None:
        """Set or clear when an entry expires."""
        self.index.set_expiry(slot, expires_at_ms or 0)

    def clear(self, tenant: int | None) -> None:
        """Have nobody find a tenant's entries any more, or anyone's; step_clears() removes them."""
        for disk in self.disks:
            disk.log.clear(tenant)
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

    def replace(self, old: Entry, disk: Disk | None) -> tuple[Extent | None, list[Left]]:
        """Take leave of what an entry was: its slot in the index has been given to a put on ``disk`` already.

        Returns:
            What lies on ``disk`` under the key, for the log's record of the new object to free; and what lies on other
            devices, to take leave of when the new object is durable.
        """
        self._take_leave(old.slot, old.tenant, old.length, old.fields.head_length)
        write = self.writes.cancel(old.slot, True)
        home = self.disk_of(old)
        left = [] if write is None else write.left
        if home is not None and home.gone is None:
            place: Extent | None = (old.extent, old.size)
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
                disk.log.remove(tenant, key)
            disk.free(place)

    def _take_leave(self, slot: int, tenant: int, length: int, head_bytes: int) -> None:
        self._drop(slot)
        self.pins.drop(tenant, slot)
        if head_bytes:
            for counters in self.counters.of(tenant):
                counters.record_bytes -= length

    def _drop(self, slot: int) -> None:
        """Forget where the value of an entry that goes lies in memory; it stays for those who hold it."""
        self.copies.drop(slot)

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
