"""Batches fit every buffer without overlap, and contain the leading pieces in order."""

import numpy as np
import pytest
from dataplane_support import keys_of, layout, make_record, part_of
from hypothesis import given
from hypothesis import strategies as st

from dpu_dataplane.batches import ALIGNMENT, Buffers, encoded_bound, plan_fetch, plan_store
from dpu_dataplane.sources.found import Stored
from shadowserve import native, record
from shadowserve.chunk import ChunkLayout

SHAPE = layout(layers=2, vector_length=32)
OTHER = layout("binned", "float32", layers=3, vector_length=16)
KEYS = keys_of(SHAPE, 8)
CODECS = set(native.codec_implementations())


def stored(shape: ChunkLayout, keys: list[bytes]) -> list[Stored]:
    records = [make_record(shape, key, index, ["deflate", "none"][index % 2]) for index, key in enumerate(keys)]
    return [Stored(len(data), data[: record.header_length(data)]) for data in records]


GROUPS = [(SHAPE, KEYS, stored(SHAPE, KEYS)), (OTHER, keys_of(OTHER, 6), stored(OTHER, keys_of(OTHER, 6)))]


def place_of(shape: ChunkLayout, offset: int) -> tuple[int, int]:
    """Return chunk and layer of an offset in a region."""
    return offset // shape.raw_bytes, offset % shape.raw_bytes * shape.layers // shape.raw_bytes


