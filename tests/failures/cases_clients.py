"""Storage servers under clients of Redis: processes that end or stop, bad clients, bad networks, little memory."""

import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from cases import ENGINES, KEYS, MEMORY, POOL, Context, Unavailable, case
from machine import WAIT_MAX_S
from nodes import MIB, Storage, certificates
from outcomes import Outcome

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import storage_key

# ---- Processes


@case("server SIGKILL", ENGINES, repetitions=4)
def killed(context: Context) -> None:
    """At a random moment while three clients store, fetch and remove; restarted on the same devices."""
    storage = context.storage()
    for _ in range(2):
        with context.load(storage.port):
            context.pause(0.1, 1.0)
            storage.kill()
        context.restart(storage)
        context.verify(storage)


@case("server SIGKILL", POOL, repetitions=3)
def killed_in_a_snapshot(context: Context) -> None:
    """While snapshots are written all the time: short values fill a small log."""
    storage = context.storage(devices=1)
    context.expected.sizes = (9, 60, 300)
    for _ in range(2):
        with context.load(storage.port, threads=4, keys=[f"small {number}" for number in range(200)]):
            context.pause(0.5, 1.5)
            storage.kill()
        context.restart(storage)
        context.verify(storage)


@case("server SIGKILL", POOL)
def killed_in_recovery(context: Context) -> None:
    """While it recovers from the SIGKILL before."""
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.3, 0.8)
        storage.kill()
    for _ in range(3):
        storage.start_only()
        context.pause(0.3, 1.2)
        storage.kill()
    context.restart(storage)
    context.verify(storage)


@case("restart under load", ENGINES)
def restarted(context: Context) -> None:
    """SIGTERM while three clients store, fetch and remove, who go on when it is back."""
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.2, 0.6)
        assert storage.stop(), "the server does not stop on SIGTERM"
        if context.engine == "memory":
            context.expected.losable = "the engine memory ends with its process"
        storage.start()
        context.pause(0.2, 0.6)
    context.verify(storage)


@case("server frozen", ENGINES)
def frozen(context: Context) -> None:
    """SIGSTOP for a second under load, then SIGCONT."""
    storage = context.storage(filled=KEYS)
    with context.load(storage.port, deadline_s=0.5, silence="the server stands still"):
        context.pause(0.1, 0.3)
        with storage.frozen():
            time.sleep(1.2)
        context.pause(0.1, 0.3)
    context.verify(storage, KEYS)


# ---- Clients


def _connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WAIT_MAX_S)
    sock.connect(("127.0.0.1", port))
    return sock


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


@case("slow reader", ENGINES, repetitions=1)
def slow_readers(context: Context) -> None:
    """Ten clients ask for a hundred large values each and read nothing; others are served meanwhile."""
    storage = context.storage(stall_timeout_s=2.0, memory_budget_bytes=32 * MIB)
    context.expected.sizes = (300_000,)
    keys = [f"large {number}" for number in range(12)]
    context.fill(storage, keys)
    before = storage.resident_bytes()
    lazy = [context.enter(_connect(storage.port, 4096)) for _ in range(10)]
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


@case("slow reader", ENGINES, repetitions=1)
def slow_link(context: Context) -> None:
    """Over a link of 400 KB/s, which is slow and not stalled: it gets all of it."""
    storage = context.storage(stall_timeout_s=2.0)
    context.expected.sizes = (300_000,)
    keys = [f"large {number}" for number in range(4)]
    context.fill(storage, keys)
    proxy = context.proxy(storage.port)
    proxy.bytes_per_s = 400_000
    context.caller(proxy.port).verify(keys)


@case("slow-loris writer", ENGINES, repetitions=1)
def slow_writers(context: Context) -> None:
    """Fifty clients send a SET a byte at a time, or stop within it; others are served meanwhile."""
    storage = context.storage(stall_timeout_s=1.0)
    value = context.chance.randbytes(40)
    slow = [context.enter(_connect(storage.port)) for _ in range(50)]
    names = [f"slow {number}" for number in range(len(slow))]
    with context.load(storage.port):
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
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            try:
                sockets.append(opened.enter_context(_connect(storage.port)))
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


@case("connection flood", ENGINES, repetitions=1)
def flood(context: Context) -> None:
    """Five hundred connections at once where fifty are allowed; clients that were there go on."""
    storage = context.storage(connections_max=50)
    with context.load(storage.port):
        context.pause(0.1, 0.2)
        for _ in range(3):
            _flood(context, storage, 500)
    context.verify(storage)


