"""Moving chunks between the chunk layout and an engine's paged KV memory.

A chunk lies as layer, kind, token, head, dimension (docs/record-format.md). A :class:`PagedLayout` sees each layer's
paged memory as one strided view for each kind, with the logical dimensions [block, token, head, dimension], whatever
the physical order; moving a chunk is then one indexed copy for each view. vLLM's layouts:

- ``kv_cells``: CUDA attention backends; logical [block, head, token, K|V] with any strides ("HND", "NHD", and the
  block-outermost ones): K is the first half of each cell, V the second.
- ``cpu_pages``: the CPU backend; each head's page holds K transposed as [dimension, token], then V as
  [token, dimension].
- ``amx_pages``: the same on CPUs with AMX, where that computes (bfloat16, also over fp8). K as [token / 16,
  dimension / 2, 16 tokens, 2 dimensions], then V as [dimension / 16, token / 2, 16 dimensions, 2 tokens]: tiles. Which
  of the two it is, or whether it is another, callers check with :meth:`PagedLayout.gather` of what the engine wrote.
- ``latent``: MLA; logical [block, 1, token, latent].
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch

__all__ = ["LayoutKind", "PagedLayout", "dtype_name"]

LayoutKind = Literal["kv_cells", "cpu_pages", "amx_pages", "latent"]
_DTYPE_NAMES: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.uint8: "uint8",
    torch.float8_e4m3fn: "uint8",
    torch.float8_e5m2: "uint8",
}
_WORD_BYTES: Final = 8
_TILE: Final = 16
"""Tokens, or dimensions of V, side by side in an AMX tile; pairs of the other are what it multiplies at once."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def dtype_name(dtype: Any) -> str | None:
    """Return the wire's name of a torch dtype (fp8 caches move as bytes), ``None`` for one that cannot be moved."""
    return _DTYPE_NAMES.get(dtype)


class PagedLayout:
    """The paged KV memory of one rank.

    Args:
        caches: one tensor for each layer, in layer order, logical [block, head, token, content].
        kind: physical layout.
        mover: what copies; by default numpy on CPUs, torch on devices.

    Raises:
        ValueError: tensors that do not fit the layout or each other; the message says which and why.

    Attributes:
        layers, kinds, heads, head_size, block_tokens, blocks: counts.
        dtype: of the elements; fp8 appears as ``torch.uint8``.
    """

    def __init__(self, caches: Sequence[Any], kind: LayoutKind, mover: Literal["numpy", "torch"] | None = None) -> None:
        if not caches:
            raise ValueError("there is no KV cache")
        first = caches[0]
        for index, cache in enumerate(caches):
            if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
                raise ValueError(f"layer {index} has another shape, dtype or device than layer 0")
        if first.dim() != 4 or dtype_name(first.dtype) is None:
            raise ValueError(f"a KV cache of shape {tuple(first.shape)} and dtype {first.dtype} is not known")
        self.device = first.device
        self.kinds = 1 if kind == "latent" else 2
        self.layers = len(caches)
        self.blocks, self.heads, self.block_tokens, content = first.shape
        if content % self.kinds:
            raise ValueError(f"a cell of {content} elements does not hold a K and a V of equal size")
        self.head_size = content // self.kinds
        if kind == "latent" and self.heads != 1:
            raise ValueError(f"a latent has one head, this cache {self.heads}")
        views = [view for cache in caches for view in _views(_moved_as(cache), kind, self.head_size)]
        self.dtype = views[0].dtype
        self._mover = _MOVERS[mover or ("numpy" if self.device.type == "cpu" else "torch")](views)

    @property
    def vector_length(self) -> int:
        """Elements of one token, layer and kind."""
        return int(self.heads * self.head_size)

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of ``tokens`` tokens."""
        return int(self.layers * self.kinds * tokens * self.vector_length * self.dtype.itemsize)

    def scatter(self, chunk: Any, blocks: Sequence[int], skip_blocks: int = 0) -> None:
        """Copy a chunk into paged memory.

        Args:
            chunk: the chunk's bytes, a buffer or a tensor in CPU memory; ``len(blocks)`` blocks long.
            blocks: block numbers, one for each ``block_tokens`` tokens of the chunk.
            skip_blocks: leading blocks that stay as they are.
        """
        if skip_blocks < len(blocks):
            self._mover.scatter(self._chunk_view(chunk, len(blocks))[:, skip_blocks:], list(blocks[skip_blocks:]))

    def gather(self, chunk: Any, blocks: Sequence[int]) -> None:
        """Copy paged memory into a chunk: the inverse of :meth:`scatter`, with the same arguments."""
        self._mover.gather(self._chunk_view(chunk, len(blocks)), list(blocks))

    def _chunk_view(self, chunk: Any, blocks: int) -> Any:
        """Return [layer x kind, block, token, head, dimension] over a chunk's bytes."""
        tensor = chunk if isinstance(chunk, torch.Tensor) else torch.frombuffer(chunk, dtype=torch.uint8)
        shape = (self.layers * self.kinds, blocks, self.block_tokens, self.heads, self.head_size)
        return tensor.view(self.dtype).view(shape)


