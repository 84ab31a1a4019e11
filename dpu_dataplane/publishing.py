"""Keys that hosts have published: they are about to store them, so that others wait for them instead of computing.

A published key is pending until it is stored, withdrawn, or its time is up; all of it is a hint. Storage sees one
client, the data plane. So this table gives each host its own share of what one client may publish there, and a host can
withdraw only what no other host has published too. Tiers without storage below have no other table than this one.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from shadowserve.errors import StorageRefusedError
from shadowserve.pieces import Flags

__all__ = ["LASTS_MS_MAX", "PENDING_KEYS_MAX", "Publications"]

PENDING_KEYS_MAX: Final = 16_384
"""Of all hosts together: as many as a storage node takes of one client (storage_kv/publications.py)."""
LASTS_MS_MAX: Final = 60_000
"""For which a key may be published at a time, as at a storage node."""


class Publications:
    """Which keys are pending, by the hosts that have published them. Used on the event loop's thread alone.

    Args:
        hosts_max: hosts that have equal shares.
        clock: seconds, monotonic.

    Attributes:
        share: keys that one host may have pending.
    """

    def __init__(self, hosts_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = max(1, PENDING_KEYS_MAX // hosts_max)
        self._hosts_max = hosts_max
        self._clock = clock
        self._by_host: dict[str, dict[bytes, float]] = {}  # until when each key is pending
        self._by_key: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def publish(self, owner: str, keys: Sequence[bytes], lasts_ms: int) -> list[bytes]:
        """Note that a host is about to store keys within so long.

        Returns:
            The keys of which storage is to hear: not those that another host has published for longer.

        Raises:
            StorageRefusedError: the host would have more keys pending than its share, or for too long; none is noted.
        """
        if lasts_ms > LASTS_MS_MAX:
            raise StorageRefusedError(f"keys are published for {lasts_ms} ms; the most are {LASTS_MS_MAX}")
        mine = self._by_host.setdefault(owner, {})
        if len(mine) + sum(key not in mine for key in keys) > self.share:
            self._expire(owner)
        new = sum(key not in mine for key in set(keys))
        if len(mine) + new > self.share:
            held = len(mine)
            self._tidy(owner)
            raise StorageRefusedError(
                f"this host has published {held} keys that are pending and publishes {new} more; its share is "
                f"{self.share}: {PENDING_KEYS_MAX} divided by hosts_max ({self._hosts_max})"
            )
        until = self._clock() + lasts_ms / 1000
        told = [key for key in keys if self._until_of_others(owner, key) < until]
        for key in keys:
            mine[key] = until
            self._by_key.setdefault(key, set()).add(owner)
        return told

    def withdraw(self, owner: str, keys: Sequence[bytes]) -> list[bytes]:
        """Note that a host will not store keys after all.

        Returns:
            The keys of which storage is to hear: not those that another host has published, too.
        """
        for key in keys:
            self._drop(owner, key)
        self._tidy(owner)
        now = self._clock()
        return [key for key in keys if self._until_of_others(owner, key) <= now]

    def pending(self, keys: Sequence[bytes]) -> Flags:
        """Return which keys are pending."""
        now = self._clock()
        return np.array(
            [any(self._by_host[owner][key] > now for owner in self._by_key.get(key, ())) for key in keys], np.bool_
        )

    def stored(self, key: bytes) -> None:
        """Note that a key is stored: it is not pending any more, whichever host has published it."""
        for owner in list(self._by_key.get(key, ())):
            self._drop(owner, key)
            self._tidy(owner)

    def forget(self, owner: str) -> list[bytes]:
        """Forget all that a host has published; return it."""
        return self.withdraw(owner, list(self._by_host.get(owner, ())))

    def expire(self) -> None:
        """Forget what is over."""
        for owner in list(self._by_host):
            self._expire(owner)
            self._tidy(owner)

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

    def _tidy(self, owner: str) -> None:
        if not self._by_host.get(owner, True):
            del self._by_host[owner]
