"""The data plane's client: deadlines, reasons, the breaker, and answers that are not believed."""

import grpc
import pytest
from scripted import ScriptedDataPlane

from host_control.client import Breaker, ChunkShape, DataPlaneClient
from host_control.destination import Destination
from shadowserve.errors import DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

KEYS = [bytes([number]) * 32 for number in range(6)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_breaker_opens_backs_off_and_probes_forever() -> None:
    clock = Clock()
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
    clock = Clock()
    breaker = Breaker(1, 1.0, 4.0, clock)
    breaker.report(success=False)
    clock.now = 1.0
    assert breaker.allow()
    clock.now = 5.0
    assert breaker.allow()


def test_lookup_counts_leading_keys_of_each_chain(client: DataPlaneClient, plane: ScriptedDataPlane) -> None:
    plane.records.update(dict.fromkeys([KEYS[0], KEYS[1], KEYS[3]], b""))
    chains = [(b"a" * 32, KEYS), (b"b" * 32, KEYS[3:]), (b"c" * 32, [])]
    assert client.lookup(chains, 5.0) == [2, 1, 0]


@pytest.mark.parametrize("hits", [[7], [], [1, 1]])
def test_lookup_that_cannot_be_true_is_refused(
    client: DataPlaneClient, plane: ScriptedDataPlane, hits: list[int]
) -> None:
    plane.script.lookup_hits = lambda _: hits
    with pytest.raises(DataPlaneError) as error:
        client.lookup([(b"a" * 32, KEYS)], 5.0)
    assert error.value.outcome == "invalid_answer"


def test_stalled_lookup_ends_by_its_deadline(client: DataPlaneClient, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Lookup")
    with pytest.raises(DataPlaneError) as error:
        client.lookup([(b"a" * 32, KEYS)], 0.1)
    assert error.value.outcome == "deadline"


def test_absent_daemon_opens_the_breaker_and_is_found_again() -> None:
    plane = ScriptedDataPlane()
    plane.stop()
    client = DataPlaneClient(plane.address, failures=2, backoff=0.01, backoff_max=0.05)
    outcomes = []
    for _ in range(3):
        with pytest.raises(DataPlaneError) as error:
            client.lookup([(b"a" * 32, KEYS)], 2.0)
        outcomes.append(error.value.outcome)
    assert outcomes == ["unreachable", "unreachable", "breaker_open"]
    revived = plane.restarted()
    try:
        assert client.wait_ready(5)
        while True:
            try:
                assert client.lookup([(b"a" * 32, KEYS)], 2.0) == [0]
                break
            except DataPlaneError as again:
                assert again.outcome == "breaker_open"
        assert not client.breakers["lookup"].open
    finally:
        client.close()
        revived.stop()


def fetch(client: DataPlaneClient, destination: Destination, timeout: float = 5.0) -> object:
    destination.acquire(5)
    call = client.start_fetch("job", destination.destination_id, 0, 1 << 20, KEYS, timeout)
    return call.result()


@pytest.mark.parametrize(
    ("chunks", "outcome"),
    [
        (7, pb.OUTCOME_COMPLETE),
        (5, pb.OUTCOME_COMPLETE),
        (6, pb.OUTCOME_ABSENT),
        (0, pb.OUTCOME_ROUND_FULL),
        (3, pb.OUTCOME_UNSPECIFIED),
        (3, 77),
    ],
)
def test_fetch_answer_that_cannot_be_true_is_not_believed_and_not_quiet(
    client: DataPlaneClient, plane: ScriptedDataPlane, destination: Destination, chunks: int, outcome: int
) -> None:
    plane.script.fetch_answer = lambda answer, request: pb.FetchResponse(chunks=chunks, outcome=outcome)
    answer = fetch(client, destination)
    assert (answer.chunks, answer.reason, answer.quiet) == (0, "invalid_answer", False)


def test_fetch_without_an_answer_is_not_quiet(
    client: DataPlaneClient, plane: ScriptedDataPlane, destination: Destination
) -> None:
    plane.script.stall.add("Fetch")
    answer = fetch(client, destination, 0.05)
    assert (answer.chunks, answer.reason, answer.quiet) == (0, "deadline", False)


def test_refused_fetch_is_quiet(client: DataPlaneClient, plane: ScriptedDataPlane, destination: Destination) -> None:
    plane.script.abort["Fetch"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    answer = fetch(client, destination)
    assert (answer.chunks, answer.reason, answer.quiet) == (0, "refused", True)


def test_disagreement_about_the_chunk_size_is_found_at_registration(
    client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkShape, "chunk_bytes", property(lambda self: 1234))
    with pytest.raises(DataPlaneError, match="1234"):
        Destination(client, shape, 1 << 16).acquire(5)


def test_statistics(client: DataPlaneClient) -> None:
    assert client.statistics().version == "scripted"
