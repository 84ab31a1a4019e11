"""Traces of fetches."""

from collections import Counter
from typing import Any

import grpc
import pytest
from dataplane_support import FAILED, WAYS, Client, Server, keys_of, kv, layout, refused, repeat, running, way_name
from machine import NEVER_MS

from shadowserve.proto import dataplane_pb2 as pb


async def stored(client: Client, storage: Server, chunks: int, **changes: Any) -> list[bytes]:
    """Store chunks and register memory for all of them."""
    shape = layout(**changes)
    keys = keys_of(shape, chunks)
    storage.fill(shape, keys)
    await client.register(shape, chunks)
    return keys


async def recorded(client: Client, keys: list[bytes], fetches: int = 1) -> list[pb.TraceSpan]:
    """Fetch while a recording runs; return its spans."""
    call = client.stub.Trace(pb.TraceRequest(timeout_ms=NEVER_MS, fetches=fetches))
    assert await call.read() == pb.TraceResponse()
    for _ in range(fetches):
        assert (await client.fetch(keys)).outcome == pb.OUTCOME_COMPLETE
    return await rest_of(call)


async def rest_of(call: Any) -> list[pb.TraceSpan]:
    spans: list[pb.TraceSpan] = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        spans += answer.spans
        assert answer.dropped == 0
    return spans


@pytest.mark.parametrize("way", WAYS, ids=way_name)
async def test_every_slice_of_a_fetch_is_in_each_stage_once(storage: Server, way: dict[str, Any]) -> None:
    async with running(storage, **way) as (_, client):
        keys = await stored(client, storage, 3)
        spans = await recorded(client, keys)
        assert client.chunk(2) == kv(client.shape, 2)
    stages = ["decompress", "dequantize"] if way["fused"] is True else ["decompress", "dequantize", "dma"]
    seen = Counter((span.step, span.piece, span.slice) for span in spans if span.slice >= 0)
    slices = client.shape.slice_count
    assert seen == Counter(
        (stage, chunk, chunk * slices + index) for stage in stages for chunk in range(3) for index in range(slices)
    )
    steps = [span.step for span in spans if span.core == -1]
    assert steps == ["turn", "headers", "plan", "batch", "fetch"]
    whole = next(span for span in spans if span.step == "fetch")
    assert all(whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns for span in spans)
    assert {span.batch for span in spans if span.core >= 0} == {1}


async def test_a_recording_ends_with_its_fetches_and_another_one_can_start(client: Client, storage: Server) -> None:
    keys = await stored(client, storage, 1)
    twice = await recorded(client, keys, fetches=2)
    once = await recorded(client, keys)
    assert {span.batch for span in twice if span.core >= 0} == {1, 2}
    assert {span.batch for span in once if span.core >= 0} == {3}


DECISION = pb.Decision(
    kind="fetch",
    tokens=600,
    loaded_tokens=512,
    predicted={"fetch": 0.25, "compute": 0.5},
    predicted_seconds=0.25,
    seconds=0.3,
)


async def test_a_recording_of_a_deciding_host_has_the_decision_after_the_fetch(client: Client, storage: Server) -> None:
    keys = await stored(client, storage, 1)
    await client.stub.Decided(DECISION)
    call = client.stub.Trace(pb.TraceRequest(timeout_ms=NEVER_MS, fetches=1))
    await call.read()
    assert (await client.fetch(keys)).outcome == pb.OUTCOME_COMPLETE
    await client.stub.Decided(DECISION)
    spans = await rest_of(call)
    (decided,) = [span for span in spans if span.step == "decision"]
    (fetch,) = [span for span in spans if span.step == "fetch"]
    assert decided.decision == DECISION and decided.core == -1
    assert decided.end_ns - decided.begin_ns == 300_000_000 and decided.end_ns >= fetch.end_ns


async def test_a_recording_without_fetches_ends_with_a_decision_or_at_its_time_limit(client: Client) -> None:
    call = client.stub.Trace(pb.TraceRequest(timeout_ms=50, fetches=1))
    assert [answer async for answer in call] == [pb.TraceResponse(), pb.TraceResponse()]
    call = client.stub.Trace(pb.TraceRequest(timeout_ms=1000, fetches=1))
    await call.read()
    await client.stub.Decided(DECISION)
    assert [span.step for span in await rest_of(call)] == ["decision"]


async def test_one_recording_at_a_time_and_a_cancelled_one_makes_room(client: Client, storage: Server) -> None:
    keys = await stored(client, storage, 1)
    first = client.stub.Trace(pb.TraceRequest(timeout_ms=NEVER_MS, fetches=1))
    await first.read()
    second = client.stub.Trace(pb.TraceRequest(timeout_ms=NEVER_MS, fetches=1)).read()
    await refused(second, FAILED, "another recording")
    first.cancel()
    assert await repeat(lambda: recorded(client, keys), passing=FAILED)  # until the end of the first one is processed


async def test_without_room_for_events_there_is_no_recording(storage: Server) -> None:
    async with running(storage, trace_events=0) as (_, client):
        call = client.stub.Trace(pb.TraceRequest(timeout_ms=10, fetches=1))
        await refused(call.read(), FAILED, "trace_events")


def commands(storage: Server) -> int:
    """Return the number of commands that the server has executed, without this one."""
    return int(storage.ask("INFO", "stats")["total_commands_processed"])


async def test_a_fetch_after_a_lookup_reads_no_headers(storage: Server) -> None:
    async with running(storage, decompression_buffer_bytes="1MiB", connections=2) as (daemon, client):
        keys = await stored(client, storage, 9, vector_length=2048)
        assert list((await client.lookup(keys)).hits) == [9]
        assert (await client.fetch(keys)).chunks > 0  # the daemon opens connections and keeps them
        batches, before = daemon.metrics.totals["batches"], commands(storage)
        between = commands(storage) - before  # the commands of this test's own INFO
        await client.fetch_all(keys)
        assert daemon.metrics.totals["batches"] - batches >= 3
        assert client.chunk(8) == kv(client.shape, 8)
        # Each chunk's two halves, once, and nothing else.
        assert commands(storage) - before == 2 * between + 2 * 9
