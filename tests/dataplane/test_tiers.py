"""Local tiers: memory and a file, above a storage server or without one."""

import asyncio
import contextlib
import itertools
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dataplane_support import (
    BACKENDS,
    Client,
    DaemonProcess,
    Fetched,
    Server,
    client_of,
    config,
    keys_of,
    kv,
    layout,
    make_record,
    running,
    serving,
    until_ends_with,
)
from machine import NEVER_MS, until
from prometheus_client import generate_latest

from dpu_dataplane.server import Daemon
from dpu_dataplane.sources.found import HeaderCache
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of
from shadowserve.errors import ConfigurationError
from shadowserve.pool.volume.tickets import BusyError
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=2048)  # 512 KiB a chunk
KEYS = keys_of(SHAPE, 6)
RECORDS = [make_record(SHAPE, key, index) for index, key in enumerate(KEYS)]
CHUNKS = [kv(SHAPE, index) for index in range(len(KEYS))]


def tiers_of(folder: Path | None = None, size: str = "64MiB", memory: str = "32MiB") -> dict[str, Any]:
    """Return tiers of memory, and of a file if there is a folder for it."""
    devices = [] if folder is None else [{"path": str(folder / "tier"), "size": size, "access": "threads"}]
    return {"memory_budget_bytes": memory, "devices": devices, "scrub_bytes_per_s": 0}


def tiers_in(daemon: Daemon) -> Tiers:
    found: Tiers = daemon._source._tiers
    return found


def resident(daemon: Daemon, keys: Sequence[bytes]) -> list[bool]:
    """Return for each record whether the tiers have it in memory."""
    tiers = tiers_in(daemon)
    with tiers.lock:
        items = [tiers.pool.peek(address_of(key)) for key in keys]
        return [item is not None and item.value is not None for item in items]


async def cool(daemon: Daemon) -> None:
    """Move all records of the tiers to devices."""
    tiers = tiers_in(daemon)
    await until(lambda: not tiers.pool.busy)
    with tiers.lock:
        while tiers.pool._core.memory_cache.make_room():
            """The memory has no copies."""


def stalled(tiers: Tiers) -> asyncio.Event:
    """Stop the pool's thread until the returned event is set."""
    poll, free = tiers.pool.poll, asyncio.Event()
    tiers.pool.poll = lambda: free.is_set() and poll()
    return free


def assert_right(client: Client, answer: Fetched, count: int = 6) -> None:
    assert (answer.chunks, answer.outcome) == (count, pb.OUTCOME_COMPLETE), answer
    assert client.chunks(count) == CHUNKS[:count]
    client.segment.memory[:] = 0xA5


async def storage_away(client: Client, keys: Sequence[bytes]) -> None:
    """Wait until the daemon detects that storage is down. Its tiers have none of ``keys``."""
    await until_ends_with(pb.OUTCOME_STORAGE_UNAVAILABLE, lambda: client.lookup(list(keys), timeout_ms=1000))


async def store(
    client: Client, indexes: Sequence[int] = range(6), shape: Any = SHAPE, keys: Any = KEYS, **more: Any
) -> list[bool]:
    """Store chunks. Return for each chunk whether it is stored."""
    client.write([kv(shape, index) for index in indexes])
    return (await client.store([keys[index] for index in indexes], **more)).stored


@pytest.mark.parametrize("backend", BACKENDS)
async def test_local_tiers_serve_a_host_and_are_warm_after_a_restart(tmp_path: Path, backend: str) -> None:
    for is_first in (True, False):
        async with serving(SHAPE, 6, "", tiers=tiers_of(tmp_path), backend=backend) as (daemon, client):
            if is_first:
                assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT
                assert await store(client) == [True] * 6
            assert (await client.lookup(KEYS)).hits == [6]
            for _ in range(2):
                assert_right(client, await client.fetch(KEYS))
            assert daemon.metrics.tier_records["lost"] == 0


async def test_records_from_storage_are_kept_and_served_during_an_outage(mortal_storage: Server) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of()) as (daemon, client):
        assert_right(client, await client.fetch(KEYS))
        assert daemon.metrics.tier_records["kept"] == 6 and daemon.metrics.totals["tier_bytes"] == 0
        mortal_storage.kill()
        others = keys_of(SHAPE, 2, seed=9)
        await storage_away(client, others)
        assert (await client.lookup(KEYS + others)).present == [[True] * 6 + [False] * 2]
        assert_right(client, await client.fetch(KEYS))
        await client.fetches(KEYS[:4] + others, 4, pb.OUTCOME_STORAGE_UNAVAILABLE)
        assert daemon.metrics.tier_records["memory"] == 10


