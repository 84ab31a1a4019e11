"""Pieces of several groups in one fetch: selection, order, and reported progress."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dataplane_support import (
    WAYS,
    Client,
    Segment,
    Server,
    expected,
    keys_of,
    layout,
    make_record,
    running,
    way_name,
)
from machine import WAIT_MAX_S

from host_control.client import DataPlaneClient, FetchPart
from host_control.registered_memory import RegisteredMemory
from shadowserve import record
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, leading_chunks, leading_layers, pack, unpack
from shadowserve.proto import dataplane_pb2 as pb

ORDERS = [pb.ORDER_CHUNKS, pb.ORDER_LAYERS]
SHAPES = [layout(layers=6), layout("binned", "float32", layers=4, vector_length=32)]
CHUNKS = [5, 3]
LARGE = [layout(layers=6, vector_length=2048), layout("binned", "float32", layers=4, vector_length=1024)]
"""Layout of which a buffer of 1 MiB holds some layers, or one or two chunks."""


class Group:
    """Chunks of one layout, in storage and in their own memory."""

    def __init__(self, shape: ChunkLayout, count: int, seed: int) -> None:
        self.shape = shape
        self.keys = keys_of(shape, count, seed)
        self.records = [make_record(shape, key, seed + index) for index, key in enumerate(self.keys)]
        self.segment: Segment
        self.memory_id = 0

    def store(self, server: Server, *, without: Sequence[int] = ()) -> None:
        for index, (key, data) in enumerate(zip(self.keys, self.records, strict=True)):
            if index not in without:
                server.put(key, data)

    async def register(self, client: Client) -> "Group":
        await client.register(self.shape, len(self.keys))
        self.segment, self.memory_id = client.segment, client.memory_id
        self.segment.memory[:] = 0xEE
        return self

    @property
    def all(self) -> Flags:
        return np.ones((self.shape.layers, len(self.keys)), np.bool_)

    def part(self, pieces: Flags | None = None, **changes: Any) -> pb.FetchPart:
        fields = {
            "memory_id": self.memory_id,
            "offset": 0,
            "length": self.segment.size,
            "keys": self.keys,
            "wanted": b"" if pieces is None else pack(pieces),
        }
        return pb.FetchPart(**(fields | changes))

    def pieces(self, data: bytes) -> Flags:
        """Return the delivered pieces of an answer. Check their bytes."""
        there = unpack(data, self.shape.layers, len(self.keys))
        size = self.shape.raw_bytes // self.shape.layers
        for layer, chunk in np.argwhere(there).tolist():
            whole = expected(self.shape, self.keys[chunk], self.records[chunk])
            begin = chunk * self.shape.raw_bytes + layer * size
            found = self.segment.memory[begin : begin + size].tobytes()
            assert found == whole[layer * size : (layer + 1) * size], (layer, chunk)
        return there

    def untouched(self, there: Flags) -> bool:
        """Return True if no bytes except these pieces were written."""
        memory = self.segment.memory.reshape(len(self.keys), self.shape.layers, -1)
        return bool((memory.swapaxes(0, 1)[~there] == 0xEE).all())


async def groups_of(client: Client, storage: Server, **without: Any) -> list[Group]:
    groups = [Group(shape, count, 10 * seed) for seed, (shape, count) in enumerate(zip(SHAPES, CHUNKS, strict=True))]
    for group in groups:
        await group.register(client)
    groups[0].store(storage, **without)
    groups[1].store(storage)
    return groups


async def fetch(client: Client, parts: Sequence[pb.FetchPart], order: int, **changes: Any) -> pb.FetchResponse:
    request = client.fetch_request([], parts=parts, order=order, **changes)
    answer: pb.FetchResponse = await client.stub.Fetch(request)
    return answer


@pytest.mark.parametrize("way", WAYS, ids=way_name)
@pytest.mark.parametrize("order", ORDERS)
async def test_groups_of_different_layouts_are_fetched_in_one_call(
    storage: Server, way: dict[str, Any], order: int
) -> None:
    async with running(storage, **way) as (_, client):
        groups = await groups_of(client, storage)
        answer = await fetch(client, [group.part() for group in groups], order)
        assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
        assert all(group.pieces(data).all() for group, data in zip(groups, answer.delivered, strict=True))
        assert answer.delivered_bytes == sum(group.segment.size for group in groups)


@pytest.mark.parametrize("order", ORDERS)
async def test_an_absent_chunk_costs_its_group_the_later_chunks_only(
    client: Client, storage: Server, order: int
) -> None:
    groups = await groups_of(client, storage, without=[2])
    answer = await fetch(client, [group.part() for group in groups], order)
    assert answer.outcome == pb.OUTCOME_ABSENT and groups[0].keys[2].hex() in answer.detail
    first, second = (group.pieces(data) for group, data in zip(groups, answer.delivered, strict=True))
    assert first.all(axis=0).tolist() == [True, True, False, False, False]
    assert second.all()
    assert groups[0].untouched(first)


@pytest.mark.parametrize("order", ORDERS)
async def test_only_wanted_pieces_are_fetched(client: Client, storage: Server, order: int) -> None:
    groups = await groups_of(client, storage, without=[4])  # that group needs no pieces
    random = np.random.default_rng(0)
    wanted = [random.random(group.all.shape) < 0.5 for group in groups]
    wanted[0][:, 4] = False
    answer = await fetch(client, [group.part(each) for group, each in zip(groups, wanted, strict=True)], order)
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
    for group, data, mine in zip(groups, answer.delivered, wanted, strict=True):
        assert (group.pieces(data) == mine).all() and group.untouched(mine)
    bodies = [
        sum(end - begin for chunk, data in enumerate(group.records) for begin, end in _ranges(data, mine[:, chunk]))
        for group, mine in zip(groups, wanted, strict=True)
    ]
    assert sum(bodies) <= answer.fetched_bytes < sum(bodies) + 100 * sum(int(mine.sum()) for mine in wanted)


def _ranges(data: bytes, layers: Flags) -> list[tuple[int, int]]:
    head = record.parse_header(data)
    found = []
    for layer in np.flatnonzero(layers).tolist():
        slices = head.slices[head.slices["layer"] == layer]
        end = sum(int(slices[-1][name]) for name in ("offset", "scales_length", "encoded_length"))
        found.append((int(slices[0]["offset"]), end))
    return found


@pytest.mark.parametrize(("order", "way"), list(zip(ORDERS * 2, WAYS, strict=False)))
async def test_pieces_beyond_the_buffers_are_fetched_by_the_next_call(
    storage: Server, order: int, way: dict[str, Any]
) -> None:
    groups = [Group(shape, 6, 10 * seed) for seed, shape in enumerate(LARGE)]
    small = way | {"decompression_buffer_bytes": "1MiB", "dma_source_buffer_bytes": "1MiB"}
    async with running(storage, **small) as (_, client):
        for group in groups:
            (await group.register(client)).store(storage)
        missing = [group.all for group in groups]
        batches = 0
        while any(each.any() for each in missing):
            batches += 1
            parts = [group.part(each) for group, each in zip(groups, missing, strict=True)]
            answer = await fetch(client, parts, order)
            there = [group.pieces(data) for group, data in zip(groups, answer.delivered, strict=True)]
            assert any(each.any() for each in there) and not any(
                (mine & ~theirs).any() for mine, theirs in zip(there, missing, strict=True)
            ), "each call must continue, without repeated pieces"
            missing = [theirs & ~mine for mine, theirs in zip(there, missing, strict=True)]
            left = any(each.any() for each in missing)
            assert answer.outcome == (pb.OUTCOME_BATCH_FULL if left else pb.OUTCOME_COMPLETE), answer.detail
            if batches == 1 and order == pb.ORDER_LAYERS:
                assert leading_layers(there[0], groups[0].all) >= 1 and leading_chunks(there[0], groups[0].all) == 0
            elif batches == 1:
                assert leading_layers(there[0], groups[0].all) == 0 and leading_chunks(there[0], groups[0].all) >= 1
        assert batches > 2


@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_host_fetches_again_until_all_pieces_are_in_place(storage: Server, layerwise: bool) -> None:
    groups = [Group(shape, 6, 10 * seed) for seed, shape in enumerate(LARGE)]
    for group in groups:
        group.store(storage)

    def run(address: str) -> tuple[list[str], list[bytes]]:
        with contextlib.closing(DataPlaneClient(address, connect_timeout_s=WAIT_MAX_S)) as plane:
            memories = [
                RegisteredMemory(plane, [each.shape], len(each.keys) * each.shape.raw_bytes, WAIT_MAX_S)
                for each in groups
            ]
            try:
                segments = [memory.acquire(WAIT_MAX_S) for memory in memories]
                parts = [
                    FetchPart.whole(group.shape, memory.memory_id, group.keys)
                    for group, memory in zip(groups, memories, strict=True)
                ]
                reasons = ["batch_full"]
                while reasons[-1] == "batch_full":
                    answer = plane.start_fetch(f"job-{len(reasons)}", parts, WAIT_MAX_S, layerwise=layerwise).result()
                    reasons.append(answer.reason)
                    parts = [
                        replace(part, wanted=part.wanted & ~there)
                        for part, there in zip(parts, answer.delivered, strict=True)
                    ]
                return reasons[1:], [bytes(segment.memory) for segment in segments]
            finally:
                for memory in memories:
                    memory.close()

    small = {"decompression_buffer_bytes": "1MiB", "dma_source_buffer_bytes": "1MiB", "hosts_max": 2}
    async with running(storage, **small) as (daemon, _):
        reasons, found = await asyncio.to_thread(run, daemon.address)
    assert reasons == ["batch_full"] * (len(reasons) - 1) + ["complete"] and len(reasons) > 1
    for group, memory in zip(groups, found, strict=True):
        assert memory == b"".join(map(expected, [group.shape] * len(group.keys), group.keys, group.records))


@pytest.mark.parametrize("order", ORDERS)
async def test_a_damaged_layer_does_not_affect_its_neighbours(redis: Server, order: int) -> None:
    async with running(redis, delete_corrupt=False) as (daemon, client):
        groups = await groups_of(client, redis)
        victim, layer = groups[0], 3
        slices = record.parse_header(victim.records[1]).slices
        begin = int(slices["offset"][slices["layer"] == layer][0])
        damaged = bytearray(victim.records[1])
        damaged[begin + 3] ^= 4
        redis.put(victim.keys[1], bytes(damaged))
        answer = await fetch(client, [group.part() for group in groups], order)
        assert answer.outcome == pb.OUTCOME_CORRUPT and victim.keys[1].hex() in answer.detail
        first, second = (group.pieces(data) for group, data in zip(groups, answer.delivered, strict=True))
        assert first[:, 0].all() and not first[layer, 1] and second.all()
        assert daemon.metrics.integrity_failures["corrupt"] == 1
        wanted = victim.all
        wanted[layer] = False
        again = await fetch(client, [victim.part(wanted)], order)
        assert again.outcome == pb.OUTCOME_COMPLETE, "the chunk's other layers must be sound"
        assert (victim.pieces(again.delivered[0]) == wanted).all()


async def test_one_unknown_memory_ends_the_call_before_a_byte_moves(client: Client, storage: Server) -> None:
    first, second = await groups_of(client, storage)
    answer = await fetch(client, [first.part(), second.part(memory_id=12345)], pb.ORDER_CHUNKS)
    assert (answer.outcome, list(answer.delivered)) == (pb.OUTCOME_UNKNOWN_MEMORY, [])
    assert "0000000000003039" in answer.detail and first.untouched(~first.all)
