"""What calls of the data plane's client ask for and bring; answers are checked before they are believed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, leading_chunks, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb

__all__ = [
    "FetchAnswer",
    "FetchCall",
    "FetchPart",
    "Registration",
    "StoreAnswer",
    "delivered_of",
    "reason_of",
]


class Registration(NamedTuple):
    """What the daemon calls registered memory."""

    memory_id: int


@dataclass(frozen=True)
class FetchPart:
    """What a fetch wants of one group.

    Attributes:
        memory_id: of the memory that it goes to.
        offset: of the first chunk's place in it.
        length: bytes from there on that chunks go to.
        keys: of the chunks.
        wanted: pieces, by layer and chunk.
        layout: index of their shape among those that the memory was registered with.
    """

    memory_id: int
    offset: int
    length: int
    keys: Sequence[bytes]
    wanted: Flags
    layout: int = 0

    @classmethod
    def whole(
        cls,
        shape: ChunkLayout,
        memory_id: int,
        keys: Sequence[bytes],
        offset: int = 0,
        length: int | None = None,
        layers: slice = slice(None),
        layout: int = 0,
    ) -> Self:
        """Return the part that wants chunks, all layers or some, by default in a region that has room for them."""
        size = len(keys) * shape.raw_bytes if length is None else length
        wanted = np.zeros((shape.layers, len(keys)), np.bool_)
        wanted[layers] = True
        return cls(memory_id, offset, size, keys, wanted, layout)

    @property
    def message(self) -> pb.FetchPart:
        """What the data plane is told."""
        wanted = b"" if self.wanted.all() else pack(self.wanted)
        return pb.FetchPart(
            memory_id=self.memory_id,
            offset=self.offset,
            length=self.length,
            keys=self.keys,
            wanted=wanted,
            layout=self.layout,
        )


class FetchAnswer(NamedTuple):
    """Outcome of one batch, and of each part the pieces that it put in place, and those that were wanted.

    ``quiet``: nobody writes any more.
    """

    delivered: list[Flags]
    wanted: Sequence[Flags]
    reason: str
    detail: str
    quiet: bool
    fetched_bytes: int = 0
    delivered_bytes: int = 0

    @property
    def chunks(self) -> list[int]:
        """Leading chunks of each part of which nothing is missing that was wanted."""
        return [leading_chunks(pieces, wanted) for pieces, wanted in zip(self.delivered, self.wanted, strict=True)]


class StoreAnswer(NamedTuple):
    """Outcome of one Store, and which of its chunks are stored. ``quiet``: nobody reads the region any more."""

    stored: Flags
    reason: str
    detail: str
    quiet: bool
    raw_bytes: int = 0
    stored_bytes: int = 0


class FetchCall:
    """A Fetch on its way."""

    def __init__(self, call: Any, answer: Callable[[Any], FetchAnswer]) -> None:
        self._call = call
        self._answer = answer

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, in any thread, once the call has ended; at once if it has."""
        self._call.add_done_callback(lambda _: callback())

    def done(self) -> bool:
        """Return whether the call has ended."""
        return bool(self._call.done())

    def layers(self, seen: int, seconds: float) -> int:
        """Wait for further leading layers than were ``seen``; see :meth:`DataPlaneClient.start_fetch_layers`."""
        return int(self._call.layers(seen, seconds))

    def result(self) -> FetchAnswer:
        """Return the outcome, waiting for it at most until the call's own deadline."""
        return self._answer(self._call)


def delivered_of(answer: pb.FetchResponse, wanted: Sequence[Flags]) -> list[Flags]:
    """Return what a fetch has delivered of each part; raise ValueError where its answer cannot be."""
    reason = reason_of(answer.outcome)
    sets = answer.delivered or [b""] * len(wanted)  # of a call that did not come to its parts
    delivered = [unpack(data, *each.shape) for data, each in zip(sets, wanted, strict=True)]
    count, asked = (sum(int(each.sum()) for each in pieces) for pieces in (delivered, wanted))
    foreign = any((mine & ~theirs).any() for mine, theirs in zip(delivered, wanted, strict=True))
    complete = count == asked
    if (
        foreign
        or reason == "unspecified"
        or complete != (reason == "complete")
        or (reason == "batch_full" and not count)
    ):
        raise ValueError(f"{count} pieces with outcome '{reason}' where {asked} were asked for")
    return delivered


def reason_of(outcome: int) -> str:
    """Return an Outcome's name in lower case, ``"unspecified"`` where it has none."""
    try:
        return pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    except ValueError:  # of a newer daemon
        return "unspecified"
