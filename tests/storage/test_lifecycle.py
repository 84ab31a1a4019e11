"""Starting, stopping and configuring the server."""

import os
import re
import signal

import pytest
from machine import NEVER_S, cores_of_threads, ignores, wait_for
from storage_support import Client, Start, make_record

MIB = 1 << 20


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_with_status_0(start: Start, number: signal.Signals) -> None:
    child = start()
    assert re.fullmatch(r"ready 127\.0\.0\.1:[0-9]+\n", child.ready_line)
    idle = child.client()
    assert idle.call("PING") == b"PONG"
    assert child.stop(number) == 0
    assert idle.receive_to_end() == b""
    assert any(" ready address=127.0.0.1:" in line for line in child.log) and "stopped" in child.log[-1]
    with pytest.raises(ConnectionRefusedError):
        child.client()


@pytest.mark.usefixtures("background")
def test_an_ignored_interrupt_stays_ignored(start: Start) -> None:
    child = start()
    assert ignores(child.process.pid, signal.SIGINT)
    child.process.send_signal(signal.SIGINT)
    assert child.client().call("PING") == b"PONG"
    assert child.stop(signal.SIGTERM) == 0


def test_unfinished_replies_are_sent_before_the_end(start: Start) -> None:
    child = start("--shutdown-timeout-s", str(NEVER_S))
    value = os.urandom(32 * MIB)
    reader = child.client()
    reader.call("SET", "a", value)
    reader.send("GET", "a")
    assert reader.receive_raw(11) == b"$33554432\r\n"
    child.process.send_signal(signal.SIGTERM)
    assert reader.receive_to_end() == value + b"\r\n"
    assert child.wait() == 0


def test_a_record_being_checked_is_answered_before_the_end(start: Start) -> None:
    child = start("--shutdown-timeout-s", str(NEVER_S))
    key, value = make_record(b"a" * 32, body_bytes=32 * MIB)
    writer = child.client()
    writer.send("SET", key, value)
    child.process.send_signal(signal.SIGTERM)
    assert writer.receive_to_end() in (b"+OK\r\n", b"")  # answered or not started, never partial
    assert child.wait() == 0


def test_a_client_that_does_not_read_delays_the_end_no_longer_than_allowed(start: Start) -> None:
    child = start("--shutdown-timeout-s", "0.3")
    with child.client(receive_buffer=4096) as slow:
        slow.call("SET", "a", b"x" * (32 * MIB))
        slow.send("GET", "a")
        slow.receive_raw(11)
        assert child.stop() == 0
    assert any("replies_cut_off clients=1" in line for line in child.log)


def test_a_second_signal_ends_at_once(start: Start) -> None:
    child = start("--shutdown-timeout-s", str(NEVER_S))
    with child.client(receive_buffer=4096) as slow, child.client() as other:
        slow.call("SET", "a", b"x" * (32 * MIB))
        slow.send("GET", "a")
        slow.receive_raw(11)
        child.process.send_signal(signal.SIGTERM)
        assert other.receive_to_end() == b""  # the server has received the first signal
        assert child.stop() == 0


def test_no_thread_leaves_the_cores_it_was_given(start: Start) -> None:
    core = max(os.sched_getaffinity(0))
    child = start("--cores", f"[{core}]")
    allowed = cores_of_threads(child.process.pid)
    assert len(allowed) > 1 and allowed == [{core}] * len(allowed)


def test_expired_keys_are_removed_without_access(start: Start) -> None:
    with start().client() as client:
        for number in range(100):
            client.send("SET", f"a{number}", "x", "PX", 50)
        assert all(client.receive() == b"OK" for _ in range(100))
        while client.call("DBSIZE") != 0:
            pass
        assert client.info()["expired_keys"] == "100" and client.info()["used_memory"] == "0"


def test_info_has_the_sections_of_redis_and_ours(client: Client) -> None:
    text = client.call("INFO")
    sections = re.findall(rb"^# (\w+)\r$", text, re.MULTILINE)
    assert sections == [
        *(b"Server", b"Clients", b"Memory", b"Persistence", b"Stats", b"Replication", b"CPU", b"Cluster"),
        *(b"Keyspace", b"ShadowServe"),
    ]
    assert bytes(client.call("INFO", "memory", "shadowserve")).count(b"# ") == 2
    assert client.call("INFO", "nosuch") == b""


def test_connections_leave_nothing_behind(start: Start) -> None:
    child = start()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{child.process.pid}/fd"))

    with child.client() as watcher:
        watcher.call("PING")
        before = descriptors()
        for number in range(200):
            with child.client() as client:
                client.call("SET", "a", str(number))
        wait_for(lambda: watcher.info()["connected_clients"] == "1")
        wait_for(lambda: descriptors() == before)  # the counter decreases before the connection closes
