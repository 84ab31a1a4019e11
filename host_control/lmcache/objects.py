"""LMCache's objects as ShadowServe's records: lossless, checked, and readable only for the key that they belong to.

An object is the KV of one chunk of one object group of one rank: arrays of given shapes and types, one after the other.
Its stored form is a header of 8 bytes, a record (docs/reference/record-format.md) for each array, and zeros.

LMCache's L2 adapters read a value into a buffer of the size that its layout predicts, and refuse values of other sizes.
So the stored form has a fixed size, a share of the object's. Objects that do not fit are not stored.

The key of a record is a digest of everything that LMCache's key and layout say. So a value of another model, rank,
chunk, salt, shape or type is refused, like a damaged one.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from shadowserve import native, record
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import MismatchError, NotARecordError, ShadowServeError

SIZES: Final = {"bfloat16": 0.675, "float16": 0.88, "float32": 0.87, "float8_e4m3fn": 0.84, "float8_e5m2": 0.84}
"""Stored size over size, by element type: some percent above what kvrans needs for KV of real models."""
OTHER_SIZE: Final = 1.01
"""The same for other types, which may not be compressible."""
SIZE_MAX: Final = 1.1
_ALIGNMENT: Final = 4096
"""Adapters that bypass the page cache need whole blocks."""
_MAGIC: Final = b"SSLC"
"""Not a record's: a storage node accepts records under their own keys only."""
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHH")
_VECTOR_MAX: Final = 4096
"""Longest vector of an array with one dimension."""
_DTYPES: Final = {
    "float16": DType.FLOAT16,
    "bfloat16": DType.BFLOAT16,
    "float32": DType.FLOAT32,
    "float8_e4m3fn": DType.FLOAT8_E4M3,
}
_OTHER_ITEMSIZES: Final = {
    "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e5m2": 1,
}  # fmt: skip


class ObjectKey(Protocol):
    """LMCache's key of an object."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class Array(NamedTuple):
    """Shape of one array, and the name of its element type in PyTorch."""

    shape: tuple[int, ...]
    dtype: str


class ObjectTooLargeError(ShadowServeError):
    """An object is compressed less than the serde's fixed size needs."""


@lru_cache(maxsize=256)
def layout_of(array: Array) -> ChunkLayout:
    """Return the layout of an array's record: its last dimension is a vector, the one before it counts tokens.

    Raises:
        ValueError: No record can hold the array.
    """
    dtype, vector, quantizer = _DTYPES.get(array.dtype), array.shape[-1] if array.shape else 0, Quantizer.LOSSLESS
    if dtype is None:
        if array.dtype not in _OTHER_ITEMSIZES:
            raise ValueError(f"the serde 'shadowserve' does not know the element type {array.dtype}")
        dtype, vector = DType.UINT8, vector * _OTHER_ITEMSIZES[array.dtype]
    if dtype.itemsize == 1:
        quantizer = Quantizer.PASSTHROUGH
    tokens = array.shape[-2] if len(array.shape) > 1 else 1
    if tokens == 1 or vector * dtype.itemsize > DECODED_BYTES_MAX:  # such as recurrent state
        tokens, vector = tokens * vector // math.gcd(vector, _VECTOR_MAX), math.gcd(vector, _VECTOR_MAX)
    layers = math.prod(array.shape[:-2])
    return ChunkLayout(dtype=dtype, layers=layers, kinds=1, tokens=tokens, vector_length=vector, quantizer=quantizer)


def stored_bytes(arrays: Sequence[Array], size: float | None = None) -> int:
    """Return the size of the stored form, in whole blocks; ``size`` replaces the share of :data:`SIZES`."""
    shares = [size or SIZES.get(array.dtype, OTHER_SIZE) for array in arrays]
    whole = sum(math.ceil(share * layout_of(array).raw_bytes) for share, array in zip(shares, arrays, strict=True))
    return -(-whole // _ALIGNMENT) * _ALIGNMENT


def _record_key(key: ObjectKey, arrays: Sequence[Array], index: int, identity: str) -> bytes:
    fields = (
        "shadowserve lmcache", _VERSION, key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash.hex(),
        key.cache_salt, arrays, index, identity,
    )  # fmt: skip
    return hashlib.sha256(json.dumps(fields).encode()).digest()


def encode(key: ObjectKey, arrays: Sequence[Array], source: memoryview, target: memoryview, identity: str = "") -> None:
    """Write the stored form of an object, which fills ``target``.

    Raises:
        ObjectTooLargeError: It does not fit; ``target`` is undefined.
    """
    source, target = source.cast("B"), target.cast("B")
    target[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, len(arrays))
    at, begin = _HEADER.size, 0
    for index, array in enumerate(arrays):
        layout = layout_of(array)
        name, part = _record_key(key, arrays, index, identity), source[begin : begin + layout.raw_bytes]
        stored = record.encode(name, native.Codec.KVRANS, layout, part)
        if at + len(stored) > len(target):
            needed = (at + len(stored)) / (begin + layout.raw_bytes)
            raise ObjectTooLargeError(
                f"an object of {key.model_name} was not stored: it needs {needed:.3f} of its {len(source)} bytes, more "
                f"than the serde's size; set its 'size' to at least {needed + 0.01:.2f}, for all servers of the store"
            )
        target[at : at + len(stored)] = stored
        at, begin = at + len(stored), begin + layout.raw_bytes
    target[at:] = bytes(len(target) - at)  # the buffer may hold bytes of another tenant


def decode(
    key: ObjectKey,
    arrays: Sequence[Array],
    source: memoryview,
    target: memoryview,
    identity: str = "",
    each: native.Each = map,
) -> None:
    """Decode an object into ``target``, after all checks, with ``map`` or that of an executor.

    Raises:
        NotARecordError, CorruptRecordError, MismatchError: It is damaged, or is not the object of ``key``. Then
            ``target`` is undefined.
    """
    source, target = source.cast("B"), target.cast("B")
    if len(source) < _HEADER.size or source[: _HEADER.size] != _HEADER.pack(_MAGIC, _VERSION, len(arrays)):
        raise NotARecordError("the value is not an object that the serde 'shadowserve' wrote for this layout")
    layouts = [layout_of(array) for array in arrays]
    if len(target) != sum(layout.raw_bytes for layout in layouts):
        raise MismatchError(f"the object's memory has {len(target)} bytes, which is not what its layout says")
    at, begin = _HEADER.size, 0
    for index, layout in enumerate(layouts):
        name, part = _record_key(key, arrays, index, identity), target[begin : begin + layout.raw_bytes]
        at += record.decode_into(source[at:], name, layout, part, each)
        begin += layout.raw_bytes
