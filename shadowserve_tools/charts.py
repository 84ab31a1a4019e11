"""Charts of benchmarks: what they show, as data, and how they are drawn, as PNG or SVG.

Drawn with matplotlib, which is an optional dependency and imported only when something is drawn. The same data gives
the same SVG byte for byte: no date, ids from a fixed salt, text kept as text. The background is white, so that a reader
of a dark page sees the same picture; the colours are Okabe and Ito's, which colour-blind readers can tell apart, and
each series has its own marker beside.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from shadowserve.errors import ShadowServeError

__all__ = ["Chart", "Point", "draw", "require_matplotlib", "three_digits"]

Point = tuple[float | str, float]
"""Where along x, and the value; x is the name of a group where the chart has bars."""

COLOURS: Final = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B", "#4D4D4D", "#8A9A00",
)  # fmt: skip
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "<")
INK: Final = "#222222"
FAINT: Final = "#707070"
STYLE: Final[dict[str, Any]] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that every machine measures text alike
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "shadowserve",
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}
OTHERS: Final = "#9DB4C4"
PANEL_INCHES: Final = (5.6, 3.9)
COLUMNS_MAX: Final = 2
"""Panels side by side: more are too small to read in a page's width."""
BAR_INCHES: Final = 0.3
LEGEND_INCHES: Final = 0.5
"""Height of a legend of two lines, and from an axis to the legend below its label."""
YLABEL_INCHES: Final = 1.2
CHARACTER_INCHES: Final = 0.075
"""Width of a legend's character, generously; and of all that stands around its text."""
HANDLE_INCHES: Final = 0.6
CLEAR: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""The background of labels among lines, which would run through the text."""
LABEL_POINTS: Final = 11.0
"""Height of a line of label text, with its gap, in points."""


def three_digits(value: float) -> str:
    """Return a number as people write it: three digits, and from 1,000 on all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


@dataclass
class Chart:
    """One panel of a benchmark's plot.

    Attributes:
        title: what it shows, in a few words.
        x: what lies along x, with its unit; the groups' name where the chart has bars.
        y: what the values are, with their unit.
        series: points of each label, in the order in which they are joined. Ours first: it has the strongest colour.
        limits: values that cannot or must not be passed, such as memcpy or a goal; drawn as dashed lines.
        kind: ``"lines"`` joins the points of a series, ``"points"`` does not and labels each series beside its first
            point, ``"bars"`` draws a group of bars for each distinct x.
        x_log: powers of two or ten along x.
        y_log: powers of ten along y; the values of bars then.
        x_bytes: x counts bytes; ticks say KiB and MiB.
        highlight: the groups of bars that stand out, where there is one series: ours beside others'. All, if empty.
        dots: the series among lines that are points which nothing joins, such as somebody's few measurements.
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
    x_bytes: bool = False
    highlight: Sequence[str] = ()
    dots: Sequence[str] = ()

    def data(self) -> dict[str, Any]:
        """Return the chart as JSON takes it; ``Chart(**data)`` is the chart again."""
        return dataclasses.asdict(self)


def require_matplotlib() -> None:
    """Raise ShadowServeError, saying how to install it, unless matplotlib is there."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ShadowServeError(
            f"drawing needs matplotlib ({error}); run 'make setup', or pip install 'shadowserve[bench]'"
        ) from error


def draw(title: str, charts: Sequence[Chart], file: Path) -> None:
    """Draw charts, two side by side, into ``file``, a PNG or an SVG by its name.

    Raises:
        ShadowServeError: matplotlib is missing, or there is nothing to draw.
    """
    require_matplotlib()
    if not charts:
        raise ShadowServeError(f"{title} has no charts to draw")
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(len(charts), COLUMNS_MAX)
    heights = [max(map(_height, charts[first : first + columns])) for first in range(0, len(charts), columns)]
    shared = _shared_legend(charts)
    size = (PANEL_INCHES[0] * columns, sum(heights) + LEGEND_INCHES * bool(shared))
    with matplotlib.rc_context(STYLE):
        figure: Any = Figure(figsize=size, layout="constrained", dpi=144)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.03)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11, color=FAINT)
        # Each panel has a layout of its own: one's long labels take no room from those above and below it.
        parts = figure.subfigures(len(heights), columns, height_ratios=heights, squeeze=False).flat
        drawn = [(chart, part.add_subplot()) for chart, part in zip(charts, parts, strict=False)]
        for chart, axes in drawn:
            _draw_panel(chart, axes)
            if len(chart.series) > 1 and chart.kind == "bars" and not shared:
                _legend(axes, list(chart.series), PANEL_INCHES[0] - YLABEL_INCHES, below=axes)
        if shared:
            _legend(figure, shared, size[0], below=None, handles=drawn[0][1].get_legend_handles_labels()[0])
        figure.draw_without_rendering()  # places the axes, which labels need to know
        for chart, axes in drawn:
            _label_panel(chart, axes)
        metadata = {"Date": None, "Creator": None} if file.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(file, metadata=metadata)


