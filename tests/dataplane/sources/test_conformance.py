"""The guarantees of every source (``dpu_dataplane/sources/source.py``), tested on each source."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_support import Cluster, cluster_config
from dataplane_support import Server, config, expected, keys_of, kv, layout, make_record, part_of, repeat
from machine import NEVER_MS, NEVER_S, WAIT_MAX_S, until, wait_for
from scripted_source import ScriptedSource

from dpu_dataplane.batches import Buffers, plan_fetch, plan_store
from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Found, Stored
from dpu_dataplane.sources.selection import nodes_max, source_of
from dpu_dataplane.sources.source import Delivered, Encoded, Resources, Source
from dpu_dataplane.sources.tiers.source import TieredSource
from dpu_dataplane.sources.tiers.tiers import address_of
from shadowserve import native
from shadowserve.errors import StorageRefusedError, StorageUnavailableError
from shadowserve.native import Result
from shadowserve.pieces import leading
from shadowserve.record import encode_header, header_length

SHAPE = layout(layers=8)
MIB = 1 << 20
BUFFERS = Buffers(decompression=4 * MIB, dequantization=None, dma_source=None, store=4 * MIB)
CODECS = frozenset(native.codec_implementations())


class Behind(ABC):
    """The storage of a source, controlled by a test."""

    verifies = False  # it stores only sound records
    is_pool = False  # it is a pool of this process
    publishes = False  # it takes publications

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def hold(self) -> None:
        """Stop answering."""

    @abstractmethod
    def release(self) -> None: ...

    @abstractmethod
    def asked(self) -> bool:
        """Return True if a request waits while answers are stopped."""

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def revive(self) -> None: ...


class BehindServers(Behind):
    """Servers with the same records, as if they read them from a bucket."""

    def __init__(self, kind: str, folder: Path, count: int) -> None:
        folders = [folder / str(number) for number in range(count)]
        for each in folders:
            each.mkdir()
        self.nodes: list[Any] = [Server(kind, each).start() for each in folders]
        self.verifies = self.publishes = kind == "storage_kv"

    def put(self, key: bytes, value: bytes) -> None:
        for server in self.nodes:
            server.put(key, value)

    def hold(self) -> None:
        for node in self.nodes:
            node.freeze()

    def release(self) -> None:
        for node in self.nodes:
            node.thaw()

    def asked(self) -> bool:
        return any(node.asked() for node in self.nodes)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def revive(self) -> None:
        for node in self.nodes:
            node.start()

    def configuration(self) -> DataPlaneConfig:
        if len(self.nodes) == 1:
            return config(self.nodes[0], layer_request_bytes_min=0)
        return config("127.0.0.1:1", storage_nodes=[server.address for server in self.nodes])


class BehindCluster(BehindServers):
    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder, replicas=0).start()
        self.cluster.never_fail_over()
        self.nodes = list(self.cluster.nodes)

    def put(self, key: bytes, value: bytes) -> None:
        self.cluster.put(key, value)

    def revive(self) -> None:
        super().revive()
        wait_for(self.cluster.is_whole)

    def configuration(self) -> DataPlaneConfig:
        return cluster_config(self.cluster)


class BehindScript(Behind):
    def __init__(self, source: ScriptedSource) -> None:
        self.source = source

    def put(self, key: bytes, value: bytes) -> None:
        self.source.records[key] = value

    def hold(self) -> None:
        self.source.free.clear()
        self.source.asked.clear()

    def release(self) -> None:
        self.source.free.set()

    def asked(self) -> bool:
        return bool(self.source.asked)

    def kill(self) -> None:
        self.source.away = StorageUnavailableError("a script is away")

    def revive(self) -> None:
        self.source.away = None


class BehindTiers(Behind):
    """A pool of memory and a file, without storage."""

    is_pool = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gate = threading.Lock()
        self.source: TieredSource

    def configuration(self) -> DataPlaneConfig:
        devices = [{"path": self._folder / "tier", "size": "64MiB"}]
        return config("", tiers={"memory_budget_bytes": "64MiB", "devices": devices})

    @property
    def pool(self) -> Any:
        return self.source._tiers.pool

    def driven_by(self, source: TieredSource) -> None:
        """Stop the pool's thread while the source is held."""
        self.source = source
        poll = self.pool.poll

        def gated() -> bool:
            with self._gate:
                return bool(poll())

        self.pool.poll = gated

    def put(self, key: bytes, value: bytes) -> None:
        with self.source._tiers.lock:
            self.pool.put(address_of(key), value, header_bytes=header_length(value) or 0)

    def hold(self) -> None:
        wait_for(lambda: not self.pool.busy)
        with self.source._tiers.lock:
            while self.pool._core.memory_cache.make_room():
                """The memory has no copies."""
        assert self._gate.acquire(timeout=NEVER_S), "the pool's thread must not be in the middle of a poll"

    def release(self) -> None:
        if self._gate.locked():
            self._gate.release()

    def asked(self) -> bool:
        return bool(self.pool._reader.under_way)

    def kill(self) -> None:
        pytest.skip("a pool of this process cannot be down")

    def revive(self) -> None: ...


