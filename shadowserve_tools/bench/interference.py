"""Measures an engine that serves while KV is fetched: decoding on the data plane's cores, or on the engine's.

Method: real vLLM on one half of the cores, data plane and storage node on the other. In-engine decompression is the
same engine and data plane with the decoding threads moved to the engine's cores. Plain vLLM that has every document
in its prefix cache is the limit. Prompts have 6 chunks (96 MiB of KV); fetches are not held to a budget. Arrivals are
Poisson in an open loop, at a part of ShadowServe's highest throughput.

Then a steady batch decodes in phases of ten steps, beside fetches of lossless and of binned KV at full speed, beside
in-engine decompression, and beside three controls on the data plane's core: a process that spins, one that copies and
one that writes as many bytes. A phase's median step is compared with the phases without load before and after it.
Rounds go on until the median's 95 % interval is within 0.01, or for a time; a wider one is no result.

Prediction: ``decode_step_slowdown`` 0.01 to 0.03, the same for the copying control; 0.3 to 1 decoded in the engine.
``tpot_gain_over_in_engine`` 1.4 at four output tokens, 1.1 at 32.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.parts.engine import decoded_tokens
from shadowserve_tools.bench.parts.loads import Control, FetchLoop
from shadowserve_tools.bench.parts.options import benchmark, numbers_option, repeats_option, whole
from shadowserve_tools.bench.parts.serving import Engine, Load, Model, Served, Stack, model_options, p95
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, half_width, over, tracked

OURS: Final = "shadowserve"
IN_ENGINE: Final = "in-engine decompression"
KEPT: Final = "kept by the engine"
"""Plain vLLM with every document in its own prefix cache: nothing is fetched."""
FETCH_CHUNKS: Final = 8
FETCH_LAYERS: Final = 8
"""Layers of the loop's workload: 64 MiB, twice a last-level cache."""
FETCH_ALONE_S: Final = 0.5
"""For how long fetches are timed that the controls are to be as fast as."""
NOTHING: Final = "nothing"
LOSSLESS: Final = "fetching lossless KV"
BINNED: Final = "fetching binned KV (lossy)"
DECODING_IN_ENGINE: Final = "fetching binned KV (lossy), decoded on the engine's cores"
SPINNING: Final = "a process that spins on a data plane's core"
COPYING: Final = "a process that copies as fast there"
WRITING: Final = "a process that only writes as fast there"
OFTEN: Final = 3
"""Phases with fetches in a round, of each kind, and with the writing control, for one with another control."""
DECODED_TOKENS: Final = 256
"""Context tokens of each request that decodes: with short steps there are many, bound by the weights."""
LOADED: Final = 0.8
"""Offered rate, relative to the highest throughput."""
SLOWDOWN_MAX: Final = 0.02
HALF_WIDTH_MAX: Final = 0.01
RATE_MIN: Final = 4e9
"""Lowest KV rate for which the goal holds, in bytes per second."""

Beside = Callable[[], AbstractContextManager[None]]


