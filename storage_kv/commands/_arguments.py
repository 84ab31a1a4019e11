"""Reading arguments, and replies that several commands share."""

from typing import Final, NoReturn

from shadowserve.resp import encode_bulk_header, parse_integer
from storage_kv.engine import Item
from storage_kv.node import REFERENCE_BYTES_MIN, CommandError, Outgoing, Part

__all__ = ["OK", "as_integer", "bulk_of", "quote", "syntax_error"]

OK: Final = b"+OK\r\n"


def as_integer(argument: bytes | memoryview) -> int:
    """Return a 64-bit integer argument."""
    number = parse_integer(bytes(argument)) if len(argument) <= 20 else None
    if number is None:
        raise CommandError("ERR value is not an integer or out of range")
    return number


def syntax_error() -> NoReturn:
    """Raise what Redis answers to options that do not fit together."""
    raise CommandError("ERR syntax error")


def quote(argument: bytes | memoryview, length_max: int = 128) -> str:
    """Return an argument for an error text, shortened, in any bytes."""
    return bytes(argument[:length_max]).decode("utf-8", "surrogateescape")


def bulk_of(item: Item, begin: int = 0, end: int | None = None) -> bytes | list[Part]:
    """Return the reply with the bytes ``[begin, end)`` of an item's value: copied if small, else by reference."""
    value = item.value if end is None else memoryview(item.value)[begin:end]
    size = len(value)
    if size < REFERENCE_BYTES_MIN:
        return b"$%d\r\n%b\r\n" % (size, value if isinstance(value, bytes) else bytes(value))
    view = value if isinstance(value, memoryview) else memoryview(value)
    return [encode_bulk_header(size), Outgoing(view, item), b"\r\n"]