@given(data=st.data(), layerwise=st.booleans(), decompression=st.integers(0, 20_000))
def test_occupancies_fit_and_do_not_overlap(data: st.DataObject, layerwise: bool, decompression: int) -> None:
    decompression += max(
        each.length for _, _, found in GROUPS for each in found
    )  # as the registration of a layout ensures
    smallest = max(shape.raw_bytes for shape, _, _ in GROUPS)
    dequantization, dma_source = (data.draw(st.none() | st.integers(smallest, 40_000)) for _ in range(2))
    buffers = Buffers(decompression=decompression, dequantization=dequantization, dma_source=dma_source, store=0)
    groups, wanted = [], []
    for shape, keys, found in GROUPS:
        size = shape.layers * len(keys)
        chosen = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape.layers, -1)
        absent = data.draw(st.none() | st.integers(0, len(keys) - 1))
        answers = {i: None if i == absent else each for i, each in enumerate(found)}
        groups.append(part_of(shape, keys, answers, chosen))
        ends = absent is not None and chosen[:, absent].any()
        wanted.append(chosen & (np.arange(len(keys)) < absent) if ends else chosen)
    plan = plan_fetch(groups, layerwise, buffers, CODECS)

    pieces, layers = plan.pieces, (plan.layers[:, 1] - plan.layers[:, 0])
    begins, lengths = pieces["decompression_offset"], pieces["body_length"]
    assert (begins % ALIGNMENT == 0).all()
    ends_at = begins + lengths
    assert (ends_at[:-1] <= begins[1:]).all() and (ends_at <= decompression).all()
    shapes = [GROUPS[group][0] for group in pieces["group"]]
    raw = np.array([count * shape.raw_bytes // shape.layers for count, shape in zip(layers, shapes, strict=True)])
    symbols = np.array(
        [n * s.kinds * s.tokens * s.token_decoded_bytes for n, s in zip(layers, shapes, strict=True)], np.uint64
    )
    if dequantization is not None:
        begins = pieces["dequantization_offset"]
        assert (np.diff(begins) >= symbols[:-1]).all() and (begins + symbols <= dequantization).all()
    if dma_source is not None:
        assert raw.sum() <= dma_source
    assert (pieces["result"] == native.Result.SKIPPED).all()

    # The planned pieces are the first of the wanted pieces in their order, and all of them unless the buffers are full.
    taken = [np.zeros_like(group.wanted) for group in groups]
    order = []
    for piece, (first, end) in zip(pieces, plan.layers, strict=True):
        assert not taken[piece["group"]][first:end, piece["chunk"]].any()
        taken[piece["group"]][first:end, piece["chunk"]] = True
        depth = GROUPS[piece["group"]][0].layers
        chunkwise = (int(piece["chunk"]), int(piece["group"]), int(first))
        order.append((first / depth, int(piece["group"]), int(piece["chunk"])) if layerwise else chunkwise)
        assert not layerwise or end == first + 1
    assert order == sorted(order)
    assert all((mine <= theirs).all() for mine, theirs in zip(taken, wanted, strict=True))
    assert plan.full == any((mine != theirs).any() for mine, theirs in zip(taken, wanted, strict=True))
    assert len(pieces) or not any(each.any() for each in wanted), "at least one piece must fit"


@pytest.mark.parametrize("layerwise", [False, True])
def test_slices_are_those_of_their_pieces(layerwise: bool) -> None:
    buffers = Buffers(decompression=1 << 20, dequantization=None, dma_source=None, store=0)
    groups = [part_of(shape, keys, dict(enumerate(found))) for shape, keys, found in GROUPS]
    plan = plan_fetch(groups, layerwise, buffers, CODECS)
    for piece, (first, end) in zip(plan.pieces, plan.layers, strict=True):
        shape, _, found = GROUPS[piece["group"]]
        slices = record.parse_header(found[piece["chunk"]].header).slices
        manifest = slices[(slices["layer"] >= first) & (slices["layer"] < end)]
        mine = plan.slices[piece["slice_first"] :][: piece["slice_count"]]
        assert (mine["offset"] + piece["record_offset"] == manifest["offset"]).all()
        assert int((mine["scales_length"] + mine["encoded_length"]).sum()) == piece["body_length"]
        assert (mine["checksum"] == manifest["checksum"]).all() and (mine["vectors"] == manifest["tokens"]).all()
        places = [place_of(shape, int(offset)) for offset in mine["memory_offset"]]
        assert places == [(piece["chunk"], layer) for layer in manifest["layer"]]


def test_a_chunk_without_a_lookup_is_left_for_the_next_batch() -> None:
    shape, keys, found = GROUPS[0]
    buffers = Buffers(decompression=1 << 20, dequantization=None, dma_source=None, store=0)
    plan = plan_fetch([part_of(shape, keys, {0: found[0], 1: found[1]})], False, buffers, CODECS)
    assert (plan.pieces["chunk"].tolist(), plan.full, plan.ends) == ([0, 1], True, {})


@pytest.mark.parametrize(("name", "value", "reason"), [("layer", 1, "cover"), ("encoded_length", 0, "empty")])
@pytest.mark.parametrize("chunk", [0, 3])
def test_a_faulty_manifest_ends_its_group_at_its_chunk(chunk: int, name: str, value: int, reason: str) -> None:
    shape, keys, found = GROUPS[0]
    header = record.parse_header(found[chunk].header)
    manifest = header.manifest.copy()
    manifest[name][0] = value
    forged = record.encode_header(keys[chunk], native.Codec(header.codec), shape, manifest)
    records = dict(enumerate(found)) | {chunk: Stored(record.peek_header(forged).record_length, forged)}
    buffers = Buffers(decompression=1 << 20, dequantization=None, dma_source=None, store=0)
    plan = plan_fetch([part_of(shape, keys, records)], False, buffers, CODECS)
    assert (plan.pieces["chunk"].tolist(), plan.full) == (list(range(chunk)), False)
    assert (fault := plan.ends[0].fault) is not None and reason in fault.reason and plan.ends[0].chunk == chunk


@pytest.mark.parametrize("codec", list(CODECS))
def test_store_batches_have_room_for_the_worst(codec: native.Codec) -> None:
    shape = layout("binned", vector_length=512)
    bound = encoded_bound(shape, codec)
    worst = shape.raw_bytes // 2 + shape.layers * shape.kinds * shape.tokens * 4
    assert bound >= worst
    plan = plan_store(KEYS[:3], [1, 4, 6], shape, codec, bound)
    offsets = plan.pieces["decompression_offset"].astype(np.int64)
    assert (np.diff(offsets) >= bound).all()
    firsts = plan.slices["memory_offset"][plan.pieces["slice_first"]]
    assert firsts.tolist() == [shape.raw_bytes, 4 * shape.raw_bytes, 6 * shape.raw_bytes]