@case("file-descriptor exhaustion", ENGINES, repetitions=1)
def few_descriptors(context: Context) -> None:
    """The process may have 120 descriptors; two hundred connections at once, twice."""
    storage = context.storage(limits=["--nofile=120:120"])
    context.expected.losable = "no descriptor was left to read it with"
    with context.load(storage.port):
        context.pause(0.1, 0.2)
        for _ in range(2):
            _flood(context, storage, 200)
    context.expected.losable = ""
    context.verify(storage)


@case("file-descriptor exhaustion", ENGINES, repetitions=1)
def no_descriptors(context: Context) -> None:
    """No descriptor is left at all while clients read and write: the limit is lowered under the running server."""
    storage = context.storage(filled=KEYS)
    if context.engine != "memory":
        assert storage.stop()
        storage.start()
    context.expected.losable = "no descriptor was left to read it with"
    soft, hard = resource.prlimit(storage.pid, resource.RLIMIT_NOFILE)
    with context.load(storage.port, deadline_s=1.0, silence="the server cannot accept it"):
        context.pause(0.1, 0.2)
        resource.prlimit(storage.pid, resource.RLIMIT_NOFILE, (storage.descriptors(), hard))
        with contextlib.ExitStack() as opened:
            for _ in range(80):
                with contextlib.suppress(OSError):
                    address = ("127.0.0.1", storage.port)
                    opened.enter_context(socket.create_connection(address, timeout=1.0))
            time.sleep(0.3)
        context.pause(0.2, 0.4)
        resource.prlimit(storage.pid, resource.RLIMIT_NOFILE, (soft, hard))
        time.sleep(1.2)
    context.expected.losable = ""
    context.verify(storage)


# ---- Machines

_HOUR_NS = 3600 * 10**9
_LASTING = [f"lasting {number}" for number in range(10)]
_EXPIRING = [f"expiring {number}" for number in range(10)]


def _with_expiry(context: Context) -> Storage:
    """Return a server with keys that last, and keys that expire in an hour."""
    storage = context.storage(faulty=True, filled=_LASTING)
    caller = context.caller(storage.port)
    for key in _EXPIRING:
        assert caller.set(key, ex=3600)
    return storage


def _set_clock(context: Context, storage: Storage, hours: int) -> None:
    storage.faults.set(clock_offset_ns=hours * _HOUR_NS)
    for key in _EXPIRING if hours > 0 else ():
        context.expected.may_be_lost(key, "expired by the server's clock")


@case("clock jump", ENGINES)
def clock_jumps(context: Context) -> None:
    """The server's wall clock goes hours forth and back under load, with and without expiry; then a restart."""
    storage = _with_expiry(context)
    caller = context.caller(storage.port)
    for key in _LASTING[:3]:
        caller.redis.expire(key, 36_000)
        caller.redis.persist(key)
    with context.load(storage.port):
        for hours in (-5, 3, -1, 48, 0):
            _set_clock(context, storage, hours)
            context.pause(0.15, 0.3)
            caller.verify(_LASTING + _EXPIRING)
    _set_clock(context, storage, -2)
    storage.kill()
    context.restart(storage)
    context.verify(storage)
    storage.faults.clear()
    context.verify(storage)


@case("clock jump", POOL)
def clock_jumps_while_down(context: Context) -> None:
    """An expiry passes while the server is down, or its clock comes back before the time of the last run."""
    storage = _with_expiry(context)
    for hours in (-24 * 365, 2, -3):
        storage.kill()
        _set_clock(context, storage, hours)
        storage.start()
        context.verify(storage)
    with context.load(storage.port):
        context.pause(0.2, 0.3)
    context.verify(storage)


