"""Hosts: Hello and its refusals, sessions, several hosts, and removed hosts."""

import asyncio
import contextlib
import hashlib
import logging
from typing import Any

import grpc
import pytest
from dataplane_support import (
    EXHAUSTED,
    FAILED,
    Client,
    Segment,
    Server,
    cancel,
    client_of,
    config,
    hello_request,
    keys_of,
    kv,
    layout,
    refused,
    repeat,
    running,
)
from machine import NEVER_MS, NEVER_S, until

from dpu_dataplane.hosts import SESSIONS_MAX, HelloRequired, HostTable
from dpu_dataplane.registrations import ChannelsOfLayouts, Registrations
from dpu_dataplane.server import Daemon, _buffers, _make_pipeline
from shadowserve import __version__, native
from shadowserve.keys import ModelIdentity
from shadowserve.proto import HELLO_KEY, PROTOCOL_VERSION, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import engine_message, layout_message

SHAPE = layout()
KEYS = keys_of(SHAPE, 4)


def another(daemon: Daemon) -> contextlib.AbstractAsyncContextManager[Client]:
    """A client on another machine."""
    return client_of(daemon, host="another machine", process="an engine on gpu-7")


async def test_hello_describes_the_data_plane(client: Client, request: pytest.FixtureRequest) -> None:
    answer = await client.hello(layout=layout_message(SHAPE), chunk_bytes=SHAPE.raw_bytes)
    assert (answer.version, answer.protocol_version) == (__version__, PROTOCOL_VERSION)
    backend = native.backends()[request.node.callspec.params["client"]]
    assert (answer.backend, answer.emulated, bool(answer.device)) == (backend.name, backend.emulated, True)
    assert "shared_memory" in answer.memory_kinds


async def test_calls_without_a_session_are_refused(client: Client) -> None:
    await client.register(SHAPE, 1)
    for call in (
        client.plain.Lookup(pb.LookupRequest(timeout_ms=100)),
        client.plain.RegisterMemory(client.register_request()),
        client.plain.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=client.memory_id)),
        client.plain.Fetch(client.fetch_request(KEYS)),
        client.plain.Store(client.store_request(KEYS[:1])),
        client.plain.Cancel(pb.CancelRequest(job_id="job")),
        client.plain.Trace(pb.TraceRequest(timeout_ms=100, fetches=1)).read(),
    ):
        error = await refused(call, FAILED, "send Hello")
        assert HELLO_KEY in dict(error.trailing_metadata())
    assert (await client.plain.Statistics(pb.StatisticsRequest())).registrations == 1
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT


async def test_the_refusal_of_a_second_host_names_the_connected_host(client: Client) -> None:
    await client.register(SHAPE, 2)
    words = ("hosts_max", "a test", "since 20", "1 segments", "restart")
    await refused(client.plain.Hello(hello_request(host="another machine")), EXHAUSTED, *words)
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT


async def test_another_host_is_accepted_after_the_first_is_removed(storage: Server) -> None:
    async with running(storage, registration_idle_s=0.5) as (daemon, client):
        newcomer = Client(daemon.address)
        await repeat(lambda: newcomer.hello(host="another machine"), passing=EXHAUSTED)
        error = await refused(client.lookup(KEYS, SHAPE.namespace), FAILED)
        assert HELLO_KEY in dict(error.trailing_metadata())
        await newcomer.close()


