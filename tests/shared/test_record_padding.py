"""Records of pages: their bodies begin at a device block's boundary, behind an object's header."""

import pytest
from record_forge import KEY, flipped, make_layout, make_record, pattern, seal

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import CorruptRecordError, RecordError
from shadowserve.native import Codec
from shadowserve.record import decode, encode_header, header_length, layer_bounds, parse_header, peek_header, verify

LAYOUT = make_layout(Quantizer.PASSTHROUGH, DType.UINT8, layers=3, kinds=1, tokens=2, vector_length=4096)


def padded() -> bytes:
    """Return a record as stored for pages."""
    plain = make_record(LAYOUT, Codec.NONE)
    head = parse_header(plain)
    return encode_header(KEY, Codec.NONE, LAYOUT, head.manifest, in_blocks=True) + plain[head.header_length :]


def test_each_layer_lies_in_whole_blocks_of_a_device() -> None:
    record = padded()
    bounds = layer_bounds(record) + native.OBJECT_HEADER_BYTES
    assert (bounds % 4096 == 0).all() and bounds[-1] == native.OBJECT_HEADER_BYTES + len(record)
    assert decode(record, KEY, LAYOUT) == pattern(LAYOUT)
    length = header_length(record)
    assert peek_header(record[:length]).record_length == len(record)
    assert (
        verify(record, KEY).slices["checksum"] == parse_header(make_record(LAYOUT, Codec.NONE)).manifest["checksum"]
    ).all()


def test_each_flipped_bit_of_a_padded_head_is_found() -> None:
    record = padded()
    length = header_length(record)
    for bit, damaged in flipped(record[:300]):
        with pytest.raises(RecordError if bit // 8 < 6 else CorruptRecordError):
            parse_header(damaged + record[300:length])


def test_padding_is_zeros_and_as_long_as_the_header_says() -> None:
    record = padded()
    length = header_length(record)
    for changed in (
        record[: length - 1] + b"\1" + record[length:],
        record[:4] + b"\2" + record[5:],  # of a version without padding
        record[:124] + bytes(4) + record[128:],
        record[:124] + (4096).to_bytes(4, "little") + record[128:],
        record[:124] + (2**32 - 1).to_bytes(4, "little") + record[128:],
    ):
        with pytest.raises(RecordError):
            parse_header(seal(changed))
