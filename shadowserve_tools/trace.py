"""``shadowserve trace``: one fetch as a timeline, one track for each core and stage."""

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from shadowserve import __version__
from shadowserve.errors import ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tls import Credentials
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import machine
from shadowserve_tools.timeline import DECISION, STAGES, chrome_trace, stage_times

GRACE_S: Final = 30.0
"""Time to assemble and send a recording of up to hundreds of thousands of spans."""


@click.command(context_settings={"show_default": True})
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(dir_okay=False, writable=True, path_type=Path), required=True,
    help="File for the timeline, as JSON.",
)  # fmt: skip
@click.option("--data-plane", metavar="HOST:PORT", help="Record the next fetches of a running data plane.")
@click.option("--seconds", default=30.0, type=click.FloatRange(0.001, 600.0), help="Longest time to wait and record.")
@click.option(
    "--fetches", default=1, type=click.IntRange(1, 10000),
    help="Stop after this number of Fetch calls; each is one batch of a prompt.",
)  # fmt: skip
@click.option(
    "--chunks", default=16, type=click.IntRange(1, 512), help="Without --data-plane: chunks of 256 tokens to fetch."
)
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="Without --data-plane: a key of the data plane's configuration, such as fused=false. Repeatable.",
)  # fmt: skip
def trace(
    output: Path, data_plane: str | None, seconds: float, fetches: int, chunks: int, settings: tuple[str, ...]
) -> None:
    """Write one fetch as a timeline: what each thread did on which core, slice by slice.

    Open the file in https://ui.perfetto.dev or chrome://tracing. Each core is a process with a track for each stage's
    thread that ran on it. On top are the steps of the Fetch call, and the decisions of engines with fetch_or_recompute
    or layer order, with predicted and measured times, and how steps waited for layers. A table shows how long each
    stage was busy, and how long its threads waited: the stage that hardly waits is the bottleneck.

    \b
    A fetch of a synthetic prompt of Llama-8B's shape, from a storage node started for it:
        shadowserve trace -o fetch.json
    The same with the paper's separate stages:
        shadowserve trace -o separate.json --set fused=false
    The next fetch of a running data plane:
        shadowserve trace -o fetch.json --data-plane 127.0.0.1:50151

    Run it on the machine whose fetches are recorded: a data plane shows each host only its own fetches. With TLS, the
    keys tls_* of section 'host' of the configuration apply.
    """
    if data_plane is not None and settings:
        raise click.UsageError("--set cannot be used with --data-plane: a running data plane has its configuration")
    if data_plane is not None:
        spans, dropped = record(data_plane, seconds, fetches, lambda: None, HostConfig.load().credentials())
    else:
        spans, dropped = _record_own(seconds, fetches, chunks, settings)
    if not any(span.step in STAGES or span.step == DECISION for span in spans):
        raise ShadowServeError(f"no fetch within {seconds:g} s; record while requests are served")
    about = {"shadowserve": __version__, "machine": machine(), "dropped": dropped}
    output.write_text(json.dumps(chrome_trace(spans, about)) + "\n")
    _summarize(spans, dropped, output)


def record(
    address: str, seconds: float, fetches: int, recording: Callable[[], object], credentials: Credentials | None = None
) -> tuple[list[pb.TraceSpan], int]:
    """Return the spans of a data plane's next fetches, and the number of dropped ones.

    Calls ``recording`` once the recording runs, which ends after ``fetches`` calls, or at the latest after ``seconds``.
    """
    spans: list[pb.TraceSpan] = []
    dropped = 0
    with closing(DataPlaneClient(address, credentials=credentials, connect_timeout_s=GRACE_S)) as plane:
        answers = plane.trace(seconds, fetches)
        next(answers)
        recording()
        for answer in answers:
            spans += answer.spans
            dropped += answer.dropped
    return spans, dropped


def _record_own(seconds: float, fetches: int, chunks: int, settings: Sequence[str]) -> tuple[list[pb.TraceSpan], int]:
    """Fetch a prompt twice from a storage node of its own: once to connect, and once recorded."""
    flags = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--set {setting}: give KEY=VALUE, such as fused=false")
        flags += [f"--{key.replace('_', '-')}", value]
    workload = llama_8b(chunks)
    with Programs() as programs:
        storage = programs.storage()
        plane = programs.data_plane(storage.address, *flags)
        put(workload, storage.address)
        target = programs.enter_context(Target.opened(plane.address, workload))
        target.fetch()
        target.clear()
        spans, dropped = record(plane.address, seconds, fetches, target.fetch)
        target.verify()
    return spans, dropped


def _summarize(spans: Sequence[pb.TraceSpan], dropped: int, output: Path) -> None:
    console = Console()
    table = Table("step", "threads", "spans", "busy ms", "waiting ms", "share", "MB in", "MB out", title="the stages")
    for time in stage_times(spans):
        times = (f"{ns / 1e6:.2f}" for ns in (time.busy_ns, time.waiting_ns))
        moved = (f"{size / 1e6:.1f}" for size in (time.input_bytes, time.output_bytes))
        table.add_row(time.stage, str(time.threads), f"{time.spans:,d}", *times, f"{time.share:.0%}", *moved)
    console.print(table)
    for span in spans:
        if span.step == DECISION:
            console.print(_decided(span.decision), highlight=False)
        elif span.step not in STAGES:
            console.print(f"{span.step}: {(span.end_ns - span.begin_ns) / 1e6:.2f} ms", highlight=False)
    if dropped:
        console.print(f"{dropped:,d} spans are missing: raise the data plane's trace_events")
    console.print(f"{output}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)


def _decided(decision: pb.Decision) -> str:
    ways = [f"{way} {1e3 * seconds:.1f} ms" for way, seconds in sorted(decision.predicted.items())]
    done = f"{decision.kind}, {decision.loaded_tokens:,d} of {decision.tokens:,d} tokens loaded"
    expected = f"{1e3 * decision.predicted_seconds:.1f} ms predicted ({', '.join(ways)})" if ways else "no prediction"
    there = [f"{decision.stored_bytes / 1e6:.1f} MB" if decision.stored_bytes else "unknown size"]
    there += [f"{size / 1e6:.1f} MB of it in {tier}" for tier, size in sorted(decision.tier_bytes.items())]
    if decision.cold_seconds:
        there.append(f"{1e3 * decision.cold_seconds:.1f} ms to load cold records")
    if decision.queued_seconds:
        there.append(f"behind {1e3 * decision.queued_seconds:.1f} ms of other loads")
    came = f"{1e3 * decision.seconds:.1f} ms to the first token"
    layers = f"; not layer by layer: {decision.not_layerwise}" if decision.not_layerwise else ""
    if waits := decision.layer_waits:
        layers = f"; {1e3 * sum(wait.seconds for wait in waits):.1f} ms of waiting for {len(waits)} layers, "
        layers += f"{statistics.fmean(wait.ahead for wait in waits):.1f} layers ahead"
    return f"decision: {done}: {came}; {expected}; stored: {', '.join(there)}{layers}"
