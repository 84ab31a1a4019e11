"""The stored record: later versions can read it, as a whole and by layers."""

import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_forge import (
    BUILT_IN,
    HEADER,
    KEY,
    NAMESPACE,
    as_values,
    layer_range,
    make_layout,
    make_record,
    pattern,
    read_header,
)

from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, TOKENS_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import CorruptRecordError, MismatchError
from shadowserve.native import Codec
from shadowserve.record import (
    FIXED_HEADER_BYTES,
    MANIFEST_DTYPE,
    decode,
    encode,
    encode_header,
    layer_bounds,
    parse_header,
    plan_slices,
    verify,
)

ASSETS = Path(__file__).parents[1] / "assets" / "records"


# ---- Golden records --------------------------------------------------------------------------------------------------

GOLDEN = {
    "none-passthrough-uint8": (Codec.NONE, make_layout(Quantizer.PASSTHROUGH, DType.UINT8)),
    "deflate-binned-bfloat16": (Codec.DEFLATE, make_layout(Quantizer.BINNED, layers=1, tokens=24, vector_length=64)),
    "lz4-lossless-float32": (
        Codec.LZ4,
        make_layout(dtype=DType.FLOAT32, layers=1, kinds=1, tokens=8, vector_length=64),
    ),
    "zstd-binned-float16": (
        Codec.ZSTD,
        make_layout(Quantizer.BINNED, DType.FLOAT16, layers=1, tokens=24, vector_length=64),
    ),
    "deflate-lossless-bfloat16": (Codec.DEFLATE, make_layout(layers=1, tokens=8, vector_length=64)),
}
GOLDEN_KV_SHA256 = {
    "none-passthrough-uint8": "4dbdc2b2b62cb00749785bc84202236dbc3777d74660611b8e58812f0cfde6c3",
    "deflate-binned-bfloat16": "7912720858bee2afacf93d803558232d26d96e50abdd47bfd5fa74017b9be6d1",
    "lz4-lossless-float32": "6aba4a3a869f1bfc24daf70a3149a6f68548e211d9efec3041b6c10501a25168",
    "zstd-binned-float16": "ccc63039cad8af5f189303556b11e1cfda16728652db94daa423d57fc5a4cb2a",
    "deflate-lossless-bfloat16": "55b6a1e1b47d19077155e299ea3210fadfa08fa5bd5d68854513edb3e2fe8a43",
}


PARENT = bytes(range(200, 232))
VERSIONS = {"v1": b"", "v2": PARENT}
"""Parent of the golden records of each version; empty for none."""


@pytest.mark.parametrize("version", list(VERSIONS))
@pytest.mark.parametrize("name", list(GOLDEN))
def test_a_record_of_every_version_is_read_for_ever(name: str, version: str) -> None:
    codec, layout = GOLDEN[name]
    record = (ASSETS / f"{version}-{name}.bin").read_bytes()
    assert parse_header(record).parent == VERSIONS[version]
    if codec not in BUILT_IN:
        with pytest.raises(MismatchError, match="cannot decode"):
            decode(record, KEY, layout)
        return
    assert hashlib.sha256(decode(record, KEY, layout)).hexdigest() == GOLDEN_KV_SHA256[name]


def test_every_golden_record_is_read() -> None:
    assert set(GOLDEN) == set(GOLDEN_KV_SHA256)
    expected = {f"{version}-{name}" for version in VERSIONS for name in GOLDEN}
    assert {path.stem for path in ASSETS.glob("*.bin")} == expected


def test_a_record_without_a_codec_is_written_as_its_version_was() -> None:
    codec, layout = GOLDEN["none-passthrough-uint8"]
    kv = bytes(range(layout.raw_bytes))
    expected = (ASSETS / "v2-none-passthrough-uint8.bin").read_bytes()
    assert encode(KEY, codec, layout, kv, parent=PARENT) == expected


def test_a_record_tells_its_parent() -> None:
    layout = make_layout()
    assert parse_header(encode(KEY, Codec.NONE, layout, pattern(layout), parent=PARENT)).parent == PARENT
    assert parse_header(encode(KEY, Codec.NONE, layout, pattern(layout))).parent == b""
    with pytest.raises(ValueError, match="its parent's 31"):
        encode(KEY, Codec.NONE, layout, pattern(layout), parent=PARENT[:31])


