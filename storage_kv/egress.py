"""Who gets how much of the link while requests are answered layer by layer: policies, without clock and without I/O.

A request whose layers have ``s`` bytes, and whose reader computes for ``c`` seconds with each, waits for nothing once
it gets the rate ``s / c``; what it gets beyond that is wasted. Where all of these do not fit the link, the sum of the
waits is least if rates go with the square root of ``s``, none beyond its cap. (ObjectCache, sections 3.5 and 3.6.)

That holds for rates that nothing changes. A node that hands on what a request no longer uses does better with those
first that end first, as any queue does: the default has rates in inverse proportion to what is left to be sent. A
fifth of the link goes to all alike, so that nobody who asks for little again and again keeps the others waiting for
ever.

The node's scheduler and ``shadowserve simulate objectcache`` use the same functions.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

_EVEN_SHARE: Final = 0.2
"""Of the link, which ``shortest_remaining`` gives to all alike."""

Policy: TypeAlias = Literal["equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt", "shortest_remaining"]


class Demand(NamedTuple):
    """What a request needs.

    Attributes:
        layer_bytes: of each of its layers; more than 0.
        window_s: seconds that its reader computes with each; more than 0.
        layers_left: that are not sent yet; at least 1.
    """

    layer_bytes: float
    window_s: float
    layers_left: int = 1

    @property
    def rate(self) -> float:
        """Bits a second at which nothing waits."""
        return 8 * self.layer_bytes / self.window_s


def allocate(policy: Policy, demands: Sequence[Demand], budget: float, margin: float = 0.0) -> list[float]:
    """Share a link among requests.

    Args:
        policy: ``equal``: the same to each. ``kv_prop``: by the bytes of a layer. ``bw_prop``: by the rate at which
            nothing waits. ``stall_opt``: the least sum of waits, none beyond that rate. ``calibrated_stall_opt``: the
            same, each cap raised by the margin. ``shortest_remaining``: in inverse proportion to the bytes that are
            left, with those caps, of four fifths of the link; the fifth is for all alike.
        demands: the requests.
        budget: bits a second of the link; more than 0.
        margin: bits a second, for ``calibrated_stall_opt`` and ``shortest_remaining``; 0 or more.

    Returns:
        Bits a second of each request, at most the budget together: less where all have their cap.
    """
    return POLICIES[policy](demands, budget, margin)


def ttft_s(demand: Demand, rate: float, layers: int) -> float:
    """Return the seconds until a request has computed its last layer (equation 3 of the paper).

    Args:
        demand: the request; its layers are alike.
        rate: bits a second that it gets.
        layers: how many.
    """
    transfer_s = 8 * demand.layer_bytes / rate
    return transfer_s + (layers - 1) * max(transfer_s, demand.window_s) + demand.window_s


def _equal(demands: Sequence[Demand], budget: float, _margin: float) -> list[float]:
    return _by_weights([1.0 for _ in demands], budget)


def _kv_prop(demands: Sequence[Demand], budget: float, _margin: float) -> list[float]:
    return _by_weights([demand.layer_bytes for demand in demands], budget)


def _bw_prop(demands: Sequence[Demand], budget: float, _margin: float) -> list[float]:
    return _by_weights([demand.rate for demand in demands], budget)


def _stall_opt(demands: Sequence[Demand], budget: float, _margin: float) -> list[float]:
    return fill(_roots(demands), [demand.rate for demand in demands], budget)


def _calibrated(demands: Sequence[Demand], budget: float, margin: float) -> list[float]:
    return fill(_roots(demands), [demand.rate + margin for demand in demands], budget)


def _shortest_remaining(demands: Sequence[Demand], budget: float, margin: float) -> list[float]:
    caps = [demand.rate + margin for demand in demands]
    even = fill([1.0 for _ in demands], caps, budget * _EVEN_SHARE)
    left = [max(0.0, cap - rate) for cap, rate in zip(caps, even, strict=True)]
    weights = [1 / (demand.layer_bytes * demand.layers_left) for demand in demands]
    more = fill(weights, left, budget - sum(even))
    return [rate + further for rate, further in zip(even, more, strict=True)]


def _roots(demands: Sequence[Demand]) -> list[float]:
    """Return the weights with which the sum of layer times is least (equation 6)."""
    return [sqrt(demand.layer_bytes) for demand in demands]


def _by_weights(weights: Sequence[float], budget: float) -> list[float]:
    whole = sum(weights)
    return [budget * weight / whole for weight in weights]


def fill(weights: Sequence[float], caps: Sequence[float], budget: float) -> list[float]:
    """Return rates in proportion to weights, none above its cap.

    Requests are taken in the order in which a rising level brings them to their caps, until it brings none there.
    """
    order = sorted(range(len(weights)), key=lambda i: caps[i] / weights[i])
    rates = [0.0] * len(weights)
    left = budget
    # From the end, where sums are of what is small first: what is left of a sum after taking the most away is noise.
    open_weights = list(accumulate(weights[i] for i in reversed(order)))[::-1]
    for position, i in enumerate(order):
        level = left / open_weights[position]
        if level * weights[i] <= caps[i]:
            for other in order[position:]:
                rates[other] = level * weights[other]
            return rates
        rates[i] = caps[i]
        left -= caps[i]
    return rates


POLICIES: Final[Mapping[Policy, Callable[[Sequence[Demand], float, float], list[float]]]] = MappingProxyType(
    {
        "equal": _equal,
        "kv_prop": _kv_prop,
        "bw_prop": _bw_prop,
        "stall_opt": _stall_opt,
        "calibrated_stall_opt": _calibrated,
        "shortest_remaining": _shortest_remaining,
    }
)
