"""Prefetch: records of waiting requests are in memory before the requests run."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from budget_support import delayed, moved, report
from dataplane_support import (
    Client,
    Server,
    keys_of,
    layout,
    make_record,
    running,
    serving,
)
from machine import NEVER_S, until
from test_tiers import assert_right, cool, resident, storage_away, tiers_in, tiers_of

from dpu_dataplane.queues import Queues
from dpu_dataplane.server import Daemon
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.found import Cold, Stored
from dpu_dataplane.sources.tiers import prefetcher
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=2048)  # 512 KiB a chunk
CHAINS = [keys_of(SHAPE, 6, seed=seed) for seed in range(40, 44)]
LASTS_MS = 60_000


class Queue:
    """One engine's queue, as its host reports it."""

    def __init__(self, client: Client, name: bytes = b"an engine") -> None:
        self._client = client
        self._name = name
        self.number = 0

    async def say(
        self, keys_by_name: dict[int, list[bytes]] | None = None, order: Sequence[int] = (), **changes: Any
    ) -> pb.ExpectResponse:
        """Send the changes of the queue; by default the whole queue."""
        self.number += 1
        namespace = self._client.shape.namespace
        fields: dict[str, Any] = {
            "queue": self._name,
            "number": self.number,
            "whole": self.number == 1,
            "order": order or list(keys_by_name or {}),
            "lasts_ms": LASTS_MS,
        }
        if keys_by_name is not None:
            fields["arrivals"] = [
                pb.Arrival(request=name, chains=[pb.KeyChain(keys=keys, namespace=namespace)])
                for name, keys in keys_by_name.items()
            ]
        answer: pb.ExpectResponse = await self._client.stub.Expect(pb.ExpectRequest(**(fields | changes)))
        return answer


def prefetching_in(daemon: Daemon) -> prefetcher.Prefetcher:
    found: prefetcher.Prefetcher = daemon._source._prefetcher
    return found


def storage_of(daemon: Daemon) -> Any:
    """Return the source below the tiers."""
    return prefetching_in(daemon)._below


def record_bytes(chain: Sequence[bytes]) -> int:
    return sum(len(make_record(SHAPE, key, index)) for index, key in enumerate(chain))


def prefetched_bytes(daemon: Daemon) -> dict[str, int]:
    return {hop: size for hop, size in daemon.metrics.prefetch_bytes.items() if size}


@pytest.mark.parametrize("devices", [True, False])
async def test_records_of_a_waiting_request_are_prefetched_into_memory(
    mortal_storage: Server, tmp_path: Path, devices: bool
) -> None:
    mortal_storage.fill(SHAPE, CHAINS[0])
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of(tmp_path if devices else None)) as (daemon, client):
        queue = Queue(client)
        assert not (await queue.say({1: CHAINS[0]})).again
        await until(lambda: all(resident(daemon, CHAINS[0])))
        mortal_storage.kill()
        await storage_away(client, keys_of(SHAPE, 1, seed=9))
        assert_right(client, await client.fetch(CHAINS[0]))
        assert prefetched_bytes(daemon) == {"storage": record_bytes(CHAINS[0])}
        await queue.say(gone=[1])
        await until(lambda: not prefetching_in(daemon)._prefetched)
        assert daemon.metrics.totals["prefetch_wasted_bytes"] == 0


async def test_records_on_a_device_are_prefetched_into_memory(tmp_path: Path) -> None:
    async with serving(SHAPE, 6, "", tiers=tiers_of(tmp_path)) as (daemon, client):
        await client.stores(CHAINS[0])
        await cool(daemon)
        assert resident(daemon, CHAINS[0]) == [False] * 6
        await Queue(client).say({1: CHAINS[0]})
        await until(lambda: all(resident(daemon, CHAINS[0])))
        before = daemon.metrics.tier_records["device"]
        assert_right(client, await client.fetch(CHAINS[0]))
        assert daemon.metrics.tier_records["device"] == before and set(prefetched_bytes(daemon)) == {"device"}


async def test_only_the_next_requests_are_prefetched_and_only_in_time(storage: Server) -> None:
    for chain in CHAINS:
        storage.fill(SHAPE, chain)
    async with serving(SHAPE, 6, storage, tiers=tiers_of() | {"ahead_requests": 2}) as (daemon, client):
        queue = Queue(client)
        order = [3, 2, 1, 0]
        await queue.say(dict(enumerate(CHAINS)), order, begins_in_ms=[0, 60_000, 60_000, 60_000])
        await until(lambda: all(resident(daemon, CHAINS[2])))
        assert resident(daemon, CHAINS[3]) == [False] * 6, "it starts now, so a prefetch would be too late"
        assert resident(daemon, CHAINS[1] + CHAINS[0]) == [False] * 12, "two other requests run before them"
        await queue.say(gone=[3, 2], order=[0, 1])
        await until(lambda: all(resident(daemon, CHAINS[0] + CHAINS[1])))


