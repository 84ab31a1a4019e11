"""Registered memory: one region of a worker serves all KV cache groups, within its host's share."""

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest
from dataplane_support import EXHAUSTED, INVALID, Client, Server, config, keys_of, layout, refused, running
from machine import WAIT_MAX_S

from dpu_dataplane.server import Daemon
from host_control.client import DataPlaneClient
from host_control.registered_memory import RegisteredMemory
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message

GROUPS = [layout(namespace=bytes([group]) * 32, layers=1 + group % 3) for group in range(6)]
"""Layouts of a model like Gemma 3: one group of full attention, and five of sliding windows."""
CHUNKS = 3
SIZE = 2 * CHUNKS * sum(shape.raw_bytes for shape in GROUPS)


@contextlib.contextmanager
def worker(address: str) -> Iterator[tuple[RegisteredMemory, RegisteredMemory]]:
    """Memory of one worker: target of fetches, and source of stores."""
    with contextlib.closing(DataPlaneClient(address, connect_timeout_s=WAIT_MAX_S)) as plane:
        with (
            contextlib.closing(RegisteredMemory(plane, GROUPS, SIZE, WAIT_MAX_S, progress=True)) as fetched,
            contextlib.closing(RegisteredMemory(plane, GROUPS, SIZE, WAIT_MAX_S)) as stored,
        ):
            yield fetched, stored


@pytest.mark.parametrize("hosts_max", [1, 8])
async def test_eight_workers_of_six_groups_fit_the_defaults(storage: Server, hosts_max: int) -> None:
    def register(address: str) -> int:
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(worker(address)) for _ in range(8)]
            return len({each.acquire(WAIT_MAX_S) for pair in workers for each in pair})

    async with Daemon(config(storage, hosts_max=hosts_max)) as daemon:
        assert await asyncio.to_thread(register, daemon.address) == 16


async def test_memory_of_ended_processes_is_removed_when_room_is_needed(storage: Server) -> None:
    """Symptom: after several restarts an engine was refused until the memory of its predecessors was idle."""
    async with running(storage, registrations_max=2) as (_, client):
        await client.register(GROUPS[0], 1)
        await client.register(GROUPS[0], 1)
        second = client.memory_id
        await refused(client.register(GROUPS[0], 1), EXHAUSTED)
        client.segments[0].die()
        await client.register(GROUPS[0], 1)
        keys = keys_of(GROUPS[0], 1)
        for registration in (client.memory_id, second):
            assert (await client.fetch(keys, memory_id=registration)).outcome == pb.OUTCOME_ABSENT
        for segment in client.segments:
            segment.unlink()


async def test_a_call_uses_the_layout_that_it_names(client: Client) -> None:
    small, large = GROUPS[0], GROUPS[2]
    client.own(small, 4 * large.raw_bytes)
    request = client.register_request(layouts=[layout_message(shape) for shape in (small, large)])
    answer = await client.stub.RegisterMemory(request)
    assert list(answer.chunk_bytes) == [small.raw_bytes, large.raw_bytes]
    client.memory_id = answer.memory_id
    keys = keys_of(large, 4)
    stored = await client.store(keys, layout=1)
    assert stored.outcome == pb.OUTCOME_COMPLETE and stored.raw_bytes == 4 * large.raw_bytes
    mismatch = await client.fetch(keys[:1], layout=0, length=small.raw_bytes)
    assert mismatch.outcome == pb.OUTCOME_MISMATCH, "records of another layout must not be delivered"


async def test_a_segment_truncated_during_registration_is_an_invalid_argument(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.own(GROUPS[0], 2 * GROUPS[0].raw_bytes)
    allocate = os.posix_fallocate

    def shrinking(file: int, begin: int, size: int) -> None:
        allocate(file, begin, size)
        os.truncate(client.segment.path, 0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", shrinking)
        await refused(client.stub.RegisterMemory(client.register_request()), INVALID, "shorter")
    await client.register(GROUPS[0], 1)
