"""Seconds as a sum of terms, learnt from observations. No clock and no I/O.

Steps and requests wait for it, and terms are few: it is plain Python, since numpy takes ten times as long for three.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import mul
from typing import Any, Final

REACH: Final = 16
"""An estimate holds up to so many times what was seen: attention pairs of a prompt four times as long."""
_SEEN_MIN: Final = 3
"""So many observations make an estimate."""
_WORTH: Final = 5e-4
"""A term has to lessen the mean square of relative errors by so much: or equal sizes would make one up."""
_RIDGE: Final = 1e-9
"""Terms that no observation tells apart share what they explain."""


class Estimate:
    """Seconds as a sum of terms, none of them negative, learnt from observations of some sizes.

    Relative errors count, and the latest observations count most. Where the last three differ from that line together,
    as over a link that has become slower, what they differ by is believed at once; a single one that differs is not.

    Args:
        terms: in the order of trust: where observations do not tell terms apart, it is the first.
        believed: what a unit of each term takes as long as none was seen; 0: nothing is said of such a one.
        decay: of an observation's weight, with each one that follows.
        drift: the line is believed as long as the last observations differ from it by less than this factor.
        refit: after so many observations the line is drawn anew.
    """

    def __init__(
        self,
        terms: int,
        believed: Sequence[float] = (),
        *,
        decay: float = 0.95,
        drift: float = 1.25,
        refit: int = 1,
    ) -> None:
        self._decay, self._drift, self._refit = decay, drift, refit
        self._believed = tuple(believed) or (0.0,) * terms
        self._moments = [[0.0] * terms for _ in range(terms)]
        self._targets = [0.0] * terms
        self._weight = 0.0
        self._largest = [0.0] * terms
        self._seen = 0
        self._since = 0  # observations since the line was drawn
        self._last: deque[tuple[Sequence[float], float]] = deque(maxlen=_SEEN_MIN)
        self._line: Sequence[float] | None = None
        self._subsets = [list(each) for size in range(1, terms + 1) for each in combinations(range(terms), size)]

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Learn that something of these sizes, one of each term, took so long."""
        if seconds <= 0:
            return
        decay, relative = self._decay, [size / seconds for size in sizes]
        for row, mine in zip(self._moments, relative, strict=True):
            row[:] = [decay * old + mine * other for old, other in zip(row, relative, strict=True)]
        self._targets = [decay * old + mine for old, mine in zip(self._targets, relative, strict=True)]
        self._weight = decay * self._weight + 1
        self._largest = list(map(max, self._largest, sizes))
        self._seen = min(self._seen + 1, _SEEN_MIN)
        self._last.append((sizes, seconds))
        self._since += 1
        if self._since >= self._refit:
            self._line = None

    def predict(self, sizes: Sequence[float], times: int = 1) -> float | None:
        """Return the seconds of so many runs that have these sizes together; ``None`` where too little is known."""
        if self._seen < _SEEN_MIN:
            return None
        for size, largest, believed in zip(sizes, self._largest, self._believed, strict=True):
            if size > times * REACH * largest and not (largest == 0 and believed > 0):
                return None
        if self._line is None:
            self._line, self._since = self._fitted(), 0
        return _product(sizes, self._line)

    def _fitted(self) -> Sequence[float]:
        moments, units = self._moments, [math.sqrt(row[term]) or 1.0 for term, row in enumerate(self._moments)]
        line, explained = [0.0] * len(units), 0.0
        for subset in self._subsets:
            part = [[moments[row][term] / (units[row] * units[term]) for term in subset] for row in subset]
            targets = [self._targets[term] / units[term] for term in subset]
            found = _solved(part, targets)
            gained = _product(found, targets)
            if min(found) >= 0 and gained > explained + _WORTH * self._weight:
                line, explained = [0.0] * len(units), gained
                for term, each in zip(subset, found, strict=True):
                    line[term] = each / units[term]
        factor = 1.0
        if len(self._last) == _SEEN_MIN:
            drift = statistics.median(seconds / max(_product(sizes, line), 1e-12) for sizes, seconds in self._last)
            factor = drift if max(drift, 1 / drift) > self._drift else 1.0
        known = zip(line, self._largest, self._believed, strict=True)
        return [factor * each if largest else believed for each, largest, believed in known]

    def pack(self) -> dict[str, Any]:
        """Return what was learnt, as numbers for :meth:`restore`."""
        return {
            "moments": self._moments,
            "targets": self._targets,
            "largest": self._largest,
            "weight": self._weight,
            "seen": self._seen,
        }

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Begin with what another one has learnt.

        Raises:
            ValueError: these are no numbers that :meth:`pack` gives; nothing was taken.
        """
        terms = len(self._targets)
        targets, largest = _numbers(packed["targets"], terms), _numbers(packed["largest"], terms)
        rows, seen = packed["moments"], packed["seen"]
        (weight,) = _numbers([packed["weight"]], 1)
        if type(rows) is not list or len(rows) != terms:
            raise ValueError(f"these are not the sums of {terms} terms")
        moments = [_numbers(row, terms) for row in rows]
        if moments != [list(column) for column in zip(*moments, strict=True)]:
            raise ValueError("no observations have such sums")
        if type(seen) is not int or not 0 <= seen <= _SEEN_MIN:
            raise ValueError("so many observations are never counted")
        self._moments, self._targets, self._largest = moments, targets, largest
        self._weight, self._seen, self._line = weight, seen, None
        self._last.clear()


def _numbers(packed: Any, count: int) -> list[float]:
    if type(packed) is not list or len(packed) != count:
        raise ValueError(f"these are not the sums of {count} terms")
    if not all(type(each) in (int, float) and 0 <= each < 1e300 for each in packed):
        raise ValueError("a number is negative, or none")
    return [float(each) for each in packed]


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other)))


def _solved(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Return what a symmetric matrix, with 1 in its diagonal, or 0, multiplies to ``right``."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place, row in enumerate(rows):
        row[place] += _RIDGE
    for place, row in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / row[place]
            below[place:] = [mine - factor * its for mine, its in zip(below[place:], row[place:], strict=True)]
    found = [0.0] * len(rows)
    for place in reversed(range(len(rows))):
        row = rows[place]
        found[place] = (row[-1] - _product(row[place + 1 : -1], found[place + 1 :])) / row[place]
    return found
