"""What a source of records is: whatever the data plane finds, reads, stores and deletes goes through a :class:`Source`.

A source holds records, immutable bytes under keys. It is asked for their heads, from which the caller makes a batch on
paper; it then makes the bodies of that batch appear where the pipeline decodes them; and it takes new records.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.sources.placing import Placing
from shadowserve import native
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.record import head_length
from shadowserve.tier import Tier

__all__ = [
    "QUESTION_KEYS_MAX",
    "Chain",
    "Cold",
    "Delivered",
    "Encoded",
    "Expected",
    "Failure",
    "Found",
    "Order",
    "Source",
    "Stored",
    "Unanswered",
    "head_size",
]

QUESTION_KEYS_MAX: Final = 8192
"""Keys in one question: 16 ranks' chains of 128K tokens."""


class Stored(NamedTuple):
    """What a source says of one key: length of the value in bytes, at least the head, if it is a record; and where."""

    length: int
    head: bytes
    tier: Tier = Tier.STORAGE


class Cold(NamedTuple):
    """That a record is in object storage behind a source: its length, and after how many ms the source expects it.

    As if it was asked for now, and those before it in the same question.
    """

    length: int
    ms: int


class Unanswered(NamedTuple):
    """Why a part of a source, such as a cluster's node, did not say what it has of a key, and whether it refused to."""

    reason: str
    refused: bool = False

    @classmethod
    def of(cls, error: StorageError) -> Self:
        """Return that a part could not be asked."""
        return cls(str(error), isinstance(error, StorageRefusedError))


Found = Stored | Cold | Unanswered | None
"""What a source says of one key; None where there is no record, and perhaps where there is a value that is none."""


def head_size(stored: Stored) -> int:
    """Return how long the head of a value is, 0 where it is no record or claims more than the value has."""
    size = head_length(stored.head)
    return size if size <= stored.length else 0


@dataclass(frozen=True)
class Order:
    """Pieces to be delivered.

    Attributes:
        keys: of each piece's record.
        pieces: PIECE_DTYPE array, at least one, in the order in which they are wanted: where the bytes lie in the
            record, and where in the buffers.
        make_batch: makes a batch of some of ``pieces``, ready for the pipeline; whoever calls it releases the batch.
        authoritative: ask who has the last word on each key, not somebody with a copy that may lag behind.
        layerwise: they come layer by layer, a layer in each.
        window_s: seconds that whoever wants them computes with each layer; 0 where nobody knows.
        found: what is known of the records, for a source that keeps what passes.

    A piece whose ``origin`` is not SERVER comes into the batches by itself: a source only has it in them.
    """

    keys: Sequence[bytes]
    pieces: npt.NDArray[np.void]
    make_batch: Callable[[npt.NDArray[np.void]], native.Batch]
    authoritative: bool = False
    layerwise: bool = False
    window_s: float = 0.0
    found: Mapping[bytes, Stored] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a piece was not delivered.

    Attributes:
        result: of the pipeline.
        error: the source, or the part of it that has the piece, could not be reached.
        said: who was asked for it and what it answered, for people; empty where there is nothing to add.
        copy: it was asked of a copy that may lag behind: an authoritative order may do better.
        recover: looks who has what now; another order may do better then. None where there is no hope of that.
    """

    result: Result
    error: StorageError | None = None
    said: str = ""
    copy: bool = False
    recover: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass
class Delivered:
    """What became of an order.

    Attributes:
        results: of each piece: OK where it is in place, SKIPPED where it became of no use, as another of its group has
            failed, or was not come to; what it failed of.
        failures: of pieces that failed, by their index.
        received_bytes: of all that was read.
        stop: the job ended before the order was done.
    """

    results: npt.NDArray[np.uint32]
    failures: dict[int, Failure] = field(default_factory=dict)
    received_bytes: int = 0
    stop: Stop | None = None

    def of(self, count: int) -> Self:
        """Return what became of an order of ``count`` pieces of which these are the first: no others were come to."""
        more = np.full(count - len(self.results), Result.SKIPPED, np.uint32)
        return replace(self, results=np.concatenate([self.results, more])) if len(more) else self


@dataclass(frozen=True)
class Encoded:
    """A record to be put: its head, and its body as ``Pipeline.encode`` left it in the store buffer.

    Attributes:
        batch: that was encoded.
        position: of the piece in it.
        head: of the record.
        lasts_ms: after which nobody needs it any more; 0: it is stored for good.
        plain: it is not compressed, and is for tiers of this machine alone where there are any.
    """

    batch: native.Batch
    position: int
    head: bytes
    lasts_ms: int = 0
    plain: bool = False


Chain = tuple[bytes, Sequence[bytes]]
"""A namespace, and keys of its records, those of a prompt's first chunk first."""


