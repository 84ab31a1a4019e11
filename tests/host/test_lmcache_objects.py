"""Stored form of LMCache's objects: exact, of a fixed size, and a miss if it is damaged or belongs to another key."""

import struct
from dataclasses import dataclass, replace

import numpy as np
import pytest

from host_control.lmcache import objects
from host_control.lmcache.objects import Array, ObjectTooLargeError, decode, encode, stored_bytes
from shadowserve import native
from shadowserve.errors import CorruptRecordError, MismatchError, RecordError

RECORD = 8
"""Offset of the first record: behind the header of the object."""
FIXED, ENTRY = 160, 40
KV = Array((2, 3, 32, 64), "bfloat16")


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes = b"\x01\xff" * 16
    model_name: str = "team/model"
    kv_rank: int = 0x02010201
    object_group_id: int = 0
    cache_salt: str = ""


def values(array: Array, seed: int = 1) -> bytes:
    """Values with the exponents of KV, in the array's type; any bits for integers."""
    random = np.random.default_rng(seed)
    count = int(np.prod(array.shape))
    normal = random.standard_normal(count, np.float32)
    match array.dtype:
        case "float32":
            return normal.tobytes()
        case "float16":
            return normal.astype(np.float16).tobytes()
        case "bfloat16":
            return (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case "float8_e4m3fn":  # the high byte of a half with one more exponent bit
            return (normal.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes()
        case _:
            return random.bytes(count * {"uint8": 1, "int64": 8}[array.dtype])


def stored(source: bytes, *arrays: Array, key: Key = Key(), size: float | None = None, identity: str = "") -> bytearray:
    target = bytearray(b"\xa5" * stored_bytes(arrays, size))
    encode(key, arrays, memoryview(source), memoryview(target), identity)
    return target


def loaded(value: bytes | bytearray, *arrays: Array, key: Key = Key(), identity: str = "") -> bytes:
    target = bytearray(sum(objects.layout_of(array).raw_bytes for array in arrays))
    decode(key, arrays, memoryview(value), memoryview(target), identity)
    return bytes(target)


@pytest.mark.parametrize(
    "arrays",
    [
        *([Array((2, 4, 256, 128), dtype)] for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn")),
        [Array((5, 256, 576), "bfloat16")],  # a latent (MLA)
        [Array((2, 2, 256, 64), "bfloat16"), Array((1, 256, 64), "float32"), Array((70_000,), "uint8")],
        [Array((3, 8), "int64")],
    ],
    ids=lambda arrays: "+".join(array.dtype for array in arrays),
)
def test_an_object_comes_back_exactly_from_a_value_of_the_predicted_size(arrays: list[Array]) -> None:
    source = b"".join(map(values, arrays))
    value = stored(source, *arrays)
    assert loaded(value, *arrays) == source
    assert len(value) == stored_bytes(arrays) and len(value) % 4096 == 0
    if arrays[0].dtype == "bfloat16" and len(arrays) == 1:
        assert len(value) < 0.7 * len(source)
    # The rest of the buffer, which LMCache reuses, does not leak into the store.
    assert not value.endswith(b"\xa5")


def test_every_changed_byte_of_a_header_or_a_slice_is_refused() -> None:
    source = values(KV)
    value = stored(source, KV)
    header = RECORD + FIXED + ENTRY * 6
    end = RECORD + int.from_bytes(value[RECORD + 16 : RECORD + 24], "little")
    assert header < end < len(value) and loaded(value, KV) == source
    for place in [*range(header), *np.linspace(header, end - 1, 300).astype(int)]:
        damaged = bytearray(value)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(RecordError):
            loaded(damaged, KV)
    for length in (0, 4, RECORD, RECORD + 10, header - 1, header, end - 1):
        with pytest.raises(RecordError):
            loaded(value[:length], KV)


@pytest.mark.parametrize(
    "other",
    [
        replace(Key(), chunk_hash=b"\x01\xff" * 15 + b"\x01\xfe"),
        replace(Key(), model_name="team/model2"),
        replace(Key(), kv_rank=0x02010202),
        replace(Key(), object_group_id=1),
        replace(Key(), cache_salt="tenant"),
    ],
    ids=lambda key: next(name for name, value in vars(key).items() if value != getattr(Key(), name)),
)
def test_an_object_of_another_key_is_refused(other: Key) -> None:
    value = stored(values(KV), KV)
    with pytest.raises(MismatchError, match="it is treated as a miss"):
        loaded(value, KV, key=other)


def test_an_object_of_another_shape_type_or_identity_is_refused() -> None:
    value = stored(values(KV), KV)
    # All of the same number of bytes.
    for other in (Array((3, 2, 32, 64), "bfloat16"), Array((2, 3, 64, 32), "bfloat16"), Array(KV.shape, "float16")):
        with pytest.raises(MismatchError):
            loaded(value, other)
    with pytest.raises(MismatchError):
        loaded(value, KV, identity="weights 2")
    with pytest.raises(RecordError):
        loaded(value, KV, KV)


@pytest.mark.parametrize(
    ("place", "form", "number"),
    [
        (8, "<I", 1 << 31),  # length of the header
        (16, "<Q", 1 << 62),  # length of the record
        (16, "<Q", 0),
        (32, "<I", 65_535),  # tokens
        (36, "<I", 1 << 30),  # layers
        (40, "<I", 1 << 31),  # length of a vector
        (44, "<I", 1 << 20),  # slices
        (FIXED, "<Q", 1 << 63),  # offset of the first slice
        (FIXED + 24, "<I", 4),  # its scales
        (FIXED + 20, "<I", 0xFFFF_FFFF),  # its tokens
        (FIXED + 28, "<I", 0xFFFF_FFF0),  # its bytes
    ],
)
def test_absurd_numbers_under_a_valid_checksum_are_refused(place: int, form: str, number: int) -> None:
    value = stored(values(KV), KV)
    header = bytearray(value[RECORD : RECORD + FIXED + ENTRY * 6])
    assert struct.unpack_from(form, header, place) != (number,)
    struct.pack_into(form, header, place, number)
    struct.pack_into("<I", header, 12, 0)
    struct.pack_into("<I", header, 12, native.crc32(header))
    value[RECORD : RECORD + len(header)] = header
    with pytest.raises((CorruptRecordError, MismatchError)):
        loaded(value, KV)


def test_an_object_that_is_not_compressible_is_not_stored_and_the_error_says_which_size_it_needs() -> None:
    noise = np.random.default_rng(2).bytes(objects.layout_of(KV).raw_bytes)
    with pytest.raises(
        ObjectTooLargeError, match=r"team/model was not stored: it needs 1\.\d+ .* at least 1\.0"
    ) as told:
        stored(noise, KV)
    size = float(str(told.value).split("at least ")[1].split(",")[0])
    assert loaded(stored(noise, KV, size=size), KV) == noise


def test_an_array_that_no_record_can_hold_is_refused_by_its_type() -> None:
    with pytest.raises(ValueError, match="does not know the element type complex64"):
        stored_bytes([Array((2, 2), "complex64")])
