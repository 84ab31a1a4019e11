"""Memory that is not shared, with the DOCA emulator: backends, checks, losses."""

import mmap
import tempfile
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from dataplane_support import Client, Segment, Server, keys_of, kv, layout, running

from host_control.delivery import address_of
from shadowserve import native
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 3)
SIZE = 4 * SHAPE.raw_bytes
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Exported:
    """Memory of this process that the DPU's side may use."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, SIZE)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self.export = native.Export(address_of(memoryview(self._mapping)), SIZE)

    def message(self, **changes: Any) -> pb.ExportedMemory:
        fields = {"address": self.export.address, "size": SIZE, "descriptor": self.export.descriptor}
        return pb.ExportedMemory(**(fields | changes))


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.export.close()


def registration(client: Client, **memory: Any) -> pb.RegisterMemoryRequest:
    """Return a registration of ``memory`` in place of the client's segment."""
    client.shape, client.segment = SHAPE, Segment(SIZE)
    client.segments.append(client.segment)
    request = client.register_request(shared_memory=None)
    return pb.RegisterMemoryRequest(**{field.name: value for field, value in request.ListFields()}, **memory)


async def refusal(client: Client, **memory: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.RegisterMemory(registration(client, **memory))
    assert caught.value.code() == INVALID, caught.value
    return caught.value.details() or ""


async def test_the_software_backend_registers_memory_that_it_can_write(storage: Server, exported: Exported) -> None:
    gpu = pb.CudaIpcMemory(handle=bytes(64), size=SIZE, device="0000:3b:00.0")
    async with running(storage, backend="software") as (_, client):
        assert "memory is exported_memory; " in await refusal(client, exported_memory=exported.message())
        assert "backend software, takes shared_memory" in await refusal(client, exported_memory=exported.message())
        assert "cuda_ipc needs a CUDA driver and fused: false" in await refusal(client, cuda_ipc=gpu)
        assert "memory is not given" in await refusal(client)
        await client.register(SHAPE, 1)


async def test_exported_memory_is_checked(storage: Server, exported: Exported) -> None:
    async with running(storage, backend="doca") as (daemon, client):
        for changes, words in (
            ({"descriptor": b""}, "descriptor has 0 bytes; it has 1 to 4096"),
            ({"descriptor": bytes(4097)}, "descriptor has 4097 bytes"),
            ({"descriptor": b"garbage"}, "the memory cannot be used: "),
            ({"descriptor": exported.export.descriptor[:-1] + b"\xff"}, "the memory cannot be used: "),
            ({"address": 0}, "at 0x0 are no valid range"),
            ({"address": 2**64 - SIZE + 1}, "are no valid range"),
            ({"size": SHAPE.raw_bytes - 1}, f"exported_memory.size is {SHAPE.raw_bytes - 1}; one chunk"),
        ):
            assert words in await refusal(client, exported_memory=exported.message(**changes))
        gpu = pb.CudaIpcMemory(handle=bytes(64), size=SIZE, device="0000:3b:00.0")
        assert "backend doca, takes shared_memory or exported_memory" in await refusal(client, cuda_ipc=gpu)
        assert daemon.metrics.gauges["registrations"][1]() == 0


async def test_exported_memory_is_stored_from_and_fetched_into(storage: Server, exported: Exported) -> None:
    chunks = [kv(SHAPE, index) for index in range(len(KEYS))]
    exported.memory[: 3 * SHAPE.raw_bytes] = np.frombuffer(b"".join(chunks), np.uint8)
    async with running(storage, backend="doca") as (_, client):
        request = registration(client, exported_memory=exported.message())
        client.memory_id = (await client.stub.RegisterMemory(request)).memory_id
        stored = await client.store(KEYS)
        assert (stored.outcome, stored.chunks) == (pb.OUTCOME_COMPLETE, 3), stored.detail
        exported.memory[:] = 0x77
        fetched = await client.fetch(KEYS, offset=SHAPE.raw_bytes, length=3 * SHAPE.raw_bytes)
        assert (fetched.outcome, fetched.chunks) == (pb.OUTCOME_COMPLETE, 3), fetched.detail
        assert exported.memory[SHAPE.raw_bytes :].tobytes() == b"".join(chunks)
        assert set(exported.memory[: SHAPE.raw_bytes].tobytes()) == {0x77}, "other bytes must not change"


@pytest.mark.parametrize("call", ["fetch", "store"])
async def test_inaccessible_memory_is_a_miss_and_is_removed(storage: Server, exported: Exported, call: str) -> None:
    async with running(storage, backend="doca") as (_, client):
        request = registration(client, exported_memory=exported.message())
        client.memory_id = (await client.stub.RegisterMemory(request)).memory_id
        assert (await client.store(KEYS[:2])).chunks == 2
        exported.export.close()
        answer = await (client.fetch(KEYS[:2]) if call == "fetch" else client.store(KEYS[2:]))
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_DEVICE, 0), answer.detail
        assert "accelerator" in answer.detail
        assert (await client.fetch(KEYS[:2])).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        await client.register(SHAPE, 2)
        assert (await client.fetch(KEYS[:2])).chunks == 2, "the daemon must continue"


@pytest.mark.parametrize("call", ["fetch", "store"])
async def test_truncated_exported_memory_is_a_miss(storage: Server, call: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        mapping = mmap.mmap(file.fileno(), SIZE)
        export = native.Export(address_of(memoryview(mapping)), SIZE)
        memory = pb.ExportedMemory(address=export.address, size=SIZE, descriptor=export.descriptor)
        async with running(storage, backend="doca") as (_, client):
            request = registration(client, exported_memory=memory)
            client.memory_id = (await client.stub.RegisterMemory(request)).memory_id
            assert (await client.store(KEYS[:2])).chunks == 2
            file.truncate(0)
            answer = await (client.fetch(KEYS[:2]) if call == "fetch" else client.store(KEYS[2:]))
            assert (answer.outcome, answer.chunks) == (pb.OUTCOME_DEVICE, 0), answer.detail
            await client.register(SHAPE, 2)
            assert (await client.fetch(KEYS[:2])).chunks == 2, "the daemon must continue"
        export.close()
