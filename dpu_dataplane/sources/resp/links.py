"""Connections to storage: control connections (:class:`RespClient`), and links, over which the C core moves bytes.

Nothing blocks the event loop: Python connects; with TLS, the C core does the handshake. The greeting goes through the
same TLS session as the bytes.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NamedTuple

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.answers import AnswerReader, MetaAnswer
from shadowserve import native, resp, spans, tls
from shadowserve.addresses import join_address
from shadowserve.errors import (
    ConfigurationError,
    NativeError,
    ProtocolError,
    StorageError,
    StorageUnavailableError,
)
from shadowserve.resp_client import RespClient, refuse_error
from shadowserve.tls import Renewed, read_authorities, read_key_pair

_RECEIVE_BYTES: Final = 4096
_KNOWS_TRACE: Final = (b"COMMAND", b"INFO", b"KV.TRACE")
"""Asks for a command that only storage nodes of ShadowServe have; other servers answer nil."""

logger = logging.getLogger(__name__)


class Node(NamedTuple):
    """The address of a storage server; ``replica``: connections begin with READONLY, to read from a replica."""

    host: str
    port: int
    replica: bool = False

    def __str__(self) -> str:
        return join_address(self.host, self.port)


class Link:
    """One data connection: a connected, non-blocking socket, and with TLS its session."""

    def __init__(self, node: Node, sock: socket.socket) -> None:
        self.node = node
        self.sock = sock
        self.latency_s = 0.0  # seconds that the last command of the greeting took
        self.takes_layers = True  # the server knows KV.LAYERS, as far as is known
        self.takes_rates = True  # the server accepts the rates that KV.LAYERS named, as far as is known
        self.session: native.TlsSession | None = None
        self.traces = False  # the server knows KV.TRACE, and records spans, as far as is known
        self.context = ""  # of the last span that KV.TRACE named

    def fileno(self) -> int:
        return self.sock.fileno()

    def is_idle(self) -> bool:
        """Return whether the connection is open and has no bytes to read, as it must be between two batches."""
        if self.session is not None and self.session.has_pending:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shut_down(self) -> None:
        """Interrupt the thread that waits on the link. The link stays open until :meth:`close`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None
        self.sock.close()

    async def encrypt(self, context: native.Tls, name: str) -> None:
        """Do the TLS handshake; StorageUnavailableError unless the server's certificate holds ``name``."""
        session = self.session = native.TlsSession(context, self.fileno(), name)
        while True:
            result, want = session.handshake()
            if result is not native.Result.OK:
                raise StorageUnavailableError(
                    f"connect to storage {self.node}: {explain_tls_error(session.reason, name)}"
                )
            if want is native.TlsWant.NOTHING:
                return
            await self._wait_ready(want)

    async def exchange(self, commands: Sequence[Sequence[bytes]]) -> "list[resp.Value | MetaAnswer]":
        """Send commands and return their answers; ProtocolError if one is not RESP."""
        await self.send(b"".join(resp.encode_command(*command) for command in commands))
        return await self.answers(len(commands))

    async def answers(self, count: int) -> "list[resp.Value | MetaAnswer]":
        """Return the answers to commands that were sent; ProtocolError if one is not RESP."""
        reader = AnswerReader()
        answers: list[resp.Value | MetaAnswer] = []
        while len(answers) < count:
            answer = reader.next_value()
            if answer is not resp.NEED_DATA:
                answers.append(answer)
                continue
            data = await self._receive()
            if not data:
                raise StorageUnavailableError(f"storage {self.node} closed the connection on greeting")
            reader.feed(data)
        return answers

    async def trace(self, context: str) -> None:
        """Send the context of the span that the next commands belong to; empty for none."""
        try:
            [answer] = await self.exchange([[b"KV.TRACE", context.encode()]])
        except BaseException:
            self.close()
            raise
        self.traces, self.context = answer == 1, context

    async def send(self, data: bytes) -> None:
        """Send commands, or a part of one."""
        if self.session is None:
            await asyncio.get_running_loop().sock_sendall(self.sock, data)
            return
        while data:
            result, want, sent = self.session.send(data)
            self._check(result)
            data = data[sent:]
            if want is not native.TlsWant.NOTHING:
                await self._wait_ready(want)

    async def _receive(self) -> bytes:
        if self.session is None:
            return await asyncio.get_running_loop().sock_recv(self.sock, _RECEIVE_BYTES)
        while True:
            result, want, data = self.session.receive(_RECEIVE_BYTES)
            self._check(result)
            if data:
                return data
            await self._wait_ready(want)

    def _check(self, result: native.Result) -> None:
        if result is not native.Result.OK:
            assert self.session is not None
            raise StorageUnavailableError(
                f"connect to storage {self.node}: {explain_tls_error(self.session.reason, '')}"
            )

    async def _wait_ready(self, want: native.TlsWant) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        watch: Callable[..., object] = loop.add_reader if want is native.TlsWant.READ else loop.add_writer
        forget: Callable[..., object] = loop.remove_reader if want is native.TlsWant.READ else loop.remove_writer

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        watch(self.sock, wake)
        try:
            await ready
        finally:
            forget(self.sock)


