"""The data plane's client: deadlines, reasons, the breaker, and invalid answers."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from machine import WAIT_MAX_S
from scripted import Clock, ScriptedDataPlane, pieces, stored

from host_control.client import Breaker, DataPlaneClient, FetchAnswer, FetchPart
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier

KEYS = [bytes([number]) * 32 for number in range(6)]


def test_breaker_opens_backs_off_and_probes_forever() -> None:
    clock = Clock(0.0)
    breaker = Breaker(2, 1.0, 4.0, clock)
    for pause in (1.0, 2.0, 4.0, 4.0, 4.0):
        while not breaker.open:
            assert breaker.allow()
            breaker.report(success=False)
        assert not breaker.allow()
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.01
        assert breaker.allow(), "the probe"
        assert not breaker.allow(), "one probe at a time"
        breaker.report(success=False)
    clock.now += 4.0
    assert breaker.allow()
    breaker.report(success=True)
    assert breaker.allow() and breaker.allow()


def test_lost_probe_does_not_close_the_door_for_good() -> None:
    clock = Clock(0.0)
    breaker = Breaker(1, 1.0, 4.0, clock)
    breaker.report(success=False)
    clock.now = 1.0
    assert breaker.allow()
    clock.now = 5.0
    assert breaker.allow()


def test_a_lookup_says_which_records_of_each_chain_are_there_where_and_how_large(
    client: DataPlaneClient, plane: ScriptedDataPlane
) -> None:
    plane.records.update(dict.fromkeys([*KEYS[:3], KEYS[4]], b""))
    chains = [(b"a" * 32, KEYS), (b"b" * 32, KEYS[1:4]), (b"c" * 32, [])]
    found = client.find(chains, WAIT_MAX_S)()
    there = [each.stored.tolist() for each in found]
    assert there == [[True, True, True, False, True, False], [True, True, False], []]
    assert [(each.stored_bytes, each.cold_seconds) for each in found] == [(0, 0.0)] * 3
    plane.script.record_bytes, plane.script.cold_ms = 100, 1500
    plane.script.tiers = {KEYS[0]: Tier.MEMORY, KEYS[1]: Tier.DEVICE}
    plane.script.cold.add(KEYS[4])
    first, second, _ = client.find(chains, WAIT_MAX_S)()
    assert first.tiers.tolist() == [Tier.MEMORY, Tier.DEVICE, Tier.STORAGE, Tier.NONE, Tier.COLD, Tier.NONE]
    assert (first.stored_bytes, first.cold_seconds) == (400, 1.5)
    assert (second.stored_bytes, second.cold_seconds) == (200, 0.0)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda answer: answer.present.__setitem__(0, bytes([0x7F])), "a set of 6 has a bit after its end"),
        (lambda answer: answer.present.append(bytes([1])), "shorter than argument 1"),
        (lambda answer: answer.ClearField("present"), "longer than argument 1"),
        (lambda answer: answer.stored_bytes.append(0), "bytes of 2 chains where 1"),
        (lambda answer: answer.cold_ms.append(0), "times of 2 chains where 1"),
        (lambda answer: answer.tiers.append(b""), "tiers of 2 chains where 1"),
        (lambda answer: answer.ClearField("tiers"), "tiers of 0 chains where 1"),
        (lambda answer: answer.tiers.__setitem__(0, bytes([3] * 3)), "not those of the stored chunks"),
        (lambda answer: answer.tiers.__setitem__(0, bytes([3] * 6)), "not those of the stored chunks"),
        (lambda answer: answer.tiers.__setitem__(0, bytes([5] * 3 + [0] * 3)), "not those of the stored chunks"),
    ],
)
def test_a_lookup_whose_parts_do_not_fit_is_refused(
    client: DataPlaneClient, plane: ScriptedDataPlane, lie: Callable[[Any], Any], words: str
) -> None:
    plane.records.update(dict.fromkeys(KEYS[:3], b""))
    plane.script.lookup_answer = lie
    with pytest.raises(DataPlaneError, match=words) as error:
        client.find([(b"a" * 32, KEYS)], WAIT_MAX_S)()
    assert error.value.outcome == "invalid_answer"


def test_stalled_lookup_ends_by_its_deadline(client: DataPlaneClient, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Lookup")
    with pytest.raises(DataPlaneError) as error:
        stored(client, [(b"a" * 32, KEYS)], 0.1)
    assert error.value.outcome == "deadline"


def test_absent_daemon_opens_the_breaker_and_is_found_again() -> None:
    plane = ScriptedDataPlane()
    plane.stop()
    client = DataPlaneClient(plane.address)
    clock = Clock(0.0)
    client.breakers["lookup"] = Breaker(2, 1.0, 4.0, clock)
    outcomes = []
    for _ in range(3):
        with pytest.raises(DataPlaneError) as error:
            stored(client, [(b"a" * 32, KEYS)])
        outcomes.append(error.value.outcome)
    assert outcomes == ["unreachable", "unreachable", "breaker_open"]
    revived = plane.restarted()
    try:
        assert client.wait_ready(WAIT_MAX_S)
        with pytest.raises(DataPlaneError, match="paused"):
            stored(client, [(b"a" * 32, KEYS)])
        clock.now += 1.0
        assert not stored(client, [(b"a" * 32, KEYS)])[0].any()
        assert not client.breakers["lookup"].open
    finally:
        client.close()
        revived.stop()


def fetch(client: DataPlaneClient, registration: RegisteredMemory, timeout: float = WAIT_MAX_S) -> FetchAnswer:
    registration.acquire(WAIT_MAX_S)
    (shape,), memory_id = registration.shapes, registration.memory_id
    return client.start_fetch("job", [FetchPart.whole(shape, memory_id, KEYS)], timeout).result()


@pytest.mark.parametrize(
    ("chunks", "outcome"),
    [
        (7, pb.OUTCOME_COMPLETE),
        (5, pb.OUTCOME_COMPLETE),
        (6, pb.OUTCOME_ABSENT),
        (0, pb.OUTCOME_BATCH_FULL),
        (3, pb.OUTCOME_UNSPECIFIED),
        (3, 77),
    ],
)
def test_fetch_answer_that_cannot_be_true_is_not_believed_and_not_quiet(
    client: DataPlaneClient, plane: ScriptedDataPlane, registration: RegisteredMemory, chunks: int, outcome: int
) -> None:
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(
        delivered=[pieces(registration.shapes[0].layers, chunks, len(KEYS))], outcome=outcome
    )
    answer = fetch(client, registration)
    assert (answer.chunks, answer.reason, answer.quiet) == ([0], "invalid_answer", False)


@pytest.mark.parametrize("reason", ["deadline", "refused"])
def test_a_refused_fetch_is_quiet_and_one_without_an_answer_is_not(
    client: DataPlaneClient, plane: ScriptedDataPlane, registration: RegisteredMemory, reason: str
) -> None:
    if reason == "refused":
        plane.script.abort["Fetch"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    else:
        plane.script.stall.add("Fetch")
    answer = fetch(client, registration, WAIT_MAX_S if reason == "refused" else 0.05)
    assert (answer.chunks, answer.reason, answer.quiet) == ([0], reason, reason == "refused")


def test_disagreement_about_the_chunk_size_is_found_at_registration(
    client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkLayout, "raw_bytes", property(lambda self: 1234))
    with pytest.raises(DataPlaneError, match="1234"):
        RegisteredMemory(client, [shape], 1 << 16, WAIT_MAX_S).acquire(WAIT_MAX_S)


def test_two_threads_that_connect_at_once_share_one_session(
    plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: memory that one thread had registered was unknown, and the first chunks of an engine were not stored."""
    client = DataPlaneClient(plane.address, connect_timeout_s=WAIT_MAX_S)
    both, opened = threading.Barrier(2), [b"second", b"first"]
    hello = client._connection._hello

    def open_both(request: pb.HelloRequest, ends: float, *, wait: bool) -> pb.HelloResponse:
        answer = hello(request, ends, wait=wait)
        if not request.session:
            answer.session = opened.pop()
            both.wait(WAIT_MAX_S)
        else:
            answer.session = request.session
        return answer

    monkeypatch.setattr(client._connection, "_hello", open_both)
    try:
        threads = [threading.Thread(target=client.connect, args=(WAIT_MAX_S,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_MAX_S)
        ((_, session),) = client._connection.metadata()
        assert [hello.session for hello in plane.hellos] == [b"", b"", session]
    finally:
        client.close()
