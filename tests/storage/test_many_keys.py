"""Commands on many or all keys: other clients are served in between, and memory is bounded."""

from typing import Any

import pytest
from machine import wait_for
from slow_store import Served
from storage_support import Client, Start, make_record
from work_meter import WORK_MAX, WorkMeter

from shadowserve.pool.types import Address
from shadowserve.pool.volume.tickets import OutOfBudgetError, Ticket
from shadowserve.resp import ErrorReply
from storage_kv.commands import _keys
from storage_kv.commands._arguments import KEYS_AT_A_TIME

MANY = 3 * KEYS_AT_A_TIME + 10


def pairs(count: int) -> list[str]:
    return [word for number in range(count) for word in (f"k{number}", str(number))]


def test_commands_on_many_keys_release_the_lock(served: Served) -> None:
    """A hold of the lock takes no more work for many keys than for those of one step."""
    node, meter = served.server.node, WorkMeter()
    meter._lock, node.lock = node.lock, meter  # the store's thread has the same lock
    work: dict[int, list[int]] = {}
    with served.client() as client:

        def metered(*command: Any) -> Any:
            meter.begin()
            reply = client.call(*command)
            work[count].append(meter.end())
            return reply

        for count in (KEYS_AT_A_TIME, MANY):
            work[count], names = [], [f"k{number}" for number in range(count)]
            assert metered("MSET", *pairs(count)) == b"OK"
            assert metered("EXISTS", *names, "none", "k1") == count + 1
            assert metered("TOUCH", *names, "none") == count
            for pattern in ("k*", "*"):
                assert sorted(metered("KEYS", pattern)) == sorted(map(str.encode, names))
            assert len(metered("SCAN", 0, "COUNT", 10**9)[1]) <= KEYS_AT_A_TIME
            assert metered("UNLINK", *names[:10], *names[:10], "none") == 10
            assert metered("DEL", *names) == count - 10
            assert client.call("KEYS", "*") == []
    for few, many in zip(work[KEYS_AT_A_TIME], work[MANY], strict=True):
        assert many < 2.2 * few, work  # three times, if all were done at once; arguments are parsed at once


