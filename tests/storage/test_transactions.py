"""MULTI and EXEC: order, limits, deferred replies, and commands of other clients in between."""

import socket

import pytest
from machine import wait_for
from slow_store import Served
from storage_support import Child, Client, Start, make_record

from shadowserve.resp import ErrorReply

LARGE = bytes(range(256)) * 400  # sent by reference, received in place


def test_commands_of_a_transaction_are_executed_in_order_when_exec_comes(client: Client, shared_server: Child) -> None:
    with shared_server.client() as other:
        assert client.call("MULTI") == b"OK"
        assert client.calls(("SET", "a", "1"), ("GET", "a"), ("SET", "b", LARGE), ("STRLEN", "b")) == [b"QUEUED"] * 4
        assert other.call("EXISTS", "a", "b") == 0
        assert client.call("EXEC") == [b"OK", b"1", b"OK", len(LARGE)]
        assert other.call("GET", "b") == LARGE
        assert client.calls(("MULTI",), ("DEL", "a"), ("DISCARD",), ("EXISTS", "a")) == [b"OK", b"QUEUED", b"OK", 1]
        client.refused("EXEC")


def test_client_list_shows_queued_commands(client: Client) -> None:
    assert client.calls(("MULTI",), ("PING",)) == [b"OK", b"QUEUED"]
    with_multi = client.calls(("CLIENT", "INFO"), ("EXEC",))[1]
    assert b" multi=-1 " in with_multi[1] and b" flags=N " in with_multi[1]
    client.call("CLIENT", "SETNAME", "queues")
    client.calls(("MULTI",), ("PING",), ("ECHO", "12345"))
    with Client(client.socket.getpeername()[1]) as other:
        listed = other.call("CLIENT", "LIST")
    line = next(line for line in listed.split(b"\n") if b" name=queues " in line)
    assert b" flags=x " in line and b" multi=2 " in line and b" multi-mem=%d " % (13 + 3 * 64) in line


def test_replies_of_a_transaction_wait_for_devices_and_keep_their_places(served: Served) -> None:
    store = served.store
    key, record = make_record(b"a" * 32, body_bytes=400_000)  # checked in another thread
    with served.client() as client, served.client() as other:
        client.call("SET", "a", LARGE)
        store.away = store.lazy = True
        client.calls(("MULTI",), ("GET", "a"), ("SET", key, record), ("GETDEL", "a"), ("MGET", "a", "b"))
        client.send("EXEC")
        served.wait_for_reads(2)
        assert other.call("EXISTS", "a", key) == 1  # all commands have been executed
        store.finish_read(1)
        wait_for(lambda: len(store.tickets) == 2)
        store.settle()
        store.settle()
        store.finish_read(0)
        assert client.receive() == [LARGE, b"OK", LARGE, [None, None]]
        wait_for(lambda: store.leases == 0)
        assert not store.buffers


def test_a_transaction_waits_for_room_and_goes_on_where_it_stopped(served: Served) -> None:
    store = served.store
    with served.client() as client:
        client.calls(("MULTI",), ("SET", "a", "1"), ("SET", "b", LARGE), ("MSET", "c", "3", "d", "4"), ("GET", "b"))
        store.crowded = True
        client.send("EXEC")
        wait_for(lambda: store.refused_writes)
        store.make_room()
        assert client.receive() == [b"OK", b"OK", b"OK", LARGE]
        assert client.call("MGET", "a", "c", "d") == [b"1", b"3", b"4"]


@pytest.mark.parametrize(
    ("keys", "commands"),
    [
        ({"request_bytes_max": 1 << 20, "bulk_bytes_max": 1 << 20}, [("SET", "a", "x" * 200_000)] * 6),
        ({"arguments_max": 100}, [("GET", "a")] * 60),
    ],
    ids=["bytes", "arguments"],
)
def test_a_transaction_holds_no_more_than_a_request_may(
    keys: dict[str, int], commands: list[tuple[object, ...]]
) -> None:
    with Served(**keys) as served, served.client() as client:
        replies = client.calls(("MULTI",), *commands, ("PING",))
        refused = [reply for reply in replies if isinstance(reply, ErrorReply)]
        assert len(refused) == 1 and b"transaction too large" in refused[0]
        assert replies[-1] == b"QUEUED"
        session = next(iter(served.server.node.sessions.values()))
        assert session.transaction is not None and session.transaction.commands == []
        assert client.refused("EXEC").startswith(b"EXECABORT ")
        assert client.call("EXISTS", "a") == 0