def _shared_legend(charts: Sequence[Chart]) -> list[str]:
    """Return the labels of one legend for all panels: bars of the same series; else none."""
    kinds = {(chart.kind, *chart.series) for chart in charts}
    (kind, *labels), *others = kinds
    return labels if kind == "bars" and len(labels) > 1 and not others else []


def _legend(where: Any, labels: Sequence[str], inches: float, *, below: Any, handles: Any = None) -> None:
    """Write a legend of as many columns as ``inches`` hold: a panel's, ``below`` its axis, or the figure's."""
    from matplotlib.transforms import ScaledTranslation

    widest = max(map(len, labels)) * CHARACTER_INCHES + HANDLE_INCHES
    options: dict[str, Any] = {"ncols": max(1, min(len(labels), int(inches / widest)))}
    if below is None:
        where.legend(handles, labels, loc="outside lower left", **options)
        return
    lower = below.transAxes + ScaledTranslation(0, -LEGEND_INCHES, below.figure.dpi_scale_trans)
    where.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=lower, **options)


def _height(chart: Chart) -> float:
    """Return a panel's height in inches: bars of one thickness in every plot, and a golden view of anything else."""
    if chart.kind != "bars":
        return PANEL_INCHES[1]
    groups = {x for points in chart.series.values() for x, _ in points}
    return 1.5 + BAR_INCHES * (len(groups) * len(chart.series) + 0.4 * len(groups))


def _draw_panel(chart: Chart, axes: Any) -> None:
    labelled_above = chart.kind == "bars" and chart.limits
    axes.set_title(chart.title, pad=18 if labelled_above else 8)
    if chart.kind == "bars":
        _draw_bars(chart, axes)
        return
    for index, (label, points) in enumerate(chart.series.items()):
        joined = chart.kind == "lines" and label not in chart.dots
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5 if joined else 8,
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
            "linewidth": (2.2 if index == 0 else 1.5) if joined else 0,
            "zorder": 5 if label in chart.dots else 4 if index == 0 else 3,
        }
        axes.plot([x for x, _ in points], [y for _, y in points], **style)
    for value in chart.limits.values():
        axes.axhline(value, color=FAINT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=2)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(True, axis="y")
    if chart.kind == "points":
        axes.margins(0.09)
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
        axes.set_xscale("log", base=2 if chart.x_bytes else 10)
        if len(xs) <= 8:  # each point's own place
            axes.set_xticks(xs, [_bytes(x) if chart.x_bytes else f"{x:,g}" for x in xs])
            axes.set_xticks([], minor=True)
            return
    if chart.x_bytes:
        axes.xaxis.set_major_formatter(lambda x, _: _bytes(x))
    elif not chart.x_log and xs and xs[-1] >= 1e5:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")  # instead of a power of ten in the corner
        axes.locator_params(axis="x", nbins=6)


def _plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _bytes(count: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count:g} B"


def _draw_bars(chart: Chart, axes: Any) -> None:
    """Draw bars that grow to the right, a group for each x from top to bottom, each with its value."""
    groups = list(dict.fromkeys(str(x) for points in chart.series.values() for x, _ in points))
    thickness = 0.8 / len(chart.series)
    for index, (label, points) in enumerate(chart.series.items()):
        places = [groups.index(str(x)) - 0.4 + thickness * (index + 0.5) for x, _ in points]
        colour: Any = COLOURS[index % len(COLOURS)]
        if chart.highlight and len(chart.series) == 1:
            colour = [COLOURS[0] if str(x) in chart.highlight else OTHERS for x, _ in points]
        bars = axes.barh(places, [y for _, y in points], thickness * 0.88, color=colour, label=label, zorder=2)
        axes.bar_label(bars, [three_digits(y) for _, y in points], padding=3, fontsize=8, bbox=CLEAR, zorder=4)
    for value in chart.limits.values():
        axes.axvline(value, color=FAINT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=3)
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


