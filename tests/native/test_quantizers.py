"""Quantizers through Python, compared with numpy and torch. native/tests/test_quantize.c has the rest."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.keys import SCHEMA_VERSION
from shadowserve.native import Isa

TORCH_FLOATS = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
}
FLOATS = list(TORCH_FLOATS)


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_elements_are_rounded_as_numpy_and_torch_do(isa: Isa, dtype: DType) -> None:
    """Every symbol at scales of all magnitudes, half of which make ties; those of 64 bins have kernels of their own."""
    rng = np.random.default_rng(0)
    mantissas = np.concatenate([rng.uniform(1, 2, 600), rng.integers(32, 64, 600) / 32])
    with np.errstate(over="ignore"):
        scales = np.ldexp(mantissas, np.arange(mantissas.size) % 278 - 150).astype(np.float32)
    scales[~np.isfinite(scales)] = 0
    for symbols in (np.arange(-128, 128), np.arange(-32, 32)):
        table = np.tile(symbols.astype(np.int8), (scales.size, 1))
        shape: dict[str, Any] = {"vectors": scales.size, "vector_length": symbols.size}
        decoded = native.dequantize(Quantizer.BINNED, dtype, table.view(np.uint8).ravel(), scales, **shape)
        with np.errstate(over="ignore"):
            products = torch.from_numpy(table.astype(np.float32) * scales[:, None])
        if dtype is DType.FLOAT8_E4M3:
            products = products.clamp(-448, 448)
        assert decoded.tobytes() == products.to(TORCH_FLOATS[dtype]).view(torch.uint8).numpy().tobytes()


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


# ---- Weighted -------------------------------------------------------------------------------------------------------

ROTATED = 10_000.0 ** -(np.arange(8) / 8)
WEIGHTED_FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32]


def channels_of(rows: int, length: int, seed: int = 1, **options: Any) -> native.Channels:
    rng = np.random.default_rng(seed)
    steps, centres = rng.uniform(0.05, 0.2, size=(rows, length)), rng.normal(size=(rows, length))
    options = {"frequencies": ROTATED, "kinds": 2, "head_length": 24, "tokens": 64} | options
    return native.Channels(steps, centres, **options)


def calm(vectors: int, length: int, seed: int = 0) -> NDArray[np.float32]:
    """Return vectors without outliers."""
    return np.random.default_rng(seed).normal(size=(vectors, length)).astype(np.float32)


def through_weighted(
    dtype: DType, source: NDArray[np.uint8], place: native.Place, length: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float64]]:
    """Return symbols, exact vectors, and the values that come back."""
    vectors = source.nbytes // dtype.itemsize // length
    shape = {"vectors": vectors, "vector_length": length, "place": place}
    symbols, exact = native.quantize(Quantizer.WEIGHTED, dtype, source, **shape)
    back = native.dequantize(Quantizer.WEIGHTED, dtype, symbols, exact, **shape)
    return symbols, exact, values_of(dtype, back).reshape(vectors, length)


@pytest.mark.parametrize("dtype", WEIGHTED_FLOATS)
@pytest.mark.parametrize("row", [0, 1, 2], ids=["keys", "values", "keys of the next layer"])
def test_weighted_errs_by_half_a_step_at_most(isa: Isa, dtype: DType, row: int) -> None:
    channels, length = channels_of(4, 48), 48
    source = elements(dtype, calm(40, length))
    before = values_of(dtype, source).reshape(40, length)
    _, exact, after = through_weighted(dtype, source, native.Place(channels, row, 1000), length)
    assert exact.view(np.uint32).tolist() == [1000, 0]
    turned = np.sqrt(2) if row % 2 == 0 else 1.0  # the error of a rotated pair is that of both channels
    rounding = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-20}[dtype] * np.abs(before).max()
    assert np.abs(after - before).max() <= turned * 0.1001 + 1.01 * rounding


def test_all_kernels_of_weighted_write_the_same_bytes(isa: Isa) -> None:
    channels = channels_of(2, 120)
    for dtype in WEIGHTED_FLOATS:
        source = elements(dtype, kv(33, 120, seed=7))
        made = through_weighted(dtype, source, native.Place(channels, 0, 77), 120)
        native.isa_force(Isa.SCALAR)
        scalar = through_weighted(dtype, source, native.Place(channels, 0, 77), 120)
        native.isa_force(isa)
        assert all(np.array_equal(one, other) for one, other in zip(made, scalar, strict=True))


def test_elements_of_weighted_change_only_with_the_version_of_keys(isa: Isa) -> None:
    """If this fails, increase ``SCHEMA_VERSION``: keys contain it, and hosts and data planes must have the same."""
    numbers = np.arange(2 * 24).reshape(2, 24)
    channels = native.Channels(0.05 + numbers / 256, numbers / 64 - 0.3, ROTATED, kinds=2, head_length=24, tokens=64)
    symbols = (np.arange(40 * 24) % 15 - 7).astype(np.int8).view(np.uint8)
    shape = {"vectors": 40, "vector_length": 24, "place": native.Place(channels, 0, 1000)}
    exact = np.array([1000, 0], np.uint32)
    made = native.dequantize(Quantizer.WEIGHTED, DType.FLOAT32, symbols, exact, **shape)
    assert (SCHEMA_VERSION, f"{native.crc32(made):08x}") == (5, "eda91a1c")


def test_keys_are_rotated_back_before_they_become_symbols(isa: Isa) -> None:
    """A constant vector before RoPE has the same symbols at every fourth position; without frequencies not."""
    plain = np.random.default_rng(3).normal(size=(2, 12)).repeat(2, axis=1)[:, :24].astype(np.float64)
    angles = np.arange(50, 90)[:, None] * ROTATED
    rotated = np.tile(plain[0], (40, 1))
    rotated[:, :8] = plain[0, :8] * np.cos(angles) - plain[0, 8:16] * np.sin(angles)
    rotated[:, 8:16] = plain[0, 8:16] * np.cos(angles) + plain[0, :8] * np.sin(angles)
    source = elements(DType.FLOAT32, rotated.astype(np.float32))
    symbols, *_ = through_weighted(DType.FLOAT32, source, native.Place(channels_of(2, 24), 0, 50), 24)
    by_shift = symbols.view(np.int8).reshape(10, 4, 24)
    assert np.ptp(by_shift, axis=0).max() <= 1  # a value at a border may round either way
    plain_channels = channels_of(2, 24, frequencies=[])
    symbols, *_ = through_weighted(DType.FLOAT32, source, native.Place(plain_channels, 0, 50), 24)
    assert np.ptp(symbols.view(np.int8).reshape(10, 4, 24), axis=0).max() > 4


def test_errors_of_channels_that_vary_less_than_a_step_cancel_out(isa: Isa) -> None:
    """Symptom: each token had the same error, which attention adds up."""
    steps, centres = np.full((2, 24), 1.0), np.zeros((2, 24))
    channels = native.Channels(steps, centres, [], kinds=2, head_length=24, tokens=64)
    values = np.full((64, 24), 0.3, np.float32)
    *_, after = through_weighted(DType.FLOAT32, elements(DType.FLOAT32, values), native.Place(channels, 1, 9), 24)
    assert np.ptp(after) > 0.5 and np.abs(after.mean(axis=0) - 0.3).max() <= 0.125


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 5e4, -5e4])
def test_vectors_that_steps_do_not_fit_are_exact(isa: Isa, bad: float) -> None:
    values = calm(20, 48)
    values[7, 3] = values[19, 47] = bad
    for dtype in WEIGHTED_FLOATS:
        source = elements(dtype, values)
        symbols, exact, after = through_weighted(dtype, source, native.Place(channels_of(2, 48), 0, 4), 48)
        before = values_of(dtype, source).reshape(20, 48)
        assert exact[4:12].view(np.uint16).tolist() == [2, 0, 7, 19]
        assert np.array_equal(after[[7, 19]], before[[7, 19]], equal_nan=True)
        assert not symbols.reshape(20, 48)[[7, 19]].any()


def test_the_first_four_tokens_of_a_prompt_are_exact(isa: Isa) -> None:
    source = elements(DType.BFLOAT16, calm(10, 48))
    for position, expected in ((0, [0, 1, 2, 3]), (2, [0, 1]), (4, [])):
        _, exact, _ = through_weighted(DType.BFLOAT16, source, native.Place(channels_of(2, 48), 1, position), 48)
        assert exact[:8].view(np.uint32).tolist() == [position, len(expected)]
        assert exact[8 : 8 + 2 * len(expected)].view(np.uint16).tolist() == expected


def test_a_finite_element_never_becomes_infinite(isa: Isa) -> None:
    channels = native.Channels(np.full((2, 24), 1000), np.zeros((2, 24)), ROTATED, kinds=2, head_length=24, tokens=8)
    source = elements(DType.FLOAT16, np.full((8, 24), 65504, np.float32))
    *_, after = through_weighted(DType.FLOAT16, source, native.Place(channels, 0, 9), 24)
    assert (after == 65504).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda exact: exact[:-1],
        lambda exact: exact[:7],
        lambda exact: b"",
        lambda exact: exact[:4] + b"\xff\xff\xff\xff" + exact[8:],
        lambda exact: exact[:8] + exact[10:12] + exact[8:10] + exact[12:],  # not ascending
        lambda exact: exact[:12] + b"\x28\x00" + exact[14:],  # behind the last vector
        lambda exact: exact[:14] + b"\x01" + exact[15:],  # padding
    ],
)
def test_damaged_exact_vectors_are_bad_data(isa: Isa, damage: Any) -> None:
    values = calm(40, 48)
    values[[3, 8, 11]] = np.nan
    place, shape = native.Place(channels_of(2, 48), 0, 4), {"vectors": 40, "vector_length": 48}
    symbols, exact = native.quantize(
        Quantizer.WEIGHTED, DType.BFLOAT16, elements(DType.BFLOAT16, values), place=place, **shape
    )
    with pytest.raises(NativeError) as caught:
        native.dequantize(Quantizer.WEIGHTED, DType.BFLOAT16, symbols, damage(exact.tobytes()), place=place, **shape)
    assert caught.value.result == native.Result.BAD_DATA


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": [[0.0] * 48] * 2}, "not positive"),
        ({"steps": [[np.nan] * 48] * 2}, "not finite"),
        ({"steps": [[1e31] * 48] * 2}, "too large"),
        ({"centres": [[np.inf] * 48] * 2}, "not finite"),
        ({"centres": [[0.0] * 47] * 2}, "shape"),
        ({"frequencies": [0.1] * 13}, "frequencies"),
        ({"head_length": 36}, "divisor"),
        ({"head_length": 0}, "head_length"),
        ({"kinds": 3}, "whole layers"),
    ],
)
def test_impossible_channels_are_refused(change: dict[str, Any], reason: str) -> None:
    options = {
        "steps": [[0.1] * 48] * 2, "centres": [[0.0] * 48] * 2, "frequencies": ROTATED, "kinds": 2,
        "head_length": 24, "tokens": 8,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=reason):
        native.Channels(options.pop("steps"), options.pop("centres"), options.pop("frequencies"), **options)


@pytest.mark.parametrize("place", [None, (2, 0), (0, 0)], ids=["none", "a row beyond the last", "longer than angles"])
def test_weighted_without_fitting_channels_is_refused(place: tuple[int, int] | None) -> None:
    channels = channels_of(2, 48, tokens=8)
    with pytest.raises(NativeError) as caught:
        native.quantize(
            Quantizer.WEIGHTED, DType.BFLOAT16, bytes(9 * 48 * 2), vectors=9, vector_length=48,
            place=place and native.Place(channels, *place),
        )  # fmt: skip
    assert caught.value.result == native.Result.BAD_ARGUMENT
