"""Memory that a data plane fetches a workload into, also at the rate that a decoding engine allows."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

import numpy as np

from host_control.client import DataPlaneClient, FetchPart
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve.calibration import PlacedSteps
from shadowserve.errors import ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve_tools.bench.parts.workload import Workload
from shadowserve_tools.bench.peers.driver import CLEARED

CALL_TIMEOUT_S: Final = 60.0
BUDGET: Final = 0.02
_LASTS_S: Final = 10.0
_AGAIN_S: Final = 3.0


class SteadySteps:
    """Reports decode steps to a data plane as the plugin does, in the caller's thread."""

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


def fetch_job(manager: KVCacheManager, keys: Sequence[bytes], **more: Any) -> float:
    """Fetch chunks with the manager that an engine uses; return the seconds."""
    job = FetchJob(request_id=secrets.token_hex(8), keys=(tuple(keys),), **more)
    begin_s = time.perf_counter()
    results = manager.exchange([job])
    manager.wait([job.request_id])
    seconds = time.perf_counter() - begin_s
    (result,) = results + manager.exchange()
    if not result.complete:
        raise ShadowServeError(f"fetching stopped at chunk {result.chunks[0]}: {result.reason}: {result.detail}")
    return seconds


class Target:
    """Memory that a data plane fetches a workload into, through an engine's client and registered memory.

    Attributes:
        rate: Bytes per second that the data plane keeps from the next fetch on, as beside decoding; 0 for no bound.
        reports: Reports of decode steps, which the targets of one data plane share.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        registration: RegisteredMemory,
        workload: Workload,
        beside: "Target | None" = None,
    ) -> None:
        self._client = client
        self._registration = registration
        self._workload = workload
        self._memory = registration.acquire(CALL_TIMEOUT_S).memory
        self.rate = 0
        self.reports: SteadySteps = SteadySteps(client) if beside is None else beside.reports

    @classmethod
    @contextmanager
    def opened(
        cls, address: str, workload: Workload, size: int | None = None, beside: "Target | None" = None
    ) -> Iterator["Target"]:
        """Register shared memory with the data plane at ``address``.

        Args:
            size: Bytes of memory, by default for all chunks.
            beside: Target at the same data plane, whose reports of decode steps this one shares.
        """
        with closing(DataPlaneClient(address, connect_timeout_s=CALL_TIMEOUT_S)) as plane:
            size = size or workload.raw_bytes
            steps = None if workload.steps is None else PlacedSteps(workload.steps, [(0, 0)])
            registration = RegisteredMemory(
                plane, [workload.layout], size, connect_timeout_s=CALL_TIMEOUT_S, steps=steps
            )
            with closing(registration):
                yield cls(plane, registration, workload, beside)

    def fetch(self, count: int | None = None) -> None:
        """Fetch the leading chunks, by default all, in as many batches as necessary."""
        self.reports.report(self.rate)
        done, last = 0, len(self._workload.keys) if count is None else count
        while done < last:
            done += self._batch(done, done * self._workload.layout.raw_bytes, last)

    def touch(self, index: int, places: int | None = None) -> None:
        """Fetch one chunk to every place, or to the first ``places``, so that all memory has been used."""
        for place in range(len(self._workload.keys) if places is None else places):
            self._batch(index, place * self._workload.layout.raw_bytes, index + 1)

    def fetch_through(self) -> None:
        """Fetch the whole workload through smaller memory; each batch is verified and then overwritten."""
        done = 0
        while done < len(self._workload.keys):
            count = self._batch(done, 0, len(self._workload.keys))
            self.verify(count, done)
            done += count

    def _batch(self, first: int, offset: int, last: int) -> int:
        """Fetch the chunks from ``first`` up to ``last`` that fit after ``offset``; return their number."""
        keys, room = self._workload.keys[first:last], len(self._memory) - offset
        part = FetchPart.whole(self._workload.layout, self._registration.memory_id, keys, offset, room)
        answer = self._client.start_fetch(secrets.token_hex(8), [part], CALL_TIMEOUT_S).result()
        (chunks,) = answer.chunks
        if not chunks or answer.reason not in ("complete", "batch_full"):
            raise ShadowServeError(f"fetching stopped at chunk {first + chunks}: {answer.reason}: {answer.detail}")
        return chunks

    def clear(self) -> None:
        """Overwrite the memory, so that an earlier run's bytes cannot pass the comparison."""
        np.frombuffer(self._memory, np.uint8).fill(CLEARED)

    def verify(self, count: int | None = None, first: int = 0) -> None:
        """Compare the chunks in memory, by default all, with the stored ones from ``first`` on."""
        self._workload.check(self._memory, count, first)
