"""The data plane with a real cluster: routing, migrating slots, failing nodes."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_support import PASSWORD, Cluster, ClusterNode, cluster_config, slot_of
from dataplane_support import (
    Client,
    keys_of,
    kvs,
    layout,
    listening,
    make_record,
    repeat,
    serving,
    started,
)
from machine import until, wait_for
from redis.crc import key_slot

from dpu_dataplane import catalog
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.server import Daemon
from dpu_dataplane.sources.outage import Outage
from dpu_dataplane.sources.resp.cluster import ServerCluster
from dpu_dataplane.sources.resp.cluster import slot_of as slot_of_name
from shadowserve.errors import StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.pieces import unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 24)
RECORDS = [make_record(SHAPE, key, seed) for seed, key in enumerate(KEYS)]
WANTED = kvs(SHAPE, len(KEYS))


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), options=("--cluster-replica-no-failover", "yes")) as cluster:
        cluster.never_fail_over()
        yield cluster


@pytest.fixture
def cluster(module_cluster: Cluster) -> Cluster:
    """The shared cluster with a record for each key, on all masters."""
    module_cluster.clear()
    module_cluster.bring_home(KEYS)
    return filled(module_cluster)


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start a cluster for this test alone, with a record for each key."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: filled(stack.enter_context(Cluster(tmp_path, **options)))


def filled(cluster: Cluster) -> Cluster:
    for key, record in zip(KEYS, RECORDS, strict=True):
        cluster.put(key, record)
    return cluster


def plane(cluster: Any, **changes: Any) -> contextlib.AbstractAsyncContextManager[tuple[Daemon, Client]]:
    """A data plane over a cluster, and a client with memory for all chunks."""
    return serving(SHAPE, len(KEYS), cluster_config(cluster, **changes))


def way_of(cluster: Cluster, key: bytes) -> tuple[int, ClusterNode, ClusterNode]:
    """Return a chunk's slot, the node that has it, and another one, to which it can move."""
    source = cluster.master_of(key)
    return slot_of(key), source, next(node for node in cluster.masters() if node is not source)


def move_away(cluster: Cluster, key: bytes) -> None:
    cluster.move(*way_of(cluster, key))


async def test_every_chunk_is_read_from_its_node(cluster: Cluster) -> None:
    assert len({cluster.master_of(key).port for key in KEYS}) == 3
    async with plane(cluster) as (daemon, client):
        assert (await client.lookup(KEYS)).hits == [len(KEYS)]
        assert await client.fetched(KEYS) == WANTED
        assert daemon.metrics.totals["storage_redirections"] == 0
        assert daemon.metrics.totals["batches"] == 1


async def test_chunks_are_stored_on_the_masters_that_take_them(cluster: Cluster) -> None:
    cluster.clear()
    async with plane(cluster) as (_, client):
        await client.stores(KEYS)
        for key in KEYS:
            assert cluster.master_of(key).redis.exists(storage_key(key))
        assert await client.fetched(KEYS) == WANTED


async def test_a_moved_slot_is_followed_and_remembered(cluster: Cluster) -> None:
    async with plane(cluster) as (daemon, client):
        await client.lookup(KEYS)  # headers are cached, so that the data connections get the redirection
        slot, source, target = way_of(cluster, KEYS[5])
        cluster.move(slot, source, target)
        await until(lambda: cluster.all_know(slot, target))
        for redirections in (1, 1):  # the second fetch knows the slot
            assert await client.fetched(KEYS) == WANTED
            assert daemon.metrics.totals["storage_redirections"] == redirections
        cluster.move(slot, target, source)
        assert (await client.store([KEYS[5]])).chunks == 1  # skipped or stored, in both cases at the right node
        assert (await client.fetch(KEYS)).chunks == len(KEYS)


async def test_local_hits_and_redirected_chunks_come_in_the_same_fetch(cluster: Cluster, tmp_path: Path) -> None:
    devices = [{"path": str(tmp_path / "tier"), "size": "16MiB"}]
    async with plane(cluster, tiers={"memory_budget_bytes": "8MiB", "devices": devices}) as (daemon, client):
        assert (await client.fetch(KEYS[::2])).chunks == len(KEYS) // 2
        await client.lookup(KEYS)
        move_away(cluster, KEYS[5])
        metrics = daemon.metrics
        for batches, near in ((1 + 2, 12), (1 + 2 + 1, 12 + 24)):  # the moved chunk needs one more batch
            assert await client.fetched(KEYS) == WANTED
            assert (metrics.totals["batches"], metrics.tier_records["memory"]) == (batches, near)
        assert metrics.totals["storage_redirections"] == 1 and metrics.tier_records["kept"] == len(KEYS)


