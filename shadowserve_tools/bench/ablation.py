"""Measures the contribution of each of the paper's three techniques (ShadowServe, section 6.4, figure 14).

Method: engine, model and cores are those of ``bench interference``. One technique is off at a time: asynchronous
fetching (the engine waits for each fetch), the chunked pipeline (a chunk passes all stages before the next one),
memory management (buffers are allocated for each chunk, and registered where there is a device). A CPU registers
nothing, so the last one also runs over the emulated DPU, with three costs of registering memory: that of a server
(128 us/MiB), and the two that the paper's 6.96 and 11.73 imply for its card, scaled by how much slower this machine
is with a prompt.

Prediction, on a machine without DPU: without asynchronous fetching TPOT 1.1 times (the paper: 1.39 to 2.03, with
fetches of 500 ms); without the chunked pipeline TTFT 1.02 times, since one core has nothing to overlap; without
memory management 1.1 times, for mapping and faulting in. Emulated card: 1.3 at a server's cost, 6.4 to 7.2 and 11.2
to 12 at the paper's.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import click

from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.serving import Load, Model, Partition, Served, Stack, model_options, p95
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options
from shadowserve_tools.simulate import model as card

FULL: Final = "shadowserve"
NO_AF: Final = "no asynchronous fetching"
NO_CP: Final = "no chunked pipeline"
NO_MM: Final = "no memory management"

DATA_PLANE_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    FULL: (),
    NO_AF: (),
    NO_CP: ("--chunked-pipeline", "false"),
    NO_MM: ("--memory-management", "false"),
}
"""Flags of the data plane. FULL and NO_AF use the same data plane: ``asynchronous_fetch`` is the engine's key."""

CARD: Final = "emulated card"
CARD_NO_MM: Final = "emulated card, no memory management"
PAPER_NO_MM: Final = {"least": 6.96, "largest": 11.73}
"""Ratios of TTFT in the paper's figure 14."""


@dataclass(frozen=True)
class _Run:
    """Results of one system in one turn: one request at a time, requests at the loaded rate, and all at once."""

    unloaded: Served
    loaded: Served
    burst: Served


@click.command()
@model_options
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(2), help="Tokens of an answer.")
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1), help="Requests of a loaded run.")
@click.option("--unloaded", default=4, show_default=True, type=click.IntRange(1), help="Requests of an unloaded run.")
@click.option("--loaded", default=0.6, show_default=True, help="Offered rate, relative to the highest throughput.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Turns of each system.")
@output_options
def ablation(
    output: Output, model: Model, load: Load, requests_max: int, output_tokens: int, requests: int, unloaded: int,
    loaded: float, repeats: int,
) -> None:  # fmt: skip
    """Serve with all of the paper's techniques, and with one switched off at a time."""
    load = replace(load, output=output_tokens, requests=requests)
    runs: dict[str, list[_Run]] = defaultdict(list)
    with Programs() as programs:
        progress = programs.progress(repeats * (len(DATA_PLANE_FLAGS) + 2 + len(PAPER_NO_MM)), "starting the engine")
        with Stack(Partition.halves(), model, load, requests_max) as running:
            capacity = running.engine.serve(load, fetched=True).throughput
            for turn in range(repeats):
                for system, flags in DATA_PLANE_FLAGS.items():
                    progress(system)
                    if system != NO_AF:
                        running.restart_data_plane(*flags)
                    running.engine.call("switch", asynchronous=system != NO_AF)
                    offered = replace(load, rate=loaded * capacity, seed=turn)
                    runs[system].append(_measure(running, offered, unloaded))
                    running.engine.call("switch", asynchronous=True)

        cards = _on_card(model, load, unloaded, repeats, progress)
    _report(runs, cards).finish(output)


def _measure(running: Stack, load: Load, unloaded: int) -> _Run:
    singles = _unloaded(running, load, unloaded)
    loaded = running.engine.serve(load, fetched=True)
    return _Run(singles, loaded, running.engine.serve(replace(load, rate=0.0), fetched=True))


def _unloaded(running: Stack, load: Load, count: int) -> Served:
    return Served.of([running.engine.serve(replace(load, requests=1), fetched=True) for _ in range(count)])


