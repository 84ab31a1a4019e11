"""Decides which loads of one step go layer by layer side by side.

A step waits for all its streams, which share the link, and all its requests get their first token at its end. So a load
that could join the streams of a step may be better off in the next step, or as a whole behind them. The choice is the
one with the smallest predicted sum of the times to the first token. Beside requests that run or load, the step may wait
for a share of its computing time only, the interference budget.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from host_control.interference.table import ComputeTable, attention_pairs

OTHER_REQUESTS: Final = "other_requests"
"""The load goes as a whole, because of other requests."""
_CLEARLY: Final = 1.05
"""A load goes as a whole if the sum is lower by this factor: it takes time from the core that computes."""
NEXT_STEP: Final = "next_step"
"""The load waits for the next step."""


class Stream(NamedTuple):
    """A load that goes layer by layer.

    Attributes:
        load_s: Predicted seconds of the load alone; 0 if unknown.
        computed: Tokens before those that the step computes.
        new: Tokens of the request that the step computes.
        cold_s: Seconds of the load in which object storage is read, and other loads go on.
    """

    load_s: float
    computed: int
    new: int
    cold_s: float = 0.0


class Streams:
    """The streams of the step that is being scheduled.

    Args:
        budget: Largest share of a step for which it may wait.
        step_tokens: Most tokens that a step computes.

    Attributes:
        joined: The streams.
        load_s, queued_s: Seconds of their loads, and those in which no other load goes on.
        is_closed: A load waits for the next step, so no later request joins this one.
    """

    def __init__(self, table: ComputeTable, budget: float, step_tokens: int) -> None:
        self._table = table
        self._budget = budget
        self._step_tokens = step_tokens
        self.clear()

    def join(self, stream: Stream) -> None:
        self.joined.append(self._cut(stream))
        self.load_s += stream.load_s
        self.queued_s += stream.load_s - stream.cold_s

    def clear(self) -> None:
        """Begin with the next step."""
        self.joined: list[Stream] = []
        self.load_s = self.queued_s = 0.0
        self.is_closed = False

    def _cut(self, stream: Stream) -> Stream:
        """Return a stream with the tokens that the step can still compute of it."""
        left = self._step_tokens - sum(each.new for each in self.joined)
        return stream._replace(new=max(min(stream.new, left), 0))

    def why_not(self, stream: Stream, layers: int, *, queued_s: float, busy: bool) -> str:
        """Return why a load does not join this step's streams; empty if it does.

        Args:
            queued_s: Seconds of other loads before it.
            busy: Other requests run or load.
        """
        reason = self._why_not(stream, layers, queued_s, busy=busy)
        self.is_closed |= reason == NEXT_STEP
        return reason

    def _why_not(self, stream: Stream, layers: int, queued_s: float, *, busy: bool) -> str:
        others, joined = self.joined, [*self.joined, self._cut(stream)]
        if not joined[-1].new:
            return NEXT_STEP if self._keeps_up([stream], layers, queued_s) else OTHER_REQUESTS
        joins = not busy or self._keeps_up(joined, layers, queued_s)
        if not others:
            return "" if joins else OTHER_REQUESTS
        if not (computing := self._computing(joined)) or not (alone := self._computing([stream])):
            return OTHER_REQUESTS if busy else ""
        before = _seconds(self.load_s, self._computing(others) or computing, layers)
        sums: dict[str, float] = {}
        if joins:
            sums[""] = len(joined) * _seconds(self.load_s + stream.load_s, computing, layers)
        if self._keeps_up([stream], layers, queued_s):  # by then, this step's requests run
            sums[NEXT_STEP] = len(joined) * before + _seconds(stream.load_s, alone, layers)
        # The loads before it are ready by then, too, and perhaps all are computed in one step.
        loaded, together = queued_s + self.load_s + stream.load_s, 1 + queued_s / stream.load_s
        whole = len(others) * before + max(before, loaded) + together * alone
        sums[OTHER_REQUESTS] = _CLEARLY * whole
        return min(sums, key=sums.__getitem__)

    def _keeps_up(self, streams: Sequence[Stream], layers: int, queued_s: float) -> bool:
        """Tell if the layers of all streams come in time for a step that other requests wait for, too."""
        computing, load_s = self._computing(streams), sum(stream.load_s for stream in streams)
        if not computing or not layers:
            return False
        return queued_s + max(load_s - computing, 0.0) + load_s / layers <= self._budget * computing

    def _computing(self, streams: Sequence[Stream]) -> float:
        """Return the predicted seconds of a step that computes behind some streams; 0 if a time is unknown."""
        if not all(stream.load_s for stream in streams):
            return 0.0
        pairs = sum(attention_pairs(stream.computed, stream.new) for stream in streams)
        return self._table.predict("prompts", sum(stream.new for stream in streams), pairs) or 0.0


def _seconds(load_s: float, computing_s: float, layers: int) -> float:
    """Return the duration of a pipeline of two stages, loading and computing, over all layers."""
    return max(load_s, computing_s) + min(load_s, computing_s) / max(layers, 1)
