"""``shadowserve bench``: measurements that anyone can repeat, reported as ratios within one run.

A benchmark prints a table and, with ``--json``, writes ``{"bench", "machine", "rows", "ratios", ...}``; with ``--plot``
it draws its charts. Ratios are medians of pairs with their spread, since absolute figures of a shared machine say
little. docs/benchmarks/ keeps the figures.
"""

import importlib
import signal
import sys
import threading
from typing import Final

import click

__all__ = ["bench"]

BENCHES: Final = (
    "stages",
    "pipeline",
    "codecs",
    "storage",
    "commands",
    "index",
    "fetch",
    "link",
    "interference",
    "ablation",
    "control",
    "memory",
    "recovery",
    "pool",
    "isolation",
    "gpu",
)


class _Benches(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHES:
            return None
        command: click.Command = getattr(importlib.import_module(f"shadowserve.cli.bench.{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Benches)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure, against a peer or a limit in the same run."""
    # Whoever ends a benchmark ends what it has started, too: SIGTERM unwinds the stack as Ctrl-C does.
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))
