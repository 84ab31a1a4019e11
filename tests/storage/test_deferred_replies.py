"""Deferred replies: order, limits and end; and a full store."""

import socket
import threading
from typing import Any

import pytest
from machine import wait_for
from slow_store import Served
from storage_support import Client, make_record

from shadowserve.pool.types import Address
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError, Ticket
from shadowserve.resp import encode_command

MIB = 1 << 20
LARGE = bytes(range(256)) * 400  # sent by reference


def nothing_arrives(client: Client) -> bool:
    """Return True if nothing can be read yet."""
    client.socket.setblocking(False)
    try:
        return not client.socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        client.socket.settimeout(60.0)


def test_commands_behind_a_deferred_reply_run_and_are_answered_after_it(served: Served) -> None:
    store = served.store
    with served.client() as client, served.client() as other:
        client.call("SET", "a", LARGE)
        store.away = True
        for command in (("GET", "a"), ("PING",), ("SET", "b", "1"), ("GETRANGE", "a", 3, 5), ("ECHO", "x")):
            client.send(*command)
        served.wait_for_reads(2)
        assert other.call("EXISTS", "b") == 1  # executed, though its OK waits
        store.finish_read(1)
        assert other.call("PING") == b"PONG" and nothing_arrives(client)
        store.finish_read(0)
        expected = [LARGE, b"PONG", b"OK", LARGE[3:6], b"x"]
        assert [client.receive() for _ in expected] == expected
        wait_for(lambda: store.leases == 0)


def test_replies_of_many_keys_mix_known_and_deferred_parts(served: Served) -> None:
    store = served.store
    key, record = make_record(b"a" * 32)
    with served.client() as client:
        client.call("SET", key, record)
        client.call("SET", "empty", "")
        store.away = True
        client.send("MGET", key, "none", "empty", key)
        served.wait_for_reads(2)
        store.finish_read()
        store.finish_read()
        assert client.receive() == [record, None, b"", record]
        client.send("KV.META", key, "empty", key)
        served.wait_for_reads(2)
        store.finish_read(1)
        store.finish_read(0, lost=True)
        found = client.receive()
        assert found[:2] == [None, None]
        length, head = found[2]
        assert length == len(record) and record.startswith(head)
        assert client.call("STRLEN", key) == len(record) and client.call("GETRANGE", "empty", 0, -1) == b""


def test_a_value_that_cannot_be_read_is_a_miss_and_counted_as_one(served: Served) -> None:
    with served.client() as client:
        client.call("SET", "a", LARGE)
        served.store.away = True
        for command, answer in ((("GET", "a"), None), (("GETRANGE", "a", 0, 9), b""), (("MGET", "a"), [None])):
            client.send(*command)
            served.wait_for_reads(1)
            served.store.finish_read(lost=True)
            assert client.receive() == answer
        info = client.info()
        assert info["keyspace_hits"] == "0" and info["keyspace_misses"] == "3" and info["lost_values"] == "3"


def test_commands_ahead_of_deferred_reads_are_bounded() -> None:
    with Served(io_threads=1, read_ahead_bytes_max=10 * len(LARGE)) as served, served.client() as client:
        client.call("SET", "small", "x" * 100)
        client.call("SET", "large", LARGE)
        served.store.away = True
        for key, most in (("small", 256), ("large", 10)):
            client.socket.sendall(encode_command("GET", key) * 300)
            served.wait_for_reads(most)
            with served.client() as other:
                assert other.call("PING") == b"PONG"
            assert len(served.store.reads) == most
            for _ in range(300):
                wait_for(lambda: served.store.reads)
                served.store.finish_read()
                assert client.receive() == (LARGE if key == "large" else b"x" * 100)
            assert not served.store.reads


def test_a_disconnected_client_releases_its_deferred_reads(served: Served) -> None:
    store = served.store
    with served.client() as client, served.client() as other:
        client.call("SET", "a", LARGE)
        store.away = True
        for _ in range(3):
            client.send("GET", "a")
        served.wait_for_reads(3)
        store.finish_read(1)  # this value is ready, but its turn has not come
        assert store.leases == 1
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # with a reset
        wait_for(lambda: other.info()["connected_clients"] == "1")
        assert store.leases == 0
        store.finish_read()
        store.finish_read(lost=True)
        assert store.leases == 0


