"""Checks whether the KV of a vLLM engine, or of one request, can be cached."""

import math
from typing import Any, Final

from host_control.layouts import element_type
from shadowserve.chunk import TOKENS_MAX

_DRAFTLESS: Final = {"ngram", "ngram_gpu", "suffix"}
_ALL_TOKENS: Final = {"FullAttentionSpec", "MLAAttentionSpec"}
_KNOWN: Final = {
    *_ALL_TOKENS, "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec",
}  # fmt: skip


class UncacheableError(Exception):
    """The engine's KV cannot be cached. The message says why and, if possible, what to change."""


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers; one if they are all the same.

    Workers have all specs of a group whose layers differ. The scheduler only has the first one.
    """
    several = getattr(spec, "kv_cache_specs", None)
    return [spec] if several is None else list(several.values())


def uncacheable(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why the engine runs without the cache, ``None`` if it can use it."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism is not supported"
    if model.runner_type != "generate" or model.is_encoder_decoder:
        return f"only decoder models that generate are supported, not runner '{model.runner_type}' or encoder-decoders"
    if (problem := _prefix_problem(vllm_config)) is not None:
        return problem
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTLESS and not speculative.use_eagle_block_drop():
        return f"speculative decoding by '{speculative.method}' has KV of a draft model, which is not supported"
    return _groups_problem(kv_cache_config.kv_cache_groups, cache)


def _groups_problem(groups: list[Any], cache: Any) -> str | None:
    kept = [group for group in groups if group.kv_cache_spec.prefix_cacheable]
    if not kept:
        return "no layer has a KV cache that vLLM's prefix caching supports"
    for group in kept:
        for spec in layer_specs(group.kv_cache_spec):
            if (problem := _uncacheable_spec(spec)) is not None:
                return problem
    common = math.lcm(*(group.kv_cache_spec.block_size for group in kept))
    if common > TOKENS_MAX:
        return (
            f"the least common multiple of all groups' block sizes is {common} tokens, and a chunk holds at most "
            f"{TOKENS_MAX}"
        )
    plain = all(type(spec).__name__ in _ALL_TOKENS for group in kept for spec in layer_specs(group.kv_cache_spec))
    if not plain and not cache.enable_prefix_caching:
        return "models with sliding windows or recurrent state need vLLM's prefix caching, and it is off"
    return None


def _prefix_problem(vllm_config: Any) -> str | None:
    """Return why the engine cannot start a prefill after a loaded prefix.

    vLLM turns prefix caching off if the engine cannot do this (MLA on most CPUs, attention that is not causal). Users
    turn it off, too, and the configuration does not show who did. But vLLM also turns chunked prefill off if the engine
    cannot continue after a prefix. So an engine with either of the two can use loaded prefixes.
    """
    from vllm import envs

    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM does not support prefix caching for this model"
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    if envs.VLLM_BATCH_INVARIANT:
        return (
            "VLLM_BATCH_INVARIANT is set and prefix caching is off. vLLM turns it off if outputs after a cached prefix "
            "are not batch-invariant (FlashInfer, Triton MLA); with other backends, leave it on"
        )
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return (
            "the engine has neither prefix caching nor chunked prefill, so it cannot start after a cached prefix. vLLM "
            "turns both off if the attention backend cannot do it (MLA on CPUs without AMX); else enable one of them"
        )
    return None


def _uncacheable_spec(spec: Any) -> str | None:
    kind = type(spec).__name__
    if kind not in _KNOWN:
        return f"KV caches of type {kind} are not supported"
    if getattr(spec, "non_causal", False):
        return "only causal attention is supported: without it, KV depends on later tokens"
    if kind == "MambaSpec":
        if spec.mamba_cache_mode != "align":
            return (
                f"with mamba_cache_mode '{spec.mamba_cache_mode}' recurrent state is not kept at block ends; "
                "set it to 'align'"
            )
        if unknown := [dtype for dtype in spec.dtypes if element_type(dtype) is None]:
            return f"recurrent state of dtype {unknown[0]} is not supported"
    return None


def in_step_problem(vllm_config: Any) -> str | None:
    """Return why the engine's steps must not compute while their KV is still being loaded, ``None`` if they can.

    vLLM learns that such a load was short with the output of the step that waited for it, and rolls back that step
    only. Steps that were scheduled meanwhile would use missing KV. The second model runner rolls back no step: it
    counts computed tokens on the GPU.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "vLLM runs a step in each pipeline stage at once, and rolls back only one after a short load"
    if vllm_config.max_concurrent_batches > 1:
        return (
            "vLLM schedules a step before the previous one has ended, and rolls back only one after a short load; "
            "start it with --no-async-scheduling"
        )
    if getattr(vllm_config, "use_v2_model_runner", False):
        return (
            "vLLM's second model runner does not roll back a step after a short load; start it with "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return None


def has_full_graphs(vllm_config: Any) -> bool:
    """Tell if the engine runs CUDA graphs of the whole model, in which no step waits for a layer."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and bool(mode.has_full_cudagraphs())


def offloading_problem(vllm_config: Any) -> str | None:
    """Return why changed weights of the engine could not be detected, ``None`` if they can be."""
    offload = getattr(vllm_config, "offload_config", None)
    backend = getattr(offload, "offload_backend", "")
    group_size = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    if backend == "prefetch" or (backend == "auto" and group_size > 0):
        return (
            "vLLM prefetches weights from CPU memory (offload_backend 'prefetch'), so several layers share the same "
            "GPU memory, and changed weights could not be detected; use cpu_offload_gb instead"
        )
    return None


def request_problem(request: Any) -> str | None:
    """Return why a request's tokens do not identify its KV, ``None`` if they do."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt embeddings"
    if request.pooling_params is not None:
        return "pooling"
    if getattr(request, "resumable", False):
        return "streaming input"
    lora = request.lora_request
    if lora is not None and getattr(lora, "load_inplace", False):
        return "an adapter that is replaced in place"
    return None
