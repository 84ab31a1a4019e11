"""Retries of a fetch after failures of its source."""

from collections.abc import AsyncIterator

import pytest
from dataplane_support import Client, expected, keys_of, layout, make_record, running
from scripted_source import ScriptedSource

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.sources.source import Resources
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
RECORDS = [make_record(SHAPE, key, seed) for seed, key in enumerate(KEYS)]


@pytest.fixture
async def script(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ScriptedSource, Client]]:
    """A source with all records, and a client of a daemon over it."""
    made: list[ScriptedSource] = []

    def source_of(configuration: DataPlaneConfig, resources: Resources) -> ScriptedSource:
        made.append(ScriptedSource(resources))
        return made[-1]

    monkeypatch.setattr("dpu_dataplane.server.source_of", source_of)
    async with running("127.0.0.1:1") as (_, client):
        made[0].records |= dict(zip(KEYS, RECORDS, strict=True))
        yield made[0], await client.register(SHAPE, len(KEYS))


async def fetch(client: Client, outcome: int, count: int) -> str:
    answer = await client.fetch(KEYS)
    assert (answer.outcome, answer.chunks) == (outcome, count), answer.detail
    assert client.chunks(count) == [expected(SHAPE, KEYS[index], RECORDS[index]) for index in range(count)]
    return answer.detail


async def test_a_chunk_that_a_replica_lacks_is_read_from_its_master(script: tuple[ScriptedSource, Client]) -> None:
    source, client = script
    source.copies[KEYS[2]] = b""
    await fetch(client, pb.OUTCOME_COMPLETE, 4)
    del source.records[KEYS[2]]
    assert KEYS[2].hex() in await fetch(client, pb.OUTCOME_ABSENT, 2)


async def test_a_broken_connection_is_retried_once(script: tuple[ScriptedSource, Client]) -> None:
    source, client = script
    source.cuts = 1
    await fetch(client, pb.OUTCOME_COMPLETE, 4)
    assert source.recovered == 1
    source.cuts = 2
    await fetch(client, pb.OUTCOME_STORAGE_UNAVAILABLE, 0)
    assert source.recovered == 2


@pytest.mark.parametrize("order", [pb.ORDER_CHUNKS, pb.ORDER_LAYERS])
@pytest.mark.parametrize("trouble", ["damaged", "copies", "cuts"])
async def test_failures_of_two_groups_are_retried_for_both(
    script: tuple[ScriptedSource, Client], trouble: str, order: int
) -> None:
    source, client = script
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
