"""Detects the layout of an engine's pages: the engine writes a pattern, and the matching layout reads it back.

vLLM's CPU backend orders a page by instruction set and dtype, its CUDA backends by configuration, and any release may
change this. A wrong layout would give wrong tokens, so no KV moves before the detection has succeeded.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from host_control.layouts import LayoutKind, PagedLayout
from host_control.vllm.support import UncacheableError

_BLOCKS: Final = 3


class _UnitScales:
    """A layer with all scales set to 1, so that the pattern is written unchanged."""

    def __init__(self, layer: Any, device: Any) -> None:
        self._layer = layer
        self._k_scale = self._v_scale = torch.ones((), dtype=torch.float32, device=device)
        self._k_scale_float = self._v_scale_float = 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def find_layout(vllm_config: Any, layer_name: str, cache: Any, kinds: Sequence[LayoutKind]) -> LayoutKind:
    """Return the page layout of one layer.

    Args:
        cache: Its registered KV cache. Only shape, strides and dtype are used.

    Raises:
        UncacheableError: No layout matches, or the pattern cannot be written.
    """
    problems = []
    for kind in kinds:
        try:
            if _is_laid_out(vllm_config, layer_name, cache, kind):
                return kind
        except ValueError as error:
            problems.append(f"; not '{kind}': {error}")
    raise UncacheableError(
        f"the KV cache of {layer_name} does not have the layout {' or '.join(map(repr, kinds))}: a pattern that the "
        f"engine wrote reads back differently{''.join(problems)}; please report the versions of vLLM and ShadowServe, "
        "the attention backend and the CPU or GPU"
    )


def _is_laid_out(vllm_config: Any, layer_name: str, cache: Any, kind: LayoutKind) -> bool:
    """Return True if the pattern reads back with layout ``kind``. Raise ValueError if it does not fit the shape."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if update is None:
        raise UncacheableError(f"the layout of the KV cache cannot be checked: {layer_name} has no do_kv_cache_update")
    scratch = _scratch(cache)
    layout = PagedLayout([scratch], kind)
    pattern = _pattern(layout, cache.dtype, vllm_config.model_config.dtype)
    tokens = pattern.shape[1]
    slots = torch.arange(layout.block_tokens, layout.block_tokens + tokens, device=cache.device)
    view = _UnitScales(layer, cache.device)
    try:
        if kind == "latent":
            rank = getattr(layer.impl, "kv_lora_rank", 0)
            latent = pattern[0, :, 0]
            cache_dtype = layer.impl.kv_cache_dtype
            # The caches of MLA layers have no dimension for heads.
            update(
                latent[:, :rank], latent[:, rank:].unsqueeze(1), scratch.squeeze(1), slots, cache_dtype, view._k_scale
            )
        else:
            update(view, pattern[0], pattern[1], scratch, slots)
    except Exception as error:
        raise UncacheableError(
            f"the layout of the KV cache cannot be checked: writing a pattern failed: {type(error).__name__}: {error}"
        ) from error
    expected = pattern.to(_stored_dtype(vllm_config, cache.dtype)).cpu().contiguous().view(torch.uint8).reshape(-1)
    found = torch.empty(layout.chunk_bytes(tokens), dtype=torch.uint8)
    layout.gather(found, [1, 2])
    return bool(torch.equal(found, expected))


def _stored_dtype(vllm_config: Any, dtype: Any) -> Any:
    """Return the dtype of a cache's elements: vLLM stores fp8 in tensors of bytes."""
    if dtype != torch.uint8:
        return dtype
    return torch.float8_e5m2 if "e5m2" in str(vllm_config.cache_config.cache_dtype) else torch.float8_e4m3fn


def _scratch(cache: Any) -> Any:
    """Return a few blocks with the shape and strides of the cache's blocks."""
    blocks, *inner = cache.shape
    order = sorted(range(1, 4), key=lambda dimension: cache.stride(dimension), reverse=True)
    physical = torch.zeros([_BLOCKS, *(cache.shape[dimension] for dimension in order)], dtype=cache.dtype).to(
        cache.device
    )
    back = [0, *(1 + order.index(dimension) for dimension in (1, 2, 3))]
    return physical.permute(back)


def _pattern(layout: PagedLayout, cache_dtype: Any, model_dtype: Any) -> Any:
    """Return random values [kind, token, head, dimension] that every cache dtype represents exactly."""
    tokens = (_BLOCKS - 1) * layout.block_tokens
    shape = (layout.kinds, tokens, layout.heads, layout.head_size)
    generator = torch.Generator().manual_seed(20)
    values = torch.randint(-8, 9, shape, generator=generator)
    dtype = model_dtype if cache_dtype.itemsize == 1 else cache_dtype
    return values.to(dtype).to(layout.device)
