"""What bounds a pool while it runs: budgets, tenants' quotas, and what their pins may take."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from shadowserve.errors import ConfigurationError
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.core import Core
from shadowserve.pool.entries import Entry
from shadowserve.pool.opening import Opened
from shadowserve.pool.scrub import Scrubber
from shadowserve.pool.space import Quota, Space
from shadowserve.pool.tenants import Tenants
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address, PinnedEntries
from shadowserve.pool.writes import Writer

__all__ = ["Bounds"]


class Bounds(ABC):
    """The part of the pool's store that changes what it may hold, and who may have how much of it."""

    _clock_ms: Callable[[], int]
    _core: Core
    _opened: Opened
    _space: Space
    _scrubber: Scrubber
    _tenants: Tenants
    _writer: Writer

    @abstractmethod
    def _entry_of(self, address: Address) -> Entry | None:
        """Return the entry of a client's key, unless it has expired, which removes it."""

    def tenant(self, name: str) -> int:
        """See :meth:`Store.tenant`."""
        return self._tenants.id_of(name)

    def tenants(self) -> Mapping[str, int]:
        """See :meth:`Store.tenants`."""
        return self._tenants.by_name()

    def set_quota(self, tenant: int, bytes_max: int | None, keys_max: int | None) -> None:
        """See :meth:`Store.set_quota`. Bytes count as they lie: with headers, in blocks of 4 KiB."""
        if bytes_max is None and keys_max is None:
            self._space.quotas.pop(tenant, None)
        else:
            self._space.quotas[tenant] = Quota(bytes_max, keys_max)
            self._bound(tenant)

    def _bound(self, tenant: int | None = None) -> None:
        self._space.bound(tenant)
        if self._space.is_beyond:
            self._core.waker.wake()

    def set_budget(self, budget_bytes: int) -> None:
        """See :meth:`Store.set_budget`: bounds all objects together, below what devices and memory have room for."""
        self._space.budget_bytes = budget_bytes
        self._bound()

    def follow(self, config: PoolConfig) -> None:
        """See :meth:`Store.follow`.

        The arenas stay as large as they were mapped: beyond that, more memory has no effect. Without devices there are
        none, and memory bounds all objects.
        """
        disks = {disk.name: disk for disk in self._core.disks}
        present = set(disks).union(name for name, _ in self._opened.absent)
        unknown = [str(device.path) for device in config.devices if str(device.path) not in present]
        if unknown:
            raise ConfigurationError(f"there is no device {unknown[0]}; there are {sorted(present)}")
        arenas = self._core.arenas
        arenas.budget_bytes = min(int(config.memory_budget_bytes), arenas.size)
        if self._core.heap is not None:
            self._space.budget_bytes = int(config.memory_budget_bytes)
        self._bound()
        for device in config.devices:
            disk = disks.get(str(device.path))
            if disk is not None:
                self._space.set_device_budget(disk, device.bytes_max, device.objects_max)
                disk.wear.budget_bytes = device.write_bytes_per_day
        self._scrubber.bytes_per_s = int(config.scrub_bytes_per_s)

    def drop_copies(self) -> None:
        """Forget what memory holds of what devices have, as far as nobody uses it: to measure reads of devices."""
        while self._core.copies.make_room():
            pass

    def set_pin_shares(self, of_tenant: float, of_all: float) -> None:
        """See :meth:`Store.set_pin_shares`."""
        self._core.pins.of_tenant, self._core.pins.of_all = of_tenant, of_all

    def pin(self, address: Address, until_ms: int) -> bool:
        """See :meth:`Store.pin`. The index counts in seconds: pins are rounded up."""
        entry = self._entry_of(address)
        if entry is None:
            return False
        until_s = -(-until_ms // 1000) if until_ms > self._clock_ms() else 0
        if until_s:
            self._end_pins()
            quota_bytes, budget_bytes = self._space.bounds(entry.tenant)
            self._core.pins.check(
                entry.tenant, entry.slot, entry.size, quota_bytes=quota_bytes, budget_bytes=budget_bytes
            )
        self._pin(entry, until_s)
        return True

    def _pin(self, entry: Entry, until_s: int) -> None:
        self._core.index.pin(entry.slot, until_s)
        if self._core.heap is not None:
            self._core.heap.at(entry.slot).is_plain = False
            self._core.heap.count_uses()
        if until_s:
            self._core.pins.add(entry.tenant, entry.slot, entry.size, 1000 * until_s)
        else:
            self._core.pins.drop(entry.tenant, entry.slot)
        disk = self._core.disk_of(entry)
        if disk is not None and not self._writer.is_unsubmitted(entry.slot):
            disk.log_pin(entry.tenant, entry.key, until_s)

    def unpin_some(self, tenant: int | None) -> int:
        """See :meth:`Store.unpin_some`."""
        some = self._core.pins.some(tenant, ENTRIES_PER_HOLD)
        for _, slot in some:
            entry = self._core.entry(slot)
            assert entry is not None, "a pin outlived its entry"
            self._pin(entry, 0)
        return len(some)

    def pinned(self, tenant: int) -> PinnedEntries:
        """See :meth:`Store.pinned`."""
        quota_bytes, budget_bytes = self._space.bounds(tenant)
        return self._core.pins.entries(tenant, quota_bytes=quota_bytes, budget_bytes=budget_bytes)

    def pinning_tenants(self, count_max: int) -> list[int]:
        """See :meth:`Store.pinning_tenants`."""
        return self._core.pins.tenants(count_max)

    def _end_pins(self) -> None:
        """Let objects take part again whose pins have ended."""
        now_ms = self._clock_ms()
        for _ in range(ENTRIES_PER_HOLD):
            ended = self._core.pins.ended(now_ms)
            if ended is None:
                return
            tenant, slot = ended
            self._core.pins.drop(tenant, slot)
            self._core.index.pin(slot, 0)
