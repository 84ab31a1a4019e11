"""How long an engine computes, by new tokens, cached tokens and layer: Tutti's slack table (design 3, equation 8).

Tutti profiles a model for each pair of lengths before it serves. Here a row is the terms that explain what was timed:
for new tokens, for the pairs of tokens that attention meets, which is where cached tokens come in, and one for each
step. They hold for lengths that nobody has tried, and a few steps are enough. Layers are those of one group, and alike,
so there is one row for all of them. No clock and no I/O: times are handed over.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from host_control.interference.estimate import Estimate

Row = Literal["prompts", "decoding", "layer"]
"""A step that computes prompts; one that only decodes; a layer, of either."""

_DECODING_DECAY: Final = 0.99
"""Steps that decode come by the hundred, and what fetching adds to one is a fraction of what they differ by."""
_DECODING_REFIT: Final = 16
"""So many of them have the same line: drawing one takes the engine's thread longer than all else about a step."""


def attention_pairs(computed: int, new: int) -> float:
    """Return how many pairs of tokens attention meets that computes ``new`` tokens behind ``computed`` ones."""
    return new * (computed + new / 2)


class ComputeTable:
    """Of one engine: made by its first steps, corrected by each that follows."""

    def __init__(self) -> None:
        self._rows: dict[Row, Estimate] = {
            "prompts": Estimate(3),
            "decoding": Estimate(3, decay=_DECODING_DECAY, drift=float("inf"), refit=_DECODING_REFIT),
            "layer": Estimate(3),
        }

    def observe(self, row: Row, tokens: int, pairs: float, seconds: float) -> None:
        """Learn how long so many new tokens took, which met so many pairs, in a step that waited for no load."""
        self._rows[row].observe((tokens, pairs, 1), seconds)

    def predict(self, row: Row, tokens: int, pairs: float, steps: int = 1) -> float | None:
        """Return the seconds of so many steps, or of a layer in them, that compute these together.

        ``None`` before three were seen, and for sizes far beyond all of them.
        """
        return self._rows[row].predict((tokens, pairs, steps), steps)

    def pack(self) -> dict[str, Any]:
        """Return what it holds, as numbers for :meth:`restore`."""
        return {row: estimate.pack() for row, estimate in self._rows.items()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Begin with what another one holds.

        Raises:
            ValueError, TypeError, KeyError: it is nothing that :meth:`pack` gives.
        """
        for row, estimate in self._rows.items():
            estimate.restore(packed[row])
