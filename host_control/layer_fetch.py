"""One fetch in the order of layers: each is scattered as it arrives, while those behind it are still on their way.

The data plane says how many leading layers are in place in a word behind the chunks, or where it does not share their
memory, in a stream of the call; so a layer costs no call. What was said holds whatever comes later; what comes of the
rest, the answers say. Where the data plane's buffers hold
less than the fetch, it is asked again for what is missing, into the same places.

Chunks are of use as a prefix: of a fetch that fails, layers in which some chunks are missing are scattered at its end,
for those chunks alone that are whole.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from host_control.client import DataPlaneClient, FetchCall, FetchPart
from host_control.registered_memory import PROGRESS_BYTES, Memory, RegisteredMemory
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.pieces import Flags, leading_chunks, leading_layers

__all__ = ["LayerFetch"]

_logger = logging.getLogger(__name__)
_LOOK_INTERVAL: Final = 0.02
"""Seconds between two looks whether the call has ended, or shall, while no layer arrives."""


class _Ended(Exception):
    """No further call follows.

    Attributes:
        reason, detail: why.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass
class LayerFetch:
    """A fetch of chunks of one part; :meth:`run` is called once.

    Args:
        client: of the data plane.
        registration: that the chunks fit into, all at once; nobody else uses it meanwhile.
        keys: of the chunks.
        deadline: on the clock of ``time.monotonic()``.
        cancelled: whether to end early.
        scatter: moves layers, from one up to another, of chunks that lie in memory one after the other.
        told: is told how many leading layers are in place of all chunks.
        window_s: seconds that will be computed with each layer; 0 where nobody knows.

    Attributes:
        fetched_bytes, delivered_bytes: over the wire, and into the registration, in all calls.
    """

    client: DataPlaneClient
    registration: RegisteredMemory
    keys: Sequence[bytes]
    deadline: float
    cancelled: Callable[[], bool]
    scatter: Callable[[Any, tuple[int, int]], None]
    told: Callable[[int], None]
    window_s: float = 0.0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    _memory: Memory | None = field(init=False, default=None)
    _placed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._shape = self.registration.shapes[0]
        self._there: Flags = np.zeros((self._shape.layers, len(self.keys)), np.bool_)
        self._wanted: Flags = np.ones_like(self._there)

    def run(self) -> tuple[int, str, str]:
        """Return how many leading chunks are in place with all layers, and why not all: a reason and a detail.

        Once it returns nothing is written any more, into pages or into a registration that was not given up.
        """
        try:
            try:
                while True:
                    self._call()
            except _Ended as end:
                chunks = leading_chunks(self._there, self._wanted)
                self._place(self._shape.layers, chunks)
                return chunks, end.reason, end.detail
        except _Ended as end:  # what has arrived cannot be used
            return 0, end.reason, end.detail

    def _call(self) -> None:
        """Ask for what is missing and place it as it comes; raise :class:`_Ended` where no other call follows."""
        before, memory = self._memory, self._acquire()
        if before is not None and memory is not before and self._there.any():
            # What is whole of it is taken from where it is.
            raise _Ended("unknown_memory", "the memory that the first layers have arrived in was given up")
        self._memory = memory
        job_id = f"layers-{secrets.token_hex(8)}"
        length = len(self.keys) * self._shape.raw_bytes
        missing = self._wanted & ~self._there
        part = FetchPart(self.registration.memory_id, 0, length, self.keys, missing)
        try:
            call, wait = self._start(job_id, part, memory)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        try:
            layers = 0
            while not call.done() and layers < len(missing):
                if self.cancelled():
                    self.client.cancel(job_id)
                layers = self._watch(wait, layers, missing, _LOOK_INTERVAL)
            self._watch(wait, layers, missing, 0.0)
        except _Ended:
            self.client.cancel(job_id)
            raise
        finally:
            answer = call.result()
            if not answer.quiet or answer.reason == "unknown_memory":
                self.registration.retire(release=not answer.quiet)
        self.fetched_bytes += answer.fetched_bytes
        self.delivered_bytes += answer.delivered_bytes
        self._there |= answer.delivered[0]
        self._place(leading_layers(self._there, self._wanted), len(self.keys))
        if answer.reason == "unknown_memory" and before is None:
            return  # the daemon has restarted: register again, once
        if answer.reason != "batch_full":
            raise _Ended(answer.reason, answer.detail)

    def _start(self, job_id: str, part: FetchPart, memory: Memory) -> tuple[FetchCall, Callable[[int, float], int]]:
        """Start a call; return it, and what waits for further layers than were seen, for so many seconds."""
        left, begin = max(self.deadline - time.monotonic(), 0.001), self.registration.progress_offset
        if begin is None:
            call = self.client.start_fetch_layers(job_id, part, left, self.window_s)
            return call, call.layers
        from shadowserve import native  # an engine loads the C core only where it has to

        word = memory.memory[begin : begin + PROGRESS_BYTES]
        word[:] = bytes(PROGRESS_BYTES)
        call = self.client.start_fetch(
            job_id, [part], left, layerwise=True, progress=begin, window_s=self.window_s
        )  # fmt: skip
        return call, functools.partial(native.progress_wait, word)

    def _acquire(self) -> Memory:
        left = self.deadline - time.monotonic()
        if self.cancelled() or left <= 0:
            raise _Ended("cancelled" if self.cancelled() else "deadline")
        try:
            return self.registration.acquire(left)
        except DataPlaneError as error:
            raise _Ended(error.outcome, str(error)) from error
        except ConfigurationError as error:
            raise _Ended("no_memory", str(error)) from error

    def _watch(self, wait: Callable[[int, float], int], seen: int, missing: Flags, seconds: float) -> int:
        """Wait so long at most for further layers than were ``seen``, and place them; return how many there are."""
        layers = min(wait(seen, seconds), len(missing))
        if layers > seen:
            self._there[:layers] |= missing[:layers]
            self._place(leading_layers(self._there, self._wanted), len(self.keys))
        return layers

    def _place(self, layers: int, chunks: int) -> None:
        """Scatter what is not, up to a layer, of so many chunks."""
        if layers <= self._placed or not chunks:
            return
        assert self._memory is not None
        try:
            self._memory.flush()
            self.scatter(self._memory.memory[: chunks * self._shape.raw_bytes], (self._placed, layers))
        except Exception as error:
            _logger.exception("scattering layers failed")
            raise _Ended("scatter_failed", f"{type(error).__name__}: {error}") from error
        if not self._memory.whole():
            lost = "the memory that chunks arrive in was made shorter; it is given up"
            _logger.error("shadowserve: %s", lost)
            self.registration.lost(self._memory)
            raise _Ended("scatter_failed", lost)
        if chunks == len(self.keys):
            self._placed = layers
            self.told(layers)
