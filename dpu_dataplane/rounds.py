"""Rounds on paper: which pieces go together, and where each lies in every buffer, before any byte moves.

A piece is consecutive layers of one chunk of one group. Its *occupancy* in a buffer is the region of it that the piece
alone uses during the round (ShadowServe section 4.3). The paper bounds the compressed size by the quantized one, since
it does not know it; here the records' heads are at hand, so every occupancy is exact and nothing is wasted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.catalog import Fault, fault_of
from dpu_dataplane.sources.source import Found, Stored, Unanswered
from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout
from shadowserve.errors import RecordError
from shadowserve.keys import storage_key
from shadowserve.pieces import Flags, leading
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import Head, Manifest, parse_head, plan_slices

__all__ = ["Buffers", "End", "FetchPlan", "StorePlan", "Wanted", "encoded_bound", "plan_fetch", "plan_store"]

ALIGNMENT: Final = 64
"""Of occupancies: a cache line, and what accelerators like."""
PIECES_MAX: Final = 16384
"""Pieces in one round: the C core's limit, 4 Mi tokens at 256 a chunk."""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Sizes of the pipeline's buffers in bytes; ``None`` for one that is not used."""

    decompression: int
    dequantization: int | None
    dma_source: int | None
    store: int

    @property
    def total(self) -> int:
        """Bytes of all buffers."""
        return self.decompression + (self.dequantization or 0) + (self.dma_source or 0) + self.store


@dataclass(frozen=True)
class Wanted:
    """What is wanted of one group.

    Attributes:
        keys: of its chunks.
        layout: that every chunk must have.
        pieces: that are wanted, by layer and chunk.
        found: what a source has of chunks that pieces are wanted of; of others nothing was asked yet.
    """

    keys: Sequence[bytes]
    layout: ChunkLayout
    pieces: Flags
    found: Mapping[int, Found]


@dataclass(frozen=True)
class End:
    """Why a group's chunks are of no use from one of them on: a fault, no answer, or neither: it is not stored."""

    chunk: int
    fault: Fault | None = None
    unanswered: Unanswered | None = None


@dataclass(frozen=True)
class FetchPlan:
    """The pieces that one round fetches, in their order.

    Attributes:
        pieces: PIECE_DTYPE array; ``group`` is the index among those who want.
        slices: SLICE_DTYPE array.
        layers: of each piece the first layer and the one behind the last.
        full: the buffers hold no more, though more pieces were asked for.
        ends: of groups, by their index.
    """

    pieces: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]
    layers: npt.NDArray[np.int64]
    full: bool
    ends: Mapping[int, End]


@dataclass(frozen=True)
class StorePlan:
    """A batch of chunks to encode; all of one layout, their manifests yet to be filled in from ``slices``."""

    pieces: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]
    manifest: Manifest

    def manifest_of(self, index: int) -> Manifest:
        """Return a chunk's manifest after it was encoded, as :func:`shadowserve.record.encode_head` wants it."""
        first, count = int(self.pieces[index]["slice_first"]), int(self.pieces[index]["slice_count"])
        filled = self.manifest.copy()
        for name in ("encoded_length", "checksum", "decoded_crc32"):
            filled[name] = self.slices[name][first : first + count]
        return filled


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encoded_bound(layout: ChunkLayout, codec: native.Codec, slice_bytes: int = DECODED_BYTES_MAX) -> int:
    """Return the most bytes that a chunk's body takes, which is also its occupancy in the store buffer.

    Args:
        layout: of the chunk.
        codec: of its slices.
        slice_bytes: most bytes of symbols in one of them.
    """
    return (
        layout.layers
        * layout.kinds
        * sum(
            layout.scales_bytes(tokens) + native.compress_bound(codec, tokens * layout.token_decoded_bytes)
            for tokens in layout.cut(slice_bytes)
        )
    )


_Parts = npt.NDArray[np.void]
_PART: Final = np.dtype(
    [(name, np.int64) for name in ("group", "chunk", "first", "end", "record_offset", "stored", "slice", "slices")]
)
"""A piece on its way into a plan: layers from ``first`` to ``end``, bytes ``stored`` in the record from
``record_offset``, and its ``slices``, from ``slice`` of all manifests on."""


