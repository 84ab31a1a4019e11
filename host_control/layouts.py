"""Moving chunks between the chunk layout and an engine's paged KV memory.

A chunk has the order layer, kind (K or V), token, head, dimension (docs/reference/record-format.md). A
:class:`PagedLayout` has one strided view per layer and kind of paged memory, with the logical dimensions [block, token,
head, dimension] in any physical order. (Tiles need two more: [block, token, token, head, dimension, dimension].) Moving
chunks is one indexed copy per view, or one kernel for all. :mod:`host_control.vllm.probe` detects an engine's layout.

vLLM's layouts:

- ``kv_cells``: CUDA attention backends; logical [block, head, token, K|V] with any strides ("HND", "NHD", and the
  block-outermost ones): K is the first half of each cell, V the second.
- ``cpu_pages``: the CPU backend; each head's page holds K transposed as [dimension, token], then V as
  [token, dimension].
- ``cpu_tiles``: the CPU backend with AMX, which multiplies pairs in tiles 16 wide; each head's page holds K as
  [token / 16, dimension / 2, token % 16, dimension % 2], then V as [dimension / 16, token / 2, dimension % 16,
  token % 2].
- ``latent``: MLA; logical [block, 1, token, latent].
- ``cells``: pages of unknown content, moved byte for byte; logical [block, head, token, content]. Only pages of the
  same kind can hold them.
"""

import abc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from shadowserve import native
from shadowserve.chunk import DType

LayoutKind = Literal["kv_cells", "cpu_pages", "cpu_tiles", "latent", "cells"]
MoverKind = Literal["native", "torch", "triton"]
_MOVED_AS_BYTES: Final = {torch.float8_e4m3fn, torch.float8_e5m2}
NOWHERE: Final = -1
"""Block number for parts of a chunk that are not moved."""
_TILE: Final = 16
_PAIR: Final = 2


def element_type(dtype: Any) -> DType | None:
    """Return the stored type of a torch dtype (fp8 as bytes), ``None`` for a dtype that cannot be stored."""
    try:
        return DType.UINT8 if dtype in _MOVED_AS_BYTES else DType.from_label(str(dtype).removeprefix("torch."))
    except ValueError:
        return None


@dataclass(frozen=True)
class ChunkRegion:
    """The position of caches in chunks that have other layers or heads, as those of another shard layout.

    Attributes:
        layers, heads: Number of layers and heads in a chunk.
        first_layer, first_head: Layer and head of the chunk that the first cache and the first moved head are.
        page_heads: Half-open range of the caches' heads that are moved.
    """

    layers: int
    heads: int
    first_layer: int
    first_head: int
    page_heads: tuple[int, int]


