"""``shadowserve bench``: repeatable measurements, reported as ratios within one run.

A benchmark prints a table. ``--json`` writes ``{"bench", "machine", "rows", "ratios", ...}``, ``--plot`` draws its
charts, and ``--explain`` prints its method and prediction. Ratios are medians of pairs with their spread, because
absolute figures of a shared machine say little. docs/results.json has the results.

Each benchmark is the module of its name. ``parts`` has workloads, loads, engines and measurements that benchmarks
share, ``peers`` the systems that they compare with.
"""

import signal
import sys
import threading
from typing import Final

import click

from shadowserve_tools.lazy import LazyGroup

BENCHES: Final = (
    "serving",
    "stages",
    "pipeline",
    "codecs",
    "storage",
    "commands",
    "aggregate",
    "schedule",
    "nodes",
    "index",
    "fetch",
    "link",
    "interference",
    "budget",
    "ablation",
    "disaggregation",
    "layers",
    "decide",
    "queue",
    "oversubscription",
    "control",
    "memory",
    "recovery",
    "pool",
    "tiers",
    "pages",
    "isolation",
    "gpu",
)


NEEDS: Final = {
    "serving": ["vllm", "redis"],
    "stages": ["redis"],
    "storage": ["redis"],
    "aggregate": ["redis"],
    "fetch": ["redis"],
    "link": ["redis"],
    "interference": ["vllm"],
    "budget": ["vllm"],
    "ablation": ["vllm"],
    "disaggregation": ["vllm"],
    "layers": ["vllm"],
    "decide": ["vllm"],
    "queue": ["vllm"],
    "oversubscription": ["vllm"],
    "control": ["vllm", "redis"],
    "pages": ["torch"],
}
"""Packages that a benchmark imports late. They are checked before minutes are spent on measuring."""


@click.group(cls=LazyGroup, modules={name: f"shadowserve_tools.bench.{name}:{name}" for name in BENCHES}, needs=NEEDS)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure ShadowServe against a peer or a limit in the same run."""
    # SIGTERM unwinds the stack like Ctrl-C, which also ends the programs that the benchmark has started.
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