@dataclass
class _Results:
    """Measurements.

    Attributes:
        lengths: Runs by output tokens, offered requests per second and system.
        steps: Seconds of decode steps, by the load beside them.
        over_alone: Each phase's median step over that of the unloaded phases before and after it.
        cpu_over_alone: The same for a step's CPU time. It leaves out what other programs take from the core, but
            has waiting for memory.
    """

    lengths: dict[tuple[int, float, str], list[Served]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    over_alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_over_alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fetched: dict[str, FetchLoop] = field(default_factory=dict)


@benchmark(
    "system", "output_tokens", "offered_req_per_s", "req_per_s", "ttft_ms", "ttft_p95_ms", "tpot_ms", "tpot_p95_ms",
    "over_alone", "half_width", "cpu_over_alone", "fetch_GB_per_s", bars=["over_alone"],
)  # fmt: skip
@model_options()
@numbers_option("--lengths", "4,8,16,32", "Output tokens, with commas between.", least=2)
@whole("--requests", 8, "Requests of a run.")
@repeats_option(3, "Number of pairs for each length.")
@whole("--batch", 2, "Requests that decode steadily.")
@whole("--rounds", 20, "Least rounds of steady decoding.", 3)
@whole("--rounds-max", 120, "Most rounds, if intervals are too wide after fewer.")
@whole("--phase-steps", 10, "Steps of a phase.", most=16)
def interference(
    report: Report, programs: Programs, model: Model, load: Load, lengths: list[int], requests: int, repeats: int,
    batch: int, rounds: int, rounds_max: int, phase_steps: int,
) -> None:  # fmt: skip
    """Measure decode steps and requests of an engine while KV is fetched."""
    load = replace(load, output=max(lengths), requests=requests)
    results = _Results()
    decoding = holding(load, 3 * OFTEN + 1, phase_steps)
    running = Stack(programs, model, decoding)
    _measure_decoding(results, programs, running, batch, (rounds, rounds_max), phase_steps)
    _measure_lengths(results, running, running.start_keeping(), lengths, load, repeats)
    _report_decoding(report, results)
    for (length, rate, system), runs in results.lengths.items():
        report.row(system=system, output_tokens=length, offered_req_per_s=rate, **Served.of(runs).columns())
    _report_ratios(report, results)
    _draw(report)


def holding(load: Load, beside: int, steps: int) -> Load:
    """Return a load with requests as large as those that decode beside ``beside`` loads."""
    tokens = DECODED_TOKENS + decoded_tokens(beside, steps)
    return replace(load, output=max(load.output, tokens - load.prompt_tokens))


def _measure_decoding(
    results: _Results, programs: Programs, running: Stack, batch: int, rounds: tuple[int, int], steps: int
) -> None:
    targets = []
    for name, quantizer in ((LOSSLESS, Quantizer.LOSSLESS), (BINNED, Quantizer.BINNED)):
        workload = llama_8b(FETCH_CHUNKS, layers=FETCH_LAYERS, quantizer=quantizer)
        put(workload, running.storage.address)
        targets.append(programs.enter_context(Target.opened(running.data_plane.address, workload)))
        results.fetched[name] = FetchLoop(targets[-1], workload.raw_bytes)
    in_engine = results.fetched[DECODING_IN_ENGINE] = FetchLoop(targets[-1], workload.raw_bytes)
    alone = FetchLoop(targets[-1], workload.raw_bytes)
    with alone.running():
        time.sleep(FETCH_ALONE_S)
    spin, copy, write = (Control(programs, kind, alone.rate) for kind in ("spin", "copy", "write"))

    @contextmanager
    def decoding_in_engine() -> Iterator[None]:
        with running.decoding_in_engine(), in_engine.running():
            yield

    loads: dict[str, Beside] = {name: results.fetched[name].running for name in (LOSSLESS, BINNED)}
    loads |= {WRITING: write.running, DECODING_IN_ENGINE: decoding_in_engine}
    loads |= {SPINNING: spin.running, COPYING: copy.running}
    controls = (DECODING_IN_ENGINE, SPINNING, COPYING)
    wanted = [results.over_alone[name] for name in (LOSSLESS, BINNED)]
    for number in rounds_until_narrow(*rounds, wanted):
        beside = [*(LOSSLESS, BINNED, WRITING) * OFTEN, controls[number % len(controls)]][:: -1 if number % 2 else 1]
        phases = _decoded_phases(running.engine, batch, steps, [loads[name] for name in beside])
        results.steps[NOTHING] += [wall for phase in phases[::2] for wall, _ in phase]
        triples = zip(phases[:-1:2], phases[1::2], phases[2::2], strict=True)
        for name, (before, during, after) in zip(beside, triples, strict=True):
            results.steps[name] += [wall for wall, _ in during]
            for found, figure in ((results.over_alone, 0), (results.cpu_over_alone, 1)):
                one, median, other = (
                    statistics.median(step[figure] for step in each) for each in (before, during, after)
                )
                found[name].append(median / ((one + other) / 2))
    for target in targets:
        target.clear()
        target.fetch()
        target.verify()


def rounds_until_narrow(
    at_least: int, at_most: int, wanted: Sequence[Sequence[float]], seconds: float = 300.0
) -> Iterator[int]:
    """Count rounds until the medians of ``wanted`` are known to ± ``HALF_WIDTH_MAX``, or ``seconds`` are over."""
    end_s = time.monotonic() + seconds
    for number in tracked(range(max(at_least, at_most)), "decoding"):
        narrow = number >= at_least and all(half_width(values) <= HALF_WIDTH_MAX for values in wanted)
        if narrow or (number >= at_least and time.monotonic() >= end_s):
            return
        yield number


Steps = list[tuple[float, float]]
"""Elapsed time and CPU time of the decode steps of a phase."""


def _decoded_phases(engine: Engine, batch: int, steps: int, beside: Sequence[Beside]) -> list[Steps]:
    """Decode a phase beside each load, and an unloaded one before and after each: loads are at odd positions."""
    engine.call("decode_start", batch=batch, tokens=DECODED_TOKENS, beside=len(beside), steps=steps)
    phases: list[Steps] = [engine.call("decode_steps", steps=steps)]
    for context in beside:
        with context():
            phases.append(engine.call("decode_steps", steps=steps))
        phases.append(engine.call("decode_steps", steps=steps))
    engine.call("decode_stop")
    return phases


def _measure_lengths(
    results: _Results, running: Stack, keeping: Engine, lengths: Sequence[int], load: Load, repeats: int
) -> None:
    """Serve outputs of each length at the loaded rate, decoding on the data plane's cores and in the engine, in
    turns.

    The same requests also go to ``keeping``, an engine that has every document.
    """

    def serve(system: str) -> Served:
        with running.decoding_in_engine() if system == IN_ENGINE else nullcontext():
            return (keeping if system == KEPT else running.engine).serve(offered, fetched=True)

    turn = itertools.count()
    for length, repeat in tracked(list(itertools.product(lengths, range(repeats))), "serving"):
        if not repeat:
            burst = replace(load, output=length, rate=0.0)
            capacity = running.engine.serve(burst, fetched=True).throughput  # all at once
        offered = replace(load, output=length, rate=LOADED * capacity, seed=repeat)
        for system in (OURS, IN_ENGINE, KEPT)[:: -1 if next(turn) % 2 else 1]:
            results.lengths[length, offered.rate, system].append(serve(system))


def _report_decoding(report: Report, results: _Results) -> None:
    for name, steps in results.steps.items():
        row: dict[str, Any] = {"system": f"a steady batch beside {name}"}
        row |= {"tpot_ms": statistics.median(steps) * 1e3, "tpot_p95_ms": p95(steps) * 1e3}
        if over := results.over_alone.get(name):
            row["over_alone"] = statistics.median(over)
            row["cpu_over_alone"] = statistics.median(results.cpu_over_alone[name])
            if name in (LOSSLESS, BINNED, WRITING):
                row["half_width"] = half_width(over)
        if loop := results.fetched.get(name):
            row["fetch_GB_per_s"] = loop.rate / 1e9
        report.row(**row)


def _slowdown_goal(width: float, rate: float) -> str:
    """Return the goal of a slowdown; none if its interval is too wide or the KV rate too low."""
    if width > HALF_WIDTH_MAX:
        return f"no result: ± {width:.2g} is wider than {HALF_WIDTH_MAX:g}; at most {SLOWDOWN_MAX:g}"
    if rate < RATE_MIN:
        return f"none at {rate / 1e9:.2g} GB/s; at {RATE_MIN / 1e9:g} and more, at most {SLOWDOWN_MAX:g}"
    return f"at most {SLOWDOWN_MAX:g}; at {rate / 1e9:.2g} GB/s of KV"


def _report_ratios(report: Report, results: _Results) -> None:
    for prefix, name in (("lossless_", LOSSLESS), ("", BINNED)):
        goal = _slowdown_goal(half_width(results.over_alone[name]), results.fetched[name].rate)
        slowdowns, limits = ([over - 1 for over in results.over_alone[beside]] for beside in (name, WRITING))
        # The writing control has the rate of binned KV.
        limits = limits if name == BINNED else []
        report.interval(f"{prefix}decode_step_slowdown", slowdowns, goal, HALF_WIDTH_MAX, limits)
        cpu = [over - 1 for over in results.cpu_over_alone[name]]
        report.ratio(f"{prefix}decode_step_slowdown_in_cpu_time", cpu, "none; without the noise of a busy machine")
    for name, beside, goal in (
        ("decode_step_slowdown_in_engine", DECODING_IN_ENGINE, "none; decoded on the engine's cores"),
        ("decode_step_slowdown_by_spinning", SPINNING, "none; what a busy core costs on this machine"),
        ("decode_step_slowdown_by_copying", COPYING, "none; what memory traffic costs on this machine"),
        ("decode_step_slowdown_by_writing", WRITING, "none; unavoidable for any delivery of KV"),
    ):
        report.ratio(name, [over - 1 for over in results.over_alone[beside]], goal)
    runs = {system: [run for (_, _, its), own in results.lengths.items() if its == system for run in own]
            for system in (OURS, IN_ENGINE, KEPT)}  # fmt: skip
    for figure, goal in (("tpot", "at least 1.3"), ("ttft", "none")):
        ours, theirs, kept = ([getattr(run, figure) for run in own] for own in runs.values())
        report.ratio(f"{figure}_gain_over_in_engine", over(theirs, ours), goal, over(theirs, kept))


def _draw(report: Report) -> None:
    for column, title in (("ttft_ms", "Loaded TTFT"), ("tpot_ms", "Loaded TPOT")):
        series = {
            system: [(float(row["output_tokens"]), row[column]) for row in report.rows if row["system"] == system]
            for system in (OURS, IN_ENGINE, KEPT)
        }
        report.charts.append(Chart(title, x="output tokens", y="ms", series=series, x_log=True))
