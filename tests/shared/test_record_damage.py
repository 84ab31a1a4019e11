"""Damaged, foreign and hostile records: only the requested record is ever accepted."""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_forge import (
    BUILT_IN,
    KEY,
    flipped,
    forge,
    layer_range,
    make_layout,
    make_record,
    pattern,
    read_header,
    read_manifest,
    seal,
)

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import CorruptRecordError, MismatchError, NotARecordError, RecordError
from shadowserve.native import Codec
from shadowserve.record import (
    FIXED_HEADER_BYTES,
    HEADER_BYTES_MAX,
    MAGIC,
    MANIFEST_DTYPE,
    Manifest,
    decode,
    encode_header,
    header_length,
    parse_header,
    peek_header,
    plan_slices,
    slices_of,
    verify,
)

# ---- Damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", BUILT_IN)
def test_each_flipped_bit_is_found_before_anything_is_decoded(codec: Codec) -> None:
    record = make_record(make_layout(Quantizer.BINNED), codec)
    for bit, damaged in flipped(record):
        expected = NotARecordError if bit // 8 < 6 else CorruptRecordError
        with pytest.raises(expected):
            verify(damaged, KEY)


@pytest.mark.parametrize("codec", BUILT_IN)
def test_each_flipped_bit_of_a_head_under_a_right_checksum_is_found(codec: Codec) -> None:
    layout = make_layout(Quantizer.BINNED)
    record = make_record(layout, codec)
    header_bytes = read_header(record)["header_length"]
    for bit, damaged in flipped(record[:header_bytes]):
        if 12 <= bit // 8 < 16:
            continue  # the checksum itself
        if 128 <= bit // 8 < 160:
            continue  # the parent, which does not change decoded values
        with pytest.raises(RecordError):
            decode(seal(damaged + record[header_bytes:]), KEY, layout)


@pytest.mark.parametrize("codec", [codec for codec in BUILT_IN if codec is not Codec.NONE])
def test_each_flipped_bit_of_a_stream_under_a_right_checksum_is_found_when_decoding(codec: Codec) -> None:
    layout = make_layout(Quantizer.LOSSLESS, layers=1, kinds=1, tokens=8, vector_length=8)
    record = make_record(layout, codec)
    manifest = read_manifest(record)
    body = record[read_header(record)["header_length"] :]
    for _, damaged in flipped(body):
        manifest["checksum"] = zlib.crc32(damaged)
        try:
            kv = decode(forge(record, manifest, damaged), KEY, layout)
        except RecordError:
            continue
        assert kv == pattern(layout)  # padding bits after the last symbol do not change the stream


@pytest.mark.parametrize("codec", BUILT_IN)
def test_each_truncation_is_found(codec: Codec) -> None:
    record = make_record(codec=codec)
    header_bytes = read_header(record)["header_length"]
    for length in range(len(record)):
        with pytest.raises(NotARecordError if length < 4 else CorruptRecordError):
            verify(record[:length], KEY)
        if length < header_bytes:
            with pytest.raises(RecordError):
                parse_header(record[:length])
    assert parse_header(record[:header_bytes]) is not None


def test_bytes_behind_the_record_are_found() -> None:
    with pytest.raises(CorruptRecordError, match="its header says"):
        verify(make_record() + b"\0", KEY)


@pytest.mark.parametrize("value", [b"", b"S", b"SSK", b"hello, world", b"sskv" + bytes(200), bytes(500), b"SSKX" * 99])
def test_a_value_that_is_no_record_is_said_to_be_none(value: bytes) -> None:
    with pytest.raises(NotARecordError):
        verify(value, KEY)


@pytest.mark.parametrize("version", [0, 3, 65535])
def test_a_record_of_another_version_is_none_that_we_know(version: int) -> None:
    with pytest.raises(NotARecordError, match="version"):
        verify(forge(make_record(), version=version), KEY)


@settings(max_examples=300)
@given(rest=st.binary(max_size=400))
def test_arbitrary_bytes_behind_the_magic_end_as_a_record_error(rest: bytes) -> None:
    with pytest.raises(RecordError):
        verify(MAGIC + rest, KEY)
    with pytest.raises(RecordError):
        verify(seal((MAGIC + b"\1\0\x80\0" + rest).ljust(FIXED_HEADER_BYTES, b"\0")), KEY)


