"""An accelerator of the DOCA emulator that never completes a job: the daemon reports it and ends within the bound.

Memory that may still be written to is never released: a call over it gets no answer except the daemon's end.
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from dataplane_support import Client, DaemonProcess, Server, client_of, keys_of, layout, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc
from machine import NEVER_MS, NEVER_S, WAIT_MAX_S, free_port, frozen, http_get, until, wait_for

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Daemon(DaemonProcess):
    """A daemon whose device misbehaves."""

    def __init__(self, storage: Server, folder: Path, **changes: Any) -> None:
        self.port = free_port()
        fields = {"backend": "doca", "device_timeout_s": 1, "metrics_port": self.port}
        super().__init__(storage, folder, **(fields | changes))

    def page(self, name: str) -> str:
        return http_get(self.port, f"/{name}")[1]

    def copying(self) -> bool:
        """Return True if the copying engine has received a job."""
        items = r'^shadowserve_stage_items_total{stage="dma"} [1-9]'
        return re.search(items, self.page("metrics"), re.M) is not None

    async def ends(self) -> bool:
        return await asyncio.to_thread(self.process.wait, WAIT_MAX_S) == 1


@contextlib.asynccontextmanager
async def served(storage: Server, folder: Path, **changes: Any) -> AsyncIterator[tuple[Daemon, Client]]:
    storage.fill(SHAPE, KEYS, codec="deflate")
    with contextlib.closing(Daemon(storage, folder, **changes)) as daemon:
        async with client_of(daemon) as client:
            yield daemon, await client.register(SHAPE, 4)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCA_EMULATOR_HANG", "dma:1+")


@pytest.mark.parametrize("tasks", ["decompress:2", "dma:1+"])
async def test_a_hanging_device_ends_the_daemon_with_a_log_line(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    monkeypatch.setenv("DOCA_EMULATOR_HANG", tasks)
    async with served(storage, tmp_path, shutdown_timeout_s=2) as (daemon, client):
        await refused(client.fetch(KEYS), UNAVAILABLE, "accelerator hangs")
        assert await daemon.ends()
        log = daemon.log.read_text()
        assert log.count("hangs for 1 s: it is given up") == 1
        assert "stopped" in log and "Traceback" not in log


@pytest.mark.usefixtures("hanging")
async def test_a_given_up_device_fails_the_health_checks(storage: Server, tmp_path: Path) -> None:
    async with served(storage, tmp_path) as (daemon, client):
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert "ok accelerator: doca" in daemon.page("healthz")
        await refused(client.fetch(KEYS), UNAVAILABLE)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "failed accelerator: given up" in daemon.page("healthz")  # the open watch delays the daemon's end
        watch.cancel()
        assert await daemon.ends()


@pytest.mark.usefixtures("hanging")
async def test_memory_that_a_hung_device_may_write_is_not_released(storage: Server, tmp_path: Path) -> None:
    async with served(storage, tmp_path) as (daemon, client):
        fetch = asyncio.ensure_future(client.fetch(KEYS))
        await until(daemon.copying)
        release = asyncio.ensure_future(client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id)))
        await refused(fetch, UNAVAILABLE)
        assert not release.done()
        assert client.segment.name in Path(f"/proc/{daemon.process.pid}/maps").read_text()
        daemon.process.kill()
        await refused(release, UNAVAILABLE)


@pytest.mark.usefixtures("hanging")
async def test_sigterm_ends_a_daemon_whose_device_hangs(storage: Server, tmp_path: Path) -> None:
    async with served(storage, tmp_path, device_timeout_s=NEVER_S, shutdown_timeout_s=2) as (daemon, client):
        fetch = asyncio.ensure_future(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(daemon.copying)
        assert "ok accelerator" in daemon.page("healthz"), "the fault is not known yet, and the check does not wait"
        assert await asyncio.to_thread(daemon.stop) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await fetch
        assert "1 jobs do not end" in daemon.log.read_text()


async def test_a_suspended_machine_does_not_count_as_a_hanging_device(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCA_EMULATOR_LATENCY_US", "500000")
    async with served(storage, tmp_path, device_timeout_s=2) as (daemon, client):
        fetch = asyncio.ensure_future(client.fetch(KEYS))
        await until(daemon.copying)
        daemon.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: frozen(daemon.process.pid))
        await asyncio.sleep(3)
        daemon.process.send_signal(signal.SIGCONT)
        assert (await fetch).chunks == 4
        assert daemon.stop() == 0
