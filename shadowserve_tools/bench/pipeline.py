"""Compares the pipeline with the time that its stages allow: the ideal.

Method: batches of 1 to 64 lossless chunks of Llama-3.1-8B's shape go through a pipeline in this process, with the
storage node beside it. The ideal is the larger of the slowest stage alone on all cores (its calls prepared, nothing
checked), and all CPU work, the server's included, over the cores. Fused pipelines decode in one stage; ``_separate``
has a stage each for decompression, dequantization and delivery. ``_apart`` gives server and pipeline cores of their
own, as on two hosts. ``linear_growth`` is the time of a chunk in a batch of 512 over that in a batch of 16. Each
batch's bytes are compared.

Prediction: one chunk 1.15 of the ideal, 16 chunks 1.02; separate stages 1.2 and 1.03; apart 1.04 and 1.02. Growth
0.995, since nothing in a batch depends on the number of its chunks but two tables.
"""

import itertools
import os
import socket
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click
import psutil

from shadowserve import native
from shadowserve.cores import usable_cores
from shadowserve_tools.bench.parts.batches import Batches, StagesAlone, connected
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Cost, Output, Report, cpu_s, measure, output_options, repeat, tracked

DISTINCT: Final = 16
"""Stored chunks. Longer batches fetch them again to the same places, so that less memory is necessary."""
FEW: Final = 2
"""Chunks of a short batch. It has its own goal, because start and end weigh more."""
SHORT_TURNS: Final = 4
"""Most turns of shorter batches for each turn of the longest: noise weighs more in less time."""
SHORT_BATCHES: Final = 8
"""Short batches for each long one; their median is the other half of the pair."""
STAGES: Final = {
    native.Stage.NET: "net",
    native.Stage.DECOMPRESS: "decompress",
    native.Stage.DEQUANTIZE: "dequantize",
    native.Stage.DMA: "deliver",
}
FUSED, SEPARATE, APART = "fused", "separate", "fused, apart"
"""Stages fused; stage by stage; fused on cores without the storage node, as on two hosts."""
GOAL_ONE: Final = "at most 1.2"
GOAL_MANY: Final = "at most 1.08"


@click.command()
@click.option("--chunks", default=64, show_default=True, type=click.IntRange(1, 256), help="1, 2, 4 .. up to these.")
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1, 32), help="Layers of a chunk.")
@click.option("--long", default=512, show_default=True, type=click.IntRange(1, 2048), help="Chunks of a long prompt.")
@click.option("--long-layers", default=16, show_default=True, type=click.IntRange(1, 32), help="Layers of its chunks.")
@click.option(
    "--connections", default=2, show_default=True, type=click.IntRange(1, 16), help="Connections to the storage node."
)
@click.option("--codec", help="Codec of the chunks. [default: that of a data plane]")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of turns.")
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
    """Compare batches through the pipeline with the ideal of its stages."""
    if codec and codec.upper() not in native.Codec.__members__:
        raise click.BadParameter(f"{codec} is none of {', '.join(map(str.lower, native.Codec.__members__))}")
    report = Report("pipeline", ["chunks", "stages", "wall_s", "cpu_s", "GB_per_s", "ideal_s", "over_ideal", "stolen"])
    counts = [1 << power for power in range(chunks.bit_length())]
    modes: dict[str, _Mode] = {}
    with _served(llama_8b(min(chunks, DISTINCT), layers=layers, codec=codec), connections) as served:
        alone = StagesAlone(served.workload, served.connections, counts[-1])
        with ExitStack() as stack:
            pipelines = {}
            for name in (FUSED, SEPARATE, APART)[: 2 if len(usable_cores()) == 1 else 3]:
                modes[name] = _Mode()
                with served.placed(apart=name == APART):
                    batches = stack.enter_context(closing(served.batches(counts[-1], name != SEPARATE)))
                    batches.verified(counts[-1], [served.server])  # touches every buffer
                    pipelines[name] = batches
            for count, (name, batches) in itertools.product(counts, pipelines.items()):
                with served.placed(apart=name == APART):
                    turns = repeats * min(SHORT_TURNS, counts[-1] // count)
                    _compare(served, batches, alone, modes[name], name, count, turns)
    with _served(llama_8b(min(long, DISTINCT), layers=long_layers, codec=codec), connections) as served:
        growth = _growth(served, long, repeats)
    for name, mode in modes.items():
        mode.add_rows(report, name)
    few = [count for count in counts if count <= FEW]
    many = counts[len(few) :]
    for name, suffix in ((FUSED, ""), (APART, "_apart")):
        for which, parts, goal in (("one", few, GOAL_ONE), ("many", many, GOAL_MANY)):
            if name in modes and parts:
                wanted = f"{goal}, for each of {parts[0]} to {parts[-1]} chunks"
                report.ratio(f"over_ideal_{which}{suffix}", modes[name].worst(parts), wanted)
    wanted = f"{GOAL_MANY}, for each of 1 to {counts[-1]} chunks"
    report.ratio("over_ideal_separate", modes[SEPARATE].worst(counts), wanted)
    report.ratio("linear_growth", growth, f"at most 1.05: a chunk's time, {long} of them over {min(long, DISTINCT)}")
    report.charts += _charts(modes)
    report.finish(output)


@dataclass
class _Served:
    """A workload in a storage node.

    Attributes:
        cores: Cores of the pipeline.
        server_cores: Cores of the server; None if it shares those.
    """

    workload: Workload
    server: psutil.Process
    connections: list[socket.socket]
    cores: list[int]
    server_cores: list[int] | None = None

    def batches(self, chunks_max: int, fused: bool) -> Batches:
        cores = len(self.cores)
        return Batches(self.workload, self.connections, chunks_max=chunks_max, cores=cores, fused=fused)

    @contextmanager
    def placed(self, *, apart: bool) -> Iterator[None]:
        """Place the server on half of the cores, if ``apart``, and threads that start meanwhile on the others."""
        before = self.cores
        if apart:
            half = len(before) // 2
            self.cores, self.server_cores = before[half:], before[:half]
            self._place()
        try:
            yield
        finally:
            self.cores, self.server_cores = before, None
            self._place()

    def _place(self) -> None:
        os.sched_setaffinity(0, self.cores)
        for thread in self.server.threads():
            os.sched_setaffinity(thread.id, self.server_cores or self.cores)

    def ideal(self, cost: Cost, server_s: float, alone_s: list[float]) -> float:
        """Return the ideal time of a batch.

        Args:
            cost: Cost of the batch, all CPU time included.
            server_s: CPU time of the server.
            alone_s: Time of each stage alone. It is no bound with the server apart, where receiving in Python is
                slower.
        """
        if self.server_cores is None:
            return max(cost.cpu_s / len(self.cores), *alone_s)
        return max((cost.cpu_s - server_s) / len(self.cores), server_s / len(self.server_cores))


@contextmanager
def _served(workload: Workload, connections: int) -> Iterator[_Served]:
    with Programs() as programs:
        # With a single thread, the server would leave a core idle at the start of a batch.
        storage = programs.storage("--io-threads", str(connections))
        put(workload, storage.address)
        sockets = [
            programs.enter_context(closing(connection)) for connection in connected(storage.address, connections)
        ]
        yield _Served(workload, psutil.Process(storage.process.pid), sockets, usable_cores())


@dataclass(frozen=True)
class _Comparison:
    """Batches of one number of chunks, and their ideal times.

    Attributes:
        chunks: Chunks of a batch.
        raw_bytes: Bytes that a batch delivers.
        whole: Costs of the batches.
        ideals: Ideal seconds of each.
        alone: Output of each stage alone, GB/s of a core.
        together: The same while all stages run.
        stolen: Part of the CPUs' busy time that the host of this virtual machine gave to others.
    """

    chunks: int
    raw_bytes: int
    whole: list[Cost]
    ideals: list[float]
    alone: dict[str, float]
    together: dict[str, float]
    stolen: float

    @property
    def over_ideal(self) -> list[float]:
        return [cost.wall_s / ideal for cost, ideal in zip(self.whole, self.ideals, strict=True)]


@dataclass
class _Mode:
    """Comparisons of one pipeline."""

    comparisons: list[_Comparison] = field(default_factory=list)

    def worst(self, counts: list[int]) -> list[float]:
        """Return the ratios to the ideal of the number of chunks with the largest median."""
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
                stolen=comparison.stolen,
            )


