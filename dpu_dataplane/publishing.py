"""Published keys: hosts will store them soon, so other engines wait for them instead of computing.

Storage sees one client, the data plane. This table divides that client's share among the hosts, and a withdrawal
reaches storage only if no other host has published the key. Local tiers without storage have this table only.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from shadowserve.errors import StorageRefusedError
from shadowserve.pieces import Flags

PENDING_KEYS_MAX: Final = 16_384
"""Most pending keys of all hosts together: a storage node's limit for one client (storage_kv/pending_keys.py)."""
LASTS_MS_MAX: Final = 60_000  # longest lifetime of a publication, as on a storage node


class Publications:
    """Pending keys by host: until they are stored, withdrawn or expired. Used on the event loop's thread only."""

    def __init__(self, hosts_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = max(1, PENDING_KEYS_MAX // hosts_max)  # most pending keys of one host
        self._hosts_max = hosts_max
        self._clock = clock
        self._ends: dict[bytes, dict[str, float]] = {}  # for each host that has published a key, when that expires
        self._counts: Counter[str] = Counter()  # keys of each host

    def __len__(self) -> int:
        return len(self._ends)

    def publish(self, owner: str, keys: Sequence[bytes], lasts_ms: int) -> list[bytes]:
        """Add publications of a host; return the keys to publish in storage: not another host's that last longer.

        StorageRefusedError, and no key is added, if the host exceeds its share or LASTS_MS_MAX.
        """
        if lasts_ms > LASTS_MS_MAX:
            raise StorageRefusedError(f"keys are published for {lasts_ms} ms; at most {LASTS_MS_MAX} ms are allowed")
        if self._counts[owner] + self._new(owner, keys) > self.share:
            self._expire()
        held, new = self._counts[owner], self._new(owner, keys)
        if held + new > self.share:
            raise StorageRefusedError(
                f"this host has {held} pending keys and publishes {new} more; its share is "
                f"{self.share}: {PENDING_KEYS_MAX} divided by hosts_max ({self._hosts_max})"
            )
        until = self._clock() + lasts_ms / 1000
        changed = [key for key in keys if self._until_of_others(owner, key) < until]
        for key in keys:
            ends = self._ends.setdefault(key, {})
            self._counts[owner] += owner not in ends
            ends[owner] = until
        return changed

    def withdraw(self, owner: str, keys: Sequence[bytes]) -> list[bytes]:
        """Withdraw publications of a host; return the keys to withdraw in storage: not those of another host."""
        for key in keys:
            self._drop(owner, key)
        now = self._clock()
        return [key for key in keys if self._until_of_others(owner, key) <= now]

    def pending(self, keys: Sequence[bytes]) -> Flags:
        now = self._clock()
        return np.array([any(until > now for until in self._ends.get(key, {}).values()) for key in keys], np.bool_)

    def stored(self, key: bytes) -> None:
        for owner in list(self._ends.get(key, ())):
            self._drop(owner, key)

    def forget(self, owner: str) -> list[bytes]:
        return self.withdraw(owner, [key for key, ends in self._ends.items() if owner in ends])

    def _new(self, owner: str, keys: Sequence[bytes]) -> int:
        return sum(owner not in self._ends.get(key, ()) for key in set(keys))

    def _until_of_others(self, owner: str, key: bytes) -> float:
        return max((until for other, until in self._ends.get(key, {}).items() if other != owner), default=0.0)

    def _expire(self) -> None:
        now = self._clock()
        for key, ends in list(self._ends.items()):
            for owner in [owner for owner, until in ends.items() if until <= now]:
                self._drop(owner, key)

    def _drop(self, owner: str, key: bytes) -> None:
        ends = self._ends.get(key, {})
        if ends.pop(owner, None) is not None:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]
        if not ends:
            self._ends.pop(key, None)
