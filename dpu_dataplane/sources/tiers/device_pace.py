"""What the pool's thread writes to devices and scrubs there, held to the interference budget.

The pool asks on its own thread and does not wait: an answer of no has a turn asked for on the event loop, and the pool
is woken once that has come.
"""

import asyncio
import threading
from collections.abc import Callable

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.shared_rate import Mover

__all__ = ["DevicePace"]


class DevicePace:
    """Allows one mover's bytes, in the order in which they are asked for.

    Args:
        budget: that bounds them.
        mover: whose they are.
        later: calls a function on the event loop, from any thread.
        wake: has the pool ask again.
    """

    def __init__(
        self,
        budget: InterferenceBudget,
        mover: Mover,
        later: Callable[..., None],
        wake: Callable[[], None],
    ) -> None:
        self._budget = budget
        self._mover = mover
        self._later = later
        self._wake = wake
        self._lock = threading.Lock()  # of the next two
        self._allowed_bytes = 0
        self._asking = False
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waits(self) -> bool:
        """Whether a turn has been asked for and has not come."""
        return self._asking

    def allows(self, size: int) -> bool:
        """Return whether so many bytes may move now; if so, they count. From the pool's thread."""
        if self._closed:
            return True
        with self._lock:
            if self._allowed_bytes >= size:
                self._allowed_bytes -= size
                return True
            if self._budget.bounded:
                if not self._asking:
                    self._asking = True
                    self._later(self._begin, size - self._allowed_bytes)
                return False
        self._later(self._budget.count, self._mover, size)
        return True

    def _begin(self, size: int) -> None:
        if not self._closed:
            self._task = asyncio.ensure_future(self._ask(size))

    async def _ask(self, size: int) -> None:
        async with self._budget.turn(self._mover, size):
            self._budget.settle_later()
            with self._lock:
                self._allowed_bytes += size
                self._asking = False
        self._wake()

    async def close(self) -> None:
        """Allow everything from now on: what is not written now is lost."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._wake()
