"""Room: which object goes when there is none, in memory, on a device, in the index, or within a budget.

A tenant beyond its own quota gives up its own objects only. Beyond anything else, whoever has most gives first, if it
has more than an equal share of the budget: what the index names, by the configured policy, never before its
descendants, never while it is pinned; when all that is left is waited for, what is needed last. What was cleared goes
before all that.

So many objects go in one hold of the pool's lock: whoever needs more room comes again, and what is beyond a bound that
was lowered goes in poll().
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from shadowserve.pool.arena import BLOCK_BYTES, Buffer, object_blocks
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import MEMORY_ONLY, Entry
from shadowserve.pool.keys import chunk_key
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address
from shadowserve.pool.volume.changes import OutOfBudgetError

EVICTION_CAUSES: Final = ("budget", "device", "memory", "quota")
"""Why an object goes: all have too much, a device is full, memory alone has it and is full, its tenant has too much."""
_TRIES_MAX: Final = 1_024
"""Copies dropped for one object at a time: about 3 ms. One that needs more room goes on with the next poll()."""
_HEADROOM_SHARE: Final = 0.01
_HEADROOM_BYTES_MAX: Final = 256 << 20
_HEADROOM_OBJECTS: Final = 8
_HEADROOM_SMALL: Final = 8
"""A hundredth of a device is kept free ahead of writers; where that is little, eight objects, or an eighth."""
_PIECES: Final = 2
"""Evicted for an object that finds no room, in multiples of its size: space may be in pieces."""
_EVICTIONS_PER_TURN: Final = 64
_CLEARED_LOOKS: Final = 16
"""Entries looked at for one that was cleared, before another one is evicted."""
_GIVERS: Final = 16
"""Tenants that are asked for something on a device, those with most first."""
_HELD_BACK_SHARE: Final = 0.25
_MEMORY_HOMES_SHARE: Final = 0.75


@dataclass(slots=True)
class Quota:
    """Most that a tenant may have; None for no bound."""

    bytes_max: int | None = None
    keys_max: int | None = None

    def is_exceeded(self, used_bytes: int, keys: int) -> bool:
        """Return whether so much is too much."""
        too_large = self.bytes_max is not None and used_bytes > self.bytes_max
        return too_large or (self.keys_max is not None and keys > self.keys_max)


class Space:
    """Makes room.

    Attributes:
        left: how many objects may still be evicted before the lock is given up; begin_hold() says anew.
        wants_turn: somebody has looked for memory for as long as is allowed in one hold.
        held_back: says of a record whether it must stay for now: the tier below still wants it.
        waits_below: something had to stay; whoever needs room comes again with the next turn.
    """

    def __init__(self, core: Core, *, budget_bytes: int | None, objects_max: int, memory_homes: bool) -> None:
        """Begin without quotas.

        Args:
            core: the pool's state.
            budget_bytes: most that all objects may take together; None for what devices and memory hold.
            objects_max: most objects.
            memory_homes: whether memory is the only home of its share of the objects.
        """
        self._core = core
        self.budget_bytes = budget_bytes
        self.objects_max = objects_max
        self.quotas: dict[int, Quota] = {}
        self.begin_hold()
        self.wants_turn = self.waits_below = False
        self.held_back: Callable[[Address], bool] = lambda address: False
        self._beyond: dict[int, None] = {}  # tenants that may have more than their quota
        self._is_beyond = False  # whether all may have more than the capacity
        self._filled = {disk.number for disk in core.disks}  # where less may be free than when there was enough
        share = _MEMORY_HOMES_SHARE if memory_homes else _HELD_BACK_SHARE
        self._memory_only_max = int(share * core.arenas.size)

    @property
    def capacity_bytes(self) -> int:
        """What the pool may hold: the budget, or what devices or, where all are gone, memory have room for."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return sum(disk.capacity_bytes for disk in self._core.disks if disk.gone is None) or self._core.arenas.size

    def begin_hold(self) -> None:
        """Allow as many evictions as there may be in one hold of the lock."""
        self.left = ENTRIES_PER_HOLD
        self._cleared_looks = ENTRIES_PER_HOLD

    # ---- Quotas and budgets

    def bounds(self, tenant: int) -> tuple[int | None, int]:
        """Return the bytes of a tenant's quota, None without one, and those that all may have."""
        quota = self.quotas.get(tenant)
        return None if quota is None else quota.bytes_max, self.capacity_bytes

    def make_room_for(self, tenant: int, size: int, old: Entry | None) -> bool:
        """Evict until an object of ``size`` bytes is within its tenant's quota and the pool's budget.

        Args:
            tenant: whose.
            size: bytes that it counts for.
            old: what it replaces.

        Returns:
            Whether it is: if not, more has to be evicted than is at a time.

        Raises:
            OutOfBudgetError: it can never be, or everything else is pinned. Nothing has changed in the first case.
        """
        core, capacity, quota = self._core, self.capacity_bytes, self.quotas.get(tenant)
        self._check_fits(size, capacity, core.held_bytes)
        if quota is not None and quota.bytes_max is not None:
            self._check_fits(size, quota.bytes_max, core.held_bytes_of(tenant))
        if old is not None:
            core.index.touch(old.slot, core.now_s())  # it goes anyway: others must not go for it
        while quota is not None:
            totals = core.index.totals(tenant=tenant)
            freed_bytes, freed_keys = self._freed(old)
            used = totals.bytes + core.held_bytes_of(tenant) - freed_bytes + size
            if not quota.is_exceeded(used, totals.objects - freed_keys + 1):
                break
            if not self.evict(cause="quota", tenant=tenant):
                return self._refuse("the tenant's quota is used up by pinned objects")
        while True:
            freed_bytes, freed_keys = (0, 0) if old is None else self._freed(old)
            fits = core.used_bytes() - freed_bytes + size <= capacity
            if fits and core.objects - freed_keys < self.objects_max:
                return True
            if not self.evict(cause="budget" if fits else self._shortage):
                return self._refuse("the budget is used up by pinned objects")

    @staticmethod
    def _check_fits(size: int, bytes_max: int, held: int) -> None:
        if size + held > bytes_max:
            raise OutOfBudgetError(
                f"a value that takes {size} bytes does not fit {bytes_max} bytes, {held} of them held by replies"
            )

    def _refuse(self, why: str) -> bool:
        """Return False where nothing was evicted for the sake of those who wait for the lock, else raise."""
        if self.left > 0 and not self._core.clears.under_way:
            raise OutOfBudgetError(why)
        return False

    def _freed(self, old: Entry | None) -> tuple[int, int]:
        """Return the bytes, and the keys, that become free when an entry is replaced."""
        if old is None or not self._core.is_current(old):
            return 0, 0
        return self._core.freed_bytes(old), 1

    def bound(self, tenant: int | None) -> None:
        """Take note that a tenant's quota has changed, or what all may have, and evict what is beyond it."""
        if tenant is None:
            self._is_beyond = True
        else:
            self._beyond[tenant] = None
        self.trim()

    @property
    def is_beyond(self) -> bool:
        """Whether trim() has more to do, and can."""
        return (self._is_beyond or bool(self._beyond)) and not self.waits_below

    def trim(self) -> None:
        """Evict what is beyond quotas and budget, as far as it may be, and as many as there may in this hold."""
        index = self._core.index
        for tenant in list(islice(self._beyond, ENTRIES_PER_HOLD)):
            quota = self.quotas.get(tenant)
            while quota is not None:
                totals = index.totals(tenant=tenant)
                if not quota.is_exceeded(totals.bytes, totals.objects) or not self.evict(cause="quota", tenant=tenant):
                    break
            if self.left <= 0:
                return
            del self._beyond[tenant]
        while self._is_beyond and self.left > 0:
            self._is_beyond = index.totals().bytes > self.capacity_bytes and self.evict(cause=self._shortage)

    @property
    def _shortage(self) -> str:
        """Why objects go that take more than the pool's capacity."""
        return "device" if self._core.disks and self.budget_bytes is None else "budget"

    def evict(self, *, cause: str, device: int = -1, tenant: int = -1) -> bool:
        """Evict one object, of a device or of a tenant or any; return whether there was one that may go now."""
        core = self._core
        if self.left <= 0:
            return False
        self.left -= 1
        if core.clears.under_way and self._cleared_looks > 0:
            self._cleared_looks -= _CLEARED_LOOKS
            if core.step_clears(_CLEARED_LOOKS):
                return True
        now_s, next_use = core.now_s(), core.next_use
        core.count_uses()
        for _ in range(_EVICTIONS_PER_TURN):
            heavy = self._heaviest(device) if tenant < 0 and core.usage_ranking.several else None
            slot = next_use.victim(now_s, device, heavy) if heavy is not None else 0
            slot = slot or next_use.victim(now_s, device, tenant)
            if not slot:
                return False
            if self._is_held_back(slot):
                self.left, self.waits_below = 0, True
                return False
            if core.evict(slot, cause):
                return True
            core.index.touch(slot, now_s)
        return False

    def _is_held_back(self, slot: int) -> bool:
        fields = self._core.index.read(slot)
        return fields.head_length > 0 and self.held_back((fields.tenant, chunk_key(fields.key)))

    def _heaviest(self, device: int) -> int | None:
        """Return the tenant that is most over an equal share of the budget, and has something on the device."""
        for tenant in self._core.usage_ranking.heaviest_first(_GIVERS, self.capacity_bytes):
            if device < 0 or self._core.index.totals(tenant=tenant, device=device).objects:
                return tenant
        return None

    # ---- Devices

    def extent(self, disk: Disk, length: int, old: Entry | None = None) -> int | None:
        """Return an extent for a value of ``length`` bytes on a device, evicting from it if need be, perhaps ``old``.

        ``old`` is what it replaces: its bytes count as free, if they are on this device.
        None: there is none now. What was evicted for it is free when the log says so, some milliseconds later, unless
        :attr:`Disk.is_freeing` is false: then nothing on the device may be evicted.
        """
        blocks = object_blocks(length)
        size = blocks * BLOCK_BYTES
        if size > disk.capacity_bytes:
            return None
        self._filled.add(disk.number)
        index = self._core.index
        replaced = old if old is not None and old.device == disk.number else None
        while True:
            totals = index.totals(device=disk.number)
            freed_bytes, freed_keys = self._freed(replaced)
            has_bytes = totals.bytes - freed_bytes + size <= disk.capacity_bytes
            if has_bytes and totals.objects - freed_keys < disk.objects_max:
                extent = disk.volume.reserve(size)
                if extent is not None or disk.volume.freeing_blocks >= _PIECES * blocks:
                    return extent
            if not self.evict(cause="device", device=disk.number):
                return None

    def set_device_budget(self, disk: Disk, bytes_max: int | None, objects_max: int | None) -> None:
        """Change what a device may hold; None for all that it has room for. What is beyond it goes bit by bit."""
        disk.set_budget(bytes_max, objects_max)
        self._filled.add(disk.number)
        self.keep_headroom()

    def keep_headroom(self) -> None:
        """Evict ahead of writers, so that they rarely wait: in poll(), a few at a time."""
        if self._filled:
            self._filled = {number for number in self._filled if not self._has_headroom(self._core.disks[number])}

    def _has_headroom(self, disk: Disk) -> bool:
        """Return whether enough of a device is free, perhaps after some evictions."""
        totals = self._core.index.totals(device=disk.number)
        if disk.gone is not None or not totals.objects:
            return True
        size, mean = disk.capacity_bytes, totals.bytes // totals.objects
        headroom = min(int(_HEADROOM_SHARE * size), _HEADROOM_BYTES_MAX)
        headroom = max(headroom, min(_HEADROOM_OBJECTS * mean, size // _HEADROOM_SMALL))
        for _ in range(_EVICTIONS_PER_TURN):
            within = totals.objects <= disk.objects_max
            if size - totals.bytes >= headroom and disk.free_bytes >= headroom and within:
                return True
            if not self.evict(cause="device", device=disk.number):
                return False
            totals = self._core.index.totals(device=disk.number)
        return False

    # ---- Memory

    def memory(self, blocks: int, parent: bytes = b"", key: bytes = b"") -> Buffer | None:
        """Return a buffer with one user, dropping copies and what is in memory alone; None if all is in use."""
        core = self._core
        tries = _TRIES_MAX
        while (buffer := core.arenas.take(blocks, parent, key)) is None:
            if not tries:
                self.wants_turn = True
                return None
            bound = self._memory_only_max - blocks * BLOCK_BYTES
            first_homeless = core.copies.kept_bytes > bound and core.index.totals(device=MEMORY_ONLY).bytes > bound
            tries -= 1
            if first_homeless and self.evict(cause="memory", device=MEMORY_ONLY):
                continue
            if not core.copies.make_room() and not (
                self._is_all_kept() and self.evict(cause="memory", device=MEMORY_ONLY)
            ):
                return None
        return buffer

    def _is_all_kept(self) -> bool:
        """Return whether waiting would free no memory: none is a copy, is read into, or is being sent.

        What is in memory alone is not evicted for a moment's need: a request for a long prefix has it all in use.
        """
        arenas = self._core.arenas
        return arenas.used_bytes - arenas.lent_bytes <= self._core.copies.kept_bytes
