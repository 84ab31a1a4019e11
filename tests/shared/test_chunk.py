"""The chunk's description: valid values, and its equality after a message."""

from dataclasses import replace

import pytest

from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_from_message, layout_message

BINNED = ChunkLayout(
    namespace=bytes(range(32)),
    dtype=DType.BFLOAT16,
    layers=4,
    kinds=2,
    vector_length=64,
    tokens=256,
    quantizer=Quantizer.BINNED,
    bins=64,
    value_bins=16,
    scale_tokens=4,
)
PLAIN = replace(BINNED, quantizer=Quantizer.LOSSLESS, bins=0, value_bins=0, scale_tokens=1)


@pytest.mark.parametrize("quantizer", Quantizer)
@pytest.mark.parametrize("dtype", DType)
def test_a_message_says_what_the_description_says(dtype: DType, quantizer: Quantizer) -> None:
    made = {"dtype": dtype, "quantizer": quantizer}
    refused = {Quantizer.BINNED: [DType.UINT8], Quantizer.WEIGHTED: [DType.UINT8, DType.FLOAT8_E4M3]}
    like = BINNED if quantizer is Quantizer.BINNED else PLAIN
    if dtype in refused.get(quantizer, []):
        pytest.raises(ValueError, replace, like, **made)
        return
    layout = replace(like, **made)
    received = pb.ChunkLayout.FromString(layout_message(layout).SerializeToString())
    assert layout_from_message(received) == layout


def test_the_message_is_what_other_programs_write() -> None:
    written = pb.ChunkLayout(
        namespace=bytes(range(32)), dtype="bfloat16", layers=4, kinds=2, vector_length=64, tokens=256,
        quantizer="binned", bins=64, value_bins=16, scale_tokens=4,
    )  # fmt: skip
    assert layout_message(BINNED) == written


def test_an_empty_message_is_no_description() -> None:
    with pytest.raises(ValueError, match="dtype is ''"):
        layout_from_message(pb.ChunkLayout())


@pytest.mark.parametrize("label", ["float64", "BFLOAT16", "torch.bfloat16", "", "name", "__members__", "x" * 10_000])
def test_a_name_that_is_no_dtype_is_answered_with_the_names_and_is_not_repeated_at_length(label: str) -> None:
    with pytest.raises(ValueError, match=r"dtype is .*uint8, float16, bfloat16, float32, float8_e4m3$") as refused:
        layout_from_message(pb.ChunkLayout(namespace=bytes(32), dtype=label, quantizer="lossless"))
    assert len(str(refused.value)) < 200
