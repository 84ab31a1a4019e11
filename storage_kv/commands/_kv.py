"""Our own commands; their names begin with ``KV.``."""

from math import inf
from typing import Final

from shadowserve.pool.terms import DEFAULT_TENANT, Address, Item, PinShareError
from shadowserve.resp import Map, Value, encode, encode_array_header, encode_null
from storage_kv.commands._arguments import KEYS_AT_A_TIME, as_integer, bulk_of, in_turns, settled, syntax_error
from storage_kv.layers import KEYS_MAX, LAYERS_MAX
from storage_kv.node import CommandError, More, Node, Part, Reply
from storage_kv.publications import NAME_BYTES_MAX, SECONDS_MAX, TooManyPublishedError
from storage_kv.session import Argument, Session

_LAYERS_TEXT_BYTES_MAX: Final = 16 << 10
_LAYER_MAX: Final = 65_535
_BITS_PER_S_MAX: Final = 1 << 50
_WINDOW_US_MAX: Final = 3_600 * 10**6


def meta(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.META key [key ...]: of each record its length and its head; nil where there is none.

    Of a record in the bucket alone, in place of its head, after how many milliseconds it is expected here: at least 1,
    and as if it and those before it were asked for now. One round trip tells a reader everything about a whole prefix
    that it needs before it fetches bodies, and the bucket is asked for nothing. Counts as a use of each record found.
    """
    null = encode_null(session.protocol)
    node.counters.meta_keys += len(arguments) - 1
    cold_bytes = 0

    def head(item: Item | None) -> bytes | list[Part]:
        nonlocal cold_bytes
        if item is None or not item.head_bytes:
            return null
        if item.is_cold:
            cold_bytes += item.length
            expected_ms = max(1, round(1e3 * (node.store.expected_s(cold_bytes) or 0)))
            return b"*2\r\n:%d\r\n:%d\r\n" % (item.length, expected_ms)
        return bulk_of(node, item, 0, item.head_bytes, missing=null, head=b"*2\r\n:%d\r\n" % item.length)

    items = (node.read(session.qualify(key), lookup=True) for key in arguments[1:])
    return More.of([encode_array_header(len(arguments) - 1)], items, head)


def prefetch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PREFETCH key [key ...]: begins to bring records from the bucket; returns how many of them are on their way.

    In their order, and no more than the bucket brings in a second or so: a client that wants the rest asks again. Waits
    for nothing.
    """
    names, position, count = arguments[1:], 0, 0

    def step() -> Reply | None:
        nonlocal position, count
        for name in names[position : position + KEYS_AT_A_TIME]:
            address = session.qualify(name)
            item = node.store.peek(address)
            if item is not None and item.is_cold:
                if not node.prefetches.begin(address, item):
                    return b":%d\r\n" % count
                count += 1
        position += KEYS_AT_A_TIME
        return b":%d\r\n" % count if position >= len(names) else None

    return in_turns(step)


def layers(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.LAYERS layers rate window key [key ...]: parts of all records of a prefix, layer after layer.

    ``layers`` are numbers and ranges with commas between, in the order in which they are wanted: ``0-31``, or
    ``5,0-4``. ``rate`` is how many bits a second are wanted at most, 0 for no limit, and no less than
    ``layers_bits_per_s_min``; ``window`` for how many microseconds the client computes with each layer, 0 if not known.

    Answers an array. First an array with, for each key, how many bytes of its record follow in all, nil where there is
    none. Then a bulk for each layer: of each key the length of its piece, 32 bits with the lowest byte first, 0 where
    there is none, and behind these the pieces, in the order of the keys.
    """
    if node.streams is None:
        raise CommandError("ERR the server is starting or stopping: try again")
    wanted = _layer_numbers(arguments[1])
    rate, window_us = as_integer(arguments[2]), as_integer(arguments[3])
    if not 0 <= rate <= _BITS_PER_S_MAX or not 0 <= window_us <= _WINDOW_US_MAX:
        raise CommandError("ERR invalid rate or window in 'kv.layers' command: bits a second, microseconds")
    least = node.config.layers_bits_per_s_min
    if rate and rate < least:
        raise CommandError(
            f"ERR a rate of {rate} bits a second is too low in 'kv.layers' command: at least {least:.0f} "
            "(layers_bits_per_s_min), or 0 for no limit"
        )
    if len(arguments) - 4 > KEYS_MAX:
        raise CommandError(f"ERR KV.LAYERS takes at most {KEYS_MAX} keys, got {len(arguments) - 4}")
    names = [bytes(name) for name in arguments[4:]]
    return node.streams.begin(session, names, wanted, rate or inf, window_us / 1e6)


def _layer_numbers(argument: Argument) -> list[int]:
    """Return the numbers of layers that a text names, in its order, each at most once."""
    error = CommandError(
        f"ERR invalid layers in 'kv.layers' command: numbers and ranges such as 0-31 or 5,0-4, each layer once, "
        f"at most {LAYERS_MAX} of them"
    )
    found: list[int] = []
    text = bytes(argument[: _LAYERS_TEXT_BYTES_MAX + 1])
    if len(text) > _LAYERS_TEXT_BYTES_MAX:
        raise error
    for part in text.split(b","):
        first, is_range, last = part.partition(b"-")
        if not first.isdigit() or not (last.isdigit() if is_range else True) or len(part) > 11:
            raise error
        begin, end = int(first), int(last if is_range else first)
        if not begin <= end <= _LAYER_MAX or len(found) + end - begin >= LAYERS_MAX:
            raise error
        found += range(begin, end + 1)
    if len(set(found)) < len(found):
        raise error
    return found


def publish(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PUBLISH milliseconds key [key ...]: says that they will be stored over this or another connection; 0 ends it.

    Answers how many of them are published now, or were till now. A key that is there needs no publication and gets
    none. At the first keys for which there is no room the rest is left as it is, and the reply is an error.
    """
    lasts_ms = as_integer(arguments[1])
    if not 0 <= lasts_ms <= 1000 * SECONDS_MAX:
        raise CommandError(f"ERR invalid time in 'kv.publish' command: 0 to {1000 * SECONDS_MAX} milliseconds")
    if any(len(name) > NAME_BYTES_MAX for name in arguments[2:]):
        raise CommandError(f"ERR a key that is published has at most {NAME_BYTES_MAX} bytes")
    names, position, count = arguments[2:], 0, 0

    def step() -> Reply | None:
        nonlocal position, count
        keys = [session.qualify(name) for name in names[position : position + KEYS_AT_A_TIME]]
        if not lasts_ms:
            count += node.publications.withdraw(session.id, keys)
        else:
            keys = [key for key in keys if node.store.peek(key) is None]
            now_ms = node.clock_ms()
            try:
                node.publications.publish(session.id, keys, now_ms, now_ms + lasts_ms)
            except TooManyPublishedError as error:
                raise CommandError(f"OOM {error}. Of this command's keys {count} are published") from None
            count += len(keys)
        position += KEYS_AT_A_TIME
        return b":%d\r\n" % count if position >= len(names) else None

    return in_turns(step)


def published(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PUBLISHED key [key ...]: for how many milliseconds more each is published; 0 where it is not, or is there."""
    now_ms = node.clock_ms()

    def left(key: Address) -> bytes:
        until_ms = node.publications.until_ms(key, now_ms)
        if until_ms and node.store.peek(key) is not None:
            node.publications.settle(key)
            until_ms = 0
        return b":%d\r\n" % max(0, until_ms - now_ms)

    return More.of([encode_array_header(len(arguments) - 1)], map(session.qualify, arguments[1:]), left)


def pin(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PIN seconds key [key ...]: how many of them are there, and will not be evicted for so long; 0 unpins.

    Pins count against shares. At the first key beyond one the rest is left as it is, and the reply is an error.
    """
    seconds, seconds_max = as_integer(arguments[1]), node.config.pin_max_s
    if not 0 <= seconds <= seconds_max:
        raise CommandError(f"ERR invalid pin time in 'kv.pin' command: 0 to {seconds_max} seconds (pin_max_s)")
    return in_turns(_Pinning(node, session, arguments[2:], seconds))


class _Pinning:
    """The keys of one KV.PIN."""

    def __init__(self, node: Node, session: Session, names: list[Argument], seconds: int) -> None:
        self._node = node
        self._session = session
        self._names = names
        self._until_ms = node.clock_ms() + 1000 * seconds if seconds else 0
        self._position = 0
        self._found = 0

    def __call__(self) -> Reply | None:
        store, end = self._node.store, self._position + KEYS_AT_A_TIME
        for name in self._names[self._position : end]:
            try:
                self._found += store.pin(self._session.qualify(name), self._until_ms)
            except PinShareError as error:
                raise CommandError(f"OOM {error}. Of this command's keys {self._found} are pinned") from None
        self._position = end
        if end < len(self._names):
            return None
        return settled(self._node, store.barrier() if self._found else None, "KV.PIN", b":%d\r\n" % self._found)


def unpin(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.UNPIN [TENANT name | ALL]: ends all pins of the own tenant, or of others; returns how many these were."""
    tenant: int | None = session.tenant
    if len(arguments) > 1:
        tenant = _other_tenant(node, session, arguments)
        node.audit.write("command", session, outcome="allowed", each=True, command="kv.unpin")
    count = 0

    def step() -> Reply | None:
        nonlocal count
        some = node.store.unpin_some(tenant)
        count += some
        if some:
            return None
        return settled(node, node.store.barrier() if count else None, "KV.UNPIN", b":%d\r\n" % count)

    return in_turns(step)


def pins(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PINS [TENANT name]: keys and bytes that the own tenant has pinned, and may; to operators, of each tenant."""
    store = node.store
    tenants = [session.tenant]
    if len(arguments) > 1:
        other = _other_tenant(node, session, arguments)
        tenants = [other] if other is not None else store.pinning_tenants(KEYS_AT_A_TIME)
    elif session.user.is_operator:
        tenants = store.pinning_tenants(KEYS_AT_A_TIME)
    names = {number: name for name, number in store.tenants().items()}
    found: list[Value] = []
    for tenant in tenants:
        pinned = store.pinned(tenant)
        fields: list[Value] = [b"tenant", names[tenant].encode(), b"keys", pinned.keys]
        found.append(Map([*fields, b"bytes", pinned.bytes, b"bytes_max", pinned.bytes_max]))
    return encode(found, session.protocol)


def _other_tenant(node: Node, session: Session, arguments: list[Argument]) -> int | None:
    """Return the tenant that ``TENANT name`` names, or None for ``ALL``; only operators may."""
    words = [bytes(argument) for argument in arguments[1:]]
    if not (len(words) == 1 and words[0].upper() == b"ALL") and not (len(words) == 2 and words[0].upper() == b"TENANT"):
        syntax_error()
    if not session.user.is_operator:
        raise CommandError("NOPERM pins of other tenants are for users with the category @admin")
    if len(words) == 1:
        return None
    name = words[1].decode("utf-8", "replace")
    if name and name not in node.config.tenants and all(name != user.tenant for user in node.users.by_name.values()):
        raise CommandError("ERR there is no such tenant")
    return node.store.tenant(name) if name else DEFAULT_TENANT