class StorageTls:
    """Certificates for connections to storage; the files are read again when they change."""

    def __init__(self, config: DataPlaneConfig) -> None:
        if not native.tls_library():
            raise ConfigurationError(
                "storage_tls_ca: this build's C core has no TLS; install OpenSSL's headers (Debian: libssl-dev) and "
                "run 'make setup' again; 'shadowserve doctor' lists the features of a build"
            )
        self.authorities = config.storage_tls_ca
        self.certificate, self.key = config.storage_tls_cert, config.storage_tls_key
        self._name = config.storage_server_name
        self._files = Renewed((self.authorities, self.certificate, self.key), self._read, _unusable)

    def name_of(self, host: str) -> str:
        """Return the name that the server's certificate must hold."""
        return self._name or host

    def contexts(self) -> tuple[ssl.SSLContext, native.Tls]:
        """Return the TLS contexts for new connections: Python's and the C core's."""
        return self._files.current()

    def _read(self) -> tuple[ssl.SSLContext, native.Tls]:
        read_authorities("storage_tls_ca", self.authorities)
        if self.certificate:
            read_key_pair(self.certificate, self.key, prefix="storage_")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_verify_locations(cafile=self.authorities)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
            contexts = context, native.Tls(self.authorities, self.certificate, self.key)
        except (ssl.SSLError, OSError, NativeError) as error:
            raise ConfigurationError(f"storage_tls_ca, storage_tls_cert: OpenSSL rejects them: {error}") from error
        logger.info("read the TLS files for storage")
        return contexts


def _unusable(error: ConfigurationError) -> None:
    logger.error("the TLS files for storage have changed and cannot be used; the old ones stay in use: %s", error)


def _knows(answers: "Sequence[resp.Value | MetaAnswer]") -> bool:
    """Return True if the answer to COMMAND INFO of one command says that the server has it."""
    [answer] = answers
    return isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list)


def explain_tls_error(reason: str, name: str) -> str:
    """Return why TLS with storage failed by OpenSSL's reason, and what to do; ``name`` must be in the certificate."""
    text = reason.lower()
    if any(words in text for words in ("expired", "mismatch", "not valid for", "verify failed")):
        return tls.rejection(reason, name, "the storage server", prefix="storage_")
    if "version number" in text or "packet length" in text or "record layer" in text:
        return "TLS: the server does not speak TLS: give it a certificate, or unset storage_tls_ca"
    if "alert" in text:
        return (
            f"TLS: the server rejects us ({reason}): does it require a client certificate (storage_tls_cert, "
            "storage_tls_key)? See its log"
        )
    return f"TLS: {reason}"


