"""Commands on keys: presence, expiry, iteration."""

import re
from collections.abc import Callable, Sequence

from shadowserve.pool.volume.tickets import Ticket, joined
from shadowserve.resp import encode, encode_array_header, encode_bulk
from storage_kv.commands._arguments import (
    KEYS_AT_A_TIME,
    OK,
    as_integer,
    count_in_steps,
    in_steps,
    quote,
    syntax_error,
    when_durable,
)
from storage_kv.glob import Glob
from storage_kv.node import Node
from storage_kv.reply import CommandError, Reply
from storage_kv.session import Argument, Session

_TIME_MS_MIN, _TIME_MS_MAX = -(1 << 63), (1 << 63) - 1
_CURSOR = re.compile(rb"(?:([+-]?)0*([0-9]{1,20}))?")
_PATTERN_BYTES_MAX = 1 << 10
_LISTING_BYTES_MAX = 16 << 20
"""Size limit of the reply to KEYS: about 200,000 keys of chunks. SCAN lists any number, a page at a time."""


def exists(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    def count(names: Sequence[Argument], _: int) -> int:
        return sum(node.read(session.qualify(name), touch=False, lookup=True) is not None for name in names)

    return count_in_steps(arguments[1:], count)


def touch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    def count(names: Sequence[Argument], _: int) -> int:
        return sum(node.read(session.qualify(name), lookup=True) is not None for name in names)

    return count_in_steps(arguments[1:], count)


def delete(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """DEL and UNLINK. Memory is freed when the last reply that uses it is sent.

    They wait also for absent keys, because a reply promises that they stay absent: another client's removal may not be
    durable yet, or the key was on a device that was given up, and the others have not logged that yet.
    """
    tickets: list[Ticket | None] = []

    def remove(names: Sequence[Argument], _: int) -> int:
        count = sum(node.store.remove(session.qualify(name)) for name in names)
        # In each step: a later barrier may not report the failures of an earlier step.
        tickets.append(node.store.barrier())
        return count

    def finish(count: int) -> Reply:
        return when_durable(node, joined(tickets), "DEL", b":%d\r\n" % count)

    return count_in_steps(arguments[1:], remove, finish)


def expire(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXPIRE, PEXPIRE, EXPIREAT and PEXPIREAT."""
    name = bytes(arguments[0]).decode("ascii").lower()
    unit_ms, from_ms = 1 if name[0] == "p" else 1000, 0 if name.endswith("at") else node.clock_ms()
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


def expiry(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TTL, PTTL, EXPIRETIME and PEXPIRETIME: -1 without expiry, -2 if absent; seconds are rounded."""
    name = bytes(arguments[0]).lower()
    item = node.read(session.qualify(arguments[1]), touch=False, lookup=True)
    if item is None or item.expires_at_ms is None:
        return b":-2\r\n" if item is None else b":-1\r\n"
    time_ms = item.expires_at_ms if name.endswith(b"time") else max(item.expires_at_ms - node.clock_ms(), 0)
    return b":%d\r\n" % (time_ms if name.startswith(b"p") else (time_ms + 500) // 1000)


def persist(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    key = session.qualify(arguments[1])
    item = node.store.peek(key)
    if item is None or item.expires_at_ms is None:
        return b":0\r\n"
    node.store.set_expiry(key, None)
    return when_durable(node, node.store.barrier(), "PERSIST", b":1\r\n")


def type_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    item = node.read(session.qualify(arguments[1]), touch=False, lookup=True)
    return b"+none\r\n" if item is None else b"+string\r\n"


def scan(node: Node, session: Session, arguments: list[Argument]) -> Reply:
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
    """KEYS pattern: each matching key once, even if the store's scan returns it twice."""
    pattern = None if arguments[1] == b"*" else _glob(arguments[1])
    seen: set[bytes] = set()
    parts: list[bytes] = []
    cursor = size = 0

    def step() -> Reply | None:
        nonlocal cursor, size
        cursor, names = node.store.scan(session.tenant, cursor, KEYS_AT_A_TIME)
        unseen = (name for name in dict.fromkeys(names) if name not in seen)
        found = [name for name in unseen if pattern is None or pattern.matches(name)]
        seen.update(found)
        parts.append(b"".join(map(encode_bulk, found)))
        size += len(parts[-1])
        if size > _LISTING_BYTES_MAX:
            raise CommandError(
                f"ERR KEYS matches more than {_LISTING_BYTES_MAX >> 20} MiB of keys: use SCAN or a narrower pattern"
            )
        return None if cursor else [encode_array_header(len(seen)), *parts]

    return in_steps(step)


def dbsize(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    return b":%d\r\n" % node.store.count(session.tenant)


def flush(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """FLUSHDB and FLUSHALL [ASYNC | SYNC]: the tenant's keys; FLUSHALL of an operator, the keys of all."""
    if len(arguments) > 2 or (len(arguments) == 2 and bytes(arguments[1]).upper() not in (b"ASYNC", b"SYNC")):
        syntax_error()
    everything = bytes(arguments[0]).upper() == b"FLUSHALL" and session.user.is_operator
    node.store.clear(None if everything else session.tenant)
    return when_durable(node, node.store.barrier(), "FLUSHALL", OK)
