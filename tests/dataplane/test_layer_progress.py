"""Progress of a fetch: in a word of shared memory, or in a stream for all kinds of memory."""

import asyncio
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from dataplane_support import (
    FAILED,
    WAYS,
    Client,
    Server,
    cancel,
    keys_of,
    kvs,
    layout,
    make_record,
    repeat,
    running,
    way_name,
)
from machine import NEVER_MS, WAIT_MAX_S, until
from scripted_source import ScriptedSource

from host_control.delivery import address_of
from shadowserve import native, record
from shadowserve.pieces import leading_chunks, leading_layers, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(layers=6)
CHUNKS = 5
KEYS = keys_of(SHAPE, CHUNKS)
SIZE = CHUNKS * SHAPE.raw_bytes
SENTINEL = 0xEEEEEEEE


async def prepared(client: Client, storage: Server) -> "Word":
    """Store chunks, and register memory with room for a word behind them."""
    storage.fill(SHAPE, KEYS)
    await client.register(SHAPE, CHUNKS, extra=64)
    return Word(client, SIZE)


class Word:
    """The progress word, initially 0, as the interface requires. It does not keep the memory mapped after the test."""

    def __init__(self, client: Client, offset: int) -> None:
        self._client, self._offset = client, offset
        self.set(0)

    def get(self) -> int:
        return int.from_bytes(self._client.segment.memory[self._offset : self._offset + 4].tobytes(), sys.byteorder)

    def set(self, value: int) -> None:
        there = np.frombuffer(value.to_bytes(4, sys.byteorder), np.uint8)
        self._client.segment.memory[self._offset : self._offset + 4] = there


def streamed_request(client: Client, **changes: Any) -> pb.FetchRequest:
    fields = {"parts": [client.part(KEYS, length=SIZE)], "order": pb.ORDER_LAYERS}
    return client.fetch_request([], **(fields | changes))


async def fetch(client: Client, **changes: Any) -> pb.FetchResponse:
    """Fetch with a word behind the chunks."""
    answer: pb.FetchResponse = await client.stub.Fetch(streamed_request(client, **({"progress": SIZE} | changes)))
    return answer


async def streamed(client: Client, **changes: Any) -> tuple[list[int], pb.FetchResponse]:
    """Return the reported layers of a stream, and its answer."""
    said = [message async for message in client.stub.FetchLayers(streamed_request(client, **changes))]
    assert [message.WhichOneof("said") for message in said] == ["layers"] * (len(said) - 1) + ["answer"]
    layers = [message.layers for message in said[:-1]]
    assert layers == sorted(set(layers)) and all(0 < count <= SHAPE.layers for count in layers)
    return layers, said[-1].answer


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_all_layers_are_reported_and_nothing_is_written_after_the_answer(
    storage: Server, way: dict[str, Any]
) -> None:
    async with running(storage, **way) as (_, client):
        word = await prepared(client, storage)
        answer = await fetch(client)
        assert (answer.outcome, word.get()) == (pb.OUTCOME_COMPLETE, SHAPE.layers), answer.detail
        word.set(SENTINEL)
        assert (await fetch(client, progress=None)).outcome == pb.OUTCOME_COMPLETE
        for _ in range(2):  # one after the other over the same word of the daemon
            client.segment.memory[:SIZE] = 0
            _, answer = await streamed(client)
            assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
            assert unpack(answer.delivered[0], SHAPE.layers, CHUNKS).all() and client.chunks(CHUNKS) == kvs(
                SHAPE, CHUNKS
            )
        assert word.get() == SENTINEL, "without progress, the word must not change"


@pytest.mark.parametrize("layer", [0, 3, 5])
async def test_a_damaged_layer_is_not_reported_as_in_place(redis: Server, layer: int) -> None:
    async with running(redis, delete_corrupt=False) as (_, client):
        word = await prepared(client, redis)
        damaged = bytearray(make_record(SHAPE, KEYS[2], 2))
        slices = record.parse_header(bytes(damaged)).slices
        damaged[int(slices["offset"][slices["layer"] == layer][0]) + 3] ^= 4
        redis.put(KEYS[2], bytes(damaged))
        layers, answer = await streamed(client)
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert max(layers, default=0) <= leading_layers(there, np.ones_like(there)) <= layer
        answer = await fetch(client)
        assert answer.outcome == pb.OUTCOME_CORRUPT
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert there[:, :2].all(), "earlier chunks must be complete"
        assert word.get() == leading_layers(there, np.ones_like(there)) <= layer


