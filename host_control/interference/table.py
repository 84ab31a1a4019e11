"""Predicts an engine's computing time by new and cached tokens: Tutti's slack table (design 3, equation 8).

Tutti profiles a model for each pair of lengths before it serves. Here, each row is a linear model in the number of new
tokens, the number of token pairs in attention (which depends on cached tokens) and the number of steps. It extends to
lengths that were not observed, and needs only a few steps. All layers have one row, because they belong to one group
and are the same. No clock and no I/O.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from host_control.interference.estimate import Estimate

Row = Literal["prompts", "decoding", "layer"]
"""Steps with prompts, steps that only decode, and single layers of either."""

_DECODING_DECAY: Final = 0.99
"""Close to 1: the slowdown by transfers is much smaller than the variation of decode steps, so the estimate needs many
samples."""
_DECODING_REFIT: Final = 16
"""Decode steps between two fits. A fit takes longer than all other bookkeeping of a step."""


def attention_pairs(computed: int, new: int) -> float:
    """Return the number of token pairs in causal attention of ``new`` tokens after ``computed`` tokens."""
    return new * (computed + new / 2)


class ComputeTable:
    """The computing times of one engine."""

    def __init__(self) -> None:
        self._rows: dict[Row, Estimate] = {
            "prompts": Estimate(3),
            "decoding": Estimate(3, decay=_DECODING_DECAY, drift=float("inf"), refit=_DECODING_REFIT),
            "layer": Estimate(3),
        }

    def observe(self, row: Row, tokens: int, pairs: float, seconds: float) -> None:
        """Learn the duration of a step that did not wait for loads.

        Args:
            row: Kind of step.
            tokens: New tokens.
            pairs: Token pairs in attention.
            seconds: Duration.
        """
        self._rows[row].observe((tokens, pairs, 1), seconds)

    def predict(self, row: Row, tokens: int, pairs: float, steps: int = 1) -> float | None:
        """Return the predicted seconds of ``steps`` steps, or of a layer in them, with these totals.

        ``None`` before three steps were observed, and for sizes far above the observed ones.
        """
        return self._rows[row].predict((tokens, pairs, steps), steps)

    def pack(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data for :meth:`restore`."""
        return {row: estimate.pack() for row, estimate in self._rows.items()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`.

        Raises:
            ValueError, TypeError, KeyError: The data is invalid.
        """
        for row, estimate in self._rows.items():
            estimate.restore(packed[row])