@case("out of memory", ENGINES)
def little_address_space(context: Context) -> None:
    """No more address space than 40 MiB beyond what it has, while clients store values of 8 MB."""
    memory = 64 * MIB if context.engine == "pool" else 4 << 30
    storage = context.storage(device_bytes=256 * MIB, memory_bytes=memory)
    size = int(Path(f"/proc/{storage.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    context.expected.sizes = (300_000, 8_000_000, 8_000_000)
    context.expected.losable = "the engine evicted it, or had no memory to read it into"
    resource.prlimit(storage.pid, resource.RLIMIT_AS, (size + 40 * MIB, -1))
    with context.load(storage.port, keys=[f"key {number}" for number in range(60)], deadline_s=30):
        context.pause(3.0, 4.0)
    resource.prlimit(storage.pid, resource.RLIMIT_AS, (-1, -1))
    context.verify(storage)


@case("out of memory", ENGINES)
def killed_for_memory(context: Context) -> None:
    """A cgroup limit of 40 MiB more than it has: the kernel may kill it; then a restart with enough."""
    memory = 16 * MIB if context.engine == "pool" else 1 << 30
    storage = context.storage(device_bytes=256 * MIB, memory_bytes=memory)
    context.expected.sizes = (300_000, 3_000_000)
    with _memory_group(storage, storage.resident_bytes() + 40 * MIB):
        context.expected.losable = "evicted to make room"
        with context.load(storage.port, keys=[f"key {number}" for number in range(120)], deadline_s=30):
            ends = time.monotonic() + context.chance.uniform(2.0, 3.0)
            while storage.alive and time.monotonic() < ends:
                time.sleep(0.05)
        storage.kill()
    if context.engine != "memory":
        context.expected.losable = "evicted to make room" if storage.engine == "pool" else ""
    context.restart(storage)
    context.verify(storage)


@contextlib.contextmanager
def _memory_group(storage: Storage, limit: int) -> Iterator[None]:
    """Run a process in its own cgroup (v1 or v2) with a memory limit in bytes."""
    name = f"shadowserve-{os.getpid()}-{storage.pid}"
    old, new = Path("/sys/fs/cgroup/memory") / name, Path("/sys/fs/cgroup") / name
    group = old if old.parent.is_dir() else new
    try:
        group.mkdir()
        limits = group / ("memory.limit_in_bytes" if group is old else "memory.max")
        limits.write_text(str(limit))
        (group / "cgroup.procs").write_text(str(storage.pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Unavailable(f"no cgroup for the process: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


# ---- Networks


@case("half-open TCP", ENGINES, short=MEMORY)
def half_open(context: Context) -> None:
    """The network forwards nothing for a second, and no endpoint is notified; then everything again."""
    storage = context.storage(filled=KEYS)
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=0.5, silence="the network is silent"):
        context.pause(0.1, 0.3)
        with proxy.silenced():
            context.pause(0.8, 1.2)
        context.pause(0.1, 0.3)
    context.verify(storage, KEYS)


@case("connection reset", ENGINES)
def resets(context: Context) -> None:
    """The network resets every connection, again and again."""
    storage = context.storage()
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=5, silence="the network has cut it"):
        for _ in range(10):
            context.pause(0.02, 0.15)
            proxy.cut()
    context.verify(storage)


def records(seed: str, count: int, layer_bytes: int, layers: int = 4) -> dict[bytes, bytes]:
    """Return keys and records of a prefix."""
    layout = ChunkLayout(
        namespace=b"n" * 32, dtype=DType.UINT8, layers=layers, kinds=2, vector_length=64,
        tokens=layer_bytes // 128, quantizer=Quantizer.PASSTHROUGH,
    )  # fmt: skip
    found = {}
    for number in range(count):
        name = f"{seed}/{number}".encode().rjust(32, b"\0")[-32:]
        values = random.Random(name).randbytes(layout.raw_bytes)
        found[storage_key(name)] = record.encode(name, native.Codec.NONE, layout, values)
    return found


@case("bit rot on the wire", ENGINES)
def flips_while_storing(context: Context) -> None:
    """To the server, while records are stored: it takes sound ones only; read over a sound network."""
    storage = context.storage()
    proxy = context.proxy(storage.port)
    proxy.flip_one_in, proxy.flips = 3, "up"
    caller = context.caller(proxy.port, deadline_s=0.7, silence="the server waits for the bytes of a flipped length")
    for key, data in records(f"wire {context.seed}", 60, 8 << 10, layers=2).items():
        caller.set_to(key.decode(), data)
    assert proxy.flipped
    context.expected.losable = "a flipped bit: another key was meant to be stored"
    context.verify(storage)


@case("bit rot on the wire", ENGINES)
def flips_under_tls(context: Context) -> None:
    """Both ways, with TLS: whatever the values are."""
    folder = certificates(context.folder / "certificates")
    storage = context.storage(tls_cert=folder / "server.crt", tls_key=folder / "server.key")
    secure = {"ssl": True, "ssl_ca_certs": str(folder / "ca.crt"), "ssl_check_hostname": False}
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=2, silence="one side waits for the bytes of a flipped length", **secure):
        context.pause(0.2, 0.4)
        proxy.flip_one_in = 12
        context.pause(1.0, 1.5)
        proxy.flip_one_in = 0
    assert proxy.flipped
    context.caller(storage.port, **secure).verify()
