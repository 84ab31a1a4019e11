"""A fetch: what the engine asks for (a job), how far it is, and its outcome."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from host_control.answers import FetchAnswer
from host_control.disaggregation import Available
from host_control.transfer import Transfer
from shadowserve.spans import Span


@dataclass(frozen=True, kw_only=True)
class FetchJob:
    """The chunks that one request wants.

    Attributes:
        request_id: Name of the request, which has one job at a time.
        keys: Record keys of each shard's chunks, in prefix order; empty for a shard of which nothing is wanted.
        places: Number of each of these chunks among all that the request loads, where shards want different chunks.
        target: Data for ``scatter`` that the manager does not read.
        available: Leading chunks that can be fetched by now, where another engine still stores the rest or object
            storage brings it. :meth:`KVCacheManager.exchange` updates it; until then the job waits and others run.
        layerwise: Fetch layer by layer: shards that want the same number of chunks. Such jobs of one exchange go side
            by side.
        first_layers: Number in the engine of each shard's first wanted layer, where it is layerwise; empty: all 0.
        window_s: Seconds that the engine will compute with each layer; 0 if unknown.
        context: Context of the request's span; empty for none.
    """

    request_id: str
    keys: tuple[tuple[bytes, ...], ...]
    places: tuple[Sequence[int], ...] = ()
    target: Any = None
    available: Available | None = None
    layerwise: bool = False
    first_layers: tuple[int, ...] = ()
    window_s: float = 0.0
    context: str = ""

    @property
    def chunks(self) -> int:
        """Number of chunks of all shards together."""
        return sum(map(len, self.keys))


@dataclass(frozen=True, kw_only=True)
class FetchResult:
    """The one outcome of a job.

    Attributes:
        chunks: Leading chunks of each shard that are in place.
        reason: A :class:`~host_control.transfer.Reason`: ``complete``, or why there are not more.
        fetched_bytes, delivered_bytes: Bytes over the network, and into registered memory.
        seconds, waited: Time from the hand-over to the outcome, and the part of it in which other jobs moved.
    """

    job: FetchJob
    chunks: tuple[int, ...]
    reason: str
    detail: str = ""
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def complete(self) -> bool:
        """Every chunk is in place."""
        return sum(self.chunks) == self.job.chunks


@dataclass(eq=False)
class Fetch(Transfer):
    """A job on its way through the manager. Times are of the monotonic clock.

    Attributes:
        available: Chunks that can be fetched by now; None: all.
        placed: Leading chunks of each shard that are in paged memory.
        delivered: Leading chunks of each shard that are in registered memory or in paged memory.
        started_at: Time of the first move; 0 before.
        layers: Leading layers of which all chunks are in place, where it goes layer by layer.
        others_s: Seconds since its start that other fetches of the same step took.
        ending: Reason of the outcome, set once no move follows.
        scatter_error: Why chunks could not be scattered, or empty.
        stalls: How often it gave way to layerwise jobs without a chunk.
        retried: The memory was registered again after a restart of the data plane; that happens once.
        pages_from: Chunks from this one on are to be placed by devices; None: no more chunks are.
    """

    job: FetchJob = field(default_factory=lambda: FetchJob(request_id="", keys=()))
    span: Span = field(default_factory=Span)
    enqueued_at: float = 0.0
    deadline: float = 0.0
    available: Available | None = None
    placed: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    started_at: float = 0.0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    layers: int = 0
    others_s: float = 0.0
    cancelled: bool = False
    ending: str = ""
    detail: str = ""
    scatter_error: str = ""
    stalls: int = 0
    retried: bool = False
    pages_from: int | None = None

    def count_moved(self, answer: FetchAnswer) -> None:
        self.fetched_bytes += answer.fetched_bytes
        self.delivered_bytes += answer.delivered_bytes

    @property
    def left_s(self) -> float:
        """Seconds up to the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def wanted(self) -> list[int]:
        """Return how many chunks of each shard can be fetched by now and were not."""
        ends = list(map(len, self.job.keys))
        if self.pages_from is not None:
            ends = [min(count, self.pages_from) for count in ends]
        elif self.available is not None:
            places = self.job.places or [range(count) for count in ends]
            ends = [bisect_left(each, self.available.chunks) for each in places]
        return [max(end - done, 0) for end, done in zip(ends, self.delivered, strict=True)]

    @property
    def all_delivered(self) -> bool:
        return sum(self.delivered) == self.job.chunks

    def waits(self) -> bool:
        """Tell if nothing can be done until more chunks are available."""
        pending = self.available is not None and not self.available.ended
        return pending and not any(self.wanted()) and not self.all_delivered


Scatter = Callable[[FetchJob, int, int, Any], None]
"""Moves chunks of a job's shard, from a first one on, into an engine's paged memory; returns once they are in place.

The chunks are one after the other: a memoryview, or a tensor on the GPU.
"""


class Placer(Protocol):
    """Lets devices of the data plane write chunks straight into an engine's paged KV memory."""

    def first(self, job: FetchJob) -> int:
        """Return the first chunk of the job's one shard that can be placed."""

    def place(
        self,
        job: FetchJob,
        chunks: range,
        deadline: float,
        cancelled: Callable[[], bool],
        on_layers: Callable[[int], None],
    ) -> FetchAnswer | None:
        """Place the leading ones of these chunks that devices hold; None where the data plane was not asked.

        ``on_layers`` receives the number of leading layers that are in place of all of them, as it grows.
        """
