"""Fetches that are held to a rate, for an engine that decodes beside them."""

import time
from typing import Any

import grpc
import pytest
from dataplane_support import Server, keys_of, kv, layout, make_record, running

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=2048)  # 512 KiB a chunk
KEYS = keys_of(SHAPE, 6)
CHUNKS = [kv(SHAPE, index) for index in range(6)]
RATE = 16 << 20
"""The lowest: a tenth of a second of it is three chunks."""


@pytest.fixture
def stored(storage: Server) -> Server:
    for index, key in enumerate(KEYS):
        storage.put(key, make_record(SHAPE, key, index))
    return storage


@pytest.mark.parametrize("tiers", [None, {"memory_budget_bytes": "32MiB"}], ids=["storage", "memory"])
async def test_a_call_that_is_held_back_brings_a_tenth_of_a_seconds_chunks_and_takes_as_long(
    stored: Server, tiers: Any
) -> None:
    """The slices of a chunk but the last take their time, whichever source they are from."""
    async with running(stored, tiers=tiers) as (_, client):
        await client.register(SHAPE, 6)
        assert (await client.fetch(KEYS)).chunks == 6  # now tiers have them
        client.segment.memory[:] = 0xA5
        begin = time.monotonic()
        answer = await client.fetch(KEYS, rate=RATE)
        assert time.monotonic() - begin > 2 * SHAPE.raw_bytes / RATE
        assert (answer.chunks, answer.outcome) == (3, pb.OUTCOME_ROUND_FULL)
        offset = 3 * SHAPE.raw_bytes
        answer = await client.fetch(KEYS[3:], offset=offset, length=offset, rate=RATE)
        assert (answer.chunks, answer.outcome) == (3, pb.OUTCOME_COMPLETE)
        assert [client.chunk(index) for index in range(6)] == CHUNKS


async def test_a_chunk_larger_than_that_comes_all_the_same(stored: Server) -> None:
    large = layout(vector_length=8192)  # 2 MiB a chunk
    key = keys_of(large, 1)[0]
    stored.put(key, make_record(large, key, 0))
    async with running(stored) as (_, client):
        await client.register(large, 1)
        answer = await client.fetch([key], rate=RATE)
        assert (answer.chunks, answer.outcome) == (1, pb.OUTCOME_COMPLETE)
        assert client.chunk(0) == kv(large, 0)


async def test_what_has_come_by_the_deadline_of_a_call_is_told(stored: Server) -> None:
    async with running(stored) as (_, client):
        await client.register(SHAPE, 6)
        answer = await client.fetch(KEYS, rate=RATE, timeout_ms=50)
        assert answer.outcome == pb.OUTCOME_DEADLINE and answer.chunks < 3
        assert [client.chunk(index) for index in range(answer.chunks)] == CHUNKS[: answer.chunks]
        assert (await client.fetch(KEYS)).chunks == 6


@pytest.mark.parametrize("wrong", [{"rate": 1}, {"rate": RATE - 1}, {"rate": RATE, "order": pb.ORDER_LAYERS}])
async def test_a_rate_that_would_hold_everybody_back_is_refused(stored: Server, wrong: dict[str, Any]) -> None:
    async with running(stored) as (_, client):
        await client.register(SHAPE, 6)
        with pytest.raises(grpc.aio.AioRpcError, match="rate is ") as caught:
            await client.fetch(KEYS, **wrong)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
