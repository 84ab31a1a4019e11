"""The daemon as a process: start, stop, kill, and memory."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from dataplane_support import (
    Client,
    DaemonProcess,
    Server,
    client_of,
    config,
    keys_of,
    kvs,
    layout,
    make_record,
    refused,
    running,
)
from machine import NEVER_MS, NEVER_S, WAIT_MAX_S, cores_of_threads, free_port, http_get, ignores, until

from dpu_dataplane.server import Daemon
from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
MIB = 1 << 20


@contextlib.asynccontextmanager
async def served(server: Server, folder: Path, chunks: int = 4, **changes: Any) -> AsyncIterator[tuple[Any, Client]]:
    """A daemon with a client that has registered memory; headers of KEYS are cached."""
    with contextlib.closing(DaemonProcess(server, folder, **changes)) as daemon:
        async with client_of(daemon) as client:
            await client.register(SHAPE, chunks)
            await client.lookup(KEYS)
            yield daemon, client


@pytest.mark.usefixtures("background")
async def test_a_daemon_in_the_background_ignores_sigint(storage: Server, tmp_path: Path) -> None:
    daemon = DaemonProcess(storage, tmp_path)
    assert ignores(daemon.process.pid, signal.SIGINT)
    assert await asyncio.to_thread(daemon.stop, signal.SIGTERM) == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_an_idle_daemon_at_once(storage: Server, tmp_path: Path, number: int) -> None:
    async with served(storage, tmp_path) as (daemon, _):
        assert await asyncio.to_thread(daemon.stop, number) == 0
        log = daemon.log.read_text()
        assert f"ready on {daemon.address}" in log
        assert "Traceback" not in log and "ERROR" not in log


async def test_sigterm_while_fetching_answers_and_exits(mortal_storage: Server, tmp_path: Path) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    port = free_port()
    limits = {"command_timeout_s": NEVER_S, "shutdown_timeout_s": 2, "metrics_port": port}
    async with served(mortal_storage, tmp_path, 8, **limits) as (daemon, client):
        mortal_storage.freeze()
        length = 4 * SHAPE.raw_bytes
        fetches = [
            asyncio.ensure_future(client.fetch(KEYS, offset=begin, length=length, timeout_ms=NEVER_MS))
            for begin in (0, length)
        ]
        await until(mortal_storage.asked)  # the request of one call
        await until(lambda: "\nshadowserve_fetch_queue_jobs 1.0\n" in http_get(port, "/metrics")[1])  # the other call
        assert await asyncio.to_thread(daemon.stop) == 0
        for fetch in fetches:
            assert (await fetch).outcome == pb.OUTCOME_CANCELLED
        log = daemon.log.read_text()
        assert "cancelling 2 jobs" in log and "Traceback" not in log


@pytest.mark.parametrize(
    ("event", "outcome"), [("suspended", pb.OUTCOME_CANCELLED), ("storage answers", pb.OUTCOME_COMPLETE)]
)
async def test_a_job_in_progress_is_answered_after_sigterm(
    mortal_storage: Server, tmp_path: Path, event: str, outcome: int
) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    limits = {"command_timeout_s": NEVER_S, "shutdown_timeout_s": 2 if event == "suspended" else NEVER_S}
    async with served(mortal_storage, tmp_path, **limits) as (daemon, client):
        mortal_storage.freeze()
        fetch = asyncio.ensure_future(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(mortal_storage.asked)
        daemon.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping" in daemon.log.read_text())
        if event == "suspended":
            daemon.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2.5)
            daemon.process.send_signal(signal.SIGCONT)
        else:
            mortal_storage.thaw()
        answer = await fetch
        assert answer.outcome == outcome
        assert outcome != pb.OUTCOME_COMPLETE or client.chunks(4) == kvs(SHAPE, 4)
        assert await asyncio.to_thread(daemon.process.wait, WAIT_MAX_S) == 0


async def test_after_a_kill_calls_end_and_the_new_daemon_requires_registration(storage: Server, tmp_path: Path) -> None:
    storage.fill(SHAPE, KEYS[:1])
    listen = f"127.0.0.1:{free_port()}"
    async with served(storage, tmp_path, listen=listen) as (daemon, client):
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE
        daemon.process.kill()
        daemon.process.wait()
        await refused(client.fetch(KEYS[:1]), grpc.StatusCode.UNAVAILABLE)
        old = client.memory_id
    async with served(storage, tmp_path, listen=listen) as (successor, client):
        assert (await client.fetch(KEYS[:1], memory_id=old)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE
        assert successor.stop() == 0


async def test_a_second_daemon_on_the_same_port_refuses_to_start(storage: Server) -> None:
    async with running(storage) as (daemon, _):
        with pytest.raises(ConfigurationError, match=f"cannot listen on {daemon.address}"):
            async with Daemon(config(storage, listen=daemon.address)):
                raise AssertionError("it listens")


async def test_no_thread_leaves_the_cores_of_the_process(storage: Server, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    storage.fill(SHAPE, KEYS)
    async with served(storage, tmp_path, cores=[core]) as (daemon, client):
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        allowed = cores_of_threads(daemon.process.pid)
        assert len(allowed) > 5, "each stage must have its own threads"
        assert allowed == [{core}] * len(allowed)
        assert daemon.stop() == 0


def test_an_unusable_configuration_ends_the_program_with_its_reason() -> None:
    command = [sys.executable, "-m", "shadowserve_tools", "dpu", "--cores", "[4095]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S)
    assert done.returncode == 2 and "4095" in done.stderr and "Traceback" not in done.stderr, done.stderr


async def test_memory_does_not_grow_with_prompts_or_batches(storage: Server, tmp_path: Path) -> None:
    shape = layout(vector_length=1024)  # 256 KiB a chunk, 8 slices
    prompt = keys_of(shape, 2048)  # as long as a prompt of 512K tokens in chunks of 256
    for key in prompt[:16]:
        storage.put(key, make_record(shape, key, 0))
    sizes = {"decompression": 16, "dequantization": 8, "dma_source": 8, "store": 16}
    buffers = {f"{name}_buffer_bytes": f"{size}MiB" for name, size in sizes.items()}
    most = (sum(sizes.values()) + 200) * MIB
    async with served(storage, tmp_path, fused="false", **buffers) as (daemon, client):
        await client.register(shape, 16)
        process = psutil.Process(daemon.process.pid)

        def resident() -> int:
            memory = process.memory_info()
            return int(memory.rss - memory.shared)

        async def serve(times: int) -> None:
            for _ in range(times):
                assert list((await client.lookup(prompt)).hits) == [16]
                await client.fetches(prompt, 16, pb.OUTCOME_BATCH_FULL)

        await serve(5)
        settled = resident()
        await serve(60)
        grown = resident() - settled
        assert resident() < most
        assert grown < 8 * MIB, f"memory grew by {grown} bytes in 60 batches"
        answer = await client.stub.Statistics(pb.StatisticsRequest())
        assert answer.resident_bytes < most
        assert answer.delivered_bytes == 65 * 16 * shape.raw_bytes
        assert await asyncio.to_thread(daemon.stop) == 0
