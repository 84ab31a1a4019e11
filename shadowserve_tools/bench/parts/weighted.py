"""The ``weighted`` quantizer, an experiment: steps by what predictions feel, learnt once per model.

Keys are un-rotated. Each channel of a layer, kind and head has one uniform step, without a scale per token, and one
table of frequencies. The first tokens are exact, and so are elements outside of a table.

Calibration measures the Fisher information of every channel: the mean square of the gradient of the logarithm of a
sampled prediction. Half of it times the square of an error is the divergence, so steps are inverse to its root, which
also shares the loss among layers. It is measured with errors of the size that quantizing makes: a head that attends to
the first token alone seems to feel nothing, until errors of keys move its attention.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from shadowserve_tools.bench.parts.kv_codecs import EXACT_TOKENS, HEADER_BYTES, SLICE_BYTES, Stored, Treatment, fp8
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel, texts_to_learn
from shadowserve_tools.report import tracked

Tensor = Any
PRESETS: Final = ("near_lossless", "small", "tiny")
BITS: Final = {"4 bits": 4.0, "2.9 bits": 2.9, "small": 2.35, "tiny": 1.75}
"""Targets in bits, headers not counted; ``near_lossless`` has a share of fp8's divergence as its target."""
SHARE_OF_FP8: Final = 0.33
LEARNT_TOKENS, SCORED_TOKENS = 1024, 128
WINDOWS: Final = 2
"""Windows of each text for calibration."""
NOISE: Final = 0.5
"""First guess of errors: the width of uniform noise, in standard deviations of a channel."""
NOISE_BITS: Final = 2.4
"""Size at which calibration measures again, with the errors of these steps."""
SYMBOL_MAX: Final = 127
SLOTS: Final = 1 << 12
"""Sum of the frequencies of a table."""
LANE_BITS: Final = 64 * 16
"""States of a coder with 64 lanes, for each slice."""
OUTSIDE_BITS: Final = 16
_WIDTH: Final = 2 * SYMBOL_MAX + 3
"""Symbols, and an escape on either side."""


