"""A server's memory of clients that have disconnected, and of names that were used once: none, or a bounded table.

The cycle collector hardly ever checks long-lived objects (see server.run), so all objects of a connection must be freed
with their last reference. The tests disable the collector.
"""

import contextlib
import gc
import socket
import ssl
import struct
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import WAIT_MAX_S, wait_for
from slow_store import Served
from storage_support import make_record

from shadowserve.pool import interleaver, memory_cache
from shadowserve.pool.pool import Pool
from shadowserve.resp import CommandReader, encode_command
from storage_kv.access import authentication_throttle
from storage_kv.clients.connection import Connection
from storage_kv.clients.event_loop import Signal
from storage_kv.clients.replies import Replies
from storage_kv.clients.secure_connection import SecureConnection
from storage_kv.clients.transport import PlainTransport, TlsTransport
from storage_kv.server import StorageServer
from storage_kv.session import Session

_OF_A_CONNECTION = frozenset(
    {Connection, SecureConnection, Session, CommandReader, Replies, Signal, PlainTransport, TlsTransport}
)
_CONNECTIONS = 5
_NAMES = 120
_BOUND = 16


class Lasting(Served):
    """A server in this process, which can read its configuration again."""

    server: StorageServer

    def make_server(self) -> StorageServer:
        return StorageServer(self._config, load=lambda: self._config)

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_MAX_S)


def _reset(sock: socket.socket) -> None:
    """Make the socket's end a reset, like that of a killed client."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# ---- Ends of a connection

_SET, _GET = encode_command("SET", "a", bytes(1_000_000)), encode_command("GET", "a")
_HALF_A_VALUE = b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$3000000\r\n" + bytes(2_000_000)
_HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"

ENDS = {
    "in order": (encode_command("SET", "a", "1") + _GET, b"+OK\r\n$1\r\n1\r\n"),
    "quit": (encode_command("QUIT"), b"+OK\r\n"),
    "half a large value": (_HALF_A_VALUE, b""),
    "reset in half a command": (b"*3\r\n$3\r\nSET\r\n$1", b""),
    "reset before reading replies": (_SET + 20 * _GET, b"+OK"),
    "nonsense": (b"*nonsense\r\n", b"-"),
    "TLS where none is spoken": (_HALF_A_HELLO, b"-"),
    "wrong password": (encode_command("AUTH", "nobody", "guessed"), b""),
}
"""Bytes that a client sends, and the beginning of the reply that it waits for."""


def _a_handshake_cut_off(sock: socket.socket, context: ssl.SSLContext) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    sock.sendall(outgoing.read())
    assert sock.recv(1)  # the server's part of the handshake
    _reset(sock)


def _a_certificate_that_is_not_trusted(sock: socket.socket, context: ssl.SSLContext) -> None:
    with pytest.raises(ssl.SSLError):
        ssl.create_default_context().wrap_socket(sock, server_hostname="localhost").close()


def _over_tls(sock: socket.socket, context: ssl.SSLContext) -> None:
    with context.wrap_socket(sock, server_hostname="localhost") as secure:
        secure.sendall(encode_command("PING"))
        assert secure.recv(7) == b"+PONG\r\n"
        secure.sendall(_HALF_A_VALUE)


TLS_ENDS: dict[str, Callable[[socket.socket, ssl.SSLContext], Any]] = {
    "half a handshake": lambda sock, context: sock.sendall(_HALF_A_HELLO),
    "a handshake cut off": _a_handshake_cut_off,
    "an untrusted certificate": _a_certificate_that_is_not_trusted,
    "no TLS": lambda sock, context: sock.sendall(b"PING\r\n"),
    "over TLS": _over_tls,
}


@pytest.fixture
def without_collector() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # objects of other tests, including open sockets
    gc.disable()
    yield
    gc.enable()


def _left() -> Counter[str]:
    """Return the connection objects in this process."""
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in _OF_A_CONNECTION)


def _check_nothing_is_left(served: Lasting, end: Callable[[socket.socket], None]) -> None:
    before = _left()
    for _ in range(_CONNECTIONS):
        with served.connect() as sock:
            end(sock)
    wait_for(lambda: not served.server.node.sessions)
    left: Counter[str] = Counter()

    def gone() -> bool:
        left.clear()
        left.update(_left() - before)
        return not left

    with contextlib.suppress(AssertionError):
        wait_for(gone)
    assert not left


@pytest.mark.parametrize("name", ENDS)
def test_an_ended_connection_leaves_no_reference_cycles(name: str, without_collector: None) -> None:
    """Symptom: a cycle kept 6 KB of each connection, and megabytes of a half-received value."""
    sent, expected = ENDS[name]

    def end(sock: socket.socket) -> None:
        sock.sendall(sent)
        found = b""
        while len(found) < len(expected):
            found += sock.recv(len(expected) - len(found))
        assert found == expected
        if name.startswith("reset"):
            _reset(sock)

    with Lasting(io_threads=1) as served:
        _check_nothing_is_left(served, end)


@pytest.mark.parametrize("name", TLS_ENDS)
def test_tls_and_failed_handshakes_leave_no_reference_cycles(
    name: str, certificates: Path, without_collector: None
) -> None:
    context = ssl.create_default_context(cafile=f"{certificates}/ca.crt")
    files = {"tls_cert": f"{certificates}/server.crt", "tls_key": f"{certificates}/server.key"}
    with Lasting(io_threads=1, **files) as served:
        _check_nothing_is_left(served, lambda sock: TLS_ENDS[name](sock, context))


# ---- New names


def _sizes(root: object) -> Counter[str]:
    """Return the sizes of all containers that can be reached from an object, by attribute path."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting:
        path, each = waiting.popleft()
        if id(each) in seen or isinstance(each, type) or callable(each):
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | tuple | set | frozenset | deque):
            if not isinstance(each, tuple):
                found[path] += len(each)
            parts = [*each.keys(), *each.values()] if isinstance(each, dict) else [*each]
            waiting.extend((f"{path}[]", part) for part in parts)
        elif isinstance(each, bytearray):
            found[path] += len(each)
        elif type(each).__module__.startswith(("storage_kv", "shadowserve")):
            names = {name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())}
            attributes = {**{name: getattr(each, name, None) for name in names}, **getattr(each, "__dict__", {})}
            waiting.extend((f"{path}.{name}", value) for name, value in attributes.items())
    return found


