"""Charts show all of their data as text and marks, the same way each time, as PNG and as SVG."""

import json
import re
import sys
from pathlib import Path

import pytest

from shadowserve.errors import ShadowServeError
from shadowserve_tools.charts import Chart, draw

LINES = Chart(
    "Lines over size",
    x="slice",
    y="GB/s",
    series={"ours": [(1 << 15, 9.0), (1 << 18, 12.0)], "theirs": [(1 << 15, 2.0), (1 << 18, 2.0001)], "none": []},
    limits={"memcpy": 14.0},
    errors={"ours": [(8.0, 9.5), (11.0, 13.0)]},
    x_log=True,
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


def texts(charts: list[Chart], file: Path) -> list[str]:
    draw("bench", charts, file)
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())


@pytest.mark.parametrize("chart", [LINES, BARS, POINTS], ids=lambda chart: chart.kind)
def test_an_svg_has_every_label_as_text_and_is_the_same_each_time_and_from_stored_data(
    tmp_path: Path, chart: Chart
) -> None:
    written = texts([chart], tmp_path / "one.svg")
    drawn = [label for label, points in chart.series.items() if points]
    assert {chart.title, *drawn, *chart.limits} <= set(written) and "none" not in written
    texts([Chart(**json.loads(json.dumps(chart.data())))], tmp_path / "again.svg")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "again.svg").read_text()


def test_a_logarithmic_axis_has_a_tick_for_each_point(tmp_path: Path) -> None:
    assert {"32,768", "262,144"} <= set(texts([LINES], tmp_path / "plot.svg"))


def test_bars_are_labelled_with_three_digits_and_never_in_scientific_notation(tmp_path: Path) -> None:
    """Symptom: a bar of 1,577 ms was labelled '1.58e+03'."""
    values = {"a": 1577.3, "b": 999.7, "c": 999.4, "d": 12.345, "e": 0.01234, "f": 12_345_678.0}
    chart = Chart("Bars", x="", y="ms", series={"Bars": list(values.items())}, kind="bars")
    written = texts([chart], tmp_path / "p.svg")
    assert {"1,577", "1,000", "999", "12.3", "0.0123", "12,345,678"} <= set(written)
    assert "e+" not in "".join(written)


def test_a_png_has_two_panels_in_a_row(tmp_path: Path) -> None:
    draw("bench", [LINES, POINTS, LINES], tmp_path / "three.png")
    draw("bench", [LINES, POINTS], tmp_path / "two.png")
    sizes = [(tmp_path / f"{name}.png").read_bytes()[16:24] for name in ("two", "three")]
    two, three = [(int.from_bytes(each[:4]), int.from_bytes(each[4:])) for each in sizes]
    assert two[0] == three[0] and three[1] > 1.8 * two[1]


def test_error_bars_and_single_points_are_drawn(tmp_path: Path) -> None:
    series = {"model": [(0.0, 1.0), (1.0, 2.0)], "measured": [(0.0, 1.5), (1.0, 1.5)]}
    pictures = set()
    for dots, errors in (((), {}), (("measured",), {}), ((), {"measured": [(1.0, 2.0), (1.2, 1.9)]})):
        draw("bench", [Chart("Few", x="x", y="y", series=series, dots=dots, errors=errors)], tmp_path / "plot.svg")
        pictures.add((tmp_path / "plot.svg").read_text())
    assert len(pictures) == 3


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShadowServeError, match="no charts"):
        draw("bench", [], tmp_path / "plot.svg")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ShadowServeError, match=r"shadowserve\[bench\]"):
        draw("bench", [LINES], tmp_path / "plot.svg")
