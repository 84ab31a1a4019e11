"""Real vLLM with coarsely quantized records and preemptions: preempted requests continue with exact KV."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stack import Process

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SEEDS = range(11, 15)
GENERATED = 110
BLOCKS = 45


@pytest.fixture(scope="module")
def engine(daemon: Process, make_engine: Callable[..., Any], reference: Any) -> Iterator[Any]:
    engine = make_engine(
        daemon.address,
        enable_prefix_caching=False,
        max_num_batched_tokens=96,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=1200,
        extra={"quantizer": "binned", "bins": 4, "value_bins": 4},
    )
    yield engine
    engine.close()


def test_preempted_requests_continue_with_exact_kv(engine: Any, prompt: Any, reference: Any) -> None:
    """Symptom: a preempted request loaded quantized KV of its own prompt."""
    prompts = [prompt(300, seed) for seed in SEEDS]
    assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
    engine.flush()
    engine.outputs([prompt(2)])  # vLLM collects counters in a step
    counted = engine.counters()
    assert counted["preempted_tokens"] >= counted["saved_tokens"] == counted["restored_tokens"] > 0
    # For other requests, the prompts are stored quantized.
    outputs = engine.outputs(prompts, GENERATED)
    assert engine.counters()["loaded_tokens"] - counted["loaded_tokens"] >= len(prompts) * 256
    assert outputs != reference(prompts, GENERATED), "the quantizer is too fine to show in outputs"
