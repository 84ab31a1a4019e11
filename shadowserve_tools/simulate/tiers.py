"""``shadowserve simulate tiers``: more KV than the GPU's memory holds, under each of TierKV's policies."""

import statistics
from typing import Any, Final

import click

from shadowserve_tools.bench.parts.options import choice, real, whole
from shadowserve_tools.charts import Chart
from shadowserve_tools.report import Output, Report, output_options, tracked
from shadowserve_tools.simulate.assumptions import rows
from shadowserve_tools.simulate.tier_assumptions import MODELS, TABLE_4, WORKLOADS, Assumed
from shadowserve_tools.simulate.tier_model import POLICIES, trace
from shadowserve_tools.simulate.tier_run import Outcome, Rules, outcome

REQUESTS_MIN: Final = 3_000
"""Of a seed."""
COLUMNS: Final = (
    "policy", "tpot_ms", "paper_ms", "p95_ms", "tokens_per_s", "hit_rate", "wait_ms", "wasted_GB",
)  # fmt: skip
KEYS: Final = ("tpot_mean_ms", "tpot_p95_ms", "throughput_tokens_s", "hit_rate", "wasted_bytes")
"""Of each policy, in the data."""
_DRAWN: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0)


@click.command()
@choice("--model", MODELS, "7b", "Llama whose KV size and speed apply.")
@choice(
    "--workload", WORKLOADS, "mixed", "Context lengths: 512; 128-512; 512-2048; 2048-8192 tokens; a quarter of each."
)
@real("--oversubscription", 3.0, "KV of all sessions, relative to the GPU's memory.", 1, 20)
@whole("--seeds", 3, "Number of runs; the mean counts.", most=100)
@whole("--lookahead", 1, "Requests ahead that are prefetched, the paper's K.", most=1000)
@choice(
    "--late", ("waits", "stalls"), "waits", "What a block that comes too late delays: its request, or all decoding."
)
@real("--memory-gb", 512.0, "Host memory; the rest of the KV is on the SSD.", 1, 1e5)
@output_options
def tiers(
    model: str, workload: str, oversubscription: float, seeds: int, lookahead: int, late: str, memory_gb: float,
    output: Output,
) -> None:  # fmt: skip
    """Predict decoding where sessions have more KV than the GPU's memory holds, under TierKV's six policies.

    Sessions keep their KV; a request needs its session's KV in the GPU's memory. The product's own objects decide what
    is evicted for it and what is prefetched. A model, not a measurement: docs/design/simulation.md has every
    assumption, the fits, and the figures of the paper that the model misses.

    \b
    The policies:
      lru, frequency      one tier that swaps: evicted KV is written out while all wait, then missing KV is read
      attention_prefetch  prefetches what was used most recently, without knowing requests; copies are below
      static              each block stays in its tier, by the tiers' sizes
      prefetch            evicts what runs last, prefetches for the queue (equation 1); requests that lack KV wait alone
      oracle              the same, with knowledge of requests before they come

    \b
    The columns:
      tpot_ms      mean time per token while decoding, p95_ms of requests; paper_ms: table 4, where it has the figure
      hit_rate     bytes in the GPU's memory at their request's turn
      wait_ms      from a request's arrival to its first token: prefetching turns stalls into waiting
      wasted_GB    prefetched and never used

    \b
    More oversubscription:          shadowserve simulate tiers --oversubscription 5
    Late blocks stop all:           shadowserve simulate tiers --late stalls --lookahead 4
    Two hops, from the SSD:         shadowserve simulate tiers --memory-gb 100
    Over oversubscription, drawn:   shadowserve simulate tiers --plot tiers.svg
    """
    given = Assumed(memory_gb=memory_gb)
    rules = Rules(lookahead, late == "stalls")
    found = outcomes(model, workload, oversubscription, seeds, given, rules)
    report = Report("tiers", list(COLUMNS), command="simulate")
    is_paper = workload == "mixed" and oversubscription == 3 and given == Assumed() and not rules.late_stalls
    for name, its in found.items():
        paper = TABLE_4[model].get(name) if is_paper else None
        report.row(
            policy=name, tpot_ms=f"{its.tpot_mean_ms:.2f}", paper_ms="" if paper is None else f"{paper:.2f}",
            p95_ms=f"{its.tpot_p95_ms:.2f}", tokens_per_s=its.throughput_tokens_s, hit_rate=f"{its.hit_rate:.3f}",
            wait_ms=its.wait_ms, wasted_GB=its.wasted_bytes / 1e9,
        )  # fmt: skip
    report.more = {
        "model": model, "workload": workload, "oversubscription": oversubscription, "seeds": seeds,
        "policies": {name: {key: getattr(its, key) for key in KEYS} for name, its in found.items()},
        "assumptions": rows(given),
    }  # fmt: skip
    if output.plot_file:
        report.charts = [_over_oversubscription(model, workload, given, rules)]
    report.finish(output)


def outcomes(
    model: str, workload: str, oversubscription: float, seeds: int, given: Assumed, rules: Rules
) -> dict[str, Outcome]:
    """Return the results of each policy for the same requests, as means over seeds."""
    shape = MODELS[model]
    of: dict[str, list[Outcome]] = {name: [] for name in POLICIES}
    for seed in tracked(range(seeds), "simulating"):
        workload_trace = trace(shape, workload, oversubscription, seed, given, REQUESTS_MIN)
        for name, policy in POLICIES.items():
            of[name].append(outcome(workload_trace, policy, shape.step_ms, given, rules))
    return {name: Outcome(*map(statistics.fmean, zip(*its, strict=True))) for name, its in of.items()}


def _over_oversubscription(model: str, workload: str, given: Assumed, rules: Rules) -> Chart:
    series: dict[str, Any] = {name: [] for name in reversed(POLICIES)}
    for times in _DRAWN:
        for name, its in outcomes(model, workload, times, 1, given, rules).items():
            series[name].append((times, its.tpot_mean_ms))
    return Chart(f"Mean TPOT, {model}, {workload}", x="KV over the GPU's memory, times", y="ms", series=series)
