"""``shadowserve bench ablation``: the gain of asynchronous fetching (ShadowServe section 6.4)."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

import click
from rich.progress import Progress

from shadowserve_tools.bench.parts.serving import Load, Model, Partition, Served, Stack, model_options, p95
from shadowserve_tools.report import Chart, Output, Report, output_options

__all__ = ["ablation"]

FULL: Final = "shadowserve"
NO_AF: Final = "no asynchronous fetching"


@dataclass(frozen=True)
class _Run:
    """What one system did in one turn: one request at a time, requests at the loaded rate, and all at once."""

    unloaded: Served
    loaded: Served
    burst: Served


@click.command()
@model_options
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(2), help="Of each answer.")
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1), help="Of each loaded run.")
@click.option("--unloaded", default=4, show_default=True, type=click.IntRange(1), help="Of each unloaded run.")
@click.option("--loaded", default=0.6, show_default=True, help="Offered rate, in parts of the highest throughput.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Turns of each system.")
@output_options
def ablation(
    output: Output, model: Model, load: Load, requests_max: int, output_tokens: int, requests: int, unloaded: int,
    loaded: float, repeats: int,
) -> None:  # fmt: skip
    """Serve with asynchronous fetching and without it, everything else the same.

    Without it the engine waits for each fetch. Engine, model and cores are those of `bench interference`.
    """
    load = replace(load, output=output_tokens, requests=requests)
    runs: dict[str, list[_Run]] = defaultdict(list)
    with Progress(transient=True) as progress:
        task = progress.add_task("starting the engine", total=2 * repeats)
        with Stack(Partition.halves(), model, load, requests_max) as running:
            capacity = running.engine.serve(load, fetched=True).throughput
            for turn in range(repeats):
                running.restart_data_plane()
                for system in (FULL, NO_AF):
                    progress.update(task, description=system)
                    running.engine.ask("switch", asynchronous=system != NO_AF)
                    offered = replace(load, rate=loaded * capacity, seed=turn)
                    runs[system].append(_measure(running, offered, unloaded))
                    running.engine.ask("switch", asynchronous=True)
                    progress.update(task, advance=1)
    _report(runs).finish(output)


def _measure(running: Stack, load: Load, unloaded: int) -> _Run:
    singles = _unloaded(running, load, unloaded)
    loaded = running.engine.serve(load, fetched=True)
    return _Run(singles, loaded, running.engine.serve(replace(load, rate=0.0), fetched=True))


def _unloaded(running: Stack, load: Load, count: int) -> Served:
    return Served.of([running.engine.serve(replace(load, requests=1), fetched=True) for _ in range(count)])


def _report(runs: dict[str, list[_Run]]) -> Report:
    report = Report(
        "ablation",
        ["system", "unloaded_ttft_ms", "loaded_ttft_ms", "loaded_ttft_p95_ms", "loaded_tpot_ms", "loaded_tpot_p95_ms",
         "highest_req_per_s"],
    )  # fmt: skip
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
    ratios = [one.loaded.tpot / full.loaded.tpot for one, full in pairs]
    report.ratio("no_af_tpot", ratios, "none; the paper has 1.39 to 2.03")
    for title, column, unit in (
        ("Loaded TPOT", "loaded_tpot_ms", "ms"),
        ("Unloaded TTFT", "unloaded_ttft_ms", "ms"),
        ("Highest throughput", "highest_req_per_s", "requests/s"),
    ):
        bars = [(str(row["system"]), float(row[column])) for row in report.rows if column in row]
        report.charts.append(Chart(title, x="", y=unit, series={title: bars}, kind="bars", highlight=[FULL]))
    return report
