"""Layer progress of the fetch that has its turn, for calls that report it in a stream.

The C core writes the number of leading layers into a word. Callers without shared memory use one word in this process,
and a thread that waits for its changes.
"""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shadowserve import native

PROGRESS_BYTES: Final = 4  # size of the word
_WAIT_S: Final = 0.01
"""The thread's longest wait: it delays the next fetch's first layers by as much after a fetch that ended early."""


class LayerProgress:
    """The word, and the thread that waits for it."""

    def __init__(self, pipeline: native.Pipeline) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._registered = native.RegisteredMemory.local(pipeline, self._memory)
        self._thread = ThreadPoolExecutor(1, "progress")

    @contextlib.asynccontextmanager
    async def follow(self, layers: int, on_layers: Callable[[int], None]) -> AsyncIterator[native.Region]:
        """Provide the word while in this context; call ``on_layers`` with its changes, on the event loop."""
        self._memory[:PROGRESS_BYTES] = bytes(PROGRESS_BYTES)
        reporting = asyncio.create_task(self._report(layers, on_layers))
        try:
            yield self._registered.region(0, PROGRESS_BYTES)
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting

    async def _report(self, layers: int, on_layers: Callable[[int], None]) -> None:
        loop, reported = asyncio.get_running_loop(), 0
        while reported < layers:
            now = await loop.run_in_executor(self._thread, native.progress_wait, self._memory, reported, _WAIT_S)
            if now > reported:
                reported = now
                on_layers(reported)

    def close(self) -> None:
        """End the thread, before the pipeline is closed. No fetch may be in progress."""
        self._thread.shutdown()
        self._registered.close()
        self._memory.close()
