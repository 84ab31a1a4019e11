"""Retries of a fetch after failures of its source."""

import pytest
from dataplane_support import Client, expected, keys_of, layout, make_record
from scripted_source import ScriptedSource

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
RECORDS = [make_record(SHAPE, key, seed) for seed, key in enumerate(KEYS)]


@pytest.fixture
async def filled(script: tuple[ScriptedSource, Client]) -> tuple[ScriptedSource, Client]:
    script[0].records |= dict(zip(KEYS, RECORDS, strict=True))
    return script[0], await script[1].register(SHAPE, len(KEYS))


async def fetch(client: Client, outcome: int, count: int) -> str:
    answer = await client.fetch(KEYS)
    assert (answer.outcome, answer.chunks) == (outcome, count), answer.detail
    assert client.chunks(count) == [expected(SHAPE, KEYS[index], RECORDS[index]) for index in range(count)]
    return answer.detail


async def test_a_chunk_that_a_replica_lacks_is_read_from_its_master(filled: tuple[ScriptedSource, Client]) -> None:
    source, client = filled
    source.copies[KEYS[2]] = b""
    await fetch(client, pb.OUTCOME_COMPLETE, 4)
    del source.records[KEYS[2]]
    assert KEYS[2].hex() in await fetch(client, pb.OUTCOME_ABSENT, 2)


async def test_a_broken_connection_is_retried_once(filled: tuple[ScriptedSource, Client]) -> None:
    source, client = filled
    source.cuts = 1
    await fetch(client, pb.OUTCOME_COMPLETE, 4)
    assert source.recovered == 1
    source.cuts = 2
    await fetch(client, pb.OUTCOME_STORAGE_UNAVAILABLE, 0)
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
