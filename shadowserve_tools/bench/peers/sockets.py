"""A lean Redis client in Python, and plain sockets, which are the limit of every transfer over TCP.

Both clients send requests and receive answers with ``recv_into`` at their final place, on one to four connections with
a thread each. The plain sockets' server is :mod:`shadowserve_tools.bench.parts.plain_sender`.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import numpy as np
import psutil

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.lean import connect, receive
from shadowserve_tools.bench.parts.plain_sender import plain_request, sender_command
from shadowserve_tools.bench.peers.contender import Contender
from shadowserve_tools.bench.peers.driver import CLEARED, Bytes, Values
from shadowserve_tools.bench.peers.network import LOOPBACK, Network
from shadowserve_tools.processes import Child, start_redis, started

CONNECTIONS: Final = (1, 2, 4)
"""Numbers of connections to try; the fastest counts."""
TRIAL_CHUNKS: Final = 4
PIECE_BYTES: Final = 2 << 20
_TIMEOUT_S: Final = 60.0


class Memory:
    """Receive memory for raw values."""

    def __init__(self, values: Values, chunks: int) -> None:
        self._values = values
        self.rows: Bytes = np.full((chunks, values.chunk_bytes), CLEARED, np.uint8)

    def clear(self) -> None:
        self.rows.fill(CLEARED)

    def verify(self, count: int) -> None:
        for index in range(count):
            if not self._values.matches(index, self.rows[index]):
                raise ShadowServeError(f"chunk {index} in memory is not what was stored; please report this")


class Reader:
    """Receives chunks over several connections at once, piece by piece, each to its place.

    Args:
        piece_bytes: Bytes of one request.
        ask: Returns the request for ``length`` bytes from ``first`` of chunk ``index``, the expected start of the
            answer, and the length of its trailer.
        ahead: Requests in flight on each connection.
    """

    def __init__(
        self,
        address: str,
        connections: int,
        memory: Memory,
        piece_bytes: int,
        ask: Callable[[int, int, int], tuple[bytes, bytes, int]],
        ahead: int = 1,
    ) -> None:
        self._memory, self._ahead, self._piece_bytes, self._ask = memory, ahead, piece_bytes, ask
        self._sockets = [connect(address) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._sockets:
            connection.close()

    def fetch(self, count: int) -> None:
        size = self._memory.rows.shape[1]
        pieces = deque((index, first) for index in range(count) for first in range(0, size, self._piece_bytes))
        others = [self._threads.submit(self._drain, connection, pieces) for connection in self._sockets[1:]]
        self._drain(self._sockets[0], pieces)
        for other in others:
            other.result()

    def _drain(self, connection: socket.socket, pieces: "deque[tuple[int, int]]") -> None:
        pending: deque[tuple[memoryview, bytes, int]] = deque()
        while True:
            while len(pending) < self._ahead:
                try:
                    index, first = pieces.popleft()
                except IndexError:  # another thread took the last one
                    break
                into = memoryview(self._memory.rows[index])[first : first + self._piece_bytes]
                request, head, tail_length = self._ask(index, first, len(into))
                connection.sendall(request)
                pending.append((into, head, tail_length))
            if not pending:
                return
            into, head, tail_length = pending.popleft()
            if head and (found := _line(connection, len(head))) != head:
                raise ShadowServeError(f"the server answered {found!r} instead of {head!r}")
            receive(connection, into)
            if tail_length:
                connection.recv(tail_length, socket.MSG_WAITALL)


def _line(connection: socket.socket, length: int) -> bytes:
    line = b""
    while len(line) < length and not line.endswith(b"\n") and (more := connection.recv(length - len(line))):
        line += more
    return line


def redis_reader(address: str, connections: int, memory: Memory, *, pieces: bool) -> Reader:
    """Return a reader of the chunks of :func:`filled_redis`: GET, or GETRANGE of 2 MiB at a time.

    One request is in flight on a connection: Redis copies replies that it cannot send yet, which costs more than
    waiting.
    """
    size = memory.rows.shape[1]

    def ask(index: int, first: int, length: int) -> tuple[bytes, bytes, int]:
        words = [b"GETRANGE", _key(index), b"%d" % first, b"%d" % (first + length - 1)] if pieces else []
        words = words or [b"GET", _key(index)]
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        return request, b"$%d\r\n" % length, 2

    return Reader(address, connections, memory, PIECE_BYTES if pieces else size, ask)


def _key(index: int) -> bytes:
    return b"chunk-%d" % index


@contextlib.contextmanager
def filled_redis(
    logs: Path, values: Values, chunks: int, *, tuned: bool, network: Network = LOOPBACK
) -> Iterator[Child]:
    """Run a Redis server with the chunks; see :func:`~shadowserve_tools.processes.start_redis`."""
    import redis

    with contextlib.ExitStack() as stack:
        with network.store_side():
            child = stack.enter_context(start_redis(logs, host=network.host, tuned=tuned))
            row = np.empty(values.chunk_bytes, np.uint8)
            with redis.Redis.from_url(f"redis://{child.address}", socket_timeout=_TIMEOUT_S) as server:
                for index in range(chunks):
                    values.write(index, row)
                    server.set(_key(index), memoryview(row))
        yield child


@contextlib.contextmanager
def plain_sockets(logs: Path, values_file: Path, chunks: int, network: Network = LOOPBACK) -> Iterator[Child]:
    """Run the server that only sends."""
    command = sender_command(network.host, "blocking", values_file, chunks)
    with contextlib.ExitStack() as stack:
        with network.store_side():
            child = stack.enter_context(started("sockets", command, logs))
        yield child


def plain_reader(address: str, connections: int, memory: Memory) -> Reader:
    """Return a reader for :func:`plain_sockets`, with requests in flight so that it never waits."""
    size = memory.rows.shape[1]

    def ask(index: int, first: int, length: int) -> tuple[bytes, bytes, int]:
        return plain_request(index * size + first, length), b"", 0

    return Reader(address, connections, memory, PIECE_BYTES, ask, ahead=3)


def fastest(
    stack: contextlib.ExitStack,
    name: str,
    server: Child,
    memory: Memory,
    open_reader: Callable[..., Reader],
    network: Network = LOOPBACK,
    *,
    kind: Literal["raw", "limit"] = "limit",
    **options: bool,
) -> Contender:
    """Return a contender with the number of connections that was the fastest of two runs each."""
    found: dict[float, Contender] = {}
    for count in CONNECTIONS:
        with network.client_side():
            reader = open_reader(server.address, count, memory, **options)
        stack.callback(reader.close)
        contender = Contender(
            name=name,
            kind=kind,
            fetch=reader.fetch,
            clear=memory.clear,
            verify=memory.verify,
            processes=[psutil.Process(server.process.pid)],
            note="1 connection" if count == 1 else f"{count} connections",
        )
        found[min(contender.run(min(len(memory.rows), TRIAL_CHUNKS)).wall_s for _ in range(2))] = contender
    return found[min(found)]
