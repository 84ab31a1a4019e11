"""Commands on values, and the rule that records are immutable."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowserve import record
from shadowserve.errors import RecordError
from shadowserve.pool.entries import chunk_of
from shadowserve.pool.types import KEY_BYTES_MAX, Address, Item
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError, Ticket, joined
from shadowserve.resp import encode_array_header, encode_bulk_header, encode_null
from storage_kv.commands._arguments import (
    KEYS_AT_A_TIME,
    OK,
    OUT_OF_MEMORY,
    OldValue,
    as_integer,
    bulk_of,
    in_steps,
    syntax_error,
    when_durable,
)
from storage_kv.node import Node
from storage_kv.reply import CommandError, Continuation, Part, Reply, drop_parts
from storage_kv.session import Argument, Session

_VERIFY_INLINE_BYTES_MAX = 128 << 10
"""Larger records are verified in another thread. This size takes about 0.1 ms, less than two thread switches cost."""

_EXPIRY_UNITS = {b"EX": (1000, True), b"PX": (1, True), b"EXAT": (1000, False), b"PXAT": (1, False)}
_MAGIC = record.MAGIC
_TIME_MS_MAX = (1 << 63) - 1
_SMALL_HEADERS = tuple(encode_bulk_header(size) for size in range(1024))
"""Headers of small bulks; formatting one takes longer than the rest of GET."""


def get(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    item = node.read((session.tenant, bytes(arguments[1])))
    if item is None:
        return encode_null(session.protocol)
    value = item.value
    if isinstance(value, bytes) and len(value) < len(_SMALL_HEADERS):  # most often; no further calls
        return b"".join((_SMALL_HEADERS[len(value)], value, b"\r\n"))
    return bulk_of(node, item, missing=encode_null(session.protocol))


def getrange(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """GETRANGE key start end: both inclusive; negative positions count from the end."""
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
    item = node.read(session.qualify(arguments[1]), lookup=True)
    return b":%d\r\n" % (0 if item is None else item.length)


def mget(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    null = encode_null(session.protocol)

    def value(key: Argument) -> bytes | list[Part]:
        item = node.read(session.qualify(key))
        return null if item is None else bulk_of(node, item, missing=null)

    return Continuation.of([encode_array_header(len(arguments) - 1)], iter(arguments[1:]), value)


@dataclass(slots=True)
class _SetOptions:
    """The options of SET and GETEX. Only one of the options about expiry may be given, but repeatedly."""

    condition: bytes = b""  # NX, XX or empty
    returns_old: bool = False  # GET is given
    keeps_expiry: bool = False  # KEEPTTL is given
    ends_expiry: bool = False  # PERSIST is given
    expiry: tuple[bytes, Argument] | None = None  # the given expiry option and its argument

    @classmethod
    def parse(cls, options: list[Argument], *, of_set: bool = True) -> "_SetOptions":
        self = cls()
        position = 0
        fixed = b"KEEPTTL" if of_set else b"PERSIST"
        about_expiry = b""
        while position < len(options):
            option = bytes(options[position]).upper()
            takes_argument = option in _EXPIRY_UNITS
            if takes_argument or option == fixed:
                if about_expiry not in (b"", option) or position + takes_argument >= len(options):
                    syntax_error()
                about_expiry = option
                if takes_argument:  # the last one counts
                    position += 1
                    self.expiry = (option, options[position])
            elif of_set and option in (b"NX", b"XX") and self.condition in (b"", option):
                self.condition = option
            elif of_set and option == b"GET":
                self.returns_old = True
            else:
                syntax_error()
            position += 1
        self.keeps_expiry = about_expiry == b"KEEPTTL"
        self.ends_expiry = about_expiry == b"PERSIST"
        return self

    def expires_at_ms(self, node: Node, command: str) -> int | None:
        return None if self.expiry is None else _expiry_time(node, *self.expiry, command)


def _expiry_time(node: Node, option: bytes, argument: Argument, command: str) -> int:
    unit_ms, relative = _EXPIRY_UNITS[option]
    number = as_integer(argument)
    time_ms = number * unit_ms + (node.clock_ms() if relative else 0)
    if number <= 0 or time_ms > _TIME_MS_MAX:
        raise CommandError(f"ERR invalid expire time in '{command}' command")
    return time_ms


def set_(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SET key value [NX | XX] [GET] [EX seconds | PX ms | EXAT time | PXAT ms-time | KEEPTTL].

    A value that begins like a record must be the valid record of its key. A record never changes: setting another
    record of the same key answers OK and keeps the first one and its expiry.
    """
    key, value = _checked(arguments[1]), arguments[2]
    if len(arguments) == 3 and value[:4] != _MAGIC:  # most often; no further calls
        try:
            ticket = node.store.put((session.tenant, key), value)
        except OutOfBudgetError:
            raise CommandError(OUT_OF_MEMORY) from None
        return OK if ticket is None else when_durable(node, ticket, "SET", OK)
    options = _SetOptions.parse(arguments[3:])
    null = encode_null(session.protocol)
    write = _Write(
        key,
        value,
        "SET",
        met=null if options.returns_old else OK,
        unmet=null,
        condition=options.condition,
        returns_old=options.returns_old,
        expires_at_ms=options.expires_at_ms(node, "set"),
        keeps_expiry=options.keeps_expiry,
    )
    return _put(node, session, write)


