"""Batches on paper: which pieces go together, and where each lies in every buffer, before any byte moves.

A piece is consecutive layers of one chunk of one group. Its *occupancy* in a buffer is the region of it that the piece
alone uses during the batch (ShadowServe section 4.3). The paper bounds the compressed size by the quantized one, since
it does not know it; here the records' heads are at hand, so every occupancy is exact and nothing is wasted.
"""

import contextlib
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
from shadowserve.record import Head, Manifest, parse_head, plan_slices, slices_of

__all__ = ["Buffers", "End", "FetchPlan", "StorePlan", "Wanted", "encoded_bound", "plan_fetch", "plan_store"]

ALIGNMENT: Final = 64
"""Of occupancies: a cache line, and what accelerators like."""
PIECES_MAX: Final = 16384
"""Pieces in one batch: the C core's limit, 4 Mi tokens at 256 a chunk."""


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
    """The pieces that one batch fetches, in their order.

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


@dataclass(frozen=True)
class _Cut:
    """The pieces of a group that have sound heads, with what the C core's tables are made of.

    Attributes:
        pieces: ``_PIECE`` array.
        heads: ``_HEAD`` array, of the chunks that pieces are of.
        slices: ``_SLICE`` array, of all their slices.
    """

    pieces: npt.NDArray[np.void]
    heads: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]


_PIECE: Final = np.dtype(
    [(name, np.int64) for name in ("group", "chunk", "first", "end", "offset", "stored", "symbols", "raw")]
    + [(name, np.int64) for name in ("head", "slice", "slices")]
)
"""Layers from ``first`` to ``end``; ``stored`` bytes from ``offset`` of the record, ``symbols`` decoded and ``raw`` in
memory; index of its head, of its first slice, and how many of these."""
_HEAD: Final = np.dtype([("key", f"S{native.KEY_SIZE_MAX}"), ("key_length", np.uint32), ("codec", np.uint32)])
_FROM_MANIFEST: Final = ("scales_length", "encoded_length", "checksum", "decoded_crc32")


def plan_fetch(groups: Sequence[Wanted], layerwise: bool, buffers: Buffers, codecs: Collection[int]) -> FetchPlan:
    """Choose the leading pieces that are stored, sound as far as their heads tell, and fit all buffers together.

    Args:
        groups: what is wanted.
        layerwise: a piece is one layer of a chunk, and they come layer by layer, groups of unlike numbers of layers
            side by side; else all wanted layers of a chunk, and they come chunk by chunk.
        buffers: to fit into.
        codecs: that this build decodes.
    """
    ends: dict[int, End] = {}
    full = False
    cuts = []
    for index, group in enumerate(groups):
        heads, end, more = _heads(group, layerwise, buffers, codecs)
        heads, manifest, flawed = _sound(heads)
        if flawed is not None:
            end, more = flawed, False
        if end is not None:
            ends[index] = end
        full = full or more
        if heads:
            cuts.append(_cut(index, group, heads, manifest, layerwise))
    cut = _together(cuts)
    pieces = cut.pieces
    if layerwise:
        depths = np.array([group.layout.layers for group in groups])
        pieces = pieces[np.lexsort((pieces["chunk"], pieces["group"], pieces["first"] / depths[pieces["group"]]))]
    elif len(cuts) > 1:
        pieces = pieces[np.lexsort((pieces["first"], pieces["group"], pieces["chunk"]))]
    places, count = _place(pieces, buffers)
    if layerwise and len(cuts) == 1 and count < len(pieces):  # a layer that lacks chunks is of use to nobody yet
        count = int(np.searchsorted(pieces["first"], pieces["first"][count])) or count
    chosen, (received, decoded) = pieces[:count], places[:, :count]
    table, slices = _tables(_Cut(chosen, cut.heads, cut.slices), received, decoded)
    if not layerwise:
        table["layer"] = chosen["chunk"]  # what is counted where a batch says how far it is
    layers = np.stack([chosen["first"], chosen["end"]], axis=1)
    return FetchPlan(table, slices, layers, full or count < len(pieces), ends)


def _heads(
    group: Wanted, layerwise: bool, buffers: Buffers, codecs: Collection[int]
) -> tuple[dict[int, Head], End | None, bool]:
    """Return the heads of wanted chunks up to where the group ends, if it does, or more would surely not fit.

    Their manifests are yet to be checked.
    """
    whole = np.logical_and.reduce(group.pieces, axis=0) & (not layerwise)
    whole_max = PIECES_MAX if buffers.dma_source is None else buffers.dma_source // group.layout.raw_bytes
    heads: dict[int, Head] = {}
    bodies = chunks = 0  # of chunks that are wanted whole
    for chunk in np.flatnonzero(group.pieces.any(axis=0)).tolist():
        if chunk not in group.found:
            return heads, None, True
        judged = _judge(group.found[chunk], group.keys[chunk], chunk, group.layout, buffers.decompression, codecs)
        if isinstance(judged, End):
            return heads, judged, False
        heads[chunk] = judged
        if whole[chunk]:
            bodies, chunks = bodies + judged.record_length - judged.head_length, chunks + 1
            if bodies > buffers.decompression or chunks > whole_max:
                break  # the last one will be found not to fit
    return heads, None, False


def _sound(heads: dict[int, Head]) -> tuple[dict[int, Head], Manifest, End | None]:
    """Return leading heads whose slices are as they have to be, these slices, and why not more."""
    with contextlib.suppress(RecordError):
        manifest = slices_of(list(heads.values()))
        if manifest["encoded_length"].all():
            return heads, manifest, None
    sound: dict[int, Head] = {}
    for chunk, head in heads.items():  # one after the other, since one of them is not
        try:
            fault = None if head.slices["encoded_length"].all() else Fault(pb.OUTCOME_CORRUPT, "a slice of it is empty")
        except RecordError as error:
            fault = fault_of(error)
        if fault is not None:
            return sound, slices_of(list(sound.values())), End(chunk, fault)
        sound[chunk] = head
    raise AssertionError("each manifest is sound, and all together are not")


def _cut(index: int, group: Wanted, heads: Mapping[int, Head], manifest: Manifest, layerwise: bool) -> _Cut:
    """Return the pieces of some chunks: one for each wanted layer, or one for each run of wanted layers."""
    layout, chunks = group.layout, np.array(list(heads), np.int64)
    wanted = group.pieces[:, chunks].T
    if layerwise:
        column, first = np.nonzero(wanted)
        end = first + 1
    else:
        column, edge = np.nonzero(np.diff(wanted, axis=1, prepend=False, append=False))
        column, first, end = column[::2], edge[::2], edge[1::2]
    counts = [len(head.manifest) for head in heads.values()]
    of = np.repeat(np.arange(len(heads)), counts)
    layer = of * layout.layers + manifest["layer"]
    begin, behind = (np.searchsorted(layer, column * layout.layers + edge) for edge in (first, end))
    stored = manifest["scales_length"].astype(np.int64) + manifest["encoded_length"]
    ends = manifest["offset"].astype(np.int64) + stored
    pieces = np.zeros(len(first), _PIECE)
    pieces["group"], pieces["chunk"], pieces["first"], pieces["end"] = index, chunks[column], first, end
    pieces["offset"] = ends[begin] - stored[begin]
    pieces["stored"] = ends[behind - 1] - pieces["offset"]
    pieces["symbols"] = (end - first) * (layout.kinds * layout.tokens * layout.token_decoded_bytes)
    pieces["raw"] = (end - first) * (layout.raw_bytes // layout.layers)
    pieces["head"], pieces["slice"], pieces["slices"] = column, begin, behind - begin
    table = np.zeros(len(heads), _HEAD)
    names = [storage_key(group.keys[chunk]) for chunk in heads]
    table["key"], table["key_length"] = names, [len(name) for name in names]
    table["codec"] = [head.codec for head in heads.values()]
    slices = np.zeros(len(manifest), native.SLICE_DTYPE)
    slices["offset"] = manifest["offset"]  # from the record's first byte, until it is known where the piece begins
    slices["destination_offset"] = (
        _raw_offsets(manifest["tokens"], layout) + ((chunks - np.arange(len(chunks))) * layout.raw_bytes)[of]
    )
    slices["decoded_length"] = manifest["tokens"] * layout.token_decoded_bytes
    slices["vectors"] = manifest["tokens"]
    for name in _FROM_MANIFEST:
        slices[name] = manifest[name]
    return _Cut(pieces, table, slices)


def _together(cuts: Sequence[_Cut]) -> _Cut:
    """Return the pieces of all groups, with indexes into what they have in common."""
    if not cuts:
        return _Cut(np.zeros(0, _PIECE), np.zeros(0, _HEAD), np.zeros(0, native.SLICE_DTYPE))
    heads = slices = 0
    for cut in cuts:
        cut.pieces["head"] += heads
        cut.pieces["slice"] += slices
        heads, slices = heads + len(cut.heads), slices + len(cut.slices)
    if len(cuts) == 1:
        return cuts[0]
    pieces, tables, all_slices = zip(*((cut.pieces, cut.heads, cut.slices) for cut in cuts), strict=True)
    joined = np.frombuffer(b"".join(all_slices), native.SLICE_DTYPE)  # concatenate() would pack the struct
    return _Cut(np.concatenate(pieces), np.concatenate(tables), joined)


def _place(pieces: npt.NDArray[np.void], buffers: Buffers) -> tuple[npt.NDArray[np.int64], int]:
    """Return where the pieces begin in the first two buffers, and how many leading ones all buffers hold together."""
    begins, fits = [], np.arange(len(pieces)) < PIECES_MAX
    sizes = (buffers.decompression, buffers.dequantization, buffers.dma_source)
    for name, size, alignment in zip(("stored", "symbols", "raw"), sizes, (ALIGNMENT, ALIGNMENT, 1), strict=True):
        aligned = -(-pieces[name] // alignment) * alignment
        begins.append(np.cumsum(aligned) - aligned)
        if size is not None:
            fits &= begins[-1] + pieces[name] <= size
    return np.array(begins[:2]), leading(fits)


def _judge(
    found: Found, key: bytes, chunk: int, layout: ChunkLayout, body_max: int, codecs: Collection[int]
) -> End | Head:
    """Return a chunk's head after every check but its manifest's, or why it ends its group."""
    if isinstance(found, Unanswered):
        return End(chunk, unanswered=found)
    if not isinstance(found, Stored):
        return End(chunk)
    judged = _checked(found, key, layout, body_max, codecs)
    return End(chunk, fault=judged) if isinstance(judged, Fault) else judged


def _checked(stored: Stored, key: bytes, layout: ChunkLayout, body_max: int, codecs: Collection[int]) -> Fault | Head:
    try:
        head = parse_head(stored.head)
        head.expect(key, layout)
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
    return head


def _tables(
    cut: _Cut, received: npt.NDArray[np.int64], decoded: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Write the pieces' and slices' tables that the C core reads."""
    chosen, heads = cut.pieces, cut.heads[cut.pieces["head"]]
    counts = chosen["slices"]
    pieces = np.zeros(len(chosen), native.PIECE_DTYPE)
    for name in ("key", "key_length", "codec"):
        pieces[name] = heads[name]
    pieces["group"], pieces["chunk"], pieces["layer"] = chosen["group"], chosen["chunk"], chosen["first"]
    pieces["record_offset"], pieces["body_length"] = chosen["offset"], chosen["stored"]
    pieces["decompression_offset"], pieces["dequantization_offset"] = received, decoded
    pieces["slice_first"], pieces["slice_count"] = np.cumsum(counts) - counts, counts
    pieces["result"] = native.Result.SKIPPED  # until the C core says otherwise
    index = np.arange(int(counts.sum())) + np.repeat(chosen["slice"] - pieces["slice_first"], counts)
    slices = cut.slices[index]
    slices["offset"] -= np.repeat(pieces["record_offset"], counts)
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
    place: int = 0,
) -> StorePlan:
    """Lay out a batch of chunks for encoding.

    Args:
        keys: of the chunks.
        positions: of each in the region, in chunks.
        layout: of the chunks.
        codec: to encode with.
        bound: from :func:`encoded_bound`; the batch takes ``len(keys)`` times that, aligned.
        slice_bytes: most bytes of symbols in a slice.
        place: in the store buffer, counted in such chunks.
    """
    manifest = plan_slices(layout, slice_bytes)
    count = len(manifest)
    pieces = np.zeros(len(keys), native.PIECE_DTYPE)
    names = [storage_key(key) for key in keys]
    pieces["key"] = names
    pieces["key_length"] = [len(name) for name in names]
    pieces["codec"] = codec
    pieces["chunk"] = np.arange(len(keys))
    pieces["decompression_offset"] = (place + np.arange(len(keys))) * _align(bound)
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
