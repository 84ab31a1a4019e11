"""The KV cache manager: figure 6 of the paper, and everything that can go wrong."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from machine import NEVER_S, PATIENCE_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.destination import Destination
from host_control.manager import (
    FetchJob,
    FetchResult,
    KVCacheManager,
    first_in_first_out,
    shortest_job_first,
)
from host_control.segment import Segment
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import DataPlaneError
from shadowserve.keys import chain_links, record_keys
from shadowserve.pieces import pack
from shadowserve.proto import dataplane_pb2 as pb

CHUNK = 4
MODEL = b"m" * 32


@dataclass
class Paged:
    """Paged KV memory: what was scattered, by request and chunk."""

    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    chunk_bytes: int = 0
    failure: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: bool = False

    def __call__(self, job: FetchJob, first: int, chunks: memoryview) -> None:
        self.waiting = True
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        for index in range(len(chunks) // self.chunk_bytes):
            begin = index * self.chunk_bytes
            assert (job.request_id, first + index) not in self.chunks, "scattered twice"
            self.chunks[job.request_id, first + index] = bytes(chunks[begin : begin + self.chunk_bytes])
        if job.request_id not in self.order:
            self.order.append(job.request_id)


@pytest.fixture
def paged(shape: ChunkLayout) -> Paged:
    paged = Paged(chunk_bytes=shape.raw_bytes)
    paged.gate.set()
    return paged


@pytest.fixture
def make_manager(
    client: DataPlaneClient, destination: Destination, paged: Paged
) -> Iterator[Callable[..., KVCacheManager]]:
    made = []

    def make(**options: Any) -> KVCacheManager:
        if "fetch_timeout" in options:
            destination.acquire(PATIENCE_S)  # so that a short one is the fetches' alone
        manager = KVCacheManager(client, destination, paged, **{"fetch_timeout": PATIENCE_S, **options})
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close(PATIENCE_S)


@pytest.fixture
def manager(make_manager: Callable[..., KVCacheManager]) -> KVCacheManager:
    return make_manager()


def prompt(tokens: int, seed: int) -> list[int]:
    return [seed * 1000 + position for position in range(tokens)]


def keys_of(tokens: list[int]) -> list[bytes]:
    return record_keys(b"n" * 32, chain_links(MODEL, tokens, chunk_tokens=CHUNK))


def job(name: str, count: int, fill: Callable[[list[bytes]], None] | None = None) -> FetchJob:
    keys = keys_of(prompt(count * CHUNK, sum(name.encode())))
    if fill is not None:
        fill(keys)
    return FetchJob(request_id=name, keys=tuple(keys))


def collect(manager: KVCacheManager, count: int, timeout: float = PATIENCE_S) -> list[FetchResult]:
    results: list[FetchResult] = []
    ends = time.monotonic() + timeout
    while len(results) < count:
        results += manager.exchange()
        assert time.monotonic() < ends, f"only {results}"
        time.sleep(0.001)
    return results


# ---------------------------------------------------------------------- exchange (figure 6)


def test_scheduler_goes_on_while_fetches_run(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 4, fill)])
    plane.wait_for_call("Fetch")
    for _ in range(100):
        assert manager.exchange() == [], "the fetch has not ended, by its deadline or otherwise"
    plane.script.unstall.set()
    assert collect(manager, 1)[0].complete


def test_waiting_for_jobs_ends_with_them_and_not_with_others(
    manager: KVCacheManager, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None], paged: Paged
) -> None:
    keys = {name: keys_of(prompt(9, seed)) for seed, name in enumerate("abc")}
    for name in keys:
        fill(keys[name])
    manager.exchange([FetchJob(request_id=name, keys=tuple(keys[name])) for name in "ab"])
    manager.wait("ab")
    assert paged.order == ["a", "b"], "in place once waiting has ended"
    plane.script.stall.add("Fetch")
    ended = manager.exchange([FetchJob(request_id="c", keys=tuple(keys["c"]))])
    assert [result.job.request_id for result in ended] == ["a", "b"]
    manager.wait("ab")
    assert manager.exchange() == []
    plane.script.unstall.set()
    manager.wait("c")
    assert [result.job.request_id for result in manager.exchange()] == ["c"]


def test_waiting_ends_by_the_deadline(
    make_manager: Callable[..., KVCacheManager], plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    manager = make_manager(fetch_timeout=0.3)
    keys = keys_of(prompt(9, 0))
    fill(keys)
    plane.script.stall.add("Fetch")
    manager.exchange([FetchJob(request_id=name, keys=tuple(keys)) for name in "ab"])
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
    manager = make_manager(order=shortest_job_first, fetch_timeout=0.3)
    plane.script.fetch_delay = 0.02
    ends = time.monotonic() + PATIENCE_S
    overtaking = 0
    while not overtaking:  # a machine that stands still just then lets all of them run out of time
        manager.exchange([job("long", 4, fill), *(job(f"short{number}", 1, fill) for number in range(50))])
        *shorter, result = sorted(collect(manager, 51), key=lambda result: len(result.job.keys))
        assert (result.job.request_id, result.chunks, result.reason) == ("long", 0, "deadline")
        overtaking = sum(short.complete for short in shorter)
        assert time.monotonic() < ends


def test_order_that_fails_falls_back_to_the_oldest(
    make_manager: Callable[..., KVCacheManager], fill: Callable[[list[bytes]], None]
) -> None:
    manager = make_manager(order=lambda queue: 99)
    manager.exchange([job("a", 1, fill), job("b", 1, fill)])
    assert [result.job.request_id for result in collect(manager, 2)] == ["a", "b"]


# ---------------------------------------------------------------------- rounds


@pytest.mark.parametrize("round_chunks", [1, 2, 3, 100])
def test_job_larger_than_the_buffers_runs_in_rounds(
    manager: KVCacheManager,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
    round_chunks: int,
) -> None:
    plane.script.round_chunks = round_chunks
    big = job("big", 11, fill)
    manager.exchange([big])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (11, "complete")
    for index, key in enumerate(big.keys):
        assert paged.chunks["big", index] == plane.records[key]
    halves = {fetch.offset for fetch in plane.fetches}
    assert len(halves) == 2, "rounds alternate between the halves of the destination"


def test_next_round_arrives_while_the_last_is_scattered(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane, paged: Paged
) -> None:
    paged.gate.clear()
    manager.exchange([job("big", 8, fill)])
    plane.wait_for_call("Fetch", 2)
    assert paged.chunks == {}, "the second round is under way before the first is in place"
    paged.gate.set()
    (result,) = collect(manager, 1)
    assert result.complete


def test_a_prompt_that_fits_into_one_round_is_scattered_while_the_rest_of_it_arrives(
    client: DataPlaneClient,
    shape: ChunkLayout,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
) -> None:
    destination = Destination(client, shape, 32 * shape.raw_bytes, connect_timeout=PATIENCE_S)
    manager = KVCacheManager(client, destination, paged, round_bytes_min=2 * shape.raw_bytes)
    paged.gate.clear()
    manager.exchange([job("a", 12, fill)])
    plane.wait_for_call("Fetch", 2)
    assert paged.chunks == {}, "the second round is under way before the first is in place"
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
    fill(list(one.keys[:good]))
    manager.exchange([one])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (good, "absent")
    assert set(paged.chunks) == {("a", index) for index in range(good)}


def test_stalled_daemon_costs_every_waiting_job_its_deadline_and_no_more(
    make_manager: Callable[..., KVCacheManager], fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    manager = make_manager(fetch_timeout=0.3)
    plane.script.stall.add("Fetch")
    count = int(2 * PATIENCE_S / 0.3)
    manager.exchange([job(f"{number}", 1, fill) for number in range(count)])
    results = collect(manager, count)  # one after the other they would take twice as long as it waits
    assert {result.reason for result in results} == {"deadline"}
    assert all(result.seconds < PATIENCE_S for result in results)


def test_memory_in_doubt_is_given_up(
    make_manager: Callable[..., KVCacheManager],
    destination: Destination,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    paged: Paged,
) -> None:
    """The symptom would be chunk 0 of the second job full of 0xEE, written by the first, late fetch."""
    manager = make_manager(fetch_timeout=0.5)
    plane.script.stall.add("Fetch")
    plane.script.write_after_stall = True
    manager.exchange([job("a", 2, fill)])
    assert collect(manager, 1)[0].reason == "deadline"
    plane.script.stall.clear()
    manager._fetch_timeout = PATIENCE_S
    second = job("b", 2, fill)
    manager.exchange([second])
    (result,) = collect(manager, 1)
    assert result.complete
    assert [paged.chunks["b", index] for index in range(2)] == [plane.records[key] for key in second.keys]
    first, *_, last = plane.fetches
    assert first.destination_id != last.destination_id
    assert destination.retired == 1


def test_restarted_daemon_is_registered_with_again_within_the_job(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    manager.exchange([job("a", 2, fill)])
    assert collect(manager, 1)[0].complete
    plane.forget_destinations()
    manager.exchange([job("b", 2, fill)])
    assert collect(manager, 1)[0].complete
    assert plane.calls.count("RegisterDestination") == 2


def test_daemon_that_never_knows_us_is_not_asked_forever(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_DESTINATION)
    manager.exchange([job("a", 2, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (0, "unknown_destination")
    assert plane.calls.count("Fetch") == 2


def test_daemon_that_brings_only_what_is_behind_a_gap_is_not_asked_forever(
    manager: KVCacheManager, shape: ChunkLayout, fill: Callable[[list[bytes]], None], plane: ScriptedDataPlane
) -> None:
    pieces = np.zeros((shape.layers, 2), np.bool_)
    pieces[:, 1] = True
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(
        delivered=[pack(pieces)], outcome=pb.OUTCOME_ROUND_FULL
    )
    manager.exchange([job("a", 2, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (0, "invalid_answer")
    assert plane.calls.count("Fetch") == 1


def test_daemon_that_dies_mid_fetch_and_comes_back(
    manager: KVCacheManager,
    destination: Destination,
    fill: Callable[[list[bytes]], None],
    plane: ScriptedDataPlane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane.script.stall.add("Fetch")
    manager.exchange([job("a", 2, fill), job("b", 2, fill)])
    plane.wait_for_call("Fetch")
    with monkeypatch.context() as patch:
        patch.setattr(destination, "_connect_timeout", 0.2)  # nobody is there to answer
        plane.stop()
        results = collect(manager, 2)
    assert {result.reason for result in results} <= {"unreachable", "breaker_open"}
    revived = plane.restarted()
    try:
        ends = time.monotonic() + PATIENCE_S
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
    client = DataPlaneClient("127.0.0.1:1", failures=1, backoff=NEVER_S, backoff_max=NEVER_S, connect_timeout=0.1)
    attempts: list[float] = []

    def absent(timeout: float, shape: ChunkLayout) -> None:
        attempts.append(timeout)
        raise DataPlaneError("nobody is there", "unreachable")

    monkeypatch.setattr(client, "connect", absent)
    manager = KVCacheManager(client, Destination(client, shape, 8 * shape.raw_bytes, 0.1), paged)
    try:
        manager.exchange([job(name, 2) for name in "abcdefgh"])
        assert {result.reason for result in collect(manager, 8)} <= {"unreachable", "breaker_open"}
        assert len(attempts) == 1, "the others do not wait for a connection"
        assert leftovers() == set()
    finally:
        manager.close(PATIENCE_S)
        client.close()


def test_scatter_that_fails_is_an_outcome(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], paged: Paged, caplog: Any
) -> None:
    paged.failure = RuntimeError("no such block")
    manager.exchange([job("a", 6, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (0, "scatter_failed")
    assert "no such block" in result.detail
    paged.failure = None
    manager.exchange([job("b", 2, fill)])
    assert collect(manager, 1)[0].complete, "the loop goes on"


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
    manager = make_manager(fetch_timeout=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    manager.exchange([job("a", 2, fill)])
    plane.wait_for_call("Fetch")
    assert manager.exchange(cancel=["a"]) == []
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (0, "cancelled")
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
    manager = make_manager(fetch_timeout=2 * NEVER_S)
    plane.script.fetch_delay = NEVER_S
    manager.exchange([job("a", 2, fill), job("b", 2, fill)])
    plane.wait_for_call("Fetch")
    results = manager.close(PATIENCE_S)
    assert {(result.job.request_id, result.reason) for result in results} == {("a", "closed"), ("b", "closed")}
    assert plane.destinations == 0 and leftovers() == set()


def test_memory_that_is_made_shorter_while_it_is_scattered_is_an_outcome_and_given_up(
    manager: KVCacheManager, fill: Callable[[list[bytes]], None], paged: Paged, destination: Destination
) -> None:
    wait_for(lambda: destination.current)
    memory = destination.current
    assert isinstance(memory, Segment)
    paged.gate.clear()
    manager.exchange([job("a", 6, fill)])
    wait_for(lambda: paged.waiting)
    os.ftruncate(memory._descriptor, 0)
    paged.gate.set()
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (0, "scatter_failed")
    assert "made shorter" in result.detail
    paged.chunks.clear()
    manager.exchange([job("b", 6, fill)])
    (result,) = collect(manager, 1)
    assert (result.chunks, result.reason) == (6, "complete"), result.detail
    assert destination.current is not memory and destination.retired == 1
