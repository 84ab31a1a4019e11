"""A fair queue: start-time fair queueing on two levels, tenants and then clients. No clock, no I/O."""

from collections import Counter
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from typing import Any, Final, Generic, TypeVar

_LEFT_MAX: Final = 1024
"""Names that do not wait any more and whose costs are kept. A client can make names without limit, by new connections.
"""

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")


class _Turns(Generic[V]):
    """Names that wait, each with a value. The next one is that with the least cost since it began to wait."""

    __slots__ = ("_clock", "_costs", "_count", "_order", "_places", "values")

    def __init__(self) -> None:
        self.values: dict[Hashable, V] = {}
        self._clock = 0.0
        self._costs: dict[Hashable, float] = {}  # also of some names that do not wait any more
        self._count = 0
        self._places: dict[Hashable, tuple[float, int, Hashable]] = {}  # cost, tie-breaker, name
        self._order: list[tuple[float, int, Hashable]] = []  # heap of these, and of earlier ones

    def enter(self, name: Hashable, value: V) -> None:
        """Let a name wait; it gets no turns for the time before."""
        self.values[name] = value
        self._costs[name] = max(self._costs.get(name, 0.0), self._clock)
        self._place(name)

    def _place(self, name: Hashable) -> None:
        self._count += 1
        place = self._places[name] = self._costs[name], self._count, name
        heappush(self._order, place)
        if len(self._order) > 2 * len(self._places) + 16:
            self._order = sorted(self._places.values())

    def names(self) -> list[Any]:
        """Return the waiting names, the next one first."""
        return [name for *_, name in sorted(self._places.values())]

    @property
    def next(self) -> Any:
        order, places = self._order, self._places
        while places.get(order[0][2]) is not order[0]:
            heappop(order)
        return order[0][2]

    def charge(self, name: Hashable, cost: float) -> None:
        self._clock = max(self._clock, self._costs[name])
        self._costs[name] += cost
        self._place(name)

    def leave(self, name: Hashable) -> None:
        del self.values[name], self._places[name]
        if len(self._costs) > 2 * len(self.values) + _LEFT_MAX:
            self._costs = {each: self._costs[each] for each in self.values}


class FairQueue(Generic[T]):
    """Items of tenants' clients; each client's in order. For one thread at a time."""

    def __init__(self) -> None:
        self._tenants: _Turns[_Turns[dict[T, None]]] = _Turns()
        self._counts: Counter[Hashable] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tenants.values)

    def __iter__(self) -> Iterator[T]:
        for clients in self._tenants.values.values():
            for items in clients.values.values():
                yield from items

    def add(self, tenant: Hashable, client: Hashable, item: T) -> None:
        """Add an item behind the client's others, unless it waits already."""
        clients = self._tenants.values.get(tenant)
        if clients is None:
            clients = _Turns()
            self._tenants.enter(tenant, clients)
        items = clients.values.get(client)
        if items is None:
            items = {}
            clients.enter(client, items)
        self._counts[tenant] += item not in items
        items[item] = None

    def tenants(self) -> list[Any]:
        """Return the tenants with items, the next one first."""
        return self._tenants.names()

    def waiting(self, tenant: Hashable) -> int:
        return self._counts[tenant]

    def first(self, tenant: Hashable) -> T | None:
        """Return a tenant's next item; None for none."""
        clients = self._tenants.values.get(tenant)
        return None if clients is None else next(iter(clients.values[clients.next]))

    def peek(self) -> tuple[Any, T] | None:
        """Return the next tenant and its next item; None for none."""
        if not self:
            return None
        tenant = self._tenants.next
        item = self.first(tenant)
        assert item is not None
        return tenant, item

    def charge(self, tenant: Hashable, cost: float, weight: float = 1.0, *, done: bool = True) -> None:
        """Charge a tenant and the client of its next item; remove the item unless it needs more turns."""
        clients = self._tenants.values[tenant]
        client = clients.next
        self._tenants.charge(tenant, cost / weight)
        clients.charge(client, cost)
        if done:
            self.discard(tenant, client, next(iter(clients.values[client])))

    def discard(self, tenant: Hashable, client: Hashable, item: T) -> None:
        clients = self._tenants.values[tenant]
        items = clients.values[client]
        del items[item]
        self._counts[tenant] -= 1
        if not items:
            clients.leave(client)
        if not clients.values:
            self._tenants.leave(tenant)
            del self._counts[tenant]
