"""Layer progress in the stream of a fetch, for all kinds of memory."""

import asyncio
import mmap
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from dataplane_support import WAYS, Client, Server, keys_of, kv, kvs, layout, make_record, running, way_name
from machine import NEVER_MS, WAIT_MAX_S
from scripted_source import ScriptedSource

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.sources.source import Resources
from host_control.delivery import address_of
from shadowserve import native, record
from shadowserve.pieces import leading_layers, unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(layers=6)
CHUNKS = 5
SIZE = CHUNKS * SHAPE.raw_bytes


def request(client: Client, keys: list[bytes], **changes: Any) -> pb.FetchRequest:
    return client.fetch_request([], **{"parts": [client.part(keys)], "order": pb.ORDER_LAYERS} | changes)


async def streamed(call: Any) -> tuple[list[int], pb.FetchResponse]:
    """Return the reported layers of a call, and its answer."""
    said = [message async for message in call]
    assert [message.WhichOneof("said") for message in said] == ["layers"] * (len(said) - 1) + ["answer"]
    layers = [message.layers for message in said[:-1]]
    assert layers == sorted(set(layers))
    return layers, said[-1].answer


def stored(storage: Server) -> list[bytes]:
    keys = keys_of(SHAPE, CHUNKS)
    storage.fill(SHAPE, keys)
    return keys


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_a_stream_ends_with_the_answer_of_the_fetch(storage: Server, way: dict[str, Any]) -> None:
    async with running(storage, **way) as (_, client):
        keys = stored(storage)
        await client.register(SHAPE, CHUNKS)
        for _ in range(2):  # one after the other over the same word
            client.segment.memory[:] = 0
            layers, answer = await streamed(client.stub.FetchLayers(request(client, keys)))
            assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
            assert unpack(answer.delivered[0], SHAPE.layers, CHUNKS).all()
            assert all(0 < count <= SHAPE.layers for count in layers)
            assert client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)


@pytest.fixture
def exported() -> Iterator[tuple[Any, pb.ExportedMemory]]:
    """Memory of this process that the DPU's side may use."""
    mapping = mmap.mmap(-1, SIZE)
    export = native.Export(address_of(memoryview(mapping)), SIZE)
    yield mapping, pb.ExportedMemory(address=export.address, size=SIZE, descriptor=export.descriptor)
    export.close()


async def test_layers_in_exported_memory_are_reported_while_the_fetch_runs(storage: Server, exported: Any) -> None:
    mapping, memory = exported
    async with running(storage, backend="doca") as (_, client):
        keys = stored(storage)
        await client.register(SHAPE, CHUNKS)
        asked = client.register_request(shared_memory=None)
        fields = {field.name: value for field, value in asked.ListFields()}
        answer = await client.stub.RegisterMemory(pb.RegisterMemoryRequest(**fields, exported_memory=memory))
        part = client.part(keys, memory_id=answer.memory_id, length=SIZE)
        _, done = await streamed(client.stub.FetchLayers(request(client, keys, parts=[part])))
        assert done.outcome == pb.OUTCOME_COMPLETE, done.detail
        assert mapping[:] == b"".join(kv(SHAPE, index) for index in range(CHUNKS))


class Gate:
    """Permits a number of commands."""

    def __init__(self) -> None:
        self._passes = asyncio.Semaphore(0)

    async def wait(self) -> None:
        await self._passes.acquire()

    def open(self, count: int) -> None:
        for _ in range(count):
            self._passes.release()


@pytest.fixture
async def gated(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ScriptedSource, Gate, Client, list[bytes]]]:
    """A data plane over a source that answers one range for each permission; headers are cached."""
    made: list[ScriptedSource] = []

    def source_of(configuration: DataPlaneConfig, resources: Resources) -> ScriptedSource:
        made.append(ScriptedSource(resources))
        return made[-1]

    monkeypatch.setattr("dpu_dataplane.server.source_of", source_of)
    keys = keys_of(SHAPE, CHUNKS)
    async with running("127.0.0.1:1") as (_, client):
        (source,) = made
        source.records = {key: make_record(SHAPE, key, index) for index, key in enumerate(keys)}
        await client.register(SHAPE, CHUNKS)
        assert (await client.lookup(keys)).hits == [CHUNKS]
        gate = Gate()
        source.free = gate  # type: ignore[assignment]
        yield source, gate, client, keys
        gate.open(1000)


