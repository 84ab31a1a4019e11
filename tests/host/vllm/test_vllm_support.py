"""Checks whether engines can be cached, and their reasons."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_support import full, local, state, window

from host_control.vllm.support import uncacheable

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


DRAFTS = {
    name: SimpleNamespace(method=name, use_eagle_block_drop=lambda name=name: name == "eagle")
    for name in ("eagle", "medusa")
}


def differing() -> Any:
    """Return a group of different layers, as a worker has it."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": full(num_kv_heads=4)})


def problem(*specs: Any, **changed: Any) -> str:
    """Return the reason for an engine with one group per spec; ``changed``: part__name -> value."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate", is_encoder_decoder=False, is_prefix_caching_supported=True
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2),
        speculative_config=None,
    )
    for place, value in changed.items():
        part, _, name = place.partition("__")
        setattr(getattr(config, part) if name else config, name or part, value)
    groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in specs]
    return uncacheable(config, SimpleNamespace(kv_cache_groups=groups)) or ""


def test_a_common_engine_is_cacheable() -> None:
    assert problem(full()) == ""


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_without_a_draft_model_is_cacheable(method: str) -> None:
    assert problem(full(), speculative_config=SimpleNamespace(method=method)) == ""


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("parallel_config__decode_context_parallel_size", 2, "context"),
        ("model_config__runner_type", "pooling", "pooling"),
        ("model_config__is_encoder_decoder", True, "encoder"),
        ("model_config__is_prefix_caching_supported", False, "does not support prefix caching"),
        ("speculative_config", DRAFTS["medusa"], "medusa"),
    ],
)
def test_an_uncacheable_engine_has_a_reason(place: str, value: Any, message: str) -> None:
    assert message in problem(full(), **{place: value})


def test_draft_layers_are_cacheable() -> None:
    assert problem(full(), speculative_config=DRAFTS["eagle"]) == ""


def test_an_unknown_cache_has_a_reason() -> None:
    assert "causal" in problem(full(non_causal=True))
    assert "'all'" in problem(full(), state(mamba_cache_mode="all")) and "align" in problem(
        state(mamba_cache_mode="none")
    )
    assert "complex64" in problem(full(), state(dtypes=(torch.float32, torch.complex64)))
    assert "MambaSpec" not in problem(full(), state())


def test_block_sizes_are_limited_by_the_record_format() -> None:
    for size in (48, 272, 1056):
        assert problem(full(block_size=size)) == "", "blocks define the chunks' length"
    assert "common" in problem(full(block_size=1 << 16), state(block_size=(1 << 16) - 32))


@pytest.mark.parametrize("kept", [{"sliding_window": 64}, {"attention_chunk_size": 64}])
def test_windows_that_keep_every_token_are_cacheable(kept: dict[str, int]) -> None:
    """vLLM's spec if windows and full attention form one group."""
    assert problem(full(**kept)) == ""


def test_windows_and_recurrent_state_need_prefix_caching() -> None:
    for others in ([window(64)], [window(64), window(64, num_kv_heads=4)], [state()], [differing()], [local(64)]):
        assert problem(full(), *others) == "" == problem(*others)
        plain = all(type(each).__name__ == "UniformTypeKVCacheSpecs" for each in others)
        said = problem(full(), *others, cache_config__enable_prefix_caching=False)
        assert (said == "") == plain and ("need vLLM's prefix caching" in said) != plain


def test_scratch_caches_are_ignored() -> None:
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    scratch = CircularBufferSpec.__new__(CircularBufferSpec)
    assert not scratch.prefix_cacheable
    assert problem(full(), scratch) == ""
    assert all("no layer has a KV cache" in said for said in (problem(scratch), problem()))


def test_the_reason_names_an_unknown_group() -> None:
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    assert "SinkFullAttentionSpec" in problem(full(), SinkFullAttentionSpec(**vars(full()), sink_len=4))


def test_an_engine_needs_prefix_caching_or_chunked_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    without_prefixes = {"cache_config__enable_prefix_caching": False}
    without_chunks = {"scheduler_config__enable_chunked_prefill": False}
    assert problem(full(), **without_prefixes) == "" == problem(full(), **without_chunks), "as configured by the user"
    assert "neither prefix caching nor chunked prefill" in problem(full(), **without_prefixes, **without_chunks)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert problem(full()) == ""
    assert "VLLM_BATCH_INVARIANT" in problem(full(), **without_prefixes)
