"""Commands on keys: presence, expiry, iteration."""

from collections.abc import Callable

from shadowserve.resp import encode
from storage_kv.commands._arguments import OK, as_integer, quote, settled, syntax_error
from storage_kv.glob import Glob
from storage_kv.node import Argument, CommandError, Node, Reply, Session

__all__ = ["dbsize", "delete", "exists", "expire", "flush", "persist", "pexpire", "pttl", "scan", "ttl", "type_"]

_TIME_MS_MAX = (1 << 63) - 1
_SCAN_COUNT_MAX = 100_000  # keys looked at in one call, so that no COUNT can hold up the others


def exists(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXISTS key [key ...]: how many of them are there, repeated ones counted repeatedly."""
    return b":%d\r\n" % sum(node.read(session.qualify(key), touch=False) is not None for key in arguments[1:])


def delete(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """DEL key [key ...], UNLINK likewise: memory is freed by the last reply that uses it.

    That a key is absent is a promise, too: another's removal of it may not be durable yet, or it may lie on a device
    that is gone, while those that are left have not noted that.
    """
    removed = sum(node.engine.remove(session.qualify(key)) for key in arguments[1:])
    return settled(node, node.engine.barrier(), "DEL", b":%d\r\n" % removed)


def expire(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """EXPIRE key seconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1000, "expire")


def pexpire(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PEXPIRE key milliseconds [NX | XX | GT | LT]."""
    return _expire(node, session, arguments, 1, "pexpire")


def _expire(node: Node, session: Session, arguments: list[Argument], unit_ms: int, name: str) -> Reply:
    allowed = _expire_condition(arguments[3:])
    number = as_integer(arguments[2])
    time_ms = number * unit_ms + node.clock_ms()
    if abs(number) * unit_ms > _TIME_MS_MAX or time_ms > _TIME_MS_MAX:
        raise CommandError(f"ERR invalid expire time in '{name}' command")
    key = session.qualify(arguments[1])
    item = node.engine.peek(key)
    if item is None or not allowed(item.expires_at_ms, time_ms) or not node.engine.set_expiry(key, time_ms):
        return b":0\r\n"
    return settled(node, node.engine.barrier(), name.upper(), b":1\r\n")


def _expire_condition(options: list[Argument]) -> Callable[[int | None, int], bool]:
    """Return the test of (present expiry, new expiry) that EXPIRE's options ask for."""
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


def _remaining_ms(node: Node, session: Session, key: Argument) -> int:
    """Return the milliseconds that ``key`` has left; -1 without expiry, -2 if absent."""
    item = node.read(session.qualify(key), touch=False)
    if item is None:
        return -2
    return -1 if item.expires_at_ms is None else max(item.expires_at_ms - node.clock_ms(), 0)


def ttl(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TTL key: seconds, rounded."""
    remaining = _remaining_ms(node, session, arguments[1])
    return b":%d\r\n" % (remaining if remaining < 0 else (remaining + 500) // 1000)


def pttl(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PTTL key: milliseconds."""
    return b":%d\r\n" % _remaining_ms(node, session, arguments[1])


def persist(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """PERSIST key."""
    key = session.qualify(arguments[1])
    item = node.engine.peek(key)
    if item is None or item.expires_at_ms is None:
        return b":0\r\n"
    node.engine.set_expiry(key, None)
    return settled(node, node.engine.barrier(), "PERSIST", b":1\r\n")


def type_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """TYPE key: every value is a string."""
    return b"+none\r\n" if node.read(session.qualify(arguments[1]), touch=False) is None else b"+string\r\n"


def scan(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SCAN cursor [MATCH pattern] [COUNT count] [TYPE type]."""
    cursor_text = bytes(arguments[1])
    if not cursor_text.isdigit() or len(cursor_text) > 20 or int(cursor_text) >= 1 << 64:
        raise CommandError("ERR invalid cursor")
    pattern: Glob | None = None
    count, of_type = 10, b"string"
    options = arguments[2:]
    for position in range(0, len(options), 2):
        name = bytes(options[position]).upper()
        if position + 1 >= len(options) or name not in (b"MATCH", b"COUNT", b"TYPE"):
            syntax_error()
        argument = bytes(options[position + 1])
        if name == b"MATCH":
            pattern = None if argument == b"*" else Glob(argument)
        elif name == b"TYPE":
            of_type = argument.lower()
        else:
            count = as_integer(argument)
            if count < 1:
                syntax_error()
    cursor, keys = node.engine.scan(session.tenant, int(cursor_text), min(count, _SCAN_COUNT_MAX))
    if of_type != b"string":
        keys = []
    found = [key for key in keys if pattern is None or pattern.matches(key)]
    return encode([b"%d" % cursor, list(found)])


def dbsize(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """DBSIZE."""
    return b":%d\r\n" % node.engine.count(session.tenant)


def flush(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """FLUSHDB and FLUSHALL [ASYNC | SYNC]: what the tenant has; FLUSHALL of those who run the server, what all have."""
    if len(arguments) > 2 or (len(arguments) == 2 and bytes(arguments[1]).upper() not in (b"ASYNC", b"SYNC")):
        syntax_error()
    everything = bytes(arguments[0]).upper() == b"FLUSHALL" and session.user.is_operator
    node.engine.clear(None if everything else session.tenant)
    return settled(node, node.engine.barrier(), "FLUSHALL", OK)
