"""Real vLLM with little room: chunked prefill, preemption, no prefix cache of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SEEDS = range(11, 15)
GENERATED = 110


@pytest.fixture(scope="module")
def engine(plane: Any, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    engine = make_engine(
        plane.address,
        enable_prefix_caching=False,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=45,
        max_model_len=1200,
    )
    yield engine
    engine.close()


def preemptions(engine: Any) -> int:
    return sum(int(metric.value) for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")


def test_chunked_prefill_stores_and_loads(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    (output,) = engine.generate([prompt(1000)])
    assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
    assert not output.num_cached_tokens
    engine.flush()
    assert len(plane.records) == 3
    (output,) = engine.generate([prompt(1000)])
    assert list(output.outputs[0].token_ids) == reference([prompt(1000)])[0]
    assert output.num_cached_tokens == 768


def test_last_token_is_prefilled_without_a_local_cache(engine: Any, reference: Any, prompt: Any) -> None:
    (output,) = engine.generate([prompt(512)])
    assert list(output.outputs[0].token_ids) == reference([prompt(512)])[0]
    assert output.num_cached_tokens == 511


def test_preempted_requests_load_again(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    prompts = [prompt(300, seed) for seed in SEEDS]
    expected = reference(prompts, GENERATED)
    before = preemptions(engine)
    assert engine.outputs(prompts, GENERATED) == expected
    assert preemptions(engine) > before, "the test wants preemptions"
    fetched = plane.calls.count("Fetch")
    assert fetched, "a preempted request comes back by loading what it had stored"
    engine.flush()
    assert engine.outputs(prompts, GENERATED) == expected
    assert plane.calls.count("Fetch") >= fetched + len(prompts)
    assert engine.free_blocks() == 44


def test_failed_loads_under_pressure(engine: Any, plane: Any, reference: Any, prompt: Any) -> None:
    plane.script.fail_fetch_at = 0
    prompts = [prompt(300, seed) for seed in SEEDS]
    try:
        assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
        assert engine.free_blocks() == 44
    finally:
        plane.script.fail_fetch_at = None
