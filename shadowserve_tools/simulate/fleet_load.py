"""Load of the model of a fleet: machines, prices, and prompts.

Prompts begin with one of the shared system prompts. A document of Zipf's popularity follows, then the conversation
about it, which grows with each request and begins again after some turns. Records are never listed: a document is a
rank, a segment is a hash of rank and position, and what a tier holds before the run follows from popularity (Che's
approximation of LRU). So 10^9 records take no more memory than 10^6.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowserve.keys import DEFAULT_CHUNK_TOKENS, SEGMENT_CHUNKS
from shadowserve.placement import partition_of
from shadowserve_tools.simulate.assumptions import given, last

_HEAD: Final = 10_000
"""Ranks whose popularity is exact; the sums over further ones are integrals."""
_BINS: Final = 500
_MASK: Final = (1 << 64) - 1
EVERYWHERE: Final = math.inf
"""Popularity of segments that every node has in memory."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Machines, prices and prompts. GB are 10^9 bytes."""

    node_gbit_per_s: float = given(100, "assumed", "link of a node")
    engine_gbit_per_s: float = given(100, "assumed", "link of an engine's data plane")
    tcp_share: float = given(0.957, "bench link", "of a link's rate that TCP carries")
    engine_gb: float = given(20, "assumed: of 80", "KV that an engine's own prefix cache keeps")
    memory_gb: float = given(512, "assumed", "memory of a node")
    device_tb: float = given(15, "assumed", "SSDs of a node; 0 for none")
    device_gb_per_s: float = given(12, "assumed: two SSDs", "reads from a node's SSDs")
    chunk_mb: float = given(22.1, "Llama 3.1 8B: 1/1.52 of it is stored (bench codecs)", "a stored chunk")
    raw_mb: float = given(33.6, "Llama 3.1 8B: 32 MiB", "a chunk in an engine")
    lookup_ms: float = given(2, "assumed; bench nodes measures it", "a lookup, all nodes side by side")
    prefill_tokens_per_s: float = given(20_000, "assumed: 8B on an H100", "what an engine computes")
    first_ms: float = given(15, "assumed", "from the last KV to the first token")
    system_tokens: float = given(1024, "the goal of bench nodes", "a system prompt")
    document_tokens: float = given(6144, "assumed; half of it to one and a half times", "a document")
    turn_tokens: float = given(512, "assumed", "what a turn adds to a conversation")
    turns: float = given(8, "assumed", "of a conversation")
    skew: float = given(0.9, "assumed", "Zipf's exponent of documents and system prompts")
    bucket_latency_ms: float = given(100, "AWS: 100 to 200 ms to the first byte", "of a read from the bucket")
    bucket_mb_per_s: float = given(85, "AWS: 85 to 90", "of one read from the bucket")
    bucket_reads_per_s: float = given(5_500, "AWS: of one prefix of names", "limit of the bucket")
    bucket_tb: float = given(0, "0 for no limit", "size of the bucket, beyond which the least used records are deleted")
    get_dollars: float = given(4e-7, "AWS, us-east-1: 0.0004 for 1,000", "a GET")
    put_dollars: float = given(5e-6, "AWS, us-east-1: 0.005 for 1,000", "a PUT or LIST")
    month_dollars: float = given(0.023, "AWS, us-east-1, first 50 TB", "a GB in the bucket for a month")
    index_bytes: float = given(100, "the goal of the bucket index", "memory of a record in the bucket")


class Segment(NamedTuple):
    """Consecutive chunks with one place.

    Attributes:
        chunks: Number of chunks that a request asks for.
        popularity: Share of all requests that ask for it.
    """

    ident: int
    partition: int
    chunks: int
    popularity: float


class Prompt(NamedTuple):
    """A request's segments, in order, and those that hold its new chunks, which have never been computed."""

    segments: list[Segment]
    new: list[Segment]


