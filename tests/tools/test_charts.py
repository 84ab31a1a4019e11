"""Charts draw what they are given, the same way each time, as PNG and as SVG."""

import json
import re
import sys
from pathlib import Path

import pytest

from shadowserve.errors import ShadowServeError
from shadowserve_tools.charts import Chart, draw

STORED = Path(__file__).parents[2] / "docs" / "benchmarks"
LINES = Chart(
    "Lines over size",
    x="slice",
    y="GB/s",
    series={"ours": [(1 << 15, 9.0), (1 << 18, 12.0)], "theirs": [(1 << 15, 2.0), (1 << 18, 2.0001)], "none": []},
    limits={"memcpy": 14.0},
    x_log=True,
    x_bytes=True,
)
BARS = Chart(
    "Bars in groups",
    x="chunks",
    y="s",
    series={"alone": [("net", 1.0), ("decode", 2.0)], "together": [("net", 1.5)]},
    limits={"ideal": 2.0},
    kind="bars",
)
POINTS = Chart(
    "Points with names",
    x="bits",
    y="GB/s",
    series={"kvrans": [(3.97, 12.0)], "deflate": [(4.2, 3.0), (4.3, 3.1)]},
    kind="points",
    y_log=True,
)


@pytest.mark.parametrize("chart", [LINES, BARS, POINTS], ids=lambda chart: chart.kind)
def test_an_svg_has_every_label_as_text_and_is_the_same_each_time(tmp_path: Path, chart: Chart) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        draw("bench", [chart], file)
    text = files[0].read_text()
    assert text == files[1].read_text()
    assert len(text) < 40_000
    written = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    drawn = [label for label, points in chart.series.items() if points]
    assert {chart.title, *drawn, *chart.limits} <= set(written)


def test_ticks_of_bytes_have_units(tmp_path: Path) -> None:
    draw("bench", [LINES], tmp_path / "plot.svg")
    assert "32 KiB" in (tmp_path / "plot.svg").read_text()


def test_bars_are_labelled_with_numbers_that_people_read(tmp_path: Path) -> None:
    """Symptom: a bar of 1,577 ms was labelled '1.58e+03'."""
    values = {"a": 1577.3, "b": 999.7, "c": 999.4, "d": 12.345, "e": 0.01234, "f": 12_345_678.0}
    chart = Chart("Bars", x="", y="ms", series={"Bars": list(values.items())}, kind="bars")
    draw("bench", [chart], tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    written = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {"1,577", "1,000", "999", "12.3", "0.0123", "12,345,678"} <= set(written)
    assert "e+" not in "".join(written)


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.stem)
def test_every_row_of_ours_stands_out_beside_others(path: Path) -> None:
    """Symptom: our fastest row was drawn in the colour of the competitors'."""
    for chart in json.loads(path.read_text()).get("charts", []):
        names = {name for points in chart["series"].values() for name, _ in points if isinstance(name, str)}
        ours = {name for name in names if name.startswith("ShadowServe")}
        if chart.get("highlight") and ours != names:
            assert ours <= set(chart["highlight"]), chart["title"]


def test_a_png_holds_all_panels(tmp_path: Path) -> None:
    draw("bench", [LINES], tmp_path / "one.png")
    draw("bench", [LINES, LINES, POINTS], tmp_path / "three.png")
    draw("bench", [LINES, LINES, POINTS, LINES], tmp_path / "four.png")
    sizes = [(tmp_path / f"{name}.png").read_bytes()[16:24] for name in ("one", "three", "four")]
    one, three, four = [(int.from_bytes(each[:4]), int.from_bytes(each[4:])) for each in sizes]
    assert three == four == pytest.approx((2 * one[0], 2 * one[1]), abs=3)  # two by two: a strip is too small to read


LEGEND = [f"a label of series {number}" for number in range(5)]
LEGENDS = [
    Chart(f"Panel {each}", x="x", y="s", series={label: [("a", 1.0)] for label in LEGEND}, kind="bars")
    for each in (1, 2)
]


@pytest.mark.parametrize("charts", [LEGENDS, LEGENDS[:1], [LINES, LEGENDS[0]]], ids=["shared", "one", "beside lines"])
def test_a_legend_is_within_the_picture_and_told_once(tmp_path: Path, charts: list[Chart]) -> None:
    """In docs/benchmarks/storage.svg the last label was cut off at the edge."""
    draw("bench", charts, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    (width, height) = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
    for label in LEGEND:
        ((size, x, y),) = re.findall(
            rf'<text style="font-size: ([\d.]+)px[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>{label}<', text
        )
        assert 0 <= float(x) and float(x) + 0.65 * float(size) * len(label) <= width
        assert float(size) <= float(y) <= height


@pytest.mark.parametrize("chart", [BARS, POINTS], ids=lambda chart: chart.kind)
def test_no_line_runs_through_a_label(tmp_path: Path, chart: Chart) -> None:
    draw("bench", [chart], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    labels = ["1", "2", "1.5"] if chart is BARS else list(chart.series)
    cleared = re.findall(r'style="fill: #ffffff"/>\s*</g>\s*<text[^>]*>([^<]*)</text>', text)
    assert sorted(cleared) == sorted(labels)
    assert (
        text.rindex("stroke-dasharray") < text.index('style="fill: #ffffff"/>\n     </g>\n     <text')
        if chart is BARS
        else True
    )


@pytest.mark.parametrize("chart", [LINES, BARS, POINTS], ids=lambda chart: chart.kind)
def test_a_chart_survives_as_data(tmp_path: Path, chart: Chart) -> None:
    again = Chart(**json.loads(json.dumps(chart.data())))
    draw("bench", [chart], tmp_path / "chart.svg")
    draw("bench", [again], tmp_path / "again.svg")
    assert (tmp_path / "chart.svg").read_text() == (tmp_path / "again.svg").read_text()


def test_labels_of_equal_values_do_not_cover_each_other(tmp_path: Path) -> None:
    series = {name: [(0.0, 1.0), (1.0, 1.0)] for name in ("first", "second", "third")}
    draw("bench", [Chart("Equal", x="x", y="y", series=series)], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    places = [re.search(rf'<text[^>]* y="([\d.]+)"[^>]*>{name}<', text) for name in series]
    heights = sorted(float(place[1]) for place in places if place)
    assert len(heights) == 3 and all(b - a > 9 for a, b in zip(heights, heights[1:], strict=False))


def test_dots_are_drawn_and_not_joined(tmp_path: Path) -> None:
    series = {"model": [(0.0, 1.0), (1.0, 2.0)], "measured": [(0.0, 1.5), (1.0, 1.5)]}
    joins = []
    for dots in ((), ("measured",)):
        draw("bench", [Chart("Few", x="x", y="y", series=series, dots=dots)], tmp_path / "plot.svg")
        text = (tmp_path / "plot.svg").read_text()
        assert "measured" in text
        joins.append(len(re.findall(r"stroke: #d55e00; stroke-width: 1.5", text)))
    assert joins == [1, 0]


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShadowServeError, match="no charts"):
        draw("bench", [], tmp_path / "plot.svg")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ShadowServeError, match=r"shadowserve\[bench\]"):
        draw("bench", [LINES], tmp_path / "plot.svg")
