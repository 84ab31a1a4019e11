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
- ``cells``: whatever a page holds, moved as it is, whole pages; logical [block, head, token, content]. Of what has no K
  and no V beside it, or holds its scales within: nothing but the same kind of page can take it.
"""

import abc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from shadowserve.chunk import DType

LayoutKind = Literal["kv_cells", "cpu_pages", "cpu_tiles", "latent", "cells"]
MoverKind = Literal["native", "torch", "triton"]
_MOVED_AS_BYTES: Final = {torch.float8_e4m3fn, torch.float8_e5m2}
NOWHERE: Final = -1
"""Stands for a block where a chunk's part goes nowhere: it is there already, or nobody will read it."""
_TILE: Final = 16
_PAIR: Final = 2


def element_type(dtype: Any) -> DType | None:
    """Return what elements of a torch dtype move as (fp8 as bytes), ``None`` for one that cannot be moved."""
    try:
        return DType.UINT8 if dtype in _MOVED_AS_BYTES else DType.from_label(str(dtype).removeprefix("torch."))
    except ValueError:
        return None


@dataclass(frozen=True)
class Place:
    """Where pages lie in chunks that have other layers or heads than they.

    Attributes:
        layers, heads: of a chunk.
        first_layer, first_head: of the chunk: what the first of the caches, and of their heads that move, are there.
        page_heads: of the caches that move: the first, and the one behind the last.
    """

    layers: int
    heads: int
    first_layer: int
    first_head: int
    page_heads: tuple[int, int]


