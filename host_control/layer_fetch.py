"""One fetch layer by layer: each layer is scattered as it arrives, while later layers are still on their way.

The data plane tells how many leading layers are in place (:mod:`host_control.progress`), so a layer costs no call.
Layers that were reported stay valid, whatever the answer is; the answer reports the rest. Where the data plane's
buffers hold less than the fetch, another call fetches the missing pieces into the same places.

Chunks are useful as a prefix only. At the end of a fetch that fails, the layers that lack some chunks are scattered for
the leading chunks that are complete.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall, FetchPart
from host_control.progress import Progress, StreamProgress, WordProgress, cancel_if, follow
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from host_control.transfer import Reason
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.pieces import Flags, leading_chunks, leading_layers

_logger = logging.getLogger(__name__)
_LOOK_INTERVAL_S: Final = 0.02
"""Between two looks at the call's end and at cancellation, while no layer arrives."""


class _Ended(Exception):
    """No further call follows.

    Attributes:
        reason, detail: Why.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass
class LayerFetch:
    """A fetch of one shard's chunks; :meth:`run` is called once.

    Args:
        registration: Registered memory that holds all of the chunks; nothing else uses it meanwhile.
        keys: Record keys of the chunks.
        deadline: Time of the clock ``time.monotonic()`` by which it ends.
        cancelled: Tells if it should end early.
        scatter: Moves layers, from one up to another, of chunks that are stored one after the other.
        on_layers: Receives the number of leading layers that are in place of all chunks.
        window_s: Seconds that the engine will compute with each layer; 0 if unknown.

    Attributes:
        fetched_bytes, delivered_bytes: Bytes over the network, and into registered memory, of all calls.
    """

    client: DataPlaneClient
    registration: RegisteredMemory
    keys: Sequence[bytes]
    deadline: float
    cancelled: Callable[[], bool]
    scatter: Callable[[Any, tuple[int, int]], None]
    on_layers: Callable[[int], None]
    window_s: float = 0.0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    _memory: Memory | None = field(init=False, default=None)
    _placed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._shape = self.registration.shapes[0]
        self._delivered: Flags = np.zeros((self._shape.layers, len(self.keys)), np.bool_)
        self._wanted: Flags = np.ones_like(self._delivered)

    def run(self) -> tuple[int, str, str]:
        """Return how many leading chunks are in place with all layers, a reason, and a detail of it.

        Afterwards nothing writes into pages any more, nor into registered memory that is still in use.
        """
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
        length = len(self.keys) * self._shape.raw_bytes
        part = FetchPart(self.registration.memory_id, 0, length, self.keys, missing)
        try:
            call, progress = self._start(job_id, part, memory)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        answer = self._follow(call, progress, job_id, missing)
        self.fetched_bytes += answer.fetched_bytes
        self.delivered_bytes += answer.delivered_bytes
        self._delivered |= answer.delivered[0]
        self._place(leading_layers(self._delivered, self._wanted), len(self.keys))
        if answer.reason == Reason.UNKNOWN_MEMORY and before is None:
            return  # the data plane has restarted: register again, once
        if answer.reason != Reason.BATCH_FULL:
            raise _Ended(answer.reason, answer.detail)

    def _follow(self, call: FetchCall, progress: Progress, job_id: str, missing: Flags) -> FetchAnswer:
        """Place layers as they arrive; return the call's answer."""
        layers, most = 0, len(missing)
        try:
            cancels = cancel_if(self.client, job_id, self.cancelled)
            for layers in follow(call, progress, most, _LOOK_INTERVAL_S, cancels):
                self._arrived(layers, missing)
            if (last := min(progress.wait(layers, 0.0), most)) > layers:
                self._arrived(last, missing)
        except _Ended:
            self.client.cancel(job_id)
            raise
        finally:
            answer = call.result()
            if not answer.quiet or answer.reason == Reason.UNKNOWN_MEMORY:
                self.registration.retire(release=not answer.quiet)
        return answer

    def _start(self, job_id: str, part: FetchPart, memory: Memory) -> tuple[FetchCall, Progress]:
        left, begin = max(self.deadline - time.monotonic(), 0.001), self.registration.progress_offset
        if begin is None:
            call = self.client.start_fetch_layers(job_id, part, left, self.window_s)
            return call, StreamProgress(call)
        word = WordProgress(memory.memory[begin : begin + PROGRESS_BYTES])  # before the call writes there
        call = self.client.start_fetch(job_id, [part], left, layerwise=True, progress=begin, window_s=self.window_s)
        return call, word

    def _acquire(self) -> Memory:
        left = self.deadline - time.monotonic()
        if self.cancelled() or left <= 0:
            raise _Ended(Reason.CANCELLED if self.cancelled() else Reason.DEADLINE)
        try:
            return self.registration.acquire(left)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        except ConfigurationError as error:
            raise _Ended(Reason.NO_MEMORY, str(error)) from error

    def _arrived(self, layers: int, missing: Flags) -> None:
        self._delivered[:layers] |= missing[:layers]
        self._place(leading_layers(self._delivered, self._wanted), len(self.keys))

    def _place(self, layers: int, chunks: int) -> None:
        """Scatter the layers of the leading chunks that are not scattered yet."""
        if layers <= self._placed or not chunks:
            return
        assert self._memory is not None
        try:
            self._memory.flush()
            self.scatter(self._memory.memory[: chunks * self._shape.raw_bytes], (self._placed, layers))
        except Exception as error:
            _logger.exception("scattering layers failed")
            raise _Ended(Reason.SCATTER_FAILED, f"{type(error).__name__}: {error}") from error
        if not self._memory.intact():
            lost = "another process truncated the memory that chunks arrive in; it is given up"
            _logger.error("shadowserve: %s", lost)
            self.registration.lost(self._memory)
            raise _Ended(Reason.SCATTER_FAILED, lost)
        if chunks == len(self.keys):
            self._placed = layers
            self.on_layers(layers)
