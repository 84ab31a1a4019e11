"""The Redis serialization protocol, RESP2 and RESP3, without I/O.

Source: the RESP specification (redis.io/docs/latest/develop/reference/protocol-spec); limits and error texts are those
of Redis 7.

- :class:`CommandReader` parses requests for a server: RESP arrays and a few commands typed as text. It detects other
  protocols before any of their bytes can be taken for a command.
- :class:`ReplyReader` parses replies for a client: every RESP2 and RESP3 type.

Bytes go in with ``feed()``. ``next_command()`` or ``next_value()`` returns the next complete one, or :data:`NEED_DATA`.
For a bulk of ``Limits.large_bulk_bytes`` or more that has not arrived completely they return :class:`LargeBulk` once;
its bytes then go directly to their final place::

    event = reader.next_value()
    if isinstance(event, LargeBulk):
        reader.provide(memoryview(my_buffer))       # optional: by default the reader allocates
    while view := reader.get_buffer():
        reader.advance(sock.recv_into(view))

See :data:`Value` for the Python type of each RESP type; :func:`encode` writes both protocol versions.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from shadowserve import _resp_values
from shadowserve._resp_lines import TYPED_COMMANDS, protocol_of, refusal_of, split_inline
from shadowserve._resp_values import *
from shadowserve._resp_values import BigNumber, ErrorReply, Map, Push, SetReply, SimpleString, Value, Verbatim
from shadowserve.errors import ForeignProtocolError, ProtocolError

__all__ = [
    "NEED_DATA",
    "TYPED_COMMANDS",
    "CommandReader",
    "LargeBulk",
    "Limits",
    "NeedData",
    "ReplyReader",
    "parse_integer",
    "split_inline",
]
__all__ += _resp_values.__all__

CRLF: Final = b"\r\n"

_ARRAY: Final = 0x2A  # "*"


class NeedData(enum.Enum):
    """The type of :data:`NEED_DATA`."""

    NEED_DATA = "need data"


NEED_DATA: Final = NeedData.NEED_DATA
"""No complete command or value has arrived yet."""


@dataclass(frozen=True, slots=True)
class LargeBulk:
    """A bulk of ``size`` bytes arrives: call ``provide()`` now to choose its buffer."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a peer's input. Beyond them: :class:`~shadowserve.errors.ProtocolError`.

    Attributes:
        total_bytes_max: Size of all bulks of a command or reply. Redis' ``client-query-buffer-limit``: 1 GiB.
        large_bulk_bytes: From this size on a bulk is received in place. Redis' ``PROTO_MBULK_BIG_ARG``: 32 KiB.
    """

    line_bytes_max: int = 64 << 10  # size of a typed request, or of any line. Redis: 64 KiB
    bulk_bytes_max: int = 512 << 20  # size of a bulk. Redis' ``proto-max-bulk-len``: 512 MiB
    items_max: int = 1 << 20  # elements of an array, or arguments of a command. Redis before version 7: 1,048,576
    depth_max: int = 16  # nesting of arrays in a reply. Redis' COMMAND has 6
    total_bytes_max: int = 1 << 30
    large_bulk_bytes: int = 32 << 10
    unauthenticated: bool = False  # the peer has not authenticated; error texts say so


DEFAULT_LIMITS: Final = Limits()

# Most lengths are small. A table look-up costs a third of checking and converting, and accepts only the canonical form:
# no sign, blank, underscore or leading zero, which int() would accept.
_SMALL_LENGTHS: Final = {b"%d" % number: number for number in range(2048)}
_SMALL_BULKS: Final = {b"$%d" % number: number for number in range(2048)}
_WHOLE_BYTES_MAX: Final = 512
_SMALL_LINE_BYTES: Final = 7  # at most, with the line's end
_INTEGER: Final = re.compile(rb"(?:0|-?[1-9][0-9]*)\Z")
_REPLY_INTEGER: Final = re.compile(rb"[+-]?[0-9]+\Z")
_DOUBLE: Final = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|inf|nan)\Z")
_OBJECT_BYTES: Final = 64  # memory of an argument beside its bytes
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_BIG_NUMBER_DIGITS_MAX: Final = 4000  # int() refuses more than 4300 digits, because the conversion is quadratic


def parse_integer(text: bytes) -> int | None:
    """Return the 64-bit integer in ``text``, or None if it is not in canonical form."""
    if len(text) > 20 or not _INTEGER.match(text):
        return None
    number = int(text)
    return number if _INT64_MIN <= number <= _INT64_MAX else None


class _Reader:
    """The buffer of both readers, and the large bulk that is received in place."""

    __slots__ = (
        "_buffer",
        "_failure",
        "_dropping",
        "_large",
        "_large_filled",
        "_large_size",
        "_position",
        "_total_bytes",
        "limits",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits  # present limits; a server changes them when a client authenticates
        self._buffer = b""
        self._position = 0
        self._total_bytes = 0
        self._failure: Callable[[], ProtocolError] | None = None  # a kept error would form a cycle
        self._large: memoryview | None = None
        self._dropping = False  # the large bulk in progress is dropped
        self._large_size = -1  # -1: no large bulk in progress
        self._large_filled = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream. The results do not depend on how a stream is split."""
        if self._dropping:
            dropped = min(self._large_size - self._large_filled, len(data))
            self._large_filled += dropped
            data = data[dropped:]
        elif self._large_size >= 0 and self._large_filled < self._large_size:
            view = self.get_buffer()
            if view is not None:
                size = min(len(view), len(data))
                view[:size] = data[:size]
                self._large_filled += size
                data = data[size:]
        if self._position >= len(self._buffer):
            self._buffer = data
        else:
            self._buffer = self._buffer[self._position :] + data
        self._position = 0

    def provide(self, buffer: memoryview) -> None:
        """Receive the :class:`LargeBulk` just returned into ``buffer``: writable, contiguous, of exactly its size.

        The value returned later is this view.
        """
        if self._large_size < 0 or self._large is not None:
            raise RuntimeError("provide() must follow a LargeBulk; this is a bug in the caller")
        if buffer.nbytes != self._large_size or buffer.readonly:
            raise ValueError(f"provide() needs a writable buffer of {self._large_size} bytes, not {buffer.nbytes}")
        self._large = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        filled = min(len(self._buffer) - self._position, self._large_size)
        self._large[:filled] = memoryview(self._buffer)[self._position : self._position + filled]
        self._large_filled = filled
        self._position += filled
        self._free_if_used()

    def drop(self) -> None:
        """Drop the bytes of the :class:`LargeBulk` just returned; its value will be empty."""
        if self._large_size < 0 or self._large is not None:
            raise RuntimeError("drop() must follow a LargeBulk; this is a bug in the caller")
        self._dropping = True
        self._large_filled = min(len(self._buffer) - self._position, self._large_size)
        self._position += self._large_filled
        self._free_if_used()

    def get_buffer(self) -> memoryview | None:
        """Return the buffer for the next bytes of a large bulk, or None if there is no such bulk: use feed() then."""
        if self._large_size < 0 or self._large_filled >= self._large_size or self._dropping:
            return None
        if self._large is None:
            self.provide(memoryview(bytearray(self._large_size)))
            if self._large_filled >= self._large_size:
                return None
        assert self._large is not None
        return self._large[self._large_filled :]

    def advance(self, size: int) -> None:
        """Record that ``size`` bytes were written to the start of the buffer from get_buffer()."""
        if not 0 <= size <= self._large_size - self._large_filled:
            raise ValueError(f"advance({size}) goes beyond the buffer; this is a bug in the caller")
        self._large_filled += size

    def _free_if_used(self) -> None:
        """Free the buffer if all of it is used: an idle peer may stay connected for days."""
        if self._position == len(self._buffer):
            self._buffer, self._position = b"", 0

    def _fail(self, reason: str) -> ProtocolError:
        """Make the reader fail from now on; return the error to raise."""
        self._failure = partial(ProtocolError, f"Protocol error: {reason}")
        return self._failure()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure()

    def _count_bulk(self, size: int) -> None:
        """Check a bulk's declared size against the limits."""
        self._total_bytes += size
        if size > self.limits.bulk_bytes_max or self._total_bytes > self.limits.total_bytes_max:
            raise self._fail("unauthenticated bulk length" if self.limits.unauthenticated else "invalid bulk length")

    def _take_bulk(self, size: int) -> bytes | memoryview | LargeBulk | NeedData:
        """Return the bulk of ``size`` bytes at the position, and skip its CRLF."""
        if self._large_size >= 0:
            return self._continue_large()
        stop = self._position + size
        if stop + 2 <= len(self._buffer):
            if self._buffer[stop : stop + 2] != CRLF:
                raise self._fail("expected CRLF after a bulk")
            value = self._buffer[self._position : stop]
            self._position = stop + 2
            return value
        if size < self.limits.large_bulk_bytes:
            return NEED_DATA
        self._large_size = size
        self._large_filled = 0
        return LargeBulk(size)

    def _continue_large(self) -> bytes | memoryview | NeedData:
        if self.get_buffer() is not None or self._large_filled < self._large_size:
            return NEED_DATA
        if len(self._buffer) - self._position < 2:
            return NEED_DATA
        if self._buffer[self._position : self._position + 2] != CRLF:
            raise self._fail("expected CRLF after a bulk")
        self._position += 2
        value = b"" if self._dropping else self._large
        assert value is not None
        self._large, self._dropping = None, False
        self._large_size = -1
        self._large_filled = 0
        return value


