"""Measures transfers within the interference budget: device reads beside writes, and fetches beside decoding.

Reads beside writes (``reads``): a prefix is read cold from a pool on one device, alone and while another thread writes
chunks continuously. Two pools take turns, with strict order (the device never reads and writes at the same time) and
without. As root with cgroup v1 the devices are loop devices whose reads are capped; otherwise they are files.

Fetches beside decoding: a steady batch decodes in real vLLM, in phases with a transfer and phases without. Fetches of
``lossless``, ``near_lossless`` and ``binned`` KV, and ``pages`` from a device, go at the rate that the plugin's own
policy sets, or without a bound (``_off``). The policy learns for some rounds before those that count. Each phase is
compared with the phases before and after it. Medians of steps are compared for fetches, and capped means for pages,
which come in bursts. ``_of_fastest`` is the same for the fastest tenth of a phase's steps, which other programs slow
down least; fetches beside them are steady. A control is measured as often as each load: it waits as long as a fetch,
and moves nothing. Its interval is the noise of the machine. Rounds end when the intervals are narrow, or with the time.
A slowdown has a result if its interval is narrow, or on one side of the goal.

Prediction: strict order costs reads 1 to 3 %. A GB/s of fetches costs a step 4 to 6 %, so the budget of 2 % leaves
0.2 to 0.3 GB/s, with a slowdown of 0.01 to 0.015; unbounded, 0.1 at 2 GB/s. All kinds of KV the same. Pages: 0.005
to 0.015 within the budget.
"""

import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from host_control.interference.slowdown import Interference
from host_control.interference.table import ComputeTable, attention_pairs
from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.interference import (
    DECODED_TOKENS,
    HALF_WIDTH_MAX,
    SLOWDOWN_MAX,
    holding,
    rounds_until_narrow,
)
from shadowserve_tools.bench.parts.disks import Disks, working_folder
from shadowserve_tools.bench.parts.engine import SETTLING_STEPS
from shadowserve_tools.bench.parts.loads import FetchLoop
from shadowserve_tools.bench.parts.options import benchmark, folder_option, listed, one_of, whole
from shadowserve_tools.bench.parts.paged import CHUNK_BLOCKS, MANY, PagedKv, PagedMemory
from shadowserve_tools.bench.parts.retrieval import Offered, OurPool, Prefix
from shadowserve_tools.bench.parts.serving import Engine, Load, Model, Stack, model_options
from shadowserve_tools.bench.parts.target import BUDGET, SteadySteps, Target
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, half_width, in_turns, over, tracked

STRICT: Final = "strict order"
MIXED: Final = "any order"
READ_SEED, WRITTEN_SEED = 1, 2
ARENA_BYTES: Final = 256 << 20
SPARE_BYTES: Final = 192 << 20
"""Space of a device besides the chunks: log, snapshots, and free space for evicting ahead."""
WRITTEN_SHARE: Final = 4
"""Chunks that are read, for each chunk that is written repeatedly."""
READ_PER_S: Final = 200_000_000
"""Bytes that the device reads in a second."""

READS: Final = "reads"
PAGES: Final = "pages"
FETCHED: Final = {"lossless": Quantizer.LOSSLESS, "near_lossless": Quantizer.WEIGHTED, "binned": Quantizer.BINNED}
KINDS: Final = (READS, *FETCHED, PAGES)
NOTHING: Final = "decoding without a load"
CONTROL: Final = "decoding beside a control that moves nothing"
LEARNING_STEPS: Final = 64
"""Steps of a phase while the policy learns. It remembers the last 500."""
PAGES_LAYERS, PAGES_HEADS = 4, 2
"""Shape of the KV in pages: a MiB a chunk, like the fetched chunks."""
FETCH_CHUNKS: Final = 16
"""Chunks of a fetch, a MiB each: a layer of 256 tokens."""
FETCH_S: Final = 0.05
"""Duration of a fetch within the budget. A phase begins and ends with a complete one."""
PAGES_S: Final = 0.1
"""Duration of a load of pages: a turn of the data plane."""
FASTEST: Final = "none; without the noise of a busy machine"
MIXED_MIN: Final = 0.95

Middle = Callable[[Sequence[float]], float]


