"""A fetch in layer order, with progress by a word or by a stream, and its end when the data plane fails."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from machine import WAIT_MAX_S
from manager_support import MakeKit
from scripted import ScriptedDataPlane

from host_control import layer_fetch
from host_control.layer_fetch import LayerWindow
from host_control.manager import FetchJob, FetchResult
from shadowserve.chunk import ChunkLayout
from shadowserve.proto import dataplane_pb2 as pb

CHUNKS = 3


class Layered:
    """A kit whose jobs go layer by layer: the layers of each scatter, and the bytes of each layer of a chunk.

    Args:
        shape: Shape of each shard's records.
        first: First layer of the engine that each shard has.
        before: Leading layers of each record that the engine does not have.
    """

    def __init__(
        self,
        make_kit: MakeKit,
        shape: ChunkLayout,
        *,
        streamed: bool,
        first: Sequence[int] = (0,),
        before: int = 0,
        **options: Any,
    ) -> None:
        self.layers: list[tuple[int, int]] = []
        self.bytes: dict[tuple[int, int, int], bytes] = {}
        self.first, self.before = first, before
        self.each, self.depth = shape.raw_bytes // shape.layers, shape.layers - before
        wanted = [slice(before, shape.layers)] * len(first)
        options |= {"scatter_layers": self._scatter, "layers": wanted}
        self.kit = make_kit(*[shape] * len(first), progress=not streamed, **options)
        self.plane, self.registration, self.manager = self.kit.plane, self.kit.registration, self.kit.manager
        self.call = "FetchLayers" if streamed else "Fetch"

    def _scatter(self, job: FetchJob, shard: int, chunks: Any, window: LayerWindow, layers: tuple[int, int]) -> None:
        self.layers.append(layers)
        size = (window.layers_end - window.layer) * self.each
        for chunk in range(len(chunks) // size):
            for layer in range(*layers):
                begin = chunk * size + (layer - window.layer) * self.each
                self.bytes[shard, layer, window.chunk + chunk] = bytes(chunks[begin : begin + self.each])

    def begin(self, name: str, chunks: int = CHUNKS) -> FetchJob:
        counts = [chunks] * len(self.first)
        job = self.kit.job(name, *counts, layerwise=True, first_layers=tuple(self.first))
        assert self.manager.exchange([job]) == []
        return job

    def ended(self, job: FetchJob) -> FetchResult:
        """Return the outcome; what was scattered must be right."""
        (result,) = self.kit.collect(1)
        for shard, (first, chunks) in enumerate(zip(self.first, result.chunks, strict=True)):
            held = itertools.product([shard], range(first, first + self.depth), range(chunks))
            assert set(held) <= self.bytes.keys()
        for (shard, layer, chunk), there in self.bytes.items():
            begin = (layer - self.first[shard] + self.before) * self.each
            assert there == self.kit.plane.records[job.keys[shard][chunk]][begin : begin + self.each]
        return result


@pytest.fixture(params=["word", "stream"])
def layered(make_kit: MakeKit, shape: ChunkLayout, request: pytest.FixtureRequest) -> Layered:
    return Layered(make_kit, shape, streamed=request.param == "stream")


@pytest.fixture(params=["word", "stream"])
def ring(make_kit: MakeKit, shape: ChunkLayout, request: pytest.FixtureRequest) -> Layered:
    """Return a kit for chunks of six layers, of which each half of the memory holds six pieces."""
    return Layered(make_kit, replace(shape, layers=6), streamed=request.param == "stream", chunks=2)


@pytest.fixture
def streamed(make_kit: MakeKit, shape: ChunkLayout) -> Layered:
    return Layered(make_kit, shape, streamed=True)


def test_each_layer_is_scattered_as_it_arrives(layered: Layered, plane: ScriptedDataPlane, shape: ChunkLayout) -> None:
    """The data plane sends the second layer only after the first one is scattered."""
    scattered = threading.Event()
    place = layered._scatter
    layered.manager._layers.scatter = lambda *given: (place(*given), scattered.set())[0]
    plane.script.before_layer = lambda layer: layer == 0 or scattered.wait(WAIT_MAX_S)
    result = layered.ended(layered.begin("a"))
    assert (result.reason, result.chunks) == ("complete", (CHUNKS,))
    assert layered.layers == [(0, 1), (1, 2)] and len(layered.bytes) == CHUNKS * shape.layers
    assert plane.calls.count(layered.call) == 1
    assert layered.kit.paged.chunks == {}, "nothing is scattered chunk by chunk"


def test_a_stream_that_ends_without_an_answer_is_none(streamed: Layered, plane: ScriptedDataPlane) -> None:
    plane.script.answers_streams = False
    result = streamed.ended(streamed.begin("a"))
    assert (result.reason, result.chunks) == ("invalid_answer", (CHUNKS,)), "all reported layers are in place"
    assert streamed.registration.retired == 1, "no answer has confirmed that writing has ended"


@pytest.mark.parametrize("said", [[7, 1 << 31], [2, 1, 0]], ids=["more than there are", "fewer than before"])
def test_layers_that_cannot_be_are_no_more_than_there_are(
    streamed: Layered, plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch, said: list[int]
) -> None:
    deliver = plane._deliver_layers

    def lying(*given: Any) -> Iterator[Any]:
        *_, answer = deliver(*given)
        yield from said
        yield answer

    monkeypatch.setattr(plane, "_deliver_layers", lying)
    result = streamed.ended(streamed.begin("a"))
    assert (result.reason, result.chunks) == ("complete", (CHUNKS,))
    assert streamed.layers[0][0] == 0 and streamed.layers[-1][1] == 2


def test_a_refused_stream_is_quiet(streamed: Layered, plane: ScriptedDataPlane) -> None:
    plane.script.abort["FetchLayers"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    result = streamed.ended(streamed.begin("a"))
    assert (result.reason, result.chunks) == ("refused", (0,)) and streamed.registration.retired == 0


# ---- The ring

LONG = 8  # chunks of which half the memory does not hold one layer


@pytest.mark.parametrize(("chunks", "windows"), [(CHUNKS, 3), (LONG, 12)], ids=["two layers", "part of a layer"])
def test_a_prompt_of_any_length_goes_through_the_ring(ring: Layered, chunks: int, windows: int) -> None:
    result = ring.ended(ring.begin("a", chunks))
    assert (result.reason, result.chunks) == ("complete", (chunks,)) and len(ring.bytes) == 6 * chunks
    assert ring.plane.calls.count(ring.call) == windows
    assert [first for first, _ in ring.layers] == sorted(first for first, _ in ring.layers), "in the engine's order"


def test_nothing_is_requested_that_has_no_place(ring: Layered, plane: ScriptedDataPlane) -> None:
    """While the first window is not scattered, only the second one is on its way."""
    gate, place = threading.Event(), ring._scatter
    ring.manager._layers.scatter = lambda *given: (gate.wait(WAIT_MAX_S), place(*given))[1]
    job = ring.begin("a", LONG)
    plane.wait_for_call(ring.call, 2)
    assert plane.calls.count(ring.call) == 2
    gate.set()
    assert ring.ended(job).complete


@pytest.mark.parametrize("chunks", [CHUNKS, LONG])
@pytest.mark.parametrize("layer", [0, 2, 5])
def test_chunks_before_a_damaged_one_are_complete_in_each_lap(ring: Layered, layer: int, chunks: int) -> None:
    ring.plane.script.fail_layer, ring.plane.script.fail_fetch_at = layer, 1
    result = ring.ended(ring.begin("a", chunks))
    assert (result.reason, result.chunks) == ("corrupt", (1,))


@pytest.mark.parametrize("layers", [1, 5])
def test_buffers_that_hold_less_than_a_window_cost_calls_only(ring: Layered, layers: int) -> None:
    ring.plane.script.batch_layers = layers
    assert ring.ended(ring.begin("a")).complete
    assert ring.plane.calls.count(ring.call) == (6 if layers == 1 else 3)


def test_what_is_left_of_two_windows_comes_in_the_order_of_computing(
    make_kit: MakeKit, shape: ChunkLayout, plane: ScriptedDataPlane
) -> None:
    """Half the memory holds two layers of the three chunks, the data plane's buffers one; two windows are in flight."""
    ring = Layered(make_kit, replace(shape, layers=6), streamed=False, chunks=2)
    plane.script.batch_layers = 1
    assert ring.ended(ring.begin("a")).complete
    assert [first for first, _ in ring.layers] == [0, 2, 1, 3, 4, 5]


