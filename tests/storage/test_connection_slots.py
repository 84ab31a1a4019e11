"""Connection slots: unauthenticated connections and limits do not lock out other clients."""

import contextlib
import socket

import pytest
from machine import wait_for
from storage_support import TIMEOUT_S, Child, Client, Start

LOGIN = {"SHADOWSERVE_STORAGE_PASSWORD": "pa"}


def known(child: Child) -> Client:
    client = child.client()
    assert client.call("AUTH", "pa") == b"OK"
    return client


def is_open(client: Client) -> bool:
    """Return True if the server has not closed a connection."""
    client.socket.settimeout(0.01)
    try:
        return client.socket.recv(1, socket.MSG_PEEK) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    finally:
        client.socket.settimeout(TIMEOUT_S)


def test_clients_that_do_not_authenticate_in_time_are_closed(start: Start) -> None:
    """Symptom: 10,000 connections that never authenticated used every slot forever."""
    child = start("--authentication-timeout-s", "1", environment=LOGIN)
    with known(child) as client, child.client() as silent, child.client() as chatty, known(child) as reset:
        assert reset.call("RESET") == b"RESET"
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                chatty.call("PING")  # commands do not extend its time
        assert not is_open(silent) or silent.socket.recv(1) == b""
        assert reset.socket.recv(1) == b"", "it is unauthenticated again"
        assert client.call("PING") == b"PONG"
        assert int(client.info()["unauthenticated_closed"]) == 3
    assert child.stop() == 0
    assert len([line for line in child.log if "client_unknown " in line]) == 1


def test_a_slow_unauthenticated_client_is_closed_too(start: Start) -> None:
    with start("--authentication-timeout-s", "1", environment=LOGIN).client() as client, pytest.raises(ConnectionError):
        client.socket.settimeout(0.05)
        client.socket.sendall(b"*2\r\n$4\r\nAUTH\r\n$16000\r\n")
        for _ in range(10_000):
            client.socket.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if client.socket.recv(1) == b"":
                    raise ConnectionError


def test_unauthenticated_clients_use_a_share_of_slots_and_new_clients_connect(start: Start) -> None:
    flags = ("--connections-max", "40", "--unauthenticated-connections-max", "4", "--authentication-timeout-s", "600")
    child = start(*flags, environment=LOGIN)
    established = [known(child) for _ in range(5)]
    unauthenticated = [child.client() for _ in range(60)]
    wait_for(lambda: sum(map(is_open, unauthenticated)) <= 4)
    assert all(is_open(client) for client in unauthenticated[-4:]), "the oldest are evicted"
    authenticated = [known(child) for _ in range(34)]
    assert all(client.call("PING") == b"PONG" for client in established + authenticated)
    with child.client() as one_too_many:  # 39 are authenticated: one slot is left for the latest client
        assert is_open(one_too_many)
        with known(child) as last:
            assert last.call("PING") == b"PONG"
            with child.client() as beyond:
                assert beyond.receive_to_end() == b"-ERR max number of clients reached\r\n"
    assert int(established[0].info()["unauthenticated_evicted"]) >= 56
    assert any("unauthenticated_evicted address=" in line for line in child.log)


def test_a_tenant_has_its_share_of_slots(start_tenants: Start) -> None:
    child = start_tenants("--connections-max", "20")

    def comes_in(name: str, password: str) -> Client | None:
        client = child.client()
        if client.call("AUTH", name, password) == b"OK":
            return client
        client.close()
        return None

    of_ann = [comes_in("ann", "a") for _ in range(15)]
    assert sum(client is not None for client in of_ann) == 10
    of_bob = [comes_in("bob", "b") for _ in range(15)]
    assert sum(client is not None for client in of_bob) == 8, (
        "only tenants with few connections may use the last eighth"
    )
    third = comes_in("root", "r")
    assert third is not None, "two tenants at their limits must not lock out a third"
    third.close()
    first = of_ann[0]
    assert first.call("AUTH", "ann", "a") == b"OK", "a connected client keeps its slot"
    assert first.call("AUTH", "bob", "b") == b"ERR max number of clients of this tenant reached"
    second = of_ann[1]
    second.close()
    wait_for(lambda: comes_in("ann", "a"))


def test_a_tenants_share_of_slots_can_be_configured(start_tenants: Start) -> None:
    child = start_tenants("--connections-max", "20", "--tenants", "{a: {connections_max: 3}}")
    clients = [child.client() for _ in range(4)]
    answers = [client.call("AUTH", "ann", "a") for client in clients]
    assert answers == [b"OK"] * 3 + [b"ERR max number of clients of this tenant reached"]


def test_without_a_password_all_clients_are_authenticated(start: Start) -> None:
    child = start("--authentication-timeout-s", "0.2", "--connections-max", "10")
    clients = [child.client() for _ in range(10)]
    with contextlib.suppress(TimeoutError):
        clients[0].socket.settimeout(1.0)
        clients[0].socket.recv(1)
    clients[0].socket.settimeout(TIMEOUT_S)
    assert all(client.call("PING") == b"PONG" for client in clients)
