"""Commands on keys: presence, expiry, iteration."""

import re
from collections.abc import Callable, Sequence

from shadowserve.pool.types import Address
from shadowserve.pool.volume.tickets import Ticket
from shadowserve.resp import encode, encode_array_header, encode_bulk
from storage_kv.commands._arguments import KEYS_AT_A_TIME, OK, as_integer, in_steps, quote, syntax_error, when_durable
from storage_kv.glob import Glob
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

_TIME_MS_MIN, _TIME_MS_MAX = -(1 << 63), (1 << 63) - 1
_CURSOR = re.compile(rb"(?:([+-]?)0*([0-9]{1,20}))?")
_PATTERN_BYTES_MAX = 1 << 10
_LISTING_BYTES_MAX = 16 << 20
"""Size limit of the reply to KEYS: about 200,000 keys of chunks. SCAN lists any number, a page at a time."""


class _Count:
    """Counts the keys of a command that pass a test, some keys in each step."""

    def __init__(
        self, node: Node, session: Session, names: Sequence[Argument], test: Callable[[Address], bool]
    ) -> None:
        self._node = node
        self._session = session
        self._names = names
        self._test = test
        self._position = 0
        self._count = 0

    def __call__(self) -> bytes | None:
        begin, self._position = self._position, self._position + KEYS_AT_A_TIME
        qualify, test = self._session.qualify, self._test
        self._count += sum(test(qualify(name)) for name in self._names[begin : self._position])
        return b":%d\r\n" % self._count if self._position >= len(self._names) else None


def exists(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXISTS key [key ...]: a repeated key counts repeatedly."""
    return in_steps(
        _Count(node, session, arguments[1:], lambda key: node.read(key, touch=False, lookup=True) is not None)
    )


def touch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TOUCH key [key ...]: as EXISTS, and counts as a use of each."""
    return in_steps(_Count(node, session, arguments[1:], lambda key: node.read(key, lookup=True) is not None))


def delete(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """DEL key [key ...], UNLINK likewise. Memory is freed when the last reply that uses it is sent.

    It waits also for absent keys, because a reply promises that they stay absent: another client's removal may not be
    durable yet, or the key was on a device that was given up, and the others have not logged that yet.
    """
    removed = _Count(node, session, arguments[1:], node.store.remove)
    tickets: list[Ticket] = []

    def step() -> Reply | None:
        reply = removed()
        # In each step: a later barrier may not report the failures of an earlier step.
        if (ticket := node.store.barrier()) is not None:
            tickets.append(ticket)
        return None if reply is None else when_durable(node, Ticket.of(*tickets) if tickets else None, "DEL", reply)

    return in_steps(step)


def expire(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXPIRE key seconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1000, node.clock_ms())


def pexpire(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PEXPIRE key milliseconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1, node.clock_ms())


def expireat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXPIREAT key unix-time-seconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1000, 0)


def pexpireat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PEXPIREAT key unix-time-milliseconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1, 0)


def _expire(node: Node, session: Session, arguments: list[Argument], unit_ms: int, from_ms: int) -> Reply:
    name = bytes(arguments[0]).decode("ascii").lower()
    allowed = _expire_condition(arguments[3:])
    number = as_integer(arguments[2])
    time_ms = number * unit_ms + from_ms
    if not _TIME_MS_MIN <= number * unit_ms <= _TIME_MS_MAX or time_ms > _TIME_MS_MAX:
        raise CommandError(f"ERR invalid expire time in '{name}' command")
    key = session.qualify(arguments[1])
    item = node.store.peek(key)
    if item is None or not allowed(item.expires_at_ms, time_ms) or not node.store.set_expiry(key, time_ms):
        return b":0\r\n"
    return when_durable(node, node.store.barrier(), name.upper(), b":1\r\n")


def _expire_condition(options: list[Argument]) -> Callable[[int | None, int], bool]:
    """Return the test of (present expiry, new expiry) for EXPIRE's options."""
    given = set()
    for option in options:
        name = bytes(option).upper()
        if name not in (b"NX", b"XX", b"GT", b"LT"):
            raise CommandError(f"ERR Unsupported option {quote(option)}")
        given.add(name)
    if b"NX" in given and len(given) > 1:
        raise CommandError("ERR NX and XX, GT or LT options at the same time are not compatible")
    if {b"GT", b"LT"} <= given:
        raise CommandError("ERR GT and LT options at the same time are not compatible")

    def allowed(present: int | None, new: int) -> bool:
        if b"NX" in given:
            return present is None
        if b"XX" in given and present is None:
            return False
        if b"GT" in given:
            return present is not None and new > present
        return b"LT" not in given or present is None or new < present

    return allowed


def _expiry_ms(node: Node, session: Session, key: Argument) -> int:
    """Return the Unix time in milliseconds at which a key expires; -1 without expiry, -2 if absent."""
    item = node.read(session.qualify(key), touch=False, lookup=True)
    if item is None:
        return -2
    return -1 if item.expires_at_ms is None else item.expires_at_ms


def _remaining_ms(node: Node, session: Session, key: Argument) -> int:
    """Return the remaining milliseconds of a key; -1 without expiry, -2 if absent."""
    time_ms = _expiry_ms(node, session, key)
    return time_ms if time_ms < 0 else max(time_ms - node.clock_ms(), 0)


