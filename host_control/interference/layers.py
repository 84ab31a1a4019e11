"""Measures the computing time per layer in steps that wait for layers. No clock."""


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
