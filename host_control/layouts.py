"""Moving chunks between the chunk layout and an engine's paged KV memory.

A chunk lies as layer, kind, token, head, dimension (docs/record-format.md). A :class:`PagedLayout` sees each layer's
paged memory as one strided view for each kind, with the logical dimensions [block, token, head, dimension], whatever
the physical order (tiles take two more, [block, token, token, head, dimension, dimension]); moving chunks is then one
indexed copy for each view, or one kernel for all. Which layout an engine has, its own writes say
(:mod:`host_control.vllm.probe`).
vLLM's layouts:

- ``kv_cells``: CUDA attention backends; logical [block, head, token, K|V] with any strides ("HND", "NHD", and the
  block-outermost ones): K is the first half of each cell, V the second.
- ``cpu_pages``: the CPU backend; each head's page holds K transposed as [dimension, token], then V as
  [token, dimension].
- ``cpu_tiles``: the CPU backend with AMX, which multiplies pairs in tiles 16 wide; each head's page holds K as
  [token / 16, dimension / 2, token % 16, dimension % 2], then V as [dimension / 16, token / 2, dimension % 16,
  token % 2].
- ``latent``: MLA; logical [block, 1, token, latent].
"""

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch

from shadowserve.chunk import DType

__all__ = ["LayoutKind", "MoverKind", "PagedLayout", "element_type"]

LayoutKind = Literal["kv_cells", "cpu_pages", "cpu_tiles", "latent"]
MoverKind = Literal["native", "torch", "triton"]
_MOVED_AS_BYTES: Final = {torch.float8_e4m3fn, torch.float8_e5m2}
_TILE: Final = 16
_PAIR: Final = 2


def element_type(dtype: Any) -> DType | None:
    """Return what elements of a torch dtype move as (fp8 as bytes), ``None`` for one that cannot be moved."""
    try:
        return DType.UINT8 if dtype in _MOVED_AS_BYTES else DType.from_label(str(dtype).removeprefix("torch."))
    except ValueError:
        return None


