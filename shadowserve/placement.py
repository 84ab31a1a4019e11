"""Placement: which storage nodes of a fleet serve which records.

Segments (:mod:`shadowserve.keys`) are divided into :data:`PARTITIONS`. Weighted rendezvous hashing (Thaler and
Ravishankar, 1998; Schindelhauer and Schomaker, 2005) ranks the nodes for each partition: the first one that is
reachable serves it. The ranking is the same for all programs with the same nodes and weights. A node that comes or goes
moves only its own partitions, and a weight that changes moves only partitions of that node.

A reader takes a segment from its first or second choice by their loads (the power of two choices: Mitzenmacher, 2001).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from shadowserve.keys import segment_of

PARTITIONS: Final = 4096
WAIT_FACTOR: Final = 1.25
WAIT_MARGIN_US: Final = 10_000
"""The second choice is taken if the first one's wait exceeds its wait times the factor plus the margin: often it must
read the segment from the bucket first, and loads that hardly differ must not move reads to and fro."""


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
    """

    def __init__(self, loads_us: Mapping[str, float], us_per_byte: float = 0.0) -> None:
        self._loads_us = loads_us
        self._us_per_byte = us_per_byte
        self._planned_bytes: Counter[str] = Counter()

    def choose(self, first: Choice, second: Choice | None, size: int) -> str:
        """Return the node to read a segment of ``size`` bytes from, and count these bytes as planned."""
        chosen = first if second is None or not self.prefers(second, first) else second
        self._planned_bytes[chosen.node] += size
        return chosen.node

    def prefers(self, choice: Choice, other: Choice) -> bool:
        """Return True if the wait at a node is known, and clearly shorter than at the other one."""
        is_shorter = self.wait_us(other) > WAIT_FACTOR * self.wait_us(choice) + WAIT_MARGIN_US
        return is_shorter and choice.node in self._loads_us

    def wait_us(self, choice: Choice) -> float:
        """Return the wait until a node begins to send: what is queued, what is planned, and what is not at hand yet."""
        planned_us = self.us_of(self._planned_bytes[choice.node])
        return self._loads_us.get(choice.node, 0.0) + planned_us + choice.extra_us

    def us_of(self, size: float) -> float:
        """Return the time of some bytes on a node's link; 0 if it is not known."""
        return size * self._us_per_byte
