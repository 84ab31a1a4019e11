"""Real vLLM with little memory: chunked prefill, and preempted requests that are saved and loaded again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from engine_stress import Script, Stress
from kit import add, greedy
from scripted import Spoilt
from stack import Process

from shadowserve.proto import dataplane_pb2 as pb

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SEEDS = range(11, 15)
GENERATED = 110
BLOCKS = 45


SMALL: dict[str, Any] = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": BLOCKS,
    "max_model_len": 1200,
}


@pytest.fixture(scope="module")
def engine(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    with closing(make_engine(plane.address, **SMALL)) as engine:
        yield engine


@pytest.fixture
def prompts(prompt: Any) -> list[list[int]]:
    """Prompts whose KV, with generated tokens, does not fit into memory at once."""
    return [prompt(300, seed) for seed in SEEDS]


@pytest.fixture
def steps(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count the scheduled tokens, and the preemptions of each request."""
    steps, schedule = SimpleNamespace(tokens=0, preemptions=Counter[str]()), engine.scheduler.schedule

    def scheduled(*arguments: Any) -> Any:
        output = schedule(*arguments)
        steps.tokens += output.total_num_scheduled_tokens
        steps.preemptions.update(output.preempted_req_ids)
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", scheduled)
    return steps


class Refusing(set[bytes]):
    """The keys that cannot be stored: those of stores with a limited lifetime."""

    def __init__(self, plane: Any) -> None:
        super().__init__()
        self._plane = plane

    def __contains__(self, key: object) -> bool:
        return bool(self._plane.stores[-1].lasts_ms)


def saved_keys(plane: Any) -> set[bytes]:
    """Return the keys of the saved tails of preempted requests."""
    return {key for request in plane.stores if request.lasts_ms for key in request.keys}


def fetched_keys(plane: Any) -> set[bytes]:
    return {key for part in plane.fetches for key in part.keys}


def test_chunked_prefill_stores_and_loads(engine: Any, plane: Any, serve: Any) -> None:
    engine.reset(plane, records=True)
    assert serve(engine, 1000) == 0
    engine.flush()
    assert len(plane.records) == 3
    assert serve(engine, 1000) == 768
    assert serve(engine, 512) == 511, "the last token is computed"


def test_a_preempted_request_continues_where_it_was(
    engine: Any, plane: Any, prompts: Any, reference: Any, steps: Any
) -> None:
    engine.reset(plane, records=True)
    assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
    times = sum(steps.preemptions.values())
    assert times, "the test needs preemptions"
    assert saved_keys(plane) and saved_keys(plane) <= fetched_keys(plane), "its tail was not saved and loaded"
    assert steps.tokens == sum(len(each) + GENERATED - 1 for each in prompts), "no token was computed twice"
    counted = engine.counted_since()
    assert counted["restored_tokens"] == counted["saved_tokens"] <= counted["preempted_tokens"]
    assert engine.free_blocks() == BLOCKS - 1
    engine.flush()
    fetched = plane.calls.count("Fetch")
    assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED), "with stored prompts and preemptions"
    assert plane.calls.count("Fetch") >= fetched + len(prompts)


def test_spoilt_saves_change_outputs(engine: Any, plane: Any, prompts: Any, reference: Any, steps: Any) -> None:
    """The control for the other tests, which compare outputs."""
    engine.reset(plane, records=True)
    plane.records = Spoilt(plane)
    try:
        assert engine.outputs(prompts, GENERATED) != reference(prompts, GENERATED)
    finally:
        plane.records = {}


def test_a_request_is_preempted_twice(engine: Any, plane: Any, prompt: Any, steps: Any) -> None:
    """Three requests fit until each has 448 tokens, two until each has 704."""
    prompts, lengths = [prompt(440, seed) for seed in range(3)], (60, 300, 300)

    def outputs(of: list[int]) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompts[each]} for each in of]
        sampling = [greedy(lengths[each]) for each in of]
        return [list(out.outputs[0].token_ids) for out in engine.llm.generate(asked, sampling, use_tqdm=False)]

    alone = [outputs([each])[0] for each in range(3)]
    assert not steps.preemptions
    engine.reset(plane, records=True)
    assert outputs([0, 1, 2]) == alone
    assert max(steps.preemptions.values()) == 2
    assert len(saved_keys(plane) & fetched_keys(plane)) == 2


