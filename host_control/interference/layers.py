"""What a worker measures of a step that waits for layers: how long it computes with each of them. No clock."""


class LayerTimes:
    """The engine computes between its waits for two layers, on the thread that waits.

    On a GPU, where that thread runs ahead of what computes, nothing is to be measured so.
    """

    def __init__(self) -> None:
        self._waits = 0
        self._computed_s = self._resumed_s = 0.0

    def waited(self, begin_s: float, end_s: float) -> None:
        """Take note of when the step began to wait for its next layer, and when it went on."""
        if self._waits:
            self._computed_s += begin_s - self._resumed_s
        self._waits += 1
        self._resumed_s = end_s

    def take(self) -> float:
        """End the step: return the seconds that each layer took, 0 where there were fewer than two."""
        seconds = self._computed_s / (self._waits - 1) if self._waits > 1 else 0.0
        self._waits, self._computed_s = 0, 0.0
        return seconds