async def test_layers_without_wanted_pieces_count_as_in_place(client: Client, storage: Server) -> None:
    word = await prepared(client, storage)
    wanted = np.zeros((SHAPE.layers, CHUNKS), np.bool_)
    wanted[2, 1:] = wanted[4, :3] = True
    answer = await fetch(client, parts=[client.part(KEYS, length=SIZE, wanted=pack(wanted))])
    assert (answer.outcome, word.get()) == (pb.OUTCOME_COMPLETE, SHAPE.layers)


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("stream", [False, True], ids=["word", "stream"])
async def test_a_window_of_layers_is_delivered_and_nothing_beside_it(
    storage: Server, way: dict[str, Any], stream: bool
) -> None:
    """The region holds layers 2 and 3 of chunks 1 to 4, without gaps."""
    async with running(storage, **way) as (_, client):
        word = await prepared(client, storage)
        whole, keys, piece = kvs(SHAPE, CHUNKS), KEYS[1:], SHAPE.raw_bytes // SHAPE.layers
        begin, size = SHAPE.raw_bytes, 2 * piece * len(keys)
        client.segment.memory[:SIZE] = 0xEE
        part = client.part(keys, offset=begin, length=size, first_layer=2, layers=2)
        if stream:
            layers, answer = await streamed(client, parts=[part])
            assert all(count > 2 for count in layers), "layers outside the window count as in place"
        else:
            answer = await fetch(client, parts=[part])
            assert word.get() == SHAPE.layers
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        there = unpack(answer.delivered[0], SHAPE.layers, len(keys))
        assert there[2:4].all() and there.sum() == 2 * len(keys)
        expected = b"".join(whole[chunk][2 * piece : 4 * piece] for chunk in range(1, CHUNKS))
        found = bytes(client.segment.memory[:SIZE])
        assert found[begin : begin + size] == expected
        assert set(found[:begin] + found[begin + size :]) == {0xEE}


@pytest.mark.parametrize("stream", [False, True], ids=["word", "stream"])
async def test_a_layer_counts_once_all_parts_of_the_window_have_it(storage: Server, stream: bool) -> None:
    """Two parts, as of records of two ranks, are one request to the storage node."""
    async with running(storage, layer_request_bytes_min=0) as (daemon, client):
        word = await prepared(client, storage)
        size = 2 * 2 * SHAPE.raw_bytes // SHAPE.layers
        shards = [KEYS[:2], KEYS[2:4]]
        parts = [
            client.part(keys, offset=rank * size, length=size, first_layer=2, layers=2)
            for rank, keys in enumerate(shards)
        ]
        layers, answer = await streamed(client, parts=parts) if stream else ([], await fetch(client, parts=parts))
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        assert daemon.metrics.totals["layer_batches"] == 1 and all(count > 2 for count in layers)
        assert stream or word.get() == SHAPE.layers
        piece = size // 4
        expected = [record[2 * piece : 4 * piece] for record in kvs(SHAPE, CHUNKS)[:4]]
        assert bytes(client.segment.memory[: 2 * size]) == b"".join(expected)
        storage.command(b"DEL", b"kv:" + KEYS[3].hex().encode())
        word.set(0)
        layers, answer = await streamed(client, parts=parts) if stream else ([], await fetch(client, parts=parts))
        assert answer.outcome == pb.OUTCOME_ABSENT
        first, second = (unpack(each, SHAPE.layers, 2) for each in answer.delivered)
        assert first[2:4].all() and second[2:4, 0].all() and not second[:, 1].any()
        assert not any(count > 2 for count in layers) and word.get() <= 2


