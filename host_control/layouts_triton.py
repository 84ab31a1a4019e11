"""Scatter and gather on a GPU with Triton: one kernel launch for all layers and chunks of a batch.

One program moves ``TOKENS`` tokens of one view (a layer's K, V or latent). A token is a contiguous vector in the chunk,
and ``heads`` runs of ``head_size`` elements in paged memory. The kernel moves units of up to eight bytes, as wide as
sizes, strides and addresses allow.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

_UNITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROGRAM_UNITS: Final = 2048
"""Units that a program moves, at least one token's: enough loads at a time to keep memory busy."""


# Triton's compiler reads annotations and knows none of Python's types.
@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    chunks,
    pages,
    offsets,
    blocks,
    count,
    chunk_tokens,
    heads,
    stride_chunk,
    stride_block,
    stride_token,
    stride_head,
    stride_unit,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    part = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.load(blocks + token // BLOCK_TOKENS, mask=token < count, other=-1)
    first = tl.load(offsets + part) // UNIT + block * stride_block + (token % BLOCK_TOKENS) * stride_token
    unit = tl.arange(0, WIDTH)
    there = pages + first[:, None] + ((unit // SIZE) * stride_head + (unit % SIZE) * stride_unit)[None, :]
    chunk = (token // chunk_tokens).to(tl.int64)
    vector = (part * chunk_tokens + token % chunk_tokens).to(tl.int64)
    here = chunks + (chunk * stride_chunk + vector * heads * SIZE)[:, None] + unit[None, :]
    moved = (block >= 0)[:, None] & (unit < heads * SIZE)[None, :]
    if TO_PAGES:
        tl.store(there, tl.load(here, mask=moved), mask=moved)
    else:
        tl.store(here, tl.load(there, mask=moved), mask=moved)


class Kernels:
    """Moves data between chunks and views [block, token, head, dimension] of paged memory, one per layer and kind.

    Raises:
        ValueError: The views' strides differ.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        first = views[0]
        if any(view.stride() != first.stride() for view in views):
            raise ValueError("layers and kinds have different strides, which the kernels do not support")
        self._first = first
        # In bytes from the first view. The views may be in one allocation or in several.
        offsets = [view.data_ptr() - first.data_ptr() for view in views]
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device=first.device)
        *strides, last = (stride * first.itemsize for stride in first.stride())
        size = first.shape[-1] * first.itemsize
        contiguous = last == first.itemsize
        self._unit = math.gcd(8, size, first.data_ptr(), *offsets, *strides) if contiguous else first.itemsize

    def move(self, chunks: Any, blocks: Any, first_part: int = 0, *, to_pages: bool) -> None:
        """Copy chunks into paged memory, or paged memory into chunks, on the current stream.

        Args:
            chunks: [chunk, view, token, head, dimension], each chunk contiguous, in GPU memory.
            blocks: Block of each ``block_tokens`` tokens of all chunks, int64, in GPU memory; -1 for tokens that are
                not moved.
            first_part: Index of the first view.
        """
        unit = math.gcd(self._unit, chunks.data_ptr(), chunks.stride(0) * chunks.itemsize)
        held, pages = chunks.view(_UNITS[unit]), self._first.view(_UNITS[unit])
        count, parts, tokens, heads, size = held.shape
        width = triton.next_power_of_2(heads * size)
        each = max(1, _PROGRAM_UNITS // width)
        _move[(triton.cdiv(count * tokens, each), parts)](
            held,
            pages,
            self._offsets[first_part:],
            blocks,
            count * tokens,
            tokens,
            heads,
            held.stride(0),
            *pages.stride(),
            UNIT=unit,
            SIZE=size,
            BLOCK_TOKENS=pages.shape[1],
            TOKENS=each,
            WIDTH=width,
            TO_PAGES=to_pages,
        )