def test_a_peek_at_a_head_tells_what_reading_it_tells() -> None:
    record = make_record(codec=Codec.LZ4)
    head = parse_header(record)
    length = header_length(record)
    assert length == head.header_length == header_length(record[:FIXED_HEADER_BYTES])
    assert peek_header(record[:length]) == (head.key, head.layout.namespace, head.codec, head.record_length)


def test_a_peek_at_a_head_finds_the_damage_that_reading_it_finds() -> None:
    record = make_record()
    head = record[: header_length(record)]
    for _, damaged in flipped(head):
        with pytest.raises(RecordError) as read:
            parse_header(damaged)
        with pytest.raises(read.type):
            peek_header(damaged)
    for length in range(len(head)):
        with pytest.raises(RecordError):
            peek_header(head[:length])


@pytest.mark.parametrize("value", [b"", b"SSKV", bytes(500), make_record()[:127], b"X" + make_record()[1:]])
def test_what_cannot_begin_a_record_claims_no_head(value: bytes) -> None:
    assert header_length(value) == 0
    assert header_length(memoryview(value)) == 0


def test_a_head_that_claims_more_than_any_has_claims_none() -> None:
    assert header_length(forge(make_record(), header_length=HEADER_BYTES_MAX + 1)) == 0


# ---- Sound records of something else ---------------------------------------------------------------------------------


def test_a_record_of_another_key_is_a_mismatch() -> None:
    other = bytes(32)
    with pytest.raises(MismatchError, match=f"key {KEY.hex()} is stored under key {other.hex()}"):
        verify(make_record(), other)


OTHER_LAYOUTS = {
    "namespace": {"namespace": bytes(32)},
    "dtype": {"dtype": DType.FLOAT16},
    "layers": {"layers": 4},
    "kinds": {"kinds": 1},
    "vector_length": {"vector_length": 8},
    "tokens": {"tokens": 6},
    "quantizer": {"quantizer": Quantizer.PASSTHROUGH},
    "bins": {"quantizer": Quantizer.BINNED, "bins": 32},
    "value_bins": {"quantizer": Quantizer.BINNED, "bins": 32, "value_bins": 16},
    "scale_tokens": {"quantizer": Quantizer.BINNED, "bins": 32, "scale_tokens": 2},
}


@pytest.mark.parametrize("name", list(vars(make_layout())))
def test_a_record_that_differs_in_anything_is_a_mismatch_that_names_it(name: str) -> None:
    layout = replace(make_layout(), **OTHER_LAYOUTS[name])
    with pytest.raises(MismatchError, match=name):
        decode(make_record(layout), KEY, make_layout())


@pytest.mark.parametrize("codec", [5, 255])
def test_an_unknown_codec_is_a_mismatch_and_not_damage(codec: int) -> None:
    record = forge(make_record(), codec=codec)
    assert verify(record, KEY).codec == codec
    with pytest.raises(MismatchError, match=f"codec {codec}"):
        decode(record, KEY, make_layout())


def test_a_codec_that_was_not_built_in_is_a_mismatch_and_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(codec=Codec.DEFLATE)
    monkeypatch.setattr(native, "codec_implementations", lambda: {Codec.NONE: "memcpy"})
    with pytest.raises(MismatchError, match="cannot decode"):
        decode(record, KEY, make_layout())


