"""Pinned keys, by host and session: storage knows one client, the data plane, and one end for each key.

A key stays pinned up to the latest end that a session has asked for, and a session ends its own pins only. The table
also has keys that are not stored yet: the catalog pins them once they are.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from shadowserve.errors import StorageRefusedError

PINS_MAX: Final = 1 << 18
"""Most pins of all hosts together, some 90 MB."""
_SCAN_S: Final = 1.0
"""Between two looks for ended pins: one of a full table takes up to 0.4 s."""

_Name = tuple[str, bytes]
"""A host and its session."""


class Pins:
    """Pins until they end. Used on the event loop's thread only."""

    def __init__(self, hosts_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = max(1, PINS_MAX // hosts_max)  # most pins of one host
        self._clock = clock
        self._ends: dict[bytes, dict[_Name, float]] = {}
        self._counts: Counter[str] = Counter()
        self._scan_at = math.inf  # no pin ends before

    def pin(
        self, owner: str, session: bytes, keys: Sequence[bytes], lasts_s: float
    ) -> tuple[list[bytes], Callable[[], None]]:
        """Pin keys for a session; 0 seconds end its pins.

        Return the keys whose last end has changed, and a function that undoes all this. StorageRefusedError, and
        nothing has changed, beyond the host's share.
        """
        name, end = (owner, session), self._clock() + lasts_s if lasts_s else None
        earlier = {key: self._ends.get(key, {}).get(name) for key in keys}
        if end is not None:
            self._check_share(owner, sum(each is None for each in earlier.values()))
            self._scan_at = min(self._scan_at, end)

        def undo() -> None:
            for key, before in earlier.items():
                self._set(key, name, before)

        return [key for key in earlier if self._set(key, name, end)], undo

    def left_s(self, key: bytes) -> int:
        """Return the seconds for which a key is pinned, rounded up; 0: it is not."""
        ends = self._ends.get(key)
        return 0 if ends is None else max(math.ceil(round(max(ends.values()) - self._clock(), 3)), 0)

    def expire(self) -> None:
        """Forget pins that have ended."""
        now = self._clock()
        if now < self._scan_at:
            return
        each = ((key, {name: end for name, end in ends.items() if end > now}) for key, ends in self._ends.items())
        self._ends = {key: left for key, left in each if left}
        self._counts = Counter(owner for ends in self._ends.values() for owner, _ in ends)
        earliest = min((end for ends in self._ends.values() for end in ends.values()), default=math.inf)
        self._scan_at = max(earliest, now + _SCAN_S)

    def _check_share(self, owner: str, new: int) -> None:
        def exceeds() -> bool:
            return self._counts[owner] + new > self.share or self._counts.total() + new > PINS_MAX

        if exceeds():
            self.expire()
        if exceeds():
            raise StorageRefusedError(
                f"this host has {self._counts[owner]} pins and asks for {new} more; its share is {self.share}, and all "
                f"hosts have {self._counts.total()} of {PINS_MAX}"
            )

    def _set(self, key: bytes, name: _Name, end: float | None) -> bool:
        """Set the end of a pin, None removes it; return True if the key's last end has changed."""
        ends = self._ends.setdefault(key, {})
        last = max(ends.values(), default=None)
        self._counts[name[0]] += (end is not None) - (ends.pop(name, None) is not None)
        if not self._counts[name[0]]:
            del self._counts[name[0]]
        if end is not None:
            ends[name] = end
        if not ends:
            del self._ends[key]
        return max(ends.values(), default=None) != last
