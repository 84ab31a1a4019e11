"""Fetches in layer order as one request: conditions, the request, and servers without that command."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from budget_support import report
from dataplane_support import (
    TOKENS,
    WAYS,
    Client,
    Fetched,
    Server,
    StartServer,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    running,
    serving,
    way_name,
)

from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.resp.layers import LayerRequest, Threshold, layer_request
from shadowserve import native
from shadowserve.keys import storage_key
from shadowserve.pieces import unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(layers=6)
CHUNKS = 5
MIB = 1 << 20
KEYS = keys_of(SHAPE, CHUNKS)
RECORDS = [make_record(SHAPE, key, index) for index, key in enumerate(KEYS)]


async def fetched(client: Client, storage: Server, **changes: Any) -> Fetched:
    """Fetch all chunks in layer order. Check their bytes."""
    storage.fill(SHAPE, KEYS)
    await client.register(SHAPE, CHUNKS)
    answer = await client.fetch(KEYS, **({"order": pb.ORDER_LAYERS} | changes))
    assert answer.outcome != pb.OUTCOME_COMPLETE or client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)
    return answer


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_a_fetch_in_layer_order_is_one_request_and_in_chunk_order_ranges(
    storage: Server, way: dict[str, Any]
) -> None:
    async with running(storage, layer_request_bytes_min=0, **way) as (daemon, client):
        before = storage.calls()
        assert (await fetched(client, storage)).outcome == pb.OUTCOME_COMPLETE
        after = storage.calls()
        made = {name: after.get(name, 0) - before.get(name, 0) for name in ("kv.layers", "getrange")}
        assert made == {"kv.layers": 1, "getrange": 0}
        assert daemon.metrics.totals["layer_batches"] == 1
        await fetched(client, storage, order=pb.ORDER_CHUNKS)
        assert storage.calls()["getrange"] > after.get("getrange", 0)
        assert daemon.metrics.totals["layer_batches"] == 1


async def test_after_one_unknown_layer_request_range_requests_are_used(
    redis: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dpu_dataplane")
    async with running(redis, layer_request_bytes_min=0) as (daemon, client):
        for _ in range(3):
            assert (await fetched(client, redis)).outcome == pb.OUTCOME_COMPLETE
        said = [record.message for record in caplog.records if "does not answer KV.LAYERS" in record.message]
        assert len(said) == 1 and "unknown command" in said[0]
        assert daemon.metrics.totals["layer_batches"] == 0
        assert daemon.metrics.slower_paths == {"no_layer_requests": 2}, "all requests except the one that detected it"
        assert sum("(no_layer_requests)" in record.message for record in caplog.records) == 1


async def test_after_a_refused_rate_layer_requests_go_on_without_a_rate(start_server: StartServer) -> None:
    """Symptom: one refused rate switched KV.LAYERS off, and the log said that the server did not know it."""
    server = start_server("--layers-bits-per-s-min", "1000000000000")
    async with running(server, layer_request_bytes_min=0) as (daemon, client):
        await report(client)
        for batches in (0, 1, 2):
            assert (await fetched(client, server)).outcome == pb.OUTCOME_COMPLETE
            assert daemon.metrics.totals["layer_batches"] == batches
        assert daemon.metrics.slower_paths == {}


async def test_below_layer_request_bytes_min_ranges_are_used(storage: Server) -> None:
    stored = sum(map(len, RECORDS))
    async with running(storage, layer_request_bytes_min=stored) as (daemon, client):
        assert (await fetched(client, storage)).outcome == pb.OUTCOME_COMPLETE
        assert daemon.metrics.totals["layer_batches"] == 0


async def test_batches_too_large_for_the_node_use_ranges_and_smaller_ones_one_request(
    start_server: StartServer,
) -> None:
    server = start_server("--memory-budget-bytes", "8 MiB")
    large = layout(layers=6, vector_length=2048)
    keys = keys_of(large, 9)
    async with running(server, layer_request_bytes_min=0) as (daemon, client):
        server.fill(large, keys)
        await client.register(large, len(keys))
        before = server.calls().get("getrange", 0)
        for count, batches in ((9, 0), (2, 1)):
            answer = await client.fetch(keys[:count], length=count * large.raw_bytes, order=pb.ORDER_LAYERS)
            assert answer.outcome in (pb.OUTCOME_COMPLETE, pb.OUTCOME_BATCH_FULL), answer.detail
            assert answer.fetched_bytes > 0 and daemon.metrics.totals["layer_batches"] == batches
            if not batches:
                assert server.calls()["getrange"] > before


async def test_a_chunk_deleted_after_the_lookup_ends_the_prefix(storage: Server) -> None:
    async with running(storage, layer_request_bytes_min=0) as (daemon, client):
        assert (await fetched(client, storage)).outcome == pb.OUTCOME_COMPLETE  # so headers are cached
        storage.command(b"DEL", storage_key(KEYS[3]))
        answer = await client.fetch(KEYS, order=pb.ORDER_LAYERS)
        assert answer.outcome == pb.OUTCOME_ABSENT
        assert answer.delivered[:, :3].all() and not answer.delivered[:, 3].any()
        assert daemon.metrics.totals["layer_batches"] == 2


async def test_a_chunk_that_one_part_lacks_does_not_interrupt_the_others(storage: Server) -> None:
    """Symptom: another batch, over new connections, when the first part lacked its first chunk."""
    large = layout("passthrough", "uint8", layers=6, vector_length=MIB // TOKENS)
    keys = keys_of(large, 2)
    storage.fill(large, keys)
    buffers = {"decompression_buffer_bytes": "64MiB", "store_buffer_bytes": "32MiB", "layer_request_bytes_min": 0}
    async with serving(large, 2, storage, **buffers) as (daemon, client):
        parts = [client.part([key], offset=n * large.raw_bytes, length=large.raw_bytes) for n, key in enumerate(keys)]
        totals = daemon.metrics.totals
        assert (await client.lookup(keys)).hits == [2]  # so headers are cached
        for there in (True, False):
            made = totals.copy()
            answer = await client.stub.Fetch(client.fetch_request([], parts=parts, order=pb.ORDER_LAYERS))
            assert [unpack(each, large.layers, 1).all() for each in answer.delivered] == [there, True], answer.detail
            storage.command(b"DEL", storage_key(keys[0]))
        assert totals["batches"] == made["batches"] + 1
        assert totals["data_connections"] == made["data_connections"]


async def test_below_tiers_one_layer_request_brings_the_records_that_they_lack(storage: Server) -> None:
    large = layout(layers=6, vector_length=2048)
    keys = keys_of(large, 3)
    storage.fill(large, keys)
    tiers = {"memory_budget_bytes": "64MiB"}
    async with serving(large, len(keys), storage, layer_request_bytes_min=0, tiers=tiers) as (daemon, client):
        for asked, batches in (([1], 1), ([1], 1), ([0, 1, 2], 2), ([2], 2)):
            wanted, length = [keys[index] for index in asked], len(asked) * large.raw_bytes
            found = await client.fetched(wanted, length=length, order=pb.ORDER_LAYERS)
            assert found == [kv(large, index) for index in asked]
            assert daemon.metrics.totals["layer_batches"] == batches
        assert daemon.metrics.tier_records["memory"] == 1 + 1 + 1
        assert daemon.metrics.slower_paths == {}


# ---- Contents of the request


def order(layers: list[int], chunks: list[int], *, group: int = 0, window_s: float = 0.0) -> FetchPlan:
    pieces = np.zeros(len(layers) * len(chunks), native.PIECE_DTYPE)
    pieces["layer"], pieces["chunk"] = np.repeat(layers, len(chunks)), np.tile(chunks, len(layers))
    pieces["group"] = group
    keys = [KEYS[chunk] for chunk in pieces["chunk"]]
    return FetchPlan([], keys, pieces, pieces, np.zeros((len(pieces), 2)), layerwise=True, window_s=window_s)


def words(request: LayerRequest | None) -> list[str]:
    return [part.decode() for part in request.command.split(b"\r\n")[2::2]]


@pytest.mark.parametrize(
    ("layers", "text"),
    [([0], "0"), ([0, 1, 2], "0-2"), ([3, 5], "3,5"), ([0, 1, 4, 7, 8], "0-1,4,7-8"), ([1, 2, 9], "1-2,9")],
)
def test_the_request_names_layers_window_and_keys(layers: list[int], text: str) -> None:
    asked = order(layers, [1, 2, 4], window_s=0.0125)
    request = layer_request(asked, range(len(asked.pieces)))
    assert (request.layers, request.keys) == (len(layers), 3)
    assert words(request) == ["KV.LAYERS", text, "0", "12500", *(f"kv:{KEYS[chunk].hex()}" for chunk in (1, 2, 4))]
    assert words(layer_request(order([0], [0], window_s=1e9), [0]))[3] == "3600000000"


@pytest.mark.parametrize(("rate", "expected"), [(0, 0), (64 << 20, 5 * (64 << 20)), (1 << 20, 10_000_000)])
def test_beside_decoding_the_request_names_the_rate_of_stored_bytes(rate: int, expected: int) -> None:
    """Half of the bytes that are delivered are stored. A quarter more than needed may come."""
    part = SimpleNamespace(piece_bytes=2000)
    asked = replace(order([0, 1], [0, 1, 2]), rate=rate, parts=[part], layers=np.array([[0, 1]] * 3 + [[1, 2]] * 3))
    asked.pieces["body_length"] = 1000
    assert int(words(layer_request(asked, range(6)))[2]) == expected
    if expected > 10_000_000:  # of two nodes, each is asked for its share
        shares = [int(words(layer_request(asked, ids))[2]) for ids in ([0, 1, 3, 4], [2, 5])]
        assert shares == pytest.approx([expected * 2 / 3, expected / 3])


def test_pieces_that_are_no_rows_of_the_same_records_are_no_layer_request() -> None:
    asked = order([0, 1, 2], [0, 1, 2])
    everything = list(range(9))
    assert layer_request(asked, everything[:6]) is not None
    for wrong in (everything[:5], everything[:2] + everything[3:], [3, 4, 5, 0, 1, 2], [1, 0, 4, 3], [0, 1, 3, 5]):
        assert layer_request(asked, wrong) is None, wrong
    asked.pieces["group"][4] = 1
    assert layer_request(asked, everything) is None


def test_the_threshold_is_the_bandwidth_delay_product() -> None:
    threshold = Threshold(None)
    assert threshold.bytes_min(0.01) == 0  # without measurements
    threshold.note(1_000_000, 0.1)
    threshold.note(1_000, 0.01)  # a short batch is no measurement of the link
    assert threshold.bytes_min(0.01) == pytest.approx(100_000)
    for _ in range(40):  # the link becomes slower
        threshold.note(1_000_000, 1.0)
    assert threshold.bytes_min(0.01) == pytest.approx(10_000)
    assert Threshold(5000).bytes_min(7.0) == 5000
