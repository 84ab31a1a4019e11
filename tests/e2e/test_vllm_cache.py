"""Real vLLM over the scripted data plane: what is stored comes back as the same tokens, whatever goes wrong."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from machine import NEVER_S, WAIT_MAX_S

from shadowserve.proto import dataplane_pb2 as pb

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LENGTHS = (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)


@pytest.fixture(scope="module")
def cold_outputs(plane: Any, make_engine: Callable[..., Any], prompt: Any, reference: Any) -> list[list[int]]:
    """Return what a first engine makes of all prompts; afterwards it is gone, and the store is filled."""
    engine = make_engine(plane.address)
    try:
        outputs = [engine.outputs([prompt(length)])[0] for length in LENGTHS]
        engine.flush()
    finally:
        engine.close()
    return outputs


@pytest.fixture(scope="module")
def shared_engine(plane: Any, make_engine: Callable[..., Any], cold_outputs: Any) -> Iterator[Any]:
    engine = make_engine(plane.address)
    stored = dict(plane.records)
    engine.stored = stored
    yield engine
    engine.close()
    assert plane.registrations == 0, "an engine that has been closed leaves memory registered"


@pytest.fixture
def engine(shared_engine: Any, plane: Any) -> Any:
    plane.records.clear()
    plane.records.update(shared_engine.stored)
    shared_engine.reset(plane)
    return shared_engine


def test_storing_changes_no_output(cold_outputs: Any, reference: Any, prompt: Any, plane: Any) -> None:
    assert cold_outputs == reference([prompt(length) for length in LENGTHS])
    assert len(plane.records) == 1000 // 256


def test_a_fresh_engine_loads_what_another_stored(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    for length in LENGTHS:
        engine.forget()
        (output,) = engine.generate([prompt(length)])
        assert list(output.outputs[0].token_ids) == reference([prompt(length)])[0]
        # All full chunks; the last token is left to prefill even where the prompt ends with a chunk.
        assert output.num_cached_tokens == min(length // 256 * 256, length - 1), length
    counted = engine.counted_since()
    assert counted["loaded_tokens"] == sum(length // 256 * 256 for length in LENGTHS)
    assert counted["hit_tokens"] == counted["lookup_tokens"]
    assert not any(name.startswith("load_failures") for name in counted)
    assert "Store" not in plane.calls, "known chunks are not stored again"


def test_a_batch_of_prompts_loads_at_once(engine: Any, reference: Any, prompt: Any) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    assert engine.outputs(prompts) == reference(prompts)


def test_partial_hit_computes_only_the_rest(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    for key in list(plane.records)[2:]:
        del plane.records[key]
    (output,) = engine.generate([prompt(1000)])
    assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
    assert output.num_cached_tokens == 512
    engine.flush()
    assert len(plane.records) == 3, "the rest has been computed, and stored"


def test_local_prefix_within_a_chunk_is_kept(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane_records = dict(plane.records)
    plane.records.clear()
    assert engine.outputs([prompt(200)]) == reference([prompt(200)])
    plane.records.update(plane_records)
    plane.fetches.clear()
    (output,) = engine.generate([prompt(700)])
    assert list(output.outputs[0].token_ids) == reference([prompt(700)])[0]
    assert output.num_cached_tokens == 512
    assert [len(fetch.keys) for fetch in plane.fetches] == [2], "the chunk that is local in part is loaded as well"


def test_local_prefix_beyond_a_chunk_saves_fetching_it(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    (first,) = engine.generate([prompt(300)])
    plane.fetches.clear()
    (output,) = engine.generate([prompt(1000)])
    assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
    assert output.num_cached_tokens == 768
    assert [len(fetch.keys) for fetch in plane.fetches] == [2]


def test_prompt_without_a_full_chunk_asks_nobody(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    assert engine.outputs([prompt(240)]) == reference([prompt(240)])
    assert plane.calls == []


def test_chunk_that_ends_in_generated_tokens_is_stored(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine.reset(plane, records=True)
    start = prompt(200)
    (generated,) = engine.outputs([start], 100)
    assert generated == reference([start], 100)[0]
    engine.flush()
    assert len(plane.records) == 1
    engine.forget()
    (output,) = engine.generate([start + generated], 50)
    assert output.num_cached_tokens == 256
    assert list(output.outputs[0].token_ids) == reference([start], 150)[0][100:150]
    engine.assert_sensitive([start + generated], [list(output.outputs[0].token_ids)])


def test_rounds_smaller_than_the_prompt(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.round_chunks = 1
    (output,) = engine.generate([prompt(1000)])
    assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
    assert output.num_cached_tokens == 768
    assert len(plane.fetches) == 3


def test_cache_salt_separates(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
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
    (output,) = engine.generate([prompt(600, 2)])
    engine.flush()
    engine.forget()
    (output,) = engine.generate([prompt(600, 2)], prompt_logprobs=1)
    assert list(output.outputs[0].token_ids) == reference([prompt(600, 2)])[0]
    assert not output.num_cached_tokens
    assert len(output.prompt_logprobs) == 600


def test_reset_of_the_engines_caches_serves_nothing_old(
    make_engine: Any, engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    from host_control.vllm.epochs import Epochs

    side = engine.connector._scheduler
    assert engine.connector.reset_cache() is True
    try:
        (output,) = engine.generate([prompt(512)])
        assert not output.num_cached_tokens
        assert list(output.outputs[0].token_ids) == reference([prompt(512)])[0]
        engine.flush()
        engine.forget()
        (output,) = engine.generate([prompt(512)])
        assert output.num_cached_tokens == 511, "what was stored since is served"
    finally:
        side.epochs = Epochs()


def test_an_engine_that_sleeps_holds_no_memory_and_loads_again_when_it_wakes(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    """As vLLM 0.33 has it around the caches' loss: twice each does no harm, and nobody is served what was held."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    engine.outputs([prompt(700)])
    engine.flush()
    assert plane.registrations
    for _ in range(2):
        group.unregister_kv_caches()
    assert plane.registrations == 0
    engine.forget()
    assert engine.outputs([prompt(700)]) == reference([prompt(700)]), "asked for something all the same"
    engine.forget()
    for _ in range(2):
        group.restore_kv_caches()
    (output,) = engine.generate([prompt(700)])
    assert (list(output.outputs[0].token_ids), output.num_cached_tokens) == (reference([prompt(700)])[0], 512)


