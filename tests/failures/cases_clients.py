"""Misbehaving clients: some do not read, some write one byte at a time, some open many connections."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator

from cases import Context, case
from machine import WAIT_MAX_S
from nodes import ENGINES, MIB, Storage
from outcomes import Outcome


def _connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WAIT_MAX_S)
    sock.connect(("127.0.0.1", port))
    return sock


@contextlib.contextmanager
def _closing(sockets: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()


def closed_by_server(context: Context, what: str, sock: socket.socket) -> None:
    """Check that the server closes this connection. It may send an error first."""
    try:
        while sock.recv(1 << 16):
            pass
        context.tally.note(Outcome.REFUSED, f"{what}: closed")
    except TimeoutError:
        context.tally.note(Outcome.HANG, f"{what}: not closed")
    except OSError:
        context.tally.note(Outcome.REFUSED, f"{what}: reset")


@case(
    "slow reader",
    "ten clients ask for a hundred large values each and read nothing; others are served meanwhile",
    engines=ENGINES,
    repetitions=1,
)
def slow_readers(context: Context) -> None:
    storage = context.storage(stall_timeout_s=2.0, memory_budget_bytes=32 * MIB)
    context.expected.sizes = (300_000,)
    keys = [f"large {number}" for number in range(12)]
    context.fill(storage, keys)
    before = storage.resident_bytes()
    lazy = [_connect(storage.port, 4096) for _ in range(10)]
    with _closing(lazy):
        for sock in lazy:
            for _ in range(100):
                name = context.chance.choice(keys).encode()
                sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            sock.sendall(b"QUIT\r\n")  # a client served late may still get the full reply
        context.expected.sizes = (150, 70_000)
        with context.load(storage.port, keys=[f"other {number}" for number in range(20)]):
            context.pause(0.5, 1.0)
        grown = storage.resident_bytes() - before
        assert grown < 350 * MIB, f"the server's memory grew by {grown} bytes for clients that do not read"
        time.sleep(2.5)
        for sock in lazy:
            closed_by_server(context, "slow reader", sock)
    context.expected.sizes = (300_000,)
    context.verify(storage, keys)


@case(
    "slow reader",
    "over a link of 400 KB/s, which is slow and not stalled: it gets all of it",
    engines=("memory", "pool"),
    repetitions=1,
)
def slow_link(context: Context) -> None:
    storage = context.storage(stall_timeout_s=2.0)
    context.expected.sizes = (300_000,)
    keys = [f"large {number}" for number in range(4)]
    context.fill(storage, keys)
    proxy = context.proxy(storage.port)
    proxy.bytes_per_s = 400_000
    context.caller(proxy.port).verify(keys)


@case(
    "slow-loris writer",
    "fifty clients send a SET a byte at a time, or stop within it; others are served meanwhile",
    engines=ENGINES,
    repetitions=1,
    short=("pool",),
)
def slow_writers(context: Context) -> None:
    storage = context.storage(stall_timeout_s=1.0)
    value = context.chance.randbytes(40)
    slow = [_connect(storage.port) for _ in range(50)]
    names = [f"slow {number}" for number in range(len(slow))]
    with _closing(slow), context.load(storage.port):
        for position in range(20):
            for name, sock in zip(names, slow, strict=True):
                text = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$40\r\n%b\r\n" % (len(name), name.encode(), value)
                piece = text[position : position + 1] if position < 19 else text[19:]
                if position == 19 and int(name.split()[1]) % 2:
                    continue  # half of the requests stay incomplete
                with contextlib.suppress(OSError):
                    sock.sendall(piece)
        for number, (name, sock) in enumerate(zip(names, slow, strict=True)):
            if number % 2:
                closed_by_server(context, "slow writer", sock)
                continue
            try:
                answer = sock.recv(16)
            except OSError:
                answer = b""
            if answer == b"+OK\r\n":
                version = context.expected.begin_with(name, value)
                context.expected.acknowledged(name, version)
                context.tally.note(Outcome.RIGHT)
            else:
                context.tally.note(Outcome.REFUSED, "slow writer: closed after stall_timeout_s")
    context.verify(storage)


def _flood(context: Context, storage: Storage, count: int) -> None:
    """Open many connections and send one request on each. Expect an answer, an error, or a closed connection."""
    sockets: list[socket.socket] = []
    with _closing(sockets):
        for _ in range(count):
            try:
                sockets.append(_connect(storage.port))
                sockets[-1].sendall(b"PING\r\n")
            except OSError as error:
                context.tally.note(Outcome.REFUSED, f"connection: {error.strerror}")
        for sock in sockets:
            try:
                answer = sock.recv(200)
            except TimeoutError:
                context.tally.note(Outcome.HANG, "connection: neither answered nor closed")
                continue
            except OSError:
                answer = b""
            if answer.startswith(b"+PONG"):
                context.tally.note(Outcome.RIGHT)
            else:
                text = answer.decode(errors="replace").strip() or "closed"
                context.tally.note(Outcome.REFUSED, f"connection: {text}")


@case(
    "connection flood",
    "five hundred connections at once where fifty are allowed; clients that were there go on",
    engines=("memory", "pool"),
    repetitions=1,
    short=("memory",),
)
def flood(context: Context) -> None:
    storage = context.storage(connections_max=50)
    with context.load(storage.port):
        context.pause(0.1, 0.2)
        for _ in range(3):
            _flood(context, storage, 500)
    context.verify(storage)


@case(
    "file-descriptor exhaustion",
    "the process may have 120 descriptors; two hundred connections at once, twice",
    engines=ENGINES,
    repetitions=1,
)
def few_descriptors(context: Context) -> None:
    storage = context.storage(limits=["--nofile=120:120"])
    context.expected.losable = "no descriptor was left to read it with"
    with context.load(storage.port):
        context.pause(0.1, 0.2)
        for _ in range(2):
            _flood(context, storage, 200)
    context.expected.losable = ""
    context.verify(storage)


@case(
    "file-descriptor exhaustion",
    "no descriptor is left at all while clients read and write: the limit is lowered under the running server",
    engines=ENGINES,
    repetitions=1,
)
def no_descriptors(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    if context.engine != "memory":
        assert storage.stop()
        storage.start()
    context.expected.losable = "no descriptor was left to read it with"
    soft, hard = resource.prlimit(storage.pid, resource.RLIMIT_NOFILE)
    with context.load(storage.port, deadline_s=1.0, silence="the server cannot accept it"):
        context.pause(0.1, 0.2)
        resource.prlimit(storage.pid, resource.RLIMIT_NOFILE, (storage.descriptors(), hard))
        threads = [threading.Thread(target=_flood_quietly, args=(storage.port,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        context.pause(0.2, 0.4)
        resource.prlimit(storage.pid, resource.RLIMIT_NOFILE, (soft, hard))
        time.sleep(1.2)
    context.expected.losable = ""
    context.verify(storage)


def _flood_quietly(port: int) -> None:
    sockets = []
    for _ in range(20):
        with contextlib.suppress(OSError):
            sockets.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
    time.sleep(0.3)
    for sock in sockets:
        sock.close()
