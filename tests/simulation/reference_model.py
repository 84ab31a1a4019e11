"""The reference model: permitted answers of a store, given all replies that clients have received.

Clients overlap, replies get lost, servers end. So the model keeps every change of each key with the interval in which
it occurred: from the client's request to its reply or, without a reply, to the time after which the server cannot have
executed it. A read may return a value if its change can precede the read, and no acknowledged change is known to have
replaced it in between. A read may miss if the value can have been removed or have expired. The pool must have counted
an eviction or loss for any other miss.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

FOREVER: Final = 1 << 62
Key = tuple[str, bytes]
"""A tenant's name and a client's key."""


class Violation(AssertionError):
    """The store has violated a guarantee."""


@dataclass(eq=False)
class Change:
    """A change of one key, or of all keys of a tenant (with an empty key).

    Attributes:
        kind: ``set``, ``remove``, or ``expiry``.
        begin_ns: Earliest possible time.
        end: Function that returns the latest possible time.
        acknowledged: True if its client knows that it has occurred.
        rejected: True if it has certainly not occurred.
        expires: Earliest and latest wall time at which the value expires; None for never.
        keeps_expiry: True if the previous expiry stays.
        failed: True if the client got an error; the change may or may not have occurred.
    """

    kind: str
    begin_ns: int
    end: Callable[[], int]
    acknowledged: bool = False
    rejected: bool = False
    expires: tuple[int, int] | None = None
    keeps_expiry: bool = False
    failed: bool = False


@dataclass(eq=False)
class Write(Change):
    """A set of a value.

    Attributes:
        value: Unique value, derived from the number.
        is_record: True if the store keeps the first of two records.
        lost: True if a read has missed it with a counted reason, or a reason outside of the model.
    """

    number: int = 0
    value: bytes = b""
    is_record: bool = False
    header_bytes: int = 0
    lost: bool = False


def text_of(key: Key, number: int, size: int) -> bytes:
    """Return a unique value of ``size`` bytes, at least 32."""
    head = f"<{key[0]}|{key[1].decode()[:12]}|{number:08x}|".encode()
    return (head + random.Random(number).randbytes(max(size - len(head), 8)))[: max(size, 32)]


class Model:
    """All keys of all tenants.

    Attributes:
        unpaid: Misses of keys that should have been present.
        must_hit: True if every such miss is a violation, because no eviction or loss is possible.
    """

    def __init__(self, must_hit: bool) -> None:
        self.must_hit = must_hit
        self.unpaid: list[tuple[Key, int]] = []
        self.reads = 0
        self.misses = 0
        self._histories: defaultdict[Key, list[Change]] = defaultdict(list)

    def add(self, key: Key, change: Change) -> None:
        self._histories[key].append(change)

    def keys(self) -> list[Key]:
        return [key for key in self._histories if key[1]]

    def writes(self, key: Key) -> list[Write]:
        """Return every set of a key that may have occurred."""
        return [each for each in self._histories[key] if isinstance(each, Write) and not each.rejected]

    def lose_all(self) -> None:
        """Allow the loss of all values: a store in memory has ended."""
        for history in self._histories.values():
            for change in history:
                if isinstance(change, Write):
                    change.lost = True

    def doubt_all(self) -> None:
        """Allow the loss of all changes so far."""
        for history in self._histories.values():
            for change in history:
                change.acknowledged = False

    # ---- Reads

    def check_value(
        self, key: Key, matches: Callable[[Write], bool], begin_ns: int, end_ns: int, wall: tuple[int, int], what: str
    ) -> None:
        """Check that a read may have returned a value. ``matches`` returns True for a write of this value."""
        self.reads += 1
        reasons = []
        for write in reversed(self.writes(key)):
            if not matches(write):
                continue
            reason = self._stale_reason(key, write, begin_ns, end_ns, wall)
            if reason is None:
                return
            reasons.append(f"write {write.number}: {reason}")
        if reasons:
            raise Violation(f"stale: {what} of {key} returned an outdated value: {'; '.join(reasons)}")
        others = [
            (other, write.number)
            for other, history in self._histories.items()
            for write in history
            if isinstance(write, Write) and matches(write)
        ]
        raise Violation(f"wrong: {what} of {key} returned bytes of another key or of none: {others}")

    def _stale_reason(self, key: Key, write: Write, begin_ns: int, end_ns: int, wall: tuple[int, int]) -> str | None:
        if write.begin_ns > end_ns:
            return "it was written later"
        after = write.end()
        for change in self._changes(key):
            if not change.acknowledged or change is write or change.kind == "expiry":
                continue
            if change.begin_ns > after and change.end() < begin_ns:
                if isinstance(change, Write) and change.is_record and write.is_record:
                    continue
                number = f" {change.number}" if isinstance(change, Write) else ""
                return f"a {change.kind}{number} at {change.begin_ns} came after it and was acknowledged"
        ends = [last for _, last in self._expiries(key, write, begin_ns, end_ns)]
        if ends and max(ends) <= wall[0]:
            return f"it expired at {max(ends)}, and it was {wall[0]}"
        return None

    def _changes(self, key: Key) -> Iterable[Change]:
        yield from self._histories[key]
        if key[1]:
            yield from self._histories[key[0], b""]

    def _expiries(self, key: Key, write: Write, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return the possible expiries of a write at a read; FOREVER for none."""
        kinds: list[Change] = [write]
        for change in self._changes(key):
            if change.rejected or change.begin_ns > end_ns or change is write:
                continue
            if change.kind == "expiry" and change.end() > write.begin_ns:
                kinds.append(change)
        found = []
        for each in kinds:
            if any(
                other.acknowledged and other.begin_ns > each.end() and other.end() < begin_ns
                for other in kinds
                if other is not each
            ):
                continue
            if each.keeps_expiry:
                return [(0, FOREVER)]  # any expiry of the previous write
            found.append(each.expires or (FOREVER, FOREVER))
        return found

    def check_miss(self, key: Key, begin_ns: int, end_ns: int, wall: tuple[int, int], what: str) -> None:
        """Check that a read may have missed, or record that the miss needs a counted reason."""
        self.misses += 1
        sure = self.surely_there(key, begin_ns, end_ns, wall)
        if sure is None:
            return
        if self.must_hit:
            raise Violation(f"lost: {what} of {key} missed write {sure.number}, acknowledged and never removed")
        self.unpaid.append((key, sure.number))
        for write in self.writes(key):
            if write.begin_ns < end_ns:
                write.lost = True

    def surely_there(self, key: Key, begin_ns: int, end_ns: int, wall: tuple[int, int]) -> Write | None:
        """Return a write that guarantees the presence of the key; None if none does."""
        changes = list(self._changes(key))
        for write in reversed(self.writes(key)):
            if not write.acknowledged or write.lost or write.end() >= begin_ns:
                continue
            others = [each for each in changes if not each.rejected and each.begin_ns < end_ns]
            if any(_may_remove(each, write) for each in others):
                continue
            if not any(_may_expire(each, write, wall) for each in others):
                return write
        return None


def _may_remove(change: Change, write: Write) -> bool:
    """Return True if a change may have removed the value of a write, or replaced it by a lost value."""
    if change is write or change.end() <= write.begin_ns:
        return False
    return change.kind == "remove" or change.failed or (isinstance(change, Write) and change.lost)


def _may_expire(change: Change, write: Write, wall: tuple[int, int]) -> bool:
    """Return True if the key may have expired by a change; ``wall``: least and greatest time of the wall clock."""
    if change.end() <= write.begin_ns and not write.is_record:  # of two records, the store may have kept the first
        return False
    return change.keeps_expiry or (change.expires is not None and change.expires[0] <= wall[1])
