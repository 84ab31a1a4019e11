"""Parser of answers on control connections, with a fast path for KV.META; and the commands for servers without it.

A lookup of a long prompt reads some 500 entries: ``[length, header]``, null, or ``[length, ms]`` for a cold record. The
general parser would take most of a lookup's time for them; one regular expression for each takes a fifth of it. All
other answers, and those whose beginning arrives in pieces, take the general path, with the same result.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, TypeAlias

from dpu_dataplane.sources.found import Cold, Found, Stored, Unanswered
from shadowserve import resp
from shadowserve.errors import ProtocolError, StorageError
from shadowserve.record import HEADER_BYTES_MAX

HEADER_GUESS: Final = 4096
"""Bytes to request from servers without KV.META: the headers of chunks of up to 99 slices (49 layers of K and V)."""

ITEMS_MAX: Final = 2048
TOTAL_BYTES_MAX: Final = 96 << 20
"""Most bytes of an answer: 1,024 headers of 96 KiB; those of 32 layers have 2.6 KiB."""

_LIMITS: Final = resp.Limits(
    bulk_bytes_max=HEADER_BYTES_MAX,
    items_max=ITEMS_MAX,
    depth_max=4,
    total_bytes_max=TOTAL_BYTES_MAX,
    large_bulk_bytes=HEADER_BYTES_MAX + 1,  # never: headers are small
)
_BEGIN: Final = re.compile(rb"\*([1-9][0-9]{0,3})\r\n(?=\*2\r\n:|\$-1\r\n)")
_ENTRY: Final = re.compile(rb"\*2\r\n:(0|[1-9][0-9]{0,17})\r\n\$(0|[1-9][0-9]{0,6})\r\n")
_COLD: Final = re.compile(rb"\*2\r\n:([1-9][0-9]{0,17})\r\n:([1-9][0-9]{0,17})\r\n")
_ENTRY_BYTES_MAX: Final = 50  # before a header
_NULL: Final = b"$-1\r\n"


Answer: TypeAlias = "resp.Value | MetaAnswer | StorageError"
Ask: TypeAlias = Callable[[Sequence[Sequence[bytes]], Sequence[bytes]], Awaitable[Sequence[Answer]]]


def header_commands(name: bytes, size: int) -> tuple[list[bytes], list[bytes]]:
    """Return the commands for the length and the first ``size`` bytes of a value; see :func:`stored_of`."""
    return [b"STRLEN", name], [b"GETRANGE", name, b"0", b"%d" % (size - 1)]


def stored_of(length: object, header: object) -> Stored | None | Literal[False]:
    """Convert the answers to :func:`header_commands`; False for answers of another type."""
    if isinstance(length, resp.ErrorReply) and length.code == "WRONGTYPE":
        return Stored(0, b"")
    if not isinstance(length, int) or length < 0 or not isinstance(header, bytes):
        return False
    size = Stored(length, header).header_bytes  # the bytes after the header are not needed
    return Stored(length, header[:size] if size else header) if length else None


async def find_by_ranges(
    names: Sequence[bytes], indexes: Sequence[int], found: list[Found], ask: Ask, where: Callable[[bytes], object]
) -> None:
    """Look some keys up by lengths and first bytes, and longer headers by a second request; write into ``found``.

    ``ask`` sends commands, each for its name, and returns their answers: errors are values. ``where`` names the node of
    a name for messages.
    """
    sizes = dict.fromkeys(indexes, HEADER_GUESS)
    for _ in range(2):
        if not sizes:
            return
        commands = [command for index, size in sizes.items() for command in header_commands(names[index], size)]
        answers = await ask(commands, [names[index] for index in sizes for _ in (0, 1)])
        for position, index in enumerate(sizes):
            found[index] = _found(where(names[index]), *answers[2 * position : 2 * position + 2])
        entries = [(index, found[index]) for index in sizes]
        sizes = {
            index: entry.header_bytes
            for index, entry in entries
            if isinstance(entry, Stored) and entry.header_bytes > len(entry.header)
        }


def _found(node: object, length: Answer, header: Answer) -> Found:
    """Convert a node's answers to :func:`header_commands`."""
    error = length if isinstance(length, StorageError | resp.ErrorReply) else header
    if isinstance(error, StorageError):
        return Unanswered.of(error)
    if isinstance(error, resp.ErrorReply) and error.code != "WRONGTYPE":
        text = error.decode("utf-8", "replace")[:200]
        if error.code in ("MOVED", "ASK"):
            return Unanswered(f"{node} and others redirect in a circle, last with: {text}")
        return Unanswered(f"{node} refused STRLEN or GETRANGE: {text}", refused=True)
    entry = stored_of(length, header)
    return Unanswered(f"{node} answered STRLEN or GETRANGE with another type") if entry is False else entry


