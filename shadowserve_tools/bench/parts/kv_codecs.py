"""Ways to store KV with a loss, with equal accounting: what comes back, and all bits that are stored.

Baselines have fixed-width codes as in their papers; if ShadowServe's entropy coder makes a slice smaller, its size
counts instead.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel

Tensor = Any
KEY: Final = bytes(32)
"""A record needs some key; nothing depends on which."""
SCALE_BITS: Final = 16
EXACT_TOKENS: Final = 4
"""First tokens, which most heads attend to."""
GROUP: Final = 32
"""Elements that share a scale and an offset in KIVI."""
SLICE_BYTES: Final = 40
"""A slice's entry in the manifest of a record."""
HEADER_BYTES: Final = record.FIXED_HEADER_BYTES


@dataclass(frozen=True)
class Stored:
    """KV as it comes back, and the bits of each layer and kind; headers of records are in them."""

    kv: Tensor
    bits: npt.NDArray[np.float64]


Treatment = Callable[[Tensor, RealModel], Stored]
"""Stores KV of whole chunks and loads it again."""


def records(
    kv: Tensor, codec: native.Codec, channels: native.Channels | None = None, **treatment: Any
) -> Iterator[bytes]:
    """Yield the records of KV in bfloat16; ``treatment`` has the quantizer and its bins."""
    layers, kinds, _, heads, size = kv.shape
    layout = ChunkLayout(
        dtype=DType.BFLOAT16, layers=layers, kinds=kinds, vector_length=heads * size, tokens=CHUNK_TOKENS, **treatment
    )
    for index, chunk in enumerate(kv.to(torch.bfloat16).split(CHUNK_TOKENS, dim=2)):
        data = chunk.contiguous().view(torch.uint8).numpy().tobytes()
        yield record.encode(KEY, codec, layout, data, channels=channels, position=index * CHUNK_TOKENS)


def as_record(
    kv: Tensor, _model: RealModel, *, exact: int = 0, channels: native.Channels | None = None, **treatment: Any
) -> Stored:
    """Store chunks as ShadowServe's records; the first tokens are ``exact``, and stored once more."""
    bits, back = np.zeros(tuple(kv.shape[:2])), []
    for data in records(kv, native.Codec.KVRANS, channels, **treatment):
        header = record.parse_header(data)
        for entry in header.slices:
            bits[entry["layer"], entry["kind"]] += 8 * (int(entry["scales_length"]) + int(entry["encoded_length"]))
        bits += 8 * header.header_length / bits.size
        decoded = record.decode(data, KEY, header.layout, channels=channels)
        elements = torch.frombuffer(decoded, dtype=torch.bfloat16)
        back.append(elements.view(*kv.shape[:2], CHUNK_TOKENS, *kv.shape[3:]).float())
    loaded = torch.cat(back, dim=2)
    loaded[:, :, :exact] = kv[:, :, :exact]
    return Stored(loaded, bits + 16 * exact * kv[0, 0, 0].numel())


def fp8(kv: Tensor, _model: RealModel) -> Stored:
    """Round to E4M3 as an engine's fp8 cache without scales does."""
    bits = np.full(kv.shape[:2], 8.0 * kv[0, 0].numel())
    return Stored(kv.clamp(-448, 448).to(torch.float8_e4m3fn).float(), bits)


def coded_bits(symbols: Tensor, width: float = np.inf) -> npt.NDArray[np.float64]:
    """Return the bits of int8 symbols [layers, kinds, tokens, ...] of each layer and kind: kvrans, or fixed-width.

    The entries of slices and the headers of records are added.
    """
    layers, kinds, tokens = symbols.shape[:3]
    rows = symbols.to(torch.int8).reshape(layers, kinds, tokens, -1).numpy()
    bits = np.zeros((layers, kinds))
    for first in range(0, tokens, CHUNK_TOKENS):
        for layer in range(layers):
            for kind in range(kinds):
                block = np.ascontiguousarray(rows[layer, kind, first : first + CHUNK_TOKENS])
                stream = native.compress(native.Codec.KVRANS, block.tobytes(), block.shape[1])
                bits[layer, kind] += min(8 * len(stream), width * block.size) + 8 * SLICE_BYTES
        bits += 8 * HEADER_BYTES / bits.size
    return bits