def test_a_long_transaction_releases_the_lock() -> None:
    """A transaction that fits into a turn runs in one turn. A longer one takes several turns."""
    with Served(pipeline_commands_max=10) as served, served.client() as client:
        node = served.server.node
        held: list[int] = []
        lock, executed = node.lock, lambda: node.counters.commands

        class Counting:
            def __enter__(self) -> None:
                lock.acquire()
                held.append(executed())

            def __exit__(self, *_: object) -> None:
                held[-1] = executed() - held[-1]
                lock.release()

        node.lock = Counting()
        client.calls(("MULTI",), *[("INFO", "server")] * 55)
        held.clear()
        client.send("EXEC")
        found = client.receive()
        assert len(found) == 55
        assert max(held) <= 2 * 10 and sum(held) >= 56
        client.calls(("MULTI",), *[("PING",)] * 9)
        held.clear()
        assert client.call("EXEC") == [b"PONG"] * 9
        assert 10 in held  # all commands run in one hold, with EXEC


def test_a_client_that_does_not_read_stops_its_transaction(served: Served) -> None:
    with served.client(receive_buffer=4096) as client, served.client() as other:
        other.call("SET", "a", "x" * 500_000)
        client.calls(("MULTI",), *[("GET", "a")] * 200)
        client.send("EXEC")
        node = served.server.node
        wait_for(lambda: any(session.executing for session in node.sessions.values()))
        sizes = {session.info.pending_output_bytes for session in node.sessions.values()}
        assert max(sizes) < node.config.output_buffer_bytes_max + 1_000_000
        found = client.receive()
        assert len(found) == 200 and len(found[199]) == 500_000


def test_a_disconnected_client_releases_its_transaction(served: Served) -> None:
    store, node = served.store, served.server.node
    with served.client() as other:
        other.call("SET", "a", LARGE)
        store.away = True
        client = served.client()
        client.call("WATCH", "w", "v")
        client.calls(("MULTI",), *[("GET", "a")] * 3, ("SET", "b", LARGE))
        client.send("EXEC")
        served.wait_for_reads(3)
        watching = served.client()
        assert watching.call("WATCH", "w") == b"OK"
        watching.calls(("MULTI",), ("SET", "a", LARGE))
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # with a reset
        watching.close()
        wait_for(lambda: len(node.sessions) == 1)
        for _ in range(3):
            store.finish_read()
        wait_for(lambda: store.leases == 0)
        assert node.watchers == {} and not store.buffers


def test_permissions_are_checked_when_a_command_is_queued_and_executed(start: Start) -> None:
    with start() as child, child.client() as admin, child.client() as client:
        admin.call("ACL", "SETUSER", "alice", "on", ">pw", "~a*", "+@all", "-flushall")
        client.call("AUTH", "alice", "pw")
        replies = client.calls(("MULTI",), ("GET", "b"), ("FLUSHALL",), ("GET", "a"), ("EXEC",))
        assert [isinstance(reply, ErrorReply) for reply in replies] == [False, True, True, False, True]
        assert client.calls(("MULTI",), ("SET", "a", "1"), ("GET", "a")) == [b"OK", b"QUEUED", b"QUEUED"]
        admin.call("ACL", "SETUSER", "alice", "-set")
        executed = client.call("EXEC")
        assert isinstance(executed[0], ErrorReply) and executed[1] is None
        entries = admin.call("ACL", "LOG")
        assert {entry[entry.index(b"context") + 1] for entry in entries} == {b"multi"}


