"""Predicts an engine's computing time by new and cached tokens: Tutti's slack table (design 3, equation 8).

Tutti profiles a model for each pair of lengths before it serves. Here, each row is a linear model in the number of new
tokens, the number of token pairs in attention (which depends on cached tokens) and the number of steps. All layers have
one row, because they are the same.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from host_control.interference.estimate import Estimate

Row = Literal["prompts", "decoding", "layer"]
"""Steps with prompts, steps that only decode, and single layers of either."""

_DECODING_DECAY: Final = 0.99
"""Close to 1: the slowdown by transfers is much smaller than the variation of decode steps."""
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
        """Learn the duration of a step, or of a layer in it, that did not wait for loads."""
        self._rows[row].observe((tokens, pairs, 1), seconds)

    def predict(self, row: Row, tokens: int, pairs: float, steps: int = 1) -> float | None:
        """Return the predicted seconds of ``steps`` steps, or of a layer in them, with these totals.

        ``None`` before three steps were observed, and for sizes far above the observed ones.
        """
        return self._rows[row].predict((tokens, pairs, steps), steps)

    def prefill(self, computed: int, tokens: int, step_tokens: int) -> float | None:
        """Return the predicted seconds to compute a prompt of ``tokens`` tokens of which ``computed`` are there."""
        new = tokens - computed
        return self.predict("prompts", new, attention_pairs(computed, new), max(-(-new // step_tokens), 1))

    def pack(self) -> dict[str, Any]:
        return {row: estimate.pack() for row, estimate in self._rows.items()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`; invalid data raises ValueError, TypeError or KeyError."""
        for row, estimate in self._rows.items():
            estimate.restore(packed[row])


class LayerWait(NamedTuple):
    """How a step waited for a layer of its loads.

    Attributes:
        begin_s: Begin of the wait, of the monotonic clock.
        ahead: Layers in place beyond this one, after the wait.
    """

    begin_s: float
    seconds: float
    ahead: int


class LayerTimes:
    """Computing time between the waits for two layers, on the thread that computes.

    Not for GPUs, where that thread runs ahead of the computation.
    """

    def __init__(self) -> None:
        self._waits = 0
        self._computed_s = self._resumed_s = 0.0

    def waited(self, begin_s: float, end_s: float) -> None:
        """Record the begin and the end of the wait for the next layer."""
        if self._waits:
            self._computed_s += begin_s - self._resumed_s
        self._waits += 1
        self._resumed_s = end_s

    def take(self) -> float:
        """End the step. Return the mean seconds per layer; 0 if there were fewer than two waits."""
        seconds = self._computed_s / (self._waits - 1) if self._waits > 1 else 0.0
        self._waits, self._computed_s = 0, 0.0
        return seconds
