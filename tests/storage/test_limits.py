"""Limits of a client: number, size, speed and protocol."""

import contextlib
import socket
import time
from pathlib import Path

import pytest
from machine import wait_for
from storage_support import TIMEOUT_S, Child, Client, Start

from shadowserve.resp import encode_command

CORPUS = Path(__file__).parents[1] / "shared" / "corpus" / "resp"
MIB = 1 << 20


def test_a_bulk_or_a_request_beyond_the_limit_is_refused(start: Start) -> None:
    child = start("--bulk-bytes-max", "1 MiB", "--request-bytes-max", "2 MiB", "--arguments-max", "100")
    error = b"-ERR Protocol error: invalid bulk length\r\n"
    with child.client() as client:
        assert client.call("SET", "a", b"x" * MIB) == b"OK"
        client.socket.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1048577\r\n")
        assert client.receive_to_end() == error
    with child.client() as client:
        client.socket.sendall(encode_command("DEL", *[b"x" * 60_000] * 34))
        assert client.receive() == 0
        client.socket.sendall(b"*36\r\n$3\r\nDEL\r\n" + b"$60000\r\n%b\r\n" % (b"x" * 60_000) * 34 + b"$60000\r\n")
        assert client.receive_to_end() == error
    with child.client() as client:
        assert client.call("EXISTS", *["a"] * 99) == 99
        client.socket.sendall(b"*101\r\n")
        assert client.receive_to_end() == b"-ERR Protocol error: invalid multibulk length\r\n"
    with child.client() as client:
        assert client.call("STRLEN", "a") == MIB


def test_an_announced_large_value_takes_no_memory_before_it_arrives(start: Start) -> None:
    child = start()
    promise = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$500000000\r\nonly this"
    with child.client() as client:
        before = int(client.info()["used_memory_rss"])
        for _ in range(20):
            child.client().socket.sendall(promise)
        while int(client.info()["total_net_input_bytes"]) < 20 * len(promise):  # until all of it has arrived
            pass
        while int(client.info()["connected_clients"]) != 21:
            pass
        assert int(client.info()["used_memory_rss"]) - before < 50 * MIB


def test_a_client_that_does_not_read_stops_itself_and_costs_only_its_own_backlog(start: Start) -> None:
    child = start("--output-buffer-bytes-max", "64 KiB")
    with child.client() as other:

        def backlog() -> int:
            """Return the bytes of replies that wait for the client that does not read; 0 before its first reply."""
            clients = bytes(other.call("CLIENT", "LIST")).decode()
            line = next((line for line in clients.splitlines() if "cmd=get" in line), "omem=0 ")
            return int(line.split("omem=")[1].split()[0])

        other.call("SET", "a", b"x" * 10_000)
        commands = encode_command("GET", "a") * 500_000  # 5 GB of replies, if all were created
        slow = child.client(receive_buffer=4096)
        slow.socket.settimeout(0.5)
        before = int(other.info()["used_memory_rss"])
        sent = 0
        waiting = 0
        while not waiting:  # a paused server does not read either
            with pytest.raises(TimeoutError):
                while sent < len(commands):
                    sent += slow.socket.send(commands[sent:])
            waiting = backlog()
        assert waiting <= 64 * 1024 + 10_100
        assert int(other.info()["used_memory_rss"]) - before < 4 * MIB
        # The client gets every reply when it reads, and meanwhile sends the rest of its commands.
        slow.socket.settimeout(TIMEOUT_S)
        expected = (b"$10000\r\n" + b"x" * 10_000 + b"\r\n") * 50
        assert slow.receive_raw(len(expected)) == expected
        assert other.call("PING") == b"PONG"
        slow.close()


def was_set(child: Child, value: bytes) -> bool:
    """Set a key; return False if this machine paused so long that the server closed the connection."""
    with child.client() as client, contextlib.suppress(ConnectionError, EOFError):
        return client.call("SET", "a", value) == b"OK"
    return False