def test_wrong_idea_of_the_layout_is_found_before_anything_moves(engine: Any) -> None:
    from host_control.vllm.probe import find_layout
    from host_control.vllm.support import UncacheableError

    worker = engine.worker
    caches = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
    name = worker._kv_cache_config.kv_cache_groups[0].layer_names[0]
    assert find_layout(worker._vllm_config, name, caches[0], ["kv_cells", "cpu_tiles", "cpu_pages"]) == "cpu_pages"
    with pytest.raises(UncacheableError, match="does not have the layout"):
        find_layout(worker._vllm_config, name, caches[0], ["kv_cells", "cpu_tiles"])


# ---------------------------------------------------------------------- failures: recomputed, never wrong


@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize(
    "outcome",
    [
        pb.OUTCOME_CORRUPT,
        pb.OUTCOME_MISMATCH,
        pb.OUTCOME_ABSENT,
        pb.OUTCOME_STORAGE_UNAVAILABLE,
        pb.OUTCOME_DEADLINE,
        pb.OUTCOME_INTERNAL,
    ],
    ids=lambda outcome: pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower(),
)
def test_failed_load_is_recomputed(
    engine: Any, plane: Any, reference: Any, prompt: Any, outcome: int, good: int
) -> None:
    plane.script.fail_fetch_at, plane.script.fail_outcome = good, outcome
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    reason = pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    assert engine.counted_since()[f"load_failures/{reason}"] == 1
    assert plane.calls.count("Fetch") == 1, "a request whose load failed is not offered another"
    engine.flush()
    assert [key for store in plane.stores for key in store.keys] == list(plane.fetches[0].keys)[good:], (
        "what could not be loaded is stored again, what could is not"
    )


