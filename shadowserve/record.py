"""The stored record of one chunk (docs/reference/record-format.md): encode, decode, verify, slices.

Only this module knows the format. A record consists of a *header* (fixed fields, then the manifest of slices) and a
*body* (scales and compressed stream of each slice). The data plane parses headers here and passes the manifest to the C
core. The storage server verifies whole records here before it stores them.

Errors are :class:`~shadowserve.errors.NotARecordError`, :class:`~shadowserve.errors.CorruptRecordError` and
:class:`~shadowserve.errors.MismatchError`. Readers treat each as a miss.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, SLICES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import CorruptRecordError, MismatchError, NativeError, NotARecordError
from shadowserve.keys import KEY_BYTES, RECORD_VERSION

MAGIC: Final = b"SSKV"
FIXED_HEADER_BYTES: Final = 160

MANIFEST_DTYPE: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("layer", "<u4"),
        ("kind", "<u4"),
        ("token_first", "<u4"),
        ("tokens", "<u4"),
        ("scales_length", "<u4"),
        ("encoded_length", "<u4"),
        ("checksum", "<u4"),
        ("decoded_crc32", "<u4"),
    ]
)
"""One manifest entry, 40 bytes."""

_HEADER: Final = struct.Struct("<4sHHIIQBBBBHHIIIIQ32s32sII")
_HEADER_BYTES_OF: Final = {1: 128, 2: FIXED_HEADER_BYTES, 3: FIXED_HEADER_BYTES}
"""Length of the fixed fields by version. Version 2 adds the parent's key. Version 3 adds zeros before the body, so that
the body begins at a device's block."""
_PADDED_VERSION: Final = 3
_BLOCK_BYTES: Final = 4096
_NO_PARENT: Final = bytes(KEY_BYTES)
_CHECKSUM_OFFSET: Final = 12
_CHECKSUM_ZEROED: Final = bytes(4)
assert _HEADER.size + KEY_BYTES == FIXED_HEADER_BYTES and MANIFEST_DTYPE.itemsize == 40

HEADER_BYTES_MAX: Final = 1 << 20
"""Longest header with manifest; limits a reader's buffer."""
assert FIXED_HEADER_BYTES + SLICES_MAX * MANIFEST_DTYPE.itemsize <= HEADER_BYTES_MAX

Manifest = npt.NDArray[np.void]
"""Array of :data:`MANIFEST_DTYPE`, in the order of the chunk's layout."""

Data = bytes | bytearray | memoryview


def plan_slices(layout: ChunkLayout, slice_bytes: int = DECODED_BYTES_MAX) -> Manifest:
    """Return a manifest for a writer: the slices' contents and lengths of scales; the other columns are zero."""
    pieces = layout.cut(slice_bytes)
    manifest = np.zeros(layout.layers * layout.kinds * len(pieces), MANIFEST_DTYPE)
    rows = np.arange(layout.layers * layout.kinds).repeat(len(pieces))
    manifest["layer"], manifest["kind"] = rows // layout.kinds, rows % layout.kinds
    manifest["tokens"] = np.tile(pieces, layout.layers * layout.kinds)
    manifest["token_first"] = np.tile(np.cumsum([0, *pieces[:-1]]), layout.layers * layout.kinds)
    manifest["scales_length"] = layout.scales_bytes(manifest["tokens"].astype(np.int64))
    return manifest


