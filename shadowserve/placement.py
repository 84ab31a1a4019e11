"""Placement: which storage nodes of a fleet serve which records.

Segments (:mod:`shadowserve.keys`) are divided into :data:`PARTITIONS`. Weighted rendezvous hashing (Thaler and
Ravishankar, 1998; Schindelhauer and Schomaker, 2005) ranks the nodes for each partition: the first one that is
reachable serves it. The ranking is the same for all programs with the same nodes and weights. A node that comes or goes
moves only its own partitions, and a weight that changes moves only partitions of that node.

A reader takes a segment from its first or second choice by their loads (the power of two choices: Mitzenmacher, 2001).
"""

import hashlib
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from shadowserve.keys import segment_of

PARTITIONS: Final = 4096
WAIT_FACTOR: Final = 1.25
WAIT_MARGIN_US: Final = 10_000
"""The second choice is taken if the first one's wait exceeds its wait times the factor plus the margin: often it must
read the segment from the bucket first, and loads that hardly differ must not move reads to and fro."""


_RATES: Final = 32
"""Last batches of which the fastest gives the rate of a link."""
_SLOW: Final = 4
"""A node is slow if other nodes have several times its rate."""
_SLOW_BATCHES: Final = 4
"""Last batches of a node that count: the fastest gives its rate."""
_SLOW_S: Final = 20.0
"""Time for which a batch counts; then a slow node is tried again."""


def partition_of(key: bytes) -> int:
    """Return the partition of a key, 0 to ``PARTITIONS - 1``."""
    return int.from_bytes(segment_of(key)[:2], "big") % PARTITIONS


class Placement:
    """Nodes with their weights, and their ranking for each partition. It does not change.

    Attributes:
        weights: Weight of each node by its address: a node with twice the weight serves twice as many partitions.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = dict(weights)
        self._rankings: dict[int, tuple[str, ...]] = {}

    def ranking(self, partition: int) -> tuple[str, ...]:
        """Return all nodes, that of the first choice first."""
        ranking = self._rankings.get(partition)
        if ranking is None:
            scores = {node: _score(node, partition, weight) for node, weight in self.weights.items()}
            ranking = tuple(sorted(scores, key=lambda node: (scores[node], node)))
            self._rankings[partition] = ranking
        return ranking

    def firsts(self) -> list[str]:
        """Return the first choice of each partition. It takes up to a second, for hundreds of nodes."""
        return [self.ranking(partition)[0] for partition in range(PARTITIONS)]


def _score(node: str, partition: int, weight: float) -> float:
    """Return a node's score for a partition, exponentially distributed at rate ``weight``; the lowest one wins."""
    digest = hashlib.blake2b(node.encode(), key=partition.to_bytes(2, "big"), digest_size=7).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (1 << 56)) / weight


class Choice(NamedTuple):
    """A node that has a segment, and the microseconds after which it has it at hand."""

    node: str
    extra_us: float = 0.0


class Waits:
    """The expected waits at nodes during one fetch, and the choice of nodes for its segments. Without clock and I/O.

    Args:
        loads_us: Load of each node: microseconds that the bytes queued for its clients need. A node without an entry
            is never taken as the second choice.
        us_per_byte: Microseconds of a node's link for a byte; 0 if not known.
        slow: The same for nodes that are much slower.
    """

    def __init__(
        self, loads_us: Mapping[str, float], us_per_byte: float = 0.0, slow: Mapping[str, float] | None = None
    ) -> None:
        self._loads_us = loads_us
        self._us_per_byte = us_per_byte
        self._slow = slow or {}
        self._planned_bytes: Counter[str] = Counter()

    def choose(self, first: Choice, second: Choice | None, size: int) -> str:
        """Return the node to read a segment of ``size`` bytes from, and count these bytes as planned."""
        chosen = first if second is None or not self.prefers(second, first, size) else second
        self._planned_bytes[chosen.node] += size
        return chosen.node

    def prefers(self, choice: Choice, other: Choice, size: int = 0) -> bool:
        """Return True if the wait for ``size`` bytes of a node is known, and clearly shorter than at the other one."""
        is_shorter = self.wait_us(other, size) > WAIT_FACTOR * self.wait_us(choice, size) + WAIT_MARGIN_US
        return is_shorter and choice.node in self._loads_us

    def wait_us(self, choice: Choice, size: int = 0) -> float:
        """Return the wait until a node begins to send: what is queued, what is planned, and what is not at hand yet.

        For a slow node also the time that ``size`` bytes take more than at other nodes.
        """
        us_per_byte = self._slow.get(choice.node, self._us_per_byte)
        own_us = us_per_byte * self._planned_bytes[choice.node] + (us_per_byte - self._us_per_byte) * size
        return self._loads_us.get(choice.node, 0.0) + own_us + choice.extra_us

    def us_of(self, size: float) -> float:
        """Return the time of some bytes on a node's link; 0 if it is not known."""
        return size * self._us_per_byte


class Rates:
    """The rates of nodes' links, as a reader sees them. Without clock and I/O."""

    def __init__(self) -> None:
        self._fastest: deque[float] = deque([0.0], _RATES)  # in each batch, in bytes per microsecond
        self._last: dict[str, deque[tuple[float, float]]] = {}  # times of a node's batches, and its rates in them

    def note(self, bytes_per_us: Mapping[str, float], now_s: float) -> None:
        """Note the rates of nodes in a batch."""
        self._fastest.append(max(bytes_per_us.values()))
        for node, rate in bytes_per_us.items():
            self._last.setdefault(node, deque(maxlen=_SLOW_BATCHES)).append((now_s, rate))

    def keep(self, nodes: Mapping[str, object]) -> None:
        """Forget all other nodes."""
        self._last = {node: last for node, last in self._last.items() if node in nodes}

    @property
    def us_per_byte(self) -> float:
        """Microseconds of a link for a byte; 0 if not known."""
        rate = max(self._fastest)
        return 1 / rate if rate else 0.0

    def slow(self, now_s: float) -> dict[str, float]:
        """Return the microseconds for a byte of each slow node."""
        rates = {
            node: max((rate for at_s, rate in last if at_s > now_s - _SLOW_S), default=math.inf)
            for node, last in self._last.items()
        }
        known = [rate for rate in rates.values() if rate < math.inf]
        usual = statistics.median_high(known) if known else 0.0
        return {node: 1 / rate for node, rate in rates.items() if _SLOW * rate < usual}
