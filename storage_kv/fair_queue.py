"""A fair queue: start-time fair queueing on two levels, tenants and then clients. No clock, no I/O."""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class _Tenant(Generic[T]):
    """The items of one tenant; ``start``, of its next item, is its cost so far divided by its weight."""

    __slots__ = ("_clients", "_clock", "_count", "_order", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self._clients: dict[int, deque[T]] = {}
        self._order: list[tuple[float, int, int]] = []  # virtual start time, tie-breaker, client
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

    def charge(self, cost: float, *, done: bool) -> bool:
        """Charge the client of the first item, and remove the item if it is done; return True if items remain."""
        start, _, client = heappop(self._order)
        self._clock = start
        items = self._clients[client]
        if done:
            items.popleft()
        if items:
            self._push(start + cost, client)
        else:
            del self._clients[client]
        return bool(self._order)

    def __iter__(self) -> Iterator[T]:
        for items in self._clients.values():
            yield from items


class FairQueue(Generic[T]):
    """Items of all tenants."""

    def __init__(self) -> None:
        self._tenants: dict[int, _Tenant[T]] = {}
        self._clock = 0.0

    def add(self, tenant: int, client: int, item: T) -> None:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(self._clock)
        found.add(client, item)

    def tenants(self) -> list[int]:
        """Return the tenants with items, the next one first."""
        return sorted(self._tenants, key=lambda each: self._tenants[each].start)

    def first(self, tenant: int) -> T | None:
        found = self._tenants.get(tenant)
        return None if found is None else found.first()

    def charge(self, tenant: int, cost: float, weight: float = 1.0, *, done: bool = True) -> None:
        """Charge a tenant and the client of its next item; remove the item unless it needs more turns."""
        found = self._tenants[tenant]
        self._clock = max(self._clock, found.start)
        found.start += cost / weight
        if not found.charge(cost, done=done):
            del self._tenants[tenant]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[T]:
        for tenant in self._tenants.values():
            yield from tenant