@dataclass(frozen=True)
class Header:
    """Header with valid lengths and checksum. :meth:`expect` and :attr:`slices` check its contents.

    Attributes:
        parent: Key of the previous chunk's record in the prompt, 32 bytes; empty for the first chunk and in version 1.
    """

    key: bytes  # record key, 32 bytes
    codec: int  # codec byte; this build may not know the codec
    layout: ChunkLayout  # layout of the chunk
    header_length: int  # bytes of fixed fields, manifest and zeros before the body
    record_length: int  # bytes of the whole record
    parent: bytes
    manifest: Manifest  # the manifest as stored, unchecked

    def expect(self, key: bytes, layout: ChunkLayout | None = None) -> None:
        """Raise MismatchError unless this is the record of ``key`` and, if given, of ``layout``."""
        if self.key != key:
            raise MismatchError(
                f"record of key {self.key.hex()} is stored under key {key.hex()}; it is treated as a miss"
            )
        if layout is not None and self.layout != layout:
            differing = [name for name in vars(layout) if getattr(self.layout, name) != getattr(layout, name)]
            raise MismatchError(
                f"record of key {key.hex()} has another {', '.join(differing)} than requested; it is treated as a miss"
            )

    @cached_property
    def slices(self) -> Manifest:
        """The manifest, checked: slices cover the chunk in order and fill the body without gaps."""
        return slices_of([self])

    @property
    def decoded_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of symbols of each slice."""
        lengths: npt.NDArray[np.int64] = self.manifest["tokens"].astype(np.int64) * self.layout.token_decoded_bytes
        return lengths


def slices_of(headers: Sequence[Header]) -> Manifest:
    """Return the concatenated manifests of headers of one layout, checked as in :attr:`Header.slices`.

    One call checks all headers: a fetch waits for it, and numpy's cost per call exceeds that of one header's data.
    """
    manifest: Manifest = np.frombuffer(b"".join(header.manifest for header in headers), MANIFEST_DTYPE)
    if not headers:
        return manifest
    layout, counts = headers[0].layout, [len(header.manifest) for header in headers]
    chunk_tokens = layout.layers * layout.kinds * layout.tokens
    of, last = np.repeat(np.arange(len(headers)), counts), np.cumsum(counts) - 1
    header_lengths, lengths = np.array([(header.header_length, header.record_length) for header in headers], np.int64).T
    layers, kinds, tokens, first, scales = (
        manifest[name].astype(np.int64) for name in ("layer", "kind", "tokens", "token_first", "scales_length")
    )
    stored = scales + manifest["encoded_length"]
    position = ((of * layout.layers + layers) * layout.kinds + kinds) * layout.tokens + first
    ends, behind = np.cumsum(tokens), np.cumsum(stored)
    sound = (
        all(counts)
        and bool((tokens > 0).all())
        and bool((layers < layout.layers).all())
        and bool((kinds < layout.kinds).all())
        and bool((first + tokens <= layout.tokens).all())
        and bool((position == ends - tokens).all())
        and bool((ends[last] == (np.arange(len(headers)) + 1) * chunk_tokens).all())
        and bool((tokens * layout.token_decoded_bytes <= DECODED_BYTES_MAX).all())
        and bool(layout.scales_fit(scales, tokens).all())
        and bool((behind[last] == np.cumsum(lengths - header_lengths)).all())
        and bool((manifest["offset"] == (lengths - behind[last])[of] + behind - stored).all())
    )
    if not sound:
        raise CorruptRecordError(
            f"manifest of record {headers[0].key.hex()} does not cover its chunk: the writer is faulty; delete it"
        )
    return manifest


def encode_header(
    key: bytes,
    codec: native.Codec,
    layout: ChunkLayout,
    manifest: Manifest,
    *,
    parent: bytes = b"",
    in_blocks: bool = False,
) -> bytes:
    """Return the header of a record.

    Args:
        manifest: Result of :func:`plan_slices` with encoded_length, checksum and decoded_crc32 filled in. Offsets are
            computed here: slices follow each other without gaps.
        parent: Key of the previous chunk's record in the prompt; empty for the first. Eviction uses it: a chunk is
            useless without those before it.
        in_blocks: Start the body at a block of 4096 bytes on a device, so that a device can read slices directly into
            their target.
    """
    if len(key) != KEY_BYTES or len(parent) not in (0, KEY_BYTES):
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}, its parent's {len(parent)}")
    placed = manifest.copy()
    padding = -(native.OBJECT_HEADER_BYTES + FIXED_HEADER_BYTES + placed.nbytes) % _BLOCK_BYTES if in_blocks else 0
    header_length = FIXED_HEADER_BYTES + placed.nbytes + padding
    stored = placed["scales_length"].astype(np.uint64) + placed["encoded_length"]
    placed["offset"] = header_length + np.cumsum(stored) - stored
    header = _HEADER.pack(
        MAGIC,
        _PADDED_VERSION if padding else RECORD_VERSION,
        FIXED_HEADER_BYTES,
        header_length,
        0,
        header_length + int(stored.sum()),
        codec,
        layout.quantizer,
        layout.dtype,
        layout.kinds,
        layout.bins,
        layout.value_bins,
        layout.tokens,
        layout.layers,
        layout.vector_length,
        len(placed),
        layout.raw_bytes,
        key,
        layout.namespace,
        layout.scale_tokens if layout.scale_tokens > 1 else 0,
        padding,
    )
    whole = bytearray(header + (parent or _NO_PARENT) + placed.tobytes() + bytes(padding))
    struct.pack_into("<I", whole, _CHECKSUM_OFFSET, native.crc32(whole))
    return bytes(whole)


def header_length(data: Data) -> int:
    """Return the claimed length of the header at the start of ``data``; 0 if no header can begin so."""
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        return 0
    length: int = _HEADER.unpack_from(data)[3]
    return length if length <= HEADER_BYTES_MAX else 0


class HeaderPeek(NamedTuple):
    """Fields of a header that a lookup needs."""

    key: bytes
    namespace: bytes
    codec: int
    record_length: int


def peek_header(data: Data) -> HeaderPeek:
    """Check version, lengths and checksum of the header at the start of ``data``, without layout and manifest.

    A lookup checks hundreds of headers in a few milliseconds. Raises as :func:`parse_header`.
    """
    fields = _read_header(memoryview(data))
    return HeaderPeek(fields[-4], fields[-3], fields[6], fields[5])


def _read_header(view: memoryview) -> tuple[Any, ...]:
    """Return the fixed fields, after the checks of lengths and checksum."""
    if bytes(view[:4]) != MAGIC:
        raise NotARecordError(f"the value does not begin with {MAGIC.decode()}: it is not a record")
    if len(view) < _HEADER.size:
        raise CorruptRecordError(f"the record is cut off after {len(view)} bytes, within its header")
    fields = _HEADER.unpack_from(view)
    version, header_length, claimed, checksum, record_length, count, padding = *fields[1:6], fields[15], fields[-1]
    if version not in _HEADER_BYTES_OF or (version == _PADDED_VERSION and not padding):
        raise NotARecordError(
            f"the record has version {version}; this build reads versions 1 to {max(_HEADER_BYTES_OF)}"
        )
    if (
        header_length != _HEADER_BYTES_OF[version]
        or claimed != header_length + count * MANIFEST_DTYPE.itemsize + padding
        or padding >= (_BLOCK_BYTES if version == _PADDED_VERSION else 1)
        or claimed > HEADER_BYTES_MAX
        or not claimed <= record_length < 1 << 63
    ):
        raise CorruptRecordError("the record's lengths contradict each other")
    if len(view) < claimed:
        raise CorruptRecordError(f"the record is cut off after {len(view)} bytes, within its manifest")
    if _header_checksum(view[:claimed]) != checksum or view[claimed - padding : claimed] != bytes(padding):
        raise CorruptRecordError("the header's checksum is wrong: bytes have changed since the record was written")
    return fields


def layer_bounds(data: Data) -> npt.NDArray[np.int64]:
    """Return the byte range of each layer in a verified record: layer ``i`` is ``[bounds[i], bounds[i + 1])``."""
    view = memoryview(data)
    fields = _read_header(view)
    manifest = np.frombuffer(view[fields[2] :], MANIFEST_DTYPE, fields[15])
    offsets = np.append(manifest["offset"].astype(np.int64), fields[5])
    bounds = offsets[np.searchsorted(manifest["layer"], np.arange(fields[13] + 1))]
    if (np.diff(bounds) < 0).any() or bounds[-1] > fields[5]:
        raise CorruptRecordError("the record's layers do not follow each other")
    return bounds


@lru_cache(maxsize=64)
def _layout(namespace: bytes, dtype: int, layers: int, *numbers: int) -> ChunkLayout:
    """Return a record's layout. Cached: a model has few layouts, and a fetch waits for their checks."""
    kinds, vector_length, tokens, quantizer, bins, value_bins, scale_tokens = numbers
    return ChunkLayout(
        namespace=namespace,
        dtype=DType(dtype),
        layers=layers,
        kinds=kinds,
        vector_length=vector_length,
        tokens=tokens,
        quantizer=Quantizer(quantizer),
        bins=bins,
        value_bins=value_bins,
        scale_tokens=scale_tokens,
    )


