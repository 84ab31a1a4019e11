"""Reads and writes pages of SGLang's host pool as chunks of records."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from host_control.layouts import element_type
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout, DType, Quantizer

_POOLS: Final = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}
"""Kinds of the pools whose pages are known. Others hold scales or other data beside the buffer."""
_ORDERS: Final = {
    # From pages of the buffer to [page, layer, kind, token, bytes].
    "page_first_direct": (1, 2, 0, 3, 4),  # [kind, page, layer, token, bytes]
    "page_first": (1, 3, 0, 2, 4),  # [kind, page, token, layer, bytes]
    "layer_first": (2, 1, 0, 3, 4),  # [kind, layer, page, token, bytes]
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
        self._axis = 2 if pool.layout == "layer_first" else 1  # of pages
        if pool.layout != "page_first_direct":  # one axis has the tokens of all pages
            shape, axis = list(self._buffer.shape), self._axis
            shape[axis : axis + 1] = [shape[axis] // self.page_tokens, self.page_tokens]
            whole = self._buffer[(slice(None),) * axis + (slice(shape[axis] * self.page_tokens),)]
            self._buffer = whole.reshape(shape)
            assert np.may_share_memory(self._buffer, whole)
        self._order = _ORDERS[pool.layout]
        self._pages = self._buffer.shape[self._axis]

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

    def _run(self, number: int, count: int) -> Any:
        """Return consecutive pages as [page, layer, kind, token, bytes]."""
        return self._buffer[(slice(None),) * self._axis + (slice(number, number + count),)].transpose(self._order)

    def _chunk(self, chunk: Any, pages: int) -> Any:
        """Return a chunk's memory as [page, layer, kind, token, bytes]."""
        shape = (self.layers, self.kinds, pages, self.page_tokens, self._buffer.shape[-1])
        return np.frombuffer(chunk, np.uint8).reshape(shape).transpose(2, 0, 1, 3, 4)

    def gather(self, chunk: Any, numbers: Sequence[int]) -> None:
        """Copy pages into a chunk that has just these."""
        target = self._chunk(chunk, len(numbers))
        for index, number, count in _runs(numbers):
            target[index : index + count] = self._run(number, count)

    def scatter(self, chunk: Any, pages: int, first: int, numbers: Sequence[int]) -> None:
        """Copy the pages from ``first`` on out of a chunk of ``pages``."""
        source = self._chunk(chunk, pages)[first:]
        for index, number, count in _runs(numbers):
            self._run(number, count)[...] = source[index : index + count]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield consecutive pages: index of the first one, its number, and how many there are.

    Each copy takes Python's lock again, for which SGLang's scheduler competes while it waits.
    """
    begin = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield begin, numbers[begin], index - begin
            begin = index
