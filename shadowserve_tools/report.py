"""Report of a benchmark: medians, ratios of pairs with their spread, charts, machine and commit.

A benchmark is a click command with ``output_options``. It fills a ``Report`` and passes the ``Output`` to ``finish``.
"""

import functools
import gc
import hashlib
import inspect
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shadowserve_tools.charts import Chart, draw, require_matplotlib, three_digits

Item = TypeVar("Item")
Name = TypeVar("Name")
INTERVAL_VALUES_MIN: Final = 6
"""Number of values from which on :func:`half_width` is defined."""
_FILE_WIDTH: Final = 200
"""Largest width of a table in a file or a pipe, in characters."""
_REPOSITORY: Final = Path(__file__).resolve().parents[1]
_PACKAGES: Final = ("shadowserve", "storage_kv", "dpu_dataplane", "host_control", "shadowserve_tools", "native/src")


@dataclass(frozen=True)
class Output:
    """Files that a result is written to: as data, and as charts (PNG or SVG by the file's name)."""

    json_file: Path | None = None
    plot_file: Path | None = None


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--json`` and ``--plot`` to a command, as its argument ``output``; and ``--explain`` to a benchmark."""

    @click.option("--json", "json_file", type=_FILE, help="Write the result as JSON.")
    @click.option("--plot", "plot_file", type=_FILE, callback=_check_plot, help="Draw the result as .png or .svg.")
    @functools.wraps(command)
    def with_output(*args: Any, json_file: Path | None, plot_file: Path | None, **options: Any) -> None:
        command(*args, output=Output(json_file, plot_file), **options)

    if command.__module__.startswith("shadowserve_tools.bench."):
        with_output = click.option(
            "--explain", is_flag=True, is_eager=True, expose_value=False, callback=_explain,
            help="Print the method and the prediction, and measure nothing.",
        )(with_output)  # fmt: skip
    return with_output


def _explain(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Print the docstring of the benchmark's module, which has the method and the prediction."""
    if wanted:
        assert context.command.callback is not None
        click.echo(inspect.getdoc(sys.modules[context.command.callback.__module__]))
        context.exit()


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def _check_plot(_context: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a plot that cannot be drawn before minutes are spent on measuring."""
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
    """Cost of one run: elapsed time, and CPU time (user and system) of all processes that took part."""

    wall_s: float
    cpu_s: float


def measure(run: Callable[[], object], processes: Iterable[psutil.Process] = ()) -> Cost:
    """Call ``run`` and return its cost: the CPU time is that of this process and of the given ones."""
    parties = [psutil.Process(), *processes]
    before_s = sum(map(cpu_s, parties))
    wall_s = timed(run)
    return Cost(wall_s, sum(map(cpu_s, parties)) - before_s)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call, elapsed or by another clock."""
    begin_s = clock()
    run()
    return clock() - begin_s


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of all threads, ended ones included, with a resolution of nanoseconds.

    It is the process's CPU clock, whose number ``clock_getcpuclockid()`` computes from the process id. The values in
    /proc are ticks, which are too coarse, or count live threads only. The kernel adds the time of a thread that runs in
    another process at its next tick or when it stops, so a run of less than 4 ms may seem to take none.
    """
    try:
        return time.clock_gettime(~process.pid << 3 | 2)
    except OSError as error:
        raise ShadowServeError(f"process {process.pid} has ended while it was measured; its log says why") from error


def resident_bytes() -> int:
    """Return the resident size of this process without garbage."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def repeat(count: int, *runs: Callable[[], Item], description: str = "measuring", warm_up: int = 1) -> list[list[Item]]:
    """Interleave runs: all of them ``count`` times, after turns of warm-up, every second turn in reverse order.

    Pairs of the same turn see the same state of the machine, and no run always follows the same other one. Return the
    results of each run, without those of the warm-up.
    """
    results: list[list[Item]] = [[] for _ in runs]
    for turn in tracked(range(warm_up + count), description):
        for run, own in list(zip(runs, results, strict=True))[:: -1 if turn % 2 else 1]:
            result = run()
            if turn >= warm_up:
                own.append(result)
    return results


def in_turns(
    count: int, runs: Mapping[Name, Callable[[], Item]], description: str = "measuring", warm_up: int = 1
) -> dict[Name, list[Item]]:
    """Interleave runs that have names, as :func:`repeat` does."""
    return dict(zip(runs, repeat(count, *runs.values(), description=description, warm_up=warm_up), strict=True))


def over(own: Iterable[float], others: Iterable[float]) -> list[float]:
    """Return the quotients of pairs."""
    return [mine / its for mine, its in zip(own, others, strict=True)]


def walls(costs: Iterable[Cost]) -> list[float]:
    """Return the elapsed time of each run."""
    return [cost.wall_s for cost in costs]


def cpus(costs: Iterable[Cost]) -> list[float]:
    """Return the CPU time of each run."""
    return [cost.cpu_s for cost in costs]


def tracked(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Yield the items with a progress bar on a terminal."""
    return track(items, description, total, transient=True, disable=not Console().is_terminal)


@dataclass
class Report:
    """Rows, ratios and charts of one benchmark.

    Attributes:
        columns: Keys of the rows, in the table's order. A unit comes last, as in ``cpu_s_per_GB``.
        bars: Columns that the plot shows as bars, a panel for each; ``charts`` are further panels.
    """

    bench: str
    columns: Sequence[str]
    bars: Sequence[str] = ()
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
        """Add a ratio: the median of the pairs, one for each turn.

        Args:
            goal: "at least 3", "at most 0.9" or "exactly 1", with more words behind it if they help. Any other text
                marks a ratio that has no goal.
            limits: The ratio in each turn if only the unavoidable part took time (the link, the device), as measured in
                the same run. A goal beyond the limit is out of reach on this machine.
        """
        self.ratios[name] = statistics.median(pairs)
        self.spread[name] = (min(pairs), max(pairs))
        self.goals[name] = goal
        if limits:
            self.limits[name] = statistics.median(limits)

    def interval(
        self, name: str, pairs: Sequence[float], goal: str, most: float | None = None, limits: Sequence[float] = ()
    ) -> None:
        """Add a ratio, and the half width of its confidence interval, which may be ``most``; None for no goal."""
        self.ratio(name, pairs, goal, limits)
        wanted = "none" if most is None else f"at most {most:g}; 95 % confidence"
        self.ratio(f"{name}_half_width", [half_width(pairs)], wanted)

    def data(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "bench": self.bench,
            **provenance(),
            "machine": machine(),
            "backend": _backend(),
            "columns": list(self.columns),
            "rows": self.rows,
            "ratios": self.ratios,
            "spread": self.spread,
            "goals": self.goals,
            "limits": self.limits,
            "charts": [chart.data() for chart in self._panels()],
            **self.more,
        }

    def finish(self, output: Output) -> None:
        """Print the table and the ratios; write the data and the plot to the files of ``output``."""
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
            draw(f"shadowserve {self.command} {self.bench}", self._panels(), output.plot_file)

    def _panels(self) -> list[Chart]:
        measured = [column for column in self.bars if any(column in row for row in self.rows)]
        return [*map(self._bar_chart, measured), *self.charts]

    def _bar_chart(self, column: str) -> Chart:
        """Return a bar for each row. Its label is the row's values up to the last column with text."""
        texts = {
            name for name in self.columns for row in self.rows if name != "note" and isinstance(row.get(name), str)
        }
        last = max((index for index, name in enumerate(self.columns) if name in texts), default=0)
        names = [name for name in self.columns[: last + 1] if name not in self.bars]
        points = [
            (", ".join(_text(row[name]) for name in names if row.get(name, "") != ""), float(row[column]))
            for row in self.rows
            if row.get(column, "") != ""
        ]
        ours = [label for label, _ in points if "shadowserve" in label.lower()]
        return Chart(heading(column), x="", y=heading(column), series={column: points}, kind="bars", highlight=ours)

    def _table(self) -> Table:
        """Return the rows as a table, without empty columns. Headings wrap before numbers do."""
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
    """Return half the width of the median's 95 % confidence interval, by order statistics.

    The values, at least ``INTERVAL_VALUES_MIN``, may have any distribution.
    """
    ordered, below, left_out = sorted(values), 0.0, -1
    while (below := below + math.comb(len(ordered), left_out + 1) / 2 ** len(ordered)) <= 0.025:
        left_out += 1
    if left_out < 0:
        raise ValueError(f"{len(ordered)} values are too few for an interval")
    return (ordered[-1 - left_out] - ordered[left_out]) / 2


def heading(column: str) -> str:
    """Return a column's heading: ``cpu_s_per_GB`` becomes cpu s/GB."""
    return column.replace("_per_", "/").replace("_", " ")


def verdict(value: float, goal: str) -> bool | None:
    """Return True if a ratio reached its goal, None if it has no goal."""
    found = re.match(r"(at least|at most|exactly) (\d+(?:\.\d+)?)\b", goal)
    if not found:
        return None
    wanted = float(found[2])
    return {"at least": value >= wanted, "at most": value <= wanted, "exactly": value == wanted}[found[1]]


def outcome(value: float, goal: str, limit: float | None) -> str:
    """Return "reached", "missed", or "out of reach" if the limit misses the goal, too; "" without a goal."""
    reached = verdict(value, goal)
    if reached is None or reached or limit is None:
        return {True: "reached", False: "missed", None: ""}[reached]
    return f"{'missed' if verdict(limit, goal) else 'out of reach'}; limit {three_digits(limit)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return three_digits(value)
    return f"{value:,d}" if isinstance(value, int) else str(value)


def _backend() -> str:
    return native.backends()[DataPlaneConfig.load().backend].label


def provenance() -> dict[str, str | None]:
    """Return the commit, with ``+`` if files differ from it (None without a checkout), and a digest of the code."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted(_REPOSITORY.joinpath(package).rglob("*.[pch]*")):
            if file.suffix in (".py", ".c", ".h"):
                digest.update(file.read_bytes())
    return {"commit": _commit(), "sources": digest.hexdigest()[:16]}


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "--", *_PACKAGES))
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Return processor, memory, versions and the implementation of each codec."""
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
