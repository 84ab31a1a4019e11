"""What an engine reports of its steps to its data planes, which hold all that they move to its interference budget.

While the engine decodes, a thread tells each data plane so and at which rate its steps stay within the budget: at once
when that changes, and again and again, since a report ends by itself. The answers say how many bytes have moved on the
host so far, of whichever engine. So the engine knows which of its steps had nothing beside them, and how much the
others had.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import grpc

from host_control.client import DataPlaneClient
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_LASTS_S: Final = 3.0
"""Of a report: an engine that has died holds data planes back for so long."""
_MOVING_S: Final = 0.1
"""Between two reports while something moves: steps are compared at the rate that came in so long."""
_CALM_S: Final = 0.5
_LINGER_S: Final = 0.25
"""Behind a step, until the engine counts as one that does not decode: the next one is soon scheduled."""
_SILENT_S: Final = 60.0
"""From a step's beginning, likewise, where its end is not told."""
_RATE_DRIFT: Final = 1.1
"""A rate that has changed by more than this factor is reported at once."""
_SAMPLES_MAX: Final = 256


class Sample(NamedTuple):
    """What data planes had moved at some moment, between these two.

    Attributes:
        sent_s, received_s: of the report and its last answer, on the clock of the engine.
        moved_bytes: so far; of several data planes those of the one that moved most.
        moving: something was under way.
        known: what has moved since the sample before is known; else a data plane was away, or is another one.
    """

    sent_s: float
    received_s: float
    moved_bytes: int
    moving: bool
    known: bool


class StepReports:
    """Reports the steps of one engine. All methods are the engine's thread's; none waits.

    Args:
        clients: of the data planes.
        budget: by which fraction steps may be longer.
        linger_s: seconds behind a step, until the engine counts as one that does not decode.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        clients: Sequence[DataPlaneClient],
        budget: float,
        *,
        linger_s: float = _LINGER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = list(clients)
        self._budget = budget
        self._linger_s = linger_s
        self._clock = clock
        self._name = os.urandom(16)
        self._until_s = -math.inf  # it decodes
        self._rate, self._paused = 0, False
        self._reported: tuple[bool, int, bool] = (False, 0, False)
        self._moved: dict[DataPlaneClient, tuple[object, int]] = {}
        self._total_bytes = 0
        self._moving = False
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES_MAX)
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shadowserve-steps", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's side

    def decodes(self, rate: int, *, paused: bool = False) -> None:
        """A step has begun that decodes.

        Args:
            rate: bytes a second beside which it stays within the budget; 0: any.
            paused: nothing is to begin to move, for a moment.
        """
        self._rate, self._paused = rate, paused
        self._until_s = self._clock() + _SILENT_S
        if self._differs():
            self._changed.set()

    def rests(self) -> None:
        """No step that decodes is under way."""
        self._until_s = min(self._until_s, self._clock() + self._linger_s)

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def close(self) -> None:
        """End the thread; data planes hear that the engine decodes no more."""
        self._until_s, self._closed = -math.inf, True
        self._changed.set()
        self._thread.join(_MOVING_S)

    # ------------------------------------------------------------------ the reporting thread

    def _differs(self) -> bool:
        """Return whether what was reported last is not so any more."""
        decodes, rate, paused = self._reported
        if not decodes or paused != self._paused or (rate > 0) != (self._rate > 0):
            return True
        return rate > 0 and not 1 / _RATE_DRIFT <= self._rate / rate <= _RATE_DRIFT

    def _run(self) -> None:
        while True:
            decodes = self._clock() < self._until_s
            if decodes or self._reported[0]:
                self._report(decodes)
            if self._closed and not self._reported[0]:
                return
            pause_s = (_MOVING_S if self._moving else _CALM_S) if decodes else None
            if pause_s is not None:
                pause_s = max(min(pause_s, self._until_s - self._clock()), 0.01)
            self._changed.wait(pause_s)
            self._changed.clear()

    def _report(self, decodes: bool) -> None:
        rate, paused = self._rate, self._paused
        message = pb.StepReport(
            engine=self._name,
            decodes=decodes,
            rate=rate if decodes else 0,
            interference_budget=self._budget,
            lasts_ms=int(1000 * _LASTS_S),
            pause_ms=2000 if decodes and paused else 0,
        )
        sent_s = self._clock()
        for client in self._clients:
            if decodes and client.peer is None:
                with contextlib.suppress(DataPlaneError):
                    client.connect(_LASTS_S, wait=False)
        calls = [(client, client.peer, client.report_steps(message)) for client in self._clients]
        self._reported = decodes, rate, paused
        answers = [(client, peer, self._answer(client, call)) for client, peer, call in calls]
        self._take(sent_s, answers)

    @staticmethod
    def _answer(client: DataPlaneClient, call: Any) -> pb.StepAnswer | None:
        if call is None:
            return None
        try:
            answer: pb.StepAnswer = call.result()
            return answer
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            client.lost(error)
            return None

    def _take(self, sent_s: float, answers: Sequence[tuple[DataPlaneClient, object, pb.StepAnswer | None]]) -> None:
        known, most, moving = True, 0, False
        for client, peer, answer in answers:
            before = self._moved.pop(client, None)
            if answer is None:
                known = False
                continue
            moving |= answer.moving
            self._moved[client] = peer, answer.moved_bytes
            if before is None or before[0] is not peer or answer.moved_bytes < before[1]:
                known = False
            else:
                most = max(most, answer.moved_bytes - before[1])
        self._total_bytes += most
        self._moving = moving or most > 0 or not known
        self._samples.append(Sample(sent_s, self._clock(), self._total_bytes, moving, known))
