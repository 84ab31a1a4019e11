"""Parts of the model of tiers: sessions and their requests, tiers of memory, the six policies.

What goes is decided by the product's own objects: ``shadowserve.native.Index`` (LRU, by frequency) and ``NextUse``.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from shadowserve.native import Index, IndexPolicy
from shadowserve.pool.entries import MEMORY_ONLY
from shadowserve.pool.next_use import NextUse
from shadowserve_tools.simulate.tier_assumptions import Assumed, Shape

FOREVER_S: Final = 0xFFFF_FFFF
_ORACLE_SEES: Final = 200
"""Requests that the oracle knows before they come: as many as it has time to prepare for."""
_REQUESTS_A_SESSION: Final = 4
"""At least, so that tiers find their order."""


@dataclass(frozen=True)
class Policy:
    """Behaviour of one of the paper's six policies.

    Attributes:
        eviction: Order in which KV without a known waiting request is evicted.
        copies_below: True if evicted KV has a copy below. Otherwise a single tier swaps, and writes it out first.
        predicts: True if it prefetches what was used most recently.
        foresees: Number of requests that it knows before they come; None if it does not know waiting requests
            either.
    """

    eviction: IndexPolicy = IndexPolicy.LRU
    copies_below: bool = True
    static: bool = False
    predicts: bool = False
    foresees: int | None = None


POLICIES: Final = {
    "lru": Policy(copies_below=False),
    "frequency": Policy(IndexPolicy.FREQUENCY, copies_below=False),
    "attention_prefetch": Policy(predicts=True),
    "static": Policy(static=True),
    "prefetch": Policy(foresees=0),
    "oracle": Policy(foresees=_ORACLE_SEES),
}


@dataclass
class Session:
    """KV that is used repeatedly, as blocks with keys and sizes in bytes.

    Attributes:
        below: Its bytes in each tier below the GPU's memory that are not being moved up, the nearest tier first.
        known: Numbers of its requests that the policy knows and that have not begun.
    """

    number: int
    keys: list[bytes]
    sizes: list[int]
    below: list[float] = field(default_factory=lambda: [0.0, 0.0])
    known: deque[int] = field(default_factory=deque)

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)


@dataclass
class Request:
    """One answer.

    Attributes:
        lacks: Blocks that it waits for once it has its turn.
        turn_s: Time of its turn; None before.
    """

    number: int
    session: Session
    comes_s: float
    tokens: int
    lacks: set[bytes] = field(default_factory=set)
    turn_s: float | None = None
    begun_s: float = 0.0
    ended_s: float = 0.0
    hit_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests of all policies, the same at the same times.

    Attributes:
        slots: Most requests that decode together.
        running_bytes_max: Most KV bytes of these together.
        mean_tokens: Mean tokens of an answer.
    """

    sessions: list[Session]
    requests: list[Request]
    slots: int
    running_bytes_max: float
    mean_tokens: float


def trace(shape: Shape, workload: str, oversubscription: float, seed: int, given: Assumed, requests_min: int) -> Trace:
    """Draw sessions whose KV takes ``oversubscription`` times the GPU's memory, and requests for them."""
    random = np.random.default_rng(seed)
    sessions: list[Session] = []
    left = oversubscription * given.hbm_gb * 1e9
    block_tokens = int(given.block_tokens)
    while True:
        tokens = shape.context(workload, random)
        left -= tokens * shape.token_bytes
        if left < 0 and sessions:
            break
        number = len(sessions)
        parts = [min(block_tokens, tokens - at) * shape.token_bytes for at in range(0, tokens, block_tokens)]
        keys = [(number << 32 | at).to_bytes(32, "big") for at in range(1, len(parts) + 1)]
        sessions.append(Session(number, keys, parts))
    weights = random.permutation(1.0 / np.arange(1, len(sessions) + 1) ** given.skew)
    weights /= weights.sum()
    count = max(requests_min, _REQUESTS_A_SESSION * len(sessions))
    picked = random.choice(len(sessions), count, p=weights)
    mean_size = float(np.dot(weights, [each.size for each in sessions]))
    running_bytes_max = given.running_share * given.hbm_gb * 1e9
    slots = int(given.slots)
    at_once = given.load * max(1.0, min(slots, running_bytes_max / mean_size))
    gaps = random.exponential(given.answer_tokens * shape.step_ms / 1e3 / at_once, count)
    tokens_of = np.maximum(2, np.rint(random.exponential(given.answer_tokens, count))).astype(int)
    requests = [
        Request(number, sessions[session], float(comes), int(length))
        for number, (session, comes, length) in enumerate(zip(picked, np.cumsum(gaps), tokens_of, strict=True))
    ]
    return Trace(sessions, requests, slots, running_bytes_max, given.answer_tokens)


