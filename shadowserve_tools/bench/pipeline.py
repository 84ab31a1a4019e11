"""``shadowserve bench pipeline``: the pipeline against its ideal, and its stages alone and all together."""

import socket
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import click
import psutil

from shadowserve import native
from shadowserve_tools.bench.parts.rounds import Alone, Rounds, connected
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.processes import start_storage
from shadowserve_tools.report import Chart, Cost, Output, Report, measure, output_options, repeat, tracked

__all__ = ["pipeline"]

DISTINCT: Final = 16
"""Chunks that are stored. Longer rounds fetch them again, to where they were: the work is the same, the memory less."""
FEW: Final = 2
"""Chunks of a short round, in which how it begins and ends weighs more; it has a goal of its own."""
FEW_TURNS: Final = 4
"""For each turn of a longer round: a moment of something else weighs more in 10 ms, and so many turns cost no more."""
SHORT_ROUNDS: Final = 8
"""For each long one, which takes as long as 32 of them: their median is the other half of the pair."""
STAGES: Final = {
    native.Stage.NET: "net",
    native.Stage.DECOMPRESS: "decompress",
    native.Stage.DEQUANTIZE: "dequantize",
    native.Stage.DMA: "deliver",
}
MODES: Final = ("fused", "separate")


@click.command()
@click.option("--chunks", default=64, show_default=True, type=click.IntRange(1, 256), help="1, 2, 4 .. up to these.")
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1, 32), help="Of each chunk.")
@click.option("--long", default=512, show_default=True, type=click.IntRange(1, 2048), help="Chunks of a long prompt.")
@click.option("--long-layers", default=16, show_default=True, type=click.IntRange(1, 32), help="Of its chunks.")
@click.option("--connections", default=2, show_default=True, type=click.IntRange(1, 16), help="To the storage server.")
@click.option("--codec", help="Of the chunks; without it, what a data plane stores with.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Turns that count.")
@output_options
def pipeline(
    chunks: int,
    layers: int,
    long: int,
    long_layers: int,
    connections: int,
    codec: str | None,
    repeats: int,
    output: Output,
) -> None:
    """Run rounds through the pipeline, fused and stage by stage, and each of its stages alone on the same chunks.

    Chunks of Llama-3.1-8B's shape, lossless. The ideal is the larger of the slowest stage alone, on all cores, and all
    CPU work, the storage server's included, over the cores: the stages run in parallel, but on loopback they share the
    machine with the server. Rounds of one and two chunks have four turns for each of the others'. Then rounds of a long
    prompt, whose time for each chunk should be that of a short one.
    """
    if codec and codec.upper() not in native.Codec.__members__:
        raise click.BadParameter(f"{codec} is none of {', '.join(map(str.lower, native.Codec.__members__))}")
    report = Report("pipeline", ["chunks", "stages", "wall_s", "cpu_s", "GB_per_s", "ideal_s", "over_ideal"])
    counts = [1 << power for power in range(chunks.bit_length())]
    modes = {name: _Mode() for name in MODES}
    with _served(llama_8b(min(chunks, DISTINCT), layers=layers, codec=codec), connections) as served:
        alone = Alone(served.workload, served.connections, counts[-1])
        for name, mode in modes.items():
            with closing(served.rounds(counts[-1], name == "fused")) as rounds:
                for count in counts:
                    turns = repeats * (FEW_TURNS if count <= FEW else 1)
                    _compare(served, rounds, alone, mode, name, count, turns)
    with _served(llama_8b(min(long, DISTINCT), layers=long_layers, codec=codec), connections) as served:
        growth = _growth(served, long, repeats)
    for name, mode in modes.items():
        mode.add_rows(report, name)
    few = [count for count in counts if count <= FEW]
    report.ratio("over_ideal_one", modes["fused"].worst(few), f"at most 1.2, for each of 1 to {few[-1]} chunks")
    if many := counts[len(few) :]:
        wanted = f"at most 1.08, for each of {many[0]} to {many[-1]} chunks"
        report.ratio("over_ideal_many", modes["fused"].worst(many), wanted)
    wanted = f"at most 1.08, for each of 1 to {counts[-1]} chunks"
    report.ratio("over_ideal_separate", modes["separate"].worst(counts), wanted)
    report.ratio("linear_growth", growth, f"at most 1.05: a chunk's time, {long} of them over {min(long, DISTINCT)}")
    report.charts += _charts(modes)
    report.finish(output)


@dataclass(frozen=True)
class _Served:
    """A workload that a storage server holds."""

    workload: Workload
    server: psutil.Process
    connections: list[socket.socket]
    cores: int

    def rounds(self, chunks_max: int, fused: bool) -> Rounds:
        return Rounds(self.workload, self.connections, chunks_max=chunks_max, cores=self.cores, fused=fused)


@contextmanager
def _served(workload: Workload, connections: int) -> Iterator[_Served]:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        storage = stack.enter_context(start_storage(logs))
        put(workload, storage.address)
        sockets = [stack.enter_context(closing(connection)) for connection in connected(storage.address, connections)]
        cores = len(psutil.Process().cpu_affinity() or [0])
        yield _Served(workload, psutil.Process(storage.process.pid), sockets, cores)


