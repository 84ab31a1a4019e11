"""When the next layer of which request may be sent: weighted deficit round-robin, without clock and without I/O.

Tenants share the link by their weights, whatever each of them asks for; what one does not use is the others'. Each flow
earns credit at its rate and spends it on whole layers. Rates are those of a policy (egress.py) among the flows of a
tenant, made anew for each epoch: a request that ends early leaves what it had unused until then, and one that comes has
nothing until then, unless nobody has anything. So a request's layers come at times that can be relied on.

All other replies (``Others``) share the link with the flows, each client counting as one flow of its tenant, and are
held to their part by debts, one for each client: a client that was sent more than it has earned executes nothing until
it has, and no other waits for that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from storage_kv.egress import Demand, Policy, allocate, fill

_OTHERS_SHARE_MIN: Final = 1 / 20
"""Of the link, for clients of whom nothing was known when the epoch began."""
_BURST_S: Final = 0.05
"""What others may save up, in seconds of their rate."""


@dataclass(frozen=True)
class Link:
    """What is shared, and how.

    Attributes:
        bits_per_s: that the link carries; 0 for no bound.
        policy: who gets how much.
        margin_bits_per_s: by which caps are raised.
        epoch_s: for which rates hold.
    """

    bits_per_s: float
    policy: Policy
    margin_bits_per_s: float
    epoch_s: float


class Sender(Protocol):
    """A client that is sent something.

    Attributes:
        id: unique.
        tenant: whose part of the link it uses.
        weight: of that tenant.
    """

    id: int
    tenant: int
    weight: float


class Flow:
    """One request's layers.

    Attributes:
        demand: what it still needs.
        limit: bits a second that it asked for at most; infinite for none.
        tenant: whose part of the link it uses.
        weight: of that tenant.
        rate: bits a second that it gets in this epoch.
        credit: bits that it has earned.
        next_bits: of the layer that is to be sent next; 0 while none may be.
    """

    __slots__ = ("credit", "demand", "limit", "next_bits", "rate", "tenant", "weight")

    def __init__(self, demand: Demand, limit: float, tenant: int = 0, weight: float = 1.0) -> None:
        self.demand = demand
        self.limit = limit
        self.tenant = tenant
        self.weight = weight
        self.rate = self.credit = 0.0
        self.next_bits = 0


class _Client:
    """What one client of other replies has earned, in bits: less than nothing is a debt."""

    __slots__ = ("credit", "filled_s")

    def __init__(self, credit: float, filled_s: float) -> None:
        self.credit = credit
        self.filled_s = filled_s

    def earn(self, rate: float, now_s: float) -> float:
        """Add what time has brought at a rate, and return what there is."""
        earned = rate * max(0.0, now_s - self.filled_s)
        self.filled_s = now_s
        self.credit = min(self.credit + earned, rate * _BURST_S)
        return self.credit


class _Tenant:
    """The other replies of one tenant.

    Attributes:
        share: of what all others may take.
        active: clients that were sent something in this epoch, or had to wait.
        count: how many these were in the epoch before.
        clients: those that have a credit or a debt.
        left: the debts of clients that have gone: the next newcomer's, or a client would be rid of its debt by
            connecting anew.
    """

    __slots__ = ("active", "clients", "count", "left", "share", "weight")

    def __init__(self) -> None:
        self.share = 1.0
        self.weight = 1.0
        self.active: set[int] = set()
        self.count = 1
        self.clients: dict[int, _Client] = {}
        self.left = _Client(0.0, 0.0)


class Others:
    """The part of the link that is left to replies that are no layers.

    Used with the node's lock held, but for what the shaper does, which replaces things and changes none.

    Attributes:
        rate: bits a second that they may take; infinite while nothing is sent by layers, or the link has no bound.
        epoch_s: after which one that waits is to ask again, so that the next epoch knows of it.
    """

    __slots__ = ("_tenants", "epoch_s", "rate")

    def __init__(self) -> None:
        self.rate = inf
        self.epoch_s = inf
        self._tenants: dict[int, _Tenant] = {}

    def _client(self, session: "Sender", now_s: float) -> tuple[_Tenant, _Client, float]:
        """Return a client's tenant, its account, and its rate."""
        tenant = self._tenants.get(session.tenant)
        if tenant is None:
            tenant = self._tenants[session.tenant] = _Tenant()
            tenant.left.filled_s = now_s
        tenant.weight = session.weight
        rate = self.rate * tenant.share
        client = tenant.clients.get(session.id)
        if client is None:
            client = tenant.clients[session.id] = _Client(min(0.0, tenant.left.earn(rate, now_s)), now_s)
            tenant.left.credit = 0.0
        return tenant, client, rate / tenant.count

    def charge(self, session: "Sender", sent_bytes: int, now_s: float) -> None:
        """Take note of what a client was sent."""
        if self.rate != inf:
            tenant, client, _ = self._client(session, now_s)
            tenant.active.add(session.id)
            client.credit -= 8 * sent_bytes

    def wait_s(self, session: "Sender", now_s: float) -> float:
        """Return for how long a client is to wait, since it was sent more than it has earned; then it asks again."""
        if self.rate == inf:
            return 0.0
        tenant, client, rate = self._client(session, now_s)
        credit = client.earn(rate, now_s)
        if credit > -1.0:  # less than a bit is what rounding leaves
            return 0.0
        tenant.active.add(session.id)
        return min(-credit / rate, self.epoch_s)

    def leave(self, session: "Sender") -> None:
        """Forget a client that has gone, but for its debt."""
        tenant = self._tenants.get(session.tenant)
        if tenant is not None and (client := tenant.clients.pop(session.id, None)) is not None:
            tenant.active.discard(session.id)
            tenant.left.credit += min(0.0, client.credit)

    def clear(self) -> None:
        """Forget all debts: nothing is shared."""
        self.rate = inf
        self._tenants = {}

    def begin_epoch(self, epoch_s: float) -> dict[int, tuple[int, float]]:
        """Return how many clients of each tenant were active in the epoch that ends, and the tenant's weight."""
        self.epoch_s = epoch_s
        active = {number: tenant for number, tenant in list(self._tenants.items()) if tenant.active}
        weights = sum(tenant.weight for tenant in active.values())
        found = {}
        for number, tenant in active.items():
            tenant.share, tenant.count = tenant.weight / weights, len(tenant.active)
            found[number] = tenant.count, tenant.weight
            tenant.active = set()
        return found


