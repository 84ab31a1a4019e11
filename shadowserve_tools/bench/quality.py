"""Measures what storing KV with a loss changes in a real model's predictions, and how many bits it saves.

Method: a model reads a long real text (licences, documents, source code). Its cache, rounded to bfloat16, is stored and
loaded; then the next tokens are scored on top of it. The divergence (Kullback-Leibler, bits a token) compares these
predictions with those on the cache that was never stored. All treatments see the same windows. Bits are all stored bits
for each element: codes, scales, tables in streams, exact tokens, manifests and headers. ``binned`` and ``weighted``
(near_lossless, small, tiny) are real records; the steps of ``weighted`` come from texts that are not scored. "Ideal
tables" are the same steps with the cross entropy of one table for each channel, learnt once: the distance is what the
codec loses. Baselines count their fixed-width code or ShadowServe's entropy coder, whichever is smaller. fp8 is an
engine's cache, unscaled. Intervals of 95 % are a bootstrap over windows and blocks of 32 positions.

Retrieval hides sentences in long texts: one; eight with questions for two (``multi_key``); chains of two assignments
(``variables``). An answer counts if greedy decoding gives every digit.

Prediction: near_lossless needs 3.5 bits, at less than fp8's divergence; small 2.4 bits, at 0.012 bits a token.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from shadowserve.calibration import PRESETS
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.kv_codecs import BASELINES, Treatment
from shadowserve_tools.bench.parts.needles import TASKS, Question, contexts
from shadowserve_tools.bench.parts.options import benchmark, folder_option, numbers_option, whole
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel, texts
from shadowserve_tools.bench.parts.weighted import treatments
from shadowserve_tools.charts import Chart
from shadowserve_tools.demo_model import default_model
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, tracked

WEIGHTED, IDEAL, FP8, EXACT = "weighted", "weighted, ideal tables", "fp8 cache", "lossless"
ASKED: Final = {EXACT: ("lossless",), FP8: ("E4M3",), "binned": ("64/16",), WEIGHTED: PRESETS}
"""Treatments whose retrieval is measured, by family."""
BLOCK: Final = 32
"""Positions that the bootstrap takes together."""
SAMPLES: Final = 2000
FIRST_TOKEN: Final = 1000
"""First token of a kind's first window."""
Numbers = npt.NDArray[np.float64]
Interval = tuple[float, float, float]
"""Low, mean, high."""


@dataclass
class Results:
    """Measurements of one treatment.

    Attributes:
        bits: For each window, bits an element of each layer and kind.
        divergence: For each window, bits of each position; ``loss`` and ``same`` likewise.
        right: For each task and length, whether each answer was right.
    """

    family: str
    name: str
    store: Treatment
    bits: list[Numbers] = field(default_factory=list)
    divergence: list[Numbers] = field(default_factory=list)
    loss: list[Numbers] = field(default_factory=list)
    same: list[Numbers] = field(default_factory=list)
    right: dict[tuple[str, int], list[bool]] = field(default_factory=dict)

    @property
    def bits_mean(self) -> float:
        return float(np.mean(self.bits))

    @property
    def asked(self) -> bool:
        return self.name in ASKED.get(self.family, ())


