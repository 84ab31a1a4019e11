"""Page loads from devices of the local tiers directly into paged memory, and their failures."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_support import moved, report
from dataplane_support import (
    BACKEND,
    FAILED,
    INVALID,
    Client,
    Fetched,
    Segment,
    Server,
    keys_of,
    kv,
    kvs,
    layout,
    refused,
    repeat,
    running,
    serving,
)
from machine import WAIT_MAX_MS, until
from test_tiers import cool, resident, store, tiers_in, tiers_of

from dpu_dataplane.server import Daemon
from dpu_dataplane.sources.tiers.tiers import address_of
from shadowserve.pieces import leading_chunks, unpack
from shadowserve.pool.device_pool import DevicePool
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message

PAGE, CHUNK_BLOCKS, LAYERS, CHUNKS, BLOCKS = 8192, 4, 4, 6, 64
SHAPE = layout("passthrough", "uint8", layers=LAYERS, kinds=1, vector_length=PAGE, tokens=CHUNK_BLOCKS)
KEYS = keys_of(SHAPE, CHUNKS)
SPOILED = 0xA5
WORD = LAYERS * BLOCKS * PAGE  # offset of the progress word behind the pages


class Paged:
    """Paged memory of a client. Each block has the pages of all layers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._jobs = 0
        self.segment = Segment(WORD + 4096)
        self.memory = self.segment.memory
        self.memory[:WORD] = SPOILED
        self.blocks = np.random.default_rng(1).permutation(BLOCKS)[: CHUNKS * CHUNK_BLOCKS].tolist()
        self.memory_id = 0

    async def register(self, shape: Any = SHAPE, **changes: Any) -> None:
        """Register the memory, as it is or with changed places of its pages."""
        fields = {"first": [layer * PAGE for layer in range(LAYERS)], "stride": LAYERS * PAGE, "blocks": BLOCKS}
        request = pb.RegisterMemoryRequest(
            layouts=[layout_message(shape)],
            shared_memory=pb.SharedMemory(name=self.segment.name, size=self.segment.size),
            pages=pb.PagedMemory(**(fields | changes)),
        )
        self.memory_id = (await self._client.stub.RegisterMemory(request)).memory_id

    async def fetch(self, keys: list[bytes] = KEYS, **changes: Any) -> Fetched:
        """Load chunks into consecutive blocks."""
        self._jobs += 1
        fields = {
            "job_id": f"pages-{self._jobs}",
            "memory_id": self.memory_id,
            "keys": keys,
            "blocks": self.blocks[: len(keys) * CHUNK_BLOCKS],
            "timeout_ms": WAIT_MAX_MS,
            "progress": WORD,
        }
        if "progress" not in changes:
            self.memory[WORD:] = 0
        answer = await self._client.stub.FetchPages(pb.FetchPagesRequest(**(fields | changes)))
        delivered = unpack((answer.delivered or [b""])[0], LAYERS, len(keys))
        chunks = leading_chunks(delivered, np.ones_like(delivered))
        return Fetched(chunks, delivered, answer.outcome, answer.detail, answer.fetched_bytes, answer.delivered_bytes)

    @property
    def reported_layers(self) -> int:
        """Return the number of leading layers in place, from the word."""
        return int(self.memory[WORD : WORD + 4].view(np.uint32)[0])

    def chunk(self, index: int) -> bytes:
        """Return a chunk in the order of its pages: layer, block, byte."""
        pages = self.memory[:WORD].reshape(BLOCKS, LAYERS, PAGE)
        return pages[self.blocks[index * CHUNK_BLOCKS : (index + 1) * CHUNK_BLOCKS]].transpose(1, 0, 2).tobytes()

    def assert_right(self, answer: Fetched, count: int = CHUNKS) -> None:
        """Check that these chunks are in place and no other bytes were written. Then overwrite the memory."""
        assert answer.chunks == count, answer
        assert [self.chunk(index) for index in range(count)] == kvs(SHAPE, count)
        others = sorted(set(range(BLOCKS)) - set(self.blocks))
        assert (self.memory[:WORD].reshape(BLOCKS, -1)[others] == SPOILED).all(), "other blocks were written"
        self.memory[:WORD] = SPOILED

    def assert_untouched(self) -> None:
        assert (self.memory[:WORD] == SPOILED).all(), "something landed"


@contextlib.asynccontextmanager
async def paged_of(client: Client, shape: Any = SHAPE, **changes: Any) -> AsyncIterator[Paged]:
    """Registered paged memory."""
    paged = Paged(client)
    await paged.register(shape, **changes)
    try:
        yield paged
    finally:
        del paged.memory
        paged.segment.close()