def mixed(number: int) -> int:
    """Return a hash of 64 bits (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


class Zipf:
    """Ranks 0 to ``size - 1``, of popularity ``1 / (rank + 1) ** exponent``."""

    def __init__(self, size: int, exponent: float) -> None:
        self._exponent, self._size = exponent, size
        head = np.arange(1, min(size, _HEAD) + 1) ** -exponent
        self._edge = len(head) + 0.5
        self._sums = np.cumsum(head)
        self._whole = float(self._sums[-1]) + self._integral(size + 0.5)

    def _integral(self, rank: float) -> float:
        """Return the sum of the weights from the head's end to a rank."""
        if rank <= self._edge:
            return 0.0
        power = 1 - self._exponent
        if abs(power) < 1e-9:
            return math.log(rank / self._edge)
        return float((rank**power - self._edge**power) / power)

    def popularity(self, rank: int) -> float:
        return float((rank + 1) ** -self._exponent / self._whole)

    def ranks(self, shares: npt.NDArray[np.float64]) -> list[int]:
        """Return the rank at each share of the whole, from 0 to 1."""
        drawn = shares * self._whole
        head = np.searchsorted(self._sums, drawn)
        beyond = np.maximum(drawn - self._sums[-1], 0)
        power = 1 - self._exponent
        if abs(power) < 1e-9:
            tail = self._edge * np.exp(beyond)
        else:
            tail = (beyond * power + self._edge**power) ** (1 / power)
        found = np.where(head < len(self._sums), head, np.minimum(np.floor(tail - 0.5), self._size - 1))
        return [int(rank) for rank in found]

    def classes(self) -> tuple[list[float], list[float]]:
        """Return classes of similar popularity: the popularity of each, and how many ranks it has."""
        edges = np.unique(np.round(np.geomspace(1, self._size + 1, _BINS)))
        middles = np.sqrt(edges[:-1] * (edges[1:] - 1))
        return list(middles**-self._exponent / self._whole), list(np.diff(edges))


def lasting(room: float, popularities: list[float], sizes: list[float]) -> float:
    """Return for how many requests an LRU cache of ``room`` remembers what is not asked for again (Che)."""

    def held(lasts: float) -> float:
        return sum(size * -math.expm1(-each * lasts) for each, size in zip(popularities, sizes, strict=True))

    if room >= sum(sizes):
        return math.inf
    high = 1.0
    while held(high) < room:
        high *= 2
    return last(lambda lasts: held(lasts) < room, high)


class Prompts:
    """Draws prompts. The same seed draws the same ones."""

    def __init__(self, its: Given, records: float, systems: int, random: np.random.Generator) -> None:
        chunks = {name: round(getattr(its, f"{name}_tokens") / DEFAULT_CHUNK_TOKENS) for name in ("system", "turn")}
        self._random, self._turn_chunks, self._turns_max = random, max(1, chunks["turn"]), round(its.turns)
        self._system_segments = -(-chunks["system"] // SEGMENT_CHUNKS)
        self._document_segments = max(1.0, its.document_tokens / DEFAULT_CHUNK_TOKENS / SEGMENT_CHUNKS)
        self._chunks = self._document_segments * SEGMENT_CHUNKS + self._turn_chunks * self._turns_max / 2
        self._documents = Zipf(max(1, round(records / self._chunks)), its.skew)
        self._systems = Zipf(systems, its.skew)
        self._ranks: list[int] = []  # documents of the next prompts
        self._turns: dict[int, int] = {}  # requests for each document
        self._prefixes: dict[int, list[Segment]] = {}  # system prompt and document of each rank

    def lasting(self, chunks: float) -> float:
        """Return for how many requests a cache of ``chunks`` remembers what is not asked for again."""
        popularities, ranks = self._documents.classes()
        return lasting(chunks, popularities, [count * self._chunks for count in ranks])

    def draw(self) -> Prompt:
        """Return the next prompt."""
        if not self._ranks:
            self._ranks = self._documents.ranks(self._random.random(4096))
        rank = self._ranks.pop()
        turn = self._turns.get(rank, mixed(rank) % (self._turns_max << 16))
        self._turns[rank] = turn + 1
        conversation, turn = divmod(turn, self._turns_max)
        prefix = self._prefix(rank)
        of, popularity = mixed(rank << 24 ^ conversation << 4), prefix[-1].popularity
        old, new = turn * self._turn_chunks, (turn + 1) * self._turn_chunks
        asked, added = (
            [
                _segment(of, number, min(SEGMENT_CHUNKS, end - number * SEGMENT_CHUNKS), popularity)
                for number in range(begin // SEGMENT_CHUNKS, -(-end // SEGMENT_CHUNKS))
            ]
            for begin, end in ((0, old), (old, new))
        )
        return Prompt([*prefix, *asked], added)

    def _prefix(self, rank: int) -> list[Segment]:
        found = self._prefixes.get(rank)
        if found is None:
            [system] = self._systems.ranks(np.array([mixed(~rank) / 2**64]))
            count = max(1, round(self._document_segments * (0.5 + mixed(rank ^ 0x5EED) / 2**64)))
            shares = self._systems.popularity(system), self._documents.popularity(rank)
            found = [_segment(~system, number, SEGMENT_CHUNKS, shares[0]) for number in range(self._system_segments)]
            found += [_segment(rank, number, SEGMENT_CHUNKS, shares[1]) for number in range(count)]
            self._prefixes[rank] = found
        return found


def _segment(of: int, number: int, chunks: int, popularity: float) -> Segment:
    ident = mixed(mixed(of & _MASK) ^ number)
    return Segment(ident, partition_of(ident.to_bytes(8, "big")), chunks, popularity)
