"""Room: which object goes when there is none, in memory, on a device, in the index, or within a budget.

A tenant beyond its own quota gives up its own objects only. Beyond anything else, tenants that use more than an equal
share of the budget go first, then whatever the index names: the least recently used or what S3-FIFO says, never before
its descendants, never while it is pinned.
"""

from dataclasses import dataclass
from typing import Final

from storage_kv.engine import TENANT_BYTES, OutOfBudgetError
from storage_kv.pool.arena import BLOCK_BYTES, Buffer, object_blocks
from storage_kv.pool.core import MEMORY_ONLY, Core, Entry
from storage_kv.pool.disk import Disk
from storage_kv.pool.keys import CHUNK_KEY_BYTES

__all__ = ["EVICTION_CAUSES", "Quota", "Space"]

EVICTION_CAUSES: Final = ("budget", "device", "memory", "quota")
"""Why an object goes: all have too much, a device is full, memory alone has it and is full, its tenant has too much."""
_TRIES_MAX: Final = 4_096
"""Copies dropped for one object: as many of 4 KiB as one of 16 MiB takes."""
_HEADROOM_SHARE: Final = 0.01
_HEADROOM_BYTES_MAX: Final = 256 << 20
_HEADROOM_OBJECTS: Final = 8
_HEADROOM_SMALL: Final = 8
"""A hundredth of a device is kept free ahead of writers; where that is little, eight objects, or an eighth."""
_PIECES: Final = 2
"""Evicted for an object that finds no room, in multiples of its size: space may be in pieces."""
_EVICTIONS_PER_TURN: Final = 64
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
    """Makes room."""

    def __init__(self, core: Core, *, budget_bytes: int | None, objects_max: int, memory_homes: bool) -> None:
        """Make one for a pool without quotas.

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
        self.tenants: set[int] = {0}
        self._filled = {disk.number for disk in core.disks}  # where less may be free than when there was enough
        if not core.disks:
            self._memory_only_max = core.arenas.size
        else:
            share = _MEMORY_HOMES_SHARE if memory_homes else _HELD_BACK_SHARE
            self._memory_only_max = int(share * core.arenas.size)

    @property
    def capacity_bytes(self) -> int:
        """What the pool may hold: the budget, or what devices and memory have room for."""
        disks = sum(disk.capacity_bytes for disk in self._core.disks if disk.gone is None)
        room = disks or self._core.arenas.size
        return room if self.budget_bytes is None else self.budget_bytes

    # ---- Quotas and budgets

    def make_room_for(self, tenant: int, size: int, old: Entry | None) -> None:
        """Evict until an object of ``size`` bytes is within its tenant's quota and the pool's budget.

        Args:
            tenant: whose.
            size: bytes, rounded up to blocks.
            old: what it replaces.

        Raises:
            OutOfBudgetError: it can never be, or everything else is pinned. Nothing has changed in the first case.
        """
        quota = self.quotas.get(tenant)
        bytes_max = min(self.capacity_bytes, quota.bytes_max if quota and quota.bytes_max is not None else 1 << 62)
        keys_max = quota.keys_max if quota and quota.keys_max is not None else self.objects_max
        held = 0 if self._core.disks else self._core.arenas.held_bytes
        if size + held > bytes_max or keys_max < 1:
            raise OutOfBudgetError(
                f"a value that takes {size} bytes does not fit {bytes_max} bytes, {held} of them held by replies"
            )
        index = self._core.index
        if old is not None:
            index.touch(old.slot, self._core.now_s())  # it goes anyway: others must not go for it
        if quota is not None:
            while True:
                totals = index.totals(tenant=tenant)
                freed_bytes, freed_keys = self._freed(old)
                if not quota.is_exceeded(totals.bytes - freed_bytes + size, totals.objects - freed_keys + 1):
                    break
                if not self.evict(cause="quota", tenant=tenant):
                    raise OutOfBudgetError("the tenant's quota is used up by pinned objects")
        while True:
            totals = index.totals()
            freed_bytes, freed_keys = self._freed(old)
            used = totals.bytes - freed_bytes + held
            fits = used + size <= self.capacity_bytes
            if fits and totals.objects - freed_keys < self.objects_max:
                return
            if not self.evict(cause="budget" if fits else self._shortage):
                raise OutOfBudgetError("the budget is used up by pinned objects")

    def _freed(self, old: Entry | None) -> tuple[int, int]:
        """Return the bytes, and the keys, that become free when an entry is replaced."""
        if old is None or not self._core.is_current(old):
            return 0, 0
        if not self._core.disks:
            buffer = self._core.copies.peek(old.slot)
            if buffer is not None and buffer.users > 1:  # it is being sent
                return 0, 1
        return old.size, 1

    def trim(self) -> None:
        """Evict what is beyond budget and quotas, as far as it may be; after one of them has changed."""
        index = self._core.index
        for tenant, quota in self.quotas.items():
            while True:
                totals = index.totals(tenant=tenant)
                if not quota.is_exceeded(totals.bytes, totals.objects) or not self.evict(cause="quota", tenant=tenant):
                    break
        while index.totals().bytes > self.capacity_bytes and self.evict(cause=self._shortage):
            pass

    @property
    def _shortage(self) -> str:
        """Why objects go that take more than the pool's capacity."""
        return "device" if self._core.disks and self.budget_bytes is None else "budget"

    def evict(self, *, cause: str, device: int = -1, tenant: int = -1) -> bool:
        """Evict one object, of a device or of a tenant or any; return whether there was one that may go."""
        core = self._core
        now_s = core.now_s()
        for _ in range(_EVICTIONS_PER_TURN):
            heavy = self._heaviest(device) if tenant < 0 else None
            slot = core.index.victim(now_s, device, heavy) if heavy is not None else 0
            slot = slot or core.index.victim(now_s, device, tenant)
            entry = core.entry(slot) if slot else None
            if entry is None:
                return False
            buffer = core.copies.peek(slot) if entry.device == MEMORY_ONLY else None
            if buffer is None or buffer.users == 1:
                break
            core.index.touch(slot, now_s)  # it is being sent: evicting it would free nothing
        else:
            return False
        counters = core.counters.tenants[entry.tenant]
        counters.evictions[cause] += 1
        counters.evicted_bytes += entry.length + self._key_bytes(entry)
        core.forget(entry, remember=True)
        return True

    def _key_bytes(self, entry: Entry) -> int:
        name = self._core.index.name(entry.slot)
        return TENANT_BYTES + (len(name) if name is not None else CHUNK_KEY_BYTES)

    def _heaviest(self, device: int) -> int | None:
        """Return the tenant that is most over an equal share of the budget, and has something on the device."""
        if len(self.tenants) < 2:
            return None
        index = self._core.index
        used = {tenant: index.totals(tenant=tenant).bytes for tenant in self.tenants}
        active = [tenant for tenant, amount in used.items() if amount]
        if len(active) < 2:
            return None
        share = self.capacity_bytes // len(active)
        over = [
            tenant
            for tenant in active
            if used[tenant] > share and (device < 0 or index.totals(tenant=tenant, device=device).objects)
        ]
        return max(over, key=lambda tenant: used[tenant]) if over else None

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
        return not self._core.disks or arenas.used_bytes - arenas.lent_bytes <= self._core.copies.kept_bytes
