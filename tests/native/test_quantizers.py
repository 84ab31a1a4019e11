"""Quantizers through Python, compared with numpy and torch. native/tests/test_quantize.c has the rest."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native import Isa

FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3]


def elements(dtype: DType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return values as the bytes of ``dtype`` (bfloat16: truncated, not rounded)."""
    if dtype is DType.FLOAT8_E4M3:
        clamped = (
            torch.from_numpy(values).nan_to_num(nan=torch.nan, posinf=torch.nan, neginf=torch.nan).clamp(-448, 448)
        )
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
    if dtype is DType.FLOAT16:
        return values.astype(np.float16).view(np.uint8)
    if dtype is DType.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)


def values_of(dtype: DType, data: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the values of bytes in ``dtype``."""
    if dtype is DType.FLOAT8_E4M3:
        return torch.from_numpy(data).view(torch.float8_e4m3fn).double().numpy()
    if dtype is DType.FLOAT16:
        return data.view(np.float16).astype(np.float64)
    if dtype is DType.BFLOAT16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(np.float32).astype(np.float64)


def kv(vectors: int, vector_length: int, seed: int = 0) -> NDArray[np.float32]:
    """Return KV-like vectors: channels and tokens of different spread."""
    rng = np.random.default_rng(seed)
    spread = rng.lognormal(0, 1, size=(vectors, 1)) * rng.lognormal(0, 0.5, size=(1, vector_length))
    return (rng.normal(size=(vectors, vector_length)) * spread).astype(np.float32)


def test_lossless_puts_the_exponent_into_the_first_plane(isa: Isa) -> None:
    source = elements(DType.BFLOAT16, np.array([1.0, -1.0, 1.5, -2.0], np.float32))
    symbols, _ = native.quantize(Quantizer.LOSSLESS, DType.BFLOAT16, source, vectors=1, vector_length=4)
    assert symbols[:4].tolist() == [127, 127, 127, 128]  # the biased exponents
    assert symbols[4:].tolist() == [0, 1, 0x80, 1]  # mantissa, then sign


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bins", [4, 16, 32, 64, 256])
def test_binning_errs_by_half_a_step_at_most(isa: Isa, dtype: DType, bins: int) -> None:
    source = elements(dtype, kv(64, 129))
    symbols, scales = native.quantize(Quantizer.BINNED, dtype, source, vectors=64, vector_length=129, bins=bins)
    assert np.abs(symbols.view(np.int8).astype(int)).max() == bins // 2 - 1
    decoded = native.dequantize(Quantizer.BINNED, dtype, symbols, scales, vectors=64, vector_length=129)
    before = values_of(dtype, source).reshape(64, 129)
    after = values_of(dtype, decoded).reshape(64, 129)
    epsilon = {DType.FLOAT8_E4M3: 2.0**-4, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-24}[
        dtype
    ]
    bound = scales[:, None] * 0.5001 + 1.01 * epsilon * np.abs(before).max(axis=1, keepdims=True)
    assert np.all(np.abs(before - after) <= bound)


@pytest.mark.parametrize(("dtype", "most"), [(DType.FLOAT16, np.inf), (DType.FLOAT8_E4M3, 448)])
@given(
    symbols=st.binary(min_size=64, max_size=64),
    scale=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=0),
)
@settings(deadline=None)
def test_elements_are_rounded_as_numpy_and_torch_do(dtype: DType, most: float, symbols: bytes, scale: float) -> None:
    scales = np.array([scale], np.float32)
    decoded = native.dequantize(Quantizer.BINNED, dtype, symbols, scales, vectors=1, vector_length=64)
    with np.errstate(over="ignore"):
        products = np.frombuffer(symbols, np.int8).astype(np.float32) * scales[0]
        assert decoded.tobytes() == elements(dtype, np.clip(products, -most, most)).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_vectors", [1, 2, 5, 16, 30])
def test_vectors_that_share_a_scale_are_one_longer_vector(isa: Isa, dtype: DType, scale_vectors: int) -> None:
    source = elements(dtype, kv(16, 40).ravel())
    shape: dict[str, Any] = {"vectors": 16, "vector_length": 40, "scale_vectors": scale_vectors}
    symbols, scales = native.quantize(Quantizer.BINNED, dtype, source, bins=32, **shape)
    decoded = native.dequantize(Quantizer.BINNED, dtype, symbols, scales, **shape)
    assert scales.size == -(-16 // scale_vectors)
    for index, first in enumerate(range(0, 16, scale_vectors)):
        length = min(scale_vectors, 16 - first) * 40
        part = slice(first * 40, first * 40 + length)
        bytes_of_part = slice(part.start * dtype.itemsize, part.stop * dtype.itemsize)
        alone: dict[str, Any] = {"vectors": 1, "vector_length": length}
        part_symbols, part_scale = native.quantize(Quantizer.BINNED, dtype, source[bytes_of_part], bins=32, **alone)
        assert part_symbols.tobytes() == symbols[part].tobytes() and part_scale[0] == scales[index]
        expected = native.dequantize(Quantizer.BINNED, dtype, part_symbols, part_scale, **alone)
        assert expected.tobytes() == decoded[bytes_of_part].tobytes()


def test_buffers_must_have_the_size_of_their_shape() -> None:
    shape: dict[str, Any] = {"vectors": 2, "vector_length": 8}
    with pytest.raises(NativeError, match="source has 31 bytes"):
        native.quantize(Quantizer.LOSSLESS, DType.FLOAT16, bytes(31), **shape)
    with pytest.raises(NativeError, match="symbols has 15 bytes"):
        native.dequantize(Quantizer.BINNED, DType.FLOAT16, bytes(15), bytes(8), **shape)
    with pytest.raises(NativeError, match="scales has 4 bytes"):
        native.dequantize(Quantizer.BINNED, DType.FLOAT16, bytes(16), bytes(4), **shape)
    with pytest.raises(NativeError, match="out has 33 bytes"):
        native.dequantize(Quantizer.LOSSLESS, DType.FLOAT16, bytes(32), None, out=bytearray(33), **shape)


def test_dequantize_writes_at_the_given_offset() -> None:
    out = bytearray(32)
    source = np.random.default_rng(0).integers(0, 256, size=32, dtype=np.uint8)
    symbols, _ = native.quantize(Quantizer.LOSSLESS, DType.FLOAT16, source, vectors=2, vector_length=8)
    native.dequantize(Quantizer.LOSSLESS, DType.FLOAT16, symbols, None, vectors=2, vector_length=8, out=out)
    assert bytes(out) == source.tobytes()
