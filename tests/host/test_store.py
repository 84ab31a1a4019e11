"""Storing in the background: staged and dropped chunks. The engine never waits."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.registered_memory import RegisteredMemory
from host_control.segment import Segment
from host_control.store import StoreQueue
from shadowserve.chunk import ChunkLayout
from shadowserve.proto import dataplane_pb2 as pb

MakeQueue = Callable[..., StoreQueue]


def keys(count: int, start: int = 0) -> list[bytes]:
    return [bytes([1 + start + index]) * 32 for index in range(count)]


def gather(index: int, chunk: memoryview) -> None:
    chunk[:] = bytes([100 + index]) * len(chunk)


def stored(queue: StoreQueue) -> None:
    """Wait until nothing waits to be stored."""
    assert queue.flush(WAIT_MAX_S)


@pytest.fixture
def make_queue(client: DataPlaneClient, shape: ChunkLayout) -> Iterator[MakeQueue]:
    """Return a function that makes a queue with room for ``chunks`` chunks of each shape."""
    queues = []

    def make(*shapes: ChunkLayout, chunks: int = 8, **options: Any) -> StoreQueue:
        room = chunks * sum(each.raw_bytes for each in shapes or [shape])
        registration = RegisteredMemory(client, shapes or [shape], room, connect_timeout_s=WAIT_MAX_S)
        given = {"batch_chunks": 3, "timeout": WAIT_MAX_S, "retry_interval": 0.02} | options
        queues.append(StoreQueue(client, registration, **given))
        assert queues[-1].wait_tried(WAIT_MAX_S)
        return queues[-1]

    yield make
    for queue in queues:
        queue.close(WAIT_MAX_S)


@pytest.fixture
def queue(make_queue: MakeQueue) -> StoreQueue:
    return make_queue(recent_keys=16)


@pytest.fixture
def parts(make_queue: MakeQueue, shape: ChunkLayout) -> StoreQueue:
    """Room for four chunks of each of two parts; the chunks of one are half as large."""
    return make_queue(shape, half(shape), chunks=4)


def half(shape: ChunkLayout) -> ChunkLayout:
    return replace(shape, namespace=b"s" * 32, vector_length=shape.vector_length // 2)


def test_chunks_are_stored_in_order_with_the_gathered_bytes(
    queue: StoreQueue, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    assert queue.offer(keys(5), gather) == 5
    stored(queue)
    assert [key for request in plane.stores for key in request.keys] == keys(5)
    assert max(len(request.keys) for request in plane.stores) <= 3
    assert [plane.records[key][0] for key in keys(5)] == [100, 101, 102, 103, 104]
    counts = queue.take_counts()
    assert counts["stored"] == 5 and counts["stored_raw_bytes"] == 5 * shape.raw_bytes
    assert queue.take_counts() == {}


def test_each_chunk_is_stored_with_the_one_before_it(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    first, *rest = keys(5)
    assert queue.offer([first], gather) == 1
    assert queue.offer(rest, gather, previous=first) == 4
    stored(queue)
    pairs = [pair for request in plane.stores for pair in zip(request.keys, request.parents, strict=True)]
    assert pairs == list(zip(keys(5), [b"", *keys(4)], strict=True))


def test_chunks_that_expire_are_stored_in_calls_of_their_own(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    queue.offer(keys(2), gather)
    queue.offer(keys(1, 2), gather, previous=keys(2)[-1], lasts_s=1.5)
    stored(queue)
    assert [(list(request.keys), request.lasts_ms) for request in plane.stores][-1] == (keys(1, 2), 1500)
    assert all(not request.lasts_ms for request in plane.stores[:-1])


@pytest.mark.parametrize("outcome", [None, pb.OUTCOME_STORAGE_REFUSED])
def test_settled_counts_staged_chunks_that_are_stored_or_dropped(
    queue: StoreQueue, plane: ScriptedDataPlane, outcome: int | None
) -> None:
    plane.script.store_outcome = outcome
    plane.script.stall.add("Store")
    assert queue.offer(keys(5), gather) == 5
    plane.wait_for_call("Store")
    assert (queue.staged, queue.settled) == (5, 0)
    plane.script.unstall.set()
    stored(queue)
    assert (queue.staged, queue.settled) == (5, 5)


def test_chunks_offered_together_are_one_call_up_to_a_whole_batch(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    with queue.together():
        for key in keys(3):
            assert queue.offer([key], gather, chained=False) == 1
        plane.wait_for_call("Store")
        for key in keys(2, start=3):
            assert queue.offer([key], gather, chained=False) == 1
    stored(queue)
    assert [list(request.keys) for request in plane.stores] == [keys(3), keys(2, start=3)]


def test_known_chunks_are_not_gathered_again(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    queue.remember(keys(2))
    assert queue.offer(keys(3), gather) == 1
    assert queue.offer(keys(3), gather) == 0
    stored(queue)
    assert list(plane.records) == keys(1, 2)
    queue.forget(keys(1))
    assert queue.offer(keys(1), gather) == 1


def test_chunk_that_was_evicted_is_stored_again(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    """Symptom: a store that restarted empty stayed empty, because its clients assumed that it was full."""
    before = time.monotonic()
    assert queue.offer(keys(2), gather) == 2
    stored(queue)
    plane.records.clear()
    assert queue.offer(keys(2), gather, absent_since=before) == 0, "looked up before it was stored"
    assert queue.offer(keys(2), gather, absent_since=time.monotonic()) == 2
    stored(queue)
    assert list(plane.records) == keys(2)


def test_reports_tell_of_chunks_once_they_are_stored_also_of_skipped_ones_and_count_lost_reports(
    make_queue: MakeQueue, plane: ScriptedDataPlane
) -> None:
    queue = make_queue(reports_max=3)
    plane.script.stall.add("Store")
    assert queue.offer(keys(2), gather, reported=True) == 2
    assert queue.offer(keys(1), gather, reported=True) == 0
    assert queue.take_stored() == []
    plane.script.unstall.set()
    stored(queue)
    assert queue.take_stored() == [*keys(2), *keys(1)] and not queue.has_stored
    assert queue.offer(keys(5, 10), gather, reported=True) == 5 and queue.offer(keys(1, 20), gather) == 1
    stored(queue)
    assert queue.take_stored() == keys(3, 10) and queue.take_counts()["unreported"] == 2


def test_memory_of_recent_keys_is_bounded(queue: StoreQueue) -> None:
    many = [bytes([0, number]) * 16 for number in range(17)]
    queue.remember(many)
    assert queue.offer(many[1:], gather) == 0
    assert queue.offer(many[:1], gather) == 1


def test_full_staging_drops_the_rest_of_the_prompt_without_waiting(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Store")
    begin = time.monotonic()
    assert queue.offer(keys(11), gather) == 8
    assert queue.offer(keys(1, 11), gather, previous=keys(11)[-1], anchored=False) == 0
    assert time.monotonic() - begin < WAIT_MAX_S, "the deadline of a store without free memory"
    assert queue.take_counts() == {"dropped_full": 1, "dropped_gap": 3}
    plane.script.unstall.set()
    stored(queue)
    assert queue.offer(keys(1, 11), gather, previous=keys(8)[-1], anchored=False) == 1, "after a stored chunk"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (pb.OUTCOME_STORAGE_REFUSED, "storage_refused"),
        (pb.OUTCOME_NOT_STORABLE, "not_storable"),
        (pb.OUTCOME_COMPLETE, "invalid_answer"),
    ],
)
def test_chunks_that_were_not_stored_are_counted_and_may_be_offered_again(
    queue: StoreQueue, plane: ScriptedDataPlane, outcome: int, reason: str
) -> None:
    plane.script.store_outcome = outcome
    queue.offer(keys(1), gather)
    stored(queue)
    assert queue.take_counts()[f"dropped_{reason}"] == 1
    plane.script.store_outcome = None
    ends = time.monotonic() + WAIT_MAX_S
    while not plane.records:
        queue.offer(keys(1), gather)
        stored(queue)
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_a_chunk_that_was_not_stored_costs_those_around_it_nothing(
    queue: StoreQueue, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    plane.script.stall.add("Store")
    plane.script.not_storable.add(keys(4)[2])
    queue.offer(keys(1), gather)
    plane.wait_for_call("Store")
    queue.offer(keys(4), gather)  # one call stores the three chunks after the first
    plane.script.unstall.set()
    stored(queue)
    assert [len(request.keys) for request in plane.stores] == [1, 3]
    counts = queue.take_counts()
    assert (counts["stored"], counts["dropped_not_storable"]) == (3, 1)
    assert counts["stored_raw_bytes"] == 3 * shape.raw_bytes
    assert queue.offer(keys(4), gather) == 1, "the others are known to be stored"


def test_a_stalled_store_gives_up_its_memory_and_keeps_waiting_chunks(
    make_queue: MakeQueue, plane: ScriptedDataPlane
) -> None:
    queue = make_queue(batch_chunks=2)
    plane.script.stall.add("Store")
    queue._timeout = 0.1
    assert queue.offer(keys(6), gather) == 6
    plane.wait_for_call("Store")
    queue._timeout = WAIT_MAX_S  # for the following stores
    plane.script.stall.clear()
    stored(queue)
    dropped = queue.take_counts()["dropped_deadline"]
    assert 1 <= dropped <= 2
    assert len(plane.records) >= 6 - dropped
    assert queue._registration.retired == 1


def test_truncated_memory_costs_only_the_chunks_in_it(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    registration = queue._registration
    memory = registration.current
    assert isinstance(memory, Segment)

    def shrinking(index: int, chunk: memoryview) -> None:
        os.ftruncate(memory._descriptor, 0)
        gather(index, chunk)

    assert queue.offer(keys(1), shrinking) == 1
    stored(queue)
    assert plane.records == {}, "zeros are not KV"
    assert queue.take_counts()["dropped_no_memory"] == 1
    wait_for(lambda: registration.current not in (None, memory))
    assert queue.offer(keys(2), gather) == 2
    stored(queue)
    assert [plane.records[key][0] for key in keys(2)] == [100, 101]


# ---- Parts -----------------------------------------------------------------------------------------------------------


def test_chunks_of_two_parts_wait_apart_and_are_stored_as_their_own(
    parts: StoreQueue, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    plane.script.stall.add("Store")
    assert parts.offer(keys(4), gather) == 4
    assert parts.offer(keys(4, 50), lambda index, chunk: gather(50 + index, chunk), part=1) == 4
    assert parts.offer(keys(1, 20), gather) == 0 == parts.offer(keys(1, 70), gather, part=1)
    assert parts.take_counts() == {"dropped_full": 2}
    plane.script.unstall.set()
    stored(parts)
    for number, part in ((0, 0), (50, 1)):
        for index, key in enumerate(keys(4, number)):
            assert plane.records[key] == bytes([100 + number + index]) * (shape.raw_bytes >> part)
    assert {request.memory_id for request in plane.stores} == {parts._registration.memory_id}
    named = {request.layout: [] for request in plane.stores}
    for request in plane.stores:
        named[request.layout] += list(request.keys)
    assert named == {0: keys(4), 1: keys(4, 50)}, "a batch is of one part"
    spans = sorted(
        (request.offset, request.offset + len(request.keys) * shape.raw_bytes)
        for request in plane.stores
        if request.layout == 0
    )
    assert spans[-1][1] <= min(request.offset for request in plane.stores if request.layout == 1)


def test_chunks_that_need_none_before_them_have_no_gap(parts: StoreQueue, plane: ScriptedDataPlane) -> None:
    """Each chunk of a window or a state is useful alone. Dropped or unknown chunks before it have no effect."""
    unknown = keys(1, 90)[0]
    assert parts.offer(keys(1, 50), gather, part=1, chained=False, previous=unknown, anchored=False) == 1
    stored(parts)
    (request,) = plane.stores
    assert list(request.parents) == [b""]

    def failing(index: int, chunk: memoryview) -> None:
        if index == 1:
            raise RuntimeError("no such block")
        gather(index, chunk)

    assert parts.offer(keys(3, 60), failing, part=1, chained=False) == 2
    stored(parts)
    assert set(plane.records) == {*keys(1, 50), keys(3, 60)[0], keys(3, 60)[2]}
    counts = parts.take_counts()
    assert counts["dropped_gather_failed"] == 1 and "dropped_gap" not in counts
    assert parts.offer(keys(3, 70), failing, previous=unknown, anchored=False) == 0, "chained chunks have a gap"
    assert parts.take_counts() == {"dropped_gap": 3}


def test_a_restarted_daemon_loses_nothing_that_waits(
    parts: StoreQueue, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    plane.forget_registrations()
    assert parts.offer(keys(4), gather) == 4
    assert parts.offer(keys(4, 50), gather, part=1) == 4
    stored(parts)
    for start, part in ((0, 0), (50, 1)):
        for index, key in enumerate(keys(4, start)):
            assert plane.records[key] == bytes([100 + index]) * (shape.raw_bytes >> part)
    assert parts._registration.retired == 1


def test_absent_daemon_costs_the_engine_nothing(shape: ChunkLayout) -> None:
    client = DataPlaneClient("127.0.0.1:1", failures=1, backoff=NEVER_S, backoff_max_s=NEVER_S)
    registration = RegisteredMemory(client, [shape], 8 * shape.raw_bytes, connect_timeout_s=0.05)
    queue = StoreQueue(client, registration, retry_interval=0.02)
    gathered = []
    try:
        assert not queue.wait_tried(WAIT_MAX_S)
        begin = time.monotonic()
        assert queue.offer(keys(100), lambda index, chunk: gathered.append(index)) == 0
        assert time.monotonic() - begin < WAIT_MAX_S
        assert gathered == []
        counts = queue.take_counts()
        assert counts.pop("dropped_gap") == 99
        assert set(counts) <= {"dropped_unreachable", "dropped_breaker_open"}
    finally:
        begin = time.monotonic()
        queue.close(1)
        client.close()
        assert time.monotonic() - begin < WAIT_MAX_S


def test_close_stores_waiting_chunks(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    queue.offer(keys(6), gather)
    queue.close(WAIT_MAX_S)
    assert list(plane.records) == keys(6)
    assert plane.registrations == 0


def test_offers_from_the_engine_while_storing(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    """Each chunk is stored with its own bytes, in any order of offers and stores."""

    def write(number: int) -> Callable[[int, memoryview], None]:
        def fill(index: int, chunk: memoryview) -> None:
            chunk[:] = bytes([number]) * len(chunk)

        return fill

    def engine() -> None:
        for number in range(200):
            while not queue.offer([bytes([number]) * 32], write(number)):
                time.sleep(0.001)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(WAIT_MAX_S)
    assert not thread.is_alive() and queue.flush(WAIT_MAX_S)
    assert {key[0]: record[0] for key, record in plane.records.items()} == {number: number for number in range(200)}


def test_dropped_chunks_that_others_wait_for_are_withdrawn(queue: StoreQueue, plane: ScriptedDataPlane) -> None:
    """Symptom: engines waited until their deadline for a chunk that no engine stored."""
    plane.published.update(dict.fromkeys(keys(12), 60_000))
    plane.script.not_storable = {keys(12)[1]}
    plane.script.stall.add("Store")
    assert queue.offer(keys(10), gather, published=True) == 8
    wait_for(lambda: list(plane.published or ()) == [*keys(8), *keys(2, 10)])
    plane.script.unstall.set()
    stored(queue)
    wait_for(lambda: keys(12)[1] not in (plane.published or ()))
    assert keys(12)[0] in plane.published, "stored chunks need no notification"
    before = plane.calls.count("Publish")
    assert queue.offer(keys(2, 20), lambda index, chunk: 1 // 0, previous=keys(1)[0]) == 0
    assert queue.offer(keys(2, 10), lambda index, chunk: 1 // 0, previous=keys(1)[0], published=True) == 0
    wait_for(lambda: not set(keys(2, 10)) & set(plane.published or ()))
    assert plane.calls.count("Publish") == before + 1, "an engine that does not wait gets no notification"


def test_a_part_is_stored_as_two_shapes_from_the_same_slots(
    make_queue: MakeQueue, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    """Like chunks that are quantized, and lossless for a saved preempted request."""
    queue = make_queue(shape, replace(shape, namespace=b"o" * 32), chunks=2, parts=1, batch_chunks=8)
    with queue.together():
        assert queue.offer(keys(2), gather) == 2
        assert queue.offer(keys(3, 50), gather, shape=1) == 2, "there are four slots"
    stored(queue)
    assert {key for call in plane.stores if call.layout == 0 for key in call.keys} == set(keys(2))
    assert {key for call in plane.stores if call.layout == 1 for key in call.keys} == set(keys(2, 50))
    assert queue.take_counts()["dropped_full"] == 1


def test_shapes_of_one_part_have_the_same_size(make_queue: MakeQueue, shape: ChunkLayout) -> None:
    with pytest.raises(ValueError, match="shards"):
        make_queue(shape, half(shape), parts=1)