def per_channel(kv: Tensor, _model: RealModel, *, bits: int) -> Stored:
    """Quantize as KIVI: groups of 32 with scale and offset, of a channel for keys, of a token for values."""
    back, symbols = torch.empty_like(kv), torch.empty_like(kv)
    for kind in range(kv.shape[1]):
        flat = kv[:, kind].flatten(2)  # layers, tokens, channels
        groups = (flat.transpose(1, 2) if kind == 0 else flat).unflatten(2, (-1, GROUP))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
        offset = low.half().float()
        code = ((groups - offset) / scale).round().clamp(0, 2**bits - 1)
        for target, found in ((back, code * scale + offset), (symbols, code)):
            found = found.flatten(2)
            target[:, kind] = (found.transpose(1, 2) if kind == 0 else found).reshape(kv[:, kind].shape)
    stored = coded_bits(symbols, bits) + 2 * SCALE_BITS * kv[0, 0].numel() / GROUP
    return Stored(back.to(torch.bfloat16).float(), stored)


def rotation(kv: Tensor, model: RealModel, *, key_bits: int, value_bits: int, lbq: bool = False) -> Stored:
    """Rotate each head at random, divide by the vector's size, and take the next entry of a Gaussian codebook.

    Without ``lbq`` as TurboQuant does; with it, keys are centred in each chunk, and the first and last layer and the
    first chunk are fp8.
    """
    size = kv.shape[-1]
    turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(7)))[0]
    centre = torch.zeros_like(kv)
    side = float(SCALE_BITS * kv.shape[2] * kv.shape[3])
    if lbq:
        means = [chunk.mean(dim=2, keepdim=True).expand_as(chunk) for chunk in kv.split(CHUNK_TOKENS, dim=2)]
        centre[:, 0] = torch.cat(means, dim=2)[:, 0].half().float()
    turned = (kv - centre) @ turn
    norm = turned.square().mean(dim=-1, keepdim=True).sqrt().half().float().clamp_min(1e-7)
    back, symbols, width = torch.empty_like(kv), torch.empty_like(kv), np.zeros(2)
    for kind, bits in enumerate((key_bits, value_bits)[: kv.shape[1]]):
        book = _codebook(bits)
        code = torch.bucketize(turned[:, kind] / norm[:, kind], (book[1:] + book[:-1]) / 2)
        symbols[:, kind] = code - 2 ** (bits - 1)
        back[:, kind] = book[code] * norm[:, kind] @ turn.T + centre[:, kind]
        width[kind] = bits
    stored = np.stack([coded_bits(symbols[:, [kind]], width[kind])[:, 0] for kind in range(kv.shape[1])], axis=1)
    stored += side
    if lbq:
        stored[:, 0] += SCALE_BITS * kv[0, 0, 0].numel() * kv.shape[2] / CHUNK_TOKENS
        exact = fp8(kv, model)
        for place in ([0, -1], slice(None)):
            tokens = kv.shape[2] if place == [0, -1] else CHUNK_TOKENS
            back[place, :, :tokens] = exact.kv[place, :, :tokens]
        stored *= 1 - CHUNK_TOKENS / kv.shape[2]
        stored += exact.bits * CHUNK_TOKENS / kv.shape[2]
        stored[[0, -1]] = exact.bits[[0, -1]]
    return Stored(back.to(torch.bfloat16).float(), stored)


@functools.cache
def _codebook(bits: int) -> Tensor:
    """Return the Lloyd-Max codebook of a Gaussian."""
    normal = torch.distributions.Normal(0.0, 1.0)
    samples = normal.icdf((torch.arange(1 << 16) + 0.5) / (1 << 16))
    book = samples[:: samples.numel() >> bits].clone() + 0.1
    for _ in range(300):
        code = torch.bucketize(samples, (book[1:] + book[:-1]) / 2)
        book = torch.zeros_like(book).scatter_reduce_(0, code, samples, "mean", include_self=False)
    return book


BASELINES: Final[dict[str, dict[str, Treatment]]] = {
    "lossless": {"lossless": functools.partial(as_record, quantizer=Quantizer.LOSSLESS)},
    "fp8 cache": {"E4M3": fp8},
    **{
        "binned" + ", first tokens exact" * (exact > 0): {
            f"{bins}/{bins // 4}": functools.partial(
                as_record, exact=exact, quantizer=Quantizer.BINNED, bins=bins, value_bins=bins // 4
            )
            for bins in points
        }
        for exact, points in ((0, (128, 64, 32)), (EXACT_TOKENS, (96, 64, 32)))
    },
    "per-channel keys (KIVI)": {f"{bits} bits": functools.partial(per_channel, bits=bits) for bits in (4, 3, 2)},
    "rotation (TurboQuant)": {
        f"{keys}/{values} bits": functools.partial(rotation, key_bits=keys, value_bits=values)
        for keys, values in ((5, 4), (4, 3), (3, 2))
    },
    "centred rotation (LBQ)": {
        f"{keys}/{values} bits": functools.partial(rotation, key_bits=keys, value_bits=values, lbq=True)
        for keys, values in ((5, 4), (4, 3), (3, 2))
    },
}
"""Treatments by family and parameters."""