class _Room:
    """What fits the buffers together. Each piece's occupancies begin behind those of the one before."""

    def __init__(self, buffers: Buffers, layouts: Sequence[ChunkLayout]) -> None:
        self._sizes = buffers.decompression, buffers.dequantization, buffers.dma_source
        layer = [layout.kinds * layout.tokens for layout in layouts]
        self._symbols = np.array([n * x.token_decoded_bytes for n, x in zip(layer, layouts, strict=True)], np.int64)
        self._used = np.zeros(3, np.int64)
        self._raw = np.array([x.raw_bytes // x.layers for x in layouts], np.int64)

    def exceeded(self, parts: _Parts) -> bool:
        """Add some pieces of one group to those of earlier calls; return whether all together are too many."""
        self._used += [int(lengths.sum()) for lengths in self._lengths(parts)]
        return any(size is not None and used > size for used, size in zip(self._used, self._sizes, strict=True))

    def _lengths(self, parts: _Parts) -> tuple[npt.NDArray[np.int64], ...]:
        layers = parts["end"] - parts["first"]
        return parts["stored"], layers * self._symbols[parts["group"]], layers * self._raw[parts["group"]]

    def place(self, parts: _Parts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Return the occupancies' begins in the first two buffers, and how many leading pieces all buffers hold."""
        begins, fits = [], np.arange(len(parts)) < PIECES_MAX
        for length, size, alignment in zip(self._lengths(parts), self._sizes, (ALIGNMENT, ALIGNMENT, 1), strict=True):
            aligned = -(-length // alignment) * alignment
            begins.append(np.cumsum(aligned) - aligned)
            if size is not None:
                fits &= begins[-1] + length <= size
        return begins[0], begins[1], leading(fits)


def plan_fetch(groups: Sequence[Wanted], layerwise: bool, buffers: Buffers, codecs: Collection[int]) -> FetchPlan:
    """Choose the leading pieces that are stored, sound as far as their heads tell, and fit all buffers together.

    Args:
        groups: what is wanted.
        layerwise: a piece is one layer of a chunk, and they come layer by layer, groups of unlike numbers of layers
            side by side; else all wanted layers of a chunk, and they come chunk by chunk.
        buffers: to fit into.
        codecs: that this build decodes.
    """
    layouts = [group.layout for group in groups]
    heads: dict[tuple[int, int], Head] = {}
    parts: list[_Parts] = []
    ends: dict[int, End] = {}
    full = False
    slices = 0
    for index, group in enumerate(groups):
        room = _Room(buffers, layouts)
        mine: list[_Parts] = []
        for chunk in np.flatnonzero(group.pieces.any(axis=0)).tolist():
            if chunk not in group.found:
                full = True
                break
            judged = _judge(group.found[chunk], group.keys[chunk], chunk, group.layout, buffers.decompression, codecs)
            if isinstance(judged, End):
                ends[index] = judged
                break
            mine.append(_cut(judged, group.pieces[:, chunk], layerwise, index, chunk, slices))
            slices += len(judged.slices)
            heads[index, chunk] = judged
            if not layerwise and room.exceeded(mine[-1]):
                break  # the rest is for another round, and so are its heads
        parts += mine
    chosen = np.concatenate(parts) if parts else np.zeros(0, _PART)
    if layerwise:
        depth = np.array([group.layout.layers for group in groups])[chosen["group"]]
        chosen = chosen[np.lexsort((chosen["chunk"], chosen["group"], chosen["first"] / depth))]
    elif len(groups) > 1:
        chosen = chosen[np.lexsort((chosen["first"], chosen["group"], chosen["chunk"]))]
    received, decoded, count = _Room(buffers, layouts).place(chosen)
    full = full or count < len(chosen)
    chosen = chosen[:count]
    pieces, table = _tables(groups, heads, chosen, received[:count], decoded[:count])
    return FetchPlan(pieces, table, np.stack([chosen["first"], chosen["end"]], axis=1), full, ends)


def _cut(head: Head, wanted: Flags, layerwise: bool, group: int, chunk: int, slice_first: int) -> _Parts:
    """Return the pieces of one chunk: one for each wanted layer, or one for each run of wanted layers."""
    if layerwise:
        first = np.flatnonzero(wanted)
        end = first + 1
    else:
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        first, end = edges[::2], edges[1::2]
    manifest = head.slices
    begin, behind = np.searchsorted(manifest["layer"], first), np.searchsorted(manifest["layer"], end)
    offsets = np.append(manifest["offset"].astype(np.int64), head.record_length)
    parts = np.zeros(len(first), _PART)
    parts["group"], parts["chunk"], parts["first"], parts["end"] = group, chunk, first, end
    parts["record_offset"], parts["stored"] = offsets[begin], offsets[behind] - offsets[begin]
    parts["slice"], parts["slices"] = begin + slice_first, behind - begin
    return parts


def _judge(
    found: Found, key: bytes, chunk: int, layout: ChunkLayout, body_max: int, codecs: Collection[int]
) -> End | Head:
    """Return a chunk's head after every check that it allows, or why it ends its group."""
    if isinstance(found, Unanswered):
        return End(chunk, unanswered=found)
    if found is None:
        return End(chunk)
    judged = _checked(found, key, layout, body_max, codecs)
    return End(chunk, fault=judged) if isinstance(judged, Fault) else judged


def _checked(stored: Stored, key: bytes, layout: ChunkLayout, body_max: int, codecs: Collection[int]) -> Fault | Head:
    try:
        head = parse_head(stored.head)
        head.expect(key, layout)
        manifest = head.slices
    except RecordError as error:
        return fault_of(error)
    if head.record_length != stored.length:
        return Fault(
            pb.OUTCOME_CORRUPT, f"the value has {stored.length} bytes, its header says {head.record_length}: it was cut"
        )
    if head.codec not in codecs:
        return Fault(pb.OUTCOME_UNSUPPORTED_CODEC, f"this build does not decode codec {head.codec}")
    if head.record_length - head.head_length > body_max:
        return Fault(pb.OUTCOME_CORRUPT, "its body is larger than any encoding of such a chunk")
    if not manifest["encoded_length"].all():
        return Fault(pb.OUTCOME_CORRUPT, "a slice of it is empty")
    return head


def _tables(
    groups: Sequence[Wanted],
    heads: Mapping[tuple[int, int], Head],
    chosen: _Parts,
    received: npt.NDArray[np.int64],
    decoded: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Write the pieces' and slices' tables that the C core reads."""
    places = list(zip(chosen["group"].tolist(), chosen["chunk"].tolist(), strict=True))
    counts = chosen["slices"]
    pieces = np.zeros(len(chosen), native.PIECE_DTYPE)
    names = [storage_key(groups[group].keys[chunk]) for group, chunk in places]
    pieces["key"] = names
    pieces["key_length"] = [len(name) for name in names]
    pieces["codec"] = [heads[place].codec for place in places]
    pieces["group"], pieces["chunk"] = chosen["group"], chosen["chunk"]
    pieces["record_offset"], pieces["body_length"] = chosen["record_offset"], chosen["stored"]
    pieces["decompression_offset"], pieces["dequantization_offset"] = received, decoded
    pieces["slice_first"], pieces["slice_count"] = np.cumsum(counts) - counts, counts
    pieces["result"] = native.Result.SKIPPED  # until the C core says otherwise
    slices = np.zeros(int(counts.sum()), native.SLICE_DTYPE)
    if len(chosen):
        manifest = np.concatenate([head.slices for head in heads.values()])
        targets = np.concatenate(
            [
                _raw_offsets(head.slices["tokens"], groups[group].layout) + chunk * groups[group].layout.raw_bytes
                for (group, chunk), head in heads.items()
            ]
        )
        index = np.arange(len(slices)) + np.repeat(chosen["slice"] - pieces["slice_first"], counts)
        manifest = manifest[index]
        symbols = np.array([group.layout.token_decoded_bytes for group in groups], np.int64)[chosen["group"]]
        slices["offset"] = manifest["offset"].astype(np.int64) - np.repeat(chosen["record_offset"], counts)
        slices["destination_offset"] = targets[index]
        slices["decoded_length"] = manifest["tokens"] * np.repeat(symbols, counts)
        slices["vectors"] = manifest["tokens"]
        for name in ("scales_length", "encoded_length", "checksum", "decoded_crc32"):
            slices[name] = manifest[name]
    return pieces, slices


def _raw_offsets(tokens: npt.NDArray[np.uint32], layout: ChunkLayout) -> npt.NDArray[np.int64]:
    """Return where each slice's elements begin in its chunk: slices cover it in order, so they follow each other."""
    raw: npt.NDArray[np.int64] = tokens.astype(np.int64) * (layout.vector_length * layout.dtype.itemsize)
    return np.cumsum(raw) - raw


def plan_store(
    keys: Sequence[bytes],
    positions: Sequence[int],
    layout: ChunkLayout,
    codec: native.Codec,
    bound: int,
    slice_bytes: int = DECODED_BYTES_MAX,
) -> StorePlan:
    """Lay out a batch of chunks for encoding.

    Args:
        keys: of the chunks.
        positions: of each in the region, in chunks.
        layout: of the chunks.
        codec: to encode with.
        bound: from :func:`encoded_bound`; the batch takes ``len(keys)`` times that, aligned.
        slice_bytes: most bytes of symbols in a slice.
    """
    manifest = plan_slices(layout, slice_bytes)
    count = len(manifest)
    pieces = np.zeros(len(keys), native.PIECE_DTYPE)
    names = [storage_key(key) for key in keys]
    pieces["key"] = names
    pieces["key_length"] = [len(name) for name in names]
    pieces["codec"] = codec
    pieces["chunk"] = np.arange(len(keys))
    pieces["decompression_offset"] = np.arange(len(keys)) * _align(bound)
    pieces["slice_first"] = np.arange(len(keys)) * count
    pieces["slice_count"] = count
    pieces["result"] = native.Result.SKIPPED
    slices = np.zeros(len(keys) * count, native.SLICE_DTYPE)
    starts = np.array(positions, np.int64) * layout.raw_bytes
    slices["destination_offset"] = (starts[:, None] + _raw_offsets(manifest["tokens"], layout)[None, :]).ravel()
    slices["decoded_length"] = np.tile(manifest["tokens"] * layout.token_decoded_bytes, len(keys))
    slices["scales_length"] = np.tile(manifest["scales_length"], len(keys))
    slices["vectors"] = np.tile(manifest["tokens"], len(keys))
    slices["bins"] = np.tile(layout.bins_of(manifest["kind"]), len(keys))
    return StorePlan(pieces, slices, manifest)
