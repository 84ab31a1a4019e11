"""What the parts of the pool share: the index, the memory, the devices, and how an entry goes.

Everything here is called with the pool's lock held.
"""

import contextlib
import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shadowserve.native import ANY, Index, IndexEntry, ObjectFields
from shadowserve.pool.admission import Admission
from shadowserve.pool.arena import BLOCK_BYTES, Arenas, Buffer, object_blocks
from shadowserve.pool.clears import Clears
from shadowserve.pool.copies import Copies
from shadowserve.pool.disk import Disk, Place, Quarantined
from shadowserve.pool.pins import Pins
from shadowserve.pool.terms import Item
from shadowserve.pool.volume.volume import Call, VolumeError
from shadowserve.pool.weights import Weights

__all__ = ["MEMORY_ONLY", "Cancelled", "Core", "Counters", "Entry", "PoolItem", "TenantCounters"]

MEMORY_ONLY: Final = 255
"""The index's number of the device of objects that are in memory alone."""

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


class Entry:
    """What the index said of an object, and its slot there."""

    __slots__ = ("device", "extent", "fields", "generation", "key", "length", "slot", "tenant")

    def __init__(self, slot: int, fields: IndexEntry) -> None:
        """Keep what the index said."""
        self.slot = slot
        self.fields = fields
        self.key = fields.key
        self.tenant = fields.tenant
        self.device = fields.device
        self.extent = fields.extent
        self.length = fields.length
        self.generation = fields.generation

    @property
    def blocks(self) -> int:
        """Blocks of 4 KiB that it takes."""
        return object_blocks(self.length)

    @property
    def size(self) -> int:
        """Bytes of these."""
        return object_blocks(self.length) * BLOCK_BYTES

    @property
    def header(self) -> ObjectFields:
        """What the object's header says, if it is the object."""
        fields = self.fields
        return ObjectFields(
            self.key, self.tenant, self.length, self.generation, head_length=fields.head_length, flags=fields.flags
        )


class PoolItem(Item):
    """What is known of an object: what the index says, and where its bytes lie in memory."""

    __slots__ = ("buffer", "entry")

    def __init__(self, entry: Entry, buffer: Buffer | None) -> None:
        """Describe an entry; ``buffer`` has its bytes."""
        fields = entry.fields
        # What Item's own would do, in one call less for each lookup.
        self.length = entry.length
        self.head_bytes = fields.head_length
        self.expires_at_ms = fields.expires_at_ms or None
        self.value = None if buffer is None else buffer.value(0, entry.length)
        self.entry = entry
        self.buffer = buffer

    @property
    def kept(self) -> object:
        """See :attr:`Item.kept`."""
        return self.buffer


class Left(NamedTuple):
    """What an object has left behind on a device, by moving to another one: gone once it is durable there."""

    disk: Disk
    place: Place


class Cancelled(NamedTuple):
    """A write that was taken back.

    Attributes:
        submitted: its volume has it.
        replaced: if not, what it would have replaced there.
        left: what it would have replaced on other devices.
    """

    submitted: bool
    replaced: Place | None
    left: list[Left]


class Core:
    """The pool's state.

    Attributes:
        cancel_write: takes back the write of a slot, whose entry goes or is replaced (True); set by the writer. None:
            none is under way.
        cancel_read: has the read of a slot bring no copy, since its entry goes or is replaced; set by the reader.
        pins: which entries are pinned, by slot.
        clears: what was cleared, and is in the index still.
        weights: who has how many bytes.
    """

    def __init__(
        self, index: Index, arenas: Arenas, disks: list[Disk], admission: Admission, clock_ms: Callable[[], int]
    ) -> None:
        """Join the parts."""
        self.index = index
        self.arenas = arenas
        self.copies = Copies(arenas)
        self.disks = disks
        self.admission = admission
        self.clock_ms = clock_ms
        self.ticks: Callable[[], int] = time.perf_counter_ns
        self.counters = Counters()
        self.generation = 1
        self.pins: Pins[int] = Pins()
        self.clears = Clears(index)
        self.weights: Weights[int] = Weights()
        self.cancel_write: Callable[[int, bool], Cancelled | None] = lambda slot, replaced: None
        self.cancel_read: Callable[[int], None] = lambda slot: None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        for disk in disks:
            disk.wake = self.wake
            disk.on_gone = self.begin_session
            disk.volume.living = self.clears.living

    # ---- The engine's thread

    @property
    def wake_descriptor(self) -> int:
        """Readable when poll() has something to do that no device announces."""
        return self._wake

    def wake(self) -> None:
        """Have poll() called soon; from any thread."""
        os.eventfd_write(self._wake, 1)
        self._awake = True  # not before: calm() would look for it in vain, and never again

    def calm(self) -> None:
        """Take back wake()."""
        if self._awake:
            self._awake = False
            with contextlib.suppress(BlockingIOError):  # the wake() before this one has taken it
                os.eventfd_read(self._wake)

    def step_disks(self, now_ms: int) -> list[Call]:
        """Take back what devices have done; return what is to be called without the lock."""
        calls: list[Call] = []
        for disk in self.disks:
            calls += disk.step(now_ms)
        return calls

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._wake)

    # ---- Devices that miss something

    def begin_session(self) -> None:
        """Begin a new session on all devices that are there.

        A device that was away, or was given up, does not hear of what is removed or replaced meanwhile. When it comes
        back, its log knows another session than the others': what is on it may be stale, and is dropped. A session is
        a number and a digest of who takes part when, so that two that went on without each other are told apart; and
        who takes part, since a loss of power may come when only some logs know of it. The number is the time where it
        can be: of two sessions that knew nothing of each other, the later one counts.
        """
        present = [disk for disk in self.disks if disk.gone is None]
        newest = max((disk.session for disk in self.disks), default=b"")
        members = b"".join(member for disk in present for member in disk.memberships)
        parts = hashlib.sha256(self.clock_ms().to_bytes(8, "big", signed=True) + members)
        number = max(int.from_bytes(newest[:8], "big") + 1, self.clock_ms())
        for disk in present:
            disk.enter_session(number.to_bytes(8, "big") + parts.digest()[:8] + members)

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
        write = self.cancel_write(entry.slot, False)
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
        self.weights.set(tenant, self.index.totals(tenant).bytes)

    def clear(self, tenant: int | None) -> None:
        """Have nobody find a tenant's entries any more, or anyone's; step_clears() removes them."""
        for disk in self.disks:
            disk.log_clear(tenant)
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
        write = self.cancel_write(old.slot, True)
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
        self.copies.drop(entry.slot)
        self.cancel_read(entry.slot)
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
