"""The interface of a source: the data plane finds, reads, stores and deletes all records through a :class:`Source`.

A source holds records, immutable bytes under keys. It answers with headers, from which the caller plans a batch. It
then brings the bodies of that batch to the pipeline, and it accepts new records.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Found
from shadowserve import native
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.proto import dataplane_pb2 as pb

QUESTION_KEYS_MAX: Final = 8192  # most keys in one request to a source: 16 ranks' chains of 128K tokens


def questions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the keys of each request to a source."""
    for first in range(0, len(keys), QUESTION_KEYS_MAX):
        yield keys[first : first + QUESTION_KEYS_MAX]


@dataclass(frozen=True)
class Failure:
    """Why a piece was not delivered."""

    result: Result  # result of the pipeline
    error: StorageError | None = None
    reply: str = ""  # the node and its answer, for messages; empty if they add nothing
    from_replica: bool = False  # A replica that may lag behind has answered: a plan with ``authoritative`` may succeed
    recover: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass
class Delivered:
    """Result of a plan. A piece was SKIPPED if it was not tried, or another piece of its group has failed before it."""

    results: npt.NDArray[np.uint32]  # of each piece: OK if it is in place, SKIPPED, or why it failed
    failures: dict[int, Failure] = field(default_factory=dict)  # failed pieces, by id
    received_bytes: int = 0  # bytes read
    tier_bytes: int = 0  # of these, from local tiers
    stop: Stop | None = None  # why the job ended before the plan was done

    def padded(self, count: int) -> Self:
        """Return the result of a plan of ``count`` pieces; those at its end were skipped."""
        more = np.full(count - len(self.results), Result.SKIPPED, np.uint32)
        return replace(self, results=np.concatenate([self.results, more])) if len(more) else self


@dataclass(frozen=True)
class Encoded:
    """A record to store: its header, and its body as ``Pipeline.encode`` left it in the store buffer."""

    batch: native.Batch  # the encoded batch
    position: int  # index of the piece in the batch
    header: bytes  # header of the record
    lasts_ms: int = 0  # lifetime in ms; 0 for no end
    plain: bool = False  # the record is not compressed, and stays in local tiers if there are any
    saved: bool = False  # it is of a preempted request, and stays in local tiers if these have room
    keep: int = pb.KEEP_ALL  # where the record is kept


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Objects that all parts of a source share."""

    pipeline: native.Pipeline
    fetching: Executor  # thread for the pipeline's calls that fetch
    storing: Executor  # thread for its calls that store
    metrics: Metrics
    budget: InterferenceBudget


Chain = tuple[bytes, Sequence[bytes]]
"""A namespace and the keys of its records, in the order of a prompt's chunks."""


class WaitingRequest(NamedTuple):
    """A request that waits in an engine's queue."""

    name: Hashable  # name of the request, unique while it waits
    chains: Sequence[Chain]  # records that it will fetch
    begins_at: float  # probable begin, in seconds of time.monotonic(); infinite if not known
    until: float  # end of this information, likewise


@dataclass(frozen=True)
class PageRequest:
    """Chunks to load into paged memory."""

    keys: Sequence[bytes]  # keys of the chunks' records, a chain
    layout: ChunkLayout
    address: int  # address of the paged memory in this process
    first: Sequence[int]  # for each layer, the offset of block 0's page in bytes
    stride: int  # bytes from one block's page to the next block's page
    blocks: npt.NDArray[np.uint32]  # block numbers by chunk and position in the chunk
    word: int  # address of the word for the number of leading layers in place; 0 for none

    def part(self, first: int, end: int) -> "PageRequest":
        """Return the request of some chunks. It reports no layers: those of the other chunks are not in place yet."""
        return replace(self, keys=self.keys[first:end], blocks=self.blocks[first:end], word=0)


class LoadedPages(NamedTuple):
    """Result of a page request."""

    delivered: Flags  # pieces in place, by layer and chunk
    corrupt: list[int]  # indexes of chunks that differ from their checksums
    stop: Stop | None  # why the job ended before the request was done


