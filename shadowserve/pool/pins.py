"""Pins: which entries must not be evicted, and until when.

A pin counts against the share of its tenant (``pin_share_of_tenant``) and of all tenants (``pin_share``). The pins are
sorted by their end, so no operation becomes slower as there are more of them.
"""

from itertools import count, islice
from typing import NamedTuple

from sortedcontainers import SortedDict

from shadowserve.pool.types import PinnedEntries, PinShareError


class _Pin(NamedTuple):
    number: int
    """The end in ms, followed by 64 bits that make the number unique."""
    size: int


class Pins:
    """Pins of entries, by tenant and slot.

    Attributes:
        of_tenant: Largest share of a tenant's quota, or of the budget without a quota, that its pins may have.
    """

    def __init__(self) -> None:
        self.of_tenant = 1.0
        self.of_all = 1.0  # largest share of the budget that all pins may have
        self.total_bytes = 0
        self._pins: dict[int, dict[int, _Pin]] = {}
        self._bytes: dict[int, int] = {}
        self._by_end: SortedDict[int, tuple[int, int]] = SortedDict()
        self._numbers = count()

    def has(self, tenant: int, slot: int) -> bool:
        return slot in self._pins.get(tenant, ())

    def bytes_of(self, tenant: int) -> int:
        return self._bytes.get(tenant, 0)

    def count(self, tenant: int | None) -> int:
        return len(self._by_end) if tenant is None else len(self._pins.get(tenant, ()))

    def check(self, tenant: int, slot: int, size: int, *, quota_bytes: int | None, budget_bytes: int) -> None:
        """Raise PinShareError if the tenant, or all tenants together, would have too much pinned."""
        pin = self._pins.get(tenant, {}).get(slot)
        more = size - (pin.size if pin is not None else 0)
        if more <= 0:
            return
        own_max = self._own_max(quota_bytes, budget_bytes)
        if self.bytes_of(tenant) + more > own_max:
            raise PinShareError(
                f"pins of this tenant may take {own_max} bytes and take {self.bytes_of(tenant)}; "
                "unpin some entries, or wait until pins end"
            )
        if self.total_bytes + more > int(self.of_all * budget_bytes):
            raise PinShareError("all pins together have their share of the budget; wait until some pins end")

    def add(self, tenant: int, slot: int, size: int, until_ms: int) -> None:
        self.drop(tenant, slot)
        pin = _Pin(max(until_ms, 0) << 64 | next(self._numbers), size)
        self._pins.setdefault(tenant, {})[slot] = pin
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        self.total_bytes += size
        self._by_end[pin.number] = (tenant, slot)

    def drop(self, tenant: int, slot: int) -> None:
        pins = self._pins.get(tenant)
        pin = None if pins is None else pins.pop(slot, None)
        if pins is None or pin is None:
            return
        del self._by_end[pin.number]
        self.total_bytes -= pin.size
        self._bytes[tenant] -= pin.size
        if not pins:
            del self._pins[tenant], self._bytes[tenant]

    def ended(self, now_ms: int) -> tuple[int, int] | None:
        """Return tenant and slot of the pin with the earliest end, if that has passed. The pin is not dropped."""
        if not self._by_end:
            return None
        number, pinned = self._by_end.peekitem(0)
        return pinned if number >> 64 <= now_ms else None

    def some(self, tenant: int | None, count_max: int) -> list[tuple[int, int]]:
        if tenant is None:
            return list(islice(self._by_end.values(), count_max))
        return [(tenant, slot) for slot in islice(self._pins.get(tenant, ()), count_max)]

    def entries(self, tenant: int, *, quota_bytes: int | None, budget_bytes: int) -> PinnedEntries:
        return PinnedEntries(self.count(tenant), self.bytes_of(tenant), self._own_max(quota_bytes, budget_bytes))

    def _own_max(self, quota_bytes: int | None, budget_bytes: int) -> int:
        return int(self.of_tenant * min(budget_bytes, budget_bytes if quota_bytes is None else quota_bytes))

    def tenants(self, count_max: int) -> list[int]:
        return list(islice(self._pins, count_max))
