"""The transfer rate during each step of an engine, from samples of the data planes' byte counters.

Samples are several steps apart. So a step's rate is known when a sample was sent after its end: it is the mean rate
from the last sample before the step to the first sample after it. No clock and no I/O.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

_T = TypeVar("_T")

_STEPS_MAX: Final = 4096
"""Steps that wait for a sample. Between two samples there are fewer, unless a data plane does not answer."""
_SAMPLES_MAX: Final = 256


class Sample(NamedTuple):
    """The bytes that data planes had moved at a time between ``sent_s`` and ``received_s``.

    Attributes:
        sent_s, received_s: Times of the report and of its last answer, on the engine's clock.
        moved_bytes: Total so far. With several data planes, each interval counts the one that moved most.
        moving: A transfer was running.
        known: The difference to the previous sample is valid. False if a data plane did not answer or has restarted.
    """

    sent_s: float
    received_s: float
    moved_bytes: int
    moving: bool
    known: bool


class StepRates(Generic[_T]):
    """Ended steps, in their order, until the transfer rate during them is known."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, _T]] = deque(maxlen=_STEPS_MAX)
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES_MAX)

    def ended(self, begun_s: float, ended_s: float, step: _T) -> None:
        self._steps.append((begun_s, ended_s, step))

    def take(self, samples: Sequence[Sample]) -> Iterator[tuple[_T, float, float]]:
        """Add samples. Yield the steps whose rate is now known: step, seconds, bytes per second.

        Steps whose rate remains unknown are dropped.
        """
        self._samples.extend(samples)
        while self._steps and self._samples and self._samples[-1].sent_s >= self._steps[0][1]:
            begun_s, ended_s, step = self._steps.popleft()
            rate = self._rate(begun_s, ended_s)
            if rate is not None:
                yield step, ended_s - begun_s, rate

    def _rate(self, begun_s: float, ended_s: float) -> float | None:
        """Return the transfer rate during a step, ``None`` if it is not known."""
        before = next(
            (index for index, each in reversed(list(enumerate(self._samples))) if each.received_s <= begun_s), -1
        )
        if before < 0:
            return None
        for _ in range(before):
            self._samples.popleft()  # later steps do not need them
        first, between = self._samples[0], list[Sample]()
        for each in list(self._samples)[1:]:
            between.append(each)
            if each.sent_s >= ended_s:
                break
        if not all(each.known for each in between):
            return None
        moved_bytes = between[-1].moved_bytes - first.moved_bytes
        if not moved_bytes:
            return None if any(each.moving for each in (first, *between)) else 0.0
        return moved_bytes / ((between[-1].sent_s + between[-1].received_s - first.sent_s - first.received_s) / 2)
