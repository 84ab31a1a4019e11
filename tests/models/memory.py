"""A KV cache's groups, its capacity in tokens, and the bytes that hits can need, by vLLM's own rules."""

import math
from typing import Any


def layer_specs(group: Any) -> list[Any]:
    """Return the spec of each layer of a group."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [specs[name] for name in group.layer_names] if specs else [group.kv_cache_spec] * len(group.layer_names)


def groups(kv_cache_config: Any) -> list[dict[str, Any]]:
    """Return the groups of a KV cache, as the matrix shows them."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        specs = layer_specs(group)
        window = getattr(specs[0], "sliding_window", None) or getattr(specs[0], "attention_chunk_size", None)
        found.append(
            {
                "kind": "+".join(sorted({type(spec).__name__.removesuffix("Spec") for spec in specs})),
                "layers": len(specs),
                "block_tokens": group.kv_cache_spec.block_size,
                "block_bytes": sum(spec.page_size_bytes for spec in specs),
                "page_bytes": sorted({spec.page_size_bytes for spec in specs}),
                **({"window": window} if window else {}),
                **({"draft": True} if group.is_eagle_group else {}),
                **({} if group.kv_cache_spec.prefix_cacheable else {"scratch": True}),
            }
        )
    return found


def chunk_tokens(kv_cache_config: Any) -> int:
    """Return the shortest chunk of whole blocks of every group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # Without prefix caching, the block of a recurrent state is as long as the context.
    return math.lcm(*(spec.block_size for spec in specs if getattr(spec, "mamba_cache_mode", "") != "none"))


def capacity(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens that fit, in requests of the longest context."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return int(concurrency * vllm_config.model_config.max_model_len)


def needed_bytes(kv_cache_config: Any, tokens: int, *, everywhere: bool) -> int:
    """Return how many bytes of a prompt's KV a hit can ever need, by each group's own rule.

    ``everywhere``: hits may end at each boundary of vLLM, not only at the last one within the prompt.
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    aligned = kv_cache_config.cache_hit_alignment_tokens or chunk_tokens(kv_cache_config)
    end = tokens // aligned * aligned
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not spec.prefix_cacheable:
            continue
        blocks = end // spec.block_size
        rule = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask
        ends = {"retention_interval": None if everywhere else 0, "reachable_boundaries": (end,)}
        mask = rule(0, blocks, aligned, spec, group.is_eagle_group, **ends)
        total += (blocks if mask is None else sum(mask)) * sum(each.page_size_bytes for each in layer_specs(group))
    return total