def test_the_header_is_laid_out_as_documented() -> None:
    layout = make_layout(Quantizer.BINNED, DType.FLOAT16, layers=5, kinds=1, tokens=7, vector_length=6)
    record = make_record(layout, Codec.NONE)
    header = read_header(record)
    assert HEADER.size == FIXED_HEADER_BYTES == 160
    assert header == {
        "magic": b"SSKV",
        "version": 2,
        "fixed_length": 160,
        "header_length": 160 + 40 * 5,
        "checksum": zlib.crc32(record[:12] + bytes(4) + record[16 : 160 + 40 * 5]),
        "record_length": len(record),
        "codec": 0,
        "quantizer": 2,
        "dtype": 1,
        "kinds": 1,
        "bins": 32,
        "value_bins": 0,
        "tokens": 7,
        "layers": 5,
        "vector_length": 6,
        "slices": 5,
        "raw_length": 7 * 5 * 6 * 2,
        "key": KEY,
        "namespace": NAMESPACE,
        "scale_tokens": 0,
        "reserved": bytes(4),
        "parent": bytes(32),
    }


def test_a_header_names_the_bins_of_values_and_the_tokens_of_a_scale() -> None:
    layout = make_layout(Quantizer.BINNED, tokens=7, bins=64, value_bins=16, scale_tokens=3)
    header = read_header(make_record(layout))
    assert (header["bins"], header["value_bins"], header["scale_tokens"]) == (64, 16, 3)
    assert parse_header(make_record(layout)).layout == layout
    assert (
        read_header(make_record(replace(layout, scale_tokens=1)))["scale_tokens"] == 0
    )  # as in versions without a choice


def test_keys_and_values_are_quantized_with_bins_of_their_own() -> None:
    layout = make_layout(Quantizer.BINNED, DType.FLOAT32, layers=2, tokens=6, vector_length=50, bins=64, value_bins=16)
    record = make_record(layout, Codec.NONE)
    for entry in parse_header(record).slices:
        begin = int(entry["offset"]) + int(entry["scales_length"])
        symbols = np.frombuffer(record[begin : begin + int(entry["encoded_length"])], np.int8)
        assert np.abs(symbols.astype(int)).max() == (7 if entry["kind"] else 31)


def test_tokens_that_share_a_scale_store_it_once() -> None:
    layout = make_layout(Quantizer.BINNED, DType.FLOAT32, layers=1, tokens=7, vector_length=50, scale_tokens=3)
    record = make_record(layout, Codec.NONE)
    kv = as_values(pattern(layout), DType.FLOAT32).reshape(2, 7, 50)
    for entry, vectors in zip(parse_header(record).slices, kv, strict=True):
        assert entry["scales_length"] == 3 * 4
        scales = np.frombuffer(record[int(entry["offset"]) :][:12], np.float32)
        largest = [np.abs(vectors[first : first + 3]).max() for first in (0, 3, 6)]
        assert scales == pytest.approx(np.array(largest) / 15)