def parse_header(data: Data) -> Header:
    """Parse the header at the start of ``data``; more bytes may follow it.

    Raises:
        NotARecordError: The magic or the version is unknown.
        CorruptRecordError: The data is too short, lengths or checksum are wrong, or the layout is invalid.
    """
    view = memoryview(data)
    (_, _, header_length, length, _, record_length, codec, quantizer, dtype, kinds, bins, value_bins, tokens,
     layers, vector_length, count, raw_length, key, namespace, scale_tokens, _) = _read_header(view)  # fmt: skip
    try:
        layout = _layout(
            namespace, dtype, layers, kinds, vector_length, tokens, quantizer, bins, value_bins, scale_tokens or 1
        )
    except ValueError as error:
        raise CorruptRecordError(f"the header's layout is invalid: {error}") from error
    if scale_tokens == 1:
        raise CorruptRecordError("the header's scale_tokens is 1, which must be written as 0")
    if raw_length != layout.raw_bytes:
        raise CorruptRecordError(f"the raw length is {raw_length}, the shape gives {layout.raw_bytes}")
    parent = bytes(view[_HEADER.size : header_length])
    manifest = np.frombuffer(view[header_length:], MANIFEST_DTYPE, count)
    return Header(key, codec, layout, length, record_length, parent if any(parent) else b"", manifest)


