"""The outcome of an operation, judged against the stored bytes.

Every operation under a fault ends in one of five ways. Right: the stored bytes, or an acknowledgement.
Missed: the cache does not have the key, for a reason that the fault explains. Refused: an error or a closed
connection within the deadline. Wrong: other bytes than the stored ones, or a miss without a reason (an acknowledged
write is lost). Hang: no end within deadline and bound.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

BOUND_S: Final = 30.0
"""Time beyond its deadline after which an operation counts as a hang: the machine itself may pause."""

_EXAMPLES_MAX: Final = 5


class Outcome(Enum):
    RIGHT = "right"
    MISSED = "missed"
    REFUSED = "refused"
    WRONG = "wrong"
    HANG = "hang"


class Tally:
    """Counts outcomes and their reasons, and keeps measured values. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[Outcome] = Counter()
        self.reasons: dict[Outcome, Counter[str]] = {outcome: Counter() for outcome in Outcome}
        self.most: dict[str, float] = {}  # largest measured value of each kind

    def note(self, outcome: Outcome, reason: str = "") -> None:
        with self._lock:
            self.counts[outcome] += 1
            if reason:
                self.reasons[outcome][reason[:240]] += 1

    def measure(self, name: str, value: float) -> None:
        """Record a value. The largest one counts."""
        with self._lock:
            self.most[name] = max(value, self.most.get(name, value))

    def note_late(self, what: str, began: float, deadline_s: float) -> None:
        """Count an operation that ended long after its deadline as a hang."""
        if (took := time.monotonic() - began) > deadline_s + BOUND_S:
            self.note(Outcome.HANG, f"{what}: an end after {took:.1f} s")

    def note_chunks(
        self, what: str, expected: Sequence[bytes], arrived: Sequence[bytes], reason: str, *, lost: bool, losable: str
    ) -> None:
        """Judge the leading chunks of a prompt that arrived. ``lost``: the others must be there."""
        for index, (wanted, found) in enumerate(zip(expected, arrived, strict=False)):
            if wanted != found:
                self.note(Outcome.WRONG, f"{what}: chunk {index} of {len(arrived)} has other bytes")
                return
        if arrived:
            self.note(Outcome.RIGHT)
        if len(arrived) < len(expected):
            if lost and not losable:
                self.note(Outcome.WRONG, f"{what}: acknowledged chunks are lost, {len(arrived)} arrived: {reason}")
            else:
                self.note(Outcome.MISSED, f"{what}: {reason}{f': {losable}' if losable else ''}")

    @property
    def failed(self) -> bool:
        return bool(self.counts[Outcome.WRONG] or self.counts[Outcome.HANG])

    def examples(self, outcome: Outcome) -> list[str]:
        return [reason for reason, _ in self.reasons[outcome].most_common(_EXAMPLES_MAX)]

    def as_json(self) -> dict[str, Any]:
        return {outcome.value: self.counts[outcome] for outcome in Outcome}


ABSENT: Final = -1
"""Version of an absent key."""


@dataclass(slots=True)
class _Known:
    """Expected state of one key."""

    possible: set[int] = field(default_factory=lambda: {ABSENT})  # versions that a read may return
    late: set[int] = field(default_factory=set)  # of abandoned writes, which the network may still deliver
    losable: str = ""  # why the key may be absent; empty if it must be present
    next_version: int = 0


class Expected:
    """The expected state of a store: the oracle. One writer for each key at a time; any thread."""

    def __init__(self, seed: int, *, sizes: tuple[int, ...] = (9, 150, 4_000, 70_000, 300_000)) -> None:
        self.seed = seed
        self.sizes = sizes
        self.losable = ""  # why any key may be absent; empty if acknowledged writes must be present
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
        if key in self._given:
            return self._given[key]
        chance = random.Random(f"{self.seed}/{key}/{version}")
        size = chance.choice(self.sizes)
        return f"{key}|{version}|".encode() + chance.randbytes(size)

    # ---- Writes

    def begin(self, key: str) -> int:
        """Return the version of the next write. From now on a read may return it."""
        known = self.of(key)
        version = known.next_version
        known.next_version += 1
        known.possible.add(version)
        return version

    def begin_with(self, key: str, value: bytes) -> int:
        """Begin to write a given value, the only value that the key ever has."""
        self._given[key] = value
        return self.begin(key)

    def acknowledged(self, key: str, version: int) -> None:
        """Record the acknowledgement of a write or (ABSENT) a removal: from now on no other version is right."""
        known = self.of(key)
        known.possible = {version}
        known.losable = ""

    def removing(self, key: str) -> None:
        self.of(key).possible.add(ABSENT)

    def may_come_late(self, key: str, version: int) -> None:
        """Record an abandoned write or (ABSENT) removal: the server may execute it at any later time."""
        self.of(key).late.add(version)

    def unknown(self, key: str) -> None:
        """Record a write that ended with an error: the key has the old value, the new value, or none."""
        self.of(key).possible.add(ABSENT)

    def may_be_lost(self, key: str, why: str) -> None:
        self.of(key).losable = why

    def all_may_be_lost(self, why: str) -> None:
        for key in self.keys:
            self.may_be_lost(key, why)

    # ---- Reads

    def judge(self, key: str, found: bytes | None) -> tuple[Outcome, str]:
        """Return the outcome of a read, and its reason."""
        known = self.of(key)
        # Another thread may write the same key: its version is possible from begin() on.
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
