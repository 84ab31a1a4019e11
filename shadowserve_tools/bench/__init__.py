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

ENGINE, TRANSFER, KERNELS = "With real vLLM engines", "With data planes and storage nodes", "In one process"
BENCHES: Final[dict[str, tuple[str, list[str]]]] = {
    "serving": (ENGINE, ["vllm", "redis"]),
    "agents": (ENGINE, ["vllm", "redis"]),
    "sglang": (ENGINE, ["vllm"]),
    "interference": (ENGINE, ["vllm"]),
    "budget": (ENGINE, ["vllm"]),
    "ablation": (ENGINE, ["vllm"]),
    "disaggregation": (ENGINE, ["vllm"]),
    "layers": (ENGINE, ["vllm"]),
    "auto": (ENGINE, ["vllm"]),
    "decide": (ENGINE, ["vllm"]),
    "queue": (ENGINE, ["vllm"]),
    "oversubscription": (ENGINE, ["vllm"]),
    "control": (ENGINE, ["vllm", "redis"]),
    "fetch": (TRANSFER, ["redis"]),
    "link": (TRANSFER, ["redis"]),
    "lmcache": (TRANSFER, ["redis"]),
    "tiers": (TRANSFER, []),
    "pages": (TRANSFER, ["torch"]),
    "nodes": (TRANSFER, []),
    "storage": (TRANSFER, ["redis"]),
    "commands": (TRANSFER, []),
    "events": (TRANSFER, ["zmq", "msgspec"]),
    "aggregate": (TRANSFER, ["redis"]),
    "schedule": (TRANSFER, []),
    "memory": (TRANSFER, []),
    "isolation": (TRANSFER, []),
    "pool": (KERNELS, []),
    "recovery": (KERNELS, []),
    "index": (KERNELS, []),
    "pipeline": (KERNELS, []),
    "stages": (KERNELS, ["redis"]),
    "codecs": (KERNELS, []),
    "gpu": (KERNELS, []),
    "quality": (KERNELS, ["torch", "transformers"]),
}
"""For each benchmark what it runs, and the packages that it imports late."""
NEEDS: Final = {name: packages for name, (_, packages) in BENCHES.items() if packages}
"""Packages are checked before minutes are spent on measuring."""


class _Benchmarks(LazyGroup):
    """Lists the benchmarks by what they run."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for kind in (ENGINE, TRANSFER, KERNELS):
            with formatter.section(kind):
                names = [name for name, (its, _) in BENCHES.items() if its == kind]
                commands = {name: self.get_command(ctx, name) for name in names}
                formatter.write_dl([(name, each.get_short_help_str(90)) for name, each in commands.items() if each])


@click.group(cls=_Benchmarks, modules={name: f"shadowserve_tools.bench.{name}:{name}" for name in BENCHES}, needs=NEEDS)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure ShadowServe against a peer or a limit in the same run."""
    # SIGTERM unwinds the stack like Ctrl-C, which also ends the programs that the benchmark has started.
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
