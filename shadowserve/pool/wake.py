"""What has whoever drives a pool look after it soon."""

import contextlib
import os


class Wake:
    """A descriptor that becomes readable when there is something to do that no device publishes.

    Attributes:
        descriptor: to wait for.
    """

    def __init__(self) -> None:
        """close() gives the descriptor back."""
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False

    def wake(self) -> None:
        """Have the descriptor readable; from any thread."""
        os.eventfd_write(self.descriptor, 1)
        self._awake = True  # not before: calm() would look for it in vain, and never again

    def calm(self) -> None:
        """Take back wake()."""
        if self._awake:
            self._awake = False
            with contextlib.suppress(BlockingIOError):  # the wake() before this one has taken it
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)
