"""Real vLLM over the scripted data plane: hits and failures give the same tokens as an engine without a cache."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from kit import add, greedy
from machine import NEVER_S, WAIT_MAX_S

from shadowserve.proto import dataplane_pb2 as pb

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)


@pytest.fixture(scope="module")
def cold_outputs(plane: Any, make_engine: Callable[..., Any], prompt: Any, reference: Any) -> list[list[int]]:
    """Return the outputs of a first engine, which fills the store and is closed."""
    with closing(make_engine(plane.address)) as engine:
        outputs = [engine.outputs([prompt(length)])[0] for length in LENGTHS]
        engine.flush()
    return outputs


@pytest.fixture(scope="module")
def shared_engine(plane: Any, make_engine: Callable[..., Any], cold_outputs: Any) -> Iterator[Any]:
    with closing(make_engine(plane.address)) as engine:
        engine.stored = dict(plane.records)
        yield engine
    assert plane.registrations == 0, "a closed engine leaves memory registered"


@pytest.fixture
def engine(shared_engine: Any, plane: Any) -> Any:
    plane.records.clear()
    plane.records.update(shared_engine.stored)
    shared_engine.reset(plane)
    return shared_engine


def test_storing_does_not_change_outputs(cold_outputs: Any, reference: Any, prompt: Any, plane: Any) -> None:
    assert cold_outputs == reference([prompt(length) for length in LENGTHS])
    assert len(plane.records) == 1000 // 256


def test_a_second_engine_loads_what_the_first_stored(engine: Any, plane: Any, serve: Any) -> None:
    for length in LENGTHS:
        engine.forget()
        # All full chunks; the last token is computed even if the prompt ends with a chunk.
        assert serve(engine, length) == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert counted["hit_tokens"] == counted["lookup_tokens"]
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "known chunks are not stored again"


def test_partial_hit_computes_only_the_rest(engine: Any, plane: Any, serve: Any) -> None:
    for key in list(plane.records)[2:]:
        del plane.records[key]
    assert serve(engine, 1000) == 512
    engine.flush()
    assert len(plane.records) == 3, "the rest is computed and stored"


def test_local_prefix_within_a_chunk_is_kept(engine: Any, plane: Any, serve: Any) -> None:
    stored = dict(plane.records)
    plane.records.clear()
    serve(engine, 200)
    plane.records.update(stored)
    plane.fetches.clear()
    assert serve(engine, 700) == 512
    assert [len(fetch.keys) for fetch in plane.fetches] == [2], "the chunk that is partly local is loaded, too"


def test_local_prefix_beyond_a_chunk_saves_fetching_it(engine: Any, plane: Any, prompt: Any, serve: Any) -> None:
    engine.outputs([prompt(300)])
    plane.fetches.clear()
    assert serve(engine, 1000) == 768
    assert [len(fetch.keys) for fetch in plane.fetches] == [2]


def test_a_chunk_with_generated_tokens_is_stored(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine.reset(plane, records=True)
    start = prompt(200)
    (generated,) = engine.outputs([start], 100)
    assert generated == reference([start], 100)[0]
    engine.flush()
    assert len(plane.records) == 1
    engine.forget()
    output, cached = engine.served(start + generated, 50)
    assert (output, cached) == (reference([start], 150)[0][100:150], 256)
    engine.assert_sensitive([start + generated], [output])


def test_cache_salt_separates(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    parameters = greedy(8)
    salted = {"prompt_token_ids": prompt(600, 1), "cache_salt": "a"}
    first, second = ({**salted, "cache_salt": salt} for salt in ("a", "b"))
    expected = reference([prompt(600, 1)])[0]
    for request, cached in ((first, 0), (second, 0), (first, 512)):
        engine.forget()
        (output,) = engine.llm.generate([request], parameters, use_tqdm=False)
        engine.flush()
        assert list(output.outputs[0].token_ids) == expected
        assert output.num_cached_tokens == cached


def test_prompt_logprobs_are_computed(engine: Any, reference: Any, prompt: Any) -> None:
    engine.outputs([prompt(600, 2)])
    engine.flush()
    engine.forget()
    (output,) = engine.generate([prompt(600, 2)], prompt_logprobs=1)
    assert list(output.outputs[0].token_ids) == reference([prompt(600, 2)])[0]
    assert not output.num_cached_tokens
    assert len(output.prompt_logprobs) == 600


def test_a_sleeping_engine_has_no_registered_memory_and_loads_again_after_waking(
    engine: Any, plane: Any, reference: Any, prompt: Any, serve: Any
) -> None:
    """vLLM 0.33 calls both functions when caches are freed. Calling them twice is harmless."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    engine.outputs([prompt(700)])
    engine.flush()
    assert plane.registrations
    for _ in range(2):
        group.unregister_kv_caches()
    assert plane.registrations == 0
    engine.forget()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)]), "the engine sent a request without memory"
    engine.forget()
    for _ in range(2):
        group.restore_kv_caches()
    assert serve(engine, 700) == 512