class PagedLayout:
    """The paged KV memory of one rank.

    Args:
        caches: one tensor for each layer, in layer order, logical [block, head, token, content].
        kind: physical layout.
        mover: what copies; by default ``native`` on CPUs, on devices ``triton`` where it is installed, else ``torch``.
        reshaping_bytes: of the device's memory that copies may take to reorder chunks in; one chunk is always taken.
            Kernels need it for nothing but chunks on their way to memory of the host.

    Raises:
        ValueError: tensors that do not fit the layout or each other; the message says which and why.

    Attributes:
        layers, kinds, heads, head_size, block_tokens, blocks: counts.
        dtype: of the elements; fp8 appears as ``torch.uint8``.
    """

    def __init__(
        self, caches: Sequence[Any], kind: LayoutKind, mover: MoverKind | None = None, reshaping_bytes: int = 0
    ) -> None:
        if not caches:
            raise ValueError("there is no KV cache")
        first = caches[0]
        for index, cache in enumerate(caches):
            if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
                raise ValueError(f"layer {index} has another shape, dtype or device than layer 0")
        if first.dim() != 4 or element_type(first.dtype) is None:
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
        self._mover = _mover(mover, views, reshaping_bytes)

    @property
    def vector_length(self) -> int:
        """Elements of one token, layer and kind."""
        return int(self.heads * self.head_size)

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of ``tokens`` tokens."""
        return int(self.layers * self.kinds * tokens * self.vector_length * self.dtype.itemsize)

    def scatter(
        self, chunks: Any, blocks: Sequence[int], skip_blocks: int = 0, chunk_blocks: int | None = None
    ) -> None:
        """Copy the chunks of a round into paged memory.

        On a device: on the current stream, in one launch with Triton.

        Args:
            chunks: their bytes, one after the other: a buffer, or a tensor in the CPU's or the device's memory.
            blocks: block numbers, one for each ``block_tokens`` tokens of all chunks.
            skip_blocks: leading blocks that stay as they are.
            chunk_blocks: blocks that one chunk fills; by default all of them.
        """
        if skip_blocks < len(blocks):
            self._mover.scatter(self._chunk_view(chunks, len(blocks), chunk_blocks), list(blocks), skip_blocks)

    def gather(self, chunk: Any, blocks: Sequence[int]) -> None:
        """Copy paged memory into one chunk.

        On a device: on the current stream, to memory of the host without waiting for the copy's end.

        Args:
            chunk: its bytes, to be written: a buffer, or a tensor in the CPU's or the device's memory.
            blocks: block numbers.
        """
        self._mover.gather(self._chunk_view(chunk, len(blocks), None), list(blocks))

    def _chunk_view(self, chunks: Any, blocks: int, chunk_blocks: int | None) -> Any:
        """Return [chunk, layer x kind, block, token, head, dimension] over chunks' bytes."""
        tensor = chunks if isinstance(chunks, torch.Tensor) else torch.frombuffer(chunks, dtype=torch.uint8)
        each = chunk_blocks or blocks
        parts = self.layers * self.kinds
        shape = (blocks // each, parts, each, self.block_tokens, self.heads, self.head_size)
        return tensor.view(self.dtype).view(shape)


class _NativeMover:
    """Copies on a CPU, in the calling thread, all blocks in one call of the C core.

    torch would spread each copy over the threads that it also computes with: two threads of ours and the engine's on
    the same cores, waiting for each other at barriers.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        from shadowserve import native  # an engine loads the C core only where it has to

        self._views = views  # hold the memory
        self._blocks = int(views[0].shape[0])
        self._block_bytes = views[0][0].nbytes
        orders: dict[tuple[Any, Any], list[int]] = {}
        for part, view in enumerate(views):
            orders.setdefault((view.shape[1:], view.stride()), []).append(part)
        self._plans = []
        for (sizes, elements), parts in orders.items():
            item = views[0].itemsize
            page_bytes, *strides = (each * item for each in elements)
            packed = [math.prod(sizes[axis + 1 :]) * item for axis in range(len(sizes))]
            scatter = native.StridedCopy(sizes, strides, packed, item)
            gather = native.StridedCopy(sizes, packed, strides, item)
            pages = np.array([views[part].data_ptr() for part in parts], np.uint64)
            self._plans.append((np.array(parts, np.uint64), pages, np.uint64(page_bytes), scatter, gather))

    def scatter(self, chunks: Any, blocks: list[int], skip_blocks: int) -> None:
        for pages, held, scatter, _ in self._addresses(chunks, blocks, skip_blocks):
            scatter(pages, held)

    def gather(self, chunks: Any, blocks: list[int]) -> None:
        for pages, held, _, gather in self._addresses(chunks, blocks, 0):
            gather(held, pages)

    def _addresses(self, chunks: Any, blocks: list[int], skip: int) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield, for each order of dimensions, where blocks are in pages and in chunks, and what copies them."""
        if not 0 <= min(blocks) <= max(blocks) < self._blocks:
            raise IndexError(f"of blocks {blocks} some are not among the {self._blocks} that there are")
        numbers = np.array(blocks[skip:], np.uint64)
        chunk, place = np.divmod(np.arange(skip, len(blocks), dtype=np.uint64), np.uint64(chunks.shape[2]))
        for parts, pages, page_bytes, scatter, gather in self._plans:
            index = (chunk * np.uint64(len(self._views)) + parts[:, None]) * np.uint64(chunks.shape[2]) + place
            held = np.uint64(chunks.data_ptr()) + index * np.uint64(self._block_bytes)
            yield (pages[:, None] + numbers * page_bytes).reshape(-1), held.reshape(-1), scatter, gather


class _DeviceMover(abc.ABC):
    """Copies on a device, on the current stream.

    Its *reshaping buffer* is memory of the device, taken when first needed: chunks that come from the host or go there
    pass through it, and :class:`_TorchMover` reorders in it. A chunk that is gathered has a part of its own, for the
    engine's thread does that, on the engine's stream; the rest is the scattering thread's.
    """

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        self._views = list(views)
        self._device = views[0].device
        self._block_tokens = views[0].shape[1]
        self._reshaping_bytes = reshaping_bytes
        self._gathered: Any = None
        self._scattered: Any = None

    def scatter(self, chunks: Any, blocks: list[int], skip_blocks: int) -> None:
        group = self._group(chunks)
        each = chunks.shape[2]
        for first in range(0, len(chunks), group):
            part = chunks[first : first + group]
            if part.device != self._device:
                self._scattered, room = _room(self._scattered, part, self._device)
                part = room.copy_(part, non_blocking=True)
            begin, end = first * each, (first + len(part)) * each
            self._to_pages(part, blocks[begin:end], min(max(skip_blocks - begin, 0), end - begin))

    def gather(self, chunks: Any, blocks: list[int]) -> None:
        target = chunks
        if chunks.device != self._device:
            self._gathered, target = _room(self._gathered, chunks, self._device)
        self._from_pages(target, blocks)
        if target is not chunks:
            chunks.copy_(target, non_blocking=True)

    def _group(self, chunks: Any) -> int:
        """Return how many chunks the buffer's part for scattering holds."""
        size = int(chunks[0].nbytes)
        return max(1, (self._reshaping_bytes - size) // size)

    @abc.abstractmethod
    def _to_pages(self, chunks: Any, blocks: list[int], skip_blocks: int) -> None:
        """Copy chunks in the device's memory into pages."""

    @abc.abstractmethod
    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        """Copy pages into chunks in the device's memory."""


class _TorchMover(_DeviceMover):
    """Copies by indexing: one launch for each layer and kind, after one that brings all chunks' blocks together."""

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        super().__init__(views, reshaping_bytes)
        self._reshaped: Any = None

    def _group(self, chunks: Any) -> int:
        # What came from the host is there twice.
        return max(1, super()._group(chunks) // (1 if chunks.device == self._device else 2))

    def _to_pages(self, chunks: Any, blocks: list[int], skip_blocks: int) -> None:
        parts_first = chunks.transpose(0, 1)
        self._reshaped, room = _room(self._reshaped, parts_first, self._device)
        reshaped = room.copy_(parts_first)
        index = torch.tensor(blocks[skip_blocks:], dtype=torch.long, device=self._device)
        for part, view in zip(reshaped.flatten(1, 2), self._views, strict=True):
            view[index] = part[skip_blocks:].reshape(-1, *view.shape[1:])

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        index = torch.tensor(blocks, dtype=torch.long, device=self._device)
        for part, view in zip(chunks[0], self._views, strict=True):
            part.copy_(view[index].reshape(part.shape))


class _TritonMover(_DeviceMover):
    """Copies with our kernels: one launch for a round."""

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        super().__init__(views, reshaping_bytes)
        from host_control.layouts_triton import Kernels

        self._kernels = Kernels(views)

    def _to_pages(self, chunks: Any, blocks: list[int], skip_blocks: int) -> None:
        self._kernels.scatter(chunks.flatten(2, 3), self._slots(blocks, skip_blocks))

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        self._kernels.gather(chunks.flatten(2, 3), self._slots(blocks, 0))

    def _slots(self, blocks: list[int], skip_blocks: int) -> Any:
        numbers = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        slots = numbers[:, None] * self._block_tokens + torch.arange(self._block_tokens, device=self._device)
        slots[:skip_blocks] = -1
        return slots.flatten()


def _room(room: Any, chunks: Any, device: Any) -> tuple[Any, Any]:
    """Return ``room``, or a larger one in its stead, and as much of it as takes ``chunks``, in their shape."""
    if room is None or room.numel() < chunks.numel():
        room = torch.empty(chunks.numel(), dtype=chunks.dtype, device=device)
    return room, room[: chunks.numel()].view(chunks.shape)


def _mover(kind: MoverKind | None, views: Sequence[Any], reshaping_bytes: int) -> Any:
    if kind == "native" or (kind is None and views[0].device.type == "cpu"):
        return _NativeMover(views)
    if kind != "torch":
        try:
            return _TritonMover(views, reshaping_bytes)
        except (ImportError, ValueError):  # no Triton, or strides that its kernels do not take: slower, the same bytes
            if kind == "triton":
                raise
    return _TorchMover(views, reshaping_bytes)


def _moved_as(cache: Any) -> Any:
    return cache.view(torch.uint8) if element_type(cache.dtype) is DType.UINT8 else cache


def _views(cache: Any, kind: LayoutKind, head_size: int) -> list[Any]:
    """Return one view for each kind of a layer, [block, token, head, dimension]."""
    if kind == "latent":
        return [cache.permute(0, 2, 1, 3)]
    if kind == "kv_cells":
        cells = cache.permute(0, 2, 1, 3)
        return [cells[..., :head_size], cells[..., head_size:]]
    blocks, heads, tokens, content = cache.shape
    if cache.stride()[1:] != (tokens * content, content, 1):
        raise ValueError(f"a CPU cache with strides {cache.stride()} does not hold each head's page in one piece")
    start, half = cache.storage_offset(), tokens * head_size
    block, head = cache.stride(0), tokens * content
    if kind == "cpu_pages":
        size: tuple[int, ...] = (blocks, tokens, heads, head_size)
        key = cache.as_strided(size, (block, 1, head, tokens), start)
        return [key, cache.as_strided(size, (block, head_size, head, 1), start + half)]
    if tokens % _TILE or head_size % _TILE:
        raise ValueError(
            f"pages of {tokens} tokens and heads of {head_size} elements do not divide into tiles of {_TILE}"
        )
    size = (blocks, tokens // _TILE, _TILE, heads, head_size // _PAIR, _PAIR)
    key = cache.as_strided(size, (block, _TILE * head_size, _PAIR, head, _TILE * _PAIR, 1), start)
    size = (blocks, tokens // _PAIR, _PAIR, heads, head_size // _TILE, _TILE)
    return [key, cache.as_strided(size, (block, _TILE * _PAIR, 1, head, _TILE * tokens, _PAIR), start + half)]
