"""Several storage nodes over one bucket: placement of prefixes, and unreachable nodes."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dataplane_support import (
    TOKENS,
    Server,
    StartServer,
    client_of,
    expected,
    found,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    repeat,
    running,
    serving,
)
from faulty_s3 import BUCKET, Answer, Asked, FaultyS3, faulty_s3
from machine import NEVER_S, WAIT_MAX_MS, WAIT_MAX_S, until, wait_for
from scripted_node import ScriptedNode, addresses, choices, fleet, own_chain, scripted_nodes, spread_chain

from shadowserve.errors import StorageRefusedError
from shadowserve.keys import storage_key
from shadowserve.pieces import unpack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.resp import ReplyReader

SHAPE = layout()
CHUNKS = 6
MIB = 1 << 20


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of this machine may answer late: nothing is decided without them, and nothing is forgotten."""
    for limit in ("several._SECOND_S", "server._LOAD_S", "source._AVOID_S"):
        monkeypatch.setattr(f"dpu_dataplane.sources.resp.{limit}", WAIT_MAX_S)


@pytest.fixture
def bucket() -> Iterator[FaultyS3]:
    with faulty_s3() as server:
        yield server


@pytest.fixture
def nodes(bucket: FaultyS3, start_server: StartServer) -> list[Server]:
    """Two storage nodes over one bucket, which they list all the time."""
    s3 = {"bucket": BUCKET, "endpoint": bucket.endpoint, "gather_s": 0.05, "index_ttl_s": 0.1, "timeout_s": WAIT_MAX_S}
    credentials = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}
    return [start_server("--s3", json.dumps(s3), environment=credentials) for _ in range(2)]


def chains_of(nodes: list[Server]) -> list[list[bytes]]:
    """Return for each node, in order, the keys of a chain whose first choice is that node."""
    return [own_chain(nodes, node) for node in nodes]


def known(node: Server) -> int:
    """Return the number of the bucket's records that a node knows."""
    return int(node.ask("INFO", "s3")["records"])


async def test_a_prefix_is_on_one_node_and_prefixes_are_on_all_nodes(nodes: list[Server]) -> None:
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (_, client):
        for number, keys in enumerate(chains_of(nodes)):
            await client.stores(keys)
            assert all(nodes[number].has(key) for key in keys)
            assert_no_copy(nodes[1 - number], keys)
            assert (await client.lookup(keys)).hits == [CHUNKS]
            assert await client.fetched(keys) == kvs(SHAPE, CHUNKS)


async def test_in_layer_order_each_node_answers_one_request_for_its_chunks(nodes: list[Server]) -> None:
    shape, chunks, fewer = layout(layers=6), 24, 17
    chain = spread_chain(nodes, chunks, shape, fewer)
    records = [make_record(shape, key, index) for index, key in enumerate(chain)]
    for key, record in zip(chain, records, strict=True):
        next(node for node in nodes if node.address == choices(nodes, key)[0]).put(key, record)
    wanted = [expected(shape, key, record) for key, record in zip(chain, records, strict=True)]
    options = {"storage_nodes": addresses(nodes), "layer_request_bytes_min": 0}
    async with serving(shape, chunks, "127.0.0.1:1", **options) as (daemon, client):
        for lost in (chunks, fewer):
            client.segment.memory[:] = 0
            before = [node.calls() for node in nodes]
            if lost < chunks:
                for node in nodes:
                    node.command(b"DEL", storage_key(chain[lost]))
            answer = await client.fetch(chain, order=pb.ORDER_LAYERS)
            assert answer.chunks == lost and client.chunks(lost) == wanted[:lost], answer.detail
            for node, old in zip(nodes, before, strict=True):
                new = node.calls()
                assert new["kv.layers"] > old.get("kv.layers", 0) and "getrange" not in new, new
        assert daemon.metrics.slower_paths == {} and daemon.metrics.totals["layer_batches"] >= 2