# ---- Hostile headers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        {"fixed_length": 64},
        {"fixed_length": 256},
        {"header_length": FIXED_HEADER_BYTES},
        {"header_length": 2**32 - 1},
        {"slices": 0},
        {"slices": 3},
        {"slices": 2**32 - 1},
        {"slices": 2**32 - 1, "header_length": (FIXED_HEADER_BYTES + 40 * (2**32 - 1)) % 2**32},
        {"record_length": 0},
        {"record_length": 2**64 - 1},
        {"quantizer": 3},
        {"quantizer": 255},
        {"dtype": 4},
        {"dtype": 255},
        {"kinds": 0},
        {"kinds": 3},
        {"bins": 2},
        {"bins": 32},
        {"tokens": 0},
        {"tokens": 2**32 - 1},
        {"layers": 0},
        {"layers": 2**32 - 1},
        {"layers": 2**32 - 1, "raw_length": 3 * (2**32 - 1) * 2 * 4 * 2},
        {"vector_length": 0},
        {"vector_length": 2**32 - 1},
        {"vector_length": 2**20, "raw_length": 3 * 2 * 2 * 2**20 * 2},
        {"raw_length": 0},
        {"raw_length": 2**64 - 1},
        {"reserved": b"\1" + bytes(3)},
        {"reserved": bytes(3) + b"\1"},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_corrupt(header: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecordError):
        verify(forge(make_record(), **header), KEY)


@pytest.mark.parametrize("length", [0, FIXED_HEADER_BYTES, FIXED_HEADER_BYTES + 4 * 40 - 1, 1 << 63])
def test_an_impossible_length_of_a_record_is_corrupt_if_only_the_header_is_read(length: int) -> None:
    """Symptom: slices_of() raised OverflowError for 2 ** 63, and a fetch ended as an internal error."""
    with pytest.raises(CorruptRecordError, match="contradict"):
        peek_header(forge(make_record(), record_length=length))


def test_a_head_above_the_longest_is_corrupt_even_if_it_is_all_there() -> None:
    count = (HEADER_BYTES_MAX - FIXED_HEADER_BYTES) // MANIFEST_DTYPE.itemsize
    assert peek_header(forge(make_record(), np.zeros(count, MANIFEST_DTYPE))).key == KEY
    with pytest.raises(CorruptRecordError, match="contradict"):
        peek_header(forge(make_record(), np.zeros(count + 1, MANIFEST_DTYPE)))


def test_an_empty_manifest_is_corrupt() -> None:
    with pytest.raises(CorruptRecordError):
        verify(forge(make_record(), np.zeros(0, MANIFEST_DTYPE), b""), KEY)


def swap(manifest: Manifest) -> None:
    manifest[[0, 1]] = manifest[[1, 0]]


def shift(name: str, index: int, by: int) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        manifest[name][index] += np.array(by, np.int64).astype(manifest.dtype[name])

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(swap, id="slices in another order"),
        pytest.param(shift("offset", 0, -1), id="a slice that begins in the head"),
        pytest.param(shift("offset", 1, -1), id="slices that overlap"),
        pytest.param(shift("offset", 1, 1), id="a gap between slices"),
        pytest.param(shift("offset", 3, 1 << 40), id="a slice far behind the end"),
        pytest.param(shift("offset", 3, -(1 << 62)), id="an offset of 64 bits"),
        pytest.param(shift("layer", 1, 1), id="a layer twice"),
        pytest.param(shift("layer", 3, 1), id="a layer that is not there"),
        pytest.param(shift("layer", 3, 1 << 31), id="a layer of 32 bits"),
        pytest.param(shift("kind", 3, 1), id="a kind that is not there"),
        pytest.param(shift("kind", 1, -1), id="a kind twice"),
        pytest.param(shift("token_first", 1, 1), id="a first token that leaves one out"),
        pytest.param(shift("token_first", 1, -1), id="a first token of 32 bits"),
        pytest.param(shift("tokens", 1, 1), id="a token too many"),
        pytest.param(shift("tokens", 1, -1), id="a token too few"),
        pytest.param(shift("tokens", 1, -3), id="a slice without tokens"),
        pytest.param(shift("tokens", 3, 1 << 31), id="tokens of 32 bits"),
        pytest.param(shift("scales_length", 1, 4), id="scales where there are none"),
        pytest.param(shift("encoded_length", 3, 1), id="a stream behind the end"),
        pytest.param(shift("encoded_length", 3, -1), id="a byte that belongs to no slice"),
        pytest.param(shift("encoded_length", 0, -1), id="a stream that ends before the next slice"),
        pytest.param(shift("encoded_length", 3, 1 << 31), id="a stream of 32 bits"),
        pytest.param(shift("layer", 0, 1 << 31), id="a layer far behind the last"),
    ],
)
def test_a_manifest_that_does_not_cover_the_chunk_is_corrupt(change: Callable[[Manifest], None]) -> None:
    record = make_record(codec=Codec.NONE)
    manifest = read_manifest(record)
    change(manifest)
    with pytest.raises(CorruptRecordError, match="does not cover"):
        _ = parse_header(forge(record, manifest)).slices  # a data plane uses only the header
    sound = parse_header(record)
    with pytest.raises(CorruptRecordError, match="does not cover"):
        slices_of([sound, parse_header(forge(record, manifest)), sound])
    with pytest.raises(CorruptRecordError):
        verify(forge(record, manifest), KEY)


