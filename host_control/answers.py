"""Arguments and answers of the data plane's calls. Answers are checked before they are used."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
import numpy.typing as npt

from host_control.transfer import Reason
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, leading_chunks, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier

Tiers = npt.NDArray[np.uint8]
"""A :class:`~shadowserve.tier.Tier` for each chunk."""


class Chain(NamedTuple):
    """Answer of a lookup for the records of one namespace.

    Attributes:
        stored: Records that are stored.
        pending: Records that are pending; None: not known.
        stored_bytes: Bytes of the stored records together.
        cold_seconds: Seconds after which storage expects to have the cold ones nearer.
        tiers: Tier of each record.
    """

    stored: Flags
    pending: Flags | None
    stored_bytes: int
    cold_seconds: float
    tiers: Tiers

    @property
    def chunk_bytes(self) -> float:
        """Mean bytes of a stored record."""
        return self.stored_bytes / max(int(self.stored.sum()), 1)


def chains_of(answer: pb.LookupResponse, counts: Sequence[int]) -> list[Chain]:
    """Return the answer of a lookup for chains with the given numbers of records.

    Raises:
        ValueError: The answer contradicts itself or the question.
    """

    def flags(packed: Sequence[bytes]) -> list[Flags]:
        return [unpack(data, count) for data, count in zip(packed, counts, strict=True)]

    stored = flags(answer.present)
    pending: Sequence[Flags | None] = flags(answer.published) if answer.published else [None] * len(counts)
    for numbers, what in (answer.stored_bytes, "bytes"), (answer.cold_ms, "times"), (answer.tiers, "tiers"):
        if len(numbers) != len(counts):
            raise ValueError(f"{what} of {len(numbers)} chains where {len(counts)} were asked for")
    tiers = [np.frombuffer(each, np.uint8) for each in answer.tiers]
    for each, there in zip(tiers, stored, strict=True):
        if len(each) != len(there) or not np.array_equal(each > Tier.NONE, there) or (each > Tier.COLD).any():
            raise ValueError("the tiers are not those of the stored chunks")
    return list(map(Chain, stored, pending, answer.stored_bytes, [ms / 1e3 for ms in answer.cold_ms], tiers))


@dataclass(frozen=True)
class FetchPart:
    """Wanted chunks of one shard in a fetch.

    Attributes:
        memory_id: Registered memory that the chunks go to.
        offset, length: Region of that memory that the chunks may use, in bytes.
        keys: Record keys of the chunks.
        wanted: Wanted pieces, [layer, chunk].
        layout: Index of the chunk layout among those that the memory was registered with.
        window: Half-open range of the layers that the region holds of each chunk; None: all.
    """

    memory_id: int
    offset: int
    length: int
    keys: Sequence[bytes]
    wanted: Flags
    layout: int = 0
    window: tuple[int, int] | None = None

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
        """Return the part that wants some layers of every chunk, by default in a region that just holds them."""
        size = len(keys) * shape.raw_bytes if length is None else length
        wanted = np.zeros((shape.layers, len(keys)), np.bool_)
        wanted[layers] = True
        return cls(memory_id, offset, size, keys, wanted, layout)

    @property
    def message(self) -> pb.FetchPart:
        """The wire's message."""
        first, end = self.window or (0, 0)
        return pb.FetchPart(
            memory_id=self.memory_id,
            offset=self.offset,
            length=self.length,
            keys=self.keys,
            wanted=b"" if self.wanted.all() else pack(self.wanted),
            layout=self.layout,
            first_layer=first,
            layers=end - first,
        )


class FetchAnswer(NamedTuple):
    """Outcome of a fetch: of each part, the pieces that are in place, and those that were wanted.

    ``quiet``: nothing writes into the memory any more.
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
        """Leading chunks of each part that have every wanted piece."""
        return [leading_chunks(pieces, wanted) for pieces, wanted in zip(self.delivered, self.wanted, strict=True)]


class StoreAnswer(NamedTuple):
    """Outcome of a store, and which of its chunks are stored. ``quiet``: nothing reads the memory any more."""

    stored: Flags
    reason: str
    detail: str
    quiet: bool
    raw_bytes: int = 0
    stored_bytes: int = 0


class FetchCall:
    """A fetch in flight."""

    def __init__(self, call: Any, answer: Callable[[Any], FetchAnswer]) -> None:
        self._call = call
        self._answer = answer

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call a function, in any thread, once the call has ended; at once if it has."""
        self._call.add_done_callback(lambda _: callback())

    def done(self) -> bool:
        return bool(self._call.done())

    def wait(self, seen: int, seconds: float) -> int:
        """Wait for more leading layers than ``seen``; only of a streamed fetch."""
        return int(self._call.layers(seen, seconds))

    def result(self) -> FetchAnswer:
        """Return the outcome; blocks until the call's own deadline at most."""
        return self._answer(self._call)


class LayerStream:
    """A FetchLayers call in flight, with the interface of any other call; a thread reads its messages."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._layers = 0
        self._ended: Future[pb.FetchResponse] = Future()
        threading.Thread(target=self._read, name="shadowserve-layers", daemon=True).start()

    def _read(self) -> None:
        answer = pb.FetchResponse()  # with no outcome
        try:
            for message in self._call:
                if message.HasField("answer"):
                    answer = message.answer
                with self._changed:
                    self._layers = max(self._layers, message.layers)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self._ended.set_exception(error)
        finally:
            if not self._ended.done():
                self._ended.set_result(answer)
            with self._changed:
                self._changed.notify_all()

    def layers(self, seen: int, seconds: float) -> int:
        """Return the number of leading layers in place, once above ``seen``, or the call or the seconds end."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers > seen or self._ended.done(), seconds)
            return self._layers

    def done(self) -> bool:
        return self._ended.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._ended.add_done_callback(callback)

    def result(self) -> pb.FetchResponse:
        """Return the answer, with no outcome where none came; raise grpc.RpcError if the call has failed."""
        return self._ended.result()


def delivered_of(answer: pb.FetchResponse, wanted: Sequence[Flags]) -> list[Flags]:
    """Return the delivered pieces of each part.

    Raises:
        ValueError: The answer contradicts itself or the question.
    """
    reason = reason_of(answer.outcome)
    packed = answer.delivered or [b""] * len(wanted)  # a call may end before its first part
    delivered = [unpack(data, *each.shape) for data, each in zip(packed, wanted, strict=True)]
    count, asked = (sum(int(each.sum()) for each in pieces) for pieces in (delivered, wanted))
    unwanted = any((pieces & ~asked_for).any() for pieces, asked_for in zip(delivered, wanted, strict=True))
    if (
        unwanted
        or reason == Reason.UNSPECIFIED
        or (count == asked) != (reason == Reason.COMPLETE)
        or (reason == Reason.BATCH_FULL and not count)
    ):
        raise ValueError(f"{count} pieces with outcome '{reason}' where {asked} were asked for")
    return delivered


def reason_of(outcome: int) -> str:
    """Return an Outcome's name in lower case, ``unspecified`` for one of a newer data plane."""
    try:
        return pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    except ValueError:
        return Reason.UNSPECIFIED
