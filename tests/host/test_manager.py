"""The KV cache manager: figure 6 of the paper, and all failures."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from manager_support import Kit, MakeKit, small
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.disaggregation import Available
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.segment import Segment
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb

Leftovers = Callable[..., set[str]]


@pytest.fixture
def parts(make_kit: MakeKit, shape: ChunkLayout) -> Kit:
    """Two parts; one has chunks four times as large. A batch has room for three chunks of each."""
    return make_kit(shape, small(shape), chunks=6, batch_bytes_min=1)


def names(results: list[FetchResult]) -> list[str]:
    return [result.job.request_id for result in results]


# ---------------------------------------------------------------------- exchange (figure 6)


def test_the_scheduler_is_not_blocked_while_fetches_run(kit: Kit, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("a", 4)])
    plane.wait_for_call("Fetch")
    for _ in range(100):
        assert kit.manager.exchange() == [], "the fetch has not ended, not even by its deadline"
    plane.script.unstall.set()
    assert kit.ended().complete


def test_an_engine_that_loads_nothing_wakes_no_thread_with_its_steps(kit: Kit) -> None:
    """Symptom: each step of an engine without fetches took 40 us more of its core."""
    status = Path(f"/proc/self/task/{kit.manager._thread.native_id}/status")

    def switches() -> str:
        return next(line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))

    def sleeps() -> bool:
        """Return True if the thread is idle, and does not wait for the interpreter."""
        before = switches()
        time.sleep(0.05)
        return switches() == before

    wait_for(lambda: kit.registration.current is not None and sleeps())
    before = switches()
    for _ in range(100):
        assert kit.manager.exchange() == []
        time.sleep(0.001)  # threads that are awake run now
    assert switches() == before


def test_the_manager_is_not_idle_before_the_last_outcome_is_taken(kit: Kit) -> None:
    assert kit.manager.idle
    kit.manager.exchange([kit.job("a", 2)])
    assert not kit.manager.idle
    kit.manager.wait(["a"])
    assert not kit.manager.idle, "no step has received the outcome"
    assert len(kit.manager.exchange()) == 1 and kit.manager.idle


def test_waiting_for_jobs_ends_with_them_and_not_with_others(kit: Kit, plane: ScriptedDataPlane) -> None:
    kit.manager.exchange([kit.job(name, 2) for name in "ab"])
    kit.manager.wait("ab")
    assert list(dict.fromkeys(name for name, _, _ in kit.paged.chunks)) == ["a", "b"], "in place after the wait"
    plane.script.stall.add("Fetch")
    assert names(kit.manager.exchange([kit.job("c", 2)])) == ["a", "b"]
    kit.manager.wait("ab")
    assert kit.manager.exchange() == []
    plane.script.unstall.set()
    kit.manager.wait("c")
    assert names(kit.manager.exchange()) == ["c"]


def test_exchange_is_atomic_between_threads(kit: Kit) -> None:
    jobs = [kit.job(f"r{number}", 1) for number in range(60)]
    taken: list[FetchResult] = []
    lock = threading.Lock()

    def engine(part: list[FetchJob]) -> None:
        for one in part:
            results = kit.manager.exchange([one])
            with lock:
                taken.extend(results)

    threads = [threading.Thread(target=engine, args=(jobs[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken += kit.collect(60 - len(taken))
    assert sorted(names(taken)) == sorted(one.request_id for one in jobs)
    assert all(result.complete for result in taken)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fifo", ["x", "long", "middle", "short"]),
        ("sjf", ["x", "short", "middle", "long"]),
    ],
)
def test_order_of_the_fetching_queue(
    make_kit: MakeKit, plane: ScriptedDataPlane, order: str, expected: list[str]
) -> None:
    kit = make_kit(order=order)
    plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("x", 1)])
    plane.wait_for_call("Fetch")
    kit.manager.exchange([kit.job("long", 3), kit.job("middle", 2), kit.job("short", 1)])
    plane.script.unstall.set()
    assert names(kit.collect(4)) == expected


def test_second_job_of_one_request_is_refused_whole(kit: Kit, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("a", 1)])
    with pytest.raises(ValueError, match="a"):
        kit.manager.exchange([kit.job("b", 1), kit.job("a", 1)])
    plane.script.unstall.set()
    assert names(kit.collect(1)) == ["a"]


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize(
    ("counts", "batch_chunks"),
    [
        *(((11,), chunks) for chunks in (1, 2, 3, 100)),
        *(((2, 9), chunks) for chunks in (1, 2, 3, 4)),
        *((counts, 100) for counts in ((7, 7), (9, 1), (0, 11), (5, 0), (1, 1), (2, 30))),
    ],
    ids=str,
)
def test_all_chunks_arrive_in_order_whatever_their_number_and_the_buffers(
    make_kit: MakeKit,
    plane: ScriptedDataPlane,
    shape: ChunkLayout,
    counts: tuple[int, ...],
    batch_chunks: int,
    progress: bool,
) -> None:
    """``batch_chunks``: chunks that the data plane's buffers hold."""
    shapes = [shape, small(shape)][: len(counts)]
    kit = make_kit(*shapes, chunks=6, progress=progress, batch_bytes_min=1, scatter_bytes_min=1)
    plane.script.batch_chunks = batch_chunks
    result = kit.fetched(kit.job("a", *counts))
    assert (result.chunks, result.reason) == (counts, "complete")
    assert result.delivered_bytes == sum(count * each.raw_bytes for count, each in zip(counts, shapes, strict=True))
    for part, count in enumerate(counts):
        assert [chunk for each, chunk in kit.paged.of("a") if each == part] == list(range(count))


