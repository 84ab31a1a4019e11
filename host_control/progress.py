"""How far a call of the data plane is, before it answers: a word in shared memory, or a stream of messages."""

from collections.abc import Callable, Iterator
from typing import Protocol

from host_control.client import DataPlaneClient, FetchCall
from host_control.registered_memory import PROGRESS_BYTES
from shadowserve import native


class Progress(Protocol):
    """Counts the leading chunks (or layers) of a call that are in place; a call of FetchLayers counts its own."""

    def wait(self, seen: int, seconds: float) -> int:
        """Return the count, once it is above ``seen`` or the seconds are over."""


class WordProgress:
    """A word in memory that this host shares with the data plane, which writes the count there. Sets it to 0."""

    def __init__(self, word: memoryview) -> None:
        word[:] = bytes(PROGRESS_BYTES)
        self._word = word

    def wait(self, seen: int, seconds: float) -> int:
        return int(native.progress_wait(self._word, seen, seconds))


def follow(
    call: FetchCall, progress: Progress, most: int, interval_s: float, cancel: Callable[[], bool]
) -> Iterator[int]:
    """Yield the count of a call each time it has grown, until the call ends or all ``most`` are in place.

    ``cancel`` is called after each growth, and at least every ``interval_s`` seconds; True stops the loop.
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