@dataclass(frozen=True)
class _Comparison:
    """Rounds of one number of chunks, and what they would ideally take.

    Attributes:
        chunks: of each round.
        raw_bytes: that each delivers.
        whole: cost of each.
        ideals: seconds; one for each.
        alone: GB/s of a core, of what comes out of each stage.
        together: the same while all stages run.
    """

    chunks: int
    raw_bytes: int
    whole: list[Cost]
    ideals: list[float]
    alone: dict[str, float]
    together: dict[str, float]

    @property
    def over_ideal(self) -> list[float]:
        return [cost.wall_s / ideal for cost, ideal in zip(self.whole, self.ideals, strict=True)]


@dataclass
class _Mode:
    """Comparisons of a pipeline whose stages are fused, or separate."""

    comparisons: list[_Comparison] = field(default_factory=list)

    def worst(self, counts: list[int]) -> list[float]:
        """Return the ratios to the ideal for that one of some numbers of chunks whose median is the largest."""
        compared = (comparison.over_ideal for comparison in self.comparisons if comparison.chunks in counts)
        return max(compared, key=statistics.median)

    def add_rows(self, report: Report, name: str) -> None:
        for comparison in self.comparisons:
            wall = statistics.median(cost.wall_s for cost in comparison.whole)
            report.row(
                chunks=comparison.chunks,
                stages=name,
                wall_s=wall,
                cpu_s=statistics.median(cost.cpu_s for cost in comparison.whole),
                GB_per_s=comparison.raw_bytes / wall / 1e9,
                ideal_s=statistics.median(comparison.ideals),
                over_ideal=statistics.median(comparison.over_ideal),
            )


def _compare(served: _Served, rounds: Rounds, alone: Alone, mode: _Mode, name: str, chunks: int, repeats: int) -> None:
    """Run rounds and stages in turns, and add what came out."""
    stages = alone.runs(name == "fused")
    parties = [served.server]
    before = rounds.statistics()
    whole, *costs = repeat(
        repeats,
        lambda: rounds.verified(chunks, parties),
        *(partial(measure, partial(run, chunks)) for run in stages.values()),
        description=f"{name}, {chunks} chunks",
    )
    after = rounds.statistics()
    # The compute stages were timed on one thread; a pipeline has one for each core. The network has its own already.
    walls = [
        [cost.wall_s if stage == "net" else cost.wall_s / served.cores for cost in own]
        for stage, own in zip(stages, costs, strict=True)
    ]
    ideals = [max(cost.cpu_s / served.cores, *alone_s) for cost, *alone_s in zip(whole, *walls, strict=True)]
    together = {
        STAGES[stage]: (after[stage].output_bytes - before[stage].output_bytes)
        / (after[stage].busy_ns - before[stage].busy_ns)
        for stage in STAGES
        if after[stage].busy_ns > before[stage].busy_ns
    }
    raw = chunks * served.workload.layout.raw_bytes
    sizes = alone.output_bytes(chunks)
    speeds = {
        stage: sizes[stage] / statistics.median(cost.cpu_s for cost in own) / 1e9
        for stage, own in zip(stages, costs, strict=True)
    }
    mode.comparisons.append(_Comparison(chunks, raw, whole, ideals, speeds, together))


def _growth(served: _Served, long: int, repeats: int) -> list[float]:
    """Return the time of a chunk in a long round over that in short ones, for pairs of one and several of them."""
    short, parties = len(served.workload.keys), [served.server]
    pairs = []
    with closing(served.rounds(long, fused=True)) as rounds:
        rounds.verified(long, parties)  # touches every buffer
        for _ in tracked(range(repeats), f"rounds of {long} chunks"):
            costs = [rounds.verified(short, parties).wall_s for _ in range(SHORT_ROUNDS)]
            pairs.append(rounds.verified(long, parties).wall_s / long / (statistics.median(costs) / short))
    return pairs


def _charts(modes: dict[str, _Mode]) -> list[Chart]:
    last = {name: mode.comparisons[-1] for name, mode in modes.items()}
    bars = {
        "alone": list(last["separate"].alone.items()),
        "together, fused": [(stage, speed) for stage, speed in last["fused"].together.items()],
        "together, separate": [(stage, speed) for stage, speed in last["separate"].together.items()],
    }
    return [
        Chart(
            f"Each stage alone, and while all run ({last['fused'].chunks} chunks)",
            x="",
            y="out of the stage, GB/s of one core",
            series=bars,
            kind="bars",
        ),
        Chart(
            "A round over its ideal",
            x="chunks in a round",
            y="ratio",
            series={
                name: [(c.chunks, statistics.median(c.over_ideal)) for c in mode.comparisons]
                for name, mode in modes.items()
            },
            limits={"ideal": 1.0, "goal": 1.08},
            x_log=True,
        ),
    ]
