"""Browsers, request forgery and other protocols run no command."""

import contextlib
import os

import pytest
from machine import wait_for
from storage_support import Child, Client, Start

from shadowserve.resp import encode_command

MIB = 1 << 20
FLUSH = encode_command("FLUSHALL")


def send_and_read(child: Child, data: bytes, step: int = MIB) -> bytes:
    """Return the server's bytes until it closes; ``data`` is sent ``step`` bytes at a time."""
    with child.client() as client:
        found = bytearray()
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(data), step):
                client.socket.sendall(data[begin : begin + step])
            while part := client.socket.recv(1 << 16):
                found += part
    return bytes(found)


HTTP = {
    "POST with commands in its body": (
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1:6380\r\nContent-Type: text/plain\r\nContent-Length: 40\r\n\r\n"
        b"FLUSHALL\r\n" + FLUSH
    ),
    "GET with commands in its lines": (
        b"GET /?a HTTP/1.1\r\nACL SETUSER eve on nopass ~* +@all\r\nFLUSHALL\r\nHost: localhost\r\n\r\n" + FLUSH
    ),
    "HTTP/1.0 with a bare line feed": b"HEAD / HTTP/1.0\nFLUSHALL\n\n",
    "HTTP/0.9": b"GET /\r\nFLUSHALL\r\n",
    "a header alone": b"Host: localhost\r\nFLUSHALL\r\n",
    "a method that is an allowed command": b"PING / HTTP/1.1\r\nFLUSHALL\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nFLUSHALL\r\n",
    "a WebSocket": b"GET /chat HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nFLUSHALL\r\n",
    "a proxy's request": b"CONNECT 127.0.0.1:6380 HTTP/1.1\r\n\r\n" + FLUSH,
    "behind an empty line": b"\r\nGET / HTTP/1.1\r\n\r\nFLUSHALL\r\n",
}


@pytest.mark.parametrize("step", [1, MIB])
@pytest.mark.parametrize("name", HTTP)
def test_nothing_that_http_carries_is_executed(shared_server: Child, client: Client, name: str, step: int) -> None:
    """Symptom: FLUSHALL in the body of a web page's POST emptied the store."""
    client.call("SET", "a", "1")
    before = int(client.info()["http_refused"])
    assert send_and_read(shared_server, HTTP[name], step) == b""
    assert client.call("GET", "a") == b"1"
    assert client.call("ACL", "GETUSER", "eve") is None
    assert int(client.info()["http_refused"]) == before + 1


def hello_of_tls(session: bytes) -> bytes:
    """Return the start of a TLS handshake with a chosen session id."""
    body = b"\x03\x03" + bytes(32) + bytes([len(session)]) + session + b"\0\2\x13\1\1\0"
    hello = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\1" + len(hello).to_bytes(2, "big") + hello


OTHERS = {
    "TLS": hello_of_tls(b"\r\nFLUSHALL\r\nFLUSHALL\r\n"),
    "curl's dict": b"CLIENT libcurl 7.88.1\r\nFLUSHALL\r\nQUIT\r\n",
    "SMTP": b"EHLO evil\r\nMAIL FROM:<x>\r\nFLUSHALL\r\n",
    "FTP": b"USER anonymous\r\nFLUSHALL\r\n",
    "git": b"003agit-upload-pack /x\0host=127.0.0.1\0\r\nFLUSHALL\r\n",
    "rsync": b"@RSYNCD: 31.0\nFLUSHALL\n",
    "memcached": b"set a 0 0 8\r\nFLUSHALL\r\n",
    "PROXY": b"PROXY TCP4 1.1.1.1 1.1.1.1 1 2\r\nFLUSHALL\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\nFLUSHALL\r\n",
    "TURN": b"\0\3\0\x10\x21\x12\xa4\x42" + bytes(12) + b"\0\6\0\x0c\r\nFLUSHALL\r\n",
    "PostgreSQL": b"\0\0\0\x20\0\3\0\0user\0\r\nFLUSHALL\r\n",
    "a typed command": b"FLUSHALL\r\n" + FLUSH,
    "a typed command in quotes": b'"FLUSHALL"\r\n',
    "behind a typed PING": b"PING\r\nFLUSHALL\r\n" + FLUSH,
    "behind a blank": b" FLUSHALL\r\n",
    "behind bytes that are no RESP": b"*1\r\n$x\r\n" + FLUSH,
}


@pytest.mark.parametrize("step", [1, MIB])
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_that_other_protocols_carry_is_executed(
    shared_server: Child, client: Client, name: str, step: int
) -> None:
    client.call("SET", "a", "1")
    before = int(client.info()["protocol_errors"])
    answer = send_and_read(shared_server, OTHERS[name], step)
    assert answer.removeprefix(b"+PONG\r\n").startswith(b"-ERR ") and answer.count(b"-ERR ") == 1
    assert client.call("GET", "a") == b"1"
    assert int(client.info()["protocol_errors"]) == before + 1


def test_typed_commands_that_change_nothing_are_accepted(start: Start) -> None:
    child = start(environment={"SHADOWSERVE_STORAGE_PASSWORD": "pa"})
    lines = b'AUTH pa\r\nPING\nping "a b"\r\n\r\nECHO x\r\nINFO replication\r\nQUIT\r\n'
    answer = send_and_read(child, lines)
    assert answer.startswith(b"+OK\r\n+PONG\r\n$3\r\na b\r\n$1\r\nx\r\n$")
    assert b"role:master" in answer and answer.endswith(b"+OK\r\n")
    refused = send_and_read(child, b"AUTH pa\r\nGET a\r\nPING\r\n")
    assert refused.startswith(b"+OK\r\n-ERR Protocol error: 'GET' cannot be typed") and refused.count(b"\r\n") == 2


def test_repeated_http_requests_are_logged_once(start: Start, tmp_path: os.PathLike[str]) -> None:
    audit = os.path.join(tmp_path, "audit.log")
    child = start("--audit-log", audit)
    for _ in range(20):
        send_and_read(child, HTTP["POST with commands in its body"])
        send_and_read(child, OTHERS["SMTP"])
    with child.client() as client:
        wait_for(lambda: client.info()["audit_lines"] == "40")
    assert child.stop() == 0
    refused = [line for line in child.log if "client_refused " in line]
    assert len([line for line in refused if "HTTP" in line]) == 1 and len(refused) == 2
    assert [line for line in child.log if "client_refused_again" in line and "times=38" in line]
    with open(audit) as file:
        lines = file.read().splitlines()
    assert len([line for line in lines if '"protocol"' in line and "HTTP" in line]) == 20
