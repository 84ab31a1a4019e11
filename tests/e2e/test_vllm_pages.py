"""Real vLLM. Devices store its pages unchanged, and loads write directly into its paged memory (``pages: true``)."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from kit import spoil
from machine import PATIENT, free_port, wait_for
from stack import Process

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (300, 513, 700, 1000)


class Plane:
    """A data plane with its own tiers on two devices, and its counters."""

    def __init__(self, folder: Any) -> None:
        devices = [{"path": str(folder / name), "size": "64MiB"} for name in ("one", "two")]
        tiers = json.dumps({"memory_budget_bytes": "64MiB", "devices": devices})
        self._port = free_port()
        metrics = ("--metrics-port", str(self._port))
        self.process = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--tiers", tiers, *metrics, *PATIENT)

    def count(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[1]) for line in lines if line.startswith(f"shadowserve_{name}_total")))


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    plane = Plane(tmp_path_factory.mktemp("devices"))
    yield plane
    plane.process.stop()


@pytest.fixture(scope="module")
def engine(plane: Plane, make_engine: Callable[..., Any], prompt: Any, serve: Any) -> Iterator[Any]:
    """An engine whose prompts are on the devices; ``reference`` has checked that another prefix gives other outputs."""
    with closing(make_engine(plane.process.address, extra={"pages": True, "layer_order": True})) as engine:
        serve(engine, 1000)
        engine.flush()
        loads(engine, plane, prompt(1000), 768)
        yield engine


def loads(engine: Any, plane: Plane, prompt: list[int], tokens: int) -> list[int]:
    """Load a prompt until all of it is read from devices: recently stored chunks are written shortly afterwards."""
    page_bytes = engine.worker._pages.page_bytes
    size = tokens // 32 * page_bytes * engine.worker._shards.parts[0][0].layout.layers
    outputs: list[int] = []

    def all_of_it() -> bool:
        nonlocal outputs
        before = plane.count("page_bytes")
        engine.forget()
        spoil(engine, 77)
        outputs, cached = engine.served(prompt)
        return cached == tokens and plane.count("page_bytes") - before == size

    wait_for(all_of_it)
    return outputs


def test_prompts_come_from_devices_into_pages(
    engine: Any, plane: Plane, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, because no other request runs; the data plane reports each layer."""
    pages, reported = engine.worker.loads.managers[0]._pages, list[int]()
    tell = pages.tell
    monkeypatch.setattr(pages, "tell", lambda fetch, layers: (reported.append(layers), tell(fetch, layers)))
    for length in LENGTHS:
        assert loads(engine, plane, prompt(length), length // 256 * 256) == reference([prompt(length)])[0]
    assert reported, "layers were reported during the load"


def test_beside_others_they_come_chunk_by_chunk(engine: Any, plane: Plane, reference: Any, prompt: Any) -> None:
    before = plane.count("page_requests")
    engine.forget()
    spoil(engine, 77)
    prompts = [prompt(31), prompt(700), prompt(1000)]
    assert engine.outputs(prompts) == reference(prompts)
    assert plane.count("page_requests") > before


def test_a_data_plane_that_stands_still_in_the_middle_has_the_memory_replaced(
    engine: Any, plane: Plane, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    """Late writes are possible, so they must hit memory that the engine has released."""
    client, before = engine.worker._client, engine.worker._pages.segment
    start, calls = client.start_fetch_pages, []

    def stand_still(*arguments: Any) -> Any:
        plane.process.freeze(True)
        calls.append(arguments)
        return start(*arguments)

    engine.forget()
    spoil(engine, 77)
    with monkeypatch.context() as patch, engine.impatient():
        patch.setattr(client, "start_fetch_pages", stand_still)
        serve(engine, 700)
    assert calls and engine.worker._pages.segment is not before
    plane.process.freeze(False)
    for length in LENGTHS:
        serve(engine, length)
    for name in ("fetch", "register", "store", "lookup"):
        for each in (client, *engine.connector._scheduler._clients):
            each.breakers[name].report(success=True)
    assert loads(engine, plane, prompt(1000), 768) == reference([prompt(1000)])[0]


def test_a_data_plane_that_was_killed_and_is_back_serves_pages_again(
    engine: Any, plane: Plane, reference: Any, prompt: Any, serve: Any
) -> None:
    plane.process.kill()
    engine.forget()
    with engine.impatient():
        serve(engine, 700)
    plane.process.restart()
    assert loads(engine, plane, prompt(1000), 768) == reference([prompt(1000)])[0]