def _on_card(
    model: Model, load: Load, unloaded: int, repeats: int, progress: Callable[[str], None]
) -> dict[str, list[Served]]:
    """Return the results of single requests over the emulated card, in each turn.

    The paper's cost of registering is multiplied by the ratio of this machine's time for a prompt to the card's,
    because behind the emulator there is a CPU.
    """
    predictor, paper = card.Model(), card.Setting(bandwidth_gbps=40)
    kv_bytes = load.chunks * DEFAULT_CHUNK_TOKENS * model.kv_bytes
    paper_s = predictor.ttft_s(paper, card.Design()) * kv_bytes / (paper.prompt_tokens * predictor.given.token_bytes)
    cards: dict[str, list[Served]] = defaultdict(list)
    # As in the paper. The card does not register memory that the host exports.
    host = {"quantizer": "binned", "delivery": "exported"}
    with Stack(Partition.halves(), model, load, 1, backend="doca", **host) as running:
        for _ in range(repeats):
            running.restart_data_plane()
            cards[CARD].append(_unloaded(running, load, unloaded))
            progress(CARD)
            slower = cards[CARD][-1].ttft / paper_s
            us_per_mib = {CARD_NO_MM: predictor.given.register_us_per_mib}
            for name, times in PAPER_NO_MM.items():
                us_per_mib[f"{CARD_NO_MM}, {name}"] = slower * predictor.registering_us_per_mib(paper, times)
            for name, us in us_per_mib.items():
                cost = {"DOCA_EMULATOR_REGISTER_US_PER_MIB": f"{us:.0f}"}
                running.restart_data_plane("--memory-management", "false", environment=cost)
                cards[name].append(_unloaded(running, load, unloaded))
                progress(name)
    return cards


def _report(runs: dict[str, list[_Run]], cards: dict[str, list[Served]]) -> Report:
    report = Report(
        "ablation",
        ["system", "unloaded_ttft_ms", "loaded_ttft_ms", "loaded_ttft_p95_ms", "loaded_tpot_ms", "loaded_tpot_p95_ms",
         "highest_req_per_s"], bars=["loaded_tpot_ms", "unloaded_ttft_ms", "highest_req_per_s"])  # fmt: skip
    for system, turns in runs.items():
        loaded = Served.of([turn.loaded for turn in turns])
        report.row(
            system=system,
            unloaded_ttft_ms=Served.of([turn.unloaded for turn in turns]).ttft * 1e3,
            loaded_ttft_ms=loaded.ttft * 1e3,
            loaded_ttft_p95_ms=p95(loaded.ttft_s) * 1e3,
            loaded_tpot_ms=loaded.tpot * 1e3,
            loaded_tpot_p95_ms=p95(loaded.tpot_s) * 1e3,
            highest_req_per_s=Served.of([turn.burst for turn in turns]).throughput,
        )
    for system, served in cards.items():
        report.row(system=system, unloaded_ttft_ms=Served.of(served).ttft * 1e3)
    paper = "none; the paper has"
    for name, system, part, goal in (
        ("no_af_tpot", NO_AF, "tpot", f"{paper} 1.39 to 2.03"),
        ("no_cp_ttft", NO_CP, "ttft", f"{paper} 1.56 to 1.86"),
        ("no_mm_ttft", NO_MM, "ttft", f"{paper} 6.96 to 11.73"),
    ):
        pairs = zip(runs[system], runs[FULL], strict=True)
        if part == "tpot":
            report.ratio(name, [one.loaded.tpot / full.loaded.tpot for one, full in pairs], goal)
        else:
            report.ratio(name, [one.unloaded.ttft / full.unloaded.ttft for one, full in pairs], goal)
    for name, system, goal in (
        ("no_mm_card_ttft", CARD_NO_MM, "none; where registering takes as long as on a server"),
        *(
            (f"no_mm_card_ttft_{name}", f"{CARD_NO_MM}, {name}", f"none; the {name} of the paper's is {times}")
            for name, times in PAPER_NO_MM.items()
        ),
    ):
        report.ratio(name, [one.ttft / full.ttft for one, full in zip(cards[system], cards[CARD], strict=True)], goal)
    return report
