"""Plans of batches: which pieces go together, and where each one lies in every buffer, before any byte moves.

The *occupancy* of a piece is its region of a buffer during the batch (ShadowServe section 4.3). Unlike in the paper,
the headers of the records are known, so every occupancy is exact.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.plan import FetchPart, FetchPlan, GroupEnd
from dpu_dataplane.sources.found import Fault, Stored, Unanswered, check_header, fault_of
from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout
from shadowserve.errors import RecordError
from shadowserve.keys import storage_key
from shadowserve.pieces import leading
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import Header, Manifest, plan_slices, slices_of

ALIGNMENT: Final = 64  # alignment of occupancies in bytes: a cache line; accelerators need it too
PIECES_MAX: Final = 16384  # most pieces of a batch, the C core's limit: 4 Mi tokens at 256 tokens a chunk


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Sizes of the pipeline's buffers in bytes; None for an unused one."""

    decompression: int
    dequantization: int | None
    dma_source: int | None
    store: int

    @property
    def total(self) -> int:
        return self.decompression + (self.dequantization or 0) + (self.dma_source or 0) + self.store


@dataclass(frozen=True)
class StorePlan:
    """A batch of chunks of one layout to encode; their manifests are completed from ``slices`` after encoding."""

    pieces: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]
    manifest: Manifest

    def manifest_of(self, index: int) -> Manifest:
        """Return the manifest of an encoded chunk, for :func:`shadowserve.record.encode_header`."""
        first, count = int(self.pieces[index]["slice_first"]), int(self.pieces[index]["slice_count"])
        filled = self.manifest.copy()
        for name in _FROM_MANIFEST:
            filled[name] = self.slices[name][first : first + count]
        return filled


