"""What speaks against caching what a vLLM engine computes, or one of its requests."""

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
    """This engine's KV cannot be cached; the message says why and, where there is one, what to change."""


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of the layers of a group, one where they are all alike.

    vLLM keeps those of layers that differ (of heads, say) in the workers; its scheduler is shown the first one alone.
    """
    several = getattr(spec, "kv_cache_specs", None)
    return [spec] if several is None else list(several.values())


def uncacheable(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why this engine is served without the cache, ``None`` where nothing speaks against it."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism is not supported"
    if model.runner_type != "generate" or model.is_encoder_decoder:
        return f"only decoders that generate are supported, not runner '{model.runner_type}' or encoder-decoders"
    if (problem := _prefix_problem(vllm_config)) is not None:
        return problem
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTLESS and not speculative.use_eagle_block_drop():
        return f"speculative decoding by '{speculative.method}' has KV of a draft model that is not known here"
    return _groups_problem(kv_cache_config.kv_cache_groups, cache)


def _groups_problem(groups: list[Any], cache: Any) -> str | None:
    kept = [group for group in groups if group.kv_cache_spec.prefix_cacheable]
    if not kept:
        return "no layer keeps anything that vLLM could continue behind"
    for group in kept:
        for spec in layer_specs(group.kv_cache_spec):
            if (problem := _uncacheable_spec(spec)) is not None:
                return problem
    common = math.lcm(*(group.kv_cache_spec.block_size for group in kept))
    if common > TOKENS_MAX:
        return f"blocks of all groups have {common} tokens in common; a chunk has at most {TOKENS_MAX}"
    plain = all(type(spec).__name__ in _ALL_TOKENS for group in kept for spec in layer_specs(group.kv_cache_spec))
    if not plain and not cache.enable_prefix_caching:
        return "of windows and states vLLM itself says how long a hit may be, with prefix caching on; it is off"
    return None


def _prefix_problem(vllm_config: Any) -> str | None:
    """Return why this engine cannot continue behind KV that it did not just compute.

    vLLM turns prefix caching off where it cannot (latents on most CPUs, attention that is not causal), and so do users
    who have no need of it; the configuration does not say who did. But a chunked prefill continues behind its own
    chunks, and where vLLM cannot do that, it turns chunked prefill off as well. So an engine with either does what a
    hit asks of it, and one without both would do it for us alone.
    """
    from vllm import envs

    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM does not continue behind a prefix with this model: it supports no prefix caching"
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    if envs.VLLM_BATCH_INVARIANT:
        return (
            "VLLM_BATCH_INVARIANT is set and prefix caching is off. vLLM turns it off where outputs behind a prefix are"
            " not invariant (FlashInfer, Triton MLA); otherwise leave it on"
        )
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return (
            "the engine has neither prefix caching nor chunked prefill, so it never continues behind a prefix. vLLM "
            "turns both off where it cannot, as with latents (MLA) on CPUs without AMX; otherwise leave one of them on"
        )
    return None


def _uncacheable_spec(spec: Any) -> str | None:
    kind = type(spec).__name__
    if kind not in _KNOWN:
        return f"KV caches of kind {kind} are not supported"
    if getattr(spec, "non_causal", False):
        return "only causal attention is supported: other KV depends on later tokens"
    if kind == "MambaSpec":
        if spec.mamba_cache_mode != "align":
            return f"states of mode '{spec.mamba_cache_mode}' are not kept at the ends of blocks; it has to be 'align'"
        if unknown := [dtype for dtype in spec.dtypes if element_type(dtype) is None]:
            return f"states of dtype {unknown[0]} are not supported"
    return None


def in_step_problem(vllm_config: Any) -> str | None:
    """Return why no step of this engine may compute on KV that is still being loaded, ``None`` where it may.

    vLLM hears that such a load fell short with the output of the step that waited for it, and takes that step back
    alone. Where others are scheduled by then, they go on behind KV that is none, and what they sample counts. The
    second model runner takes no step back: its count of computed tokens is on the GPU, and stays as it is.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "vLLM has a step under way in each pipeline stage, and takes back only one whose load falls short"
    if vllm_config.max_concurrent_batches > 1:
        return (
            "vLLM schedules a step before the one before it has ended, and takes back only one whose load falls short; "
            "start it with --no-async-scheduling"
        )
    if getattr(vllm_config, "use_v2_model_runner", False):
        return (
            "vLLM's second model runner does not take back a step whose load falls short; start it with "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return None


def offloading_problem(vllm_config: Any) -> str | None:
    """Return why changes of this engine's weights would go unnoticed, ``None`` where nothing speaks for that."""
    offload = getattr(vllm_config, "offload_config", None)
    group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    if getattr(offload, "offload_backend", "") == "prefetch" or (
        getattr(offload, "offload_backend", "") == "auto" and group > 0
    ):
        return (
            "vLLM prefetches weights from CPU memory (offload_backend 'prefetch'), so that layers take turns in the "
            "same GPU memory: a change of weights would go unnoticed; use cpu_offload_gb instead"
        )
    return None


def request_problem(request: Any) -> str | None:
    """Return why a request's KV cannot be named by its tokens, ``None`` where it can."""
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
