"""Records for the tests of the stored record: sound ones, damaged ones and forged ones."""

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.native import Codec
from shadowserve.record import FIXED_HEADER_BYTES, MANIFEST_DTYPE, Header, Manifest, encode

KEY = bytes(range(32))
NAMESPACE = bytes(range(100, 132))
BUILT_IN = sorted(native.codec_implementations())

# docs/reference/record-format.md again, independent of the module under test.
HEADER_FIELDS = (
    ("magic", "4s"),
    ("version", "H"),
    ("fixed_length", "H"),
    ("header_length", "I"),
    ("checksum", "I"),
    ("record_length", "Q"),
    ("codec", "B"),
    ("quantizer", "B"),
    ("dtype", "B"),
    ("kinds", "B"),
    ("bins", "H"),
    ("value_bins", "H"),
    ("tokens", "I"),
    ("layers", "I"),
    ("vector_length", "I"),
    ("slices", "I"),
    ("raw_length", "Q"),
    ("key", "32s"),
    ("namespace", "32s"),
    ("scale_tokens", "I"),
    ("reserved", "4s"),
    ("parent", "32s"),
)
HEADER = struct.Struct("<" + "".join(code for _, code in HEADER_FIELDS))


def make_layout(
    quantizer: Quantizer = Quantizer.LOSSLESS,
    dtype: DType = DType.BFLOAT16,
    layers: int = 2,
    kinds: int = 2,
    tokens: int = 3,
    vector_length: int = 4,
    **changes: Any,
) -> ChunkLayout:
    return ChunkLayout(
        namespace=NAMESPACE,
        dtype=dtype,
        layers=layers,
        kinds=kinds,
        vector_length=vector_length,
        tokens=tokens,
        quantizer=quantizer,
        **({"bins": 32 if quantizer is Quantizer.BINNED else 0} | changes),
    )


# Every float8_e4m3 without a sign: 2^-9 steps under 2^-6, then 8 steps for each power of two; the last is NaN.
FLOAT8_VALUES = np.array(
    [
        mantissa / 512 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
)


def as_elements(values: npt.NDArray[np.float32], dtype: DType) -> bytes:
    """Return the bytes of ``values`` in ``dtype``; bfloat16 by truncation of a float32."""
    if dtype is DType.UINT8:
        return values.astype(np.uint8).tobytes()
    if dtype is DType.FLOAT8_E4M3:
        nearest = np.abs(np.abs(values).reshape(-1, 1) - FLOAT8_VALUES).argmin(axis=1)
        return (nearest + 128 * (values.ravel() < 0)).astype(np.uint8).tobytes()
    if dtype is DType.FLOAT16:
        return values.astype(np.float16).tobytes()
    if dtype is DType.FLOAT32:
        return values.astype(np.float32).tobytes()
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def as_values(data: bytes | bytearray, dtype: DType) -> npt.NDArray[np.float64]:
    if dtype is DType.BFLOAT16:
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype is DType.FLOAT8_E4M3:
        patterns = np.frombuffer(data, np.uint8)
        return FLOAT8_VALUES[patterns & 127] * np.where(patterns < 128, 1, -1)
    return np.frombuffer(data, {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32}[dtype]).astype(np.float64)


def pattern(layout: ChunkLayout, seed: int = 0) -> bytes:
    """Return KV-like data: normal values, with another magnitude in each vector."""
    vectors = layout.layers * layout.kinds * layout.tokens
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((vectors, layout.vector_length)) * np.linspace(1, 9, vectors)[:, None]
    return as_elements(values.astype(np.float32), layout.dtype)


def make_record(layout: ChunkLayout | None = None, codec: Codec = Codec.DEFLATE) -> bytes:
    layout = layout or make_layout()
    return encode(KEY, codec, layout, pattern(layout))


def read_header(record: bytes) -> dict[str, Any]:
    return dict(zip([name for name, _ in HEADER_FIELDS], HEADER.unpack_from(record), strict=True))


def read_manifest(record: bytes) -> Manifest:
    return np.frombuffer(record[FIXED_HEADER_BYTES : read_header(record)["header_length"]], MANIFEST_DTYPE).copy()


def seal(record: bytes) -> bytes:
    """Return the record with a right checksum over its header, as from a faulty or hostile writer."""
    sealed = bytearray(record)
    header_bytes = min(read_header(record)["header_length"], len(record))
    sealed[12:16] = bytes(4)
    sealed[12:16] = struct.pack("<I", zlib.crc32(sealed[:header_bytes]))
    return bytes(sealed)


def forge(record: bytes, manifest: Manifest | None = None, body: bytes | None = None, **header: Any) -> bytes:
    """Return the record with other parts, matching header lengths by default, and a right checksum."""
    original = read_header(record)
    manifest = read_manifest(record) if manifest is None else manifest
    body = record[original["header_length"] :] if body is None else body
    header_bytes = FIXED_HEADER_BYTES + manifest.nbytes
    lengths = {"slices": len(manifest), "header_length": header_bytes, "record_length": header_bytes + len(body)}
    values = original | lengths | header
    return seal(HEADER.pack(*(values[name] for name, _ in HEADER_FIELDS)) + manifest.tobytes() + body)


def flipped(record: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)


def layer_range(head: Header, first: int, last: int) -> tuple[int, int]:
    """Return the byte range ``[begin, end)`` of the record that holds layers first to last, inclusive."""
    chosen = head.slices[(head.slices["layer"] >= first) & (head.slices["layer"] <= last)]
    end = sum(int(chosen[-1][name]) for name in ("offset", "scales_length", "encoded_length"))
    return int(chosen[0]["offset"]), end
