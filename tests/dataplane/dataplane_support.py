"""Helpers of the data plane's tests: real storage servers, a real daemon, real segments, and records."""

import asyncio
import contextlib
import fcntl
import functools
import mmap
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import grpc
import numpy as np
import pytest
from machine import NEVER_S, WAIT_MAX_MS, WAIT_MAX_S, free_port, frozen, wait_for
from preloaded import Preloaded

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.plan import FetchPart
from dpu_dataplane.server import Daemon
from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import RECORD_VERSION, SCHEMA_VERSION, ModelIdentity, prefix_chain, record_keys, storage_key
from shadowserve.pieces import Flags, leading, leading_chunks, pack, unpack
from shadowserve.proto import PROTOCOL_VERSION, SESSION_KEY, dataplane_pb2_grpc
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message

T = TypeVar("T")
TOKENS = 16
BACKEND = os.environ.get("SHADOWSERVE_DPU_BACKEND", "software")
"""Backend of the tests' daemons, including daemons in separate processes."""
BACKENDS = [BACKEND] if "SHADOWSERVE_DPU_BACKEND" in os.environ else ["software", "doca"]
"""Backends of tests that take no longer with several backends."""
WAYS = [
    {"backend": backend, "fused": fused}
    for backend in BACKENDS
    for fused in ((True, False) if backend == "software" else ("auto",))
]
"""All configurations of the pipeline."""


def way_name(way: dict[str, Any]) -> str:
    return way["backend"] + {True: "-fused", False: "-staged", "auto": ""}[way["fused"]]


class Server:
    """A storage server as a process that can be killed and restarted on the same port."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        *,
        password: str = "",
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.kind, self.directory, self.password, self.options = kind, directory, password, options
        self.environment = os.environ | (environment or {})
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Server":
        if self.kind == "redis":
            command = [shutil.which("redis-server") or "redis-server", "--save", "", "--dir", str(self.directory)]
            command += ["--bind", "127.0.0.1", "--port", str(self.port)]
            command += ["--requirepass", self.password] if self.password else []
        else:
            command = [sys.executable, "-m", "shadowserve_tools", "storage", "--port", str(self.port)]
            command += ["--password", self.password] if self.password else []
        with open(self.directory / "storage.log", "ab") as log:
            self.process = Preloaded([*command, *self.options], stdout=log, stderr=log, env=self.environment)
        wait_for(self._answers)
        return self

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.directory / "storage.log").read_text()
        try:
            return self.command(b"PING") == b"+PONG"
        except OSError:
            return False

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_MAX_S)

    def command(self, *words: bytes) -> bytes:
        """Send one command. Return the first line of its answer."""
        with self._connection() as sock:
            for command in ([(b"AUTH", self.password.encode())] if self.password else []) + [words]:
                sock.sendall(b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in command))
                answer = b""
                while not answer.endswith(b"\r\n"):
                    data = sock.recv(65536)
                    if not data:
                        raise ConnectionResetError
                    answer += data
            return answer.split(b"\r\n")[0]

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value under a chunk's key over any other value."""
        self.command(b"DEL", storage_key(key))
        answer = self.command(b"SET", storage_key(key), value)
        assert answer == b"+OK", answer

    def fill(self, shape: ChunkLayout, keys: Sequence[bytes], codec: str = "kvrans") -> list[bytes]:
        """Store the record of ``kv(shape, index)`` under each key; return the records."""
        records = [make_record(shape, key, index, codec) for index, key in enumerate(keys)]
        for key, data in zip(keys, records, strict=True):
            self.put(key, data)
        return records

    def ask(self, *command: Any) -> Any:
        """Return the reply to one command, as redis-py decodes it."""
        from redis import Redis

        with Redis(port=self.port, password=self.password or None, decode_responses=True) as client:
            return client.execute_command(*command)

    def get(self, key: bytes) -> bytes:
        """Return the value under a chunk's key."""
        from redis import Redis

        with Redis(port=self.port) as client:
            return bytes(client.get(storage_key(key)))

    def calls(self) -> dict[str, int]:
        """Return the number of executions of each command."""
        found = self.ask("INFO", "commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()}

    def connections(self) -> int:
        """Return the number of connections beside the one that asks."""
        return int(self.ask("INFO", "clients")["connected_clients"]) - 1

    def has(self, key: bytes) -> bool:
        return self.command(b"EXISTS", storage_key(key)) == b":1"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def freeze(self) -> None:
        """Make it accept connections without answers."""
        self.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: self.process is not None and frozen(self.process.pid))

    def asked(self) -> bool:
        """Return True if unread bytes have arrived: while the server is stopped, a call has started."""
        local = f"0100007F:{self.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        established = [row for row in rows if row[1] == local and row[3] == "01"]
        return any(int(row[4].partition(":")[2], 16) for row in established)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


