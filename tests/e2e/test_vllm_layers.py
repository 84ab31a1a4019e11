"""Real vLLM that computes while the layers behind are still on their way (``layer_order: true``).

What goes wrong then goes wrong while a step computes: whatever layer it is, nobody may get a token of it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from machine import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 256, 257, 500, 513, 1000)


@pytest.fixture(scope="module")
def running(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    """An engine that loads layer by layer; ``reference`` has shown that another prefix gives other outputs."""
    engine = make_engine(plane.address, extra={"layer_order": True})
    yield engine
    engine.close()


@pytest.fixture
def engine(running: Any, plane: Any, prompt: Any) -> Any:
    """The same, with every prompt's chunks stored and forgotten by the engine, and garbage where they were."""
    running.reset(plane, records=True)
    running.outputs([prompt(1000)])
    running.flush()
    assert len(plane.records) == 3
    running.reset(plane)
    spoil(running)
    return running


def spoil(engine: Any) -> None:
    """Fill paged memory: or blocks may still hold what a prompt left there when it was stored."""
    for cache in engine.worker._parts[0][0].layout._mover._views:
        cache.fill_(3.0)


def layers(engine: Any) -> int:
    return int(engine.worker._parts[0][0].layout.layers)


def test_outputs_are_the_same(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    for length in LENGTHS:
        engine.forget()
        spoil(engine)
        (output,) = engine.generate([prompt(length)])
        assert list(output.outputs[0].token_ids) == reference([prompt(length)])[0]
        assert output.num_cached_tokens == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "known chunks are not stored again"
    assert plane.layerwise_calls == sum(length >= 256 for length in LENGTHS)
    assert all(plane.windows_us[-plane.layerwise_calls + 3 :]), "what a layer takes is known after three"


def test_a_layer_computes_while_the_next_ones_are_away(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer comes only once the one before was asked for by the engine: all at once they would never come."""
    manager, asked = engine.worker._managers[0], threading.Semaphore(1)
    wait = manager.wait_layer

    def waited(names: Any, layer: int) -> None:
        wait(names, layer)
        asked.release()

    monkeypatch.setattr(manager, "wait_layer", waited)
    plane.script.before_layer = lambda layer: asked.acquire(timeout=PATIENCE_S)
    begin = time.monotonic()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert time.monotonic() - begin < PATIENCE_S, "it waited for layers that only computing brings"
    assert plane.layerwise_calls == 1


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_no_layer_that_fails_reaches_a_token(engine: Any, plane: Any, reference: Any, prompt: Any, chunk: int) -> None:
    whole = dict(plane.records)
    for layer in range(layers(engine)):
        engine.reset(plane)
        plane.records.clear()
        plane.records.update(list(whole.items()))
        spoil(engine)
        plane.script.fail_layer, plane.script.fail_fetch_at = layer, chunk
        (output,) = engine.generate([prompt(1000)])
        assert [list(output.outputs[0].token_ids)] == reference([prompt(1000)]), (layer, chunk)
        assert plane.layerwise_calls == 1
        engine.flush()
        assert plane.records.keys() == whole.keys()
        for key, kv in whole.items():
            stored, computed = (np.frombuffer(bytes_, np.float32) for bytes_ in (plane.records[key], kv))
            assert np.allclose(stored, computed, rtol=1e-3, atol=1e-3), (layer, chunk)
        counted = engine.counted_since()
        assert counted["load_failures/corrupt"] == 1, counted
        assert engine.free_blocks() == engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


def test_what_was_computed_behind_a_layer_that_failed_is_stored_as_it_is_computed_again(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    """The step that loads computes the third chunk on garbage."""
    whole = dict(plane.records)
    del plane.records[list(whole)[2]]
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 1
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    engine.flush()
    assert plane.records.keys() == whole.keys()
    for key, kv in whole.items():
        stored, computed = (np.frombuffer(bytes_, np.float32) for bytes_ in (plane.records[key], kv))
        assert np.allclose(stored, computed, rtol=1e-3, atol=1e-3)


def test_a_layer_that_never_comes_costs_the_deadline(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    gone = threading.Event()
    plane.script.before_layer = lambda layer: layer == 2 and gone.wait(PATIENCE_S)
    begin = time.monotonic()
    with engine.impatient():
        assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert time.monotonic() - begin < PATIENCE_S
    gone.set()


@pytest.mark.parametrize("least", [1, 2])
def test_what_the_data_plane_s_buffers_do_not_hold_at_once_comes_in_several_calls(
    engine: Any, plane: Any, reference: Any, prompt: Any, least: int
) -> None:
    plane.script.round_layers = least
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == -(-layers(engine) // least)
    assert engine.counted_since()["loaded_tokens"] == 768


def test_a_data_plane_that_forgets_the_memory_between_two_calls_costs_the_load(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    plane.script.round_layers = 1
    plane.script.before_layer = lambda layer: plane.forget_destinations()
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 1, "the second one found no memory"
    assert engine.counted_since()["load_failures/unknown_destination"] == 1
    plane.script.round_layers, plane.script.before_layer = 1 << 30, None
    engine.forget()
    spoil(engine)
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert plane.layerwise_calls == 2


def test_an_engine_that_does_not_ask_for_every_layer_uses_none(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a graph of the whole model runs: its kernels read what may not be there."""
    ask = type(engine.worker).wait_layer
    monkeypatch.setattr(
        type(engine.worker), "wait_layer", lambda worker, name: None if ".1." in name else ask(worker, name)
    )
    plane.script.layer_delay = 0.01
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert engine.counted_since()["load_failures/not_awaited"] == 1


def test_beside_a_request_that_runs_others_come_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    prompts = [prompt(31), prompt(700), prompt(600, 1)]
    assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 1


def test_beside_another_load_a_request_comes_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.outputs([prompt(600, 1)])
    engine.flush()
    engine.reset(plane)
    spoil(engine)
    monkeypatch.setattr(engine.connector._scheduler, "_layerwise_chunks", 2)
    plane.script.fetch_delay = 0.2
    prompts = [prompt(1000), prompt(600, 1)]  # the first is too long to come layer by layer
    assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 2
    plane.script.fetch_delay = 0.0
    engine.forget()
    assert engine.outputs([prompt(600, 1)]) == reference([prompt(600, 1)])
    assert plane.layerwise_calls == 1, "nothing else is loaded"


def test_more_chunks_than_the_memory_holds_come_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.connector._scheduler, "_layerwise_chunks", 2)
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") >= 1
    engine.forget()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert plane.layerwise_calls == 1