def ttl(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TTL key: seconds, rounded."""
    remaining = _remaining_ms(node, session, arguments[1])
    return b":%d\r\n" % (remaining if remaining < 0 else (remaining + 500) // 1000)


def pttl(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PTTL key: milliseconds."""
    return b":%d\r\n" % _remaining_ms(node, session, arguments[1])


def expiretime(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXPIRETIME key: Unix time in seconds, rounded; -1 without expiry, -2 if absent."""
    time_ms = _expiry_ms(node, session, arguments[1])
    return b":%d\r\n" % (time_ms if time_ms < 0 else (time_ms + 500) // 1000)


def pexpiretime(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PEXPIRETIME key: Unix time in milliseconds; -1 without expiry, -2 if absent."""
    return b":%d\r\n" % _expiry_ms(node, session, arguments[1])


def persist(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PERSIST key."""
    key = session.qualify(arguments[1])
    item = node.store.peek(key)
    if item is None or item.expires_at_ms is None:
        return b":0\r\n"
    node.store.set_expiry(key, None)
    return when_durable(node, node.store.barrier(), "PERSIST", b":1\r\n")


def type_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TYPE key: every value is a string."""
    return (
        b"+none\r\n" if node.read(session.qualify(arguments[1]), touch=False, lookup=True) is None else b"+string\r\n"
    )


def scan(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SCAN cursor [MATCH pattern] [COUNT count] [TYPE type]."""
    cursor = _cursor(bytes(arguments[1]))
    pattern: Glob | None = None
    count, of_type = 10, b"string"
    options = arguments[2:]
    for position in range(0, len(options), 2):
        name = bytes(options[position]).upper()
        if position + 1 >= len(options) or name not in (b"MATCH", b"COUNT", b"TYPE"):
            syntax_error()
        argument = bytes(options[position + 1])
        if name == b"MATCH":
            pattern = None if argument == b"*" else _glob(argument)
        elif name == b"TYPE":
            of_type = argument.lower()
        else:
            count = as_integer(argument)
            if count < 1:
                syntax_error()
    cursor, names = node.store.scan(session.tenant, cursor, min(count, KEYS_AT_A_TIME))
    if of_type != b"string":
        names = []
    found = [name for name in names if pattern is None or pattern.matches(name)]
    return encode([b"%d" % cursor, list(found)])


def _glob(pattern: Argument) -> Glob:
    """Compile a pattern of limited size."""
    if len(pattern) > _PATTERN_BYTES_MAX:
        raise CommandError(f"ERR pattern is too long: {len(pattern)} bytes, at most {_PATTERN_BYTES_MAX} are allowed")
    return Glob(bytes(pattern))


def _cursor(text: bytes) -> int:
    """Parse a cursor as Redis' strtoul() does: it may be empty or negative, modulo 64 bits."""
    match = _CURSOR.fullmatch(text.partition(b"\0")[0])
    number = 0 if match is None else int(match[2] or 0)
    if match is None or number >= 1 << 64:
        raise CommandError("ERR invalid cursor")
    return (-number if match[1] == b"-" else number) % (1 << 64)


def keys(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KEYS pattern: each matching key once, found in steps."""
    return in_steps(_Listing(node, session, bytes(arguments[1])))


def _all(name: bytes) -> bool:
    return True


class _Listing:
    """Lists the keys of a tenant that match a pattern."""

    def __init__(self, node: Node, session: Session, pattern: bytes) -> None:
        self._node = node
        self._tenant = session.tenant
        self._matches: Callable[[bytes], bool] = _all if pattern == b"*" else _glob(pattern).matches
        self._cursor = 0
        self._found: set[bytes] = set()
        self._parts: list[bytes] = []
        self._bytes = 0

    def __call__(self) -> Reply | None:
        matches, seen = self._matches, self._found
        self._cursor, names = self._node.store.scan(self._tenant, self._cursor, KEYS_AT_A_TIME)
        fresh = [name for name in dict.fromkeys(names) if name not in seen and matches(name)]
        seen.update(fresh)
        self._parts.append(b"".join(map(encode_bulk, fresh)))
        self._bytes += len(self._parts[-1])
        if self._bytes > _LISTING_BYTES_MAX:
            raise CommandError(
                f"ERR KEYS matches more than {_LISTING_BYTES_MAX >> 20} MiB of keys: use SCAN or a narrower pattern"
            )
        return None if self._cursor else [encode_array_header(len(seen)), *self._parts]


def dbsize(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """DBSIZE."""
    return b":%d\r\n" % node.store.count(session.tenant)


def flush(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """FLUSHDB and FLUSHALL [ASYNC | SYNC]: the tenant's keys; FLUSHALL of an operator, the keys of all."""
    if len(arguments) > 2 or (len(arguments) == 2 and bytes(arguments[1]).upper() not in (b"ASYNC", b"SYNC")):
        syntax_error()
    everything = bytes(arguments[0]).upper() == b"FLUSHALL" and session.user.is_operator
    node.store.clear(None if everything else session.tenant)
    return when_durable(node, node.store.barrier(), "FLUSHALL", OK)