@pytest.mark.parametrize("name", ["encoded_length", "tokens"])
def test_manifests_whose_faults_cancel_out_are_corrupt(name: str) -> None:
    """The total numbers of bytes and tokens are right."""
    record = make_record(codec=Codec.NONE)
    heads = []
    for by in (1, -1):
        manifest = read_manifest(record)
        shift(name, 3, by)(manifest)
        heads.append(parse_header(forge(record, manifest, record_length=len(record))))
    with pytest.raises(CorruptRecordError, match="does not cover"):
        slices_of(heads)


def test_manifests_are_those_of_their_heads() -> None:
    heads = [parse_header(make_record(codec=codec)) for codec in (Codec.NONE, Codec.DEFLATE, Codec.NONE)]
    assert slices_of(heads).tobytes() == b"".join(head.manifest.tobytes() for head in heads)
    assert len(slices_of([])) == 0


def test_a_head_of_more_tokens_than_a_chunk_has_is_corrupt() -> None:
    """A position could otherwise wrap around to a sound one."""
    with pytest.raises(CorruptRecordError, match="at most 65536"):
        parse_header(forge(make_record(), tokens=2**32 - 1))


def rename_kind(manifest: Manifest) -> Manifest:
    """Rename layer 1, kind 0 to layer 0, kind 2: the same position by another name."""
    manifest["layer"][2], manifest["kind"][2] = 0, 2
    return manifest


def rename_token(manifest: Manifest) -> Manifest:
    """Rename kind 1, token 0 to kind 0, token 3 (of three)."""
    manifest["kind"][1], manifest["token_first"][1] = 0, 3
    return manifest


def merge(manifest: Manifest) -> Manifest:
    """Merge K and V into one slice."""
    manifest["tokens"][0] += manifest["tokens"][1]
    manifest["encoded_length"][0] += manifest["encoded_length"][1]
    return np.delete(manifest, 1)


def insert_empty(manifest: Manifest) -> Manifest:
    """Insert an empty slice between two others."""
    empty = manifest[1:2].copy()
    empty["tokens"] = empty["encoded_length"] = empty["checksum"] = empty["decoded_crc32"] = 0
    return np.concatenate([manifest[:1], empty, manifest[1:]])


def leave_out(manifest: Manifest) -> Manifest:
    """Remove the last layer's last kind."""
    return manifest[:-1]


def call_scales(manifest: Manifest) -> Manifest:
    """Declare the first bytes of a stream as scales; a lossless record has none."""
    manifest["scales_length"][1], manifest["encoded_length"][1] = 4, manifest["encoded_length"][1] - 4
    return manifest


@pytest.mark.parametrize("change", [rename_kind, rename_token, merge, insert_empty, leave_out, call_scales])
def test_a_manifest_that_covers_the_chunk_by_a_trick_is_corrupt(change: Callable[[Manifest], Manifest]) -> None:
    record = make_record(codec=Codec.NONE)
    body = record[header_length(record) :]
    manifest = change(read_manifest(record))
    stored = manifest["scales_length"].astype(int) + manifest["encoded_length"]
    body = body[: stored.sum()]
    manifest["offset"] = FIXED_HEADER_BYTES + manifest.nbytes + np.cumsum(stored) - stored
    for entry in manifest:
        begin = int(entry["offset"]) - FIXED_HEADER_BYTES - manifest.nbytes
        length = int(entry["scales_length"]) + int(entry["encoded_length"])
        entry["checksum"] = zlib.crc32(body[begin : begin + length])
    with pytest.raises(CorruptRecordError, match="does not cover"):
        verify(forge(record, manifest, body), KEY)


