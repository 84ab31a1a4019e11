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
"""Most pins of all hosts together, some 60 MB."""


class Pins:
    """Pins until they end. Used on the event loop's thread only."""

    def __init__(self, hosts_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = max(1, PINS_MAX // hosts_max)  # most pins of one host
        self._clock = clock
        self._ends: dict[bytes, dict[tuple[str, bytes], float]] = {}
        self._counts: Counter[str] = Counter()

    def pin(self, owner: str, session: bytes, keys: Sequence[bytes], lasts_s: float) -> list[bytes]:
        """Pin keys; return those that storage is to pin for this time: no other session's pin lasts longer.

        StorageRefusedError, and nothing has changed, beyond the host's share.
        """
        keys, name = list(dict.fromkeys(keys)), (owner, session)
        if self._counts[owner] + len(keys) > self.share:
            self._expire()
        new = sum(name not in self._ends.get(key, ()) for key in keys)
        if self._counts[owner] + new > self.share:
            raise StorageRefusedError(
                f"this host has {self._counts[owner]} pins and asks for {new} more; its share is {self.share}"
            )
        self._counts[owner] += new
        end, changed = self._clock() + lasts_s, list[bytes]()
        for key in keys:
            ends = self._ends.setdefault(key, {})
            ends[name] = end
            if max(ends.values()) == end:
                changed.append(key)
        return changed

    def release(self, owner: str, session: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """End a session's pins; return the keys that no other session pins."""
        for key in keys:
            self._drop(key, (owner, session))
        return [key for key in keys if not self.left_s(key)]

    def left_s(self, key: bytes) -> int:
        """Return the seconds for which a key is pinned, rounded up; 0: it is not."""
        ends = self._ends.get(key)
        return 0 if ends is None else max(math.ceil(max(ends.values()) - self._clock()), 0)

    def _expire(self) -> None:
        now = self._clock()
        for key, name in [(key, name) for key, ends in self._ends.items() for name, end in ends.items() if end <= now]:
            self._drop(key, name)

    def _drop(self, key: bytes, name: tuple[str, bytes]) -> None:
        ends = self._ends.get(key, {})
        if ends.pop(name, None) is None:
            return
        self._counts[name[0]] -= 1
        if not self._counts[name[0]]:
            del self._counts[name[0]]
        if not ends:
            del self._ends[key]
