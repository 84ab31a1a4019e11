"""Reading arguments, and replies that several commands share."""

import threading
from collections.abc import Callable
from typing import Final, NoReturn

from shadowserve.pool.terms import ENTRIES_PER_HOLD, Item, Lease
from shadowserve.pool.volume.changes import OutOfBudgetError, Ticket
from shadowserve.resp import encode_bulk_header, encode_error, parse_integer
from storage_kv.node import REFERENCE_BYTES_MIN, CommandError, More, Node, Outgoing, Part, Pending, Ready, Reply

OK: Final = b"+OK\r\n"
OUT_OF_MEMORY: Final = "OOM command not allowed when used memory > 'maxmemory'."

KEYS_AT_A_TIME: Final = ENTRIES_PER_HOLD
"""That one command works on before it lets others have the node's lock."""


def as_integer(argument: bytes | memoryview) -> int:
    """Return a 64-bit integer argument."""
    number = parse_integer(bytes(argument)) if len(argument) <= 20 else None
    if number is None:
        raise CommandError("ERR value is not an integer or out of range")
    return number


def syntax_error() -> NoReturn:
    """Raise what Redis answers to options that do not fit together."""
    raise CommandError("ERR syntax error")


def in_turns(step: Callable[[], Reply | None]) -> Reply:
    """Return the reply of a command that is executed in steps, between which others have the node's lock.

    Args:
        step: does some of the work; returns the reply when all of it is done. BusyError: it is to be called again
            later, and has done nothing since the last step that was whole. The first step may raise it only if it has
            done nothing at all.
    """
    reply = step()
    return More([], lambda _: in_turns(step)) if reply is None else reply


def quote(argument: bytes | memoryview, length_max: int = 1024) -> str:
    """Return an argument for an error text, shortened, in any bytes but a null, where Redis' strings end."""
    return bytes(argument[:length_max]).partition(b"\0")[0].decode("utf-8", "surrogateescape")


def bulk_of(
    node: Node, item: Item, begin: int = 0, end: int | None = None, *, missing: bytes = b"$-1\r\n", head: bytes = b""
) -> bytes | list[Part]:
    """Return the reply with the bytes ``[begin, end)`` of an item's value: copied if small, else by reference.

    Args:
        node: the node.
        item: what get() or read() has just returned.
        begin: first byte.
        end: behind the last byte; None for the value's end.
        missing: the reply if the value is not in memory, and cannot be read either.
        head: what precedes the bulk if it is not missing.
    """
    size = (item.length if end is None else end) - begin
    value = item.value
    if value is None:
        return [_read(node, item, begin, begin + size, missing, head)] if size else head + b"$0\r\n\r\n"
    if size < REFERENCE_BYTES_MIN:
        if size != item.length:
            value = value[begin : begin + size]
        return b"%b$%d\r\n%b\r\n" % (head, size, value if isinstance(value, bytes) else bytes(value))
    view = value if isinstance(value, memoryview) else memoryview(value)
    return [head + encode_bulk_header(size), Outgoing(view[begin : begin + size], item), b"\r\n"]


def _read(node: Node, item: Item, begin: int, end: int, missing: bytes, head: bytes) -> Pending:
    """Return the part for the bytes ``[begin, end)``, which are on their way from a device."""
    pending = Pending(node, end - begin)

    def done(lease: Lease | None) -> None:
        pending.lost = lease is None
        pending.resolve([missing] if lease is None else _bulk(lease, head))

    node.store.read(item, begin, end, done)
    return pending


def _bulk(lease: Lease, head: bytes = b"") -> list[Ready]:
    return [head + encode_bulk_header(len(lease.view)), Outgoing(lease.view, lease), b"\r\n"]


def settled(node: Node, ticket: Ticket | None, operation: str, reply: bytes) -> bytes | list[Part]:
    """Return ``reply`` for when a change is durable, or the error for the client whose command it was."""
    if ticket is None:
        return reply
    pending = Pending(node, len(reply))

    def done(error: Exception | None) -> None:
        pending.failed = error is not None
        pending.resolve([reply if error is None else _write_error(operation, error)])

    ticket.then(done)
    return [pending]


def _write_error(operation: str, error: Exception) -> bytes:
    """Return the reply for a change that could not be made durable."""
    if isinstance(error, OutOfBudgetError):
        return encode_error(OUT_OF_MEMORY)
    return encode_error(f"IOERR {operation} failed: {error}")


class OldValue:
    """The value that SET GET and GETDEL answer: taken before it is replaced, sent when what replaces it is durable."""

    def __init__(self, node: Node, item: Item, operation: str, missing: bytes) -> None:
        """Take the value of ``item``: hold it, or begin to read it. It has to be sent with ``reply()``.

        Args:
            node: the node.
            item: what get() has just returned.
            operation: what replaces the value, for errors.
            missing: the reply if the value cannot be read.
        """
        self._operation = operation
        self._pending = Pending(node, item.length)
        self._lock = threading.Lock()
        self._missing = 2  # of: the value, and the change's fate
        self._parts: list[Ready] = [missing]
        self._error: Exception | None = None
        if item.value is not None:
            part = Outgoing(memoryview(item.value), item)
            part.hold(node.store)
            self._parts = [encode_bulk_header(item.length), part, b"\r\n"]
            self._step()
        elif item.length:
            node.store.read(item, 0, item.length, self._on_read)
        else:
            self._parts = [b"$0\r\n\r\n"]
            self._step()

    def reply(self, ticket: Ticket | None) -> list[Part]:
        """Return the part that is the value when ``ticket`` is settled."""
        if ticket is None:
            self._step()
        else:
            ticket.then(self._on_settled)
        return [self._pending]

    def _on_read(self, lease: Lease | None) -> None:
        self._pending.lost = lease is None
        if lease is not None:
            self._parts = _bulk(lease)
        self._step()

    def _on_settled(self, error: Exception | None) -> None:
        self._error = error
        self._step()

    def _step(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        parts = self._parts
        if self._error is not None:
            # Of the value nothing is sent, but it has to be let go of.
            self._pending.failed = True
            parts = [_write_error(self._operation, self._error)]
            parts += [Outgoing(part.view[:0], part.source) for part in self._parts if isinstance(part, Outgoing)]
        self._pending.resolve(parts)