@pytest.mark.parametrize("shards", [1, 2])
async def test_pieces_beyond_the_buffers_are_not_reported(storage: Server, shards: int) -> None:
    """Each call brings whole layers, or leading chunks of a layer, of all shards."""
    shape = layout(layers=6, vector_length=2048)
    async with running(storage, decompression_buffer_bytes="1MiB", dma_source_buffer_bytes="1MiB") as (_, client):
        keys = keys_of(shape, 6)
        storage.fill(shape, keys)
        size = len(keys) * shape.raw_bytes
        await client.register(shape, len(keys), extra=64)
        word = Word(client, size)
        count = len(keys) // shards
        there = np.zeros((shards, shape.layers, count), np.bool_)
        outcomes = [pb.OUTCOME_BATCH_FULL]
        while outcomes[-1] == pb.OUTCOME_BATCH_FULL:
            word.set(0)
            before, parts = there.copy(), []
            for shard, pieces in enumerate(there):
                mine, length = keys[shard * count :][:count], size // shards
                parts.append(client.part(mine, offset=shard * length, length=length, wanted=pack(~pieces)))
            answer = await fetch(client, parts=parts, progress=size)
            there |= np.array([unpack(each, shape.layers, count) for each in answer.delivered])
            everywhere = np.logical_and.reduce(there)
            assert word.get() == leading_layers(everywhere, np.ones_like(everywhere))
            assert everywhere.sum() > np.logical_and.reduce(before).sum()
            outcomes.append(answer.outcome)
        assert outcomes[-1] == pb.OUTCOME_COMPLETE and len(outcomes) > 3


async def test_a_cancelled_fetch_reports_no_more_layers(mortal_storage: Server) -> None:
    async with running(mortal_storage) as (_, client):
        word = await prepared(client, mortal_storage)
        assert (await fetch(client)).outcome == pb.OUTCOME_COMPLETE
        word.set(0)
        mortal_storage.freeze()
        fetching = asyncio.ensure_future(fetch(client, job_id="job", timeout_ms=NEVER_MS))
        await until(mortal_storage.asked)
        assert await cancel(client, "job")
        assert (await fetching).outcome == pb.OUTCOME_CANCELLED
        word.set(SENTINEL)
        mortal_storage.thaw()
        assert (await fetch(client, progress=None)).outcome == pb.OUTCOME_COMPLETE
        assert word.get() == SENTINEL


@pytest.mark.parametrize("chunk", [0, 3])
async def test_chunks_are_reported_in_chunk_order_up_to_a_damaged_one(redis: Server, chunk: int) -> None:
    async with running(redis, delete_corrupt=False) as (_, client):
        word = await prepared(client, redis)
        answer = await fetch(client, order=pb.ORDER_CHUNKS)
        assert (answer.outcome, word.get()) == (pb.OUTCOME_COMPLETE, CHUNKS)
        damaged = bytearray(make_record(SHAPE, KEYS[chunk], chunk))
        damaged[-3] ^= 4
        redis.put(KEYS[chunk], bytes(damaged))
        word.set(0)
        answer = await fetch(client, order=pb.ORDER_CHUNKS)
        assert answer.outcome == pb.OUTCOME_CORRUPT
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert word.get() == leading_chunks(there, np.ones_like(there)) <= chunk


async def test_a_chunk_counts_once_all_parts_have_it(client: Client, storage: Server) -> None:
    """The second part has one chunk, so it has no data for the other chunks of the first part."""
    word = await prepared(client, storage)
    absent = keys_of(SHAPE, CHUNKS + 1)[-1]
    size = SHAPE.raw_bytes
    for other, outcome, there in ((KEYS[4], pb.OUTCOME_COMPLETE, 4), (absent, pb.OUTCOME_ABSENT, 0)):
        word.set(0)
        parts = [client.part(KEYS[:4], length=4 * size), client.part([other], offset=4 * size, length=size)]
        answer = await fetch(client, parts=parts, order=pb.ORDER_CHUNKS)
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
        parts = [client.part(keys, length=size, wanted=pack(wanted))]
        answer = await fetch(client, parts=parts, progress=size, order=pb.ORDER_CHUNKS)
        assert (answer.outcome, word.get()) == (pb.OUTCOME_COMPLETE, 4096), answer.detail


