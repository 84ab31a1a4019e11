"""The slowdown of decode steps by transfers, and the transfer rate that stays within the interference budget.

Transfers share memory and cores with the engine, so a step takes longer in proportion to the transfer rate. The
slowdown per GB/s is learnt from the engine's steps: each is compared with the prediction for a step without transfers.
Only hundreds of steps show the slowdown, because steps vary more than that. Until then a high estimate is used, so the
rate starts low. No clock and no I/O.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

_GIGA: Final = 1e9
_ASSUMED: Final = 0.05
"""Assumed slowdown per GB/s, as measured on CPUs by `bench interference`."""
_ASSUMED_ERROR: Final = 0.15
"""Standard deviation of the assumption. The noisier steps are, the longer it counts: without it, noise alone could
lower the rate, and lower rates show even less."""
_ASSUMED_DEVIATION: Final = 0.1
"""Initial relative deviation of steps from their prediction."""
_DECAY: Final = 0.998
"""Factor of a step's weight with each later step: about the last 500 count."""
_USUAL_DECAY: Final = 0.95
"""The same for steps without transfers. Predictions are learnt from about the last 100 of these steps, and their mean
error must not last longer: it would count as a slowdown by transfers."""
_ADDED_MAX: Final = 0.25
"""Limit of the relative deviation of a step (or twice the budget, if larger): more has other causes. If transfers do
slow steps down more, the rate falls until they do not."""
_WEIGHT_MAX: Final = 2000.0
"""Limit of the total weight, in steps at the current rate. Steps at high rates have a very large weight. Without the
limit, it would take hours to learn that such rates have become more expensive.
"""
_RATE_MIN: Final = 16 << 20
"""Bytes per second. At lower rates, a chunk would occupy the data plane for seconds."""
_RATE_MAX: Final = 100e9
"""Bytes per second, above any real rate: no limit is needed."""


class Interference:
    """Computes the transfer rate during decode steps. ``budget``: their allowed relative slowdown, above 0."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._added_max = max(_ADDED_MAX, 2 * budget)
        self._calm = [0.0, 0.0]  # steps without transfers: weight, and sum of measured / predicted time
        self._squares = 0.0  # sum of squared rates, in (GB/s)²
        self._products = 0.0  # sum of rate times relative slowdown
        self._spread = [1.0, _ASSUMED_DEVIATION**2]  # weight, and sum of squared residuals

    def decoded(self, predicted: float, seconds: float, rate: float) -> None:
        """Learn from a decode step.

        Args:
            predicted: Predicted seconds without transfers, above 0.
            seconds: Measured seconds.
            rate: Bytes per second that were transferred during the step.
        """
        usual = self._usual()
        added = min(max(seconds / predicted / usual - 1, -self._added_max), self._added_max)
        if not rate:
            self._calm = [_USUAL_DECAY * self._calm[0] + 1, _USUAL_DECAY * self._calm[1] + usual * (1 + added)]
            self._note_rest(added)
            return
        giga = rate / _GIGA
        self._note_rest(added - self.cost * giga)
        self._squares = _DECAY * self._squares + giga * giga
        self._products = _DECAY * self._products + giga * added
        if rate_set := self.rate:
            kept = min(1.0, _WEIGHT_MAX * (rate_set / _GIGA) ** 2 / self._squares)
            self._squares, self._products = kept * self._squares, kept * self._products

    def _usual(self) -> float:
        """Return the mean ratio of measured to predicted time of steps without transfers."""
        weight, total = self._calm
        return (total + 1) / (weight + 1)

    def _note_rest(self, rest: float) -> None:
        self._spread = [_DECAY * self._spread[0] + 1, _DECAY * self._spread[1] + rest * rest]

    def _variance(self) -> float:
        """Return the variance of steps around their prediction, above 0."""
        return max(self._spread[1] / self._spread[0], 1e-9)

    def _assumed_weight(self) -> float:
        """Return the weight of the assumed slowdown, in (GB/s)²."""
        return self._variance() / _ASSUMED_ERROR**2

    @property
    def cost(self) -> float:
        """Relative slowdown per GB/s; never negative."""
        weight = self._assumed_weight()
        return max((self._products + weight * _ASSUMED) / (self._squares + weight), 0.0)

    @property
    def rate(self) -> int:
        """Bytes per second that stay within the budget if the cost is one standard deviation above its estimate.

        0: no limit is needed.
        """
        deviation = math.sqrt(self._variance() / (self._squares + self._assumed_weight()))
        rate = self._budget / (self.cost + deviation) * _GIGA
        return 0 if rate > _RATE_MAX else max(int(rate), _RATE_MIN)

    def pack(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data for :meth:`restore`. It does not depend on the budget."""
        return {
            "calm": list(self._calm),
            "squares": self._squares,
            "products": self._products,
            "spread": list(self._spread),
        }

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`.

        Raises:
            ValueError, TypeError, KeyError: The data is invalid; the state is unchanged.
        """
        calm, spread = ([float(number) for number in packed[name]] for name in ("calm", "spread"))
        squares, products = float(packed["squares"]), float(packed["products"])
        if len(calm) != 2 or len(spread) != 2 or not all(map(math.isfinite, (*calm, *spread, squares, products))):
            raise ValueError("expected two sums per entry, all finite")
        if min(*calm, *spread, squares) < 0 or not spread[0]:
            raise ValueError("a sum is negative, or has no weight")
        self._calm, self._spread, self._squares, self._products = calm, spread, squares, products
