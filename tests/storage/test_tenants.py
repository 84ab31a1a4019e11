"""Tenants: separate keys, rates and quotas."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from machine import wait_for
from storage_support import USERS, Child, Client, Start, login, make_node

from storage_kv.access.limits import RateLimiter
from storage_kv.commands import execute
from storage_kv.config import StorageConfig, TenantLimits
from storage_kv.session import Session


@pytest.fixture
def server(start_tenants: Start) -> Child:
    return start_tenants()


@pytest.fixture
def people(server: Child) -> Iterator[dict[str, Client]]:
    yield {name: login(server, name) for name in ("root", "ann", "amy", "bob")}


def test_the_same_key_is_another_key_for_another_tenant(people: dict[str, Client]) -> None:
    ann, amy, bob, root = (people[name] for name in ("ann", "amy", "bob", "root"))
    assert ann.call("SET", "k", "ann's") == b"OK"
    assert amy.call("GET", "k") == b"ann's" and bob.call("GET", "k") is None and root.call("GET", "k") is None
    assert bob.call("SET", "k", "bob's", "NX") == b"OK"
    assert ann.call("GET", "k") == b"ann's" and bob.call("GET", "k") == b"bob's"
    assert ann.call("DBSIZE") == 1 and ann.call("SCAN", 0) == [b"0", [b"k"]]
    assert bob.call("UNLINK", "k") == 1 and ann.call("EXISTS", "k") == 1


def test_lists_and_counts_show_the_own_tenant(people: dict[str, Client]) -> None:
    ann, bob, root = people["ann"], people["bob"], people["root"]
    for number in range(20):
        ann.call("SET", f"a{number}", "x")
    bob.call("SET", "b", "x")
    root.call("SET", "r", "x")
    for client, keys in ((ann, 20), (bob, 1), (root, 1)):
        assert client.call("DBSIZE") == keys
        found, cursor = [], b"0"
        while True:
            cursor, some = client.call("SCAN", cursor)
            found += some
            if cursor == b"0":
                break
        assert len(found) == keys
    assert ann.info()["db0"].startswith("keys=20,") and bob.info()["db0"].startswith("keys=1,")
    assert root.info()["db0"].startswith("keys=22,")
    assert "used_memory" not in ann.info() and "total_commands_processed" not in ann.info("stats")
    assert "used_memory" in root.info()

    def names(client: Client) -> set[bytes]:
        text = client.call("CLIENT", "LIST")
        return {line.split(b"user=")[1].split()[0] for line in text.splitlines()}

    assert names(people["amy"]) == {b"ann", b"amy"} and names(bob) == {b"bob"}
    assert names(root) == {b"ann", b"amy", b"bob", b"root"}


def test_flushall_removes_the_own_tenants_keys_or_an_operators_all(people: dict[str, Client]) -> None:
    for name in ("ann", "bob", "root"):
        people[name].call("SET", "k", "x")
    assert people["ann"].call("FLUSHALL") == b"OK"
    assert [people[name].call("DBSIZE") for name in ("ann", "bob", "root")] == [0, 1, 1]
    assert people["root"].call("FLUSHDB") == b"OK"
    assert [people[name].call("DBSIZE") for name in ("ann", "bob", "root")] == [0, 1, 0]
    assert people["root"].call("FLUSHALL") == b"OK"
    assert people["bob"].call("DBSIZE") == 0


def test_a_user_that_moves_to_another_tenant_must_reconnect(people: dict[str, Client], server: Child) -> None:
    people["ann"].call("SET", "k", "x")
    assert people["root"].call("ACL", "SETUSER", "ann", "tenant=b") == b"OK"
    assert people["ann"].receive_to_end() == b""
    assert login(server, "ann").call("GET", "k") is None


def recorded(execution: Callable[[], object]) -> tuple[list[tuple[str, str]], object]:
    """Return all functions of this project that a command executes, in order, with its result."""
    import sys

    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "/storage_kv/" in frame.f_code.co_filename:
            calls.append((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        reply = execution()
    finally:
        sys.setprofile(None)
    return calls, reply


def test_another_tenants_key_behaves_like_an_absent_one(tmp_path: Path) -> None:
    """The same functions run in the same order with the same reply; ``shadowserve bench isolation`` compares times."""
    (users := tmp_path / "users.acl").write_text(USERS)
    node = make_node(config=StorageConfig(users_file=str(users)))
    sessions = {}
    for number, name in enumerate((b"ann", b"bob")):
        sessions[name] = Session(number, address="127.0.0.1:1")
        node.bind(sessions[name], node.users.by_name[name])
    assert execute(node, sessions[b"ann"], [b"SET", b"there", b"x"]) == b"+OK\r\n"
    for command in (b"GET %b", b"EXISTS %b", b"STRLEN %b", b"TTL %b", b"MGET %b", b"KV.META %b", b"GETRANGE %b 0 5",
                    b"TYPE %b", b"DEL %b", b"EXPIRE %b 5", b"PERSIST %b", b"SET %b x XX"):  # fmt: skip
        traced = [
            recorded(partial(execute, node, sessions[b"bob"], (command % key).split()))
            for key in (b"absent", b"absent", b"there")
        ]
        assert traced[1] == traced[2], command
    assert execute(node, sessions[b"ann"], [b"GET", b"there"]) == b"$1\r\nx\r\n"


def test_buckets_go_into_debt_and_earn_it_back() -> None:
    limiter = RateLimiter(TenantLimits(commands_per_s=10, bytes_per_s=1000), 100.0)
    limiter.charge(10, 0)
    assert limiter.wait_s(100.0) == 0
    limiter.charge(5, 3000)
    assert limiter.wait_s(100.0) == pytest.approx(2.0)
    assert limiter.wait_s(101.0) == pytest.approx(1.0)
    assert limiter.wait_s(102.5) == 0 and limiter.wait_s(102.0) == 0  # a clock that goes back adds no credit
    assert not RateLimiter(TenantLimits(keys_max=1), 0.0).has_limits


def test_a_tenant_beyond_its_rate_waits_and_others_do_not(start_tenants: Start) -> None:
    child = start_tenants("--tenants", "{a: {commands_per_s: 20}, b: {bytes_per_s: 4 MiB}}")
    ann, bob, root = login(child, "ann"), login(child, "bob"), login(child, "root")
    begun = time.monotonic()
    for _ in range(60):
        ann.send("PING")
    assert root.call("PING") == b"PONG"
    assert [ann.receive() for _ in range(60)] == [b"PONG"] * 60  # no reply is lost
    for _ in range(3):
        assert ann.call("PING") == b"PONG"
    assert time.monotonic() - begun > 1.0  # 63 commands, 20 of them saved, at 20 per second
    value = b"v" * (6 << 20)
    assert bob.call("SET", "k", value) == b"OK" and bob.call("GET", "k") == value and bob.call("PING") == b"PONG"
    assert int(root.info()["throttled"]) >= 2


def test_quotas_bound_what_a_tenant_holds_and_only_its_own_is_evicted(start_tenants: Start) -> None:
    child = start_tenants("--tenants", "{a: {keys_max: 10}, b: {bytes_max: 1 MiB}}")
    ann, bob = login(child, "ann"), login(child, "bob")
    for number in range(50):
        assert ann.call("SET", number, "x") == b"OK"
        assert bob.call("SET", number, b"x" * 50_000) == b"OK"
    assert ann.call("DBSIZE") == 10 and ann.call("GET", 49) == b"x"
    held = bob.call("DBSIZE")
    assert 10 < held < 21 and bob.call("EXISTS", 49) == 1
    info = login(child, "root").info()
    assert info["evictions"] == f"budget=0,quota={40 + 50 - held}" and info["lost_objects"] == ""


def test_waiting_commands_of_a_throttled_client_use_no_memory(start_tenants: Start) -> None:
    """A client beyond its rate is not read. Its commands stay in its own buffers."""
    child = start_tenants("--tenants", "{a: {commands_per_s: 1}}")
    ann, root = login(child, "ann"), login(child, "root")
    ann.socket.setblocking(False)
    sent = 0
    try:
        while sent < 64 << 20:
            sent += ann.socket.send(b"PING " + b"x" * 1000 + b"\r\n")
    except BlockingIOError:
        pass
    assert sent < 64 << 20  # the sender was stopped
    wait_for(lambda: int(root.info()["throttled"]) >= 1)
    assert root.call("PING") == b"PONG"