def test_a_slice_above_2_mib_is_corrupt() -> None:
    layout = make_layout(dtype=DType.FLOAT32, layers=1, kinds=1, tokens=520, vector_length=1024)
    record = make_record(layout, Codec.NONE)
    whole = read_manifest(record)[:1].copy()
    whole["tokens"], whole["encoded_length"] = 520, 520 * 4096
    whole["offset"] = FIXED_HEADER_BYTES + 40
    body = record[read_header(record)["header_length"] :]
    whole["checksum"] = whole["decoded_crc32"] = zlib.crc32(body)
    with pytest.raises(CorruptRecordError, match="does not cover"):
        verify(forge(record, whole, body), KEY)


def test_a_stream_that_swells_is_given_only_its_slice() -> None:
    layout = make_layout(Quantizer.PASSTHROUGH, DType.UINT8, layers=1, kinds=1, tokens=4)
    bomb = native.compress(Codec.DEFLATE, bytes(64 << 20))
    manifest = plan_slices(layout)
    manifest["encoded_length"], manifest["checksum"] = len(bomb), zlib.crc32(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match="does not decode"):
            decode(encode_header(KEY, Codec.DEFLATE, layout, manifest) + bomb, KEY, layout)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(bomb) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        {"slices": 2**32 - 1, "header_length": 2**32 - 1, "record_length": 2**64 - 1},
        {"slices": (HEADER_BYTES_MAX - FIXED_HEADER_BYTES) // 40 + 1},
        {"layers": 2**32 - 1, "tokens": 2**32 - 1, "vector_length": 2**20},
    ],
    ids=str,
)
def test_a_hostile_head_costs_no_memory_beyond_its_own(header: dict[str, Any]) -> None:
    slices = header.get("slices", 4)
    consistent = {"header_length": FIXED_HEADER_BYTES + 40 * slices, "record_length": 1 << 40}
    record = forge(make_record(), **({key: value % 2**32 for key, value in consistent.items()} | header))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError):
            verify(record, KEY)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_scales_that_are_not_finite_are_corrupt() -> None:
    layout = make_layout(Quantizer.BINNED, layers=1, kinds=1, tokens=1)
    record = make_record(layout, Codec.NONE)
    body = struct.pack("<f", float("nan")) + record[read_header(record)["header_length"] + 4 :]
    manifest = read_manifest(record)
    manifest["checksum"] = zlib.crc32(body)
    with pytest.raises(CorruptRecordError, match="cannot be dequantized"):
        decode(forge(record, manifest, body), KEY, layout)


INTERESTING = st.one_of(
    st.sampled_from([0, 1, 2, 3, 127, 128, 255, 1 << 20, 2 << 20, 1 << 31, (1 << 32) - 1]),
    st.integers(0, (1 << 32) - 1),
)


@settings(max_examples=500)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, (FIXED_HEADER_BYTES + 4 * 40) // 4 - 1), INTERESTING), min_size=1, max_size=6
    ),
    relative=st.booleans(),
)
def test_any_words_in_a_sealed_head_end_as_a_record_error_or_as_the_same_record(
    changes: list[tuple[int, int]], relative: bool
) -> None:
    layout = make_layout(Quantizer.BINNED)
    record = bytearray(make_record(layout, Codec.NONE))
    for word, value in changes:
        (old,) = struct.unpack_from("<I", record, word * 4)
        struct.pack_into("<I", record, word * 4, (old + value) % (1 << 32) if relative else value)
    sealed = seal(bytes(record))
    try:
        head = parse_header(sealed)
        assert head.slices["offset"].max() < len(sealed)
        assert [layer_range(head, layer, layer) for layer in range(min(head.layout.layers, 9))]
        kv = decode(sealed, KEY, layout)
    except RecordError:
        return
    assert kv == decode(make_record(layout, Codec.NONE), KEY, layout)
