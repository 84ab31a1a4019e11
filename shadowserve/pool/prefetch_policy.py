"""What is moved up for requests before they run: TierKV's equations 1 and 2, and its algorithm 1.

A tier is reached from the one below it by a hop. Moving n bytes over a hop takes its latency and n over its bandwidth
(equation 2); what it has promised to carry already goes first. A request's bytes are prefetched as far as they arrive
before it runs (equation 1): the rest would be late, and is loaded when the request's turn comes, like anybody's. The
paper checks each block as if it were alone on the link, so that it promises more than the link carries.

How far ahead is a number of requests, or a time. What lies two hops down begins earlier: each hop looks further ahead
by as much as it is slower than the first.

No clock and no I/O. A step takes as long as there are requests within reach, whatever the number of their blocks: who
keeps account of blocks sums up the bytes that lie in each tier as they come and go.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """The way up from a tier to the one above it."""

    bytes_per_s: float
    """What it really carries now."""
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Return how long ``size`` bytes take: equation 2."""
        return self.latency_s + size / self.bytes_per_s


class Waiting(NamedTuple):
    """A request that has not begun."""

    request: Hashable
    begins_in_s: float
    """Expected; with what its scheduling takes."""
    below: Sequence[float]
    """Its bytes in each tier below the first that are not on their way up yet, from the nearest tier on."""


class Move(NamedTuple):
    """What to begin to move."""

    request: Hashable
    hop: int
    """0: into the first tier."""
    size: float
    """At most so many bytes of the request, those that its prefix begins with first."""


class PrefetchPolicy:
    """Decides what to prefetch."""

    def __init__(self, requests: int | None = 1, ahead_s: float = math.inf) -> None:
        """Look ahead.

        Args:
            requests: that are next, the paper's K; None for all.
            ahead_s: seconds before a request is expected to run.
        """
        self.requests = requests
        self.ahead_s = ahead_s

    def reach(self, hops: Sequence[Hop]) -> tuple[float, float]:
        """Return how many requests are looked at, and how many seconds ahead, over the hop that looks furthest."""
        counts, times = self._reaches(hops)
        return max(counts), max(times)

    def _reaches(self, hops: Sequence[Hop]) -> tuple[list[float], list[float]]:
        slower = [max(1.0, hops[0].bytes_per_s / hop.bytes_per_s) for hop in hops]
        counts = [math.inf if self.requests is None else math.ceil(self.requests * each) for each in slower]
        return counts, [self.ahead_s * each for each in slower]

    def plan(self, waiting: Iterable[Waiting], hops: Sequence[Hop], promised: Sequence[float]) -> list[Move]:
        """Return what to begin now.

        Args:
            waiting: in the order in which they run.
            hops: what each hop carries, the way into the first tier first.
            promised: bytes that each hop has yet to carry.
        """
        moves: list[Move] = []
        counts, times = self._reaches(hops)
        reach, reach_s = max(counts), max(times)
        owed_s = [hop.seconds(size) for hop, size in zip(hops, promised, strict=True)]
        for place, (request, begins_in_s, below) in enumerate(waiting):
            if place >= reach or begins_in_s > reach_s:
                break
            for hop, size in enumerate(below):
                if size > 0 and place < counts[hop] and begins_in_s <= times[hop]:
                    # The last of it has to pass the hops above as well, behind what is promised there.
                    room_s = begins_in_s - sum(owed_s[: hop + 1])
                    fits = min(size, room_s * hops[hop].bytes_per_s)
                    if fits > 0:
                        owed_s[hop] += fits / hops[hop].bytes_per_s
                        moves.append(Move(request, hop, fits))
        return moves