def _compare(
    served: _Served, batches: Batches, alone: StagesAlone, mode: _Mode, name: str, chunks: int, repeats: int
) -> None:
    """Run batches and stages in turns, and add the comparison."""
    stages = alone.runs(name != SEPARATE)
    server_s: list[float] = []

    def batch() -> Cost:
        before = cpu_s(served.server)
        cost = batches.verified(chunks, [served.server])
        server_s.append(cpu_s(served.server) - before)  # the server is idle before and after
        return cost

    before, began = batches.statistics(), psutil.cpu_times()
    whole, *costs = repeat(
        repeats,
        batch,
        *(partial(measure, partial(run, chunks)) for run in stages.values()),
        description=f"{name}, {chunks} chunks",
    )
    after, stolen = batches.statistics(), _stolen(began)
    # The compute stages ran on one thread; a pipeline has one for each core. The network stage has its own threads.
    walls = [
        [cost.wall_s if stage == "net" else cost.wall_s / len(served.cores) for cost in own]
        for stage, own in zip(stages, costs, strict=True)
    ]
    ideals = [
        served.ideal(cost, server, list(alone_s))
        for cost, server, *alone_s in zip(whole, server_s[1:], *walls, strict=True)  # without the warm-up
    ]
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
    mode.comparisons.append(_Comparison(chunks, raw, whole, ideals, speeds, together, stolen))


def _stolen(began: Any) -> float:
    """Return the part of the CPUs' busy time since then that the host gave to others."""
    now = psutil.cpu_times()
    spent = {name: getattr(now, name) - getattr(began, name) for name in now._fields}
    worked = sum(spent[name] for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(spent["steal"] / worked) if worked else 0.0


def _growth(served: _Served, long: int, repeats: int) -> list[float]:
    """Return the time of a chunk in a long batch over that in short ones; a pair has one long and several short."""
    short, parties = len(served.workload.keys), [served.server]
    pairs = []
    with closing(served.batches(long, fused=True)) as batches:
        batches.verified(long, parties)  # touches every buffer
        for _ in tracked(range(repeats), f"batches of {long} chunks"):
            costs = [batches.verified(short, parties).wall_s for _ in range(SHORT_BATCHES)]
            pairs.append(batches.verified(long, parties).wall_s / long / (statistics.median(costs) / short))
    return pairs


def _charts(modes: dict[str, _Mode]) -> list[Chart]:
    last = {name: mode.comparisons[-1] for name, mode in modes.items()}
    bars = {
        "alone": list(last[SEPARATE].alone.items()),
        "together, fused": [(stage, speed) for stage, speed in last[FUSED].together.items()],
        "together, separate": [(stage, speed) for stage, speed in last[SEPARATE].together.items()],
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
            "A batch over its ideal",
            x="chunks in a batch",
            y="ratio",
            series={
                name: [(c.chunks, statistics.median(c.over_ideal)) for c in mode.comparisons]
                for name, mode in modes.items()
            },
            limits={"ideal": 1.0, "goal for four and more": 1.08},
            x_log=True,
        ),
    ]