def test_the_manifest_is_laid_out_as_documented() -> None:
    layout = make_layout(Quantizer.BINNED, DType.FLOAT16, tokens=7, vector_length=6)
    record = make_record(layout, Codec.NONE)
    offset = FIXED_HEADER_BYTES + 40 * 4
    for index in range(4):
        entry = struct.unpack_from("<QIIIIIIII", record, FIXED_HEADER_BYTES + 40 * index)
        stored = record[offset : offset + 4 * 7 + 7 * 6]
        crcs = (zlib.crc32(stored), zlib.crc32(stored[4 * 7 :]))
        assert entry == (offset, index // 2, index % 2, 0, 7, 4 * 7, 7 * 6, *crcs)
        offset += len(stored)
    assert offset == len(record)


# ---- Batch trips -----------------------------------------------------------------------------------------------------


TREATMENTS = [
    (codec, quantizer, dtype)
    for codec, quantizer, dtype in itertools.product(BUILT_IN, Quantizer, DType)
    if quantizer is not Quantizer.WEIGHTED and (quantizer is not Quantizer.BINNED or dtype is not DType.UINT8)
]


ROUNDING = {DType.FLOAT8_E4M3: 2**-4, DType.FLOAT16: 2**-11, DType.BFLOAT16: 2**-8, DType.FLOAT32: 2**-20}


@pytest.mark.parametrize(("codec", "quantizer", "dtype"), TREATMENTS)
@settings(max_examples=25)
@given(
    layers=st.integers(1, 3),
    kinds=st.integers(1, 2),
    tokens=st.integers(1, 9),
    vector_length=st.integers(1, 40),
    bins=st.sampled_from([4, 16, 32, 64, 254, 256]),
    value_bins=st.sampled_from([0, 6, 18, 252]),
    scale_tokens=st.integers(1, 9),
    random=st.randoms(use_true_random=False),
)
def test_what_was_stored_is_read(
    codec: Codec,
    quantizer: Quantizer,
    dtype: DType,
    layers: int,
    kinds: int,
    tokens: int,
    vector_length: int,
    bins: int,
    value_bins: int,
    scale_tokens: int,
    random: Any,
) -> None:
    layout = make_layout(quantizer, dtype, layers, kinds, tokens, vector_length)
    if quantizer is not Quantizer.BINNED:
        kv = random.randbytes(layout.raw_bytes)  # all bit patterns, including NaN
        assert decode(encode(KEY, codec, layout, kv), KEY, layout) == kv
        return
    scale_tokens = min(scale_tokens, tokens)
    layout = replace(layout, bins=bins, value_bins=value_bins if kinds == 2 else 0, scale_tokens=scale_tokens)
    kv = pattern(layout, random.randrange(1 << 32))
    given_values, read_values = (
        as_values(data, dtype).reshape(layers, kinds, tokens, vector_length)
        for data in (kv, decode(encode(KEY, codec, layout, kv), KEY, layout))
    )
    for first in range(0, tokens, scale_tokens):
        for kind in range(kinds):
            before, after = (values[:, kind, first : first + scale_tokens] for values in (given_values, read_values))
            largest = np.abs(before).max(axis=(1, 2), keepdims=True)
            half_step = largest / (((layout.value_bins if kind else 0) or bins) / 2 - 1) / 2
            rounding = largest * ROUNDING[dtype]
            assert (np.abs(before - after) <= half_step + rounding).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(kind: Callable[[bytes], Any]) -> None:
    layout = make_layout()
    assert decode(kind(make_record(layout)), KEY, layout) == pattern(layout)


@pytest.mark.parametrize("length", [0, 1, 95, 97])
def test_kv_of_another_length_than_its_layout_is_not_encoded(length: int) -> None:
    assert make_layout().raw_bytes == 96
    with pytest.raises(ValueError, match="its layout"):
        encode(KEY, Codec.NONE, make_layout(), bytes(length))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_not_encoded(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        encode(bytes(length), Codec.NONE, make_layout(), bytes(96))


# ---- Slices and layers -----------------------------------------------------------------------------------------------


def test_a_slice_never_spans_more_than_2_mib_decoded() -> None:
    layout = make_layout(dtype=DType.FLOAT32, layers=1, kinds=2, tokens=1300, vector_length=1024)
    record = make_record(layout, Codec.NONE)
    head = verify(record, KEY)
    assert head.slices["tokens"].tolist() == [434, 433, 433] * 2
    assert head.decoded_lengths.max() <= DECODED_BYTES_MAX
    assert decode(record, KEY, layout) == pattern(layout)


def test_where_a_writer_cuts_changes_no_value() -> None:
    layout = replace(make_layout(Quantizer.BINNED, tokens=100), scale_tokens=16)
    for slice_bytes in (1, 17 * layout.token_decoded_bytes, 40 * layout.token_decoded_bytes, DECODED_BYTES_MAX):
        cut = layout.cut(slice_bytes)
        assert sum(cut) == 100 and min(cut) > 0
        assert all(tokens % 16 == 0 for tokens in cut[:-1]), "the tokens of one scale must not be split"


def channels_of(layout: ChunkLayout, step: float) -> native.Channels:
    shape = (layout.layers * layout.kinds, layout.vector_length)
    return native.Channels(
        np.full(shape, step), np.zeros(shape), [1.0, 0.01], kinds=layout.kinds, head_length=8, tokens=layout.tokens
    )


def test_a_weighted_record_is_read_with_the_steps_that_it_was_written_with() -> None:
    layout = make_layout(Quantizer.WEIGHTED, DType.FLOAT32, layers=2, tokens=30, vector_length=16)
    values = np.random.default_rng(1).normal(size=(2, 2, 30, 16)).astype(np.float32)
    values[1, 0, 20, 5], values[0, 1, 9, 0] = np.inf, 1e6
    channels = channels_of(layout, 0.1)
    for position, exact in ((0, [0, 1, 2, 3]), (512, [])):
        data = encode(KEY, Codec.KVRANS, layout, values.tobytes(), channels=channels, position=position)
        back = np.frombuffer(decode(data, KEY, layout, channels=channels), np.float32)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            error = np.abs(back.reshape(values.shape) - values)
        assert np.nanmax(error) <= 0.05 * 2**0.5 * 1.001 and np.nanmax(error) > 0.03
        assert back.reshape(values.shape)[1, 0, 20, 5] == np.inf and not error[0, 1, 9].any()
        assert not error[:, :, exact].any()
        with pytest.raises(ValueError, match="steps of its channels"):
            decode(data, KEY, layout)
    other = np.frombuffer(decode(data, KEY, layout, channels=channels_of(layout, 0.2)), np.float32)
    finite = np.isfinite(back)
    assert not np.allclose(other[finite], back[finite])


def test_a_weighted_record_with_a_damaged_number_of_exact_tokens_is_corrupt() -> None:
    layout = make_layout(Quantizer.WEIGHTED, DType.BFLOAT16, layers=1, kinds=1, tokens=6, vector_length=8)
    channels = channels_of(layout, 0.1)
    data = bytearray(encode(KEY, Codec.NONE, layout, bytes(layout.raw_bytes), channels=channels))
    header = parse_header(data)
    begin = header.header_length
    assert data[begin + 4 : begin + 8] == b"\4\0\0\0"
    data[begin + 4] = 5
    manifest = header.manifest.copy()
    manifest["checksum"] = native.crc32(data[begin:])
    damaged = encode_header(KEY, Codec.NONE, layout, manifest) + bytes(data[begin:])
    with pytest.raises(CorruptRecordError, match="cannot be dequantized"):
        decode(damaged, KEY, layout, channels=channels)


@settings(max_examples=200)
@given(
    quantizer=st.sampled_from(Quantizer),
    dtype=st.sampled_from([DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32]),
    layers=st.integers(1, 4),
    kinds=st.integers(1, 2),
    tokens=st.integers(1, 2048),
    vector_length=st.integers(1, DECODED_BYTES_MAX // 4),
)
def test_planned_slices_cover_the_chunk_in_order_with_as_few_cuts_as_will_do(
    quantizer: Quantizer, dtype: DType, layers: int, kinds: int, tokens: int, vector_length: int
) -> None:
    try:
        layout = make_layout(quantizer, dtype, layers, kinds, tokens, vector_length)
    except ValueError as error:
        assert "more slices than a head may name" in str(error)
        return
    manifest = plan_slices(layout)
    assert len(manifest) == layout.slice_count
    pieces = manifest["tokens"].reshape(layers * kinds, -1).astype(int)
    assert (pieces.sum(axis=1) == tokens).all() and pieces.max() - pieces.min() <= 1 and pieces.min() >= 1
    assert (np.diff(manifest["token_first"].reshape(pieces.shape), axis=1) == pieces[:, :-1]).all()
    assert pieces.max() * layout.token_decoded_bytes <= DECODED_BYTES_MAX
    assert pieces.shape[1] == 1 or -(-tokens // (pieces.shape[1] - 1)) * layout.token_decoded_bytes > DECODED_BYTES_MAX
    assert manifest["layer"].tolist() == sorted(manifest["layer"].tolist())
    assert parse_header(encode_header(KEY, Codec.NONE, layout, manifest)).layout == layout


def test_every_range_of_layers_is_one_range_of_bytes() -> None:
    layout = make_layout(Quantizer.BINNED, layers=5, tokens=6, vector_length=8)
    record = make_record(layout)
    head = verify(record, KEY)
    kv = decode(record, KEY, layout)
    layer_bytes = len(kv) // layout.layers
    covered = 0
    for first, last in itertools.combinations_with_replacement(range(layout.layers), 2):
        begin, end = layer_range(head, first, last)
        delivered = bytearray()
        for entry in head.slices[(head.slices["layer"] >= first) & (head.slices["layer"] <= last)]:
            scales_end = int(entry["offset"]) + int(entry["scales_length"])
            assert begin <= entry["offset"] and scales_end + int(entry["encoded_length"]) <= end
            stream = record[scales_end : scales_end + int(entry["encoded_length"])]
            symbols = native.decompress(Codec(head.codec), stream, layout.tokens * layout.token_decoded_bytes)
            scales = record[int(entry["offset"]) : scales_end]
            delivered += native.dequantize(
                layout.quantizer, layout.dtype, symbols, scales, vectors=layout.tokens, vector_length=8
            ).tobytes()
        assert delivered == kv[first * layer_bytes : (last + 1) * layer_bytes]
        if first == last:
            covered += end - begin
    assert covered == len(record) - head.header_length
    assert layer_range(head, 0, 4) == (head.header_length, len(record))
    bounds = layer_bounds(record).tolist()
    assert bounds == layer_bounds(record[: head.header_length]).tolist()
    ranges = [layer_range(head, layer, layer) for layer in range(layout.layers)]
    assert list(itertools.pairwise(bounds)) == ranges


def test_layers_of_a_changed_header_are_not_returned() -> None:
    record = make_record(make_layout())
    layer_bounds(record)
    for position in (8, 40, FIXED_HEADER_BYTES, FIXED_HEADER_BYTES + 9):
        damaged = bytearray(record)
        damaged[position] ^= 1
        with pytest.raises(CorruptRecordError):
            layer_bounds(damaged)


def test_a_reader_takes_slices_that_were_cut_otherwise() -> None:
    layout = make_layout(Quantizer.PASSTHROUGH, DType.UINT8, layers=1, kinds=1, tokens=5)
    kv = bytes(range(20))
    manifest = np.zeros(3, MANIFEST_DTYPE)
    manifest["tokens"], manifest["token_first"] = [1, 3, 1], [0, 1, 4]
    manifest["encoded_length"] = manifest["tokens"] * 4
    for entry, piece in zip(manifest, (kv[:4], kv[4:16], kv[16:]), strict=True):
        entry["checksum"] = entry["decoded_crc32"] = zlib.crc32(piece)
    assert decode(encode_header(KEY, Codec.NONE, layout, manifest) + kv, KEY, layout) == kv


# ---- Layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"namespace": b""}, "32 bytes"),
        ({"kinds": 0}, "kinds"),
        ({"kinds": 3}, "kinds"),
        ({"layers": 0}, "at least 1"),
        ({"tokens": 0}, "at least 1"),
        ({"tokens": TOKENS_MAX + 1}, "tokens"),
        ({"vector_length": -1}, "at least 1"),
        ({"bins": 32}, "needs 0"),
        ({"value_bins": 32}, "needs 0"),
        ({"scale_tokens": 2}, "needs 0"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "value_bins": 33}, "value_bins is 33"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "value_bins": 32}, "bins of K"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "value_bins": 16, "kinds": 1}, "does not exist"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "scale_tokens": 0}, "scale_tokens"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "scale_tokens": 4}, "scale_tokens"),
        ({"quantizer": Quantizer.BINNED}, "from 4 to 256"),
        ({"quantizer": Quantizer.BINNED, "bins": 33}, "from 4 to 256"),
        ({"quantizer": Quantizer.BINNED, "bins": 258}, "from 4 to 256"),
        ({"quantizer": Quantizer.BINNED, "bins": 32, "dtype": DType.UINT8}, "use passthrough"),
        ({"vector_length": (1 << 20) + 1}, "the limit is 2 MiB"),
        ({"layers": 1 << 20}, "too many slices"),
    ],
)
def test_a_layout_that_no_record_can_hold_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_layout(), **change)
