"""The interference budget of a data plane: every mover of bytes waits here for its turn, and is counted.

:class:`~dpu_dataplane.shared_rate.SharedRate` says what moves next, and how fast; here movers wait for it. Engines
report their steps by ReportSteps calls. A turn is bounded by its mover: some chunks, or a record.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover, SharedRate, Turn
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["TURN_S", "Granted", "InterferenceBudget"]

TURN_S: Final = 0.1
"""A turn beside decoding is as long as the rate takes for it, about so long, or as one chunk takes: others wait."""
_SETTLES_S: Final = 0.1
"""A device has done a write or a read some time after it was granted: until then bytes may move."""


class Granted:
    """A turn that has begun.

    Attributes:
        rate: bytes a second that it is to spread its bytes at; 0: no bound.
        waited: whether it did not begin at once.
        moved_bytes: to be set by the mover: what it has really moved; at first all that it asked for.
    """

    def __init__(self, turn: Turn, *, waited: bool) -> None:
        self.rate = turn.rate
        self.waited = waited
        self.moved_bytes = turn.size


class InterferenceBudget:
    """Grants turns to movers. To be used on the event loop.

    Args:
        metrics: to count in.
        shares_memory: what moves inside the data plane uses the memory of the engines' host as well.
        clock: seconds, monotonic.

    Attributes:
        shared: says what moves next.
        bounded: whether turns wait; may be read from any thread.
    """

    def __init__(
        self, metrics: Metrics, *, shares_memory: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shared = SharedRate(clock, shares_memory=shares_memory)
        self.bounded = False
        self._shares_memory = shares_memory
        self._clock = clock
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._settles_s = clock()
        self._moved: Counter[str] = Counter()
        self._delayed: Counter[str] = Counter()
        self._waited_s = dict.fromkeys((mover.label for mover in Mover), 0.0)
        self._dropped: Counter[tuple[str, str]] = Counter()
        metrics.families.append(self._families)
        metrics.gauges |= {
            "interference_rate_bytes_per_s": (
                "Bytes a second that all movers may move beside engines that decode; 0: no bound",
                lambda: self.shared.rate,
            ),
            "interference_budget_ratio": (
                "The least interference budget of the engines that decode; 0 where none does",
                lambda: self.shared.budget,
            ),
            "decoding_engines": ("Engines that have reported that they decode", lambda: self.shared.engines),
        }

    # ---- Reports of engines

    def report(self, owner: str, request: pb.StepReport) -> pb.StepAnswer:
        """Take an engine's report that was checked; return what has moved so far, for its baseline."""
        if request.decodes:
            lasts_s = request.lasts_ms / 1000
            self.shared.report(
                owner, request.engine, rate=request.rate, budget=request.interference_budget, lasts_s=lasts_s
            )
        else:
            self.shared.ended(owner, request.engine)
        self.shared.pause(owner, request.engine, request.pause_ms / 1000)
        self._look()
        moved_bytes, moving = self.shared.moved()
        return pb.StepAnswer(moved_bytes=moved_bytes, moving=moving or self._clock() < self._settles_s)

    @property
    def rate(self) -> int:
        """Bytes a second of all movers together; 0: no bound."""
        return self.shared.rate

    # ---- Turns of movers

    @contextlib.asynccontextmanager
    async def turn(
        self, mover: Mover, size: int, job: Job | None = None, asked: Callable[[Turn], None] | None = None
    ) -> AsyncIterator[Granted]:
        """Wait for a turn of so many bytes, and keep it.

        Args:
            mover: whose.
            size: bytes that it will move at most.
            job: whose time bounds the wait; None: nothing does.
            asked: takes the turn once it is asked for, as :meth:`hasten` wants it.

        Raises:
            Stop: the job was cancelled, or is out of time; it is counted.
        """
        turn = self.shared.ask(mover, size)
        if asked is not None:
            asked(turn)
        granted: Granted | None = None
        try:
            waited = await self._wait_for(turn, job)
            granted = Granted(turn, waited=waited)
            yield granted
        finally:
            moved_bytes = 0 if granted is None else granted.moved_bytes
            self.shared.end(turn, moved_bytes)
            self._moved[mover.label] += moved_bytes
            self._look()

    async def _wait_for(self, turn: Turn, job: Job | None) -> bool:
        """Wait until a turn is granted; return False where it was at once."""
        waiting = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self._look()
        if waiting.done():
            return False
        label = turn.mover.label
        self._delayed[label] += 1
        try:
            if job is None:
                await waiting
            else:
                await job.within(_wait(waiting), "waiting for the interference budget")
        except Stop as stop:
            self.drop(turn.mover, "deadline" if stop.outcome == pb.OUTCOME_DEADLINE else "cancelled")
            raise
        finally:
            self._waiting.pop(turn, None)
            self._waited_s[label] += self._clock() - turn.asked_s
        return True

    def hasten(self, turn: Turn) -> None:
        """A fetch waits for what this turn moves: it goes with fetches."""
        self.shared.hasten(turn)

    def drop(self, mover: Mover, reason: str) -> None:
        """Count that a mover gave up what it had waited to move."""
        self._dropped[mover.label, reason] += 1

    def count(self, mover: Mover, size: int) -> None:
        """Count bytes that another thread moves now, as nothing bounded them when it asked."""
        self.shared.note(mover, size)
        self._moved[mover.label] += size
        self.settle_later()

    def settle_later(self) -> None:
        """A device does for a moment yet what was granted."""
        self._settles_s = self._clock() + _SETTLES_S

    def _look(self) -> None:
        """Grant what is due, and look again when more is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        after_s = self.shared.grant()
        self.bounded = self.shared.bounded
        for turn, waiting in list(self._waiting.items()):
            if turn.begun_s is not None:
                del self._waiting[turn]
                if not waiting.done():
                    waiting.set_result(None)
        if after_s is None and self.bounded:
            after_s = TURN_S  # for the end of reports
        if after_s is not None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def close(self) -> None:
        """End the timer; no mover may wait any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ---- Metrics

    def _families(self) -> list[Metric]:
        families: list[Metric] = []
        for name, text, counts in (
            ("moved_bytes", "Bytes moved on this host, by what moved them", self._moved),
            ("interference_wait_seconds", "Seconds that movers waited for the interference budget", self._waited_s),
            ("interference_delayed", "Turns that waited for the interference budget", self._delayed),
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=["mover"])
            for mover in Mover:
                family.add_metric([mover.label], counts.get(mover.label, 0))
            families.append(family)
        name, text = "interference_dropped", "What was not moved, as its turn did not come in time, by the reason"
        dropped = CounterMetricFamily(f"shadowserve_{name}", text, labels=["mover", "reason"])
        for labels, count in list(self._dropped.items()):
            dropped.add_metric(list(labels), count)
        return [*families, dropped]


async def _wait(future: "asyncio.Future[None]") -> None:
    await future
