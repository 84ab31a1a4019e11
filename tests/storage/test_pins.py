"""Pins and pending keys: bounded in time and number, by tenant and client."""

from pathlib import Path
from typing import Any

import pytest
from machine import wait_for
from storage_support import Child, Client, Start, login

from shadowserve.resp import ErrorReply

VALUE = b"x" * 60_000


@pytest.fixture(params=["memory", "pool"])
def pinning(request: pytest.FixtureRequest, start_tenants: Start, tmp_path: Path) -> Child:
    if request.param == "memory":
        return start_tenants("--memory-budget-bytes", "8 MiB")
    device = f'[{{"path": "{tmp_path}/device", "size": "16 MiB"}}]'
    return start_tenants("--memory-budget-bytes", "64 MiB", "--devices", device)


def pinned(client: Client) -> dict[bytes, dict[bytes, Any]]:
    found = {}
    for fields in client.call("KV.PINS"):
        each = dict(zip(fields[::2], fields[1::2], strict=True))
        found[each[b"tenant"]] = each
    return found


def test_one_tenants_pins_leave_the_others_room_and_an_operator_sees_and_ends_them(pinning: Child) -> None:
    root, ann, bob = (login(pinning, name) for name in ("root", "ann", "bob"))
    budget = int(root.info("memory")["maxmemory"])
    keys = [f"k{number}" for number in range(budget // len(VALUE) + 1)]
    refusal: ErrorReply | None = None
    for key in keys:  # one page of pins fills the share
        assert ann.call("SET", key, VALUE) == b"OK"
        reply = ann.call("KV.PIN", 600, key)
        if isinstance(reply, ErrorReply):
            refusal = reply
    assert refusal.startswith(b"OOM pins of this tenant may take")
    shown = pinned(root)[b"a"]
    assert 0 < shown[b"bytes"] <= shown[b"bytes_max"] == budget // 4 and shown[b"keys"] > 10
    assert pinned(ann).keys() == {b"a"} and pinned(bob)[b"b"][b"keys"] == 0
    for number in range(2 * len(keys)):
        assert bob.call("SET", f"b{number}", VALUE) == b"OK"
    fields = root.info("shadowserve")
    assert int(fields["pinned_keys"]) == shown[b"keys"] and int(fields["pinned_bytes"]) == shown[b"bytes"]
    assert bob.call("KV.UNPIN", "TENANT", "a").startswith(b"NOPERM")
    assert bob.call("KV.PINS", "ALL").startswith(b"NOPERM")
    assert root.call("KV.UNPIN", "TENANT", "nobody").startswith(b"ERR there is no such tenant")
    assert root.call("KV.UNPIN", "TENANT", "a") == shown[b"keys"]
    assert root.call("KV.UNPIN", "ALL") == 0 and pinned(root) == {}
    assert ann.call("SET", "own", VALUE) == b"OK" and ann.call("KV.PIN", 60, "own") == 1
    assert ann.call("KV.UNPIN") == 1 and pinned(ann)[b"a"][b"keys"] == 0
    assert ann.call("KV.PIN", 60, "own") == 1 and ann.call("FLUSHDB") == b"OK" and root.call("KV.PINS") == []


def test_a_pin_is_short_and_longer_ones_are_refused(start: Start) -> None:
    client = start().client()
    client.call("SET", "a", "x")
    assert client.call("KV.PIN", 600, "a") == 1
    assert client.call("KV.PIN", 601, "a") == (
        b"ERR invalid pin time in 'kv.pin' command: 0 to 600 seconds (pin_max_s)"
    )
    assert client.call("KV.PIN", 365 * 86_400, "a").startswith(b"ERR invalid pin time")
    assert client.call("CONFIG", "SET", "pin_max_s", 3600) == b"OK" and client.call("KV.PIN", 3600, "a") == 1
    assert client.call("KV.PIN", 0, "a") == 1 and client.call("KV.PIN", 60, "none") == 0
    assert client.call("CONFIG", "SET", "pin_share_of_tenant", 0) == b"OK"
    assert client.call("KV.PIN", 60, "none", "a").endswith(b"0 of this command's keys are pinned")
    assert client.call("KV.UNPIN", "ALL", "more").startswith(b"ERR syntax error")


def test_thousands_of_keys_are_pinned_and_unpinned_in_turns(start: Start) -> None:
    client = start("--memory-budget-bytes", "256 MiB").client()
    keys = [f"k{number}" for number in range(5_000)]
    client.call("MSET", *(part for key in keys for part in (key, "x")))
    assert client.call("KV.PIN", 60, *keys) == 5_000 and int(client.info("shadowserve")["pinned_keys"]) == 5_000
    assert client.call("KV.UNPIN") == 5_000 and int(client.info("shadowserve")["pinned_keys"]) == 0


USERS = """user ann on >a ~kv:* +@all -@admin tenant=a
user bob on >b ~* +@all -@admin tenant=b
user eve on >e ~* +@read tenant=a
"""
MINUTE_MS = 60_000


@pytest.fixture
def server(start: Start) -> Child:
    return start()


def pending(client: Client, *keys: str) -> list[bool]:
    reply = client.call("KV.PENDING", *keys)
    assert all(isinstance(left, int) and 0 <= left <= MINUTE_MS for left in reply)
    return [left != 0 for left in reply]


def test_a_published_key_is_pending_until_it_is_stored(server: Child) -> None:
    writer, reader = server.client(), server.client()
    assert pending(reader, "a", "b") == [False, False]
    assert writer.call("KV.PUBLISH", MINUTE_MS, "a", "b") == 2
    assert pending(reader, "a", "b", "c") == [True, True, False]
    assert reader.call("GET", "a") is None and reader.call("EXISTS", "a") == 0
    assert writer.call("SET", "a", "1") == b"OK"
    assert pending(reader, "a", "b") == [False, True]
    assert writer.call("DEL", "a") == 1
    assert pending(reader, "a") == [False], "it is stored"


def test_an_existing_key_does_not_become_pending(server: Child) -> None:
    client = server.client()
    assert client.call("SET", "a", "1") == b"OK"
    assert client.call("KV.PUBLISH", MINUTE_MS, "a", "b") == 1
    assert client.call("DEL", "a") == 1
    assert pending(client, "a", "b") == [False, True]


def test_ending_a_pending_key_affects_only_the_own_client(server: Child) -> None:
    one, other = server.client(), server.client()
    assert one.call("KV.PUBLISH", MINUTE_MS, "a", "b") == 2
    assert other.call("KV.PUBLISH", MINUTE_MS, "a") == 1
    assert one.call("KV.PUBLISH", 0, "a", "b", "c") == 2
    assert pending(one, "a", "b") == [True, False]
    assert other.call("KV.PUBLISH", 0, "a") == 1
    assert pending(one, "a") == [False]


@pytest.mark.parametrize("end", ["closes", "resets"])
def test_a_disconnected_client_ends_its_pending_keys(server: Child, end: str) -> None:
    one, other = server.client(), server.client()
    keys = [f"k{number}" for number in range(1000)]
    assert one.call("KV.PUBLISH", MINUTE_MS, *keys) == len(keys)
    assert all(pending(other, *keys))
    if end == "closes":
        one.close()
    else:
        assert one.call("RESET") == b"RESET"
    wait_for(lambda: not any(pending(other, *keys)))


def test_a_pending_key_expires(server: Child) -> None:
    client = server.client()
    assert client.call("KV.PUBLISH", 1, "a") == 1
    wait_for(lambda: pending(client, "a") == [False])
    assert client.call("KV.PUBLISH", MINUTE_MS, "a") == 1
    assert client.call("KV.PUBLISH", 1, "a") == 1, "the last value must be valid"
    wait_for(lambda: pending(client, "a") == [False])


def test_pending_keys_are_bounded_and_expired_ones_make_room(server: Child) -> None:
    client = server.client()
    keys = [f"k{number}" for number in range(16_384)]
    assert client.call("KV.PUBLISH", 1000, *keys) == len(keys)
    refusal = client.call("KV.PUBLISH", MINUTE_MS, "one more")
    if isinstance(refusal, ErrorReply):  # a pause of a second lets all of them expire
        assert refusal.startswith(b"OOM this connection may have 16384 pending keys and has 16384")
    wait_for(lambda: client.call("KV.PUBLISH", MINUTE_MS, "one more") == 1)
    for number in range(3):
        assert server.client().call("KV.PUBLISH", MINUTE_MS, *(f"{number} {key}" for key in keys)) == len(keys)
    idle, waiting = server.client(), server.client()
    assert idle.call("KV.PUBLISH", 1000, *(f"4 {key}" for key in keys[1:])) == len(keys) - 1
    refusal = waiting.call("KV.PUBLISH", MINUTE_MS, "one more")
    if isinstance(refusal, ErrorReply):
        assert refusal.startswith(b"OOM the server may have 65536 pending keys")
    wait_for(lambda: waiting.call("KV.PUBLISH", MINUTE_MS, "one more") == 1)


def test_pending_keys_follow_permissions_and_tenants(start_tenants: Start) -> None:
    tenants = start_tenants(users=USERS)
    ann, amy, bob, eve = login(tenants, "ann"), login(tenants, "ann"), login(tenants, "bob"), login(tenants, "eve")
    assert ann.call("KV.PUBLISH", MINUTE_MS, "kv:a") == 1
    assert pending(eve, "kv:a") == [True] and pending(bob, "kv:a") == [False]
    for client, key in ((ann, "a"), (eve, "kv:b")):
        assert client.refused("KV.PUBLISH", MINUTE_MS, key).startswith(b"NOPERM")
    keys = [f"k{number}" for number in range(16_384)]
    assert bob.call("KV.PUBLISH", MINUTE_MS, *keys) == len(keys)
    assert login(tenants, "bob").call("KV.PUBLISH", MINUTE_MS, *(f"1{key}" for key in keys)) == len(keys)
    refusal = login(tenants, "bob").call("KV.PUBLISH", MINUTE_MS, "one more")
    assert isinstance(refusal, ErrorReply) and refusal.startswith(b"OOM this tenant may have 32768 pending keys")
    assert amy.call("KV.PUBLISH", MINUTE_MS, "kv:b") == 1


@pytest.mark.parametrize("arguments", [(-1, "a"), (60_001, "a"), ("soon", "a"), (MINUTE_MS, "a" * 129)])
def test_invalid_pending_keys_are_refused(server: Child, arguments: tuple[int | str, str]) -> None:
    client = server.client()
    client.refused("KV.PUBLISH", *arguments)
    assert pending(client, "a") == [False]


def test_a_pending_key_does_not_fail_watchers(server: Child) -> None:
    client, other = server.client(), server.client()
    assert client.call("WATCH", "a") == b"OK"
    assert other.call("KV.PUBLISH", MINUTE_MS, "a") == 1
    assert client.call("MULTI") == b"OK"
    assert client.call("PING") == b"QUEUED"
    assert client.call("EXEC") == [b"PONG"]