# ---- Streams


async def test_layers_in_exported_memory_are_reported(storage: Server) -> None:
    mapping = mmap.mmap(-1, SIZE)
    export = native.Export(address_of(memoryview(mapping)), SIZE)
    memory = pb.ExportedMemory(address=export.address, size=SIZE, descriptor=export.descriptor)
    async with running(storage, backend="doca") as (_, client):
        await prepared(client, storage)
        request = client.register_request(shared_memory=None, exported_memory=memory)
        answer = await client.stub.RegisterMemory(request)
        part = client.part(KEYS, memory_id=answer.memory_id, length=SIZE)
        _, done = await streamed(client, parts=[part])
        assert done.outcome == pb.OUTCOME_COMPLETE, done.detail
        assert mapping[:] == b"".join(kvs(SHAPE, CHUNKS))
    export.close()


async def test_a_stream_into_unknown_memory_is_an_outcome(client: Client, storage: Server) -> None:
    await prepared(client, storage)
    layers, answer = await streamed(client, parts=[client.part(KEYS, memory_id=client.memory_id ^ 1)])
    assert (layers, answer.outcome) == ([], pb.OUTCOME_UNKNOWN_MEMORY)


class Gate(asyncio.Semaphore):
    """Permits a number of commands."""

    wait = asyncio.Semaphore.acquire

    def open(self, count: int) -> None:
        for _ in range(count):
            self.release()


@pytest.fixture
async def gated(script: tuple[ScriptedSource, Client]) -> Any:
    """A data plane over a source that answers one range for each permission; headers are cached."""
    source, client = script
    source.records = {key: make_record(SHAPE, key, index) for index, key in enumerate(KEYS)}
    await client.register(SHAPE, CHUNKS)
    assert (await client.lookup(KEYS)).hits == [CHUNKS]
    source.free = gate = Gate(0)
    yield gate, client
    gate.open(1000)


async def test_a_layer_is_reported_while_later_layers_are_missing(gated: tuple[Gate, Client]) -> None:
    gate, client = gated
    call = client.stub.FetchLayers(streamed_request(client))
    async with asyncio.timeout(WAIT_MAX_S):
        for layer in range(1, SHAPE.layers):
            gate.open(CHUNKS)
            assert (await call.read()).layers == layer, "the next layer has no bytes yet"
        gate.open(CHUNKS)
        said = await call.read()
        if said.WhichOneof("said") == "layers":  # the answer may precede the report of the last layer
            assert said.layers == SHAPE.layers
            said = await call.read()
    assert said.answer.outcome == pb.OUTCOME_COMPLETE


async def test_a_disconnecting_caller_releases_its_memory_and_its_turn(gated: tuple[Gate, Client]) -> None:
    gate, client = gated
    call = client.stub.FetchLayers(streamed_request(client, timeout_ms=NEVER_MS))
    gate.open(CHUNKS)
    async with asyncio.timeout(WAIT_MAX_S):
        assert (await call.read()).layers == 1
    call.cancel()
    gate.open(1000)
    answer = await repeat(lambda: client.fetch(KEYS, length=SIZE), passing=FAILED)  # while the call holds the region
    assert answer.outcome == pb.OUTCOME_COMPLETE


async def test_a_cancelled_stream_ends_with_an_answer(gated: tuple[Gate, Client]) -> None:
    gate, client = gated
    call = client.stub.FetchLayers(streamed_request(client, job_id="job", timeout_ms=NEVER_MS))
    gate.open(CHUNKS)
    async with asyncio.timeout(WAIT_MAX_S):
        assert (await call.read()).layers == 1
        assert await cancel(client, "job")
        answer = (await call.read()).answer
    assert answer.outcome == pb.OUTCOME_CANCELLED
    assert unpack(answer.delivered[0], SHAPE.layers, CHUNKS)[0].all()
