"""The kernels: CPU dispatch, checksum, codecs, quantizers. Each call processes whole buffers."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native._channels import Place
from shadowserve.native._library import Codec, Isa, Result, check, ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "Each",
    "codec_implementations",
    "compress",
    "compress_bound",
    "crc32",
    "decode_slices",
    "decompress",
    "dequantize",
    "isa_active",
    "isa_available",
    "isa_force",
    "quantize",
]


Each = Callable[..., Iterable[Any]]
"""Calls a function with each item, as ``map`` does."""
_SLICES_PER_CALL: Final = 16
"""Slices that are decoded together; each has scratch memory of its own."""


# ---- CPU dispatch ---------------------------------------------------------------------------------------------------


def isa_available(isa: Isa) -> bool:
    """Return whether this build has kernels for ``isa`` and this CPU can run them."""
    return bool(lib.ss_isa_available(isa))


def isa_active() -> Isa:
    """Return the variant that the kernels use now: the best available one, unless another one was forced."""
    return Isa(lib.ss_isa_active())


def isa_force(isa: Isa) -> None:
    """Make every kernel use ``isa`` from now on; for tests and benchmarks, while no other thread runs kernels."""
    check(lib.ss_isa_force(isa), f"forcing the {isa.name} kernels")


# ---- Checksum and codecs --------------------------------------------------------------------------------------------


def crc32(data: "ReadableBuffer", crc: int = 0) -> int:
    """Return the CRC-32 (IEEE 802.3, as ``zlib.crc32``) of ``data``, continuing ``crc``."""
    with ffi.from_buffer("uint8_t[]", data) as source:
        return lib.ss_crc32(crc, source, len(source))


def codec_implementations() -> dict[Codec, str]:
    """Return the library and version behind each codec that was built in, such as ``"isa-l 2.30.0"``."""
    found = {}
    for codec in Codec:
        text = lib.ss_codec_implementation(codec)
        if text != ffi.NULL:
            found[codec] = ffi.string(text).decode()
    return found


def compress_bound(codec: Codec, size: int) -> int:
    """Return the largest possible result of ``compress()`` for ``size`` bytes, at most about 2 GiB."""
    bound = lib.ss_compress_bound(codec, size)
    if bound == 0 and not (codec is Codec.NONE and size == 0):
        raise NativeError(f"{codec.name} cannot compress {size} bytes in this build", Result.NOT_SUPPORTED)
    return bound


def compress(codec: Codec, data: "ReadableBuffer", row_length: int = 0) -> bytes:
    """Return ``data`` as one stream of ``codec``; Deflate is raw and Huffman-only.

    ``row_length`` is the bytes of a token's symbols, for kvrans, which codes columns; 0: no rows.
    """
    with ffi.from_buffer("uint8_t[]", data) as source:
        target = np.empty(compress_bound(codec, len(source)), dtype=np.uint8)
        written = ffi.new("size_t *")
        stream = ffi.from_buffer("uint8_t[]", target)
        result = lib.ss_compress(codec, source, len(source), row_length, stream, len(target), written)
        check(result, f"compressing {len(source)} bytes with {codec.name}")
    return target[: written[0]].tobytes()


def decompress(codec: Codec, data: "ReadableBuffer", size: int) -> bytes:
    """Decode ``data``, one whole stream of ``codec``, to exactly ``size`` bytes.

    NativeError with ``Result.BAD_DATA``: ``data`` does not decode to ``size`` bytes.
    """
    target = np.empty(size, dtype=np.uint8)
    with ffi.from_buffer("uint8_t[]", data) as source:
        result = lib.ss_decompress(codec, source, len(source), ffi.from_buffer("uint8_t[]", target), size)
        check(result, f"decompressing {len(source)} bytes of {codec.name} to {size}")
    return target.tobytes()


# ---- Quantizers -----------------------------------------------------------------------------------------------------


def _check_size(name: str, actual: int, needed: int) -> None:
    if actual != needed:
        raise NativeError(f"{name} has {actual} bytes, but its shape needs {needed}", Result.BAD_ARGUMENT)


def _batches(
    quantizer: Quantizer, vectors: int, vector_length: int, scale_vectors: int
) -> list[tuple[int, int, int, int]]:
    """Return number of vectors, their length, first element and first scale of each kernel call.

    Vectors that share a scale are one longer vector; the last one, if it is shorter, needs a call of its own.
    """
    if quantizer is not Quantizer.BINNED:
        return [(vectors, vector_length, 0, 0)]
    whole, rest = divmod(vectors, scale_vectors)
    first = (whole, scale_vectors * vector_length, 0, 0)
    return [first, (1, rest * vector_length, whole * scale_vectors * vector_length, whole)] if rest else [first]


def quantize(
    quantizer: Quantizer,
    dtype: DType,
    source: "ReadableBuffer",
    *,
    vectors: int,
    vector_length: int,
    bins: int = 0,
    scale_vectors: int = 1,
    place: Place | None = None,
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Turn ``vectors * vector_length`` elements into symbols and scales (weighted: position and exact vectors).

    ``bins`` is even, 4 to 256. The last scale may have fewer than ``scale_vectors`` vectors. ``place`` is for weighted.
    NativeError with ``Result.NOT_FINITE``: a value to bin is infinite or NaN.
    """
    if quantizer is Quantizer.WEIGHTED:
        return _weigh(dtype, source, vectors, vector_length, place)
    itemsize = 1 if quantizer is Quantizer.BINNED else dtype.itemsize
    symbols = np.empty(vectors * vector_length * itemsize, dtype=np.uint8)
    scales = np.empty(-(-vectors // scale_vectors) if quantizer is Quantizer.BINNED else 0, dtype=np.float32)
    symbol_bytes, scale_bytes = ffi.from_buffer("uint8_t[]", symbols), ffi.from_buffer("uint8_t[]", scales)
    with ffi.from_buffer("uint8_t[]", source) as elements:
        _check_size("source", len(elements), vectors * vector_length * dtype.itemsize)
        for count, length, first, scale in _batches(quantizer, vectors, vector_length, scale_vectors):
            result = lib.ss_quantize(
                quantizer,
                dtype,
                bins,
                elements + first * dtype.itemsize,
                count,
                length,
                symbol_bytes + first * itemsize,
                scale_bytes + 4 * scale,
            )
            check(result, f"quantizing {vectors} x {vector_length} {dtype.label} elements ({quantizer.name})")
    return symbols, scales


def _check_place(place: Place | None, vector_length: int) -> Place:
    if place is None or place.channels.vector_length != vector_length:
        raise NativeError(f"weighted needs channels for vectors of {vector_length} elements", Result.BAD_ARGUMENT)
    return place


def _weigh(
    dtype: DType, source: "ReadableBuffer", vectors: int, vector_length: int, place: Place | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    channels, row, position = _check_place(place, vector_length)
    symbols = np.empty(vectors * vector_length, dtype=np.uint8)
    exact = np.empty(lib.ss_weighted_exact_max(dtype, vectors, vector_length), dtype=np.uint8)
    length = ffi.new("size_t *")
    made, side = ffi.from_buffer("uint8_t[]", symbols), ffi.from_buffer("uint8_t[]", exact)
    with ffi.from_buffer("uint8_t[]", source) as elements:
        _check_size("source", len(elements), vectors * vector_length * dtype.itemsize)
        result = lib.ss_quantize_weighted(dtype, channels.struct, row, position, elements, vectors, made, side, length)
        check(result, f"quantizing {vectors} x {vector_length} {dtype.label} elements (weighted)")
    return symbols, exact[: length[0]]


def dequantize(
    quantizer: Quantizer,
    dtype: DType,
    symbols: "ReadableBuffer",
    scales: "ReadableBuffer | None",
    *,
    vectors: int,
    vector_length: int,
    scale_vectors: int = 1,
    place: Place | None = None,
    out: "WriteableBuffer | None" = None,
) -> NDArray[np.uint8]:
    """Turn symbols back into the bytes of elements of ``dtype``, in ``out`` or a new array.

    Symbols have one byte for each element if binned or weighted, else the elements' bytes. NativeError with
    ``Result.BAD_DATA``: a scale is not finite, or exact vectors are damaged.
    """
    if quantizer is Quantizer.WEIGHTED:
        return _unweigh(dtype, symbols, scales, vectors, vector_length, place, out)
    binned = quantizer is Quantizer.BINNED
    size = vectors * vector_length * dtype.itemsize
    target = np.empty(size, dtype=np.uint8) if out is None else np.frombuffer(out, dtype=np.uint8)
    _check_size("out", target.nbytes, size)
    with (
        ffi.from_buffer("uint8_t[]", symbols) as source,
        ffi.from_buffer("uint8_t[]", b"" if scales is None or not binned else scales) as scale_bytes,
    ):
        _check_size("symbols", len(source), vectors * vector_length if binned else size)
        _check_size("scales", len(scale_bytes), 4 * -(-vectors // scale_vectors) if binned else 0)
        elements = ffi.from_buffer("uint8_t[]", target, True)
        for count, length, first, scale in _batches(quantizer, vectors, vector_length, scale_vectors):
            result = lib.ss_dequantize(
                quantizer,
                dtype,
                source + first,
                scale_bytes + 4 * scale,
                count,
                length,
                elements + first * dtype.itemsize,
            )
            check(result, f"dequantizing {vectors} x {vector_length} {dtype.label} elements ({quantizer.name})")
    return target


def _unweigh(
    dtype: DType,
    symbols: "ReadableBuffer",
    exact: "ReadableBuffer | None",
    vectors: int,
    vector_length: int,
    place: Place | None,
    out: "WriteableBuffer | None",
) -> NDArray[np.uint8]:
    channels, row, _ = _check_place(place, vector_length)
    size = vectors * vector_length * dtype.itemsize
    target = np.empty(size, dtype=np.uint8) if out is None else np.frombuffer(out, dtype=np.uint8)
    _check_size("out", target.nbytes, size)
    with (
        ffi.from_buffer("uint8_t[]", symbols) as source,
        ffi.from_buffer("uint8_t[]", b"" if exact is None else exact) as side,
    ):
        _check_size("symbols", len(source), vectors * vector_length)
        elements = ffi.from_buffer("uint8_t[]", target, True)
        result = lib.ss_dequantize_weighted(dtype, channels.struct, row, source, side, len(side), vectors, elements)
        check(result, f"dequantizing {vectors} x {vector_length} {dtype.label} elements (weighted)")
    return target


# ---- Whole slices ---------------------------------------------------------------------------------------------------


def decode_slices(
    codec: Codec,
    quantizer: Quantizer,
    dtype: DType,
    vector_length: int,
    source: "ReadableBuffer",
    slices: Sequence[tuple[int, int, int, int]],
    target: "WriteableBuffer",
    each: Each = map,
) -> None:
    """Check slices of ``source`` and decode them into ``target``, one after the other. Not for binned.

    Each slice is its offset, its length, the CRC-32 of its bytes, and its vectors. NativeError is that of the first
    slice that failed (``Result.CHECKSUM`` for its CRC-32); the content of ``target`` is then undefined.

    Args:
        each: ``map``, or that of an executor, whose threads then share the slices. All have ended at the return.
    """
    vector_bytes = vector_length * dtype.itemsize
    ends = list(itertools.accumulate((vectors * vector_bytes for *_, vectors in slices), initial=0))
    with ffi.from_buffer("uint8_t[]", source) as encoded, ffi.from_buffer("uint8_t[]", target, True) as elements:
        _check_size("target", len(elements), ends[-1])
        for number, (offset, length, *_) in enumerate(slices):
            if not 0 <= offset <= offset + length <= len(encoded):
                raise NativeError(f"slice {number} is not within the record", Result.BAD_ARGUMENT)

        def decode(first: int) -> tuple[int, int]:
            """Return the result of a group of slices, and the slice that it is of."""
            try:
                return decode_group(first)
            except MemoryError:  # not raised: other threads may still use the buffers
                return Result.NO_MEMORY, first

        def decode_group(first: int) -> tuple[int, int]:
            group = slices[first : first + _SLICES_PER_CALL]
            scratch_bytes = vector_bytes * max(vectors for *_, vectors in group)
            streams = ffi.new("struct ss_stream[]", len(group))
            made = ffi.new("struct ss_elements[]", len(group))
            scratch = ffi.new_allocator(should_clear_after_alloc=False)("uint8_t[]", scratch_bytes * len(group))
            for index, (offset, length, checksum, vectors) in enumerate(group):
                if lib.ss_crc32(0, encoded + offset, length) != checksum:
                    return Result.CHECKSUM, first + index
                stream, to = streams[index], made[index]
                stream.source, stream.source_size = encoded + offset, length
                stream.target, stream.target_size = scratch + index * scratch_bytes, vectors * vector_bytes
                to.target, to.vectors, to.vector_length = elements + ends[first + index], vectors, vector_length
                to.scale_vectors, to.quantizer, to.dtype = 1, quantizer, dtype
            lib.ss_decode_many(codec, streams, made, len(group))
            return next(((job.result, first + index) for index, job in enumerate(streams) if job.result), (0, 0))

        results = list(each(decode, range(0, len(slices), _SLICES_PER_CALL)))
    for result, number in results:
        check(result, f"decoding slice {number}")
