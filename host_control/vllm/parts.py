"""Parts: layers of one KV cache group whose pages are alike, and the records that hold them.

Most groups are one part. Layers of one group may differ, though (attention and its indexer, heads of several sizes),
and a state may have several tensors (of a convolution, of a recurrence). Of a group a hit needs all parts.

A rank's records hold its layers and its heads. An engine of another *cut*, with other numbers of tensor-parallel ranks
or pipeline stages, has others of the same KV: a rank can read those that have some of its layers and heads, and takes
its own of them. It makes none such.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from host_control.config import HostConfig
from host_control.layouts import LayoutKind, PagedLayout, Place, element_type
from host_control.vllm.groups import Group, Groups
from host_control.vllm.probe import find_layout
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.keys import KVNamespace, ModelIdentity

CUTS: Final = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2))
"""Tensor-parallel ranks and pipeline stages of engines whose records are looked for beside an engine's own."""
_LATENTS: Final = {"MLAAttentionSpec", "SlidingWindowMLASpec"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Layers of a group whose pages are alike.

    Attributes:
        cut: of the engine that makes such records: 0 for this one's own, else a number of :data:`CUTS` and one.
        group: whose they are.
        layout: of their pages.
        ratio: the kernels' blocks in one of the group's.
        label: what a namespace calls them.
        layers, heads: that a record has: the first, and the one behind the last.
        wanted: of a record's layers those that are here.
        whole: whether every rank of an engine has the same.
        binnable: whether its elements are keys and values, or latents, that a quantizer may make coarser.
    """

    cut: int
    group: Group
    layout: PagedLayout
    ratio: int
    label: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    wanted: slice
    whole: bool
    binnable: bool

    @property
    def record_blocks(self) -> int:
        """The kernels' blocks that a record holds."""
        return self.group.record_blocks * self.ratio

    def kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Return the numbers of the kernels' blocks, which may be parts of the group's; what is nowhere stays so."""
        if self.ratio == 1:
            return list(blocks)
        return [block * self.ratio + part if block >= 0 else block for block in blocks for part in range(self.ratio)]

    def described(self, model: ModelIdentity, config: HostConfig, *, saved: bool = False) -> ChunkLayout:
        """Return how its chunks lie in shared memory, and what becomes of them, under a name of their own.

        Caches of 8 bits are stored as they are, but for E4M3 where it shall be binned; states are stored exactly, and
        so is what preempted requests are saved in (``saved``), under a name that no other record has.

        Raises:
            UncacheableError: no record holds such a chunk.
        """
        dtype, quantizer = element_type(self.layout.dtype), Quantizer.from_label(config.quantizer)
        assert dtype is not None, "a cache that the layout took"
        if (saved or not self.binnable) and quantizer is Quantizer.BINNED:
            quantizer = Quantizer.LOSSLESS
        if dtype is DType.UINT8 and quantizer is Quantizer.BINNED and _is_float8_e4m3(model.dtype):
            dtype = DType.FLOAT8_E4M3
        elif dtype is DType.UINT8:
            quantizer = Quantizer.PASSTHROUGH
        tokens = self.record_blocks * self.layout.block_tokens
        binned: dict[str, Any] = {}
        if quantizer is Quantizer.BINNED:
            other = config.value_bins if config.value_bins != config.bins and self.layout.kinds == 2 else 0
            binned = {"bins": config.bins, "value_bins": other, "scale_tokens": min(config.scale_tokens, tokens)}
        try:
            label = f"{self.label}, of preempted requests" if saved else self.label
            return KVNamespace(model=model, group=label, layers=self.layers, heads=self.heads).name(
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
            raise UncacheableError(f"its chunks cannot be stored: {error}") from error


def find_parts(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Groups,
    caches: dict[str, Any],
    config: HostConfig,
    rank: "Rank",
    *,
    paged: bool = False,
) -> list[Part]:
    """Return the parts of all groups, in the groups' order, and behind them those of engines of other cuts.

    Args:
        vllm_config, kv_cache_config: of vLLM, as a worker has them, after the model was loaded.
        groups: that are stored.
        caches: layer -> its registered KV cache.
        config: of the host.
        rank: this worker's.
        paged: store pages as they are, whatever their order: of one group, on a CPU.

    Raises:
        UncacheableError: a layer's cache is of no known layout.
    """
    parts: list[Part] = []
    several = len(groups.groups) > 1
    for group in groups.groups:
        described = kv_cache_config.kv_cache_groups[group.index]
        specs = getattr(described.kv_cache_spec, "kv_cache_specs", {})
        alike: dict[Any, list[str]] = {}
        for name in described.layer_names:
            if name not in caches:
                raise UncacheableError(f"layer {name} has no KV cache of its own")
            spec = specs.get(name, described.kv_cache_spec)
            role = getattr(spec, "cache_role", "")
            alike.setdefault((type(spec).__name__, role, caches[name].shape, caches[name].dtype), []).append(name)
        for names in alike.values():
            spec = specs.get(names[0], described.kv_cache_spec)
            tensors = [caches[name] for name in names]
            named = several or len(alike) > 1
            make = _Maker(vllm_config, kv_cache_config, group, spec, tuple(names), named, config, rank, paged)
            parts += make.states(tensors) if group.kind == "state" else make.attention(tensors)
    return sorted(parts, key=lambda part: part.cut)


@dataclass(frozen=True)
class Rank:
    """A worker's place in its engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def number(self) -> int:
        """Among all workers, a stage's ranks one after the other."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def heads(self, total: int) -> tuple[int, int]:
        """Return which of a model's KV heads it has: neighbours the same, where there are more ranks than heads."""
        first = self.tp_rank * total // self.tp_size
        return first, first + max(1, total // self.tp_size)

    def layers(self, vllm_config: Any) -> tuple[int, int]:
        """Return which of a model's layers it has, as vLLM divides them."""
        from vllm.distributed.utils import get_pp_indices

        total = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        first, end = get_pp_indices(total, self.pp_rank, self.pp_size)
        return int(first), int(end)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else None


@dataclass(frozen=True)
class _Maker:
    """What all parts of some layers have in common."""

    vllm_config: Any
    kv_cache_config: Any
    group: Group
    spec: Any
    names: tuple[str, ...]
    named: bool  # there are others, so that it takes the layers' names to tell them apart
    config: HostConfig
    rank: "Rank"
    paged: bool = False

    def attention(self, tensors: list[Any]) -> list[Part]:
        latent = type(self.spec).__name__ in _LATENTS
        kinds = self._kinds(tensors[0], latent)
        kind = find_layout(self.vllm_config, self.names[0], tensors[0], kinds) if kinds else "cells"
        if kind == "cells" and element_type(tensors[0].dtype) is None:
            tensors = [tensor.view(_uint8()) for tensor in tensors]
        layout = self._layout(tensors, kind)
        ratio, rest = divmod(layout.blocks, self.kv_cache_config.num_blocks)
        if rest or (self.spec.tokens_per_state == 1 and self.group.block_tokens != ratio * layout.block_tokens):
            raise UncacheableError(
                f"{layout.blocks} blocks of {layout.block_tokens} tokens are not the "
                f"{self.kv_cache_config.num_blocks} of {self.group.block_tokens} that vLLM counts"
            )
        label = "latent" if latent else str(self.group.kind)
        if self.paged and kind != "cells":
            # All that the order of bytes in a page depends on: only the same kind of page can take them.
            order = "x".join(map(str, tensors[0].shape[1:]))
            label = f"{label} in {kind} of {order} {str(tensors[0].dtype).removeprefix('torch.')}"
            pages = self._layout([_whole_page(tensor) for tensor in tensors], "cells")
            return [self._part(self._labelled(label), pages, ratio, whole=latent, binnable=False)]
        if kind == "cells":
            if layout.device.type == "cpu":  # whose kernels order a page by the instruction set
                raise UncacheableError(f"how a CPU orders the pages of {self.names[0]} is not known")
            # Nobody else knows what a page holds: of another length, kernel or release, it is another thing.
            backend = getattr(getattr(self._layer(), "attn_backend", None), "__name__", type(self.spec).__name__)
            label = f"{label} in pages of {layout.block_tokens} by {backend} of vLLM {_release()}"
        own = self._part(self._labelled(label), layout, ratio, whole=latent, binnable=kind != "cells")
        total = int(self.vllm_config.model_config.get_total_num_kv_heads())
        held = 1 if latent else max(1, total // self.rank.tp_size)
        layers = self.rank.layers(self.vllm_config)
        if self.named or kind == "cells" or layout.heads != held or len(tensors) != layers[1] - layers[0]:
            return [own]  # of these only an engine of the same cut knows which they are
        heads = (0, 1) if latent else self.rank.heads(total)
        own = replace(own, label=label, layers=layers, heads=heads)
        return [own, *self._others(own, tensors, kind, 1 if latent else total)]

    def _others(self, own: Part, tensors: list[Any], kind: LayoutKind, total: int) -> Iterator[Part]:
        """Yield the parts of which engines of other cuts make records with some of these layers and heads."""
        for number, (tp_size, pp_size) in enumerate(CUTS, 1):
            if (tp_size, pp_size) == (self.rank.tp_size, self.rank.pp_size):
                continue
            seen = {(own.layers, own.heads)}
            for tp_rank, pp_rank in itertools.product(range(tp_size), range(pp_size)):
                if tp_size > total and not own.whole:
                    continue
                other = Rank(tp_rank, tp_size, pp_rank, pp_size)
                layers, heads = other.layers(self.vllm_config), (0, 1) if own.whole else other.heads(total)
                ours, our_heads = _common(own.layers, layers), _common(own.heads, heads)
                if ours is None or our_heads is None or (layers, heads) in seen:
                    continue
                seen.add((layers, heads))
                (first, end), (first_head, end_head) = ours, our_heads
                place = Place(
                    layers=layers[1] - layers[0],
                    heads=heads[1] - heads[0],
                    first_layer=first - layers[0],
                    first_head=first_head - heads[0],
                    page_heads=(first_head - own.heads[0], end_head - own.heads[0]),
                )
                held = tensors[first - own.layers[0] : end - own.layers[0]]
                wanted = slice(first - layers[0], end - layers[0])
                layout = self._layout(held, kind, place)
                yield replace(own, cut=number, layout=layout, layers=layers, heads=heads, wanted=wanted)

    def _part(self, label: str, layout: PagedLayout, ratio: int, *, whole: bool, binnable: bool) -> Part:
        """Return a part that only engines of the same cut have."""
        rank = self.rank
        if not whole:
            label += f", rank {rank.tp_rank} of {rank.tp_size}"
        if rank.pp_size > 1:
            label += f", stage {rank.pp_rank} of {rank.pp_size}"
        return Part(
            cut=0,
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
        """Return the layouts that a cache may have, none where its cells are only moved as they are."""
        spec = self.spec
        odd = spec.state_content_bytes is not None or spec.tokens_per_state != 1 or element_type(tensor.dtype) is None
        if latent:
            indexes = str(getattr(spec.cache_role, "value", "")) == "indexer" if hasattr(spec, "cache_role") else False
            return () if odd or indexes else ("latent",)
        if odd or spec.head_size_v != spec.head_size or spec.num_heads != spec.num_kv_heads:
            return ()
        return ("cpu_pages", "cpu_tiles") if tensor.device.type == "cpu" else ("kv_cells",)

    def states(self, tensors: list[Any]) -> list[Part]:
        parts, begin = [], 0
        for place, (shape, dtype) in enumerate(zip(self.spec.shapes, self.spec.dtypes, strict=True)):
            count = math.prod(shape)
            views = [_state(tensor, begin, shape, dtype) for tensor in tensors]
            begin += count * dtype.itemsize
            layout, label = self._layout(views, "cells"), self._labelled(f"state {place}")
            parts.append(self._part(label, layout, 1, whole=bool(self.spec.tp_replicated), binnable=False))
        return parts

    def _layout(self, tensors: list[Any], kind: LayoutKind, place: Place | None = None) -> PagedLayout:
        try:
            return PagedLayout(tensors, kind, reshaping_bytes=int(self.config.reshaping_buffer_bytes), place=place)
        except ValueError as error:
            raise UncacheableError(f"the KV cache's layout is not known: {error}") from error

    def _layer(self) -> Any:
        return self.vllm_config.compilation_config.static_forward_context.get(self.names[0])

    def _labelled(self, label: str) -> str:
        if not self.named and label in ("full", "latent"):
            return label
        return f"{label} of {hashlib.sha256(chr(0).join(self.names).encode()).hexdigest()[:32]}"


def _whole_page(tensor: Any) -> Any:
    """Return a cache as [block, 1, 1, byte], of pages that lie in one piece each."""
    bytes_ = tensor.view(_uint8())
    size = math.prod(bytes_.shape[1:])
    return bytes_.as_strided((len(bytes_), 1, 1, size), (bytes_.stride(0), size, size, 1))


def _state(tensor: Any, begin: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return one tensor of each block's state, [block, 1, row, element], of pages of which it is some bytes.

    Raises:
        UncacheableError: the pages are not in one piece each.
    """
    bytes_ = tensor.view(_uint8())
    if bytes_.dim() != 4 or bytes_.shape[1:3] != (1, 1) or bytes_.stride(3) != 1:
        raise UncacheableError(f"states of shape {tuple(tensor.shape)} are not in one piece each")
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
    """Return whether what a model's identity calls its cache's elements is OCP's E4M3: some AMD GPUs have another."""
    asked, _, element = cache_dtype.partition("/")
    return element == "float8_e4m3fn" or (element == "uint8" and asked == "fp8_e4m3 as float8_e4m3fn")
