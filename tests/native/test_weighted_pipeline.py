"""Chunks of the quantizer ``weighted`` through the pipeline: encoded from memory, and fetched into memory."""

import numpy as np
import pytest
from numpy.typing import NDArray

from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.native import Origin, Result
from shadowserve.record import plan_slices

LAYERS, TOKENS, LENGTH, CHUNKS = 3, 32, 64, 2
LAYOUT = ChunkLayout(
    dtype=DType.FLOAT32, layers=LAYERS, kinds=2, tokens=TOKENS, vector_length=LENGTH, quantizer=Quantizer.WEIGHTED
)
STEPS = np.random.default_rng(5).uniform(0.01, 0.2, (2 * LAYERS, LENGTH)).astype(np.float32)
ROOM = 1 << 20


def channels_of(steps: NDArray[np.float32]) -> native.Channels:
    return native.Channels(steps, np.zeros_like(steps), [1, 0.1], kinds=2, head_length=16, tokens=TOKENS)


def make_batch(memory: NDArray[np.float32], channels: native.Channels, first_position: int) -> native.Batch:
    """Return a batch of all chunks, with as much room for exact tokens as they may need."""
    manifest = plan_slices(LAYOUT)
    pieces = np.zeros(CHUNKS, native.PIECE_DTYPE)
    pieces["codec"], pieces["slice_count"] = native.Codec.KVRANS, len(manifest)
    pieces["chunk"] = np.arange(CHUNKS)
    pieces["slice_first"] = len(manifest) * np.arange(CHUNKS)
    pieces["decompression_offset"] = pieces["dequantization_offset"] = ROOM // CHUNKS * np.arange(CHUNKS)
    slices = np.zeros(CHUNKS * len(manifest), native.SLICE_DTYPE)
    slices["vectors"], slices["decoded_length"] = TOKENS, TOKENS * LENGTH
    slices["memory_offset"] = 4 * TOKENS * LENGTH * np.arange(len(slices))
    slices["scales_length"] = np.tile(manifest["scales_length"], CHUNKS)
    slices["row"] = np.tile(np.arange(2 * LAYERS), CHUNKS)
    slices["position"] = first_position + TOKENS * np.repeat(np.arange(CHUNKS), len(manifest))
    group = native.Group.of(LAYOUT, memory.data.cast("B"), channels)
    return native.Batch(pieces=pieces, slices=slices, groups=[group], deadline_ns=2**62)


@pytest.fixture
def pipeline() -> native.Pipeline:
    return native.Pipeline(decompression_bytes=ROOM, dequantization_bytes=ROOM, store_bytes=ROOM, pin_memory=False)


def through_a_record(
    pipeline: native.Pipeline, kv: NDArray[np.float32], channels: native.Channels, position: int
) -> NDArray[np.float32]:
    """Return the KV after it was encoded and fetched."""
    stored = make_batch(kv, channels, position)
    assert pipeline.encode(stored) is Result.OK
    back = np.empty_like(kv)
    fetched = make_batch(back, channels, position)
    fetched.slices[:] = stored.slices
    fetched.pieces["body_length"], fetched.pieces["origin"] = stored.pieces["body_length"], Origin.AWAITED
    fetched = native.Batch(
        pieces=fetched.pieces, slices=fetched.slices, deadline_ns=2**62,
        groups=[native.Group.of(LAYOUT, back.data.cast("B"), channels)],
    )  # fmt: skip
    for index in range(CHUNKS):
        body = bytearray(int(stored.pieces["body_length"][index]))
        pipeline.copy_body(stored, index, body)
        fetched.supply(index, body)
    assert pipeline.fetch(fetched) is Result.OK
    return back


@pytest.mark.parametrize("position", [0, 4096])
def test_kv_comes_back_within_half_a_step_and_first_tokens_exactly(pipeline: native.Pipeline, position: int) -> None:
    kv = np.random.default_rng(6).normal(size=(CHUNKS, LAYERS, 2, TOKENS, LENGTH)).astype(np.float32)
    kv[1, 2, 0, 7, 9] = 1e9
    with pipeline:
        back = through_a_record(pipeline, kv, channels_of(STEPS), position)
    error = np.abs(back - kv)
    assert (error[:, :, 1] <= 0.504 * STEPS.reshape(LAYERS, 2, 1, LENGTH)[:, 1]).all()  # values
    assert 0 < error[:, :, 0].max() <= 0.504 * 2**0.5 * STEPS.max()  # keys: of both channels of a rotated pair
    assert not error[1, 2, 0, 7].any()
    assert error[0, :, :, :4].any() == (position != 0)


def test_steps_decide_how_much_is_lost(pipeline: native.Pipeline) -> None:
    kv = np.random.default_rng(7).normal(size=(CHUNKS, LAYERS, 2, TOKENS, LENGTH)).astype(np.float32)
    with pipeline:
        fine, coarse = (through_a_record(pipeline, kv, channels_of(STEPS * by), 512) for by in (1, 8))
    assert np.abs(fine - kv).mean() * 4 < np.abs(coarse - kv).mean()


@pytest.mark.parametrize(
    "change", [{"scales_length": 64}, {"row": 2 * LAYERS}, {"vectors": 0}], ids=["too little room", "row", "no tokens"]
)
def test_a_store_with_impossible_slices_is_refused(pipeline: native.Pipeline, change: dict[str, int]) -> None:
    kv = np.zeros((CHUNKS, LAYERS, 2, TOKENS, LENGTH), np.float32)
    batch = make_batch(kv, channels_of(STEPS), 0)
    for name, value in change.items():
        batch.slices[name][3] = value
    with pipeline:
        assert pipeline.encode(batch) is Result.BAD_ARGUMENT
