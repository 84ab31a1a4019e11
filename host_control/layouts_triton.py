"""Scatter and gather on a GPU with Triton: one kernel launch for all layers and chunks of a batch.

As in vLLM's ``reshape_and_cache``, a token's position in paged memory is its *slot*: block number times tokens per
block plus token in the block; -1 for a token that is not moved. One program moves one token of one view (a layer's K, V
or latent): a contiguous vector of the chunk, and ``heads`` runs of ``head_size`` elements in paged memory.
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
    """Moves data between chunks and views [block, token, head, dimension] of paged memory, one per layer and kind.

    Raises:
        ValueError: The views' strides differ.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        first = views[0]
        if any(view.stride() != first.stride() for view in views):
            raise ValueError("layers and kinds have different strides, which the kernels do not support")
        itemsize = first.dtype.itemsize
        # Relative to the first view. The views may be in one allocation or in several.
        offsets = [(view.data_ptr() - first.data_ptr()) // itemsize for view in views]
        self._integer = _INTEGERS[itemsize]
        self._pages = first.view(self._integer)
        self._offsets = torch.tensor(offsets, dtype=torch.int64, device=first.device)

    def scatter(self, chunks: Any, slots: Any, first_part: int = 0) -> None:
        """Copy chunks into paged memory, on the current stream.

        Args:
            chunks: [chunk, view, token, head, dimension], each chunk contiguous, in GPU memory.
            slots: Slot of each token of all chunks, int64, in GPU memory.
            first_part: Index of the first view to fill.
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
