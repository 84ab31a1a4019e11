"""The way to the storage server: one control connection for questions, and data sockets for the C core.

The control connection is pipelined: any number of callers ask at the same time. It is watched rather than each call:
when the server owes an answer and is silent for ``command_timeout``, the connection is given up. While the server is
known to be away, calls fail at once and a task keeps trying to reach it, so that an outage costs a request nothing
and ends within half a second of the server's return.

RESP2 is spoken, since the C core reads only that, and any Redis server may stand in: where ``KV.META`` is unknown, the
same question is asked as one pipeline of STRLEN and GETRANGE.
"""

import asyncio
import contextlib
import logging
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dpu_dataplane.answers import AnswerReader, MetaAnswer, Stored
from dpu_dataplane.config import DataPlaneConfig, split_address
from dpu_dataplane.metrics import Metrics
from shadowserve import resp
from shadowserve.errors import ProtocolError, StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.record import head_length

__all__ = ["QUESTION_KEYS_MAX", "DataSockets", "StorageClient"]

HEAD_GUESS: Final = 4096
"""Bytes asked for where KV.META is unknown: the heads of chunks of up to 99 slices, such as 49 layers of K and V."""
META_KEYS_MAX: Final = 1024
"""Keys in one command: twice a prompt of 128K tokens, and some 3 MB of answer for 32 layers."""
QUESTION_KEYS_MAX: Final = 8 * META_KEYS_MAX
"""Keys in one round trip: 16 ranks' chains of 128K tokens."""
BACKOFF_FIRST: Final = 0.05
BACKOFF_MAX: Final = 0.5
STABLE_TIME: Final = 1.0
"""Seconds that a connection must have held for the next failure not to count as the same outage."""


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


class StorageClient:
    """Knows whether storage can be reached, asks it questions and opens data sockets to it."""

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = config.storage
        self._host, self._port = split_address(config.storage)
        self._username, self._password = config.storage_username, config.storage_password.get_secret_value()
        self._connect_timeout, self._command_timeout = config.connect_timeout, config.command_timeout
        self._metrics = metrics
        self._control: _Control | None = None
        self._failure: StorageError | None = None
        self._settled = asyncio.Event()  # connected, or known not to be
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
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    async def meta(self, keys: Sequence[bytes]) -> list[Stored | None]:
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
                found: list[Stored | None] = []
                for part, answer in zip(parts, answers, strict=True):
                    found += self._check_meta(control, answer, len(part))
                return found
            logger.info("storage %s does not know KV.META; asking it with STRLEN and GETRANGE instead", self.name)
            control.has_meta = False
        return await self._meta_by_ranges(control, names)

    async def delete(self, key: bytes) -> None:
        """Delete a record.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`meta`.
        """
        control = await self._connected()
        [answer] = await control.ask([[b"DEL", storage_key(key)]])
        _refuse_error("DEL", answer)

    async def open_data_socket(self) -> socket.socket:
        """Return a connected, authenticated, non-blocking socket.

        Raises:
            StorageUnavailableError, StorageRefusedError: within ``connect_timeout``.
        """
        self.check()
        async with self._deadline("connect"):
            loop = asyncio.get_running_loop()
            sock = await self._open_socket()
            try:
                reader = AnswerReader()
                commands = self._greeting()
                await loop.sock_sendall(sock, b"".join(resp.encode_command(*command) for command in commands))
                for command in commands:
                    while (answer := reader.next_value()) is resp.NEED_DATA:
                        data = await loop.sock_recv(sock, 4096)
                        if not data:
                            raise StorageUnavailableError(f"storage {self.name} closed the connection on greeting")
                        reader.feed(data)
                    _refuse_error(command[0].decode(), answer)
            except BaseException:
                sock.close()
                raise
        return sock

    async def _open_socket(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure

    @contextlib.asynccontextmanager
    async def _deadline(self, operation: str) -> AsyncIterator[None]:
        """Bound an attempt to connect, and turn what it raises into StorageError."""
        try:
            async with asyncio.timeout(self._connect_timeout):
                yield
        except TimeoutError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {self.name}: no answer for {self._connect_timeout:g} s; is it stalled?"
            ) from error
        except OSError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {self.name}: {error.strerror or error}; is it running?"
            ) from error
        except ProtocolError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {self.name}: {error}; does a Redis-compatible server listen there?"
            ) from error

    def _greeting(self) -> list[list[bytes]]:
        commands = [[b"PING"]]
        if self._password:
            user = [self._username.encode()] if self._username else []
            commands.insert(0, [b"AUTH", *user, self._password.encode()])
        return commands

    async def _connected(self) -> _Control:
        """Return the connection, waiting for the attempt in progress if there has been no failure since the last."""
        while True:
            if self._control is not None:
                return self._control
            self.check()
            await self._settled.wait()

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        backoff, connections = BACKOFF_FIRST, 0
        while True:
            try:
                control = await self._connect()
            except StorageError as error:
                self._go_down(error)
            else:
                connections += 1
                self._metrics.storage_connections += 1
                logger.info("connected to storage %s", self.name)
                since = loop.time()
                reason = await self._serve(control)
                if loop.time() - since >= STABLE_TIME:
                    backoff = BACKOFF_FIRST
                    logger.warning("%s; reconnecting", reason)
                    continue
                self._go_down(StorageUnavailableError(reason))
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))
            backoff = min(2 * backoff, BACKOFF_MAX)

    async def _serve(self, control: _Control) -> str:
        """Let callers use the connection until it closes; return why it did."""
        self._control, self._failure = control, None
        self._settled.set()
        try:
            return await asyncio.shield(control.closed)
        finally:
            self._control = None
            self._settled.clear()
            control.abort("the data plane is stopping")

    def _go_down(self, error: StorageError) -> None:
        if self._failure is None:
            logger.warning("%s (trying again; until then every call is a miss)", error)
        self._failure = error
        self._settled.set()
        self._settled = asyncio.Event()

    async def _connect(self) -> _Control:
        loop = asyncio.get_running_loop()
        async with self._deadline("connect"):
            _, control = await loop.create_connection(
                lambda: _Control(self.name, self._command_timeout), self._host, self._port
            )
            try:
                commands = self._greeting()
                for command, answer in zip(commands, await control.ask(commands), strict=True):
                    _refuse_error(command[0].decode(), answer)
            except BaseException:
                control.abort("the greeting failed")
                raise
        return control

    def _check_meta(self, control: _Control, answer: "resp.Value | MetaAnswer", count: int) -> list[Stored | None]:
        if isinstance(answer, MetaAnswer) and len(answer) == count:
            return answer
        _refuse_error("KV.META", answer)
        if isinstance(answer, list) and len(answer) == count:
            try:
                return [None if entry is None else _stored(*entry) for entry in answer]  # type: ignore[misc]
            except (TypeError, ValueError):
                pass
        reason = f"storage {self.name} answered KV.META in a form that this build does not know"
        control.abort(reason)
        raise StorageUnavailableError(reason)

    async def _meta_by_ranges(self, control: _Control, names: list[bytes]) -> list[Stored | None]:
        """Ask a server without KV.META: sizes and first bytes of all keys in one pipeline, rarely a second one."""
        commands = [
            command
            for name in names
            for command in ([b"STRLEN", name], [b"GETRANGE", name, b"0", b"%d" % (HEAD_GUESS - 1)])
        ]
        answers = await control.ask(commands)
        found: list[Stored | None] = []
        for length, head in zip(answers[::2], answers[1::2], strict=True):
            if isinstance(length, resp.ErrorReply) and length.code == "WRONGTYPE":
                found.append(Stored(0, b""))
                continue
            _refuse_error("STRLEN", length)
            _refuse_error("GETRANGE", head)
            if not isinstance(length, int) or not isinstance(head, bytes):
                raise StorageUnavailableError(f"storage {self.name} answered STRLEN or GETRANGE with another type")
            stored = Stored(length, head)
            size = _head_size(stored)  # no need to keep the bytes behind it
            found.append(Stored(length, head[:size] if size else head) if length else None)
        longer = {
            index: size
            for index, entry in enumerate(found)
            if entry is not None and (size := _head_size(entry)) > len(entry.head)
        }
        if longer:
            ranges = [[b"GETRANGE", names[index], b"0", b"%d" % (size - 1)] for index, size in longer.items()]
            for index, head in zip(longer, await control.ask(ranges), strict=True):
                _refuse_error("GETRANGE", head)
                known = found[index]
                if known is not None and isinstance(head, bytes):
                    found[index] = Stored(known.length, head)
        return found


