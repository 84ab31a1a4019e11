"""Rounds on paper: which chunks go together, and where each lies in every buffer, before any byte moves.

A chunk's *occupancy* in a buffer is the region of it that the chunk alone uses during the round (ShadowServe section
4.3). The paper bounds the compressed size by the quantized one, since it does not know it; here the records' heads are
at hand, so every occupancy is exact and nothing is wasted.
"""

from collections.abc import Collection, Sequence
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
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import Head, Manifest, parse_head, plan_slices

__all__ = ["Buffers", "FetchPlan", "StorePlan", "encoded_bound", "plan_fetch", "plan_store"]

ALIGNMENT: Final = 64
"""Of occupancies: a cache line, and what accelerators like."""
CHUNKS_MAX: Final = 16384
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
class FetchPlan:
    """The leading chunks that one round fetches.

    Attributes:
        chunks: PIECE_DTYPE array.
        slices: SLICE_DTYPE array.
        full: the buffers hold no more, though more chunks were asked for.
        fault: of the chunk behind the last, if that is why it is the last.
        absent: the chunk behind the last is not stored.
        unanswered: why a cluster's node did not say what it holds of the chunk behind the last.
    """

    chunks: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]
    full: bool = False
    fault: Fault | None = None
    absent: bool = False
    unanswered: Unanswered | None = None


@dataclass(frozen=True)
class StorePlan:
    """A batch of chunks to encode; all of one layout, their manifests yet to be filled in from ``slices``."""

    chunks: npt.NDArray[np.void]
    slices: npt.NDArray[np.void]
    manifest: Manifest

    def manifest_of(self, index: int) -> Manifest:
        """Return a chunk's manifest after it was encoded, as :func:`shadowserve.record.encode_head` wants it."""
        first, count = int(self.chunks[index]["slice_first"]), int(self.chunks[index]["slice_count"])
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


def plan_fetch(
    keys: Sequence[bytes],
    found: Sequence[tuple[Found, bool]],
    layout: ChunkLayout,
    buffers: Buffers,
    codecs: Collection[int],
) -> FetchPlan:
    """Choose the leading chunks that are stored, sound as far as their heads tell, and fit all buffers together.

    Args:
        keys: of the chunks, in order; more than ``found`` where not all were asked for.
        found: what storage holds under the first of them, from :meth:`Catalog.find`.
        layout: that every chunk must have.
        buffers: to fit into.
        codecs: that this build decodes.
    """
    heads: list[Head] = []
    offsets: list[int] = []
    position = 0
    decoded_bytes = layout.layers * layout.kinds * layout.tokens * layout.token_decoded_bytes
    count_max = min(
        CHUNKS_MAX,
        CHUNKS_MAX if buffers.dequantization is None else buffers.dequantization // _align(decoded_bytes),
        CHUNKS_MAX if buffers.dma_source is None else buffers.dma_source // layout.raw_bytes,
    )
    full, fault, absent, unanswered = len(found) < len(keys), None, False, None
    for key, (stored, _) in zip(keys, found, strict=False):
        if isinstance(stored, Unanswered):
            unanswered = stored
            break
        if stored is None:
            absent = True
            break
        judged = _judge(stored, key, layout, buffers.decompression, codecs)
        if isinstance(judged, Fault):
            fault = judged
            break
        body = judged.record_length - judged.head_length
        if len(heads) == count_max or position + body > buffers.decompression:
            full = True
            break
        heads.append(judged)
        offsets.append(position)
        position = _align(position + body)
    chunks, slices = _tables(keys, heads, offsets, layout, _align(decoded_bytes))
    ended = absent or fault is not None or unanswered is not None
    return FetchPlan(chunks, slices, full and not ended, fault, absent, unanswered)


def _judge(stored: Stored, key: bytes, layout: ChunkLayout, body_max: int, codecs: Collection[int]) -> Fault | Head:
    """Make every check that the head allows."""
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
    keys: Sequence[bytes], heads: list[Head], offsets: list[int], layout: ChunkLayout, decoded_stride: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """Write the chunks' and slices' tables that the C core reads."""
    counts = np.array([len(head.manifest) for head in heads], np.int64)
    head_lengths = np.array([head.head_length for head in heads], np.int64)
    chunks = np.zeros(len(heads), native.PIECE_DTYPE)
    names = [storage_key(key) for key in keys[: len(heads)]]
    chunks["key"] = names
    chunks["key_length"] = [len(name) for name in names]
    chunks["codec"] = [head.codec for head in heads]
    chunks["chunk"] = np.arange(len(heads))
    chunks["record_offset"] = head_lengths
    chunks["body_length"] = [head.record_length - head.head_length for head in heads]
    chunks["decompression_offset"] = offsets
    chunks["dequantization_offset"] = np.arange(len(heads)) * decoded_stride
    chunks["slice_first"] = np.cumsum(counts) - counts
    chunks["slice_count"] = counts
    chunks["result"] = native.Result.SKIPPED  # until the C core says otherwise
    slices = np.zeros(int(counts.sum()), native.SLICE_DTYPE)
    if heads:
        manifest = np.concatenate([head.slices for head in heads])
        slices["offset"] = manifest["offset"].astype(np.int64) - np.repeat(head_lengths, counts)
        slices["destination_offset"] = _raw_offsets(manifest["tokens"], layout)
        slices["decoded_length"] = manifest["tokens"] * layout.token_decoded_bytes
        slices["vectors"] = manifest["tokens"]
        for name in ("scales_length", "encoded_length", "checksum", "decoded_crc32"):
            slices[name] = manifest[name]
    return chunks, slices


def _raw_offsets(tokens: npt.NDArray[np.uint32], layout: ChunkLayout) -> npt.NDArray[np.int64]:
    """Return where each slice's elements begin: slices cover all chunks in order, so they follow each other."""
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
    chunks = np.zeros(len(keys), native.PIECE_DTYPE)
    names = [storage_key(key) for key in keys]
    chunks["key"] = names
    chunks["key_length"] = [len(name) for name in names]
    chunks["codec"] = codec
    chunks["chunk"] = np.arange(len(keys))
    chunks["decompression_offset"] = np.arange(len(keys)) * _align(bound)
    chunks["slice_first"] = np.arange(len(keys)) * count
    chunks["slice_count"] = count
    chunks["result"] = native.Result.SKIPPED
    slices = np.zeros(len(keys) * count, native.SLICE_DTYPE)
    starts = np.array(positions, np.int64) * layout.raw_bytes
    slices["destination_offset"] = (starts[:, None] + _raw_offsets(manifest["tokens"], layout)[None, :]).ravel()
    slices["decoded_length"] = np.tile(manifest["tokens"] * layout.token_decoded_bytes, len(keys))
    slices["scales_length"] = np.tile(manifest["scales_length"], len(keys))
    slices["vectors"] = np.tile(manifest["tokens"], len(keys))
    slices["bins"] = np.tile(layout.bins_of(manifest["kind"]), len(keys))
    return StorePlan(chunks, slices, manifest)
