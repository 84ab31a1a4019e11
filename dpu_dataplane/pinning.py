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
"""Between two looks for ended pins: one of a full table takes up to 0.4 s in all."""
_SCAN_KEYS: Final = 4096
"""Keys in one part of a look: some milliseconds, and then other calls get their turn on the event loop."""

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
        self._scanning: list[bytes] = []  # keys that the running look has still to see
        self._earliest = math.inf  # of the ends that it has seen

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
            self._scan_at, self._earliest = min(self._scan_at, end), min(self._earliest, end)

        def undo() -> None:
            for key, before in earlier.items():
                self._set(key, name, before)

        return [key for key in earlier if self._set(key, name, end)], undo

    def left_s(self, key: bytes) -> int:
        """Return the seconds for which a key is pinned, rounded up; 0: it is not."""
        ends = self._ends.get(key)
        return 0 if ends is None else max(math.ceil(round(max(ends.values()) - self._clock(), 3)), 0)

    def make_room(self, owner: str, count: int) -> bool:
        """Forget some ended pins if a host's share does not hold that many more; True: there may be others."""
        return self._exceeds(owner, count) and self.expire()

    def expire(self) -> bool:
        """Forget some of the pins that have ended; return True if there may be others."""
        now = self._clock()
        if not self._scanning:
            if now < self._scan_at:
                return False
            self._scanning, self._earliest = list(self._ends), math.inf
        for key in self._scanning[-_SCAN_KEYS:]:
            for name, end in list(self._ends.get(key, {}).items()):
                if end <= now:
                    self._set(key, name, None)
                else:
                    self._earliest = min(self._earliest, end)
        del self._scanning[-_SCAN_KEYS:]
        if not self._scanning:
            self._scan_at = max(self._earliest, now + _SCAN_S)
        return bool(self._scanning)

    def _exceeds(self, owner: str, new: int) -> bool:
        return self._counts[owner] + new > self.share or self._counts.total() + new > PINS_MAX

    def _check_share(self, owner: str, new: int) -> None:
        if self._exceeds(owner, new):
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
