"""Tenants' ids: given out in order, and told to every device, so that a restart knows whose objects are whose."""

from collections.abc import Mapping

from shadowserve.pool.disk import Disk
from shadowserve.pool.terms import TENANTS_MAX
from shadowserve.pool.volume.changes import OutOfBudgetError


class Tenants:
    """Names and ids."""

    def __init__(self, disks: list[Disk]) -> None:
        """Take over what the devices know.

        Where two devices disagree, since one was absent when the other learned of a tenant, the first one counts, so
        those that were away come last; :attr:`strangers` says what lies on the other.

        Attributes:
            strangers: devices and ids of tenants whose objects there are somebody else's.
        """
        self._disks = disks
        self._next_id = 1
        self._ids: dict[str, int] = {"": 0}
        self.strangers: list[tuple[Disk, int]] = []
        names = self._names = {0: ""}
        for disk in disks:
            for tenant, text in disk.volume.tenants.items():
                name = text.decode(errors="surrogateescape")
                known = names.get(tenant)
                if known is None and name not in self._ids:
                    names[tenant] = name
                    self._ids[name] = tenant
                elif known != name:
                    self.strangers.append((disk, tenant))
        for disk in disks:
            for name, tenant in self._ids.items():
                if tenant:
                    disk.log.name_tenant(tenant, name)

    def by_name(self) -> Mapping[str, int]:
        """Return all ids that were given out, by the tenants' names."""
        return self._ids

    def name_of(self, tenant: int) -> str:
        """Return the name of an id that was given out."""
        return self._names[tenant]

    def ids(self) -> set[int]:
        """Return all ids that were given out."""
        return set(self._ids.values())

    def id_of(self, name: str) -> int:
        """Return a tenant's id, a new one if it has none.

        Raises:
            OutOfBudgetError: there are no more.
        """
        tenant = self._ids.get(name)
        if tenant is None:
            while self._next_id in self._names:
                self._next_id += 1
            tenant = self._next_id if self._next_id < TENANTS_MAX else 0
            if not tenant:
                raise OutOfBudgetError(f"there are {TENANTS_MAX} tenants already")
            self._ids[name] = tenant
            self._names[tenant] = name
            for disk in self._disks:
                disk.log.name_tenant(tenant, name)
        return tenant