async def test_chunks_of_a_migrating_slot_are_found_on_both_nodes(cluster: Cluster) -> None:
    async with plane(cluster) as (daemon, client):
        await client.lookup(KEYS)
        ways = [way_of(cluster, KEYS[index]) for index in (2, 9, 10)]
        for way in ways:
            cluster.begin_to_move(*way)
            assert cluster.move_keys(*way) == 1
        try:
            assert await client.fetched(KEYS) == WANTED
            assert daemon.metrics.totals["storage_redirections"] == len(ways)
            answer = await client.fetch(KEYS)  # ASK is valid once, so the map has not changed
            assert answer.chunks == len(KEYS)
            assert daemon.metrics.totals["storage_redirections"] == 2 * len(ways)
            assert (await client.lookup(KEYS)).hits == [len(KEYS)]  # requests for headers follow the same redirection
        finally:
            for slot, source, target in ways:
                cluster.end_move(slot, target)
                cluster.move(slot, target, source)


async def test_a_chunk_of_a_migrating_slot_is_stored_on_the_new_node(cluster: Cluster) -> None:
    key = KEYS[3]
    slot, source, target = way_of(cluster, key)
    source.redis.delete(storage_key(key))
    cluster.begin_to_move(slot, source, target)
    try:
        async with plane(cluster) as (_, client):
            await client.stores([key])
            assert not source.redis.execute_command("CLUSTER COUNTKEYSINSLOT", slot)
            assert target.redis.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 1
    finally:
        cluster.end_move(slot, target)
        cluster.move(slot, target, source)


async def test_circular_redirections_cost_one_chunk_and_the_later_ones(cluster: Cluster) -> None:
    slot, source, target = way_of(cluster, KEYS[4])
    async with plane(cluster) as (_, client):
        await client.lookup(KEYS)
        source.redis.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        source.redis.delete(storage_key(KEYS[4]))  # so it answers ASK, and the other node answers MOVED
        try:
            answer = await client.fetches(KEYS, 4, pb.OUTCOME_STORAGE_REFUSED)
            assert "redirected 5 times" in answer.detail
            assert client.chunks(4) == WANTED[:4]
        finally:
            source.redis.execute_command("CLUSTER SETSLOT", slot, "STABLE")
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT


async def test_headers_are_found_with_an_outdated_map(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "HEADER_CACHE_BYTES", 0)
    async with plane(cluster) as (_, client):
        assert (await client.lookup(KEYS)).hits == [len(KEYS)]

        async def of_a_node_that_has_not_heard(_: ServerCluster) -> None: ...

        monkeypatch.setattr(ServerCluster, "_read_map", of_a_node_that_has_not_heard)
        for key in KEYS[2:4]:
            await asyncio.to_thread(move_away, cluster, key)
        for _ in range(2):
            assert (await client.lookup(KEYS)).hits == [len(KEYS)]
            assert await client.fetched(KEYS) == WANTED


async def close_while_reading(cluster: Cluster, turns: int) -> None:
    client = ServerCluster(cluster_config(cluster), Metrics())
    await client.start()
    await until(lambda: client.connected)
    with contextlib.ExitStack() as frozen:
        for node in cluster.nodes:
            node.freeze()
            frozen.callback(node.thaw)
        reading = asyncio.create_task(client.recover(None))
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.close()
        await asyncio.wait([reading])


@pytest.mark.parametrize("turns", range(0, 40, 10))
async def test_no_connection_stays_open_when_the_client_closes_while_the_map_is_read(
    cluster: Cluster, turns: int
) -> None:
    await close_while_reading(cluster, turns)
    gc.collect()  # reports open resources as warnings, which are errors


