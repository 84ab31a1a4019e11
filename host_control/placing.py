"""What brings chunks straight into an engine's paged KV memory."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Placed", "Placer"]


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
