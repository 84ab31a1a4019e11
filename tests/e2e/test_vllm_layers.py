"""Real vLLM that computes while the layers behind are still on their way (``layer_order: true``).

What goes wrong then goes wrong while a step computes: whatever layer it is, nobody may get a token of it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from machine import WAIT_MAX_S, wait_for

from host_control.fetch_policy import Decision
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 256, 257, 500, 513, 1000)


@pytest.fixture(scope="module")
def running(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    """An engine that loads layer by layer; ``reference`` has shown that another prefix gives other outputs."""
    engine = make_engine(plane.address, extra={"layer_order": True, "fetch_or_recompute": True})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def decides(running: Any) -> Any:
    """What has it decide."""
    return running.connector._scheduler._policy_runner


@pytest.fixture
def engine(running: Any, decides: Any, plane: Any, prompt: Any) -> Any:
    """The same, with every prompt's chunks stored and forgotten by the engine, and garbage where they were.

    Whatever it thinks, it loads what is stored.
    """
    running.connector._scheduler._policy_runner = None
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


@pytest.fixture
def deciding(engine: Any, decides: Any, plane: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, taking what is sooner: it knows that a token takes a millisecond, and a load a fifth of a second."""
    side, policy = engine.connector._scheduler, decides._policy
    table = ComputeTable()
    policy = decides._policy = type(policy)(
        table,
        LoadTable(),
        chunk_tokens=256,
        step_tokens=policy._step_tokens,
        load_tokens_min=64,
        fetch_timeout_s=WAIT_MAX_S,
    )
    for tokens in (300, 600, 900):
        table.observe("prompts", tokens, tokens * tokens / 2, tokens / 1000)
        policy.computed()
        policy.fetched(Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={Tier.STORAGE: 3e5}), 0.2)
    side._policy_runner = decides
    monkeypatch.setattr(side._timing, "table", table)
    plane.script.record_bytes = 100_000
    plane.decisions.clear()
    yield engine
    plane.script.record_bytes = 0


def test_layers_are_taken_where_that_is_predicted_to_be_soonest_and_the_answer_is_right(
    deciding: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    (output,) = deciding.generate([prompt(1000)])
    assert [list(output.outputs[0].token_ids)] == reference([prompt(1000)])
    assert output.num_cached_tokens == 768 and plane.layerwise_calls == 1
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert (told.kind, told.loaded_tokens, told.stored_bytes) == ("layers", 768, 300_000)
    soonest = told.predicted["layers"]
    assert soonest == pytest.approx(0.232 + 0.2 / layers(deciding), rel=0.1), "the load is hidden but for a layer"
    assert soonest == told.predicted_seconds < min(told.predicted["fetch"], told.predicted["compute"])
    counted = deciding.counted_since()
    assert counted["decisions/layers"] == 1 and counted["loaded_tokens"] == 768
    side = deciding.connector._scheduler
    policy = side._policy_runner._policy
    assert policy._loads == {}, "the link is free again"
    assert policy._fetching._lines[Tier.STORAGE]._last[-1][1] != 0.2, "what this load took is learnt"
    learnt = side._timing.table.predict("prompts", 600, 600 * 600 / 2)
    assert learnt == pytest.approx(0.6), "a step that waits for layers tells nothing of computing"


def test_where_layers_would_come_too_late_the_prompt_is_computed_and_the_answer_is_the_same(
    deciding: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    policy = deciding.connector._scheduler._policy_runner._policy
    for _ in range(3):
        policy.fetched(Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={Tier.STORAGE: 3e5}), 20.0)
    assert deciding.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 0 and "Fetch" not in plane.calls
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert told.kind == "compute" and told.predicted["layers"] > 19


def test_layers_that_were_decided_for_and_fail_cost_no_token(
    deciding: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 0
    assert deciding.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 1
    counted = deciding.counted_since()
    assert counted["decisions/layers"] == 1 and counted["load_failures/corrupt"] == 1
    side = deciding.connector._scheduler._policy_runner
    line = side._policy._fetching._lines[Tier.STORAGE]
    assert side._loads == {} == side._policy._loads and line._last[-1][1] == 0.2


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
    plane.script.before_layer = lambda layer: asked.acquire(timeout=WAIT_MAX_S)
    begin = time.monotonic()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert time.monotonic() - begin < WAIT_MAX_S, "it waited for layers that only computing brings"
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


@pytest.mark.parametrize("good", [0, 1])
def test_a_seeded_request_whose_load_falls_short_samples_what_it_samples_without_the_plugin(
    engine: Any, plane: Any, seeded: Any, seeded_reference: Any, prompt: Any, good: int
) -> None:
    """Symptom: other tokens. vLLM drops the step that waited for the load, but its generator has gone on."""
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, good
    (output,) = engine.generate([prompt(1000)], **seeded)
    assert list(output.outputs[0].token_ids) == seeded_reference(prompt(1000))
    counted = engine.counted_since()
    assert plane.layerwise_calls == 0 and counted["slower_paths/seed"] == 1


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
    plane.script.before_layer = lambda layer: layer == 2 and gone.wait(WAIT_MAX_S)
    begin = time.monotonic()
    with engine.impatient():
        assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert time.monotonic() - begin < WAIT_MAX_S
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
    plane.script.before_layer = lambda layer: plane.forget_registrations()
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 1, "the second one found no memory"
    assert engine.counted_since()["load_failures/unknown_memory"] == 1
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
    prompts = [prompt(200), prompt(700), prompt(600, 1)]
    with engine.awaiting_lookups():
        assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 1


def test_beside_another_load_a_request_comes_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.outputs([prompt(600, 1)])
    engine.flush()
    engine.reset(plane)
    spoil(engine)
    monkeypatch.setattr(engine.connector._scheduler.ways, "layerwise_chunks", 2)
    prompts = [prompt(1000), prompt(600, 1)]  # the first is too long to come layer by layer
    with engine.awaiting_lookups():
        assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 2
    engine.forget()
    assert engine.outputs([prompt(600, 1)]) == reference([prompt(600, 1)])
    assert plane.layerwise_calls == 1, "nothing else is loaded"


def test_more_chunks_than_the_memory_holds_come_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.connector._scheduler.ways, "layerwise_chunks", 2)
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") >= 1
    engine.forget()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)])
    assert plane.layerwise_calls == 1


@pytest.mark.parametrize("when", ["before its step has ended", "after it"])
def test_a_request_aborted_as_its_load_falls_short_leaves_nothing_wrong_in_the_engine_s_own_cache(
    engine: Any, plane: Any, reference: Any, prompt: Any, when: str
) -> None:
    """vLLM has its blocks in its prefix cache since it was scheduled, and would have had it compute them again."""
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    scheduler = engine.scheduler

    def abort() -> None:
        (name,) = scheduler.requests
        core.engine_core.engine_core.aborts_queue.put_nowait([name])

    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 0
    if when == "before its step has ended":
        plane.script.before_layer = lambda layer: layer or abort()
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    core.add_request("gone", {"prompt_token_ids": prompt(1000)}, sampling)
    while not plane.layerwise_calls:
        core.step()
    core.abort_request(["gone"])
    plane.script = type(plane.script)()
    plane.records.clear()
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert engine.free_blocks() == scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
