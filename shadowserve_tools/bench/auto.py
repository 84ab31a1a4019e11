"""Measures ``layer_order: auto`` against loads that all go as a whole, and loads that all go layer by layer.

Method: real vLLM, prompts of several lengths whose first part is stored, behind links of several rates and in the data
plane's memory. Each prompt is served whole, layer by layer, and with ``auto``, in turns of changing order. The policy
learns from its own choices alone; some prompts of each cell come first and do not count. Answers must equal those of
the engine without a cache. ``auto_over_better`` is the worst cell's lower end of the confidence interval, so that noise
alone does not reach the goal; ``auto_over_better_worst`` is its median.

Prediction: where the load takes as long as computing, whole loads take 1.9 times as long; elsewhere 1.0 to 1.3. With
``auto`` the worst of twelve medians is 1.01 to 1.04, by noise.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.reading import FREE_GBIT_PER_S, Bed, Cell, worst
from shadowserve_tools.bench.parts.serving import Model, check_answer, made_up, shape_options
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over, tracked

_ORDERS: Final[dict[str, bool | str]] = {"whole": False, "layer by layer": True, "auto": "auto"}
_WAYS: Final = tuple(_ORDERS)
_WHOLE, _STREAMED, _AUTO = _WAYS
_MEMORY: Final = "memory"


@dataclass
class _Cell(Cell):
    """A prompt whose first part comes from a tier."""

    stored: int = 0
    tier: str = _MEMORY


@benchmark(
    "tokens", "stored", "tier", "link_Gbit_per_s", "whole_ms", "layers_ms", "auto_ms", "streamed", "over_better",
    "half_width", bars=["whole_ms", "layers_ms", "auto_ms"],
)  # fmt: skip
@shape_options(layers=24, hidden=256, heads=4, head_size=64)
@whole("--prompt prompts", (1024, 2048, 4096), "Tokens of a prompt; repeatable.", 2 * DEFAULT_CHUNK_TOKENS)
@real("--stored share", 0.5, "Stored part of each prompt.", 0.01, 0.99)
@real("--link links", (1.0, 0.25, 0.1), "Rate of the link in Gbit/s, in this order; repeatable.", 0.001, 100)
@whole("--learning", 8, "Prompts of each cell that come first and do not count.")
@repeats_option(7, "Turns of the three ways for each cell.")
def auto(
    report: Report, programs: Programs, model: Model, prompts: tuple[int, ...], share: float,
    links: tuple[float, ...], learning: int, repeats: int,
) -> None:  # fmt: skip
    """Compare layer_order: auto with whole loads and with loads layer by layer."""
    bed = Bed(programs, model, max(prompts), layer_order="auto")
    stored = {tokens: max(int(share * tokens) // DEFAULT_CHUNK_TOKENS, 1) * DEFAULT_CHUNK_TOKENS for tokens in prompts}
    answers = {tokens: bed.serve_computed(made_up(tokens), held) for tokens, held in stored.items()}
    for tokens, held in stored.items():
        bed.store(made_up(tokens)[:held])
    cells = [
        _Cell(_WAYS, tokens, rate, stored=held, tier="storage") for rate in links for tokens, held in stored.items()
    ]
    _measure(bed, cells, answers, learning, repeats)
    _restart_with_memory(bed, model, stored)
    near = [_Cell(_WAYS, tokens, stored=held) for tokens, held in stored.items()]
    _measure(bed, near, answers, learning, repeats)
    _report(report, [*cells, *near])


def _restart_with_memory(bed: Bed, model: Model, stored: dict[int, int]) -> None:
    """Restart the data plane with a memory tier, and fetch all stored prompts into it."""
    bed.network.limit(FREE_GBIT_PER_S)
    first, its_stored = next(iter(stored.items()))
    budget = 2 * sum(stored.values()) * model.kv_bytes + (64 << 20)
    bed.restart_tiers(made_up(first)[: its_stored + 1], memory_budget_bytes=budget)
    for tokens, held in stored.items():
        bed.serve(made_up(tokens), held)


def _measure(bed: Bed, cells: Sequence[_Cell], answers: dict[int, list[int]], learning: int, repeats: int) -> None:
    for cell in tracked(cells, "asking"):
        bed.network.limit(cell.gbit_per_s)
        for _ in range(learning):
            _ask(bed, cell, _AUTO, answers)
        for turn in range(repeats):
            for name in _WAYS[turn % 3 :] + _WAYS[: turn % 3]:
                result = _ask(bed, cell, name, answers)
                cell.ttft_s[name].append(result["ttft_s"])
                is_streamed = "retrieval_s" not in result
                if name == _AUTO:
                    cell.chosen.append(float(is_streamed))
                elif is_streamed != (name == _STREAMED):
                    raise ShadowServeError(f"a load that was to go {name} went the other way; please report this")


def _ask(bed: Bed, cell: _Cell, name: str, answers: dict[int, list[int]]) -> dict[str, Any]:
    bed.engine.call("layer_order", value=_ORDERS[name])
    result = bed.serve(made_up(cell.tokens), cell.stored)
    check_answer(result, answers[cell.tokens])
    return result


def _report(report: Report, cells: Sequence[_Cell]) -> None:
    for cell in cells:
        link = "" if cell.tier == _MEMORY else cell.gbit_per_s
        figures = cell.row("whole_ms", "layers_ms", "auto_ms", "streamed")
        report.row(**figures, stored=cell.stored, tier=cell.tier, link_Gbit_per_s=link)
    lower_ends = [row["over_better"] - (row["half_width"] or 0.0) for row in report.rows]
    report.ratio("auto_over_better", [max(lower_ends)], "at most 1.02; with the interval")
    for name, ratio in ((_AUTO, "auto"), (_WHOLE, "whole"), (_STREAMED, "layers")):
        report.ratio(f"{ratio}_over_better_worst", worst(cells, name), "none; the worst cell")
    gains = [statistics.median(over(cell.ttft_s[_WHOLE], cell.ttft_s[_AUTO])) for cell in cells]
    report.ratio("whole_over_auto", [statistics.fmean(gains)], "none; the mean gain over all cells")
