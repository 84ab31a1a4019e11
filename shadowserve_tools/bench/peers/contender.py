"""Measured systems: each brings chunks from its store into memory of its client, and all take turns."""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from shadowserve_tools.report import Cost, Report, cpus, in_turns, measure, walls

Costs = dict[str, list[Cost]]
"""The costs of each system, by its name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A way to bring the leading chunks of a workload from its store into memory.

    Attributes:
        kind: ``ours``; ``raw``, a peer that moves uncompressed values; ``compressing``, any other peer; ``limit``,
            no system but a bound of all.
        fetch: Brings this number of leading chunks and returns when all are in memory.
        clear: Overwrites the memory, and empties caches on the way to it.
        verify: Raises ShadowServeError unless the memory has this number of leading chunks.
        processes: All processes that take part, without this one.
    """

    name: str
    kind: Literal["ours", "raw", "compressing", "limit"]
    fetch: Callable[[int], None]
    clear: Callable[[], None]
    verify: Callable[[int], None]
    processes: Sequence[psutil.Process] = ()
    note: str = ""

    def run(self, count: int) -> Cost:
        """Fetch ``count`` chunks into cleared memory; return the cost, without clearing and verifying."""
        self.clear()
        cost = measure(lambda: self.fetch(count), self.processes)
        self.verify(count)
        return cost


@dataclass
class Field:
    """Systems that take turns with the same chunks; ``absent`` has the reason of each that does not run, by name."""

    contenders: list[Contender] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def measure(self, repeats: int, count: int, description: str = "measuring", **more: Callable[[], Cost]) -> Costs:
        """Let all fetch ``count`` chunks in turns with each other and with ``more``."""
        runs = {each.name: functools.partial(each.run, count) for each in self.contenders}
        return in_turns(repeats, runs | more, description)

    def best(self, costs: Costs, kind: str, figures: Callable[[list[Cost]], list[float]]) -> str:
        """Return the name of the system of a kind with the lowest median of a figure."""
        names = [each.name for each in self.contenders if each.kind == kind]
        return min(names, key=lambda name: statistics.median(figures(costs[name])))

    def add_rows(self, report: Report, costs: Costs, raw_bytes: int) -> None:
        for each in self.contenders:
            add_row(report, raw_bytes, costs[each.name], system=each.name, note=each.note)
        for name, reason in self.absent.items():
            report.row(system=name, note=reason)


def add_row(report: Report, raw_bytes: int, costs: list[Cost], **columns: Any) -> None:
    """Add a row with the medians of a system's runs."""
    wall_s, cpu_s = statistics.median(walls(costs)), statistics.median(cpus(costs))
    speed, each = raw_bytes / wall_s / 1e9, cpu_s / raw_bytes * 1e9
    report.row(GB_per_s=speed, cpu_s_per_GB=each, wall_s=wall_s, runs=len(costs), **columns)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