def job_of(seconds: float = WAIT_MAX_S) -> Job:
    return Job("a test", "a job", seconds)


@dataclass
class Bench:
    """A started source, its storage, and the pipeline."""

    source: Source
    behind: Behind
    pipeline: native.Pipeline

    def put(self, keys: Sequence[bytes]) -> list[bytes]:
        records = [make_record(SHAPE, key, seed) for seed, key in enumerate(keys)]
        for key, record in zip(keys, records, strict=True):
            self.behind.put(key, record)
        return records

    def order(
        self,
        job: Job,
        chains: Sequence[Sequence[bytes]],
        found: Sequence[Found],
        targets: Sequence[np.ndarray],
        layerwise: bool = False,
    ) -> FetchPlan:
        """Plan all pieces of some groups' chunks; ``found`` has the answers of each group in order."""
        answers = iter(found)
        parts = [
            part_of(SHAPE, keys, dict(enumerate(islice(answers, len(keys)))), memory=target)
            for keys, target in zip(chains, targets, strict=True)
        ]
        plan = plan_fetch(parts, layerwise, BUFFERS, CODECS)
        assert not plan.full and not plan.ends
        return replace(plan, deadline_ns=job.deadline_ns)

    async def deliver(
        self, keys: Sequence[bytes], found: Sequence[Found] = (), layerwise: bool = False
    ) -> tuple[Delivered, list[bytes]]:
        """Deliver chunks with the given or current answers. Return the result and the delivered bytes."""
        target = np.zeros(len(keys) * SHAPE.raw_bytes, np.uint8)
        job = job_of()
        order = self.order(job, [keys], found or await self.source.find(keys), [target], layerwise)
        done = await self.source.deliver(job, order)
        return done, [bytes(chunk) for chunk in target.reshape(len(keys), -1)]

    async def store(self, key: bytes, seed: int, lasts_ms: int = 0) -> Result:
        """Encode a chunk and put it."""
        codec = native.Codec.KVRANS
        plan = plan_store([key], [0], SHAPE, codec, MIB)
        job = job_of()
        batch_ = native.Batch(
            pieces=plan.pieces,
            slices=plan.slices,
            groups=[native.Group.of(SHAPE, kv(SHAPE, seed))],
            deadline_ns=job.deadline_ns,
        )
        try:
            assert await asyncio.to_thread(self.pipeline.encode, batch_) is Result.OK
            head = encode_header(key, codec, SHAPE, plan.manifest_of(0))
            return (await self.source.put(job, key, Encoded(batch_, 0, head, lasts_ms)))[0]
        finally:
            batch_.release()


def end_of(done: Delivered, chunks: int = 0) -> tuple[int, Result]:
    """Return the number of leading delivered pieces, and the result of the next one.

    In layer order with ``chunks`` chunks, pieces are counted by chunks.
    """
    if chunks:
        there = (done.results == Result.OK).reshape(-1, chunks).all(axis=0)
        failed = {index % chunks: failure.result for index, failure in done.failures.items()}
        return leading(there), failed[leading(there)] if not there.all() else Result.OK
    count = leading(done.results == Result.OK)
    return count, done.failures[count].result if count < len(done.results) else Result.OK


PROCESSES: dict[str, Callable[[Path], BehindServers]] = {
    "our server": lambda folder: BehindServers("storage_kv", folder, 1),
    "redis": lambda folder: BehindServers("redis", folder, 1),
    "nodes": lambda folder: BehindServers("storage_kv", folder, 3),
    "cluster": BehindCluster,
}


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], BehindServers]]:
    """Return a function that starts storage once for all tests."""
    started: dict[str, BehindServers] = {}

    def start(kind: str) -> BehindServers:
        if kind not in started:
            started[kind] = PROCESSES[kind](tmp_path_factory.mktemp("storage"))
        return started[kind]

    yield start
    for storage in started.values():
        storage.kill()


