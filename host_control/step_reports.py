"""Reports of an engine's decode steps to its data planes, which limit their transfers to its interference budget.

While the engine decodes, a thread reports the allowed transfer rate to each data plane: at once when it changes, and
regularly, because a report expires. The answers contain the number of bytes that were moved on the host so far, for any
engine. From these the engine knows the transfer rate during its steps.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from host_control.client import DataPlaneClient
from host_control.interference.step_rates import Sample
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_LASTS_S: Final = 3.0
"""Lifetime of a report: a crashed engine limits data planes this long."""
_MOVING_S: Final = 0.1
"""Interval of reports during transfers: the resolution of measured transfer rates."""
_CALM_S: Final = 0.5
"""Interval of reports without transfers."""
_LINGER_S: Final = 0.25
"""Time after a step until the engine counts as idle: the next step usually follows soon."""
_SILENT_S: Final = 60.0
"""The same from the start of a step whose end is not reported."""
_RATE_DRIFT: Final = 1.1
"""A change of the rate by more than this factor is reported at once."""
_SAMPLES_MAX: Final = 256


class StepReports:
    """Reports the steps of one engine. All methods run on the engine's thread. None of them blocks.

    ``budget``: allowed relative slowdown of decode steps. ``linger_s``: see ``_LINGER_S``.
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
        self._until_s = -math.inf  # the engine counts as decoding until then
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

    # ---- On the engine's thread --------------------------------------------------------------------------------------

    def decodes(self, rate: int, *, paused: bool = False) -> None:
        """Report that a decode step has begun.

        Args:
            rate: Allowed transfer rate in bytes per second; 0: no limit.
            paused: Ask for a short pause of transfers.
        """
        self._rate, self._paused = rate, paused
        self._until_s = self._clock() + _SILENT_S
        if self._differs():
            self._changed.set()

    def rests(self) -> None:
        """Report that no decode step is running."""
        self._until_s = min(self._until_s, self._clock() + self._linger_s)

    def ends(self) -> None:
        """Report at once that no decode step runs or follows: a load that begins now slows nothing down."""
        if self._until_s != -math.inf:
            self._until_s = -math.inf
            self._changed.set()

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def close(self) -> None:
        """Report that the engine does not decode any more, and end the thread."""
        self._until_s, self._closed = -math.inf, True
        self._changed.set()
        self._thread.join(_MOVING_S)

    # ---- On the reporting thread -------------------------------------------------------------------------------------

    def _differs(self) -> bool:
        """Return True if the last report is outdated."""
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
            if decodes != (self._clock() < self._until_s):
                continue  # decodes() was called during the report, and compared with the report before
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
