"""One storage server: a control connection for questions; ``links.py`` has those for bytes.

The control connection is pipelined: any number of callers ask at the same time. It is watched rather than each call:
when the server owes an answer and is silent for ``command_timeout``, the connection is given up. While the server is
known to be away, calls fail at once and a task keeps trying to reach it, ever less often (``outage.py``), so that an
outage costs a request nothing and ends within some 5 s of the server's return, a short one sooner.

RESP2 is spoken, since the C core reads only that, and any Redis server may stand in: where ``KV.META`` is unknown, the
same question is asked as one pipeline of STRLEN and GETRANGE.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dpu_dataplane.config import DataPlaneConfig, split_address
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.answers import HEAD_GUESS, AnswerReader, MetaAnswer, stored_of
from dpu_dataplane.sources.resp.links import Dialer, Node, refuse_error
from dpu_dataplane.sources.resp.servers import Redirect
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Found, Stored, head_size
from shadowserve import resp
from shadowserve.errors import ProtocolError, StorageError, StorageUnavailableError
from shadowserve.keys import storage_key

__all__ = ["OneServer"]

META_KEYS_MAX: Final = 1024
"""Keys in one command: twice a prompt of 128K tokens, and some 3 MB of answer for 32 layers."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Question:
    """Commands sent together, and what has been answered so far."""

    answer: "asyncio.Future[list[resp.Value | MetaAnswer]]"
    count: int
    values: "list[resp.Value | MetaAnswer]"
    asked_at: float


class _Control(asyncio.Protocol):
    """One connection: commands out, answers back in the same order."""

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
        self.has_meta = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
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