async def test_cold_records_are_prefetched_earlier(storage: Server) -> None:
    """Report the record of the second request as cold: one, as the link is soon measured to be as fast as the other."""
    near, far = CHAINS[0], CHAINS[1][:1]
    storage.fill(SHAPE, near)
    storage.fill(SHAPE, far)
    async with serving(SHAPE, 6, storage, tiers=tiers_of() | {"ahead_requests": 1}) as (daemon, client):
        source = storage_of(daemon)
        find = source.find

        async def cold(keys: Sequence[bytes]) -> Any:
            found = await find(keys)
            return [
                Cold(each.length, 60_000) if isinstance(each, Stored) and key in far else each
                for key, each in zip(keys, found, strict=True)
            ]

        source.find = cold
        queue = Queue(client)
        await queue.say({1: near, 2: far}, begins_in_ms=[600_000, 600_000])
        await until(lambda: all(resident(daemon, near + far)))
        assert prefetched_bytes(daemon) == {"storage": record_bytes(near), "cold": record_bytes(far)}


async def test_prefetches_pause_for_a_fetch_and_no_record_is_read_twice(mortal_storage: Server) -> None:
    for chain in CHAINS[:2]:
        mortal_storage.fill(SHAPE, chain)
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of()) as (daemon, client):
        assert (await client.lookup(CHAINS[0])).hits == [6] and (await client.lookup(CHAINS[1])).hits == [6]
        source = storage_of(daemon)
        receive, begun = source.receive, asyncio.Event()

        async def standing(job: Any, key: bytes, first: int, memory: memoryview) -> Any:
            if not begun.is_set():
                begun.set()
                mortal_storage.freeze()
            return await receive(job, key, first, memory)

        source.receive = standing
        try:
            await Queue(client).say({1: CHAINS[0], 2: CHAINS[1]})
            await begun.wait()
            fetching = asyncio.create_task(client.fetch(CHAINS[0]))
            await until(lambda: prefetching_in(daemon)._gate.fetches)
        finally:
            mortal_storage.thaw()
        assert_right(client, await fetching)
        await until(lambda: all(resident(daemon, CHAINS[1])))
        totals = daemon.metrics.totals
        received = sum(prefetched_bytes(daemon).values()) + totals["fetched_bytes"] - totals["tier_bytes"]
        assert received <= sum(map(record_bytes, CHAINS[:2])), "something came twice"


async def test_records_of_the_last_requests_are_evicted_first(storage: Server) -> None:
    """Fetch records of two waiting requests, then more records of others than fit."""
    size = len(make_record(SHAPE, CHAINS[0][0], 0))
    async with running(storage, tiers=tiers_of(memory=f"{20 * size}") | {"ahead_requests": 0}) as (daemon, client):
        await client.register(SHAPE, 6)
        for chain in CHAINS[:3]:
            storage.fill(SHAPE, chain)
            assert_right(client, await client.fetch(chain))
        queue = Queue(client)
        await queue.say({0: CHAINS[0], 1: CHAINS[1]}, order=[1, 0])
        await until(lambda: len(tiers_in(daemon).pool.next_use) == 2)
        for seed in range(60, 63):
            other = keys_of(SHAPE, 6, seed=seed)
            storage.fill(SHAPE, other)
            assert_right(client, await client.fetch(other))
        assert resident(daemon, CHAINS[0] + CHAINS[1]) == [True] * 12, "waiting requests need these records"
        assert not any(resident(daemon, CHAINS[2])), "no request waits for these records"
        tiers = tiers_in(daemon)
        with tiers.lock:
            tiers.pool.set_budget(int(7.5 * (size + 1000)))
        await until(lambda: tiers.pool.statistics().used_bytes <= 7.5 * (size + 1000))
        assert resident(daemon, CHAINS[1]) == [True] * 6 and resident(daemon, CHAINS[0][-4:]) == [False] * 4


# ---- Faults