def test_failed_load_behind_a_local_prefix_is_recomputed(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    assert engine.outputs([prompt(300)]) == reference([prompt(300)])
    plane.script.fail_fetch_at = 0
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert plane.calls.count("Fetch") == 2


@pytest.mark.parametrize("chunks", [0, 7])
def test_lying_answer_is_not_believed(engine: Any, plane: Any, reference: Any, prompt: Any, chunks: int) -> None:
    from scripted import pieces

    layers = engine.worker._managers[0]._registration.shapes[0].layers

    def lie(answer: pb.FetchResponse, request: pb.FetchRequest) -> pb.FetchResponse:
        return pb.FetchResponse(delivered=[pieces(layers, chunks, 3)], outcome=pb.OUTCOME_COMPLETE)

    plane.script.fetch_answer = lie
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert engine.counted_since()["load_failures/invalid_answer"] == 1


def test_hits_that_are_not_there(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.lookup_hits = lambda hits: [2, *hits[1:]]
    assert engine.outputs([prompt(600, 3)]) == reference([prompt(600, 3)])
    assert engine.counted_since()["load_failures/absent"] == 1


def test_more_hits_than_asked_for(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.lookup_hits = lambda hits: [99 for _ in hits]
    assert engine.outputs([prompt(512)]) == reference([prompt(512)])
    assert engine.counted_since()["lookup_failures/invalid_answer"] == 1
    assert "Fetch" not in plane.calls


@pytest.mark.parametrize("method", ["Lookup", "Fetch", "Store"])
@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT])
def test_refused_call(engine: Any, plane: Any, reference: Any, prompt: Any, method: str, code: grpc.StatusCode) -> None:
    plane.script.abort[method] = code
    prompts = [prompt(512), prompt(600, 4)]
    assert engine.outputs(prompts) == reference(prompts)
    engine.flush()


@pytest.mark.parametrize("method", ["Lookup", "Fetch", "Store"])
def test_stalled_call_costs_its_deadline(engine: Any, plane: Any, reference: Any, prompt: Any, method: str) -> None:
    plane.script.stall.add(method)
    plane.script.write_after_stall = True
    prompts = [prompt(512), prompt(600, 5)]
    begin = time.monotonic()
    with engine.impatient():
        assert engine.outputs(prompts) == reference(prompts)
    assert time.monotonic() - begin < WAIT_MAX_S
    plane.script.unstall.set()


def test_memory_in_doubt_is_not_used_again(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.stall.add("Fetch")
    plane.script.write_after_stall = True
    with engine.impatient():
        assert engine.outputs([prompt(512)]) == reference([prompt(512)])
    doubtful = {fetch.memory_id for fetch in plane.fetches}
    engine.reset(plane)
    (output,) = engine.generate([prompt(512)])
    assert list(output.outputs[0].token_ids) == reference([prompt(512)])[0]
    assert output.num_cached_tokens == 511
    assert doubtful.isdisjoint(fetch.memory_id for fetch in plane.fetches)


def test_restarted_daemon_is_used_at_once(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.forget_registrations()
    (output,) = engine.generate([prompt(512)])
    assert list(output.outputs[0].token_ids) == reference([prompt(512)])[0]
    assert output.num_cached_tokens == 511
    assert plane.calls.count("RegisterMemory") >= 1


def test_abort_while_loading_frees_the_blocks_once_quiet(engine: Any, plane: Any, prompt: Any, reference: Any) -> None:
    from vllm import SamplingParams

    free = engine.free_blocks()
    plane.script.fetch_delay = WAIT_MAX_S / 2
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("doomed", {"prompt_token_ids": prompt(1000)}, SamplingParams(max_tokens=4))
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
    assert internal not in engine.worker._managers[0]._outstanding
    plane.script.fetch_delay = 0.0
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])


@pytest.fixture
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have idle steps wait for the end of a load however long that takes."""
    monkeypatch.setattr("host_control.vllm.worker_side._IDLE_S", NEVER_S)


@pytest.mark.usefixtures("patient_steps")
def test_an_idle_step_ends_with_the_load_that_it_waits_for(
    engine: Any, plane: Any, reference: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.script.fetch_delay = 0.2
    plane.script.fail_fetch_at = 2
    idle: list[bool] = []
    step = engine.connector._scheduler.step

    def counted(output: Any) -> Any:
        metadata = step(output)
        idle.append(metadata.idle)
        return metadata

    monkeypatch.setattr(engine.connector._scheduler, "step", counted)
    assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
    assert idle.count(True) == 1, "it began in one, and had ended in the same"


@pytest.mark.usefixtures("patient_steps")
def test_an_idle_step_of_several_loads_ends_with_the_first(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    plane.script.fetch_delay = 0.1
    prompts = [prompt(1000), prompt(700), prompt(512)]
    assert engine.outputs(prompts) == reference(prompts)


@pytest.mark.usefixtures("patient_steps")
def test_a_request_that_computes_is_not_held_up_by_one_that_loads(
    engine: Any, plane: Any, reference: Any, prompt: Any
) -> None:
    from vllm import SamplingParams

    plane.script.stall.add("Fetch")
    llm_engine, found = engine.llm.llm_engine, dict[str, list[int]]()
    for name, length, tokens in (("loads", 1000, 8), ("computes", 200, 150)):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm_engine.add_request(name, {"prompt_token_ids": prompt(length)}, sampling)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        if "computes" in found and not plane.script.unstall.is_set():
            assert "Fetch" in plane.calls and not engine.worker._managers[0].idle, "its load has not ended"
            plane.script.unstall.set()
    assert found == {"computes": reference([prompt(200)], 150)[0], "loads": reference([prompt(1000)])[0]}


def test_full_staging_drops_and_counts(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    engine.reset(plane, records=True)
    plane.script.stall.add("Store")
    store = engine.worker._store
    slots, store._free = store._free, {segment: [free[0][:1]] for segment, free in store._free.items()}
    try:
        assert engine.outputs([prompt(1000)]) == reference([prompt(1000)])
        counted = engine.counted_since()
        assert counted["dropped_stores/full"] == 1 and counted["dropped_stores/gap"] == 1
    finally:
        plane.script.unstall.set()
        engine.flush()
        store._free = slots
        for (free,) in slots.values():
            free.sort()