class CommandReader(_Reader):
    """Parses commands."""

    __slots__ = ("_argument_bytes", "_arguments", "_bulk_size", "_remaining")

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(limits)
        self._arguments: list[bytes | memoryview] = []
        self._argument_bytes = 0  # size of the small ones
        self._remaining = 0  # missing arguments of the command in progress
        self._bulk_size = -1  # size of the argument whose length line was read; -1 for none

    @property
    def in_progress(self) -> bool:
        """True if a part of a command has arrived and the rest has not."""
        return self._remaining > 0 or self._position < len(self._buffer)

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the bytes that were fed and not returned yet, without large bulks."""
        return len(self._buffer) + self._argument_bytes + _OBJECT_BYTES * len(self._arguments)

    @property
    def arguments(self) -> Sequence[bytes | memoryview]:
        """The complete arguments of the command in progress; after a LargeBulk, those before it."""
        return self._arguments

    def next_command(self) -> list[bytes | memoryview] | LargeBulk | Literal[NeedData.NEED_DATA]:
        """Return the next command's name and arguments (at least one), or LargeBulk, or NEED_DATA.

        Raises:
            ProtocolError: The input is not RESP or exceeds a limit; the message is the error reply without ``-ERR``.
                Every later call raises it again.
        """
        if self._position >= len(self._buffer) and self._large_size < 0 and self._failure is None:
            return NEED_DATA
        self._check_failure()
        if self._remaining == 0 and self._position == 0 and (whole := self._read_whole()) is not None:
            return whole
        while True:
            if self._remaining == 0:
                started = self._start_command()
                if started is NEED_DATA:
                    return NEED_DATA
                if isinstance(started, list):
                    self._free_if_used()
                    return started
            event = self._read_arguments()
            if event is not None:
                return event
            arguments = self._arguments
            self._arguments, self._argument_bytes = [], 0
            self._free_if_used()
            return arguments

    def _read_whole(self) -> list[bytes | memoryview] | None:
        """Return the command if it is the whole buffer, short, and without line ends in arguments: the common case."""
        size, limits = len(self._buffer), self.limits
        if size > min(_WHOLE_BYTES_MAX, limits.bulk_bytes_max, limits.total_bytes_max):
            return None
        pieces = self._buffer.split(CRLF)
        arguments: list[bytes | memoryview] = [*pieces[2::2]]
        if pieces[0] != b"*%d" % len(arguments) or pieces[-1] or not 0 < len(arguments) <= limits.items_max:
            return None
        if [b"$%d" % len(argument) for argument in arguments] != pieces[1:-1:2]:
            return None
        self._buffer = b""
        return arguments

    def _start_command(self) -> list[bytes | memoryview] | None | Literal[NeedData.NEED_DATA]:
        """Read up to the first argument; return None before arguments, a whole typed command, or NEED_DATA."""
        buffer = self._buffer
        while self._position < len(buffer):
            position = self._position
            if buffer[position] != _ARRAY:
                inline = self._read_inline()
                if inline is NEED_DATA or inline:
                    return inline
                continue
            end = buffer.find(CRLF, position)
            if end < 0:
                if len(buffer) - position > self.limits.line_bytes_max:
                    raise self._fail("too big mbulk count string")
                return NEED_DATA
            text = buffer[position + 1 : end]
            count = _SMALL_LENGTHS.get(text)
            if count is None:
                count = parse_integer(text)
            if count is None or count > self.limits.items_max:
                word = "unauthenticated" if count is not None and self.limits.unauthenticated else "invalid"
                raise self._fail(f"{word} multibulk length")
            self._position = end + 2
            if count > 0:  # Redis ignores empty and negative ones
                self._remaining = count
                self._total_bytes = 0
                return None
        return NEED_DATA

    def _read_arguments(self) -> LargeBulk | None | Literal[NeedData.NEED_DATA]:
        """Read arguments until none is missing (None), or more bytes are needed."""
        buffer = self._buffer
        arguments = self._arguments
        while self._remaining:
            size = self._bulk_size
            if size < 0 and self._read_small_arguments():
                return None
            if size < 0:
                end = buffer.find(CRLF, self._position)
                if end < 0:
                    if len(buffer) - self._position > self.limits.line_bytes_max:
                        raise self._fail("too big bulk count string")
                    return NEED_DATA
                size = self._bulk_length(buffer[self._position : end])
                self._position = end + 2
                self._bulk_size = size
            value = self._take_bulk(size)
            if value is NEED_DATA:
                return NEED_DATA
            if isinstance(value, LargeBulk):
                return value
            arguments.append(value)
            if isinstance(value, bytes):
                self._argument_bytes += size if len(value) else 0
            self._bulk_size = -1
            self._remaining -= 1
        return None

    def _read_small_arguments(self) -> bool:
        """Read the small complete arguments, the common case; return True if none is missing."""
        buffer, position, remaining, arguments = self._buffer, self._position, self._remaining, self._arguments
        if self._large_size >= 0 or self.limits.bulk_bytes_max < len(_SMALL_BULKS):
            return False
        begin_room = room = self.limits.total_bytes_max - self._total_bytes
        while remaining:
            end = buffer.find(CRLF, position, position + _SMALL_LINE_BYTES)
            size = _SMALL_BULKS.get(buffer[position:end]) if end >= 0 else None
            if size is None or size > room:
                break
            stop = end + 2 + size
            if buffer[stop : stop + 2] != CRLF:
                break
            arguments.append(buffer[end + 2 : stop])
            position = stop + 2
            room -= size
            remaining -= 1
        read = begin_room - room
        self._position, self._remaining = position, remaining
        self._total_bytes += read
        self._argument_bytes += read
        return not remaining

    def _bulk_length(self, line: bytes) -> int:
        if line[:1] != b"$":
            got = chr(line[0]) if line else "\r"
            raise self._fail(f"expected '$', got '{got}'")
        size = _SMALL_LENGTHS.get(line[1:])
        if size is None:
            size = parse_integer(line[1:])
        if size is None or size < 0:
            raise self._fail("invalid bulk length")
        self._count_bulk(size)
        return size

    def _line(self) -> bytes:
        """Return the line at the position with its line feed, or as much of it as has arrived."""
        end = self._buffer.find(b"\n", self._position)
        return self._buffer[self._position : end + 1 if end >= 0 else len(self._buffer)]

    def _read_inline(self) -> list[bytes | memoryview] | Literal[NeedData.NEED_DATA]:
        """Read a typed line; return an empty list for an empty line."""
        line = self._line()
        if protocol := protocol_of(line):
            self._failure = partial(ForeignProtocolError, protocol)
            raise self._failure()
        if (reason := refusal_of(line, self.limits.line_bytes_max)) is not None:
            raise self._fail(reason)
        if not line.endswith(b"\n"):
            return NEED_DATA
        self._position += len(line)
        arguments = split_inline(line[:-1].removesuffix(b"\r"))
        if arguments is None:
            raise self._fail("unbalanced quotes in request")
        if len(arguments) > self.limits.items_max:
            raise self._fail("invalid multibulk length")
        return list(arguments)


class _Frame:
    """An unfinished aggregate."""

    __slots__ = ("items", "kind", "remaining")

    def __init__(self, kind: int, remaining: int) -> None:
        self.kind = kind
        self.remaining = remaining
        self.items: list[Value] = []


_AGGREGATES: Final = {0x2A: "array", 0x25: "map", 0x7E: "set", 0x3E: "push", 0x7C: "attribute"}  # * % ~ > |
_BULKS: Final = {0x24: "bulk", 0x3D: "verbatim", 0x21: "error"}  # $ = !


class ReplyReader(_Reader):
    """Parses replies. RESP3 attributes are dropped: no reply's meaning depends on them."""

    __slots__ = ("_bulk_kind", "_bulk_size", "_stack")

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(limits)
        self._stack: list[_Frame] = []
        self._bulk_kind = 0  # 0: no bulk in progress
        self._bulk_size = -1

    @property
    def in_progress(self) -> bool:
        """True if a part of a reply has arrived and the rest has not."""
        return bool(self._stack) or self._bulk_kind != 0 or self._position < len(self._buffer)

    def next_value(self) -> "Value | LargeBulk | Literal[NeedData.NEED_DATA]":
        """Return the next whole reply, or LargeBulk, or NEED_DATA.

        Raises:
            ProtocolError: The input is not RESP or exceeds a limit. Every later call raises it again.
        """
        self._check_failure()
        while True:
            if self._bulk_kind == 0:
                line = self._next_line()
                if line is None:
                    return NEED_DATA
                complete, value = self._read_line(line)
            else:
                bulk = self._take_bulk(self._bulk_size)
                if bulk is NEED_DATA or isinstance(bulk, LargeBulk):
                    return bulk
                assert isinstance(bulk, bytes | memoryview)
                complete, value = True, self._finish_bulk(bulk)
            if complete:
                complete, value = self._deliver(value)
            if complete:
                self._total_bytes = 0
                return value

    def _next_line(self) -> bytes | None:
        end = self._buffer.find(CRLF, self._position)
        limit = self.limits.line_bytes_max
        if (end if end >= 0 else len(self._buffer)) - self._position > limit:
            raise self._fail(f"a line longer than {limit} bytes")
        if end < 0:
            return None
        line = self._buffer[self._position : end]
        self._position = end + 2
        return line

    def _read_line(self, line: bytes) -> tuple[bool, Value]:
        """Parse one line: return (True, value) for a complete value, otherwise (False, None)."""
        kind = line[0] if line else 0
        text = line[1:]
        if kind in _BULKS:
            return self._start_bulk(kind, text)
        if kind in _AGGREGATES:
            return self._start_aggregate(kind, text)
        if kind == 0x2B:  # +
            return True, SimpleString(self._clean(text))
        if kind == 0x2D:  # -
            return True, ErrorReply(self._clean(text))
        if kind == 0x3A and len(text) <= 20 and _REPLY_INTEGER.match(text):  # :
            number = int(text)
            if _INT64_MIN <= number <= _INT64_MAX:
                return True, number
        elif kind == 0x5F and not text:  # _
            return True, None
        elif kind == 0x23 and text in (b"t", b"f"):  # #
            return True, text == b"t"
        elif kind == 0x2C and _DOUBLE.match(text):  # ,
            return True, float(text)
        elif kind == 0x28 and len(text) <= _BIG_NUMBER_DIGITS_MAX and _REPLY_INTEGER.match(text):  # (
            return True, BigNumber(text)
        raise self._fail(f"a reply cannot begin with {line[:32]!r}")

    def _clean(self, text: bytes) -> bytes:
        if b"\n" in text or b"\r" in text:
            raise self._fail("a CR or LF inside a line")
        return text

    def _start_bulk(self, kind: int, text: bytes) -> tuple[bool, Value]:
        if text == b"-1" and kind == 0x24:
            return True, None
        size = parse_integer(text)
        if size is None or size < 0:
            raise self._fail("invalid bulk length")
        self._count_bulk(size)
        self._bulk_kind = kind
        self._bulk_size = size
        return False, None

    def _finish_bulk(self, bulk: bytes | memoryview) -> Value:
        kind = self._bulk_kind
        self._bulk_kind = 0
        if kind == 0x24:
            return bulk
        if kind == 0x21:
            return ErrorReply(bulk)
        if len(bulk) < 4 or bulk[3] != 0x3A:
            raise self._fail("a verbatim string without its format")
        return Verbatim(bytes(bulk[4:]), bytes(bulk[:3]).decode("latin-1"))

    def _start_aggregate(self, kind: int, text: bytes) -> tuple[bool, Value]:
        if text == b"-1" and kind == 0x2A:
            return True, None
        count = parse_integer(text)
        if count is not None and kind in (0x25, 0x7C):  # maps count pairs
            count *= 2
        if count is None or not 0 <= count <= self.limits.items_max:
            raise self._fail("invalid multibulk length")
        if len(self._stack) >= self.limits.depth_max:
            raise self._fail(f"arrays nested deeper than {self.limits.depth_max}")
        if count == 0 and kind == 0x7C:
            return False, None
        if count == 0:
            return True, _aggregate(kind, [])
        self._stack.append(_Frame(kind, count))
        return False, None

    def _deliver(self, value: Value) -> tuple[bool, Value]:
        """Add a value to the aggregate in progress; return (True, value) if the outermost value is complete."""
        while self._stack:
            frame = self._stack[-1]
            frame.items.append(value)
            frame.remaining -= 1
            if frame.remaining:
                return False, None
            self._stack.pop()
            if frame.kind == 0x7C:
                return False, None
            value = _aggregate(frame.kind, frame.items)
        return True, value


def _aggregate(kind: int, items: "list[Value]") -> Value:
    if kind == 0x2A:
        return items
    if kind == 0x25:
        return Map(items)
    return SetReply(items) if kind == 0x7E else Push(items)