@pytest.mark.parametrize("order", [pb.ORDER_CHUNKS, pb.ORDER_LAYERS])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_one_batch_reads_each_chunk_from_the_nearest_tier(
    storage: Server, tmp_path: Path, backend: str, order: int
) -> None:
    storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, storage, tiers=tiers_of(tmp_path), backend=backend) as (daemon, client):
        for index in (0, 3):
            assert (await client.fetch([KEYS[index]])).chunks == 1
        await cool(daemon)
        for index in (1, 4):
            assert (await client.fetch([KEYS[index]])).chunks == 1
        metrics = daemon.metrics
        batches, before = metrics.totals["batches"], metrics.tier_records.copy()
        assert_right(client, await client.fetch(KEYS, order=order))
        assert metrics.totals["batches"] == batches + 1
        assert metrics.tier_records - before == {"memory": 2, "device": 2, "kept": 2}
        assert_right(client, await client.fetch(KEYS, order=order))
        assert metrics.totals["batches"] == batches + 2 and metrics.tier_records["device"] == before["device"] + 2


async def test_records_are_stored_in_the_tier_and_in_storage(mortal_storage: Server) -> None:
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of()) as (_, client):
        assert await store(client) == [True] * 6
        assert all(mortal_storage.has(key) for key in KEYS)
        mortal_storage.command(b"FLUSHALL")
        assert await store(client, [0, 1]) == [True] * 2, "storage has lost the chunk, so it must be stored again"
        assert [mortal_storage.has(key) for key in KEYS] == [True] * 2 + [False] * 4
        mortal_storage.kill()
        await storage_away(client, keys_of(SHAPE, 1, seed=9))
        assert_right(client, await client.fetch(KEYS))
        others = keys_of(SHAPE, 6, seed=8)
        assert await store(client, [0, 1], keys=others) == [True] * 2, "the tiers must serve without storage"
        assert (await client.fetch(others[:2])).chunks == 2


async def test_saved_records_with_an_end_stay_in_the_tier_if_it_has_room(storage: Server) -> None:
    for memory, near in (("32MiB", True), ("1MiB", False)):
        shape = SHAPE if near else layout(vector_length=8192)  # 2 MiB
        keys = keys_of(shape, 1)
        async with serving(shape, 1, storage, tiers=tiers_of(memory=memory)) as (_, client):
            saved = {"lasts_ms": NEVER_MS, "purpose": pb.PURPOSE_PREEMPTION}
            assert await store(client, [0], shape, keys, **saved) == [True]
            assert storage.has(keys[0]) != near
            assert (await client.fetch(keys)).outcome == pb.OUTCOME_COMPLETE
            assert client.chunk(0) == kv(shape, 0)


async def test_a_store_keeps_records_in_the_tiers_that_it_names(storage: Server) -> None:
    keys = keys_of(SHAPE, 3)
    async with serving(SHAPE, 1, storage, tiers=tiers_of()) as (daemon, client):
        for key, keep, (stored, cached) in zip(
            keys,
            (pb.KEEP_ALL, pb.KEEP_LOCAL, pb.KEEP_STORAGE),
            ((True, True), (False, True), (True, False)),
            strict=True,
        ):
            assert await store(client, [0], keys=[key], keep=keep) == [True]
            assert storage.has(key) is stored
            before = daemon.metrics.tier_records["memory"]
            assert (await client.fetch([key])).outcome == pb.OUTCOME_COMPLETE
            assert daemon.metrics.tier_records["memory"] - before == cached
    large = layout(vector_length=8192)  # 2 MiB
    async with serving(large, 1, storage, tiers=tiers_of(memory="1MiB")) as (_, client):
        client.fill(1)
        [key] = keys_of(large, 1, seed=9)
        answer = await client.store([key], keep=pb.KEEP_LOCAL)
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_STORAGE_REFUSED, 0) and "no room" in answer.detail
        assert not storage.has(key)


