"""Measures SGLang with ShadowServe's storage backend, with its own ``file`` backend, and with HiCache alone.

Method: SGLang's engine on a CPU (scripts/test-sglang installs it), one for each system, with a Llama of random weights
and much KV per token. Kernels are replaced where SGLang's CPU version computes or copies far more than its GPU one.
Each turn computes two new prompts, one right after the other, in each engine (``fill_s``: both, so that what is stored
of the first one may slow down the second). Then the engine's memory is emptied, and each prompt is asked again:
``ttft_s`` until the first token. The ``file`` backend reads from the page cache; ShadowServe's data plane has the KV in
memory of this host, compressed without loss. The engine without storage keeps the KV in its host pool, so its time is
SGLang's own, and the limit of the others: a load that takes no time. ``load_s`` is what a system's first token takes
longer. vLLM serves prompts of the same length with the same data plane; its own time is that with its prefix cache.
Answers must be equal, and all KV must come from where it should. SGLang is no system of ``bench agents``: on one core,
its engine takes 100 ms for a token of an answer after 2,048 tokens, and vLLM's 25 ms, so kernels would decide.

Prediction: the data plane decodes 1.7 GB/s for one request, ``file`` reads 0.5 GB/s in pages of 16 tokens between steps
of a busy scheduler: ``ttft_over_file`` 0.5 with a limit of 0.3.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from shadowserve.cores import on_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.serving import Host, Load, Model, made_up, shape_options, write_model
from shadowserve_tools.bench.peers.sglang import DEFAULT_PYTHON, NOT_INSTALLED, SGLang
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Child, Programs
from shadowserve_tools.report import Report, over

WITHOUT, FILE, OURS = "HiCache, no storage", "HiCache, file backend", "HiCache, ShadowServe"
VLLM: Final = "vLLM, ShadowServe"
VLLM_KEEPING: Final = "vLLM, its prefix cache"
_PAIR: Final = 2
"""Prompts of a turn."""
_DEVICE, _HOST = 1.25, 3.0
"""Prompts that the engine's memory and its host pool hold: a turn's first one leaves the engine's memory."""
_TRIES: Final = 20


@dataclass
class _Times:
    """Seconds of a system, turn by turn."""

    fill_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


@benchmark("system", "fill_s", "ttft_s", "load_s", "load_GB_per_s", "note", bars=["ttft_s"])
@shape_options(12, 256, 16, 128)
@whole("--prompt-chunks chunks", 8, "Chunks of 256 tokens in a prompt.", 2, 64)
@repeats_option(4, "Turns of two prompts in each engine.")
@click.option(
    "--sglang-python",
    default=DEFAULT_PYTHON,
    show_default="that of scripts/test-sglang",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python of the environment that has SGLang.",
)
def sglang(report: Report, programs: Programs, model: Model, chunks: int, repeats: int, sglang_python: Path) -> None:
    """Compare SGLang's storage backends, and loads in SGLang with those in vLLM."""
    load = Load(chunks=chunks, documents=_PAIR * (repeats + 1))
    write_model(programs.logs, model, load)
    host = Host(programs, programs.logs, model, load)
    room = 2 * load.documents * host.document_bytes + (64 << 20)
    plane = host.start_plane("", "--tiers", json.dumps({"memory_budget_bytes": room}))
    times: defaultdict[str, _Times] = defaultdict(_Times)
    there = sglang_python.exists()
    if there:
        engines = {
            WITHOUT: _start(host, sglang_python, "without"),
            FILE: _start(host, sglang_python, "file", hicache_storage_backend="file"),
            OURS: _start(host, sglang_python, "ours", plane.address),
        }
        _measure(programs, load, engines, repeats, times)
        for engine in engines.values():
            engine.stop()
    _measure_vllm(host, plane, repeats, times)
    _report(report, host, times)
    if not there:
        report.row(system=OURS, note=NOT_INSTALLED)


def _start(host: Host, python: Path, name: str, address: str | None = None, **arguments: Any) -> SGLang:
    load, files = host.load, host.folder / "files"
    with on_cores(host.partition.engine):
        engine = SGLang(
            python,
            host.folder / "model",
            host.folder / f"sglang-{name}.log",
            address,
            environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(files)},
            dtype="bfloat16",
            context_length=load.tokens_max,
            max_total_tokens=int(_DEVICE * load.tokens_max),
            hicache_ratio=_HOST / _DEVICE,
            **arguments,
        )
    host.stack.callback(engine.stop)
    return engine