async def test_a_layer_is_reported_while_later_layers_are_missing(gated: Any) -> None:
    _, gate, client, keys = gated
    call = client.stub.FetchLayers(request(client, keys))
    for layer in range(1, SHAPE.layers):
        gate.open(CHUNKS)
        async with asyncio.timeout(WAIT_MAX_S):
            said = await call.read()
        assert said.layers == layer, "the next layer has no bytes yet"
    gate.open(CHUNKS)
    async with asyncio.timeout(WAIT_MAX_S):
        said = await call.read()
        if said.WhichOneof("said") == "layers":  # the answer may precede the report of the last layer
            assert said.layers == SHAPE.layers
            said = await call.read()
    assert said.answer.outcome == pb.OUTCOME_COMPLETE


async def test_a_disconnecting_caller_releases_its_memory_and_its_turn(gated: Any) -> None:
    source, gate, client, keys = gated
    call = client.stub.FetchLayers(request(client, keys, timeout_ms=NEVER_MS))
    gate.open(CHUNKS)
    async with asyncio.timeout(WAIT_MAX_S):
        assert (await call.read()).layers == 1
    call.cancel()
    gate.open(1000)

    async def fetched() -> bool:
        try:
            return bool((await client.fetch(keys, length=SIZE)).outcome == pb.OUTCOME_COMPLETE)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION, "the other call holds the region until its end"
            return False

    async with asyncio.timeout(WAIT_MAX_S):
        while not await fetched():
            await asyncio.sleep(0.01)


async def test_a_cancelled_stream_ends_with_an_answer(gated: Any) -> None:
    source, gate, client, keys = gated
    call = client.stub.FetchLayers(request(client, keys, job_id="job", timeout_ms=NEVER_MS))
    gate.open(CHUNKS)
    async with asyncio.timeout(WAIT_MAX_S):
        assert (await call.read()).layers == 1
        assert (await client.stub.Cancel(pb.CancelRequest(job_id="job"))).found
        answer = (await call.read()).answer
    assert answer.outcome == pb.OUTCOME_CANCELLED
    assert unpack(answer.delivered[0], SHAPE.layers, CHUNKS)[0].all()


@pytest.mark.parametrize("layer", [0, 3])
async def test_a_damaged_layer_is_not_reported(redis: Server, layer: int) -> None:
    async with running(redis, delete_corrupt=False) as (_, client):
        keys = stored(redis)
        await client.register(SHAPE, CHUNKS)
        damaged = bytearray(make_record(SHAPE, keys[2], 2))
        slices = record.parse_header(bytes(damaged)).slices
        damaged[int(slices["offset"][slices["layer"] == layer][0]) + 3] ^= 4
        redis.put(keys[2], bytes(damaged))
        layers, answer = await streamed(client.stub.FetchLayers(request(client, keys)))
        assert answer.outcome == pb.OUTCOME_CORRUPT
        there = unpack(answer.delivered[0], SHAPE.layers, CHUNKS)
        assert max(layers, default=0) <= leading_layers(there, np.ones_like(there)) <= layer


async def test_pages_of_unknown_memory_are_an_outcome(client: Client, storage: Server) -> None:
    keys = stored(storage)
    await client.register(SHAPE, CHUNKS)
    part = client.part(keys, memory_id=client.memory_id ^ 1)
    layers, answer = await streamed(client.stub.FetchLayers(request(client, keys, parts=[part])))
    assert (layers, answer.outcome) == ([], pb.OUTCOME_UNKNOWN_MEMORY)
