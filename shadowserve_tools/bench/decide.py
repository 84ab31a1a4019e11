"""Measures the fetch-or-recompute policy against always fetching and always recomputing.

Method: real vLLM, prompts of three lengths, all stored behind links of four rates, from the fastest to the slowest.
Each prompt is computed, fetched, and served with ``fetch_or_recompute``, in turns of both orders. The policy learns
from its own choices alone. For each link, one prompt of each length comes first and does not count. At the end the
fastest link returns: ``healed_with_prompt`` is the number of the prompt from which on the shortest one is fetched
again.

Prediction: everything is computed at 0.05 Gbit/s, only the shortest prompt at 0.25, nothing above. The worst of
twelve medians is 1.03 to 1.06 by noise alone. Always fetching is 7 times slower at the slowest link. Fetching again
after 150 prompts: exploring may cost a fiftieth of the time.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.reading import Bed, Cell, held_tokens, worst
from shadowserve_tools.bench.parts.serving import Model, check_answer, check_cached, made_up, shape_options
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, tracked

_WAYS: Final = {"no cache": "compute", "always fetch": "fetch", "policy": "decide"}
_OFF, _ALWAYS, _DECIDING = _WAYS
_HEALED: Final = 3
"""Number of fetched prompts in a row that show that the policy knows the link's new rate."""
_REQUESTS_MAX: Final = 400

_SYSTEMS: Final = (
    (_DECIDING, "worst_over_better_of_both", "at most 1.05"),
    (_ALWAYS, "always_fetch_worst_over_better", "none; without the policy"),
    (_OFF, "no_cache_worst_over_better", "none; without a cache"),
)
"""Name of the ratio of each system's worst cell, and its goal."""


@dataclass
class _Results:
    cells: list[Cell] = field(default_factory=list)
    learning_s: list[tuple[int, float, float]] = field(default_factory=list)  # tokens, rate, time to the first token
    healing_s: list[float] = field(default_factory=list)  # time of each prompt after the link is fast again
    stored_bytes: dict[int, int] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)


@benchmark(
    "tokens", "link_Gbit_per_s", "stored_MB", "no_cache_ms", "always_fetch_ms", "deciding_ms", "loaded", "over_better",
    "half_width", bars=["no_cache_ms", "always_fetch_ms", "deciding_ms"],
)  # fmt: skip
@shape_options(layers=12, hidden=256, heads=4, head_size=64)
@whole("--prompt prompts", (512, 2048, 4096), "Tokens of a stored prompt; repeatable.", DEFAULT_CHUNK_TOKENS)
@real("--link links", (4.0, 1.0, 0.25, 0.05), "Rate of the link in Gbit/s, in this order; repeatable.", 0.001, 100)
@repeats_option(5, "Pairs of the longest prompt; shorter prompts have proportionally more.")
def decide(
    report: Report, programs: Programs, model: Model, prompts: tuple[int, ...], links: tuple[float, ...],
    repeats: int,
) -> None:  # fmt: skip
    """Compare the fetch-or-recompute policy with always fetching and with no cache."""
    results = _Results()
    bed = Bed(programs, model, max(prompts), fetch_or_recompute=True)
    _store(bed, prompts, results)
    for rate in links:
        bed.network.limit(rate)
        _measure(bed, prompts, rate, repeats, results)
    bed.network.limit(links[0])
    _heal(bed, min(prompts), results)
    _report(report, results, links)


def _store(bed: Bed, prompts: Sequence[int], results: _Results) -> None:
    """Compute each prompt and store it, then fetch it once."""
    bed.engine.call("hits", way=_WAYS[_DECIDING])
    for tokens in prompts:
        results.answers[tokens] = bed.serve_computed(made_up(tokens), tokens - 1)
        bed.store(made_up(tokens))
    bed.engine.call("hits", way=_WAYS[_ALWAYS])
    for tokens in prompts:
        before = bed.plane.statistics().fetched_bytes
        check_answer(bed.serve(made_up(tokens), held_tokens(tokens)), results.answers[tokens])
        results.stored_bytes[tokens] = bed.plane.statistics().fetched_bytes - before


def _measure(bed: Bed, prompts: Sequence[int], rate: float, repeats: int, results: _Results) -> None:
    """Serve each prompt with each system over one link, in turns."""
    bed.engine.call("hits", way=_WAYS[_DECIDING])
    for tokens in prompts:
        results.learning_s.append((tokens, rate, bed.serve(made_up(tokens))["ttft_s"]))
    cells = [Cell(tuple(_WAYS), tokens, rate) for tokens in prompts]
    results.cells += cells

    number = itertools.count()
    for _ in tracked(range(repeats), f"asking over {rate:g} Gbit/s"):
        for cell in cells:
            # Short prompts are noisier, and take less time.
            for _ in range(round(max(prompts) / cell.tokens)):
                for name in _WAYS if next(number) % 2 == 0 else reversed(_WAYS):
                    _ask(bed, cell, name, results.answers[cell.tokens])


def _ask(bed: Bed, cell: Cell, name: str, answer: list[int]) -> None:
    bed.engine.call("hits", way=_WAYS[name])
    result, held = bed.serve(made_up(cell.tokens)), held_tokens(cell.tokens)
    cell.ttft_s[name].append(result["ttft_s"])
    if name == _DECIDING:
        cell.chosen.append(result["cached"] / held)
    else:
        check_cached(result, 0 if name == _OFF else held, name)
    # Answers after a partial hit may differ by rounding.
    if result["cached"] in (0, held):
        check_answer(result, answer)


def _heal(bed: Bed, tokens: int, results: _Results) -> None:
    bed.engine.call("hits", way=_WAYS[_DECIDING])
    row = 0
    while row < _HEALED and len(results.healing_s) < _REQUESTS_MAX:
        result = bed.serve(made_up(tokens))
        results.healing_s.append(result["ttft_s"])
        row = row + 1 if result["cached"] == held_tokens(tokens) else 0


def _report(report: Report, results: _Results, links: Sequence[float]) -> None:
    for cell in results.cells:
        figures = cell.row("no_cache_ms", "always_fetch_ms", "deciding_ms", "loaded")
        stored_mb = results.stored_bytes[cell.tokens] / 1e6
        report.row(**figures, link_Gbit_per_s=cell.gbit_per_s, stored_MB=stored_mb)
    for name, ratio, goal in _SYSTEMS:
        report.ratio(ratio, worst(results.cells, name), goal)
    report.ratio("all_over_better", [_whole(results)], "none; all prompts together, those that it learnt from too")
    healed = len(results.healing_s) - _HEALED + 1
    report.ratio("healed_with_prompt", [healed], f"none; from {links[-1]:g} to {links[0]:g} Gbit/s")


def _whole(results: _Results) -> float:
    """Return the time of all prompts under the policy, over that of the better system of each cell."""
    taken = sum(seconds for *_, seconds in results.learning_s)
    better = {(cell.tokens, cell.gbit_per_s): statistics.median(cell.ttft_s[cell.better]) for cell in results.cells}
    least = sum(better[tokens, rate] for tokens, rate, _ in results.learning_s)
    for cell in results.cells:
        taken += sum(cell.ttft_s[_DECIDING])
        least += better[cell.tokens, cell.gbit_per_s] * len(cell.ttft_s[_DECIDING])
    return taken / least
