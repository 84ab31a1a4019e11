"""Helpers of the storage tests: servers as child processes, a plain client, and records."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from faulty_s3 import BUCKET
from machine import NEVER_S, WAIT_MAX_S, free_port, http_get, wait_for
from preloaded import Preloaded

from shadowserve import native, record
from shadowserve.chunk import TOKENS_MAX, ChunkLayout, DType, Quantizer
from shadowserve.clock import wall_clock_ms
from shadowserve.keys import storage_key
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.resp import NEED_DATA, ErrorReply, LargeBulk, ReplyReader, encode_command
from storage_kv.access.users import Users
from storage_kv.commands import BY_FULL_NAME
from storage_kv.config import StorageConfig
from storage_kv.node import Node
from storage_kv.reconfiguration import Reconfiguration

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = WAIT_MAX_S
USERS = """user root on >r ~* &* +@all
user ann on >a ~* +@all -@admin tenant=a
user amy on >a ~* +@all -@admin +client|list tenant=a
user bob on >b ~* +@all -@admin +client|list tenant=b
user eve on >e ~* +@all -@admin tenant=e
"""


class Child:
    """A storage server in a separate process, on a free port. It always ends."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
        self.process = Preloaded(
            [sys.executable, "-m", "shadowserve_tools", "storage", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=clean | (environment or {}),
        )
        self.log: list[str] = []
        self._clients: list[Client] = []
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()
        self.ready_line = self.process.stdout.readline()
        if not self.ready_line.startswith("ready "):
            self.kill()
            raise AssertionError(f"the server did not start: {self.log}")
        self.port = int(self.ready_line.rpartition(":")[2])

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal. Return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(TIMEOUT_S)
        self._log_reader.join(TIMEOUT_S)
        return status

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()

    def kill(self) -> None:
        self.close_clients()
        self.process.kill()
        self.process.wait()
        self._log_reader.join(TIMEOUT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def threads(self) -> list[Path]:
        """Return the folder in /proc of each thread."""
        return list(Path(f"/proc/{self.process.pid}/task").iterdir())

    @property
    def metrics_port(self) -> int:
        """Port of the HTTP endpoint, from the log."""

        def found() -> list[str]:
            return re.findall(r"metrics_port\W+(\d+)", "\n".join(self.log))

        return int(wait_for(found)[0])

    def http(self, path: str) -> tuple[int, str]:
        """Return status and text of a GET from the HTTP endpoint."""
        return http_get(self.metrics_port, path)

    def samples(self) -> dict[str, float]:
        """Return the metrics by name with labels."""
        status, text = self.http("/metrics")
        assert status == 200
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def client(self, host: str = "127.0.0.1", receive_buffer: int | None = None) -> "Client":
        """Return a client, which is closed with the server."""
        self._clients.append(Client(self.port, host, receive_buffer))
        return self._clients[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


Start = Callable[..., Child]


class Client:
    """A plain blocking client."""

    def __init__(self, port: int, host: str = "127.0.0.1", receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        try:
            self.socket.connect((host, port))
        except OSError:
            self.socket.close()
            raise
        self._reader = ReplyReader()

    def send(self, *arguments: bytes | str | int | memoryview) -> None:
        self.socket.sendall(encode_command(*arguments))

    def receive(self) -> Any:
        """Return the next reply. Bulks received in place are returned as bytes."""
        while True:
            event = self._reader.next_value()
            if isinstance(event, memoryview):
                return bytes(event)
            if event is not NEED_DATA and not isinstance(event, LargeBulk):
                return event
            view = self._reader.get_buffer()
            if view is not None:
                size = self.socket.recv_into(view)
                self._reader.advance(size)
            else:
                data = self.socket.recv(1 << 16)
                size = len(data)
                self._reader.feed(data)
            if size == 0:
                raise EOFError("the server closed the connection")

    def call(self, *arguments: bytes | str | int | memoryview) -> Any:
        self.send(*arguments)
        return self.receive()

    def calls(self, *commands: Sequence[bytes | str | int | memoryview]) -> list[Any]:
        """Send all commands at once. Return the replies."""
        self.socket.sendall(b"".join(encode_command(*command) for command in commands))
        return [self.receive() for _ in commands]

    def refused(self, *arguments: bytes | str | int | memoryview) -> ErrorReply:
        """Return the error that is the reply to a command."""
        reply = self.call(*arguments)
        assert isinstance(reply, ErrorReply), reply
        return reply

    def store(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Store values by key in one pipeline, as a data plane does."""
        commands = [("SET", *record) for record in records]
        assert self.calls(*commands) == [b"OK"] * len(commands)

    def receive_raw(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the stream."""
        found = bytearray()
        while len(found) < size and (data := self.socket.recv(size - len(found))):
            found += data
        return bytes(found)

    def receive_to_end(self) -> bytes:
        """Return everything until the server closes; a reset raises."""
        found = bytearray()
        while data := self.socket.recv(1 << 16):
            found += data
        return bytes(found)

    def info(self, section: str = "everything") -> dict[str, str]:
        text = self.call("INFO", section)
        return dict(line.split(":", 1) for line in text.decode().split("\r\n") if ":" in line)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_node(store: Any = None, config: StorageConfig | None = None) -> Node:
    """Return a node without a server, by default with an empty store in memory."""
    config = config or StorageConfig()
    users = Users(config, BY_FULL_NAME)
    return Node(Reconfiguration(config), users, store or MemoryPool.open(config), wall_clock_ms)


def bucket_flags(endpoint: str, **keys: Any) -> list[str]:
    """Return the flags of a node over a test server's bucket; ``keys`` change the configuration."""
    given = {"bucket": BUCKET, "endpoint": endpoint, "gather_s": 0.0, "index_ttl_s": 0.1, "timeout_s": 20.0}
    return ["--s3", json.dumps(given | keys)]


@contextlib.contextmanager
def running_redis(folder: Path, *flags: str) -> Iterator[int]:
    """Run a redis-server; yield its port."""
    port = free_port()
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder), *flags],
        stdout=subprocess.DEVNULL,
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, "redis-server did not start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
                return True
            return False

        wait_for(listens)  # redis-server sends no ready message
        yield port
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def login(child: Child, name: str, receive_buffer: int | None = None) -> Client:
    """Return a client with an authenticated user whose password is the first letter of its name."""
    client = child.client(receive_buffer=receive_buffer)
    assert client.call("AUTH", name, name[0]) == b"OK"
    return client


def make_record(name: bytes, *, body_bytes: int = 4096, fill: int = 0) -> tuple[bytes, bytes]:
    """Return the storage key and a valid record of the chunk ``name`` (32 bytes), of about ``body_bytes``."""
    tokens = max(1, min(TOKENS_MAX, body_bytes // 256))
    layout = ChunkLayout(
        namespace=b"n" * 32,
        dtype=DType.UINT8,
        layers=2,
        kinds=2,
        vector_length=max(64, body_bytes // tokens // 4),
        tokens=tokens,
        quantizer=Quantizer.PASSTHROUGH,
    )
    return storage_key(name), record.encode(name, native.Codec.NONE, layout, bytes([fill]) * layout.raw_bytes)


def make_certificates(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "make-certificates"), str(folder), *arguments],
        check=True,
        timeout=NEVER_S,
        stdout=subprocess.DEVNULL,
    )


def tls_flags(folder: Path, *, mutual: bool = False) -> list[str]:
    flags = ["--tls-cert", f"{folder}/server.crt", "--tls-key", f"{folder}/server.key"]
    return [*flags, "--tls-client-ca", f"{folder}/ca.crt"] if mutual else flags