def exact_vectors(layout: ChunkLayout, manifest: Manifest) -> int:
    """Return the number of vectors that slices of ``weighted`` have as they are."""
    one = layout.vector_length * layout.dtype.itemsize + 2  # its elements, and its number in the slice
    return int(((manifest["scales_length"].astype(np.int64) - layout.scales_bytes(0)) // one).sum())


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encoded_bound(layout: ChunkLayout, codec: native.Codec, slice_bytes: int = DECODED_BYTES_MAX) -> int:
    """Return the largest size of a chunk's body in bytes: its occupancy in the store buffer."""
    return (
        layout.layers
        * layout.kinds
        * sum(
            layout.scales_bytes(tokens) + native.compress_bound(codec, tokens * layout.token_decoded_bytes)
            for tokens in layout.cut(slice_bytes)
        )
    )


@dataclass(frozen=True)
class _GroupPieces:
    """The pieces of a group whose headers are sound, and what the C core's tables are made of."""

    pieces: npt.NDArray[np.void]  # ``_PIECE`` array
    headers: npt.NDArray[np.void]  # ``_HEADER`` array, a row for each chunk
    slices: npt.NDArray[np.void]  # ``_SLICE`` array, the slices of all these chunks


_PIECE: Final = np.dtype(
    [(name, np.int64) for name in ("group", "chunk", "first", "end", "offset", "stored", "symbols", "raw")]
    + [(name, np.int64) for name in ("header", "slice", "slices")]
)
"""Layers from ``first`` to ``end``; ``stored`` bytes from ``offset`` of the record, ``symbols`` bytes decoded and
``raw`` bytes in memory; index of the header, index of the first slice, and number of slices."""
_HEADER: Final = np.dtype([("key", f"S{native.KEY_SIZE_MAX}"), ("key_length", np.uint32), ("codec", np.uint32)])
_FROM_MANIFEST: Final = ("scales_length", "encoded_length", "checksum", "decoded_crc32")


def plan_fetch(parts: Sequence[FetchPart], layerwise: bool, buffers: Buffers, codecs: Collection[int]) -> FetchPlan:
    """Choose the leading remaining pieces that are stored, sound as far as their headers tell, and fit all buffers.

    With ``layerwise`` each piece is one layer of a chunk, in the order of layers, then of chunks; groups with different
    numbers of layers progress side by side. Otherwise a piece is a run of wanted layers, in the order of chunks.
    """
    ends: dict[int, GroupEnd] = {}
    full = False
    groups = []
    for index, part in enumerate(parts):
        headers, end, more = _find_headers(part, layerwise, buffers, codecs)
        headers, manifest, flawed = _check_manifests(headers)
        if flawed is not None:
            end, more = flawed, False
        if end is not None:
            ends[index] = end
        full = full or more
        if headers:
            groups.append(_cut_pieces(index, part, headers, manifest, layerwise))
    joined = _join(groups)
    pieces = joined.pieces
    if layerwise:
        depths = np.array([part.layout.layers for part in parts])[pieces["group"]]
        alike = bool((depths == depths[:1]).all())
        last, before = ("group", "chunk") if alike else ("chunk", "group")
        pieces = pieces[np.lexsort((pieces[last], pieces[before], pieces["first"] / depths))]
    elif len(groups) > 1:
        pieces = pieces[np.lexsort((pieces["first"], pieces["group"], pieces["chunk"]))]
    offsets, count = _fit(pieces, buffers)
    if layerwise and alike and count < len(pieces):  # the engine cannot use a layer that lacks chunks
        count = int(np.searchsorted(pieces["first"], pieces["first"][count])) or count
    chosen, (received, decoded) = pieces[:count], offsets[:, :count]
    table, slices = _tables(_GroupPieces(chosen, joined.headers, joined.slices), received, decoded)
    if not layerwise:
        table["layer"] = chosen["chunk"]  # the C core counts progress in the unit of this column
    places = chosen["group"].tolist(), chosen["chunk"].tolist()
    return FetchPlan(
        parts=parts,
        keys=[parts[group].keys[chunk] for group, chunk in zip(*places, strict=True)],
        pieces=table,
        slices=slices,
        layers=np.stack([chosen["first"], chosen["end"]], axis=1),
        full=full or count < len(pieces),
        ends=ends,
        layerwise=layerwise,
    )


def _find_headers(
    part: FetchPart, layerwise: bool, buffers: Buffers, codecs: Collection[int]
) -> tuple[dict[int, Header], GroupEnd | None, bool]:
    """Return the headers of remaining chunks, where the group ends if it does, and whether there may be more chunks.

    Stops where more surely would not fit. The manifests are not checked yet.
    """
    whole = np.logical_and.reduce(part.remaining, axis=0) & (not layerwise)
    whole_max = PIECES_MAX if buffers.dma_source is None else buffers.dma_source // part.layout.raw_bytes
    headers: dict[int, Header] = {}
    bodies = chunks = 0  # of chunks that are wanted whole
    for chunk in np.flatnonzero(part.remaining.any(axis=0)).tolist():
        if chunk not in part.found:
            return headers, None, True
        found = part.found[chunk]
        if not isinstance(found, Stored):
            return headers, GroupEnd(chunk, unanswered=found if isinstance(found, Unanswered) else None), False
        header = check_header(found, part.keys[chunk], part.layout, buffers.decompression, codecs)
        if isinstance(header, Fault):
            return headers, GroupEnd(chunk, fault=header), False
        headers[chunk] = header
        if whole[chunk]:
            bodies, chunks = bodies + header.record_length - header.header_length, chunks + 1
            if bodies > buffers.decompression or chunks > whole_max:
                break  # the last one will be found not to fit
    return headers, None, False


def _check_manifests(headers: dict[int, Header]) -> tuple[dict[int, Header], Manifest, GroupEnd | None]:
    """Return the leading headers with sound manifests, these manifests, and where the group ends if it does."""
    with contextlib.suppress(RecordError):
        manifest = slices_of(list(headers.values()))
        if manifest["encoded_length"].all():
            return headers, manifest, None
    sound: dict[int, Header] = {}
    for chunk, header in headers.items():  # one manifest is faulty: check them one by one
        try:
            empty = not header.slices["encoded_length"].all()
            fault = Fault(pb.OUTCOME_CORRUPT, "a slice of it is empty") if empty else None
        except RecordError as error:
            fault = fault_of(error)
        if fault is not None:
            return sound, slices_of(list(sound.values())), GroupEnd(chunk, fault)
        sound[chunk] = header
    raise AssertionError("each manifest is sound, and all together are not")


def _cut_pieces(
    index: int, part: FetchPart, headers: Mapping[int, Header], manifest: Manifest, layerwise: bool
) -> _GroupPieces:
    """Return the pieces of some chunks: one for each remaining layer, or one for each run of remaining layers."""
    layout, chunks = part.layout, np.array(list(headers), np.int64)
    wanted = part.remaining[:, chunks].T
    if layerwise:
        column, first = np.nonzero(wanted)
        end = first + 1
    else:
        column, edge = np.nonzero(np.diff(wanted, axis=1, prepend=False, append=False))
        column, first, end = column[::2], edge[::2], edge[1::2]
    counts = [len(header.manifest) for header in headers.values()]
    chunk_of_slice = np.repeat(np.arange(len(headers)), counts)
    layer = chunk_of_slice * layout.layers + manifest["layer"]
    slice_first, slice_end = (np.searchsorted(layer, column * layout.layers + edge) for edge in (first, end))
    stored = manifest["scales_length"].astype(np.int64) + manifest["encoded_length"]
    ends = manifest["offset"].astype(np.int64) + stored
    pieces = np.zeros(len(first), _PIECE)
    pieces["group"], pieces["chunk"], pieces["first"], pieces["end"] = index, chunks[column], first, end
    pieces["offset"] = ends[slice_first] - stored[slice_first]
    pieces["stored"] = ends[slice_end - 1] - pieces["offset"]
    pieces["symbols"] = (end - first) * (layout.kinds * layout.tokens * layout.token_decoded_bytes)
    pieces["raw"] = (end - first) * part.piece_bytes
    pieces["header"], pieces["slice"], pieces["slices"] = column, slice_first, slice_end - slice_first
    table = np.zeros(len(headers), _HEADER)
    names = [storage_key(part.keys[chunk]) for chunk in headers]
    table["key"], table["key_length"] = names, [len(name) for name in names]
    table["codec"] = [header.codec for header in headers.values()]
    slices = np.zeros(len(manifest), native.SLICE_DTYPE)
    slices["offset"] = manifest["offset"]  # from the record's first byte, until the beginning of the piece is known
    # Slices outside the window get offsets too, which nothing uses.
    chunk_offsets = chunks * part.chunk_bytes - np.arange(len(chunks)) * layout.raw_bytes
    chunk_offsets -= part.window.start * part.piece_bytes
    slices["memory_offset"] = _raw_offsets(manifest["tokens"], layout) + chunk_offsets[chunk_of_slice]
    slices["decoded_length"] = manifest["tokens"] * layout.token_decoded_bytes
    slices["vectors"] = manifest["tokens"]
    slices["row"] = _rows(manifest, layout)
    for name in _FROM_MANIFEST:
        slices[name] = manifest[name]
    return _GroupPieces(pieces, table, slices)


def _join(groups: Sequence[_GroupPieces]) -> _GroupPieces:
    if not groups:
        return _GroupPieces(np.zeros(0, _PIECE), np.zeros(0, _HEADER), np.zeros(0, native.SLICE_DTYPE))
    headers = slices = 0
    for group in groups:
        group.pieces["header"] += headers
        group.pieces["slice"] += slices
        headers, slices = headers + len(group.headers), slices + len(group.slices)
    if len(groups) == 1:
        return groups[0]
    pieces, tables, all_slices = zip(*((group.pieces, group.headers, group.slices) for group in groups), strict=True)
    joined = np.frombuffer(b"".join(all_slices), native.SLICE_DTYPE)  # concatenate() would pack the struct
    return _GroupPieces(np.concatenate(pieces), np.concatenate(tables), joined)


def _fit(pieces: npt.NDArray[np.void], buffers: Buffers) -> tuple[npt.NDArray[np.int64], int]:
    """Return the pieces' offsets in the first two buffers, and the number of leading pieces that all buffers hold."""
    offsets, fits = [], np.arange(len(pieces)) < PIECES_MAX
    sizes = (buffers.decompression, buffers.dequantization, buffers.dma_source)
    for name, size, alignment in zip(("stored", "symbols", "raw"), sizes, (ALIGNMENT, ALIGNMENT, 1), strict=True):
        aligned = -(-pieces[name] // alignment) * alignment
        offsets.append(np.cumsum(aligned) - aligned)
        if size is not None:
            fits &= offsets[-1] + pieces[name] <= size
    return np.array(offsets[:2]), leading(fits)


def _tables(
    group: _GroupPieces, received: npt.NDArray[np.int64], decoded: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    chosen, headers = group.pieces, group.headers[group.pieces["header"]]
    counts = chosen["slices"]
    pieces = np.zeros(len(chosen), native.PIECE_DTYPE)
    for name in ("key", "key_length", "codec"):
        pieces[name] = headers[name]
    pieces["group"], pieces["chunk"], pieces["layer"] = chosen["group"], chosen["chunk"], chosen["first"]
    pieces["record_offset"], pieces["body_length"] = chosen["offset"], chosen["stored"]
    pieces["decompression_offset"], pieces["dequantization_offset"] = received, decoded
    pieces["slice_first"], pieces["slice_count"] = np.cumsum(counts) - counts, counts
    pieces["result"] = native.Result.SKIPPED  # until the C core writes another one
    index = np.arange(int(counts.sum())) + np.repeat(chosen["slice"] - pieces["slice_first"], counts)
    slices = group.slices[index]
    slices["offset"] -= np.repeat(pieces["record_offset"], counts)
    return pieces, slices


def _raw_offsets(tokens: npt.NDArray[np.uint32], layout: ChunkLayout) -> npt.NDArray[np.int64]:
    """Return the offset of each slice's elements in its chunk: slices cover the chunk in order, without gaps."""
    raw: npt.NDArray[np.int64] = tokens.astype(np.int64) * (layout.vector_length * layout.dtype.itemsize)
    return np.cumsum(raw) - raw


def _rows(manifest: Manifest, layout: ChunkLayout) -> npt.NDArray[np.uint32]:
    """Return the row of channels of each slice, for ``weighted``."""
    rows: npt.NDArray[np.uint32] = manifest["layer"] * layout.kinds + manifest["kind"]
    return rows


def plan_store(
    keys: Sequence[bytes],
    indexes: Sequence[int],
    layout: ChunkLayout,
    codec: native.Codec,
    bound: int,
    slice_bytes: int = DECODED_BYTES_MAX,
    first: int = 0,
    positions: Sequence[int] = (),
) -> StorePlan:
    """Lay out a batch of chunks for encoding, from the ``indexes`` of the registered region.

    ``first`` is the first chunk's index in the store buffer, in units of ``bound`` (:func:`encoded_bound`), aligned;
    ``positions`` has the position of each chunk's first token in its prompt, for ``weighted``.
    """
    manifest = plan_slices(layout, slice_bytes)
    count = len(manifest)
    pieces = np.zeros(len(keys), native.PIECE_DTYPE)
    names = [storage_key(key) for key in keys]
    pieces["key"] = names
    pieces["key_length"] = [len(name) for name in names]
    pieces["codec"] = codec
    pieces["chunk"] = np.arange(len(keys))
    pieces["decompression_offset"] = (first + np.arange(len(keys))) * _align(bound)
    pieces["slice_first"] = np.arange(len(keys)) * count
    pieces["slice_count"] = count
    pieces["result"] = native.Result.SKIPPED
    slices = np.zeros(len(keys) * count, native.SLICE_DTYPE)
    starts = np.array(indexes, np.int64) * layout.raw_bytes
    slices["memory_offset"] = (starts[:, None] + _raw_offsets(manifest["tokens"], layout)[None, :]).ravel()
    slices["decoded_length"] = np.tile(manifest["tokens"] * layout.token_decoded_bytes, len(keys))
    slices["scales_length"] = np.tile(manifest["scales_length"], len(keys))
    slices["vectors"] = np.tile(manifest["tokens"], len(keys))
    slices["bins"] = np.tile(layout.bins_of(manifest["kind"]), len(keys))
    slices["row"] = np.tile(_rows(manifest, layout), len(keys))
    if positions:
        slices["position"] = (np.array(positions)[:, None] + manifest["token_first"]).ravel()
    return StorePlan(pieces, slices, manifest)
