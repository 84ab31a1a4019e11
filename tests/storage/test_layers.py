"""KV.LAYERS: a prefix in one request, layer by layer; missing records, permissions, disconnects, bugs and rates."""

import contextlib
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from machine import wait_for
from slow_store import Served
from storage_support import Child, Client, Start, login

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import storage_key
from shadowserve.resp import ErrorReply
from storage_kv.egress import POLICIES
from storage_kv.layer_stream import Stream
from storage_kv.shaper import Shaper

LAYERS = 4
MIB = 1 << 20


def record_of(
    number: int, *, layers: int = LAYERS, layer_bytes: int = 2048, seed: int | None = None
) -> tuple[bytes, bytes]:
    """Return key and record of a chunk whose bytes differ between layers and chunks."""
    layout = ChunkLayout(
        namespace=b"n" * 32, dtype=DType.UINT8, layers=layers, kinds=2, vector_length=64,
        tokens=layer_bytes // 128, quantizer=Quantizer.PASSTHROUGH,
    )  # fmt: skip
    values = np.random.default_rng(number if seed is None else seed).integers(0, 256, layout.raw_bytes, np.uint8)
    name = number.to_bytes(32, "big")
    return storage_key(name), record.encode(name, native.Codec.NONE, layout, values.tobytes())


def layer_of(value: bytes, layer: int) -> bytes:
    """Return a layer's bytes slice by slice from the manifest, independently of the server's code."""
    slices = record.parse_header(value).slices
    parts = slices[slices["layer"] == layer]
    sizes = parts["scales_length"].astype(int) + parts["encoded_length"]
    return b"".join(value[at : at + size] for at, size in zip(parts["offset"].astype(int), sizes, strict=True))


def stored(client: Client, count: int, **options: int) -> dict[bytes, bytes]:
    records = dict(record_of(number, **options) for number in range(count))
    client.store(records.items())
    return records


def pieces(bulk: bytes, count: int) -> list[bytes]:
    lengths = np.frombuffer(bulk[: 4 * count], "<u4").tolist()
    assert len(bulk) == 4 * count + sum(lengths)
    ends = np.cumsum([4 * count, *lengths]).tolist()
    return [bulk[begin:end] for begin, end in zip(ends[:-1], ends[1:], strict=True)]


def check(answer: Any, asked: Sequence[bytes], records: dict[bytes, bytes], layers: Sequence[int]) -> None:
    there, *bulks = answer
    assert len(bulks) == len(layers)
    wanted = [[layer_of(records[key], layer) if key in records else b"" for key in asked] for layer in layers]
    assert [pieces(bytes(bulk), len(asked)) for bulk in bulks] == wanted
    sums = [sum(map(len, column)) for column in zip(*wanted, strict=True)]
    assert there == [total if key in records else None for key, total in zip(asked, sums, strict=True)]


