"""Reads and writes pages of SGLang's host pool as chunks of records."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from host_control.layouts import element_type
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout, DType, Quantizer

_POOLS: Final = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}
"""Kinds of the pools whose pages are known. Others hold scales or other data beside the buffer."""
_ORDERS: Final = {
    # From a page of the buffer [kind, ...] to [layer, kind, token, bytes].
    "page_first_direct": (1, 0, 2, 3),  # [kind, page, layer, token, bytes]
    "page_first": (2, 0, 1, 3),  # [kind, token, layer, bytes]
    "layer_first": (1, 0, 2, 3),  # [kind, layer, token, bytes]
}


class HostPages:
    """The pages of a host pool.

    Raises:
        UncacheableError: The pool's pages are not known.
    """

    def __init__(self, pool: Any) -> None:
        import torch

        name = type(pool).__name__
        if name not in _POOLS or pool.layout not in _ORDERS:
            raise UncacheableError(
                f"the host pool {name} with --hicache-mem-layout {pool.layout} is not supported; supported are "
                f"{', '.join(_POOLS)} with {', '.join(_ORDERS)}"
            )
        if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
            raise UncacheableError("layers of a draft model in the host pool are not supported")
        dtype = element_type(pool.dtype)
        if dtype is None or pool.kv_buffer.dtype != pool.dtype:
            raise UncacheableError(f"a KV cache of {pool.dtype} is not supported")
        self.dtype, self.kinds = dtype, _POOLS[name]
        self.layers, self.page_tokens = int(pool.layer_num), int(pool.page_size)
        buffer = pool.kv_buffer.view(torch.uint8).flatten(-2)
        self._buffer = buffer.numpy() if self.kinds == 2 else buffer.numpy()[None]
        self._paged = pool.layout == "page_first_direct"
        self._tokens_axis = 2 if pool.layout == "layer_first" else 1
        self._order = _ORDERS[pool.layout]
        self._pages = self._buffer.shape[self._tokens_axis] // (1 if self._paged else self.page_tokens)

    @property
    def vector_length(self) -> int:
        """Elements of one token, layer and kind."""
        return int(self._buffer.shape[-1]) // self.dtype.itemsize

    def layout(self, pages: int) -> ChunkLayout:
        """Return the layout of a chunk of some pages."""
        return ChunkLayout(
            dtype=self.dtype,
            layers=self.layers,
            kinds=self.kinds,
            vector_length=self.vector_length,
            tokens=pages * self.page_tokens,
            quantizer=Quantizer.PASSTHROUGH if self.dtype is DType.UINT8 else Quantizer.LOSSLESS,
        )

    def numbers(self, indices: Any, count: int) -> list[int]:
        """Return the numbers of the pages that SGLang names by the indices of their tokens."""
        first = indices[:: self.page_tokens].tolist()
        numbers = [index // self.page_tokens for index in first]
        if len(indices) != count * self.page_tokens or any(index % self.page_tokens for index in first):
            raise ValueError(f"{len(indices)} indices are not those of {count} pages of {self.page_tokens} tokens")
        if numbers and not 0 <= min(numbers) <= max(numbers) < self._pages:
            raise ValueError(f"the host pool has {self._pages} pages, and page {max(numbers)} is asked for")
        return numbers

    def _page(self, number: int) -> Any:
        """Return one page as [layer, kind, token, bytes]."""
        if self._paged:
            return self._buffer[:, number].transpose(self._order)
        tokens = slice(number * self.page_tokens, (number + 1) * self.page_tokens)
        page = self._buffer[:, tokens] if self._tokens_axis == 1 else self._buffer[:, :, tokens]
        return page.transpose(self._order)

    def _chunk(self, chunk: Any, pages: int) -> Any:
        """Return a chunk's memory as [page, layer, kind, token, bytes]."""
        shape = (self.layers, self.kinds, pages, self.page_tokens, self._buffer.shape[-1])
        return np.frombuffer(chunk, np.uint8).reshape(shape).transpose(2, 0, 1, 3, 4)

    def gather(self, chunk: Any, numbers: Sequence[int]) -> None:
        """Copy pages into a chunk that has just these."""
        target = self._chunk(chunk, len(numbers))
        for index, number in enumerate(numbers):
            target[index] = self._page(number)

    def scatter(self, chunk: Any, pages: int, first: int, numbers: Sequence[int]) -> None:
        """Copy the pages from ``first`` on out of a chunk of ``pages``."""
        source = self._chunk(chunk, pages)
        for index, number in enumerate(numbers, first):
            self._page(number)[...] = source[index]
