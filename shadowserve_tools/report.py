"""What every benchmark reports, and how: medians, ratios of pairs with their spread, charts, the machine they are from.

A benchmark is a click command under ``output_options``; it fills a ``Report`` and hands it the ``Output`` at the end.
"""

import functools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve_tools import provenance
from shadowserve_tools.charts import Chart, draw, require_matplotlib, three_digits

__all__ = [
    "INTERVAL_VALUES_MIN",
    "Chart",
    "Cost",
    "Output",
    "Report",
    "cpu_s",
    "half_width",
    "heading",
    "machine",
    "measure",
    "output_options",
    "outcome",
    "repeat",
    "tracked",
    "verdict",
]

Item = TypeVar("Item")
INTERVAL_VALUES_MIN: Final = 6
"""So many values say how far their median may be off; see :func:`half_width`."""
_FILE_WIDTH: Final = 200
"""Of a table that goes to a file or a pipe, at most, in characters."""


@dataclass(frozen=True)
class Output:
    """Where a result goes beside the terminal.

    Attributes:
        json_file: gets the result as data.
        plot_file: gets the charts; PNG or SVG by its name.
    """

    json_file: Path | None = None
    plot_file: Path | None = None


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--json`` and ``--plot``, and their values as its argument ``output``."""

    @click.option("--json", "json_file", type=_FILE, help="Write the result as data, too.")
    @click.option("--plot", "plot_file", type=_FILE, callback=_check_plot, help="Draw the result, as .png or .svg.")
    @functools.wraps(command)
    def with_output(*args: Any, json_file: Path | None, plot_file: Path | None, **options: Any) -> None:
        command(*args, output=Output(json_file, plot_file), **options)

    return with_output


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def _check_plot(_context: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuse what cannot be drawn before minutes of measuring."""
    if file is not None:
        if file.suffix.lower() not in (".png", ".svg"):
            raise click.BadParameter(f"{file} ends neither in .png nor in .svg")
        try:
            require_matplotlib()
        except ShadowServeError as error:
            raise click.BadParameter(str(error)) from error
    return file


@dataclass(frozen=True)
class Cost:
    """What one run took.

    Attributes:
        wall_s: seconds on the clock.
        cpu_s: CPU seconds, user and system, of all processes that took part.
    """

    wall_s: float
    cpu_s: float


def measure(run: Callable[[], object], processes: Iterable[psutil.Process] = ()) -> Cost:
    """Run something and return its cost: this process's CPU time, and that of the given ones."""
    parties = [psutil.Process(), *processes]
    cpu = sum(cpu_s(party) for party in parties)
    begin = time.perf_counter()
    run()
    wall = time.perf_counter() - begin
    return Cost(wall, sum(cpu_s(party) for party in parties) - cpu)


def cpu_s(process: psutil.Process) -> float:
    """Return CPU seconds of all threads, those that have ended included, in nanoseconds' grain.

    From the process's own CPU clock, whose number is what ``clock_getcpuclockid()`` makes of its id; the kernel's ticks
    in /proc are too coarse, and its nanoseconds there are of live threads, up to their last tick.
    """
    try:
        return time.clock_gettime(~process.pid << 3 | 2)
    except OSError as error:
        raise ShadowServeError(f"process {process.pid}, which is measured, has ended") from error


def repeat(count: int, *runs: Callable[[], Cost], description: str = "measuring") -> list[list[Cost]]:
    """Run all in turn, ``count`` times after one that warms up, so that pairs see the same machine; one list for each.

    Every other turn goes backwards, so that no run always follows the same one.
    """
    costs: list[list[Cost]] = [[] for _ in runs]
    for round_number in tracked(range(1 + count), description):
        for run, own in list(zip(runs, costs, strict=True))[:: -1 if round_number % 2 else 1]:
            cost = run()
            if round_number:
                own.append(cost)
    return costs


