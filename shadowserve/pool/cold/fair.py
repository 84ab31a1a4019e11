"""Fairness among tenants: turns in a queue (start-time fair queueing), and shares of what all have in the bucket.

Every node computes the same shares from its configuration and a list of the bucket.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Clock:
    """Chooses the next name: the one with the least cost since it began to wait."""

    def __init__(self) -> None:
        self._now = 0.0
        self._had: dict[Hashable, float] = {}

    def enter(self, name: Hashable) -> None:
        """Let a name wait; it gets no turns for the time before."""
        self._had[name] = max(self._had.get(name, 0.0), self._now)

    def next(self, waiting: "OrderedDict[Hashable, _Lane] | OrderedDict[Hashable, OrderedDict[T, None]]") -> Hashable:
        return min(waiting, key=self._had.__getitem__)

    def charge(self, name: Hashable, cost: float) -> None:
        self._now = max(self._now, self._had[name])
        self._had[name] += cost

    def leave(self, waiting: "OrderedDict[Hashable, _Lane] | OrderedDict[Hashable, OrderedDict[T, None]]") -> None:
        """Forget names that do not wait and have had no more than others."""
        if len(self._had) > 2 * len(waiting) + 16:
            self._had = {name: had for name, had in self._had.items() if name in waiting or had > self._now}


class _Lane:
    """A tenant's items, by clients."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.clients: OrderedDict[Hashable, OrderedDict[Hashable, None]] = OrderedDict()
        self.count = 0


class FairQueue(Generic[T]):
    """Items of tenants' clients. For one thread at a time."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._lanes: OrderedDict[Hashable, _Lane] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def waiting(self, tenant: Hashable) -> int:
        lane = self._lanes.get(tenant)
        return 0 if lane is None else lane.count

    def push(self, tenant: Hashable, client: Hashable, item: T) -> None:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane()
            self._clock.enter(tenant)
        items = lane.clients.get(client)
        if items is None:
            items = lane.clients[client] = OrderedDict()
            lane.clock.enter(client)
        lane.count += item not in items
        items[item] = None

    def peek(self) -> tuple[Hashable, Hashable, T] | None:
        if not self._lanes:
            return None
        tenant = self._clock.next(self._lanes)
        lane = self._lanes[tenant]
        client = lane.clock.next(lane.clients)
        item: T = next(iter(lane.clients[client]))  # type: ignore[assignment]
        return tenant, client, item

    def charge(self, tenant: Hashable, client: Hashable, cost: float) -> None:
        self._clock.charge(tenant, cost)
        self._lanes[tenant].clock.charge(client, cost)

    def discard(self, tenant: Hashable, client: Hashable, item: T) -> None:
        lane = self._lanes[tenant]
        items = lane.clients[client]
        del items[item]
        lane.count -= 1
        if not items:
            del lane.clients[client]
            lane.clock.leave(lane.clients)
        if not lane.clients:
            del self._lanes[tenant]
            self._clock.leave(self._lanes)


class Shares:
    """Shares of a total, by tenants' quotas. For one thread at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._quotas: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._shares: dict[str, float] = {}

    def set_quota(self, tenant: str, quota: int | None) -> None:
        if quota is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = quota
        self._known = frozenset()

    def among(self, tenants: Collection[str]) -> Mapping[str, float]:
        """Return the share of each of ``tenants``, which use something now; the sum is at most the total.

        A tenant with a quota has its quota. The others share the rest equally, and have at least an equal part of the
        whole; quotas shrink in proportion for that.
        """
        present = frozenset(tenants)
        if present != self._known or not self._shares:
            self._known, self._shares = present, self._divide(present)
        return self._shares

    def _divide(self, tenants: frozenset[str]) -> dict[str, float]:
        if not tenants:
            return {}
        bounded = {tenant: self._quotas[tenant] for tenant in tenants if tenant in self._quotas}
        claimed, free = sum(bounded.values()), len(tenants) - len(bounded)
        equal = max((self.total - claimed) / free, self.total / len(tenants)) if free else 0.0
        left = self.total - free * equal
        shrunk = min(1.0, left / claimed) if claimed else 1.0
        return {tenant: bounded[tenant] * shrunk if tenant in bounded else equal for tenant in tenants}


def most_beyond(used: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return the tenant that uses most of its share, or exceeds it most; by name among equals."""

    def beyond(tenant: str) -> tuple[float, str]:
        share = shares[tenant]
        return used[tenant] / share if share > 0 else float("inf"), tenant

    return max(used, key=beyond)
