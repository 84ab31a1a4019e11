"""Placement: which storage nodes of a fleet serve which records.

Segments (:mod:`shadowserve.keys`) are divided into :data:`PARTITIONS`. Weighted rendezvous hashing (Thaler and
Ravishankar, 1998; Schindelhauer and Schomaker, 2005) ranks the nodes for each partition: the first one that is
reachable serves it. The ranking is the same for all programs with the same nodes and weights. A node that comes or goes
moves only its own partitions, and a weight that changes moves only partitions of that node.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Final

from shadowserve.keys import segment_of

PARTITIONS: Final = 4096


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


def _score(node: str, partition: int, weight: float) -> float:
    """Return a node's score for a partition, exponentially distributed at rate ``weight``; the lowest one wins."""
    digest = hashlib.blake2b(node.encode(), key=partition.to_bytes(2, "big"), digest_size=7).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (1 << 56)) / weight
