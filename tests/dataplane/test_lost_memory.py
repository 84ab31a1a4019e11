"""Shared memory that another process truncates: the daemon survives accesses beyond its end."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from dataplane_support import WAYS, Client, DaemonProcess, Server, keys_of, kv, kvs, layout, way_name
from machine import NEVER_S, until

from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ways = pytest.mark.parametrize("way", WAYS, ids=way_name)


class Shrinking:
    """A client that keeps a descriptor of its segment, to truncate it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._file = -1

    async def register(self, chunks: int) -> "Shrinking":
        from dataplane_support import Segment

        client = self.client
        await client.hello()
        client.shape, client.segment = SHAPE, Segment(chunks * SHAPE.raw_bytes)
        client.segments.append(client.segment)
        self._file = os.open(client.segment.path, os.O_RDWR)
        client.memory_id = (await client.stub.RegisterMemory(client.register_request())).memory_id
        return self

    def shrink(self, size: int = 0) -> None:
        os.truncate(self._file, size)

    def grow(self, size: int) -> None:
        os.truncate(self._file, size)

    def close(self) -> None:
        os.close(self._file)


@contextlib.asynccontextmanager
async def served(daemon: DaemonProcess) -> AsyncIterator[tuple[Shrinking, Client]]:
    """A client that truncates its memory, and another client of the same daemon, which survives."""
    bad, good = Client(daemon.address), Client(daemon.address)
    shrinking = await Shrinking(bad).register(4)
    try:
        await good.register(SHAPE, 4)
        yield shrinking, good
        assert daemon.process.poll() is None, "the daemon lives"
        assert (await good.fetch(KEYS)).chunks == 4
        assert [good.chunk(index) for index in range(4)] == kvs(SHAPE, 4)
        assert daemon.stop() == 0
        log = daemon.log.read_text()
        assert "Traceback" not in log
        assert log.count("is shorter now") == 1, "the log must have one line"
    finally:
        await bad.close()
        await good.close()
        shrinking.close()
        daemon.close()


def fill(server: Server) -> None:
    server.fill(SHAPE, KEYS)


async def refusal(call: "asyncio.Future[pb.FetchResponse] | asyncio.Future[pb.StoreResponse]") -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == INVALID, caught.value
    return caught.value.details() or ""


@ways
async def test_a_segment_truncated_during_a_fetch_is_removed_and_no_other(
    mortal_storage: Server, tmp_path: Path, way: dict[str, object]
) -> None:
    fill(mortal_storage)
    daemon = DaemonProcess(mortal_storage, tmp_path, command_timeout_s=NEVER_S, **way)
    async with served(daemon) as (shrinking, _):
        bad = shrinking.client
        await bad.lookup(KEYS)
        mortal_storage.freeze()
        fetch = asyncio.ensure_future(bad.fetch(KEYS))
        await until(mortal_storage.asked)
        shrinking.shrink()
        mortal_storage.thaw()
        assert "is shorter now; register it again" in await refusal(fetch)
        assert (await bad.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY


@ways
async def test_no_record_is_stored_from_a_segment_truncated_during_the_store(
    mortal_storage: Server, tmp_path: Path, way: dict[str, object]
) -> None:
    fill(mortal_storage)
    fresh = keys_of(SHAPE, 4, seed=1)
    daemon = DaemonProcess(mortal_storage, tmp_path, command_timeout_s=NEVER_S, **way)
    async with served(daemon) as (shrinking, _):
        bad = shrinking.client
        mortal_storage.freeze()
        store = asyncio.ensure_future(bad.store(fresh))
        await until(mortal_storage.asked)  # the lookup of existing keys: no chunk is encoded yet
        shrinking.shrink(SHAPE.raw_bytes // 2)
        mortal_storage.thaw()
        assert "is shorter now; register it again" in await refusal(store)
        assert not any(mortal_storage.has(key) for key in fresh)
        assert (await bad.store(fresh)).outcome == pb.OUTCOME_UNKNOWN_MEMORY


@ways
async def test_a_segment_truncated_and_extended_without_room_is_survived(
    mortal_storage: Server, tmp_path: Path, way: dict[str, object]
) -> None:
    # Memory behind the new end has no pages. The first access creates them with zeros.
    fill(mortal_storage)
    daemon = DaemonProcess(mortal_storage, tmp_path, command_timeout_s=NEVER_S, **way)
    async with served(daemon) as (shrinking, good):
        bad = shrinking.client
        shrinking.shrink()
        shrinking.grow(bad.segment.size)
        assert (await bad.fetch(KEYS)).chunks == 4
        assert bad.chunk(2) == kv(SHAPE, 2)
        shrinking.shrink(SHAPE.raw_bytes)
        assert "is shorter now" in await refusal(asyncio.ensure_future(bad.fetch(KEYS)))
        assert (await good.fetch(KEYS)).chunks == 4


async def test_a_segment_truncated_before_its_first_use_is_refused_and_removed(
    mortal_storage: Server, tmp_path: Path
) -> None:
    fill(mortal_storage)
    daemon = DaemonProcess(mortal_storage, tmp_path)
    async with served(daemon) as (shrinking, _):
        shrinking.shrink(SHAPE.raw_bytes * 2)
        assert "is shorter now" in await refusal(asyncio.ensure_future(shrinking.client.fetch(KEYS)))
        assert (await shrinking.client.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
