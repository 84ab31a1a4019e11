"""Deliveries, outcomes and retries of fetches."""

import itertools
from typing import Any

import pytest
from dataplane_support import (
    WAYS,
    Client,
    Server,
    expected,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    running,
    serving,
    way_name,
)
from scripted_source import ScriptedSource

from shadowserve import native
from shadowserve.keys import storage_key
from shadowserve.proto import dataplane_pb2 as pb

CODECS = ["kvrans", "deflate", "lz4", "zstd", "none"]
TREATMENTS = [
    *(layout("lossless", dtype) for dtype in ("bfloat16", "float16", "float32", "uint8", "float8_e4m3")),
    *(layout("binned", dtype) for dtype in ("bfloat16", "float16", "float32", "float8_e4m3")),
    layout("binned", bins=64, value_bins=16),
    layout("binned", "float8_e4m3", bins=64, value_bins=16, scale_tokens=16),
    layout("binned", "float16", value_bins=8, scale_tokens=5),  # the last scale of a slice covers fewer tokens
    *(layout("passthrough", dtype) for dtype in ("uint8", "bfloat16", "float8_e4m3")),
]


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_every_quantizer_and_codec_is_delivered_exactly(storage: Server, way: dict[str, Any]) -> None:
    async with running(storage, **way) as (_, client):
        for shape, codec in itertools.product(TREATMENTS, CODECS):
            keys = keys_of(shape, 3, seed=TREATMENTS.index(shape) * len(CODECS) + CODECS.index(codec))
            records = storage.fill(shape, keys, codec)
            await client.register(shape, 3)
            answer = await client.fetch(keys)
            assert (answer.outcome, answer.chunks) == (pb.OUTCOME_COMPLETE, 3), (shape, codec, answer)
            for index, (key, data) in enumerate(zip(keys, records, strict=True)):
                assert client.chunk(index) == expected(shape, key, data), (shape, codec)
            assert answer.delivered_bytes == 3 * shape.raw_bytes
            assert answer.fetched_bytes >= sum(map(len, records)) - 3 * 128 * 40
            await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id))


async def test_a_chunk_of_many_slices_arrives_whole(storage: Server) -> None:
    # A slice spans at most 2 MiB: one (layer, kind) of 5 tokens x 1 MiB has three slices.
    shape = layout("lossless", "uint8", layers=1, kinds=1, tokens=5, vector_length=1 << 20)
    assert shape.slice_count == 3
    [key] = keys_of(shape, 1)
    async with serving(shape, 1, storage, decompression_buffer_bytes="8MiB", store_buffer_bytes="8MiB") as (_, roomy):
        storage.put(key, make_record(shape, key, 0))
        assert (await roomy.fetch([key])).outcome == pb.OUTCOME_COMPLETE
        assert roomy.chunk(0) == kv(shape, 0)


async def test_pieces_beyond_the_region_take_further_calls(client: Client, storage: Server) -> None:
    shape = layout()
    keys = keys_of(shape, 5)
    storage.fill(shape, keys)
    await client.register(shape, 2, extra=100)
    seen: list[bytes] = []
    outcomes = []
    while len(seen) < 5:
        answer = await client.fetch(keys[len(seen) :])
        outcomes.append(answer.outcome)
        seen += [client.chunk(index) for index in range(answer.chunks)]
    assert outcomes == [pb.OUTCOME_BATCH_FULL, pb.OUTCOME_BATCH_FULL, pb.OUTCOME_COMPLETE]
    assert seen == kvs(shape, 5)


async def test_a_record_evicted_after_the_lookup_is_absent(client: Client, storage: Server) -> None:
    shape = layout()
    keys = keys_of(shape, 2)
    storage.fill(shape, keys)
    await client.register(shape, 2)
    assert list((await client.lookup(keys)).hits) == [2]
    storage.command(b"DEL", storage_key(keys[1]))
    await client.fetches(keys, 1, pb.OUTCOME_ABSENT)


async def test_a_record_replaced_after_the_lookup_is_fetched(client: Client, storage: Server) -> None:
    shape = layout()
    [key] = keys_of(shape, 1)
    storage.put(key, make_record(shape, key, 0, "zstd"))
    await client.register(shape, 1)
    assert list((await client.lookup([key])).hits) == [1]
    storage.put(key, make_record(shape, key, 1, "deflate"))
    await client.fetches([key], 1)
    assert client.chunk(0) == kv(shape, 1)