class PagedLayout:
    """The paged KV memory of one rank.

    Args:
        caches: One tensor per layer, in layer order, logical [block, head, token, content].
        mover: Implementation of copies. Default: ``native`` on CPUs; on GPUs ``triton`` if installed, else ``torch``.
        reshaping_bytes: GPU memory, at most, for reordering chunks; at least one chunk is used. With Triton only chunks
            that move between host and GPU need it.
        region: Position of the caches in chunks. Default: chunks hold exactly these caches.

    Raises:
        ValueError: The tensors do not fit the layout or each other.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        kind: LayoutKind,
        mover: MoverKind | None = None,
        reshaping_bytes: int = 0,
        region: ChunkRegion | None = None,
    ) -> None:
        if not caches:
            raise ValueError("there are no KV caches")
        first = caches[0]
        for index, cache in enumerate(caches):
            if cache.shape != first.shape or cache.dtype != first.dtype or cache.device != first.device:
                raise ValueError(f"layer {index} has another shape, dtype or device than layer 0")
        if first.dim() != 4 or element_type(first.dtype) is None:
            raise ValueError(f"KV caches of shape {tuple(first.shape)} and dtype {first.dtype} are not supported")
        self.device = first.device
        self.kinds = 1 if kind in ("latent", "cells") else 2
        self.blocks, heads, self.block_tokens, content = first.shape
        if content % self.kinds:
            raise ValueError(f"cells of {content} elements cannot hold a K and a V of equal size")
        self.head_size = content // self.kinds
        if kind == "latent" and heads != 1:
            raise ValueError(f"MLA caches have one head, this one has {heads}")
        if element_type(first.dtype) is DType.UINT8:
            caches = [cache.view(torch.uint8) for cache in caches]
        views = [view for cache in caches for view in _views(cache, kind, self.head_size)]
        self.dtype = views[0].dtype
        self._region = region or ChunkRegion(len(caches), heads, 0, 0, (0, heads))
        self.layers, self.heads = self._region.layers, self._region.heads
        begin, end = self._region.page_heads
        self._moved = (len(caches) * self.kinds, end - begin)
        # The heads are the middle dimension of each view, with and without tiles.
        views = [view.narrow(view.dim() // 2, begin, end - begin) for view in views]
        whole = self._moved == (self.layers * self.kinds, self.heads)
        self._mover = _mover(mover, views, reshaping_bytes, self.heads, whole=whole)

    @property
    def vector_length(self) -> int:
        """Number of elements of one token, layer and kind."""
        return int(self.heads * self.head_size)

    def chunk_bytes(self, tokens: int) -> int:
        return int(self.layers * self.kinds * tokens * self.vector_length * self.dtype.itemsize)

    def scatter(
        self,
        chunks: Any,
        blocks: Sequence[int],
        chunk_blocks: int | None = None,
        layers: tuple[int, int] | None = None,
        held: tuple[int, int] | None = None,
    ) -> None:
        """Copy consecutive chunks into paged memory. On a GPU: on the current stream, in one launch with Triton.

        Args:
            chunks: Bytes of the chunks: a buffer, or a tensor in host or GPU memory.
            blocks: Target block for each ``block_tokens`` tokens of all chunks, or :data:`NOWHERE`.
            chunk_blocks: Blocks per chunk; by default there is one chunk.
            layers: Half-open range of the caches to fill; by default all. The bytes of other layers are not read.
            held: Half-open range of the caches whose layers the chunks hold; by default all layers of a record.
        """
        if any(block != NOWHERE for block in blocks):
            view = self._chunk_view(chunks, len(blocks), chunk_blocks, held)
            before = held[0] if held else 0
            first, end = layers or (before, before + len(view[0]) // self.kinds)
            shown = view[:, self.kinds * (first - before) : self.kinds * (end - before)]
            self._mover.scatter(shown, list(blocks), self.kinds * first)

    def gather(self, chunk: Any, blocks: Sequence[int], rows: int | None = None) -> None:
        """Copy paged memory into one chunk. On a GPU: on the current stream, without waiting for its end.

        Args:
            chunk: Target bytes: a buffer, or a tensor in host or GPU memory.
            blocks: Source blocks, or :data:`NOWHERE` for zeros.
            rows: Number of leading tokens to copy, followed by zeros; by default all.
        """
        self._mover.gather(self._chunk_view(chunk, len(blocks), None), list(blocks), rows)

    def _chunk_view(
        self, chunks: Any, blocks: int, chunk_blocks: int | None, held: tuple[int, int] | None = None
    ) -> Any:
        """Return a view [chunk, layer x kind, block, token, head, dimension] of the moved bytes of chunks."""
        tensor = chunks if isinstance(chunks, torch.Tensor) else torch.frombuffer(chunks, dtype=torch.uint8)
        each = chunk_blocks or blocks
        layers = held[1] - held[0] if held else self.layers
        shape = (blocks // each, layers * self.kinds, each, self.block_tokens, self.heads, self.head_size)
        moved, heads = self._moved
        whole = tensor.view(self.dtype).view(shape)
        if not held:
            whole = whole.narrow(1, self._region.first_layer * self.kinds, moved)
        return whole.narrow(4, self._region.first_head, heads)


class _NativeMover:
    """Copies on a CPU, on the calling thread, all blocks in one call of the C core.

    torch would spread each copy over its thread pool, whose barriers would delay the engine's computation.
    """

    def __init__(self, views: Sequence[Any], chunk_heads: int) -> None:
        self._views = views  # hold the memory
        self._blocks = int(views[0].shape[0])
        orders: dict[tuple[Any, Any], list[int]] = {}
        for part, view in enumerate(views):
            orders.setdefault((view.shape[1:], view.stride()), []).append(part)
        self._plans = []
        for (sizes, elements), parts in orders.items():
            item = views[0].itemsize
            page_bytes, *strides = (each * item for each in elements)
            held = [*sizes[: len(sizes) // 2], chunk_heads, *sizes[len(sizes) // 2 + 1 :]]
            packed = [math.prod(held[axis + 1 :]) * item for axis in range(len(held))]
            scatter = native.StridedCopy(sizes, strides, packed, item)
            gather = native.StridedCopy(sizes, packed, strides, item)
            pages = np.array([views[part].data_ptr() for part in parts], np.uint64)
            self._plans.append((np.array(parts, np.uint64), pages, np.uint64(page_bytes), scatter, gather))

    def scatter(self, chunks: Any, blocks: list[int], first: int = 0) -> None:
        for pages, held, scatter, _ in self._addresses(chunks, blocks, first):
            scatter(pages, held)

    def gather(self, chunks: Any, blocks: list[int], rows: int | None = None) -> None:
        if NOWHERE in blocks:
            chunks.zero_()
        for pages, held, _, gather in self._addresses(chunks, blocks):
            gather(held, pages)
        _end_after(chunks, rows)

    def _addresses(self, chunks: Any, blocks: list[int], first: int = 0) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield, per order of dimensions, the addresses of blocks in pages and in chunks, and the copy functions."""
        if not min(blocks) >= NOWHERE or not max(blocks) < self._blocks:
            raise IndexError(f"some of the blocks {blocks} are not below {self._blocks}, the number of blocks")
        all_blocks = np.array(blocks, np.int64)
        (moved,) = np.nonzero(all_blocks != NOWHERE)
        numbers = all_blocks[moved].astype(np.uint64)
        chunk, index = np.divmod(moved.astype(np.uint64), np.uint64(chunks.shape[2]))
        chunk_stride, view_stride, block_stride = (
            np.uint64(chunks.stride(axis) * chunks.itemsize) for axis in range(3)
        )
        for all_views, all_pages, page_bytes, scatter, gather in self._plans:
            selected = (all_views >= first) & (all_views < first + chunks.shape[1])
            views, pages = all_views[selected] - np.uint64(first), all_pages[selected]
            held = (
                np.uint64(chunks.data_ptr())
                + chunk * chunk_stride
                + views[:, None] * view_stride
                + index * block_stride
            )
            yield (pages[:, None] + numbers * page_bytes).reshape(-1), held.reshape(-1), scatter, gather