@pytest.fixture(params=["memory", "pool"])
def server(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> Child:
    devices = f'[{{"path": "{tmp_path}/device", "size": "64 MiB"}}]'
    options = {"memory": ["--memory-budget-bytes", "64 MiB"],
               "pool": ["--memory-budget-bytes", "64 MiB", "--devices", devices]}[request.param]  # fmt: skip
    return start(*options)


@pytest.mark.parametrize("layer_bytes", [256, 2048, 128 << 10])
def test_each_layer_has_the_pieces_of_all_chunks_in_the_order_of_the_prefix(server: Child, layer_bytes: int) -> None:
    client = server.client()
    records = stored(client, 9, layer_bytes=layer_bytes)
    client.call("SET", "no-record", b"x" * 5000)
    keys = [*records, b"no-record", storage_key(b"?" * 32)]
    asked = keys[5:] + keys[:5]
    check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    check(client.call("KV.LAYERS", "2,0-1", 0, 1000, *asked), asked, records, [2, 0, 1])
    check(client.call("KV.LAYERS", "3", 10**10, 0, *asked, *asked), [*asked, *asked], records, [3])
    nobody = [b"none", b"no-record"]
    check(client.call("KV.LAYERS", "0-3", 0, 0, *nobody), nobody, {}, range(LAYERS))


def test_after_a_restart_each_object_is_read_once_from_its_device(start: Start, tmp_path: Path) -> None:
    devices = f'[{{"path": "{tmp_path}/device", "size": "256 MiB"}}]'
    options = ["--memory-budget-bytes", "64 MiB", "--devices", devices]
    child = start(*options)
    records = stored(child.client(), 20, layer_bytes=128 << 10)
    assert child.stop() == 0
    child = start(*options)
    client = child.client()
    before = client.info()
    asked = list(records)
    check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    after = client.info()
    reads = [name for name in after if name.endswith("_reads") and after[name] != before.get(name)]
    assert all(int(after[name]) - int(before[name]) <= len(asked) for name in reads), reads


def test_records_with_fewer_layers_have_nothing_in_the_others(server: Child) -> None:
    client = server.client()
    short, value = record_of(1, layers=2)
    long, other = record_of(2, layers=4)
    client.call("SET", short, value)
    client.call("SET", long, other)
    there, *bulks = client.call("KV.LAYERS", "1-5", 0, 0, short, long)
    assert there == [len(layer_of(value, 1)), sum(len(layer_of(other, layer)) for layer in (1, 2, 3))]
    found = [pieces(bytes(bulk), 2) for bulk in bulks]
    assert found[0] == [layer_of(value, 1), layer_of(other, 1)]
    assert found[1] == [b"", layer_of(other, 2)] and found[3:] == [[b"", b""]] * 2


def test_redis_py_reads_it(server: Child) -> None:
    records = stored(server.client(), 5)
    asked = list(records)
    for protocol in (2, 3):
        with contextlib.closing(redis.Redis(port=server.port, protocol=protocol)) as client:
            check(client.execute_command("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
            with client.pipeline(transaction=True) as pipeline:
                pipeline.get(asked[0])
                pipeline.execute_command("KV.LAYERS", "1", 0, 0, *asked)
                pipeline.ping()
                first, answer, pong = pipeline.execute()
            assert first == records[asked[0]] and pong
            check(answer, asked, records, [1])


@pytest.mark.parametrize(
    "layers", ["", "a", "0-", "-1", "3-2", "0,0", "0-3,2", "0-1024", "65536", "0--1", "1 ", "9" * 20_000]
)
def test_invalid_layers_are_refused(client: Client, layers: str) -> None:
    assert bytes(client.call("KV.LAYERS", layers, 0, 0, "a")).startswith(b"ERR invalid layers in 'kv.layers'")


def test_requests_beyond_a_limit_are_refused_before_any_work(start: Start) -> None:
    client = start("--memory-budget-bytes", "8 MiB").client()
    assert bytes(client.call("KV.LAYERS", "0", 0, 0, *["a"] * 8193)).startswith(
        b"ERR KV.LAYERS takes at most 8192 keys"
    )
    for rate, window in ((-1, 0), (1 << 51, 0), (0, -1), (0, 10**10)):
        assert bytes(client.call("KV.LAYERS", "0", rate, window, "a")).startswith(b"ERR invalid rate")
    client.refused("KV.LAYERS", "0", "x", 0, "a")
    # The whole request would pin more than half of the memory.
    records = stored(client, 12, layer_bytes=96 << 10)
    assert b"request fewer keys" in client.refused("KV.LAYERS", "0-3", 0, 0, *records)
    assert client.info()["total_error_replies"] == str(1 + 4 + 1 + 1)
    few = list(records)[:5]
    check(client.call("KV.LAYERS", "0-3", 0, 0, *few), few, records, range(LAYERS))


FEW = """user ann on >a ~* +@all -@admin tenant=a
user bob on >b ~* +@all -@admin tenant=b
user few on >f ~kv:00* +@all -@admin tenant=a
user none on >n ~* +@all -@admin -kv.layers tenant=a
"""


def test_layers_of_other_tenants_do_not_exist_and_permissions_apply(start_tenants: Start) -> None:
    child = start_tenants(users=FEW)
    assert bytes(child.client().call("KV.LAYERS", "0", 0, 0, "a")).startswith(b"NOAUTH")
    records = stored(login(child, "ann"), 3)
    asked = list(records)
    check(login(child, "ann").call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    check(login(child, "bob").call("KV.LAYERS", "0-3", 0, 0, *asked), asked, {}, range(LAYERS))
    check(login(child, "few").call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    assert bytes(login(child, "few").call("KV.LAYERS", "0-3", 0, 0, *asked, "other")).startswith(b"NOPERM")
    assert bytes(login(child, "none").call("KV.LAYERS", "0-3", 0, 0, *asked)).startswith(b"NOPERM")


def lent(client: Client) -> int:
    return int(client.info()["lent_bytes"])


def test_clients_that_disconnect_during_layers_release_everything(start: Start) -> None:
    child = start("--memory-budget-bytes", "64 MiB")
    client = child.client()
    records = stored(client, 24, layer_bytes=256 << 10)
    asked = list(records)
    for read_bytes in (0, 100, 5 * MIB):
        gone = child.client(receive_buffer=8192)
        gone.send("KV.LAYERS", "0-3", 0, 0, *asked)
        gone.receive_raw(read_bytes)
        gone.close()
    silent = child.client()
    assert silent.call("PING") == b"PONG"
    silent.socket.sendall(b"*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$3\r\nOFF\r\n")
    silent.send("KV.LAYERS", "0-3", 0, 0, *asked)
    silent.send("CLIENT", "REPLY", "ON")
    assert silent.receive() == b"OK"
    wait_for(lambda: lent(client) == 0)
    check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    wait_for(lambda: lent(client) == 0)


def test_a_record_deleted_during_sending_arrives_unchanged(start: Start) -> None:
    child = start("--memory-budget-bytes", "64 MiB")
    client, slow = child.client(), child.client(receive_buffer=8192)
    records = stored(client, 24, layer_bytes=256 << 10)
    asked = list(records)
    slow.send("KV.LAYERS", "0-3", 0, 0, *asked)
    wait_for(lambda: lent(client) > 0)
    assert client.call("DEL", *asked) == len(asked)
    for number in range(100, 110):
        client.call("SET", *record_of(number, layer_bytes=256 << 10))
    check(slow.receive(), asked, records, range(LAYERS))


def test_a_chunk_that_cannot_be_read_is_missing_from_the_beginning() -> None:
    with Served() as server:
        store, client = server.store, server.client()
        records = stored(client, 4)
        store.away = True
        asked = list(records)
        client.send("KV.LAYERS", "0-3", 0, 0, *asked)
        server.wait_for_reads(4)
        fates = [True, False, True, True]
        for there in fates[:-1]:
            store.finish_read(lost=not there)
        assert server.client().call("PING") == b"PONG"
        assert select.select([client.socket], [], [], 0)[0] == []  # no bytes are sent before all lookups are complete
        store.finish_read()
        left = {key: value for (key, value), there in zip(records.items(), fates, strict=True) if there}
        check(client.receive(), asked, left, range(LAYERS))
        assert int(client.info("stats")["keyspace_misses"]) == 1
        wait_for(lambda: store.leases == 0)


@pytest.mark.parametrize("method", ["_add_up", "_hold_or_read", "_find_layers", "layer"])
def test_a_bug_in_one_stream_is_answered_with_an_error_and_costs_no_other(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = getattr(Stream, method)

    def wrong(stream: Any, *arguments: Any) -> Any:
        if stream.keys == 3 and (method != "layer" or arguments == (2,)):
            raise RuntimeError("a bug")
        return right(stream, *arguments)

    monkeypatch.setattr(Stream, method, wrong)
    with Served() as server:
        client, other = server.client(), server.client()
        records = stored(client, 4)
        asked = list(records)
        for _ in range(2):
            other.send("KV.LAYERS", "0-3", 0, 0, *asked)
            answer = client.call("KV.LAYERS", "0-3", 0, 0, *asked[:3])
            if method == "layer":
                assert [isinstance(each, ErrorReply) for each in answer] == [False, False, False, True, True]
                answer = answer[3]
            assert isinstance(answer, ErrorReply) and b"the server's log has the details" in answer
            assert client.call("PING") == b"PONG"
            check(other.receive(), asked, records, range(LAYERS))
        wait_for(lambda: lent(client) == 0)
        info = client.info()
        assert (info["layer_streams"], info["layer_streams_failed"], info["layer_streams_active"]) == ("4", "2", "0")
        assert int(info["layers_sent"]) >= 2 * LAYERS
    assert [line.message for line in caplog.records if line.levelname == "ERROR"] == ["layers_failed"] * 2


def test_a_bug_in_the_shared_thread_fails_all_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Served() as server:
        client = server.client()
        records = stored(client, 4)
        asked = list(records)
        with monkeypatch.context() as broken:
            broken.setattr(Shaper, "ready", lambda *_: 1 / 0)
            clients = [server.client() for _ in range(3)]
            for each in clients:
                each.send("KV.LAYERS", "0-3", 0, 0, *asked)
            for each in clients:
                answer = each.receive()  # one error instead of all layers, or of each layer after the first ones
                layers = answer[1:] if isinstance(answer, list) else [answer]
                assert layers and all(isinstance(layer, ErrorReply) for layer in layers)
        check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
        wait_for(lambda: lent(client) == 0)
    assert "layers_failed" in caplog.text


def test_rates_of_tenants_and_of_the_request_hold(start: Start) -> None:
    # The test checks only the minimum time for the bytes: a slow machine takes longer, never less.
    client = start("--memory-budget-bytes", "64 MiB", "--tenants", '{"": {"bytes_per_s": "16 MiB"}}').client()
    records = stored(client, 4, layer_bytes=128 << 10)  # 2 MiB
    asked = list(records)
    began = time.monotonic()
    rate = 8 * (4 << 20)
    check(client.call("KV.LAYERS", "0-3", rate, 0, *asked), asked, records, range(LAYERS))
    assert time.monotonic() - began > 0.4
    began = time.monotonic()
    for _ in range(24):  # 48 MiB, 16 of them saved
        client.call("KV.LAYERS", "0-3", 0, 0, *asked)
    assert time.monotonic() - began > 1.0


def test_a_shared_link_brings_layers_and_whole_values_to_all_under_every_policy(start: Start) -> None:
    child = start("--memory-budget-bytes", "64 MiB", "--egress-bits-per-s", "4e8")
    operator = child.client()
    records = stored(operator, 4, layer_bytes=64 << 10)  # 1 MiB
    asked = list(records)
    clients = [child.client() for _ in range(6)]
    for policy in POLICIES:
        assert operator.call("CONFIG", "SET", "egress_policy", policy) == b"OK"
        began = time.monotonic()
        for number, client in enumerate(clients[:4]):
            client.send("KV.LAYERS", "0-3", 0, 1000 * number, *asked)
        for client in clients[4:]:
            for key in asked:
                client.send("GET", key)
        for client in clients[:4]:
            check(client.receive(), asked, records, range(LAYERS))
        assert time.monotonic() - began > 0.05  # 4 MiB over this link take 84 ms, minus saved credit
        for client in clients[4:]:
            assert [client.receive() for _ in asked] == list(records.values())
    operator.refused("CONFIG", "SET", "egress_policy", "greedy")
    assert operator.call("CONFIG", "SET", "egress_bits_per_s", "0") == b"OK"
    check(operator.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
