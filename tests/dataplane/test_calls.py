"""Calls: malformed, cancelled, abandoned, overlapping, too many; registrations; health; metrics."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from dataplane_support import (
    FAILED,
    Client,
    Server,
    cancel,
    client_of,
    keys_of,
    kv,
    layout,
    make_record,
    refused,
    repeat,
    running,
    serving,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from machine import NEVER_MS, NEVER_S, http_get, until

from dpu_dataplane.server import SERVICE_NAME, Daemon
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)


@pytest.fixture
async def frozen(mortal_storage: Server) -> AsyncIterator[tuple[Daemon, Client, Server]]:
    """A daemon whose storage holds records and has stopped answering; headers are cached."""
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 8, mortal_storage, command_timeout_s=NEVER_S) as (daemon, client):
        await client.lookup(KEYS)
        assert (await client.fetch(KEYS)).chunks == 4
        mortal_storage.freeze()
        yield daemon, client, mortal_storage
        mortal_storage.thaw()


async def test_a_lookup_reports_the_stored_bytes(client: Client, storage: Server) -> None:
    storage.fill(SHAPE, KEYS[:3])
    storage.put(KEYS[3], b"no record")
    sizes = [len(make_record(SHAPE, key, index)) for index, key in enumerate(KEYS[:3])]
    client.shape = SHAPE
    answer = await client.look(KEYS, KEYS[:1], [bytes(32)], [])
    assert answer.outcome == pb.OUTCOME_COMPLETE
    assert list(answer.stored_bytes) == [sum(sizes), sizes[0], 0, 0]


# ---- Registered memory ----------------------------------------------------------------------------------------------


async def test_unknown_memory_is_an_outcome(client: Client) -> None:
    await client.register(SHAPE, 2)
    for registration in (0, 1, 2**64 - 1):
        assert (await client.fetch(KEYS, memory_id=registration)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        assert (await client.store(KEYS, memory_id=registration)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
    await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id))
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
    await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id))


async def test_an_idle_registration_is_removed(storage: Server) -> None:
    async with running(storage, registration_idle_s=0.2) as (daemon, client):

        async def fetch_after_idleness() -> Any:
            await client.hello()  # the new session replaces the host
            await client.register(SHAPE, 1)
            await until(lambda: daemon.metrics.gauges["registrations"][1]() == 0)
            await client.hello()
            return await client.fetch(KEYS)

        answer = await repeat(fetch_after_idleness, passing=FAILED)  # if the machine paused
        assert answer.outcome == pb.OUTCOME_UNKNOWN_MEMORY


async def test_release_returns_only_when_the_region_is_quiet(frozen: tuple[Daemon, Client, Server]) -> None:
    _, client, storage = frozen
    fetch = asyncio.ensure_future(client.fetch(KEYS, job_id="slow", timeout_ms=NEVER_MS))
    await until(storage.asked)
    request = pb.ReleaseMemoryRequest(memory_id=client.memory_id)
    release = asyncio.ensure_future(client.stub.ReleaseMemory(request))
    done, _ = await asyncio.wait({release, fetch}, timeout=0.3)
    assert not done
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
    assert await cancel(client, "slow")
    assert (await fetch).outcome == pb.OUTCOME_CANCELLED
    await release


# ---- Jobs -----------------------------------------------------------------------------------------------------------


async def test_cancel_ends_a_running_and_a_waiting_fetch(frozen: tuple[Daemon, Client, Server]) -> None:
    daemon, client, storage = frozen
    length = 4 * SHAPE.raw_bytes
    running_one = asyncio.ensure_future(client.fetch(KEYS, job_id="one", length=length, timeout_ms=NEVER_MS))
    await until(storage.asked)
    waiting = asyncio.ensure_future(client.fetch(KEYS, job_id="two", offset=length, length=length, timeout_ms=NEVER_MS))
    await until(lambda: daemon.metrics.gauges["fetch_queue_jobs"][1]() == 1)
    assert await cancel(client, "two")
    assert (await waiting).outcome == pb.OUTCOME_CANCELLED
    assert not running_one.done()
    assert await cancel(client, "one")
    assert (await running_one).outcome == pb.OUTCOME_CANCELLED
    assert not await cancel(client, "one")


async def test_the_deadline_counts_while_waiting(frozen: tuple[Daemon, Client, Server]) -> None:
    _, client, storage = frozen
    length = 4 * SHAPE.raw_bytes
    first = asyncio.ensure_future(client.fetch(KEYS, job_id="first", length=length, timeout_ms=NEVER_MS))
    await until(storage.asked)
    begin = time.monotonic()
    second = await client.fetch(KEYS, offset=length, length=length, timeout_ms=300)
    assert second.outcome == pb.OUTCOME_DEADLINE
    assert time.monotonic() - begin > 0.29
    assert not first.done()
    assert await cancel(client, "first")
    assert (await first).outcome == pb.OUTCOME_CANCELLED


async def test_a_disconnecting_caller_cancels_its_job(frozen: tuple[Daemon, Client, Server]) -> None:
    daemon, client, storage = frozen
    fetch = client.stub.Fetch(client.fetch_request(KEYS, timeout_ms=NEVER_MS))
    await until(storage.asked)
    fetch.cancel()
    await until(lambda: daemon.metrics.fetches["cancelled"] == 1)


async def test_two_jobs_cannot_share_bytes_that_one_of_them_writes(frozen: tuple[Daemon, Client, Server]) -> None:
    _, client, storage = frozen
    fetch = asyncio.ensure_future(client.fetch(KEYS, job_id="one", length=4 * SHAPE.raw_bytes, timeout_ms=NEVER_MS))
    await until(storage.asked)
    overlapping = {"offset": 3 * SHAPE.raw_bytes, "length": 2 * SHAPE.raw_bytes}
    await refused(client.stub.Fetch(client.fetch_request(KEYS, **overlapping)), FAILED, "another job")
    request = client.store_request(KEYS[:1], offset=3 * SHAPE.raw_bytes)
    await refused(client.stub.Store(request), FAILED, "another job")
    await refused(
        client.stub.Fetch(client.fetch_request(KEYS, job_id="one", offset=4 * SHAPE.raw_bytes, length=SHAPE.raw_bytes)),
        grpc.StatusCode.ALREADY_EXISTS,
        "job_id",
    )
    await cancel(client, "one")
    await fetch


async def test_fetches_and_stores_side_by_side(storage: Server) -> None:
    shapes = [layout(), layout("binned"), layout("lossless", "float32")]
    async with running(storage) as (daemon, client):

        async def one(shape: Any, seed: int) -> None:
            async with client_of(daemon) as peer:
                keys = keys_of(shape, 3, seed=seed)
                await peer.register(shape, 3)
                chunks = [kv(shape, seed + index) for index in range(3)]
                peer.write(chunks)
                peer._jobs = 1000 * seed
                assert (await peer.store(keys)).chunks == 3
                assert await peer.fetched(keys) == chunks or shape.bins

        await asyncio.gather(*(one(shapes[seed % 3], seed) for seed in range(1, 25)))
        assert daemon.metrics.fetches == {"complete": 24}
        assert client.memory_id == 0


# ---- Health and metrics ---------------------------------------------------------------------------------------------


async def test_the_daemon_can_listen_on_a_unix_socket(storage: Server, tmp_path: Path) -> None:
    storage.put(KEYS[0], make_record(SHAPE, KEYS[0], 0))
    async with running(storage, listen=f"unix:{tmp_path}/dpu.sock") as (daemon, client):
        assert daemon.address == f"unix:{tmp_path}/dpu.sock"
        await client.register(SHAPE, 1)
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE


async def test_deadlines_are_logged_at_a_limited_rate(
    frozen: tuple[Daemon, Client, Server], caplog: pytest.LogCaptureFixture
) -> None:
    _, client, _ = frozen
    for _ in range(3):
        assert (await client.fetch(KEYS, timeout_ms=50)).outcome == pb.OUTCOME_DEADLINE
    assert len([entry for entry in caplog.records if "Fetch ended with deadline" in entry.getMessage()]) == 1


async def test_health_service_answers(client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", SERVICE_NAME):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert SERVICE_NAME == "shadowserve.v1.DataPlane"


async def test_metrics_and_probes_are_served_on_a_free_port(storage: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Symptom: with ``metrics_port: 0`` the port that was taken could not be found out."""
    caplog.set_level("INFO", "dpu_dataplane")
    storage.fill(SHAPE, KEYS[:1])
    async with serving(SHAPE, 4, storage, metrics_host="0.0.0.0", metrics_port=0) as (daemon, client):  # noqa: S104
        await client.lookup(KEYS)
        answer = await client.fetch(KEYS)
        port = daemon.metrics_port
        assert port and f"http://0.0.0.0:{port}/metrics" in caplog.text
        (_, text), health, ready = [
            await asyncio.to_thread(http_get, port, path) for path in ("/metrics", "/healthz", "/readyz")
        ]
    assert health[0] == 200 and health[1].startswith("ok event loop: answered in ")
    assert ready[0] == 200 and "\nok draining: no\nok storage: connected to " in ready[1]
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'fetches_total{outcome="absent"}': 1, 'lookups_total{outcome="complete"}': 1, "lookup_hits_total": 1,
        "fetched_bytes_total": answer.fetched_bytes, "delivered_bytes_total": SHAPE.raw_bytes, "storage_up": 1,
        "fetch_seconds_count": 1, "registered_bytes": 4 * SHAPE.raw_bytes,
    }  # fmt: skip
    assert {name: float(samples[f"shadowserve_{name}"]) for name in expected} == expected
    assert float(samples['shadowserve_stage_busy_seconds_total{stage="decompress"}']) > 0
