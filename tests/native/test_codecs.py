"""Checksum and codecs through Python: round trips, compatibility with zlib, and errors."""

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowserve import native
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


def blocks(data: st.DataObject) -> bytes:
    """Draw data in regions: runs, few symbols, noise, so that stored and coded Deflate blocks alternate."""
    parts = []
    for _ in range(data.draw(st.integers(0, 4))):
        size = data.draw(st.integers(0, 70_000))
        symbols = data.draw(st.integers(1, 256))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        parts.append(rng.integers(0, symbols, size=size, dtype=np.uint8).tobytes())
    return b"".join(parts)


@given(data=st.binary(max_size=5000), crc=st.integers(0, 2**32 - 1))
def test_crc32_is_zlibs(data: bytes, crc: int) -> None:
    assert native.crc32(data) == zlib.crc32(data)
    assert native.crc32(data, crc) == zlib.crc32(data, crc)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.float32)])
def test_crc32_takes_any_buffer(make: Callable[[bytes], bytes]) -> None:
    data = kv_symbols(4096)
    assert native.crc32(make(data)) == zlib.crc32(data)


@pytest.mark.parametrize("codec", BUILT_IN)
@given(data=st.data())
@settings(max_examples=40)
def test_what_was_compressed_comes_back(codec: Codec, data: st.DataObject) -> None:
    plain = blocks(data)
    stream = native.compress(codec, plain)
    assert len(stream) <= native.compress_bound(codec, len(plain))
    assert native.decompress(codec, stream, len(plain)) == plain


@given(data=st.data())
@settings(max_examples=60)
def test_zlib_inflates_our_deflate(data: st.DataObject) -> None:
    plain = blocks(data)
    decoder = zlib.decompressobj(-15)
    assert decoder.decompress(native.compress(Codec.DEFLATE, plain)) == plain
    assert decoder.eof and decoder.unused_data == b""


@given(plain=st.binary(max_size=20_000), level=st.integers(0, 9), strategy=st.sampled_from(range(5)))
@settings(deadline=None)
def test_we_inflate_zlibs_deflate(plain: bytes, level: int, strategy: int) -> None:
    encoder = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
    stream = encoder.compress(plain) + encoder.flush()
    assert native.decompress(Codec.DEFLATE, stream, len(plain)) == plain


@pytest.mark.parametrize("bins", [16, 32, 64, 256])
def test_deflate_is_no_larger_than_zlibs_huffman_only(bins: int) -> None:
    plain = kv_symbols(1 << 18, bins)
    encoder = zlib.compressobj(6, zlib.DEFLATED, -15, 8, zlib.Z_HUFFMAN_ONLY)
    theirs = len(encoder.compress(plain) + encoder.flush())
    assert len(native.compress(Codec.DEFLATE, plain)) <= 1.005 * theirs


def test_noise_is_stored() -> None:
    plain = np.random.default_rng(3).bytes(1 << 20)
    assert len(native.compress(Codec.DEFLATE, plain)) <= len(plain) + 5 * 17


@pytest.mark.parametrize("codec", BUILT_IN)
def test_a_stream_decodes_to_one_size_only(codec: Codec) -> None:
    plain = kv_symbols(3000)
    stream = native.compress(codec, plain)
    for source, size in [
        (stream, len(plain) - 1),
        (stream, len(plain) + 1),
        (stream, 0),
        (stream[:-1], len(plain)),
        (stream + b"\0", len(plain)),
        (stream + stream, len(plain)),
        (b"", len(plain)),
    ]:
        with pytest.raises(NativeError, match="corrupt") as caught:
            native.decompress(codec, source, size)
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


@pytest.mark.parametrize("codec", BUILT_IN)
@given(data=st.data())
@settings(max_examples=100)
def test_damaged_streams_end_in_bad_data_or_other_bytes(codec: Codec, data: st.DataObject) -> None:
    stream = bytearray(native.compress(codec, kv_symbols(2000, seed=data.draw(st.integers(0, 5)))))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert len(native.decompress(codec, stream, 2000)) == 2000
    except NativeError as error:
        assert error.result == Result.BAD_DATA


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