class Tier:
    """Contents of one memory, and its eviction."""

    def __init__(self, size: float, blocks: int, policy: IndexPolicy, gone: Callable[[bytes, int], None]) -> None:
        """``gone`` is called with each evicted key and its bytes."""
        self.index = Index(blocks + 1, policy, seed=1)
        self.next_use = NextUse(self.index, lambda tenant, slot: slot in self.pins)
        self.victim: Callable[[int | None], int] = lambda sake: self.next_use.victim(1, sake=sake)
        self._left = size
        self._gone = gone
        self.pins: dict[int, int] = {}

    def slot(self, key: bytes) -> int:
        return self.index.find(0, key)

    def reserve(self, size: int, sake: int | None = None) -> bool:
        """Make room for a block that is to come; return whether there is. ``sake``: whose victims it may have."""
        while self._left < size:
            slot = self.victim(sake)
            if not slot:
                return False
            entry = self.index.read(slot)
            self.drop(entry.key)
            self._gone(entry.key, entry.length)
        self._left -= size
        return True

    def put(self, key: bytes, size: int) -> None:
        """Keep what room was reserved for."""
        self.index.insert(0, key, device=MEMORY_ONLY, length=size, now_s=1)

    def drop(self, key: bytes) -> None:
        slot = self.slot(key)
        self._left += self.index.read(slot).length
        self.index.evict(slot)

    def pin(self, key: bytes) -> None:
        """Pin a present block once more."""
        slot = self.slot(key)
        self.pins[slot] = self.pins.get(slot, 0) + 1
        self.index.pin(slot, FOREVER_S)

    def unpin(self, key: bytes) -> bool:
        """Undo pin(), which counts as a use; return True if the block has no pin left."""
        slot = self.slot(key)
        self.pins[slot] -= 1
        if self.pins[slot]:
            return False
        del self.pins[slot]
        self.index.pin(slot, 0)
        self.index.touch(slot, 1)
        return True


class Predicted:
    """Sessions by a decayed sum of their uses, for evicting and prefetching without knowledge of requests.

    All sums decay alike, so that their order changes by uses alone: instead of decaying them, later uses count more.
    """

    def __init__(self, sessions: list[Session], tier: Tier) -> None:
        self._sessions = sessions
        self._tier = tier
        self._uses = 0
        self._sums = [-math.inf] * len(sessions)  # logarithms of the sums
        self._ranked = [(-math.inf, number) for number in range(len(sessions))]
        self._nothing_before = 0  # number of sessions that have no KV to evict

    def use(self, session: Session) -> None:
        self._uses += 1
        number, grown = session.number, self._uses / len(self._sessions)
        old = self._sums[number]
        self._sums[number] = grown + math.log1p(math.exp(old - grown))
        del self._ranked[bisect_left(self._ranked, (old, number))]
        insort(self._ranked, (self._sums[number], number))
        self._nothing_before = 0

    def given_back(self) -> None:
        """Note that blocks may go that could not."""
        self._nothing_before = 0

    def victim(self, sake: int | None) -> int:
        """Return the last block of the session used least; for a session's sake, only of one used less than that."""
        for place in range(self._nothing_before, len(self._ranked)):
            used, number = self._ranked[place]
            if sake is not None and used >= self._sums[sake]:
                return 0
            session = self._sessions[number]
            if sum(session.below) < session.size:  # a part of it is in this tier, or in transit
                for slot in map(self._tier.slot, reversed(session.keys)):
                    if slot and slot not in self._tier.pins:
                        return slot
            self._nothing_before = place + 1
        return 0

    def best(self) -> Session | None:
        """Return the most used session with KV below, if it is in the more used half."""
        for used, number in self._ranked[: len(self._ranked) // 2 : -1]:
            if used > -math.inf and self._sessions[number].below[0] > 0:
                return self._sessions[number]
        return None