@pytest.fixture(params=[*PROCESSES, "script", "tiers", "tiers above"])
async def bench(
    request: pytest.FixtureRequest, storages: Callable[[str], BehindServers], tmp_path: Path
) -> AsyncIterator[Bench]:
    behind: Any = None
    if request.param in PROCESSES:
        behind = storages(request.param)
    elif request.param == "tiers":
        behind = BehindTiers(tmp_path)
    configuration = behind.configuration() if behind is not None else config("127.0.0.1:1")
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(
            native.Pipeline(
                decompression_bytes=BUFFERS.decompression,
                store_bytes=BUFFERS.store,
                net_cores=[-1] * len(configuration.stage_cores()["net"]),
                nodes_max=nodes_max(configuration),
            )
        )
        fetching, storing = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        metrics = Metrics()
        resources = Resources(
            pipeline=pipeline,
            fetching=fetching,
            storing=storing,
            metrics=metrics,
            budget=InterferenceBudget(metrics, pipeline.unlimit),
        )
        source: Source
        if behind is None:
            source = scripted = ScriptedSource(resources)
            behind = BehindScript(scripted)
            if request.param == "tiers above":
                source = TieredSource(config("", tiers={"memory_budget_bytes": "64MiB"}), scripted, resources)
        else:
            source = source_of(configuration, resources)
        await source.start()
        await until(lambda: source.connected)
        if isinstance(behind, BehindTiers):
            assert isinstance(source, TieredSource)
            behind.driven_by(source)
        try:
            yield Bench(source, behind, pipeline)
        finally:
            await source.close()


async def test_stored_records_are_found_with_their_lengths(bench: Bench) -> None:
    keys = keys_of(SHAPE, 6, seed=1)
    records = bench.put(keys[::2])
    bench.behind.put(keys[1], b"no record")
    found = await bench.source.find(keys)
    for record, entry in zip(records, found[::2], strict=True):
        assert isinstance(entry, Stored)
        assert (entry.length, entry.header[: header_length(record)]) == (len(record), record[: header_length(record)])
    assert found[1] is None or (isinstance(found[1], Stored) and header_length(found[1].header) == 0)
    assert [found[3], found[5]] == [None, None]
    assert list(await bench.source.find([])) == []


async def test_headers_of_any_length_and_of_many_keys_are_found(bench: Bench) -> None:
    long = layout(layers=120)
    keys = keys_of(SHAPE, 3000, seed=2)
    record = make_record(long, keys[1700], 0)
    assert header_length(record) > 4096
    bench.behind.put(keys[1700], record)
    found = await bench.source.find(keys)
    assert [index for index, entry in enumerate(found) if entry is not None] == [1700]
    entry = found[1700]
    assert isinstance(entry, Stored) and entry.header[: header_length(record)] == record[: header_length(record)]


@pytest.mark.parametrize("layerwise", [False, True])
async def test_planned_pieces_are_delivered_exactly(bench: Bench, layerwise: bool) -> None:
    keys = keys_of(SHAPE, 5, seed=3)
    records = bench.put(keys)
    for _ in range(2):
        done, chunks = await bench.deliver(keys, layerwise=layerwise)
        assert (*end_of(done, 5 * layerwise), done.stop, done.failures) == (5, Result.OK, None, {})
        assert chunks == [expected(SHAPE, key, record) for key, record in zip(keys, records, strict=True)]
        assert done.received_bytes >= sum(len(record) - header_length(record) for record in records)