class _DeviceMover(abc.ABC):
    """Copies on a GPU, on the current stream.

    The *reshaping buffer* is GPU memory, allocated when first needed. Chunks between host and GPU pass through it, and
    :class:`_TorchMover` reorders in it. Gathering has a buffer of its own for one chunk, because it runs on the
    engine's thread and stream, and scattering on another thread.
    """

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        self._views = list(views)
        self._device = views[0].device
        self._block_tokens = views[0].shape[1]
        self._reshaping_bytes = reshaping_bytes
        self._gathered: Any = None
        self._scattered: Any = None

    def scatter(self, chunks: Any, blocks: list[int], first_part: int = 0) -> None:
        count = self._chunks_at_once(chunks)
        each = chunks.shape[2]
        for first in range(0, len(chunks), count):
            batch = chunks[first : first + count]
            if batch.device != self._device:
                self._scattered, buffer = _buffer(self._scattered, batch, self._device)
                batch = buffer.copy_(batch, non_blocking=True)
            self._to_pages(batch, blocks[first * each : (first + len(batch)) * each], first_part)

    def gather(self, chunks: Any, blocks: list[int], rows: int | None = None) -> None:
        target = chunks
        if chunks.device != self._device:
            self._gathered, target = _buffer(self._gathered, chunks, self._device)
        if NOWHERE in blocks:
            target.zero_()
        self._from_pages(target, blocks)
        _end_after(target, rows)
        if target is not chunks:
            chunks.copy_(target, non_blocking=True)

    def _chunks_at_once(self, chunks: Any) -> int:
        size = int(chunks[0].nbytes)
        return max(1, (self._reshaping_bytes - size) // size)

    @abc.abstractmethod
    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        """Copy chunks in GPU memory to the views from index ``first_part`` on."""

    @abc.abstractmethod
    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        """Copy pages into chunks in GPU memory."""


class _TorchMover(_DeviceMover):
    """Copies by indexing: one launch to reorder all chunks, then one per layer and kind."""

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        super().__init__(views, reshaping_bytes)
        self._reshaped: Any = None

    def _chunks_at_once(self, chunks: Any) -> int:
        # Chunks from the host need the buffer twice: as copied, and reordered.
        return max(1, super()._chunks_at_once(chunks) // (1 if chunks.device == self._device else 2))

    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        by_view = chunks.transpose(0, 1)
        self._reshaped, buffer = _buffer(self._reshaped, by_view, self._device)
        reshaped = buffer.copy_(by_view)
        index, kept = self._moved(blocks)
        for part, view in zip(reshaped.flatten(1, 2), self._views[first_part:][: len(reshaped)], strict=True):
            view[index] = (part if kept is None else part[kept]).reshape(-1, *view.shape[1:])

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        index, kept = self._moved(blocks)
        for part, view in zip(chunks[0], self._views, strict=True):
            if kept is None:
                part.copy_(view[index].reshape(part.shape))
            else:
                part[kept] = view[index].reshape(-1, *part.shape[1:])

    def _moved(self, blocks: list[int]) -> tuple[Any, Any]:
        """Return the block numbers other than NOWHERE and their positions; ``None`` if there are no others."""
        positions = [position for position, block in enumerate(blocks) if block != NOWHERE]
        index = torch.tensor([blocks[position] for position in positions], dtype=torch.long, device=self._device)
        kept = torch.tensor(positions, dtype=torch.long, device=self._device) if len(positions) < len(blocks) else None
        return index, kept


class _TritonMover(_DeviceMover):
    """Copies with Triton kernels: one launch per batch."""

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        super().__init__(views, reshaping_bytes)
        from host_control.layouts_triton import Kernels

        self._kernels = Kernels(views)

    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        self._kernels.move(chunks.flatten(2, 3), self._numbers(blocks), first_part, to_pages=True)

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        self._kernels.move(chunks.flatten(2, 3), self._numbers(blocks), to_pages=False)

    def _numbers(self, blocks: list[int]) -> Any:
        # Without non_blocking the host would wait for all earlier work of the stream.
        return torch.tensor(blocks, dtype=torch.int64).to(self._device, non_blocking=True)


def _end_after(chunks: Any, rows: int | None) -> None:
    """Zero the tokens after ``rows`` in each chunk: the last block may still hold KV of other requests."""
    if rows is not None:
        whole, rest = divmod(rows, chunks.shape[3])
        chunks[:, :, whole : whole + 1, rest:] = 0
        chunks[:, :, whole + 1 :] = 0


def _buffer(buffer: Any, chunks: Any, device: Any) -> tuple[Any, Any]:
    if buffer is None or buffer.numel() < chunks.numel():
        buffer = torch.empty(chunks.numel(), dtype=chunks.dtype, device=device)
    return buffer, buffer[: chunks.numel()].view(chunks.shape)


def _mover(kind: MoverKind | None, views: Sequence[Any], reshaping_bytes: int, chunk_heads: int, *, whole: bool) -> Any:
    if kind == "native" or (kind is None and views[0].device.type == "cpu"):
        return _NativeMover(views, chunk_heads)
    # The kernels only move whole chunks. torch moves chunks with other layers or heads, more slowly.
    if kind != "torch" and whole:
        try:
            return _TritonMover(views, reshaping_bytes)
        except (ImportError, ValueError):  # no Triton, or strides that the kernels do not support
            if kind == "triton":
                raise
    return _TorchMover(views, reshaping_bytes)


def _views(cache: Any, kind: LayoutKind, head_size: int) -> list[Any]:
    """Return one view [block, token, head, dimension] per kind of a layer."""
    if kind in ("latent", "cells"):
        return [cache.permute(0, 2, 1, 3)]
    if kind == "kv_cells":
        cells = cache.permute(0, 2, 1, 3)
        return [cells[..., :head_size], cells[..., head_size:]]
    blocks, heads, tokens, content = cache.shape
    if cache.stride()[1:] != (tokens * content, content, 1):
        raise ValueError(f"in a CPU cache with strides {cache.stride()}, the page of a head is not contiguous")
    start, half = cache.storage_offset(), tokens * head_size
    block, head = cache.stride(0), tokens * content
    if kind == "cpu_pages":
        size: tuple[int, ...] = (blocks, tokens, heads, head_size)
        key = cache.as_strided(size, (block, 1, head, tokens), start)
        return [key, cache.as_strided(size, (block, head_size, head, 1), start + half)]
    if tokens % _TILE or head_size % _TILE:
        raise ValueError(
            f"pages of {tokens} tokens and heads of {head_size} elements cannot be divided into tiles of {_TILE}"
        )
    size = (blocks, tokens // _TILE, _TILE, heads, head_size // _PAIR, _PAIR)
    key = cache.as_strided(size, (block, _TILE * head_size, _PAIR, head, _TILE * _PAIR, 1), start)
    size = (blocks, tokens // _PAIR, _PAIR, heads, head_size // _TILE, _TILE)
    return [key, cache.as_strided(size, (block, _TILE * _PAIR, 1, head, _TILE * tokens, _PAIR), start + half)]
