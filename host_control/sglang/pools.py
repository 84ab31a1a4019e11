"""Reads and writes pages of SGLang's host pool as chunks of records.

The C core copies, without Python's lock: while SGLang waits for pages, its scheduler takes that lock again and again.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from host_control.layouts import element_type
from host_control.vllm.support import UncacheableError
from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer

_POOLS: Final = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}
"""Kinds of the pools whose pages are known. Others hold scales or other data beside the buffer."""
_ORDERS: Final = {
    # From pages of the buffer to [page, layer, kind, token, bytes].
    "page_first_direct": (1, 2, 0, 3, 4),  # [kind, page, layer, token, bytes]
    "page_first": (1, 3, 0, 2, 4),  # [kind, page, token, layer, bytes]
    "layer_first": (2, 1, 0, 3, 4),  # [kind, layer, page, token, bytes]
}
_SPLIT_BYTES: Final = 2 << 20
"""Fewer bytes are copied by one thread alone. A core copies more slowly than memory can, and SGLang's scheduler, which
polls while it waits for pages, takes half of a thread's time where it has the same core."""


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
        self._copies = ThreadPoolExecutor(1, "shadowserve-copy")

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

    def close(self) -> None:
        """End the thread that copies beside the caller's."""
        self._copies.shutdown()

    def gather(self, chunk: Any, numbers: Sequence[int]) -> None:
        """Copy pages into a chunk that has just these."""
        addresses, held = self._addresses(chunk, len(numbers), 0, numbers)
        self._copy(len(numbers), scatters=False)(held, addresses)

    def scatter(self, chunk: Any, pages: int, first: int, numbers: Sequence[int]) -> None:
        """Copy the pages from ``first`` on out of a chunk of ``pages``."""
        addresses, held = self._addresses(chunk, pages, first, numbers)
        copy = self._copy(pages, scatters=True)
        half = len(numbers) // 2 if len(chunk) * len(numbers) >= pages * _SPLIT_BYTES else 0
        other = self._copies.submit(copy, addresses[:half], held[:half]) if half else None
        try:
            copy(addresses[half:], held[half:])
        finally:  # nothing may write to the pages after this call
            if other is not None:
                other.result()

    def _addresses(self, chunk: Any, pages: int, first: int, numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return the addresses of pages in the pool, and in a chunk of ``pages`` from its page ``first`` on."""
        held = np.frombuffer(chunk, np.uint8)
        page_bytes = self.page_tokens * self._buffer.shape[-1]
        assert first + len(numbers) <= pages and held.nbytes == self.layers * self.kinds * pages * page_bytes
        assert 0 <= min(numbers) and max(numbers) < self._pages
        there = np.array(numbers, np.uint64) * np.uint64(self._buffer.strides[self._axis])
        here = np.arange(first, first + len(numbers), dtype=np.uint64) * np.uint64(page_bytes)
        return there + np.uint64(self._buffer.ctypes.data), here + np.uint64(held.ctypes.data)

    def _copy(self, pages: int, *, scatters: bool) -> native.StridedCopy:
        """Return a function that copies pages out of a chunk of ``pages``, or into it."""
        row, item = self._buffer.shape[-1], self.dtype.itemsize
        layer, kind, token = (self._buffer.strides[axis] for axis in self._order[1:4])
        chunk = [self.kinds * pages * self.page_tokens * row, pages * self.page_tokens * row, row, item]
        sizes, pool = [self.layers, self.kinds, self.page_tokens, row // item], [layer, kind, token, item]
        if token == row:  # one run
            sizes[2:], chunk[2:], pool[2:] = [self.page_tokens * sizes[3]], [item], [item]
        return native.StridedCopy(sizes, *((pool, chunk) if scatters else (chunk, pool)), item)