class Dialer:
    """Makes authenticated connections to storage servers, with TLS if configured, within ``connect_timeout_s``."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.username, self.password = config.storage_username, config.storage_password.get_secret_value()
        self.connect_timeout_s, self.command_timeout_s = config.connect_timeout_s, config.command_timeout_s
        self.tls = StorageTls(config) if config.storage_tls_ca else None

    async def open_control(self, node: Node) -> RespClient:
        context, name = None, None
        if self.tls is not None:
            context, name = self.tls.contexts()[0], self.tls.name_of(node.host)
        client = RespClient(str(node), self.command_timeout_s, AnswerReader())
        async with self.deadline("connect", str(node)):
            await client.open(node.host, node.port, self.greeting(replica=node.replica), context, name)
            try:
                client.traces = spans.recording() and _knows(await client.ask([_KNOWS_TRACE]))
            except BaseException:
                client.abort("connecting failed")
                raise
        return client

    async def open(self, node: Node) -> Link:
        """Open a link, ready for the C core."""
        async with self.deadline("connect", str(node)):
            link = Link(node, await self._connect(node))
            try:
                if self.tls is not None:
                    await link.encrypt(self.tls.contexts()[1], self.tls.name_of(node.host))
                for command in self.greeting(replica=node.replica):
                    began_s = time.monotonic()
                    [answer] = await link.exchange([command])
                    link.latency_s = time.monotonic() - began_s
                    refuse_error(command[0].decode(), answer)
                link.traces = spans.recording() and _knows(await link.exchange([_KNOWS_TRACE]))
            except BaseException:
                link.close()
                raise
        return link

    async def _connect(self, node: Node) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM):
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
    async def deadline(self, operation: str, name: str) -> AsyncIterator[None]:
        """Limit the duration of an attempt to connect, and convert its errors to StorageError."""
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                yield
        except TimeoutError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {name}: no answer for {self.connect_timeout_s:g} s; is it stalled?"
            ) from error
        except ssl.SSLError as error:
            host = name.rpartition(":")[0].strip("[]")
            expected = self.tls.name_of(host) if self.tls is not None else host
            raise StorageUnavailableError(
                f"{operation} to storage {name}: {explain_tls_error(str(error), expected)}"
            ) from error
        except OSError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {name}: {error.strerror or error}; is it running?{self._hint(error)}"
            ) from error
        except StorageUnavailableError as error:  # it closed the connection on greeting
            if hint := self._hint(error):
                raise StorageUnavailableError(f"{error}{hint}") from error
            raise
        except ProtocolError as error:
            raise StorageUnavailableError(
                f"{operation} to storage {name}: {error}; does a Redis-compatible server listen there"
                + ("?" if self.tls is not None else ", and without TLS (storage_tls_ca)?")
            ) from error

    def _hint(self, error: Exception) -> str:
        """Return a hint for a broken connection: servers reject a client without a certificate after the handshake."""
        if (
            self.tls is None
            or self.tls.certificate
            or "TLS: " in str(error)
            or isinstance(error, ConnectionRefusedError)
        ):
            return ""
        return " Over TLS: does it want a certificate of its clients (storage_tls_cert, storage_tls_key)?"

    def greeting(self, *, replica: bool = False) -> list[list[bytes]]:
        """Return the first commands of a connection."""
        commands = [[b"READONLY"]] if replica else [[b"PING"]]
        if self.password:
            user = [self.username.encode()] if self.username else []
            commands.insert(0, [b"AUTH", *user, self.password.encode()])
        return commands


class DataLinks:
    """The links of one user (fetch, store): ``count`` links to each node, opened on demand and kept."""

    def __init__(self, dialer: Dialer, count: int, metrics: Metrics) -> None:
        self._dialer = dialer
        self._count = count
        self._metrics = metrics
        self._links: dict[Node, list[Link]] = {}

    async def open(self, node: Node) -> list[Link]:
        """Return the links to a node; broken ones are replaced."""
        links = self._links.setdefault(node, [])
        for link in [link for link in links if not link.is_idle()]:
            links.remove(link)
            link.close()
        while len(links) < self._count:
            links.append(await self._dialer.open(node))
            self._metrics.totals["data_connections"] += 1
        if stale := [link for link in links if link.traces and link.context != spans.current()]:
            async with self._dialer.deadline("KV.TRACE", str(node)):
                await asyncio.gather(*(link.trace(spans.current()) for link in stale))
        return list(links)

    async def open_all(self, nodes: Sequence[Node]) -> list[list[Link] | StorageError]:
        """Return the links to each node, or the error."""

        async def one(node: Node) -> list[Link] | StorageError:
            try:
                return await self.open(node)
            except StorageError as error:
                return error

        return list(await asyncio.gather(*(one(node) for node in nodes)))

    def keep(self, nodes: Sequence[Node]) -> None:
        """Close the links to all other nodes."""
        for node in self._links.keys() - set(nodes):
            for link in self._links.pop(node):
                link.close()

    def close(self) -> None:
        self.keep(())
