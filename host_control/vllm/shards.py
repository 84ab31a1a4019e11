"""Shards: the layers and heads of one rank that are stored as one record per chunk.

A KV cache group of a rank has several shards if its layers differ (attention and its indexer, several head sizes), or
if a recurrent state has several tensors. A hit needs all of them. A *shard layout* is the number of tensor-parallel
ranks and pipeline stages of an engine. A rank also reads records of other shard layouts that contain some of its layers
and heads, and only writes records of its own.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.layouts import ChunkRegion, LayoutKind, PagedLayout, element_type
from host_control.lookup import EXACT, SAVED
from host_control.vllm.calibrated import PresetSteps
from host_control.vllm.groups import Group, Groups
from host_control.vllm.probe import find_layout
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.keys import KVNamespace, ModelIdentity

SHARD_LAYOUTS: Final = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2))
"""Foreign shard layouts that an engine looks up: (tensor-parallel ranks, pipeline stages)."""
LOSSY: Final = (Quantizer.BINNED, Quantizer.WEIGHTED)
OTHER_LAYOUTS: Final = 1
"""Key of the manager that fetches records of all other shard layouts."""
_BUFFER_CHUNKS_MAX: Final = 128
"""Larger buffers bring nothing: a batch of 64 chunks hides its round trip many times over."""
_LATENTS: Final = {"MLAAttentionSpec", "SlidingWindowMLASpec"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Layers of a group with the same page layout.

    Attributes:
        shard_layout: Shard layout of the records: 0 for the engine's own, else 1 + an index into :data:`SHARD_LAYOUTS`.
        ratio: Kernel blocks per block of the group.
        label: Name of the shard within a namespace.
        layers, heads: Half-open ranges of the model's layers and KV heads in a record.
        wanted: The layers of a record that this rank has.
        first_layer: Number of the first of them among the layers of this rank.
        whole: Every rank of an engine has the same bytes.
        binnable: The elements are keys, values or latents, which the ``binned`` quantizer may round.
        placed: ``layers`` and ``heads`` are numbers in the model, as calibrations have them.
    """

    shard_layout: int
    group: Group
    layout: PagedLayout
    ratio: int
    label: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    wanted: slice
    whole: bool
    binnable: bool
    first_layer: int = 0
    placed: bool = False

    @property
    def record_blocks(self) -> int:
        return self.group.record_blocks * self.ratio

    def kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Return the kernel block numbers of the group's blocks. Negative entries (``NOWHERE``) are kept."""
        if self.ratio == 1:
            return list(blocks)
        return [block * self.ratio + index if block >= 0 else block for block in blocks for index in range(self.ratio)]

    def described(
        self,
        model: ModelIdentity,
        config: HostConfig,
        preset: PresetSteps | None = None,
        *,
        exact: bool = False,
        saved: bool = False,
    ) -> ChunkLayout:
        """Return the layout, quantizer and namespace of the shard's chunks.

        8-bit caches are stored as bytes, except E4M3 with the ``binned`` quantizer. Recurrent state and the blocks of
        preempted requests are stored exactly.

        Args:
            preset: Steps for the configured quantizer.
            exact: The records hold exact values, as those of an engine without a lossy quantizer.
            saved: Likewise; they hold blocks of preempted requests and have a namespace of their own.

        Raises:
            UncacheableError: The record format cannot hold such a chunk.
        """
        dtype = element_type(self.layout.dtype)
        quantizer = Quantizer.WEIGHTED if preset is not None else Quantizer.from_label(config.quantizer)
        assert dtype is not None, "PagedLayout accepted this dtype"
        if (exact or saved or not self.binnable) and quantizer in LOSSY:
            quantizer = Quantizer.LOSSLESS
        if dtype is DType.UINT8 and quantizer is Quantizer.BINNED and _is_float8_e4m3(model.dtype):
            dtype = DType.FLOAT8_E4M3
        elif dtype is DType.UINT8:
            quantizer = Quantizer.PASSTHROUGH
        if quantizer is Quantizer.WEIGHTED and not self.placed:
            raise UncacheableError(
                f"quantizer: {config.quantizer} needs keys and values of equal layers in one KV cache group, and this "
                "engine has others; set quantizer: lossless"
            )
        steps = preset.name if preset is not None and quantizer is Quantizer.WEIGHTED else ""
        tokens = self.record_blocks * self.layout.block_tokens
        binned: dict[str, Any] = {}
        if quantizer is Quantizer.BINNED:
            other = config.value_bins if config.value_bins != config.bins and self.layout.kinds == 2 else 0
            binned = {"bins": config.bins, "value_bins": other, "scale_tokens": min(config.scale_tokens, tokens)}
        try:
            label = f"{self.label}, of preempted requests" if saved else self.label
            return KVNamespace(model=model, group=label, layers=self.layers, heads=self.heads, steps=steps).name(
                ChunkLayout(
                    dtype=dtype,
                    layers=self.layout.layers,
                    kinds=self.layout.kinds,
                    vector_length=self.layout.vector_length,
                    tokens=tokens,
                    quantizer=quantizer,
                    **binned,
                )
            )
        except ValueError as error:
            raise UncacheableError(f"the record format cannot hold its chunks: {error}") from error