StartServer = Callable[..., Server]


class Segment:
    """Shared memory in a host's format."""

    def __init__(self, size: int) -> None:
        self.name = f"shadowserve-{secrets.token_hex(8)}"
        self.path = f"/dev/shm/{self.name}"
        self.size = size
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self._file = file
        self.memory = np.frombuffer(self._map, np.uint8)

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def die(self) -> None:
        """Release the lock, as the kernel does for an ended process."""
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping has its own descriptor
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        self.unlink()
        if self._file >= 0:
            self.die()
        del self.memory
        self._map.close()


def layout(quantizer: str = "lossless", dtype: str = "bfloat16", **changes: Any) -> ChunkLayout:
    """A small layout: 4 layers, 2 KV heads of 32 elements."""
    bins = 32 if quantizer == "binned" else 0
    fields: dict[str, Any] = {
        "namespace": namespace(quantizer, dtype),
        "dtype": DType[dtype.upper()],
        "layers": 4,
        "kinds": 2,
        "vector_length": 64,
        "tokens": TOKENS,
        "quantizer": Quantizer[quantizer.upper()],
        "bins": bins,
    }
    return ChunkLayout(**(fields | changes))


def namespace(quantizer: str = "lossless", dtype: str = "bfloat16", model: str = "test") -> bytes:
    return ModelIdentity(model=f"{model} {quantizer}", dtype=dtype).digest()


def keys_of(shape: ChunkLayout, count: int, seed: int = 0) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 1000, count * shape.tokens)
    return record_keys(shape.namespace, prefix_chain(bytes(32), tokens, chunk_tokens=shape.tokens))


def kv(shape: ChunkLayout, seed: int) -> bytes:
    """One chunk of data that compresses somewhat, like KV."""
    random = np.random.default_rng(seed)
    count = shape.raw_bytes // shape.dtype.itemsize
    values = random.normal(size=count).astype(np.float32)
    if shape.dtype is DType.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if shape.dtype is DType.UINT8:
        return random.integers(0, 40, count, np.uint8).tobytes()
    if shape.dtype is DType.FLOAT8_E4M3:
        return (random.integers(0, 80, count, np.uint8) + 128 * (values < 0)).astype(np.uint8).tobytes()  # no NaN
    return values.astype(np.float16 if shape.dtype is DType.FLOAT16 else np.float32).tobytes()


def kvs(shape: ChunkLayout, count: int) -> list[bytes]:
    return [kv(shape, index) for index in range(count)]


def make_record(shape: ChunkLayout, key: bytes, seed: int, codec: str = "kvrans") -> bytes:
    return record.encode(key, native.Codec[codec.upper()], shape, kv(shape, seed))


def expected(shape: ChunkLayout, key: bytes, data: bytes) -> bytes:
    return bytes(record.decode(data, key, shape))


SMALL_BUFFERS: dict[str, Any] = {
    "decompression_buffer_bytes": "4MiB",
    "dequantization_buffer_bytes": "8MiB",
    "dma_source_buffer_bytes": "8MiB",
    "store_buffer_bytes": "4MiB",
}
PATIENT: dict[str, Any] = {"connect_timeout_s": WAIT_MAX_S, "command_timeout_s": WAIT_MAX_S}
"""Slow storage must not count as down. Tests of an outage set their own timeouts."""


def config(server: "Server | str | DataPlaneConfig", **changes: Any) -> DataPlaneConfig:
    if isinstance(server, DataPlaneConfig):
        return server
    address = server if isinstance(server, str) else server.address
    password = "" if isinstance(server, str) else server.password
    values = {"listen": "127.0.0.1:0", "storage": address, "storage_password": password, "shutdown_timeout_s": 2.0}
    return DataPlaneConfig.model_validate({"backend": BACKEND} | values | PATIENT | SMALL_BUFFERS | changes)