@dataclass
class _Steps:
    """Measurements of decode steps.

    Attributes:
        seconds: Duration of each step, by the load beside it.
        over: Steps of a phase over those of the unloaded phases before and after it.
        fastest_over: The same for the fastest tenth of the steps.
        rates: Bytes per second of the load in each phase.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    over: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    fastest_over: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@benchmark(
    "what", "read_GB_per_s", "written_GB_per_s", "dropped", "step_ms", "fetch_GB_per_s",
    bars=["step_ms", "read_GB_per_s"],
)  # fmt: skip
@model_options(layers=4, chunks=1)  # short steps, for more samples
@listed("--kinds", ",".join(KINDS), "What to measure.", one_of(KINDS))
@whole("--read-chunks", 96, "Chunks to read in a turn.", 8)
@whole("--chunk-kib", 7424, "KiB of a chunk.", 64, 1 << 20)
@whole("--turns", 3, "Turns of reading.")
@whole("--batch", 2, "Requests that decode steadily.")
@whole("--learning", 8, "Rounds in which the policy learns; they do not count.")
@whole("--rounds", 12, "Least rounds that count.", 6)
@whole("--rounds-max", 240, "Most rounds, if intervals are too wide.")
@whole("--seconds", 330, "Seconds after which no more rounds begin than the least.")
@whole("--phase-steps", 24, "Steps of a phase.", 2, LEARNING_STEPS)
@folder_option("Folder of the device's file. [default: memory, if it has space]")
def budget(
    report: Report, programs: Programs, model: Model, load: Load, kinds: list[str],
    read_chunks: int, chunk_kib: int, turns: int, batch: int, learning: int, rounds: int, rounds_max: int,
    seconds: int, phase_steps: int, folder: Path | None,
) -> None:  # fmt: skip
    """Measure reads beside writes, and decoding beside transfers within the budget."""
    if READS in kinds:
        _measure_disk(report, Prefix(read_chunks, chunk_kib << 10, seed=READ_SEED), turns, folder)
    moved = [kind for kind in KINDS if kind in kinds and kind != READS]
    if not moved:
        return
    load = holding(load, len(moved), LEARNING_STEPS)
    load = holding(load, 2 * len(moved) + 1, phase_steps)
    running = Stack(programs, model, load)
    movings = _fetching(programs, running, [kind for kind in moved if kind in FETCHED])
    if PAGES in moved:
        paged = _paged(programs, running)
        movings[PAGES] = _Moving(paged, paged.chunk_bytes, MANY // CHUNK_BLOCKS, PAGES_S, _mean)
    decoding, steps = _Decoding(running.engine, batch, movings), _Steps()
    within = [_name(kind) for kind in movings]
    for _ in tracked(range(learning), "learning"):
        decoding.round(within, LEARNING_STEPS, _Steps())
    beside = [CONTROL, *within, *(_name(kind, within=False) for kind in movings)]
    judged = [steps.over[name] for name in within]
    for number in rounds_until_narrow(rounds, rounds_max, judged, seconds):
        decoding.round(beside[:: -1 if number % 2 else 1], phase_steps, steps)
    for moving in movings.values():
        moving.verify()
    _report_steps(report, steps, movings)


def _name(kind: str, *, within: bool = True) -> str:
    """Return the name of the phases with a load."""
    what = "pages from a device" if kind == PAGES else f"fetching {kind} KV"
    return f"decoding beside {what}, {'within the budget' if within else 'no bound'}"


def _fetching(stack: ExitStack, running: Stack, kinds: Sequence[str]) -> dict[str, "_Moving"]:
    """Store KV of each kind, and return the loads that fetch it."""
    loads, beside = {}, None
    for kind in kinds:
        workload = llama_8b(FETCH_CHUNKS, layers=1, quantizer=FETCHED[kind])
        put(workload, running.storage.address)
        beside = stack.enter_context(Target.opened(running.data_plane.address, workload, beside=beside))
        loads[kind] = _Moving(beside, workload.layout.raw_bytes, FETCH_CHUNKS, FETCH_S, statistics.median)
    return loads


def _measure_disk(report: Report, prefix: Prefix, turns: int, folder: Path | None) -> None:
    """Measure reads alone and beside writes, in pools with strict order and without."""
    written = Prefix(max(len(prefix.names) // WRITTEN_SHARE, 1), prefix.chunk_bytes, seed=WRITTEN_SEED)
    size = (prefix.size + written.size) * 9 // 8 + SPARE_BYTES
    with ExitStack() as stack:
        disks = stack.enter_context(Disks(stack.enter_context(working_folder(2 * size, folder))))
        if disks.why_not:
            click.echo(f"the device is a file, as fast as it is: {disks.why_not}", err=True)
        runs = {}
        for name, strict in ((STRICT, True), (MIXED, False)):
            device = disks.make("strict" if strict else "mixed", size, READ_PER_S)
            pool = stack.enter_context(closing(OurPool([device], [1 << 50], 1, ARENA_BYTES, size, strict=strict)))
            pool.put(prefix)
            pool.cool()
            pool.retrieve(prefix, check=True)
            runs[name] = functools.partial(_read, pool, prefix, written)
        with disks.capped():
            found = in_turns(turns, runs, "reading", warm_up=0)
        report.more["capped"] = not disks.why_not
    for (name, own), ratio, goal in zip(
        found.items(),
        ("mixed_over_reads_alone", "mixed_over_reads_alone_any_order"),
        (f"at least {MIXED_MIN:g}", "none; without strict order"),
        strict=True,
    ):
        alone, beside, offered = zip(*own, strict=True)
        report.row(what=f"reads alone, {name}", read_GB_per_s=statistics.median(alone) / 1e9)
        report.row(
            what=f"reads beside writes, {name}",
            read_GB_per_s=statistics.median(beside) / 1e9,
            written_GB_per_s=statistics.median(each.written / each.seconds for each in offered) / 1e9,
            dropped=statistics.median(each.dropped / (each.taken + each.dropped) for each in offered),
        )
        report.ratio(ratio, over(beside, alone), goal)


def _read(pool: OurPool, prefix: Prefix, written: Prefix) -> tuple[float, float, Offered]:
    """Read the prefix alone and beside writes; return both rates, and what was written."""
    pool.cool()
    alone = pool.retrieve(prefix)
    pool.cool()
    with pool.written(written) as offered:
        beside = pool.retrieve(prefix)
    return alone.device_bytes / alone.wall_s, beside.device_bytes / beside.wall_s, offered


class _Pages:
    """Paged memory that receives a device's pages, as in the plugin; ``rate`` in bytes per second, 0 for no bound."""

    def __init__(self, paged: PagedMemory, kv: PagedKv) -> None:
        self._paged, self._steps = paged, SteadySteps(paged.plane.client)
        self.rate, self.chunk_bytes = 0, kv.paged.raw_bytes

    def fetch(self, count: int | None = None) -> None:
        self._steps.report(self.rate)
        self._paged.retrieve((MANY // CHUNK_BLOCKS if count is None else count) * CHUNK_BLOCKS)

    def clear(self) -> None:
        self._paged.clear()

    def verify(self) -> None:
        self._paged.verify(MANY)


def _paged(stack: ExitStack, running: Stack) -> _Pages:
    """Start a data plane whose device has pages, on the cores of the other one."""
    kv = PagedKv(PAGES_LAYERS, PAGES_HEADS)
    cores = json.dumps(running.partition.data_plane)
    return _Pages(PagedMemory(stack, running.folder, running.folder / "pages", kv, "--cores", cores), kv)


@dataclass(frozen=True)
class _Moving:
    """A load beside decoding, and the policy that sets its rate.

    Attributes:
        part_s: Duration of a transfer within the budget.
        middle: Statistic of a phase's steps.
    """

    target: Target | _Pages
    chunk_bytes: int
    chunks: int
    part_s: float
    middle: Middle
    policy: Interference = field(default_factory=lambda: Interference(BUDGET))

    def loop(self, *, within: bool) -> FetchLoop:
        """Return a loop that transfers in short parts at the policy's rate, or everything at once without a bound."""
        rate = self.policy.rate if within else 0
        self.target.rate = rate
        wanted = int(rate * self.part_s / self.chunk_bytes) if rate else self.chunks
        count = min(max(wanted, 1), self.chunks)
        return FetchLoop(self.target, count * self.chunk_bytes, count)

    def verify(self) -> None:
        """Transfer everything once more and compare it with what was stored."""
        self.target.rate = 0
        self.target.clear()
        self.target.fetch()
        self.target.verify()


def _mean(steps: Sequence[float]) -> float:
    """Return the mean, with each step capped at twice the median: a longer one waited for something else."""
    most = 2 * statistics.median(steps)
    return statistics.mean(min(step, most) for step in steps)


def _tenth(steps: Sequence[float]) -> float:
    """Return the duration that a tenth of the steps do not exceed."""
    return statistics.quantiles(steps, n=10, method="inclusive")[0]


class _Nothing:
    """Moves nothing, and takes as long as a fetch."""

    def fetch(self, count: int | None = None) -> None:
        time.sleep(FETCH_S)


class _Decoding:
    """A steady batch beside loads, by their kind."""

    def __init__(self, engine: Engine, batch: int, movings: dict[str, _Moving]) -> None:
        self._engine, self._batch = engine, batch
        self._beside = {
            _name(kind, within=own): (moving, own) for kind, moving in movings.items() for own in (True, False)
        }
        self._policies = [moving.policy for moving in movings.values()]
        self._table = ComputeTable()
        self._decoded = 0

    def round(self, beside: list[str], length: int, steps: _Steps) -> None:
        """Decode a phase of ``length`` steps with each load, and an unloaded one before and after each."""
        self._engine.call("decode_start", batch=self._batch, tokens=DECODED_TOKENS, beside=len(beside), steps=length)
        self._decoded = 0
        before = self._note(steps.seconds[NOTHING], self._durations(length), 0.0, self._policies)
        for name in beside:
            loop, middle, learning = self._load(name)
            with loop.running():
                durations = self._durations(length)
            own = self._note(steps.seconds[name], durations, loop.rate, learning)
            steps.rates[name].append(loop.rate)
            after = self._note(steps.seconds[NOTHING], self._durations(length), 0.0, self._policies)
            for found, figure in ((steps.over, middle), (steps.fastest_over, _tenth)):
                found[name].append(figure(own) / ((figure(before) + figure(after)) / 2))
            before = after
        self._engine.call("decode_stop")

    def _load(self, name: str) -> tuple[FetchLoop, Middle, list[Interference]]:
        """Return a load's loop, its statistic of a phase, and the policy that learns from it, if any."""
        if name == CONTROL:
            return FetchLoop(_Nothing(), 0), statistics.median, []
        moving, within = self._beside[name]
        return moving.loop(within=within), moving.middle, [moving.policy] if within else []

    def _durations(self, steps: int) -> list[float]:
        self._decoded += SETTLING_STEPS
        return [wall for wall, _ in self._engine.call("decode_steps", steps=steps)]

    def _note(
        self, seconds: list[float], durations: list[float], rate: float, policies: list[Interference]
    ) -> list[float]:
        """Let policies learn from steps as in the plugin, record the steps, and return them."""
        for duration in durations:
            pairs = self._batch * attention_pairs(DECODED_TOKENS + self._decoded, 1)
            self._decoded += 1
            if predicted := self._table.predict("decoding", self._batch, pairs):
                for policy in policies:
                    policy.decoded(predicted, duration, rate)
            if not rate:
                self._table.observe("decoding", self._batch, pairs, duration)
        seconds += durations
        return durations


def _report_steps(report: Report, steps: _Steps, movings: dict[str, _Moving]) -> None:
    for name, seconds in steps.seconds.items():
        row: dict[str, Any] = {"what": name, "step_ms": statistics.median(seconds) * 1e3}
        if any(rates := steps.rates.get(name, [])):
            row["fetch_GB_per_s"] = statistics.median(rates) / 1e9
        report.row(**row)
    for kind, moving in movings.items():
        prefix = "" if kind == "binned" else f"{kind}_"
        within, free = _name(kind), _name(kind, within=False)
        slowdowns = [each - 1 for each in steps.over[within]]
        report.interval(f"{prefix}decode_step_slowdown", slowdowns, _goal(slowdowns), HALF_WIDTH_MAX)
        report.interval(f"{prefix}decode_step_slowdown_off", [each - 1 for each in steps.over[free]], "none")
        if kind in FETCHED:
            for name, suffix in ((within, ""), (free, "_off")):
                fastest = [each - 1 for each in steps.fastest_over[name]]
                report.interval(f"{prefix}decode_step_slowdown_of_fastest{suffix}", fastest, FASTEST)
        left, unbound = ([rate / 1e9 for rate in steps.rates[name]] for name in (within, free))
        report.interval(f"{prefix}rate_left_GB_per_s", left, "none")
        report.ratio(f"{prefix}rate_off_GB_per_s", unbound, "none")
        report.ratio(f"{prefix}cost_for_each_GB_per_s", [moving.policy.cost], "none; as the policy has learned it")
    for suffix, found in (("", steps.over), ("_of_fastest", steps.fastest_over)):
        report.interval(f"control_slowdown{suffix}", [each - 1 for each in found[CONTROL]], "none; nothing is moved")


def _goal(slowdowns: Sequence[float]) -> str:
    """Return the goal of a slowdown; none if its interval is wide and has the goal in it."""
    width = half_width(slowdowns)
    if width > HALF_WIDTH_MAX and abs(statistics.median(slowdowns) - SLOWDOWN_MAX) <= width:
        return f"no result: ± {width:.2g} is too wide; at most {SLOWDOWN_MAX:g}"
    return f"at most {SLOWDOWN_MAX:g}"
