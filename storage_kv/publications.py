"""Publications: which keys clients are about to store, so that others may wait for them instead of computing.

A publication is a hint. It ends with its time, with the connection that made it, and when the key is there; nothing
is kept of it on any device. All of it happens with the node's lock held, and the work for a key is the same however
many clients publish it: of each key those few are noted that last longest.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.pool.terms import ENTRIES_PER_HOLD, Address

SECONDS_MAX: Final = 60
"""For which a key may be published at a time: far above what computing a prompt takes."""
NAME_BYTES_MAX: Final = 128
"""Of a key that is published; a chunk's has 67."""
_KEYS_MAX: Final = 65_536
"""Of all clients together: some 40 MiB."""
_TENANT_SHARE: Final = 2
"""One tenant of several has half of it."""
_RESERVED_SHARE: Final = 8
"""The last eighth is for tenants that have published no more than their part of it."""
_KEYS_OF_CLIENT_MAX: Final = 16_384
"""Of one connection; 256 prompts of 4K tokens, stored by 4 ranks."""
_CLIENTS_OF_KEY_MAX: Final = 8
"""That are noted of one key: those whose publications last longest. The ranks of an engine have keys of their own."""
_CLIENTS_TIDIED: Final = 16
"""Looked at with each step of a command, in turn."""


class TooManyPublishedError(ShadowServeError):
    """There is no room for as many publications; the message says whose."""


class _Client:
    """What one connection has published.

    Attributes:
        number: of the connection.
        keys: those published last at the end.
        gone: the connection has ended.
    """

    __slots__ = ("gone", "keys", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.keys: OrderedDict[Address, None] = OrderedDict()
        self.gone = False


class Publications:
    """Who is about to store what, and until when.

    Args:
        tenants: how many tenants share the room; 1 where there is only one.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._by_key: dict[Address, dict[_Client, int]] = {}  # until, in milliseconds
        self._clients: dict[int, _Client] = {}
        self._turn: deque[_Client] = deque()  # all that may have keys; the one that is looked at next is first
        self._by_tenant: Counter[int] = Counter()
        self._count = 0

    def publish(self, client: int, keys: Sequence[Address], now_ms: int, until_ms: int) -> None:
        """Take note that a client is about to store keys, a few and all of one tenant.

        Raises:
            TooManyPublishedError: it, its tenant or all together would have published too many; none is noted.
        """
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
            self._note(mine, key, until_ms)

    def _check(self, held: int, tenant: int, new: int) -> None:
        tenants, of_tenant, of_all = self._tenants(), self._by_tenant[tenant], self._count
        several = tenants > 1
        reserved = _KEYS_MAX // _RESERVED_SHARE if several else 0
        is_modest = of_tenant + new <= reserved // tenants
        for whose, has, most in (
            ("this connection", held, _KEYS_OF_CLIENT_MAX),
            ("all clients", of_all, _KEYS_MAX if is_modest else _KEYS_MAX - reserved),
            ("this tenant", of_tenant, _KEYS_MAX // _TENANT_SHARE if several else _KEYS_MAX),
        ):
            if has + new > most:
                raise TooManyPublishedError(f"{whose} may publish {most} keys, and has published {has}")

    def _note(self, mine: _Client, key: Address, until_ms: int) -> None:
        clients = self._by_key.setdefault(key, {})
        if mine not in clients and len(clients) >= _CLIENTS_OF_KEY_MAX:
            first = min(clients, key=lambda each: -1 if each.gone else clients[each])
            if not first.gone and clients[first] >= until_ms:
                return  # it is published for longer by as many as are noted
            self._drop(first, key)
            clients = self._by_key.setdefault(key, {})
        if mine not in clients:
            self._by_tenant[key[0]] += 1
            self._count += 1
        clients[mine] = until_ms
        mine.keys[key] = None
        mine.keys.move_to_end(key)

    def withdraw(self, client: int, keys: Iterable[Address]) -> int:
        """Forget that a client has published keys; return how many of them it had."""
        mine = self._clients.get(client)
        gone = [] if mine is None else [key for key in keys if key in mine.keys]
        for key in gone:
            assert mine is not None
            self._drop(mine, key)
        return len(gone)

    def leave(self, client: int) -> None:
        """Withdraw all that a client has published; at no cost now, however much it is."""
        if (mine := self._clients.pop(client, None)) is not None:
            mine.gone = True

    def until_ms(self, key: Address, now_ms: int) -> int:
        """Return until when a key is published, 0 where it is not (any more)."""
        clients = self._by_key.get(key, {})
        latest = max((until for client, until in clients.items() if not client.gone), default=0)
        return latest if latest > now_ms else 0

    def settle(self, key: Address) -> None:
        """Forget a key, whoever has published it."""
        for client in list(self._by_key.get(key, ())):
            self._drop(client, key)

    def _tidy(self, now_ms: int) -> None:
        """Forget some of what is over, and more than one step of a command brings."""
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
                del self._clients[client.number]

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