def tracked(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Yield the items under a progress bar, which is gone afterwards and is not shown where nobody watches."""
    return track(items, description, total, transient=True, disable=not Console().is_terminal)


@dataclass
class Report:
    """Rows, ratios and charts of one benchmark.

    Attributes:
        bench: its name.
        columns: keys of the rows, in the table's order; a unit comes last (``cpu_s_per_GB``).
        charts: drawn side by side.
        command: whose subcommand it is.
        more: what else belongs into the data.
    """

    bench: str
    columns: Sequence[str]
    charts: list[Chart] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    goals: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    command: str = "bench"
    more: dict[str, Any] = field(default_factory=dict)

    def row(self, **values: Any) -> None:
        self.rows.append(values)

    def ratio(self, name: str, pairs: Sequence[float], goal: str, limits: Sequence[float] = ()) -> None:
        """Add a ratio: the median of the pairs.

        Args:
            name: in the data.
            pairs: the ratio in each turn.
            goal: what it is to reach: "at least 3", "at most 0.9", "exactly 1", with more words behind if they help; or
                anything else for a ratio that is only reported.
            limits: what it would be in each turn, or in some, if all were free but what nobody can do without (a link's
                time, a device's), as measured in the same run. A goal beyond it is out of reach here.
        """
        self.ratios[name] = statistics.median(pairs)
        self.spread[name] = (min(pairs), max(pairs))
        self.goals[name] = goal
        if limits:
            self.limits[name] = statistics.median(limits)

    def data(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return {
            "bench": self.bench,
            **self._provenance(),
            "machine": machine(),
            "backend": _backend(),
            "columns": list(self.columns),
            "rows": self.rows,
            "ratios": self.ratios,
            "spread": self.spread,
            "goals": self.goals,
            "limits": self.limits,
            "charts": [chart.data() for chart in self.charts],
            **self.more,
        }

    def _provenance(self) -> dict[str, str | None]:
        if self.command != "bench":
            return {}
        return {"commit": provenance.commit(self.bench), "sources": provenance.digest(self.bench)}

    def finish(self, output: Output) -> None:
        """Print the table and the ratios; write data and draw the charts where ``output`` says."""
        console = Console()
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        console.print(self._table())
        for name, value in self.ratios.items():
            low, high = self.spread[name]
            colour = {True: "green", False: "red", None: "default"}[verdict(value, self.goals[name])]
            mark = f"[{colour}]{outcome(value, self.goals[name], self.limits.get(name))}[/]"
            spread = f"from {three_digits(low)} to {three_digits(high)}"
            console.print(f"{name}: {three_digits(value)} ({spread}; goal: {self.goals[name]}) {mark}", soft_wrap=True)
        if output.json_file:
            output.json_file.write_text(json.dumps(self.data(), indent=2) + "\n")
        if output.plot_file:
            draw(f"shadowserve {self.command} {self.bench}", self.charts, output.plot_file)

    def _table(self) -> Table:
        """Return the rows, without columns that none of them fills; headings are folded before figures are."""
        backend = f", {_backend()}" if _backend() != "software" else ""
        table = Table(title=f"{self.command} {self.bench}{backend}", title_justify="left", box=SIMPLE_HEAD, padding=0)
        filled = [name for name in self.columns if any(row.get(name, "") != "" for row in self.rows)]
        for name in filled:
            values = [row[name] for row in self.rows if row.get(name, "") != ""]
            figures = not any(isinstance(value, str) for value in values)
            width = max(map(len, map(_text, values))) if figures else None
            table.columns.append(
                Column(heading(name), min_width=width, justify="right" if figures else "left", overflow="fold")
            )
        for row in self.rows:
            table.add_row(*(_text(row.get(name, "")) for name in filled))
        return table


def half_width(values: Sequence[float]) -> float:
    """Return half of the median's interval of 95 % confidence, whatever their distribution is, by order statistics.

    Args:
        values: at least ``INTERVAL_VALUES_MIN``; fewer have no such interval.
    """
    ordered, below, left_out = sorted(values), 0.0, -1
    while (below := below + math.comb(len(ordered), left_out + 1) / 2 ** len(ordered)) <= 0.025:
        left_out += 1
    if left_out < 0:
        raise ValueError(f"{len(ordered)} values are too few for an interval")
    return (ordered[-1 - left_out] - ordered[left_out]) / 2


def heading(column: str) -> str:
    """Return a column's name as people write it: ``cpu_s_per_GB`` is cpu s/GB."""
    return column.replace("_per_", "/").replace("_", " ")


def verdict(value: float, goal: str) -> bool | None:
    """Return whether a ratio reached its goal; None where the goal is none."""
    found = re.match(r"(at least|at most|exactly) (\d+(?:\.\d+)?)\b", goal)
    if not found:
        return None
    wanted = float(found[2])
    return {"at least": value >= wanted, "at most": value <= wanted, "exactly": value == wanted}[found[1]]


def outcome(value: float, goal: str, limit: float | None) -> str:
    """Return what came of a goal, in words: reached; missed; or out of reach, where its own limit misses it, too."""
    reached = verdict(value, goal)
    if reached is None or reached or limit is None:
        return {True: "reached", False: "missed", None: ""}[reached]
    return f"{'missed' if verdict(limit, goal) else 'out of reach'}; limit {three_digits(limit)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return three_digits(value)
    return f"{value:,d}" if isinstance(value, int) else str(value)


def _backend() -> str:
    """Return what data planes work with that this process starts, which take what they are not told from here."""
    return native.backends()[DataPlaneConfig.load().backend].label


def machine() -> dict[str, Any]:
    """Return what a reader needs to know of the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "isa": native.isa_active().name.lower(),
        "codecs": {codec.name.lower(): name for codec, name in native.codec_implementations().items()},
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