def _label_panel(chart: Chart, axes: Any) -> None:
    """Name lines and points where they are, so that no reader has to look up a legend."""
    if chart.kind == "bars":
        for label, value in chart.limits.items():
            axes.annotate(
                label, (value, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", color=FAINT, fontsize=8,
            )  # fmt: skip
        return
    if chart.kind == "points":
        _label_points(chart, axes)
    entries = [(label, value, FAINT) for label, value in chart.limits.items()]
    if chart.kind == "lines":
        for index, (label, points) in enumerate(chart.series.items()):
            if points:
                entries.append((label, points[-1][1], COLOURS[index % len(COLOURS)]))
    _label_edge(axes, entries)


def _label_edge(axes: Any, entries: Sequence[tuple[str, float, str]]) -> None:
    """Write labels beside the right edge, each as near to its value as its neighbours let it be."""
    to_points = 72 / axes.figure.dpi
    heights = [axes.transData.transform((1, value))[1] * to_points for _, value, _ in entries]
    top = axes.bbox.y1 * to_points
    for (label, value, colour), height, placed in zip(entries, heights, _spread(heights, top), strict=True):
        axes.annotate(
            label, (1, value), xycoords=("axes fraction", "data"), xytext=(7, placed - height),
            textcoords="offset points", va="center", color=colour, fontsize=8, annotation_clip=False,
        )  # fmt: skip


def _spread(heights: Sequence[float], top: float) -> list[float]:
    """Return the heights moved apart to a line of text each, at most as high as ``top``, in their order."""
    placed = [0.0] * len(heights)
    ceiling = top + LABEL_POINTS
    for index in sorted(range(len(heights)), key=lambda index: -heights[index]):
        placed[index] = ceiling = min(heights[index], ceiling - LABEL_POINTS)
    # What was pushed down as one block goes up again by half of what its last has moved.
    order = sorted(range(len(heights)), key=lambda index: -placed[index])
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and placed[order[last]] - placed[order[last + 1]] < LABEL_POINTS + 1e-6:
            last += 1
        moved = max(heights[index] - placed[index] for index in order[first : last + 1])
        above = placed[order[first - 1]] - LABEL_POINTS if first else top
        shift = min(moved / 2, max(0.0, above - placed[order[first]]))
        for index in order[first : last + 1]:
            placed[index] += shift
        first = last + 1
    return placed


def _label_points(chart: Chart, axes: Any) -> None:
    """Write each series' label beside its first point, on the side where it covers least."""
    places = (
        (8, 0, "left", "center"),
        (-8, 0, "right", "center"),
        (0, 9, "center", "bottom"),
        (0, -9, "center", "top"),
        (6, 6, "left", "bottom"),
        (6, -6, "left", "top"),
        (-6, 6, "right", "bottom"),
        (-6, -6, "right", "top"),
    )
    lines = [axes.transData.transform((1, value))[1] for value in chart.limits.values()]
    renderer = axes.figure.canvas.get_renderer() if hasattr(axes.figure.canvas, "get_renderer") else None
    taken = [
        axes.transData.transform((x, y)) + offset
        for points in chart.series.values()
        for x, y in points
        for offset in ((-4, -4), (4, 4), (0, 0))
    ]
    boxes: list[Any] = []
    for index, (label, points) in enumerate(chart.series.items()):
        if not points:
            continue
        best: tuple[int, Any, Any] | None = None
        for right, up, horizontal, vertical in places:
            text = axes.annotate(
                label, points[0], xytext=(right, up), textcoords="offset points", ha=horizontal, va=vertical,
                color=COLOURS[index % len(COLOURS)], fontsize=8, annotation_clip=False, bbox=CLEAR, zorder=2.5,
            )  # fmt: skip
            box = text.get_window_extent(renderer)
            cost = sum(box.contains(*place) for place in taken) + 6 * sum(box.overlaps(other) for other in boxes)
            cost += 2 * sum(box.y0 <= line <= box.y1 for line in lines)
            cost += 4 * (box.x1 > axes.bbox.x1 or box.x0 < axes.bbox.x0 + 6 or box.y1 > axes.bbox.y1)
            if best is None or cost < best[0]:
                if best:
                    best[1].remove()
                best = (cost, text, box)
            else:
                text.remove()
        if best:
            boxes.append(best[2])
