"""Parsing of arguments, and replies that several commands share."""

import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from shadowserve.pool.types import ENTRIES_PER_HOLD, Item, Lease
from shadowserve.pool.volume.tickets import OutOfBudgetError, Ticket
from shadowserve.resp import encode_bulk_header, encode_error, parse_integer
from storage_kv.node import Node
from storage_kv.reply import (
    REFERENCE_BYTES_MIN,
    CommandError,
    Continuation,
    DeferredReply,
    Part,
    Ready,
    Reply,
    ValueSlice,
)
from storage_kv.session import Argument

OK: Final = b"+OK\r\n"
OUT_OF_MEMORY: Final = "OOM command not allowed when used memory > 'maxmemory'."

KEYS_AT_A_TIME: Final = ENTRIES_PER_HOLD
"""Number of keys that one command handles before it releases the node's lock."""


def as_integer(argument: bytes | memoryview) -> int:
    """Return a 64-bit integer; raise CommandError for anything else."""
    number = parse_integer(bytes(argument)) if len(argument) <= 20 else None
    if number is None:
        raise CommandError("ERR value is not an integer or out of range")
    return number


def syntax_error() -> NoReturn:
    """Raise Redis' error for options that do not fit together."""
    raise CommandError("ERR syntax error")


def in_steps(step: Callable[[], Reply | None]) -> Reply:
    """Return the reply of a command that runs in steps, between which the node's lock is free.

    ``step`` does some of the work, and returns the reply when all is done. It may raise BusyError if it must be called
    again later; it has done nothing then.
    """
    reply = step()
    return Continuation([], lambda _: in_steps(step)) if reply is None else reply


def count_in_steps(
    names: Sequence[Argument],
    count: Callable[[Sequence[Argument], int], int],
    finish: Callable[[int], Reply] = lambda total: b":%d\r\n" % total,
) -> Reply:
    """Return the reply of a command that counts keys, some at a time.

    ``count`` gets some of them and the count of those before, and returns the count of these. ``finish`` makes the
    reply from the whole count.
    """
    position = total = 0

    def step() -> Reply | None:
        nonlocal position, total
        total += count(names[position : position + KEYS_AT_A_TIME], total)
        position += KEYS_AT_A_TIME
        return finish(total) if position >= len(names) else None

    return in_steps(step)


def quote(argument: bytes | memoryview, length_max: int = 1024) -> str:
    """Return an argument for an error text, up to its first null byte and shortened."""
    return bytes(argument[:length_max]).partition(b"\0")[0].decode("utf-8", "surrogateescape")


def bulk_of(
    node: Node, item: Item, begin: int = 0, end: int | None = None, *, missing: bytes = b"$-1\r\n", prefix: bytes = b""
) -> bytes | list[Part]:
    """Return a bulk reply of the bytes ``[begin, end)`` of a value: copied if small, otherwise by reference.

    ``missing`` is the reply if the value can be read neither from memory nor from a device. ``prefix`` stands before
    the bulk, not before ``missing``.
    """
    size = (item.length if end is None else end) - begin
    value = item.value
    if value is None:
        return [_read(node, item, begin, begin + size, missing, prefix)] if size else prefix + b"$0\r\n\r\n"
    if size < REFERENCE_BYTES_MIN:
        if size != item.length:
            value = value[begin : begin + size]
        return b"%b$%d\r\n%b\r\n" % (prefix, size, value if isinstance(value, bytes) else bytes(value))
    view = value if isinstance(value, memoryview) else memoryview(value)
    return [prefix + encode_bulk_header(size), ValueSlice(view[begin : begin + size], item), b"\r\n"]


def _read(node: Node, item: Item, begin: int, end: int, missing: bytes, prefix: bytes) -> DeferredReply:
    deferred = DeferredReply(node.lock, node.store, end - begin)

    def done(lease: Lease | None) -> None:
        deferred.lost = lease is None
        deferred.resolve([missing] if lease is None else _bulk(lease, prefix))

    # A client that reads the beginning of a record in the bucket, such as its header, need not wait for the rest.
    node.store.read(item, begin, end, done, ahead=item.is_cold and not begin and end < item.length)
    return deferred


def _bulk(lease: Lease, prefix: bytes = b"") -> list[Ready]:
    return [prefix + encode_bulk_header(len(lease.view)), ValueSlice(lease.view, lease), b"\r\n"]


def when_durable(node: Node, ticket: Ticket | None, operation: str, reply: bytes) -> bytes | list[Part]:
    """Return ``reply`` when a change is durable, or an error if it could not be made so."""
    if ticket is None:
        return reply
    deferred = DeferredReply(node.lock, node.store, len(reply))

    def done(error: Exception | None) -> None:
        deferred.failed = error is not None
        deferred.resolve([reply if error is None else _write_error(operation, error)])

    ticket.then(done)
    return [deferred]


def _write_error(operation: str, error: Exception) -> bytes:
    if isinstance(error, OutOfBudgetError):
        return encode_error(OUT_OF_MEMORY)
    return encode_error(f"IOERR {operation} failed: {error}")


class OldValue:
    """The previous value that SET GET and GETDEL answer: held before its replacement, sent when that is durable."""

    def __init__(self, node: Node, item: Item, operation: str, missing: bytes) -> None:
        """Hold the value of ``item``, or start to read it. ``reply()`` must be called.

        ``missing`` is the reply if the value cannot be read.
        """
        self._operation = operation
        self._deferred = DeferredReply(node.lock, node.store, item.length)
        self._lock = threading.Lock()
        self._unknown = 2  # the value, and the result of the change
        self._parts: list[Ready] = [missing]
        self._error: Exception | None = None
        if item.value is not None:
            part = ValueSlice(memoryview(item.value), item)
            part.hold(node.store)
            self._parts = [encode_bulk_header(item.length), part, b"\r\n"]
            self._resolve_if_known()
        elif item.length:
            node.store.read(item, 0, item.length, self._on_read)
        else:
            self._parts = [b"$0\r\n\r\n"]
            self._resolve_if_known()

    def reply(self, ticket: Ticket | None) -> list[Part]:
        """Return the part with the value, known when ``ticket`` has ended."""
        if ticket is None:
            self._resolve_if_known()
        else:
            ticket.then(self._on_durable)
        return [self._deferred]

    def _on_read(self, lease: Lease | None) -> None:
        self._deferred.lost = lease is None
        if lease is not None:
            self._parts = _bulk(lease)
        self._resolve_if_known()

    def _on_durable(self, error: Exception | None) -> None:
        self._error = error
        self._resolve_if_known()

    def _resolve_if_known(self) -> None:
        with self._lock:
            self._unknown -= 1
            if self._unknown:
                return
        parts = self._parts
        if self._error is not None:
            # The value is not sent, but must be released: empty slices do that.
            self._deferred.failed = True
            parts = [_write_error(self._operation, self._error)]
            parts += [ValueSlice(part.view[:0], part.source) for part in self._parts if isinstance(part, ValueSlice)]
        self._deferred.resolve(parts)
