"""The ``weighted`` quantizer as records of ShadowServe, and with ideal tables: a measure of what the codec loses."""

import functools
from typing import Any, Final

import numpy as np
import torch

from shadowserve import native
from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.parts.kv_codecs import (
    EXACT_TOKENS,
    HEADER_BYTES,
    SLICE_BYTES,
    Stored,
    Treatment,
    as_record,
)
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel
from shadowserve_tools.calibrate.steps import SYMBOL_MAX, WIDTH, Measured, learn, rounded, symbol_counts, symbols

Tensor = Any
BITS: Final = {"4 bits": 4.0, "2.9 bits": 2.9}
"""Points beside the presets, headers not counted."""
SLOTS: Final = 1 << 12
"""Sum of the frequencies of a table."""
LANE_BITS: Final = 64 * 16
"""States of a coder with 64 lanes, for each slice."""
OUTSIDE_BITS: Final = 16


def treatments(model: RealModel) -> tuple[dict[str, Treatment], dict[str, Treatment]]:
    """Calibrate; return the presets and points between them, from the smallest loss on: as records, and ideal."""
    found, coarse = learn(model)
    coarse |= {name: found.for_bits(bits) for name, bits in BITS.items()}
    coarse = dict(sorted(coarse.items(), key=lambda item: item[1]))
    records: dict[str, Treatment] = {
        name: functools.partial(as_record, quantizer=Quantizer.WEIGHTED, channels=channels(found, each, model))
        for name, each in coarse.items()
    }
    return records, {name: IdealTables(found, each) for name, each in coarse.items()}


def channels(found: Measured, coarse: float, model: RealModel) -> native.Channels:
    """Return the steps of all layers for records of the whole model."""
    steps, centres = (each.flatten(0, 1).numpy() for each in (found.steps(coarse), found.centres))
    return native.Channels(
        steps, centres, model.frequencies, kinds=found.centres.shape[1], head_length=model.head_size,
        tokens=CHUNK_TOKENS,
    )  # fmt: skip


class IdealTables:
    """Stores with one table of frequencies for each channel, learnt once, and an ideal coder.

    Elements outside of a table are exact.
    """

    def __init__(self, found: Measured, coarse: float) -> None:
        self._steps, self._centres = found.steps(coarse), found.centres
        counts = symbol_counts(symbols(found.samples, self._centres, self._steps))
        places = torch.arange(WIDTH)
        seen = torch.where(counts > 0, places, SYMBOL_MAX + 1)  # the symbol 0 is always in the table
        inside = (places >= seen.amin(-1, True) - 2) & (places <= seen.amax(-1, True) + 2)
        inside[..., [0, -1]] = False
        counts = torch.where(inside, counts + 0.25, 0.0)
        counts[..., -1] = 0.25  # the escape
        shares = counts / counts.sum(dim=-1, keepdim=True) * SLOTS
        shares = torch.where(shares > 0, shares.clamp_min(1), 0)
        self._costs = -(shares / shares.sum(dim=-1, keepdim=True)).log2()
        self._costs[..., -1] += OUTSIDE_BITS

    def __call__(self, kv: Tensor, model: RealModel) -> Stored:
        """Store and load."""
        numbers = symbols(model.plain(kv).flatten(3), self._centres, self._steps)
        costs = self._costs.gather(-1, (numbers + SYMBOL_MAX + 1).long().transpose(2, 3)).transpose(2, 3)
        inside = torch.isfinite(costs) & (numbers <= SYMBOL_MAX)
        costs = torch.where(inside, costs, self._costs[:, :, None, :, -1])
        costs[:, :, :EXACT_TOKENS] = OUTSIDE_BITS
        slices = 8 * SLICE_BYTES + LANE_BITS + 8 * HEADER_BYTES / (kv.shape[0] * kv.shape[1])
        bits = costs.double().sum(dim=(2, 3)).numpy() + slices * (kv.shape[2] // CHUNK_TOKENS)
        return Stored(rounded(kv, model, self._centres, self._steps, inside), np.asarray(bits))
