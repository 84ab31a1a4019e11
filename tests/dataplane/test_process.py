"""The daemon as a process: start, stop, kill, and memory."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from dataplane_support import Client, DaemonProcess, Server, keys_of, kv, layout, make_record
from machine import NEVER_MS, NEVER_S, WAIT_MAX_S, cores_of_threads, free_port, ignores, until

from dpu_dataplane.config import DataPlaneConfig
from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
MIB = 1 << 20


@contextlib.asynccontextmanager
async def client_of(daemon: DaemonProcess) -> AsyncIterator[Client]:
    client = Client(daemon.address)
    try:
        await client.hello()
        yield client
    finally:
        await client.close()
        daemon.close()


def metrics(port: int) -> str:
    """Return the metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_MAX_S) as page:
        return str(page.read().decode())


@pytest.mark.usefixtures("background")
async def test_a_daemon_in_the_background_ignores_sigint(storage: Server, tmp_path: Path) -> None:
    daemon = DaemonProcess(storage, tmp_path)
    assert ignores(daemon.process.pid, signal.SIGINT)
    assert await asyncio.to_thread(daemon.stop, signal.SIGTERM) == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_an_idle_daemon_at_once(storage: Server, tmp_path: Path, number: int) -> None:
    daemon = DaemonProcess(storage, tmp_path)
    async with client_of(daemon) as client:
        await client.register(SHAPE, 1)
        assert await asyncio.to_thread(daemon.stop, number) == 0
        log = daemon.log.read_text()
        assert f"ready on {daemon.address}" in log
        assert "Traceback" not in log and "ERROR" not in log


async def test_sigterm_while_fetching_answers_and_exits(mortal_storage: Server, tmp_path: Path) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    port = free_port()
    daemon = DaemonProcess(mortal_storage, tmp_path, command_timeout_s=NEVER_S, shutdown_timeout_s=2, metrics_port=port)
    async with client_of(daemon) as client:
        await client.register(SHAPE, 8)
        await client.lookup(KEYS)
        mortal_storage.freeze()
        length = 4 * SHAPE.raw_bytes
        fetches = [
            asyncio.ensure_future(client.fetch(KEYS, offset=begin, length=length, timeout_ms=NEVER_MS))
            for begin in (0, length)
        ]
        await until(mortal_storage.asked)  # the request of one call
        await until(lambda: "\nshadowserve_fetch_queue_jobs 1.0\n" in metrics(port))  # the other call
        assert await asyncio.to_thread(daemon.stop) == 0
        for fetch in fetches:
            assert (await fetch).outcome == pb.OUTCOME_CANCELLED
        log = daemon.log.read_text()
        assert "cancelling 2 jobs" in log and "Traceback" not in log


