"""State that the parts of the pool share: index, memory, devices, and the removal of entries. With its lock held."""

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from shadowserve.native import ANY, Index
from shadowserve.pool.arena import Arenas
from shadowserve.pool.changes import REMOVED, Changes
from shadowserve.pool.clears import Clears
from shadowserve.pool.disk import Disk, Extent, Quarantined
from shadowserve.pool.entries import CHUNK_KEY_BYTES, MEMORY_ONLY, NAMED, Entry
from shadowserve.pool.memory_cache import MemoryCache
from shadowserve.pool.next_use import NextUse
from shadowserve.pool.pins import Pins
from shadowserve.pool.usage_ranking import UsageRanking
from shadowserve.pool.volume.volume import Call, VolumeError
from shadowserve.pool.write_states import OldCopy, Writes

_NOT_THE_EXTENTS: Final = frozenset({"device_gone", "no_memory", "stale", "reassigned"})
"""Reasons for dropping an object that say nothing about its extent."""


class Waker:
    """A descriptor that becomes readable when the pool has work that no device signals."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False

    def wake(self) -> None:
        """Make the descriptor readable; from any thread."""
        os.eventfd_write(self.descriptor, 1)
        self._awake = True  # after the write: otherwise reset() could miss it

    def reset(self) -> None:
        if self._awake:
            self._awake = False
            with contextlib.suppress(BlockingIOError):  # an earlier reset() has read it
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


AdmissionPolicy = Literal["all", "second_hit"]


@dataclass(slots=True)
class TenantCounters:
    """Counters of a tenant's objects; ``record_bytes`` counts present records only."""

    evictions: Counter[str] = field(default_factory=Counter)
    evicted_bytes: int = 0
    expired_keys: int = 0
    lost_keys: int = 0
    failed_writes: int = 0
    record_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """Counters since the pool was opened; :class:`Statistics` describes them. Times are in ns."""

    lookups: int = 0
    lookup_ns: int = 0
    placement_ns: int = 0
    grouping_ns: int = 0
    submission_ns: int = 0
    shared_reads: int = 0
    partial_reads: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # entries that were dropped because of their bytes, by reason
    tenants: defaultdict[int, TenantCounters] = field(default_factory=lambda: defaultdict(TenantCounters))
    everyones: TenantCounters = field(default_factory=TenantCounters)  # sums over all tenants

    def of(self, tenant: int) -> tuple[TenantCounters, TenantCounters]:
        return self.tenants[tenant], self.everyones