@pytest.mark.parametrize("host", ["this machine", "another machine"])
async def test_a_session_has_no_access_to_the_memory_of_another_one(storage: Server, host: str) -> None:
    storage.fill(SHAPE, KEYS)
    async with running(storage, hosts_max=2) as (daemon, victim), client_of(daemon, host=host) as thief:
        await victim.register(SHAPE, 4)
        assert thief.session != victim.session, "a session must be random, and not depend on the name"
        thief.shape, thief.segment, thief.memory_id = SHAPE, victim.segment, victim.memory_id
        assert (await thief.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        assert (await thief.store(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY
        await thief.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=victim.memory_id))
        assert not victim.segment.memory.any()
        assert (await victim.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        assert victim.chunk(3) == kv(SHAPE, 3)


@pytest.mark.parametrize("host", ["this machine", "another machine"])
async def test_a_session_has_no_access_to_the_jobs_of_another_one(mortal_storage: Server, host: str) -> None:
    async with (
        running(mortal_storage, hosts_max=2, command_timeout_s=NEVER_S) as (daemon, mine),
        client_of(daemon, host=host) as theirs,
    ):
        await mine.register(SHAPE, 4)
        await theirs.register(SHAPE, 4)
        mortal_storage.freeze()
        jobs = [
            asyncio.ensure_future(each.fetch(KEYS, job_id=job_id, timeout_ms=NEVER_MS))
            for each, job_id in ((mine, "the same"), (theirs, "the same"))
        ]
        await until(lambda: daemon.metrics.gauges["fetch_queue_jobs"][1]() == 1)  # and so both have arrived
        assert await cancel(theirs, "the same")
        assert (await jobs[1]).outcome == pb.OUTCOME_CANCELLED
        assert not await cancel(theirs, "the same")
        assert not jobs[0].done()
        assert await cancel(mine, "the same")
        assert (await jobs[0]).outcome == pb.OUTCOME_CANCELLED


async def test_a_process_that_reconnects_with_its_session_keeps_its_memory(client: Client) -> None:
    await client.register(SHAPE, 4)
    again = await client.hello(session=client.session)
    assert again.session == client.session
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT
    other = await client.hello(session=bytes(16))
    assert len(other.session) == 16 and other.session not in (bytes(16), again.session), (
        "the caller must never choose it"
    )
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_UNKNOWN_MEMORY


async def test_sessions_of_a_host_are_bounded_and_those_with_memory_stay(client: Client) -> None:
    await client.register(SHAPE, 4)
    first = (await client.plain.Hello(hello_request())).session
    for _ in range(SESSIONS_MAX):
        await client.plain.Hello(hello_request())
    assert (await client.plain.Hello(hello_request(session=first))).session != first, (
        "the host idle for the longest time must be removed"
    )
    assert (await client.fetch(KEYS)).outcome == pb.OUTCOME_ABSENT


class Context:
    """The part of a call's context that a table of hosts reads."""

    session = b""

    def peer(self) -> str:
        return "ipv4:192.0.2.7:1"

    def peer_identities(self) -> None:
        return None

    def invocation_metadata(self) -> list[tuple[str, bytes]]:
        return [("other-bin", b"x"), (SESSION_KEY, self.session)]


async def test_an_idle_host_without_calls_and_segments_is_removed(storage: Server) -> None:
    settings = config(storage, registration_idle_s=100)
    pipeline = _make_pipeline(settings, _buffers(settings))
    registrations = Registrations(settings, pipeline)
    gone: list[str] = []
    hosts, context = HostTable(settings, registrations, gone.append), Context()
    session, new = hosts.enter(hello_request(), context)
    assert new
    context.session = session.token
    with hosts.call(context):
        hosts.expire(session.used_at + 1000)
        assert len(hosts) == 1, "a call of the host is running"
    segment = Segment(SHAPE.raw_bytes)
    memory = pb.SharedMemory(name=segment.name, size=segment.size)
    request = pb.RegisterMemoryRequest(shared_memory=memory)
    registration = await registrations.register(request, [SHAPE], ChannelsOfLayouts(), session.owner, session.token)
    segment.close()
    registration.used_at = session.used_at + 950
    hosts.expire(session.used_at + 1000)
    assert len(hosts) == 1, "the host has a segment"
    hosts.expire(session.used_at + 99)
    assert len(hosts) == 1, "the host has been idle only briefly"
    hosts.expire(session.used_at + 1051)
    assert len(hosts) == len(registrations) == 0 and gone == [session.owner]
    with pytest.raises(HelloRequired), hosts.call(context):
        pass
    pipeline.close()


async def test_a_recording_has_no_spans_of_other_hosts(storage: Server) -> None:
    storage.fill(SHAPE, KEYS)
    async with running(storage, hosts_max=2) as (daemon, mine), another(daemon) as theirs:
        await mine.register(SHAPE, 4)
        await theirs.register(SHAPE, 4)
        call = mine.stub.Trace(pb.TraceRequest(timeout_ms=NEVER_MS, fetches=1))
        assert await call.read() == pb.TraceResponse()
        assert (await theirs.fetch(KEYS)).outcome == pb.OUTCOME_COMPLETE
        assert (await mine.fetch(KEYS[:1])).outcome == pb.OUTCOME_COMPLETE
        spans: list[pb.TraceSpan] = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            spans += answer.spans
        assert {span.piece for span in spans if span.slice >= 0} == {0}
        assert [span.step for span in spans].count("fetch") == 1
        assert len({span.batch for span in spans if span.core >= 0}) == 1


async def test_a_host_cannot_use_up_other_hosts_shares_of_memory(storage: Server) -> None:
    size = 4 * SHAPE.raw_bytes
    async with (
        running(storage, hosts_max=2, registrations_max=4, registered_bytes_max=6 * size) as (daemon, ours),
        another(daemon) as theirs,
    ):
        await ours.register(SHAPE, 4)
        share = f"its share is {3 * size}: registered_bytes_max ({6 * size}) divided by hosts_max (2)"
        await refused(ours.register(SHAPE, 9), EXHAUSTED, share, "raise registered_bytes_max")
        await ours.register(SHAPE, 4)
        share = "has registered 2 regions of memory and asks for 1 more; its share is 2: registrations_max (4) divided"
        error = await refused(ours.register(SHAPE, 4), EXHAUSTED, share, "raise registrations_max")
        assert "running" not in (error.details() or ""), "other hosts have room: it is not asked to end an engine"
        await theirs.register(SHAPE, 4)
        await theirs.register(SHAPE, 8)
        await ours.stub.ReleaseMemory(pb.ReleaseMemoryRequest(memory_id=ours.memory_id))
        await ours.register(SHAPE, 1)


async def test_a_host_cannot_fill_the_queue(mortal_storage: Server) -> None:
    mortal_storage.fill(SHAPE, KEYS)
    async with (
        running(mortal_storage, hosts_max=2, fetch_queue=4, command_timeout_s=NEVER_S) as (daemon, ours),
        another(daemon) as theirs,
    ):
        await ours.register(SHAPE, 8)
        await theirs.register(SHAPE, 4)
        await ours.lookup(KEYS)
        mortal_storage.freeze()
        fetches = [
            asyncio.ensure_future(ours.fetch(KEYS[:1], offset=index * SHAPE.raw_bytes, length=SHAPE.raw_bytes))
            for index in range(8)
        ]
        queued = daemon.metrics.gauges["fetch_queue_jobs"][1]
        # One has its turn, and two wait; if it did not have its turn yet when they came, one waits.
        await until(lambda: queued() + sum(fetch.done() for fetch in fetches) == 7)
        waits = asyncio.ensure_future(theirs.fetch(KEYS))
        await until(lambda: queued() + sum(fetch.done() for fetch in fetches) == 8)
        mortal_storage.thaw()
        assert (await waits).chunks == 4
        ended = await asyncio.gather(*fetches, return_exceptions=True)
        turned_away = [each for each in ended if isinstance(each, grpc.aio.AioRpcError)]
        assert {(each.code(), "fetch_queue" in str(each.details())) for each in turned_away} == {(EXHAUSTED, True)}
        assert len(turned_away) in (5, 6)


# ---- Engines of one model

MODEL = ModelIdentity(model="a model", dtype="bfloat16")


def engine(**changes: Any) -> pb.Engine:
    said = engine_message(MODEL, layout(), paged=False)
    said.MergeFrom(pb.Engine(**changes))
    return said


async def engine_hello(client: Client, process: str, said: pb.Engine) -> list[str]:
    shape = layout(namespace=hashlib.sha256(said.SerializeToString()).digest())
    answer = await client.hello(process=process, engine=said, layout=layout_message(shape), chunk_bytes=shape.raw_bytes)
    return list(answer.differences)


async def test_engines_of_one_model_without_shared_records_are_reported_and_logged_once(
    storage: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: two engines with different chunk_tokens shared no records, without a warning."""
    async with running(storage) as (_, client):
        with caplog.at_level(logging.WARNING):
            assert await engine_hello(client, "the first", engine()) == []
            assert await engine_hello(client, "the second", engine()) == []
            for _ in range(3):
                [difference] = await engine_hello(client, "the third", engine(chunk_tokens=512))
            assert "the third" in difference and "chunk_tokens (512 and 256)" in difference
            found = await engine_hello(client, "the fourth", engine(quantizer="binned of 64 and 16 bins"))
            assert len(found) == 2 and any(
                "quantizer (binned of 64 and 16 bins and lossless)" in each for each in found
            )
            assert await engine_hello(client, "of another model", engine(model=bytes(32), chunk_tokens=64)) == []
        lines = [record.message for record in caplog.records if "share no records" in record.message]
        assert len([line for line in lines if "the third" in line and "the fourth" not in line]) == 1


async def test_statistics_list_engines_that_have_registered_memory_or_are_new(
    storage: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(storage) as (_, client):
        shape = layout()
        said = engine()
        await client.hello(process="one", engine=said, layout=layout_message(shape), chunk_bytes=shape.raw_bytes)
        await engine_hello(client, "two", engine(chunk_tokens=512))

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
