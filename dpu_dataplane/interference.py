"""The interference budget of a data plane: movers of bytes wait for their turns, and are counted.

:class:`~dpu_dataplane.shared_rate.SharedRate` decides the order and the rate. The mover limits the size of a turn: some
chunks, or a record.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover, SharedRate, Turn
from shadowserve.proto import dataplane_pb2 as pb

TURN_S: Final = 0.1
"""Approximate length of a turn beside decoding, unless one chunk takes longer. Other movers wait meanwhile."""
_SETTLES_S: Final = 0.1  # time after a grant within which a device finishes its write or read


class InterferenceBudget:
    """Grants turns to movers. Used on the event loop.

    ``unlimit``: removes the rate of the batch that is running, when no engine decodes any more.
    """

    def __init__(
        self,
        metrics: Metrics,
        unlimit: Callable[[], None],
        *,
        shares_memory: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shared = SharedRate(clock, shares_memory=shares_memory)  # decides the order and the rate
        self.bounded = False  # whether turns wait; any thread may read it
        self._unlimit = unlimit
        self._limited = False  # there was a rate at the last look
        self._clock = clock
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._settles_s = clock()
        self._metrics = metrics
        metrics.moved_bytes.update({mover.label: 0 for mover in Mover})
        metrics.interference_delayed.update({mover.label: 0 for mover in Mover})
        metrics.interference_wait_seconds |= {mover.label: 0.0 for mover in Mover}
        metrics.gauges |= {
            "interference_rate_bytes_per_s": (
                "Bytes per second of all movers beside decoding engines; 0: no limit",
                lambda: self.shared.rate,
            ),
            "interference_budget_ratio": (
                "Lowest interference budget of the decoding engines; 0 without any",
                lambda: self.shared.budget,
            ),
            "decoding_engines": ("Decoding engines", lambda: self.shared.engines),
        }

    # ---- Reports of engines

    def report(self, owner: str, request: pb.StepReport) -> pb.StepAnswer:
        """Apply a validated report; return the moved bytes so far, for the engine's baseline."""
        if request.decodes:
            lasts_s = request.lasts_ms / 1000
            self.shared.report(
                owner, request.engine, rate=request.rate, budget=request.interference_budget, lasts_s=lasts_s
            )
        else:
            self.shared.ended(owner, request.engine)
        self.shared.pause(owner, request.engine, request.pause_ms / 1000)
        self._grant()
        moved_bytes, moving = self.shared.moved()
        return pb.StepAnswer(moved_bytes=moved_bytes, moving=moving or self._clock() < self._settles_s)

    @property
    def rate(self) -> int:
        """Bytes per second of all movers together; 0 for no limit."""
        return self.shared.rate

    # ---- Turns of movers

    @property
    def wanted(self) -> bool:
        """True if a mover waits for its turn."""
        return bool(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(
        self, mover: Mover, size: int, job: Job | None = None, on_request: Callable[[Turn], None] | None = None
    ) -> AsyncIterator[Turn]:
        """Wait for a turn of up to ``size`` bytes, and keep it while in this context.

        The job's deadline limits the wait; Stop if it is cancelled or late. ``on_request`` gets the requested turn, for
        :meth:`hasten`.
        """
        turn = self.shared.request(mover, size)
        if on_request is not None:
            on_request(turn)
        granted = False
        try:
            await self._wait_for(turn, job)
            granted = True
            yield turn
        finally:
            moved_bytes = turn.moved_bytes if granted else 0
            self.shared.end(turn, moved_bytes)
            self._metrics.moved_bytes[mover.label] += moved_bytes
            self._grant()

    async def _wait_for(self, turn: Turn, job: Job | None) -> None:
        waiting = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self._grant()
        if waiting.done():
            return
        label, turn.waited = turn.mover.label, True
        self._metrics.interference_delayed[label] += 1
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
            self._metrics.interference_wait_seconds[label] += self._clock() - turn.requested_s

    def drop(self, mover: Mover, reason: str) -> None:
        """Count a move that was given up while it waited."""
        self._metrics.interference_dropped[mover.label, reason] += 1

    def count(self, mover: Mover, size: int) -> None:
        """Count bytes that another thread moves now without a turn, because there was no limit."""
        self.shared.note(mover, size)
        self._metrics.moved_bytes[mover.label] += size
        self.settle_later()

    def settle_later(self) -> None:
        """Note that a device is finishing a granted write or read."""
        self._settles_s = self._clock() + _SETTLES_S

    def _grant(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limited = self.shared.rate > 0
        if self._limited and not limited:
            self._unlimit()
        self._limited = limited
        after_s = self.shared.grant()
        self.bounded = self.shared.bounded
        for turn, waiting in list(self._waiting.items()):
            if turn.granted_s is not None:
                del self._waiting[turn]
                if not waiting.done():
                    waiting.set_result(None)
        if after_s is None and self.bounded:
            after_s = TURN_S  # to notice when reports expire
        if after_s is not None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._grant)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _wait(future: "asyncio.Future[None]") -> None:
    await future
