"""What brings chunks straight into an engine's paged KV memory, and in which pieces beside an engine that decodes."""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["Pace", "Placed", "Placer"]

_PIECE_S: Final = 0.1
"""A piece is of as much as a rate allows in so long: calls that a data plane holds to a rate end after it, too."""


class Placed(NamedTuple):
    """What a :class:`Placer` has done: chunks in place, bytes for them, why nothing more may be; empty if it may."""

    chunks: int
    moved_bytes: int = 0
    reason: str = ""
    detail: str = ""


class Placer(Protocol):
    """Has chunks brought straight into an engine's paged KV memory, as far as they lie where that can be done.

    Jobs are a :class:`~host_control.manager.FetchJob`.
    """

    def first(self, job: Any) -> int:
        """Return from which chunk of the job's one part on."""

    def place(
        self,
        job: Any,
        chunks: range,
        deadline: float,
        cancelled: Callable[[], bool],
        told: Callable[[int], None],
    ) -> Placed:
        """Place these chunks of the job, from that one on; return what came of it.

        ``told`` hears how many leading layers are in place of all of them.
        """


class Pace:
    """Holds what is placed to a rate, in pieces: each comes as fast as a device brings it, and pauses lie between them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began, self._bytes = 0.0, 0

    @staticmethod
    def chunks(rate: int, chunk_bytes: int) -> int:
        """Return how many chunks make a piece: one at least."""
        return max(int(rate * _PIECE_S) // chunk_bytes, 1)

    def left(self, rate: int) -> float:
        """Return the seconds until a piece may begin, at so many bytes a second, which may be others than before."""
        return max(self._began + self._bytes / rate - self._clock(), 0.0)

    def begin(self) -> None:
        """A piece begins."""
        self._began, self._bytes = self._clock(), 0

    def end(self, moved_bytes: int) -> None:
        """It was of so many bytes."""
        self._bytes = moved_bytes
