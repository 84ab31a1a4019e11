"""A pipelined client of a server that speaks RESP2, for control commands; the C core moves large values.

Any number of callers may send commands at the same time. The connection has one timeout: it is closed when the server
owes a reply and sends nothing for too long.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

from shadowserve import spans
from shadowserve.errors import ProtocolError, StorageRefusedError, StorageUnavailableError
from shadowserve.resp import NEED_DATA, ErrorReply, Limits, NeedData, ReplyReader, encode_command

ANSWER_BYTES_MAX: Final = 64 << 20


class Answers(Protocol):
    """A parser of replies: a ReplyReader, or one that parses some replies faster."""

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""

    def next_value(self) -> Any | Literal[NeedData.NEED_DATA]:
        """Return the next complete reply, or NEED_DATA."""


def refuse_error(command: str, answer: object) -> None:
    """Raise StorageRefusedError if ``answer`` is an error reply."""
    if isinstance(answer, ErrorReply):
        raise StorageRefusedError(f"storage refused {command}: {answer.decode('utf-8', 'replace')[:200]}")


@dataclass(slots=True)
class _Request:
    """Commands that were sent together, and their replies so far."""

    answer: "asyncio.Future[list[Any]]"
    count: int
    values: list[Any]
    sent_at: float


class RespClient(asyncio.Protocol):
    """One connection; replies come in the order of the commands.

    Attributes:
        closed: Resolves with the reason when the connection is closed.
    """

    def __init__(self, name: str, silence_max_s: float, answers: Answers | None = None) -> None:
        """``silence_max_s``: time that the server may owe a reply and send nothing; ``answers``: parser of replies."""
        self._name = name
        self._silence_max_s = silence_max_s
        self._loop = asyncio.get_running_loop()
        limits = Limits(bulk_bytes_max=ANSWER_BYTES_MAX, total_bytes_max=ANSWER_BYTES_MAX, large_bulk_bytes=1 << 62)
        self._reader: Answers = answers or ReplyReader(limits)
        self._requests: deque[_Request] = deque()
        self._transport: asyncio.Transport | None = None
        self._received_at = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._reason = f"storage {name} closed the connection"
        self.closed: asyncio.Future[str] = self._loop.create_future()
        self.traces = False  # the server knows KV.TRACE, and records spans, as far as is known

    async def open(
        self,
        host: str,
        port: int,
        greeting: Sequence[Sequence[bytes]],
        context: ssl.SSLContext | None,
        name: str | None,
    ) -> Self:
        """Connect, also with TLS (``context``, the ``name`` in the certificate), and send the first commands.

        An error reply to one of them is raised.
        """
        try:
            await self._loop.create_connection(lambda: self, host, port, ssl=context, server_hostname=name)
            for command, answer in zip(greeting, await self.ask(greeting), strict=True):
                refuse_error(command[0].decode(), answer)
        except BaseException:  # abort, because closing TLS would wait for the server
            self.abort("connecting timed out, or the first commands failed")
            raise
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio, like the next two methods."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Parse replies and resolve their requests."""
        self._received_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (value := self._reader.next_value()) is not NEED_DATA:
                self._add_reply(value)
        except ProtocolError as error:
            self.abort(f"storage {self._name} does not speak RESP as expected: {error}")

    def _add_reply(self, value: Any) -> None:
        if not self._requests:
            raise ProtocolError("a reply without a command")
        request = self._requests[0]
        request.values.append(value)
        if len(request.values) == request.count:
            self._requests.popleft()
            if not request.answer.done():
                request.answer.set_result(request.values)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._reason = f"the connection to storage {self._name} broke: {exc}"
        if self._watch is not None:
            self._watch.cancel()
        for request in self._requests:
            if not request.answer.done():
                request.answer.set_exception(StorageUnavailableError(self._reason))
        self._requests.clear()
        if not self.closed.done():
            self.closed.set_result(self._reason)

    def abort(self, reason: str) -> None:
        """Close at once; all requests fail with ``reason``."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, commands: Sequence[Sequence[str | bytes]]) -> list[Any]:
        """Send commands as one pipeline and return their replies; error replies are values."""
        if self._transport is not None and self._transport.is_closing():
            await asyncio.wait((self.closed,), timeout=self._silence_max_s)  # to learn the reason
        if self._transport is None or self.closed.done() or self._transport.is_closing():
            raise StorageUnavailableError(self._reason)
        if not commands:
            return []  # no reply would end the wait
        if self.traces and (context := spans.current()):
            traced, *answers = await self._exchange([["KV.TRACE", context, str(len(commands))], *commands])
            self.traces = traced == 1
            return answers
        return await self._exchange(commands)

    async def _exchange(self, commands: Sequence[Sequence[str | bytes]]) -> list[Any]:
        assert self._transport is not None
        now = self._loop.time()
        request = _Request(self._loop.create_future(), len(commands), [], now)
        self._requests.append(request)
        self._transport.write(b"".join(encode_command(*command) for command in commands))
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._silence_max_s, self._check_silence)
        return await request.answer

    def _check_silence(self) -> None:
        """Close the connection if the server owes a reply and has sent nothing for too long."""
        self._watch = None
        if not self._requests:
            return
        close_at = max(self._requests[0].sent_at, self._received_at) + self._silence_max_s
        if self._loop.time() >= close_at:
            self.abort(f"storage {self._name} owes a reply and has sent nothing for {self._silence_max_s:g} s")
        else:
            self._watch = self._loop.call_at(close_at, self._check_silence)