def _header_checksum(header: memoryview) -> int:
    crc = zlib.crc32(_CHECKSUM_ZEROED, zlib.crc32(header[:_CHECKSUM_OFFSET]))
    return zlib.crc32(header[_CHECKSUM_OFFSET + 4 :], crc)  # faster than a call into the C core up to about 4 KB


def verify(data: Data, key: bytes) -> Header:
    """Check a whole record without decoding it: header, manifest, and the checksum of each slice.

    Raises:
        NotARecordError, CorruptRecordError, MismatchError: The record is invalid, or has another key.
    """
    header = parse_header(data)
    header.expect(key)
    view = memoryview(data)
    if len(view) != header.record_length:
        raise CorruptRecordError(f"the record has {len(view)} bytes, its header says {header.record_length}")
    for entry, stored in _stored_slices(header, view):
        if native.crc32(stored) != entry["checksum"]:
            raise CorruptRecordError(
                f"slice of layer {entry['layer']}, kind {entry['kind']} of record {key.hex()}: checksum is wrong"
            )
    return header


def _stored_slices(header: Header, record: memoryview) -> Iterator[tuple[Any, memoryview]]:
    for entry in header.slices:
        begin = int(entry["offset"])
        yield entry, record[begin : begin + int(entry["scales_length"]) + int(entry["encoded_length"])]


def encode(
    key: bytes,
    codec: native.Codec,
    layout: ChunkLayout,
    kv: Data,
    *,
    parent: bytes = b"",
    channels: native.Channels | None = None,
    position: int = 0,
) -> bytes:
    """Return the record of one chunk. This is the reference for the data plane's encoder, and a tool for tests.

    ``weighted`` needs the ``channels``, and the ``position`` of the chunk's first token in its prompt.

    Raises:
        ValueError: ``kv`` or a key has another length.
        NativeError: Values cannot be quantized, or the codec is not built in.
    """
    view = memoryview(kv).cast("B")
    if len(view) != layout.raw_bytes:
        raise ValueError(f"the chunk has {len(view)} bytes, its layout {layout.raw_bytes}")
    manifest = plan_slices(layout)
    body, begin = bytearray(), 0
    token_bytes = layout.vector_length * layout.dtype.itemsize
    row_length = token_bytes if layout.quantizer is Quantizer.PASSTHROUGH else layout.vector_length
    for entry, bins in zip(manifest, layout.bins_of(manifest["kind"]).tolist(), strict=True):
        tokens = int(entry["tokens"])
        source = view[begin : begin + tokens * token_bytes]
        begin += tokens * token_bytes
        symbols_array, scales_array = native.quantize(
            layout.quantizer,
            layout.dtype,
            source,
            vectors=tokens,
            vector_length=layout.vector_length,
            bins=bins,
            scale_vectors=layout.scale_tokens,
            place=_place(layout, entry, channels, position),
        )
        symbols, scales = symbols_array.tobytes(), scales_array.tobytes()
        stream = native.compress(codec, symbols, row_length)
        entry["scales_length"], entry["encoded_length"] = len(scales), len(stream)
        entry["checksum"] = native.crc32(stream, native.crc32(scales))
        entry["decoded_crc32"] = native.crc32(symbols)
        body += scales
        body += stream
    return encode_header(key, codec, layout, manifest, parent=parent) + bytes(body)


