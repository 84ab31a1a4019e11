"""How far the layers of the fetch are that has its turn, told by its own call.

The C core says it in a word. Where the caller shares the memory that it fetches into, that word lies there. For all
others there is one in this process, for one fetch at a time, and a thread that waits for it to change.
"""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shadowserve import native

__all__ = ["PROGRESS_BYTES", "LayerProgress"]

PROGRESS_BYTES: Final = 4
"""Of the word."""
_LOOK_S: Final = 0.01
"""The thread's longest wait: so long may the next fetch's first layers wait for it, if this one's last never came."""


class LayerProgress:
    """The word, and who waits for it.

    Args:
        pipeline: that runs the batches.
    """

    def __init__(self, pipeline: native.Pipeline) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._registered = native.Destination.local(pipeline, self._memory)
        self._thread = ThreadPoolExecutor(1, "progress")

    @contextlib.asynccontextmanager
    async def told(self, layers: int, tell: Callable[[int], None]) -> AsyncIterator[native.Region]:
        """Give a word to the one fetch that has its turn; ``tell`` is called when more of its layers are in place.

        Args:
            layers: that there are.
            tell: takes how many leading ones are; on the event loop, and not after the end.
        """
        self._memory[:PROGRESS_BYTES] = bytes(PROGRESS_BYTES)
        following = asyncio.create_task(self._follow(layers, tell))
        try:
            yield self._registered.region(0, PROGRESS_BYTES)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    async def _follow(self, layers: int, tell: Callable[[int], None]) -> None:
        loop, seen = asyncio.get_running_loop(), 0
        while seen < layers:
            now = await loop.run_in_executor(self._thread, native.progress_wait, self._memory, seen, _LOOK_S)
            if now > seen:
                seen = now
                tell(seen)

    def close(self) -> None:
        """End the thread; no fetch may have its turn, and the pipeline is still open."""
        self._thread.shutdown()
        self._registered.close()
        self._memory.close()