@pytest.mark.parametrize("layerwise", [False, True])
async def test_a_missing_chunk_affects_no_other_group(bench: Bench, layerwise: bool) -> None:
    chains = [keys_of(SHAPE, 4, seed=20), keys_of(SHAPE, 3, seed=21)]
    records = [bench.put(keys) for keys in chains]
    found = [each for keys in chains for each in await bench.source.find(keys)]
    await bench.source.delete(chains[0][2])
    targets = [np.zeros(len(keys) * SHAPE.raw_bytes, np.uint8) for keys in chains]
    job = job_of()
    order = bench.order(job, chains, found, targets, layerwise)
    done = await bench.source.deliver(job, order)
    groups, chunks = order.pieces["group"], order.pieces["chunk"]
    needed = (groups == 1) | (chunks < 2)
    assert (done.results[needed] == Result.OK).all()
    assert not (done.results[(groups == 0) & (chunks == 2)] == Result.OK).any()
    failed = {(int(groups[index]), int(chunks[index]), failure.result) for index, failure in done.failures.items()}
    assert failed == {(0, 2, Result.NOT_FOUND)}
    for keys, target, mine, count in zip(chains, targets, records, (2, 3), strict=True):
        for chunk in range(count):
            wanted = expected(SHAPE, keys[chunk], mine[chunk])
            assert bytes(target[chunk * SHAPE.raw_bytes : (chunk + 1) * SHAPE.raw_bytes]) == wanted


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("absent", [0, 2])
async def test_a_record_deleted_after_the_lookup_costs_no_earlier_chunk(
    bench: Bench, absent: int, layerwise: bool
) -> None:
    keys = keys_of(SHAPE, 5, seed=4)
    records = bench.put(keys)
    found = await bench.source.find(keys)
    await bench.source.delete(keys[absent])
    done, chunks = await bench.deliver(keys, found, layerwise)
    assert end_of(done, 5 * layerwise) == (absent, Result.NOT_FOUND)
    wanted = [expected(SHAPE, key, record) for key, record in zip(keys, records, strict=True)]
    assert chunks[:absent] == wanted[:absent]
    done, _ = await bench.deliver(keys[:absent] + keys[absent + 1 :], layerwise=layerwise)
    assert end_of(done, 4 * layerwise)[1] is Result.OK, "a failed order must not affect the next one"


async def test_damaged_records_are_not_delivered(bench: Bench) -> None:
    keys = keys_of(SHAPE, 3, seed=5)
    records = bench.put(keys)
    found = await bench.source.find(keys)
    await bench.source.delete(keys[1])
    damaged = records[1][:-9] + bytes([records[1][-9] ^ 4]) + records[1][-8:]
    wanted = Result.CHECKSUM
    if bench.behind.verifies:
        with pytest.raises(AssertionError, match="checksum is wrong"):
            bench.behind.put(keys[1], damaged)  # the storage node refuses such a record
        wanted = Result.NOT_FOUND
    else:
        bench.behind.put(keys[1], damaged)
    done, _ = await bench.deliver(keys, found)
    assert end_of(done) == (1, wanted)


async def test_stored_records_are_found_and_delivered(bench: Bench) -> None:
    [key] = keys_of(SHAPE, 1, seed=6)
    assert await bench.source.find([key]) == [None]
    assert await bench.store(key, 7) is Result.OK
    assert await bench.store(key, 7) is Result.OK, "a store of an existing record must succeed"
    done, chunks = await bench.deliver([key])
    assert (end_of(done), chunks) == ((1, Result.OK), [kv(SHAPE, 7)])
    for _ in range(2):
        await bench.source.delete(key)
    assert await bench.source.find([key]) == [None]


async def test_records_with_an_end_expire(bench: Bench) -> None:
    stays, lasts, ends = keys_of(SHAPE, 3, seed=10)
    for key, lasts_ms in ((stays, 0), (lasts, NEVER_MS), (ends, 300)):
        assert await bench.store(key, 7, lasts_ms) is Result.OK
    await repeat(lambda: bench.source.find([ends]), lambda found: found == [None])
    done, chunks = await bench.deliver([stays, lasts])
    assert (end_of(done), chunks) == ((2, Result.OK), [kv(SHAPE, 7)] * 2)


async def test_publications_are_pending_until_withdrawn_where_they_are_taken(bench: Bench) -> None:
    keys = keys_of(SHAPE, 3, seed=30)
    assert await bench.source.publish(keys[:2], 60_000) == bench.behind.publishes
    if not bench.behind.publishes:
        assert await bench.source.published(keys) is None
        return
    for withdrawn, pending in (([], [True, True, False]), (keys[:1], [False, True, False]), (keys, [False] * 3)):
        assert not withdrawn or await bench.source.publish(withdrawn, 0)
        flags = await bench.source.published(keys)
        assert flags.tolist() == pending


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("why", ["cancelled", "late"])
async def test_nothing_is_written_after_a_plan_that_ended_early(bench: Bench, why: str, layerwise: bool) -> None:
    keys = keys_of(SHAPE, 4, seed=9)
    bench.put(keys)
    found = await bench.source.find(keys)
    assert end_of((await bench.deliver(keys))[0])[1] is Result.OK  # so that it is connected
    target = np.zeros(len(keys) * SHAPE.raw_bytes, np.uint8)
    bench.behind.hold()
    try:
        job = job_of(0.5 if why == "late" else NEVER_S)
        order = bench.order(job, [keys], found, [target], layerwise)
        delivering = asyncio.create_task(bench.source.deliver(job, order))
        if why == "cancelled":
            await until(bench.behind.asked)
            job.cancel()
        with contextlib.suppress(Stop):
            done = await asyncio.wait_for(delivering, WAIT_MAX_S)
            assert done.stop is not None or end_of(done, 4 * layerwise)[1] in (Result.CANCELLED, Result.DEADLINE)
            assert not (done.results == Result.OK).any()
    finally:
        bench.behind.release()
    target[:] = 0xA5
    assert end_of((await bench.deliver(keys))[0])[1] is Result.OK, (
        "the source must continue despite unanswered requests"
    )
    assert (target == 0xA5).all()