class PagedLayout:
    """The paged KV memory of one rank.

    Args:
        caches: one tensor for each layer, in layer order, logical [block, head, token, content].
        kind: physical layout.
        mover: what copies; by default ``native`` on CPUs, on devices ``triton`` where it is installed, else ``torch``.
        reshaping_bytes: of the device's memory that copies may take to reorder chunks in; one chunk is always taken.
            Kernels need it for nothing but chunks on their way to memory of the host.
        place: where the caches lie in chunks; by default chunks hold all of them and nothing else.

    Raises:
        ValueError: tensors that do not fit the layout or each other; the message says which and why.

    Attributes:
        layers, kinds, heads, head_size, block_tokens, blocks: counts; of layers and heads, a chunk's.
        dtype: of the elements; fp8 appears as ``torch.uint8``.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        kind: LayoutKind,
        mover: MoverKind | None = None,
        reshaping_bytes: int = 0,
        place: Place | None = None,
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
        self.kinds = 1 if kind in ("latent", "cells") else 2
        self.blocks, heads, self.block_tokens, content = first.shape
        if content % self.kinds:
            raise ValueError(f"a cell of {content} elements does not hold a K and a V of equal size")
        self.head_size = content // self.kinds
        if kind == "latent" and heads != 1:
            raise ValueError(f"a latent has one head, this cache {heads}")
        views = [view for cache in caches for view in _views(_moved_as(cache), kind, self.head_size)]
        self.dtype = views[0].dtype
        self._place = place or Place(len(caches), heads, 0, 0, (0, heads))
        self.layers, self.heads = self._place.layers, self._place.heads
        begin, end = self._place.page_heads
        self._moved = (len(caches) * self.kinds, end - begin)
        # Heads are in the middle of each view, whatever is before and behind them.
        views = [view.narrow(view.dim() // 2, begin, end - begin) for view in views]
        whole = self._moved == (self.layers * self.kinds, self.heads)
        self._mover = _mover(mover, views, reshaping_bytes, self.heads, whole=whole)

    @property
    def vector_length(self) -> int:
        """Elements of one token, layer and kind."""
        return int(self.heads * self.head_size)

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of ``tokens`` tokens."""
        return int(self.layers * self.kinds * tokens * self.vector_length * self.dtype.itemsize)

    def scatter(
        self,
        chunks: Any,
        blocks: Sequence[int],
        chunk_blocks: int | None = None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Copy the chunks of a batch into paged memory, all layers that are here or some.

        On a device: on the current stream, in one launch with Triton.

        Args:
            chunks: their bytes, one after the other: a buffer, or a tensor in the CPU's or the device's memory.
            blocks: block numbers, one for each ``block_tokens`` tokens of all chunks, or :data:`NOWHERE`.
            chunk_blocks: blocks that one chunk fills; by default all of them.
            layers: of the caches here, the first and the one behind the last; by default all. Others are not read.
        """
        if any(block != NOWHERE for block in blocks):
            view = self._chunk_view(chunks, len(blocks), chunk_blocks)
            first, end = (self.kinds * layer for layer in layers) if layers else (0, len(view[0]))
            self._mover.scatter(view[:, first:end], list(blocks), first)

    def gather(self, chunk: Any, blocks: Sequence[int], rows: int | None = None) -> None:
        """Copy paged memory into one chunk.

        On a device: on the current stream, to memory of the host without waiting for the copy's end.

        Args:
            chunk: its bytes, to be written: a buffer, or a tensor in the CPU's or the device's memory.
            blocks: block numbers, or :data:`NOWHERE` for zeros.
            rows: leading tokens of the chunk that are there, the rest are zeros; by default all that blocks hold.
        """
        self._mover.gather(self._chunk_view(chunk, len(blocks), None), list(blocks), rows)

    def _chunk_view(self, chunks: Any, blocks: int, chunk_blocks: int | None) -> Any:
        """Return [chunk, layer x kind, block, token, head, dimension] over what moves of chunks' bytes."""
        tensor = chunks if isinstance(chunks, torch.Tensor) else torch.frombuffer(chunks, dtype=torch.uint8)
        each = chunk_blocks or blocks
        parts = self.layers * self.kinds
        shape = (blocks // each, parts, each, self.block_tokens, self.heads, self.head_size)
        moved, heads = self._moved
        first = self._place.first_layer * self.kinds
        whole = tensor.view(self.dtype).view(shape)
        return whole.narrow(1, first, moved).narrow(4, self._place.first_head, heads)


class _NativeMover:
    """Copies on a CPU, in the calling thread, all blocks in one call of the C core.

    torch would spread each copy over the threads that it also computes with: two threads of ours and the engine's on
    the same cores, waiting for each other at barriers.
    """

    def __init__(self, views: Sequence[Any], chunk_heads: int) -> None:
        from shadowserve import native  # an engine loads the C core only where it has to

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
        """Copy parts, a layer's K, V or latent, of chunks, from that number on."""
        for pages, held, scatter, _ in self._addresses(chunks, blocks, first):
            scatter(pages, held)

    def gather(self, chunks: Any, blocks: list[int], rows: int | None = None) -> None:
        if NOWHERE in blocks:
            chunks.zero_()
        for pages, held, _, gather in self._addresses(chunks, blocks):
            gather(held, pages)
        _end_after(chunks, rows)

    def _addresses(self, chunks: Any, blocks: list[int], first: int = 0) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield, for each order of dimensions, where blocks are in pages and in chunks, and what copies them."""
        if not min(blocks) >= NOWHERE or not max(blocks) < self._blocks:
            raise IndexError(f"of blocks {blocks} some are not among the {self._blocks} that there are")
        every = np.array(blocks, np.int64)
        (meant,) = np.nonzero(every != NOWHERE)
        numbers = every[meant].astype(np.uint64)
        chunk, place = np.divmod(meant.astype(np.uint64), np.uint64(chunks.shape[2]))
        of_chunk, of_part, of_block = (np.uint64(chunks.stride(axis) * chunks.itemsize) for axis in range(3))
        for every_part, every_page, page_bytes, scatter, gather in self._plans:
            meant_part = (every_part >= first) & (every_part < first + chunks.shape[1])
            parts, pages = every_part[meant_part] - np.uint64(first), every_page[meant_part]
            held = np.uint64(chunks.data_ptr()) + chunk * of_chunk + parts[:, None] * of_part + place * of_block
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

    def scatter(self, chunks: Any, blocks: list[int], first_part: int = 0) -> None:
        """Copy parts, a layer's K, V or latent, of chunks, from that number on."""
        group = self._group(chunks)
        each = chunks.shape[2]
        for first in range(0, len(chunks), group):
            part = chunks[first : first + group]
            if part.device != self._device:
                self._scattered, room = _room(self._scattered, part, self._device)
                part = room.copy_(part, non_blocking=True)
            self._to_pages(part, blocks[first * each : (first + len(part)) * each], first_part)

    def gather(self, chunks: Any, blocks: list[int], rows: int | None = None) -> None:
        target = chunks
        if chunks.device != self._device:
            self._gathered, target = _room(self._gathered, chunks, self._device)
        if NOWHERE in blocks:
            target.zero_()
        self._from_pages(target, blocks)
        _end_after(target, rows)
        if target is not chunks:
            chunks.copy_(target, non_blocking=True)

    def _group(self, chunks: Any) -> int:
        """Return how many chunks the buffer's part for scattering holds."""
        size = int(chunks[0].nbytes)
        return max(1, (self._reshaping_bytes - size) // size)

    @abc.abstractmethod
    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        """Copy parts of chunks in the device's memory into pages, from that number on."""

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

    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        parts_first = chunks.transpose(0, 1)
        self._reshaped, room = _room(self._reshaped, parts_first, self._device)
        reshaped = room.copy_(parts_first)
        index, kept = self._meant(blocks)
        for part, view in zip(reshaped.flatten(1, 2), self._views[first_part:][: len(reshaped)], strict=True):
            view[index] = (part if kept is None else part[kept]).reshape(-1, *view.shape[1:])

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        index, kept = self._meant(blocks)
        for part, view in zip(chunks[0], self._views, strict=True):
            if kept is None:
                part.copy_(view[index].reshape(part.shape))
            else:
                part[kept] = view[index].reshape(-1, *part.shape[1:])

    def _meant(self, blocks: list[int]) -> tuple[Any, Any]:
        """Return the blocks that are meant, and their places among all; None where these are all."""
        places = [place for place, block in enumerate(blocks) if block != NOWHERE]
        index = torch.tensor([blocks[place] for place in places], dtype=torch.long, device=self._device)
        kept = torch.tensor(places, dtype=torch.long, device=self._device) if len(places) < len(blocks) else None
        return index, kept


class _TritonMover(_DeviceMover):
    """Copies with our kernels: one launch for a batch."""

    def __init__(self, views: Sequence[Any], reshaping_bytes: int) -> None:
        super().__init__(views, reshaping_bytes)
        from host_control.layouts_triton import Kernels

        self._kernels = Kernels(views)

    def _to_pages(self, chunks: Any, blocks: list[int], first_part: int) -> None:
        self._kernels.scatter(chunks.flatten(2, 3), self._slots(blocks), first_part)

    def _from_pages(self, chunks: Any, blocks: list[int]) -> None:
        self._kernels.gather(chunks.flatten(2, 3), self._slots(blocks))

    def _slots(self, blocks: list[int]) -> Any:
        numbers = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        slots = numbers[:, None] * self._block_tokens + torch.arange(self._block_tokens, device=self._device)
        slots[numbers == NOWHERE] = -1
        return slots.flatten()


def _end_after(chunks: Any, rows: int | None) -> None:
    """Clear what is behind so many tokens of each chunk: in the block that they end in, other requests' may be left."""
    if rows is not None:
        whole, rest = divmod(rows, chunks.shape[3])
        chunks[:, :, whole : whole + 1, rest:] = 0
        chunks[:, :, whole + 1 :] = 0


def _room(room: Any, chunks: Any, device: Any) -> tuple[Any, Any]:
    """Return ``room``, or a larger one in its stead, and as much of it as takes ``chunks``, in their shape."""
    if room is None or room.numel() < chunks.numel():
        room = torch.empty(chunks.numel(), dtype=chunks.dtype, device=device)
    return room, room[: chunks.numel()].view(chunks.shape)


def _mover(kind: MoverKind | None, views: Sequence[Any], reshaping_bytes: int, chunk_heads: int, *, whole: bool) -> Any:
    if kind == "native" or (kind is None and views[0].device.type == "cpu"):
        return _NativeMover(views, chunk_heads)
    # The kernels take chunks whole: of those that hold other layers or heads, torch takes what is wanted, slower.
    if kind != "torch" and whole:
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
    if kind in ("latent", "cells"):
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
