"""Occupancies: inside every buffer, never overlapping, the leading chunks and no others."""

import numpy as np
import pytest
from dataplane_support import keys_of, layout, make_record
from hypothesis import given
from hypothesis import strategies as st

from dpu_dataplane.rounds import ALIGNMENT, Buffers, encoded_bound, plan_fetch, plan_store
from dpu_dataplane.sources.source import Stored
from shadowserve import native, record

SHAPE = layout(layers=2, vector_length=32)
KEYS = keys_of(SHAPE, 8)
RECORDS = [make_record(SHAPE, key, index, ["deflate", "none"][index % 2]) for index, key in enumerate(KEYS)]
FOUND = [(Stored(len(data), data[: record.head_length(data)]), False) for data in RECORDS]
CODECS = set(native.codec_implementations())


@given(
    decompression=st.integers(0, 20_000),
    dequantization=st.none() | st.integers(0, 40_000),
    dma_source=st.none() | st.integers(0, 40_000),
    absent=st.none() | st.integers(0, 7),
)
def test_occupancies_fit_and_do_not_overlap(
    decompression: int, dequantization: int | None, dma_source: int | None, absent: int | None
) -> None:
    found = [(None if index == absent else stored, False) for index, (stored, _) in enumerate(FOUND)]
    largest = max(len(data) for data in RECORDS)
    decompression += largest  # as the daemon makes sure of, when a layout is registered
    buffers = Buffers(decompression=decompression, dequantization=dequantization, dma_source=dma_source, store=0)
    plan = plan_fetch(KEYS, found, SHAPE, buffers, CODECS)
    count = len(plan.chunks)
    begins, lengths = plan.chunks["decompression_offset"], plan.chunks["body_length"]
    ends = begins + lengths
    assert (begins % ALIGNMENT == 0).all()
    assert (ends[:-1] <= begins[1:]).all() and (ends <= decompression).all()
    symbols = SHAPE.raw_bytes
    if dequantization is not None:
        begins = plan.chunks["dequantization_offset"]
        assert (np.diff(begins) >= symbols).all() and (begins + symbols <= dequantization).all()
    if dma_source is not None:
        assert count * SHAPE.raw_bytes <= dma_source
    assert plan.fault is None
    assert plan.absent == (count == absent)
    assert plan.full == (count < 8 and count != absent)
    # Slices cover the destination from the first byte to the last, once.
    assert len(plan.slices) == count * SHAPE.slice_count
    raw = plan.slices["vectors"].astype(np.int64) * SHAPE.vector_length * SHAPE.dtype.itemsize
    assert (plan.slices["destination_offset"] == np.cumsum(raw) - raw).all()
    assert raw.sum() == count * SHAPE.raw_bytes
    assert (plan.chunks["result"] == native.Result.SKIPPED).all()


@pytest.mark.parametrize("codec", list(CODECS))
def test_store_batches_have_room_for_the_worst(codec: native.Codec) -> None:
    shape = layout("binned", vector_length=512)
    bound = encoded_bound(shape, codec)
    worst = shape.raw_bytes // 2 + shape.layers * shape.kinds * shape.tokens * 4
    assert bound >= worst
    plan = plan_store(KEYS[:3], [1, 4, 6], shape, codec, bound)
    offsets = plan.chunks["decompression_offset"].astype(np.int64)
    assert (np.diff(offsets) >= bound).all()
    firsts = plan.slices["destination_offset"][plan.chunks["slice_first"]]
    assert firsts.tolist() == [shape.raw_bytes, 4 * shape.raw_bytes, 6 * shape.raw_bytes]