class _NumpyMover:
    """Copies on a CPU, in the calling thread.

    torch would spread each copy over the threads that it also computes with: two threads of ours and the engine's on
    the same cores, waiting for each other at barriers. One numpy copy is as fast, and leaves the interpreter free.

    Where tokens lie side by side in a page (K), each block has to be transposed, an element at a time. So neighbouring
    tokens are first joined to words of 8 bytes, in the cache and with vector instructions: then there are four times
    fewer elements to transpose, which more than halves the time, on the engine's core.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = [_as_numpy(view) for view in views]
        self._words = [_words(view) for view in self._views]

    def scatter(self, source: Any, blocks: list[int]) -> None:
        for part, view, words in zip(_as_numpy(source), self._views, self._words, strict=True):
            for block, number in zip(part, blocks, strict=True):
                if words is None:
                    view[number] = block.reshape(view.shape[1:])
                else:
                    words[number] = _joined(block)

    def gather(self, target: Any, blocks: list[int]) -> None:
        for part, view in zip(_as_numpy(target), self._views, strict=True):
            for block, number in zip(part, blocks, strict=True):
                block.reshape(view.shape[1:])[...] = view[number]


class _TorchMover:
    """Copies on a device, on the current stream: with our Triton kernels where they can run, else by indexing."""

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = list(views)
        self._device = views[0].device
        self._kernels = _kernels() if self._device.type == "cuda" else None

    def scatter(self, source: Any, blocks: list[int]) -> None:
        source = source.to(self._device, non_blocking=True)
        if self._kernels is not None:
            self._kernels.scatter(source, self._views, blocks)
            return
        index = torch.tensor(blocks, dtype=torch.long, device=self._device)
        for part, view in zip(source, self._views, strict=True):
            view[index] = part.reshape(-1, *view.shape[1:])

    def gather(self, target: Any, blocks: list[int]) -> None:
        staged = target if target.device == self._device else torch.empty_like(target, device=self._device)
        if self._kernels is not None:
            self._kernels.gather(staged, self._views, blocks)
        else:
            index = torch.tensor(blocks, dtype=torch.long, device=self._device)
            for part, view in zip(staged, self._views, strict=True):
                part.copy_(view[index].reshape(part.shape))
        if staged is not target:
            target.copy_(staged)


_MOVERS: Final[dict[str, Callable[[Sequence[Any]], Any]]] = {"numpy": _NumpyMover, "torch": _TorchMover}


def _words(view: Any) -> Any:
    """Return a view of pages as words of neighbouring tokens, [block, word, head, dimension]; ``None``: cannot be."""
    count = _WORD_BYTES // view.itemsize
    if sys.byteorder != "little" or view.strides[1] != view.itemsize or view.shape[1] % count:
        return None
    return np.moveaxis(np.moveaxis(view, 1, 3).view(np.uint64), 3, 1)


def _joined(block: Any) -> Any:
    """Return [token, head, dimension] with neighbouring tokens joined to words, the first one lowest."""
    while block.itemsize < _WORD_BYTES:
        bits = 8 * block.itemsize
        block = block.view(f"u{block.itemsize}")
        joined = block[1::2].astype(f"u{2 * block.itemsize}")
        joined <<= bits
        joined |= block[0::2]
        block = joined
    return block


def _as_numpy(tensor: Any) -> Any:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy()


def _moved_as(cache: Any) -> Any:
    return cache.view(torch.uint8) if dtype_name(cache.dtype) == "uint8" else cache


def _views(cache: Any, kind: LayoutKind, head_size: int) -> list[Any]:
    """Return one view for each kind of a layer, [block, token, head, dimension], where need be with parts of these."""
    if kind == "latent":
        return [cache.permute(0, 2, 1, 3)]
    if kind == "kv_cells":
        cells = cache.permute(0, 2, 1, 3)
        return [cells[..., :head_size], cells[..., head_size:]]
    blocks, heads, tokens, content = cache.shape
    if cache.stride()[1:] != (tokens * content, content, 1):
        raise ValueError(f"a CPU cache with strides {cache.stride()} does not hold each head's page in one piece")
    half = tokens * head_size
    block_stride = cache.stride(0)
    head_stride = tokens * content
    start = cache.storage_offset()
    if kind == "amx_pages":
        return _amx_views(cache, head_size)
    size = (blocks, tokens, heads, head_size)
    key = cache.as_strided(size, (block_stride, 1, head_stride, tokens), start)
    value = cache.as_strided(size, (block_stride, head_size, head_stride, 1), start + half)
    return [key, value]


def _amx_views(cache: Any, head_size: int) -> list[Any]:
    """Return views [block, token / n, n, head, dimension / m, m]: n and m are 16 and 2 for K, 2 and 16 for V."""
    blocks, heads, tokens, content = cache.shape
    if tokens % _TILE or head_size % _TILE:
        raise ValueError(f"pages of {tokens} tokens of {head_size} elements are not made of tiles")
    pair = 2 * _TILE
    outer, head, start = cache.stride(0), tokens * content, cache.storage_offset()
    key = cache.as_strided(
        (blocks, tokens // _TILE, _TILE, heads, head_size // 2, 2),
        (outer, _TILE * head_size, 2, head, pair, 1),
        start,
    )
    value = cache.as_strided(
        (blocks, tokens // 2, 2, heads, head_size // _TILE, _TILE),
        (outer, pair, 1, head, _TILE * tokens, 2),
        start + tokens * head_size,
    )
    return [key, value]


def _kernels() -> Any:
    """Return the Triton kernels where they can run, else ``None``: indexed copies do the same, slower."""
    try:
        import host_control.layouts_triton as kernels
    except ImportError:
        return None
    return kernels