@pytest.mark.parametrize(
    ("change", "breaks"),
    [
        (("SET", "w", "2"), True), (("SET", "w", "2", "NX"), False), (("SET", "new", "1"), True), (("DEL", "w"), True),
        (("DEL", "other", "new"), False), (("EXPIRE", "w", "100"), True), (("EXPIRE", "new", "100"), False),
        (("PERSIST", "w"), False), (("GET", "w"), False), (("GETEX", "w"), False), (("GETEX", "w", "EX", "100"), True),
        (("GETDEL", "w"), True), (("GETDEL", "new"), False), (("FLUSHALL",), True), (("MSET", "x", "1", "w", "1"), 1),
        (("MSETNX", "x", "1", "w", "1"), False), (("SET", "new", "1", "GET"), True), (("PEXPIRE", "w", "-1"), True),
        (("SET", "other", "3"), False), (("SETRANGE", "w", "1", "x"), False), (("TOUCH", "w"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_exec_executes_nothing_if_a_watched_key_has_changed(
    change: tuple[object, ...], breaks: bool, client: Client, shared_server: Child
) -> None:
    with shared_server.client() as other:
        client.call("MSET", "w", "1", "other", "2")
        assert client.call("WATCH", "w", "new") == b"OK"
        other.call(*change)
        assert client.call("MULTI") == b"OK"
        client.call("SET", "done", "1")
        assert client.call("EXEC") == (None if breaks else [b"OK"])
        assert client.call("EXISTS", "done") == (not breaks)
        assert client.calls(("MULTI",), ("PING",), ("EXEC",))[2] == [b"PONG"]  # EXEC has cleared the watched keys


def test_a_pipeline_of_another_client_fails_watchers(client: Client, shared_server: Child) -> None:
    with shared_server.client() as other:
        client.call("WATCH", "w50")
        assert other.calls(*[("SET", f"w{number}", "1") for number in range(100)]) == [b"OK"] * 100
        assert client.calls(("MULTI",), ("PING",), ("EXEC",))[2] is None
        for forget in (("UNWATCH",), ("RESET",), ("DISCARD",)):
            client.call("WATCH", "w50")
            other.call("SET", "w50", "2")
            client.calls(*([("MULTI",)] if forget == ("DISCARD",) else []), forget)
            assert client.calls(("MULTI",), ("PING",), ("EXEC",))[2] == [b"PONG"]


def test_an_expired_or_evicted_key_fails_watchers(start: Start) -> None:
    with start("--memory-budget-bytes", "1048576") as child, child.client() as client, child.client() as other:
        other.call("SET", "gone", "1", "PX", "1")
        client.call("SET", "w", "1")
        client.call("WATCH", "w")
        for number in range(20):
            assert other.call("SET", f"k{number}", "x" * 100_000) == b"OK"
        assert other.call("EXISTS", "w") == 0
        assert client.calls(("MULTI",), ("PING",), ("EXEC",))[2] is None


def test_another_tenants_key_of_the_same_name_is_another_key(start: Start) -> None:
    with start() as child, child.client() as admin, child.client() as client:
        admin.call("ACL", "SETUSER", "alice", "on", ">pw", "~*", "+@all", "-@dangerous", "tenant=a")
        client.call("AUTH", "alice", "pw")
        client.call("WATCH", "w")
        admin.call("SET", "w", "1")
        assert client.calls(("MULTI",), ("KEYS", "*"), ("GET", "w"), ("EXEC",))[1] != b"QUEUED"
        client.call("WATCH", "w")
        admin.call("SET", "w", "2")
        assert client.calls(("MULTI",), ("GET", "w"), ("EXEC",))[2] == [None]


def test_watched_keys_are_bounded(client: Client) -> None:
    assert client.call("WATCH", *(f"k{number}" for number in range(1000))) == b"OK"
    assert b"too many watched keys" in client.refused("WATCH", "one more")
    assert client.call("UNWATCH") == b"OK"
    assert isinstance(client.call("WATCH", *("x" * 60_000 + str(number) for number in range(20))), ErrorReply)