def test_a_data_plane_that_never_has_the_memory_ends_the_load(ring: Layered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.plane, "_memory", lambda part: None)
    result = ring.ended(ring.begin("a"))
    assert (result.reason, result.chunks) == ("unknown_memory", (0,))


def test_a_call_that_was_refused_beside_another_is_made_again_alone(
    ring: Layered, plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data plane's queue has room for one call of this host."""
    enter = plane._enter
    calls = itertools.count(1)  # of this method; either of the two may come first

    def refuse_the_second(method: str, context: Any) -> None:
        enter(method, context)
        if method == ring.call and next(calls) == 2:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")

    monkeypatch.setattr(plane, "_enter", refuse_the_second)
    assert ring.ended(ring.begin("a")).complete
    assert plane.calls.count(ring.call) == 4


def test_buffers_smaller_than_a_window_behind_a_damaged_chunk_cost_nothing_more(
    make_kit: MakeKit, shape: ChunkLayout, plane: ScriptedDataPlane
) -> None:
    """Half the memory holds six chunks of a layer. The window of the others is in flight when chunk 1 fails."""
    ring = Layered(make_kit, replace(shape, layers=6), streamed=False, chunks=2)
    plane.script.fail_layer, plane.script.fail_fetch_at = 0, 1
    plane.script.fetch_answer = lambda answer, request: (
        pb.FetchResponse(outcome=pb.OUTCOME_BATCH_FULL, delivered=answer.delivered)
        if len(request.parts[0].keys) == LONG - 6
        else answer
    )
    result = ring.ended(ring.begin("a", LONG))
    assert (result.reason, result.chunks) == ("corrupt", (1,))


# ---- Records of other shard layouts

LAYOUTS = {
    "two ranks": {"first": (0, 0), "layers": 6},
    "two stages": {"first": (0, 3), "layers": 3},
    "two ranks and two stages": {"first": (0, 3, 0, 3), "layers": 3},
    "a stage of a longer record": {"first": (0,), "layers": 8, "before": 2},
}


@pytest.fixture(params=LAYOUTS)
def resharded(make_kit: MakeKit, shape: ChunkLayout, request: pytest.FixtureRequest) -> Callable[[bool], Layered]:
    """Return a function that makes a kit for six layers in records of another shard layout."""

    def make(streamed: bool) -> Layered:
        options = dict(LAYOUTS[request.param])
        of_shard = replace(shape, layers=options.pop("layers"))
        return Layered(make_kit, of_shard, streamed=streamed, chunks=2, **options)

    return make


@pytest.mark.parametrize("streamed", [False, True], ids=["word", "stream"])
@pytest.mark.parametrize("chunks", [CHUNKS, LONG])
def test_records_of_another_shard_layout_stream_in_the_order_of_layers(
    resharded: Callable[[bool], Layered], plane: ScriptedDataPlane, chunks: int, streamed: bool
) -> None:
    layered = resharded(streamed)
    result = layered.ended(layered.begin("a", chunks))
    assert (result.reason, set(result.chunks)) == ("complete", {chunks})
    assert [first for first, _ in layered.layers] == sorted(first for first, _ in layered.layers)
    assert plane.calls.count(layered.call) > 1 and layered.kit.paged.chunks == {}


def test_a_window_has_no_more_records_than_the_data_plane_looks_up_together(
    resharded: Callable[[bool], Layered], plane: ScriptedDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: of records of eight ranks, chunks after the first 1,024 came after all layers of those."""
    monkeypatch.setattr(layer_fetch, "_LOOKUP_KEYS", 2)
    counts: list[int] = []

    def count(answer: pb.FetchResponse, request: pb.FetchRequest) -> pb.FetchResponse:
        counts.append(sum(len(part.keys) for part in request.parts))
        return answer

    plane.script.fetch_answer = count
    layered = resharded(False)
    assert layered.ended(layered.begin("a")).complete
    assert max(counts) <= 2 and [first for first, _ in layered.layers] == sorted(first for first, _ in layered.layers)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_shard_costs_all_shards_the_later_chunks(
    resharded: Callable[[bool], Layered], plane: ScriptedDataPlane, layer: int
) -> None:
    """The scripted data plane damages the last shard of a window, in each stage."""
    layered = resharded(False)
    plane.script.fail_layer, plane.script.fail_fetch_at = layer + layered.before, 1
    result = layered.ended(layered.begin("a", CHUNKS))
    assert (result.reason, set(result.chunks)) == ("corrupt", {1})


def test_buffers_that_hold_one_layer_bring_records_of_another_layout(
    resharded: Callable[[bool], Layered], plane: ScriptedDataPlane
) -> None:
    plane.script.batch_layers = 1
    layered = resharded(False)
    assert layered.ended(layered.begin("a")).complete
