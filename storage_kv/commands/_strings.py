"""Commands on values, and the rule that records are immutable."""

from dataclasses import dataclass
from typing import NamedTuple

from shadowserve import record
from shadowserve.errors import RecordError
from shadowserve.keys import KEY_BYTES
from shadowserve.resp import encode_array_header, encode_bulk_header, encode_null
from storage_kv.commands._arguments import OK, OUT_OF_MEMORY, OldValue, as_integer, bulk_of, settled, syntax_error
from storage_kv.commands._table import RUN_REPLY_BYTES_MAX
from storage_kv.engine import KEY_BYTES_MAX, BusyError, Item, OutOfBudgetError
from storage_kv.node import Argument, CommandError, Later, Node, Part, Reply, Series, Session

__all__ = ["get", "get_run", "getrange", "mget", "set_", "set_run", "strlen"]

_VERIFY_INLINE_BYTES_MAX = 128 << 10
"""Checking this much takes about 0.1 ms: less than handing it to another thread and back would disturb."""

_EXPIRY_UNITS = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}
_MAGIC = record.MAGIC
_TIME_MS_MAX = (1 << 63) - 1
_SMALL_HEADERS = tuple(encode_bulk_header(size) for size in range(RUN_REPLY_BYTES_MAX - 8))
"""Of bulks; formatting one takes longer than all the rest of GET."""