class MetaAnswer(list[Stored | Cold | None]):
    """An answer to KV.META: an entry for each key, None for a missing record."""


class AnswerReader:
    """Parses answers, as :class:`shadowserve.resp.ReplyReader` does; those to KV.META are a :class:`MetaAnswer`."""

    def __init__(self) -> None:
        self._general = resp.ReplyReader(_LIMITS)
        self._data = b""
        self._position = 0
        self._entries: MetaAnswer | None = None  # of a KV.META answer in progress
        self._remaining = 0
        self._total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream. Any split of a stream gives the same results."""
        if self._entries is None and self._general.in_progress:
            self._general.feed(data)
        else:
            self._data = self._data[self._position :] + data if self._position < len(self._data) else data
            self._position = 0

    def next_value(self) -> "resp.Value | MetaAnswer | Literal[resp.NeedData.NEED_DATA]":
        """Return the next whole answer, or NEED_DATA; ProtocolError if it is not RESP, or exceeds a limit."""
        if self._entries is None:
            begin = None if self._general.in_progress else _BEGIN.match(self._data, self._position)
            if begin is None or int(begin[1]) > ITEMS_MAX:
                return self._next_general()
            self._entries, self._remaining, self._total_bytes = MetaAnswer(), int(begin[1]), 0
            self._position = begin.end()
        return self._next_entries(self._entries)

    def _next_general(self) -> resp.Value | Literal[resp.NeedData.NEED_DATA]:
        if self._position < len(self._data):
            self._general.feed(self._data[self._position :])
            self._data, self._position = b"", 0
        value = self._general.next_value()
        assert not isinstance(value, resp.LargeBulk), "the limits allow no large bulks"
        return value

    def _next_entries(self, entries: MetaAnswer) -> MetaAnswer | Literal[resp.NeedData.NEED_DATA]:
        data, position = self._data, self._position
        while self._remaining:
            match = _ENTRY.match(data, position)
            if match is not None:
                size = int(match[2])
                begin, end = match.end(), match.end() + size
                if size > HEADER_BYTES_MAX or self._total_bytes + size > TOTAL_BYTES_MAX:
                    raise ProtocolError("Protocol error: an answer larger than the limits allow")
                if end + 2 > len(data):
                    break
                if data[end : end + 2] != b"\r\n":
                    raise ProtocolError("Protocol error: expected CRLF after a bulk")
                entries.append(Stored(int(match[1]), data[begin:end]))
                self._total_bytes += size
                position = end + 2
            elif data.startswith(_NULL, position):
                entries.append(None)
                position += len(_NULL)
            elif (cold := _COLD.match(data, position)) is not None:
                entries.append(Cold(int(cold[1]), int(cold[2])))
                position = cold.end()
            elif len(data) - position < _ENTRY_BYTES_MAX:
                break
            else:
                raise ProtocolError(f"Protocol error: no entry begins like {data[position : position + 32]!r}")
            self._remaining -= 1
        self._position = position
        if self._remaining:
            return resp.NEED_DATA
        self._entries = None
        return entries