class Core:
    """The pool's state.

    Attributes:
        may_write, may_scrub: Return whether a device may write, or scrub, a number of bytes now. A callback that
            returns False wakes the pool when to ask again.
    """

    def __init__(
        self,
        index: Index,
        clears: Clears,
        arenas: Arenas,
        disks: list[Disk],
        admission: AdmissionPolicy,
        waker: Waker,
        clock_ms: Callable[[], int],
        ticks: Callable[[], int],
    ) -> None:
        self.waker = waker
        self.index = index
        self.arenas = arenas
        self.memory_cache = MemoryCache(arenas)
        self.disks = disks
        self.admission: AdmissionPolicy = admission
        self.held_back = 0  # objects that were stored in memory alone because of it
        self.clock_ms = clock_ms
        self.ticks = ticks  # clock of the counters of time, in ns
        self.counters = Counters()
        self.generation = 1
        self.pins = Pins()  # pinned entries, by slot
        self.next_use = NextUse(index, self.pins.has)  # chooses victims; knows what waiting requests need
        self.clears = clears  # cleared entries that are still in the index
        self.usage_ranking = UsageRanking(index.used_bytes)
        self.writes = Writes()
        self.changes: Changes | None = None  # logs of chunk keys that came and went; None for none
        self.held_bytes = 0  # bytes of the budget of removed values that are still being sent. With devices it is 0
        self.may_write: Callable[[int], bool] = lambda size: True
        self.may_scrub: Callable[[int], bool] = lambda size: True

    # ---- the pool's thread

    def turn(self) -> None:
        """Do the work of every 100 ms."""

    def step_disks(self, now_ms: int) -> list[Call]:
        """Process completions of devices; return calls to make without the lock."""
        calls: list[Call] = []
        for disk in self.disks:
            calls += disk.step(now_ms)
        return calls

    def refusal(self) -> VolumeError | None:
        """Return the error of all changes when the pool had devices and none is left; None otherwise."""
        if not self.disks or any(disk.gone is None for disk in self.disks):
            return None
        return VolumeError(f"no device is left to write to: {self.disks[0].gone}")

    # ---- Entries

    def entry(self, slot: int) -> Entry | None:
        try:
            return Entry(slot, self.index.read(slot))
        except KeyError:
            return None

    @property
    def objects(self) -> int:
        return len(self.index)

    def used_bytes(self) -> int:
        return self.index.used_bytes()

    def held_bytes_of(self, tenant: int) -> int:
        return 0

    def freed_bytes(self, entry: Entry) -> int:
        return entry.size

    def count_uses(self) -> None:
        """Report all uses so far to the index, where they are collected."""

    def admits(self, tenant: int, key: bytes) -> bool:
        """Return whether an object is written to an SSD at all.

        Much of what is stored is never read, and writing it wears SSDs out. With ``second_hit`` a new object stays in
        memory alone until it is read, or stored again soon after its eviction: then its key is a ghost entry. The
        price: an object that was stored once and never read is lost at a restart, and when memory is full.
        """
        if self.admission == "all" or self.index.ghost(tenant, key):
            return True
        self.held_back += 1
        return False

    def is_current(self, entry: Entry) -> bool:
        return self.index.holds(entry.slot, entry.key, entry.generation)

    def undurable_disks(self, tenant: int, key: bytes, *, but: Disk | None = None) -> list[Disk]:
        """Return the devices whose logs must become durable before a new value of a key may be acknowledged.

        After a power cut they could bring back an older value: where the new one's device is missing, or after the new
        value is evicted. ``but``: the device of the new value, whose log has both in order.
        """
        return [disk for disk in self.disks if not disk.log.is_durable(tenant, key, own=disk is but)]

    def next_generation(self) -> int:
        self.generation = self.generation % 0xFFFF_FFFF + 1
        return self.generation

    def disk_of(self, entry: Entry) -> Disk | None:
        return None if entry.device == MEMORY_ONLY else self.disks[entry.device]

    def forget(self, entry: Entry, *, remember: bool = False, quarantine: str | None = None) -> None:
        """Remove an entry: from its device's log, its extent, memory and the index.

        Args:
            entry: The present entry.
            remember: Make it a ghost entry.
            quarantine: Reason for testing the extent before it is used again; None for none.
        """
        disk, logged = self.disk_of(entry), False
        if self.clears.under_way:
            if self.clears.covers(entry.tenant, entry.generation):
                logged, remember = True, False  # the log has a CLEAR record already
            else:
                self.clears.count_change(entry.tenant, -1)
        if self.changes is not None and not logged and not entry.fields.flags & NAMED:
            self.changes.note(entry.tenant, REMOVED, entry.key)
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
            self.free_old_copies(entry.tenant, entry.key, write.old_copies, logged=logged)
        self._detach(entry.slot, entry.tenant, entry.length, entry.fields.header_length)
        if remember:
            self.index.evict(entry.slot)
        else:
            self.index.remove(entry.slot)
        self.usage_ranking.note(entry.tenant)

    def evict(self, slot: int, cause: str) -> bool:
        """Evict an entry; return False if that would free nothing, since a reply is sending what is in memory alone."""
        entry = Entry(slot, self.index.read(slot))
        if entry.device == MEMORY_ONLY:
            kept = self.memory_cache.peek(slot)
            if kept is not None and kept.users > 1:
                return False
        name = self.index.name(slot)
        self.count_eviction(entry.tenant, cause, entry.length + (CHUNK_KEY_BYTES if name is None else len(name)))
        self.forget(entry, remember=True)
        return True

    def count_eviction(self, tenant: int, cause: str, size: int) -> None:
        for counters in self.counters.of(tenant):
            counters.evictions[cause] += 1
            counters.evicted_bytes += size

    def pin(self, slot: int, until_s: int) -> None:
        self.index.pin(slot, until_s)

    def set_expiry(self, slot: int, expires_at_ms: int | None) -> None:
        self.index.set_expiry(slot, expires_at_ms or 0)

    def clear(self, tenant: int | None) -> None:
        """Make all entries of a tenant, or of all tenants, absent; step_clears() removes them."""
        for disk in self.disks:
            disk.log.clear(tenant)
        self.clears.begin(ANY if tenant is None else tenant, self.generation)
        if self.changes is not None:
            self.changes.cleared(tenant)

    def step_clears(self, looks: int) -> int:
        """Examine at most ``looks`` entries and remove those that were cleared; return the number of removed ones."""
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

    def replace(self, old: Entry, disk: Disk | None) -> tuple[Extent | None, list[OldCopy]]:
        """Release the old object of an entry whose slot now has a put on ``disk``.

        Returns:
            The old extent on ``disk``, which the record of the new object frees; and the copies on other devices, to be
            freed when the new object is durable.
        """
        self._detach(old.slot, old.tenant, old.length, old.fields.header_length)
        write = self.writes.cancel(old.slot, True)
        home = self.disk_of(old)
        old_copies = [] if write is None else write.old_copies
        if home is not None and home.gone is None:
            place: Extent | None = (old.extent, old.size)
            if write is not None and not write.submitted:
                home.free((old.extent, old.size))
                place = write.replaced
            else:
                home.volume.hold(old.fields.pack())
            if place is not None:
                old_copies.append(OldCopy(home, place))
        own = next((each for each in old_copies if each.disk is disk), None)
        if own is None:
            return None, old_copies
        old_copies.remove(own)
        return own.extent, old_copies

    def free_old_copies(self, tenant: int, key: bytes, old_copies: list[OldCopy], *, logged: bool = False) -> None:
        """Remove an object's old copies from other devices; ``logged``: their logs have the removal already."""
        for disk, place in old_copies:
            if not logged:
                disk.log.remove(tenant, key)
            disk.free(place)

    def _detach(self, slot: int, tenant: int, length: int, header_bytes: int) -> None:
        self._drop(slot)
        self.pins.drop(tenant, slot)
        if header_bytes:
            for counters in self.counters.of(tenant):
                counters.record_bytes -= length

    def _drop(self, slot: int) -> None:
        """Forget the entry's memory; holders of the value keep it."""
        self.memory_cache.drop(slot)

    def expire(self, entry: Entry) -> None:
        for counters in self.counters.of(entry.tenant):
            counters.expired_keys += 1
        self.forget(entry)

    def drop_lost(self, entry: Entry, reason: str) -> None:
        self.count_lost(reason, entry.tenant, 1)
        self.forget(entry, quarantine=None if reason in _NOT_THE_EXTENTS else reason)

    def count_lost(self, reason: str, tenant: int, count: int) -> None:
        self.counters.lost[reason] = self.counters.lost.get(reason, 0) + count
        for counters in self.counters.of(tenant):
            counters.lost_keys += count

    def now_s(self) -> int:
        return self.clock_ms() // 1000