def get(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """GET key."""
    _, reply, large = get_run(node, session, (b"", bytes(arguments[1])))
    return reply if large is None else large


def get_run(node: Node, session: Session, arguments: tuple[bytes, ...]) -> tuple[int, bytes, Reply | None]:
    """GET key, many times: up to a value that is not small or not in memory."""
    lengths = len(_SMALL_HEADERS)
    parts: list[bytes] = []
    large: Reply | None = None
    done = misses = 0
    for item in node.engine.get_each(session.prefix, arguments[1::2]):
        done += 1
        if item is None:
            misses += 1
            parts.append(encode_null(session.protocol))
            continue
        value = item.value
        if isinstance(value, bytes) and len(value) < lengths:  # most often, and worth no more calls
            parts += (_SMALL_HEADERS[len(value)], value, b"\r\n")
            continue
        reply = bulk_of(node, item, missing=encode_null(session.protocol))
        if not isinstance(reply, bytes) or len(reply) > RUN_REPLY_BYTES_MAX:
            large = reply
            break
        parts.append(reply)
    if misses:
        node.counters.misses += misses
    node.counters.hits += done - misses
    return done, b"".join(parts), large


def getrange(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """GETRANGE key start end: both inclusive, negative ones count from the end."""
    start, end = as_integer(arguments[2]), as_integer(arguments[3])
    item = node.read(session.qualify(arguments[1]))
    if item is None or (start < 0 and end < 0 and start > end):
        return b"$0\r\n\r\n"
    size = item.length
    start = max(start + size, 0) if start < 0 else start
    end = max(end + size, 0) if end < 0 else min(end, size - 1)
    if start > end or size == 0:
        return b"$0\r\n\r\n"
    return bulk_of(node, item, start, end + 1, missing=b"$0\r\n\r\n")


def strlen(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """STRLEN key."""
    item = node.read(session.qualify(arguments[1]))
    return b":%d\r\n" % (0 if item is None else item.length)


def mget(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """MGET key [key ...]."""
    null, counters = encode_null(session.protocol), node.counters

    def value(item: Item | None) -> bytes | list[Part]:
        if item is None:
            counters.misses += 1
            return null
        counters.hits += 1
        return bulk_of(node, item, missing=null)

    items = node.engine.get_each(session.prefix, arguments[1:])
    return Series.of([encode_array_header(len(arguments) - 1)], items, value)


@dataclass(slots=True)
class _SetOptions:
    """The options of SET; at most one of those that concern expiry."""

    condition: bytes = b""
    returns_old: bool = False
    keeps_expiry: bool = False
    expires_at_ms: int | None = None

    @classmethod
    def parse(cls, node: Node, options: list[Argument]) -> "_SetOptions":
        self = cls()
        position = 0
        expiry: tuple[Argument, int, bool] | None = None
        while position < len(options):
            option = bytes(options[position]).upper()
            if option in (b"NX", b"XX") and self.condition in (b"", option):
                self.condition = option
            elif option == b"GET":
                self.returns_old = True
            elif option == b"KEEPTTL" and expiry is None:
                self.keeps_expiry = True
            elif option in _EXPIRY_UNITS and expiry is None and not self.keeps_expiry and position + 1 < len(options):
                position += 1
                expiry = (options[position], *_EXPIRY_UNITS[option])
            else:
                syntax_error()
            position += 1
        if expiry is not None:
            self.expires_at_ms = _expiry_time(node, *expiry)
        return self


def _expiry_time(node: Node, argument: Argument, unit_ms: int, relative: bool) -> int:
    number = as_integer(argument)
    time_ms = number * unit_ms + (node.clock_ms() if relative else 0)
    if number <= 0 or time_ms > _TIME_MS_MAX:
        raise CommandError("ERR invalid expire time in 'set' command")
    return time_ms


def set_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SET key value [NX | XX] [GET] [EX seconds | PX ms | EXAT time | PXAT ms-time | KEEPTTL].

    A value that begins like a record must be the valid record of its key, and then never changes any more: setting
    another record of the same key answers OK and keeps the first, its expiry included.
    """
    key, value = bytes(arguments[1]), arguments[2]
    if len(key) > KEY_BYTES_MAX:
        raise CommandError(f"ERR key is too long: {len(key)} bytes, and at most {KEY_BYTES_MAX} are allowed")
    options = _SetOptions.parse(node, arguments[3:]) if len(arguments) > 3 else _PLAIN
    if value[:4] != _MAGIC:
        if options is _PLAIN:  # most often, and worth no more calls
            try:
                ticket = node.engine.put(session.prefix + key, value)
            except OutOfBudgetError:
                raise CommandError(OUT_OF_MEMORY) from None
            return OK if ticket is None else settled(node, ticket, "SET", OK)
        return _store(node, session, key, value, options, _NO_CHUNK)
    if len(value) <= _VERIFY_INLINE_BYTES_MAX:
        return _store_verified(node, session, key, value, options, _verify(key, value))
    return Later(
        lambda: _verify(key, value),
        lambda verdict: _store_verified(node, session, key, value, options, verdict),
    )


_PLAIN = _SetOptions()


def set_run(node: Node, session: Session, arguments: tuple[bytes, ...]) -> tuple[int, bytes, Reply | None]:
    """SET key value, many times: up to a record, an error, or a value that is not as durable as it will be at once."""
    store, prefix = node.engine.put, session.prefix
    done = 0
    for position in range(1, len(arguments), 3):
        key, value = arguments[position], arguments[position + 1]
        if value[:4] == _MAGIC or len(key) > KEY_BYTES_MAX:
            break
        try:
            ticket = store(prefix + key, value)
        except (OutOfBudgetError, BusyError):
            break
        if ticket is not None:
            return done + 1, OK * done, settled(node, ticket, "SET", OK)
        done += 1
    return done, OK * done, None


class _Chunk(NamedTuple):
    """What the engine is told of a record: the length of its head, and the name of the chunk before it."""

    head_bytes: int
    parent: bytes


_NO_CHUNK = _Chunk(0, b"")


def _verify(key: bytes, value: Argument) -> "_Chunk | str":
    """Return what the engine is told of a valid record of ``key``, or what is wrong with it. Runs in any thread."""
    try:
        name = bytes.fromhex(key[3:].decode("ascii")) if key.startswith(b"kv:") else b""
    except ValueError:
        name = b""
    if len(name) != KEY_BYTES or key[3:] != name.hex().encode():
        return "its key is not 'kv:' and 64 lower-case hexadecimal digits"
    try:
        head = record.verify(value, name)
    except RecordError as error:
        return str(error)
    return _Chunk(head.head_length, head.parent)


def _store_verified(
    node: Node, session: Session, key: bytes, value: Argument, options: _SetOptions, verdict: "_Chunk | str"
) -> bytes | list[Part]:
    if isinstance(verdict, str):
        node.counters.records_refused += 1
        raise CommandError(f"ERR record refused, nothing was stored: {verdict}")
    return _store(node, session, key, value, options, verdict)


def _store(
    node: Node,
    session: Session,
    key: bytes,
    value: Argument,
    options: _SetOptions,
    chunk: "_Chunk",
) -> bytes | list[Part]:
    head_bytes = chunk.head_bytes
    engine, name, null = node.engine, session.qualify(key), encode_null(session.protocol)
    # With GET the old value is the answer, which is a use of it, whether it is replaced or not.
    old = node.read(name) if options.returns_old else engine.peek(name)
    unmet = bool(options.condition) and (options.condition == b"NX") == (old is not None)
    keeps_record = not unmet and old is not None and head_bytes > 0 and old.head_bytes > 0
    if keeps_record:
        engine.get(name)  # counts as a use: somebody still computes it
        node.counters.records_kept += 1
    if unmet or keeps_record:
        if options.returns_old:
            return null if old is None else bulk_of(node, old, missing=null)
        # The record was stored by another, maybe just now: this client, too, is told OK when that is durable.
        return null if unmet else settled(node, engine.settling(name), "SET", OK)
    expires_at_ms = old.expires_at_ms if options.keeps_expiry and old is not None else options.expires_at_ms
    old_value = OldValue(node, old) if options.returns_old and old is not None else None
    try:
        ticket = engine.put(name, value, head_bytes=head_bytes, expires_at_ms=expires_at_ms, parent=chunk.parent)
    except (OutOfBudgetError, BusyError) as error:
        if old_value is not None:
            node.drop(old_value.reply(None))
        if isinstance(error, BusyError):
            raise
        raise CommandError(OUT_OF_MEMORY) from None
    if head_bytes:
        node.counters.records_stored += 1
    if old_value is not None:
        return old_value.reply(ticket)
    return settled(node, ticket, "SET", null if options.returns_old else OK)
