"""Tenants' ids: assigned in order and logged on every device, so that a restart knows the tenants of all objects."""

from collections.abc import Mapping

from shadowserve.pool.disk import Disk
from shadowserve.pool.types import TENANTS_MAX
from shadowserve.pool.volume.tickets import OutOfBudgetError


class Tenants:
    """Names and ids of tenants."""

    def __init__(self, disks: list[Disk]) -> None:
        """Recover names and ids from the devices.

        Where one was missing when another one logged a new tenant, the first one in the list counts.
        """
        self._disks = disks
        self._next_id = 1
        self._ids: dict[str, int] = {"": 0}
        self.conflicts: list[tuple[Disk, int]] = []  # devices and ids whose objects there belong to another tenant
        names = self._names = {0: ""}
        for disk in disks:
            for tenant, text in disk.volume.tenants.items():
                name = text.decode(errors="surrogateescape")
                known = names.get(tenant)
                if known is None and name not in self._ids:
                    names[tenant] = name
                    self._ids[name] = tenant
                elif known != name:
                    self.conflicts.append((disk, tenant))
        for disk in disks:
            for name, tenant in self._ids.items():
                if tenant:
                    disk.log.name_tenant(tenant, name)

    def by_name(self) -> Mapping[str, int]:
        return self._ids

    def name_of(self, tenant: int) -> str:
        return self._names[tenant]

    def ids(self) -> set[int]:
        return set(self._ids.values())

    def id_of(self, name: str) -> int:
        """Return a tenant's id; assign one if needed. OutOfBudgetError if all ids are assigned."""
        tenant = self._ids.get(name)
        if tenant is None:
            while self._next_id in self._names:
                self._next_id += 1
            tenant = self._next_id if self._next_id < TENANTS_MAX else 0
            if not tenant:
                raise OutOfBudgetError(f"there are {TENANTS_MAX} tenants already; use fewer tenants")
            self._ids[name] = tenant
            self._names[tenant] = name
            for disk in self._disks:
                disk.log.name_tenant(tenant, name)
        return tenant