@pytest.mark.parametrize(
    ("options", "count", "asked"),
    [
        ({"chunks": 32, "batch_bytes_min": 2}, 12, [6, 3, 2, 1]),
        ({"chunks": 16, "progress": True}, 20, [8, 8, 4]),
    ],
    ids=["half of what is left", "as much as there is room for"],
)
def test_batches_alternate_between_the_halves_of_the_memory(
    make_kit: MakeKit,
    plane: ScriptedDataPlane,
    shape: ChunkLayout,
    options: dict[str, int],
    count: int,
    asked: list[int],
) -> None:
    if "batch_bytes_min" in options:
        options = options | {"batch_bytes_min": options["batch_bytes_min"] * shape.raw_bytes}
    kit = make_kit(**options)
    assert kit.fetched(kit.job("a", count)).complete
    assert [chunks for _, chunks in kit.asked()] == asked
    offsets = [each.offset for each in plane.fetches]
    assert offsets == [offsets[index % 2] for index in range(len(asked))] and offsets[0] != offsets[1]


@pytest.mark.parametrize("counts", [{"big": 8}, {"a": 2, "b": 2}], ids=["of the same job", "of the next job"])
def test_the_next_batch_arrives_while_the_last_is_scattered(kit: Kit, counts: dict[str, int]) -> None:
    kit.paged.gate.clear()
    kit.manager.exchange([kit.job(*each) for each in counts.items()])
    kit.plane.wait_for_call("Fetch", 2)
    assert kit.paged.chunks == {} and kit.manager.exchange() == []
    kit.paged.gate.set()
    assert names(kit.collect(len(counts))) == list(counts)


def test_parts_that_fit_into_a_batch_come_with_one_fetch_side_by_side(parts: Kit, plane: ScriptedDataPlane) -> None:
    large, little = parts.paged.chunk_bytes
    assert parts.fetched(parts.job("a", 1, 12)).complete
    first, second, *_ = plane.fetches
    assert plane.calls.count("Fetch") < len(plane.fetches), "one Fetch contained both"
    half = parts.registration.size // 2
    for each in plane.fetches:
        assert each.length == len(each.keys) * parts.paged.chunk_bytes[each.layout]
        assert each.offset // half == (each.offset + each.length - 1) // half, "within one half of the memory"
    assert (first.offset, first.length) == (0, large) and (second.offset, second.length) == (large, 4 * little)


def test_each_batch_takes_half_of_the_bytes_that_are_left(parts: Kit) -> None:
    """Half of the bytes of all parts together; a chunk of the first part has four times the bytes."""
    assert parts.fetched(parts.job("a", 2, 8)).complete
    assert parts.asked() == [(0, 2), (1, 4), (1, 2), (1, 1), (1, 1)]


