"""What speaks against caching what a vLLM engine computes, or one of its requests."""

from typing import Any, Final

from host_control.config import HostConfig
from host_control.layouts import element_type

__all__ = ["UncacheableError", "request_problem", "uncacheable"]

_DRAFTLESS: Final = {"ngram", "ngram_gpu", "suffix"}
_WINDOWS: Final = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}


class UncacheableError(Exception):
    """This engine's KV cannot be cached; the message says why and, where there is one, what to change."""


def uncacheable(vllm_config: Any, kv_cache_config: Any, config: HostConfig) -> str | None:
    """Return why this engine is served without the cache, ``None`` where nothing speaks against it."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported"
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism is not supported"
    if model.runner_type != "generate" or model.is_encoder_decoder:
        return f"only decoders that generate are supported, not runner '{model.runner_type}' or encoder-decoders"
    if (problem := _groups_problem([group.kv_cache_spec for group in groups])) is not None:
        return problem
    if (problem := _prefix_problem(vllm_config)) is not None:
        return problem
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTLESS:
        return f"speculative decoding by '{speculative.method}' has KV that depends on later tokens"
    if getattr(cache, "calculate_kv_scales", False):
        return "KV scales computed at run time differ between engines; give them in the checkpoint"
    return _uncacheable_spec(groups[0].kv_cache_spec, config)


def _groups_problem(specs: list[Any]) -> str | None:
    if len(specs) == 1:
        return None
    kinds = {type(spec).__name__ for spec in specs}
    problem = f"the model has {len(specs)} KV cache groups ({', '.join(sorted(kinds))}); one is supported"
    cells = {(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in specs if hasattr(spec, "num_kv_heads")}
    if kinds & _WINDOWS and kinds <= _WINDOWS | {"FullAttentionSpec"} and len(cells) == 1:
        problem += (
            ". With --disable-hybrid-kv-cache-manager vLLM makes it one, which is cached; layers with a window then "
            "keep the whole context, so that fewer tokens fit"
        )
    return problem


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


def _uncacheable_spec(spec: Any, config: HostConfig) -> str | None:
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        return f"KV caches of kind {kind} are not supported"
    if config.chunk_tokens % spec.block_size:
        return (
            f"chunk_tokens ({config.chunk_tokens}) is no multiple of the block size ({spec.block_size}); "
            "change one of them"
        )
    if spec.page_size_bytes != spec.unpadded_page_size_bytes or spec.tokens_per_state != 1:
        return "padded or compressed KV pages are not supported"
    if kind == "FullAttentionSpec" and (
        spec.head_size_v != spec.head_size
        or spec.state_content_bytes is not None
        or spec.num_heads != spec.num_kv_heads
        or spec.non_causal
    ):
        return "only causal attention with a K and a V of equal size in each cell is supported"
    if element_type(spec.dtype) is None:
        return f"KV caches of dtype {spec.dtype} are not supported"
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
