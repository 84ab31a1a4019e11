"""kvrans compared with a second decoder, written from docs/design/kvrans.md: the format matches the page, and does not
change."""

import hashlib
import json
import re
from pathlib import Path

import kvrans_reader
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrans_reader import BadStreamError, decode

from shadowserve import native
from shadowserve.errors import NativeError
from shadowserve.native import Codec

REPOSITORY = Path(__file__).parents[2]
ASSETS = REPOSITORY / "tests" / "assets" / "kvrans"
STORED: dict[str, dict[str, str]] = json.loads((ASSETS / "index.json").read_text())


@pytest.mark.parametrize("name", STORED)
def test_stored_streams_decode_to_what_they_were_made_from(name: str, isa: native.Isa) -> None:
    stream, size = (ASSETS / f"{name}.kvrans").read_bytes(), int(STORED[name]["size"])
    assert hashlib.sha256(native.decompress(Codec.KVRANS, stream, size)).hexdigest() == STORED[name]["sha256"]
    if isa is native.Isa.SCALAR:
        assert hashlib.sha256(decode(stream, size)).hexdigest() == STORED[name]["sha256"]


def test_the_example_in_the_documentation_decodes() -> None:
    page = (REPOSITORY / "docs" / "design" / "kvrans.md").read_text()
    match = re.search(r"<!-- example -->\n(.*?)\n<!-- decodes to -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert match is not None
    stream, plain = (bytes.fromhex(re.sub(r"\|.*|#.*", "", part, flags=re.MULTILINE)) for part in match.groups())
    assert len(plain) == 8 and decode(stream, 8) == plain
    assert native.decompress(Codec.KVRANS, stream, 8) == plain


@given(data=st.data())
@settings(max_examples=25)
def test_the_second_decoder_reads_what_the_encoder_writes(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    limit, tail = data.draw(st.sampled_from([1, 15, 31, 127])), data.draw(st.integers(0, columns - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = rng.normal(size=(rows + 1, columns)) * rng.lognormal(0, 1, columns) * limit / 4
    plain = np.clip(np.rint(values), -limit, limit).astype(np.int8).tobytes()[: rows * columns + tail]
    assert decode(native.compress(Codec.KVRANS, plain, columns), len(plain)) == plain


@given(data=st.data())
@settings(max_examples=150)
def test_both_decoders_accept_the_same_streams(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["listed", "lanes_128", "stored"]))
    size = int(STORED[name]["size"])
    damaged = bytearray((ASSETS / f"{name}.kvrans").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, min(len(damaged), 120) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        theirs: bytes | None = decode(bytes(damaged), size)
    except BadStreamError:
        theirs = None
    try:
        ours: bytes | None = native.decompress(Codec.KVRANS, damaged, size)
    except NativeError:
        ours = None
    assert ours == theirs


@pytest.mark.parametrize(("bins", "most"), [(16, 0.95), (32, 0.95), (64, 0.96)])
def test_columns_make_it_smaller_than_deflate(bins: int, most: float) -> None:
    rng = np.random.default_rng(bins)
    limit = bins // 2 - 1
    values = rng.normal(size=(256, 1024)) * rng.lognormal(0, 0.6, 1024) * limit / 5
    plain = np.clip(np.rint(values), -limit, limit).astype(np.int8).tobytes()
    assert len(native.compress(Codec.KVRANS, plain, 1024)) <= most * len(native.compress(Codec.DEFLATE, plain))


def test_tables_have_few_entries_where_that_hardly_takes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slots are looked up at once: a symbol with all four is one entry, any others are four."""
    read, tables = kvrans_reader._table, list[kvrans_reader.Table]()
    monkeypatch.setattr(kvrans_reader, "_table", lambda *bits: tables.append(read(*bits)) or tables[-1])
    rng = np.random.default_rng(4)
    plain = np.rint(rng.normal(size=(256, 192)) * 3 * rng.lognormal(0, 0.7, 192)).clip(-25, 25).astype(np.int8)
    assert decode(native.compress(Codec.KVRANS, plain.tobytes(), 192), plain.size) == plain.tobytes()
    assert len(tables) > 2
    for table in tables:
        fours = [table.index[slot : slot + 4] for slot in range(0, 256, 4)]
        whole = {four[0] for four in fours if four[0] == four[3]}
        assert len(whole) + 4 * sum(four[0] != four[3] for four in fours) <= 64


def test_noise_is_stored() -> None:
    plain = np.random.default_rng(3).bytes(1 << 18)
    assert len(native.compress(Codec.KVRANS, plain, 1024)) == len(plain) + 6


@pytest.mark.parametrize(("columns", "alone", "with_mantissas"), [(64, 64, 128), (128, 128, 256), (1024, 256, 256)])
def test_lossless_heads_have_more_lanes_than_blocks_alone(columns: int, alone: int, with_mantissas: int) -> None:
    rng = np.random.default_rng(6)
    exponents = np.rint(rng.normal(size=(256, columns)) * 3).astype(np.int8).tobytes()
    for plain, lanes in ((exponents, alone), (exponents + rng.bytes(len(exponents)), with_mantissas)):
        stream = native.compress(Codec.KVRANS, plain, columns)
        assert 64 << (stream[6] >> 2 & 3) == lanes
        assert decode(stream, len(plain)) == plain


def test_mantissas_are_not_coded_for_a_thousandth(isa: native.Isa) -> None:
    rng = np.random.default_rng(5)
    values = (rng.normal(size=(256, 1024)) * rng.lognormal(0, 0.6, 1024)).astype(np.float32)
    elements = (values.view(np.uint32) >> 16).astype(np.uint16)
    rotated = elements << 1 | elements >> 15
    exponents, mantissas = (rotated >> 8).astype(np.uint8).tobytes(), rotated.astype(np.uint8).tobytes()
    stream = native.compress(Codec.KVRANS, exponents + mantissas, 1024)
    assert stream.endswith(bytes([0, 255]) + mantissas)  # a stored block of 256 rows
    assert len(stream) < len(mantissas) + 0.4 * len(exponents)
    assert decode(stream, 2 << 18) == exponents + mantissas
