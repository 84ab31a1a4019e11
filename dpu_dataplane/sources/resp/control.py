"""The connection for questions to one server, a node of a cluster or the only one; ``links.py`` has those for bytes.

It is pipelined: any number of callers ask at the same time. It is watched rather than each call: when the server owes
an answer and is silent for ``command_timeout``, the connection is given up.

RESP2 is spoken, since the C core reads only that, and any Redis server may stand in.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dpu_dataplane.sources.resp.answers import AnswerReader, MetaAnswer
from dpu_dataplane.sources.resp.links import Dialer, Node, refuse_error
from shadowserve import resp
from shadowserve.errors import ProtocolError, StorageUnavailableError

__all__ = ["Control"]


@dataclass(slots=True)
class _Question:
    """Commands sent together, and what has been answered so far."""

    answer: "asyncio.Future[list[resp.Value | MetaAnswer]]"
    count: int
    values: "list[resp.Value | MetaAnswer]"
    asked_at: float


class Control(asyncio.Protocol):
    """Commands out, answers back in the same order.

    Attributes:
        closed: why, once it is.
    """

    def __init__(self, name: str, silence_max: float) -> None:
        self._name = name
        self._silence_max = silence_max
        self._loop = asyncio.get_running_loop()
        self._reader = AnswerReader()
        self._questions: deque[_Question] = deque()
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._reason = f"storage {name} closed the connection"
        self.closed: asyncio.Future[str] = self._loop.create_future()

    @classmethod
    async def open(cls, dialer: Dialer, node: Node) -> "Control":
        """Connect, with TLS if so configured, and greet.

        Raises:
            StorageUnavailableError, StorageRefusedError: within ``connect_timeout``.
        """
        name = str(node)
        async with dialer.deadline("connect", name):
            context, server_name = None, None
            if dialer.tls is not None:
                context, server_name = dialer.tls.contexts()[0], dialer.tls.name_of(node.host)
            _, control = await asyncio.get_running_loop().create_connection(
                lambda: cls(name, dialer.command_timeout),
                node.host,
                node.port,
                ssl=context,
                server_hostname=server_name,
            )
            try:
                commands = dialer.greeting(replica=node.replica)
                for command, answer in zip(commands, await control.ask(commands), strict=True):
                    refuse_error(command[0].decode(), answer)
            except BaseException:
                control.abort("the greeting failed")
                raise
        return control

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
            while (value := self._reader.next_value()) is not resp.NEED_DATA:
                self._take(value)
        except ProtocolError as error:
            self.abort(f"storage {self._name} does not speak RESP as expected: {error}")

    def _take(self, value: "resp.Value | MetaAnswer") -> None:
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

    async def ask(self, commands: Sequence[Sequence[bytes]]) -> "list[resp.Value | MetaAnswer]":
        """Send commands as one pipeline and return an answer for each; errors are values.

        Raises:
            StorageUnavailableError: the connection broke, before or since.
        """
        if self._transport is None or self.closed.done() or self._transport.is_closing():
            raise StorageUnavailableError(self._reason)
        if not commands:
            return []  # no answer will come that could end the wait
        now = self._loop.time()
        question = _Question(self._loop.create_future(), len(commands), [], now)
        self._questions.append(question)
        self._transport.write(b"".join(resp.encode_command(*command) for command in commands))
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
