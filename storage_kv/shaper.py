"""When the next layer of which request may be sent: weighted deficit round robin, without clock and without I/O.

Each flow earns credit at its rate and spends it on whole layers. Rates are those of a policy (egress.py), made anew for
each epoch: a request that ends early leaves what it had unused until then, and one that comes has nothing until then,
unless nobody has anything. So a request's layers come at times that can be relied on.

Everybody else's replies (``Others``) share the link with the flows, each client counting as one flow, and are held to
their part by debts: who has sent more than has been earned executes nothing until it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from storage_kv.egress import Demand, Policy, allocate

__all__ = ["Flow", "Link", "Others", "Shaper"]

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


class Flow:
    """One request's layers.

    Attributes:
        demand: what it still needs.
        limit: bits a second that it asked for at most; infinite for none.
        rate: bits a second that it gets in this epoch.
        credit: bits that it has earned.
        next_bits: of the layer that is to be sent next; 0 while none may be.
    """

    __slots__ = ("credit", "demand", "limit", "next_bits", "rate")

    def __init__(self, demand: Demand, limit: float) -> None:
        self.demand = demand
        self.limit = limit
        self.rate = self.credit = 0.0
        self.next_bits = 0


class Others:
    """The part of the link that is left to replies that are no layers; used with the node's lock held.

    Attributes:
        rate: bits a second that they may take; infinite while nothing is sent by layers, or the link has no bound.
        clients: those that were sent something in this epoch, or had to wait.
        epoch_s: after which one that waits is to ask again, so that the next epoch knows of it.
    """

    __slots__ = ("_credit", "_filled_s", "clients", "epoch_s", "rate")

    def __init__(self) -> None:
        self.rate = inf
        self.epoch_s = inf
        self.clients: set[int] = set()
        self._credit = self._filled_s = 0.0

    def charge(self, client: int, sent_bytes: int) -> None:
        """Take note of what a client was sent."""
        if self.rate != inf:
            self.clients.add(client)
            self._credit -= 8 * sent_bytes

    def wait_s(self, client: int, now_s: float) -> float:
        """Return for how many seconds a client is to wait, since more was sent than is earned; then it asks again."""
        if self.rate == inf:
            self._credit, self._filled_s = 0.0, now_s
            return 0.0
        earned = self.rate * max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._credit = min(self._credit + earned, self.rate * _BURST_S)
        if self._credit >= 0.0:
            return 0.0
        self.clients.add(client)
        return min(-self._credit / self.rate, self.epoch_s)


class Shaper:
    """The flows of one link.

    Attributes:
        others: everybody else.
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
        self.others.rate = inf
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
        others, self.others.clients = len(self.others.clients), set()
        self.others.epoch_s = link.epoch_s
        if not flows:
            self._epoch_ends_s = -inf
            return
        if not link.bits_per_s:
            for flow in flows:
                flow.rate = flow.limit
            self.others.rate = inf
            self._epoch_ends_s = now_s + link.epoch_s
            return
        budget = link.bits_per_s * len(flows) / (len(flows) + others)
        rates = allocate(link.policy, [flow.demand for flow in flows], budget, link.margin_bits_per_s)
        # Where all have what they need and nobody else sends, the rest shortens first layers.
        more = 1.0 if others else max(1.0, budget / sum(rates))
        for flow, rate in zip(flows, rates, strict=True):
            flow.rate = min(flow.limit, rate * more)
        left = link.bits_per_s - sum(flow.rate for flow in flows)
        self.others.rate = max(left, link.bits_per_s * _OTHERS_SHARE_MIN)
        self._epoch_ends_s = now_s + link.epoch_s
