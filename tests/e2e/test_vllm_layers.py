"""Real vLLM with ``layer_order: true``: it computes while later layers are fetched. Failures never reach a token."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import assert_all_free, assert_close, greedy, spoil
from machine import WAIT_MAX_S, wait_for

from host_control.fetch_policy import Decision
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 256, 257, 500, 513, 1000)


@pytest.fixture(scope="module")
def running(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    """An engine that loads layer by layer. ``reference`` checks that another prefix changes outputs."""
    engine = make_engine(plane.address, extra={"layer_order": True, "fetch_or_recompute": True})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def decides(running: Any) -> Any:
    """The engine's fetch-or-recompute policy."""
    return running.connector._scheduler._policy_runner


@pytest.fixture
def engine(running: Any, decides: Any, plane: Any, prompt: Any) -> Any:
    """The same engine without the policy, after all chunks were stored and paged memory was overwritten."""
    running.connector._scheduler._policy_runner = None
    running.reset(plane, records=True)
    running.outputs([prompt(1000)])
    running.flush()
    assert len(plane.records) == 3
    running.reset(plane)
    spoil(running)
    return running


def layers(engine: Any) -> int:
    return int(engine.worker._shards.parts[0][0].layout.layers)


def test_outputs_are_the_same(engine: Any, plane: Any, serve: Any) -> None:
    for length in LENGTHS:
        engine.forget()
        spoil(engine)
        assert serve(engine, length) == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "stored chunks were stored again"
    assert plane.layerwise_calls == sum(length >= 256 for length in LENGTHS)
    assert all(plane.windows_us[-plane.layerwise_calls + 3 :]), "the time per layer is predicted after three loads"