@dataclass(frozen=True)
class Calibration:
    """Measurements of a calibration, [layers, kinds, channels].

    Attributes:
        feeling: Fisher information of one prediction, for an element.
        samples: Plain KV [layers, kinds, tokens, channels].
    """

    feeling: Tensor
    samples: Tensor

    @functools.cached_property
    def centres(self) -> Tensor:
        """Means of the channels."""
        return self.samples.mean(dim=2)

    def steps(self, coarse: float) -> Tensor:
        """Return the steps; twice ``coarse`` costs one bit an element less and has four times the loss."""
        return coarse * self.feeling.clamp_min(1e-30).rsqrt()

    def for_bits(self, bits: float) -> float:
        """Return ``coarse`` so that samples have this entropy."""
        known, coarse = self._curve
        return math.exp(np.interp(bits, known, coarse))

    @functools.cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        """Entropies in bits, ascending, and the logarithms of ``coarse`` that have them."""
        some = self.samples[:, :, :: max(1, self.samples.shape[2] // 800)]
        middle = float((some.std(dim=2).clamp_min(1e-6) * self.feeling.clamp_min(1e-30).sqrt()).log().mean())
        coarse, bits = [middle + 0.5 * step for step in range(4, -8, -1)], []
        for each in coarse:
            counts = _counts(_symbols(some, self.centres, self.steps(math.exp(each))))
            shares = counts / counts.sum(dim=-1, keepdim=True)
            bits.append(float(-torch.xlogy(shares, shares).sum(dim=-1).mean()) / math.log(2))
        return bits, coarse


def learn(model: RealModel) -> dict[str, Treatment]:
    """Calibrate with texts that are on every machine; return the presets and points between them."""
    size, windows = LEARNT_TOKENS + SCORED_TOKENS, []
    for text in texts_to_learn().values():
        tokens = model.tokens(text)
        stride = max(size, len(tokens) // WINDOWS)
        windows += [tokens[first : first + size] for first in range(0, len(tokens) - size, stride)][:WINDOWS]
    found = calibrate(model, windows)
    coarse = {name: found.for_bits(bits) for name, bits in BITS.items()}
    coarse[PRESETS[0]] = _near_lossless(model, found, windows[::WINDOWS])
    return {name: Weighted(found, each) for name, each in sorted(coarse.items(), key=lambda item: item[1])}


def calibrate(model: RealModel, windows: Sequence[list[int]]) -> Calibration:
    """Measure on windows of tokens, whose last ``SCORED_TOKENS`` are predicted."""
    with torch.no_grad():
        cached = [model.plain(model.prefill(window[:-SCORED_TOKENS])) for window in windows]
    samples = torch.cat([kv[:, :, EXACT_TOKENS:].flatten(3) for kv in cached], dim=2)
    found = Calibration(_feeling(model, windows[::WINDOWS], cached[::WINDOWS], NOISE * samples.std(dim=2)), samples)
    steps = found.steps(found.for_bits(NOISE_BITS))
    return Calibration(_feeling(model, windows, cached, steps), samples)


def _feeling(
    model: RealModel, windows: Sequence[list[int]], cached: Sequence[Tensor], noise: Tensor, passes: int = 2
) -> Tensor:
    """Return the Fisher information at plain KV with uniform noise of these widths."""
    generator, total = torch.Generator().manual_seed(3), torch.zeros_like(noise)
    for window, exact in tracked(list(zip(windows, cached, strict=True)), "calibrating"):
        error = (torch.rand(exact.shape, generator=generator) - 0.5) * noise.view(*noise.shape[:2], 1, *exact.shape[3:])
        error[:, :, :EXACT_TOKENS] = 0
        leaf = (exact + error).requires_grad_()
        predicted = model.predict(model.rotated(leaf), window[-SCORED_TOKENS:])
        for index in range(passes):
            drawn = torch.multinomial(predicted.detach().exp(), 1, generator=generator)
            (slope,) = torch.autograd.grad(predicted.gather(1, drawn).sum(), leaf, retain_graph=index + 1 < passes)
            total += slope[:, :, EXACT_TOKENS:].flatten(3).square().mean(dim=2)
    return total / (passes * SCORED_TOKENS * len(windows))


def _near_lossless(model: RealModel, found: Calibration, windows: Sequence[list[int]]) -> float:
    """Return ``coarse`` whose divergence is a share of an fp8 cache's."""
    tried = [found.for_bits(bits) for bits in (4.2, 3.7, 3.2, 2.7)]
    stores: list[Treatment] = [fp8, *(Weighted(found, coarse) for coarse in tried)]
    lost = np.zeros(len(stores))
    with torch.no_grad():
        for window in windows:
            kv, scored = model.prefill(window[:LEARNT_TOKENS]), window[LEARNT_TOKENS:]
            exact = model.predict(kv, scored)
            for index, store in enumerate(stores):
                other = model.predict(store(kv, model).kv, scored)
                lost[index] += float((exact.exp() * (exact - other)).sum(dim=-1).mean())
    return float(np.exp(np.interp(np.log(SHARE_OF_FP8 * lost[0]), np.log(lost[1:]), np.log(tried))))


class Weighted:
    """Stores with steps and tables of a calibration."""

    def __init__(self, found: Calibration, coarse: float) -> None:
        self._steps, self._centres = found.steps(coarse), found.centres
        counts = _counts(_symbols(found.samples, self._centres, self._steps))
        places = torch.arange(_WIDTH)
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
        plain = model.plain(kv).flatten(3)
        symbols = _symbols(plain, self._centres, self._steps)
        costs = self._costs.gather(-1, (symbols + SYMBOL_MAX + 1).long().transpose(2, 3)).transpose(2, 3)
        escaped = ~torch.isfinite(costs) | (symbols > SYMBOL_MAX)
        costs = torch.where(escaped, self._costs[:, :, None, :, -1], costs)
        costs[:, :, :EXACT_TOKENS] = OUTSIDE_BITS
        escaped[:, :, :EXACT_TOKENS] = True
        back = symbols * self._steps[:, :, None] + self._centres[:, :, None]
        back = model.rotated(torch.where(escaped, plain, back).view(kv.shape)).to(torch.bfloat16).float()
        back[:, :, :EXACT_TOKENS] = kv[:, :, :EXACT_TOKENS]
        slices = 8 * SLICE_BYTES + LANE_BITS + 8 * HEADER_BYTES / (kv.shape[0] * kv.shape[1])
        bits = costs.double().sum(dim=(2, 3)).numpy() + slices * (kv.shape[2] // CHUNK_TOKENS)
        return Stored(back, np.asarray(bits))


def _symbols(plain: Tensor, centres: Tensor, steps: Tensor) -> Tensor:
    """Return the numbers of steps from the centre; beyond the largest, the escape."""
    numbers = ((plain - centres[:, :, None]) / steps[:, :, None]).round()
    return numbers.clamp(-SYMBOL_MAX - 1, SYMBOL_MAX + 1)


def _counts(symbols: Tensor) -> Tensor:
    """Return how often each channel has each symbol, from -128 on."""
    layers, kinds, _, channels = symbols.shape
    places = (symbols + SYMBOL_MAX + 1).long()
    places += (torch.arange(layers * kinds * channels) * _WIDTH).view(layers, kinds, 1, channels)
    counts = torch.bincount(places.flatten(), minlength=layers * kinds * channels * _WIDTH)
    return counts.view(layers, kinds, channels, _WIDTH)