def test_a_client_that_has_finished_sending_gets_its_answers(served: Served) -> None:
    with served.client() as client:
        client.call("SET", "a", LARGE)
        served.store.away = True
        client.send("GET", "a")
        client.socket.shutdown(socket.SHUT_WR)
        served.wait_for_reads(1)
        served.store.finish_read()
        assert client.receive_to_end() == b"$%d\r\n%b\r\n" % (len(LARGE), LARGE)


def test_replies_that_a_client_does_not_want_hold_nothing(served: Served) -> None:
    with served.client() as client:
        client.call("SET", "a", LARGE)
        served.store.away = True
        client.send("CLIENT", "REPLY", "SKIP")
        client.send("GET", "a")
        assert client.call("PING") == b"PONG"
        served.store.finish_read()
        assert served.store.leases == 0


def test_a_slow_device_does_not_count_as_a_stalled_client() -> None:
    with Served(io_threads=1, stall_timeout_s=0.2, idle_timeout_s=0.2) as served, served.client() as client:
        client.call("SET", "a", LARGE)
        served.store.away = True
        client.send("GET", "a")
        served.wait_for_reads(1)
        with served.client() as stalling:  # the server's clock advances
            stalling.socket.sendall(b"*2\r\n$3\r\nGET\r\n")
            assert stalling.receive_to_end() == b""
        assert nothing_arrives(client)
        served.store.finish_read()
        assert client.receive() == LARGE


def test_a_write_is_answered_when_it_is_durable(served: Served) -> None:
    store = served.store
    with served.client() as client, served.client() as other:
        client.call("SET", "b", "1")
        store.lazy = True
        for command in (("SET", "a", "x"), ("DEL", "b"), ("EXPIRE", "a", 100), ("PERSIST", "a"), ("KV.PIN", 9, "a")):
            client.send(*command)
        client.send("FLUSHALL")
        wait_for(lambda: len(store.tickets) == 6)
        assert other.call("DBSIZE") == 0 and nothing_arrives(client)
        for answer in (b"OK", 1, 1, 1, 1, b"OK"):
            store.settle()
            assert client.receive() == answer


def test_a_removed_key_does_not_return_after_the_reply_of_del(served: Served) -> None:
    """Another client's removal may not be durable yet: after a crash the key would exist again."""
    store = served.store
    with served.client() as client, served.client() as other:
        client.call("SET", "a", "1")
        store.lazy = True
        client.send("DEL", "a")
        wait_for(lambda: store.tickets)
        other.send("DEL", "a")
        wait_for(lambda: len(store.tickets) == 2)
        assert nothing_arrives(other)
        store.settle()
        assert client.receive() == 1
        store.settle()
        assert other.receive() == 0


def test_a_write_that_fails_is_an_error_to_its_writer(served: Served) -> None:
    store = served.store
    with served.client() as client:
        client.call("SET", "a", "1")
        store.lazy = True
        client.send("SET", "a", "2")
        wait_for(lambda: store.tickets)
        store.settle(OSError(5, "Input/output error"))
        assert client.receive() == b"IOERR SET failed: [Errno 5] Input/output error"
        client.send("DEL", "a")
        wait_for(lambda: store.tickets)
        store.settle(OutOfBudgetError("disk full"))
        assert client.receive() == b"OOM command not allowed when used memory > 'maxmemory'."
        assert client.info()["total_error_replies"] == "2"


@pytest.mark.parametrize("away", [False, True])
def test_the_old_value_of_set_get_comes_when_the_new_one_is_durable(served: Served, away: bool) -> None:
    store = served.store
    with served.client() as client:
        for turn in range(4):
            store.lazy = store.away = False
            client.call("SET", "a", LARGE)
            store.lazy, store.away = True, away
            client.send("SET", "a", "new", "GET")
            wait_for(lambda: store.tickets)
            if away and turn % 2:
                store.finish_read()
            store.settle(None if turn < 2 else OSError("gone"))
            if away and turn % 2 == 0:
                store.finish_read()
            assert client.receive() == (LARGE if turn < 2 else b"IOERR SET failed: gone")
            wait_for(lambda: store.leases == 0)
        store.lazy = store.away = False
        client.call("FLUSHALL")
        assert client.info()["used_memory"] == "0" and client.info()["memory_held_bytes"] == "0"


