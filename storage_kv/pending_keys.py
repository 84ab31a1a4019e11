"""PendingKeys: which keys clients are about to store, so that others may wait for them instead of computing.

A publication is a hint. It ends with its time, with the connection that made it, and when the key is there. All of it
happens with the node's lock held, and the work for a key is the same however many clients publish it: of each key those
few are noted that last longest.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.pool.types import ENTRIES_PER_HOLD, Address

SECONDS_MAX: Final = 60
"""Longest time that a key may be pending: far above the time to compute a prompt."""
NAME_BYTES_MAX: Final = 128
"""Size limit of a pending key's name; a chunk's has 67."""
_KEYS_MAX: Final = 65_536  # limit of all clients together: about 40 MiB
_TENANT_SHARE: Final = 2  # one of several tenants may have half
_RESERVED_SHARE: Final = 8  # the last eighth is for tenants that have no more than their part of it
_KEYS_OF_CLIENT_MAX: Final = 16_384  # limit of one connection: 256 prompts of 4K tokens, stored by 4 ranks
_CLIENTS_OF_KEY_MAX: Final = 8
"""Limit of the clients that are kept for one key. The ranks of an engine have keys of their own."""
_CLIENTS_TIDIED: Final = 16  # number of clients whose expired keys are removed in each step of a command


class TooManyPendingError(ShadowServeError):
    """Too many keys would be pending; the message says whose limit."""


@dataclass(slots=True, eq=False)
class _Client:
    """The pending keys of one connection, the latest last; ``id`` is its session's. ``gone``: it has ended."""

    id: int
    keys: OrderedDict[Address, None] = field(default_factory=OrderedDict)
    gone: bool = False


class PendingKeys:
    """The pending keys of all clients; ``tenants`` returns the number of tenants that share the limit."""

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._by_key: dict[Address, dict[_Client, int]] = {}  # expiry in milliseconds
        self._clients: dict[int, _Client] = {}
        self._turn: deque[_Client] = deque()  # clients with keys, the next to tidy first
        self._by_tenant: Counter[int] = Counter()
        self._count = 0

    def add(self, client: int, keys: Sequence[Address], now_ms: int, until_ms: int) -> None:
        """Mark a few keys of one tenant as pending. A TooManyPendingError has changed nothing."""
        self._tidy(now_ms)
        if not keys:
            return
        mine = self._clients.get(client)
        tenant = keys[0][0]
        new = len(keys) if mine is None else sum(key not in mine.keys for key in keys)
        self._check(0 if mine is None else len(mine.keys), tenant, new)
        if mine is None:
            mine = self._clients[client] = _Client(client)
            self._turn.append(mine)
        for key in keys:
            self._add_one(mine, key, until_ms)

    def _check(self, held: int, tenant: int, new: int) -> None:
        tenants, of_tenant, of_all = self._tenants(), self._by_tenant[tenant], self._count
        several = tenants > 1
        reserved = _KEYS_MAX // _RESERVED_SHARE if several else 0
        is_modest = of_tenant + new <= reserved // tenants
        for whose, has, most in (
            ("this connection", held, _KEYS_OF_CLIENT_MAX),
            ("the server", of_all, _KEYS_MAX if is_modest else _KEYS_MAX - reserved),
            ("this tenant", of_tenant, _KEYS_MAX // _TENANT_SHARE if several else _KEYS_MAX),
        ):
            if has + new > most:
                raise TooManyPendingError(f"{whose} may have {most} pending keys and has {has}")

    def _add_one(self, mine: _Client, key: Address, until_ms: int) -> None:
        clients = self._by_key.setdefault(key, {})
        if mine not in clients and len(clients) >= _CLIENTS_OF_KEY_MAX:
            first = min(clients, key=lambda each: -1 if each.gone else clients[each])
            if not first.gone and clients[first] >= until_ms:
                return  # those that are kept last longer
            self._drop(first, key)
            clients = self._by_key.setdefault(key, {})
        if mine not in clients:
            self._by_tenant[key[0]] += 1
            self._count += 1
        clients[mine] = until_ms
        mine.keys[key] = None
        mine.keys.move_to_end(key)

    def withdraw(self, client: int, keys: Iterable[Address]) -> int:
        mine = self._clients.get(client)
        gone = [] if mine is None else [key for key in keys if key in mine.keys]
        for key in gone:
            assert mine is not None
            self._drop(mine, key)
        return len(gone)

    def leave(self, client: int) -> None:
        """End all pending keys of a client. Marks them only, so the cost does not depend on their number."""
        if (mine := self._clients.pop(client, None)) is not None:
            mine.gone = True

    def until_ms(self, key: Address, now_ms: int) -> int:
        """Return until when a key is pending; 0 if it is not."""
        clients = self._by_key.get(key, {})
        latest = max((until for client, until in clients.items() if not client.gone), default=0)
        return latest if latest > now_ms else 0

    def discard(self, key: Address) -> None:
        for client in list(self._by_key.get(key, ())):
            self._drop(client, key)

    def _tidy(self, now_ms: int) -> None:
        """Remove some expired keys: more than one step of a command can add."""
        left = 2 * ENTRIES_PER_HOLD
        for _ in range(min(_CLIENTS_TIDIED, len(self._turn))):
            client = self._turn[0]
            while left and client.keys:
                key = next(iter(client.keys))
                if not client.gone and self._by_key[key][client] > now_ms:
                    break
                self._drop(client, key)
                left -= 1
            if not left:
                return
            self._turn.popleft()
            if client.keys:
                self._turn.append(client)
            elif not client.gone:
                del self._clients[client.id]

    def _drop(self, client: _Client, key: Address) -> None:
        del client.keys[key]
        self._count -= 1
        self._by_tenant[key[0]] -= 1
        if not self._by_tenant[key[0]]:
            del self._by_tenant[key[0]]
        clients = self._by_key[key]
        del clients[client]
        if not clients:
            del self._by_key[key]
