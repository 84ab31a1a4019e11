"""Room: which object is evicted when memory, a device, the index or a budget is full.

A tenant beyond its quota evicts its own objects only. Otherwise the tenant with most evicts first, if it has more than
an equal share of the budget. The policy chooses its victim: never before the victim's descendants, never while it is
pinned, and only last among those that requests wait for. Cleared objects go before all others. One hold of the pool's
lock evicts a limited number of objects; the rest is evicted in poll(), or when the writer tries again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from shadowserve.keys import storage_key
from shadowserve.pool.arena import Buffer
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import MEMORY_ONLY, Entry
from shadowserve.pool.types import ENTRIES_PER_HOLD, Address
from shadowserve.pool.volume.format import BLOCK_BYTES, blocks_of
from shadowserve.pool.volume.tickets import OutOfBudgetError

EVICTION_CAUSES: Final = ("budget", "device", "memory", "quota")
"""Causes of evictions: the pool is beyond its budget, a device is full, memory is full of objects that no device has, a
tenant is beyond its quota."""
_TRIES_MAX: Final = 1_024
"""Copies that are dropped at a time to find memory for one object: about 3 ms. A larger object continues in the next
poll()."""
_HEADROOM_SHARE: Final = 0.01
_HEADROOM_BYTES_MAX: Final = 256 << 20
_HEADROOM_OBJECTS: Final = 8
_HEADROOM_SMALL: Final = 8
"""A hundredth of a device is kept free for writers; where that is little, room for eight objects, or an eighth."""
_PIECES: Final = 2
"""Evictions for an object that finds no room, in multiples of its size: free space may be in pieces."""
_EVICTIONS_PER_TURN: Final = 64
_CLEARED_LOOKS: Final = 16
"""Entries that are examined for cleared ones before another one is evicted."""
_GIVERS: Final = 16
"""Tenants that are asked for an object on a device, those with most bytes first."""
_HELD_BACK_SHARE: Final = 0.25
_MEMORY_HOMES_SHARE: Final = 0.75


@dataclass(slots=True)
class Quota:
    """Limits of a tenant; None for no limit."""

    bytes_max: int | None = None
    keys_max: int | None = None

    def is_exceeded(self, used_bytes: int, keys: int) -> bool:
        too_large = self.bytes_max is not None and used_bytes > self.bytes_max
        return too_large or (self.keys_max is not None and keys > self.keys_max)


class Space:
    """Makes room.

    Attributes:
        held_back: Returns whether a record may not be evicted yet, since the lower tier still writes it.
        waits_for_lower_tier: A record was held back; writers try again in the next turn.
    """

    def __init__(self, core: Core, *, budget_bytes: int | None, objects_max: int, memory_homes: bool) -> None:
        """``memory_homes``: objects of memory's share are in memory alone. There are no quotas yet."""
        self._core = core
        self.budget_bytes = budget_bytes
        self.objects_max = objects_max
        self.quotas: dict[int, Quota] = {}
        self.begin_hold()
        self.wants_poll = self.waits_for_lower_tier = False
        self.held_back: Callable[[Address], bool] = lambda address: False
        self._beyond: dict[int, None] = {}  # tenants that may be beyond their quota
        self._is_beyond = False  # the pool may be beyond its capacity
        self._filled = {disk.number for disk in core.disks}  # devices that may lack headroom
        share = _MEMORY_HOMES_SHARE if memory_homes else _HELD_BACK_SHARE
        self._memory_only_max = int(share * core.arenas.size)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of the pool: the budget, or the room of the devices, or of memory where all devices are gone."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return sum(disk.capacity_bytes for disk in self._core.disks if disk.gone is None) or self._core.arenas.size

    def begin_hold(self) -> None:
        """Allow as many evictions as one hold of the lock may do."""
        self.evictions_left = ENTRIES_PER_HOLD  # evictions until the lock must be released
        self._cleared_looks = ENTRIES_PER_HOLD

    # ---- Quotas and budgets

    def bounds(self, tenant: int) -> tuple[int | None, int]:
        """Return the bytes of a tenant's quota (None without one) and of the budget."""
        quota = self.quotas.get(tenant)
        return None if quota is None else quota.bytes_max, self.capacity_bytes

    def make_room_for(self, tenant: int, size: int, old: Entry | None) -> bool:
        """Evict until an object of ``size`` bytes fits its tenant's quota and the pool's budget.

        Returns:
            False if more has to be evicted than one hold of the lock allows.

        Raises:
            OutOfBudgetError: It can never fit (nothing has changed), or everything else is pinned.
        """
        core, capacity, quota = self._core, self.capacity_bytes, self.quotas.get(tenant)
        self._check_fits(size, capacity, core.held_bytes)
        if quota is not None and quota.bytes_max is not None:
            self._check_fits(size, quota.bytes_max, core.held_bytes_of(tenant))
        if old is not None:
            core.index.touch(old.slot, core.now_s())  # it is replaced anyway: no other entry should be evicted first
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
        """Return False if evictions stopped only because of the lock, otherwise raise."""
        if self.evictions_left > 0 and not self._core.clears.under_way:
            raise OutOfBudgetError(why)
        return False

    def _freed(self, old: Entry | None) -> tuple[int, int]:
        if old is None or not self._core.is_current(old):
            return 0, 0
        return self._core.freed_bytes(old), 1

    def bound(self, tenant: int | None) -> None:
        """Evict what is beyond a tenant's changed quota, or a changed budget (None), as far as this hold allows."""
        if tenant is None:
            self._is_beyond = True
        else:
            self._beyond[tenant] = None
        self.trim()

    @property
    def is_beyond(self) -> bool:
        """True if trim() has more to do, and can."""
        return (self._is_beyond or bool(self._beyond)) and not self.waits_for_lower_tier

    def trim(self) -> None:
        index = self._core.index
        for tenant in list(islice(self._beyond, ENTRIES_PER_HOLD)):
            quota = self.quotas.get(tenant)
            while quota is not None:
                totals = index.totals(tenant=tenant)
                if not quota.is_exceeded(totals.bytes, totals.objects) or not self.evict(cause="quota", tenant=tenant):
                    break
            if self.evictions_left <= 0:
                return
            del self._beyond[tenant]
        while self._is_beyond and self.evictions_left > 0:
            self._is_beyond = index.totals().bytes > self.capacity_bytes and self.evict(cause=self._shortage)

    @property
    def _shortage(self) -> str:
        return "device" if self._core.disks and self.budget_bytes is None else "budget"

    def evict(self, *, cause: str, device: int = -1, tenant: int = -1) -> bool:
        """Evict one object of a device, of a tenant, or any; return False if none may be evicted now."""
        core = self._core
        if self.evictions_left <= 0:
            return False
        self.evictions_left -= 1
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
                self.evictions_left, self.waits_for_lower_tier = 0, True
                return False
            if core.evict(slot, cause):
                return True
            core.index.touch(slot, now_s)
        return False

    def _is_held_back(self, slot: int) -> bool:
        fields = self._core.index.read(slot)
        return fields.header_length > 0 and self.held_back((fields.tenant, storage_key(fields.key)))

    def _heaviest(self, device: int) -> int | None:
        """Return the tenant that is most beyond an equal share of the budget and has an object on the device."""
        for tenant in self._core.usage_ranking.heaviest_first(_GIVERS, self.capacity_bytes):
            if device < 0 or self._core.index.totals(tenant=tenant, device=device).objects:
                return tenant
        return None

    # ---- Devices

    def extent(self, disk: Disk, length: int, old: Entry | None = None) -> int | None:
        """Reserve an extent for a value of ``length`` bytes, evicting from the device if needed, even the replaced
        entry ``old``, whose bytes count as free; None if there is none now.

        Extents of evicted objects become free some milliseconds later, when the log is durable. If
        :attr:`Disk.is_freeing` is False, nothing on the device may be evicted.
        """
        blocks = blocks_of(length)
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
        """Change the limits of a device; None for its full size. The excess is evicted bit by bit."""
        disk.set_budget(bytes_max, objects_max)
        self._filled.add(disk.number)
        self.keep_headroom()

    def keep_headroom(self) -> None:
        """Evict ahead of writers so that they rarely wait: in poll(), a few objects at a time."""
        if self._filled:
            self._filled = {number for number in self._filled if not self._has_headroom(self._core.disks[number])}

    def _has_headroom(self, disk: Disk) -> bool:
        """Return whether a device has its headroom, after a few evictions if needed."""
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
        """Return a buffer with one user, dropping copies and objects of memory alone if needed; None if all memory
        is in use."""
        core = self._core
        tries = _TRIES_MAX
        while (buffer := core.arenas.take(blocks, parent, key)) is None:
            if not tries:
                self.wants_poll = True  # the search for memory has taken as long as one hold of the lock allows
                return None
            bound = self._memory_only_max - blocks * BLOCK_BYTES
            memory_only_bytes = core.index.totals(device=MEMORY_ONLY).bytes
            first_memory_only = core.memory_cache.kept_bytes > bound and memory_only_bytes > bound
            tries -= 1
            if first_memory_only and self.evict(cause="memory", device=MEMORY_ONLY):
                continue
            if not core.memory_cache.make_room() and not (
                self._is_all_kept() and self.evict(cause="memory", device=MEMORY_ONLY)
            ):
                return None
        return buffer

    def _is_all_kept(self) -> bool:
        """Return whether waiting would free no memory: there are no copies, and none is being read into or sent."""
        arenas = self._core.arenas
        return arenas.used_bytes - arenas.lent_bytes <= self._core.memory_cache.kept_bytes