async def test_a_lookup_reports_chunks_after_a_gap(client: Client, storage: Server) -> None:
    shape = layout()
    keys = keys_of(shape, 20)
    await client.register(shape, 20)
    for index in (0, 1, 3, 19):
        storage.put(keys[index], make_record(shape, keys[index], index))
    storage.put(keys[4], make_record(layout("binned"), keys[4], 4))
    answer = await client.lookup(keys)
    assert [index for index, there in enumerate(*answer.present) if there] == [0, 1, 3, 19]
    assert (answer.hits, answer.outcome) == ([2], pb.OUTCOME_COMPLETE)
    again = await client.lookup(keys)  # after the quarantine of one
    assert again.present == answer.present


async def test_statistics_add_up(client: Client) -> None:
    shape = layout()
    keys = keys_of(shape, 3)
    await client.register(shape, 4)
    stored = await client.stores(keys)
    fetched = await client.fetch([*keys, bytes(32)])
    statistics = await client.stub.Statistics(pb.StatisticsRequest())
    assert dict(statistics.fetch_outcomes) == {"absent": 1}
    assert dict(statistics.store_outcomes) == {"complete": 1}
    assert statistics.batches == 1
    assert statistics.fetched_bytes == fetched.fetched_bytes
    assert statistics.delivered_bytes == fetched.delivered_bytes == 3 * shape.raw_bytes
    assert statistics.stored_bytes == stored.stored_bytes
    assert statistics.stored_raw_bytes == stored.raw_bytes == 3 * shape.raw_bytes
    assert statistics.registrations == 1
    assert statistics.resident_bytes > statistics.buffer_bytes
    stages = {stage.stage: stage for stage in statistics.stages}
    assert set(stages) == {stage.name.lower() for stage in native.Stage}
    assert stages["decompress"].items == 3 * shape.slice_count
    assert stages["decompress"].output_bytes == 3 * shape.raw_bytes
    assert stages["put"].items == 3


# ---- Retries after failures of the source

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
RECORDS = [make_record(SHAPE, key, seed) for seed, key in enumerate(KEYS)]


@pytest.fixture
async def filled(script: tuple[ScriptedSource, Client]) -> tuple[ScriptedSource, Client]:
    script[0].records |= dict(zip(KEYS, RECORDS, strict=True))
    return script[0], await script[1].register(SHAPE, len(KEYS))


async def retried(client: Client, outcome: int, count: int) -> str:
    answer = await client.fetches(KEYS, count, outcome)
    assert client.chunks(count) == [expected(SHAPE, KEYS[index], RECORDS[index]) for index in range(count)]
    return answer.detail


async def test_a_chunk_that_a_replica_lacks_is_read_from_its_master(filled: tuple[ScriptedSource, Client]) -> None:
    source, client = filled
    source.copies[KEYS[2]] = b""
    await retried(client, pb.OUTCOME_COMPLETE, 4)
    del source.records[KEYS[2]]
    assert KEYS[2].hex() in await retried(client, pb.OUTCOME_ABSENT, 2)


async def test_a_broken_connection_is_retried_once(filled: tuple[ScriptedSource, Client]) -> None:
    source, client = filled
    source.cuts = 1
    await retried(client, pb.OUTCOME_COMPLETE, 4)
    assert source.recovered == 1
    source.cuts = 2
    await retried(client, pb.OUTCOME_STORAGE_UNAVAILABLE, 0)
    assert source.recovered == 2


@pytest.mark.parametrize("order", [pb.ORDER_CHUNKS, pb.ORDER_LAYERS])
@pytest.mark.parametrize("trouble", ["damaged", "copies", "cuts"])
async def test_failures_of_two_groups_are_retried_for_both(
    filled: tuple[ScriptedSource, Client], trouble: str, order: int
) -> None:
    source, client = filled
    parts = [
        client.part(KEYS[:2], length=2 * SHAPE.raw_bytes),
        client.part(KEYS[2:], offset=2 * SHAPE.raw_bytes, length=2 * SHAPE.raw_bytes),
    ]
    if trouble == "damaged":
        source.damaged += [KEYS[1], KEYS[2]]
    elif trouble == "copies":
        source.copies |= {KEYS[0]: b"", KEYS[3]: b""}
    else:
        source.cuts = 1
    answer = await client.stub.Fetch(client.fetch_request([], parts=parts, order=order))
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
    assert client.chunks(4) == [expected(SHAPE, key, data) for key, data in zip(KEYS, RECORDS, strict=True)]
    assert not source.damaged and source.recovered <= 2
