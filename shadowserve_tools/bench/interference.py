"""``shadowserve bench interference``: what fetching does to an engine that serves, here and where it should not run."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

import click
from rich.progress import Progress

from shadowserve_tools.bench.fetch import Target
from shadowserve_tools.bench.parts.loads import Control, FetchLoop
from shadowserve_tools.bench.parts.serving import Engine, Load, Model, Partition, Served, Stack, model_options, p95
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.report import Chart, Output, Report, output_options

__all__ = ["interference"]

OURS: Final = "shadowserve"
IN_ENGINE: Final = "in-engine decompression"
RECOMPUTE: Final = "recompute"
SHORT_OUTPUT: Final = 8
"""Tokens up to which an output is short: the paper's gap is widest there (figure 10)."""
FETCH_CHUNKS: Final = 8
FETCH_LAYERS: Final = 8
"""The fetch loop's workload: 64 MiB, twice a last-level cache, in a round of some tens of milliseconds."""
FETCH_ALONE_S: Final = 0.5
NOTHING: Final = "nothing"
FETCHING: Final = "fetching on its own cores"
FETCHING_IN_ENGINE: Final = "fetching on the engine's cores"
FETCHING_ALONE: Final = "fetching alone"
SPINNING: Final = "a process that spins on a data plane's core"
COPYING: Final = "a process that copies as fast there"

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The options of :func:`interference`; rates are parts of ShadowServe's highest throughput."""

    lengths: list[float]
    rates: list[float]
    curve_output: int
    loaded: float
    requests: int
    recomputed: int
    repeats: int
    batch: int
    windows: int
    window_steps: int


