"""Announcements: which keys clients are about to store, so that others may wait for them instead of computing.

An announcement is a hint. It ends with its time, with the connection that made it, and when the key is there; nothing
is kept of it on any device. All of it happens with the node's lock held.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address

__all__ = ["NAME_BYTES_MAX", "SECONDS_MAX", "Announcements", "TooManyAnnouncedError"]

SECONDS_MAX: Final = 60
"""For which a key may be announced at a time: far above what computing a prompt takes."""
NAME_BYTES_MAX: Final = 128
"""Of a key that is announced; a chunk's has 67."""
_KEYS_MAX: Final = 65_536
"""Of all clients together: some 20 MiB. One tenant of several has half of it."""
_KEYS_OF_CLIENT_MAX: Final = 16_384
"""Of one connection; 256 prompts of 4K tokens, stored by 4 ranks."""


class TooManyAnnouncedError(ShadowServeError):
    """There is no room for as many announcements; the message says whose."""


@dataclass(eq=False, slots=True)
class _Client:
    keys: dict[Address, None] = field(default_factory=dict)  # those announced last at the end
    gone: bool = False


class Announcements:
    """Who is about to store what, and until when.

    Args:
        has_tenants: whether there is more than one tenant.
    """

    def __init__(self, has_tenants: Callable[[], bool]) -> None:
        self._has_tenants = has_tenants
        self._by_key: dict[Address, dict[_Client, int]] = {}  # until, in milliseconds
        self._clients: dict[int, _Client] = {}
        self._gone: deque[_Client] = deque()
        self._by_tenant: Counter[int] = Counter()

    def announce(self, client: int, keys: Sequence[Address], now_ms: int, until_ms: int) -> None:
        """Take note that a client is about to store keys, a few and all of one tenant.

        Raises:
            TooManyAnnouncedError: it, its tenant or all together would have announced too many; none is noted.
        """
        self._tidy(now_ms)
        mine = self._clients.get(client) or _Client()
        tenant = keys[0][0] if keys else 0
        new = sum(key not in mine.keys for key in keys)
        for whose, held, most in (
            ("this connection", len(mine.keys), _KEYS_OF_CLIENT_MAX),
            ("all clients", self._by_tenant.total(), _KEYS_MAX),
            ("this tenant", self._by_tenant[tenant], _KEYS_MAX // 2 if self._has_tenants() else _KEYS_MAX),
        ):
            if held + new > most:
                raise TooManyAnnouncedError(f"{whose} may announce {most} keys, and has announced {held}")
        self._clients[client] = mine
        for key in keys:
            self._by_tenant[tenant] += key not in mine.keys
            mine.keys.pop(key, None)  # to the end
            mine.keys[key] = None
            self._by_key.setdefault(key, {})[mine] = until_ms

    def withdraw(self, client: int, keys: Iterable[Address]) -> int:
        """Forget that a client has announced keys; return how many of them it had."""
        mine = self._clients.get(client)
        gone = [] if mine is None else [key for key in keys if key in mine.keys]
        for key in gone:
            assert mine is not None
            self._drop(mine, key)
        return len(gone)

    def leave(self, client: int) -> None:
        """Withdraw all that a client has announced; at no cost now, however much it is."""
        if (mine := self._clients.pop(client, None)) is not None:
            mine.gone = True
            self._gone.append(mine)

    def until_ms(self, key: Address, now_ms: int) -> int:
        """Return until when a key is announced, 0 where it is not (any more)."""
        clients = self._by_key.get(key, {})
        latest = max((until for client, until in clients.items() if not client.gone), default=0)
        return latest if latest > now_ms else 0

    def settle(self, key: Address) -> None:
        """Forget a key, whoever has announced it."""
        for client in list(self._by_key.get(key, ())):
            self._drop(client, key)

    def _tidy(self, now_ms: int) -> None:
        """Forget some of what is over, and more than one step of a command brings."""
        left = 2 * ENTRIES_PER_HOLD
        while self._gone and left:
            if self._gone[0].keys:
                self._drop(self._gone[0], next(iter(self._gone[0].keys)))
                left -= 1
            else:
                self._gone.popleft()
        for number, client in list(self._clients.items()):
            while left and client.keys and self._by_key[key := next(iter(client.keys))][client] <= now_ms:
                self._drop(client, key)
                left -= 1
            if not client.keys:
                del self._clients[number]

    def _drop(self, client: _Client, key: Address) -> None:
        del client.keys[key]
        self._by_tenant[key[0]] -= 1
        clients = self._by_key[key]
        del clients[client]
        if not clients:
            del self._by_key[key]
