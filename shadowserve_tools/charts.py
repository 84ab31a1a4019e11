"""Charts of benchmarks and simulations: what they show, as data, and how they are drawn, as PNG or SVG.

Matplotlib is an optional dependency, imported only when something is drawn. The same data gives the same SVG byte for
byte: no date, ids from a fixed salt, text kept as text. The background is white, so that a dark page shows the same
picture. The colours are those of Okabe and Ito, which colour-blind readers can tell apart; each series also has its own
marker.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from shadowserve.errors import ShadowServeError

Point = tuple[float | str, float]
"""Position along x, and the value. The position is the name of a group where the chart has bars."""

COLOURS: Final = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B", "#4D4D4D", "#8A9A00",
)  # fmt: skip
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "<")
FAINT: Final = "#707070"
OTHERS: Final = "#9DB4C4"
STYLE: Final[dict[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # is part of matplotlib, so that text has the same size on every machine
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "shadowserve",
}
PANEL_INCHES: Final = (5.6, 3.9)
ALONE_INCHES: Final = 7.2
"""Width of a plot of one panel."""
TITLE_INCHES: Final = 0.3
COLUMNS_MAX: Final = 2
"""Panels in one row. More are too small to read in a page's width."""
BAR_INCHES: Final = 0.3
LEGEND_LINE_INCHES: Final = 0.18
LEGEND_CHARACTERS: Final = 60
"""Width of a panel's legend, in characters."""
DASHED: Final[dict[str, Any]] = {"color": FAINT, "linewidth": 1.1, "linestyle": (0, (5, 3))}


def three_digits(value: float) -> str:
    """Return a number as text: three digits, or all digits before the point from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


@dataclass
class Chart:
    """One panel of a plot.

    Attributes:
        title: Its message, in a few words. Empty where the plot's title says it.
        x: Label of the x axis, with its unit; with bars, the name of the groups.
        y: Label of the values, with their unit.
        series: Points of each label, in the order in which lines join them. The first series has the strongest colour.
        limits: Values that cannot or must not be passed, such as memcpy or a goal. Drawn as dashed lines.
        kind: ``"lines"`` joins the points of a series, ``"points"`` does not, ``"bars"`` draws a group of horizontal
            bars for each distinct x.
        x_log: Logarithmic x axis.
        y_log: Logarithmic axis of the values.
        highlight: Groups of bars in the strong colour, if there is one series. All, if empty.
        dots: Labels of series that are not joined although the chart has lines, such as single measurements.
        errors: Lowest and highest value of each point, by label. Drawn as error bars.
    """

    title: str
    _: dataclasses.KW_ONLY
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    limits: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["lines", "points", "bars"] = "lines"
    x_log: bool = False
    y_log: bool = False
    highlight: Sequence[str] = ()
    dots: Sequence[str] = ()
    errors: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return the chart for JSON. ``Chart(**data)`` is the chart again."""
        return dataclasses.asdict(self)


