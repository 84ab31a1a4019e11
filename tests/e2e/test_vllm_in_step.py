"""Real vLLM whose steps compute on loads: layer by layer (``layer_order: true``), or after the whole load
(``asynchronous_fetch: false``). Failures never reach a token.

With ``TEST_ASYNCHRONOUS=1`` the engines schedule asynchronously, in vLLM with docs/design/vllm-take-back-steps.patch.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import patched_vllm
import pytest
from kit import SEEDED, add, assert_all_free, assert_close, spoil
from machine import WAIT_MAX_S, wait_for

from host_control.fetch_policy import Decision
from host_control.interference.loading import LoadTable
from host_control.interference.table import ComputeTable
from shadowserve.tier import Tier

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 256, 257, 500, 513, 1000)
MODES: dict[str, dict[str, bool]] = {
    "layers": {"layer_order": True, "fetch_or_recompute": True},
    "whole": {"asynchronous_fetch": False},
}
only_layers = pytest.mark.parametrize("running", ["layers"], indirect=True)
only_whole = pytest.mark.parametrize("running", ["whole"], indirect=True)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bool]:
    with pytest.MonkeyPatch.context() as patch:
        if asked := bool(os.environ.get("TEST_ASYNCHRONOUS")):
            patched_vllm.schedule_asynchronously(patch, tmp_path_factory.mktemp("sources"))
        yield asked


@pytest.fixture(scope="module", params=MODES)
def running(
    request: Any, plane: Any, make_engine: Callable[..., Any], reference: Any, asynchronous: bool
) -> Iterator[Any]:
    """An engine of a mode. ``reference`` checks that another prefix changes outputs."""
    with closing(make_engine(plane.address, extra=MODES[request.param])) as engine:
        engine.layers = int(engine.worker._shards.parts[0][0].layout.layers) if request.param == "layers" else 0
        assert (type(engine.scheduler).__name__ == "AsyncScheduler") == asynchronous
        engine.policy_runner = engine.connector._scheduler._policy_runner
        yield engine


@pytest.fixture
def engine(running: Any, plane: Any, prompt: Any) -> Any:
    """The same engine without the policy, after all chunks were stored and paged memory was overwritten."""
    running.policy_runner._always = False
    running.reset(plane, records=True)
    running.outputs([prompt(1000)])
    running.flush()
    assert len(plane.records) == 3
    running.reset(plane)
    spoil(running)
    return running


def test_outputs_are_the_same(engine: Any, plane: Any, reference: Any, prompt: Any, serve: Any) -> None:
    for length in LENGTHS:
        engine.forget()
        spoil(engine)
        assert serve(engine, length) == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "stored chunks were stored again"
    assert plane.layerwise_calls == (sum(length >= 256 for length in LENGTHS) if engine.layers else 0)
    assert counted.get("layerwise_loads", 0) == plane.layerwise_calls
    assert counted.get("layer_waits", 0) == plane.layerwise_calls * engine.layers
    if engine.layers:
        assert all(plane.windows_us[-plane.layerwise_calls + 3 :]), "the time per layer is predicted after three loads"
    engine.forget()
    prompts = [prompt(length) for length in LENGTHS]
    assert engine.outputs(prompts) == reference(prompts), "all at once"


@pytest.mark.parametrize(("good", "stored"), [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2), (2, 2)])
def test_a_failed_load_never_reaches_a_token_or_a_record(
    engine: Any, plane: Any, serve: Any, good: int, stored: int
) -> None:
    """With two stored chunks, the step that loads also computes the third one, perhaps on invalid KV."""
    whole = dict(plane.records)
    for layer in range(max(engine.layers, 1)):
        engine.reset(plane)
        plane.records.clear()
        plane.records.update(list(whole.items())[:stored])
        spoil(engine)
        plane.script.fail_layer, plane.script.fail_fetch_at = layer if engine.layers else None, good
        serve(engine, 1000)
        assert plane.layerwise_calls == (engine.layers > 0)
        engine.flush()
        assert plane.records.keys() == whole.keys()
        assert_close(plane.records, whole, (layer, good))
        assert engine.counted_since().get("load_failures/corrupt", 0) == (good < stored)
        assert_all_free(engine)


@pytest.mark.parametrize("good", [0, 1])
def test_a_seeded_request_with_a_short_load_samples_the_same_tokens(
    engine: Any, plane: Any, seeded_reference: Any, prompt: Any, good: int
) -> None:
    """Symptom: other tokens. vLLM rolls the step back, but not its random generator."""
    plane.script.fail_fetch_at = good
    assert engine.served(prompt(1000), **SEEDED)[0] == seeded_reference(prompt(1000))
    counted = engine.counted_since()
    assert counted["load_failures/corrupt"] == 1 and counted["slower_paths/seed"] == 1
    assert plane.layerwise_calls == 0


def test_a_stalled_load_ends_by_its_deadline(engine: Any, plane: Any, serve: Any) -> None:
    gone = threading.Event()
    plane.script.before_layer = lambda layer: layer == 2 and gone.wait(WAIT_MAX_S)
    if not engine.layers:
        plane.script.stall.add("Fetch")
    begin = time.monotonic()
    with engine.impatient():
        serve(engine, 700)
    assert time.monotonic() - begin < WAIT_MAX_S
    gone.set()


@only_whole
def test_decoding_stalls_during_a_load_of_another_request(engine: Any, plane: Any, prompt: Any) -> None:
    """The control is in test_vllm_cache: an asynchronous load does not delay a request that computes."""
    steps, seen = 0, list[int]()

    def watch() -> None:
        """Count steps during the fetch, then let it end."""
        plane.wait_for_call("Fetch")
        seen.append(steps)
        time.sleep(0.5)
        seen.append(steps)
        plane.script.unstall.set()

    plane.script.stall.add("Fetch")
    watcher = threading.Thread(target=watch)
    watcher.start()
    core = engine.llm.llm_engine
    add(engine, "decoding", prompt(31), 300)
    core.step()
    add(engine, "fetching", prompt(700), 300)
    while core.has_unfinished_requests():
        core.step()
        steps += 1
    watcher.join()
    assert seen[1] == seen[0]


# ---- Layer by layer --------------------------------------------------------------------------------------------------


@only_layers
def test_the_policy_selects_layer_order_or_computing_if_it_is_fastest(
    engine: Any, plane: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has learnt 1 ms per token and 0.2 s per load."""
    side, runner, table = engine.connector._scheduler, engine.policy_runner, ComputeTable()
    policy = runner._policy = type(runner._policy)(
        table,
        LoadTable(),
        chunk_tokens=256,
        step_tokens=runner._policy._step_tokens,
        load_tokens_min=64,
        fetch_timeout_s=WAIT_MAX_S,
    )
    for tokens in (300, 600, 900):
        table.observe("prompts", tokens, tokens * tokens / 2, tokens / 1000)
        policy.computed()
        policy.fetched(Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={Tier.STORAGE: 3e5}), 0.2)
    monkeypatch.setattr(runner, "_always", True)
    monkeypatch.setattr(side._timing, "table", table)
    plane.script.record_bytes = 100_000
    plane.decisions.clear()
    assert serve(engine, 1000) == 768 and plane.layerwise_calls == 1
    wait_for(lambda: plane.decisions)
    (decision,) = plane.decisions
    assert (decision.kind, decision.loaded_tokens, decision.stored_bytes) == ("layers", 768, 300_000)
    waits = decision.layer_waits
    assert len(waits) == engine.layers and max(wait.begin_s + wait.seconds for wait in waits) <= decision.seconds
    assert decision.predicted["layers"] == pytest.approx(0.232 + 0.2 / engine.layers, rel=0.1), (
        "computing hides the load except for one layer"
    )
    assert (
        decision.predicted["layers"]
        == decision.predicted_seconds
        < min(decision.predicted["fetch"], decision.predicted["compute"])
    )
    counted = engine.counted_since()
    assert counted["decisions/layers"] == 1 and counted["loaded_tokens"] == 768
    assert policy._queued == {}, "no load is queued"
    assert policy._loads._lines[Tier.STORAGE]._last[-1][1] != 0.2, "the load was not learnt"
    assert table.predict("prompts", 600, 600 * 600 / 2) == pytest.approx(0.6), "a step that waited was learnt"

    # Where every load is late, prompts are computed, and stored chunks are not stored again.
    for _ in range(3):
        policy.fetched(Decision(way="fetch", end_tokens=0, kind="fetch", load_tiers={Tier.STORAGE: 3e5}), 20.0)
    engine.forget()
    plane.decisions.clear()
    plane.calls.clear()
    assert serve(engine, 1000) == 0
    wait_for(lambda: plane.decisions)
    assert plane.decisions[0].kind == "compute" and not {"Fetch", "Store"} & set(plane.calls)


