"""Prefetch policy for waiting requests: TierKV's equations 1 and 2, and its algorithm 1.

A hop is the way from a tier to the next nearer one. Moving n bytes over a hop takes its latency plus n divided by its
bandwidth (equation 2), after the bytes that are queued there. A request's bytes are prefetched as far as they arrive
before it runs (equation 1); the rest is loaded when the request runs. The paper checks each block as if it were alone
on the link, and so promises more than the link carries.

A hop looks further ahead by as much as it is slower than the first. The time of a step grows with the requests within
reach, not with their blocks. No clock and no I/O.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """The way from a tier to the next nearer one."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the time for ``size`` bytes: equation 2."""
        return self.latency_s + size / self.bytes_per_s


class Waiting(NamedTuple):
    """A request that has not begun to run."""

    request: Hashable
    begins_in_s: float
    """Expected time until it runs, scheduling included."""
    below: Sequence[float]
    """Its bytes in each tier beyond the first that are not on their way yet, from the nearest tier on."""


class Move(NamedTuple):
    """A move to begin."""

    request: Hashable
    hop: int
    """Number of the hop; 0 leads into the first tier."""
    size: float
    """Most bytes of the request to move, from the beginning of its prefix."""


class PrefetchPolicy:
    """Decides what to prefetch: for the next ``requests`` (the paper's K; None for all) that run within ``ahead_s``."""

    def __init__(self, requests: int | None = 1, ahead_s: float = math.inf) -> None:
        self.requests = requests
        self.ahead_s = ahead_s

    def reach(self, hops: Sequence[Hop]) -> tuple[float, float]:
        counts, times = self._reaches(hops)
        return max(counts), max(times)

    def _reaches(self, hops: Sequence[Hop]) -> tuple[list[float], list[float]]:
        slower = [max(1.0, hops[0].bytes_per_s / hop.bytes_per_s) for hop in hops]
        counts = [math.inf if self.requests is None else math.ceil(self.requests * each) for each in slower]
        return counts, [self.ahead_s * each for each in slower]

    def plan(self, waiting: Iterable[Waiting], hops: Sequence[Hop], promised: Sequence[float]) -> list[Move]:
        """Return the moves to begin now. ``waiting``: in the order in which they run; ``hops``: the one into the first
        tier first; ``promised``: queued bytes of each hop."""
        moves: list[Move] = []
        counts, times = self._reaches(hops)
        reach, reach_s = max(counts), max(times)
        owed_s = [hop.seconds(size) for hop, size in zip(hops, promised, strict=True)]
        for place, (request, begins_in_s, below) in enumerate(waiting):
            if place >= reach or begins_in_s > reach_s:
                break
            for hop, size in enumerate(below):
                if size > 0 and place < counts[hop] and begins_in_s <= times[hop]:
                    # The last byte also passes the nearer hops, behind the bytes that are queued there.
                    room_s = begins_in_s - sum(owed_s[: hop + 1])
                    fits = min(size, room_s * hops[hop].bytes_per_s)
                    if fits > 0:
                        owed_s[hop] += fits / hops[hop].bytes_per_s
                        moves.append(Move(request, hop, fits))
        return moves