def test_a_part_of_which_the_last_chunk_alone_is_wanted_waits_for_that_one(parts: Kit) -> None:
    job = parts.job("a", 4, 1, places=((0, 1, 2, 3), (3,)), available=Available(2, ""))
    parts.manager.exchange([job])
    parts.waits(1)
    assert sorted(parts.paged.of("a")) == [(0, 0), (0, 1)]
    parts.manager.exchange(available={"a": Available(3, "")})
    wait_for(lambda: len(parts.paged.chunks) == 3)
    parts.manager.exchange(available={"a": Available(4, "complete")})
    result = parts.ended()
    assert (result.chunks, result.reason) == ((4, 1), "complete")
    assert sum(count for _, count in parts.asked()) == 5, "no fetch of missing chunks, and no chunk twice"


def test_more_parts_than_a_fetch_may_name_come_with_several(
    make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    kit = make_kit(*[shape] * 70, chunks=4)
    named: list[int] = []
    plane.script.fetch_answer = lambda answer, request: (named.append(len(request.parts)), answer)[1]
    result = kit.fetched(kit.job("a", *[1] * 70))
    assert (result.chunks, result.reason) == ((1,) * 70, "complete")
    assert named == [64, 6]


def test_a_job_without_chunks_is_complete_without_a_fetch(parts: Kit, plane: ScriptedDataPlane) -> None:
    result = parts.fetched(parts.job("a", 0, 0))
    assert (result.chunks, result.reason, result.complete) == ((0, 0), "complete", True)
    assert "Fetch" not in plane.calls


def test_a_registration_that_does_not_hold_two_of_the_largest_chunks_is_refused(
    client: DataPlaneClient, shape: ChunkLayout
) -> None:
    registration = RegisteredMemory(client, [small(shape), shape], 2 * shape.raw_bytes - 1)
    with pytest.raises(ConfigurationError, match="fetch_buffer_bytes"):
        KVCacheManager(client, registration, lambda *_: None)


# ---------------------------------------------------------------------- batches whose progress is known


@pytest.mark.parametrize(("parts", "ends"), [(3, (2, 4, 5, 6)), (6, (1, 2, 3, 4, 5, 6))])
def test_delivered_chunks_are_scattered_while_the_rest_of_the_batch_arrives(
    make_kit: MakeKit, plane: ScriptedDataPlane, parts: int, ends: Any
) -> None:
    kit = make_kit(chunks=16, progress=True, scatter_bytes_min=1, scatter_parts=parts)

    def after(chunks: int) -> None:
        if chunks in ends:  # each time a part of the remaining chunks
            wait_for(lambda: len(kit.paged.chunks) == chunks)

    plane.script.after_chunk = after
    assert kit.fetched(kit.job("a", 6)).complete
    assert kit.asked() == [(0, 6)], "in one call"


def test_less_than_is_worth_it_waits_for_more(make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout) -> None:
    kit = make_kit(chunks=16, progress=True, scatter_bytes_min=3 * shape.raw_bytes)
    seen: list[int] = []

    def after(chunks: int) -> None:
        if chunks in (3, 6):
            wait_for(lambda: len(kit.paged.chunks) >= chunks)
        seen.append(len(kit.paged.chunks))

    plane.script.after_chunk = after
    assert kit.fetched(kit.job("a", 6)).complete
    assert seen == [0, 0, 3, 3, 3, 6]


def test_chunks_in_place_count_even_without_an_answer(make_kit: MakeKit, plane: ScriptedDataPlane) -> None:
    kit = make_kit(chunks=16, progress=True, scatter_bytes_min=1)
    memory = kit.registration.acquire(WAIT_MAX_S)

    def die(chunks: int) -> None:
        if chunks == 3:
            wait_for(lambda: len(kit.paged.chunks) == 3)
            raise RuntimeError("as in the script")

    plane.script.after_chunk = die
    result = kit.fetched(kit.job("a", 6))
    assert result.chunks == (3,) and not result.complete
    assert kit.registration.current is not memory, "the data plane has not answered, so it may still write"


def test_a_batch_ends_early_where_its_job_is_cancelled(make_kit: MakeKit, plane: ScriptedDataPlane) -> None:
    kit = make_kit(chunks=16, progress=True, scatter_bytes_min=1)

    def cancel(chunks: int) -> None:
        if chunks == 3:
            wait_for(lambda: len(kit.paged.chunks) == 3)
            kit.manager.exchange(cancel=["a"])
            wait_for(lambda: bool(plane.cancelled))

    plane.script.after_chunk = cancel
    result = kit.fetched(kit.job("a", 6))
    assert (result.chunks, result.reason) == ((3,), "cancelled")


# ---------------------------------------------------------------------- one outcome, by the deadline


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize(
    ("counts", "good"),
    [((6,), (0,)), ((6,), (1,)), ((6,), (5,)), ((3, 3), (0, 3)), ((3, 3), (2, 0)), ((3, 3), (3, 2)), ((3, 3), (1, 3))],
    ids=str,
)
def test_chunks_before_the_failure_are_in_place(
    make_kit: MakeKit, shape: ChunkLayout, counts: tuple[int, ...], good: tuple[int, ...], progress: bool
) -> None:
    shapes = [shape, small(shape)][: len(counts)]
    kit = make_kit(*shapes, progress=progress, batch_bytes_min=1, scatter_bytes_min=1)
    result = kit.fetched(kit.job("a", *counts, stored=good))
    assert result.reason == "absent" and not result.complete
    assert all(there <= count for there, count in zip(result.chunks, good, strict=True))
    assert result.chunks[0] == good[0], "the first is before the gap"
    assert kit.fetched(kit.job("b", *counts)).complete, "no effect on the next one"


def test_stalled_daemon_costs_every_waiting_job_its_deadline_and_no_more(
    make_kit: MakeKit, plane: ScriptedDataPlane
) -> None:
    kit = make_kit(fetch_timeout_s=0.3)
    plane.script.stall.add("Fetch")
    jobs = [kit.job(f"{number}", 1) for number in range(int(2 * WAIT_MAX_S / 0.3))]
    kit.manager.exchange(jobs)
    kit.manager.wait(job.request_id for job in jobs)
    results = kit.manager.exchange()
    assert len(results) == len(jobs) and {result.reason for result in results} == {"deadline"}
    assert all(result.seconds < WAIT_MAX_S for result in results), "one after the other, they would take twice as long"


def test_memory_in_doubt_is_given_up(make_kit: MakeKit, plane: ScriptedDataPlane) -> None:
    """Symptom: chunk 0 of the second job was full of 0xEE, written by the first, late fetch."""
    kit = make_kit(fetch_timeout_s=0.5)
    plane.script.stall.add("Fetch")
    plane.script.write_after_stall = True
    assert kit.fetched(kit.job("a", 2)).reason == "deadline"
    plane.script.stall.clear()
    kit.manager._fetch_timeout = WAIT_MAX_S
    assert kit.fetched(kit.job("b", 2)).complete
    first, *_, last = plane.fetches
    assert first.memory_id != last.memory_id
    assert kit.registration.retired == 1


def test_a_restarted_daemon_is_registered_with_again_within_the_job(parts: Kit, plane: ScriptedDataPlane) -> None:
    assert parts.fetched(parts.job("a", 1, 1)).complete
    before = parts.registration.memory_id
    plane.forget_registrations()
    assert parts.fetched(parts.job("b", 2, 2)).complete
    assert parts.registration.memory_id != before and plane.calls.count("RegisterMemory") == 2


@pytest.mark.parametrize(
    ("outcome", "delivered", "progress", "reason", "fetches"),
    [
        (pb.OUTCOME_UNKNOWN_MEMORY, [], False, "unknown_memory", 2),
        (pb.OUTCOME_BATCH_FULL, [1], False, "invalid_answer", 1),
        (pb.OUTCOME_COMPLETE, [], True, "invalid_answer", 1),
    ],
    ids=["never knows us", "delivers only behind a gap", "cannot be, after progress"],
)
def test_a_data_plane_that_delivers_nothing_is_not_asked_forever(
    make_kit: MakeKit,
    plane: ScriptedDataPlane,
    shape: ChunkLayout,
    outcome: int,
    delivered: list[int],
    progress: bool,
    reason: str,
    fetches: int,
) -> None:
    pieces = np.zeros((shape.layers, 2), np.bool_)
    pieces[:, delivered] = True
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(
        delivered=[pack(pieces)] if delivered else [], outcome=outcome
    )
    kit = make_kit(progress=progress, scatter_bytes_min=1)
    kit.manager.exchange([kit.job("a", 2)])
    (result,) = kit.collect(1)
    assert (result.chunks, result.reason) == ((0,), reason)
    assert plane.calls.count("Fetch") == fetches


def test_a_data_plane_that_dies_during_a_fetch_and_restarts(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("a", 2), kit.job("b", 2)])
    kit.plane.wait_for_call("Fetch")
    with monkeypatch.context() as patch:
        patch.setattr(kit.registration, "_connect_timeout", 0.2)  # no process answers
        kit.plane.stop()
        assert {result.reason for result in kit.collect(2)} <= {"unreachable", "breaker_open"}
    revived = kit.plane.restarted()
    try:
        ends = time.monotonic() + WAIT_MAX_S
        for number in itertools.count():
            result = kit.fetched(kit.job(f"c{number}", 1))
            if result.complete:
                break
            assert time.monotonic() < ends, result
    finally:
        revived.stop()


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("available", [None, Available(2, "")], ids=["all", "some are pending"])
def test_scatter_that_fails_is_an_outcome(
    make_kit: MakeKit, shape: ChunkLayout, progress: bool, available: Available | None
) -> None:
    kit = make_kit(shape, small(shape), chunks=6, progress=progress, batch_bytes_min=1)
    kit.paged.fails_at = 1
    result = kit.fetched(kit.job("a", 4, 3, available=available))
    assert (result.reason, result.complete) == ("scatter_failed", False)
    assert result.chunks[1] == 0 and "no such block" in result.detail
    kit.paged.fails_at = None
    assert kit.fetched(kit.job("b", 2, 2)).complete, "the loop continues"