@pytest.mark.parametrize("size", [100, 8 * MIB])
def test_a_client_stops_where_there_is_no_room_and_goes_on_when_there_is(served: Served, size: int) -> None:
    store = served.store
    value = b"v" * size
    with served.client() as client, served.client() as other:
        store.full = True
        sent = threading.Event()

        def send() -> None:
            client.send("SET", "a", value)
            client.send("GET", "a")
            sent.set()

        threading.Thread(target=send).start()
        wait_for(lambda: store.ready or store.refused_writes)
        assert other.call("EXISTS", "a") == 0
        if size < MIB:
            assert sent.wait(60.0)
        else:  # the client cannot send more than the server receives
            assert not sent.is_set()
        store.make_room()
        assert client.receive() == b"OK" and client.receive() == value
        assert sent.wait(60) and not store.buffers


def test_a_checked_record_waits_for_room_without_being_checked_again(served: Served) -> None:
    store = served.store
    key, record = make_record(b"a" * 32, body_bytes=MIB)
    with served.client() as client:
        store.crowded = True
        client.send("SET", key, record)
        for again in (True, True, False):
            wait_for(lambda: store.refused_writes)
            assert store.buffers
            store.make_room(crowded=again)
        assert client.receive() == b"OK" and client.call("GET", key) == record and not store.buffers


@pytest.mark.parametrize("size", [100, MIB])
def test_a_client_gets_an_error_after_waiting_too_long_for_room(size: int) -> None:
    with Served(io_threads=1, stall_timeout_s=0.2) as served, served.client() as client:
        served.store.full = True
        client.send("SET", "a", b"v" * size)
        reply = client.receive()
        assert reply.startswith(b"OOM no room to write for too long")
        if size == 100:  # an unreceived value cannot be skipped, but this one was received
            assert client.call("PING") == b"PONG"
        served.store.make_room()
        with served.client() as other:
            assert other.call("SET", "a", "1") == b"OK"


def test_buffers_of_values_that_are_not_stored_are_released(served: Served) -> None:
    value = b"v" * MIB
    with served.client() as client, served.client() as cut:
        assert client.call("SET", "a", b"SSKV" + value) is not None  # no record: refused
        assert client.call("SET", "a", value, "XX") is None
        assert not served.store.buffers
        cut.socket.sendall(encode_command("SET", "a", value)[: MIB // 2])
        wait_for(lambda: served.store.buffers)
        cut.close()
        wait_for(lambda: not served.store.buffers)


def test_shutdown_waits_for_deferred_replies_within_its_timeout() -> None:
    with Served(io_threads=2) as served, served.client() as client, served.client() as writer:
        client.call("SET", "a", LARGE)
        served.store.away = served.store.lazy = True
        client.send("GET", "a")
        writer.send("SET", "b", "1")
        served.wait_for_reads(1)
        wait_for(lambda: served.store.tickets)
        served.request_stop()
        served.store.settle()
        assert writer.receive_to_end() == b"+OK\r\n"
        served.store.finish_read()
        assert client.receive_to_end() == b"$%d\r\n%b\r\n" % (len(LARGE), LARGE)
        served.wait()
        assert served.store.drained and served.store.closed
    with Served(io_threads=2, shutdown_timeout_s=0.2) as served, served.client() as client:
        client.call("SET", "a", LARGE)
        served.store.away = True
        client.send("GET", "a")
        served.wait_for_reads(1)
        served.request_stop()
        assert client.receive_to_end() == b""
        served.wait()
        served.store.finish_read()  # after the connection has ended
        assert served.store.leases == 0 and served.store.closed


def test_a_store_without_room_stops_a_pipeline_in_place(served: Served) -> None:
    put, counters = served.store.put, served.server.node.counters
    room: list[Ticket] = []
    is_full = True

    def put_sometimes(address: Address, value: bytes | memoryview, **named: Any) -> Ticket | None:
        if address[1].endswith(b"7") and is_full:
            room.append(Ticket())
            raise BusyError("too many writes", room[-1])
        return put(address, value, **named)

    served.store.put = put_sometimes
    commands = [[b"SET", b"k%d" % number, b"v"] for number in range(10)] + [[b"GET", b"k9"], [b"DBSIZE"]]
    with served.client() as client, served.client() as other:
        for command in commands:
            client.send(*command)
        assert [client.receive() for _ in range(7)] == [b"OK"] * 7
        wait_for(lambda: counters.busy_refusals == 1)
        assert other.call("DBSIZE") == 7 and other.call("GET", "k9") is None
        is_full = False
        room[-1].settle()
        assert [client.receive() for _ in range(5)] == [b"OK", b"OK", b"OK", b"v", 10]
        assert counters.busy_refusals == 1 and counters.by_command["set"].calls == 10