def manager_key(shard_layout: int) -> int:
    """Return the key of the manager that fetches records of a shard layout: 0 (own), ``SAVED`` or all others."""
    return shard_layout if shard_layout in (0, SAVED) else OTHER_LAYOUTS


class WorkerShards:
    """Shards of a worker by shard layout: 0 is its own; ``SAVED`` and ``EXACT`` are exact ones beside lossy ones."""

    def __init__(self) -> None:
        self.parts: dict[int, list[Shard]] = {}
        self.shapes: dict[int, list[ChunkLayout]] = {}

    def layouts_of(self, key: int) -> list[int]:
        """Return the shard layouts whose records the manager with this key fetches."""
        return [layout for layout in self.parts if manager_key(layout) == key]

    @property
    def stored_layouts(self) -> list[int]:
        """Shard layouts of the records that this worker stores, each with as many shards."""
        return [layout for layout in (0, SAVED, EXACT) if layout in self.parts]

    def first_of(self, shard_layout: int) -> int:
        """Return the index of a shard layout's first shard among all shards of its manager."""
        return sum(len(self.parts[each]) for each in self.layouts_of(manager_key(shard_layout)) if each < shard_layout)

    def chunk_bytes(self, shard_layout: int = 0) -> int:
        """Return the bytes of one chunk of every shard of a layout."""
        return sum(shape.raw_bytes for shape in self.shapes.get(shard_layout, ()))

    def buffer_chunks(self, shard_layout: int, configured_bytes: int) -> int:
        """Return the number of chunks that a buffer holds."""
        return min(max(configured_bytes // self.chunk_bytes(shard_layout), 2), _BUFFER_CHUNKS_MAX)

    def buffer_bytes(self, shard_layouts: Iterable[int], configured_bytes: int) -> int:
        """Return the size of one buffer for chunks of several shard layouts."""
        return max(self.buffer_chunks(each, configured_bytes) * self.chunk_bytes(each) for each in shard_layouts)


def find_shards(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Groups,
    caches: dict[str, Any],
    config: HostConfig,
    rank: "Rank",
    *,
    paged: bool = False,
) -> list[Shard]:
    """Return the shards of all groups in the groups' order, followed by the shards of other shard layouts.

    Args:
        vllm_config, kv_cache_config: A worker's configuration from vLLM, after the model was loaded.
        paged: Store pages byte for byte, in their own order (one group, on a CPU).

    Raises:
        UncacheableError: The layout of a layer's KV cache is not known.
    """
    shards: list[Shard] = []
    several = len(groups.groups) > 1
    for group in groups.groups:
        described = kv_cache_config.kv_cache_groups[group.index]
        specs = getattr(described.kv_cache_spec, "kv_cache_specs", {})
        alike: dict[Any, list[str]] = {}
        for name in described.layer_names:
            if name not in caches:
                raise UncacheableError(f"layer {name} shares its KV cache or has none")
            spec = specs.get(name, described.kv_cache_spec)
            role = getattr(spec, "cache_role", "")
            alike.setdefault((type(spec).__name__, role, caches[name].shape, caches[name].dtype), []).append(name)
        for names in alike.values():
            spec = specs.get(names[0], described.kv_cache_spec)
            tensors = [caches[name] for name in names]
            named = several or len(alike) > 1
            make = _Maker(vllm_config, kv_cache_config, group, spec, tuple(names), named, config, rank, paged)
            shards += make.states(tensors) if group.kind == "state" else make.attention(tensors)
    return sorted(shards, key=lambda shard: shard.shard_layout)


@dataclass(frozen=True)
class Rank:
    """Tensor-parallel rank and pipeline stage of a worker, with their numbers in the engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def number(self) -> int:
        """Index among all workers of the engine, ordered by stage, then by rank."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def heads(self, total: int) -> tuple[int, int]:
        """Return the half-open range of the rank's KV heads; neighbours share heads if ranks outnumber those."""
        first = self.tp_rank * total // self.tp_size
        return first, first + max(1, total // self.tp_size)

    def layers(self, vllm_config: Any) -> tuple[int, int]:
        """Return the half-open range of layers that the rank's stage holds, by vLLM's own division."""
        from vllm.distributed.utils import get_pp_indices

        total = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        first, end = get_pp_indices(total, self.pp_rank, self.pp_size)
        return int(first), int(end)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None


@dataclass(frozen=True)
class _Maker:
    """Makes the shards of some layers of one group."""

    vllm_config: Any
    kv_cache_config: Any
    group: Group
    spec: Any
    names: tuple[str, ...]
    named: bool  # the engine has other layers too, so a shard's label includes the names of its layers
    config: HostConfig
    rank: "Rank"
    paged: bool = False

    def attention(self, tensors: list[Any]) -> list[Shard]:
        """Return the shards of attention layers: the rank's own, and those of other shard layouts that overlap it."""
        latent = type(self.spec).__name__ in _LATENTS
        label = "latent" if latent else str(self.group.kind)
        kinds = self._kinds(tensors[0], latent)
        kind = find_layout(self.vllm_config, self.names[0], tensors[0], kinds) if kinds else "cells"
        if kind == "cells" and element_type(tensors[0].dtype) is None:
            tensors = [tensor.view(_uint8()) for tensor in tensors]
        layout = self._layout(tensors, kind)
        ratio = self._kernel_blocks(layout)
        if self.paged and kind != "cells":
            # The label holds everything that decides the order of bytes in a page.
            order = "x".join(map(str, tensors[0].shape[1:]))
            label = f"{label} in {kind} of {order} {str(tensors[0].dtype).removeprefix('torch.')}"
            pages = self._layout([_whole_page(tensor) for tensor in tensors], "cells")
            return [self._part(self._labelled(label), pages, ratio, whole=latent, binnable=False)]
        if kind == "cells":
            label = self._opaque_label(label, layout)
        own = self._part(self._labelled(label), layout, ratio, whole=latent, binnable=kind != "cells")
        total = 1 if latent else int(self.vllm_config.model_config.get_total_num_kv_heads())
        heads = (0, 1) if latent else self.rank.heads(total)
        layers = self.rank.layers(self.vllm_config)
        if (
            self.named
            or kind == "cells"
            or layout.heads != heads[1] - heads[0]
            or len(tensors) != layers[1] - layers[0]
        ):
            return [own]  # which layers and heads of the model these are is only known within the same shard layout
        own = replace(own, label=label, layers=layers, heads=heads, placed=not latent)
        return [own, *self._others(own, tensors, kind, total)]

    def _kernel_blocks(self, layout: PagedLayout) -> int:
        """Return the number of kernel blocks per block of the group."""
        ratio, rest = divmod(layout.blocks, self.kv_cache_config.num_blocks)
        if rest or (self.spec.tokens_per_state == 1 and self.group.block_tokens != ratio * layout.block_tokens):
            raise UncacheableError(
                f"the KV cache has {layout.blocks} blocks of {layout.block_tokens} tokens, which do not make up vLLM's "
                f"{self.kv_cache_config.num_blocks} blocks of {self.group.block_tokens} tokens"
            )
        return int(ratio)

    def _opaque_label(self, label: str, layout: PagedLayout) -> str:
        """Return the label of pages that are stored byte for byte because their layout is not known.

        Pages of another length, attention backend or release of vLLM may differ, so the label includes these.
        """
        if layout.device.type == "cpu":
            raise UncacheableError(
                f"the page layout of {self.names[0]} is not known, and on CPUs it depends on the instruction set"
            )
        backend = getattr(getattr(self._layer(), "attn_backend", None), "__name__", type(self.spec).__name__)
        return f"{label} in pages of {layout.block_tokens} by {backend} of vLLM {_release()}"

    def _others(self, own: Shard, tensors: list[Any], kind: LayoutKind, total: int) -> Iterator[Shard]:
        """Yield the shards of other shard layouts that contain some of the rank's layers and heads."""
        for number, (tp_size, pp_size) in enumerate(SHARD_LAYOUTS, 1):
            if (tp_size, pp_size) == (self.rank.tp_size, self.rank.pp_size):
                continue
            seen = {(own.layers, own.heads)}
            for tp_rank, pp_rank in itertools.product(range(tp_size), range(pp_size)):
                if tp_size > total and not own.whole:
                    continue
                other = Rank(tp_rank, tp_size, pp_rank, pp_size)
                layers, heads = other.layers(self.vllm_config), (0, 1) if own.whole else other.heads(total)
                shared_layers, shared_heads = _overlap(own.layers, layers), _overlap(own.heads, heads)
                if shared_layers is None or shared_heads is None or (layers, heads) in seen:
                    continue
                seen.add((layers, heads))
                (first, end), (first_head, end_head) = shared_layers, shared_heads
                region = ChunkRegion(
                    layers=layers[1] - layers[0],
                    heads=heads[1] - heads[0],
                    first_layer=first - layers[0],
                    first_head=first_head - heads[0],
                    page_heads=(first_head - own.heads[0], end_head - own.heads[0]),
                )
                held = tensors[first - own.layers[0] : end - own.layers[0]]
                wanted = slice(first - layers[0], end - layers[0])
                layout = self._layout(held, kind, region)
                made = replace(own, shard_layout=number, layout=layout, layers=layers, heads=heads, wanted=wanted)
                yield replace(made, first_layer=first - own.layers[0])

    def _part(self, label: str, layout: PagedLayout, ratio: int, *, whole: bool, binnable: bool) -> Shard:
        """Return a shard whose records only engines of the same shard layout can use."""
        rank = self.rank
        if not whole:
            label += f", rank {rank.tp_rank} of {rank.tp_size}"
        if rank.pp_size > 1:
            label += f", stage {rank.pp_rank} of {rank.pp_size}"
        return Shard(
            shard_layout=0,
            group=self.group,
            layout=layout,
            ratio=ratio,
            label=label,
            layers=(0, layout.layers),
            heads=(0, 1 if whole else layout.heads),
            wanted=slice(None),
            whole=whole,
            binnable=binnable,
        )

    def _kinds(self, tensor: Any, latent: bool) -> tuple[LayoutKind, ...]:
        """Return the page layouts that a cache may have. None of them: pages are stored byte for byte."""
        spec = self.spec
        odd = spec.state_content_bytes is not None or spec.tokens_per_state != 1 or element_type(tensor.dtype) is None
        if latent:
            indexes = str(getattr(spec.cache_role, "value", "")) == "indexer" if hasattr(spec, "cache_role") else False
            return () if odd or indexes else ("latent",)
        if odd or spec.head_size_v != spec.head_size or spec.num_heads != spec.num_kv_heads:
            return ()
        return ("cpu_pages", "cpu_tiles") if tensor.device.type == "cpu" else ("kv_cells",)

    def states(self, tensors: list[Any]) -> list[Shard]:
        """Return one shard for each tensor of the layers' recurrent state."""
        shards, begin = [], 0
        for index, (shape, dtype) in enumerate(zip(self.spec.shapes, self.spec.dtypes, strict=True)):
            views = [_state(tensor, begin, shape, dtype) for tensor in tensors]
            begin += math.prod(shape) * dtype.itemsize
            layout, label = self._layout(views, "cells"), self._labelled(f"state {index}")
            shards.append(self._part(label, layout, 1, whole=bool(self.spec.tp_replicated), binnable=False))
        return shards

    def _layout(self, tensors: list[Any], kind: LayoutKind, region: ChunkRegion | None = None) -> PagedLayout:
        try:
            return PagedLayout(tensors, kind, reshaping_bytes=int(self.config.reshaping_buffer_bytes), region=region)
        except ValueError as error:
            raise UncacheableError(f"the layout of the KV cache is not known: {error}") from error

    def _layer(self) -> Any:
        return self.vllm_config.compilation_config.static_forward_context.get(self.names[0])

    def _labelled(self, label: str) -> str:
        if not self.named and label in ("full", "latent"):
            return label
        return f"{label} of {hashlib.sha256(chr(0).join(self.names).encode()).hexdigest()[:32]}"


def _whole_page(tensor: Any) -> Any:
    """Return a view [block, 1, 1, byte] of a cache whose pages are contiguous."""
    bytes_ = tensor.view(_uint8())
    size = math.prod(bytes_.shape[1:])
    return bytes_.as_strided((len(bytes_), 1, 1, size), (bytes_.stride(0), size, size, 1))


def _state(tensor: Any, begin: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a view [block, 1, row, element] of one tensor of the recurrent state, ``begin`` bytes into each page."""
    bytes_ = tensor.view(_uint8())
    if bytes_.dim() != 4 or bytes_.shape[1:3] != (1, 1) or bytes_.stride(3) != 1:
        raise UncacheableError(f"recurrent state of shape {tuple(tensor.shape)} is not contiguous in each page")
    count = math.prod(shape)
    elements = bytes_[..., begin : begin + count * dtype.itemsize].view(dtype)
    rows = next(
        (
            math.prod(shape[:axis])
            for axis in range(1, len(shape) + 1)
            if math.prod(shape[axis:]) * dtype.itemsize <= DECODED_BYTES_MAX
        ),
        1,
    )
    length = count // rows
    return elements.as_strided(
        (elements.shape[0], 1, rows, length), (elements.stride(0), count, length, 1), elements.storage_offset()
    )


def _release() -> str:
    import vllm

    return str(vllm.__version__)


def _uint8() -> Any:
    import torch

    return torch.uint8


def _is_float8_e4m3(cache_dtype: str) -> bool:
    """Return True if the cache dtype in a model's identity is OCP E4M3 (some AMD GPUs use another E4M3)."""
    asked, _, element = cache_dtype.partition("/")
    return element == "float8_e4m3fn" or (element == "uint8" and asked == "fp8_e4m3 as float8_e4m3fn")