# ---------------------------------------------------------------------- cancelling and closing


def test_cancel_mid_fetch_writes_nothing_and_ends_promptly(make_kit: MakeKit, plane: ScriptedDataPlane) -> None:
    kit = make_kit(fetch_timeout_s=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    kit.manager.exchange([kit.job("a", 2)])
    plane.wait_for_call("Fetch")
    assert kit.manager.exchange(cancel=["a"]) == []
    result = kit.ended()
    assert (result.chunks, result.reason) == ((0,), "cancelled")


def test_cancel_before_its_turn(kit: Kit, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("a", 1), kit.job("b", 1)])
    plane.wait_for_call("Fetch")
    (result,) = kit.manager.exchange(cancel=["b"])
    assert (result.job.request_id, result.reason) == ("b", "cancelled")
    plane.script.unstall.set()
    assert kit.ended().complete


def test_close_is_bounded_and_leaves_nothing(make_kit: MakeKit, plane: ScriptedDataPlane, leftovers: Leftovers) -> None:
    kit = make_kit(fetch_timeout_s=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    kit.manager.exchange([kit.job("a", 2), kit.job("b", 2)])
    plane.wait_for_call("Fetch")
    results = kit.manager.close(WAIT_MAX_S)
    assert {(result.job.request_id, result.reason) for result in results} == {("a", "closed"), ("b", "closed")}
    assert plane.registrations == 0 and leftovers() == set()


def test_memory_that_is_made_shorter_while_it_is_scattered_is_an_outcome_and_given_up(kit: Kit) -> None:
    memory = wait_for(lambda: kit.registration.current)
    assert isinstance(memory, Segment)
    kit.paged.gate.clear()
    kit.manager.exchange([kit.job("a", 6)])
    wait_for(lambda: kit.paged.waiting)
    os.ftruncate(memory._descriptor, 0)
    kit.paged.gate.set()
    (result,) = kit.collect(1)
    assert (result.chunks, result.reason) == ((0,), "scatter_failed")
    assert "truncated" in result.detail
    assert kit.fetched(kit.job("b", 6)).complete
    assert kit.registration.current is not memory and kit.registration.retired == 1


# ---------------------------------------------------------------------- chunks that other engines still store


def test_available_chunks_are_fetched_at_once_and_the_rest_as_it_becomes_available(kit: Kit) -> None:
    mine = kit.pending("mine", 6, there=3)
    (keys,) = mine.keys
    kit.manager.exchange([mine])
    kit.waits(1)
    assert sorted(kit.paged.of("mine")) == [(0, index) for index in range(3)], "in place while it waits"
    assert kit.fetched(kit.job("other", 2)).job.request_id == "other", "a waiting job does not delay others"
    kit.store(*keys[3:5])
    kit.manager.exchange(available={"mine": Available(5, "")})
    kit.waits(3)
    kit.store(*keys[5:])
    kit.manager.exchange(available={"mine": Available(6, "complete"), "unknown": Available(1, "")})
    result = kit.ended()
    assert (result.chunks, result.reason) == ((6,), "complete")
    asked = [key for fetch in kit.plane.fetches for key in fetch.keys if key in keys]
    assert asked == list(keys), "no fetch of missing chunks, and no chunk twice"


def test_waiting_for_any_outcome_ends_with_the_first(kit: Kit, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Fetch")
    kit.manager.exchange([kit.job("first", 2), kit.job("second", 2)])
    plane.wait_for_call("Fetch")
    kit.manager.wait_any(0.01)
    assert kit.manager.exchange() == [], "its time limit is over, but not that of a job"
    later = threading.Timer(0.05, plane.script.unstall.set)
    later.start()
    ended: list[str] = []
    while len(ended) < 2:
        kit.manager.wait_any(NEVER_S)
        ended += (now := [result.job.request_id for result in kit.manager.exchange()])
        assert now, "no job had ended yet"
    assert ended == ["first", "second"]
    later.join()


def test_an_outcome_that_was_not_taken_and_a_job_that_waits_for_chunks_end_the_wait(kit: Kit) -> None:
    """Only the waiting thread could report that more chunks are available."""
    kit.manager.exchange([kit.job("a", 2)])
    kit.manager.wait(["a"])
    kit.manager.wait_any(NEVER_S)
    mine = kit.pending("mine", 4, there=2)
    assert [result.job.request_id for result in kit.manager.exchange([mine])] == ["a"]
    kit.manager.wait_any(NEVER_S)
    kit.waits(2)
    kit.manager.wait_any(NEVER_S)
    kit.store(*mine.keys[0])
    assert kit.manager.exchange(available={"mine": Available(4, "complete")}) == []
    kit.manager.wait_any(NEVER_S)
    assert [result.chunks for result in kit.manager.exchange()] == [(4,)]


@pytest.mark.parametrize(
    ("there", "reason"), [(0, "published_gone"), (1, "published_late"), (3, "storage_unavailable")]
)
def test_a_job_whose_chunks_never_become_available_ends_with_the_others(kit: Kit, there: int, reason: str) -> None:
    mine = kit.pending("mine", 4, there=1)
    kit.manager.exchange([mine])
    kit.waits(1)
    kit.store(*mine.keys[0][1:there])
    kit.manager.exchange(available={"mine": Available(there, reason)})
    result = kit.ended()
    assert (result.chunks, result.reason) == ((max(there, 1),), reason)


def test_a_job_that_is_cancelled_while_it_waits_ends_at_once_without_a_write(kit: Kit) -> None:
    mine = kit.pending("mine", 4, there=2)
    kit.manager.exchange([mine])
    kit.waits(1)
    ended = kit.manager.exchange(cancel=["mine"], available={"mine": Available(4, "complete")})
    assert [result.reason for result in ended] == ["cancelled"]
    kit.store(*mine.keys[0])
    kit.manager.exchange([kit.job("next", 1)], available={"mine": Available(4, "complete")})
    assert kit.ended().complete
    assert len(kit.paged.chunks) == 3 and kit.plane.calls.count("Fetch") == 2


def test_a_waiting_job_ends_by_its_deadline_with_the_chunks_in_place(make_kit: MakeKit) -> None:
    kit = make_kit(fetch_timeout_s=0.3)
    result = kit.fetched(kit.pending("mine", 4, there=2))
    assert result.reason == "deadline" and result.chunks in ((2,), (0,))  # 0 if the machine was slow
    assert 0.3 <= result.seconds
