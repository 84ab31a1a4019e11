"""Large values, and clients that try to exhaust the server's memory."""

import random
import select
import socket

import pytest
from machine import wait_for
from storage_support import Child, Client, Start, login, make_record

from shadowserve.resp import encode_command

MIB = 1 << 20
LARGE = random.Random(1).randbytes(32 * MIB)


def resident_bytes(process_id: int) -> int:
    with open(f"/proc/{process_id}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("size", [32 * 1024 - 1, 32 * 1024, 65_536, MIB - 1, MIB, MIB + 1, 32 * MIB])
def test_values_around_every_boundary_come_back_intact(client: Client, size: int) -> None:
    value = memoryview(LARGE)[:size]
    assert client.call("SET", "large", value) == b"OK"
    assert client.call("STRLEN", "large") == size
    assert client.call("GET", "large") == value


def test_a_value_being_sent_stays_whole_while_it_is_replaced_and_deleted(shared_server: Child, client: Client) -> None:
    client.call("SET", "large", LARGE)
    for change in (("SET", "large", "other"), ("DEL", "large"), ("FLUSHALL",)):
        client.call("SET", "large", LARGE)
        with shared_server.client() as reader:
            reader.send("GET", "large")
            assert reader.receive_raw(11) == b"$33554432\r\n"  # in progress: the rest exceeds the socket buffers
            client.call(*change)
            assert int(client.info()["memory_held_bytes"]) > len(LARGE)
            assert reader.receive_raw(len(LARGE) + 2) == LARGE + b"\r\n"
            assert reader.call("PING") == b"PONG"
        assert int(client.info()["memory_held_bytes"]) == 0


def test_a_client_that_disconnects_during_a_reply_releases_its_value(shared_server: Child, client: Client) -> None:
    client.call("SET", "large", LARGE)
    reader = shared_server.client()
    reader.send("GET", "large")
    reader.receive_raw(11)
    client.call("DEL", "large")
    assert int(client.info()["memory_held_bytes"]) > len(LARGE)

    def reply_waits() -> bool:
        listed = client.call("CLIENT", "LIST").splitlines()
        return any(b"cmd=get" in line and b"omem=0 " not in line for line in listed)

    wait_for(reply_waits)
    reader.close()
    while int(client.info()["memory_held_bytes"]):  # each round trip gives the server time to detect it
        pass
    assert client.info()["used_memory"] == "0"


def test_the_budget_holds_and_memory_returns_to_the_system(start: Start) -> None:
    child = start("--memory-budget-bytes", "64 MiB")
    with child.client() as client:
        before = resident_bytes(child.process.pid)
        for number in range(40):
            assert client.call("SET", f"large{number}", memoryview(LARGE)[: 10 * MIB]) == b"OK"
        info = client.info()
        assert int(info["used_memory"]) <= 64 * MIB and int(info["evicted_keys"]) == 34
        assert client.call("DBSIZE") == 6 and client.call("EXISTS", "large39") == 1
        assert resident_bytes(child.process.pid) - before < 64 * MIB + 24 * MIB
        client.call("FLUSHALL")
        assert resident_bytes(child.process.pid) - before < 24 * MIB


def test_a_value_larger_than_the_budget_is_refused_with_redis_text(start: Start) -> None:
    with start("--memory-budget-bytes", "16 MiB").client() as client:
        client.call("SET", "a", "stays")
        refusal = b"OOM command not allowed when used memory > 'maxmemory'."
        assert client.call("SET", "large", memoryview(LARGE)[: 16 * MIB]) == refusal
        assert client.call("GET", "a") == b"stays" and client.call("GET", "large") is None


VALUE = b"x" * 15_000  # copied into replies, just below the size for sends without a copy
SMALL = ("--memory-budget-bytes", "64 MiB")


class Weighed:
    """The growth of a server's memory since the object was created."""

    def __init__(self, child: Child) -> None:
        self._child = child
        with child.client() as client:
            client.call("INFO")
        self._before = resident_bytes(child.process.pid)

    @property
    def grown(self) -> int:
        return resident_bytes(self._child.process.pid) - self._before


def send_until_it_stops(clients: list[Client], data: bytes) -> None:
    """Send the same bytes with each client, in parallel."""
    left = {client.socket: memoryview(data) for client in clients}
    while waiting := [each for each, view in left.items() if view]:
        ready = select.select([], waiting, [], 1.0)[1]
        if not ready:
            return
        for each in ready:
            try:
                left[each] = left[each][each.send(left[each][:MIB]) :]  # its timeout permits partial sends
            except ConnectionError:
                left[each] = memoryview(b"")


def await_commands(client: Client, name: str, count: int) -> None:
    """Wait until a number of clients have started a command."""
    wait_for(lambda: str(client.call("CLIENT", "LIST")).count(f"cmd={name}") >= count)


def test_an_unread_mget_of_one_key_many_times_costs_little_memory(start: Start) -> None:
    """Symptom: 60,000 times cost 0.9 GiB."""
    child = start()
    with child.client() as client:
        client.call("SET", "a", VALUE)
        key, record = make_record(b"a" * 32)
        client.call("SET", key, record)
    weighed = Weighed(child)
    mget, meta = child.client(receive_buffer=4096), child.client(receive_buffer=4096)
    mget.send("MGET", *["a"] * 4_000)
    meta.send("KV.META", *[key] * 65_000)
    await_commands(child.client(), "mget", 1)
    await_commands(child.client(), "kv.meta", 1)
    assert weighed.grown < 24 * MIB
    assert mget.receive() == [VALUE] * 4_000 and mget.call("PING") == b"PONG"


def test_a_value_beyond_the_lent_budget_is_sent_to_one_client_at_a_time(start: Start) -> None:
    """Symptom: the waiting client was never notified."""
    child = start("--memory-budget-bytes", "1 MiB", "--stall-timeout-s", "120")
    value = bytes(850_000)
    with child.client() as writer, child.client(receive_buffer=4096) as slow:
        assert writer.call("SET", "a", value) == b"OK"
        slow.send("GET", "a")
        await_commands(writer, "get", 1)
        waiting = [child.client() for _ in range(3)]
        for client in waiting:
            client.socket.sendall(encode_command("PING") + encode_command("GET", "a"))
            assert client.receive() == b"PONG"
        assert [client.receive() for client in (slow, *waiting)] == [value] * 4


@pytest.fixture
def tenants(start_tenants: Start) -> Child:
    return start_tenants(
        *("--tenants", "{a: {bytes_max: 16 MiB}}", *SMALL),
        # The waiting client has the fourth turn, and each pair is closed after a sixth of that time plus some ticks.
        *("--clients-memory-bytes-max", "64 MiB", "--stall-timeout-s", "6"),
    )


def test_a_tenant_with_eight_connections_stays_within_its_memory(tenants: Child) -> None:
    """Symptom: a server of 64 MiB used 7.8 GB."""
    weighed = Weighed(tenants)
    clients = []
    for number in range(8):
        client = login(tenants, "ann", receive_buffer=4096)
        assert client.call("SET", f"a{number}", VALUE) == b"OK"
        client.send("MGET", *[f"a{number}"] * 6_000)
        clients.append(client)
    await_commands(login(tenants, "root"), "mget", 8)
    send_until_it_stops(clients, encode_command("GET", "a0") * 20_000)
    assert weighed.grown < 48 * MIB
    other = login(tenants, "bob")
    assert other.call("SET", "b", VALUE * 100) == b"OK" and other.call("GET", "b") == VALUE * 100


def test_arguments_that_will_be_refused_are_not_held(start: Start) -> None:
    """Symptom: eight unfinished GETs with a key of 500 MB held 828 MB."""
    child = start(*SMALL)
    weighed = Weighed(child)
    part = bytes(20 * MIB)
    for begin in (b"*2\r\n$3\r\nGET\r\n$500000000\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$500000000\r\n"):
        for _ in range(8):
            client = child.client()
            client.socket.sendall(begin + part)
    with child.client() as client:
        wait_for(lambda: int(client.info()["total_net_input_bytes"]) >= 16 * len(part))
        assert weighed.grown < 24 * MIB


def test_a_refused_argument_is_dropped_and_the_connection_continues(start: Start) -> None:
    child = start(*SMALL)
    long = b"k" * (2 * MIB)
    refused = b"ERR an argument of 2097152 bytes is too long: only values have more than 1048576"
    with child.client() as client:
        for command in (("GET", long), ("SET", long, "x"), ("SET", "a", "x", "EX", long), ("DEL", "a", long, long, "b"),
                        (long,), ("NOSUCH", long), ("MSET", long, "x")):  # fmt: skip
            assert client.call(*command) == refused, command[0][:10]
        assert bytes(client.call("SET", "a", bytes(65 * MIB))).startswith(b"OOM a value of ")
        client.socket.sendall(encode_command("GET", long) * 3 + encode_command("PING"))
        assert [client.receive() for _ in range(4)] == [refused] * 3 + [b"PONG"]
        assert client.call("SET", "a", bytes(30 * MIB)) == b"OK" and client.call("STRLEN", "a") == 30 * MIB
        assert client.call("DEL", b"k" * 65_472, "a") == 1


def test_values_beyond_a_quota_are_dropped_as_they_arrive(tenants: Child) -> None:
    client, refusal = login(tenants, "ann"), b"OOM command not allowed when used memory > 'maxmemory'."
    assert client.call("SET", "a", bytes(17 * MIB)) == refusal and client.call("EXISTS", "a") == 0
    assert client.call("SET", "a", bytes(10 * MIB)) == b"OK"


def test_unfinished_values_of_a_tenant_are_bounded_and_delay_no_other(tenants: Child) -> None:
    """A client of the same tenant waits only until the slow ones are closed."""
    weighed = Weighed(tenants)
    begin = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n" % (15 * MIB)
    send_until_it_stops([login(tenants, "ann") for _ in range(8)], begin + bytes(14 * MIB))
    root = login(tenants, "root")
    assert int(root.info()["clients_memory_bytes"]) <= 32 * MIB, "with several tenants, half of the bound"
    assert weighed.grown < 56 * MIB
    assert login(tenants, "bob").call("SET", "b", bytes(20 * MIB)) == b"OK"
    assert login(tenants, "ann").call("SET", "a", bytes(15 * MIB)) == b"OK"
    assert int(root.info()["evicted_clients"]) >= 1


def test_many_small_arguments_are_bounded(start: Start) -> None:
    child = start(*SMALL, "--clients-memory-bytes-max", "64 MiB")
    weighed = Weighed(child)
    begin = b"*60001\r\n$3\r\nDEL\r\n" + (b"$10000\r\n%b\r\n" % bytes(10_000)) * 3_000
    send_until_it_stops([child.client() for _ in range(6)], begin)
    with child.client() as client:
        info = client.info()
        assert int(info["clients_memory_bytes"]) <= 64 * MIB and int(info["evicted_clients"]) >= 3
        assert weighed.grown < 112 * MIB
        assert client.call("DEL", *[b"%d" % number * 1000 for number in range(3000)]) == 0


def test_unauthenticated_clients_use_little_memory(start: Start) -> None:
    child = start(
        *("--connections-max", "3000", "--unauthenticated-connections-max", "300", "--authentication-timeout-s", "600"),
        environment={"SHADOWSERVE_STORAGE_PASSWORD": "pa"},
    )
    weighed = Weighed(child)
    part = b"*3\r\n$4\r\nAUTH\r\n$16384\r\n" + bytes(16384) + b"\r\n$16384\r\n" + bytes(16000)
    for _ in range(280):
        child.client().socket.sendall(part)
    deaf = [child.client(receive_buffer=4096) for _ in range(10)]  # they do not read their replies
    send_until_it_stops(deaf, encode_command("PING") * 500_000)
    with child.client() as client:
        assert client.call("AUTH", "pa") == b"OK"

        def waiting() -> list[int]:
            listed = client.call("CLIENT", "LIST")
            sizes = [int(line.partition(b" omem=")[2].split()[0]) for line in listed.splitlines()]
            return [size for size in sizes if size]

        wait_for(lambda: len(waiting()) == 10)
        assert max(waiting()) < 20_000
        assert weighed.grown < 40 * MIB


def test_slow_readers_are_closed_when_others_need_their_memory(tenants: Child) -> None:
    bob, root = login(tenants, "bob"), login(tenants, "root")
    for number in range(6):
        assert bob.call("SET", f"b{number}", bytes(6 * MIB)) == b"OK"
    for number in range(6):
        login(tenants, "bob", receive_buffer=4096).send("GET", f"b{number}")
    wait_for(lambda: int(root.info()["lent_bytes"]) > 16 * MIB)
    # Half of the lent budget, which is a quarter of the memory budget, plus one value of unknown size.
    assert int(root.info()["lent_bytes"]) <= (16 + 6) * MIB
    assert bob.call("PING") == b"PONG" and bob.call("EXISTS", "b5") == 1
    assert bob.call("GET", "b5") == bytes(6 * MIB)
    assert int(root.info()["evicted_clients"]) >= 1


def test_values_of_500_mib_and_long_pipelines_still_pass(start: Start) -> None:
    with start().client() as client:
        value = bytes(500 * MIB)
        assert client.call("SET", "a", value) == b"OK" and client.call("STRLEN", "a") == len(value)
        del value
        assert client.call("GETRANGE", "a", -5, -1) == bytes(5)
        client.call("DEL", "a")
        pipeline = b"".join(encode_command("SET", f"k{number}", VALUE) for number in range(5000))
        client.socket.sendall(pipeline)
        assert [client.receive() for _ in range(5000)] == [b"OK"] * 5000
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        found = client.call("MGET", *[f"k{number}" for number in range(5000)])
        assert found == [VALUE] * 5000
        assert client.info()["clients_memory_bytes"] == "0"
