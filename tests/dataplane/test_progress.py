"""Layer progress in a word of shared memory during a fetch, and no writes to the memory afterwards."""

import asyncio
import sys
from typing import Any

import numpy as np
import pytest
from dataplane_support import WAYS, Client, Server, keys_of, layout, make_record, running, way_name
from machine import NEVER_MS, until

from shadowserve import record
from shadowserve.pieces import leading_chunks, leading_layers, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(layers=6)
CHUNKS = 5
SENTINEL = 0xEEEEEEEE


async def prepared(client: Client, storage: Server) -> list[bytes]:
    """Store chunks, and register memory with room for a word behind them."""
    keys = keys_of(SHAPE, CHUNKS)
    storage.fill(SHAPE, keys)
    await client.register(SHAPE, CHUNKS, extra=64)
    return keys


class Word:
    """The progress word, initially 0, as the interface requires. It does not keep the memory mapped after the test."""

    def __init__(self, client: Client, offset: int = CHUNKS * SHAPE.raw_bytes) -> None:
        self._client, self._offset = client, offset
        self.set(0)

    def get(self) -> int:
        return int.from_bytes(self._client.segment.memory[self._offset : self._offset + 4].tobytes(), sys.byteorder)

    def set(self, value: int) -> None:
        there = np.frombuffer(value.to_bytes(4, sys.byteorder), np.uint8)
        self._client.segment.memory[self._offset : self._offset + 4] = there


def request(client: Client, keys: list[bytes], **changes: Any) -> pb.FetchRequest:
    part = client.part(keys, length=CHUNKS * SHAPE.raw_bytes, **changes.pop("part", {}))
    fields = {"parts": [part], "order": pb.ORDER_LAYERS, "progress": CHUNKS * SHAPE.raw_bytes}
    return client.fetch_request([], **(fields | changes))


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_all_layers_are_reported_and_nothing_is_written_after_the_answer(
    storage: Server, way: dict[str, Any]
) -> None:
    async with running(storage, **way) as (_, client):
        keys = await prepared(client, storage)
        word = Word(client)
        answer = await client.stub.Fetch(request(client, keys))
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        assert word.get() == SHAPE.layers
        word.set(SENTINEL)
        assert (await client.stub.Fetch(request(client, keys, progress=None))).outcome == pb.OUTCOME_COMPLETE
        assert word.get() == SENTINEL, "without progress, the word must not change"


@pytest.mark.parametrize("layer", [0, 3, 5])
async def test_a_damaged_layer_is_not_reported_as_in_place(redis: Server, layer: int) -> None:
    async with running(redis, delete_corrupt=False) as (_, client):
        keys = await prepared(client, redis)
        damaged = bytearray(make_record(SHAPE, keys[2], 2))
        slices = record.parse_header(bytes(damaged)).slices
        damaged[int(slices["offset"][slices["layer"] == layer][0]) + 3] ^= 4
        redis.put(keys[2], bytes(damaged))
        word = Word(client)
        answer = await client.stub.Fetch(request(client, keys))
        assert answer.outcome == pb.OUTCOME_CORRUPT
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert there[:, :2].all(), "earlier chunks must be complete"
        assert word.get() == leading_layers(there, np.ones_like(there)) <= layer


async def test_layers_without_wanted_pieces_count_as_in_place(client: Client, storage: Server) -> None:
    keys = await prepared(client, storage)
    wanted = np.zeros((SHAPE.layers, CHUNKS), np.bool_)
    wanted[2, 1:] = wanted[4, :3] = True
    word = Word(client)
    answer = await client.stub.Fetch(request(client, keys, part={"wanted": pack(wanted)}))
    assert answer.outcome == pb.OUTCOME_COMPLETE and word.get() == SHAPE.layers