class OneServer:
    """Knows whether the storage server can be reached, and asks it questions.

    Raises:
        ConfigurationError: TLS is wanted and cannot be had.
    """

    clustered = False

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = config.storage
        self._node = Node(*split_address(config.storage))
        self.dialer = Dialer(config)
        self._metrics = metrics
        self._control: _Control | None = None
        self._outage = Outage(logger)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; does not wait for it, since storage may be absent when the daemon starts."""
        self._task = asyncio.create_task(self._keep_connected(), name="storage connection")

    async def close(self) -> None:
        """Close the connection and stop trying."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def connected(self) -> bool:
        """Whether the control connection stands."""
        return self._control is not None

    def check(self) -> None:
        """Raise the StorageError of the current outage, if there is one."""
        self._outage.check()

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what storage holds under each of up to QUESTION_KEYS_MAX keys, in one round trip.

        Raises:
            StorageUnavailableError, StorageRefusedError: no connection, or an error as answer.
        """
        assert len(keys) <= QUESTION_KEYS_MAX
        control = await self._connected()
        names = [storage_key(key) for key in keys]
        if control.has_meta:
            parts = [names[first : first + META_KEYS_MAX] for first in range(0, len(names), META_KEYS_MAX)]
            answers = await control.ask([[b"KV.META", *part] for part in parts])
            if not any(_is_unknown_command(answer) for answer in answers):
                found: list[Found] = []
                for part, answer in zip(parts, answers, strict=True):
                    found += self._check_meta(control, answer, len(part))
                return found
            logger.info("storage %s does not know KV.META; asking it with STRLEN and GETRANGE instead", self.name)
            control.has_meta = False
        return await self._meta_by_ranges(control, names)

    async def delete(self, key: bytes) -> None:
        """Delete a record.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        control = await self._connected()
        [answer] = await control.ask([[b"DEL", storage_key(key)]])
        refuse_error("DEL", answer)

    def nodes(self) -> Sequence[Node]:
        """Return the one there is."""
        return [self._node]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return the one node for each key."""
        return [self._node] * len(keys)

    def redirect(self, asked: Node, text: str) -> Redirect | None:
        """Return ``None``: who names one node of a cluster as ``storage`` gets its refusal."""
        return None

    async def recover(self, node: Node | None) -> None:
        """Do nothing: the control connection is watched, and data connections are made when they are needed."""

    async def _connected(self) -> _Control:
        """Return the connection, waiting for the attempt in progress if there has been no failure since the last."""
        while True:
            if self._control is not None:
                return self._control
            self.check()
            await self._outage.settled()

    async def _keep_connected(self) -> None:
        while True:
            try:
                control = await self._connect()
            except StorageError as error:
                self._outage.begin(error)
            else:
                self._metrics.storage_connections += 1
                logger.info("connected to storage %s", self.name)
                if await self._serve(control):
                    continue
            await asyncio.sleep(self._outage.pause())

    async def _serve(self, control: _Control) -> bool:
        """Let callers use the connection until it closes; return whether it held, and may be made again at once."""
        self._control = control
        self._outage.end()
        try:
            reason = await asyncio.shield(control.closed)
        finally:
            self._control = None
            held = self._outage.lose()
            control.abort("the data plane is stopping")
        if held:
            logger.warning("%s; reconnecting", reason)
        else:
            self._outage.begin(StorageUnavailableError(reason))
        return held

    async def _connect(self) -> _Control:
        loop = asyncio.get_running_loop()
        dialer, (host, port, _) = self.dialer, self._node
        async with dialer.deadline("connect", self.name):
            context, name = None, None
            if dialer.tls is not None:
                context, name = dialer.tls.contexts()[0], dialer.tls.name_of(host)
            _, control = await loop.create_connection(
                lambda: _Control(self.name, dialer.command_timeout), host, port, ssl=context, server_hostname=name
            )
            try:
                commands = dialer.greeting()
                for command, answer in zip(commands, await control.ask(commands), strict=True):
                    refuse_error(command[0].decode(), answer)
            except BaseException:
                control.abort("the greeting failed")
                raise
        return control

    def _check_meta(self, control: _Control, answer: "resp.Value | MetaAnswer", count: int) -> list[Stored | None]:
        if isinstance(answer, MetaAnswer) and len(answer) == count:
            return answer
        refuse_error("KV.META", answer)
        if isinstance(answer, list) and len(answer) == count:
            try:
                return [None if entry is None else _stored(*entry) for entry in answer]  # type: ignore[misc]
            except (TypeError, ValueError):
                pass
        reason = f"storage {self.name} answered KV.META in a form that this build does not know"
        control.abort(reason)
        raise StorageUnavailableError(reason)

    async def _meta_by_ranges(self, control: _Control, names: list[bytes]) -> list[Found]:
        """Ask a server without KV.META: sizes and first bytes of all keys in one pipeline, rarely a second one."""
        commands = [
            command
            for name in names
            for command in ([b"STRLEN", name], [b"GETRANGE", name, b"0", b"%d" % (HEAD_GUESS - 1)])
        ]
        answers = await control.ask(commands)
        found: list[Found] = []
        for length, head in zip(answers[::2], answers[1::2], strict=True):
            if not (isinstance(length, resp.ErrorReply) and length.code == "WRONGTYPE"):
                refuse_error("STRLEN", length)
                refuse_error("GETRANGE", head)
            entry = stored_of(length, head)
            if entry is False:
                raise StorageUnavailableError(f"storage {self.name} answered STRLEN or GETRANGE with another type")
            found.append(entry)
        longer = {
            index: size
            for index, entry in enumerate(found)
            if isinstance(entry, Stored) and (size := head_size(entry)) > len(entry.head)
        }
        if longer:
            ranges = [[b"GETRANGE", names[index], b"0", b"%d" % (size - 1)] for index, size in longer.items()]
            for index, head in zip(longer, await control.ask(ranges), strict=True):
                refuse_error("GETRANGE", head)
                known = found[index]
                if isinstance(known, Stored) and isinstance(head, bytes):
                    found[index] = Stored(known.length, head)
        return found


def _stored(length: Any, head: Any) -> Stored:
    if type(length) is not int or not isinstance(head, bytes):
        raise TypeError
    return Stored(length, head)


def _is_unknown_command(answer: object) -> bool:
    return isinstance(answer, resp.ErrorReply) and answer.startswith(b"ERR unknown command")
