"""Jobs in the KV cache manager with chunks that other engines are still storing."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from manager_support import Paged, collect, job
from scripted import ScriptedDataPlane

from host_control.disaggregation import Available
from host_control.manager import FetchJob, KVCacheManager

Fill = Callable[[list[bytes]], None]


def coming(plane: ScriptedDataPlane, fill: Fill, name: str, count: int, there: int) -> FetchJob:
    """Return a job of which the given number of chunks are stored."""
    whole = job(name, count, fill)
    for key in whole.keys[0][there:]:
        del plane.records[key]
    return replace(whole, available=Available(there, ""))


def waits(manager: KVCacheManager, plane: ScriptedDataPlane, fetches: int) -> None:
    """Wait until a job has fetched the stored chunks."""
    plane.wait_for_call("Fetch", fetches)
    wait_for(lambda: any(progress.waits() for progress in manager._queue))


def test_available_chunks_are_fetched_at_once_and_the_rest_as_it_becomes_available(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill, paged: Paged
) -> None:
    mine = coming(plane, fill, "mine", 6, there=3)
    manager.exchange([mine])
    waits(manager, plane, 1)
    assert sorted(paged.chunks) == [("mine", index) for index in range(3)], "in place while it waits"
    manager.exchange([job("other", 2, fill)])
    assert collect(manager, 1)[0].job.request_id == "other", "a waiting job does not delay others"
    fill(list(mine.keys[0][3:5]))
    manager.exchange(available={"mine": Available(5, "")})
    waits(manager, plane, 3)
    fill(list(mine.keys[0][5:]))
    manager.exchange(available={"mine": Available(6, "complete"), "unknown": Available(1, "")})
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((6,), "complete")
    assert [paged.chunks["mine", index] for index in range(6)] == [plane.records[key] for key in mine.keys[0]]
    asked = [key for fetch in plane.fetches for key in fetch.keys if key in mine.keys[0]]
    assert asked == list(mine.keys[0]), "no fetch of missing chunks, and no chunk twice"


def test_waiting_for_any_outcome_ends_with_the_first(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("first", 2, fill), job("second", 2, fill)])
    plane.wait_for_call("Fetch")
    manager.wait_any(0.01)
    assert manager.exchange() == [], "its time limit is over, but not that of a job"
    later = threading.Timer(0.05, plane.script.unstall.set)
    later.start()
    ended: list[str] = []
    while len(ended) < 2:
        manager.wait_any(NEVER_S)
        ended += (now := [result.job.request_id for result in manager.exchange()])
        assert now, "no job had ended yet"
    assert ended == ["first", "second"]
    later.join()


def test_an_outcome_that_was_not_taken_ends_the_wait(manager: KVCacheManager, fill: Fill) -> None:
    manager.exchange([job("a", 2, fill)])
    manager.wait(["a"])
    manager.wait_any(NEVER_S)
    assert [result.job.request_id for result in manager.exchange()] == ["a"]


def test_a_job_that_waits_for_available_chunks_ends_the_wait(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill
) -> None:
    """Only the waiting thread could report it."""
    mine = coming(plane, fill, "mine", 4, there=2)
    manager.exchange([mine])
    manager.wait_any(NEVER_S)
    waits(manager, plane, 1)
    manager.wait_any(NEVER_S)
    fill(list(mine.keys[0]))
    assert manager.exchange(available={"mine": Available(4, "complete")}) == []
    manager.wait_any(NEVER_S)
    assert [result.chunks for result in manager.exchange()] == [(4,)]


@pytest.mark.parametrize("there", [0, 1, 3])
@pytest.mark.parametrize("reason", ["published_gone", "published_late", "storage_unavailable"])
def test_a_job_whose_chunks_never_become_available_ends_with_the_others(
    manager: KVCacheManager,
    plane: ScriptedDataPlane,
    fill: Fill,
    paged: Paged,
    there: int,
    reason: str,
) -> None:
    mine = coming(plane, fill, "mine", 4, there=1)
    manager.exchange([mine])
    waits(manager, plane, 1)
    fill(list(mine.keys[0][1:there]))
    manager.exchange(available={"mine": Available(there, reason)})
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((max(there, 1),), reason)
    assert sorted(paged.chunks) == [("mine", index) for index in range(max(there, 1))]


def test_a_job_that_is_cancelled_while_it_waits_ends_at_once_without_a_write(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill, paged: Paged
) -> None:
    mine = coming(plane, fill, "mine", 4, there=2)
    manager.exchange([mine])
    waits(manager, plane, 1)
    ended = manager.exchange(cancel=["mine"], available={"mine": Available(4, "complete")})
    assert [result.reason for result in ended] == ["cancelled"]
    fill(list(mine.keys[0]))
    manager.exchange([job("next", 1, fill)], available={"mine": Available(4, "complete")})
    assert collect(manager, 1)[0].complete
    assert len(paged.chunks) == 3 and plane.calls.count("Fetch") == 2


def test_a_waiting_job_ends_by_its_deadline_with_the_chunks_in_place(
    make_manager: Callable[..., KVCacheManager], plane: ScriptedDataPlane, fill: Fill
) -> None:
    manager = make_manager(fetch_timeout_s=0.3)
    manager.exchange([coming(plane, fill, "mine", 4, there=2)])
    (result,) = collect(manager, 1)
    assert result.reason == "deadline" and result.chunks in ((2,), (0,))  # 0 if the machine was slow
    assert 0.3 <= result.seconds


def test_a_chunk_that_arrives_corrupt_ends_the_job_before_it(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill, paged: Paged
) -> None:
    mine = coming(plane, fill, "mine", 4, there=2)
    manager.exchange([mine])
    waits(manager, plane, 1)
    fill(list(mine.keys[0]))
    plane.script.fail_fetch_at = 1
    manager.exchange(available={"mine": Available(4, "complete")})
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((3,), "corrupt")
    assert sorted(paged.chunks) == [("mine", index) for index in range(3)]


def test_a_job_that_cannot_scatter_does_not_wait_for_more(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill, paged: Paged
) -> None:
    paged.failure = RuntimeError("no such block")
    manager.exchange([coming(plane, fill, "mine", 4, there=2)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == ((0,), "scatter_failed")


def test_a_waiting_job_ends_when_the_manager_closes(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Fill
) -> None:
    manager.exchange([coming(plane, fill, "mine", 4, there=2)])
    waits(manager, plane, 1)
    assert [result.reason for result in manager.close(WAIT_MAX_S)] == ["closed"]
