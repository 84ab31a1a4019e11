"""Real vLLM with quantized records and more requests than memory: what is preempted goes on as it was.

With the real data plane, which quantizes, and so coarsely that it shows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from machine import free_port
from stack import Process, data_plane

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SEEDS = range(11, 15)
GENERATED = 110
BLOCKS = 45


@pytest.fixture(scope="module")
def daemon() -> Iterator[Process]:
    storage = Process("storage", "--port", str(free_port()))
    process = data_plane(storage.address)
    yield process
    process.stop()
    storage.stop()


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


def test_preempted_requests_go_on_behind_exactly_what_they_had(engine: Any, prompt: Any, reference: Any) -> None:
    """Symptom: what came back of a request that had computed its prompt was quantized."""
    prompts = [prompt(300, seed) for seed in SEEDS]
    assert engine.outputs(prompts, GENERATED) == reference(prompts, GENERATED)
    engine.flush()
    engine.outputs([prompt(2)])  # counts are taken with a step
    counted = engine.counters()
    assert counted["preempted_tokens"] >= counted["saved_tokens"] == counted["restored_tokens"] > 0
    # And their prompts were stored for others, quantized.
    outputs = engine.outputs(prompts, GENERATED)
    assert engine.counters()["loaded_tokens"] - counted["loaded_tokens"] >= len(prompts) * 256
    assert outputs != reference(prompts, GENERATED), "the quantizer is too fine for this test to tell anything"
