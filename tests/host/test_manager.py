"""The KV cache manager: figure 6 of the paper, and all failures."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from manager_support import Paged, collect, job, keys_of, prompt
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.disaggregation import Available
from host_control.manager import (
    FetchJob,
    FetchResult,
    KVCacheManager,
    first_in_first_out,
    shortest_job_first,
)
from host_control.registered_memory import RegisteredMemory
from host_control.segment import Segment
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb

# ---------------------------------------------------------------------- exchange (figure 6)


def test_the_scheduler_is_not_blocked_while_fetches_run(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 4, fill)])
    plane.wait_for_call("Fetch")
    for _ in range(100):
        assert manager.exchange() == [], "the fetch has not ended, not even by its deadline"
    plane.script.unstall.set()
    assert collect(manager, 1)[0].complete


def test_an_engine_that_loads_nothing_wakes_no_thread_with_its_steps(manager: KVCacheManager) -> None:
    """Symptom: each step of an engine without fetches took 40 us more of its core."""
    status = Path(f"/proc/self/task/{manager._thread.native_id}/status")

    def switches() -> str:
        return next(line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))

    def sleeps() -> bool:
        """Return True if the thread is idle, and does not wait for the interpreter."""
        before = switches()
        time.sleep(0.05)
        return switches() == before

    wait_for(lambda: manager._registration.current is not None and sleeps())
    before = switches()
    for _ in range(100):
        assert manager.exchange() == []
        time.sleep(0.001)  # threads that are awake run now
    assert switches() == before


def test_the_manager_is_not_idle_before_the_last_outcome_is_taken(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None]
) -> None:
    assert manager.idle
    manager.exchange([job("a", 2, fill)])
    assert not manager.idle
    manager.wait(["a"])
    assert not manager.idle, "no step has received the outcome"
    assert len(manager.exchange()) == 1 and manager.idle


def test_waiting_for_jobs_ends_with_them_and_not_with_others(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None], paged: Paged
) -> None:
    keys = {name: keys_of(prompt(9, seed)) for seed, name in enumerate("abc")}
    for name in keys:
        fill(keys[name])
    manager.exchange([FetchJob(request_id=name, keys=(tuple(keys[name]),)) for name in "ab"])
    manager.wait("ab")
    assert paged.order == ["a", "b"], "in place after the wait"
    plane.script.stall.add("Fetch")
    ended = manager.exchange([FetchJob(request_id="c", keys=(tuple(keys["c"]),))])
    assert [result.job.request_id for result in ended] == ["a", "b"]
    manager.wait("ab")
    assert manager.exchange() == []
    plane.script.unstall.set()
    manager.wait("c")
    assert [result.job.request_id for result in manager.exchange()] == ["c"]


def test_waiting_ends_by_the_deadline(
    make_manager: Callable[..., KVCacheManager], plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    manager = make_manager(fetch_timeout_s=0.3)
    keys = keys_of(prompt(9, 0))
    fill(keys)
    plane.script.stall.add("Fetch")
    manager.exchange([FetchJob(request_id=name, keys=(tuple(keys),)) for name in "ab"])
    manager.wait("ab")
    assert {result.reason for result in manager.exchange()} == {"deadline"}


def test_exchange_is_atomic_between_threads(manager: KVCacheManager, fill: Callable[[list[bytes]], None]) -> None:
    jobs = [job(f"r{number}", 1, fill) for number in range(60)]
    taken: list[FetchResult] = []
    lock = threading.Lock()

    def engine(part: list[FetchJob]) -> None:
        for one in part:
            results = manager.exchange([one])
            with lock:
                taken.extend(results)

    threads = [threading.Thread(target=engine, args=(jobs[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken += collect(manager, 60 - len(taken))
    assert sorted(result.job.request_id for result in taken) == sorted(one.request_id for one in jobs)
    assert all(result.complete for result in taken)


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("order", "expected"),
    [(first_in_first_out, ["x", "long", "middle", "short"]), (shortest_job_first, ["x", "short", "middle", "long"])],
)
def test_order_of_the_fetching_queue(
    make_manager: Callable[..., KVCacheManager],
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    order: Any,
    expected: list[str],
) -> None:
    manager = make_manager(order=order)
    plane.script.fetch_delay = 0.1
    manager.exchange([job("x", 1, fill)])
    plane.wait_for_call("Fetch")
    manager.exchange([job("long", 3, fill), job("middle", 2, fill), job("short", 1, fill)])
    assert [result.job.request_id for result in collect(manager, 4)] == expected


def test_long_job_that_is_overtaken_ends_by_its_deadline(
    make_manager: Callable[..., KVCacheManager], fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    manager = make_manager(order=shortest_job_first, fetch_timeout_s=0.3)
    plane.script.fetch_delay = 0.02
    ends = time.monotonic() + WAIT_MAX_S
    overtaking = 0
    while not overtaking:  # on a slow machine all of them may time out
        manager.exchange([job("long", 4, fill), *(job(f"short{number}", 1, fill) for number in range(50))])
        *shorter, result = sorted(collect(manager, 51), key=lambda result: result.job.chunks)
        assert (result.job.request_id, result.chunks, result.reason) == ("long", (0,), "deadline")
        overtaking = sum(short.complete for short in shorter)
        assert time.monotonic() < ends


def test_order_that_fails_falls_back_to_the_oldest(
    make_manager: Callable[..., KVCacheManager], fill: Callable[[list[bytes]], None]
) -> None:
    manager = make_manager(order=lambda queue: 99)
    manager.exchange([job("a", 1, fill), job("b", 1, fill)])
    assert [result.job.request_id for result in collect(manager, 2)] == ["a", "b"]


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("batch_chunks", [1, 2, 3, 100])
def test_job_larger_than_the_buffers_runs_in_rounds(
    manager: KVCacheManager,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
    batch_chunks: int,
) -> None:
    plane.script.batch_chunks = batch_chunks
    big = job("big", 11, fill)
    manager.exchange([big])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((11,), "complete")
    for index, key in enumerate(big.keys[0]):
        assert paged.chunks["big", index] == plane.records[key]
    halves = {fetch.offset for fetch in plane.fetches}
    assert len(halves) == 2, "batches alternate between the halves of the registered memory"


def test_next_batch_arrives_while_the_last_is_scattered(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane, paged: Paged
) -> None:
    paged.gate.clear()
    manager.exchange([job("big", 8, fill)])
    plane.wait_for_call("Fetch", 2)
    assert paged.chunks == {}, "the second batch runs before the first is in place"
    paged.gate.set()
    (result,) = collect(manager, 1)
    assert result.complete


def test_a_prompt_that_fits_into_one_batch_is_scattered_while_the_rest_of_it_arrives(
    client: DataPlaneClient,
    shape: ChunkLayout,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
) -> None:
    registration = RegisteredMemory(client, [shape], 32 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S)
    manager = KVCacheManager(client, registration, paged, batch_bytes_min=2 * shape.raw_bytes)
    paged.gate.clear()
    manager.exchange([job("a", 12, fill)])
    plane.wait_for_call("Fetch", 2)
    assert paged.chunks == {}, "the second batch runs before the first is in place"
    paged.gate.set()
    (result,) = collect(manager, 1)
    manager.close()
    assert result.complete and len(paged.chunks) == 12
    assert [len(each.keys) for each in plane.fetches] == [6, 3, 2, 1]


def test_next_job_arrives_while_the_last_is_scattered(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane, paged: Paged
) -> None:
    paged.gate.clear()
    manager.exchange([job("a", 2, fill), job("b", 2, fill)])
    plane.wait_for_call("Fetch", 2)
    assert manager.exchange() == []
    paged.gate.set()
    assert [result.job.request_id for result in collect(manager, 2)] == ["a", "b"]


# ---------------------------------------------------------------------- parts


@dataclass
class Pages:
    """Scattered chunks of several shapes, by request, part and chunk, and their order."""

    chunk_bytes: list[int]
    chunks: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    fails_at: int | None = None

    def __call__(self, job: FetchJob, part: int, first: int, chunks: memoryview) -> None:
        assert self.gate.wait(WAIT_MAX_S)
        if part == self.fails_at:
            raise RuntimeError("no such block")
        size = self.chunk_bytes[part]
        assert len(chunks) % size == 0
        for index in range(len(chunks) // size):
            place = (job.request_id, part, first + index)
            assert place not in self.chunks, "scattered twice"
            self.chunks[place] = bytes(chunks[index * size : (index + 1) * size])
            self.order.append(place[1:])


class Parts:
    """A manager of parts with these shapes, and jobs for it."""

    def __init__(
        self, client: DataPlaneClient, plane: Any, shapes: list[ChunkLayout], size: int, least: int = 1
    ) -> None:
        self.plane, self.shapes = plane, shapes
        self.pages = Pages([shape.raw_bytes for shape in shapes])
        self.pages.gate.set()
        self.registration = RegisteredMemory(client, shapes, size, connect_timeout_s=WAIT_MAX_S)
        self.manager = KVCacheManager(
            client, self.registration, self.pages, fetch_timeout_s=WAIT_MAX_S, batch_bytes_min=least
        )

    def job(self, name: str, *counts: int) -> FetchJob:
        """Return a job for the given number of chunks of each part; all of them are stored."""
        keys = tuple(
            tuple(bytes([sum(name.encode()) % 256, part, chunk]) + bytes(29) for chunk in range(count))
            for part, count in enumerate(counts)
        )
        for part, (shape, names) in enumerate(zip(self.shapes, keys, strict=True)):
            for chunk, key in enumerate(names):
                self.plane.records[key] = bytes([(1 + part * 50 + chunk) % 251]) * shape.raw_bytes
        return FetchJob(request_id=name, keys=keys)

    def fetched(self, job: FetchJob) -> FetchResult:
        self.manager.exchange([job])
        (result,) = collect(self.manager, 1)
        there = {place[1:]: data for place, data in self.pages.chunks.items() if place[0] == job.request_id}
        if result.reason != "scatter_failed":
            assert set(there) == {(part, chunk) for part, count in enumerate(result.chunks) for chunk in range(count)}
        assert all(data == self.plane.records[job.keys[part][chunk]] for (part, chunk), data in there.items())
        return result


@pytest.fixture
def parts(client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout) -> Iterator[Parts]:
    """Two parts; one has chunks four times as large. A batch has room for three chunks of each."""
    small = replace(shape, namespace=b"s" * 32, vector_length=shape.vector_length // 4)
    parts = Parts(client, plane, [shape, small], 2 * 3 * (shape.raw_bytes + small.raw_bytes))
    yield parts
    parts.manager.close(WAIT_MAX_S)


def asked(plane: ScriptedDataPlane, parts: Parts) -> list[tuple[int, int]]:
    """Return the part and the number of chunks of each part of each Fetch."""
    assert {each.memory_id for each in plane.fetches} <= {parts.registration.memory_id}
    return [(each.layout, len(each.keys)) for each in plane.fetches]


@pytest.mark.parametrize("counts", [(7, 7), (9, 1), (0, 11), (5, 0), (1, 1), (2, 30)], ids=str)
def test_chunks_of_every_part_arrive_in_order_whatever_their_number(parts: Parts, counts: tuple[int, int]) -> None:
    result = parts.fetched(parts.job("a", *counts))
    assert (result.chunks, result.reason) == (counts, "complete")
    assert result.delivered_bytes == sum(
        count * size for count, size in zip(counts, parts.pages.chunk_bytes, strict=True)
    )
    for part, count in enumerate(counts):
        assert [chunk for each, chunk in parts.pages.order if each == part] == list(range(count))


def test_parts_that_fit_into_a_batch_come_with_one_fetch_side_by_side(parts: Parts, plane: ScriptedDataPlane) -> None:
    large, small = parts.pages.chunk_bytes
    assert parts.fetched(parts.job("a", 1, 12)).complete
    first, second, *_ = plane.fetches
    assert plane.calls.count("Fetch") < len(plane.fetches), "one Fetch contained both"
    half = parts.registration.size // 2
    for each, size in zip(
        plane.fetches, [parts.pages.chunk_bytes[part] for part, _ in asked(plane, parts)], strict=True
    ):
        assert each.length == len(each.keys) * size
        assert each.offset // half == (each.offset + each.length - 1) // half, "within one half of the memory"
    assert (first.offset, first.length) == (0, large) and (second.offset, second.length) == (large, 4 * small)


def test_each_batch_takes_half_of_the_bytes_that_are_left(parts: Parts, plane: ScriptedDataPlane) -> None:
    """Half of the bytes of all parts together; a chunk of the first part has four times the bytes."""
    assert parts.fetched(parts.job("a", 2, 8)).complete
    assert asked(plane, parts) == [(0, 2), (1, 4), (1, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("good", [(0, 3), (2, 0), (3, 2), (1, 3)], ids=str)
def test_the_outcome_of_one_shard_is_the_outcome_of_the_job(
    parts: Parts, plane: ScriptedDataPlane, good: tuple[int, int]
) -> None:
    job = parts.job("a", 3, 3)
    for keys, count in zip(job.keys, good, strict=True):
        for key in keys[count:]:
            del plane.records[key]
    result = parts.fetched(job)
    assert result.reason == "absent" and not result.complete
    assert all(there <= count for there, count in zip(result.chunks, good, strict=True))
    assert result.chunks[0] == good[0], "the first is before the gap"
    assert parts.fetched(parts.job("b", 2, 2)).complete, "no effect on the next one"


@pytest.mark.parametrize("batch_chunks", [1, 2, 3, 4])
def test_buffers_that_are_full_in_the_middle_of_the_second_part_make_another_round(
    parts: Parts, plane: ScriptedDataPlane, batch_chunks: int
) -> None:
    plane.script.batch_chunks = batch_chunks
    result = parts.fetched(parts.job("a", 2, 9))
    assert (result.chunks, result.reason) == ((2, 9), "complete")


def test_a_part_of_which_the_last_chunk_alone_is_wanted_waits_for_that_one(
    parts: Parts, plane: ScriptedDataPlane
) -> None:
    job = replace(parts.job("a", 4, 1), places=((0, 1, 2, 3), (3,)), available=Available(2, ""))
    parts.manager.exchange([job])
    wait_for(lambda: any(progress.waits() for progress in parts.manager._queue))
    assert sorted(parts.pages.order) == [(0, 0), (0, 1)]
    parts.manager.exchange(available={"a": Available(3, "")})
    wait_for(lambda: len(parts.pages.order) == 3)
    parts.manager.exchange(available={"a": Available(4, "complete")})
    (result,) = collect(parts.manager, 1)
    assert (result.chunks, result.reason) == ((4, 1), "complete")
    assert sum(count for _, count in asked(plane, parts)) == 5, "no fetch of missing chunks, and no chunk twice"


def test_a_scatter_that_fails_for_one_part_counts_for_none_of_its_round(parts: Parts) -> None:
    parts.pages.fails_at = 1
    result = parts.fetched(parts.job("a", 1, 3))
    assert (result.reason, result.complete) == ("scatter_failed", False)
    assert result.chunks[1] == 0


def test_a_daemon_that_has_restarted_is_registered_with_again(parts: Parts, plane: ScriptedDataPlane) -> None:
    assert parts.fetched(parts.job("a", 1, 1)).complete
    before = parts.registration.memory_id
    plane.forget_registrations()
    assert parts.fetched(parts.job("b", 2, 2)).complete
    assert parts.registration.memory_id != before and plane.registrations == 1


def test_more_parts_than_a_fetch_may_name_come_with_several(
    client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    count = 70
    shapes = [replace(shape, namespace=bytes([number]) * 32) for number in range(count)]
    parts = Parts(client, plane, shapes, 4 * count * shape.raw_bytes, least=1 << 30)
    named: list[int] = []
    plane.script.fetch_answer = lambda answer, request: (named.append(len(request.parts)), answer)[1]
    try:
        result = parts.fetched(parts.job("a", *[1] * count))
        assert (result.chunks, result.reason) == ((1,) * count, "complete")
        assert named == [64, 6]
    finally:
        parts.manager.close(WAIT_MAX_S)


def test_a_job_that_wants_nothing_is_complete_without_a_fetch(parts: Parts, plane: ScriptedDataPlane) -> None:
    result = parts.fetched(FetchJob(request_id="a", keys=((), ())))
    assert (result.chunks, result.reason, result.complete) == ((0, 0), "complete", True)
    assert "Fetch" not in plane.calls


def test_a_registration_that_does_not_hold_two_of_the_largest_chunks_is_refused(
    client: DataPlaneClient, shape: ChunkLayout
) -> None:
    small = replace(shape, namespace=b"s" * 32, vector_length=2)
    registration = RegisteredMemory(client, [small, shape], 2 * shape.raw_bytes - 1)
    with pytest.raises(ConfigurationError, match="fetch_buffer_bytes"):
        KVCacheManager(client, registration, Pages([]))


# ---------------------------------------------------------------------- one outcome, by the deadline


@pytest.mark.parametrize("good", [0, 1, 5])
def test_chunks_before_the_failure_are_in_place(
    manager: KVCacheManager,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
    good: int,
) -> None:
    one = job("a", 6)
    fill(list(one.keys[0][:good]))
    manager.exchange([one])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((good,), "absent")
    assert set(paged.chunks) == {("a", index) for index in range(good)}


def test_stalled_daemon_costs_every_waiting_job_its_deadline_and_no_more(
    make_manager: Callable[..., KVCacheManager], fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    manager = make_manager(fetch_timeout_s=0.3)
    plane.script.stall.add("Fetch")
    count = int(2 * WAIT_MAX_S / 0.3)
    manager.exchange([job(f"{number}", 1, fill) for number in range(count)])
    results = collect(manager, count)  # one after the other, they would take twice the waiting time
    assert {result.reason for result in results} == {"deadline"}
    assert all(result.seconds < WAIT_MAX_S for result in results)


def test_memory_in_doubt_is_given_up(
    make_manager: Callable[..., KVCacheManager],
    registration: RegisteredMemory,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
) -> None:
    """Symptom: chunk 0 of the second job was full of 0xEE, written by the first, late fetch."""
    manager = make_manager(fetch_timeout_s=0.5)
    plane.script.stall.add("Fetch")
    plane.script.write_after_stall = True
    manager.exchange([job("a", 2, fill)])
    assert collect(manager, 1)[0].reason == "deadline"
    plane.script.stall.clear()
    manager._fetch_timeout = WAIT_MAX_S
    second = job("b", 2, fill)
    manager.exchange([second])
    (result,) = collect(manager, 1)
    assert result.complete
    assert [paged.chunks["b", index] for index in range(2)] == [plane.records[key] for key in second.keys[0]]
    first, *_, last = plane.fetches
    assert first.memory_id != last.memory_id
    assert registration.retired == 1


def test_restarted_daemon_is_registered_with_again_within_the_job(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    manager.exchange([job("a", 2, fill)])
    assert collect(manager, 1)[0].complete
    plane.forget_registrations()
    manager.exchange([job("b", 2, fill)])
    assert collect(manager, 1)[0].complete
    assert plane.calls.count("RegisterMemory") == 2


def test_daemon_that_never_knows_us_is_not_asked_forever(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY)
    manager.exchange([job("a", 2, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "unknown_memory")
    assert plane.calls.count("Fetch") == 2


def test_a_data_plane_that_delivers_only_behind_a_gap_is_not_asked_forever(
    manager: KVCacheManager, shape: ChunkLayout, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    pieces = np.zeros((shape.layers, 2), np.bool_)
    pieces[:, 1] = True
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(
        delivered=[pack(pieces)], outcome=pb.OUTCOME_BATCH_FULL
    )
    manager.exchange([job("a", 2, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "invalid_answer")
    assert plane.calls.count("Fetch") == 1


def test_a_data_plane_that_dies_during_a_fetch_and_restarts(
    manager: KVCacheManager,
    registration: RegisteredMemory,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 2, fill), job("b", 2, fill)])
    plane.wait_for_call("Fetch")
    with monkeypatch.context() as patch:
        patch.setattr(registration, "_connect_timeout", 0.2)  # no process answers
        plane.stop()
        results = collect(manager, 2)
    assert {result.reason for result in results} <= {"unreachable", "breaker_open"}
    revived = plane.restarted()
    try:
        ends = time.monotonic() + WAIT_MAX_S
        for number in itertools.count():
            manager.exchange([job(f"c{number}", 1, fill)])
            (result,) = collect(manager, 1)
            if result.complete:
                break
            assert time.monotonic() < ends, result
    finally:
        revived.stop()


def test_absent_daemon_fails_jobs_at_once_after_a_while(
    shape: ChunkLayout, paged: Paged, leftovers: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = DataPlaneClient("127.0.0.1:1", failures=1, backoff=NEVER_S, backoff_max_s=NEVER_S, connect_timeout_s=0.1)
    attempts: list[float] = []

    def absent(timeout: float, shape: ChunkLayout) -> None:
        attempts.append(timeout)
        raise DataPlaneError("no process answers", "unreachable")

    monkeypatch.setattr(client, "connect", absent)
    manager = KVCacheManager(client, RegisteredMemory(client, [shape], 8 * shape.raw_bytes, 0.1), paged)
    try:
        manager.exchange([job(name, 2) for name in "abcdefgh"])
        assert {result.reason for result in collect(manager, 8)} <= {"unreachable", "breaker_open"}
        assert len(attempts) == 1, "the other jobs do not wait for a connection"
        assert leftovers() == set()
    finally:
        manager.close(WAIT_MAX_S)
        client.close()


def test_scatter_that_fails_is_an_outcome(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], paged: Paged, caplog: Any
) -> None:
    paged.failure = RuntimeError("no such block")
    manager.exchange([job("a", 6, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "scatter_failed")
    assert "no such block" in result.detail
    paged.failure = None
    manager.exchange([job("b", 2, fill)])
    assert collect(manager, 1)[0].complete, "the loop continues"


def test_second_job_of_one_request_is_refused_whole(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 1, fill)])
    with pytest.raises(ValueError, match="a"):
        manager.exchange([job("b", 1, fill), job("a", 1)])
    plane.script.unstall.set()
    assert [result.job.request_id for result in collect(manager, 1)] == ["a"]


# ---------------------------------------------------------------------- cancelling and closing


def test_cancel_mid_fetch_writes_nothing_and_ends_promptly(
    make_manager: Callable[..., KVCacheManager],
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
) -> None:
    manager = make_manager(fetch_timeout_s=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    manager.exchange([job("a", 2, fill)])
    plane.wait_for_call("Fetch")
    assert manager.exchange(cancel=["a"]) == []
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "cancelled")
    assert paged.chunks == {}


def test_cancel_before_its_turn(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 1, fill), job("b", 1, fill)])
    plane.wait_for_call("Fetch")
    (result,) = manager.exchange(cancel=["b"])
    assert (result.job.request_id, result.reason) == ("b", "cancelled")
    plane.script.unstall.set()
    assert collect(manager, 1)[0].complete


def test_close_is_bounded_and_leaves_nothing(
    make_manager: Callable[..., KVCacheManager],
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    leftovers: Callable[[], set[str]],
) -> None:
    manager = make_manager(fetch_timeout_s=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    manager.exchange([job("a", 2, fill), job("b", 2, fill)])
    plane.wait_for_call("Fetch")
    results = manager.close(WAIT_MAX_S)
    assert {(result.job.request_id, result.reason) for result in results} == {("a", "closed"), ("b", "closed")}
    assert plane.registrations == 0 and leftovers() == set()


def test_memory_that_is_made_shorter_while_it_is_scattered_is_an_outcome_and_given_up(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], paged: Paged, registration: RegisteredMemory
) -> None:
    wait_for(lambda: registration.current)
    memory = registration.current
    assert isinstance(memory, Segment)
    paged.gate.clear()
    manager.exchange([job("a", 6, fill)])
    wait_for(lambda: paged.waiting)
    os.ftruncate(memory._descriptor, 0)
    paged.gate.set()
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "scatter_failed")
    assert "truncated" in result.detail
    paged.chunks.clear()
    manager.exchange([job("b", 6, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((6,), "complete"), result.detail
    assert registration.current is not memory and registration.retired == 1
