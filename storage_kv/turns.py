"""The order in which waiting requests go on: by tenant, then by client, whoever was served least goes first.

This is start-time fair queueing on two levels. A tenant's requests never stand before another tenant's, however many
they are, and a client's never before those of the same tenant's other clients. No clock, no I/O.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class _Tenant(Generic[T]):
    """What waits of one tenant.

    Attributes:
        start: what the tenant was served when its next request's turn begins, in units of its weight.
    """

    __slots__ = ("_clients", "_clock", "_count", "_order", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self._clients: dict[int, deque[T]] = {}
        self._order: list[tuple[float, int, int]] = []  # start, a number that tells equal ones apart, client
        self._clock = 0.0
        self._count = 0

    def add(self, client: int, item: T) -> None:
        items = self._clients.get(client)
        if items is None:
            items = self._clients[client] = deque()
            self._push(self._clock, client)
        items.append(item)

    def _push(self, start: float, client: int) -> None:
        self._count += 1
        heappush(self._order, (start, self._count, client))

    def first(self) -> T:
        return self._clients[self._order[0][2]][0]

    def charge(self, cost: float, *, takes: bool) -> bool:
        """Charge the first's client, and take the first away if it is over; return whether any is left."""
        start, _, client = heappop(self._order)
        self._clock = start
        items = self._clients[client]
        if takes:
            items.popleft()
        if items:
            self._push(start + cost, client)
        else:
            del self._clients[client]
        return bool(self._order)

    def __iter__(self) -> Iterator[T]:
        for items in self._clients.values():
            yield from items


class Turns(Generic[T]):
    """What waits, of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[int, _Tenant[T]] = {}
        self._clock = 0.0

    def add(self, tenant: int, client: int, item: T) -> None:
        """Let an item wait behind those of the same client."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._clock)
        found.add(client, item)

    def tenants(self) -> list[int]:
        """Return the tenants of which something waits, the one whose turn it is first."""
        return sorted(self._tenants, key=lambda each: self._tenants[each].start)

    def first(self, tenant: int) -> T | None:
        """Return what is next of a tenant; None without any."""
        found = self._tenants.get(tenant)
        return None if found is None else found.first()

    def charge(self, tenant: int, cost: float, weight: float = 1.0, *, takes: bool = True) -> None:
        """Charge a tenant and the client of what is next of it, and take that away unless it is to have more turns."""
        found = self._tenants[tenant]
        self._clock = max(self._clock, found.start)
        found.start += cost / weight
        if not found.charge(cost, takes=takes):
            del self._tenants[tenant]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[T]:
        for tenant in self._tenants.values():
            yield from tenant