@pytest.mark.parametrize("fault", ["no save", "no tail", "first chunk", "tail", "all loads"])
def test_failed_saves_and_loads_are_computed(
    engine: Any, plane: Any, prompts: Any, reference: Any, steps: Any, fault: str
) -> None:
    engine.reset(plane, records=True)
    if fault == "no save":
        plane.script.store_outcome = pb.OUTCOME_STORAGE_REFUSED
    elif fault == "no tail":
        plane.script.not_storable = Refusing(plane)
    elif fault == "all loads":
        plane.script.abort["Fetch"] = grpc.StatusCode.UNAVAILABLE
    else:
        plane.script.fail_fetch_at = 0 if fault == "first chunk" else 1
    try:
        assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
    finally:
        plane.script = type(plane.script)()
        plane.records = {}
    assert steps.preemptions
    assert engine.free_blocks() == BLOCKS - 1


def test_an_abort_of_a_preempted_request_leaves_nothing(
    engine: Any, plane: Any, prompts: Any, reference: Any, steps: Any
) -> None:
    engine.reset(plane, records=True)
    core = engine.llm.llm_engine
    for number, tokens in enumerate(prompts):
        add(engine, f"{number}", tokens, GENERATED)
    answers: dict[str, list[int]] = {}
    gone = ""
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if steps.preemptions and not gone:
            (name,) = steps.preemptions
            gone = name.partition("-")[0]
            core.abort_request([gone])
    expected = dict(zip(map(str, range(len(prompts))), reference(prompts, GENERATED), strict=True))
    assert gone
    assert {name: answers[name] for name in expected if name != gone} == {
        name: tokens for name, tokens in expected.items() if name != gone
    }
    engine.flush()
    side = engine.connector._scheduler
    assert not side._requests and not engine.worker.stores._saves
    assert engine.free_blocks() == BLOCKS - 1


def test_stress(engine: Any, plane: Any, prompt: Any, reference: Any) -> None:
    """One seed of ``make soak``, which runs many kinds of engines without an end."""
    engine.reset(plane, records=True)
    longest = [((300, seed), GENERATED) for seed in SEEDS] + [((200, 0), GENERATED)]
    shorter = [((length, 0), 8) for length in (256, 513, 1000)]
    prompts = [(prompt(*arguments), tokens) for arguments, tokens in longest + shorter]
    expected = [(tokens, reference([tokens], count)[0]) for tokens, count in prompts]
    stress = Stress(engine, expected, Script(plane), seed=5)
    with engine.impatient():
        stress.run(30)
    # Preemptions depend on timing.
    assert stress.counts["answers"] and stress.counts["aborts"], stress.counts


def test_with_a_coarse_quantizer_preempted_requests_continue_with_exact_kv(
    engine: Any, daemon: Process, make_engine: Callable[..., Any], prompts: Any, reference: Any
) -> None:
    """Symptom: a preempted request loaded quantized KV of its own prompt."""
    engine.close()  # a process can only have one
    engine.close = lambda: None
    extra = {"quantizer": "binned", "bins": 4, "value_bins": 4}
    with closing(make_engine(daemon.address, **SMALL, extra=extra)) as coarse:
        assert coarse.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
        coarse.flush()
        coarse.outputs([prompts[0][:2]])  # vLLM collects counters in a step
        counted = coarse.counters()
        assert counted["preempted_tokens"] >= counted["saved_tokens"] == counted["restored_tokens"] > 0
        # For other requests, the prompts are stored quantized.
        outputs = coarse.outputs(prompts, GENERATED)
        assert coarse.counters()["loaded_tokens"] - counted["loaded_tokens"] >= len(prompts) * 256
        assert outputs != reference(prompts, GENERATED), "the quantizer is too fine to show in outputs"
