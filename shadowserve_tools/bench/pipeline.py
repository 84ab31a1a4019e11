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

import functools
import itertools
import os
import socket
import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil

from shadowserve import native
from shadowserve.cores import usable_cores
from shadowserve_tools.bench.parts.batches import Batches, StagesAlone
from shadowserve_tools.bench.parts.lean import connect
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Cost, Report, cpu_s, cpus, measure, over, repeat, tracked, walls

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


@benchmark("chunks", "stages", "wall_s", "cpu_s", "GB_per_s", "ideal_s", "over_ideal", "stolen")
@whole("--chunks", 64, "1, 2, 4 .. up to these.", most=256)
@whole("--layers", 32, "Layers of a chunk.", most=32)
@whole("--long", 512, "Chunks of a long prompt.", most=2048)
@whole("--long-layers", 16, "Layers of its chunks.", most=32)
@whole("--connections", 2, "Connections to the storage node.", most=16)
@repeats_option(5, "Number of turns.")
def pipeline(
    report: Report, programs: Programs, chunks: int, layers: int, long: int, long_layers: int, connections: int,
    repeats: int,
) -> None:  # fmt: skip
    """Compare batches through the pipeline with the ideal of its stages."""
    counts = [1 << power for power in range(chunks.bit_length())]
    found: dict[tuple[str, int], _Comparison] = {}
    with _served(llama_8b(min(chunks, DISTINCT), layers=layers), connections) as served:
        alone = StagesAlone(served.workload, served.connections, counts[-1])
        with ExitStack() as stack:
            pipelines = {}
            for name in (FUSED, SEPARATE, APART)[: 2 if len(usable_cores()) == 1 else 3]:
                with served.placed(apart=name == APART):
                    batches = stack.enter_context(closing(served.batches(counts[-1], name != SEPARATE)))
                    batches.verified(counts[-1], [served.server])  # touches every buffer
                    pipelines[name] = batches
            for count, (name, batches) in itertools.product(counts, pipelines.items()):
                with served.placed(apart=name == APART):
                    turns = repeats * min(SHORT_TURNS, counts[-1] // count)
                    found[name, count] = _compared(report, served, batches, alone, name, count, turns)
    with _served(llama_8b(min(long, DISTINCT), layers=long_layers), connections) as served:
        growth = _growth(served, long, repeats)

    def add(ratio: str, name: str, parts: list[int], goal: str) -> None:
        """Add the ratio of the number of chunks with the largest median."""
        if parts and name in pipelines:
            worst = max((found[name, count].over_ideal for count in parts), key=statistics.median)
            report.ratio(f"over_ideal_{ratio}", worst, f"{goal}, for each of {parts[0]} to {parts[-1]} chunks")

    few = [count for count in counts if count <= FEW]
    for name, suffix in ((FUSED, ""), (APART, "_apart")):
        add(f"one{suffix}", name, few, GOAL_ONE)
        add(f"many{suffix}", name, counts[len(few) :], GOAL_MANY)
    add("separate", SEPARATE, counts, GOAL_MANY)
    report.ratio("linear_growth", growth, f"at most 1.05: a chunk's time, {long} of them over {min(long, DISTINCT)}")
    _charts(report, found, counts[-1])


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

    def ideal(self, cost: Cost, server_s: float, alone_s: Iterable[float]) -> float:
        """Return the ideal time of a batch.

        Args:
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
        sockets = [programs.enter_context(connect(storage.address)) for _ in range(connections)]
        yield _Served(workload, psutil.Process(storage.process.pid), sockets, usable_cores())


@dataclass(frozen=True)
class _Comparison:
    """Batches of one number of chunks.

    Attributes:
        over_ideal: Time of each batch over its ideal.
        alone: Output of each stage alone, GB/s of a core.
        together: The same while all stages run.
    """

    over_ideal: list[float]
    alone: dict[str, float]
    together: dict[str, float]


def _compared(
    report: Report, served: _Served, batches: Batches, alone: StagesAlone, name: str, chunks: int, repeats: int
) -> _Comparison:
    stages = alone.runs(name != SEPARATE)
    server_s: list[float] = []

    def batch() -> Cost:
        before = cpu_s(served.server)
        cost = batches.verified(chunks, [served.server])
        server_s.append(cpu_s(served.server) - before)  # the server is idle before and after
        return cost

    before, began = batches.statistics(), psutil.cpu_times()
    runs = [functools.partial(measure, functools.partial(run, chunks)) for run in stages.values()]
    batch_costs, *costs = repeat(repeats, batch, *runs, description=f"{name}, {chunks} chunks")
    after, stolen = batches.statistics(), _stolen(began)
    # The compute stages ran on one thread; a pipeline has one for each core. The network stage has its own threads.
    shares = [1 if stage == "net" else len(served.cores) for stage in stages]
    alone_s = zip(
        *([wall / share for wall in walls(own)] for own, share in zip(costs, shares, strict=True)), strict=True
    )
    ideals = list(map(served.ideal, batch_costs, server_s[1:], alone_s))  # without the warm-up
    spent = {stage: after[stage].busy_ns - before[stage].busy_ns for stage in STAGES}
    together = {
        label: (after[stage].output_bytes - before[stage].output_bytes) / spent[stage]
        for stage, label in STAGES.items()
        if spent[stage]
    }
    sizes = alone.output_bytes(chunks)
    speeds = {
        stage: sizes[stage] / statistics.median(cpus(own)) / 1e9 for stage, own in zip(stages, costs, strict=True)
    }
    comparison = _Comparison(over(walls(batch_costs), ideals), speeds, together)
    wall = statistics.median(walls(batch_costs))
    report.row(
        chunks=chunks, stages=name, wall_s=wall, cpu_s=statistics.median(cpus(batch_costs)),
        GB_per_s=chunks * served.workload.layout.raw_bytes / wall / 1e9, ideal_s=statistics.median(ideals),
        over_ideal=statistics.median(comparison.over_ideal), stolen=stolen,
    )  # fmt: skip
    return comparison


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


def _charts(report: Report, found: dict[tuple[str, int], _Comparison], most: int) -> None:
    fused, separate = found[FUSED, most], found[SEPARATE, most]
    bars = {"alone": separate.alone, "together, fused": fused.together, "together, separate": separate.together}
    title = f"Each stage alone, and while all run ({most} chunks)"
    series = {name: list(speeds.items()) for name, speeds in bars.items()}
    report.charts.append(Chart(title, x="", y="out of the stage, GB/s of one core", series=series, kind="bars"))
    ratios: dict[str, list[tuple[float, float]]] = {}
    for (name, count), comparison in found.items():
        ratios.setdefault(name, []).append((count, statistics.median(comparison.over_ideal)))
    limits = {"ideal": 1.0, "goal for four and more": 1.08}
    title = "A batch over its ideal"
    report.charts.append(Chart(title, x="chunks in a batch", y="ratio", series=ratios, limits=limits, x_log=True))