async def test_a_tier_smaller_than_a_prompt_serves_it_correctly(storage: Server, tmp_path: Path) -> None:
    """A memory for six chunks, of which devices may load two at a time, and a device for about ten chunks."""
    keys = keys_of(SHAPE, 24, seed=3)
    for first in range(0, 24, 6):
        storage.fill(SHAPE, keys[first : first + 6])
    async with serving(SHAPE, 24, storage, tiers=tiers_of(tmp_path, "8MiB", "4MiB")) as (daemon, client):
        for _ in range(4):
            await client.fetch_all(keys)
            assert client.chunks(24) == [CHUNKS[index % 6] for index in range(24)]
            client.segment.memory[:] = 0xA5
            await cool(daemon)
        assert daemon.metrics.tier_records["device"] > 0


def rot(daemon: Daemon, folder: Path, index: int) -> None:
    """Damage a record on the device."""
    tiers, key, file = tiers_in(daemon), KEYS[index], folder / "tier"
    before = RECORDS[index].index(key)  # a part that the pool's metadata contains, too
    with tiers.lock:
        item = tiers.pool.peek(address_of(key))
    begin = re.search(re.escape(RECORDS[index][:4]) + b".{%d}" % (before - 4) + re.escape(key), file.read_bytes(), re.S)
    with open(file, "r+b") as opened:
        opened.seek(begin.start() + item.length - 64)
        opened.write(bytes(64))


@pytest.mark.parametrize("alone", [True, False])
async def test_corrupt_records_on_a_device_are_a_miss_or_read_from_storage(
    storage: Server, tmp_path: Path, alone: bool
) -> None:
    storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, "" if alone else storage, tiers=tiers_of(tmp_path)) as (daemon, client):
        await (store(client) if alone else client.fetch(KEYS))
        await cool(daemon)
        rot(daemon, tmp_path, 2)
        answer = await client.fetch(KEYS)
        if alone:
            assert (answer.chunks, answer.outcome) == (2, pb.OUTCOME_ABSENT)
            assert await store(client) == [True] * 6
        else:
            assert_right(client, answer)
            assert daemon.metrics.tier_records["lost"] == 1
        assert_right(client, await client.fetch(KEYS))


@pytest.mark.parametrize("alone", [True, False])
async def test_corrupt_tier_memory_is_a_miss_or_read_from_storage(storage: Server, alone: bool) -> None:
    storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, "" if alone else storage, tiers=tiers_of()) as (daemon, client):
        await (store(client) if alone else client.fetch(KEYS))
        tiers = tiers_in(daemon)
        for index in (0, 3):
            with tiers.lock:
                item = tiers.pool.peek(address_of(KEYS[index]))
            assert isinstance(item.value, memoryview)
            item.value[-9] ^= 4
        answer = await client.fetch(KEYS)
        if alone:
            assert (answer.chunks, answer.outcome) == (0, pb.OUTCOME_CORRUPT)
            assert (await client.lookup(KEYS)).present == [[False] + [True] * 5], (
                "the record must be quarantined and absent"
            )
            assert await store(client) == [True] * 6
            answer = await client.fetches(KEYS, 3, pb.OUTCOME_CORRUPT)
        else:
            assert_right(client, answer)
            assert daemon.metrics.tier_records["lost"] == 2
            assert_right(client, await client.fetch(KEYS))


async def test_two_models_share_a_tier_without_mixing() -> None:
    shapes = [layout(vector_length=2048), layout("binned", vector_length=1024)]
    chains = [keys_of(shape, 4, seed=5) for shape in shapes]
    async with running("", tiers=tiers_of()) as (daemon, _):
        clients = [Client(daemon.address) for _ in shapes]
        for client, shape, chain in zip(clients, shapes, chains, strict=True):
            await client.register(shape, 4)
            assert await store(client, range(4), shape, chain) == [True] * 4
        for client, chain, other in zip(clients, chains, reversed(chains), strict=True):
            assert (await client.lookup(chain)).hits == [4]
            assert (await client.lookup(other)).hits == [0], "its keys in this namespace"
            assert (await client.fetch(chain)).chunks == 4
        assert [clients[0].chunk(index) for index in range(4)] == [kv(shapes[0], index) for index in range(4)]
        for client, other in zip(clients, reversed(chains), strict=True):
            await client.fetches(other, 0, pb.OUTCOME_MISMATCH)
        for client, chain in zip(clients, chains, strict=True):
            assert (await client.fetch(chain)).chunks == 4, "a wrong request must not affect other clients"
            await client.close()