def test_commands_about_commands_release_the_lock(served: Served) -> None:
    meter = WorkMeter()
    served.server.node.lock = meter
    questions = {"DOCS": ["client"], "INFO": ["client"], "GETKEYS": ["MSET"]}
    with served.client() as client:
        for name, words in questions.items():
            for count in (1000, 12_000):  # with 6,000, even one hold stays within the limit
                asked = words * count if words != ["MSET"] else ["MSET", *pairs(count // 2)]
                meter.begin()
                reply = client.call("COMMAND", name, *asked)
                assert meter.end() < WORK_MAX, (name, count)
                assert isinstance(reply, ErrorReply) == (count == 12_000 and words != ["MSET"]), name
                assert words != ["MSET"] or (isinstance(reply, list) and len(reply) == count // 2)


def test_keys_lists_each_key_once_while_others_change(served: Served) -> None:
    store = served.store
    scan, calls = store.scan, 0
    with served.client() as client:
        client.call("MSET", *pairs(MANY))

        def scan_and_change(tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
            nonlocal calls
            calls += 1
            store.put((0, b"new%d" % calls), b"x")
            store.remove((0, b"k%d" % (MANY - calls)))
            next_cursor, names = scan(tenant, cursor, count)
            return next_cursor, [*names, b"k0"]  # a store may return a key twice

        store.scan = scan_and_change
        found = client.call("KEYS", "k*")
        assert len(found) == len(set(found))
        assert {b"k%d" % number for number in range(MANY - 10)} <= set(found)
        assert calls >= 4


def test_a_listing_that_would_be_too_long_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_keys, "_LISTING_BYTES_MAX", 1 << 20)
    with served.client() as client:
        for number in range(40):
            client.call("SET", f"{number}" + "x" * 30_000, "")
        assert b"use SCAN" in client.refused("KEYS", "*")
        assert len(client.call("KEYS", "1*")) == 11
        assert b"pattern is too long" in client.refused("KEYS", "x" * 2000)
        client.refused("SCAN", "0", "MATCH", "x" * 2000)


@pytest.mark.parametrize("count", [5, MANY])
def test_values_set_together_wait_for_room_and_are_answered_when_durable(served: Served, count: int) -> None:
    store = served.store
    with served.client() as client:
        store.lazy = True
        put, puts = store.put, 0

        def put_with_pauses(*arguments: Any, **named: Any) -> Any:
            nonlocal puts
            puts += 1
            store.crowded |= puts % max(3, count // 5) == 0  # until the test frees memory
            return put(*arguments, **named)

        store.put = put_with_pauses
        client.send("MSET", *pairs(count))
        room = 0
        while len(store.tickets) < count:
            wait_for(lambda: store.refused_writes or len(store.tickets) == count)
            room += bool(store.refused_writes)
            store.make_room()
        assert room >= 2
        other = served.client()
        assert other.call("EXISTS", "k0") == 1  # but the reply must still wait
        for number in range(count):
            store.settle(OutOfBudgetError("gone") if number == 1 else None)
        refused = client.receive()
        assert isinstance(refused, ErrorReply) and refused.startswith(b"OOM ")


def test_records_set_together_are_checked_before_any_is_stored(client: Client) -> None:
    key, record = make_record(b"a" * 32, body_bytes=300_000)
    small_key, small = make_record(b"b" * 32)
    for value in (record[:-1], b"SSR"):
        refused = client.refused("MSET", "plain", "1", small_key, small, key, record[:4] + value)
        assert b"record refused" in refused
        assert client.call("EXISTS", "plain", key, small_key) == 0
    assert client.call("MSET", "plain", "1", small_key, small, key, record) == b"OK"
    other = make_record(b"a" * 32, body_bytes=300_000, fill=1)[1]
    for command in (("MSET", key, other), ("SETEX", key, 100, other), ("SET", key, other)):
        assert client.call(*command) == b"OK"  # as with SET, the first record stays
        assert client.call("GET", key) == record and client.call("TTL", key) == -1
    assert client.call("SETNX", key, other) == 0 and client.call("GETSET", key, other) == record
    assert client.call("GETDEL", key) == record and client.call("MSETNX", key, other, small_key, small) == 0
    client.refused("PSETEX", key, 100, record[:-1])
    assert client.call("PSETEX", key, 1_000_000, other) == b"OK" and client.call("GETEX", key, "PERSIST") == other


def test_more_keys_than_may_be_set_at_once_or_not_at_all_are_refused(client: Client) -> None:
    assert client.call("MSETNX", *pairs(KEYS_AT_A_TIME)) == 1
    refused = client.refused("MSETNX", *(f"other{word}" for word in pairs(KEYS_AT_A_TIME + 1)))
    assert b"at most %d keys" % KEYS_AT_A_TIME in refused


@pytest.mark.parametrize("away", [False, True])
def test_a_value_that_is_removed_as_it_is_read_is_sent_whole(served: Served, away: bool) -> None:
    store = served.store
    with served.client() as client:
        for command in (("GETDEL", "a"), ("GETEX", "a", "EXAT", 1), ("GETSET", "a", "new")):
            client.call("SET", "a", "x" * 100_000)
            store.away, store.lazy = away, True
            client.send(*command)
            if away:
                served.wait_for_reads(1)
                store.finish_read()
            wait_for(lambda: len(store.tickets) == 1)
            store.settle()
            assert client.receive() == b"x" * 100_000
            store.away = store.lazy = False
            assert client.call("GET", "a") == (b"new" if command[0] == "GETSET" else None)
        wait_for(lambda: store.leases == 0 and store.statistics().held_bytes == 0)


def test_client_kill_filters_select_clients(start: Start) -> None:
    with start() as child, child.client() as admin:

        def address_of(client: Client) -> str:
            host, port = client.socket.getsockname()[:2]
            return f"{host}:{port}"

        def is_gone(client: Client) -> bool:
            try:
                client.call("PING")
            except (EOFError, ConnectionError):
                return True
            return False

        admin.call("ACL", "SETUSER", "alice", "on", ">pw", "~*", "+@all", "-acl", "tenant=a")
        admin.call("ACL", "SETUSER", "bob", "on", ">pw", "~*", "+@all", "tenant=b")
        first, second, third = (child.client() for _ in range(3))
        number = [client.call("CLIENT", "ID") for client in (first, second, third)][1]
        assert admin.call("CLIENT", "KILL", address_of(first)) == b"OK" and is_gone(first)
        admin.refused("CLIENT", "KILL", address_of(first))
        assert admin.call("CLIENT", "KILL", "ID", str(number), "TYPE", "master") == 0
        assert admin.call("CLIENT", "KILL", "ID", str(number), "ADDR", address_of(second)) == 1 and is_gone(second)
        assert third.call("AUTH", "alice", "pw") == b"OK"
        assert admin.call("CLIENT", "KILL", "USER", "alice") == 1 and is_gone(third)

        alice, alice_too, bob = (child.client() for _ in range(3))
        for client, name in ((alice, "alice"), (alice_too, "alice"), (bob, "bob")):
            assert client.call("AUTH", name, "pw") == b"OK"
        unknown = alice.call("CLIENT", "KILL", "USER", "bob")  # of another tenant: its existence must stay hidden
        assert isinstance(unknown, ErrorReply) and unknown == b"ERR No such user 'bob'"
        alice.refused("CLIENT", "KILL", address_of(bob))
        assert alice.call("CLIENT", "KILL", "TYPE", "normal") == 1 and is_gone(alice_too)
        assert bob.call("PING") == b"PONG" and admin.call("PING") == b"PONG"
        assert alice.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no") == 1 and is_gone(alice)
        assert admin.call("CLIENT", "KILL", address_of(admin)) == b"OK" and is_gone(admin)


def test_the_name_of_a_client_is_bounded(client: Client) -> None:
    assert client.call("CLIENT", "SETNAME", "x" * 256) == b"OK"
    for command in (("CLIENT", "SETNAME", "x" * 257), ("HELLO", 2, "SETNAME", "y" * 5_000)):
        assert b"at most 256 bytes" in client.refused(*command)
    assert client.call("CLIENT", "GETNAME") == b"x" * 256
    assert client.call("CLIENT", "SETINFO", "LIB-NAME", "z" * 5_000) == b"OK"
    assert len(client.call("CLIENT", "INFO")) < 4000


@pytest.mark.parametrize("command", ["MSET", "MSETNX", "SET in MULTI"])
def test_large_values_are_stored_as_they_were_received(served: Served, command: str) -> None:
    """Symptom: the server copied them once more with the lock held."""
    put = served.store.put
    stored: list[bytes | memoryview] = []

    def put_noted(address: Address, value: bytes | memoryview, **named: Any) -> Ticket | None:
        stored.append(value)
        return put(address, value, **named)

    served.store.put = put_noted
    values = {name: name.encode() * (1 << 20) for name in "ab"}
    pairs = [word for pair in values.items() for word in pair]
    with served.client() as client:
        if command == "SET in MULTI":
            assert client.call("MULTI") == b"OK"
            for name, value in values.items():
                assert client.call("SET", name, value) == b"QUEUED"
            assert client.call("EXEC") == [b"OK", b"OK"]
        else:
            assert client.call(command, *pairs) in (b"OK", 1)
        assert [type(value) for value in stored] == [memoryview, memoryview]
        assert client.call("MGET", *values) == list(values.values())