def require_matplotlib() -> None:
    """Raise ShadowServeError with installation instructions if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ShadowServeError(
            f"drawing needs matplotlib ({error}); run 'make setup', or pip install 'shadowserve[bench]'"
        ) from error


def draw(title: str, charts: Sequence[Chart], file: Path) -> None:
    """Draw charts, two in a row, as PNG or SVG by the file's name.

    Raises:
        ShadowServeError: matplotlib is missing, or there is no chart.
    """
    require_matplotlib()
    if not charts:
        raise ShadowServeError(f"{title} has no charts to draw")
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(charts), COLUMNS_MAX)
    heights = [max(map(_height, charts[first : first + columns])) for first in range(0, len(charts), columns)]
    width = PANEL_INCHES[0] * columns if columns > 1 else ALONE_INCHES
    with matplotlib.rc_context(STYLE):
        figure: Any = Figure(figsize=(width, sum(heights) + TITLE_INCHES * bool(title)), layout="constrained", dpi=144)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.03)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=11, weight="bold")
        # Each panel is a figure with its own layout, so that long labels of one do not shrink the panels around it.
        panels = figure.subfigures(len(heights), columns, height_ratios=heights, squeeze=False).flat
        for chart, panel in zip(charts, panels, strict=False):
            axes = panel.add_subplot()
            axes.set_title(chart.title)
            (_draw_bars if chart.kind == "bars" else _draw_lines)(chart, axes)
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1:
                panel.legend(handles, labels, loc="outside lower left", ncols=_legend_columns(labels))
        metadata = {"Date": None, "Creator": None} if file.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(file, metadata=metadata)


def _legend_columns(labels: Sequence[str]) -> int:
    return max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))


def _height(chart: Chart) -> float:
    """Return a panel's height in inches. Bars have the same thickness in every plot."""
    labels = [*chart.series, *chart.limits]
    legend = LEGEND_LINE_INCHES * -(-len(labels) // _legend_columns(labels)) if len(labels) > 1 else 0.0
    if chart.kind != "bars":
        return PANEL_INCHES[1] + legend
    groups = {x for points in chart.series.values() for x, _ in points}
    return 1.5 + legend + BAR_INCHES * (len(groups) * len(chart.series) + 0.4 * len(groups))


def _errors(chart: Chart, label: str) -> list[list[float]] | None:
    """Return the distances from each value to its lowest and its highest one, as matplotlib takes them."""
    if label not in chart.errors:
        return None
    pairs = list(zip(chart.series[label], chart.errors[label], strict=True))
    return [[value - low for (_, value), (low, _) in pairs], [high - value for (_, value), (_, high) in pairs]]


def _draw_lines(chart: Chart, axes: Any) -> None:
    for index, (label, points) in enumerate(chart.series.items()):
        joined = chart.kind == "lines" and label not in chart.dots
        axes.errorbar(
            [x for x, _ in points],
            [y for _, y in points],
            yerr=_errors(chart, label),
            label=label if points else None,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5 if joined else 8,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=(2.2 if index == 0 else 1.5) if joined else 0,
            elinewidth=1,
            capsize=3,
            zorder=5 if label in chart.dots else 4 if index == 0 else 3,
        )
    for label, value in chart.limits.items():
        axes.axhline(value, label=label, zorder=2, **DASHED)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(True, axis="y")
    if chart.y_log:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        values = [y for points in chart.series.values() for _, y in points]
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low) if min(values, default=0.0) < 0 else 0.0, high + 0.04 * abs(high))
    _scale_x(chart, axes)


def _scale_x(chart: Chart, axes: Any) -> None:
    xs = sorted({float(x) for points in chart.series.values() for x, _ in points})
    if chart.x_log:
        axes.set_xscale("log")
        if len(xs) <= 8:  # one tick for each point
            axes.set_xticks(xs, [f"{x:,g}" for x in xs], rotation=45 * (len(xs) > 6))
            axes.set_xticks([], minor=True)
    elif xs and xs[-1] >= 1e5:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")  # instead of a power of ten in the corner
        axes.locator_params(axis="x", nbins=6)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_bars(chart: Chart, axes: Any) -> None:
    """Draw horizontal bars with their values, a group for each x from top to bottom."""
    groups = list(dict.fromkeys(str(x) for points in chart.series.values() for x, _ in points))
    thickness = 0.8 / len(chart.series)
    one = len(chart.series) == 1
    for index, (label, points) in enumerate(chart.series.items()):
        rows = [groups.index(str(x)) - 0.4 + thickness * (index + 0.5) for x, _ in points]
        colour: Any = COLOURS[index % len(COLOURS)]
        if chart.highlight and one:
            colour = [COLOURS[0] if str(x) in chart.highlight else OTHERS for x, _ in points]
        bars = axes.barh(
            rows, [y for _, y in points], thickness * 0.88, color=colour, label=None if one else label,
            xerr=_errors(chart, label), error_kw={"elinewidth": 1, "capsize": 3}, zorder=2,
        )  # fmt: skip
        texts = [three_digits(y) for _, y in points]
        axes.bar_label(bars, texts, padding=3, fontsize=8, zorder=4, bbox={"facecolor": "white", "lw": 0, "pad": 0.8})
    for label, value in chart.limits.items():
        axes.axvline(value, label=label, zorder=3, **DASHED)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.y)
    axes.set_ylabel(chart.x)
    axes.grid(True, axis="x")
    if chart.y_log:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.margins(x=0.12)