async def test_keys_published_on_several_nodes_are_pending_for_all_data_planes(nodes: list[Server]) -> None:
    chain = spread_chain(nodes, 24)
    backwards = addresses(nodes)[::-1]
    async with (
        running("127.0.0.1:1", storage_nodes=addresses(nodes)) as (_, prefill),
        serving(SHAPE, 24, "127.0.0.1:1", storage_nodes=backwards) as (_, decode),
    ):
        request = pb.PublishRequest(keys=chain, lasts_ms=WAIT_MAX_MS, timeout_ms=WAIT_MAX_MS)
        assert (await prefill.stub.Publish(request)).reach == pb.REACH_ALL
        answer = await decode.look(chain, published=True)
        assert found(answer, 24).hits == [0] and unpack(answer.published[0], 24).all()
        await decode.stores(chain)
        answer = await decode.look(chain, published=True)
        assert found(answer, 24).hits == [24] and not unpack(answer.published[0], 24).any()


def assert_no_copy(node: Server, keys: list[bytes]) -> None:
    """Check that a node has no record of a chain itself; it may know records of the bucket."""
    assert not {storage_key(key).decode() for key in keys} & set(node.ask("KEYS", "*"))


async def test_a_dead_node_is_replaced_until_it_returns(nodes: list[Server]) -> None:
    chain, other = chains_of(nodes)
    nodes[0].fill(SHAPE, chain)
    wanted = kvs(SHAPE, CHUNKS)
    await until(lambda: known(nodes[1]) >= CHUNKS)
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (daemon, client):
        assert await client.fetched(chain) == wanted
        assert daemon.metrics.gauges["storage_nodes_away"][1]() == 0
        nodes[0].kill()
        # The headers are cached, and the connections are closed: the next node has the bucket's records.
        assert await client.fetched(chain) == wanted
        assert (await client.lookup(chain)).hits == [CHUNKS]
        await until(lambda: daemon.metrics.gauges["storage_nodes_away"][1]() == 1)
        late = own_chain(nodes, nodes[0], 1000)
        await client.stores(late)
        assert all(nodes[1].has(key) for key in late)
        nodes[0].start()
        await until(lambda: daemon.metrics.gauges["storage_nodes_away"][1]() == 0)
        wait_for(lambda: known(nodes[0]) >= 2 * CHUNKS)
        nodes[1].kill()
        assert await client.fetched(chain) == wanted, "the node must have its prefixes again, from the bucket"
        assert len(await client.fetched(late)) == CHUNKS
        assert (await client.lookup(other)).outcome == pb.OUTCOME_COMPLETE


async def test_unreachable_nodes_are_skipped_and_an_outage_of_all_is_reported(nodes: list[Server]) -> None:
    chain, other = chains_of(nodes)
    nodes[0].kill()
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (_, client):
        lookup = await client.lookup([*chain, *other])
        assert (lookup.outcome, lookup.hits) == (pb.OUTCOME_COMPLETE, [0])
        nodes[1].kill()
        lookup = await client.lookup(chain)
        assert lookup.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE and "is it running" in lookup.detail


async def test_a_lookup_reports_cold_chunks_without_waiting(nodes: list[Server], bucket: FaultyS3) -> None:
    chain, other = chains_of(nodes)
    records = nodes[1].fill(SHAPE, chain)  # not the first choice, which finds them in the bucket
    await until(lambda: known(nodes[0]) >= CHUNKS)
    gate = bucket.hold("get")
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (_, client):
        read = bucket.count("get")
        answer = await client.look(chain, other, published=True)
        assert found(answer, CHUNKS, CHUNKS).hits == [CHUNKS, 0]
        assert answer.cold_ms[0] > 0 and answer.cold_ms[1] == 0
        assert list(answer.tiers) == [bytes([pb.TIER_COLD] * CHUNKS), bytes(CHUNKS)]
        assert list(answer.stored_bytes) == [sum(map(len, records)), 0], "the node must know the lengths"
        assert bucket.count("get") == read, "nothing was read"
        gate.set()
        assert len(await client.fetched(chain)) == CHUNKS
        answer = await client.look(chain, other)
        assert found(answer, CHUNKS, CHUNKS).hits == [CHUNKS, 0] and list(answer.cold_ms) == [0, 0]
        assert list(answer.tiers) == [bytes([pb.TIER_STORAGE] * CHUNKS), bytes(CHUNKS)]


