"""Batches with progress reports: chunks in place are scattered while the others arrive."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from machine import WAIT_MAX_S, wait_for
from manager_support import Paged, collect, job
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout
from shadowserve.proto import dataplane_pb2 as pb

CHUNKS = 6


@pytest.fixture
def following(client: DataPlaneClient, shape: ChunkLayout, paged: Paged) -> Iterator[KVCacheManager]:
    """A manager with room for eight chunks in a batch."""
    registration = RegisteredMemory(client, [shape], 16 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S, progress=True)
    manager = KVCacheManager(client, registration, paged, fetch_timeout_s=WAIT_MAX_S, scatter_bytes_min=1)
    yield manager
    manager.close(WAIT_MAX_S)


def test_delivered_chunks_are_scattered_while_the_rest_of_the_batch_arrives(
    following: KVCacheManager, plane: ScriptedDataPlane, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    def after(chunks: int) -> None:
        if chunks in (2, 4, 5, CHUNKS):  # each time a third of the remaining chunks
            wait_for(lambda: len(paged.chunks) == chunks)

    plane.script.after_chunk = after
    whole = job("a", CHUNKS, fill)
    following.exchange([whole])
    (result,) = collect(following, 1)
    assert (result.chunks, result.reason) == ((CHUNKS,), "complete")
    assert [paged.chunks["a", index] for index in range(CHUNKS)] == [plane.records[key] for key in whole.keys[0]]
    assert [len(each.keys) for each in plane.fetches] == [CHUNKS], "in one call"


def test_less_than_is_worth_it_waits_for_more(
    client: DataPlaneClient,
    shape: ChunkLayout,
    plane: ScriptedDataPlane,
    paged: Paged,
    fill: Callable[[list[bytes]], None],
) -> None:
    registration = RegisteredMemory(client, [shape], 16 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S, progress=True)
    manager = KVCacheManager(client, registration, paged, scatter_bytes_min=3 * shape.raw_bytes)
    seen: list[int] = []

    def after(chunks: int) -> None:
        if chunks in (3, CHUNKS):
            wait_for(lambda: len(paged.chunks) >= chunks)
        seen.append(len(paged.chunks))

    plane.script.after_chunk = after
    manager.exchange([job("a", CHUNKS, fill)])
    assert collect(manager, 1)[0].complete
    manager.close(WAIT_MAX_S)
    assert seen == [0, 0, 3, 3, 3, 6]


def test_a_prompt_larger_than_a_batch_alternates_between_the_halves(
    following: KVCacheManager, plane: ScriptedDataPlane, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    whole = job("a", 20, fill)
    following.exchange([whole])
    assert collect(following, 1)[0].complete
    assert [paged.chunks["a", index] for index in range(20)] == [plane.records[key] for key in whole.keys[0]]
    assert [len(each.keys) for each in plane.fetches] == [8, 8, 4]
    first, second, third = (each.offset for each in plane.fetches)
    assert first == third != second


def test_a_failed_chunk_keeps_the_chunks_before_it(
    following: KVCacheManager, plane: ScriptedDataPlane, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    plane.script.fail_fetch_at = 4
    following.exchange([job("a", CHUNKS, fill)])
    (result,) = collect(following, 1)
    assert (result.chunks, result.reason) == ((4,), "corrupt")
    assert set(paged.chunks) == {("a", index) for index in range(4)}


def test_chunks_in_place_count_even_without_an_answer(
    following: KVCacheManager, plane: ScriptedDataPlane, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    memory = following._registration.acquire(WAIT_MAX_S)

    def die(chunks: int) -> None:
        if chunks == 3:
            wait_for(lambda: len(paged.chunks) == 3)
            raise RuntimeError("as in the script")

    plane.script.after_chunk = die
    following.exchange([job("a", CHUNKS, fill)])
    (result,) = collect(following, 1)
    assert result.chunks == (3,) and not result.complete
    assert set(paged.chunks) == {("a", index) for index in range(3)}
    assert following._registration.current is not memory, "the data plane has not answered, so it may still write"


def test_progress_before_an_invalid_answer_does_not_count(
    following: KVCacheManager, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(outcome=pb.OUTCOME_COMPLETE)
    following.exchange([job("a", CHUNKS, fill)])
    (result,) = collect(following, 1)
    assert (result.chunks, result.reason) == ((0,), "invalid_answer")


def test_a_batch_ends_early_where_its_job_is_cancelled(
    following: KVCacheManager, plane: ScriptedDataPlane, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    def cancel(chunks: int) -> None:
        if chunks == 3:
            wait_for(lambda: len(paged.chunks) == 3)
            following.exchange(cancel=["a"])
            wait_for(lambda: bool(plane.cancelled))

    plane.script.after_chunk = cancel
    following.exchange([job("a", CHUNKS, fill)])
    (result,) = collect(following, 1)
    assert (result.chunks, result.reason) == ((3,), "cancelled")


def test_scattering_that_fails_ends_the_job(
    following: KVCacheManager, paged: Paged, fill: Callable[[list[bytes]], None]
) -> None:
    paged.failure = RuntimeError("no such block")
    following.exchange([job("a", CHUNKS, fill)])
    (result,) = collect(following, 1)
    assert (result.chunks, result.reason) == ((0,), "scatter_failed")


@pytest.mark.parametrize("counts", [(7, 7), (9, 1), (0, 11), (5, 0), (2, 30)], ids=str)
def test_chunks_of_every_part_arrive_whatever_their_number(
    client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout, counts: tuple[int, int]
) -> None:
    small = replace(shape, namespace=b"s" * 32, vector_length=shape.vector_length // 4)
    placed: dict[tuple[int, int], bytes] = {}

    def scatter(job: FetchJob, part: int, first: int, chunks: memoryview) -> None:
        size = (shape, small)[part].raw_bytes
        for index in range(len(chunks) // size):
            assert (part, first + index) not in placed, "scattered twice"
            placed[part, first + index] = bytes(chunks[index * size :][:size])

    size = 6 * (shape.raw_bytes + small.raw_bytes)
    registration = RegisteredMemory(client, [shape, small], size, connect_timeout_s=WAIT_MAX_S, progress=True)
    manager = KVCacheManager(client, registration, scatter, scatter_bytes_min=1)
    keys = tuple(tuple(bytes([part, chunk]) + bytes(30) for chunk in range(count)) for part, count in enumerate(counts))
    for part, names in enumerate(keys):
        for chunk, key in enumerate(names):
            plane.records[key] = bytes([1 + part * 50 + chunk]) * (shape, small)[part].raw_bytes
    manager.exchange([FetchJob(request_id="a", keys=keys)])
    (result,) = collect(manager, 1)
    manager.close(WAIT_MAX_S)
    assert (result.chunks, result.reason) == (counts, "complete")
    assert placed == {
        (part, chunk): plane.records[key] for part, names in enumerate(keys) for chunk, key in enumerate(names)
    }
