"""A connection over which a server that speaks RESP2 is asked; values that are bytes to be moved go through the C core.

It is pipelined: any number of callers ask at the same time. It is watched rather than each call: when the server owes
an answer and is silent for too long, the connection is given up.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, Self

from shadowserve.errors import ProtocolError, StorageRefusedError, StorageUnavailableError
from shadowserve.resp import NEED_DATA, ErrorReply, Limits, NeedData, ReplyReader, encode_command

ANSWER_BYTES_MAX: Final = 64 << 20


class Answers(Protocol):
    """Bytes in, answers out: a ReplyReader that hands everything out whole, or one that knows some answers better."""

    def feed(self, data: bytes) -> None:
        """Take ``data`` as the next bytes of the stream."""

    def next_value(self) -> Any | Literal[NeedData.NEED_DATA]:
        """Return the next whole answer, or NEED_DATA."""


def refuse_error(command: str, answer: object) -> None:
    """Raise StorageRefusedError if ``answer`` is an error."""
    if isinstance(answer, ErrorReply):
        raise StorageRefusedError(f"storage refused {command}: {answer.decode('utf-8', 'replace')[:200]}")


@dataclass(slots=True)
class _Question:
    """Commands sent together, and what has been answered so far."""

    answer: "asyncio.Future[list[Any]]"
    count: int
    values: list[Any]
    asked_at: float


class RespClient(asyncio.Protocol):
    """Commands out, answers back in the same order.

    Attributes:
        closed: why, once it is.
    """

    def __init__(self, name: str, silence_max: float, answers: Answers | None = None) -> None:
        """Know how to ask; :meth:`open` connects.

        Args:
            name: of the server, for messages.
            silence_max: seconds for which it may owe an answer and say nothing.
            answers: reads what it says; by default all of RESP, answers of up to 64 MiB.
        """
        self._name = name
        self._silence_max = silence_max
        self._loop = asyncio.get_running_loop()
        limits = Limits(bulk_bytes_max=ANSWER_BYTES_MAX, total_bytes_max=ANSWER_BYTES_MAX, large_bulk_bytes=1 << 62)
        self._reader: Answers = answers or ReplyReader(limits)
        self._questions: deque[_Question] = deque()
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._reason = f"storage {name} closed the connection"
        self.closed: asyncio.Future[str] = self._loop.create_future()

    async def open(
        self,
        host: str,
        port: int,
        greeting: Sequence[Sequence[bytes]],
        context: ssl.SSLContext | None,
        name: str | None,
    ) -> Self:
        """Connect, with TLS if there is a context, and greet.

        Args:
            host: of the server, and
            port: where it listens.
            greeting: the first commands; none may be refused.
            context: for TLS, in which
            name: is what the server's certificate must hold.

        Raises:
            OSError, StorageUnavailableError, StorageRefusedError, ProtocolError: it cannot be reached, or refuses.
        """
        try:
            await self._loop.create_connection(lambda: self, host, port, ssl=context, server_hostname=name)
            for command, answer in zip(greeting, await self.ask(greeting), strict=True):
                refuse_error(command[0].decode(), answer)
        except BaseException:  # of TLS too, which would wait for the other side's goodbye
            self.abort("it was not made in time, or the greeting failed")
            raise
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: called by asyncio, as the next two."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Hand answers to those who asked."""
        self._heard_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (value := self._reader.next_value()) is not NEED_DATA:
                self._take(value)
        except ProtocolError as error:
            self.abort(f"storage {self._name} does not speak RESP as expected: {error}")

    def _take(self, value: Any) -> None:
        if not self._questions:
            raise ProtocolError("an answer to nothing")
        question = self._questions[0]
        question.values.append(value)
        if len(question.values) == question.count:
            self._questions.popleft()
            if not question.answer.done():
                question.answer.set_result(question.values)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait."""
        if exc is not None:
            self._reason = f"the connection to storage {self._name} broke: {exc}"
        if self._watch is not None:
            self._watch.cancel()
        for question in self._questions:
            if not question.answer.done():
                question.answer.set_exception(StorageUnavailableError(self._reason))
        self._questions.clear()
        if not self.closed.done():
            self.closed.set_result(self._reason)

    def abort(self, reason: str) -> None:
        """Close at once; whoever waits is told ``reason``."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, commands: Sequence[Sequence[str | bytes]]) -> list[Any]:
        """Send commands as one pipeline and return an answer for each; errors are values.

        Raises:
            StorageUnavailableError: the connection broke, before or since.
        """
        if self._transport is not None and self._transport.is_closing():
            await asyncio.wait((self.closed,), timeout=self._silence_max)  # why: the loop tells in its next turns
        if self._transport is None or self.closed.done() or self._transport.is_closing():
            raise StorageUnavailableError(self._reason)
        if not commands:
            return []  # no answer will come that could end the wait
        now = self._loop.time()
        question = _Question(self._loop.create_future(), len(commands), [], now)
        self._questions.append(question)
        self._transport.write(b"".join(encode_command(*command) for command in commands))
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._silence_max, self._look)
        return await question.answer

    def _look(self) -> None:
        """Give the connection up if the server owes an answer and has been silent for too long."""
        self._watch = None
        if not self._questions:
            return
        give_up_at = max(self._questions[0].asked_at, self._heard_at) + self._silence_max
        if self._loop.time() >= give_up_at:
            self.abort(f"storage {self._name} owes an answer and was silent for {self._silence_max:g} s")
        else:
            self._watch = self._loop.call_at(give_up_at, self._look)
