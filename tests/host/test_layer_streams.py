"""Two streams in one ring, of which one fails: each has one outcome, and the other one loses nothing."""

import math
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from machine import WAIT_MAX_S, wait_for
from manager_support import MakeKit
from scripted import ScriptedDataPlane, pieces

from host_control import layer_fetch
from host_control.manager import FetchJob, FetchResult
from shadowserve.chunk import ChunkLayout
from shadowserve.proto import dataplane_pb2 as pb

LAYERS = 6
OUTCOMES = {
    "absent": pb.OUTCOME_ABSENT,
    "corrupt": pb.OUTCOME_CORRUPT,
    "storage_unavailable": pb.OUTCOME_STORAGE_UNAVAILABLE,
}
FAULTS = (*OUTCOMES, "deadline", "aborted", "restarted", "vanished")


class Streams:
    """A manager whose jobs go layer by layer, and a data plane with a fault at one piece of the job ``bad``.

    Attributes:
        faults: What happens before the data plane delivers a layer of ``bad``, by layer; each happens once.
        outcome: Outcome of the calls of ``bad`` that lack a record.
    """

    def __init__(self, make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout, **options: Any) -> None:
        options = {"chunks": 2, "scatter_layers": self.scatter} | options
        self.kit = make_kit(replace(shape, layers=LAYERS), **options)
        self.each = self.kit.shapes[0].raw_bytes // LAYERS
        self.plane, self._deliver = plane, plane._deliver_layers
        plane._deliver_layers = self._deliver_with_faults
        self.faults: dict[int, Any] = {}
        self.outcome = pb.OUTCOME_ABSENT
        self.bytes: dict[tuple[str, int, int], bytes] = {}
        self.results: dict[str, FetchResult] = {}
        self.late: list[str] = []
        self.gone = threading.Event()

    def scatter(self, *given: Any) -> None:
        job, (chunks, window, layers) = given[0], given[-3:]
        self.late += [job.request_id] * (job.request_id in self.results)
        size = (window.layers_end - window.layer) * self.each
        for chunk in range(len(chunks) // size):
            for layer in range(*layers):
                begin = chunk * size + (layer - window.layer) * self.each
                place = (job.request_id, layer, window.chunk + chunk)
                self.bytes[place] = bytes(chunks[begin : begin + self.each])

    def _deliver_with_faults(self, request: Any, memory: Any) -> Iterator[Any]:
        layer, mine = request.parts[0].first_layer, request.parts[0].keys[0].endswith(b"bad".ljust(30))
        delivered = self._deliver(request, memory)
        while True:
            if mine and (fault := self.faults.pop(layer, None)) is not None:
                fault(request, memory)
            if (said := next(delivered, None)) is None:
                return
            if mine and not isinstance(said, int) and said.outcome == pb.OUTCOME_ABSENT:
                said.outcome = self.outcome
            layer += 1
            yield said

    def begin(self, window_s: float = 0.0, **chunks: int) -> dict[str, FetchJob]:
        jobs = {name: self.kit.job(name, count, layerwise=True, window_s=window_s) for name, count in chunks.items()}
        self.right = dict(self.plane.records)
        assert self.kit.manager.exchange(jobs.values()) == []
        return jobs

    def ended(self, jobs: int = 2) -> dict[str, FetchResult]:
        """Return the outcomes by request; check that all bytes are right, and that none come later."""
        for result in self.kit.collect(jobs - len(self.results)):
            assert result.job.request_id not in self.results, "a second outcome"
            self.results[result.job.request_id] = result
        assert not self.kit.early, "a second outcome"
        for name, result in self.results.items():
            for layer in range(LAYERS):
                for chunk in range(*result.chunks):
                    right = self.right[result.job.keys[0][chunk]][layer * self.each :][: self.each]
                    assert self.bytes[name, layer, chunk] == right, (name, layer, chunk)
        self.gone.set()
        self.retired = self.kit.registration.retired
        self.kit.manager.close(WAIT_MAX_S)
        assert not self.late, "scattered after the outcome"
        return self.results


@pytest.mark.parametrize("layer", [0, 2, 5], ids=["first lap", "middle lap", "last lap"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("progress", [True, False], ids=["word", "stream"])
def test_a_fault_of_one_stream_costs_the_other_nothing(
    make_kit: MakeKit,
    plane: ScriptedDataPlane,
    shape: ChunkLayout,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    layer: int,
    progress: bool,
) -> None:
    if fault == "aborted":  # no other reason ends its call
        monkeypatch.setattr(layer_fetch, "_PATIENCE", math.inf)
    chance = random.Random(f"{fault} {layer} {progress}")
    options = {"fetch_timeout_s": 0.5} if fault == "deadline" else {}
    streams = Streams(make_kit, plane, shape, progress=progress, **options)
    lengths = {"bad": chance.choice([2, 3, 8]), "good": chance.choice([1, 3, 8])}  # of 8, no window holds a layer
    chunk = chance.randrange(lengths["bad"])
    streams.outcome = OUTCOMES.get(fault, pb.OUTCOME_ABSENT)

    def happen(request: Any, memory: Any) -> None:
        if fault in OUTCOMES:
            plane.records.pop(jobs["bad"].keys[0][chunk])
        elif fault == "deadline":
            streams.gone.wait(WAIT_MAX_S)
        elif fault == "aborted":
            streams.kit.manager.exchange([], ["bad"])
            wait_for(lambda: request.job_id in plane.cancelled)
        elif fault == "restarted":
            plane.forget_registrations()
        else:
            writing = threading.Thread(target=write_late, args=(request, memory))
            writers.append(writing)
            writing.start()
            raise RuntimeError("the connection breaks")

    def write_late(request: Any, memory: Any) -> None:
        """Write into the region of a call without an answer until the end."""
        mapping, part = (memory[0] if isinstance(memory, list) else memory).mapping, request.parts[0]
        while not streams.gone.wait(0.001):
            mapping[part.offset : part.offset + part.length] = b"\xee" * part.length

    writers: list[threading.Thread] = []
    streams.faults[layer] = happen
    ready = threading.Event()
    entered = plane._deliver_layers
    plane._deliver_layers = lambda *given: (ready.wait(WAIT_MAX_S), entered(*given))[1]
    jobs = streams.begin(**(lengths if chance.random() < 0.5 else dict(reversed(lengths.items()))))
    ready.set()
    results = streams.ended()
    for writing in writers:
        writing.join()
    bad, good = results["bad"], results["good"]
    assert good.complete or (fault == "deadline" and good.reason == "deadline")
    lost = fault in ("deadline", "restarted", "vanished")
    assert streams.retired == lost, "memory is given up where the data plane may still write, or does not know it"
    if fault in OUTCOMES:
        assert (bad.reason, bad.chunks) == (fault, (chunk,))
    elif fault == "restarted":
        assert bad.complete
    else:
        assert bad.reason == {"aborted": "cancelled", "vanished": "unreachable"}.get(fault, fault) and not any(
            bad.chunks
        )


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_the_others_go_on_while_one_stream_stalls(
    make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    monkeypatch.setattr(layer_fetch, "_PATIENCE", 0.005)
    streams, others_ended = Streams(make_kit, plane, shape, progress=True), threading.Event()

    def stall(request: Any, memory: Any) -> None:
        wait_for(lambda: request.job_id in plane.cancelled or others_ended.is_set())
        if not others_ended.is_set():
            streams.faults[layer] = stall

    streams.faults[layer] = stall
    streams.begin(bad=8, good=8, other=3)
    streams.results |= {each.job.request_id: each for each in streams.kit.collect(2)}
    assert "bad" not in streams.results
    others_ended.set()
    assert all(result.complete for result in streams.ended(3).values()), "the stalled one goes on"


def test_each_call_names_its_share_of_the_time_in_which_the_engine_computes_a_layer(
    make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    streams = Streams(make_kit, plane, shape, progress=True)
    streams.begin(0.4, a=3, b=1)
    results = streams.ended().values()
    assert all(result.complete for result in results)
    assert sum(result.seconds - result.waited for result in results) <= max(result.seconds for result in results), (
        "they share the time, so none teaches that the source is slow"
    )
    assert sorted(plane.windows_us) == [100_000] * 3 + [300_000] * 3


def test_a_chunkwise_load_goes_on_after_the_streams_that_interrupt_it(
    make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    streams, began, gate = Streams(make_kit, plane, shape, progress=True), threading.Event(), threading.Event()
    plane.script.after_chunk = lambda chunks: (began.set(), gate.wait(WAIT_MAX_S))
    job = streams.kit.job("whole", 5)
    assert streams.kit.manager.exchange([job]) == []
    assert began.wait(WAIT_MAX_S)
    streams.begin(a=3, b=2)
    gate.set()
    assert [each.job.request_id for each in streams.kit.collect(2)] == ["a", "b"], "before the load's next batch"
    whole = streams.kit.ended()
    assert whole.complete and plane.layerwise_calls == 6


@pytest.mark.parametrize("progress", [True, False])
def test_streams_do_not_wait_for_a_chunkwise_batch_that_stalls(
    make_kit: MakeKit, plane: ScriptedDataPlane, shape: ChunkLayout, progress: bool
) -> None:
    """Symptom: the engine's step waited until the batch of another request ended, up to its deadline."""
    streams = Streams(make_kit, plane, shape, progress=progress, chunks=4)
    counts: list[int] = []

    def stall(answer: pb.FetchResponse, request: pb.FetchRequest) -> pb.FetchResponse:
        if request.order != pb.ORDER_LAYERS:
            counts.append(len(request.parts[0].keys))
            if len(counts) == 1:
                wait_for(lambda: request.job_id in plane.cancelled)
                there = pieces(LAYERS, 1, counts[0])
                return pb.FetchResponse(outcome=pb.OUTCOME_CANCELLED, delivered=[there])
        return answer

    plane.script.fetch_answer = stall
    assert streams.kit.manager.exchange([streams.kit.job("whole", 4, stored=[1])]) == []
    wait_for(lambda: counts)  # one record was delivered
    streams.kit.job("whole", 4)  # the other records come
    streams.begin(a=3, b=2)
    assert [each.job.request_id for each in streams.kit.collect(2)] == ["a", "b"]
    assert streams.kit.ended().complete
    assert counts[0] == 2 and sum(counts) == 5, "the chunk that had come is not fetched again"
