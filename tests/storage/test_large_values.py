"""Large values: whole, in ranges, from several clients, and while they are replaced or evicted."""

import random
from collections.abc import Callable

import pytest
from storage_support import Child, Client

from shadowserve.resp import ErrorReply

MIB = 1 << 20
VALUE = random.Random(1).randbytes(32 * MIB)


def resident_bytes(process_id: int) -> int:
    with open(f"/proc/{process_id}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("size", [32 * 1024 - 1, 32 * 1024, 65_536, MIB - 1, MIB, MIB + 1, 32 * MIB])
def test_values_around_every_boundary_come_back_intact(client: Client, size: int) -> None:
    value = memoryview(VALUE)[:size]
    assert client.call("SET", "large", value) == b"OK"
    assert client.call("STRLEN", "large") == size
    assert client.call("GET", "large") == value


def test_large_arguments_that_are_no_values_are_accepted_up_to_their_limit(client: Client) -> None:
    assert client.call("ECHO", VALUE[:100_000]) == VALUE[:100_000]
    refused = client.call("ECHO", VALUE[: 2 * MIB])
    assert isinstance(refused, ErrorReply) and refused.startswith(b"ERR an argument of 2097152 bytes is too long")
    key = VALUE[:50_000]
    assert client.call("SET", key, VALUE[:MIB]) == b"OK"
    assert client.call("GET", key) == VALUE[:MIB] and client.call("DEL", key) == 1
    reply = client.call(VALUE[:40_000].replace(b"\r", b"").replace(b"\n", b""), "x")
    assert isinstance(reply, ErrorReply) and reply.startswith(b"ERR unknown command '")


def test_a_value_being_sent_stays_whole_while_it_is_replaced_and_deleted(shared_server: Child, client: Client) -> None:
    client.call("SET", "large", VALUE)
    for change in (("SET", "large", "other"), ("DEL", "large"), ("FLUSHALL",)):
        client.call("SET", "large", VALUE)
        with shared_server.client() as reader:
            reader.send("GET", "large")
            assert reader.receive_raw(11) == b"$33554432\r\n"  # in progress: the rest exceeds the socket buffers
            client.call(*change)
            assert int(client.info()["memory_held_bytes"]) > len(VALUE)
            assert reader.receive_raw(len(VALUE) + 2) == VALUE + b"\r\n"
            assert reader.call("PING") == b"PONG"
        assert int(client.info()["memory_held_bytes"]) == 0


def test_a_client_that_disconnects_during_a_reply_releases_its_value(shared_server: Child, client: Client) -> None:
    client.call("SET", "large", VALUE)
    reader = shared_server.client()
    reader.send("GET", "large")
    reader.receive_raw(11)
    client.call("DEL", "large")
    assert int(client.info()["memory_held_bytes"]) > len(VALUE)
    client_id = next(line for line in str(client.call("CLIENT", "LIST")).split("\\n") if "cmd=get" in line)
    assert "omem=0 " not in client_id
    reader.close()
    while int(client.info()["memory_held_bytes"]):  # each round trip gives the server time to detect it
        pass
    assert client.info()["used_memory"] == "0"


def test_the_budget_holds_and_memory_returns_to_the_system(start: Callable[..., Child]) -> None:
    child = start("--memory-budget-bytes", "64 MiB")
    with child.client() as client:
        before = resident_bytes(child.process.pid)
        for number in range(40):
            assert client.call("SET", f"large{number}", memoryview(VALUE)[: 10 * MIB]) == b"OK"
        info = client.info()
        assert int(info["used_memory"]) <= 64 * MIB and int(info["evicted_keys"]) == 34
        assert client.call("DBSIZE") == 6 and client.call("EXISTS", "large39") == 1
        assert resident_bytes(child.process.pid) - before < 64 * MIB + 24 * MIB
        client.call("FLUSHALL")
        assert resident_bytes(child.process.pid) - before < 24 * MIB


def test_a_value_larger_than_the_budget_is_refused_with_redis_text(start: Callable[..., Child]) -> None:
    child = start("--memory-budget-bytes", "16 MiB")
    with child.client() as client:
        client.call("SET", "a", "stays")
        refusal = b"OOM command not allowed when used memory > 'maxmemory'."
        assert client.call("SET", "large", memoryview(VALUE)[: 16 * MIB]) == refusal
        assert client.call("GET", "a") == b"stays" and client.call("GET", "large") is None