def test_a_wrong_page_layout_is_detected_before_kv_moves(engine: Any) -> None:
    from host_control.vllm.probe import find_layout
    from host_control.vllm.support import UncacheableError

    worker = engine.worker
    caches = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
    name = worker._engine.kv_cache_config.kv_cache_groups[0].layer_names[0]
    assert (
        find_layout(worker._engine.vllm_config, name, caches[0], ["kv_cells", "cpu_tiles", "cpu_pages"]) == "cpu_pages"
    )
    with pytest.raises(UncacheableError, match="does not have the layout"):
        find_layout(worker._engine.vllm_config, name, caches[0], ["kv_cells", "cpu_tiles"])


# ---- Failures: recomputed, never wrong tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "good"),
    [(pb.OUTCOME_CORRUPT, 0), (pb.OUTCOME_ABSENT, 1), (pb.OUTCOME_STORAGE_UNAVAILABLE, 2), (pb.OUTCOME_INTERNAL, 1)],
)
def test_a_failed_load_is_recomputed(engine: Any, plane: Any, outcome: int, good: int, serve: Any) -> None:
    plane.script.fail_fetch_at, plane.script.fail_outcome = good, outcome
    serve(engine, 1000)
    reason = pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    assert engine.counted_since()[f"load_failures/{reason}"] == 1
    assert plane.calls.count("Fetch") == 1, "a request whose load failed gets no second load"
    engine.flush()
    assert [key for store in plane.stores for key in store.keys] == list(plane.fetches[0].keys)[good:], (
        "only chunks that could not be loaded are stored again"
    )


@pytest.mark.parametrize("method", ["Lookup", "Fetch", "Store"])
def test_a_refused_call_changes_no_output(engine: Any, plane: Any, reference: Any, prompt: Any, method: str) -> None:
    plane.script.abort[method] = grpc.StatusCode.RESOURCE_EXHAUSTED
    prompts = [prompt(512), prompt(600, 4)]
    assert engine.outputs(prompts) == reference(prompts)
    engine.flush()


@pytest.mark.parametrize("method", ["Lookup", "Fetch", "Store"])
def test_a_stalled_call_ends_by_its_deadline(engine: Any, plane: Any, reference: Any, prompt: Any, method: str) -> None:
    plane.script.stall.add(method)
    plane.script.write_after_stall = True
    prompts = [prompt(512), prompt(600, 5)]
    begin = time.monotonic()
    with engine.impatient():
        assert engine.outputs(prompts) == reference(prompts)
    assert time.monotonic() - begin < WAIT_MAX_S
    plane.script.unstall.set()


def test_an_abort_while_loading_frees_the_blocks_once_quiesced(
    engine: Any, plane: Any, prompt: Any, serve: Any
) -> None:
    free = engine.free_blocks()
    plane.script.fetch_delay = WAIT_MAX_S / 2
    llm_engine = engine.llm.llm_engine
    add(engine, "doomed", prompt(1000))
    ends = time.monotonic() + WAIT_MAX_S
    while "Fetch" not in plane.calls:
        llm_engine.step()
        assert time.monotonic() < ends
    assert engine.free_blocks() < free
    (internal,) = engine.scheduler.requests
    llm_engine.abort_request(["doomed"])
    while engine.scheduler.requests:
        engine.llm.llm_engine.engine_core.engine_core.step()
        assert time.monotonic() < ends
    assert engine.free_blocks() == free
    assert "Cancel" in plane.calls
    assert internal not in engine.worker.loads.managers[0]._outstanding
    plane.script.fetch_delay = 0.0
    serve(engine, 1000)


@pytest.fixture
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle steps wait for the end of a load without a time limit."""
    monkeypatch.setattr("host_control.vllm.worker_loads._IDLE_S", NEVER_S)


@pytest.mark.usefixtures("patient_steps")
def test_an_idle_step_ends_with_its_load(engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    plane.script.fetch_delay = 0.2
    plane.script.fail_fetch_at = 2
    idle: list[bool] = []
    step = engine.connector._scheduler.step

    def counted(output: Any) -> Any:
        metadata = step(output)
        idle.append(metadata.idle)
        return metadata

    monkeypatch.setattr(engine.connector._scheduler, "step", counted)
    serve(engine, 1000)
    assert idle.count(True) == 1, "the load ended in the step in which it began"


@pytest.mark.usefixtures("patient_steps")
def test_a_load_does_not_delay_a_request_that_computes(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.stall.add("Fetch")
    llm_engine, found = engine.llm.llm_engine, dict[str, list[int]]()
    add(engine, "loads", prompt(1000))
    add(engine, "computes", prompt(200), 150)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        if "computes" in found and not plane.script.unstall.is_set():
            assert "Fetch" in plane.calls and not engine.worker.loads.managers[0].idle, "the load still runs"
            plane.script.unstall.set()
    assert found == {"computes": reference([prompt(200)], 150)[0], "loads": reference([prompt(1000)])[0]}
