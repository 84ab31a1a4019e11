"""Published keys of other data planes in lookups. They are only hints."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cluster_support import Cluster, cluster_config
from dataplane_support import Client, Server, keys_of, layout, make_record, running
from machine import WAIT_MAX_MS, WAIT_MAX_S

from dpu_dataplane.server import Daemon
from shadowserve.pieces import unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
LASTS_MS = 60_000


async def look(client: Client, *chains: list[bytes], published: bool = True) -> tuple[list[Any], list[Any] | None]:
    """Return the stored and the published chunks of each chain; the latter is None without publications."""
    request = pb.LookupRequest(
        chains=[pb.KeyChain(keys=keys, namespace=SHAPE.namespace) for keys in chains],
        timeout_ms=WAIT_MAX_MS,
        published=published,
    )
    answer = await client.stub.Lookup(request)
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
    sets = [
        [unpack(data, len(keys)).tolist() for data, keys in zip(field, chains, strict=True)] if field else None
        for field in (answer.present, answer.published)
    ]
    assert sets[0] is not None
    return sets[0], sets[1]


async def publish(client: Client, keys: list[bytes], lasts_ms: int = LASTS_MS) -> int:
    request = pb.PublishRequest(keys=keys, lasts_ms=lasts_ms, timeout_ms=WAIT_MAX_MS)
    return int((await client.stub.Publish(request)).outcome)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_MAX_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_another_data_plane_sees_published_keys_and_then_stored_ones(tmp_path: Path) -> None:
    server = Server("storage_kv", tmp_path).start()
    try:
        async with running(server) as (_, prefill), running(server) as (_, decode):
            assert await look(decode, KEYS, KEYS[:1]) == ([[False] * 4, [False]], [[False] * 4, [False]])
            assert await publish(prefill, KEYS[:3]) == pb.OUTCOME_COMPLETE
            server.put(KEYS[0], make_record(SHAPE, KEYS[0], 0))
            present, published = await look(decode, KEYS, KEYS[:1])
            assert present == [[True, False, False, False], [True]]
            assert published == [[False, True, True, False], [False]]
            assert await look(decode, KEYS, published=False) == (present[:1], None), (
                "without a request, the answer has no publications"
            )
            assert await publish(prefill, KEYS[2:3], 0) == pb.OUTCOME_COMPLETE
            assert (await look(decode, KEYS))[1] == [[False, True, False, False]], "a withdrawn key must not be pending"
    finally:
        server.kill()


async def test_publications_end_with_their_data_plane(tmp_path: Path) -> None:
    server = Server("storage_kv", tmp_path).start()
    try:
        async with running(server) as (_, decode):
            async with running(server) as (_, prefill):
                assert await publish(prefill, KEYS) == pb.OUTCOME_COMPLETE
                assert (await look(decode, KEYS))[1] == [[True] * 4]

            async def gone() -> bool:
                return (await look(decode, KEYS))[1] == [[False] * 4]

            await until_true(gone)
    finally:
        server.kill()


async def test_publications_are_read_again_after_a_restart_of_storage(tmp_path: Path) -> None:
    server = Server("storage_kv", tmp_path).start()
    try:
        async with running(server) as (_, client):
            assert await publish(client, KEYS) == pb.OUTCOME_COMPLETE
            server.kill()

            async def away() -> bool:
                return await publish(client, KEYS) == pb.OUTCOME_STORAGE_UNAVAILABLE

            await until_true(away)
            server.start()

            async def back() -> bool:
                return await publish(client, KEYS[:1]) == pb.OUTCOME_COMPLETE

            await until_true(back)
            assert await look(client, KEYS) == ([[False] * 4], [[True, False, False, False]])
    finally:
        server.kill()


async def test_too_many_publications_are_refused_and_lookups_go_on(tmp_path: Path) -> None:
    server = Server("storage_kv", tmp_path).start()
    try:
        async with running(server) as (_, client):
            many = [index.to_bytes(32, "little") for index in range(16_384)]
            for first in range(0, len(many), 1024):
                assert await publish(client, many[first : first + 1024]) == pb.OUTCOME_COMPLETE
            assert await publish(client, KEYS) == pb.OUTCOME_STORAGE_REFUSED
            assert await look(client, KEYS) == ([[False] * 4], [[False] * 4])
    finally:
        server.kill()


async def test_redis_takes_no_publications_and_serves_all_other_calls(tmp_path: Path) -> None:
    server = Server("redis", tmp_path).start()
    try:
        async with running(server) as (_, client):
            server.put(KEYS[0], make_record(SHAPE, KEYS[0], 0))
            assert await publish(client, KEYS) == pb.OUTCOME_COMPLETE
            for _ in range(2):
                assert await look(client, KEYS) == ([[True, False, False, False]], None)
    finally:
        server.kill()


async def test_a_cluster_takes_no_publications_and_serves_all_other_calls(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, replicas=0).start()
    try:
        async with Daemon(cluster_config(cluster)) as daemon:
            client = Client(daemon.address)
            await client.hello()
            cluster.put(KEYS[0], make_record(SHAPE, KEYS[0], 0))
            assert await publish(client, KEYS) == pb.OUTCOME_COMPLETE
            assert await look(client, KEYS) == ([[True, False, False, False]], None)
            await client.close()
    finally:
        cluster.kill()
