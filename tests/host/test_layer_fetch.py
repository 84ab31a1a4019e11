"""A fetch in layer order, with progress by a word or by a stream, and its end when the data plane fails."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from machine import WAIT_MAX_S
from manager_support import collect, job
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout

CHUNKS = 3


class Pages:
    """Scattered layers: the layers of each call, and the bytes of each layer."""

    def __init__(self, shape: ChunkLayout) -> None:
        self.layers: list[tuple[int, int]] = []
        self.bytes: dict[tuple[int, int], bytes] = {}
        self._shape = shape

    def __call__(self, job: FetchJob, chunks: Any, layers: tuple[int, int]) -> None:
        self.layers.append(layers)
        each = self._shape.raw_bytes // self._shape.layers
        for chunk in range(len(chunks) // self._shape.raw_bytes):
            for layer in range(*layers):
                begin = chunk * self._shape.raw_bytes + layer * each
                self.bytes[layer, chunk] = bytes(chunks[begin : begin + each])


@pytest.fixture
def pages(shape: ChunkLayout) -> Pages:
    return Pages(shape)


@pytest.fixture(params=["word", "stream"])
def registration(client: DataPlaneClient, shape: ChunkLayout, request: pytest.FixtureRequest) -> RegisteredMemory:
    progress = request.param == "word"
    return RegisteredMemory(client, [shape], 8 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S, progress=progress)


@pytest.fixture
def manager(client: DataPlaneClient, registration: RegisteredMemory, pages: Pages) -> Iterator[KVCacheManager]:
    def scatter(*_: Any) -> None:
        raise AssertionError("the fetch must be in layer order")

    manager = KVCacheManager(client, registration, scatter, scatter_layers=pages, fetch_timeout_s=WAIT_MAX_S)
    yield manager
    manager.close(WAIT_MAX_S)


def layered(name: str, fill: Callable[[list[bytes]], None], chunks: int = CHUNKS) -> FetchJob:
    made = job(name, chunks, fill)
    return FetchJob(request_id=name, keys=made.keys, layerwise=True)


def is_streamed(registration: RegisteredMemory) -> bool:
    return registration.progress_offset is None


def assert_right(plane: ScriptedDataPlane, pages: Pages, done: FetchJob, shape: ChunkLayout) -> None:
    each = shape.raw_bytes // shape.layers
    for (layer, chunk), there in pages.bytes.items():
        assert there == plane.records[done.keys[0][chunk]][layer * each :][:each]


def test_each_layer_is_scattered_as_it_arrives(
    manager: KVCacheManager, plane: ScriptedDataPlane, registration: RegisteredMemory, pages: Pages,
    fill: Callable[[list[bytes]], None], shape: ChunkLayout,
) -> None:  # fmt: skip
    """The data plane sends the second layer only after the first one is scattered."""
    scattered = threading.Event()
    place = pages.__call__
    manager._layers.scatter = lambda *given: (place(*given), scattered.set())[0]
    plane.script.before_layer = lambda layer: layer == 0 or scattered.wait(WAIT_MAX_S)
    wanted = layered("a", fill)
    manager.exchange([wanted])
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("complete", (CHUNKS,))
    assert pages.layers == [(0, 1), (1, 2)] and len(pages.bytes) == CHUNKS * shape.layers
    assert_right(plane, pages, wanted, shape)
    assert plane.calls.count("FetchLayers" if is_streamed(registration) else "Fetch") == 1


def test_complete_chunks_of_a_failed_fetch_are_used(
    manager: KVCacheManager, plane: ScriptedDataPlane, pages: Pages, fill: Callable[[list[bytes]], None],
    shape: ChunkLayout,
) -> None:  # fmt: skip
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 2
    wanted = layered("a", fill)
    manager.exchange([wanted])
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("corrupt", (2,))
    assert_right(plane, pages, wanted, shape)


def test_a_data_plane_that_dies_between_two_layers_costs_the_load_and_its_memory(
    manager: KVCacheManager, plane: ScriptedDataPlane, registration: RegisteredMemory,
    fill: Callable[[list[bytes]], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gone = threading.Event()
    plane.script.before_layer = lambda layer: layer == 0 or gone.wait(WAIT_MAX_S)
    manager.exchange([layered("a", fill)])
    plane.wait_for_call("FetchLayers" if is_streamed(registration) else "Fetch")
    memory = registration.current
    monkeypatch.setattr(registration, "_connect_timeout", 0.2)  # no process answers
    stopping = threading.Thread(target=plane.stop)
    stopping.start()
    (result,) = collect(manager, 1)
    gone.set()
    stopping.join()
    assert (result.reason, result.chunks) == ("unreachable", (0,))
    assert memory is not None and registration.current is None and registration.retired == 1, (
        "the data plane may still write"
    )


def test_a_load_that_is_cancelled_between_two_layers_ends(
    manager: KVCacheManager,
    plane: ScriptedDataPlane,
    registration: RegisteredMemory,
    fill: Callable[[list[bytes]], None],
) -> None:
    reached, gone = threading.Event(), threading.Event()

    def before(layer: int) -> None:
        if layer:
            reached.set()
            gone.wait(WAIT_MAX_S)

    plane.script.before_layer = before
    manager.exchange([layered("a", fill)])
    assert reached.wait(WAIT_MAX_S)
    manager.exchange([], ["a"])
    plane.wait_for_call("Cancel")
    gone.set()
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("cancelled", (0,))
    assert registration.retired == 0, "the answer confirms that writing has ended"


@pytest.fixture
def streamed(
    client: DataPlaneClient, shape: ChunkLayout, pages: Pages
) -> Iterator[tuple[KVCacheManager, RegisteredMemory]]:
    registration = RegisteredMemory(client, [shape], 8 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S)
    manager = KVCacheManager(client, registration, pages, scatter_layers=pages, fetch_timeout_s=WAIT_MAX_S)
    yield manager, registration
    manager.close(WAIT_MAX_S)


def test_a_stream_that_ends_without_an_answer_is_none(
    streamed: Any, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    manager, registration = streamed
    plane.script.answers_streams = False
    manager.exchange([layered("a", fill)])
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("invalid_answer", (CHUNKS,)), (
        "all layers reported as complete are in place"
    )
    assert registration.retired == 1, "no answer has confirmed that writing has ended"


@pytest.mark.parametrize("said", [[7, 1 << 31], [2, 1, 0]], ids=["more than there are", "fewer than before"])
def test_layers_that_cannot_be_are_no_more_than_there_are(
    streamed: Any, plane: ScriptedDataPlane, pages: Pages, fill: Callable[[list[bytes]], None],
    monkeypatch: pytest.MonkeyPatch, said: list[int],
) -> None:  # fmt: skip
    manager, _ = streamed
    deliver = plane._deliver_layers

    def lying(*given: Any) -> Iterator[Any]:
        *_, answer = deliver(*given)
        yield from said
        yield answer

    monkeypatch.setattr(plane, "_deliver_layers", lying)
    manager.exchange([layered("a", fill)])
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("complete", (CHUNKS,))
    assert pages.layers[0][0] == 0 and pages.layers[-1][1] == 2


def test_a_daemon_that_does_not_know_the_memory_is_registered_with_again(
    streamed: Any, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    manager, _ = streamed
    manager.exchange([layered("a", fill)])
    assert collect(manager, 1)[0].complete
    plane.forget_registrations()
    manager.exchange([layered("b", fill)])
    assert collect(manager, 1)[0].complete
    assert plane.calls.count("RegisterMemory") == 2 and plane.calls.count("FetchLayers") == 3


def test_a_refused_stream_is_quiet(
    streamed: Any, plane: ScriptedDataPlane, fill: Callable[[list[bytes]], None]
) -> None:
    manager, registration = streamed
    plane.script.abort["FetchLayers"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    manager.exchange([layered("a", fill)])
    (result,) = collect(manager, 1)
    assert (result.reason, result.chunks) == ("refused", (0,)) and registration.retired == 0
