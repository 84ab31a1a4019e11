"""Reports decode steps to a data plane, so that it keeps its transfers within a rate."""

import time
from typing import Final

from host_control.client import DataPlaneClient
from shadowserve.errors import ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb

BUDGET: Final = 0.02
_LASTS_S: Final = 10.0
_AGAIN_S: Final = 3.0


class SteadySteps:
    """Reports to a data plane as the plugin does, in the caller's thread.

    Args:
        client: Client of the data plane.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._rate = 0
        self._reported_s = 0.0

    def report(self, rate: int) -> None:
        """Report that an engine decodes, with the rate that its interference budget allows; 0: it does not decode."""
        if rate == self._rate and time.monotonic() < self._reported_s + _AGAIN_S:
            return
        call = self._client.report_steps(
            pb.StepReport(
                engine=b"benchmark",
                decodes=rate > 0,
                rate=rate,
                interference_budget=BUDGET,
                lasts_ms=int(1000 * _LASTS_S),
            )
        )
        if call is None:
            raise ShadowServeError("the data plane takes no report of steps: it is not connected")
        call.result()
        self._rate, self._reported_s = rate, time.monotonic()
