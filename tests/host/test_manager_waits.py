"""Jobs in the KV cache manager with chunks that other engines are still storing."""

import threading

import pytest
from machine import NEVER_S, WAIT_MAX_S
from manager_support import Kit, MakeKit
from scripted import ScriptedDataPlane

from host_control.disaggregation import Available


def test_available_chunks_are_fetched_at_once_and_the_rest_as_it_becomes_available(
    kit: Kit, plane: ScriptedDataPlane
) -> None:
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
    asked = [key for fetch in plane.fetches for key in fetch.keys if key in keys]
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


def test_a_job_that_is_cancelled_while_it_waits_ends_at_once_without_a_write(
    kit: Kit, plane: ScriptedDataPlane
) -> None:
    mine = kit.pending("mine", 4, there=2)
    kit.manager.exchange([mine])
    kit.waits(1)
    ended = kit.manager.exchange(cancel=["mine"], available={"mine": Available(4, "complete")})
    assert [result.reason for result in ended] == ["cancelled"]
    kit.store(*mine.keys[0])
    kit.manager.exchange([kit.job("next", 1)], available={"mine": Available(4, "complete")})
    assert kit.ended().complete
    assert len(kit.paged.chunks) == 3 and plane.calls.count("Fetch") == 2


def test_a_waiting_job_ends_by_its_deadline_with_the_chunks_in_place(make_kit: MakeKit) -> None:
    kit = make_kit(fetch_timeout_s=0.3)
    result = kit.fetched(kit.pending("mine", 4, there=2))
    assert result.reason == "deadline" and result.chunks in ((2,), (0,))  # 0 if the machine was slow
    assert 0.3 <= result.seconds


def test_a_chunk_that_arrives_corrupt_ends_the_job_before_it(kit: Kit, plane: ScriptedDataPlane) -> None:
    mine = kit.pending("mine", 4, there=2)
    kit.manager.exchange([mine])
    kit.waits(1)
    kit.store(*mine.keys[0])
    plane.script.fail_fetch_at = 1
    kit.manager.exchange(available={"mine": Available(4, "complete")})
    result = kit.ended()
    assert (result.chunks, result.reason) == ((3,), "corrupt")


def test_a_waiting_job_ends_when_the_manager_closes(kit: Kit) -> None:
    kit.manager.exchange([kit.pending("mine", 4, there=2)])
    kit.waits(1)
    assert [result.reason for result in kit.manager.close(WAIT_MAX_S)] == ["closed"]
