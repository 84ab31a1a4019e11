"""Pins of records that are stored now or later: by session, on one and on several nodes, and in local tiers alone."""

from typing import Any

import pytest
from dataplane_support import Client, Server, StartServer, keys_of, layout, repeat, running, serving
from machine import WAIT_MAX_MS, until

from dpu_dataplane.pinning import PINS_MAX, Pins
from shadowserve.errors import StorageRefusedError
from shadowserve.keys import storage_key
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
CHUNKS = 4
KEYS = keys_of(SHAPE, CHUNKS)
OTHERS = keys_of(SHAPE, CHUNKS, seed=1)
MINUTE_MS = 60_000


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server()


async def pin(client: Client, keys: list[bytes], lasts_ms: int = MINUTE_MS, session: bytes = b"") -> pb.PinResponse:
    request = pb.PinRequest(keys=keys, lasts_ms=lasts_ms, session=session, timeout_ms=WAIT_MAX_MS)
    answer: pb.PinResponse = await client.stub.Pin(request)
    return answer


async def pins(client: Client, keys: list[bytes], lasts_ms: int = MINUTE_MS, session: bytes = b"") -> None:
    answer = await pin(client, keys, lasts_ms, session)
    assert (answer.outcome, answer.supported) == (pb.OUTCOME_COMPLETE, True), answer.detail


def pinned(*servers: Server) -> int:
    """Return the number of pinned keys."""
    return sum(int(tenant["keys"]) for server in servers for tenant in server.ask("KV.PINS"))


async def until_pinned(count: int, *servers: Server) -> None:
    await until(lambda: pinned(*servers) == count)


async def test_records_are_pinned_that_are_stored_now_or_later_and_no_others(server: Server) -> None:
    async with serving(SHAPE, CHUNKS, server) as (_, client):
        await client.stores(KEYS[:2])
        await pins(client, KEYS)
        assert pinned(server) == 2
        await client.stores(KEYS)
        await client.stores(OTHERS)
        await until_pinned(CHUNKS, server)
        await pins(client, KEYS, 0)
        assert pinned(server) == 0


async def test_a_release_keeps_what_another_session_has_pinned(server: Server) -> None:
    server.fill(SHAPE, KEYS)
    async with running(server) as (_, client):
        await pins(client, KEYS[:3], session=b"parent")
        await pins(client, KEYS[2:], session=b"child")
        await pins(client, KEYS, 0, session=b"child")
        assert pinned(server) == 3


async def test_a_release_ends_no_pins_that_the_session_never_set(server: Server) -> None:
    server.fill(SHAPE, KEYS)
    server.ask("KV.PIN", 60, storage_key(KEYS[0]))
    async with running(server) as (_, client):
        await pins(client, KEYS[1:], session=b"ours")
        await pins(client, KEYS, 0, session=b"ours")
        assert pinned(server) == 1


async def test_a_pin_that_is_refused_leaves_the_earlier_one(server: Server) -> None:
    server.fill(SHAPE, KEYS)
    async with running(server) as (_, client):
        await pins(client, KEYS)
        assert (await pin(client, KEYS, 2**32 - 1)).outcome == pb.OUTCOME_STORAGE_REFUSED
        await pins(client, KEYS, 0)
        assert pinned(server) == 0


async def test_when_the_longest_session_releases_the_end_of_another_one_holds(server: Server) -> None:
    server.fill(SHAPE, KEYS)
    async with running(server) as (_, client):
        await pins(client, KEYS, 9 * MINUTE_MS, session=b"long")
        await pins(client, KEYS, 1, session=b"brief")
        await pins(client, KEYS, 0, session=b"long")
        await until_pinned(0, server)


@pytest.mark.parametrize("kind", ["server", "redis"])
async def test_a_ttl_puts_no_end_on_a_record_that_another_request_has_stored(
    kind: str, request: pytest.FixtureRequest
) -> None:
    storage: Server = request.getfixturevalue(kind)
    async with serving(SHAPE, CHUNKS, storage) as (daemon, client):
        await client.stores(KEYS[:2])

        async def before_the_other_store(keys: list[bytes]) -> list[None]:
            return [None] * len(keys)

        daemon._source.find_stored = before_the_other_store
        await client.stores(KEYS, lasts_ms=MINUTE_MS)
        assert [storage.ask("PTTL", storage_key(key)) > 0 for key in KEYS] == [False, False, True, True]


async def test_what_storage_does_not_pin_is_not_pinned_in_local_tiers(redis: Server) -> None:
    async with serving(SHAPE, CHUNKS, redis, tiers={"memory_budget_bytes": "1MiB"}) as (daemon, client):
        await client.stores(KEYS)
        assert not (await pin(client, KEYS)).supported
        for seed in range(2, 40):
            await client.stores(keys_of(SHAPE, CHUNKS, seed))
        assert not any(daemon._source._tiers.has(key) for key in KEYS)


