"""Registered memory: the data plane writes fetched chunks into it, or reads chunks to be stored from it.

Memory that the data plane may still use is never reused. If a call ends without an answer, or the data plane does not
know the memory any more, :meth:`RegisteredMemory.retire` gives it up, and the next :meth:`RegisteredMemory.acquire`
registers new memory.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from host_control.client import DataPlaneClient, FetchAnswer, MemoryMessage, StoreAnswer
from host_control.segment import Memory, Segment
from host_control.transfer import Reason
from shadowserve.calibration import PlacedSteps
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError

__all__ = ["PROGRESS_BYTES", "Memory", "RegisteredMemory"]

_logger = logging.getLogger(__name__)
PROGRESS_BYTES: Final = 4
"""Size of the progress word: the number of leading layers or chunks that are in place."""


class RegisteredMemory:
    """Memory that is registered with the data plane when first needed, and again after it was given up.

    One region holds chunks of several shards with different shapes; calls refer to a shape by its index.

    Only one thread calls :meth:`acquire`, :meth:`lost` and :meth:`retire`; any thread reads :attr:`current`.

    Args:
        shapes: Chunk layout of each shard.
        size: Size in bytes.
        connect_timeout_s: Seconds that :meth:`acquire` waits for a connection.
        make: Allocates memory of a given size.
        progress: Append two progress words to the memory, for two calls at a time. Needs shared memory.
        steps: Steps for shapes of ``weighted``.

    Attributes:
        progress_offsets: Offsets of the progress words, of which there may be none.
        retired: Number of times that the memory was given up.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        shapes: Sequence[ChunkLayout],
        size: int,
        connect_timeout_s: float = 2.0,
        make: Callable[[int], Memory] = Segment.create,
        *,
        progress: bool = False,
        steps: PlacedSteps | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self._steps = steps
        self.size = size
        aligned = -(-size // PROGRESS_BYTES) * PROGRESS_BYTES
        self.progress_offsets = (aligned, aligned + PROGRESS_BYTES) if progress else ()
        self._made_bytes = aligned + 2 * PROGRESS_BYTES if progress else size
        self._client = client
        self._make = make
        self._connect_timeout = connect_timeout_s
        self._lock = threading.Lock()
        self._memory: Memory | None = None
        self._memory_id = 0
        self._unreleased: tuple[int, Memory] | None = None
        self.retired = 0

    @property
    def current(self) -> Memory | None:
        """The registered memory; ``None`` if there is none now."""
        with self._lock:
            return self._memory

    @property
    def memory_id(self) -> int:
        with self._lock:
            return self._memory_id

    def acquire(self, timeout: float) -> Memory:
        """Return the registered memory. Allocate and register it if there is none.

        Raises:
            DataPlaneError: The data plane cannot be reached, or refuses the registration; with the outcome
                ``no_memory``, the memory cannot be allocated.
        """
        memory = self.current
        if memory is not None:
            return memory
        breaker = self._client.breakers["register"]
        if not breaker.allow():
            raise DataPlaneError(
                f"registering memory at the data plane {self._client.address} is paused after repeated failures",
                Reason.BREAKER_OPEN,
            )
        try:
            memory, message = self._made(timeout)
        except DataPlaneError:
            breaker.report(success=False)
            raise
        try:
            memory_id = self._client.register(self.shapes, message, steps=self._steps)
        except DataPlaneError:
            memory.close()  # safe even if it was registered: only a Fetch call with its ID would write into it
            raise
        memory.on_registered()
        with self._lock:
            self._memory, self._memory_id = memory, memory_id
        return memory

    def _made(self, timeout: float) -> tuple[Memory, MemoryMessage]:
        # Connect first: allocating all pages is slow.
        self._client.connect(min(timeout, self._connect_timeout), self.shapes[0])
        try:
            if not self._release_pending():
                raise DataPlaneError(
                    f"the data plane at {self._client.address} does not answer the release of old memory",
                    Reason.UNREACHABLE,
                )
            memory = self._make(self._made_bytes)
            try:
                return memory, memory.message()
            except ConfigurationError:
                memory.close()
                raise
        except ConfigurationError as error:
            raise DataPlaneError(str(error), Reason.NO_MEMORY) from error

    def store(
        self, fill: Callable[[Any], None], keys: Sequence[bytes], parents: Sequence[bytes], ends: float, **how: Any
    ) -> StoreAnswer:
        """Write chunks into the memory and store them; once more after a restart of the data plane.

        Args:
            fill: Writes the chunks one after the other into the memory that it is given.
            ends: Time limit (monotonic).
            keys, parents, how: Arguments of :meth:`DataPlaneClient.store`.

        Raises:
            DataPlaneError: As in :meth:`acquire`; also with ``no_memory``, another process truncated the memory.
        """
        for _ in range(2):
            memory = self.acquire(max(ends - time.monotonic(), 0.001))
            fill(memory.memory)
            if not memory.intact():  # bytes of truncated memory read as zeros
                self.lost(memory)
                raise DataPlaneError("another process truncated the memory of stores", Reason.NO_MEMORY)
            left, job_id = max(ends - time.monotonic(), 0.001), secrets.token_hex(8)
            answer = self._client.store(job_id, self.memory_id, 0, keys, parents, left, **how)
            self.settle(answer)
            if answer.reason != Reason.UNKNOWN_MEMORY:
                break
        return answer

    def retire(self, *, release: bool, wait: bool = False) -> None:
        """Give the memory up, so that late writes of the data plane hit memory that nothing reads.

        Memory without a mapping of the data plane's own is kept until the data plane has answered its release.

        Args:
            release: Also release it at the data plane, which may still know it.
            wait: Wait for the answer.
        """
        with self._lock:
            memory, memory_id = self._memory, self._memory_id
            self._memory = None
        if memory is None:
            return
        self.retired += 1
        if release and not memory.peer_keeps_mapping:
            self._unreleased = (memory_id, memory)
            if wait:
                self._release_pending()
            return
        if release:
            self._client.release(memory_id, wait=wait)
        memory.close()

    def settle(self, answer: FetchAnswer | StoreAnswer) -> None:
        """Give the memory up after an answer that is not quiet, or of a data plane that does not know the memory."""
        if not answer.quiet or answer.reason == Reason.UNKNOWN_MEMORY:
            self.retire(release=not answer.quiet)

    def lost(self, memory: Memory) -> None:
        if self.current is memory:
            self.retire(release=True)

    def check(self, memory: Memory) -> str:
        """Give memory of fetched chunks up where another process has truncated it; return a sentence about that."""
        if memory.intact():
            return ""
        lost = "another process truncated the memory that chunks arrive in; it is given up"
        _logger.error("shadowserve: %s", lost)
        self.lost(memory)
        return lost

    def _release_pending(self) -> bool:
        """Release memory that was given up. Return True if none is left to release."""
        if self._unreleased is None:
            return True
        memory_id, memory = self._unreleased
        if not self._client.release(memory_id, wait=True):
            return False
        self._unreleased = None
        memory.close()
        return True

    def close(self) -> None:
        self.retire(release=True, wait=True)
        if self._unreleased is not None:
            _kept.append(self._unreleased[1])


_kept: list[Memory] = []
"""Memory that an unreachable data plane may still write into. It is kept until this process ends."""