def _stored(length: Any, head: Any) -> Stored:
    if type(length) is not int or not isinstance(head, bytes):
        raise TypeError
    return Stored(length, head)


def _head_size(stored: Stored) -> int:
    """Return how long the head of a value is, 0 where it is no record or claims more than the value has."""
    size = head_length(stored.head)
    return size if size <= stored.length else 0


def _is_unknown_command(answer: object) -> bool:
    return isinstance(answer, resp.ErrorReply) and answer.startswith(b"ERR unknown command")


def _refuse_error(command: str, answer: object) -> None:
    if isinstance(answer, resp.ErrorReply):
        raise StorageRefusedError(f"storage refused {command}: {answer.decode('utf-8', 'replace')[:200]}")


class DataSockets:
    """The data sockets of one user (fetching, storing): opened at need, kept, and all re-made after a failure."""

    def __init__(self, client: StorageClient, count: int, metrics: Metrics) -> None:
        self._client = client
        self._count = count
        self._metrics = metrics
        self._sockets: list[socket.socket] = []

    async def open(self) -> list[socket.socket]:
        """Return the sockets, those that died since they were last used replaced.

        Raises:
            StorageUnavailableError, StorageRefusedError: one could not be opened.
        """
        self._client.check()
        for sock in [sock for sock in self._sockets if not _is_quiet(sock)]:
            self._sockets.remove(sock)
            sock.close()
        while len(self._sockets) < self._count:
            self._sockets.append(await self._client.open_data_socket())
            self._metrics.data_connections += 1
        return list(self._sockets)

    def shut_down(self) -> None:
        """Make whatever thread waits on a socket return; the sockets stay open until :meth:`close`."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all; the next :meth:`open` makes new ones."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()


def _is_quiet(sock: socket.socket) -> bool:
    """Return whether the connection stands and has nothing to say, as between two rounds."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
