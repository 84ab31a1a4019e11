"""Which engines are served from the cache, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import pytest

from host_control.config import HostConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def options(**changed: Any) -> dict[str, Any]:
    import torch

    return {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, **changed}


def full(**changed: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(**options(**changed))


def window(**changed: Any) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(**options(sliding_window=64, **changed))


def state() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def differing() -> Any:
    """Return a group of layers that differ, as a worker sees it; vLLM's scheduler is shown one of the layers."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": full(), "b": full(num_kv_heads=4)})


def engine() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate", is_encoder_decoder=False, is_prefix_caching_supported=True
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=False, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2),
        speculative_config=None,
    )


def problem(*specs: Any, **changed: Any) -> str:
    """Return what is said of an engine with a group of each spec; ``changed``: part__name -> value."""
    from host_control.vllm.support import uncacheable

    config = engine()
    for place, value in changed.items():
        part, _, name = place.partition("__")
        setattr(getattr(config, part) if name else config, name or part, value)
    groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in specs]
    return uncacheable(config, SimpleNamespace(kv_cache_groups=groups), HostConfig()) or ""


def test_common_engine_is_cacheable() -> None:
    assert problem(full()) == ""


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_a_draft_model_is_cacheable(method: str) -> None:
    assert problem(full(), speculative_config=SimpleNamespace(method=method)) == ""


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("parallel_config__pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config__decode_context_parallel_size", 2, "context"),
        ("model_config__runner_type", "pooling", "pooling"),
        ("model_config__is_encoder_decoder", True, "encoder"),
        ("model_config__is_prefix_caching_supported", False, "supports no prefix caching"),
        ("speculative_config", SimpleNamespace(method="mtp"), "mtp"),
        ("cache_config__calculate_kv_scales", True, "scales"),
    ],
)
def test_engine_that_cannot_be_cached_says_why(place: str, value: Any, message: str) -> None:
    assert message in problem(full(), **{place: value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 48}, "chunk_tokens"),
        ({"head_size_v": 32}, "equal size"),
        ({"page_size_padded": 1 << 16}, "padded"),
        ({"non_causal": True}, "causal"),
    ],
)
def test_cache_of_an_unknown_form_says_why(changed: dict[str, Any], message: str) -> None:
    assert message in problem(full(**changed))


def test_windows_that_keep_every_token_are_cacheable() -> None:
    """What vLLM makes of windows beside full attention, where it is to keep one group."""
    assert problem(full(sliding_window=64)) == "" == problem(full(attention_chunk_size=64))
    assert "SlidingWindowSpec" in problem(window()), "windows alone forget tokens"


def test_a_group_whose_layers_differ_is_not_cached() -> None:
    assert "UniformTypeKVCacheSpecs" in problem(differing())


def test_several_groups_say_what_would_make_one_of_them() -> None:
    flag = "--disable-hybrid-kv-cache-manager"
    said = problem(full(), window(), window())
    assert "3 KV cache groups (FullAttentionSpec, SlidingWindowSpec)" in said and flag in said
    for other in (state(), window(num_kv_heads=4), differing()):
        said = problem(full(), other)
        assert "2 KV cache groups" in said and flag not in said, "with the flag vLLM does not start"
    assert "0 KV cache groups" in problem()


def test_an_engine_is_cached_if_it_continues_behind_kv_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    without_prefixes = {"cache_config__enable_prefix_caching": False}
    without_chunks = {"scheduler_config__enable_chunked_prefill": False}
    assert problem(full(), **without_prefixes) == "" == problem(full(), **without_chunks), "as its user wants it"
    assert "neither prefix caching nor chunked prefill" in problem(full(), **without_prefixes, **without_chunks)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert problem(full()) == ""
    assert "VLLM_BATCH_INVARIANT" in problem(full(), **without_prefixes)
