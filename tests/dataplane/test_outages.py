"""Storage that is absent, killed, frozen, restarted or faulty: every call ends in time with its reason."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dataplane_support import (
    Client,
    Found,
    Server,
    cancel,
    found,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    running,
    serving,
    until_ends_with,
)
from machine import NEVER_MS, WAIT_MAX_S, until
from scripted_node import ScriptedNode, scripted_nodes

from dpu_dataplane.sources.outage import BACKOFF_MAX_S
from shadowserve.keys import storage_key
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=2048)  # 512 KiB a chunk
KEYS = keys_of(SHAPE, 6)
RECORDS = [make_record(SHAPE, key, index) for index, key in enumerate(KEYS)]


async def assert_calls_fail_at_once(client: Client) -> None:
    """The daemon knows that storage is down. Calls that waited for a connection attempt would take twice as long."""
    async with asyncio.timeout(WAIT_MAX_S):
        for _ in range(int(2 * WAIT_MAX_S / BACKOFF_MAX_S)):
            assert (await client.lookup(KEYS)).outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
            assert (await client.store(KEYS)).outcome == pb.OUTCOME_STORAGE_UNAVAILABLE


async def test_storage_absent_at_start_then_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dpu_dataplane")
    server = Server("storage_kv", tmp_path)
    async with serving(SHAPE, 6, server) as (_, client):
        answer = await client.fetch(KEYS)
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
        assert server.address in answer.detail
        await assert_calls_fail_at_once(client)
        ours = [entry for entry in caplog.records if entry.name == "dpu_dataplane.sources.resp.server"]
        warnings = [entry for entry in ours if entry.levelno >= logging.WARNING]
        assert len(warnings) == 1, [entry.getMessage() for entry in warnings]
        with server:
            server.fill(SHAPE, KEYS)
            await until_ends_with(pb.OUTCOME_COMPLETE, lambda: client.fetch(KEYS))


async def test_storage_is_restarted_with_and_without_its_records(mortal_storage: Server) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, mortal_storage) as (daemon, client):
        connections = daemon.metrics.totals
        assert list((await client.lookup(KEYS)).hits) == [6]
        await client.fetches(KEYS, 6)
        mortal_storage.kill()
        await client.fetches(KEYS, 0, pb.OUTCOME_STORAGE_UNAVAILABLE)
        mortal_storage.start()
        # The headers are still cached, but the records are lost: a hint alone is never an answer.
        await until_ends_with(pb.OUTCOME_ABSENT, lambda: client.fetch(KEYS))
        mortal_storage.fill(SHAPE, KEYS)
        await client.fetches(KEYS, 6)
        before = connections["storage_connections"]
        mortal_storage.kill()
        mortal_storage.start()
        mortal_storage.fill(SHAPE, KEYS)
        await until(lambda: connections["storage_connections"] > before)
        await client.fetches(KEYS, 6)  # a restart between two fetches costs no hit


async def test_storage_killed_in_the_middle_of_a_fetch(mortal_storage: Server) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, mortal_storage) as (daemon, client):
        await client.lookup(KEYS)  # so that the fetch needs no headers, and waits for bodies
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        mortal_storage.freeze()
        fetch = asyncio.create_task(client.fetch(KEYS, timeout_ms=NEVER_MS))
        await until(mortal_storage.asked)
        assert not fetch.done()
        mortal_storage.kill()
        async with asyncio.timeout(WAIT_MAX_S):
            answer = await fetch
        assert answer.outcome == pb.OUTCOME_STORAGE_UNAVAILABLE
        assert daemon.metrics.totals["batches"] == 2


@pytest.mark.parametrize("phase", ["lookup", "fetch", "store"])
async def test_a_stalled_server_costs_a_call_at_most_its_deadline(mortal_storage: Server, phase: str) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    async with serving(SHAPE, 6, mortal_storage, command_timeout_s=1.0, connect_timeout_s=0.5) as (daemon, client):
        await until_ends_with(pb.OUTCOME_COMPLETE, lambda: client.lookup(KEYS, timeout_ms=1000))
        mortal_storage.freeze()
        begin = time.monotonic()
        answer = await getattr(client, phase)(KEYS, timeout_ms=300)
        assert answer.outcome == pb.OUTCOME_DEADLINE, answer
        assert time.monotonic() - begin > 0.29
        # After the daemon detects the stall, calls end at once.
        await until(lambda: daemon.metrics.gauges["storage_up"][1]() == 0 or _ask(client))
        await until_ends_with(pb.OUTCOME_STORAGE_UNAVAILABLE, lambda: client.lookup(KEYS, timeout_ms=1000))
        await assert_calls_fail_at_once(client)
        mortal_storage.thaw()
        await until_ends_with(pb.OUTCOME_COMPLETE, lambda: client.fetch(KEYS))
        assert client.chunk(5) == kv(SHAPE, 5)


_asked: set[asyncio.Task[Found]] = set()


def _ask(client: Client) -> bool:
    """Keep requests in flight: a silence is detected only while an answer is due."""
    if len(_asked) < 4:
        task = asyncio.create_task(client.lookup(KEYS, timeout_ms=200))
        _asked.add(task)
        task.add_done_callback(_asked.discard)
    return False


# ---- A faulty server -----------------------------------------------------------------------------------------------


@pytest.fixture
async def liar() -> AsyncIterator[ScriptedNode]:
    """A server with the records that lies as the test says."""
    async with scripted_nodes(1) as [node]:
        node.fill(SHAPE, KEYS)
        yield node


def answering(name: bytes, answer: bytes) -> Callable[[list[bytes]], bytes | None]:
    return lambda command: answer if command[0] == name else None


UNAVAILABLE, REFUSED = pb.OUTCOME_STORAGE_UNAVAILABLE, pb.OUTCOME_STORAGE_REFUSED
LIES = {
    "meta of another length": (b"KV.META", b"*1\r\n$-1\r\n", UNAVAILABLE),
    "meta of another shape": (b"KV.META", b"*6\r\n" + b"*2\r\n+a\r\n+b\r\n" * 6, UNAVAILABLE),
    "meta is no array": (b"KV.META", b"+OK\r\n", UNAVAILABLE),
    "garbage": (b"KV.META", b"HTTP/1.1 400 Bad Request\r\n\r\n", UNAVAILABLE),
    "a bulk beyond every limit": (b"KV.META", b"*6\r\n*2\r\n:5\r\n$99999999999\r\n", UNAVAILABLE),
    "an answer to nothing": (b"KV.META", b"+OK\r\n" * 5, UNAVAILABLE),
    "loading": (b"KV.META", b"-LOADING Redis is loading\r\n", REFUSED),
    "no such user any more": (b"GETRANGE", b"-NOPERM this user has no permissions\r\n", REFUSED),
    "ranges are null": (b"GETRANGE", b"$-1\r\n", pb.OUTCOME_ABSENT),
    "ranges are too long": (b"GETRANGE", b"$99999999\r\n", UNAVAILABLE),
    "ranges are garbage": (b"GETRANGE", b"\0\0\0\0\r\n", UNAVAILABLE),
}


@pytest.mark.parametrize("lie", LIES)
async def test_wrong_answers_of_a_server_are_misses(liar: ScriptedNode, lie: str) -> None:
    command, wrong, outcome = LIES[lie]
    silence = 0.5 if lie == "a bulk beyond every limit" else WAIT_MAX_S  # the server never sends the rest
    async with serving(SHAPE, 6, liar.address, command_timeout_s=silence) as (_, client):
        client.segment.memory[:] = 0x33
        liar.lie = answering(command, wrong)
        assert (await client.fetches(KEYS, 0, outcome)).detail
        liar.lie = lambda command: None
        await until_ends_with(pb.OUTCOME_COMPLETE, lambda: client.fetch(KEYS))
        assert client.chunks(6) == kvs(SHAPE, 6)


@pytest.mark.parametrize("after", [0, 3, 5000])
async def test_a_connection_that_breaks_within_a_body_is_a_miss(liar: ScriptedNode, after: int) -> None:
    async with serving(SHAPE, 6, liar.address) as (_, client):
        liar.part_bytes = after
        await client.fetches(KEYS, 0, pb.OUTCOME_STORAGE_UNAVAILABLE)
        liar.part_bytes = None
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE


@pytest.mark.parametrize("looked_up", [True, False])
async def test_corruption_is_accepted_after_a_second_read(liar: ScriptedNode, looked_up: bool) -> None:
    flips = iter([True])

    def flip_once(command: list[bytes]) -> bytes | None:
        if command[0] != b"GETRANGE" or command[1] != storage_key(KEYS[2]) or not next(flips, False):
            return None
        answer = bytearray(liar.answer(command))
        answer[-10] ^= 1
        return bytes(answer)

    async with serving(SHAPE, 6, liar.address) as (daemon, client):
        if looked_up:
            await client.lookup(KEYS)
        liar.lie = flip_once
        assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        assert daemon.metrics.totals["deleted_records"] == 0
        assert not daemon.metrics.integrity_failures


async def test_an_unanswered_put_ends_on_cancel_and_at_the_deadline(liar: ScriptedNode) -> None:
    liar.records.clear()
    liar.lie = answering(b"SET", b"")
    async with serving(SHAPE, 6, liar.address) as (_, client):
        store = asyncio.ensure_future(client.store(KEYS, job_id="store", timeout_ms=NEVER_MS))
        await until(lambda: liar.asked["SET"])
        assert await cancel(client, "store")
        assert (await store).outcome == pb.OUTCOME_CANCELLED
        answer = await client.store(KEYS, timeout_ms=300)
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_DEADLINE, 0)
        liar.lie = lambda command: None
        assert (await client.store(KEYS)).outcome == pb.OUTCOME_COMPLETE


async def test_a_broken_put_is_retried_once(liar: ScriptedNode) -> None:
    breaks = iter([True])

    def break_once(command: list[bytes]) -> bytes | None:
        if command[0] == b"SET" and next(breaks, False):
            raise ConnectionResetError
        return None

    liar.records.clear()
    async with serving(SHAPE, 6, liar.address, codec="kvrans") as (_, client):
        liar.lie = break_once
        await client.stores(KEYS)
        assert liar.records == {storage_key(key): data for key, data in zip(KEYS, RECORDS, strict=True)}


async def test_a_lookup_of_a_long_prompt_is_one_round_trip(liar: ScriptedNode) -> None:
    asked: list[list[bytes]] = []

    def answer_the_last(words: list[bytes]) -> bytes | None:
        if words[0] != b"KV.META":
            return None
        asked.append(words)
        return b"" if len(asked) < 2 else b"".join(map(liar.answer, asked))

    liar.lie = answer_the_last
    shape = layout(layers=32, vector_length=8)
    chains = [keys_of(shape, 512, seed=seed) for seed in range(2)]  # 128K tokens in chunks of 256, for two ranks
    for keys in chains:
        for key in keys[:500]:
            liar.records[storage_key(key)] = make_record(shape, key, 0, "none")
    async with running(liar.address) as (daemon, client):
        await until(lambda: daemon.metrics.gauges["storage_up"][1]() == 1)
        liar.asked.clear()
        client.shape = shape
        answer = found(await client.look(*chains), 512, 512)
        assert (answer.hits, answer.outcome) == ([500, 500], pb.OUTCOME_COMPLETE)
        assert liar.asked == {"KV.META": 2}, "one command for each chain"
        # The next fetch needs no further request.
        await client.register(shape, 20)
        await client.fetches(chains[0][:20], 20)
        assert len(asked) == 2
