"""Measures the gain of asynchronous fetching (ShadowServe, section 6.4, figure 14).

Method: engine, model and cores are those of ``bench interference``. Without asynchronous fetching the engine waits for
each fetch. Commit f571e7f1 could also switch off the paper's other two techniques, the chunked pipeline and memory
management.

Prediction, on a machine without DPU: without asynchronous fetching TPOT 1.1 times (the paper: 1.39 to 2.03, with
fetches of 500 ms).
"""

import functools
from dataclasses import replace
from typing import Final

from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.serving import Load, Model, Served, Stack, model_options, p95
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, over

FULL: Final = "shadowserve"
NO_AF: Final = "no asynchronous fetching"
LOADED: Final = 0.6
"""Offered rate, relative to the highest throughput."""


@benchmark(
    "system", "unloaded_ttft_ms", "loaded_ttft_ms", "loaded_ttft_p95_ms", "loaded_tpot_ms", "loaded_tpot_p95_ms",
    "highest_req_per_s", bars=["loaded_tpot_ms", "unloaded_ttft_ms", "highest_req_per_s"],
)  # fmt: skip
@model_options()
@whole("--output-tokens", 32, "Tokens of an answer.", 2)
@whole("--requests", 16, "Requests of a loaded run.")
@whole("--unloaded", 4, "Requests of an unloaded run.")
@repeats_option(3, "Turns of each system.")
def ablation(
    report: Report, programs: Programs, model: Model, load: Load, output_tokens: int, requests: int,
    unloaded: int, repeats: int,
) -> None:  # fmt: skip
    """Serve with asynchronous fetching and without it."""
    load = replace(load, output=output_tokens, requests=requests)
    progress = programs.progress(2 * repeats + 1, "starting the engine")
    running = Stack(programs, model, load)
    serve = functools.partial(running.engine.serve, fetched=True)
    capacity = serve(load).throughput
    singles, offered, bursts = ({FULL: list[Served](), NO_AF: list[Served]()} for _ in range(3))
    for turn in range(repeats):
        running.restart_data_plane()
        for system in (FULL, NO_AF):
            progress(system)
            running.engine.call("switch", asynchronous=system != NO_AF)
            singles[system] += [serve(replace(load, requests=1)) for _ in range(unloaded)]
            offered[system].append(serve(replace(load, rate=LOADED * capacity, seed=turn)))
            bursts[system].append(serve(load))
            running.engine.call("switch", asynchronous=True)
    for system, runs in offered.items():
        every = Served.of(runs)
        report.row(
            system=system,
            unloaded_ttft_ms=Served.of(singles[system]).ttft * 1e3,
            loaded_ttft_ms=every.ttft * 1e3,
            loaded_ttft_p95_ms=p95(every.ttft_s) * 1e3,
            loaded_tpot_ms=every.tpot * 1e3,
            loaded_tpot_p95_ms=p95(every.tpot_s) * 1e3,
            highest_req_per_s=Served.of(bursts[system]).throughput,
        )
    tpots = [[run.tpot for run in offered[system]] for system in (NO_AF, FULL)]
    report.ratio("no_af_tpot", over(*tpots), "none; the paper has 1.39 to 2.03")