async def test_cancelled_jobs_answer_after_the_daemon_was_suspended(mortal_storage: Server, tmp_path: Path) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    daemon = DaemonProcess(mortal_storage, tmp_path, command_timeout_s=NEVER_S, shutdown_timeout_s=2)
    async with client_of(daemon) as client:
        await client.register(SHAPE, 4)
        await client.lookup(KEYS)
        mortal_storage.freeze()
        fetch = asyncio.ensure_future(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(mortal_storage.asked)
        daemon.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping" in daemon.log.read_text())
        daemon.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        daemon.process.send_signal(signal.SIGCONT)
        assert (await fetch).outcome == pb.OUTCOME_CANCELLED
        assert await asyncio.to_thread(daemon.process.wait, WAIT_MAX_S) == 0


async def test_sigterm_lets_a_short_job_finish(mortal_storage: Server, tmp_path: Path) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    daemon = DaemonProcess(mortal_storage, tmp_path, shutdown_timeout_s=NEVER_S)
    async with client_of(daemon) as client:
        await client.register(SHAPE, 4)
        await client.lookup(KEYS)
        mortal_storage.freeze()
        fetch = asyncio.ensure_future(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(mortal_storage.asked)
        daemon.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping" in daemon.log.read_text())
        mortal_storage.thaw()
        assert (await fetch).outcome == pb.OUTCOME_COMPLETE
        assert client.chunk(3) == kv(SHAPE, 3)
        assert await asyncio.to_thread(daemon.process.wait, WAIT_MAX_S) == 0


async def test_after_a_kill_calls_end_and_the_new_daemon_requires_registration(storage: Server, tmp_path: Path) -> None:
    storage.put(KEYS[0], make_record(SHAPE, KEYS[0], 0))
    port = free_port()
    daemon = DaemonProcess(storage, tmp_path, listen=f"127.0.0.1:{port}")
    async with client_of(daemon) as client:
        await client.register(SHAPE, 1)
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE
        daemon.process.kill()
        daemon.process.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.fetch(KEYS[:1])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    successor = DaemonProcess(storage, tmp_path, listen=f"127.0.0.1:{port}")
    old = client.memory_id
    async with client_of(successor) as client:
        await client.register(SHAPE, 1)
        assert (await client.fetch(KEYS[:1], memory_id=old)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        assert (await client.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE
        assert successor.stop() == 0


def test_a_second_daemon_on_the_same_port_refuses_to_start(storage: Server, tmp_path: Path) -> None:
    first = DaemonProcess(storage, tmp_path)
    try:
        command = [sys.executable, "-m", "shadowserve_tools", "dpu", "--listen", first.address]
        second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S)
        assert second.returncode == 2
        assert "cannot listen" in second.stderr and first.address in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        assert first.stop() == 0


async def test_no_thread_leaves_the_cores_of_the_process(storage: Server, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    storage.fill(SHAPE, KEYS)
    daemon = DaemonProcess(storage, tmp_path, cores=[core])
    async with client_of(daemon) as client:
        await client.register(SHAPE, len(KEYS))
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        allowed = cores_of_threads(daemon.process.pid)
        assert len(allowed) > 5, "each stage must have its own threads"
        assert allowed == [{core}] * len(allowed)
        assert daemon.stop() == 0


def test_stages_divide_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    stages = DataPlaneConfig(cores=list(range(16, 32))).stage_cores()
    assert set(stages["net"]) == {16, 17}
    assert stages["decompress"] == list(range(18, 32))
    assert all(core in range(16, 32) for cores in stages.values() for core in cores)
    with pytest.raises(ConfigurationError, match="decompress_cores: core 3 is not"):
        DataPlaneConfig(cores=[16, 17], decompress_cores=[3]).stage_cores()


def test_on_few_cores_only_network_threads_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    stages = DataPlaneConfig(connections=3).stage_cores()
    assert stages["net"] == [4, 5, 4]
    assert stages["decompress"] == stages["store"] == [-1, -1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], ["allow_remote"]),
        (["--codec", "zip"], ["codec", "zip"]),
        (["--net-cores", "[9999]", "--connections", "1"], ["net_cores"]),
        (["--cores", "[4095]"], ["cores", "4095"]),
        (["--cores", "[]"], ["cores", "empty"]),
        (["--net-cores", "[-1]"], ["connections"]),
        (["--decompression-buffer-bytes", "17 parsecs"], ["decompression_buffer_bytes"]),
    ],
)
def test_an_unusable_configuration_names_the_key(flags: list[str], words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shadowserve_tools", "dpu", *flags], capture_output=True, text=True, timeout=WAIT_MAX_S
    )
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


def test_the_sample_configuration_holds_every_key_with_its_default(repository: Path) -> None:
    file = repository / "configs" / "emulated.yaml"
    assert DataPlaneConfig.load(file, environment={}) == DataPlaneConfig.load(environment={})
    assert set(yaml.safe_load(file.read_text())["dpu"]) == set(DataPlaneConfig.model_fields)


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[2]


async def test_memory_does_not_grow_with_prompts_or_batches(storage: Server, tmp_path: Path) -> None:
    shape = layout(vector_length=1024)  # 256 KiB a chunk, 8 slices
    prompt = keys_of(shape, 2048)  # as long as a prompt of 512K tokens in chunks of 256
    for key in prompt[:16]:
        storage.put(key, make_record(shape, key, 0))
    buffers = 3 * 16 * MIB
    daemon = DaemonProcess(
        storage, tmp_path, fused="false", decompression_buffer_bytes="16MiB", dequantization_buffer_bytes="8MiB",
        dma_source_buffer_bytes="8MiB", store_buffer_bytes="16MiB",
    )  # fmt: skip
    process = psutil.Process(daemon.process.pid)

    def resident() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared)

    async with client_of(daemon) as client:
        await client.register(shape, 16)

        async def serve(times: int) -> None:
            for _ in range(times):
                assert list((await client.lookup(prompt)).hits) == [16]
                answer = await client.fetch(prompt)
                assert (answer.chunks, answer.outcome) == (16, pb.OUTCOME_BATCH_FULL)

        await serve(5)
        settled = resident()
        await serve(60)
        grown = resident() - settled
        assert resident() < buffers + 200 * MIB
        assert grown < 8 * MIB, f"memory grew by {grown} bytes in 60 batches"
        answer = await client.stub.Statistics(pb.StatisticsRequest())
        assert answer.resident_bytes < buffers + 200 * MIB
        assert answer.delivered_bytes == 65 * 16 * shape.raw_bytes
        assert await asyncio.to_thread(daemon.stop) == 0
