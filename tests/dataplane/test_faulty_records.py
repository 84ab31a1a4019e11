"""Faulty records: each is a miss with its reason, and none is delivered."""

import logging
import random
import struct
from types import SimpleNamespace

import pytest
from dataplane_support import (
    Client,
    Fetched,
    Server,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    namespace,
    running,
    serving,
)
from machine import until

from dpu_dataplane import catalog
from dpu_dataplane.metrics import outcome_name
from shadowserve import native
from shadowserve.chunk import ChunkLayout
from shadowserve.keys import KVNamespace, ModelIdentity
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout()
KEYS = keys_of(SHAPE, 3)
GOOD = [make_record(SHAPE, key, index) for index, key in enumerate(KEYS)]


def reseal(data: bytes) -> bytes:
    """Return a changed header with a right checksum, like one of a faulty writer."""
    head = bytearray(data)
    struct.pack_into("<I", head, 12, 0)
    (length,) = struct.unpack_from("<I", head, 8)
    struct.pack_into("<I", head, 12, native.crc32(bytes(head[:length])))
    return bytes(head)


async def offer(redis: Server, client: Client, shape: ChunkLayout, bad: bytes) -> Fetched:
    """Store two good chunks with ``bad`` between them, and fetch all three into memory of a known pattern."""
    for key, data in zip(KEYS, [GOOD[0], bad, GOOD[2]], strict=True):
        redis.put(key, data)
    await client.register(shape, 3)
    client.segment.memory[:] = 0x77
    return await client.fetch(KEYS)


def other_shape(**changes: object) -> bytes:
    shape = layout(**changes)
    data = make_record(ChunkLayout(**(vars(shape) | {"namespace": SHAPE.namespace})), KEYS[1], 1)
    return data


def part(**changes: object) -> bytes:
    """Return a record of the same chunk and shape, for another part of the model than any of these."""
    given = {"group": "full", "layers": (0, 4), "heads": (0, 2)} | changes
    made = KVNamespace(model=ModelIdentity(model="test", dtype="bfloat16"), **given).name(SHAPE)
    return make_record(made, KEYS[1], 1)


FAULTS = {
    "truncated body": (GOOD[1][:-1], pb.OUTCOME_CORRUPT),
    "truncated head": (GOOD[1][:200], pb.OUTCOME_CORRUPT),
    "truncated header": (GOOD[1][:40], pb.OUTCOME_CORRUPT),
    "trailing byte": (GOOD[1] + b"\0", pb.OUTCOME_CORRUPT),
    "another key's record": (GOOD[0], pb.OUTCOME_MISMATCH),
    "another namespace": (
        make_record(layout(namespace=namespace(model="another model")), KEYS[1], 1),
        pb.OUTCOME_MISMATCH,
    ),
    "another group": (part(group="window of 128"), pb.OUTCOME_MISMATCH),
    "other heads": (part(heads=(2, 4)), pb.OUTCOME_MISMATCH),
    "other layers": (part(layers=(4, 8)), pb.OUTCOME_MISMATCH),
    "another dtype": (other_shape(dtype="float16"), pb.OUTCOME_MISMATCH),
    "another quantizer": (other_shape(quantizer="binned"), pb.OUTCOME_MISMATCH),
    "other bins of values": (other_shape(quantizer="binned", value_bins=16), pb.OUTCOME_MISMATCH),
    "an unknown quantizer": (reseal(GOOD[1][:25] + b"\x09" + GOOD[1][26:]), pb.OUTCOME_CORRUPT),
    "bins of a quantizer without": (reseal(GOOD[1][:28] + b"\x20" + GOOD[1][29:]), pb.OUTCOME_CORRUPT),
    "bins of values without those of keys": (reseal(GOOD[1][:30] + b"\x20" + GOOD[1][31:]), pb.OUTCOME_CORRUPT),
    "scales of a quantizer without": (reseal(GOOD[1][:120] + b"\x02" + GOOD[1][121:]), pb.OUTCOME_CORRUPT),
    "more layers": (other_shape(layers=5), pb.OUTCOME_MISMATCH),
    "fewer tokens": (other_shape(tokens=8), pb.OUTCOME_MISMATCH),
    "not a record": (b"the value of some other program", pb.OUTCOME_NOT_A_RECORD),
    "one byte": (b"x", pb.OUTCOME_NOT_A_RECORD),
    "another version": (GOOD[1][:4] + b"\x03\x00" + GOOD[1][6:], pb.OUTCOME_NOT_A_RECORD),
    "unknown codec": (reseal(GOOD[1][:24] + b"\x77" + GOOD[1][25:]), pb.OUTCOME_UNSUPPORTED_CODEC),
    "wrong codec, sealed": (reseal(GOOD[1][:24] + b"\x02" + GOOD[1][25:]), pb.OUTCOME_CORRUPT),
    "empty slice, sealed": (reseal(GOOD[1][:128] + bytes(40) + GOOD[1][168:]), pb.OUTCOME_CORRUPT),
}


def assert_untouched_or_right(found: bytes, right: bytes) -> None:
    """Chunks behind a fault may be delivered if only decoding finds the fault; otherwise none is delivered."""
    assert len(found) == len(right)
    assert all(byte in (0x77, expected) for byte, expected in zip(found, right, strict=True))


