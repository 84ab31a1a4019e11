"""Fetches layer by layer: each layer is scattered as it arrives, while later layers are still on their way.

The data plane tells how many leading layers are in place (:mod:`host_control.progress`), so a layer costs no call.
Layers that were reported stay valid, whatever the answer is; the answer reports the rest. Where the data plane's
buffers hold less than the fetch, another call fetches the missing pieces into the same places.

Chunks are useful as a prefix only. At the end of a fetch that fails, the layers that lack some chunks are scattered for
the leading chunks that are complete.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall, FetchPart
from host_control.fetch import Fetch, FetchJob
from host_control.movers import BatchMover
from host_control.progress import Progress, WordProgress, cancel_if, follow
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from host_control.transfer import Reason
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, leading_chunks, leading_layers

_logger = logging.getLogger(__name__)
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at the call's end and at cancellation, while no layer arrives."""


@dataclass
class LayerMover:
    """Fetches all chunks of one fetch layer by layer.

    Args:
        registration: Registered memory that holds all chunks of a fetch.
        scatter: Moves layers, from one up to another, of a job's leading chunks.
        batches: Mover that ends fetches, and whose chunks are scattered first.
        tell: Receives the number of leading layers of a fetch that are in place.
    """

    client: DataPlaneClient
    registration: RegisteredMemory
    scatter: Callable[[FetchJob, Any, tuple[int, int]], None]
    batches: BatchMover
    tell: Callable[[Fetch, int], None]

    def move(self, fetch: Fetch) -> bool:
        """Fetch everything that is left, and end the fetch.

        Afterwards nothing writes into pages any more, nor into registered memory that is still in use.
        """
        self.batches.flush()  # layers arrive in both halves
        if fetch.all_delivered:
            self.batches.end(fetch, Reason.COMPLETE)
        else:
            fetch.placed[0], reason, detail = _LayerFetch(self, fetch).run()
            self.batches.end(fetch, reason, detail)
        return False


class _Ended(Exception):
    """No further call follows."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class _LayerFetch:
    def __init__(self, mover: LayerMover, fetch: Fetch) -> None:
        self._mover, self._fetch = mover, fetch
        self._client, self._registration = mover.client, mover.registration
        self._keys, self._shape = fetch.job.keys[0], mover.registration.shapes[0]
        self._memory: Memory | None = None
        self._placed = 0  # layers that are scattered
        self._delivered: Flags = np.zeros((self._shape.layers, len(self._keys)), np.bool_)
        self._wanted: Flags = np.ones_like(self._delivered)

    def run(self) -> tuple[int, str, str]:
        """Return how many leading chunks are in place with all layers, a reason, and a detail of it."""
        try:
            try:
                while True:
                    self._call()
            except _Ended as end:
                chunks = leading_chunks(self._delivered, self._wanted)
                self._place(self._shape.layers, chunks)
                return chunks, end.reason, end.detail
        except _Ended as end:  # the delivered layers cannot be used
            return 0, end.reason, end.detail

    def _call(self) -> None:
        """Fetch the missing pieces, and place layers as they arrive; raise :class:`_Ended` where no call follows."""
        before, memory = self._memory, self._acquire()
        if before is not None and memory is not before and self._delivered.any():
            # The first layers of every chunk are in the memory that was given up.
            raise _Ended(Reason.UNKNOWN_MEMORY, "the memory that holds the first layers was given up")
        self._memory = memory
        job_id = f"layers-{secrets.token_hex(8)}"
        missing = self._wanted & ~self._delivered
        length = len(self._keys) * self._shape.raw_bytes
        part = FetchPart(self._registration.memory_id, 0, length, self._keys, missing)
        try:
            call, progress = self._start(job_id, part, memory)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        answer = self._follow(call, progress, job_id, missing)
        self._fetch.count_moved(answer)
        self._delivered |= answer.delivered[0]
        self._place(leading_layers(self._delivered, self._wanted), len(self._keys))
        if answer.reason == Reason.UNKNOWN_MEMORY and before is None:
            return  # the data plane has restarted: register again, once
        if answer.reason != Reason.BATCH_FULL:
            raise _Ended(answer.reason, answer.detail)

    def _acquire(self) -> Memory:
        if self._fetch.cancelled or self._fetch.left_s <= 0:
            raise _Ended(Reason.CANCELLED if self._fetch.cancelled else Reason.DEADLINE)
        try:
            return self._registration.acquire(self._fetch.left_s)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error

    def _start(self, job_id: str, part: FetchPart, memory: Memory) -> tuple[FetchCall, Progress]:
        left, begin = max(self._fetch.left_s, 0.001), self._registration.progress_offset
        window_s = self._fetch.job.window_s
        if begin is None:
            call = self._client.start_fetch_layers(job_id, part, left, window_s)
            return call, call
        word = WordProgress(memory.memory[begin : begin + PROGRESS_BYTES])  # before the call writes there
        call = self._client.start_fetch(job_id, [part], left, layerwise=True, progress=begin, window_s=window_s)
        return call, word

    def _follow(self, call: FetchCall, progress: Progress, job_id: str, missing: Flags) -> FetchAnswer:
        """Place layers as they arrive; return the call's answer."""
        layers, most = 0, len(missing)
        try:
            cancels = cancel_if(self._client, job_id, lambda: self._fetch.cancelled)
            for layers in follow(call, progress, most, _LOOK_INTERVAL_S, cancels):
                self._arrived(layers, missing)
            if (last := min(progress.wait(layers, 0.0), most)) > layers:
                self._arrived(last, missing)
        except _Ended:
            self._client.cancel(job_id)
            raise
        finally:
            answer = call.result()
            self._registration.settle(answer)
        return answer

    def _arrived(self, layers: int, missing: Flags) -> None:
        self._delivered[:layers] |= missing[:layers]
        self._place(leading_layers(self._delivered, self._wanted), len(self._keys))

    def _place(self, layers: int, chunks: int) -> None:
        """Scatter the layers of the leading chunks that are not scattered yet."""
        if layers <= self._placed or not chunks:
            return
        assert self._memory is not None
        try:
            self._memory.flush()
            data = self._memory.memory[: chunks * self._shape.raw_bytes]
            self._mover.scatter(self._fetch.job, data, (self._placed, layers))
        except Exception as error:
            _logger.exception("scattering layers failed")
            raise _Ended(Reason.SCATTER_FAILED, f"{type(error).__name__}: {error}") from error
        if lost := self._registration.check(self._memory):
            raise _Ended(Reason.SCATTER_FAILED, lost)
        if chunks == len(self._keys):
            self._placed = layers
            self._mover.tell(self._fetch, layers)
