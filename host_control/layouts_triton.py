"""Scatter and gather on a GPU: one kernel launch for all layers of a chunk, instead of one indexed copy for each.

Imported only where CUDA and Triton are; :mod:`host_control.layouts` does the same with torch elsewhere. One program
moves one token of one layer and kind: a contiguous vector of the chunk, and ``heads`` runs of ``head_size`` in paged
memory, whose strides make the layout.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

__all__ = ["gather", "scatter"]

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    chunk: Any,
    pages: Any,
    offsets: Any,
    blocks: Any,
    tokens: Any,
    heads: Any,
    stride_block: Any,
    stride_token: Any,
    stride_head: Any,
    stride_dimension: Any,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_PAGES: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    part = tl.program_id(1)
    block = tl.load(blocks + token // BLOCK_TOKENS)
    base = tl.load(offsets + part) + block * stride_block + (token % BLOCK_TOKENS) * stride_token
    element = tl.arange(0, WIDTH)
    inside = element < heads * SIZE
    head = element // SIZE
    there = pages + base + head * stride_head + (element % SIZE) * stride_dimension
    here = chunk + (part.to(tl.int64) * tokens + token) * heads * SIZE + element
    if TO_PAGES:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside), mask=inside)


def scatter(source: Any, views: Sequence[Any], blocks: Sequence[int]) -> None:
    """Copy ``source`` [part, block, token, head, dimension] into the blocks of each part's view."""
    _launch(source.contiguous(), views, blocks, to_pages=True)


def gather(target: Any, views: Sequence[Any], blocks: Sequence[int]) -> None:
    """Copy the blocks of each part's view into ``target``, which is contiguous."""
    _launch(target, views, blocks, to_pages=False)


def _launch(chunk: Any, views: Sequence[Any], blocks: Sequence[int], *, to_pages: bool) -> None:
    first = views[0]
    parts, count, block_tokens, heads, size = chunk.shape
    integer = _INTEGERS[first.dtype.itemsize]
    # Addresses relative to the first view: the views may lie in one allocation or in several.
    offsets = [(view.data_ptr() - first.data_ptr()) // first.dtype.itemsize for view in views]
    device = chunk.device
    _move[(count * block_tokens, parts)](
        chunk.view(integer),
        first.view(integer),
        torch.tensor(offsets, dtype=torch.int64, device=device),
        torch.tensor(list(blocks), dtype=torch.int64, device=device),
        count * block_tokens,
        heads,
        *first.stride(),
        SIZE=size,
        BLOCK_TOKENS=block_tokens,
        WIDTH=triton.next_power_of_2(heads * size),
        TO_PAGES=to_pages,
    )
