"""For how long an engine computes with a layer: learnt from its steps, for storage that shares its link."""

from typing import Final

__all__ = ["LayerWindow"]

_NEWEST_SHARE: Final = 0.5
"""Of what is learnt: that of the last step, as prompts of one kind come together."""


class LayerWindow:
    """The time that one layer takes, in proportion to the tokens that a step computes.

    It has no clock: times come with the calls. The engine computes between its waits for two layers, so what is
    measured is what it does on the thread that waits; on a GPU, where that runs ahead, nothing is.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._token_s = 0.0
        self._begin(0)

    def _begin(self, tokens: int) -> None:
        self._tokens = tokens
        self._waits = 0
        self._computed_s = self._resumed_s = 0.0

    def step(self, tokens: int) -> float:
        """Begin a step of so many tokens; return the seconds that each layer is expected to take, 0 if not known."""
        self._begin(tokens)
        return self._token_s * tokens

    def waited(self, begin_s: float, end_s: float) -> None:
        """Take note of when the step began to wait for its next layer, and when it went on."""
        if self._waits:
            self._computed_s += begin_s - self._resumed_s
        self._waits += 1
        self._resumed_s = end_s

    def end(self) -> None:
        """End the step, and learn from it."""
        if self._waits > 1 and self._tokens:
            newest = self._computed_s / (self._waits - 1) / self._tokens
            self._token_s = newest if not self._token_s else self._token_s + _NEWEST_SHARE * (newest - self._token_s)
        self._begin(0)
