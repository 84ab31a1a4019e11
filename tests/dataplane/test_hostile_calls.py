"""Malicious callers: malformed messages, log flooding, calls and bytes without end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from dataplane_support import EXHAUSTED, Client, DaemonProcess, Server, keys_of, kv, layout, refused, running
from grpc_health.v1 import health_pb2
from machine import NEVER_MS, NEVER_S, until

from dpu_dataplane import admission
from shadowserve.proto import SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
SERVICE = pb.DESCRIPTOR.services_by_name["DataPlane"]
METHODS = [f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods]
PROBES = health_pb2.DESCRIPTOR.services_by_name["Health"]
HEALTH = [f"/{PROBES.full_name}/{method.name}" for method in PROBES.methods]
STREAMING = {f"/{SERVICE.full_name}/Trace", "/grpc.health.v1.Health/Watch"}
GARBAGE = b"\xff" * 64
TIMES = 150
"""Repetitions of an attack that must not fill the log."""


@contextlib.asynccontextmanager
async def attacked(storage: Server, directory: Path, **changes: Any) -> AsyncIterator[tuple[DaemonProcess, Client]]:
    """A daemon and its client. Afterwards, calls must still work, and the attack must not have filled the log."""
    storage.fill(SHAPE, KEYS)
    daemon = DaemonProcess(storage, directory, **changes)
    client = Client(daemon.address)
    try:
        await client.register(SHAPE, 4)
        yield daemon, client
        assert (await client.fetch(KEYS)).chunks == 4
        assert client.chunk(3) == kv(SHAPE, 3)
        assert daemon.process.poll() is None
        log = daemon.log.read_text()
        assert "Traceback" not in log
        assert len(log.splitlines()) < 60 and len(log) < 20_000, log[-3000:]
    finally:
        await client.close()
        daemon.close()


def raw(client: Client, method: str) -> Any:
    """Return a method that sends raw bytes."""
    make = client.channel.unary_stream if method in STREAMING else client.channel.unary_unary
    return make(method)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call, also of one with a stream of answers."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    return await call.code(), await call.details()


async def send_garbage(daemon: DaemonProcess, client: Client) -> None:
    metadata = client.stub._metadata
    for method in METHODS + HEALTH:
        for _ in range(TIMES):
            code, detail = await status_of(raw(client, method)(GARBAGE, metadata=metadata))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, code, detail)
            assert method in detail and "64 bytes" in detail
        assert daemon.log.read_text().count(method) == 1, "the log must have one line"


async def call_unknown_methods(_: DaemonProcess, client: Client) -> None:
    unknown = f"/{SERVICE.full_name}/Nothing"
    for _ in range(TIMES):
        assert (await status_of(raw(client, unknown)(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
    for _ in range(5):
        assert (await status_of(raw(client, METHODS[0])(bytes(9 << 20))))[0] is EXHAUSTED


async def come_as_other_hosts(daemon: DaemonProcess, _: Client) -> None:
    other = Client(daemon.address)
    for number in range(TIMES):
        name = f"x{number}\x1b[31m\n\u2028" + "y" * 200
        await refused(other.hello(host=f"other {number}", process=name), EXHAUSTED)
    await other.close()
    log = daemon.log.read_text()
    assert "refused" in log
    assert "\x1b" not in log and "\u2028" not in log, "the log must not contain a client's control characters"


async def register_again(_: DaemonProcess, client: Client) -> None:
    for _ in range(TIMES):
        await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id))
        await client.register(SHAPE, 4)
        client.segments.pop(0).close()


async def name_unknown_sessions(_: DaemonProcess, client: Client) -> None:
    for _ in range(TIMES):
        call = raw(client, METHODS[1])(b"", metadata=((SESSION_KEY, b"x" * 16),))
        assert (await status_of(call))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_repeated_attacks_do_not_fill_the_log_and_leave_no_state(storage: Server, tmp_path: Path) -> None:
    async with attacked(storage, tmp_path) as (daemon, client):
        for attack in (
            send_garbage, call_unknown_methods, come_as_other_hosts, register_again, name_unknown_sessions
        ):  # fmt: skip
            await attack(daemon, client)


async def test_the_bytes_of_calls_in_progress_are_bounded(mortal_storage: Server, tmp_path: Path) -> None:
    # Each call waits for storage that does not answer, and holds a message of two megabytes in the daemon.
    async with attacked(mortal_storage, tmp_path, command_timeout_s=NEVER_S, call_bytes_max="16MiB") as (_, client):
        mortal_storage.freeze()
        chain = pb.KeyChain(keys=[bytes(32)] * 60_000, namespace=SHAPE.namespace)
        request = pb.LookupRequest(chains=[chain], timeout_ms=NEVER_MS).SerializeToString()
        lookup = client.channel.unary_unary(f"/{SERVICE.full_name}/Lookup")
        calls = [lookup(request, metadata=client.stub._metadata) for _ in range(40)]
        await until(lambda: sum(call.done() for call in calls) >= 40 - (16 << 20) // len(request))
        for call in [call for call in calls if call.done()]:
            code, detail = await status_of(call)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "call_bytes_max" in detail, (code, detail)
        waiting = [call for call in calls if not call.done()]
        assert 0 < len(waiting) <= (16 << 20) // len(request)
        for call in waiting:
            call.cancel()
        mortal_storage.thaw()
        answer = await asyncio.wait_for(client.lookup(KEYS), NEVER_S)
        assert list(answer.hits) == [4], "and given back"


async def test_stalled_unauthenticated_calls_do_not_lock_hosts_out(storage: Server, tmp_path: Path) -> None:
    async with attacked(storage, tmp_path) as (daemon, client):
        other_host = Client(daemon.address)
        try:
            lookup = other_host.channel.stream_unary(METHODS[1])
            sessions: list[Any] = [(), ((SESSION_KEY, b"x" * 16),)]
            calls = [lookup(metadata=sessions[number % 2]) for number in range(400)]
            await until(lambda: sum(call.done() for call in calls) >= 400 - 128)
            waiting = [call for call in calls if not call.done()]
            assert 0 < len(waiting) <= 128, "unauthenticated clients must share few places"
            for call in calls:
                if call.done():
                    assert (await status_of(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert list((await client.lookup(KEYS)).hits) == [4], "the host must have its own places"
            for call in calls:
                call.cancel()
        finally:
            await other_host.close()


async def test_a_missing_message_releases_its_call(storage: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MESSAGE_S", 0.2)
    async with running(storage) as (_, client):
        for method in (METHODS[1], f"/{SERVICE.full_name}/Trace"):
            make = client.channel.stream_stream if method in STREAMING else client.channel.stream_unary
            calls = [make(method)() for _ in range(3)]
            for call in calls:
                code, detail = await call.code(), await call.details()
                assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "did not arrive" in detail
        assert (await client.lookup(KEYS, SHAPE.namespace)).outcome == pb.OUTCOME_COMPLETE
