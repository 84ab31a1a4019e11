"""What fetching costs an engine that decodes, and at which rate it keeps within a budget.

Fetching shares memory and cores with the engine, so a step takes longer beside it, in proportion to its rate. By how
much is learnt from the engine's own steps: each is compared with what the table says of one like it that nothing was
fetched beside. A step's time varies by more than fetching adds, so single ones tell nothing; the sum of hundreds does,
and as long as it does not, the cost is taken for what it may well be. So the rate begins low, and grows as more is
known, within seconds where fetching costs nothing.

No clock and no I/O.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

_GIGA: Final = 1e9
_ASSUMED: Final = 0.05
"""Slowdown for each GB/s, before anything is known: what `bench interference` has measured on CPUs."""
_ASSUMED_WEIGHT: Final = 0.5
"""Of that, in (GB/s)², at first: as much as fifty steps tell beside 0.1 GB/s."""
_DOUBT: Final = 0.02
"""Of that, for ever: where nothing but low rates was tried for long, what is known is little, and higher ones are."""
_ASSUMED_DEVIATION: Final = 0.1
"""Of a step from what is predicted, as a fraction, before anything is known."""
_DECAY: Final = 0.998
"""Of a step's weight, with each that follows: the last 500 count."""
_ADDED_MAX: Final = 0.25
"""By which fraction a step counts as longer or shorter than usual at most, or twice the budget: what is more is of
something else. Where fetching does add more, the rate falls until it adds less."""
_WEIGHT_MAX: Final = 2000.0
"""Steps at the rate that is set, of which all that is known has the weight at most: what was seen at high rates weighs
so much that it would take as many hours to learn that they have become dear as it took seconds to try them."""
_RATE_MIN: Final = 16 << 20
"""Bytes a second: less, and a chunk takes seconds, for which the data plane would be nobody else's."""
_RATE_MAX: Final = 100e9
"""Bytes a second, above all that there are: no bound is needed then."""


class Interference:
    """Sets the rate of fetching beside decoding.

    Args:
        budget: by which fraction steps may be longer beside fetching; above 0.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._added_max = max(_ADDED_MAX, 2 * budget)
        self._calm = [0.0, 0.0]  # steps beside nothing: weight, and sum of what they took over what was predicted
        self._squares = _ASSUMED_WEIGHT  # sum of rates squared, in (GB/s)², beside which steps were timed
        self._products = _ASSUMED_WEIGHT * _ASSUMED  # sum of rates times what was added to steps, as a fraction
        self._spread = [1.0, _ASSUMED_DEVIATION**2]  # weight, and sum of squares of what remains unexplained

    def decoded(self, predicted: float, seconds: float, rate: float) -> None:
        """Learn that a step took so long which was predicted to take so long beside nothing.

        Args:
            predicted: seconds, above 0.
            seconds: that it took.
            rate: bytes a second that were fetched beside it; 0 where nothing was.
        """
        usual = self._usual()
        added = min(max(seconds / predicted / usual - 1, -self._added_max), self._added_max)
        if not rate:
            self._calm = [_DECAY * self._calm[0] + 1, _DECAY * self._calm[1] + usual * (1 + added)]
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
        """Return what steps beside nothing take over what is predicted of them."""
        weight, total = self._calm
        return (total + 1) / (weight + 1)

    def _note_rest(self, rest: float) -> None:
        self._spread = [_DECAY * self._spread[0] + 1, _DECAY * self._spread[1] + rest * rest]

    @property
    def cost(self) -> float:
        """The slowdown for each GB/s, as a fraction; none where it comes out below 0."""
        known = (self._products + _DOUBT * _ASSUMED) / (self._squares + _DOUBT)
        return max(known, 0.0)

    @property
    def rate(self) -> int:
        """Bytes a second at which fetching keeps within the budget; 0: it does at any rate.

        The cost may be above what came out by one standard deviation.
        """
        deviation = math.sqrt(self._spread[1] / self._spread[0] / (self._squares + _DOUBT))
        rate = self._budget / (self.cost + max(deviation, 1e-9)) * _GIGA
        return 0 if rate > _RATE_MAX else max(int(rate), _RATE_MIN)

    def pack(self) -> dict[str, Any]:
        """Return what was learnt, as numbers for :meth:`restore`; whatever the budget, it is the same."""
        return {
            "calm": list(self._calm),
            "squares": self._squares,
            "products": self._products,
            "spread": list(self._spread),
        }

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Begin with what another one has learnt.

        Raises:
            ValueError, TypeError, KeyError: it is nothing that :meth:`pack` gives; nothing was taken.
        """
        calm, spread = ([float(number) for number in packed[name]] for name in ("calm", "spread"))
        squares, products = float(packed["squares"]), float(packed["products"])
        if len(calm) != 2 or len(spread) != 2 or not all(map(math.isfinite, (*calm, *spread, squares, products))):
            raise ValueError("these are not the sums of an interference")
        if min(*calm, *spread, squares) < 0 or not spread[0]:
            raise ValueError("no steps have such sums")
        self._calm, self._spread, self._squares, self._products = calm, spread, squares, products
