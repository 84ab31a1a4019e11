"""Policies that share the link among requests for layers, without clock and without I/O.

A request whose layers have ``s`` bytes, and whose reader computes ``c`` seconds with each, does not wait at the rate
``s / c``; a higher rate is wasted. If the link cannot carry all these rates, the sum of the waits is smallest when
rates are proportional to the square root of ``s``, each capped at ``s / c`` (ObjectCache, sections 3.5 and 3.6).

That is optimal for constant rates. A node that redistributes the rates of finished requests does better when the
shortest requests finish first, so the default makes rates inversely proportional to the remaining bytes. A fifth of the
link is shared equally, so that a series of short requests cannot stop a long one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

_EVEN_SHARE: Final = 0.2  # share of the link that ``shortest_remaining`` divides equally

Policy: TypeAlias = Literal["equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt", "shortest_remaining"]


class Demand(NamedTuple):
    """The remaining work of a request: mean size of a layer, time to compute one, number of unsent ones."""

    layer_bytes: float
    window_s: float
    layers_left: int = 1

    @property
    def rate(self) -> float:
        """Bits per second at which its reader does not wait."""
        return 8 * self.layer_bytes / self.window_s


def allocate(policy: Policy, demands: Sequence[Demand], budget: float, margin: float = 0.0) -> list[float]:
    """Share a link among requests.

    Args:
        policy: ``equal``: equal rates. ``kv_prop``: by the bytes of a layer. ``bw_prop``: by the rate without waits.
            ``stall_opt``: smallest sum of waits, capped at that rate. ``calibrated_stall_opt``: the same with caps
            raised by the margin. ``shortest_remaining``: a fifth equally, the rest in inverse proportion to the
            remaining bytes, with those caps.
        demands: The requests.
        budget: Capacity of the link in bits per second; more than 0.
        margin: Margin of the last two policies in bits per second; 0 or more.

    Returns:
        Bits per second of each request; less than the budget in all if every request has its cap.
    """
    return POLICIES[policy](demands, budget, margin)


def ttft_s(demand: Demand, rate: float, layers: int) -> float:
    """Return the seconds until a request of equal layers has computed its last one (equation 3 of the paper)."""
    transfer_s = 8 * demand.layer_bytes / rate
    return transfer_s + (layers - 1) * max(transfer_s, demand.window_s) + demand.window_s


def _shortest_remaining(demands: Sequence[Demand], budget: float, margin: float) -> list[float]:
    caps = [demand.rate + margin for demand in demands]
    even = fill([1.0 for _ in demands], caps, budget * _EVEN_SHARE)
    left = [max(0.0, cap - rate) for cap, rate in zip(caps, even, strict=True)]
    weights = [1 / (demand.layer_bytes * demand.layers_left) for demand in demands]
    more = fill(weights, left, budget - sum(even))
    return [rate + further for rate, further in zip(even, more, strict=True)]


def _by_weights(demands: Sequence[Demand], budget: float, weight: Callable[[Demand], float]) -> list[float]:
    whole = sum(map(weight, demands))
    return [budget * weight(demand) / whole for demand in demands]


def _stall_opt(demands: Sequence[Demand], budget: float, margin: float) -> list[float]:
    """Return the rates with the smallest sum of layer times (equation 6)."""
    return fill([sqrt(demand.layer_bytes) for demand in demands], [demand.rate + margin for demand in demands], budget)


def fill(weights: Sequence[float], caps: Sequence[float], budget: float) -> list[float]:
    """Return rates in proportion to weights, none above its cap.

    A rising level brings requests to their caps in order, until the budget is used.
    """
    order = sorted(range(len(weights)), key=lambda i: caps[i] / weights[i])
    rates = [0.0] * len(weights)
    left = budget
    # Summed from the end: subtracting from the whole sum would leave rounding errors.
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
        "equal": lambda demands, budget, _: _by_weights(demands, budget, lambda demand: 1.0),
        "kv_prop": lambda demands, budget, _: _by_weights(demands, budget, lambda demand: demand.layer_bytes),
        "bw_prop": lambda demands, budget, _: _by_weights(demands, budget, lambda demand: demand.rate),
        "stall_opt": lambda demands, budget, _: _stall_opt(demands, budget, 0.0),
        "calibrated_stall_opt": _stall_opt,
        "shortest_remaining": _shortest_remaining,
    }
)
