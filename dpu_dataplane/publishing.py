"""Published keys: hosts will store them soon, so other engines wait for them instead of computing.

Storage sees one client, the data plane. This table divides that client's share among the hosts, and a withdrawal
reaches storage only if no other host has published the key. Local tiers without storage have this table only.
"""

import time
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
        self._by_host: dict[str, dict[bytes, float]] = {}  # with the time at which each expires
        self._by_key: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def publish(self, owner: str, keys: Sequence[bytes], lasts_ms: int) -> list[bytes]:
        """Add publications of a host; return the keys to publish in storage: not another host's that last longer.

        StorageRefusedError, and no key is added, if the host exceeds its share or LASTS_MS_MAX.
        """
        if lasts_ms > LASTS_MS_MAX:
            raise StorageRefusedError(f"keys are published for {lasts_ms} ms; at most {LASTS_MS_MAX} ms are allowed")
        mine = self._by_host.setdefault(owner, {})
        if len(mine) + sum(key not in mine for key in keys) > self.share:
            self._expire(owner)
        new = sum(key not in mine for key in set(keys))
        if len(mine) + new > self.share:
            held = len(mine)
            self._remove_if_empty(owner)
            raise StorageRefusedError(
                f"this host has {held} pending keys and publishes {new} more; its share is "
                f"{self.share}: {PENDING_KEYS_MAX} divided by hosts_max ({self._hosts_max})"
            )
        until = self._clock() + lasts_ms / 1000
        changed = [key for key in keys if self._until_of_others(owner, key) < until]
        for key in keys:
            mine[key] = until
            self._by_key.setdefault(key, set()).add(owner)
        return changed

    def withdraw(self, owner: str, keys: Sequence[bytes]) -> list[bytes]:
        """Withdraw publications of a host; return the keys to withdraw in storage: not those of another host."""
        for key in keys:
            self._drop(owner, key)
        self._remove_if_empty(owner)
        now = self._clock()
        return [key for key in keys if self._until_of_others(owner, key) <= now]

    def pending(self, keys: Sequence[bytes]) -> Flags:
        now = self._clock()
        return np.array(
            [any(self._by_host[owner][key] > now for owner in self._by_key.get(key, ())) for key in keys], np.bool_
        )

    def stored(self, key: bytes) -> None:
        for owner in list(self._by_key.get(key, ())):
            self._drop(owner, key)
            self._remove_if_empty(owner)

    def forget(self, owner: str) -> list[bytes]:
        return self.withdraw(owner, list(self._by_host.get(owner, ())))

    def expire(self) -> None:
        for owner in list(self._by_host):
            self._expire(owner)
            self._remove_if_empty(owner)

    def _until_of_others(self, owner: str, key: bytes) -> float:
        others = self._by_key.get(key, set()) - {owner}
        return max((self._by_host[other][key] for other in others), default=0.0)

    def _expire(self, owner: str) -> None:
        now = self._clock()
        for key in [key for key, until in self._by_host[owner].items() if until <= now]:
            self._drop(owner, key)

    def _drop(self, owner: str, key: bytes) -> None:
        if self._by_host.get(owner, {}).pop(key, None) is None:
            return
        owners = self._by_key[key]
        owners.discard(owner)
        if not owners:
            del self._by_key[key]

    def _remove_if_empty(self, owner: str) -> None:
        if not self._by_host.get(owner, True):
            del self._by_host[owner]
