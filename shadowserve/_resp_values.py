"""RESP values as Python objects, and their encoding. :mod:`shadowserve.resp` exports all names."""

import math
from collections.abc import Iterable
from typing import Final, TypeAlias

__all__ = [
    "BigNumber",
    "ErrorReply",
    "Map",
    "Push",
    "SetReply",
    "SimpleString",
    "Value",
    "Verbatim",
    "encode",
    "encode_array_header",
    "encode_bulk",
    "encode_bulk_header",
    "encode_command",
    "encode_error",
    "encode_map_header",
    "encode_null",
]

CRLF: Final = b"\r\n"
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


class SimpleString(bytes):
    """A status line such as ``+OK``: holds neither CR nor LF."""

    __slots__ = ()


class ErrorReply(bytes):
    """An error line such as ``-ERR syntax error``, without the dash. A value, not an exception."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word: ``ERR``, ``NOAUTH``, ``OOM``..."""
        return self.split(b" ", 1)[0].decode("ascii", "replace")


class Verbatim(bytes):
    """A verbatim string (RESP3 ``=``): text with a three-letter ``format``, such as ``txt``."""

    format: str

    def __new__(cls, text: bytes, format: str = "txt") -> "Verbatim":
        """``format`` must be three ASCII characters."""
        self = super().__new__(cls, text)
        self.format = format
        return self


class BigNumber(int):
    """An integer beyond 64 bits (RESP3 ``(``)."""


class Map(list["Value"]):
    """A map, flat as RESP2 sends it: key, value, key, value... Keys may be of any type, so it is not a ``dict``."""


class SetReply(list["Value"]):
    """A set (RESP3 ``~``), in the order of arrival."""


class Push(list["Value"]):
    """Out-of-band data (RESP3 ``>``); its first element is its kind."""


Value: TypeAlias = None | bool | int | float | bytes | memoryview | list["Value"]
"""None: null; bool, float: RESP3's; int: integer; bytes: bulk; memoryview: a bulk received as :class:`LargeBulk`;
list: array; the classes above for others."""


def encode_bulk_header(size: int) -> bytes:
    return b"$%d\r\n" % size


def encode_bulk(value: bytes | bytearray | memoryview) -> bytes:
    """Return a whole bulk. It copies the value."""
    return b"".join((b"$%d\r\n" % len(value), value, CRLF))


def encode_array_header(count: int) -> bytes:
    return b"*%d\r\n" % count


def encode_map_header(count: int, protocol: int) -> bytes:
    """Return the header of a map of ``count`` pairs; RESP2 has flat arrays instead."""
    return b"%%%d\r\n" % count if protocol == 3 else b"*%d\r\n" % (count * 2)


def encode_null(protocol: int) -> bytes:
    return b"_\r\n" if protocol == 3 else b"$-1\r\n"


def encode_error(text: str) -> bytes:
    """Return an error line; CR and LF in ``text`` become blanks, as Redis does."""
    return b"-%b\r\n" % text.replace("\r", " ").replace("\n", " ").encode("utf-8", "surrogateescape")


def encode(value: Value, protocol: int = 2) -> bytes:
    """Return ``value`` in RESP2 or RESP3. A type that RESP2 lacks becomes what Redis sends in its place."""
    if isinstance(value, SimpleString | ErrorReply):
        line = bytes(value)
        if b"\r" in line or b"\n" in line:
            raise ValueError(f"a status or error line cannot hold CR or LF: {line!r}; send a bulk instead")
        return b"%b%b\r\n" % (b"+" if isinstance(value, SimpleString) else b"-", line)
    if isinstance(value, Verbatim):
        if protocol != 3:
            return encode_bulk(value)
        return encode_bulk(b"%b:%b" % (value.format.encode("latin-1"), value)).replace(b"$", b"=", 1)
    if isinstance(value, bytes | bytearray | memoryview):
        return encode_bulk(value)
    if isinstance(value, list):
        return _encode_list(value, protocol)
    if value is None:
        return encode_null(protocol)
    return _encode_number(value, protocol)


def _encode_number(value: bool | int | float, protocol: int) -> bytes:
    if isinstance(value, bool):
        return (b"#t\r\n" if value else b"#f\r\n") if protocol == 3 else (b":1\r\n" if value else b":0\r\n")
    if isinstance(value, BigNumber) or (isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX):
        return b"(%d\r\n" % value if protocol == 3 else encode_bulk(b"%d" % value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    text = (f"{value:.17g}" if math.isfinite(value) else str(value)).encode()
    return b",%b\r\n" % text if protocol == 3 else encode_bulk(text)


def _encode_list(value: "list[Value]", protocol: int) -> bytes:
    if isinstance(value, Map):
        if len(value) % 2:
            raise ValueError("a Map needs as many values as keys")
        header = encode_map_header(len(value) // 2, protocol)
    elif protocol == 3 and isinstance(value, SetReply | Push):
        header = (b"~%d\r\n" if isinstance(value, SetReply) else b">%d\r\n") % len(value)
    else:
        header = encode_array_header(len(value))
    return header + b"".join([encode(item, protocol) for item in value])


def encode_command(*arguments: bytes | bytearray | memoryview | str | int) -> bytes:
    """Return a command as clients send it. It copies the arguments; the C core sends large ones."""
    parts: list[bytes | bytearray | memoryview] = [encode_array_header(len(arguments))]
    for argument in _as_buffers(arguments):
        parts += (encode_bulk_header(len(argument)), argument, CRLF)
    return b"".join(parts)


def _as_buffers(
    arguments: Iterable[bytes | bytearray | memoryview | str | int],
) -> Iterable[bytes | bytearray | memoryview]:
    for argument in arguments:
        if isinstance(argument, str):
            yield argument.encode()
        elif isinstance(argument, int):
            yield b"%d" % argument
        elif isinstance(argument, memoryview):
            yield argument.cast("B") if argument.nbytes else b""
        else:
            yield argument
