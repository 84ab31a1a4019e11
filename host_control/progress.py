"""How far a call of the data plane is, before it answers: a word in shared memory, or a stream of messages."""

from collections.abc import Callable, Iterator
from typing import Protocol

from host_control.client import DataPlaneClient, FetchCall
from host_control.registered_memory import PROGRESS_BYTES


class Progress(Protocol):
    """Counts the leading chunks (or layers) of a call that are in place. The count only grows."""

    def wait(self, seen: int, seconds: float) -> int:
        """Return the count, once it is above ``seen`` or the seconds are over."""


class WordProgress:
    """A word in memory that this host shares with the data plane, which writes the count there.

    Args:
        word: The word, which is set to 0.
    """

    def __init__(self, word: memoryview) -> None:
        from shadowserve import native  # an engine loads the C core only where it has to

        word[:] = bytes(PROGRESS_BYTES)
        self._word = word
        self._wait = native.progress_wait

    def wait(self, seen: int, seconds: float) -> int:
        """See :class:`Progress`."""
        return int(self._wait(self._word, seen, seconds))


class StreamProgress:
    """The messages of a FetchLayers call, for memory that the data plane does not share.

    Args:
        call: The call.
    """

    def __init__(self, call: FetchCall) -> None:
        self._call = call

    def wait(self, seen: int, seconds: float) -> int:
        """See :class:`Progress`."""
        return self._call.layers(seen, seconds)


def follow(
    call: FetchCall, progress: Progress, most: int, interval_s: float, cancel: Callable[[], bool]
) -> Iterator[int]:
    """Yield the count of a call each time it has grown, until the call ends or all ``most`` are in place.

    Args:
        call: The call.
        progress: Its progress.
        most: Largest count.
        interval_s: Seconds between two looks at ``cancel`` and the call's end.
        cancel: Called at each look; True stops the loop.
    """
    seen = 0
    while seen < most and not call.done() and not cancel():
        count = min(progress.wait(seen, interval_s), most)
        if count > seen:
            seen = count
            yield seen


def cancel_if(client: DataPlaneClient, job_id: str, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function for :func:`follow` that cancels a call when the engine does, and lets it answer."""

    def look() -> bool:
        if cancelled():
            client.cancel(job_id)
        return False

    return look