class Shaper:
    """The flows of one link.

    Attributes:
        others: all other replies.
        flows: those that have entered, and not left.
    """

    def __init__(self, link: Callable[[], Link]) -> None:
        """``link`` is asked at the beginning of each epoch: it may change."""
        self._link = link
        self.others = Others()
        self.flows: list[Flow] = []
        self._epoch_ends_s = -inf
        self._earned_s = 0.0

    def enter(self, flow: Flow, now_s: float) -> None:
        """Add a flow; where the link is shared it has a rate from the next epoch on."""
        self._advance(now_s)
        if not self._link().bits_per_s:
            flow.rate = flow.limit
        self.flows.append(flow)

    def leave(self, flow: Flow) -> None:
        """Take a flow out; what it had is given to others in the next epoch."""
        self.flows.remove(flow)
        if not self.flows:
            self.clear()

    def clear(self) -> None:
        """Take all flows out."""
        self.flows = []
        self.others.clear()
        self._epoch_ends_s = -inf

    def ready(self, now_s: float) -> list[Flow]:
        """Return the flows that may send a layer now, those first that could have the longest; and let time pass.

        The caller sends a layer of each, calls :meth:`spend`, and asks again.
        """
        self._advance(now_s)
        if now_s >= self._epoch_ends_s or not any(flow.rate for flow in self.flows):
            self._begin_epoch(now_s)
        found = [flow for flow in self.flows if flow.next_bits and flow.credit >= flow.next_bits]
        return sorted(found, key=lambda flow: flow.next_bits - flow.credit)

    def spend(self, flow: Flow) -> None:
        """Take what a layer costs off a flow's credit: the one that was to be sent next."""
        flow.credit -= flow.next_bits
        flow.demand = flow.demand._replace(layers_left=max(1, flow.demand.layers_left - 1))

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until ready() may have more to say; infinite if nothing but the flows can change that."""
        waits = [(flow.next_bits - flow.credit) / flow.rate for flow in self.flows if flow.next_bits and flow.rate]
        if any(flow.next_bits for flow in self.flows):
            waits.append(self._epoch_ends_s - now_s)
        return max(0.0, min(waits, default=inf))

    def _advance(self, now_s: float) -> None:
        """Let flows earn what time has brought: a layer's worth at most, so that a slow reader saves nothing up."""
        elapsed_s, self._earned_s = now_s - self._earned_s, now_s
        for flow in self.flows:
            most = max(flow.next_bits, 8 * flow.demand.layer_bytes)
            earned = most if flow.rate == inf else flow.rate * elapsed_s
            flow.credit = max(flow.credit, min(flow.credit + earned, most))

    def _begin_epoch(self, now_s: float) -> None:
        link, flows = self._link(), self.flows
        others = self.others.begin_epoch(link.epoch_s)
        if not flows:
            self._epoch_ends_s = -inf
            return
        self._epoch_ends_s = now_s + link.epoch_s
        if not link.bits_per_s:
            for flow in flows:
                flow.rate = flow.limit
            self.others.clear()
            return
        by_tenant: dict[int, list[Flow]] = {number: [] for number in others}
        for flow in flows:
            by_tenant.setdefault(flow.tenant, []).append(flow)
        weights, caps = [], []
        for number, own in by_tenant.items():
            count, weight = others.get(number, (0, 0.0))
            weights.append(own[0].weight if own else weight)
            caps.append(inf if count else sum(flow.limit for flow in own))
        shares = fill(weights, caps, link.bits_per_s)
        for share, (number, own) in zip(shares, by_tenant.items(), strict=True):
            if own:
                count, _ = others.get(number, (0, 0.0))
                self._share_among(own, link, share * len(own) / (len(own) + count))
        used = sum(flow.rate for flow in flows)
        if not others and used < link.bits_per_s:  # all have what they need; the rest shortens first layers
            for flow in flows:
                flow.rate = min(flow.limit, flow.rate * link.bits_per_s / used)
            used = sum(flow.rate for flow in flows)
        self.others.rate = max(link.bits_per_s - used, link.bits_per_s * _OTHERS_SHARE_MIN)

    @staticmethod
    def _share_among(flows: list[Flow], link: Link, budget: float) -> None:
        """Give the flows of one tenant their rates."""
        rates = allocate(link.policy, [flow.demand for flow in flows], budget, link.margin_bits_per_s)
        for flow, rate in zip(flows, rates, strict=True):
            flow.rate = min(flow.limit, rate)
