"""Records and outcomes of stores."""

import itertools
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from dataplane_support import (
    BACKEND,
    Server,
    StartServer,
    config,
    keys_of,
    kv,
    kvs,
    layout,
    make_record,
    running,
    serving,
)
from machine import until

from dpu_dataplane.batches import encoded_bound
from dpu_dataplane.config import codec_name
from dpu_dataplane.jobs import Job
from dpu_dataplane.sources.source import Encoded
from shadowserve import native, record
from shadowserve.proto import dataplane_pb2 as pb


@pytest.mark.parametrize("codec", ["auto", "kvrans", "deflate", "lz4", "zstd", "none"])
async def test_records_are_those_of_the_reference(storage: Server, codec: str) -> None:
    expected = native.Codec[codec_name(codec, BACKEND).upper()]
    assert codec != "auto" or expected is (native.Codec.KVRANS if BACKEND == "software" else native.Codec.DEFLATE)
    async with running(storage, codec=codec) as (_, client):
        treatments = itertools.product(("lossless", "binned"), ("bfloat16", "float32"))
        shapes = [
            *(layout(*treatment) for treatment in treatments),
            layout("binned", "float8_e4m3"),
            layout("binned", bins=64, value_bins=16),
            layout("binned", bins=64, value_bins=16, scale_tokens=5),
        ]
        for seed, shape in enumerate(shapes):
            keys = keys_of(shape, 3, seed)
            await client.register(shape, 3)
            answer = await client.stores(keys)
            records = [storage.get(key) for key in keys]
            for index, (key, data) in enumerate(zip(keys, records, strict=True)):
                assert data == record.encode(key, expected, shape, kv(shape, index))
            assert answer.stored_bytes == sum(map(len, records))
            assert answer.raw_bytes == 3 * shape.raw_bytes


async def test_records_name_the_chunk_before_them(storage: Server) -> None:
    shape = layout()
    keys = keys_of(shape, 3)
    async with serving(shape, 3, storage) as (_, client):
        await client.stores(keys, parents=[b"", keys[0], keys[1]])
        assert [record.parse_header(storage.get(key)).parent for key in keys] == [b"", keys[0], keys[1]]


async def test_stored_chunks_are_not_sent_again(storage: Server) -> None:
    shape = layout()
    keys = keys_of(shape, 4)
    storage.put(keys[1], make_record(shape, keys[1], 1))
    async with serving(shape, 4, storage) as (daemon, client):
        await client.stores(keys)
        assert daemon.metrics.totals["stored_raw_bytes"] == 3 * shape.raw_bytes
        assert (await client.store(keys)).chunks == 4
        assert daemon.metrics.totals["stored_raw_bytes"] == 3 * shape.raw_bytes
        assert (await client.fetch(keys)).chunks == 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_value_that_binning_cannot_hold_costs_its_chunk(storage: Server, value: float) -> None:
    shape = layout("binned", "float32")
    keys = keys_of(shape, 3)
    storage.put(keys[2], make_record(shape, keys[2], 2))
    async with serving(shape, 3, storage) as (_, client):
        client.fill(3)
        client.segment.memory.view(np.float32)[shape.raw_bytes // 4 + 17] = value
        answer = await client.store(keys)
        assert (answer.outcome, answer.stored) == (pb.OUTCOME_NOT_STORABLE, [True, False, True])
        assert answer.raw_bytes == 2 * shape.raw_bytes
        assert answer.stored_bytes == len(storage.get(keys[0])) + len(storage.get(keys[2]))


async def test_a_full_server_refuses_with_its_text(start_server: StartServer) -> None:
    server = start_server("--maxmemory", "1500kb", "--maxmemory-policy", "noeviction", kind="redis")
    shape = layout(vector_length=2048)
    keys = keys_of(shape, 6)
    async with serving(shape, 6, server) as (_, client):
        client.fill(6)
        answer = await client.store(keys)
        assert answer.outcome == pb.OUTCOME_STORAGE_REFUSED
        assert "OOM" in answer.detail
        assert answer.chunks < 6
        # The connection can still be used.
        assert (await client.fetch(keys)).chunks == answer.chunks


async def test_a_sound_record_of_another_namespace_is_not_replaced(redis: Server) -> None:
    shape = layout()
    [key] = keys_of(shape, 1)
    theirs = make_record(layout(namespace=bytes(32)), key, 5)
    redis.put(key, theirs)
    async with serving(shape, 1, redis) as (_, client):
        client.fill(1)
        answer = await client.store([key])
        assert (answer.outcome, answer.chunks) == (pb.OUTCOME_MISMATCH, 0)
    assert redis.get(key) == theirs


@pytest.mark.parametrize(
    "bad", [b"not a record", b"SSKV but cut", make_record(layout(), bytes(32), 3)], ids=["text", "cut", "other key"]
)
async def test_faulty_records_are_replaced_by_a_store(redis: Server, bad: bytes) -> None:
    shape = layout()
    [key] = keys_of(shape, 1)
    redis.put(key, bad)
    async with serving(shape, 1, redis) as (_, client):
        await client.stores([key])
        assert (await client.fetch([key])).outcome == pb.OUTCOME_COMPLETE


async def test_chunks_are_encoded_while_earlier_ones_are_put(storage: Server) -> None:
    """A batch that overwrites encoded bytes before their transmission would store wrong bytes."""
    shape = layout(vector_length=2048)
    keys = keys_of(shape, 10)
    async with serving(shape, 10, storage, store_buffer_bytes="3MiB", store_cores=[0]) as (daemon, client):
        codec = native.Codec[codec_name("auto", BACKEND).upper()]
        places = (3 << 20) // encoded_bound(shape, codec, int(config(storage).slice_bytes))
        assert 2 < places < len(keys)
        put, encoded = daemon._source.put, Counter[str]()
        encode = daemon._pipeline.encode

        def count(batch_: native.Batch) -> native.Result:
            encoded["chunks"] += len(batch_.pieces)
            return encode(batch_)

        async def slowly(job: Job, key: bytes, record: Encoded) -> tuple[native.Result, str]:
            number = keys.index(key)
            await until(lambda: encoded["chunks"] >= min(number + places, len(keys)))
            assert encoded["chunks"] <= number + places, "a batch overwrote bytes during their transmission"
            return await put(job, key, record)

        with patch.object(daemon._pipeline, "encode", count), patch.object(daemon._source, "put", slowly):
            await client.stores(keys)
        assert await client.fetched(keys) == kvs(shape, 10)