async def test_other_engines_have_their_turn_while_the_bucket_stalls(nodes: list[Server], bucket: FaultyS3) -> None:
    """Symptom: a cold fetch in layer order kept the only turn, up to its deadline, while the bucket was read."""
    large = layout("passthrough", "uint8", vector_length=MIB // 2 // TOKENS)  # layers of 1 MiB: read one by one
    chain, [other] = keys_of(large, 2), keys_of(large, 1, seed=1)
    records = nodes[0].fill(large, chain)
    nodes[1].put(other, make_record(large, other, 2))
    await until(lambda: known(nodes[1]) >= 2)
    begins = {(name, data.find(record)) for name, data in list(bucket.objects.items()) for record in records}
    gate = threading.Event()

    def stall(asked: Asked) -> Answer | None:
        offsets = [begin for name, begin in begins if name == asked.name and begin >= 0]
        late = asked.range is not None and all(asked.range[0] - begin not in range(MIB) for begin in offsets)
        return Answer(after=gate) if asked.operation == "get" and late else None

    bucket.fault = stall
    buffers = {"decompression_buffer_bytes": "64MiB", "store_buffer_bytes": "8MiB", "layer_request_bytes_min": 0}
    async with (
        serving(large, 4, nodes[1], **buffers) as (daemon, client),
        client_of(daemon) as theirs,
    ):
        await theirs.register(large, 1)
        client.segment.memory[:] = 0
        wanted = [expected(large, key, record) for key, record in zip(chain, records, strict=True)]
        fetching = [asyncio.create_task(client.fetch(chain, order=pb.ORDER_LAYERS, length=2 * large.raw_bytes))]
        await until(lambda: client.chunk(1)[:MIB] == wanted[1][:MIB])
        whole = {"offset": 2 * large.raw_bytes, "length": 2 * large.raw_bytes}  # its headers are cached by now
        fetching.append(asyncio.create_task(client.fetch(chain, **whole)))
        for _ in range(2):
            near = await theirs.fetch([other])
            assert near.chunks == 1 and not any(each.done() for each in fetching)
        gate.set()
        assert [(await each).chunks for each in fetching] == [2, 2]
        assert client.chunks(4) == [*wanted, *wanted] and theirs.chunk(0) == kv(large, 2)


async def test_a_lookup_with_prefetch_brings_cold_records_and_nothing_else_waits_for_them(
    nodes: list[Server], bucket: FaultyS3
) -> None:
    chain, other = chains_of(nodes)
    nodes[1].put(other[0], make_record(SHAPE, other[0], 1))
    nodes[1].fill(SHAPE, chain)
    await until(lambda: known(nodes[0]) > CHUNKS)
    gate = bucket.hold("get")
    async with serving(SHAPE, 2 * CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (_, client):
        assert set((await client.look(chain, prefetch=True)).tiers[0]) == {pb.TIER_COLD}
        fetching = asyncio.create_task(client.fetch(chain, length=CHUNKS * SHAPE.raw_bytes))
        await until(lambda: bucket.count("get") > 0)
        assert (await client.look([other[0]])).tiers[0] == bytes([pb.TIER_STORAGE]), "other lookups must continue"
        near = await client.fetch([other[0]], offset=CHUNKS * SHAPE.raw_bytes, length=SHAPE.raw_bytes)
        assert near.chunks == 1 and not fetching.done(), "the fetch gives up its turn while it waits"
        again = await client.store(chain[:1], offset=CHUNKS * SHAPE.raw_bytes)
        assert again.outcome == pb.OUTCOME_COMPLETE and again.stored_bytes > 0, (
            "the record is stored, so a read is not needed"
        )
        gate.set()
        assert (await fetching).chunks == CHUNKS
        answer = await client.look(chain, prefetch=True)
        assert answer.tiers[0] == bytes([pb.TIER_STORAGE] * CHUNKS) and not answer.cold_ms[0]


async def test_a_lookup_reports_the_tier_of_each_chunk(nodes: list[Server], tmp_path: Path) -> None:
    """One chunk in memory, one on a device, one in storage, one only in the bucket, and two nowhere."""
    chain, _ = chains_of(nodes)
    records = [make_record(SHAPE, key, seed) for seed, key in enumerate(chain)]
    nodes[1].fill(SHAPE, chain[:4])
    await until(lambda: known(nodes[0]) >= 4)
    devices = [{"path": str(tmp_path / "tier.pool"), "size": "64MiB", "bandwidth": "1GB"}]
    tiers = {"memory_budget_bytes": "32MiB", "devices": devices}
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(nodes), tiers=tiers) as (_, client):
        assert set((await client.look(chain)).tiers[0]) == {pb.TIER_COLD, pb.TIER_NONE}
        assert len(await client.fetched(chain[1:2])) == 1  # the tiers fill it, finally on the device
    async with running("127.0.0.1:1", storage_nodes=addresses(nodes), tiers=tiers) as (_, client):  # empty memory
        await client.register(SHAPE, CHUNKS)
        assert len(await client.fetched(chain[:1])) == 1
        nodes[0].command(b"GET", storage_key(chain[2]))  # the node then has it in memory
        answer = await client.look(chain)
        expected_tiers = [pb.TIER_MEMORY, pb.TIER_DEVICE, pb.TIER_STORAGE, pb.TIER_COLD, pb.TIER_NONE, pb.TIER_NONE]
        assert list(answer.tiers[0]) == expected_tiers
        assert answer.stored_bytes[0] == sum(map(len, records[:4])) and answer.cold_ms[0] > 0
        for node in nodes:
            node.kill()
        assert found(await client.look(chain), CHUNKS).hits == [2], "the tiers must serve without storage"


@pytest.mark.parametrize("kind", ["redis", "storage"])
async def test_storage_without_a_bucket_has_no_cold_records(kind: str, request: pytest.FixtureRequest) -> None:
    store: Server = request.getfixturevalue(kind)
    keys = keys_of(SHAPE, 2)
    store.put(keys[0], make_record(SHAPE, keys[0], 0))
    async with running(store) as (_, client):
        client.shape = SHAPE
        for _ in range(2):
            answer = await client.look(keys, prefetch=True)
            assert found(answer, 2).present == [[True, False]] and list(answer.cold_ms) == [0]


# ---- The choice between two nodes


async def test_reads_move_from_a_busy_node_to_the_second_choice_and_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a lookup is that of the node which is read from: here the other one has another encoding."""
    monkeypatch.setattr("dpu_dataplane.sources.resp.copies._WAITING_MAX", 0)
    caplog.set_level("INFO", "dpu_dataplane")
    async with fleet(3, 4) as (nodes, daemon, client):
        chain = own_chain(nodes, nodes[0], chunks=4)
        second = next(node for node in nodes if node.address == choices(nodes, chain[0])[1])
        wanted = kvs(SHAPE, 4)

        async def read_from(load: int | None) -> list[ScriptedNode]:
            """Look up and fetch while the first choice reports a load; return the nodes that were read from."""
            nodes[0].load = load
            for _ in range(2):  # the first one receives the load
                assert (await client.lookup(chain)).hits == [4]
            for node in nodes:
                node.asked.clear()
            assert await client.fetched(chain) == wanted
            assert not any(node.asked["KV.META"] for node in nodes), "the headers of the lookup are the right ones"
            return [node for node in nodes if node.asked["GETRANGE"]]

        nodes[0].fill(SHAPE, chain)
        assert await read_from(1_000_000) == [nodes[0]], "the second choice lacks the records"
        second.fill(SHAPE, chain, "lz4")
        assert await read_from(0) == [nodes[0]]
        assert await read_from(1_000_000) == [second]
        second.load = 900_000
        assert await read_from(1_000_000) == [nodes[0]], "the waits hardly differ"
        second.load = 0
        assert await read_from(1 << 62) == [second], "a load beyond all limits is a long one"
        assert await read_from(-(1 << 62)) == [nodes[0]]
        assert await read_from(None) == [nodes[0]], "a node that reports no load is not avoided"
        assert sum("is avoided while it is busy" in record.message for record in caplog.records) == 1
        assert daemon.metrics.storage_nodes_reads == {"first": 5 * 4, "second": 2 * 4}
        assert not daemon.metrics.integrity_failures
        second.records.clear()  # between the lookup and the fetch
        nodes[0].load = 1_000_000
        assert (await client.lookup(chain)).hits == [4] and (await client.fetch(chain)).chunks == 4


async def test_a_lookup_asks_first_and_second_choices_in_one_round_trip() -> None:
    """Symptom: a lookup of a busy node's records took two round trips, one after the other."""
    async with fleet(2, 4) as (nodes, _, client):
        chain = own_chain(nodes, nodes[0], chunks=4)
        for node in nodes:
            node.fill(SHAPE, chain)
        nodes[0].load = 1_000_000
        assert (await client.lookup(chain)).hits == [4]
        nodes[0].hold("KV.META")
        before = nodes[1].asked["KV.META"]
        looking = asyncio.ensure_future(client.lookup(chain))
        await until(lambda: nodes[0].waiting and nodes[1].asked["KV.META"] > before)
        nodes[0].free()
        assert (await looking).hits == [4]


async def test_records_of_several_sizes_take_a_lookup_of_idle_nodes_no_second_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: over four idle nodes the lookup of a long prompt took 1.3 times as long as over one."""
    for module in ("dpu_dataplane.sources.resp.several", "shadowserve.placement"):
        monkeypatch.setattr(f"{module}.WAIT_MARGIN_US", 0)
    async with fleet(2, 40) as (nodes, _, client):
        for seed in range(10):
            chain = keys_of(SHAPE, 40, seed)
            for node in nodes:
                for index, key in enumerate(chain):
                    node.fill(SHAPE, [key], "none" if index % 3 else "kvrans")
            for _ in range(2):  # sizes are known, and then the rate of the link
                assert (await client.lookup(chain)).hits == [40]
                assert (await client.fetch(chain)).chunks == 40
            for node in nodes:
                node.asked.clear()
            assert (await client.lookup(chain)).hits == [40]
            assert max(node.asked["KV.META"] for node in nodes) <= 2, "one as first, one as second choice"


async def test_hot_records_are_copied_to_the_second_choice_verified_and_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dpu_dataplane.sources.resp.copies._JITTER_S", 0)
    monkeypatch.setattr("dpu_dataplane.sources.resp.copies._PART_BYTES", 1000)
    async with fleet(2, 4) as (nodes, daemon, client):
        chain = own_chain(nodes, nodes[0], chunks=4)
        nodes[0].fill(SHAPE, chain)
        names = [storage_key(key) for key in chain]
        await client.lookup(chain)
        await client.lookup(chain)
        assert not nodes[0].asked["PTTL"], "an idle node's records are not copied"
        nodes[0].lifetimes[names[1]] = 1000
        body = nodes[0].records[names[2]]
        nodes[0].records[names[2]] = body[:-1] + bytes([body[-1] ^ 1])
        nodes[0].load = 1_000_000
        counts = daemon.metrics.storage_nodes_copies
        await repeat(lambda: client.lookup(chain), lambda _: counts.total() >= 4)
        assert {name for name in names if name in nodes[1].records} == {names[0], names[3]}
        assert all(nodes[1].records[name] == nodes[0].records[name] for name in (names[0], names[3]))
        assert counts["copied"] == 2 and counts["dropped"] > 0 and counts["failed"] > 0
        assert daemon.metrics.moved_bytes["copy"] > 0
        assert nodes[0].asked["GETRANGE"] >= 2 * (counts["copied"] + counts["failed"]), "each takes several turns"
        nodes[0].fill(SHAPE, chain)
        assert await client.fetched(chain) == kvs(SHAPE, 4)
        assert nodes[1].asked["GETRANGE"]
        await daemon._source.delete(chain[0])
        assert not any(names[0] in node.records for node in nodes), "a record is deleted wherever it may be"


async def test_a_record_that_receives_an_expiry_while_it_is_copied_gets_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: the copy never expired."""
    monkeypatch.setattr("dpu_dataplane.sources.resp.copies._JITTER_S", 0)
    async with fleet(2, 1) as (nodes, daemon, client):
        chain = own_chain(nodes, nodes[0], chunks=1)
        nodes[0].fill(SHAPE, chain)
        nodes[0].load = 1_000_000
        nodes[0].hold("GETRANGE")
        await repeat(lambda: client.lookup(chain), lambda _: nodes[0].waiting)
        nodes[0].lifetimes[storage_key(chain[0])] = 1000
        nodes[0].free()
        counts = daemon.metrics.storage_nodes_copies
        await until(counts.total)
        assert counts == {"dropped": 1} and not nodes[1].records


async def test_a_node_that_refuses_a_command_is_not_avoided() -> None:
    """Symptom: after a refusal, reads and stores went to the next node."""
    async with fleet(2, 4) as (nodes, daemon, client):
        chain = own_chain(nodes, nodes[0], chunks=4)
        nodes[0].fill(SHAPE, chain)
        nodes[0].refused = ["DEL", "KV.PUBLISH"]
        source = daemon._source
        for change in (source.delete(chain[0]), source.publish(chain, 1)):
            with pytest.raises(StorageRefusedError):
                await change
        assert (await client.lookup(chain)).hits == [4]
        assert not nodes[1].asked["KV.PUBLISH"]


@pytest.mark.parametrize("length", [-1, 1 << 62])
async def test_a_length_out_of_range_is_no_answer(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpu_dataplane.sources.resp.links.AnswerReader", ReplyReader)  # no fast path
    monkeypatch.setattr(ScriptedNode, "_meta", lambda *_: b"*2\r\n:%d\r\n$1\r\nx\r\n" % length)
    async with fleet(1, 1) as (nodes, _, client):
        answer = await client.lookup(keys_of(SHAPE, 1))
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE and "unknown format" in answer.detail


async def test_a_second_choice_that_does_not_answer_delays_no_lookup_and_no_answer_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: while one second choice was slow, all reads stayed on the busy first choice."""
    monkeypatch.setattr("dpu_dataplane.sources.resp.several._SECOND_S", 0.1)
    monkeypatch.setattr("dpu_dataplane.sources.resp.copies._WAITING_MAX", 0)
    async with fleet(3, 8, command_timeout_s=NEVER_S) as (nodes, daemon, client):
        chain = own_chain(nodes, nodes[0], chunks=8, seconds=2)
        for node in nodes:
            node.fill(SHAPE, chain)
        nodes[0].load = 1_000_000
        nodes[1].hold("KV.META")
        for _ in range(2):
            assert (await client.lookup(chain)).hits == [8]
            assert nodes[1].waiting

        async def read() -> int:
            assert (await client.lookup(chain)).hits == [8]
            assert (await client.fetch(chain)).chunks == 8
            return nodes[2].asked["GETRANGE"]

        await repeat(read, bool)
        assert not nodes[1].asked["GETRANGE"]
        await asyncio.wait_for(daemon._source.delete(chain[0]), WAIT_MAX_S)
        await asyncio.wait_for(daemon._source.delete(chain[4]), WAIT_MAX_S)
        assert not {storage_key(chain[0]), storage_key(chain[4])} & set(nodes[0].records)
        nodes[1].free()


@pytest.mark.parametrize("order", [pb.ORDER_CHUNKS, pb.ORDER_LAYERS])
async def test_a_node_that_dies_during_a_fetch_costs_its_chunks_nothing_but_time(order: Any) -> None:
    chunks = 24
    async with fleet(3, chunks) as (nodes, daemon, client):
        chain = spread_chain(nodes, chunks)
        for node in nodes:
            node.fill(SHAPE, chain)
        assert (await client.lookup(chain)).hits == [chunks]
        assert (await client.fetch(chain, order=order)).chunks == chunks
        assert all(node.asked["GETRANGE"] for node in nodes), "a fetch reads from all of its nodes"
        assert daemon.metrics.storage_nodes_reads == {"first": chunks}
        nodes[1].cuts_at = nodes[1].asked["GETRANGE"] + 2
        assert await client.fetched(chain, order=order) == kvs(SHAPE, chunks)
        assert daemon.metrics.storage_nodes_reads["away"] > 0


async def test_a_node_that_hangs_is_left_when_its_control_connection_is_lost() -> None:
    async with fleet(2, 4) as (nodes, _, client):
        chain = own_chain(nodes, nodes[0], chunks=4)
        for node in nodes:
            node.fill(SHAPE, chain)
        assert (await client.lookup(chain)).hits == [4]
        nodes[0].hold("GETRANGE")
        fetching = asyncio.create_task(client.fetched(chain))
        await until(lambda: nodes[0].waiting > 0)
        nodes[0].cut("KV.META")
        assert await fetching == kvs(SHAPE, 4)
        assert nodes[1].asked["GETRANGE"]
        nodes[0].free()


async def test_a_changed_list_of_nodes_moves_reads_without_misses() -> None:
    chunks = 32
    async with (
        scripted_nodes(4) as nodes,
        serving(SHAPE, chunks, "127.0.0.1:1", storage_nodes=addresses(nodes[:3])) as (daemon, client),
    ):
        chain = spread_chain(nodes, chunks)
        await client.stores(chain)
        source = daemon._source
        assert sum(len(node.records) for node in nodes[:3]) == chunks, "one copy of each"
        for refused in ({}, {nodes[0].address: 0.0}, {nodes[0].address: float("nan")}):
            await source.set_members(refused)
        assert daemon.metrics.totals["storage_nodes_refused"] == 3
        await source.set_members(dict.fromkeys(addresses(nodes), 1.0))
        for _ in range(2):
            assert (await client.lookup(chain)).hits == [chunks], "the old node has what the new one lacks"
            assert await client.fetched(chain) == kvs(SHAPE, chunks)
        assert daemon.metrics.storage_nodes_reads["second"] > 0 and not nodes[3].asked["GETRANGE"]
        client.fill(chunks)
        assert (await client.store(chain)).stored_bytes > 0, "the new node receives its share"
        assert (await client.lookup(chain)).hits == [chunks] and await client.fetched(chain) == kvs(SHAPE, chunks)
        assert nodes[3].asked["GETRANGE"]
        # A removed node answers what it was asked before.
        nodes[0].hold("KV.META")
        looking = asyncio.create_task(client.lookup(chain))
        await until(lambda: nodes[0].waiting > 0)
        removing = asyncio.create_task(source.set_members(dict.fromkeys(addresses(nodes[1:]), 1.0)))
        await until(lambda: nodes[0].address not in source.name)
        nodes[0].free()
        assert (await looking).hits == [chunks]
        await removing
        asked = nodes[0].asked.copy()
        await client.lookup(chain)
        assert nodes[0].asked == asked


async def test_what_was_stored_while_a_node_was_away_is_found_after_its_return(start_server: StartServer) -> None:
    stores = [start_server(), start_server()]
    chain = own_chain(stores, stores[0])
    stores[0].kill()
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=addresses(stores)) as (daemon, client):
        await client.stores(chain)
        stores[0].start()
        await until(lambda: daemon.metrics.gauges["storage_nodes_away"][1]() == 0)
        assert (await client.lookup(chain)).hits == [CHUNKS] and await client.fetched(chain) == kvs(SHAPE, CHUNKS)
        assert daemon.metrics.storage_nodes_reads == {"second": CHUNKS}


async def test_a_node_that_is_being_removed_is_closed_with_the_data_plane() -> None:
    """Symptom: its connections stayed when the end of the data plane interrupted the removal."""
    async with scripted_nodes(2) as nodes:
        async with serving(SHAPE, 4, "127.0.0.1:1", storage_nodes=addresses(nodes)) as (daemon, client):
            chain = own_chain(nodes, nodes[0], chunks=4)
            await client.lookup(chain)
            nodes[0].hold("KV.META")
            looking = asyncio.create_task(client.lookup(chain))
            await until(lambda: nodes[0].waiting > 0)
            removing = asyncio.create_task(daemon._source.set_members({nodes[1].address: 1.0}))
            await until(lambda: nodes[0].address not in daemon._source.name)
            for task in (removing, looking):
                task.cancel()
                await asyncio.wait([task])
        nodes[0].free()
        await until(lambda: not nodes[0].connections)


async def test_data_planes_with_different_lists_and_weights_miss_what_they_do_not_find() -> None:
    chunks = 16
    async with (
        scripted_nodes(3) as nodes,
        serving(SHAPE, chunks, "127.0.0.1:1", storage_nodes=addresses(nodes[:2])) as (_, one),
        serving(SHAPE, chunks, "127.0.0.1:1", storage_nodes=addresses(nodes[1:])) as (daemon, other),
    ):
        await daemon._source.set_members({nodes[1].address: 1.0, nodes[2].address: 3.0})
        chain = spread_chain(nodes[:2], chunks)
        await one.stores(chain)
        [hits] = (await other.lookup(chain)).hits
        assert hits < chunks
        if hits:
            assert await other.fetched(chain[:hits]) == kvs(SHAPE, hits)
        await other.stores(chain)
        for client in (one, other):
            assert (await client.lookup(chain)).hits == [chunks]
            assert await client.fetched(chain) == kvs(SHAPE, chunks)