@pytest.mark.parametrize("alone", [False, True], ids=["above", "alone"])
async def test_a_stalled_device_costs_its_read_timeout_or_the_deadline(
    storage: Server, tmp_path: Path, alone: bool
) -> None:
    storage.fill(SHAPE, KEYS)
    tiers_on = tiers_of(tmp_path)
    async with serving(SHAPE, 6, storage, tiers=tiers_on) as (daemon, client):
        assert_right(client, await client.fetch(KEYS))
    async with serving(SHAPE, 6, "" if alone else storage, tiers=tiers_on, command_timeout_s=0.5) as (daemon, client):
        assert (await client.lookup(KEYS)).present == [[True] * 6], "headers are cached from here on"
        await cool(daemon)
        tiers = tiers_in(daemon)
        free = stalled(tiers)
        await client.fetches(KEYS, 0, pb.OUTCOME_DEADLINE, timeout_ms=300)
        client.segment.memory[:] = 0xA5
        if alone:
            await client.fetches(KEYS, 0, pb.OUTCOME_ABSENT)
        else:
            assert_right(client, await client.fetch(KEYS))
            tiers._headers = HeaderCache(1 << 20)
            assert (await client.lookup(KEYS)).present == [[True] * 6], (
                "storage does not answer the request for headers"
            )
        free.set()
        await until(lambda: not tiers.pool.busy)
        assert (client.segment.memory == 0xA5).all(), "no bytes must arrive after the answer"
        if not alone:
            assert_right(client, await client.fetch(KEYS))


async def test_in_layer_order_the_first_layers_arrive_before_the_rest_is_read(tmp_path: Path) -> None:
    shape = layout(layers=4, vector_length=32768)
    keys, extra = keys_of(shape, 3), 64
    buffers = dict.fromkeys(["decompression_buffer_bytes", "store_buffer_bytes"], "64MiB")
    async with running("", tiers=tiers_of(tmp_path), **buffers) as (daemon, client):
        await client.register(shape, 3, extra)
        assert await store(client, range(3), shape, keys) == [True] * 3
        await cool(daemon)
        tiers, size = tiers_in(daemon), 3 * shape.raw_bytes
        client.segment.memory[:] = 0
        pool_read, later = tiers.pool.read, list[tuple[Any, ...]]()
        begun = 0

        def read(item: Any, start: int, end: int, done: Any, *, in_parts: bool = False) -> None:
            nonlocal begun
            assert in_parts, "a part of a record brings no other part"
            begun += 1
            if begun > len(keys):
                later.append((item, start, end, done))
            else:
                pool_read(item, start, end, done, in_parts=True)

        tiers.pool.read = read
        request = client.fetch_request(keys, length=size, progress=size, order=pb.ORDER_LAYERS)
        fetching = asyncio.ensure_future(client.stub.Fetch(request))
        await until(lambda: client.segment.memory[size] >= 1)
        assert not fetching.done() and later, "other parts are still to be read"
        with tiers.lock:
            tiers.pool.read = pool_read
            for given in later:
                pool_read(*given, in_parts=True)
        assert (await fetching).outcome == pb.OUTCOME_COMPLETE
        assert client.chunks(3) == [kv(shape, index) for index in range(3)]


async def test_records_that_devices_cannot_take_are_dropped_and_counted(storage: Server, tmp_path: Path) -> None:
    storage.fill(SHAPE, KEYS)
    bound = {"write_bytes_under_way_max": "1MiB"}
    async with serving(SHAPE, 6, storage, tiers=tiers_of(tmp_path) | bound) as (daemon, client):
        tiers = tiers_in(daemon)
        free = stalled(tiers)
        assert_right(client, await client.fetch(KEYS))
        records = daemon.metrics.tier_records
        assert records["kept"] + records["dropped"] == 6
        assert 0 < records["kept"] <= (1 << 20) // min(map(len, RECORDS))
        free.set()
        await until(lambda: not tiers.pool.busy)
        assert_right(client, await client.fetch(KEYS))
        assert records["memory"] > 0, "the tier must serve filled records"