def _measure(
    programs: Programs, load: Load, engines: dict[str, SGLang], repeats: int, times: defaultdict[str, _Times]
) -> None:
    """Serve all turns in all SGLang engines. The first turn does not count."""
    progress = programs.progress((repeats + 1) * len(engines))
    for turn in range(repeats + 1):
        prompts = [made_up(load.prompt_tokens, _PAIR * turn + number) for number in range(_PAIR)]
        answers = dict[str, Any]()
        for name in list(engines) if turn % 2 else reversed(engines):
            progress(f"turn {turn}: {name}")
            served = _Times()
            answers[name] = _serve(engines[name], name, prompts, served)
            if turn:
                times[name].fill_s += served.fill_s
                times[name].ttft_s += served.ttft_s
        for name, answer in answers.items():
            if answer != answers[WITHOUT]:
                raise ShadowServeError(f"{name}: the answers are {answer}; of {WITHOUT} they are {answers[WITHOUT]}")


def _serve(engine: SGLang, name: str, prompts: Sequence[list[int]], times: _Times) -> list[int]:
    """Serve a turn, and return its first tokens."""
    first = [engine.generate(prompt, tokens=1) for prompt in prompts]
    times.fill_s.append(sum(answer["seconds"] for answer in first))
    place = "host" if name == WITHOUT else "storage"
    wanted = (len(prompts[0]) - 1) // 16 * 16
    for _ in range(_TRIES):  # until everything is stored
        again = [_ask(engine, prompt, place) for prompt in prompts]
        if all(answer["cached"].get(place) == wanted for answer in again):
            break
        time.sleep(0.5)
    else:
        raise ShadowServeError(f"{name}: of {wanted} tokens, {[answer['cached'] for answer in again]} came back")
    again = [_ask(engine, prompt, place) for prompt in prompts]
    if not all(answer["cached"].get(place) == wanted for answer in again):
        raise ShadowServeError(f"{name}: of {wanted} tokens, {[answer['cached'] for answer in again]} came back")
    times.ttft_s.append(statistics.fmean(answer["seconds"] for answer in again))
    tokens = [answer["tokens"][0] for answer in first]
    if tokens != [answer["tokens"][0] for answer in again]:
        raise ShadowServeError(f"{name}: answers with loaded KV differ from computed ones")
    return tokens


def _ask(engine: SGLang, prompt: list[int], place: str) -> dict[str, Any]:
    if place == "storage":
        engine.flush()
    return engine.generate(prompt, tokens=1)


def _measure_vllm(host: Host, plane: Child, repeats: int, times: defaultdict[str, _Times]) -> None:
    """Serve prompts in vLLM, from the data plane and from its prefix cache."""
    kept = host.load.chunks * DEFAULT_CHUNK_TOKENS
    engine = host.start_engine("vllm", host.plugin(plane), enable_prefix_caching=True)
    for turn in range(repeats + 1):
        prompt = made_up(host.load.prompt_tokens, _PAIR * turn)
        engine.ask(prompt)
        engine.call("settle")
        served = defaultdict[str, list[float]](list)
        for _ in range(_PAIR):
            engine.call("reset")
            for name in (VLLM, VLLM_KEEPING):
                served[name].append(engine.ask(prompt, cached=kept)["ttft_s"])
        for name, seconds in served.items():
            if turn:
                times[name].ttft_s.append(statistics.fmean(seconds))


def _report(report: Report, host: Host, times: defaultdict[str, _Times]) -> None:
    own = {FILE: WITHOUT, OURS: WITHOUT, VLLM: VLLM_KEEPING}
    loads = {
        name: [late - early for late, early in zip(times[name].ttft_s, times[other].ttft_s, strict=True)]
        for name, other in own.items()
        if name in times
    }
    for name, found in times.items():
        row: dict[str, Any] = {"ttft_s": statistics.median(found.ttft_s)}
        if found.fill_s:
            row["fill_s"] = statistics.median(found.fill_s)
        if name in loads:
            row["load_s"] = statistics.median(loads[name])
            row["load_GB_per_s"] = host.document_bytes / row["load_s"] / 1e9
        report.row(system=name, **row)
    if OURS in times:
        file, ours, without = (times[name] for name in (FILE, OURS, WITHOUT))
        limits = over(without.ttft_s, file.ttft_s)
        report.ratio("ttft_over_file", over(ours.ttft_s, file.ttft_s), "at most 0.5", limits)
        report.ratio("load_over_file", over(loads[OURS], loads[FILE]), "none; without SGLang's own time")
        report.ratio("load_over_vllm", over(loads[OURS], loads[VLLM]), "at most 1.15; the same bytes")
        report.ratio("fill_over_without", over(ours.fill_s, without.fill_s), "at most 1.05")
        report.ratio("file_fill_over_without", over(file.fill_s, without.fill_s), "none")
    report.ratio("ttft_over_vllm_own", over(times[VLLM].ttft_s, times[VLLM_KEEPING].ttft_s), "none; fetched KV in vLLM")
    bars = {"ms": [(name, 1e3 * statistics.median(found.ttft_s)) for name, found in times.items()]}
    report.charts.append(Chart("First tokens", x="system", y="ms", series=bars, kind="bars"))