async def test_pieces_beyond_the_buffers_are_not_reported(storage: Server) -> None:
    shape = layout(layers=6, vector_length=2048)
    async with running(storage, decompression_buffer_bytes="1MiB", dma_source_buffer_bytes="1MiB") as (_, client):
        keys = keys_of(shape, 6)
        storage.fill(shape, keys)
        size = len(keys) * shape.raw_bytes
        await client.register(shape, len(keys), extra=64)
        word = Word(client, size)
        there = np.zeros((shape.layers, len(keys)), np.bool_)
        outcomes = [pb.OUTCOME_BATCH_FULL]
        while outcomes[-1] == pb.OUTCOME_BATCH_FULL:
            word.set(0)
            part = client.part(keys, length=size, wanted=pack(~there))
            asked = client.fetch_request([], parts=[part], order=pb.ORDER_LAYERS, progress=size)
            answer = await client.stub.Fetch(asked)
            there |= unpack(answer.delivered[0], *there.shape)
            assert word.get() == leading_layers(there, np.ones_like(there))
            outcomes.append(answer.outcome)
        assert outcomes[-1] == pb.OUTCOME_COMPLETE and len(outcomes) > 3


async def test_a_cancelled_fetch_reports_no_more_layers(mortal_storage: Server) -> None:
    async with running(mortal_storage) as (_, client):
        keys = await prepared(client, mortal_storage)
        assert (await client.stub.Fetch(request(client, keys))).outcome == pb.OUTCOME_COMPLETE
        word = Word(client)
        mortal_storage.freeze()
        asked = request(client, keys, job_id="job", timeout_ms=NEVER_MS)
        fetching = asyncio.ensure_future(client.stub.Fetch(asked))
        await until(mortal_storage.asked)
        assert (await client.stub.Cancel(pb.CancelRequest(job_id="job"))).found
        assert (await fetching).outcome == pb.OUTCOME_CANCELLED
        word.set(SENTINEL)
        mortal_storage.thaw()
        assert (await client.stub.Fetch(request(client, keys, progress=None))).outcome == pb.OUTCOME_COMPLETE
        assert word.get() == SENTINEL


async def test_in_chunk_order_all_chunks_are_reported(storage: Server) -> None:
    async with running(storage) as (_, client):
        keys = await prepared(client, storage)
        word = Word(client)
        answer = await client.stub.Fetch(request(client, keys, order=pb.ORDER_CHUNKS))
        assert answer.outcome == pb.OUTCOME_COMPLETE and word.get() == CHUNKS


@pytest.mark.parametrize("chunk", [0, 3])
async def test_a_damaged_chunk_is_not_reported_as_in_place(redis: Server, chunk: int) -> None:
    async with running(redis, delete_corrupt=False) as (_, client):
        keys = await prepared(client, redis)
        damaged = bytearray(make_record(SHAPE, keys[chunk], chunk))
        damaged[-3] ^= 4
        redis.put(keys[chunk], bytes(damaged))
        word = Word(client)
        answer = await client.stub.Fetch(request(client, keys, order=pb.ORDER_CHUNKS))
        assert answer.outcome == pb.OUTCOME_CORRUPT
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert word.get() == leading_chunks(there, np.ones_like(there)) <= chunk


async def test_a_chunk_counts_once_all_parts_have_it(client: Client, storage: Server) -> None:
    """The second part has one chunk, so it has no data for the other chunks of the first part."""
    keys = await prepared(client, storage)
    absent = keys_of(SHAPE, CHUNKS + 1)[-1]
    size = SHAPE.raw_bytes
    for other, outcome, there in ((keys[4], pb.OUTCOME_COMPLETE, 4), (absent, pb.OUTCOME_ABSENT, 0)):
        word = Word(client)
        parts = [client.part(keys[:4], length=4 * size), client.part([other], offset=4 * size, length=size)]
        answer = await client.stub.Fetch(request(client, keys, parts=parts, order=pb.ORDER_CHUNKS))
        assert (answer.outcome, word.get()) == (outcome, there)


async def test_progress_of_more_chunks_than_a_batch_counts_covers_the_first(storage: Server) -> None:
    """The C core counts 4,096 chunks of a batch; later ones are in the answer."""
    count = 4200
    shape = layout(layers=1)
    async with running(storage) as (_, client):
        keys = keys_of(shape, count)
        wanted = np.zeros((1, count), np.bool_)
        wanted[0, [0, -1]] = True
        for index in (0, count - 1):
            storage.put(keys[index], make_record(shape, keys[index], index))
        size = count * shape.raw_bytes
        await client.register(shape, count, extra=64)
        word = Word(client, size)
        part = client.part(keys, length=size, wanted=pack(wanted))
        answer = await client.stub.Fetch(client.fetch_request([], parts=[part], progress=size))
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        assert word.get() == 4096
