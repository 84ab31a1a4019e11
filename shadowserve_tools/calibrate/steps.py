"""Steps of the ``weighted`` quantizer from the Fisher information of each channel, learnt once per model.

Keys are un-rotated. Each channel of a layer, kind and head has one uniform step, without a scale per token.

Calibration measures the Fisher information of every channel: the mean square of the gradient of the logarithm of a
sampled prediction. Half of it times the square of an error is the divergence, so steps are inverse to its root, which
also shares the loss among layers. It is measured with errors of the size that quantizing makes: a head that attends to
the first token alone has no Fisher information until errors of keys move its attention.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from shadowserve import native
from shadowserve.calibration import PRESETS, Calibration
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.kv_codecs import EXACT_TOKENS, fp8
from shadowserve_tools.bench.parts.real_model import RealModel, texts_to_learn
from shadowserve_tools.report import tracked

Tensor = Any
BITS: Final = {"small": 2.2, "tiny": 1.63}
"""Targets of presets in bits, headers not counted; ``near_lossless`` has a share of fp8's divergence as its target."""
SHARE_OF_FP8: Final = 0.33
LEARNT_TOKENS, SCORED_TOKENS = 1024, 128
WINDOWS: Final = 2
"""Windows of each text."""
NOISE: Final = 0.5
"""First guess of errors: the width of uniform noise, in standard deviations of a channel."""
NOISE_BITS: Final = 2.4
"""Size at which calibration measures again, with the errors of these steps."""
SYMBOL_MAX: Final = 127
REACH: Final = 60
"""Steps from the centre to the farthest sample, at most. With more, one channel costs low bits in all channels of its
slice: near_lossless on SmolLM2 has 3.65 bits with 120, 3.58 with 60, at the same divergence."""
WIDTH: Final = 2 * SYMBOL_MAX + 3
"""Symbols, and an escape on either side."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a model, [layers, kinds, channels].

    Attributes:
        fisher: Fisher information of one prediction, for an element.
        samples: Plain KV [layers, kinds, tokens, channels].
    """

    fisher: Tensor
    samples: Tensor

    @functools.cached_property
    def centres(self) -> Tensor:
        """Means of the channels."""
        return self.samples.mean(dim=2)

    def steps(self, coarse: float) -> Tensor:
        """Return the steps; twice ``coarse`` costs one bit an element less and has four times the loss.

        All samples are within ``REACH`` steps: one element beyond ``SYMBOL_MAX`` makes all channels of a token exact.
        """
        return torch.maximum(coarse * self.fisher.clamp_min(1e-30).rsqrt(), self._least)

    @functools.cached_property
    def _least(self) -> Tensor:
        layers = zip(self.samples, self.centres, strict=True)
        return torch.stack([(its - centre[:, None]).abs().amax(dim=1) for its, centre in layers]) / REACH

    def for_bits(self, bits: float) -> float:
        """Return ``coarse`` so that samples have this entropy."""
        known, coarse = self._curve
        return math.exp(np.interp(bits, known, coarse))

    def bits(self, coarse: float) -> float:
        """Return the entropy of samples with these steps: bits an element."""
        some = self.samples[:, :, :: max(1, self.samples.shape[2] // 800)]
        counts = symbol_counts(symbols(some, self.centres, self.steps(coarse)))
        shares = counts / counts.sum(dim=-1, keepdim=True)
        return float(-torch.xlogy(shares, shares).sum(dim=-1).mean()) / math.log(2)

    @functools.cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        """Entropies in bits, ascending, and the logarithms of ``coarse`` that have them."""
        spread = self.samples[:, :, :: max(1, self.samples.shape[2] // 800)].std(dim=2).clamp_min(1e-6)
        middle = float((spread * self.fisher.clamp_min(1e-30).sqrt()).log().mean())
        coarse = [middle + 0.5 * step for step in range(4, -8, -1)]
        return [self.bits(math.exp(each)) for each in coarse], coarse


def learn(model: RealModel) -> tuple[Measured, dict[str, float]]:
    """Measure a model with texts that every Python has; return ``coarse`` of each preset, too.

    Raises:
        ShadowServeError: The model's keys cannot be un-rotated, or its prompts are too short.
    """
    size, windows = LEARNT_TOKENS + SCORED_TOKENS, []
    if model.positions_max < size:
        raise ShadowServeError(f"{model.name} has {model.positions_max} positions; calibration needs {size}")
    model.check_plain()
    for text in texts_to_learn().values():
        tokens = model.tokens(text)
        stride = max(size, len(tokens) // WINDOWS)
        windows += [tokens[first : first + size] for first in range(0, len(tokens) - size, stride)][:WINDOWS]
    found = measure(model, windows)
    coarse = {PRESETS[0]: _near_lossless(model, found, windows[::WINDOWS])}
    return found, coarse | {preset: found.for_bits(bits) for preset, bits in BITS.items()}


def artefact(model: RealModel, found: Measured, coarse: dict[str, float]) -> Calibration:
    """Return the calibration for a file.

    Raises:
        ShadowServeError: A number of it is out of range.
    """
    shape = (*found.centres.shape[:2], -1, model.head_size)
    steps = {preset: found.steps(each).view(shape).numpy() for preset, each in coarse.items()}
    centres = found.centres.view(shape).numpy()
    try:
        return Calibration(model.name, model.architecture, model.rope, steps, centres, model.frequencies)
    except ValueError as error:
        raise ShadowServeError(f"{model.name} cannot be calibrated: {error}") from error


def measure(model: RealModel, windows: Sequence[list[int]]) -> Measured:
    """Measure on windows of tokens, whose last ``SCORED_TOKENS`` are predicted."""
    with torch.no_grad():
        cached = [model.plain(model.prefill(window[:-SCORED_TOKENS])) for window in tracked(windows, "reading texts")]
    samples = torch.cat([kv[:, :, EXACT_TOKENS:].flatten(3) for kv in cached], dim=2)
    noise = NOISE * samples.std(dim=2)
    found = Measured(_fisher(model, windows[::WINDOWS], cached[::WINDOWS], noise, "calibrating, 1 of 3"), samples)
    steps = found.steps(found.for_bits(NOISE_BITS))
    return Measured(_fisher(model, windows, cached, steps, "calibrating, 2 of 3"), samples)


def _fisher(
    model: RealModel, windows: Sequence[list[int]], cached: Sequence[Tensor], noise: Tensor, label: str, passes: int = 2
) -> Tensor:
    """Return the Fisher information at plain KV with uniform noise of these widths."""
    generator, total = torch.Generator().manual_seed(3), torch.zeros_like(noise)
    for window, exact in tracked(list(zip(windows, cached, strict=True)), label):
        error = (torch.rand(exact.shape, generator=generator) - 0.5) * noise.view(*noise.shape[:2], 1, *exact.shape[3:])
        error[:, :, :EXACT_TOKENS] = 0
        leaf = (exact + error).requires_grad_()
        predicted = model.predict(model.rotated(leaf), window[-SCORED_TOKENS:])
        for index in range(passes):
            drawn = torch.multinomial(predicted.detach().exp(), 1, generator=generator)
            (slope,) = torch.autograd.grad(predicted.gather(1, drawn).sum(), leaf, retain_graph=index + 1 < passes)
            total += slope[:, :, EXACT_TOKENS:].flatten(3).square().mean(dim=2)
    return total / (passes * SCORED_TOKENS * len(windows))


def _near_lossless(model: RealModel, found: Measured, windows: Sequence[list[int]]) -> float:
    """Return ``coarse`` whose divergence is a share of an fp8 cache's."""
    tried = [found.for_bits(bits) for bits in (4.2, 3.7, 3.2, 2.7)]
    lost = np.zeros(1 + len(tried))
    with torch.no_grad():
        for window in tracked(windows, "calibrating, 3 of 3"):
            kv, scored = model.prefill(window[:LEARNT_TOKENS]), window[LEARNT_TOKENS:]
            exact = model.predict(kv, scored)
            for index in range(len(lost)):
                back = rounded(kv, model, found.centres, found.steps(tried[index - 1])) if index else fp8(kv, model).kv
                other = model.predict(back, scored)
                lost[index] += float((exact.exp() * (exact - other)).sum(dim=-1).mean())
    return float(np.exp(np.interp(np.log(SHARE_OF_FP8 * lost[0]), np.log(lost[1:]), np.log(tried))))


def rounded(kv: Tensor, model: RealModel, centres: Tensor, steps: Tensor, inside: Tensor | None = None) -> Tensor:
    """Return KV as it comes back: rounded to whole steps, except in the first tokens.

    Args:
        inside: Where symbols are in a table [layers, kinds, tokens, channels]; all others come back exactly. By
            default, those up to ``SYMBOL_MAX`` are.
    """
    plain = model.plain(kv).flatten(3)
    numbers = symbols(plain, centres, steps)
    if inside is None:
        inside = numbers.abs() <= SYMBOL_MAX
    back = torch.where(inside, (numbers + _shifts(plain)) * steps[:, :, None] + centres[:, :, None], plain)
    back = model.rotated(back.view(kv.shape)).to(torch.bfloat16).float()
    back[:, :, :EXACT_TOKENS] = kv[:, :, :EXACT_TOKENS]
    return back


def symbols(plain: Tensor, centres: Tensor, steps: Tensor) -> Tensor:
    """Return the numbers of steps from the shifted centre; beyond ``SYMBOL_MAX``, the next number."""
    numbers = ((plain - centres[:, :, None]) / steps[:, :, None] - _shifts(plain)).round()
    return numbers.clamp(-SYMBOL_MAX - 1, SYMBOL_MAX + 1)


def _shifts(plain: Tensor) -> Tensor:
    return torch.from_numpy(native.shifts(*plain.shape[2:]))


def symbol_counts(numbers: Tensor) -> Tensor:
    """Return how often each channel has each symbol, from -128 on."""
    layers, kinds, _, channels = numbers.shape
    places = (numbers + SYMBOL_MAX + 1).long()
    places += (torch.arange(layers * kinds * channels) * WIDTH).view(layers, kinds, 1, channels)
    counts = torch.bincount(places.flatten(), minlength=layers * kinds * channels * WIDTH)
    return counts.view(layers, kinds, channels, WIDTH)
