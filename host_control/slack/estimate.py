"""Seconds as a sum of terms, learnt from observations. No clock and no I/O."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["REACH", "Estimate"]

REACH: Final = 16
"""An estimate holds up to so many times what was seen: attention pairs of a prompt four times as long."""
_SEEN_MIN: Final = 3
"""So many observations make an estimate."""
_WORTH: Final = 5e-4
"""A term has to lessen the mean square of relative errors by so much: or equal sizes would make one up."""


class Estimate:
    """Seconds as a sum of terms, none of them negative, learnt from observations of some sizes.

    Relative errors count, and the latest observations count most. Where the last three differ from that line together,
    as over a link that has become slower, what they differ by is believed at once; a single one that differs is not.

    Args:
        terms: in the order of trust: where observations do not tell terms apart, it is the first.
        decay: of an observation's weight, with each one that follows.
        drift: the line is believed as long as the last observations differ from it by less than this factor.
        refit: after so many observations the line is drawn anew, which costs a tenth of a millisecond.
    """

    def __init__(self, terms: int, *, decay: float = 0.95, drift: float = 1.25, refit: int = 1) -> None:
        self._decay, self._drift, self._refit = decay, drift, refit
        self._moments = np.zeros((terms, terms))
        self._targets = np.zeros(terms)
        self._weight = 0.0
        self._largest = np.zeros(terms)
        self._seen = 0
        self._since = 0  # observations since the line was drawn
        self._last: deque[tuple[npt.NDArray[np.float64], float]] = deque(maxlen=_SEEN_MIN)
        self._line: npt.NDArray[np.float64] | None = None
        self._subsets = [list(each) for size in range(1, terms + 1) for each in combinations(range(terms), size)]

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Learn that something of these sizes, one of each term, took so long."""
        if seconds <= 0:
            return
        observed = np.asarray(sizes, np.float64)
        relative = observed / seconds
        self._moments = self._decay * self._moments + np.outer(relative, relative)
        self._targets = self._decay * self._targets + relative
        self._weight = self._decay * self._weight + 1
        self._largest = np.maximum(self._largest, observed)
        self._seen = min(self._seen + 1, _SEEN_MIN)
        self._last.append((observed, seconds))
        self._since += 1
        if self._since >= self._refit:
            self._line = None

    def predict(self, sizes: Sequence[float], times: int = 1) -> float | None:
        """Return the seconds of so many runs that have these sizes together; ``None`` where too little is known."""
        wanted = np.asarray(sizes, np.float64)
        if self._seen < _SEEN_MIN or (wanted > times * REACH * self._largest).any():
            return None
        if self._line is None:
            self._line, self._since = self._fitted(), 0
        return float(wanted @ self._line)

    def _fitted(self) -> npt.NDArray[np.float64]:
        units = np.sqrt(np.diag(self._moments))
        units[units == 0] = 1
        moments, targets = self._moments / np.outer(units, units), self._targets / units
        line, explained = np.zeros(len(units)), 0.0
        for subset in self._subsets:
            part = moments[np.ix_(subset, subset)] + 1e-9 * np.eye(len(subset))
            found = np.linalg.solve(part, targets[subset])
            gained = float(found @ targets[subset])
            if (found >= 0).all() and gained > explained + _WORTH * self._weight:
                line, explained = np.zeros(len(units)), gained
                line[subset] = found / units[subset]
        if len(self._last) < _SEEN_MIN:
            return line
        drift = statistics.median(seconds / max(float(sizes @ line), 1e-12) for sizes, seconds in self._last)
        return line * (drift if max(drift, 1 / drift) > self._drift else 1)

    def pack(self) -> dict[str, Any]:
        """Return what was learnt, as numbers for :meth:`restore`."""
        return {
            "moments": self._moments.tolist(),
            "targets": self._targets.tolist(),
            "largest": self._largest.tolist(),
            "weight": self._weight,
            "seen": self._seen,
        }

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Begin with what another one has learnt.

        Raises:
            ValueError: these are no numbers that :meth:`pack` gives; nothing was taken.
        """
        terms = len(self._targets)
        moments, targets, largest = (_numbers(packed[name]) for name in ("moments", "targets", "largest"))
        weight, seen = float(_numbers(packed["weight"])), packed["seen"]
        if moments.shape != (terms, terms) or targets.shape != (terms,) or largest.shape != (terms,):
            raise ValueError(f"these are not the sums of {terms} terms")
        if (moments != moments.T).any() or type(seen) is not int or not 0 <= seen <= _SEEN_MIN:
            raise ValueError("no observations have such sums")
        self._moments, self._targets, self._largest = moments, targets, largest
        self._weight, self._seen, self._line = weight, seen, None
        self._last.clear()


def _numbers(packed: Any) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(packed, np.float64)
    except TypeError as error:
        raise ValueError("there is something else where numbers are to be") from error
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise ValueError("a number is negative, or none")
    return numbers


def attention_pairs(computed: int, new: int) -> float:
    """Return how many pairs of tokens attention meets that computes ``new`` tokens behind ``computed`` ones."""
    return new * (computed + new / 2)