def hello_request(**changes: Any) -> pb.HelloRequest:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "version": "test",
        "record_version": RECORD_VERSION,
        "key_schema": SCHEMA_VERSION,
        "host": "this machine",
        "process": "a test",
    }
    return pb.HelloRequest(**(fields | changes))


class LocalMemory:
    """Memory of this process instead of registered memory."""

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory)

    def group(self, layout: ChunkLayout, offset: int, length: int) -> native.Group:
        return native.Group.of(layout, self._memory[offset : offset + length])


def part_of(
    shape: ChunkLayout, keys: Sequence[bytes], found: Mapping[int, Any], wanted: Flags | None = None, memory: Any = b""
) -> FetchPart:
    """Return a part of a running fetch, with the answers of a source."""
    flags = np.ones((shape.layers, len(keys)), np.bool_) if wanted is None else wanted
    size = shape.raw_bytes * len(keys)
    part = FetchPart(LocalMemory(memory), shape, 0, size, keys, pack(flags))
    part.start(len(keys), shape.layers)
    part.wanted, part.remaining, part.found = flags, flags.copy(), found
    return part


class Sessioned:
    """A stub that sends a session with each call."""

    def __init__(self, stub: Any, session: bytes) -> None:
        self._stub = stub
        self._metadata = ((SESSION_KEY, session),)

    def over(self, stub: Any) -> "Sessioned":
        """Return the same session over another connection."""
        return Sessioned(stub, self._metadata[0][1])

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._stub, name), metadata=self._metadata)


