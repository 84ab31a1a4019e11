"""Scatter and gather on a GPU: one kernel launch for all layers and all chunks of a batch.

Imported only where Triton is; :mod:`host_control.layouts` does the same with torch elsewhere. As vLLM's
``reshape_and_cache`` does, the kernel finds each token's place by a *slot*: block number x tokens in a block + token in
the block, -1 for a token that stays as it is. One program moves one token of one part (a layer's K, its V, or its
latent): a contiguous vector of the chunk, and ``heads`` runs of ``head_size`` in paged memory, whose strides make the
layout: heads before tokens or after them, layers inside blocks or outside, K beside V.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    chunks: Any,
    pages: Any,
    offsets: Any,
    slots: Any,
    first_part: Any,
    stride_chunk: Any,
    chunk_tokens: Any,
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
    slot = tl.load(slots + token)
    if slot >= 0:
        block = slot // BLOCK_TOKENS
        base = tl.load(offsets + first_part + part) + block * stride_block + (slot % BLOCK_TOKENS) * stride_token
        element = tl.arange(0, WIDTH)
        inside = element < heads * SIZE
        head = element // SIZE
        there = pages + base + head * stride_head + (element % SIZE) * stride_dimension
        chunk = (token // chunk_tokens).to(tl.int64)
        vector = part * chunk_tokens + token % chunk_tokens
        here = chunks + chunk * stride_chunk + vector * heads * SIZE + element
        if TO_PAGES:
            tl.store(there, tl.load(here, mask=inside), mask=inside)
        else:
            tl.store(here, tl.load(there, mask=inside), mask=inside)


class Kernels:
    """Moves between chunks and the paged memory that ``views`` show.

    Args:
        views: one for each part, [block, token, head, dimension]; all with the same strides.

    Raises:
        ValueError: strides that differ.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        first = views[0]
        if any(view.stride() != first.stride() for view in views):
            raise ValueError("layers and kinds with different strides; the kernels take one set of them")
        itemsize = first.dtype.itemsize
        # Relative to the first view: the views may lie in one allocation or in several.
        offsets = [(view.data_ptr() - first.data_ptr()) // itemsize for view in views]
        self._integer = _INTEGERS[itemsize]
        self._pages = first.view(self._integer)
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device=first.device)

    def scatter(self, chunks: Any, slots: Any, first_part: int = 0) -> None:
        """Copy parts of chunks into paged memory, on the current stream.

        Args:
            chunks: [chunk, part, token, head, dimension], each chunk contiguous, on the device.
            slots: one for each token of all chunks, int64, on the device.
            first_part: the number of the chunks' first part.
        """
        self._launch(chunks, slots, first_part, to_pages=True)

    def gather(self, chunks: Any, slots: Any) -> None:
        """Copy paged memory into chunks: the inverse of :meth:`scatter`, with the same arguments."""
        self._launch(chunks, slots, 0, to_pages=False)

    def _launch(self, chunks: Any, slots: Any, first_part: int, *, to_pages: bool) -> None:
        count, parts, tokens, heads, size = chunks.shape
        _move[(count * tokens, parts)](
            chunks.view(self._integer),
            self._pages,
            self._offsets,
            slots,
            first_part,
            chunks.stride(0),
            tokens,
            heads,
            *self._pages.stride(),
            SIZE=size,
            BLOCK_TOKENS=self._pages.shape[1],
            WIDTH=triton.next_power_of_2(heads * size),
            TO_PAGES=to_pages,
        )
