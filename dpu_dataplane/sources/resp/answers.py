"""Answers on a control connection: a ReplyReader with a short cut for KV.META; and what is asked where that is unknown.

A lookup of a long prompt reads some 500 entries: ``[length, head]``, null, or ``[length, ms]`` of a record in object
storage. Value by value that would be most of a lookup's time; entry by entry, with one regular expression each, it is a
fifth. Everything else, and an answer whose beginning has not arrived in one piece, goes the general way, with the same
result.
"""

import re
from typing import Final, Literal

from dpu_dataplane.sources.source import Cold, Stored, head_size
from shadowserve import resp
from shadowserve.errors import ProtocolError
from shadowserve.record import HEAD_BYTES_MAX

__all__ = ["HEAD_GUESS", "AnswerReader", "MetaAnswer", "head_question", "stored_of"]

HEAD_GUESS: Final = 4096
"""Bytes asked for where KV.META is unknown: the heads of chunks of up to 99 slices, such as 49 layers of K and V."""

ITEMS_MAX: Final = 2048
TOTAL_BYTES_MAX: Final = 96 << 20
"""Of one answer: 1,024 heads of 96 KiB; those of 32 layers have 2.6."""

_LIMITS: Final = resp.Limits(
    bulk_bytes_max=HEAD_BYTES_MAX,
    items_max=ITEMS_MAX,
    depth_max=4,
    total_bytes_max=TOTAL_BYTES_MAX,
    large_bulk_bytes=HEAD_BYTES_MAX + 1,  # never: heads are small enough to be handed out as bytes
)
_BEGIN: Final = re.compile(rb"\*([1-9][0-9]{0,3})\r\n(?=\*2\r\n:|\$-1\r\n)")
_ENTRY: Final = re.compile(rb"\*2\r\n:(0|[1-9][0-9]{0,17})\r\n\$(0|[1-9][0-9]{0,6})\r\n")
_COLD: Final = re.compile(rb"\*2\r\n:([1-9][0-9]{0,17})\r\n:([1-9][0-9]{0,17})\r\n")
_ENTRY_BYTES_MAX: Final = 50  # of what precedes a head
_NULL: Final = b"$-1\r\n"


def head_question(name: bytes, size: int) -> tuple[list[bytes], list[bytes]]:
    """Return the commands whose answers :func:`stored_of` reads, with so many bytes of the value."""
    return [b"STRLEN", name], [b"GETRANGE", name, b"0", b"%d" % (size - 1)]


def stored_of(length: object, head: object) -> Stored | None | Literal[False]:
    """Return what the answers to a :func:`head_question` say; False where they are no such answers."""
    if isinstance(length, resp.ErrorReply) and length.code == "WRONGTYPE":
        return Stored(0, b"")
    if not isinstance(length, int) or not isinstance(head, bytes):
        return False
    stored = Stored(length, head)
    size = head_size(stored)  # no need to keep the bytes behind it
    return Stored(length, head[:size] if size else head) if length else None


class MetaAnswer(list[Stored | Cold | None]):
    """An answer to KV.META: an entry for each key, None where there is no record."""


class AnswerReader:
    """Bytes in, answers out, as :class:`shadowserve.resp.ReplyReader`; KV.META's come as :class:`MetaAnswer`."""

    def __init__(self) -> None:
        self._general = resp.ReplyReader(_LIMITS)
        self._data = b""
        self._position = 0
        self._entries: MetaAnswer | None = None  # of the answer in progress, if it is KV.META's
        self._remaining = 0
        self._total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take ``data`` as the next bytes of the stream. Any split of a stream gives the same results."""
        if self._entries is None and self._general.in_progress:
            self._general.feed(data)
        else:
            self._data = self._data[self._position :] + data if self._position < len(self._data) else data
            self._position = 0

    def next_value(self) -> "resp.Value | MetaAnswer | Literal[resp.NeedData.NEED_DATA]":
        """Return the next whole answer, or NEED_DATA.

        Raises:
            ProtocolError: the peer does not speak RESP, or broke a limit.
        """
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
        assert not isinstance(value, resp.LargeBulk), "large bulks are switched off by the limits"
        return value

    def _next_entries(self, entries: MetaAnswer) -> MetaAnswer | Literal[resp.NeedData.NEED_DATA]:
        data, position = self._data, self._position
        while self._remaining:
            match = _ENTRY.match(data, position)
            if match is not None:
                size = int(match[2])
                begin, end = match.end(), match.end() + size
                if size > HEAD_BYTES_MAX or self._total_bytes + size > TOTAL_BYTES_MAX:
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