class Client:
    """A client of one daemon with one registered segment."""

    def __init__(self, address: str, channel: grpc.aio.Channel | None = None) -> None:
        # Its own subchannel pool: otherwise a channel to an address that was just down waits before it connects again.
        self.channel = channel or grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.plain: Any = dataplane_pb2_grpc.DataPlaneStub(self.channel)
        self.stub: Any = self.plain
        self.segments: list[Segment] = []
        self.segment: Segment
        self.memory_id = 0
        self.session = b""
        self.shape: ChunkLayout
        self._jobs = 0

    async def hello(self, **changes: Any) -> pb.HelloResponse:
        """Send Hello. Later calls carry the session."""
        answer: pb.HelloResponse = await self.plain.Hello(hello_request(**changes))
        self.session = answer.session
        self.stub = Sessioned(self.plain, answer.session)
        return answer

    async def register(self, shape: ChunkLayout, chunks: int, extra: int = 0) -> "Client":
        if self.stub is self.plain:
            await self.hello()
        self.own(shape, shape.raw_bytes * chunks + extra)
        answer = await self.stub.RegisterMemory(self.register_request())
        self.segment.unlink()
        assert list(answer.chunk_bytes) == [shape.raw_bytes]
        self.memory_id = answer.memory_id
        return self

    def own(self, shape: ChunkLayout, size: int) -> None:
        """Make a segment of this size the client's, without its registration."""
        self.shape, self.segment = shape, Segment(size)
        self.segments.append(self.segment)

    def register_request(self, **changes: Any) -> pb.RegisterMemoryRequest:
        fields: dict[str, Any] = {
            "layouts": [layout_message(self.shape)],
            "shared_memory": pb.SharedMemory(name=self.segment.name, size=self.segment.size),
        }
        return pb.RegisterMemoryRequest(**(fields | changes))

    def part(self, keys: list[bytes], **changes: Any) -> pb.FetchPart:
        fields = {"memory_id": self.memory_id, "offset": 0, "length": self.segment.size, "keys": keys}
        return pb.FetchPart(**(fields | changes))

    def fetch_request(self, keys: list[bytes], **changes: Any) -> pb.FetchRequest:
        """Return a request of one part. Changes apply to the part if it has such a field."""
        self._jobs += 1
        of_part = {name: changes.pop(name) for name in list(changes) if name in pb.FetchPart.DESCRIPTOR.fields_by_name}
        fields: dict[str, Any] = {
            "job_id": f"job-{self._jobs}",
            "parts": [self.part(**({"keys": keys} | of_part))],
            "timeout_ms": WAIT_MAX_MS,
        }
        return pb.FetchRequest(**(fields | changes))

    async def fetch(self, keys: list[bytes], **changes: Any) -> "Fetched":
        """Fetch all of some chunks."""
        answer: pb.FetchResponse = await self.stub.Fetch(self.fetch_request(keys, **changes))
        (pieces,) = answer.delivered or [b""]
        delivered = unpack(pieces, self.shape.layers, len(keys))
        chunks = leading_chunks(delivered, np.ones_like(delivered))
        return Fetched(chunks, delivered, answer.outcome, answer.detail, answer.fetched_bytes, answer.delivered_bytes)

    async def fetches(
        self, keys: list[bytes], chunks: int, outcome: int = pb.OUTCOME_COMPLETE, **changes: Any
    ) -> "Fetched":
        """Fetch, and check the number of leading chunks and the outcome."""
        answer = await self.fetch(keys, **changes)
        assert (answer.chunks, answer.outcome) == (chunks, outcome), answer
        return answer

    async def fetched(self, keys: list[bytes], **changes: Any) -> list[bytes]:
        """Fetch into cleared memory, check the outcome, and return the chunks that arrived."""
        self.segment.memory[:] = 0
        answer = await self.fetch(keys, **changes)
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        return self.chunks(answer.chunks)

    async def fetch_all(self, keys: list[bytes]) -> None:
        """Fetch chunks in the necessary number of batches."""
        done = 0
        while done < len(keys):
            offset = done * self.shape.raw_bytes
            answer = await self.fetch(keys[done:], offset=offset, length=self.segment.size - offset)
            assert answer.chunks > 0, answer
            done += answer.chunks

    def store_request(self, keys: list[bytes], **changes: Any) -> pb.StoreRequest:
        self._jobs += 1
        fields: dict[str, Any] = {
            "job_id": f"job-{self._jobs}",
            "memory_id": self.memory_id,
            "offset": 0,
            "keys": keys,
            "timeout_ms": WAIT_MAX_MS,
        }
        return pb.StoreRequest(**(fields | changes))

    async def store(self, keys: list[bytes], **changes: Any) -> "Stored":
        answer: pb.StoreResponse = await self.stub.Store(self.store_request(keys, **changes))
        stored = unpack(answer.stored, len(keys))
        return Stored(
            leading(stored), stored.tolist(), answer.outcome, answer.detail, answer.raw_bytes, answer.stored_bytes
        )

    async def stores(self, keys: list[bytes], **changes: Any) -> "Stored":
        """Store ``kvs``, and check that all chunks are stored."""
        self.fill(len(keys))
        answer = await self.store(keys, **changes)
        assert (answer.chunks, answer.outcome) == (len(keys), pb.OUTCOME_COMPLETE), answer
        return answer

    async def look(self, *chains: list[bytes], **changes: Any) -> pb.LookupResponse:
        """Return the plain answer about some chains."""
        space = self.shape.namespace
        fields = {"chains": [pb.KeyChain(keys=keys, namespace=space) for keys in chains], "timeout_ms": WAIT_MAX_MS}
        answer: pb.LookupResponse = await self.stub.Lookup(pb.LookupRequest(**(fields | changes)))
        return answer

    async def lookup(self, keys: list[bytes], space: bytes = b"", timeout_ms: int = WAIT_MAX_MS) -> "Found":
        chain = pb.KeyChain(keys=keys, namespace=space or self.shape.namespace)
        return found(await self.stub.Lookup(pb.LookupRequest(chains=[chain], timeout_ms=timeout_ms)), len(keys))

    def chunk(self, index: int, shape: ChunkLayout | None = None) -> bytes:
        size = (shape or self.shape).raw_bytes
        return self.segment.memory[index * size : (index + 1) * size].tobytes()

    def chunks(self, count: int) -> list[bytes]:
        return [self.chunk(index) for index in range(count)]

    def write(self, chunks: Sequence[bytes]) -> None:
        """Write chunks into the segment."""
        data = b"".join(chunks)
        self.segment.memory[: len(data)] = np.frombuffer(data, np.uint8)

    def fill(self, count: int) -> None:
        """Write ``kvs`` into the segment."""
        self.write(kvs(self.shape, count))

    async def close(self) -> None:
        await self.channel.close()
        for segment in self.segments:
            segment.close()


class Fetched(NamedTuple):
    """The answer of a Fetch; ``chunks`` is the number of leading chunks in place."""

    chunks: int
    delivered: Flags
    outcome: int
    detail: str
    fetched_bytes: int
    delivered_bytes: int