async def test_local_tiers_alone_pin_for_ten_minutes(server: Server) -> None:
    async with serving(SHAPE, CHUNKS, server, tiers={"memory_budget_bytes": "1MiB"}, storage="") as (_, client):
        answer = await pin(client, KEYS, 11 * MINUTE_MS)
        assert answer.outcome == pb.OUTCOME_STORAGE_REFUSED and "600" in answer.detail


async def test_a_refused_pin_says_why_and_a_later_store_does_not_repeat_it(server: Server) -> None:
    server.fill(SHAPE, KEYS)
    async with serving(SHAPE, CHUNKS, server) as (daemon, client):
        answer = await pin(client, [*KEYS, *OTHERS], 2**32 - 1)
        assert answer.outcome == pb.OUTCOME_STORAGE_REFUSED and "pin_max_s" in answer.detail
        await client.stores(OTHERS)
        await pins(client, KEYS[:1])
        assert pinned(server) == 1 and not daemon.metrics.totals["pins_refused"]


async def test_a_pin_that_is_refused_after_its_store_is_counted(start_server: StartServer) -> None:
    server = start_server("--pin-share", "0")
    async with serving(SHAPE, CHUNKS, server) as (daemon, client):
        await pins(client, KEYS)
        await client.stores(KEYS)
        await until(lambda: daemon.metrics.totals["pins_refused"] == CHUNKS)
        assert pinned(server) == 0


async def test_redis_knows_no_pins_and_serves_all_other_calls(redis: Server) -> None:
    async with serving(SHAPE, CHUNKS, redis) as (_, client):
        for _ in range(2):
            answer = await pin(client, KEYS)
            assert (answer.outcome, answer.supported) == (pb.OUTCOME_COMPLETE, False)
        await client.stores(KEYS)


async def test_several_nodes_pin_their_own_records(server: Server, start_server: StartServer) -> None:
    other = start_server()
    chains = [keys_of(SHAPE, CHUNKS, seed) for seed in range(16)]
    async with serving(SHAPE, CHUNKS, "127.0.0.1:1", storage_nodes=[server.address, other.address]) as (_, client):
        for chain in chains:
            await client.stores(chain)
        assert all(any(each.has(chain[0]) for chain in chains) for each in (server, other))
        await pins(client, sum(chains, []))
        assert pinned(server, other) == 16 * CHUNKS
        server.kill()
        await pins(client, sum(chains, []), 0)
        assert pinned(other) == 0


@pytest.mark.parametrize("below", [False, True], ids=["alone", "above a node"])
async def test_a_pinned_record_stays_in_local_tiers_and_one_with_a_ttl_is_stored_below_too(
    server: Server, below: bool
) -> None:
    tiers = {"memory_budget_bytes": "1MiB"}
    options: dict[str, Any] = {"tiers": tiers} if below else {"tiers": tiers, "storage": ""}
    async with serving(SHAPE, CHUNKS, server, **options) as (_, client):
        await client.stores(KEYS)
        await pins(client, KEYS)
        for seed in range(2, 40):
            await client.stores(keys_of(SHAPE, CHUNKS, seed))
        if below:
            assert pinned(server) == CHUNKS
            await client.stores(OTHERS, lasts_ms=MINUTE_MS)
            assert all(0 < server.ask("PTTL", storage_key(key)) <= MINUTE_MS for key in OTHERS)
            server.kill()
        await repeat(lambda: client.lookup([*KEYS, *keys_of(SHAPE, CHUNKS, 2)]), lambda found: found.hits == [CHUNKS])


def test_a_host_has_its_share_of_pins_and_ended_ones_do_not_count() -> None:
    now = 0.0
    table = Pins(2, clock=lambda: now)
    many = [index.to_bytes(32, "little") for index in range(PINS_MAX // 2)]
    assert table.pin("ours", b"", many, 10.0)[0] == many
    with pytest.raises(StorageRefusedError, match="share"):
        table.pin("ours", b"other", many[:1], 10.0)
    assert table.pin("theirs", b"", many[:1], 5.0)[0] == [], "another pin lasts longer"
    now, parts = 10.0, 0
    while table.make_room("ours", 1):  # other calls get their turn between two parts
        parts += 1
    assert 1 <= parts <= 64
    assert table.pin("ours", b"other", many[:1], 10.0)[0] == many[:1]


def test_hosts_that_come_and_go_have_no_more_pins_than_all_may_have() -> None:
    table = Pins(2, clock=lambda: 0.0)
    many = [index.to_bytes(32, "little") for index in range(PINS_MAX // 2)]
    for host in ("first", "second"):
        table.pin(host, b"", many, 10.0)
    with pytest.raises(StorageRefusedError, match="all hosts"):
        table.pin("third", b"", many[:1], 10.0)