def test_a_stalled_reader_is_closed(start: Start) -> None:
    child = start("--stall-timeout-s", "0.5")
    with child.client() as other:
        wait_for(lambda: was_set(child, b"x" * (32 * MIB)))
        with child.client(receive_buffer=4096) as slow:
            slow.send("GET", "a")
            slow.receive_raw(11)
            wait_for(lambda: any("client_stalled" in line and "reading its replies" in line for line in child.log))
            wait_for(lambda: other.info()["connected_clients"] == "1")
        assert int(other.info()["clients_stalled"]) >= 1
    assert child.stop() == 0


def write_slowly_beside_one_that_stands_still(child: Child) -> tuple[bool, float]:
    """Return True if the slow client got its reply after the other was closed, and its longest pause in seconds."""
    request = encode_command("SET", "a", b"x" * 100_000)
    longest, last = 0.0, time.monotonic()
    with child.client() as slow, child.client() as still:
        still.socket.sendall(request[:50_000])
        still.socket.settimeout(0.1)
        position, closed = 0, False
        try:
            while not closed or position == 0:
                slow.socket.sendall(request[position : position + 1])
                position, longest, last = position + 1, max(longest, time.monotonic() - last), time.monotonic()
                with contextlib.suppress(TimeoutError):
                    closed = still.socket.recv(1) == b""
            slow.socket.sendall(request[position:])
            answered = slow.receive() == b"OK"
        except (ConnectionError, EOFError):
            answered = False
    return answered, max(longest, time.monotonic() - last)


def test_a_stalled_writer_is_closed_and_a_slow_one_is_not(start: Start) -> None:
    child = start("--stall-timeout-s", "0.6")
    answered, tries = False, 0
    while not answered:
        tries += 1
        answered, longest = write_slowly_beside_one_that_stands_still(child)
        assert answered or longest > 0.3, (
            "the slow client got no reply, and the machine did not pause"
        )  # or the machine paused: repeat
        assert tries < 30
    with child.client() as client:
        assert int(client.info()["clients_stalled"]) >= 1


def test_idle_clients_are_closed_only_where_that_is_configured(start: Start) -> None:
    child = start("--idle-timeout-s", "0.3", "--stall-timeout-s", "60")
    with child.client() as client:
        assert client.receive_to_end() == b""
    wait_for(lambda: any("client_idle" in line for line in child.log))
    with start().client() as client:
        client.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*")), ids=lambda path: path.name)
def test_hostile_bytes_end_at_most_their_own_connection(path: Path, shared_server: Child, client: Client) -> None:
    with shared_server.client() as hostile:
        hostile.socket.sendall(path.read_bytes())
        hostile.socket.shutdown(socket.SHUT_WR)
        answer = hostile.receive_to_end()
    assert client.call("PING") == b"PONG"
    lines = [line for line in answer.split(b"\r\n") if line.startswith(b"-")]
    assert all(line.startswith((b"-ERR ", b"-ERR Protocol error: ")) for line in lines)


def test_a_client_that_sends_on_after_its_error_still_gets_the_error(shared_server: Child) -> None:
    with shared_server.client() as client:
        client.socket.sendall(b"*x\r\n" + b"y" * (1 << 20))
        assert client.receive_to_end() == b"-ERR Protocol error: invalid multibulk length\r\n"


def test_an_incomplete_pipeline_is_answered_up_to_its_last_command(shared_server: Child, client: Client) -> None:
    with shared_server.client() as cut:
        cut.socket.sendall(encode_command("SET", "a", "1") * 5000 + b"*3\r\n$3\r\nSET\r\n$1\r\nb")
        cut.socket.shutdown(socket.SHUT_WR)
        assert cut.receive_to_end() == b"+OK\r\n" * 5000
    assert client.call("EXISTS", "b") == 0


def test_quit_answers_and_closes_and_nothing_behind_it_is_executed(shared_server: Child, client: Client) -> None:
    with shared_server.client() as quitter:
        quitter.socket.sendall(encode_command("QUIT") + encode_command("SET", "a", "1"))
        assert quitter.receive_to_end() == b"+OK\r\n"
    assert client.call("EXISTS", "a") == 0