async def test_an_unreachable_source_fails_at_once_and_reconnects(bench: Bench) -> None:
    keys = keys_of(SHAPE, 2, seed=10)
    [record, _] = bench.put(keys)
    found = await bench.source.find(keys)
    receives = not bench.behind.is_pool

    async def received(size: int) -> Result:
        return await bench.source.receive(job_of(), keys[0], 0, memoryview(bytearray(size)))

    assert not receives or await received(9) is Result.OK
    bench.behind.kill()
    try:
        with contextlib.suppress(StorageUnavailableError):
            await asyncio.wait_for(bench.source.find(keys), WAIT_MAX_S)  # else a cluster's map is read every 15 s
        await until(lambda: not bench.source.connected)
        with pytest.raises(StorageUnavailableError, match=r".+"):
            await asyncio.wait_for(bench.source.find(keys), WAIT_MAX_S)
        with pytest.raises(StorageUnavailableError):
            await asyncio.wait_for(received(len(record)), WAIT_MAX_S)
        with contextlib.suppress(StorageUnavailableError):
            done, _ = await asyncio.wait_for(bench.deliver(keys, found), WAIT_MAX_S)
            assert end_of(done) == (0, Result.DISCONNECTED)
    finally:
        bench.behind.revive()
    await until(lambda: bench.source.connected)
    bench.put(keys)
    assert end_of((await bench.deliver(keys))[0])[1] is Result.OK
    assert not receives or await received(9) is Result.OK


async def receive(bench: Bench, key: bytes, first: int, memory: bytearray, job: Job | None = None) -> Result:
    """Receive a part of a record. Skip the test if the source cannot return one."""
    if bench.behind.is_pool:
        with pytest.raises(StorageRefusedError):
            await bench.source.receive(job_of(), key, first, memoryview(memory))
        pytest.skip("a pool has no clients that receive parts")
    return await bench.source.receive(job or job_of(), key, first, memoryview(memory))


async def test_records_are_received_as_they_are_stored(bench: Bench) -> None:
    keys = keys_of(SHAPE, 4, seed=11)
    records = bench.put(keys[:3])
    for size in (1, 2, 700, 1023, 1024, 1025, len(records[0])):
        memory = bytearray(size)
        assert await receive(bench, keys[0], 0, memory) is Result.OK
        assert memory == records[0][:size]
    memories = [bytearray(len(record) - 100) for record in records]
    received = await asyncio.gather(
        *(receive(bench, key, 100, memory) for key, memory in zip(keys, memories, strict=False))
    )
    assert received == [Result.OK] * 3 and memories == [record[100:] for record in records]
    assert await receive(bench, keys[3], 0, bytearray(10)) is Result.NOT_FOUND
    assert await receive(bench, keys[0], 0, bytearray(len(records[0]) + 1)) is Result.NOT_FOUND
    assert await receive(bench, keys[0], 0, bytearray(10)) is Result.OK


@pytest.mark.parametrize("why", ["cancelled", "late"])
async def test_nothing_is_written_after_a_cancelled_receive(bench: Bench, why: str) -> None:
    [key] = keys_of(SHAPE, 1, seed=12)
    [record] = bench.put([key])
    memory = bytearray(len(record))
    assert await receive(bench, key, 0, memory) is Result.OK and memory == record
    memory[:] = bytes([0xA5]) * len(memory)
    bench.behind.hold()
    try:
        job = job_of(0.5 if why == "late" else NEVER_S)
        receiving = asyncio.create_task(receive(bench, key, 0, memory, job))
        if why == "cancelled":
            await until(bench.behind.asked)
            job.cancel()
        with pytest.raises(Stop):
            await asyncio.wait_for(receiving, WAIT_MAX_S)
    finally:
        bench.behind.release()
    assert await receive(bench, key, 0, bytearray(len(record))) is Result.OK, "it goes on"
    assert memory == bytes([0xA5]) * len(memory)