class PageLoader(ABC):
    """Loads whole chunks from devices into paged memory, without a buffer between. The caller fetches other chunks.

    *Quiet.* Once :meth:`load` has returned, nothing is written to the paged memory any more. A read that a device has
    begun cannot be cancelled, so :meth:`load` waits for it, however long the device takes.
    """

    @abstractmethod
    def register(self, memory: memoryview) -> None:
        """Register paged memory with all devices. This pins its pages, which takes long: not on the event loop."""

    @abstractmethod
    def unregister(self, memory: memoryview) -> None: ...

    @abstractmethod
    async def load(self, job: Job, request: PageRequest) -> LoadedPages:
        """Load the leading chunks that devices hold as pages, layer by layer, and verify their checksums."""


class Source(ABC):
    """A place where records are stored.

    *Outage.* A source that is known to be unreachable fails at once, with the reason. It reconnects on its own.

    *Quiet.* Once :meth:`deliver` has returned or raised, this source writes no more to the plan's registered memory or
    to the pipeline's buffers; once :meth:`put` has, it reads no more there.

    *Time.* Methods that take a job end at its deadline, or soon after it is cancelled. Other methods end within the
    source's own limits.

    Methods raise StorageUnavailableError or StorageRefusedError if no key was answered for.

    Attributes:
        page_loader: Loads chunks of pages from devices of this machine; None for a source without devices.
        publishes_here: All engines that share the source use this data plane. Its table of published keys
            (:class:`~dpu_dataplane.publishing.Publications`) is complete, so the source needs none.
    """

    name: str  # name for messages
    page_loader: PageLoader | None = None
    publishes_here: bool = False
    has_tiers: bool = False  # records can stay in tiers of this machine

    @property
    @abstractmethod
    def connected(self) -> bool:
        """True if the source can be reached, as far as is known."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to connect. Does not wait: the source may be unreachable when the daemon starts."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. No job may be in progress."""

    @abstractmethod
    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look up to QUESTION_KEYS_MAX keys up. A record in object storage is not waited for: it is Cold."""

    async def find_stored(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Look keys up before a store: a record that is found here needs no put."""
        return await self.find(keys)

    async def find_warm(self, keys: Sequence[bytes], *, headers: bool) -> Sequence[Found]:
        """Look keys up, and wait until object storage has brought the cold records, or only their ``headers``."""
        return await self.find(keys)

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Publish keys that will be stored within ``lasts_ms``, 0 withdraws them; False if it takes no publications."""
        return False

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return a flag per key for those that are pending; None for a source that takes no publications.

        Of two concurrent requests this one is answered before :meth:`find`: a key that is no longer published is
        either stored or not coming.
        """
        return None

    async def pin(self, keys: Sequence[bytes], seconds: int) -> bool:
        """Protect stored records from eviction for some seconds, 0 ends that; False if the source knows no pins."""
        return False

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Hint: begin to bring the cold records of up to QUESTION_KEYS_MAX keys from object storage. Does not wait."""
        return

    def expect(self, requests: Sequence[WaitingRequest]) -> None:
        """Hint: these requests will be fetched soon, in this order. Replaces the requests of the last call."""
        return

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        """Fill memory with a record's stored bytes from offset ``first`` on. They are not verified.

        Returns OK, or the reason; NOT_FOUND if there is no such record or it is shorter. Stop ends a cancelled job.
        """
        raise StorageRefusedError(f"{self.name} hands out no records as they are stored")

    @abstractmethod
    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        """Deliver a plan's pieces, in order; Stop if the job has ended and no byte was moved yet.

        A piece that cannot be delivered costs its group the pieces of its chunk and of later chunks, no others.
        """

    @abstractmethod
    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """Store a record; return OK, or the reason with the server's error text. Stop ends a cancelled job.

        A valid record that is already stored under the key stays; that is a success.
        """

    @abstractmethod
    async def delete(self, key: bytes) -> None:
        """Delete a record; a missing one is no error."""
