"""Chunks of the quantizer ``weighted``: hosts send steps with their memory, and positions with their stores."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dataplane_support import (
    EXHAUSTED,
    INVALID,
    WAYS,
    Client,
    Server,
    keys_of,
    kvs,
    layout,
    refused,
    running,
    way_name,
)

from dpu_dataplane.config import codec_name
from shadowserve import native, record
from shadowserve.calibration import Steps
from shadowserve.chunk import ChunkLayout
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message, steps_message

LAYERS, HEADS, HEAD_SIZE, CHUNKS = 6, 4, 32, 3
SHAPE = layout("weighted", namespace=b"w" * 32)
"""Four layers and two heads of the model."""
OTHER = layout("lossless", namespace=b"o" * 32)
FIRST_LAYER, FIRST_HEAD = 1, 2
POSITIONS = [0, 16, 4096]


@pytest.fixture
def steps() -> Steps:
    chance = np.random.default_rng(3)
    shape = (LAYERS, 2, HEADS, HEAD_SIZE)
    numbers = (chance.uniform(0.02, 0.3, shape), chance.normal(size=shape))
    return Steps(*(each.astype(np.float32) for each in numbers), np.array([1.0, 0.1, 0.01]))


def channels_of(steps: Steps, shape: ChunkLayout = SHAPE) -> native.Channels:
    shard = steps.shard((FIRST_LAYER, FIRST_LAYER + shape.layers), (FIRST_HEAD, FIRST_HEAD + 2))
    return shard.channels(shape.tokens)


def weighted(of: Steps, **changes: Any) -> dict[str, Any]:
    fields = {
        "layouts": [layout_message(OTHER), layout_message(SHAPE)],
        "steps": steps_message(of),
        "shards": [pb.Shard(), pb.Shard(first_layer=FIRST_LAYER, first_head=FIRST_HEAD)],
    }
    return fields | changes


async def register(client: Client, steps: Steps) -> None:
    client.own(SHAPE, CHUNKS * SHAPE.raw_bytes)
    client.memory_id = (await client.stub.RegisterMemory(client.register_request(**weighted(steps)))).memory_id


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_weighted_chunks_are_stored_and_fetched_with_the_steps_of_their_shard(
    storage: Server, steps: Steps, way: dict[str, Any]
) -> None:
    keys, channels = keys_of(SHAPE, CHUNKS), channels_of(steps)
    codec = native.Codec[codec_name("auto", way["backend"]).upper()]
    records = [
        record.encode(key, codec, SHAPE, kv, channels=channels, position=position)
        for key, kv, position in zip(keys, kvs(SHAPE, CHUNKS), POSITIONS, strict=True)
    ]
    decoded = [record.decode(data, key, SHAPE, channels=channels) for key, data in zip(keys, records, strict=True)]
    assert all(back != kv for back, kv in zip(decoded, kvs(SHAPE, CHUNKS), strict=True))
    async with running(storage, **way) as (_, client):
        await register(client, steps)
        client.fill(CHUNKS)
        answer = await client.store(keys, layout=1, positions=POSITIONS)
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_COMPLETE, CHUNKS), answer.detail
        assert answer.stored_bytes == sum(map(len, records))
        assert list(map(storage.get, keys)) == records
        for order in (pb.ORDER_CHUNKS, pb.ORDER_LAYERS):
            client.segment.memory[:] = 0
            await client.fetches(keys, CHUNKS, layout=1, order=order)
            assert client.chunks(CHUNKS) == decoded
        client.segment.memory[:] = 0
        fetched = await client.fetch(keys[1:2], layout=1, first_layer=2, layers=1)
        piece = SHAPE.raw_bytes // SHAPE.layers
        assert fetched.delivered[2].all()
        assert client.segment.memory[:piece].tobytes() == decoded[1][2 * piece : 3 * piece]
        lossless = keys_of(OTHER, 1)
        client.fill(1)
        assert (await client.store(lossless)).outcome == pb.OUTCOME_COMPLETE
        client.segment.memory[:] = 0
        await client.fetches(lossless, 1)
        assert client.chunk(0) == kvs(OTHER, 1)[0]


async def test_vectors_outside_of_all_steps_are_counted(storage: Server, steps: Steps) -> None:
    keys, coarse = keys_of(SHAPE, 2), replace(steps, steps=np.full_like(steps.steps, 0.3))
    async with running(storage) as (daemon, client):
        await register(client, coarse)
        client.fill(2)
        rows = client.segment.memory[: 2 * SHAPE.raw_bytes].view(np.uint16).reshape(-1, SHAPE.vector_length)
        rows[[5, 40, 41]] = 0x7F80  # infinity: one vector in one slice, two in another
        vectors = len(rows)
        del rows  # the segment can be closed
        assert (await client.store(keys, layout=1, positions=[16, 32])).outcome == pb.OUTCOME_COMPLETE
        totals = daemon.metrics.totals
        assert (totals["exact_vectors"], totals["quantized_vectors"]) == (3, vectors)


async def test_a_registration_without_the_steps_of_its_layouts_is_refused(storage: Server, steps: Steps) -> None:
    good = steps_message(steps)
    cut = pb.Steps(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, steps=good.steps[:-4], centres=good.centres)
    huge = [layout("weighted", layers=600, vector_length=1 << 12, tokens=2, namespace=bytes([n] * 32)) for n in (1, 2)]
    beyond = [pb.Shard(), pb.Shard(first_layer=3, first_head=2)]
    wrong_heads = [pb.Shard(), pb.Shard(first_layer=1, first_head=3)]
    nan = Steps(np.full_like(steps.steps, np.nan), steps.centres, steps.frequencies)
    wide = Steps(steps.steps, steps.centres, np.ones(HEAD_SIZE))
    rows: list[tuple[dict[str, Any], str]] = [
        ({"shards": []}, "shards has 0 entries"),
        ({"steps": None}, "steps.steps has 0 bytes"),
        ({"steps": cut}, "steps.steps has"),
        ({"steps": steps_message(nan)}, "not finite"),
        ({"steps": steps_message(wide)}, "frequencies"),
        ({"steps": pb.Steps(layers=2**32 - 1, heads=2**32 - 1, head_size=2**32 - 1)}, "steps.steps has 0 bytes"),
        ({"shards": beyond}, "layers 3 to 7"),
        ({"shards": wrong_heads}, "heads 3 to 5"),
        ({"layouts": [layout_message(OTHER), layout_message(layout("weighted", kinds=1))]}, "1 kinds"),
        ({"layouts": [layout_message(OTHER), layout_message(layout("weighted", vector_length=40))]}, "whole heads"),
        ({"layouts": [*map(layout_message, huge)]}, "at most"),
        ({"layouts": [layout_message(SHAPE)] * 2}, "the same weighted layout twice"),
    ]
    async with running(storage, decompression_buffer_bytes="64MiB", store_buffer_bytes="64MiB") as (_, client):
        await register(client, steps)
        for changes, reason in rows:
            request = client.register_request(**weighted(steps, **changes))
            await refused(client.stub.RegisterMemory(request), INVALID, reason)


async def test_positions_are_needed_for_weighted_chunks_alone(storage: Server, steps: Steps) -> None:
    keys = keys_of(SHAPE, 2)
    async with running(storage) as (_, client):
        await register(client, steps)
        for changes, reason in (
            ({"layout": 1}, "positions has 0 entries"),
            ({"layout": 1, "positions": [0]}, "one for each of 2 keys"),
            ({"layout": 1, "positions": [0, 2**31]}, "largest position"),
            ({"layout": 0, "positions": [0, 16]}, "else none"),
        ):
            await refused(client.stub.Store(client.store_request(keys, **changes)), INVALID, reason)


async def test_steps_count_as_registered_memory(storage: Server, steps: Steps) -> None:
    size = CHUNKS * SHAPE.raw_bytes
    async with running(storage, registered_bytes_max=size + 100, hosts_max=1) as (_, client):
        with pytest.raises(Exception, match="registered_bytes_max") as caught:
            await register(client, steps)
        assert caught.value.code() is EXHAUSTED


async def test_a_record_with_a_damaged_number_of_exact_tokens_writes_nothing_behind_its_chunk(
    storage: Server, steps: Steps
) -> None:
    [key] = keys_of(SHAPE, 1)
    data = bytearray(record.encode(key, native.Codec.NONE, SHAPE, kvs(SHAPE, 1)[0], channels=channels_of(steps)))
    header = record.parse_header(bytes(data))
    manifest = header.manifest.copy()
    begin = int(manifest["offset"][0])
    data[begin + 4 : begin + 8] = (2**32 - 1).to_bytes(4, "little")  # number of exact tokens
    end = begin + int(manifest["scales_length"][0]) + int(manifest["encoded_length"][0])
    manifest["checksum"][0] = native.crc32(bytes(data[begin:end]))
    head = record.encode_header(key, native.Codec.NONE, SHAPE, manifest)
    storage.put(key, head + bytes(data[header.header_length :]))
    async with running(storage) as (_, client):
        await register(client, steps)
        client.segment.memory[:] = 7
        assert (await client.fetch([key], layout=1, length=SHAPE.raw_bytes)).outcome == pb.OUTCOME_CORRUPT
        assert (client.segment.memory[SHAPE.raw_bytes :] == 7).all()
