"""``shadowserve simulate bluefield``: the model's rows, its errors against the paper, and its charts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import click

from shadowserve_tools.bench.parts.options import listed, one_of, real, whole
from shadowserve_tools.charts import Chart, Point
from shadowserve_tools.flags import Size
from shadowserve_tools.report import Output, Report, output_options
from shadowserve_tools.simulate.assumptions import PAPER_TOKENS, rows
from shadowserve_tools.simulate.model import CHANGES, PAPER_SLICE_BYTES, Design, Model, Result, Setting, swing
from shadowserve_tools.simulate.targets import TARGETS

COMBINATIONS: Final = (
    (), ("fusion",), ("slices",), ("huffman",), ("kvrans",), ("fusion", "slices"), ("fusion", "slices", "kvrans"),
    ("fusion", "slices", "huffman"),
)  # fmt: skip
"""Each change alone, and those that make sense together; kvrans replaces Deflate. The last is drawn, as no what-if."""

COLUMNS: Final = (
    "system", "link_Gbps", "net_Gbps", "ttft_ms", "range_ms", "tpot_ms", "req_per_s", "at_rate_ms",
)  # fmt: skip
SLICE_BYTES_MIN: Final = 4096
CACHEGEN: Final = "CacheGen-Async"


def _read_bandwidth(text: str) -> float:
    try:
        bandwidth = float(text)
    except ValueError as error:
        raise ValueError("not numbers with commas between, such as 10,20") from error
    if not 0.1 <= bandwidth <= 10_000:
        raise ValueError("each has to be 0.1 to 10000 Gbps")
    return bandwidth


@click.command()
@listed("--bandwidth bandwidths", "10,20,30,40", "Links to storage.", _read_bandwidth, metavar="GBPS,...")
@whole("--prompt-tokens", PAPER_TOKENS, "Tokens of a prompt, all stored.", most=1_000_000)
@whole("--output-tokens", 16, "Tokens of an answer.", 2, 10_000)
@whole("--chunk-tokens", 256, "Tokens of a chunk.", most=65_536)
@click.option(
    "--slice-bytes", default="256KiB", type=Size(SLICE_BYTES_MIN, PAPER_SLICE_BYTES),
    help="Decoded bytes of a slice with the change 'slices'; the paper has 2MiB.",
)  # fmt: skip
@listed(
    "--with changes", None,
    f"Only the paper's two systems and this combination of {', '.join(CHANGES)}; otherwise each and together.",
    one_of(CHANGES), metavar="CHANGE,...",
)  # fmt: skip
@real("--rate", 1.0, "Load of at_rate_ms; empty if a system cannot carry it.", 0, 1000, "REQUESTS/S")
@output_options
def bluefield(
    bandwidths: list[float], prompt_tokens: int, output_tokens: int, chunk_tokens: int, slice_bytes: int,
    changes: list[str] | None, rate: float, output: Output,
) -> None:  # fmt: skip
    """Predict fetches of a Llama-8B prompt through a BlueField-3, and the gain of ShadowServe's changes there.

    A model, not a measurement: nothing here has run on the card. It is fitted to the paper's figures. The second table
    has its error for each of them, and marks the fitted ones. docs/design/simulation.md has the method, every
    assumption with its source, and what would refute it.

    \b
    The columns:
      net_Gbps    rate of incoming compressed bytes, unloaded
      ttft_ms     mean time to first token, unloaded; range_ms: within the ranges of the assumptions
      tpot_ms     mean time per output token at req_per_s, the highest load
      at_rate_ms  mean time to first token at --rate

    \b
    The changes:
      fusion   dequantize and DMA slice by slice, so that elements may pass through the cache
      slices   smaller than 2 MiB, passed on one by one; fusion needs them, or the cache is too small
      huffman  Huffman-only Deflate streams: smaller; the engine decodes them like any other
      kvrans   ShadowServe's codec on the Arm cores instead of the engine; known by instruction counts only

    \b
    Where is the card not the limit?      shadowserve simulate bluefield --bandwidth 5,10,15,20,25
    All changes, with Deflate:            shadowserve simulate bluefield --with fusion,slices,huffman
    The best size of slices:              shadowserve simulate bluefield --with fusion,slices --slice-bytes 64KiB
    As data, and drawn:                   shadowserve simulate bluefield --json b.json --plot b.svg
    """
    tokens = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "chunk_tokens": chunk_tokens}
    settings = [Setting(bandwidth_gbps=each, **tokens) for each in sorted(set(bandwidths))]
    combinations = COMBINATIONS if changes is None else ((), changes)
    designs = [Design(each, slice_bytes) for each in dict.fromkeys(map(frozenset, combinations))]
    report_of(settings, designs, rate).finish(output)
    columns = ["figure", "kind", "paper", "model", "error_%", "verdict"]
    against = Report("bluefield, against the paper", columns, command="simulate")
    for row in target_rows(Model()):
        verdict = "missed" if row["missed"] else ""
        against.row(**row, figure=row["name"], **{"error_%": f"{row['error'] * 100:+.1f}"}, verdict=verdict)
    against.finish(Output())


def report_of(settings: Sequence[Setting], designs: Sequence[Design], rate: float) -> Report:
    """Return the rows of both systems and of the designs, and the charts."""
    model = Model()
    report = Report("bluefield", list(COLUMNS), command="simulate")
    for setting in settings:
        report.row(**_row(CACHEGEN, setting, model.cachegen(setting, rate)))
        for design in designs:
            ttft = swing(partial(Model.ttft_s, setting=setting, design=design))
            load = swing(partial(_requests_per_s, setting, design))
            report.row(
                **_row(design.name, setting, model.shadowserve(setting, design, rate)),
                range_ms=f"{1e3 * ttft[0]:.0f} to {1e3 * ttft[1]:.0f}",
                range_per_s=f"{load[0]:.2f} to {load[1]:.2f}",
            )
    report.more = {
        "assumptions": assumption_rows(), "targets": target_rows(model), "stages": stage_rows(model),
    }  # fmt: skip
    report.charts = _charts(model, designs)
    return report


def _requests_per_s(setting: Setting, design: Design, model: Model) -> float:
    return model.shadowserve(setting, design).requests_per_s


def _fitted(name: str, model: Model) -> float:
    return float(getattr(model.fitted, name))


def _row(system: str, setting: Setting, result: Result) -> dict[str, Any]:
    row = {
        "system": system,
        "link_Gbps": setting.bandwidth_gbps,
        "net_Gbps": result.fetch_gbps,
        "ttft_ms": 1e3 * result.ttft_s,
        "tpot_ms": 1e3 * result.tpot_s,
        "req_per_s": result.requests_per_s,
    }
    return row if result.ttft_at_rate_s is None else row | {"at_rate_ms": 1e3 * result.ttft_at_rate_s}


def assumption_rows() -> list[dict[str, Any]]:
    """Return every number of the model: name, value, low and high (None: a point), source, meaning, whether fitted."""
    model = Model()
    fitted = rows(model.fitted, fitted_by_model=True)
    for row in fitted:
        row["low"], row["high"] = swing(partial(_fitted, row["name"]))
    return rows(model.given, fitted_by_model=False) + fitted


def target_rows(model: Model) -> list[dict[str, Any]]:
    """Return every figure of the paper with the model's value."""
    return [
        {
            **{key: getattr(target, key) for key in ("name", "kind", "paper", "source")},
            "model": target.model(model),
            "error": target.error(model),
            "missed": target.missed(model),
        }
        for target in TARGETS
    ]