@benchmark(
    "family", "treatment", "bits", "bits_keys", "bits_values", "ratio", "divergence", "divergence_low",
    "divergence_high", "perplexity", "same_token_percent", *TASKS,
)  # fmt: skip
@folder_option("A Hugging Face model. [default: SmolLM2-135M-Instruct if its package is installed]", "--model")
@click.option(
    "--text", "files", multiple=True, help="Score this text instead of those of the machine.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)  # fmt: skip
@whole("--context", 4096, "Stored tokens of a window, in whole chunks of 256.", least=512, most=131072)
@whole("--scored", 256, "Tokens of a window that are scored.", least=BLOCK, most=4096)
@whole("--windows", 3, "Number of windows.", most=100)
@whole("--prompts", 1, "Prompts for each task and length of retrieval; 0: none.", least=0, most=100)
@numbers_option("--lengths", "1024,2048,4096,7936", "Tokens of the prompts of retrieval.", least=512, most=131072)
@click.option("--by-layer", is_flag=True, help="Also store each layer and kind alone, in the first window.")
def quality(
    report: Report, programs: Programs, model: Path | None, files: tuple[Path, ...], context: int, scored: int,
    windows: int, prompts: int, lengths: list[int], by_layer: bool,
) -> None:  # fmt: skip
    """Measure what lossy KV changes in a real model's predictions."""
    used = RealModel(model or default_model(Console()))
    if context % CHUNK_TOKENS or any(length % CHUNK_TOKENS for length in lengths):
        raise ShadowServeError("--context and --lengths are multiples of 256")
    if max(context + scored, *(lengths if prompts else [0])) > used.positions_max:
        raise ShadowServeError(f"{used.name} has {used.positions_max} positions: give a smaller --context, --lengths")
    kinds = {file.name: file.read_text(encoding="utf-8") for file in files} or texts()
    tokens = {kind: used.tokens(text) for kind, text in kinds.items()}
    cut = list(_windows(tokens, context + scored, windows))
    if len(cut) < windows:
        raise ShadowServeError(f"the texts have {len(cut)} windows of {context + scored} tokens, not {windows}")
    weighted, ideal = treatments(used)
    families = {**BASELINES, WEIGHTED: weighted, IDEAL: ideal}
    found = [Results(family, name, store) for family, each in families.items() for name, store in each.items()]
    kept: list[Numbers] = []
    with torch.no_grad():
        for _, window in tracked(cut, "scoring"):
            kept.append(_score(used, window[:context], window[context:], found))
        _ask(used, tokens, lengths, prompts, [each for each in found if each.asked])
        if by_layer:
            report.more["layers"] = _by_layer(used, cut[0][1], context, found)
    _rows(report, found)
    _ratios(report, found)
    report.more["settings"] = {
        "model": used.name, "context": context, "scored": scored, "windows": [kind for kind, _ in cut],
        "prompts": prompts, "perplexity": float(np.exp(np.mean(kept))),
    }  # fmt: skip
    report.charts += _charts(found)


def _windows(tokens: dict[str, list[int]], size: int, count: int) -> Iterator[tuple[str, list[int]]]:
    """Yield windows without overlap, from each kind of text in turn."""
    first = {kind: min(FIRST_TOKEN, len(its) - size) for kind, its in tokens.items()}
    while first and count > 0:
        for kind in list(first):
            begin = first[kind]
            if begin < 0 or begin + size > len(tokens[kind]):
                del first[kind]
            elif count > 0:
                yield kind, tokens[kind][begin : begin + size]
                first[kind] += size
                count -= 1


def _score(model: RealModel, stored: list[int], scored: list[int], found: Sequence[Results]) -> Numbers:
    """Add one window to all results; return the loss of each position with the kept cache, in nats."""
    kv = model.prefill(stored)
    kept = model.predict(kv, scored)
    next_tokens = torch.tensor(scored[1:])[:, None]
    for each in found:
        back = each.store(kv, model)
        each.bits.append(back.bits / kv[0, 0].numel())
        predicted = kept if torch.equal(back.kv, kv) else model.predict(back.kv, scored)
        each.divergence.append(_divergence(kept, predicted))
        each.loss.append(-predicted[:-1].gather(1, next_tokens)[:, 0].double().numpy())
        each.same.append((predicted.argmax(-1) == kept.argmax(-1)).double().numpy())
    loss: Numbers = -kept[:-1].gather(1, next_tokens)[:, 0].double().numpy()
    return loss


def _divergence(kept: Any, other: Any) -> Numbers:
    values: Numbers = ((kept.exp() * (kept - other)).sum(dim=-1) / math.log(2)).double().numpy()
    return values


def _ask(
    model: RealModel, tokens: dict[str, list[int]], lengths: Sequence[int], prompts: int, found: Sequence[Results]
) -> None:
    """Ask all questions of all prompts on top of every treatment's cache."""
    for length in lengths if prompts else []:
        haystack = max(tokens.values(), key=len)
        every: list[tuple[str, list[int], list[Question]]] = list(contexts(model, haystack, length, prompts))
        for task, prompt, questions in tracked(every, f"retrieval, {length} tokens"):
            kv = model.prefill(prompt)
            for each in found:
                back = each.store(kv, model).kv
                each.right.setdefault((task, length), []).extend(asked.right(model, back) for asked in questions)


def _by_layer(model: RealModel, window: list[int], context: int, found: Sequence[Results]) -> list[dict[str, Any]]:
    """Return the divergence when only one layer and kind is stored, for each preset."""
    kv = model.prefill(window[:context])
    kept, rows = model.predict(kv, window[context:]), []
    for each in (result for result in found if result.family == WEIGHTED and result.name == PRESETS[1]):
        back = each.store(kv, model)
        for layer, kind in tracked(list(np.ndindex(*kv.shape[:2])), "by layer"):
            mixed = kv.clone()
            mixed[layer, kind] = back.kv[layer, kind]
            alone = float(_divergence(kept, model.predict(mixed, window[context:])).mean())
            bits = float(back.bits[layer, kind]) / kv[0, 0].numel()
            rows.append({"treatment": each.name, "layer": layer, "kind": kind, "bits": bits, "divergence": alone})
    return rows


def interval(windows: Sequence[Numbers], others: Sequence[Numbers] | None = None) -> Interval:
    """Return the mean of all positions, or its quotient by that of ``others``, with its bootstrap interval."""
    its = np.stack([_blocks(window) for window in windows])
    chance = np.random.default_rng(1)
    chosen = chance.integers(len(its), size=(SAMPLES, len(its), 1))
    places = chance.integers(its.shape[1], size=(SAMPLES, *its.shape))
    means, middle = its[chosen, places].mean(axis=(1, 2)), float(np.mean(windows))
    if others is not None:
        means /= np.stack([_blocks(window) for window in others])[chosen, places].mean(axis=(1, 2))
        middle /= float(np.mean(others))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), middle, float(high)