class Expected(NamedTuple):
    """A request that waits in an engine's queue.

    Attributes:
        name: of the request, for as long as it waits.
        chains: what it will fetch.
        begins_at: when it will probably begin, in seconds of time.monotonic(); infinite where nobody knows.
        until: when it is forgotten if nobody says anything of it, likewise.
    """

    name: Hashable
    chains: Sequence[Chain]
    begins_at: float
    until: float


class Source(ABC):
    """Where records are.

    *Outage.* A source that is known to be away fails at once, with the reason, and looks by itself for its return.

    *Quiet.* Once :meth:`deliver` has returned or raised, for whatever reason, nothing of this source writes to the
    order's registration or to the pipeline's buffers any more, and nothing reads there once :meth:`put` has.

    *Time.* What takes a job ends at its deadline, or soon after it is cancelled; other questions end by the source's
    own limits.

    Attributes:
        name: for people.
        placing: brings chunks of pages from devices of this machine; ``None`` of a source without any.
        publishes_here: all engines that store to it or read from it use this data plane: its table of published keys
            (:class:`~dpu_dataplane.publishing.Publications`) is complete, and the source need not keep one.
        keeps_plain: records that are not compressed stay in tiers of this machine.
    """

    name: str
    placing: Placing | None = None
    publishes_here: bool = False
    keeps_plain: bool = False

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether it can be asked, as far as is known."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to reach it; does not wait for that, since a source may be away when the daemon starts."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of it, and stop trying. No job may be in progress."""

    @abstractmethod
    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what it has under each of up to QUESTION_KEYS_MAX keys. Waits for nothing in object storage: Cold.

        Raises:
            StorageUnavailableError, StorageRefusedError: no key was answered for.
        """

    async def held(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return likewise under which keys nothing needs to be put."""
        return await self.find(keys)

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Tell whoever asks this source that keys will be stored within so long; 0: that they will not, after all.

        Returns:
            Whether it takes publications at all; by default none does.

        Raises:
            StorageUnavailableError, StorageRefusedError: it has not been told; there may be too many already.
        """
        return False

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return which of up to QUESTION_KEYS_MAX keys are published and not there; None of a source that is not told.

        Of two questions at the same time this one is answered before :meth:`find`: what is published no more is there,
        or is not coming.

        Raises:
            StorageUnavailableError, StorageRefusedError: no key was answered for.
        """
        return None

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return as :meth:`find` does, but wait until object storage has brought what was cold.

        Raises:
            StorageUnavailableError, StorageRefusedError: no key was answered for.
        """
        return await self.find(keys)

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have what is cold of up to QUESTION_KEYS_MAX keys brought from object storage, or begin with it: a hint.

        Whoever wants the rest asks again. Nothing is waited for.

        Raises:
            StorageUnavailableError, StorageRefusedError: it was not told.
        """
        return

    def expect(self, requests: Sequence[Expected]) -> None:
        """Take what will be fetched soon, in this order, in the place of what was said before. A hint.

        By default it is of no use.
        """
        return

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        """Fill memory with the bytes of a record from ``first`` on, as they are stored; nobody has checked them.

        Returns:
            OK, or why it is not filled: NOT_FOUND where there is no such record, or a shorter one.

        Raises:
            StorageUnavailableError, StorageRefusedError: it cannot be reached, or does not hand out such bytes.
            Stop: cancelled, or out of time.
        """
        raise StorageRefusedError(f"{self.name} hands out no records as they are stored")

    @abstractmethod
    async def deliver(self, job: Job, order: Order) -> Delivered:
        """Deliver an order's pieces, in order.

        What cannot be had costs those of its group that are of its chunk or of one behind it, and no others.

        Raises:
            StorageUnavailableError, StorageRefusedError: the whole source cannot be reached.
            Stop: cancelled, or out of time, before a byte moved.
        """

    @abstractmethod
    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Store a record; a valid record that is there already under the key stays, and that is a success.

        Returns:
            OK, or why not, and for people what the source said.

        Raises:
            StorageUnavailableError, StorageRefusedError: it cannot be reached.
            Stop: cancelled, or out of time.
        """

    @abstractmethod
    async def delete(self, key: bytes) -> None:
        """Delete a record, if there is one.

        Raises:
            StorageUnavailableError, StorageRefusedError: it was not answered for.
        """