async def test_fetches_are_whole_while_slots_move_under_them(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def move_about() -> int:
        moves = 0
        while not stop.is_set() or moves < 3:
            await asyncio.to_thread(move_away, cluster, KEYS[moves % len(KEYS)])
            moves += 1
        return moves

    monkeypatch.setattr(catalog, "HEADER_CACHE_BYTES", 0)
    async with plane(cluster) as (_, client):
        mover = asyncio.create_task(move_about())
        try:
            for _ in range(10):
                assert await client.fetched(KEYS) == WANTED
        finally:
            stop.set()
            await mover


async def test_replicas_take_their_share(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.redis.config_resetstat()
    async with plane(cluster, storage_cluster_replicas=True) as (_, client):
        for _ in range(4):
            assert await client.fetched(KEYS) == WANTED
    reads = {node.port: node.redis.info("commandstats").get("cmdstat_getrange", {"calls": 0}) for node in cluster.nodes}
    assert all(read["calls"] > 0 for read in reads.values()), reads


async def test_records_missing_on_a_replica_are_read_from_its_master(cluster: Cluster) -> None:
    replicas = cluster.replicas()
    for replica in replicas:
        replica.redis.config_set("masterauth", "wrong")
    for master in cluster.masters():
        master.redis.execute_command("CLIENT KILL TYPE replica")
    try:
        for replica in replicas:
            wait_for(lambda replica=replica: replica.redis.info("replication")["master_link_status"] == "down")
        fresh = keys_of(SHAPE, 6, seed=77)
        for seed, key in enumerate(fresh):
            assert cluster.master_of(key).redis.set(storage_key(key), make_record(SHAPE, key, seed))
        async with plane(cluster, storage_cluster_replicas=True) as (_, client):
            for _ in range(2):
                await client.fetches(fresh, 6)
    finally:
        for replica in replicas:
            replica.redis.config_set("masterauth", PASSWORD)
        wait_for(cluster.is_whole)


async def test_a_dead_node_costs_its_chunks_until_the_failover(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster()
    async with plane(cluster) as (daemon, client):
        await client.lookup(KEYS)
        first = next(
            index for index in range(1, len(KEYS)) if cluster.master_of(KEYS[index]) is not cluster.master_of(KEYS[0])
        )
        victim = cluster.master_of(KEYS[first])
        victim.kill()
        answer = await client.fetch(KEYS)
        if answer.outcome != pb.OUTCOME_COMPLETE:  # the failover to the replica takes seconds
            assert (answer.outcome, answer.chunks) == (pb.OUTCOME_STORAGE_UNAVAILABLE, first), answer.detail
            assert client.chunks(first) == WANTED[:first]
            assert str(victim.port) in answer.detail
            assert daemon._source.connected  # to the other nodes
        await repeat(lambda: client.fetch(KEYS), lambda answer: answer.chunks == len(KEYS))
        assert client.chunks(len(KEYS)) == WANTED
        more = keys_of(SHAPE, 12, seed=5)
        await client.stores(more)
        for node in cluster.nodes:
            node.kill()
        answer = await client.fetches(KEYS, 0, pb.OUTCOME_STORAGE_UNAVAILABLE)
        await until(lambda: not daemon._source.connected)


async def test_redirections_outside_the_cluster_are_not_followed() -> None:
    """Each key could name another node, and each would cost a connection."""
    visitors: list[Any] = []
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:%d\r\n"

    async def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitors.append(writer)
        writer.close()

    async def send_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                asked = data.count(b"STRLEN") + data.count(b"GETRANGE")
                writer.write(b"-ASK 0 %b\r\n" % elsewhere.encode() * asked)
                writer.write(slots % int(node.rpartition(":")[2]) * data.count(b"SLOTS"))
                writer.write(b"+OK\r\n" * (data.count(b"AUTH") + data.count(b"PING")))

    async with listening(meet) as elsewhere, listening(send_on) as node:
        async with started(ServerCluster(cluster_config([node]), Metrics())) as client:
            with pytest.raises(StorageUnavailableError, match="redirect in a circle"):
                await client.find(KEYS)
    assert not visitors


async def test_an_unreachable_node_affects_only_groups_with_chunks_on_it(
    start_cluster: Callable[..., Cluster], caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: a lookup was complete and named no reason while a node of the cluster was away."""
    cluster = start_cluster(replicas=0)
    cluster.never_fail_over()
    victim = cluster.master_of(KEYS[0])
    away, here = ([i for i, key in enumerate(KEYS) if (cluster.master_of(key) is victim) == is_] for is_ in (1, 0))
    async with plane(cluster) as (daemon, client):
        await client.lookup(KEYS)
        parts, begin = [], 0
        for chosen in (away, here):
            length = len(chosen) * SHAPE.raw_bytes
            parts.append(client.part([KEYS[index] for index in chosen], offset=begin, length=length))
            begin += length
        victim.kill()
        answer = await client.stub.Fetch(client.fetch_request([], parts=parts, order=pb.ORDER_LAYERS))
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE and str(victim.port) in answer.detail
        there = [unpack(data, SHAPE.layers, len(part.keys)) for data, part in zip(answer.delivered, parts, strict=True)]
        assert not there[0].any() and there[1].all()
        assert client.chunks(len(KEYS))[len(away) :] == [WANTED[index] for index in here]
        [flags] = (await client.lookup(KEYS)).present
        assert [index for index, stored in enumerate(flags) if stored] == here
        assert daemon.metrics.lookups == {"complete": 1, "storage_unavailable": 1}
        assert f"{len(away)} keys count as not stored: " in caplog.text and str(victim.port) in caplog.text


def test_slots_are_those_of_other_clients() -> None:
    names = [b"", b"key", b"{tag}key", b"a{tag}b{other}", b"a{}b", b"a{b", b"}{a}", bytes(range(256)), *KEYS]
    for name in names:
        assert slot_of_name(name) == key_slot(name), name


WRONG = [
    b"$2\r\nno\r\n",
    b"*0\r\n",
    b"*1\r\n*1\r\n:0\r\n",
    b"*1\r\n*3\r\n:5\r\n:4\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n",
    b"*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n",
    b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n:1\r\n:7000\r\n",
    b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$1\r\nh\r\n:70000\r\n",
    b"*1\r\n*3\r\n:0\r\n:1\r\n*2\r\n$2\r\n\xff\xfe\r\n:7000\r\n",
]


@pytest.mark.parametrize("answer", WRONG)
async def test_a_malformed_map_is_an_outage(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outage, "next_delay_s", lambda self: 0.01)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 12):
                writer.write(answer if b"SLOTS" in data else b"+OK\r\n" * data.count(b"*"))

    async with listening(serve) as address:
        async with started(ServerCluster(cluster_config([address]), Metrics())) as client:
            with pytest.raises(StorageUnavailableError, match="CLUSTER SLOTS"):
                await client.find(KEYS)
            assert not client.connected
