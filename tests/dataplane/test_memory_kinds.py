"""Memory that is not shared, with the DOCA emulator: backends, checks, losses."""

import mmap
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dataplane_support import INVALID, Client, Server, keys_of, kvs, layout, refused, running

from host_control.delivery import address_of
from shadowserve import native
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 3)
SIZE = 4 * SHAPE.raw_bytes
GPU = pb.CudaIpcMemory(handle=bytes(64), size=SIZE, device="0000:3b:00.0")


class Exported:
    """Memory of this process that the DPU's side may use."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the fixture
        self.file.truncate(SIZE)
        self._mapping = mmap.mmap(self.file.fileno(), SIZE)
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
    made.file.close()


async def register(client: Client, **memory: Any) -> int:
    """Register ``memory`` in place of the client's segment."""
    client.own(SHAPE, SIZE)
    answer = await client.stub.RegisterMemory(client.register_request(shared_memory=None, **memory))
    client.memory_id = answer.memory_id
    return client.memory_id


async def test_backends_register_memory_that_they_can_write(storage: Server, exported: Exported) -> None:
    async with running(storage, backend="software") as (_, client):
        words = ("memory is exported_memory; ", "backend software, takes shared_memory")
        await refused(register(client, exported_memory=exported.message()), INVALID, *words)
        await refused(register(client, cuda_ipc=GPU), INVALID, "cuda_ipc needs a CUDA driver and fused: false")
        await refused(register(client), INVALID, "memory is not given")
        await client.register(SHAPE, 1)
    async with running(storage, backend="doca") as (daemon, client):
        for changes, text in (
            ({"descriptor": b""}, "descriptor has 0 bytes; it has 1 to 4096"),
            ({"descriptor": bytes(4097)}, "descriptor has 4097 bytes"),
            ({"descriptor": b"garbage"}, "the memory cannot be used: "),
            ({"descriptor": exported.export.descriptor[:-1] + b"\xff"}, "the memory cannot be used: "),
            ({"address": 0}, "at 0x0 are no valid range"),
            ({"address": 2**64 - SIZE + 1}, "are no valid range"),
            ({"size": SHAPE.raw_bytes - 1}, f"exported_memory.size is {SHAPE.raw_bytes - 1}; one chunk"),
        ):
            await refused(register(client, exported_memory=exported.message(**changes)), INVALID, text)
        await refused(register(client, cuda_ipc=GPU), INVALID, "backend doca, takes shared_memory or exported_memory")
        assert daemon.metrics.gauges["registrations"][1]() == 0


async def test_exported_memory_is_stored_from_and_fetched_into(storage: Server, exported: Exported) -> None:
    chunks = b"".join(kvs(SHAPE, 3))
    exported.memory[: len(chunks)] = np.frombuffer(chunks, np.uint8)
    async with running(storage, backend="doca") as (_, client):
        await register(client, exported_memory=exported.message())
        stored = await client.store(KEYS)
        assert (stored.outcome, stored.chunks) == (pb.OUTCOME_COMPLETE, 3), stored.detail
        exported.memory[:] = 0x77
        await client.fetches(KEYS, 3, offset=SHAPE.raw_bytes, length=3 * SHAPE.raw_bytes)
        assert exported.memory[SHAPE.raw_bytes :].tobytes() == chunks
        assert set(exported.memory[: SHAPE.raw_bytes].tobytes()) == {0x77}, "other bytes must not change"


@pytest.mark.parametrize("lost", ["closed", "truncated"])
@pytest.mark.parametrize("call", ["fetch", "store"])
async def test_inaccessible_memory_is_a_miss_and_is_removed(
    storage: Server, exported: Exported, call: str, lost: str
) -> None:
    async with running(storage, backend="doca") as (_, client):
        await register(client, exported_memory=exported.message())
        assert (await client.store(KEYS[:2])).chunks == 2
        if lost == "closed":
            exported.export.close()
        else:
            exported.file.truncate(0)
        answer = await (client.fetch(KEYS[:2]) if call == "fetch" else client.store(KEYS[2:]))
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_DEVICE, 0), answer.detail
        assert "accelerator" in answer.detail
        assert (await client.fetch(KEYS[:2])).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        await client.register(SHAPE, 2)
        assert (await client.fetch(KEYS[:2])).chunks == 2, "the daemon must continue"
