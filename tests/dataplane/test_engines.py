"""Engines of one model with different chunk sizes or quantizers: log line and answer of Hello."""

import hashlib
import logging
from typing import Any

import pytest
from dataplane_support import Client, Server, layout, running

from shadowserve.keys import ModelIdentity
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import engine_message, layout_message

MODEL = ModelIdentity(model="a model", dtype="bfloat16")


def engine(**changes: Any) -> pb.Engine:
    said = engine_message(MODEL, layout(), paged=False)
    said.MergeFrom(pb.Engine(**changes))
    return said


async def hello(client: Client, process: str, said: pb.Engine) -> list[str]:
    shape = layout(namespace=hashlib.sha256(said.SerializeToString()).digest())
    answer = await client.hello(process=process, engine=said, layout=layout_message(shape), chunk_bytes=shape.raw_bytes)
    return list(answer.differences)


async def test_engines_of_one_model_without_shared_records_are_reported_and_logged_once(
    storage: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: two engines with different chunk_tokens shared no records, without a warning."""
    async with running(storage) as (_, client):
        with caplog.at_level(logging.WARNING):
            assert await hello(client, "the first", engine()) == []
            assert await hello(client, "the second", engine()) == []
            for _ in range(3):
                [difference] = await hello(client, "the third", engine(chunk_tokens=512))
            assert "the third" in difference and "chunk_tokens (512 and 256)" in difference
            found = await hello(client, "the fourth", engine(quantizer="binned of 64 and 16 bins"))
            assert len(found) == 2 and any(
                "quantizer (binned of 64 and 16 bins and lossless)" in each for each in found
            )
            assert await hello(client, "of another model", engine(model=bytes(32), chunk_tokens=64)) == []
        lines = [record.message for record in caplog.records if "share no records" in record.message]
        assert len([line for line in lines if "the third" in line and "the fourth" not in line]) == 1


async def test_statistics_list_engines_that_have_registered_memory_or_are_new(
    storage: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(storage) as (_, client):
        shape = layout()
        said = engine()
        await client.hello(process="one", engine=said, layout=layout_message(shape), chunk_bytes=shape.raw_bytes)
        await hello(client, "two", engine(chunk_tokens=512))

        async def listed() -> set[str]:
            answer = await client.plain.Statistics(pb.StatisticsRequest())
            return {each.process for each in answer.engines}

        assert await listed() == {"one", "two"}
        await client.register(shape, 1)
        monkeypatch.setattr("dpu_dataplane.engines._NEW_S", 0.0)
        assert await listed() == {"one"}
        await client.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id))
        assert await listed() == set()


def test_a_quantizer_description_holds_the_parameters_of_the_identity() -> None:
    binned = layout("binned")
    assert engine_message(MODEL, binned, paged=False).quantizer.startswith("binned of ")
    assert engine_message(MODEL, layout(), paged=True).quantizer == "lossless, as pages"
    other = ModelIdentity(model="a model", dtype="bfloat16", chunk_tokens=512)
    assert engine_message(other, layout(), paged=False).model == engine().model