def stage_rows(model: Model) -> list[dict[str, Any]]:
    """Return each stage's Gbps alone over the size of a chunk (figure 13a), and together with the others (13b)."""
    return [
        {"chunk_tokens": tokens, "stage": name, "alone_Gbps": alone, "together_Gbps": together}
        for tokens in (16, 64, 256, 1024)
        for name, (alone, together) in model.stages_gbps(Setting(bandwidth_gbps=40, chunk_tokens=tokens)).items()
    ]


def _charts(model: Model, designs: Sequence[Design]) -> list[Chart]:
    """Draw the paper's settings, independent of the options, so that its points belong to the lines."""
    last = designs[-1]
    measured = ("paper, ShadowServe", f"paper, {CACHEGEN}")
    axis = [float(each) for each in range(6, 43, 2)]

    def chart(title: str, unit: str, outputs: int, key: str, points: Sequence[Sequence[Point]]) -> Chart:
        settings = [Setting(bandwidth_gbps=each, output_tokens=outputs) for each in axis]

        def line(of: Callable[[Setting], Result]) -> list[tuple[float, float]]:
            scale = 1e3 if unit == "ms" else 1.0
            return [(each.bandwidth_gbps, scale * getattr(of(each), key)) for each in settings]

        series: dict[str, Sequence[Point]] = {"ShadowServe": line(model.shadowserve), CACHEGEN: line(model.cachegen)}
        if last.changes:
            name = "with " + " + ".join(change for change in CHANGES if change in last.changes)
            series[name] = line(partial(model.shadowserve, design=last))
        series |= dict(zip(measured, points, strict=True))
        return Chart(title, x="link, Gbps", y=unit, series=series, dots=measured)

    paper = {target.name: target.paper for target in TARGETS}
    ours = [(each, paper[f"TTFT at {each} Gbps, ms"]) for each in (20, 30, 40)]
    # At 30 and 40 Gbps the paper has CacheGen as a ratio to ShadowServe.
    theirs = [(20, paper[f"{CACHEGEN}, TTFT at 20 Gbps, ms"])]
    theirs += [(30, ours[1][1] / (1 + model.given.loss_30)), (40, ours[2][1] / (1 + model.given.loss_40))]
    tpots = [
        [(each, paper[f"{system}TPOT at {each} Gbps, 16 outputs, ms"]) for each in (10, 40)]
        for system in ("", f"{CACHEGEN}, ")
    ]
    loads = [[(20, paper[f"{system}requests/s at 20 Gbps, 32 outputs"])] for system in ("", f"{CACHEGEN}, ")]
    return [
        chart("Unloaded TTFT", "ms", 16, "ttft_s", [ours, theirs]),
        chart("Loaded TPOT, 16 output tokens", "ms", 16, "tpot_s", tpots),
        chart("Highest load, 32 output tokens", "requests/s", 32, "requests_per_s", loads),
    ]
