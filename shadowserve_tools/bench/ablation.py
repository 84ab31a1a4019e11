"""Measures the gain of asynchronous fetching (ShadowServe, section 6.4, figure 14).

Method: engine, model and cores are those of ``bench interference``. Without asynchronous fetching the engine waits for
each fetch. Commit f571e7f1 could also switch off the paper's other two techniques, the chunked pipeline and memory
management.

Prediction, on a machine without DPU: without asynchronous fetching TPOT 1.1 times (the paper: 1.39 to 2.03, with
fetches of 500 ms).
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

import click

from shadowserve_tools.bench.parts.serving import Load, Model, Partition, Served, Stack, model_options, p95
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options

FULL: Final = "shadowserve"
NO_AF: Final = "no asynchronous fetching"


@dataclass(frozen=True)
class _Run:
    """Results of one system in one turn: one request at a time, requests at the loaded rate, and all at once."""

    unloaded: Served
    loaded: Served
    burst: Served


@click.command()
@model_options
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(2), help="Tokens of an answer.")
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1), help="Requests of a loaded run.")
@click.option("--unloaded", default=4, show_default=True, type=click.IntRange(1), help="Requests of an unloaded run.")
@click.option("--loaded", default=0.6, show_default=True, help="Offered rate, relative to the highest throughput.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Turns of each system.")
@output_options
def ablation(
    output: Output, model: Model, load: Load, requests_max: int, output_tokens: int, requests: int, unloaded: int,
    loaded: float, repeats: int,
) -> None:  # fmt: skip
    """Serve with asynchronous fetching and without it."""
    load = replace(load, output=output_tokens, requests=requests)
    runs: dict[str, list[_Run]] = defaultdict(list)
    with Programs() as programs:
        progress = programs.progress(2 * repeats + 1, "starting the engine")
        with Stack(Partition.halves(), model, load, requests_max) as running:
            capacity = running.engine.serve(load, fetched=True).throughput
            for turn in range(repeats):
                running.restart_data_plane()
                for system in (FULL, NO_AF):
                    progress(system)
                    running.engine.call("switch", asynchronous=system != NO_AF)
                    offered = replace(load, rate=loaded * capacity, seed=turn)
                    runs[system].append(_measure(running, offered, unloaded))
                    running.engine.call("switch", asynchronous=True)
    _report(runs).finish(output)


def _measure(running: Stack, load: Load, unloaded: int) -> _Run:
    singles = Served.of([running.engine.serve(replace(load, requests=1), fetched=True) for _ in range(unloaded)])
    loaded = running.engine.serve(load, fetched=True)
    return _Run(singles, loaded, running.engine.serve(replace(load, rate=0.0), fetched=True))


def _report(runs: dict[str, list[_Run]]) -> Report:
    report = Report(
        "ablation",
        ["system", "unloaded_ttft_ms", "loaded_ttft_ms", "loaded_ttft_p95_ms", "loaded_tpot_ms", "loaded_tpot_p95_ms",
         "highest_req_per_s"], bars=["loaded_tpot_ms", "unloaded_ttft_ms", "highest_req_per_s"])  # fmt: skip
    for system, turns in runs.items():
        loaded = Served.of([turn.loaded for turn in turns])
        report.row(
            system=system,
            unloaded_ttft_ms=Served.of([turn.unloaded for turn in turns]).ttft * 1e3,
            loaded_ttft_ms=loaded.ttft * 1e3,
            loaded_ttft_p95_ms=p95(loaded.ttft_s) * 1e3,
            loaded_tpot_ms=loaded.tpot * 1e3,
            loaded_tpot_p95_ms=p95(loaded.tpot_s) * 1e3,
            highest_req_per_s=Served.of([turn.burst for turn in turns]).throughput,
        )
    pairs = zip(runs[NO_AF], runs[FULL], strict=True)
    report.ratio(
        "no_af_tpot", [one.loaded.tpot / full.loaded.tpot for one, full in pairs], "none; the paper has 1.39 to 2.03"
    )
    return report
