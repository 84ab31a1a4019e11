"""An accelerator of the DOCA emulator that never completes a job: the daemon reports it and ends within the bound.

Memory that may still be written to is never released: a call over it gets no answer except the daemon's end.
"""

import asyncio
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from dataplane_support import Client, DaemonProcess, Server, keys_of, layout, make_record
from grpc_health.v1 import health_pb2, health_pb2_grpc
from machine import NEVER_MS, NEVER_S, WAIT_MAX_S, free_port, frozen, until, wait_for

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)


def fill(server: Server) -> None:
    for index, key in enumerate(KEYS):
        server.put(key, make_record(SHAPE, key, index, codec="deflate"))


def page(port: int, name: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=WAIT_MAX_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def copying(port: int) -> bool:
    """Return True if the copying engine has received a job."""
    return re.search(r'^shadowserve_stage_items_total{stage="dma"} [1-9]', page(port, "metrics"), re.M) is not None


async def unanswered(call: "asyncio.Future[object]") -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
    return caught.value.details() or ""


@pytest.mark.parametrize("tasks", ["decompress:2", "dma:1+"])
async def test_a_hanging_device_ends_the_daemon_with_a_log_line(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    fill(storage)
    monkeypatch.setenv("DOCA_EMULATOR_HANG", tasks)
    daemon = DaemonProcess(storage, tmp_path, backend="doca", device_timeout_s=1, shutdown_timeout_s=2)
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        assert "accelerator hangs" in await unanswered(asyncio.ensure_future(client.fetch(KEYS)))
        assert await asyncio.to_thread(daemon.process.wait, WAIT_MAX_S) == 1
        log = daemon.log.read_text()
        assert log.count("hangs for 1 s: it is given up") == 1
        assert "stopped" in log and "Traceback" not in log
    finally:
        await client.close()
        daemon.close()


async def test_a_given_up_device_fails_the_health_checks(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage)
    monkeypatch.setenv("DOCA_EMULATOR_HANG", "dma:1+")
    port = free_port()
    daemon = DaemonProcess(
        storage, tmp_path, backend="doca", device_timeout_s=1, shutdown_timeout_s=NEVER_S, metrics_port=port
    )
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert "ok accelerator: doca" in page(port, "healthz")
        await unanswered(asyncio.ensure_future(client.fetch(KEYS)))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "failed accelerator: given up" in page(port, "healthz")  # the open watch delays the daemon's end
        watch.cancel()
        assert await asyncio.to_thread(daemon.process.wait, WAIT_MAX_S) == 1
    finally:
        await client.close()
        daemon.close()


async def test_memory_that_a_hung_device_may_write_is_not_released(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage)
    monkeypatch.setenv("DOCA_EMULATOR_HANG", "dma:1+")
    port = free_port()
    daemon = DaemonProcess(
        storage, tmp_path, backend="doca", device_timeout_s=1, shutdown_timeout_s=NEVER_S, metrics_port=port
    )
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        fetch = asyncio.ensure_future(client.fetch(KEYS))
        await until(lambda: copying(port))
        release = asyncio.ensure_future(client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id)))
        await unanswered(fetch)
        assert not release.done()
        assert client.segment.name in Path(f"/proc/{daemon.process.pid}/maps").read_text()
        daemon.process.kill()
        await unanswered(release)
    finally:
        await client.close()
        daemon.close()


async def test_sigterm_ends_a_daemon_whose_device_hangs(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage)
    monkeypatch.setenv("DOCA_EMULATOR_HANG", "dma:1+")
    port = free_port()
    daemon = DaemonProcess(
        storage, tmp_path, backend="doca", device_timeout_s=NEVER_S, shutdown_timeout_s=2, metrics_port=port
    )
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        fetch = asyncio.ensure_future(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(lambda: copying(port))
        assert "ok accelerator" in page(port, "healthz"), "the fault is not known yet, and the check does not wait"
        assert await asyncio.to_thread(daemon.stop) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await fetch
        assert "1 jobs do not end" in daemon.log.read_text()
    finally:
        await client.close()
        daemon.close()


async def test_a_suspended_machine_does_not_count_as_a_hanging_device(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(storage)
    monkeypatch.setenv("DOCA_EMULATOR_LATENCY_US", "500000")
    port = free_port()
    daemon = DaemonProcess(storage, tmp_path, backend="doca", device_timeout_s=2, metrics_port=port)
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        fetch = asyncio.ensure_future(client.fetch(KEYS))
        await until(lambda: copying(port))
        daemon.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: frozen(daemon.process.pid))
        await asyncio.sleep(3)
        daemon.process.send_signal(signal.SIGCONT)
        assert (await fetch).chunks == 4
        assert daemon.stop() == 0
    finally:
        await client.close()
        daemon.close()
