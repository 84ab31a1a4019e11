"""Published keys: what other engines and data planes see, shares of hosts, withdrawals, and tiers without storage."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dataplane_support import (
    FAILED,
    Client,
    Server,
    client_of,
    keys_of,
    layout,
    repeat,
    running,
    serving,
    until_ends_with,
)
from machine import WAIT_MAX_MS

from dpu_dataplane.publishing import PENDING_KEYS_MAX, Publications
from shadowserve.errors import StorageRefusedError
from shadowserve.pieces import unpack
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)
LASTS_MS = 60_000
TIERS = {"memory_budget_bytes": "16MiB"}


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [index.to_bytes(32, "little") for index in range(first, first + count)]


async def publish(client: Client, keys: list[bytes], lasts_ms: int = LASTS_MS, **more: Any) -> pb.PublishResponse:
    request = pb.PublishRequest(keys=keys, lasts_ms=lasts_ms, timeout_ms=WAIT_MAX_MS, **more)
    answer: pb.PublishResponse = await client.stub.Publish(request)
    return answer


async def publish_many(client: Client, keys: list[bytes]) -> None:
    for first in range(0, len(keys), 1024):
        assert (await publish(client, keys[first : first + 1024])).outcome == pb.OUTCOME_COMPLETE


async def look(client: Client, *chains: list[bytes], published: bool = True) -> tuple[Any, Any]:
    """Return the stored and the published chunks of each chain; None for the latter without publications."""
    client.shape = SHAPE
    answer = await client.look(*chains, published=published)
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer.detail
    stored, pending = (
        [unpack(data, len(keys)).tolist() for data, keys in zip(field, chains, strict=True)] if field else None
        for field in (answer.present, answer.published)
    )
    return stored, pending


async def pending(client: Client, keys: list[bytes] = KEYS) -> list[bool] | None:
    published = (await look(client, keys))[1]
    return None if published is None else published[0]


async def test_another_data_plane_sees_published_keys_and_then_stored_ones(mortal_storage: Server) -> None:
    async with running(mortal_storage) as (_, decode):
        async with running(mortal_storage) as (_, prefill):
            assert await look(decode, KEYS, KEYS[:1]) == ([[False] * 4, [False]], [[False] * 4, [False]])
            assert (await publish(prefill, KEYS[:3])).outcome == pb.OUTCOME_COMPLETE
            mortal_storage.fill(SHAPE, KEYS[:1])
            present = [[True, False, False, False], [True]]
            assert await look(decode, KEYS, KEYS[:1]) == (present, [[False, True, True, False], [False]])
            assert await look(decode, KEYS, published=False) == (present[:1], None)
            assert (await publish(prefill, KEYS[2:3], 0)).outcome == pb.OUTCOME_COMPLETE
            assert await pending(decode) == [False, True, False, False], "a withdrawn key must not be pending"
        await repeat(lambda: pending(decode), lambda found: found == [False] * 4)  # gone with their data plane


async def test_publications_are_read_again_after_a_restart_of_storage(mortal_storage: Server) -> None:
    async with running(mortal_storage) as (_, client):
        assert (await publish(client, KEYS)).outcome == pb.OUTCOME_COMPLETE
        mortal_storage.kill()
        await until_ends_with(pb.OUTCOME_STORAGE_UNAVAILABLE, lambda: publish(client, KEYS[:1]))
        mortal_storage.start()
        await until_ends_with(pb.OUTCOME_COMPLETE, lambda: publish(client, KEYS[:1]))
        assert await look(client, KEYS) == ([[False] * 4], [[True, False, False, False]])


async def test_redis_takes_no_publications_and_serves_all_other_calls(redis: Server) -> None:
    redis.fill(SHAPE, KEYS[:1])
    async with running(redis) as (_, client):
        answer = await publish(client, KEYS)
        assert (answer.outcome, answer.reach) == (pb.OUTCOME_COMPLETE, pb.REACH_NONE)
        for _ in range(2):
            assert await look(client, KEYS) == ([[True, False, False, False]], None)


async def test_a_host_has_its_share_of_publications(mortal_storage: Server) -> None:
    async with (
        running(mortal_storage, hosts_max=2) as (daemon, ours),
        client_of(daemon, host="another machine") as theirs,
    ):
        share = PENDING_KEYS_MAX // 2
        many = numbered(share)
        await publish_many(ours, many)
        refused = await publish(ours, numbered(8, share))
        assert refused.outcome == pb.OUTCOME_STORAGE_REFUSED
        assert f"its share is {share}: {PENDING_KEYS_MAX} divided by hosts_max (2)" in refused.detail
        assert daemon.metrics.totals["publications_refused"] == 8
        assert (await publish(theirs, KEYS)).outcome == pb.OUTCOME_COMPLETE
        assert await pending(ours) == [True] * 4, "lookups go on"
        assert (await publish(ours, many[:8], 0)).outcome == pb.OUTCOME_COMPLETE
        assert (await publish(ours, numbered(8, share))).outcome == pb.OUTCOME_COMPLETE, "withdrawn keys are free"


async def test_a_host_does_not_withdraw_keys_published_by_another_host(mortal_storage: Server) -> None:
    async with (
        running(mortal_storage, hosts_max=2) as (daemon, ours),
        client_of(daemon, host="another machine") as theirs,
    ):
        await publish(ours, KEYS)
        await publish(theirs, KEYS[:2])
        await publish(theirs, KEYS, 0)
        assert await pending(ours) == [True] * 4
        await publish(theirs, KEYS, 1)  # for a shorter time than the other publication
        await asyncio.sleep(0.01)
        assert await pending(ours) == [True] * 4
        await publish(ours, KEYS[1:], 0)
        assert await pending(ours) == [True, False, False, False]


async def test_local_tiers_report_pending_keys_until_stored_or_withdrawn() -> None:
    async with serving(SHAPE, 4, "", tiers=TIERS) as (_, client):
        assert await pending(client) == [False] * 4
        assert (await publish(client, KEYS, plain=True)).reach == pb.REACH_ALL
        assert await pending(client) == [True] * 4
        await client.stores(KEYS[:1])
        assert await pending(client) == [False, True, True, True]
        await publish(client, KEYS[1:2], 0)
        assert await pending(client) == [False, False, True, True]
        await publish(client, KEYS[2:], 1)
        await repeat(lambda: pending(client), lambda found: found == [False] * 4)
        assert (await publish(client, KEYS, 60_001)).outcome == pb.OUTCOME_STORAGE_REFUSED


async def test_publications_of_a_removed_host_are_withdrawn() -> None:
    async with (
        running("", tiers=TIERS, hosts_max=2, registration_idle_s=0.5) as (daemon, ours),
        client_of(daemon, host="another machine") as theirs,
    ):
        await publish(theirs, KEYS)
        assert await pending(ours) == [True] * 4
        hosts = daemon.metrics.gauges["hosts"][1]
        await repeat(lambda: pending(ours), lambda found: hosts() == 1 and found == [False] * 4, FAILED)


async def test_plain_records_are_pending_on_their_own_data_plane_only(mortal_storage: Server, tmp_path: Path) -> None:
    """Symptom: a decode engine at another data plane waited for page records, which never leave their tiers."""
    tiers = TIERS | {"devices": [{"path": str(tmp_path / "device"), "size": "64MiB"}]}
    async with (
        running(mortal_storage, tiers=tiers) as (_, prefill),
        running(mortal_storage, tiers=TIERS) as (_, decode),
    ):
        await prefill.register(SHAPE, 4)
        plain = await publish(prefill, KEYS[:2], plain=True)
        assert (plain.outcome, plain.reach) == (pb.OUTCOME_COMPLETE, pb.REACH_DATA_PLANE)
        assert (await publish(prefill, KEYS[2:])).reach == pb.REACH_ALL
        assert await pending(prefill) == [True] * 4, "engines of the same data plane must see them"
        assert await pending(decode) == [False, False, True, True]
        await prefill.stores(KEYS[:1], plain=True)
        assert await pending(prefill) == [False, True, True, True]
        assert (await publish(decode, KEYS, plain=True)).reach == pb.REACH_ALL, "without devices they go to storage"


def test_expired_publications_take_no_share() -> None:
    now = 0.0
    table = Publications(4, lambda: now)
    table.publish("a", numbered(table.share), 1000)
    with pytest.raises(StorageRefusedError, match="share"):
        table.publish("a", numbered(1, table.share), 1000)
    now = 1.5
    assert not table.pending(numbered(1)).any()
    assert table.publish("a", numbered(1, table.share), 1000) == numbered(1, table.share)
    assert len(table) == 1
    table.stored(numbered(1, table.share)[0])
    assert len(table) == 0