@pytest.fixture
def policy_engine(engine: Any, decides: Any, plane: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same engine with the policy, which has learnt 1 ms per token and 0.2 s per load."""
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


def test_the_policy_selects_layer_order_if_it_is_fastest(policy_engine: Any, plane: Any, serve: Any) -> None:
    assert serve(policy_engine, 1000) == 768 and plane.layerwise_calls == 1
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert (told.kind, told.loaded_tokens, told.stored_bytes) == ("layers", 768, 300_000)
    soonest = told.predicted["layers"]
    assert soonest == pytest.approx(0.232 + 0.2 / layers(policy_engine), rel=0.1), (
        "computing hides the load except for one layer"
    )
    assert soonest == told.predicted_seconds < min(told.predicted["fetch"], told.predicted["compute"])
    counted = policy_engine.counted_since()
    assert counted["decisions/layers"] == 1 and counted["loaded_tokens"] == 768
    side = policy_engine.connector._scheduler
    policy = side._policy_runner._policy
    assert policy._queued == {}, "no load is queued"
    assert policy._loads._lines[Tier.STORAGE]._last[-1][1] != 0.2, "the load was not learnt"
    learnt = side._timing.table.predict("prompts", 600, 600 * 600 / 2)
    assert learnt == pytest.approx(0.6), "a step that waited for layers was learnt"


def test_the_policy_computes_if_layers_would_be_late(policy_engine: Any, plane: Any, serve: Any) -> None:
    policy = policy_engine.connector._scheduler._policy_runner._policy
    for _ in range(3):
        policy.fetched(Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={Tier.STORAGE: 3e5}), 20.0)
    serve(policy_engine, 1000)
    assert plane.layerwise_calls == 0 and "Fetch" not in plane.calls
    wait_for(lambda: plane.decisions)
    (told,) = plane.decisions
    assert told.kind == "compute" and told.predicted["layers"] > 19


def test_a_failed_layer_after_a_decision_is_recomputed(policy_engine: Any, plane: Any, serve: Any) -> None:
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 0
    serve(policy_engine, 1000)
    assert plane.layerwise_calls == 1
    counted = policy_engine.counted_since()
    assert counted["decisions/layers"] == 1 and counted["load_failures/corrupt"] == 1
    side = policy_engine.connector._scheduler
    policy = side._policy_runner._policy
    line = policy._loads._lines[Tier.STORAGE]
    assert side._loads == {} == policy._queued and line._last[-1][1] == 0.2


def test_a_layer_computes_before_the_next_one_arrives(
    engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    """Each layer is sent only after the engine has waited for the one before."""
    manager, asked = engine.worker._loads.managers[0], threading.Semaphore(1)
    wait = manager.wait

    def waited(names: Any, layer: int | None = None) -> None:
        wait(names, layer)
        asked.release()

    monkeypatch.setattr(manager, "wait", waited)
    plane.script.before_layer = lambda layer: asked.acquire(timeout=WAIT_MAX_S)
    begin = time.monotonic()
    serve(engine, 700)
    assert time.monotonic() - begin < WAIT_MAX_S, "it waited for layers that need computing first"
    assert plane.layerwise_calls == 1


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_failed_layer_never_reaches_a_token(engine: Any, plane: Any, serve: Any, chunk: int) -> None:
    whole = dict(plane.records)
    for layer in range(layers(engine)):
        engine.reset(plane)
        plane.records.clear()
        plane.records.update(list(whole.items()))
        spoil(engine)
        plane.script.fail_layer, plane.script.fail_fetch_at = layer, chunk
        serve(engine, 1000)
        assert plane.layerwise_calls == 1
        engine.flush()
        assert plane.records.keys() == whole.keys()
        assert_close(plane.records, whole, (layer, chunk))
        counted = engine.counted_since()
        assert counted["load_failures/corrupt"] == 1, counted
        assert_all_free(engine)


@pytest.mark.parametrize("good", [0, 1])
def test_a_seeded_request_with_a_short_load_samples_the_same_tokens(
    engine: Any, plane: Any, seeded: Any, seeded_reference: Any, prompt: Any, good: int
) -> None:
    """Symptom: other tokens. vLLM rolls the step back, but not its random generator."""
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, good
    (output,) = engine.generate([prompt(1000)], **seeded)
    assert list(output.outputs[0].token_ids) == seeded_reference(prompt(1000))
    counted = engine.counted_since()
    assert plane.layerwise_calls == 0 and counted["slower_paths/seed"] == 1


def test_chunks_computed_after_a_failed_layer_are_stored_after_recomputation(
    engine: Any, plane: Any, serve: Any
) -> None:
    """The step that loads computes the third chunk on invalid KV."""
    whole = dict(plane.records)
    del plane.records[list(whole)[2]]
    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 1
    serve(engine, 1000)
    engine.flush()
    assert plane.records.keys() == whole.keys()
    assert_close(plane.records, whole)


def test_a_stalled_layer_ends_by_its_deadline(engine: Any, plane: Any, serve: Any) -> None:
    gone = threading.Event()
    plane.script.before_layer = lambda layer: layer == 2 and gone.wait(WAIT_MAX_S)
    begin = time.monotonic()
    with engine.impatient():
        serve(engine, 700)
    assert time.monotonic() - begin < WAIT_MAX_S
    gone.set()


@pytest.mark.parametrize("least", [1, 2])
def test_a_load_larger_than_the_data_planes_buffers_takes_several_calls(
    engine: Any, plane: Any, least: int, serve: Any
) -> None:
    plane.script.batch_layers = least
    serve(engine, 1000)
    assert plane.layerwise_calls == -(-layers(engine) // least)
    assert engine.counted_since()["loaded_tokens"] == 768


def test_a_data_plane_restart_between_two_calls_costs_recomputation(engine: Any, plane: Any, serve: Any) -> None:
    plane.script.batch_layers = 1
    plane.script.before_layer = lambda layer: plane.forget_registrations()
    serve(engine, 1000)
    assert plane.layerwise_calls == 1, "the second call found its memory"
    assert engine.counted_since()["load_failures/unknown_memory"] == 1
    plane.script.batch_layers, plane.script.before_layer = 1 << 30, None
    engine.forget()
    spoil(engine)
    serve(engine, 700)
    assert plane.layerwise_calls == 2


def test_a_load_fails_if_the_engine_does_not_wait_for_every_layer(
    engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    """Like a CUDA graph of the whole model."""
    ask = type(engine.worker).wait_layer
    monkeypatch.setattr(
        type(engine.worker), "wait_layer", lambda worker, name: None if ".1." in name else ask(worker, name)
    )
    plane.script.layer_delay = 0.01
    serve(engine, 700)
    assert engine.counted_since()["load_failures/not_awaited"] == 1


def test_next_to_a_running_request_others_load_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    prompts = [prompt(200), prompt(700), prompt(600, 1)]
    with engine.awaiting_lookups():
        assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 1


def test_next_to_another_load_a_request_loads_chunk_by_chunk(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    engine.outputs([prompt(600, 1)])
    engine.flush()
    engine.reset(plane)
    spoil(engine)
    monkeypatch.setattr(engine.connector._scheduler.ways, "layerwise_chunks", 2)
    prompts = [prompt(1000), prompt(600, 1)]  # the first is too long for layer order
    with engine.awaiting_lookups():
        assert engine.outputs(prompts) == reference(prompts)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") == 2
    engine.forget()
    serve(engine, 600, 1)
    assert plane.layerwise_calls == 1


def test_a_prompt_larger_than_the_buffer_loads_chunk_by_chunk(
    engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    monkeypatch.setattr(engine.connector._scheduler.ways, "layerwise_chunks", 2)
    serve(engine, 1000)
    assert plane.layerwise_calls == 0 and plane.calls.count("Fetch") >= 1
    engine.forget()
    serve(engine, 700)
    assert plane.layerwise_calls == 1


@pytest.mark.parametrize("when", ["before its step has ended", "after it"])
def test_an_abort_during_a_short_load_leaves_no_wrong_blocks_in_the_prefix_cache(
    engine: Any, plane: Any, prompt: Any, when: str, serve: Any
) -> None:
    """vLLM adds its blocks to the prefix cache when it schedules the request, before the load is complete."""
    core = engine.llm.llm_engine
    scheduler = engine.scheduler

    def abort() -> None:
        (name,) = scheduler.requests
        core.engine_core.engine_core.aborts_queue.put_nowait([name])

    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 0
    if when == "before its step has ended":
        plane.script.before_layer = lambda layer: layer or abort()
    sampling = greedy(8)
    core.add_request("gone", {"prompt_token_ids": prompt(1000)}, sampling)
    while not plane.layerwise_calls:
        core.step()
    core.abort_request(["gone"])
    plane.script = type(plane.script)()
    plane.records.clear()
    serve(engine, 1000)
    assert_all_free(engine)
