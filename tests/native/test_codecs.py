"""Checksum and codecs through Python. The C tests of codecs, CRC-32 and Deflate have the rest."""

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native import Codec, Result

BUILT_IN = list(native.codec_implementations())


def kv_symbols(count: int, bins: int = 32, seed: int = 0) -> bytes:
    """Return binned KV-like symbols: each of 128 channels has its own spread."""
    rng = np.random.default_rng(seed)
    limit = bins // 2 - 1
    spreads = rng.lognormal(0, 0.5, size=128) * limit / 4
    values = rng.normal(size=count) * np.resize(spreads, count)
    return np.clip(np.rint(values), -limit, limit).astype(np.int8).tobytes()


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.float32)])
def test_crc32_takes_any_buffer(make: Callable[[bytes], bytes]) -> None:
    data = kv_symbols(4096)
    assert native.crc32(make(data)) == zlib.crc32(data)


@pytest.mark.parametrize("codec", BUILT_IN)
def test_what_was_compressed_comes_back_or_is_bad_data(codec: Codec) -> None:
    plain = kv_symbols(3000)
    stream = native.compress(codec, plain)
    assert len(stream) <= native.compress_bound(codec, len(plain))
    assert native.decompress(codec, stream, len(plain)) == plain
    with pytest.raises(NativeError, match="corrupt") as caught:
        native.decompress(codec, stream, len(plain) + 1)
    assert caught.value.result == Result.BAD_DATA


def test_zstd_takes_one_frame_and_nothing_more() -> None:
    if Codec.ZSTD not in BUILT_IN:
        pytest.skip("this build has no zstd")
    stream = native.compress(Codec.ZSTD, b"frame" * 100)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    for source in (stream + skippable, skippable + stream):
        with pytest.raises(NativeError) as caught:
            native.decompress(Codec.ZSTD, source, 500)
        assert caught.value.result == Result.BAD_DATA


def test_implementations_are_named() -> None:
    names = native.codec_implementations()
    assert names[Codec.NONE] == "memcpy"
    assert names[Codec.DEFLATE].split()[0] in ("isa-l", "libdeflate", "zlib")
    for codec, name in names.items():
        assert codec in (Codec.NONE, Codec.KVRANS) or name.split()[1][0].isdigit()


def test_kvrans_names_the_kernels_in_use(isa: native.Isa) -> None:
    name = native.codec_implementations()[Codec.KVRANS]
    assert name in ("own, scalar", f"own, {isa.name.lower()}")
    assert isa is not native.Isa.SCALAR or name == "own, scalar"


def test_sizes_past_the_limit_are_refused() -> None:
    with pytest.raises(NativeError) as caught:
        native.compress_bound(Codec.DEFLATE, 1 << 40)
    assert caught.value.result == Result.NOT_SUPPORTED


@pytest.mark.parametrize("what", ["stream", "slices"])
def test_an_error_that_is_kept_in_a_cycle_holds_no_buffer(what: str) -> None:
    """The collector would clear a memoryview whose buffer cffi holds, which ends CPython 3.11."""
    source, target = memoryview(bytearray(200))[8:], bytearray(64)
    kept: list[object] = []
    try:
        if what == "stream":
            native.decompress(Codec.KVRANS, source, len(target))
        else:
            slices = [(0, 64, native.crc32(source[:64]), 8)]
            native.decode_slices(Codec.KVRANS, Quantizer.LOSSLESS, DType.BFLOAT16, 4, source, slices, target)
    except NativeError as error:
        kept += [error, kept]
    assert kept
    with source:  # fails while a buffer is held
        pass
