"""Measures requests that need more memory than the engine has, with preempted KV saved in a tier.

Method: real vLLM in float32. Requests with prompts of 100 tokens and answers of 300 arrive at once: as many as fit to
their end (demand 1), three and five times as many. ``recompute`` is vLLM alone, which computes preempted requests
again; ``tier`` has the plugin and a data plane with memory. Both have the same number of blocks and take turns in
both orders. Answers are compared. The limit of a ratio over recompute is the time without the tokens that an earlier
step had already computed, from the steps of the same turn.

Prediction, from vLLM's rules played through: 51 preemptions of 48 requests at demand 3, and 1.45 times the tokens
without a tier, so ``throughput_3x_over_recompute`` is 1.2 to 1.3. 1.5 is out of reach for requests that arrive
together. ``throughput_5x_over_1x`` 1.07 to 1.15, ``throughput_1x_over_off`` 0.99.
"""

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.engine import BLOCK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, grouped, repeats_option, whole
from shadowserve_tools.bench.parts.serving import Engine, Host, Load, Model, shape_options, write_model
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over

_OFF, _TIER = "recompute", "tier"
_TIMEOUT_S: Final = 600.0
_ALONE: Final = 3
"""Turns with the requests that fit, for each other turn: one per cent counts, and a turn varies by two."""
_KV_SCALE: Final = 2
"""Bytes of float32 over bfloat16. Only float32 gives equal answers when the order of computing differs."""


@dataclass
class _Cell:
    """A system under a demand, with the results of each turn.

    Attributes:
        demand: KV of all requests at their end, over what the engine holds.
        seconds: Time until the last answer is complete.
        preemptions, computed: Numbers of preempted requests, and of computed tokens.
    """

    system: str
    demand: int
    requests: int
    seconds: list[float] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [self.requests / seconds for seconds in self.seconds]


