"""Pins: bounded by shares and time. Operators can list and end them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage_support import Child, Client, login

from shadowserve.resp import ErrorReply

VALUE = b"x" * 60_000
MIB = 1 << 20


@pytest.fixture(params=["memory", "pool"])
def server(request: pytest.FixtureRequest, start_tenants: Callable[..., Child], tmp_path: Path) -> Child:
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


def test_one_tenants_pins_leave_the_others_room_and_an_operator_sees_and_ends_them(server: Child) -> None:
    root, ann, bob = (login(server, name) for name in ("root", "ann", "bob"))
    budget = int(root.info("memory")["maxmemory"])
    keys = [f"k{number}" for number in range(budget // len(VALUE) + 1)]
    refusal: ErrorReply | None = None
    for key in keys:  # one page of pins fills the share
        assert ann.call("SET", key, VALUE) == b"OK"
        reply = ann.call("KV.PIN", 600, key)
        if isinstance(reply, ErrorReply):
            refusal = reply
    assert refusal is not None and refusal.startswith(b"OOM pins of this tenant may take")
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


def test_a_pin_is_short_and_longer_ones_are_refused(start: Callable[..., Child]) -> None:
    child = start()
    client = child.client()
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


def test_thousands_of_keys_are_pinned_and_unpinned_in_turns(start: Callable[..., Child]) -> None:
    client = start("--memory-budget-bytes", "256 MiB").client()
    keys = [f"k{number}" for number in range(5_000)]
    client.call("MSET", *(part for key in keys for part in (key, "x")))
    assert client.call("KV.PIN", 60, *keys) == 5_000 and int(client.info("shadowserve")["pinned_keys"]) == 5_000
    assert client.call("KV.UNPIN") == 5_000 and int(client.info("shadowserve")["pinned_keys"]) == 0
