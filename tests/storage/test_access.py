"""Access to the server: passwords and protected mode."""

import subprocess
from collections.abc import Callable

import pytest
import redis
from machine import NEVER_S
from storage_support import Child

from shadowserve.resp import ErrorReply, encode_command

PASSWORD = "correct horse"


def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    found = subprocess.run(
        ["hostname", "-I"], capture_output=True, text=True, check=True, timeout=NEVER_S
    ).stdout.split()
    addresses = [address for address in found if ":" not in address and not address.startswith("127.")]
    assert addresses, "this test needs a machine with an IPv4 address that is not loopback"
    return addresses[0]


@pytest.fixture
def guarded(start: Callable[..., Child]) -> Child:
    return start(environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})


def test_unauthenticated_clients_can_only_authenticate(guarded: Child) -> None:
    with guarded.client() as client:
        for command in (["GET", "a"], ["PING"], ["INFO"], ["KV.META", "a"], ["CLIENT", "ID"], ["COMMAND"]):
            assert client.call(*command) == b"NOAUTH Authentication required."
        hello = client.call("HELLO", 3)
        assert isinstance(hello, ErrorReply) and hello.startswith(b"NOAUTH HELLO must be called with")
        wrong = b"WRONGPASS invalid username-password pair or user is disabled."
        assert client.call("AUTH", "wrong") == wrong
        assert client.call("AUTH", "") == wrong
        assert client.call("AUTH", "nobody", PASSWORD) == wrong
        assert client.call("HELLO", 3, "AUTH", "default", "wrong") == wrong
        assert client.call("GET", "a") == b"NOAUTH Authentication required."
        assert client.call("AUTH", PASSWORD) == b"OK"
        assert client.call("SET", "a", "1") == b"OK"
        assert client.call("RESET") == b"RESET"
        assert client.call("GET", "a") == b"NOAUTH Authentication required."
        assert client.call("HELLO", 2, "AUTH", "default", PASSWORD, "SETNAME", "me") != wrong
        assert client.call("CLIENT", "GETNAME") == b"me"
        assert client.info()["acl_access_denied_auth"] == "4"


def test_before_the_password_a_client_may_send_little(guarded: Child) -> None:
    with guarded.client() as client:
        client.socket.sendall(encode_command("SET", "a", b"x" * 20_000))
        assert client.receive_to_end() == b"-ERR Protocol error: unauthenticated bulk length\r\n"
    with guarded.client() as client:
        client.socket.sendall(encode_command("DEL", *["a"] * 10))
        assert client.receive_to_end() == b"-ERR Protocol error: unauthenticated multibulk length\r\n"
    with guarded.client() as client:  # and the commands after it in the same packet
        client.socket.sendall(encode_command("AUTH", PASSWORD) + encode_command("SET", "a", b"x" * 20_000))
        assert client.receive() == b"OK" and client.receive() == b"OK"
        assert client.call("EXISTS", *["a"] * 20) == 20


def test_the_password_is_written_nowhere(guarded: Child) -> None:
    with guarded.client() as client:
        client.call("AUTH", PASSWORD)
        assert PASSWORD.encode() not in bytes(client.call("INFO", "everything"))  # type: ignore[arg-type]
        assert client.call("CONFIG", "GET", "*pass*") == []
    assert guarded.stop() == 0
    assert PASSWORD not in "\n".join(guarded.log)


def test_other_machines_are_denied_without_a_password(start: Callable[..., Child]) -> None:
    child = start("--host", "0.0.0.0")
    with child.client(own_address()) as outside:
        answer = outside.receive_to_end()
    assert answer.startswith(b"-DENIED ") and answer.endswith(b"\r\n") and answer.count(b"\n") == 1
    with child.client() as inside:
        assert inside.call("PING") == b"PONG"
        assert inside.info()["connections_denied"] == "1"
    with (
        redis.Redis(own_address(), child.port) as client,
        pytest.raises(redis.exceptions.RedisError, match="protected mode"),
    ):
        client.ping()
    assert child.stop() == 0
    assert any("no_password" in line for line in child.log) and any("client_denied" in line for line in child.log)


def test_other_machines_connect_with_a_password_or_without_protected_mode(start: Callable[..., Child]) -> None:
    child = start("--host", "0.0.0.0", environment={"SHADOWSERVE_STORAGE_PASSWORD": PASSWORD})
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"NOAUTH Authentication required."
        assert outside.call("AUTH", PASSWORD) == b"OK" and outside.call("PING") == b"PONG"
    child = start("--host", "0.0.0.0", "--protected-mode", "false")
    with child.client(own_address()) as outside:
        assert outside.call("PING") == b"PONG"


def test_by_default_other_machines_cannot_connect_at_all(shared_server: Child) -> None:
    with pytest.raises(ConnectionRefusedError):
        shared_server.client(own_address())