@dataclass(frozen=True)
class _Requests:
    """Requests that arrive at once: ``prompt_tokens`` each, and ``output_tokens`` for each answer."""

    prompt_tokens: int
    output_tokens: int
    fit: int

    @property
    def blocks(self) -> int:
        """Blocks of the engine: ``fit`` requests fit to their end, and vLLM's null block."""
        return self.fit * -(-(self.prompt_tokens + self.output_tokens) // BLOCK_TOKENS) + 1

    def orders(self, demand: int, turn: int) -> list[dict[str, Any]]:
        """Return the requests in the engine's format. Each demand of each turn has its own prompts."""
        first = 1 + 1000 * (10 * turn + demand)
        seeds = range(first, first + demand * self.fit)
        return [{"seed": seed, "tokens": self.prompt_tokens, "output": self.output_tokens, "at": 0.0} for seed in seeds]


@benchmark("demand", "system", "requests", "req_per_s", "preemptions", "computed_tokens", bars=["req_per_s"])
@shape_options(layers=4, hidden=768, heads=2, head_size=64)
@grouped("requests", _Requests, {
    "prompt_tokens": whole("--prompt-tokens", 100, "Tokens of a prompt."),
    "output_tokens": whole("--output-tokens", 300, "Tokens of an answer.", 2),
    "fit": whole("--fit", 16, "Requests that fit into the engine's memory."),
})  # fmt: skip
@whole("--demand demands", (1, 3, 5), "Requests at once, in requests that fit; repeatable.", most=9)
@repeats_option(3, "Number of turns.")
def oversubscription(
    report: Report, programs: Programs, model: Model, requests: _Requests, demands: tuple[int, ...], repeats: int
) -> None:
    """Serve more requests than memory holds, with tiers for preempted KV and without."""
    cells = [_Cell(system, demand, demand * requests.fit) for demand in demands for system in (_OFF, _TIER)]
    alone = [cell for cell in cells if cell.demand == 1]
    equal: list[float] = []
    progress = programs.progress(repeats * (len(cells) + (_ALONE - 1) * len(alone)))
    engines = _engines(programs, model, requests, max(demands))
    for engine in engines.values():  # open connections, and touch memory for the first time
        _serve(engine, requests.orders(1, _ALONE * repeats))
    for turn in range(_ALONE * repeats):
        answers: dict[tuple[str, int], list[list[int]]] = {}
        for cell in (cells if turn < repeats else alone)[:: -1 if turn % 2 else 1]:
            progress(f"{cell.system}, {cell.demand} times")
            answers[cell.system, cell.demand] = _measure(engines[cell.system], cell, requests, turn)
        for demand in demands if turn < repeats else ():
            pairs = list(zip(answers[_OFF, demand], answers[_TIER, demand], strict=True))
            equal.append(sum(mine == its for mine, its in pairs) / len(pairs))
    _report(report, cells, equal)


def _engines(programs: Programs, model: Model, requests: _Requests, demand_max: int) -> dict[str, Engine]:
    load = Load.of_prompt(requests.prompt_tokens + requests.output_tokens, running_max=demand_max * requests.fit)
    host = Host(programs, programs.logs, model, load)
    write_model(host.folder, model, load)
    # Space for all requests of a turn, and for the rest of the turn before.
    budget = 2 * load.running_max * load.prompt_tokens * model.kv_bytes * _KV_SCALE + (64 << 20)
    plane = host.start_plane("", "--tiers", json.dumps({"memory_budget_bytes": budget}))
    return {
        name: host.start_engine(
            name,
            transfer,
            kv_cache_memory_bytes=requests.blocks * BLOCK_TOKENS * model.kv_bytes * _KV_SCALE,
            dtype="float32",
            enable_prefix_caching=True,
        )
        for name, transfer in {
            _OFF: None,
            _TIER: host.plugin(plane, lookup_timeout_s=0.5, fetch_timeout_s=10, store_timeout_s=10),
        }.items()
    }


def _serve(engine: Engine, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = engine.call("serve", timeout_s=_TIMEOUT_S, requests=orders)
    return results


def _measure(engine: Engine, cell: _Cell, requests: _Requests, turn: int) -> list[list[int]]:
    results = _serve(engine, requests.orders(cell.demand, turn))
    pressure = engine.call("pressure")
    answers = [result["answer"] for result in results]
    if any(mine == its for mine, its in itertools.pairwise(answers)):
        raise ShadowServeError("two prompts have the same answer: equal answers would show nothing")
    if (pressure["preemptions"] > 0) != (cell.demand > 1):
        times = f"{pressure['preemptions']} preemptions at {cell.demand} times what fits"
        raise ShadowServeError(f"{times}: give other --prompt-tokens, --output-tokens or --fit")
    cell.seconds.append(max(result["end_s"] for result in results))
    cell.preemptions.append(pressure["preemptions"])
    cell.computed.append(sum(tokens for _, _, tokens, _ in pressure["steps"]))
    cell.limits.append(limit(pressure["steps"]))
    if cell.system == _TIER:
        engine.call("settle")
    return answers


def limit(steps: Sequence[tuple[float, int, int, int]]) -> float:
    """Return the speed of a turn without repeated computing, relative to the turn.

    A step's duration is modelled as a sum: one part for the step, one for each request, one for each further token. The
    last is the cost of a token that is computed again.

    Args:
        steps: Seconds, requests, tokens and repeated tokens of each step.
    """
    seconds, requests, tokens, again = np.array(steps).T
    terms = np.stack([np.ones_like(seconds), requests, tokens - requests], axis=1)
    each = max(np.linalg.lstsq(terms, seconds, rcond=None)[0][2], 0.0)
    total = float(seconds.sum())
    return total / (total - float(each * again.sum()))


def _report(report: Report, cells: Sequence[_Cell], equal: Sequence[float]) -> None:
    of = {(cell.system, cell.demand): cell for cell in cells}
    for cell in cells:
        report.row(
            demand=cell.demand, system=cell.system, requests=cell.requests, req_per_s=statistics.median(cell.rates),
            preemptions=statistics.median(cell.preemptions), computed_tokens=statistics.median(cell.computed),
        )  # fmt: skip
    goals = {(5, "1x"): "at least 0.9", (3, "recompute"): "at least 1.5"}
    one = of.get((_TIER, 1))
    for demand in sorted({cell.demand for cell in cells} - {1}, reverse=True):
        tier, off = of[_TIER, demand], of[_OFF, demand]
        if one is not None:  # pairs of the same turn
            pairs = over(tier.rates, one.rates[: len(tier.rates)])
            report.ratio(f"throughput_{demand}x_over_1x", pairs, goals.get((demand, "1x"), "none"))
        goal = goals.get((demand, "recompute"), "none")
        report.ratio(f"throughput_{demand}x_over_recompute", over(tier.rates, off.rates), goal, off.limits)
    if one is not None:
        report.ratio("throughput_1x_over_off", over(one.rates, of[_OFF, 1].rates), "at least 0.99")
    report.ratio("equal_answers", equal, "exactly 1")