def _sizes_at_rest(served: Lasting) -> Counter[str]:
    """Return the sizes of a server's tables if it is idle; otherwise an empty result."""
    node = served.server.node
    with node.lock:
        disks = node.store._core.disks if isinstance(node.store, Pool) else []
        busy = node.sessions or node.store.statistics().expiring_keys or not all(disk.volume.idle for disk in disks)
        return Counter() if busy else _sizes(served.server)


def _use_new_names(served: Lasting, numbers: range) -> None:
    node = served.server.node
    with served.client() as client:
        asked = 0
        for number in numbers:
            key, record = make_record(number.to_bytes(32, "little"), body_bytes=256)
            commands: list[tuple[str | bytes | int, ...]] = [
                ("SET", f"key {number}", bytes(36_000)),
                ("SET", f"brief {number}", "1", "PX", "1"),
                ("SET", key, record),
                ("KV.PIN", key, 1),
                ("GET", f"key {number - 40}"),
                ("DEL", f"key {number - 60}"),
                ("CLIENT", "SETNAME", f"client-{number}"),
                (f"UNKNOWN{number}", "a"),
                ("CONFIG", "SET", f"unknown{number}", "1"),
            ]
            for command in commands:
                client.send(*command)
            asked += len(commands)
        for _ in range(asked):
            client.receive()
    for number in numbers[:: _NAMES // 4]:
        with served.client() as client:
            user = f"user{number}"
            assert client.call("ACL", "SETUSER", user, "on", f">{number}", "~*", "+@all") == b"OK"
            assert client.call("AUTH", user, str(number)) == b"OK"
            assert client.call("CONFIG", "SET", "maxclients", number + 100) == b"OK"
        with served.client() as client:
            assert client.call("ACL", "DELUSER", user) == 1
        served.server.node.reconfiguration.reload(served.server.node.lock)
    with node.lock:
        for number in numbers:
            node.auth_throttle.answer_at(f"10.0.{number >> 8}.{number & 255}:1", float(number), accepted=False)
            session = Session(0, address=f"client {number}")
            node.deny(session, "key", b"key %d" % number, b"client %d" % number)


@pytest.mark.parametrize("engine", ["memory", "pool"])
def test_names_that_occur_once_do_not_accumulate(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of keys, users, clients, commands and addresses are bounded. The test uses small bounds."""
    for module, bound in (
        (interleaver, "_CHAINS_MAX"),
        (memory_cache, "_GHOSTS_MAX"),
        (authentication_throttle, "_ADDRESSES_MAX"),
    ):
        monkeypatch.setattr(module, bound, _BOUND)
    config: dict[str, Any] = {"memory_budget_bytes": 8 << 20, "audit_log": str(tmp_path / "audit")}
    if engine == "pool":
        device = {"size": 48 << 20, "objects_max": 64, "bandwidth": 1 << 30}
        config["devices"] = [{**device, "path": str(tmp_path / f"disk{number}")} for number in range(2)]
    else:
        config |= {"memory_budget_bytes": 1 << 20}
    with Lasting(io_threads=1, **config) as served:
        found: list[Counter[str]] = []
        for turn in range(6):
            _use_new_names(served, range(turn * _NAMES, (turn + 1) * _NAMES))
            found.append(wait_for(lambda: _sizes_at_rest(served)))
    # The first two turns fill the bounded tables. An unbounded table grows by one for each name of the next four turns.
    # A table that compacts at intervals, such as the key index, varies by less.
    grown = {path: size - found[1][path] for path, size in found[5].items()}
    assert {path: more for path, more in grown.items() if more >= 2 * _NAMES} == {}
    assert any(path.endswith("auth_throttle._queues") for path in grown), "the walk must find the tables"
