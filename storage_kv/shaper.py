"""Schedules layers on the link: weighted deficit round-robin, without clock and without I/O.

Tenants share the link by their weights; what one does not use goes to the others. Each flow earns credit at its rate
and spends it on whole layers. A policy (egress.py) sets the rates of a tenant's flows at the start of each epoch: what
a finished request leaves stays unused until then, and a new request waits until then unless there is no other.

All other replies (``Others``) share the link too. Each of their clients counts as one flow of its tenant, and has a
debt of its own: a client that was sent more than it has earned executes nothing until the debt is paid.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from storage_kv.egress import Demand, Policy, allocate, fill
from storage_kv.session import Session

_OTHERS_SHARE_MIN: Final = 1 / 20  # share of the link for clients that were not active before the epoch
_BURST_S: Final = 0.05  # limit of the credit of other replies, in seconds of their rate


@dataclass(frozen=True)
class Link:
    """The link and how it is shared."""

    bits_per_s: float  # capacity; 0 for no limit
    policy: Policy
    margin_bits_per_s: float  # amount by which caps are raised
    epoch_s: float  # time for which rates hold


@dataclass(slots=True, eq=False)
class Flow:
    """The layers of one request."""

    demand: Demand  # what remains to be sent
    limit: float  # highest rate in bits per second; infinite for none
    tenant: int = 0
    weight: float = 1.0
    rate: float = 0.0  # rate in this epoch in bits per second
    credit: float = 0.0  # earned bits
    next_bits: int = 0  # size of the next layer; 0 while none may be sent


@dataclass(slots=True)
class _Client:
    """The credit of one client of other replies in bits; below zero it is a debt."""

    credit: float
    filled_s: float

    def earn(self, rate: float, now_s: float) -> float:
        earned = rate * max(0.0, now_s - self.filled_s)
        self.filled_s = now_s
        self.credit = min(self.credit + earned, rate * _BURST_S)
        return self.credit


@dataclass(slots=True)
class _Tenant:
    """The other replies of one tenant."""

    share: float = 1.0  # share of the rate of all other replies
    weight: float = 1.0
    active: set[int] = field(default_factory=set)  # clients that were sent something in this epoch, or had to wait
    count: int = 1  # number of active clients in the previous epoch
    clients: dict[int, _Client] = field(default_factory=dict)  # clients with a credit or a debt
    # Debts of disconnected clients. The next new one inherits them; otherwise reconnecting would clear a debt.
    left: _Client = field(default_factory=lambda: _Client(0.0, 0.0))


class Others:
    """The part of the link for replies that are no layers.

    Needs the node's lock, except what the shaper does: it replaces values and changes none in place.
    """

    def __init__(self) -> None:
        self.rate = inf  # in bits per second; infinite while there are no layers to send, or the link has no limit
        self.epoch_s = inf  # longest wait, so that the next epoch counts a waiting client as active
        self._tenants: dict[int, _Tenant] = {}

    def _client(self, session: Session, now_s: float) -> tuple[_Tenant, _Client, float]:
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

    def charge(self, session: Session, sent_bytes: int, now_s: float) -> None:
        if self.rate != inf:
            tenant, client, _ = self._client(session, now_s)
            tenant.active.add(session.id)
            client.credit -= 8 * sent_bytes

    def wait_s(self, session: Session, now_s: float) -> float:
        """Return how long a client must wait because of its debt, before it calls this again; 0.0 for not at all."""
        if self.rate == inf:
            return 0.0
        tenant, client, rate = self._client(session, now_s)
        credit = client.earn(rate, now_s)
        if credit > -1.0:  # less than a bit is a rounding error
            return 0.0
        tenant.active.add(session.id)
        return min(-credit / rate, self.epoch_s)

    def leave(self, session: Session) -> None:
        """Remove a client; its debt stays with the tenant."""
        tenant = self._tenants.get(session.tenant)
        if tenant is not None and (client := tenant.clients.pop(session.id, None)) is not None:
            tenant.active.discard(session.id)
            tenant.left.credit += min(0.0, client.credit)

    def clear(self) -> None:
        """Clear all debts: the link is not shared."""
        self.rate = inf
        self._tenants = {}

    def begin_epoch(self, epoch_s: float) -> dict[int, tuple[int, float]]:
        """Return the number of active clients in the previous epoch and the weight, by tenant."""
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
    """The flows of one link; ``others`` are all other replies."""

    def __init__(self, link: Callable[[], Link]) -> None:
        """``link`` is called at the start of each epoch."""
        self._link = link
        self.others = Others()
        self.flows: list[Flow] = []
        self._epoch_ends_s = -inf
        self._earned_s = 0.0

    def enter(self, flow: Flow, now_s: float) -> None:
        """Add a flow. On a shared link it gets a rate at the next epoch."""
        self._advance(now_s)
        if not self._link().bits_per_s:
            flow.rate = flow.limit
        self.flows.append(flow)

    def leave(self, flow: Flow) -> None:
        """Remove a flow. Its rate goes to others at the next epoch."""
        self.flows.remove(flow)
        if not self.flows:
            self.clear()

    def clear(self) -> None:
        self.flows = []
        self.others.clear()
        self._epoch_ends_s = -inf

    def ready(self, now_s: float) -> list[Flow]:
        """Return the flows that may send a layer now, those with most excess credit first.

        The caller sends a layer of each, calls :meth:`spend`, and calls this again.
        """
        self._advance(now_s)
        if now_s >= self._epoch_ends_s or not any(flow.rate for flow in self.flows):
            self._begin_epoch(now_s)
        found = [flow for flow in self.flows if flow.next_bits and flow.credit >= flow.next_bits]
        return sorted(found, key=lambda flow: flow.next_bits - flow.credit)

    def spend(self, flow: Flow) -> None:
        """Charge a flow for its next layer."""
        flow.credit -= flow.next_bits
        flow.demand = flow.demand._replace(layers_left=max(1, flow.demand.layers_left - 1))

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until ready() may return more flows; infinite if only a change of the flows can."""
        waits = [(flow.next_bits - flow.credit) / flow.rate for flow in self.flows if flow.next_bits and flow.rate]
        if any(flow.next_bits for flow in self.flows):
            waits.append(self._epoch_ends_s - now_s)
        return max(0.0, min(waits, default=inf))

    def _advance(self, now_s: float) -> None:
        """Add the credit since the last call: at most one layer's, so that a slow reader saves none."""
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
        if not others and used < link.bits_per_s:  # all demands are met; the rest makes first layers faster
            for flow in flows:
                flow.rate = min(flow.limit, flow.rate * link.bits_per_s / used)
            used = sum(flow.rate for flow in flows)
        self.others.rate = max(link.bits_per_s - used, link.bits_per_s * _OTHERS_SHARE_MIN)

    @staticmethod
    def _share_among(flows: list[Flow], link: Link, budget: float) -> None:
        rates = allocate(link.policy, [flow.demand for flow in flows], budget, link.margin_bits_per_s)
        for flow, rate in zip(flows, rates, strict=True):
            flow.rate = min(flow.limit, rate)