class Stored(NamedTuple):
    """The answer of a Store; ``chunks`` is the number of leading stored chunks."""

    chunks: int
    stored: list[bool]
    outcome: int
    detail: str
    raw_bytes: int
    stored_bytes: int


class Found(NamedTuple):
    """The answer of a Lookup; ``hits`` are the numbers of leading stored chunks of each chain."""

    hits: list[int]
    present: list[list[bool]]
    outcome: int
    detail: str


def found(answer: pb.LookupResponse, *counts: int) -> Found:
    """Convert the answer about chains with these numbers of keys."""
    flags = [unpack(data, count) for data, count in zip(answer.present, counts, strict=bool(answer.present))]
    return Found([leading(each) for each in flags], [each.tolist() for each in flags], answer.outcome, answer.detail)


INVALID = grpc.StatusCode.INVALID_ARGUMENT
FAILED = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def refused(call: Any, code: grpc.StatusCode, *words: str) -> grpc.aio.AioRpcError:
    """Check that a call is refused with this status, and that its message has these words."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    assert all(word in (caught.value.details() or "") for word in words), caught.value.details()
    return caught.value


async def cancel(client: "Client", job_id: str) -> bool:
    """Cancel a job; return True if it was found."""
    return bool((await client.stub.Cancel(pb.CancelRequest(job_id=job_id))).found)


async def repeat(
    call: Callable[[], Awaitable[T]],
    right: Callable[[T], Any] = lambda answer: True,
    passing: grpc.StatusCode | None = None,
) -> T:
    """Repeat a call until its answer is right, and return the answer; meanwhile it may fail with one status."""
    async with asyncio.timeout(WAIT_MAX_S):
        while True:
            try:
                if right(answer := await call()):
                    return answer
            except grpc.aio.AioRpcError as error:
                assert error.code() is passing, error
            await asyncio.sleep(0.02)


async def until_ends_with(outcome: int, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until it ends with this outcome, and return its answer."""
    return await repeat(call, lambda answer: answer.outcome == outcome)


@contextlib.asynccontextmanager
async def listening(serve: Callable[..., Any], **options: Any) -> AsyncIterator[str]:
    """A server of streams on a free port; yields its address."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0, **options) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def started(source: Any) -> AsyncIterator[Any]:
    await source.start()
    try:
        yield source
    finally:
        await source.close()


@contextlib.asynccontextmanager
async def client_of(daemon: "Daemon | DaemonProcess", **hello: Any) -> AsyncIterator["Client"]:
    """Another client of a daemon, by default on the same host."""
    client = Client(daemon.address)
    try:
        await client.hello(**hello)
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def running(server: "Server | str | DataPlaneConfig", **changes: Any) -> AsyncIterator[tuple[Daemon, Client]]:
    """A daemon within this event loop, and a client of it."""
    async with Daemon(config(server, **changes)) as daemon:
        async with client_of(daemon) as client:
            yield daemon, client


@contextlib.asynccontextmanager
async def serving(
    shape: ChunkLayout, chunks: int, server: "Server | str | DataPlaneConfig", **changes: Any
) -> AsyncIterator[tuple[Daemon, Client]]:
    """A daemon within this event loop, and a client with registered memory for some chunks."""
    async with running(server, **changes) as (daemon, client):
        yield daemon, await client.register(shape, chunks)


class DaemonProcess:
    """The daemon in a separate process, by default with this interpreter."""

    def __init__(
        self, server: "Server | str", directory: Path, *, python: Sequence[str] = (sys.executable,), **changes: Any
    ) -> None:
        address = server if isinstance(server, str) else server.address
        values = {"listen": "127.0.0.1:0", "storage": address, "shutdown_timeout_s": NEVER_S}
        values |= PATIENT | SMALL_BUFFERS | changes
        flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.log = directory / "daemon.log"
        with open(self.log, "wb") as log:
            self.process = Preloaded(
                [*python, "-m", "shadowserve_tools", "dpu", *flags], stdout=subprocess.PIPE, stderr=log
            )
        line = self.process.stdout.readline().decode().split()
        assert line[:1] == ["ready"], self.log.read_text()
        self.address = line[1]

    def stop(self, number: int = signal.SIGTERM, timeout: float = WAIT_MAX_S) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