def setnx(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    write = _Write(_checked(arguments[1]), arguments[2], "SETNX", met=b":1\r\n", unmet=b":0\r\n", condition=b"NX")
    return _put(node, session, write)


def setex(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """SETEX key seconds value, and PSETEX key milliseconds value."""
    name, key = bytes(arguments[0]).lower().decode(), _checked(arguments[1])
    expires_at_ms = _expiry_time(node, b"EX" if name == "setex" else b"PX", arguments[2], name)
    return _put(node, session, _Write(key, arguments[3], name.upper(), met=OK, expires_at_ms=expires_at_ms))


def getset(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    null = encode_null(session.protocol)
    return _put(node, session, _Write(_checked(arguments[1]), arguments[2], "GETSET", met=null, returns_old=True))


def getdel(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    key = session.qualify(arguments[1])
    item = node.read(key)
    if item is None:
        return encode_null(session.protocol)
    old_value = OldValue(node, item, "GETDEL", encode_null(session.protocol))
    node.store.remove(key)
    return old_value.reply(node.store.barrier())


def getex(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    options = _SetOptions.parse(arguments[2:], of_set=False)
    key, null = session.qualify(arguments[1]), encode_null(session.protocol)
    item = node.read(key)
    if item is None:
        return null
    expires_at_ms = options.expires_at_ms(node, "getex")
    if expires_at_ms is None and not options.ends_expiry:
        return bulk_of(node, item, missing=null)
    old_value = OldValue(node, item, "GETEX", null)
    node.store.set_expiry(key, expires_at_ms)
    return old_value.reply(node.store.barrier())


def _checked(key: Argument) -> bytes:
    """Return a key that something may be stored under."""
    if len(key) > KEY_BYTES_MAX:
        raise CommandError(f"ERR key is too long: {len(key)} bytes, and at most {KEY_BYTES_MAX} are allowed")
    return bytes(key)


class _RecordInfo(NamedTuple):
    """The length of a record's header, and the key of the chunk before it; for other values zero and empty."""

    header_bytes: int
    parent: bytes


_NO_RECORD = _RecordInfo(0, b"")


def _verify(key: bytes, value: Argument) -> "_RecordInfo | str":
    """Verify a record of ``key``; return its description, or an error text. Runs in any thread."""
    name = chunk_of(key)
    if name is None:
        return "its key is not 'kv:' and 64 lower-case hexadecimal digits"
    try:
        header = record.verify(value, name)
    except RecordError as error:
        return str(error)
    return _RecordInfo(header.header_length, header.parent)


class _Write(NamedTuple):
    """A value to be stored, and the replies if its condition is met or not; ``returns_old`` prefers the old value."""

    key: bytes
    value: Argument
    operation: str
    met: bytes
    unmet: bytes = b""
    condition: bytes = b""
    returns_old: bool = False
    expires_at_ms: int | None = None
    keeps_expiry: bool = False


def _put(node: Node, session: Session, write: _Write) -> Reply:
    """Verify a value if it is a record, at once or in another thread, and store it."""
    return _verified(node, [(write.key, write.value)], lambda chunks: _store(node, session, write, chunks[0]))


def _verified(
    node: Node, pairs: Sequence[tuple[bytes, Argument]], store: Callable[[Sequence[_RecordInfo]], Reply]
) -> Reply:
    """Verify the values that are records, at once or in another thread, then call ``store``."""

    def verify() -> list[_RecordInfo | str]:
        return [_verify(key, value) if value[:4] == _MAGIC else _NO_RECORD for key, value in pairs]

    def finish(verdicts: Sequence[_RecordInfo | str]) -> Reply:
        accepted: list[_RecordInfo] = []
        for verdict in verdicts:
            if isinstance(verdict, str):
                node.counters.records_refused += 1
                raise CommandError(f"ERR record refused, nothing was stored: {verdict}")
            accepted.append(verdict)
        return store(accepted)

    record_bytes = sum(len(value) for _, value in pairs if value[:4] == _MAGIC)
    return finish(verify()) if record_bytes <= _VERIFY_INLINE_BYTES_MAX else Continuation([], finish, verify)


def _store(node: Node, session: Session, write: _Write, chunk: _RecordInfo) -> bytes | list[Part]:
    store, name, null = node.store, session.qualify(write.key), encode_null(session.protocol)
    # With GET the previous value is the reply, which counts as a use, whether it is replaced or not.
    old = node.read(name) if write.returns_old else store.peek(name)
    if write.condition and (write.condition == b"NX") == (old is not None):
        if write.returns_old:
            return null if old is None else bulk_of(node, old, missing=null)
        return write.unmet
    if old is not None and _is_kept(node, name, old, chunk):
        if write.returns_old:
            return bulk_of(node, old, missing=null)
        # Another client stored the record, maybe just now: the reply waits until that is durable.
        return when_durable(node, store.settling(name), write.operation, write.met)
    expires_at_ms = old.expires_at_ms if write.keeps_expiry and old is not None else write.expires_at_ms
    if old is None or not write.returns_old:
        return when_durable(node, _insert(node, name, write.value, chunk, expires_at_ms), write.operation, write.met)
    old_value = OldValue(node, old, write.operation, null)
    try:
        ticket = _insert(node, name, write.value, chunk, expires_at_ms)
    except (CommandError, BusyError):
        drop_parts(old_value.reply(None), store)
        raise
    return old_value.reply(ticket)


def _is_kept(node: Node, name: Address, old: Item, chunk: _RecordInfo) -> bool:
    """Return True if a record stays because it is there already; count that as a use: a client has just computed it.

    A record that only the bucket has is stored again, so that the next reader finds it here.
    """
    if not chunk.header_bytes or not old.header_bytes or old.is_cold:
        return False
    node.store.get(name)
    node.counters.records_kept += 1
    return True


def _insert(
    node: Node, name: Address, value: Argument, chunk: _RecordInfo, expires_at_ms: int | None = None
) -> Ticket | None:
    try:
        ticket = node.store.put(
            name, value, header_bytes=chunk.header_bytes, expires_at_ms=expires_at_ms, parent=chunk.parent
        )
    except OutOfBudgetError:
        raise CommandError(OUT_OF_MEMORY) from None
    node.counters.records_stored += chunk.header_bytes > 0
    return ticket


# ---- Several at a time


def mset(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """MSET: stores pairs in order, in several steps. If memory runs out in between, the first pairs are stored."""
    pairs = _pairs(arguments, "mset")
    return _verified(node, pairs, lambda chunks: _put_pairs(node, session, pairs, chunks, "MSET", OK))


def msetnx(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    pairs = _pairs(arguments, "msetnx")
    if len(pairs) > KEYS_AT_A_TIME:  # all or none, so in one step
        raise CommandError(f"ERR MSETNX takes at most {KEYS_AT_A_TIME} keys, got {len(pairs)}: use SET with NX")

    def store(chunks: Sequence[_RecordInfo]) -> Reply:
        if any(node.store.peek(session.qualify(key)) is not None for key, _ in pairs):
            return b":0\r\n"
        return _put_pairs(node, session, pairs, chunks, "MSETNX", b":1\r\n")

    return _verified(node, pairs, store)


def _pairs(arguments: list[Argument], name: str) -> list[tuple[bytes, Argument]]:
    if len(arguments) % 2 == 0:
        raise CommandError(f"ERR wrong number of arguments for '{name}' command")
    return [(_checked(key), value) for key, value in zip(arguments[1::2], arguments[2::2], strict=True)]


def _put_pairs(
    node: Node,
    session: Session,
    pairs: Sequence[tuple[bytes, Argument]],
    chunks: Sequence[_RecordInfo],
    operation: str,
    reply: bytes,
) -> Reply:
    """Store several values in order, some in each step, except records over records."""
    position, tickets = 0, list[Ticket | None]()

    def step() -> Reply | None:
        nonlocal position
        began = position
        while position < min(began + KEYS_AT_A_TIME, len(pairs)):
            (key, value), chunk = pairs[position], chunks[position]
            name = session.qualify(key)
            old = node.store.peek(name) if chunk.header_bytes else None
            try:
                if old is not None and _is_kept(node, name, old, chunk):
                    ticket = node.store.settling(name)
                else:
                    ticket = _insert(node, name, value, chunk)
            except BusyError:
                if position == began:
                    raise
                return None
            tickets.append(ticket)
            position += 1
        if position < len(pairs):
            return None
        return when_durable(node, joined(tickets), operation, reply)

    return in_steps(step)
