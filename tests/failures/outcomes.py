"""What an operation came to, judged against what was stored.

Every operation under a fault ends in one of five ways. Right: the bytes that were stored, or an acknowledgement.
Missed: the cache does not have it, for a reason that the fault explains. Refused: an error, or the connection's end,
within the deadline. Wrong: other bytes than were stored, or a miss that nothing explains: an acknowledged write is
lost. Hang: no end within deadline and bound.
"""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

BOUND_S: Final = 30.0
"""How far an operation may outlast its deadline before it counts as a hang: the machine itself may stand still."""

_EXAMPLES_MAX: Final = 5


class Outcome(Enum):
    RIGHT = "right"
    MISSED = "missed"
    REFUSED = "refused"
    WRONG = "wrong"
    HANG = "hang"


class Tally:
    """Counts outcomes, and keeps an example of the reason for each but the first; and what was measured. Thread-safe.

    Attributes:
        most: the largest value that was measured of each thing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[Outcome] = Counter()
        self.reasons: dict[Outcome, Counter[str]] = {outcome: Counter() for outcome in Outcome}
        self.most: dict[str, float] = {}

    def note(self, outcome: Outcome, reason: str = "") -> None:
        with self._lock:
            self.counts[outcome] += 1
            if reason:
                self.reasons[outcome][reason[:240]] += 1

    def measure(self, name: str, value: float) -> None:
        """Note a value of which the largest counts."""
        with self._lock:
            self.most[name] = max(value, self.most.get(name, value))

    @property
    def failed(self) -> bool:
        return bool(self.counts[Outcome.WRONG] or self.counts[Outcome.HANG])

    def add(self, other: "Tally") -> None:
        with self._lock:
            self.counts.update(other.counts)
            for outcome, reasons in other.reasons.items():
                self.reasons[outcome].update(reasons)

    def examples(self, outcome: Outcome) -> list[str]:
        return [reason for reason, _ in self.reasons[outcome].most_common(_EXAMPLES_MAX)]

    def as_json(self) -> dict[str, Any]:
        return {outcome.value: self.counts[outcome] for outcome in Outcome}


ABSENT: Final = -1
"""In place of a version: the key is not there."""


@dataclass(slots=True)
class _Known:
    """What is known of one key.

    Attributes:
        possible: versions that a read may return, by rights.
        late: versions whose writers gave up waiting: the network may yet deliver them, whatever has been written since.
        losable: why it may be absent all the same; empty for not at all.
        next_version: number of the next write.
    """

    possible: set[int] = field(default_factory=lambda: {ABSENT})
    late: set[int] = field(default_factory=set)
    losable: str = ""
    next_version: int = 0


class Expected:
    """The state that a store should be in: the oracle. One writer for each key at a time; any thread.

    Attributes:
        losable: why any key may be absent; empty while acknowledged writes must be there.
    """

    def __init__(self, seed: int, *, sizes: tuple[int, ...] = (9, 150, 4_000, 70_000, 300_000)) -> None:
        self.seed = seed
        self.sizes = sizes
        self.losable = ""
        self._known: dict[str, _Known] = {}
        self._given: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def of(self, key: str) -> _Known:
        with self._lock:
            return self._known.setdefault(key, _Known())

    @property
    def keys(self) -> list[str]:
        with self._lock:
            return list(self._known)

    def value(self, key: str, version: int) -> bytes:
        """Return the bytes that stand for a version of a key."""
        if key in self._given:
            return self._given[key]
        chance = random.Random(f"{self.seed}/{key}/{version}")
        size = chance.choice(self.sizes)
        return f"{key}|{version}|".encode() + chance.randbytes(size)

    # ---- Writing

    def begin(self, key: str) -> int:
        """Return the version that is about to be written: from now on it may be read."""
        known = self.of(key)
        version = known.next_version
        known.next_version += 1
        known.possible.add(version)
        return version

    def begin_with(self, key: str, value: bytes) -> int:
        """Begin to write a value that is given, the only one that the key will ever have."""
        self._given[key] = value
        return self.begin(key)

    def acknowledged(self, key: str, version: int) -> None:
        """The write, or (ABSENT) the removal, was acknowledged: nothing else may be read any more."""
        known = self.of(key)
        known.possible = {version}
        known.losable = ""

    def removing(self, key: str) -> None:
        self.of(key).possible.add(ABSENT)

    def may_come_late(self, key: str, version: int) -> None:
        """Nobody waits for this write or (ABSENT) removal any more, and it may be executed at any later time."""
        self.of(key).late.add(version)

    def unknown(self, key: str) -> None:
        """A write ended with an error: what was there, what was to be there, or nothing."""
        self.of(key).possible.add(ABSENT)

    def may_be_lost(self, key: str, why: str) -> None:
        self.of(key).losable = why

    def all_may_be_lost(self, why: str) -> None:
        for key in self.keys:
            self.may_be_lost(key, why)

    # ---- Reading

    def judge(self, key: str, found: bytes | None) -> tuple[Outcome, str]:
        """Return what a read came to."""
        known = self.of(key)
        # A write of the same key may be under way in another thread: its version is possible from begin() on.
        possible = known.possible | known.late
        if found is None:
            if possible == {ABSENT}:
                return Outcome.RIGHT, ""
            if ABSENT in possible:
                return Outcome.MISSED, "its last write was never acknowledged"
            why = known.losable or self.losable
            if why:
                return Outcome.MISSED, why
            return Outcome.WRONG, f"lost: {key} was acknowledged as version {sorted(possible)} and is absent"
        if any(found == self.value(key, version) for version in possible if version != ABSENT):
            return Outcome.RIGHT, ""
        label = found[:40].split(b"|")[:2]
        return Outcome.WRONG, f"other bytes: {key} should be of {sorted(possible)}, found {len(found)} bytes of {label}"


__all__ = ["ABSENT", "BOUND_S", "Expected", "Outcome", "Tally"]