async def test_records_in_use_by_a_batch_are_not_evicted(mortal_storage: Server, tmp_path: Path) -> None:
    """A batch holds chunks of memory while storage hangs; meanwhile the tier evicts all other chunks."""
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of(tmp_path, "8MiB", "4MiB")) as (daemon, client):
        for index in (0, 1, 3, 4):
            assert (await client.fetch([KEYS[index]])).chunks == 1
        assert (await client.lookup(KEYS)).hits == [6]  # so that headers are cached
        tiers = tiers_in(daemon)
        mortal_storage.freeze()
        try:
            fetching = asyncio.create_task(client.fetch(KEYS))
            await until(mortal_storage.asked)
            with tiers.lock:
                items = [tiers.pool.peek(address_of(KEYS[index])) for index in (0, 1, 3, 4)]
            for number in range(40):
                key = keys_of(SHAPE, 1, seed=100 + number)[0]
                with tiers.lock:
                    buffer = tiers.pool.allocate(len(RECORDS[0]), lambda: None)
                    if buffer is not None:
                        buffer[:] = bytes(len(RECORDS[0]))
                        with contextlib.suppress(BusyError):
                            tiers.pool.put(address_of(key), buffer, header_bytes=64)
                        tiers.pool.discard(buffer)
                await asyncio.sleep(0.01)
            assert all(item is not None for item in items)
        finally:
            mortal_storage.thaw()
        assert_right(client, await fetching)


async def test_a_device_with_foreign_data_is_refused_and_not_changed(tmp_path: Path) -> None:
    foreign = b"a user's documents" * 60_000
    (tmp_path / "tier").write_bytes(foreign)
    with pytest.raises(ConfigurationError, match="tier"):
        async with Daemon(config("", tiers=tiers_of(tmp_path))):
            raise AssertionError("it took it")
    assert (tmp_path / "tier").read_bytes() == foreign


async def test_a_tier_filled_on_another_machine_returns_stored_bytes_or_misses(tmp_path: Path) -> None:
    """The two hosts use the same model with different tokens."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, seed in ((there, 0), (here, 7)):
        folder.mkdir()
        async with serving(SHAPE, 6, "", tiers=tiers_of(folder)) as (_, client):
            assert await store(client, keys=keys_of(SHAPE, 6, seed)) == [True] * 6
    (there / "tier").replace(here / "tier")
    async with serving(SHAPE, 6, "", tiers=tiers_of(here)) as (_, client):
        assert (await client.fetch(keys_of(SHAPE, 6, seed=7))).outcome == pb.OUTCOME_ABSENT
        assert_right(client, await client.fetch(KEYS))


async def test_a_daemon_killed_during_a_fill_recovers_whole_records_only(storage: Server, tmp_path: Path) -> None:
    chance = random.Random(5)
    keys = keys_of(SHAPE, 24, seed=3)
    for first in range(0, 24, 6):
        storage.fill(SHAPE, keys[first : first + 6])
    request = pb.LookupRequest(chains=[pb.KeyChain(keys=keys, namespace=SHAPE.namespace)], timeout_ms=NEVER_MS)
    survived = 0
    for kill in itertools.count(1):  # at later and later moments, until a record has survived
        with contextlib.closing(
            DaemonProcess(storage, tmp_path, tiers=tiers_of(tmp_path), storage=storage.address)
        ) as process:
            async with client_of(process) as client:
                await client.register(SHAPE, 24)
                survived = (await client.stub.Lookup(request)).tiers[0].count(pb.TIER_DEVICE)
                if survived and kill > 3:
                    break
                fetching = asyncio.create_task(client.fetch(keys))
                await asyncio.sleep(chance.uniform(0.0, 0.05 * kill))
                process.process.send_signal(signal.SIGKILL)
                await asyncio.gather(fetching, return_exceptions=True)
    async with serving(SHAPE, 24, "", tiers=tiers_of(tmp_path)) as (_, client):
        present = [index for index, there in enumerate((await client.lookup(keys)).present[0]) if there]
        assert len(present) == survived
        for index in present:
            assert (await client.fetch([keys[index]])).chunks == 1
            assert client.chunk(0) == CHUNKS[index % 6]


async def test_metrics_of_a_data_plane_with_tiers_are_served(tmp_path: Path) -> None:
    async with serving(SHAPE, 6, "", tiers=tiers_of(tmp_path)) as (daemon, client):
        await store(client)
        text = generate_latest(daemon.metrics.registry).decode()
        found = {name: float(value) for name, value in re.findall(r"^shadowserve_(tier_\w+) (\S+)$", text, re.M)}
        assert found["tier_objects"] == 6 and found["tier_devices_gone"] == 0
        assert 0 < found["tier_used_bytes"] <= found["tier_capacity_bytes"]
