"""Beside a decoding engine, every mover of a data plane waits for its turn, for any engine.

tests/dataplane/test_shared_rate.py tests the sharing of turns. These tests show that each real mover takes them.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_support import delayed, held, moved, report
from dataplane_support import Server, keys_of, kv, kvs, layout, make_record, serving
from machine import NEVER_MS, until
from test_tiers import store, tiers_in, tiers_of

from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.tiers.tiers import address_of
from shadowserve.native import Stage
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=2048)  # 512 KiB a chunk
KEYS = keys_of(SHAPE, 6)
CHUNKS = kvs(SHAPE, 6)


@pytest.fixture
def stored(storage: Server) -> Server:
    storage.fill(SHAPE, KEYS)
    return storage


async def test_a_fetch_keeps_to_the_rate_of_another_engine_that_decodes(stored: Server) -> None:
    """Symptom: loads of one engine slowed down another engine that decoded on the same data plane."""
    async with serving(SHAPE, 6, stored) as (daemon, client):
        await report(client)
        await client.fetches(KEYS, 3, pb.OUTCOME_BATCH_FULL)
        offset = 3 * SHAPE.raw_bytes
        await client.fetches(KEYS[3:], 3, offset=offset, length=offset)
        assert client.chunks(6) == CHUNKS
        assert moved(daemon) == {"fetch": 6 * SHAPE.raw_bytes}


@pytest.mark.parametrize("tiers", [None, {"memory_budget_bytes": "32MiB"}], ids=["storage", "memory"])
async def test_fetches_in_layer_order_keep_to_the_rate(stored: Server, tiers: Any) -> None:
    async with serving(SHAPE, 6, stored, tiers=tiers) as (daemon, client):
        await client.fetch(KEYS)
        client.segment.memory[:] = 0xA5
        await report(client)
        answer = await client.fetch(KEYS, order=pb.ORDER_LAYERS)
        assert answer.outcome == pb.OUTCOME_BATCH_FULL
        assert answer.delivered[:2].all() and not answer.delivered[2:].any()
        assert moved(daemon) == {"fetch": 9 * SHAPE.raw_bytes}


async def test_a_chunk_larger_than_a_turn_is_delivered(stored: Server) -> None:
    large = layout(vector_length=8192)  # 2 MiB a chunk
    key = keys_of(large, 1)[0]
    stored.put(key, make_record(large, key, 0))
    async with serving(large, 1, stored) as (_, client):
        await report(client)
        await client.fetches([key], 1)
        assert client.chunk(0) == kv(large, 0)


async def test_a_fetch_goes_on_without_a_limit_when_decoding_ends(stored: Server) -> None:
    """Symptom: a batch kept its rate after the last decode step, while its request was all that the engine had."""
    async with serving(SHAPE, 1, stored) as (daemon, client):
        engine: dict[str, Any] = {"engine": b"a", "lasts_ms": NEVER_MS}
        daemon.budget.report("host", pb.StepReport(decodes=True, rate=1, **engine))  # a chunk would take days
        fetching = asyncio.create_task(client.fetches(KEYS[:1], 1))
        pipeline = daemon.metrics.pipeline
        assert pipeline is not None
        await until(lambda: pipeline.statistics()[Stage.DECOMPRESS].items > 0)  # the other slices wait
        daemon.budget.report("host", pb.StepReport(decodes=False, **engine))
        await fetching


async def test_pieces_delivered_before_the_deadline_are_reported(stored: Server) -> None:
    async with serving(SHAPE, 6, stored) as (_, client):
        await report(client)
        answer = await client.fetch(KEYS, timeout_ms=50)
        assert answer.outcome == pb.OUTCOME_DEADLINE and answer.chunks < 3
        assert [client.chunk(index) for index in range(answer.chunks)] == CHUNKS[: answer.chunks]


@pytest.mark.parametrize(
    ("purpose", "fetching", "storing"),
    [
        (pb.PURPOSE_REQUEST, Mover.FETCH, Mover.STORE),
        (pb.PURPOSE_PREEMPTION, Mover.FETCH, Mover.PREEMPTION_SAVE),
        (pb.PURPOSE_OFFLOADING_TIER, Mover.TIER_LOAD, Mover.TIER_STORE),
    ],
)
async def test_loads_and_stores_of_every_kind_wait_for_their_turn(
    storage: Server, purpose: Any, fetching: Mover, storing: Mover
) -> None:
    async with serving(SHAPE, 2, storage) as (daemon, client):
        client.segment.memory[:] = np.frombuffer(b"".join(CHUNKS[:2]), np.uint8)
        kept = await held(daemon, client, storing, lambda: client.store(KEYS[:2], purpose=purpose))
        assert (kept.chunks, kept.outcome) == (2, pb.OUTCOME_COMPLETE)
        client.segment.memory[:] = 0xA5
        answer = await held(daemon, client, fetching, lambda: client.fetch(KEYS[:2], purpose=purpose))
        assert answer.chunks and client.chunk(0) == CHUNKS[0]
        assert moved(daemon) == {
            storing.label: 2 * SHAPE.raw_bytes, fetching.label: answer.chunks * SHAPE.raw_bytes
        }  # fmt: skip


async def test_a_save_beyond_the_budget_is_incomplete_at_its_deadline(storage: Server) -> None:
    async with serving(SHAPE, 6, storage) as (daemon, client):
        await report(client)
        answer = await client.store(KEYS, purpose=pb.PURPOSE_PREEMPTION, timeout_ms=60)
        assert answer.outcome == pb.OUTCOME_DEADLINE and answer.chunks < 6
        assert daemon.metrics.interference_dropped == {("preemption_save", "deadline"): 1}
        assert moved(daemon).get("preemption_save", 0) >= answer.chunks * SHAPE.raw_bytes


async def test_device_writes_wait_for_their_turn(tmp_path: Path) -> None:
    """Symptom: device writes used the whole device beside a decoding engine."""
    # By default a DPU's tiers have their own devices, and wait for no turn.
    async with serving(SHAPE, 6, "", tiers=tiers_of(tmp_path), shares_host_memory=True) as (daemon, client):
        await report(client)
        tiers = tiers_in(daemon)
        await store(client, keys=KEYS, shape=SHAPE)
        await until(lambda: not len(tiers.pool._writer))
        with tiers.lock:
            sizes = [item.length for key in KEYS if (item := tiers.pool.peek(address_of(key))) is not None]
        assert len(sizes) == 6 and moved(daemon)["device_write"] >= sum(sizes)
        assert delayed(daemon, Mover.DEVICE_WRITE) > 0, "the store's turn must come first"


async def test_scrubbing_waits_for_its_turn(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path) | {"scrub_bytes_per_s": "1GiB"}
    async with serving(SHAPE, 6, "", tiers=tiers, shares_host_memory=True) as (daemon, client):
        await store(client, keys=KEYS, shape=SHAPE)
        await until(lambda: moved(daemon).get("scrub", 0) > 0)
        await held(daemon, client, Mover.SCRUB, lambda: asyncio.sleep(0))
        before = moved(daemon)["scrub"]
        await until(lambda: moved(daemon)["scrub"] > before)
        tiers = tiers_in(daemon)
        with tiers.lock:
            assert tiers.pool._core.disks[0].scrubbed_bytes <= daemon.budget.shared.granted_bytes[Mover.SCRUB]


async def test_reports_of_steps_are_answered_with_the_moved_bytes(stored: Server) -> None:
    async with serving(SHAPE, 6, stored) as (daemon, client):
        assert (await report(client, rate=0)).moved_bytes == 0
        assert (await client.fetch(KEYS)).chunks == 6
        answer = await report(client, rate=0)
        assert (answer.moved_bytes, answer.moving) == (6 * SHAPE.raw_bytes, False)
        assert (await report(client, rate=0)).moved_bytes == answer.moved_bytes, "no bytes must have moved since"
