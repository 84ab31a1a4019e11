"""Limits device writes and scrubs of the pool's thread to the interference budget."""

import asyncio
import threading
from collections.abc import Callable

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.shared_rate import Mover


class DevicePace:
    """Allows the bytes of one mover. The pool's thread does not wait: a turn is requested on the event loop.

    ``later`` calls a function on the event loop, ``wake`` wakes the pool's thread once the turn is granted.
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
        self._lock = threading.Lock()  # guards the next two
        self._allowed_bytes = 0
        self._requested = False
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waits(self) -> bool:
        """True if a turn was requested and is not granted yet."""
        return self._requested

    def allows(self, size: int) -> bool:
        """Return whether bytes may move now, and count them. Called on the pool's thread."""
        if self._closed:
            return True
        with self._lock:
            if self._allowed_bytes >= size:
                self._allowed_bytes -= size
                return True
            if self._budget.bounded:
                if not self._requested:
                    self._requested = True
                    self._later(self._request, size - self._allowed_bytes)
                return False
        self._later(self._budget.count, self._mover, size)
        return True

    def _request(self, size: int) -> None:
        if not self._closed:
            self._task = asyncio.ensure_future(self._wait_for_turn(size))

    async def _wait_for_turn(self, size: int) -> None:
        async with self._budget.turn(self._mover, size):
            self._budget.settle_later()
            with self._lock:
                self._allowed_bytes += size
                self._requested = False
        self._wake()

    async def close(self) -> None:
        """Allow all bytes from now on: records that are not written now are lost."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._wake()