def _place(layout: ChunkLayout, entry: Any, channels: native.Channels | None, position: int = 0) -> native.Place | None:
    """Return the channels of a slice of a chunk at a position; None unless the layout is ``weighted``."""
    if layout.quantizer is not Quantizer.WEIGHTED:
        return None
    if channels is None:
        raise ValueError("a record of 'weighted' needs the steps of its channels, which are not in the record")
    row = int(entry["layer"]) * layout.kinds + int(entry["kind"])
    return native.Place(channels, row, position + int(entry["token_first"]))


def decode(data: Data, key: bytes, layout: ChunkLayout, *, channels: native.Channels | None = None) -> bytearray:
    """Return the KV of a record in its layout, after all checks. ``channels``: as for :func:`encode`.

    Raises:
        NotARecordError, CorruptRecordError, MismatchError: The record is invalid, has another key or layout, or has a
            codec that is not built in.
        NativeError: Out of memory.
    """
    header = verify(data, key)
    header.expect(key, layout)
    codec = _codec(header)
    kv = bytearray()
    for (entry, stored), decoded_length in zip(
        _stored_slices(header, memoryview(data)), header.decoded_lengths.tolist(), strict=True
    ):
        scales, stream = stored[: int(entry["scales_length"])], stored[int(entry["scales_length"]) :]
        try:
            symbols = native.decompress(codec, stream, decoded_length)
        except NativeError as error:
            if error.result != native.Result.BAD_DATA:
                raise  # such as out of memory: the record is not at fault
            raise CorruptRecordError(f"a slice of record {key.hex()} does not decode: {error}") from error
        if native.crc32(symbols) != entry["decoded_crc32"]:
            raise CorruptRecordError(f"a slice of record {key.hex()} decodes to other bytes than were stored")
        kv += _dequantize(header, entry, symbols, scales, _place(layout, entry, channels))
    return kv


def decode_into(data: Data, key: bytes, layout: ChunkLayout, target: Data, each: native.Each = map) -> int:
    """Decode the record at the start of ``data`` into memory of the layout's size; return the record's length.

    As fast as the C core, for readers without a data plane. As there, the CRC-32 of a slice covers the stored bytes.
    After an error the content of ``target`` is undefined. ``binned`` is not supported. ``each`` as in
    :func:`~shadowserve.native.decode_slices`.

    Raises:
        NotARecordError, CorruptRecordError, MismatchError: As :func:`decode`.
    """
    header = parse_header(data)
    header.expect(key, layout)
    if header.record_length > len(data):
        raise CorruptRecordError(f"the record is cut off after {len(data)} bytes, within its body")
    names = ("offset", "encoded_length", "checksum", "tokens")
    slices = list(zip(*(header.slices[name].tolist() for name in names), strict=True))
    try:
        native.decode_slices(
            _codec(header), layout.quantizer, layout.dtype, layout.vector_length, data, slices, target, each
        )
    except NativeError as error:
        if error.result not in (native.Result.BAD_DATA, native.Result.CHECKSUM):
            raise
        raise CorruptRecordError(f"record {key.hex()} is damaged: {error}") from error
    return header.record_length


def _codec(header: Header) -> native.Codec:
    if header.codec not in native.codec_implementations():
        known = ", ".join(codec.name.lower() for codec in native.codec_implementations())
        raise MismatchError(
            f"record {header.key.hex()} has codec {header.codec}, which this build cannot decode; it has {known}"
        )
    return native.Codec(header.codec)


def _dequantize(header: Header, entry: Any, symbols: bytes, scales: memoryview, place: native.Place | None) -> bytes:
    layout = header.layout
    try:
        return native.dequantize(
            layout.quantizer,
            layout.dtype,
            symbols,
            scales,
            vectors=int(entry["tokens"]),
            vector_length=layout.vector_length,
            scale_vectors=layout.scale_tokens,
            place=place,
        ).tobytes()
    except NativeError as error:  # such as a scale that is not finite; our writers never store one
        raise CorruptRecordError(f"a slice of record {header.key.hex()} cannot be dequantized: {error}") from error
