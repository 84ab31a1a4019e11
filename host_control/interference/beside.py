"""What moved beside each step of an engine, by samples of how much data planes have moved so far.

Samples come some steps apart, so a step is judged once a sample has come that was sent after its end. It had nothing
beside it only where no byte has moved from the last sample before it to the first one behind it; else it is taken to
have had the mean rate of that time. No clock and no I/O.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

_T = TypeVar("_T")

_STEPS_MAX: Final = 4096
"""That wait for a sample: more than fit between two of a data plane that answers."""
_SAMPLES_MAX: Final = 256


class Moved(Protocol):
    """What had moved at some moment between these two; see :class:`host_control.step_reports.Sample`."""

    @property
    def sent_s(self) -> float: ...
    @property
    def received_s(self) -> float: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def moving(self) -> bool: ...
    @property
    def known(self) -> bool: ...


class Beside(Generic[_T]):
    """Steps that have ended, in their order, until it is known what moved beside them."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, _T]] = deque(maxlen=_STEPS_MAX)
        self._samples: deque[Moved] = deque(maxlen=_SAMPLES_MAX)

    def ended(self, begun_s: float, ended_s: float, step: _T) -> None:
        """Take note of a step."""
        self._steps.append((begun_s, ended_s, step))

    def take(self, samples: Sequence[Moved]) -> Iterator[tuple[_T, float, float]]:
        """Take samples, and yield steps that can be judged by now: each, its seconds, and bytes a second beside it.

        Steps of which nobody knows what moved beside them are left out.
        """
        self._samples.extend(samples)
        while self._steps and self._samples and self._samples[-1].sent_s >= self._steps[0][1]:
            begun_s, ended_s, step = self._steps.popleft()
            rate = self._rate(begun_s, ended_s)
            if rate is not None:
                yield step, ended_s - begun_s, rate

    def _rate(self, begun_s: float, ended_s: float) -> float | None:
        """Return the rate of what moved in some time; None where it is not known."""
        before = next(
            (index for index, each in reversed(list(enumerate(self._samples))) if each.received_s <= begun_s), -1
        )
        if before < 0:
            return None
        for _ in range(before):
            self._samples.popleft()  # steps that follow begin later
        first, between = self._samples[0], list[Moved]()
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
