"""A linear model of durations, learnt by least squares from observations. No clock and no I/O.

It is plain Python because it runs in every step: for three terms, numpy needs ten times as long.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import mul
from typing import Any, Final

REACH: Final = 16
"""Predictions extend to this multiple of the largest observed size: the attention pairs of a prompt four times as long.
"""
_SEEN_MIN: Final = 3
"""Observations that are needed for a prediction."""
_WORTH: Final = 5e-4
"""A term is only used if it reduces the mean square of relative errors by this much. Otherwise equal sizes would give
arbitrary terms."""
_RIDGE: Final = 1e-9
"""Regularization for terms that the observations do not separate."""


class Estimate:
    """Predicts seconds as a linear function of sizes, with coefficients that are not negative.

    It minimizes relative errors and gives recent observations more weight. If the last three observations all deviate,
    as when a link becomes slower, predictions are scaled by their median deviation at once.

    Args:
        terms: Number of sizes. If observations do not separate two terms, the earlier one is used.
        decay: Factor of an observation's weight with each later observation.
        drift: Deviation of the last observations, as a factor, above which predictions are scaled.
        refit: Number of observations between two fits.
    """

    def __init__(
        self,
        terms: int,
        *,
        decay: float = 0.95,
        drift: float = 1.25,
        refit: int = 1,
    ) -> None:
        self._decay, self._drift, self._refit = decay, drift, refit
        self._moments = [[0.0] * terms for _ in range(terms)]
        self._targets = [0.0] * terms
        self._weight = 0.0
        self._largest = [0.0] * terms
        self._seen = 0
        self._since = 0  # observations since the last fit
        self._last: deque[tuple[Sequence[float], float]] = deque(maxlen=_SEEN_MIN)
        self._line: Sequence[float] | None = None
        self._subsets = [list(each) for size in range(1, terms + 1) for each in combinations(range(terms), size)]

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Learn from one observation with the given size of each term."""
        if seconds <= 0:
            return
        decay, relative = self._decay, [size / seconds for size in sizes]
        for row, mine in zip(self._moments, relative, strict=True):
            row[:] = [decay * old + mine * other for old, other in zip(row, relative, strict=True)]
        self._targets = [decay * old + size for old, size in zip(self._targets, relative, strict=True)]
        self._weight = decay * self._weight + 1
        self._largest = list(map(max, self._largest, sizes))
        self._seen = min(self._seen + 1, _SEEN_MIN)
        self._last.append((sizes, seconds))
        self._since += 1
        if self._since >= self._refit:
            self._line = None

    def predict(self, sizes: Sequence[float], times: int = 1) -> float | None:
        """Return the predicted seconds of ``times`` runs with these total sizes; ``None`` if too little is known."""
        if self._seen < _SEEN_MIN:
            return None
        if any(size > times * REACH * largest for size, largest in zip(sizes, self._largest, strict=True)):
            return None
        if self._line is None:
            self._line, self._since = self._fitted(), 0
        return _product(sizes, self._line)

    def _fitted(self) -> Sequence[float]:
        """Return the coefficients: the best fit over all subsets of terms, scaled by the recent deviation."""
        line = self._best_line()
        factor = 1.0
        if len(self._last) == _SEEN_MIN:
            drift = statistics.median(seconds / max(_product(sizes, line), 1e-12) for sizes, seconds in self._last)
            factor = drift if max(drift, 1 / drift) > self._drift else 1.0
        return [factor * each for each in line]

    def _best_line(self) -> list[float]:
        moments, units = self._moments, [math.sqrt(row[term]) or 1.0 for term, row in enumerate(self._moments)]
        line, explained = [0.0] * len(units), 0.0
        for subset in self._subsets:
            matrix = [[moments[row][term] / (units[row] * units[term]) for term in subset] for row in subset]
            targets = [self._targets[term] / units[term] for term in subset]
            solution = _solved(matrix, targets)
            gained = _product(solution, targets)
            if min(solution) >= 0 and gained > explained + _WORTH * self._weight:
                line, explained = [0.0] * len(units), gained
                for term, each in zip(subset, solution, strict=True):
                    line[term] = each / units[term]
        return line

    def pack(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data for :meth:`restore`."""
        return {
            "moments": self._moments,
            "targets": self._targets,
            "largest": self._largest,
            "weight": self._weight,
            "seen": self._seen,
        }

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`.

        Raises:
            ValueError: The data is invalid; the state is unchanged.
        """
        terms = len(self._targets)
        targets, largest = _numbers(packed["targets"], terms), _numbers(packed["largest"], terms)
        rows, seen = packed["moments"], packed["seen"]
        (weight,) = _numbers([packed["weight"]], 1)
        if type(rows) is not list or len(rows) != terms:
            raise ValueError(f"expected sums of {terms} terms")
        moments = [_numbers(row, terms) for row in rows]
        if moments != [list(column) for column in zip(*moments, strict=True)]:
            raise ValueError("the matrix of sums is not symmetric")
        if type(seen) is not int or not 0 <= seen <= _SEEN_MIN:
            raise ValueError(f"the number of observations is not between 0 and {_SEEN_MIN}")
        self._moments, self._targets, self._largest = moments, targets, largest
        self._weight, self._seen, self._line = weight, seen, None
        self._last.clear()


def _numbers(packed: Any, count: int) -> list[float]:
    if type(packed) is not list or len(packed) != count:
        raise ValueError(f"expected sums of {count} terms")
    if not all(type(each) in (int, float) and 0 <= each < 1e300 for each in packed):
        raise ValueError("a value is negative or not a number")
    return [float(each) for each in packed]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other)))


def _solved(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Solve ``matrix * x = right`` by Gaussian elimination, for a symmetric matrix with a diagonal of 1 or 0."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for index, row in enumerate(rows):
        row[index] += _RIDGE
    for index, row in enumerate(rows):
        for later in rows[index + 1 :]:
            factor = later[index] / row[index]
            later[index:] = [mine - factor * its for mine, its in zip(later[index:], row[index:], strict=True)]
    solution = [0.0] * len(rows)
    for index in reversed(range(len(rows))):
        row = rows[index]
        solution[index] = (row[-1] - _product(row[index + 1 : -1], solution[index + 1 :])) / row[index]
    return solution
