"""KV.LAYERS of large records that are on a device or in a bucket: layers are sent while later ones are read."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cold_support import CREDENTIALS
from faulty_s3 import LIES, Answer, Asked, FaultyS3
from machine import wait_for
from slow_store import Served
from storage_support import Child, Client, Start, bucket_flags
from test_layers import LAYERS, check, layer_of, lent, pieces, record_of, stored

from shadowserve import record
from shadowserve.keys import storage_key
from shadowserve.pool.types import DEFAULT_TENANT
from storage_kv import layer_ranges
from storage_kv.layer_stream import Stream

MIB = 1 << 20
LARGE = {"layer_bytes": MIB}
"""Four layers of 1 MiB: the least part of an ordered read, so each layer is a part."""
FarNode = Callable[..., tuple[Child, Client, dict[bytes, bytes]]]


@pytest.fixture
def cold_node(start: Start, faulty: FaultyS3) -> FarNode:
    """Start a node that knows records which only the bucket has."""
    return far_node(start, *bucket_flags(faulty.endpoint, gather_s=0.2, timeout_s=60.0))


@pytest.fixture(params=["device", "bucket"])
def restarted(request: pytest.FixtureRequest, start: Start, tmp_path: Path) -> FarNode:
    """Start a node whose records are on a device, or in a bucket; none is in memory."""
    if request.param == "device":
        return far_node(start, "--devices", f'[{{"path": "{tmp_path}/device", "size": "256 MiB"}}]')
    faulty = request.getfixturevalue("faulty")
    return far_node(start, *bucket_flags(faulty.endpoint, gather_s=0.2, object_bytes=4 * MIB))


def far_node(start: Start, *below: str) -> FarNode:
    def start_node(count: int, memory: str = "64 MiB", *flags: str) -> tuple[Child, Client, dict[bytes, bytes]]:
        first = start("--memory-budget-bytes", "128 MiB", *below, environment=CREDENTIALS)
        records = stored(client := first.client(), count, **LARGE)
        wait_for(lambda: client.info("s3").get("records", str(count)) == str(count))
        assert first.stop() == 0
        child = start("--memory-budget-bytes", memory, *below, *flags, environment=CREDENTIALS)
        client = child.client()
        wait_for(lambda: client.info("s3").get("records", str(count)) == str(count))
        return child, client, records

    return start_node


@contextlib.contextmanager
def asked_far(
    count: int, wanted: str = "0-3", config: dict[str, Any] | None = None, **record_options: int
) -> Iterator[tuple[Served, Client, dict[bytes, bytes]]]:
    """A server, and a client that waits for layers of records that are not in memory. At the end nothing is held."""
    with Served(**({"memory_budget_bytes": 16 * MIB} if config is None else config)) as server:
        client = server.client()
        records = stored(client, count, **(LARGE | record_options))
        server.store.away = True
        client.send("KV.LAYERS", wanted, 0, 0, *records)
        server.wait_for_reads(count)
        yield server, client, records
        wait_for(lambda: lent(server.client()) == 0 and server.store.leases == 0)


def replace_record(server: Served, key: bytes, *, away: bool) -> None:
    """Store another record under a key, as if the first had been evicted."""
    value = record_of(int(key.removeprefix(b"kv:"), 16), seed=100, **LARGE)[1]
    with server.server.node.lock:
        server.store.remove((DEFAULT_TENANT, key))
        server.store.put((DEFAULT_TENANT, key), value, header_bytes=record.parse_header(value).header_length)
        server.store.away = away


def reads(client: Client) -> int:
    """Return the bytes read from a device, or the number of requests to the bucket."""
    device = re.search(r"read_bytes=(\d+)", client.info("devices").get("device0", ""))
    return int(client.info("s3")["requests"] if device is None else device[1])


def test_all_layers_arrive_and_records_are_kept_for_the_next_time(restarted: FarNode) -> None:
    _, client, records = restarted(3)
    small, value = record_of(9, layer_bytes=2048)
    client.call("SET", small, value)
    asked = [*records, small, storage_key(b"?" * 32)]
    records[small] = value
    check(client.call("KV.LAYERS", "0-1", 0, 0, *asked), asked, records, range(2))
    check(client.call("KV.LAYERS", "3,1-2", 0, 0, *asked), asked, records, [3, 1, 2])
    before = reads(client)
    check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
    assert reads(client) == before > 0
    wait_for(lambda: lent(client) == 0)


def test_records_that_do_not_fit_memory_pass_through_it(restarted: FarNode) -> None:
    _, client, records = restarted(8, "20 MiB")  # 32 MiB, of which 10 may be lent
    asked = list(records)
    for layers in ("0-3", "2-3"):
        first, last = map(int, layers.split("-"))
        check(client.call("KV.LAYERS", layers, 0, 0, *asked), asked, records, range(first, last + 1))
    wait_for(lambda: lent(client) == 0)


def first_layer(asked: list[bytes], records: dict[bytes, bytes]) -> bytes:
    """Return the reply up to the end of the first layer."""
    totals = [sum(len(layer_of(records[key], layer)) for layer in range(LAYERS)) for key in asked]
    parts = [layer_of(records[key], 0) for key in asked]
    bulk = np.array([len(part) for part in parts], "<u4").tobytes() + b"".join(parts)
    head = b"*%d\r\n*%d\r\n" % (1 + LAYERS, len(asked)) + b"".join(b":%d\r\n" % total for total in totals)
    return head + b"$%d\r\n%s\r\n" % (len(bulk), bulk)


@pytest.mark.parametrize("fate", ["slow", "broken", "absent", "same_length"])
def test_the_first_layer_is_sent_before_a_bucket_has_answered_the_last_range(
    faulty: FaultyS3, cold_node: FarNode, fate: str
) -> None:
    _, client, records = cold_node(3)
    asked = list(records)
    read = threading.Event()
    places = {(name, body.find(records[key])): key for name, body in faulty.objects.items() for key in asked}

    def slow_and_wrong(of: Asked) -> Answer | None:
        for (name, offset), key in places.items():
            if of.operation == "get" and of.name == name and of.range is not None and offset >= 0:
                if offset + 2 * MIB <= of.range[0] < offset + len(records[key]):
                    wrong = LIES[fate](of) if fate in LIES and key == asked[1] else None
                    return replace(wrong or Answer(), after=read)
        return None

    faulty.fault = slow_and_wrong
    client.send("KV.LAYERS", "0-3", 0, 0, *asked)
    begun = first_layer(asked, records)
    assert client.receive_raw(len(begun)) == begun
    read.set()
    rest = [client.receive() for _ in range(LAYERS - 1)]
    there = asked if fate == "slow" else [asked[0], asked[2]]
    for layer, bulk in enumerate(rest, 1):
        wanted = [layer_of(records[key], layer) if key in there else b"" for key in asked]
        assert pieces(bulk, len(asked)) == wanted
    wait_for(lambda: lent(client) == 0)
    assert client.info()["lost_values"] == str(len(asked) - len(there))


def test_a_prefetch_and_a_header_of_a_record_that_is_being_read_do_not_stop_the_node(
    faulty: FaultyS3, cold_node: FarNode
) -> None:
    _, client, records = cold_node(1)
    [(key, value)] = records.items()
    read = threading.Event()
    [body] = faulty.objects.values()
    second = body.find(value) + MIB
    faulty.fault = lambda of: Answer(after=read) if of.range is not None and of.range[0] >= second else None
    assert client.call("GETRANGE", key, 0, 9) == value[:10]
    client.call("KV.PREFETCH", key)
    assert client.call("GETRANGE", key, 0, 9) == value[:10]
    read.set()
    assert client.call("GET", key) == value


def test_a_stream_reads_ahead_what_its_tenant_has_room_for_and_no_bytes_of_another_record() -> None:
    with asked_far(4) as (server, client, records):
        asked = list(records)

        def finish_reads() -> None:
            server.wait_for_reads(4)
            for _ in asked:
                server.store.finish_read()

        finish_reads()  # the headers
        finish_reads()
        begun = first_layer(asked, records)
        assert client.receive_raw(len(begun)) == begun
        server.wait_for_reads(4)
        replace_record(server, asked[2], away=True)
        finish_reads()
        wanted = [layer_of(records[key], 1) for key in asked]
        assert pieces(bytes(client.receive()), 4) == wanted
        finish_reads()  # one of them of the other record, which is not read any more after that
        wanted = [layer_of(records[key], 2) for key in asked]
        wanted[2] = b""
        assert pieces(bytes(client.receive()), 4) == wanted
        server.wait_for_reads(3)
        client.close()
        for _ in range(3):
            server.store.finish_read()


def test_records_that_come_to_memory_after_they_were_added_up_are_sent_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Served(memory_budget_bytes=16 * MIB) as server:
        store, client = server.store, server.client()
        records = stored(client, 4, **LARGE)
        reserve = Stream.reserve

        def come_to_memory(stream: Stream, size: int) -> None:
            store.away = False
            reserve(stream, size)

        monkeypatch.setattr(Stream, "reserve", come_to_memory)
        store.away = True
        asked = list(records)
        check(client.call("KV.LAYERS", "0-3", 0, 0, *asked), asked, records, range(LAYERS))
        wait_for(lambda: lent(client) == 0)


@pytest.mark.parametrize("memory", [8 * MIB, 64 * MIB])
def test_a_record_in_memory_that_replaced_another_one_is_not_sent_under_its_header(memory: int) -> None:
    with asked_far(2, config={"memory_budget_bytes": memory}) as (server, client, records):
        asked = list(records)
        replace_record(server, asked[1], away=False)
        for _ in asked:
            server.store.finish_read()
        answer = client.receive()
        for layer in range(LAYERS):
            assert pieces(bytes(answer[1 + layer]), 2) == [layer_of(records[asked[0]], layer), b""]


@pytest.mark.parametrize(
    ("count", "wanted", "record_options", "ranges_max", "said"),
    [
        (2, "3,2,1,0", {}, 7, b"request them in order"),
        (4, "0-1", {"layers": 2, "layer_bytes": 2 * MIB}, 8, b"OOM one layer"),
    ],
    ids=["too many ranges", "a layer beyond the room of its tenant"],
)
def test_layers_that_cannot_be_read_by_ranges_are_refused(
    count: int,
    wanted: str,
    record_options: dict[str, int],
    ranges_max: int,
    said: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_ranges, "RANGES_MAX", ranges_max)
    with asked_far(count, wanted, **record_options) as (server, client, _):
        for _ in range(count):
            server.store.finish_read()
        assert said in bytes(client.receive())


def test_wrong_bytes_of_ranges_are_reported_and_their_object_is_not_used(faulty: FaultyS3, cold_node: FarNode) -> None:
    child, client, asked = cold_node(8, "20 MiB", "--metrics-port", "0")
    faulty.fault = LIES["same_length"]
    there, *_ = client.call("KV.LAYERS", "0-3", 0, 0, *asked)
    assert there == [None] * 8
    assert child.samples()['shadowserve_storage_s3_failed_reads_total{reason="damaged"}'] > 0


def test_ranges_that_do_not_come_end_the_stream_at_its_deadline() -> None:
    with asked_far(2, config={"layers_timeout_s": 1.0}) as (server, client, _):
        server.store.finish_read()
        server.store.finish_read(lost=True)
        answer = client.receive()
        assert b"TIMEOUT" in (answer[-1] if isinstance(answer, list) else answer)
        assert len(server.store.reads) in (0, LAYERS)  # none if the machine was so busy that no range was asked for
        while server.store.reads:
            server.store.finish_read()