# Records that the storage node stores: it refuses the others from any client.
TAKEN = [
    "another namespace",
    "another group",
    "other heads",
    "other layers",
    "another dtype",
    "more layers",
    "unknown codec",
    "wrong codec, sealed",
]


@pytest.mark.parametrize(
    ("server", "fault"), [("redis", fault) for fault in FAULTS] + [("storage_kv", fault) for fault in TAKEN]
)
async def test_faulty_record_is_a_miss_with_its_reason(
    fault: str, server: str, redis: Server, storage: Server, caplog: pytest.LogCaptureFixture
) -> None:
    bad, outcome = FAULTS[fault]
    where = redis if server == "redis" else storage
    caplog.set_level(logging.WARNING, "dpu_dataplane")
    async with running(where) as (daemon, client):
        answer = await offer(where, client, SHAPE, bad)
        assert (answer.outcome, answer.chunks) == (outcome, 1)
        assert client.chunk(0) == kv(SHAPE, 0)
        assert_untouched_or_right(client.chunk(2), kv(SHAPE, 2))
        assert KEYS[1].hex() in answer.detail
        assert dict(daemon.metrics.integrity_failures) == {outcome_name(outcome): 1}
        # The record must not be offered or logged again.
        assert list((await client.lookup(KEYS)).hits) == [1]
        assert (await client.fetch(KEYS)).chunks == 1
        assert len([entry for entry in caplog.records if KEYS[1].hex() in entry.getMessage()]) == 1
        if outcome == pb.OUTCOME_CORRUPT:
            await until(lambda: daemon.metrics.totals["deleted_records"] == 1)
            assert not where.has(KEYS[1])
        else:
            assert where.has(KEYS[1])


async def test_a_flipped_bit_anywhere_is_never_delivered(redis: Server) -> None:
    bits = 8 * len(GOOD[1])
    positions = [*range(0, 8 * 168, 13), *random.Random(1).sample(range(bits), 100)]  # the header with its first slice
    async with serving(SHAPE, 2, redis, delete_corrupt=False) as (_, client):
        redis.put(KEYS[0], GOOD[0])
        for position in positions:
            bad = bytearray(GOOD[1])
            bad[position // 8] ^= 1 << position % 8
            redis.put(KEYS[1], bytes(bad))
            in_magic_or_version = position // 8 < 6
            await client.fetches(KEYS[:2], 1, pb.OUTCOME_NOT_A_RECORD if in_magic_or_version else pb.OUTCOME_CORRUPT)
            assert client.chunk(0) == kv(SHAPE, 0)


async def test_a_flipped_bit_after_the_lookup_is_found(redis: Server) -> None:
    async with serving(SHAPE, 3, redis) as (_, client):
        redis.fill(SHAPE, KEYS)
        assert list((await client.lookup(KEYS)).hits) == [3]
        redis.put(KEYS[1], GOOD[1][:-9] + bytes([GOOD[1][-9] ^ 4]) + GOOD[1][-8:])
        await client.fetches(KEYS, 1, pb.OUTCOME_CORRUPT)
        assert list((await client.lookup(KEYS)).hits) == [1]


async def test_storing_a_quarantined_key_releases_it(redis: Server) -> None:
    async with running(redis, delete_corrupt=False) as (daemon, client):
        answer = await offer(redis, client, SHAPE, GOOD[1][:-5] + b"wrong")
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_CORRUPT, 1)
        assert list((await client.lookup(KEYS)).hits) == [1]
        client.write([kv(SHAPE, 1)])
        stored = await client.store(KEYS[1:2])
        assert (stored.outcome, stored.chunks) == (pb.OUTCOME_COMPLETE, 1)
        assert list((await client.lookup(KEYS)).hits) == [3]
        assert await client.fetched(KEYS) == kvs(SHAPE, 3)


async def test_quarantine_ends(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("dpu_dataplane.catalog.time", SimpleNamespace(monotonic=lambda: now))
    async with running(redis, delete_corrupt=False, quarantine_s=10) as (_, client):
        await offer(redis, client, SHAPE, GOOD[1][:-5] + b"wrong")
        redis.put(KEYS[1], GOOD[1])
        now += 9.9
        assert list((await client.lookup(KEYS)).hits) == [1]
        now += 0.1
        assert list((await client.lookup(KEYS)).hits) == [3]


async def test_a_lookup_with_a_wrong_namespace_costs_no_other_hit(redis: Server) -> None:
    async with running(redis) as (_, client):
        redis.fill(SHAPE, KEYS)
        await client.register(SHAPE, 3)
        assert list((await client.lookup(KEYS, space=bytes(32))).hits) == [0]
        assert list((await client.lookup(KEYS)).hits) == [3]
        assert (await client.fetch(KEYS)).chunks == 3


async def test_quarantine_is_bounded(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_QUARANTINE_MAX", 5)
    keys = keys_of(SHAPE, 20, seed=3)
    for key in keys:
        redis.put(key, b"no record")
    async with serving(SHAPE, 1, redis) as (daemon, client):
        for key in keys:
            assert list((await client.lookup([key])).hits) == [0]
        assert daemon.metrics.gauges["quarantined_keys"][1]() == 5