@only_layers
def test_a_layer_computes_before_the_next_one_arrives(
    engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    """Each layer is sent only after the engine has waited for the one before."""
    manager, asked = engine.worker.loads.managers[0], threading.Semaphore(1)
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


@only_layers
def test_a_load_in_several_calls_and_a_data_plane_restart_between_two(engine: Any, plane: Any, serve: Any) -> None:
    """The data plane's buffers hold one layer. After its restart, the rest is loaded into new memory."""
    plane.script.batch_layers = 1
    serve(engine, 1000)
    assert plane.layerwise_calls == engine.layers
    assert engine.counted_since()["loaded_tokens"] == 768
    engine.forget()
    plane.script.before_layer = lambda layer: layer == 0 and plane.forget_registrations()
    plane.layerwise_calls = 0
    serve(engine, 1000)
    assert plane.layerwise_calls == engine.layers
    assert engine.counted_since()["loaded_tokens"] == 2 * 768
    plane.script.batch_layers, plane.script.before_layer = 1 << 30, None
    engine.forget()
    spoil(engine)
    serve(engine, 700)
    assert plane.layerwise_calls == engine.layers + 1


@only_layers
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


@only_layers
@pytest.mark.parametrize("keeps_up", [False, True])
def test_beside_other_requests_only_loads_that_keep_up_go_layer_by_layer(
    engine: Any, plane: Any, reference: Any, prompt: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, keeps_up: bool
) -> None:
    monkeypatch.setattr(engine.policy_runner._streams, "_keeps_up", lambda *given: keeps_up)
    prompts = [prompt(200), prompt(700), prompt(600, 1)]
    with engine.awaiting_lookups():
        assert engine.outputs(prompts) == reference(prompts)
    assert plane.calls.count("Fetch") == 1 and plane.layerwise_calls == (1 if keeps_up else 0)
    plane.layerwise_calls = 0
    engine.forget()
    serve(engine, 700)
    assert plane.layerwise_calls == 1


@only_layers
@pytest.mark.parametrize("when", ["before its step has ended", "after it"])
def test_an_abort_during_a_short_load_leaves_no_wrong_blocks_in_the_prefix_cache(
    engine: Any, plane: Any, prompt: Any, when: str, serve: Any
) -> None:
    """vLLM adds its blocks to the prefix cache when it schedules the request, before the load is complete."""
    core = engine.llm.llm_engine

    def abort() -> None:
        (name,) = engine.scheduler.requests
        core.engine_core.engine_core.aborts_queue.put_nowait([name])

    plane.script.fail_layer, plane.script.fail_fetch_at = 1, 0
    if when == "before its step has ended":
        plane.script.before_layer = lambda layer: layer or abort()
    add(engine, "gone", prompt(1000))
    while not plane.layerwise_calls:
        core.step()
    core.abort_request(["gone"])
    plane.script = type(plane.script)()
    plane.records.clear()
    serve(engine, 1000)
    assert_all_free(engine)
