"""Helpers of the tests with real vLLM engines."""

from collections.abc import Mapping
from typing import Any

import numpy as np

SEEDED = {"temperature": 1.0, "seed": 11}
"""Sampling parameters of the fixture ``seeded_reference``."""


def greedy(tokens: int = 8) -> Any:
    """Return sampling parameters for ``tokens`` greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def add(engine: Any, name: str, prompt: list[int], tokens: int = 8) -> None:
    """Add a request to an engine, without running a step."""
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(tokens))


def spoil(engine: Any, value: float = 3.0) -> None:
    """Overwrite paged memory, so that blocks do not contain the KV of earlier requests."""
    for cache in engine.worker._shards.parts[0][0].layout._mover._views:
        cache.fill_(value)


def assert_all_free(engine: Any) -> None:
    """Check that no block is in use, except vLLM's null block."""
    assert engine.free_blocks() == engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


def assert_close(records: Mapping[bytes, Any], expected: Mapping[bytes, Any], case: Any = None) -> None:
    """Check that the records with the keys of ``expected`` have the same KV, within rounding."""
    for key, kv in expected.items():
        stored, computed = (np.frombuffer(data, np.float32) for data in (records[key], kv))
        assert np.allclose(stored, computed, rtol=1e-3, atol=1e-3), case