def _blocks(values: Numbers) -> Numbers:
    """Return the means of blocks of positions; a rest belongs to none."""
    size = min(BLOCK, len(values) // 4)
    blocks: Numbers = values[: len(values) // size * size].reshape(-1, size).mean(axis=1)
    return blocks


def _rows(report: Report, found: Sequence[Results]) -> None:
    for each in found:
        low, middle, high = interval(each.divergence)
        by_kind = np.mean(each.bits, axis=(0, 1))
        report.row(
            family=each.family,
            treatment=each.name,
            bits=each.bits_mean,
            bits_keys=float(by_kind[0]),
            bits_values=float(by_kind[-1]),
            ratio=16 / each.bits_mean,
            divergence=middle,
            divergence_low=low,
            divergence_high=high,
            perplexity=float(np.exp(np.mean(each.loss))),
            same_token_percent=100 * float(np.mean(each.same)),
            **{task: _share(each, task) for task in TASKS if each.right},
        )
    report.more["windows"] = [
        {
            "treatment": f"{each.family} {each.name}",
            "divergence": [float(window.mean()) for window in each.divergence],
            "bits_by_layer_and_kind": np.mean(each.bits, axis=0).round(3).tolist(),
            "right": {f"{task} {length}": answers for (task, length), answers in each.right.items()},
        }
        for each in found
    ]


def _share(each: Results, task: str) -> float:
    return float(np.mean([right for (name, _), answers in each.right.items() if name == task for right in answers]))


def _ratios(report: Report, found: Sequence[Results]) -> None:
    """Add sizes and divergences of the presets, against goals, fp8 and the best other treatment at equal divergence."""
    exact = next(each for each in found if each.family == EXACT)
    fp8 = next(each for each in found if each.family == FP8)
    goals = {"near_lossless": (3.7, None), "small": (2.4, 0.012), "tiny": (1.8, None)}
    for name, (bits, divergence) in goals.items():
        its = next(each for each in found if (each.family, each.name) == (WEIGHTED, name))
        ideal = next(each for each in found if (each.family, each.name) == (IDEAL, name))
        report.ratio(f"{name}_bits", [float(np.mean(each)) for each in its.bits], f"at most {bits}")
        over_ideal = its.bits_mean / ideal.bits_mean
        report.ratio(f"{name}_bits_over_ideal", [over_ideal], "none; one table for each channel")
        goal = f"at most {divergence}" if divergence else "none"
        report.ratio(f"{name}_divergence", interval(its.divergence), goal)
        over_fp8 = interval(its.divergence, fp8.divergence)
        report.ratio(f"{name}_kl_over_fp8", over_fp8, "at most 1" if name == "near_lossless" else "none")
        middle = float(np.mean(its.divergence))
        for family in dict.fromkeys(each.family for each in found if each.family not in (WEIGHTED, IDEAL, EXACT, FP8)):
            others = [each for each in found if each.family == family]
            if equal := _bits_at(others, middle):
                label = "_".join(re.findall("[a-z0-9]+", family.lower()))
                report.ratio(f"{name}_bits_over_{label}", [its.bits_mean / equal], "at most 1, at equal divergence")
        if its.right:
            lost = [right for answers in exact.right.values() for right in answers]
            kept = [right for answers in its.right.values() for right in answers]
            change = interval([np.array(kept, float) - np.array(lost, float)])
            report.ratio(f"{name}_retrieval_change", change, "none; right answers less those of the kept cache")


def _bits_at(family: Sequence[Results], divergence: float) -> float | None:
    """Return the bits of a family at this divergence, between its points; None outside of them."""
    points = sorted((math.log(float(np.mean(each.divergence))), each.bits_mean) for each in family)
    if not points[0][0] <= math.log(divergence) <= points[-1][0]:
        return None
    losses, bits = np.array(points).T
    return float(np.interp(math.log(divergence), losses, bits))


def _charts(found: Sequence[Results]) -> list[Chart]:
    series: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    order = [WEIGHTED, *(each.family for each in found if each.family not in (WEIGHTED, EXACT))]
    for each in sorted(found, key=lambda each: each.bits_mean):
        if each.family != EXACT:
            low, middle, high = interval(each.divergence)
            series.setdefault(each.family, []).append((each.bits_mean, middle))
            errors.setdefault(each.family, []).append((low, high))
    series = {family: series[family] for family in dict.fromkeys(order)}
    x = "stored bits for each element (bfloat16: 16)"
    charts = [Chart("Predictions", x=x, y="divergence, bits/token", series=series, errors=errors, y_log=True)]
    if any(each.right for each in found):
        shares = {
            f"{each.family} {each.name}": [(task, 100 * _share(each, task)) for task in TASKS]
            for each in found
            if each.right
        }
        charts.append(Chart("Retrieval", x="", y="right answers, %", series=shares, kind="bars"))
    return charts