@contextlib.asynccontextmanager
async def stored(folder: Path, size: str = "64MiB") -> AsyncIterator[tuple[Daemon, Client, Paged]]:
    """A data plane with tiers and no storage, with chunks of pages on a device, and registered paged memory."""
    async with serving(SHAPE, CHUNKS, "", tiers=tiers_of(folder, size)) as (daemon, client):
        await store_plain(client)
        await written(daemon)
        async with paged_of(client) as paged:
            yield daemon, client, paged


class Held:
    """A device that accepts reads of pages, and does not complete them until :meth:`release`."""

    def __init__(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tiers = tiers_in(daemon)
        device = self._tiers.pool._core.disks[0].volume.device
        self._submit, self._held = device.submit, list[Any]()
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(device, "submit", self._hold)

    def _hold(self, operations: Any) -> None:
        pages = [each for each in operations if each.pages is not None]
        self._held += pages
        if others := [each for each in operations if each.pages is None]:
            self._submit(others)
        if pages:
            self._loop.call_soon_threadsafe(self.begun.set)

    def release(self) -> None:
        with self._tiers.lock:
            self._submit(self._held)


async def store_plain(client: Client) -> None:
    await client.stores(KEYS, plain=True, parents=[b"", *KEYS[:-1]])


async def written(daemon: Daemon) -> None:
    """Wait until the device has the stored records."""
    await until(lambda: not tiers_in(daemon).pool.busy)


def rot(daemon: Daemon, folder: Path, index: int, layer: int) -> None:
    """Damage one page of a chunk on the device."""
    tiers = tiers_in(daemon)
    pool = tiers.pool
    assert isinstance(pool, DevicePool)
    with tiers.lock:
        item = pool.peek(address_of(KEYS[index]))
        lent = pool.lend_extents([KEYS[index]], [item.length])
        pool.return_extents(lent)
    body = item.length - SHAPE.raw_bytes
    with open(folder / "tier", "r+b") as file:
        file.seek(lent[0].extent * 4096 + 2048 + body + layer * CHUNK_BLOCKS * PAGE + PAGE + 17)
        file.write(b"\xff" * 8)


async def test_pages_are_loaded_exactly_and_layers_are_reported(tmp_path: Path) -> None:
    async with stored(tmp_path) as (daemon, client, paged):
        for count in (1, 4, CHUNKS):
            answer = await paged.fetch(KEYS[:count])
            assert answer.outcome == pb.OUTCOME_COMPLETE and paged.reported_layers == LAYERS
            assert answer.delivered_bytes == count * SHAPE.raw_bytes
            paged.assert_right(answer, count)
        assert daemon.metrics.totals["page_bytes"] == (1 + 4 + CHUNKS) * SHAPE.raw_bytes
        assert daemon.metrics.totals["page_requests"] == 3, "each retrieval must be one request of any length"
        assert (await client.fetch(KEYS)).chunks == CHUNKS, "they must be readable as normal records"
        assert client.chunks(CHUNKS) == kvs(SHAPE, CHUNKS)


async def test_pages_survive_a_restart(tmp_path: Path) -> None:
    async with stored(tmp_path):
        pass
    async with running("", tiers=tiers_of(tmp_path)) as (_, client), paged_of(client) as paged:
        assert (await client.hello(session=client.session)).page_devices
        paged.assert_right(await paged.fetch())


@pytest.mark.parametrize("tiers", [False, True])
async def test_chunks_of_pages_are_compressed_without_devices(storage: Server, tiers: bool) -> None:
    """Symptom: uncompressed chunks went to the storage server and back over the link."""
    async with running(storage, **({"tiers": tiers_of()} if tiers else {})) as (_, client):
        assert not (await client.hello()).page_devices
        await client.register(SHAPE, CHUNKS)
        client.segment.memory[: CHUNKS * SHAPE.raw_bytes] = 7
        answer = await client.store(KEYS, plain=True, parents=[b"", *KEYS[:-1]])
        ratio = 10 if BACKEND == "software" else 4  # Huffman coding alone needs an eighth of constant bytes
        assert answer.chunks == CHUNKS and answer.stored_bytes < answer.raw_bytes / ratio
        assert storage.has(KEYS[0])
        assert (await client.fetch(KEYS)).chunks == CHUNKS and client.chunk(1) == b"\x07" * SHAPE.raw_bytes


async def test_a_chain_longer_than_a_hold_of_the_lock_is_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpu_dataplane.sources.tiers.tiers.ENTRIES_PER_HOLD", 4)
    async with stored(tmp_path) as (daemon, _, paged):
        paged.assert_right(await paged.fetch())
        assert daemon.metrics.totals["page_requests"] == 1
        tiers_in(daemon).drop(KEYS[4])
        paged.assert_right(await paged.fetch(), 4)
        assert not any(disk._uses for disk in tiers_in(daemon).pool._core.disks)


async def test_pages_of_several_devices_are_one_prefix(tmp_path: Path) -> None:
    alike: dict[str, Any] = {"size": "64MiB", "access": "threads", "bandwidth": 1 << 30}
    devices = [{"path": str(tmp_path / name), **alike} for name in ("one", "two")]
    tiers = tiers_of() | {"devices": devices, "memory_bandwidth": 1}
    async with serving(SHAPE, CHUNKS, "", tiers=tiers) as (daemon, client), paged_of(client) as paged:
        await store_plain(client)
        await written(daemon)
        answer = await paged.fetch()
        assert daemon.metrics.totals["page_requests"] == 2, "chunks alternate between the devices; one request each"
        assert paged.reported_layers == LAYERS
        paged.assert_right(answer)


async def test_a_corrupt_page_costs_its_chunk_and_the_later_ones(tmp_path: Path) -> None:
    async with stored(tmp_path) as (daemon, client, paged):
        rot(daemon, tmp_path, 2, layer=1)
        answer = await paged.fetch()
        assert (answer.chunks, answer.outcome) == (2, pb.OUTCOME_CORRUPT)
        assert not answer.delivered[1, 2] and answer.delivered.sum() == LAYERS * CHUNKS - 1
        assert paged.reported_layers == 1, "the second layer must not be in place"
        assert [paged.chunk(index) for index in (0, 1)] == [kv(SHAPE, index) for index in (0, 1)]
        await store_plain(client)
        await written(daemon)
        assert (await client.fetch(KEYS)).outcome in (pb.OUTCOME_COMPLETE, pb.OUTCOME_ABSENT)


async def test_records_without_pages_are_absent_and_nothing_is_written(tmp_path: Path) -> None:
    async with stored(tmp_path) as (_, client, paged):
        assert (await paged.fetch(keys_of(SHAPE, CHUNKS, seed=3))).outcome == pb.OUTCOME_ABSENT
        other = layout("passthrough", "uint8", layers=LAYERS, kinds=1, vector_length=PAGE, tokens=CHUNK_BLOCKS)
        coded = keys_of(other, CHUNKS, seed=4)
        assert await store(client, range(CHUNKS), SHAPE, coded) == [True] * CHUNKS
        await asyncio.sleep(0)
        assert (await paged.fetch(coded)).outcome == pb.OUTCOME_ABSENT, "these are compressed"
        paged.assert_untouched()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("layers", "blocks", "page"), [(LAYERS, 2, PAGE // 2), (2 * LAYERS, 1, PAGE // 2)])
async def test_pages_of_another_layout_are_a_miss_and_not_written(
    tmp_path: Path, layers: int, blocks: int, page: int, before: bool
) -> None:
    """Symptom: the read plan was cached by the key alone; with more layers it read beyond the end of the checksums."""
    async with stored(tmp_path) as (_, client, paged):
        if before:
            paged.assert_right(await paged.fetch())
        shape = layout("passthrough", "uint8", layers=layers, kinds=1, vector_length=page, tokens=blocks * CHUNK_BLOCKS)
        stride = layers * page
        places = {"first": [layer * page for layer in range(layers)], "stride": stride, "blocks": WORD // stride}
        async with paged_of(client, shape, **places) as wrong:
            fields = {"memory_id": wrong.memory_id, "keys": KEYS, "blocks": range(CHUNKS * blocks * CHUNK_BLOCKS)}
            request = pb.FetchPagesRequest(job_id="wrong", timeout_ms=WAIT_MAX_MS, **fields)
            answer = await client.stub.FetchPages(request)
            assert answer.outcome == pb.OUTCOME_ABSENT and not answer.delivered_bytes, answer
            wrong.assert_untouched()
        paged.assert_right(await paged.fetch())


@pytest.mark.parametrize("way", ["cancel", "deadline", "gone"])
async def test_nothing_is_written_to_pages_after_a_cancelled_load(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer follows the reads in progress, and no bytes are written after it."""
    async with stored(tmp_path) as (daemon, client, paged):
        device = Held(daemon, monkeypatch)
        timeout = 300 if way == "deadline" else WAIT_MAX_MS
        call = asyncio.ensure_future(paged.fetch(timeout_ms=timeout))
        await device.begun.wait()
        if way == "cancel":
            assert (await client.stub.Cancel(pb.CancelRequest(job_id="pages-1"))).found
        elif way == "gone":
            call.cancel()
        done, _ = await asyncio.wait({call}, timeout=0.6)
        assert bool(done) == (way == "gone"), "an answer would promise that no more bytes arrive"
        await refused(paged.fetch(), FAILED)  # the memory is still in use
        monkeypatch.undo()
        device.release()
        if way != "gone":
            answer = await call
            outcome = pb.OUTCOME_CANCELLED if way == "cancel" else pb.OUTCOME_DEADLINE
            assert (answer.chunks, answer.outcome) == (0, outcome)
        paged.assert_untouched()
        paged.assert_right(await repeat(paged.fetch, passing=FAILED))  # the memory is still in use


async def test_a_failed_device_is_a_miss(tmp_path: Path) -> None:
    async with stored(tmp_path) as (daemon, _, paged):
        with open(tmp_path / "tier", "r+b") as file:
            file.truncate(1 << 20)
        answer = await paged.fetch()
        assert answer.chunks < CHUNKS and answer.outcome == pb.OUTCOME_ABSENT
        await written(daemon)


async def test_a_client_that_truncates_its_paged_memory_affects_no_other_client(tmp_path: Path) -> None:
    async with stored(tmp_path) as (daemon, client, paged):
        os.truncate(paged.segment.path, 4096)
        await refused(paged.fetch(progress=None), INVALID)
        async with paged_of(client) as other:
            other.assert_right(await other.fetch())
        assert not any(disk.errors for disk in tiers_in(daemon).pool._core.disks)
        os.truncate(paged.segment.path, paged.segment.size)


async def test_records_are_not_overwritten_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is evicted during its read, on a device that is filled again, is still read correctly."""
    async with stored(tmp_path, "8MiB") as (daemon, client, paged):
        tiers, device = tiers_in(daemon), Held(daemon, monkeypatch)
        call = asyncio.ensure_future(paged.fetch())
        await device.begun.wait()
        for key in KEYS:
            tiers.drop(key)
        client.segment.memory[:] = 7
        for seed in range(20, 32):  # more records than fit on the device
            await client.store(keys_of(SHAPE, CHUNKS, seed=seed), plain=True)
        await until(lambda: not len(tiers.pool._writer))
        device.release()
        paged.assert_right(await call)


async def test_records_of_pages_are_not_prefetched_into_memory(tmp_path: Path) -> None:
    """Symptom: pages of a waiting request were read twice, the first time into memory that the load did not use."""
    others = keys_of(SHAPE, 1, seed=7)
    async with serving(SHAPE, CHUNKS, "", tiers=tiers_of(tmp_path)) as (daemon, client):
        await store_plain(client)
        stored = await client.store(others)  # compressed records, which are fetched from memory
        await cool(daemon)
        chain = pb.KeyChain(keys=[*KEYS, *others], namespace=SHAPE.namespace)
        arrivals = [pb.Arrival(request=1, chains=[chain])]
        expected = {"queue": b"an engine", "number": 1, "whole": True, "order": [1], "lasts_ms": 60_000}
        await client.stub.Expect(pb.ExpectRequest(arrivals=arrivals, **expected))
        await until(lambda: daemon.metrics.prefetch_bytes["device"] > 0)
        async with paged_of(client) as paged:
            paged.assert_right(await paged.fetch())
        assert resident(daemon, [*KEYS, *others]) == [False] * CHUNKS + [True]
        assert daemon.metrics.prefetch_bytes["device"] == stored.stored_bytes


async def test_prefetches_pause_for_a_page_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom (F21): prefetches read from a device while a page load was waiting for it."""
    async with stored(tmp_path) as (daemon, client, paged):
        prefetching = daemon._source._prefetcher
        device = Held(daemon, monkeypatch)
        call = asyncio.ensure_future(paged.fetch())
        await device.begun.wait()
        assert prefetching._gate.fetches == 1
        device.release()
        paged.assert_right(await call)
        assert prefetching._gate.fetches == 0


async def test_page_loads_keep_to_the_rate(tmp_path: Path) -> None:
    async with stored(tmp_path) as (daemon, client, paged):
        before = moved(daemon)
        await report(client)
        requests = daemon.metrics.totals["page_requests"]
        paged.assert_right(await paged.fetch())
        assert moved(daemon)["page_load"] == CHUNKS * SHAPE.raw_bytes and "page_load" not in before
        assert daemon.metrics.totals["page_requests"] > requests