async def test_a_waiting_request_that_never_fetches_leaves_no_record_held(
    storage: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_LINGER_S", 0.2)
    storage.fill(SHAPE, CHAINS[0])
    async with serving(SHAPE, 6, storage, tiers=tiers_of(tmp_path)) as (daemon, client):
        await Queue(client).say({1: CHAINS[0]}, lasts_ms=1500)
        own, tiers = prefetching_in(daemon), tiers_in(daemon)
        await until(lambda: len(own._prefetched) == 6)
        await until(lambda: not own._requests)
        assert not own._prefetched and own._prefetched_bytes == 0 and len(tiers.pool.next_use) == 0
        assert daemon.metrics.totals["prefetch_wasted_bytes"] == prefetched_bytes(daemon)["storage"] > 0
        await until(lambda: not tiers.pool.busy)
        with tiers.lock:
            while tiers.pool._core.memory_cache.make_room():
                """Evict all records without a hold."""
        assert not any(resident(daemon, CHAINS[0]))


class Reports:
    """The queues of a daemon, and the order in which the requests wait."""

    def __init__(self, hosts_max: int) -> None:
        self._queues = Queues(hosts_max, lambda: 0.0)

    def report(
        self,
        number: int,
        keys_by_name: dict[int, list[bytes]] | None = None,
        *,
        owner: str = "a host",
        name: bytes = b"q",
        **fields: Any,
    ) -> bool:
        """Report changes of a queue; return False if messages before it are missing."""
        request = pb.ExpectRequest(queue=name, number=number, lasts_ms=LASTS_MS, **fields)
        return self._queues.update(owner, request, [(key, [(b"", keys)]) for key, keys in (keys_by_name or {}).items()])

    @property
    def waiting(self) -> list[Any]:
        return [request.name[-1] for request in self._queues.waiting()]


def test_late_messages_are_ignored_and_missing_ones_requested() -> None:
    queues = Reports(hosts_max=2)
    one, two, three, four = CHAINS
    assert not queues.report(7, {1: one}), "the daemon must request the whole queue"
    assert queues.report(8, {1: one, 2: two}, order=[2, 1], whole=True) and queues.waiting == [2, 1]
    assert queues.report(8, gone=[2]) and queues.waiting == [2, 1], "an old one"
    assert queues.report(3, {5: three}, whole=True) and queues.waiting == [2, 1]
    assert not queues.report(20, gone=[2]) and queues.waiting == [2, 1], "some are missing"
    assert queues.report(9, {3: three}, order=[9, 3, 3, 1, 77], gone=[2, 123])
    assert queues.waiting == [3, 1], "unknown names must be skipped"
    assert queues.report(1, {1: four}, name=b"another engine", whole=True, gone=[3])
    assert sorted(queues.waiting) == [1, 1, 3], "an engine's report must affect only its own queue"
    assert not queues.report(10, owner="another host"), "another host's queue of the same name must be separate"
    assert queues.report(1, owner="another host", whole=True) and len(queues.waiting) == 3


def test_a_host_has_its_share_of_waiting_requests() -> None:
    queues = Reports(hosts_max=4)
    assert queues.report(1, {name: [] for name in range(REQUESTS_MAX // 4 + 9)}, whole=True)
    assert len(queues.waiting) == REQUESTS_MAX // 4
    many = [index.to_bytes(32, "little") for index in range(60_000)]
    assert queues.report(2, {name: many for name in range(3)}, whole=True)
    assert queues.waiting == [0], "this host's share is a quarter of all keys"
    assert queues.report(3, {1: many[:5000]}, order=[1], begins_in_ms=[(1 << 32) - 1]) and len(queues.waiting) == 2


async def test_a_data_plane_without_tiers_answers_that_it_does_not_prefetch(storage: Server) -> None:
    async with serving(SHAPE, 1, storage) as (_, client):
        assert (await Queue(client).say({1: CHAINS[0]})).unused


async def test_a_storage_failure_during_a_fetch_costs_only_missing_pieces(mortal_storage: Server) -> None:
    mortal_storage.fill(SHAPE, CHAINS[0])
    async with serving(SHAPE, 6, mortal_storage, tiers=tiers_of()) as (daemon, client):
        assert (await client.fetch(CHAINS[0][:2])).chunks == 2
        source = storage_of(daemon)
        receive = source.receive

        async def dying(*arguments: Any) -> Any:
            mortal_storage.kill()
            return await receive(*arguments)

        source.receive = dying
        await Queue(client).say({1: CHAINS[0]})
        await storage_away(client, keys_of(SHAPE, 1, seed=9))
        await client.fetches(CHAINS[0], 2, pb.OUTCOME_STORAGE_UNAVAILABLE)
        await until(lambda: not prefetching_in(daemon)._moving)
        source.receive = receive
        mortal_storage.start()
        mortal_storage.fill(SHAPE, CHAINS[0])
        await until(lambda: all(resident(daemon, CHAINS[0])))
        assert_right(client, await client.fetch(CHAINS[0]))


async def test_a_damaged_record_is_not_prefetched(redis: Server) -> None:
    redis.fill(SHAPE, CHAINS[0])
    record = bytearray(make_record(SHAPE, CHAINS[0][2], 2))
    record[-9] ^= 4
    redis.put(CHAINS[0][2], bytes(record))
    async with serving(SHAPE, 6, redis, tiers=tiers_of()) as (daemon, client):
        await Queue(client).say({1: CHAINS[0]})
        await until(lambda: resident(daemon, CHAINS[0]) == [True, True, False, True, True, True])
        own = prefetching_in(daemon)
        await until(lambda: own._order[0].unsound == {CHAINS[0][2]} and not own._moving)
        await client.fetches(CHAINS[0], 2, pb.OUTCOME_CORRUPT)


async def test_records_of_a_failed_device_are_read_from_storage(storage: Server, tmp_path: Path) -> None:
    storage.fill(SHAPE, CHAINS[0])
    async with serving(SHAPE, 6, storage, tiers=tiers_of(tmp_path) | {"ahead_requests": 0}) as (daemon, client):
        assert_right(client, await client.fetch(CHAINS[0]))
        await cool(daemon)
        tiers, own = tiers_in(daemon), prefetching_in(daemon)
        read, failed = tiers.pool.read, []

        def fail(item: Any, start: int, end: int, done: Any, **options: Any) -> None:
            if len(failed) < 3:
                failed.append(item)
                done(None)
            else:
                read(item, start, end, done)

        tiers.pool.read = fail
        own._policy.requests = 4
        await Queue(client).say({1: CHAINS[0]})
        await until(lambda: len(failed) == 3)
        assert_right(client, await client.fetch(CHAINS[0]))
        await until(lambda: all(resident(daemon, CHAINS[0])))


async def test_prefetched_records_under_pressure_leave_room_for_fetches(storage: Server, tmp_path: Path) -> None:
    """Memory for a dozen records. Four requests wait for two dozen, while hosts fetch others."""
    for chain in CHAINS:
        storage.fill(SHAPE, chain)
    async with serving(SHAPE, 6, storage, tiers=tiers_of(tmp_path, "64MiB", "6MiB")) as (daemon, client):
        await Queue(client).say(dict(enumerate(CHAINS)))
        own, tiers = prefetching_in(daemon), tiers_in(daemon)
        await until(lambda: own._prefetched)
        for seed in range(70, 76):
            other = keys_of(SHAPE, 6, seed=seed)
            storage.fill(SHAPE, other)
            assert_right(client, await client.fetch(other))
            assert own._prefetched_bytes <= tiers.batch_bytes_max
        for chain in CHAINS:
            assert_right(client, await client.fetch(chain))


# ---- Prefetch during decoding


async def test_prefetches_wait_for_turns_and_are_dropped_when_their_request_begins(storage: Server) -> None:
    """Symptom: prefetches used the whole link beside a decoding engine."""
    chain = CHAINS[0]
    storage.fill(SHAPE, chain)
    async with serving(SHAPE, 6, storage, tiers=tiers_of(), shares_host_memory=True) as (daemon, client):
        queue = Queue(client)
        await report(client)
        async with daemon.budget.turn(Mover.FETCH, 1 << 50) as turn, asyncio.timeout(NEVER_S):
            turn.moved_bytes = 0
            await queue.say({1: chain})
            while not delayed(daemon, Mover.PREFETCH):
                await report(client)  # the previous report expires
                await asyncio.sleep(0.01)
            assert moved(daemon).get("prefetch", 0) == 0
            await queue.say(gone=[1])  # before the prefetch gets its turn
        await until(lambda: ("prefetch", "request_begun") in daemon.metrics.interference_dropped)
        await queue.say({2: chain})
        await until(lambda: moved(daemon).get("prefetch", 0) == sum(daemon.metrics.prefetch_bytes.values()))


async def test_a_fetch_gets_records_whose_prefetch_is_in_progress(storage: Server) -> None:
    chain = CHAINS[0]
    storage.fill(SHAPE, chain)
    async with serving(SHAPE, 6, storage, tiers=tiers_of(), shares_host_memory=True) as (daemon, client):
        await report(client)
        await Queue(client).say({1: chain})
        await until(lambda: moved(daemon).get("prefetch", 0) > 0)
        assert (await client.fetch(chain)).chunks == 3