@dataclass
class _Results:
    """What was measured.

    Attributes:
        lengths: runs of (output tokens, requests offered a second, system).
        curves: runs of (part of the capacity, requests offered a second, system).
        steps: seconds of decode steps, by what ran beside them.
        over_alone: each window's median step over that of the windows around it that nothing ran beside.
        cpu_over_alone: the same of a step's CPU time. What else runs on the machine, and takes a core away for a while,
            is not in it; waiting for memory is, and so is a core that is shared with another hyperthread.
        fetched: what the fetches beside them delivered.
    """

    lengths: dict[tuple[int, float, str], list[Served]] = field(default_factory=lambda: defaultdict(list))
    curves: dict[tuple[float, float, str], list[Served]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    over_alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_over_alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fetched: dict[str, FetchLoop] = field(default_factory=dict)


def _numbers(_context: click.Context, parameter: click.Parameter, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter("give numbers with commas between them", param=parameter) from error
    if min(numbers) <= 0:
        raise click.BadParameter("give numbers above zero", param=parameter)
    return numbers


_COUNT = click.IntRange(1)


@click.command()
@model_options
@click.option("--lengths", default="4,8,16,32,64", show_default=True, callback=_numbers, help="Output tokens.")
@click.option(
    "--rates", default="0.2,0.4,0.6,0.8,0.95", show_default=True, callback=_numbers,
    help="Offered rates of the load-latency curves, in parts of ShadowServe's highest throughput.",
)  # fmt: skip
@click.option("--curve-output", default=32, show_default=True, type=click.IntRange(2), help="Their output tokens.")
@click.option("--loaded", default=0.8, show_default=True, help="The rate at which lengths are compared, likewise.")
@click.option("--requests", default=16, show_default=True, type=_COUNT, help="Of each run.")
@click.option("--recomputed", default=6, show_default=True, type=_COUNT, help="Of each run that recomputes.")
@click.option("--repeats", default=3, show_default=True, type=_COUNT, help="Pairs for each length.")
@click.option("--batch", default=2, show_default=True, type=_COUNT, help="Requests that decode steadily.")
@click.option("--windows", default=9, show_default=True, type=_COUNT, help="Windows of steady decoding, of each kind.")
@click.option("--window-steps", default=40, show_default=True, type=click.IntRange(1, 40), help="Steps in each.")
@output_options
def interference(output: Output, model: Model, load: Load, requests_max: int, **options: Any) -> None:
    """Serve on half of the cores while the data plane fetches on the other half, and on the engine's own.

    Three systems: recompute is plain vLLM; in-engine decompression is the very same data plane moved onto the engine's
    cores, which is what decompressing in the engine comes to on a CPU; ShadowServe leaves it on its own. The engine is
    real vLLM with a Llama of random weights, and keeps no prefix itself. And a steady batch decodes while the data
    plane fetches at full speed for somebody else: how much longer is a step?
    """
    plan = _Plan(**options)
    load = replace(load, output=int(max(plan.curve_output, *plan.lengths)))
    results = _Results()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(transient=True))
        total = 2 + plan.windows + 2 * plan.repeats * len(plan.lengths) + 3 * len(plan.rates)
        task = progress.add_task("starting engines", total=total)

        def tell(what: str) -> None:
            progress.update(task, advance=1, description=what)

        running = stack.enter_context(Stack(Partition.halves(), model, load, requests_max))
        plain = stack.enter_context(running.engine_with("plain"))
        tell("decoding")
        _measure_decoding(results, running, plan, load, tell)
        _measure_lengths(results, running, plan, load, tell)
        _measure_curves(results, running, plain, plan, load, tell)
    _report(results, plan).finish(output)


# ---- A steady batch --------------------------------------------------------------------------------------------------


def _measure_decoding(results: _Results, running: Stack, plan: _Plan, load: Load, tell: Tell) -> None:
    """Fill in the decode windows."""
    workload = llama_8b(FETCH_CHUNKS, layers=FETCH_LAYERS)
    put(workload, running.storage.address)
    own, engines = running.partition.data_plane, running.partition.engine
    with ExitStack() as stack:
        target = stack.enter_context(Target.opened(running.data_plane.address, workload))
        loops = {name: FetchLoop(target, workload.raw_bytes) for name in (FETCHING_ALONE, FETCHING, FETCHING_IN_ENGINE)}
        alone = loops[FETCHING_ALONE]
        with alone.running():
            time.sleep(FETCH_ALONE_S)
        spin = stack.enter_context(Control("spin"))
        copy = stack.enter_context(Control("copy", alone.bytes / alone.seconds))
        beside: list[tuple[str, tuple[int, ...], Callable[[], AbstractContextManager[None]]]] = [
            (NOTHING, own, nullcontext),
            (FETCHING, own, loops[FETCHING].running),
            (FETCHING_IN_ENGINE, engines, loops[FETCHING_IN_ENGINE].running),
            (SPINNING, own, spin.running),
            (COPYING, own, copy.running),
            (NOTHING, own, nullcontext),
        ]
        for _ in range(plan.windows):
            _decode_round(results, running, plan, load, beside)
            with alone.running():
                time.sleep(FETCH_ALONE_S)
            tell("decoding")
        target.clear()
        target.fetch()
        target.verify()
    results.fetched = loops


def _decode_round(results: _Results, running: Stack, plan: _Plan, load: Load, beside: list[Any]) -> None:
    """Decode a window beside each; the first and the last, beside nothing, are what the others are compared with."""
    engine = running.engine
    engine.ask("decode_start", batch=plan.batch, tokens=load.prompt_tokens, steps_max=_ROUND_STEPS)
    walls, cpus = [], []
    for name, cores, context in beside:
        running.place(cores)
        with context():
            durations = engine.ask("decode_steps", steps=plan.window_steps)
        walls.append(statistics.median(wall for wall, _ in durations))
        cpus.append(statistics.median(cpu for _, cpu in durations))
        results.steps[name] += [wall for wall, _ in durations]
    running.place(running.partition.data_plane)
    engine.ask("decode_stop")
    for over_alone, medians in ((results.over_alone, walls), (results.cpu_over_alone, cpus)):
        alone = (medians[0] + medians[-1]) / 2
        for (name, _, _), median in zip(beside, medians, strict=True):
            over_alone[name].append(median / alone)


_ROUND_STEPS = 256
"""Steps of one round's windows, warm-up included, at most: 6 x 40 and some."""


# ---- Serving ---------------------------------------------------------------------------------------------------------


def _capacity(running: Stack, load: Load) -> float:
    """Return the highest throughput, in requests a second: what comes of all requests at once."""
    return running.engine.serve(replace(load, rate=0.0), fetched=True).throughput


def _both(running: Stack, load: Load) -> dict[str, Served]:
    """Serve a load with the data plane on its own cores, then on the engine's."""
    served = {}
    for system, cores in ((OURS, running.partition.data_plane), (IN_ENGINE, running.partition.engine)):
        running.place(cores)
        served[system] = running.engine.serve(load, fetched=True)
    running.place(running.partition.data_plane)
    return served


def _measure_lengths(results: _Results, running: Stack, plan: _Plan, load: Load, tell: Tell) -> None:
    """Serve outputs of each length at the loaded rate."""
    for length in map(int, plan.lengths):
        load = replace(load, output=length, requests=plan.requests)
        load = replace(load, rate=plan.loaded * _capacity(running, load))
        for repeat in range(plan.repeats):
            for system, served in _both(running, replace(load, seed=repeat)).items():
                results.lengths[length, load.rate, system].append(served)
            tell(f"{length} tokens at {load.rate:.2g}/s")
            tell(f"{length} tokens at {load.rate:.2g}/s")


def _measure_curves(results: _Results, running: Stack, plain: Engine, plan: _Plan, load: Load, tell: Tell) -> None:
    """Serve outputs of one length at each rate."""
    load = replace(load, output=plan.curve_output, requests=plan.requests)
    capacity = _capacity(running, load)
    for part in plan.rates:
        load = replace(load, rate=part * capacity)
        runs = _both(running, load)
        tell(f"{load.output} tokens at {load.rate:.2g}/s")
        runs[RECOMPUTE] = plain.serve(replace(load, requests=plan.recomputed), fetched=False)
        for system, served in runs.items():
            results.curves[part, load.rate, system].append(served)
        tell(f"{load.output} tokens at {load.rate:.2g}/s")
        tell(f"{load.output} tokens at {load.rate:.2g}/s")


# ---- What came of it -------------------------------------------------------------------------------------------------


def _report(results: _Results, plan: _Plan) -> Report:
    report = Report(
        "interference",
        ["system", "output_tokens", "offered_req_per_s", "req_per_s", "ttft_ms", "ttft_p95_ms", "tpot_ms",
         "tpot_p95_ms", "over_alone", "cpu_over_alone", "fetch_GB_per_s"],
    )  # fmt: skip
    _report_decoding(report, results)
    for (length, rate, system), runs in results.lengths.items():
        report.row(system=system, output_tokens=length, offered_req_per_s=rate, **Served.of(runs).columns())
    for (_, rate, system), runs in results.curves.items():
        report.row(system=system, output_tokens=plan.curve_output, offered_req_per_s=rate, **Served.of(runs).columns())
    _report_ratios(report, results, plan)
    _draw(report, results, plan)
    return report


def _report_decoding(report: Report, results: _Results) -> None:
    for name in [*results.steps, FETCHING_ALONE]:
        row: dict[str, Any] = {"system": name if name == FETCHING_ALONE else f"a steady batch beside {name}"}
        if steps := results.steps.get(name):
            row |= {"tpot_ms": statistics.median(steps) * 1e3, "tpot_p95_ms": p95(steps) * 1e3}
            row["over_alone"] = statistics.median(results.over_alone[name])
            row["cpu_over_alone"] = statistics.median(results.cpu_over_alone[name])
        if loop := results.fetched.get(name):
            row["fetch_GB_per_s"] = loop.bytes / loop.seconds / 1e9
        report.row(**row)


def _report_ratios(report: Report, results: _Results, plan: _Plan) -> None:
    for name, beside, goal in (
        ("decode_step_slowdown", FETCHING, "at most 0.02"),
        ("decode_step_slowdown_in_engine", FETCHING_IN_ENGINE, "none; the same fetches on the engine's cores"),
        ("decode_step_slowdown_by_spinning", SPINNING, "none; what a busy core costs on this machine"),
        ("decode_step_slowdown_by_copying", COPYING, "none; what memory traffic costs on this machine"),
    ):
        report.ratio(name, [over - 1 for over in results.over_alone[beside]], goal)
    cpu = [over - 1 for over in results.cpu_over_alone[FETCHING]]
    report.ratio("decode_step_slowdown_in_cpu_time", cpu, "none; the first without what a busy machine adds to it")
    short = [length for length, _, system in results.lengths if length <= SHORT_OUTPUT and system == OURS]
    pairs = [
        (ours, theirs)
        for (length, rate, system), runs in results.lengths.items()
        if system == OURS and length in (short or map(int, plan.lengths))
        for ours, theirs in zip(runs, results.lengths[length, rate, IN_ENGINE], strict=True)
    ]
    report.ratio("tpot_gain_over_in_engine", [theirs.tpot / ours.tpot for ours, theirs in pairs], "at least 1.3")
    report.ratio("ttft_gain_over_in_engine", [theirs.ttft / ours.ttft for ours, theirs in pairs], "none")
    report.ratio(
        "ttft_gain_over_recompute",
        [
            run.ttft / results.curves[part, rate, OURS][0].ttft
            for (part, rate, system), (run,) in results.curves.items()
            if system == RECOMPUTE and part == min(plan.rates)
        ],
        "none; at the lowest rate",
    )


def _draw(report: Report, results: _Results, plan: _Plan) -> None:
    systems = (OURS, IN_ENGINE, RECOMPUTE)
    for what, title in (("ttft", "TTFT under load"), ("tpot", "TPOT under load")):
        series = {
            system: [
                (rate, getattr(run, what) * 1e3) for (_, rate, name), (run,) in results.curves.items() if name == system
            ]
            for system in systems
        }
        report.charts.append(
            Chart(f"{title}, {plan.curve_output} tokens", x="offered requests/s", y="ms", series=series, y_log=True)
        )
    lengths = {
        system: [
            (float(length), Served.of(runs).tpot * 1e3)
            for (length, _, name), runs in results.lengths.items()
            if name == system
        ]
        for system in (OURS, IN_ENGINE)
    }
    report.charts.append(Chart("Loaded TPOT", x="output tokens", y="ms", series=lengths, x_log=True))
    bars = [(name, statistics.median(over)) for name, over in results.over_alone.items()]
    report.charts.append(
        Chart("A decode step beside", x="", y="times as long as alone", series={"step": bars}, kind="bars",
              limits={"goal": 1.02}, highlight=[FETCHING])
    )  # fmt: skip
