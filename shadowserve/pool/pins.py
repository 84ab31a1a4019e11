"""Who keeps how much from eviction, and until when.

A pin counts against the share of its tenant and of all together (``pin_share_of_tenant``, ``pin_share``). Nothing here
takes longer as there are more pins: ends are in order, and what each tenant has is summed up.
"""

from itertools import count, islice
from typing import NamedTuple

from shadowserve.pool.ordered import Ordered
from shadowserve.pool.terms import PinnedEntries, PinShareError


class _Pin(NamedTuple):
    number: int
    """Its end in ms, and what makes it unique, in one number."""
    size: int


class Pins:
    """Pins of entries, by tenant and slot.

    Attributes:
        of_tenant: share of a tenant's quota, or of the budget without one, that its pins may take.
        of_all: share of the budget that all pins may take together.
        total: of all pins.
    """

    def __init__(self) -> None:
        self.of_tenant = 1.0
        self.of_all = 1.0
        self.total_bytes = 0
        self._pins: dict[int, dict[int, _Pin]] = {}
        self._bytes: dict[int, int] = {}
        self._ends: Ordered[tuple[int, int]] = Ordered()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._ends)

    def has(self, tenant: int, slot: int) -> bool:
        """Return whether an entry is pinned."""
        return slot in self._pins.get(tenant, ())

    def bytes_of(self, tenant: int) -> int:
        """Return the bytes that a tenant has pinned."""
        return self._bytes.get(tenant, 0)

    def count(self, tenant: int | None) -> int:
        """Return the number of a tenant's pins, or of all."""
        return len(self._ends) if tenant is None else len(self._pins.get(tenant, ()))

    def check(self, tenant: int, slot: int, size: int, *, quota_bytes: int | None, budget_bytes: int) -> None:
        """Check that an entry may be pinned.

        Raises:
            PinShareError: its tenant, or all, would have too much pinned.
        """
        pin = self._pins.get(tenant, {}).get(slot)
        more = size - (pin.size if pin is not None else 0)
        if more <= 0:
            return
        own_max = self._own_max(quota_bytes, budget_bytes)
        if self.bytes_of(tenant) + more > own_max:
            raise PinShareError(
                f"pins of this tenant may take {own_max} bytes, and {self.bytes_of(tenant)} are; "
                "unpin some, or wait until their pins end"
            )
        if self.total_bytes + more > int(self.of_all * budget_bytes):
            raise PinShareError("pins may not take more at present; wait until some end")

    def add(self, tenant: int, slot: int, size: int, until_ms: int) -> None:
        """Pin an entry of ``size`` bytes, or change its pin."""
        self.drop(tenant, slot)
        pin = _Pin(max(until_ms, 0) << 64 | next(self._numbers), size)
        self._pins.setdefault(tenant, {})[slot] = pin
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        self.total_bytes += size
        self._ends.add(pin.number, (tenant, slot))

    def drop(self, tenant: int, slot: int) -> None:
        """Unpin an entry, if it is pinned."""
        pins = self._pins.get(tenant)
        pin = None if pins is None else pins.pop(slot, None)
        if pins is None or pin is None:
            return
        self._ends.remove(pin.number)
        self.total_bytes -= pin.size
        self._bytes[tenant] -= pin.size
        if not pins:
            del self._pins[tenant], self._bytes[tenant]

    def ended(self, now_ms: int) -> tuple[int, int] | None:
        """Return tenant and slot of the pin that ended first, if it has; it is still there."""
        first = self._ends.first()
        return None if first is None or first[0] >> 64 > now_ms else first[1]

    def some(self, tenant: int | None, count_max: int) -> list[tuple[int, int]]:
        """Return tenants and slots of some of a tenant's pins, or of anyone's."""
        if tenant is None:
            return self._ends.page(0, count_max)[1]
        return [(tenant, slot) for slot in islice(self._pins.get(tenant, ()), count_max)]

    def entries(self, tenant: int, *, quota_bytes: int | None, budget_bytes: int) -> PinnedEntries:
        """Return what a tenant has pinned, and may."""
        return PinnedEntries(self.count(tenant), self.bytes_of(tenant), self._own_max(quota_bytes, budget_bytes))

    def _own_max(self, quota_bytes: int | None, budget_bytes: int) -> int:
        return int(self.of_tenant * min(budget_bytes, budget_bytes if quota_bytes is None else quota_bytes))

    def tenants(self, count_max: int) -> list[int]:
        """Return some tenants that have pins."""
        return list(islice(self._pins, count_max))
