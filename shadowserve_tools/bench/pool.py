"""Measures reading a prefix from memory and several devices at once (unified KV pooling, figure 10).

Method: 512 chunks of 7.25 MiB are stored once and read back cold, in one process without a network. A chunk has
arrived when its bytes are in memory and its checksums are right. Four systems take turns: the pool on memory and
three devices; *pool only*, its placement over plain files; *passthrough only*, the pool on one device; plain files on
one device, read by 16 threads. As root with cgroup v1 the devices are loop devices capped to 200, 120 and 80 MB/s;
then all runs again without caps. Memory counts with 100 MB/s in the shares. ``aggregate_over_sum`` compares with what
each device gives a plain program, plus memory's 100 MB/s. ``orchestration_share`` is CPU time of finding keys,
planning reads and finding memory; ``control_share`` also has submitting and completing reads. ``organizer_error`` is
the worst of the bandwidths that the pool measured itself.

Prediction: the full pool and *pool only* take as long as the devices, 7.8 s; one device 2.5 times as long.
``aggregate_over_sum`` 0.97, orchestration 0.2 %, 3.5 times less CPU time than files. Uncapped, *pool only* takes 2
times.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from shadowserve.pool.statistics import Statistics
from shadowserve_tools.bench.parts.disks import Disk, Disks, plain_rate, working_folder
from shadowserve_tools.bench.parts.options import folder_option, numbers_option
from shadowserve_tools.bench.parts.retrieval import Files, OurPool, Prefix, Retrieval, Store
from shadowserve_tools.report import Output, Report, output_options, tracked

FULL: Final = "pool and passthrough"
POOL_ONLY: Final = "pool only"
PASSTHROUGH_ONLY: Final = "passthrough only"
NEITHER: Final = "plain files"
SYSTEMS: Final = (FULL, POOL_ONLY, PASSTHROUGH_ONLY, NEITHER)

_MEGA: Final = 1_000_000
_ONE_DEVICE_SHARE: Final = 4
"""A system with one device reads a quarter of the prefix, and the table has four times its time."""
_ALONE_SHARE: Final = 3
"""A device alone is read for a third of the pool's time."""
_LEARNING_SHARE: Final = 4
"""Part of the prefix, as a divisor, that is read before the placement, to measure bandwidths..."""
_LEARNING_ROUNDS: Final = 4
"""...and the number of such reads, so that each device is read for seconds."""
_SPARE_BYTES: Final = 192 << 20
"""Space of a device besides the chunks: log, snapshots, file system, and free space for evicting ahead."""
_ARENA_BYTES: Final = 256 << 20
"""Memory to read into, besides memory's share of the prefix."""


@dataclass(frozen=True)
class _Turn:
    """Measurements of one turn: each system, and the bytes per second of each device alone."""

    taken: dict[str, Retrieval]
    alone: list[float]

    def seconds(self, name: str, size: int) -> float:
        """Return a system's time for ``size`` bytes."""
        return size * self.taken[name].wall_s / self.taken[name].size


@click.command()
@click.option(
    "--chunks", default=512, show_default=True, type=click.IntRange(8), help="Chunks of the prefix, 256 tokens each."
)
@click.option("--chunk-kib", default=7424, show_default=True, type=click.IntRange(64, 1 << 20), help="KiB of a chunk.")
@numbers_option("--caps", "200,120,80", "MB/s of the devices, with commas between.", most=100_000, count=range(2, 17))
@click.option("--memory", default=100, show_default=True, type=click.IntRange(1), help="MB/s that memory counts with.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 50), help="Number of turns.")
@folder_option("Folder of the devices' files. [default: memory, if it has space]")
@output_options
def pool(
    chunks: int, chunk_kib: int, caps: list[int], memory: int, repeats: int, folder: Path | None, output: Output
) -> None:
    """Store a prefix over memory and devices of different speed, and read it back cold."""
    speeds = [speed * _MEGA for speed in caps]
    prefix = Prefix(chunks, chunk_kib << 10)
    report = Report(
        "pool",
        ["devices", "system", "seconds", "GB_per_s", "cpu_s_per_GB", "orchestration_us_per_chunk"],
        bars=["seconds", "cpu_s_per_GB"],
    )
    size = prefix.size + prefix.size // 8 + _SPARE_BYTES
    with ExitStack() as stack:
        where = stack.enter_context(working_folder(5 * prefix.size // 2, folder))
        disks = stack.enter_context(Disks(where))
        if disks.why_not:
            click.echo(f"the devices are files, as fast as they are: {disks.why_not}", err=True)
        shared = [disks.make(f"pool{number}", size, speed) for number, speed in enumerate(speeds)]
        with disks.capped():
            full = _open_full(stack, shared, memory * _MEGA, prefix, size)
        learned = full.statistics()
        if not disks.why_not:
            _judge_organizer(report, shared, learned)
        stores = _open(stack, disks, full, prefix, size, speeds)
        part = prefix.beginning(max(chunks // _ONE_DEVICE_SHARE, 1))
        parts = {FULL: prefix, POOL_ONLY: prefix, PASSTHROUGH_ONLY: part, NEITHER: part}
        for name, store in tracked(stores.items(), "storing"):
            store.put(parts[name])
        _judge_placement(report, learned, full.statistics())
        for name, store in tracked(stores.items(), "comparing"):
            store.cool()
            store.retrieve(parts[name], check=True)
        with disks.capped():
            turns = _turns(stores, shared, parts, repeats, "measuring")
        _add_rows(report, "files" if disks.why_not else "capped", turns, prefix)
        _judge(report, turns, prefix, memory * _MEGA)
        if not disks.why_not:
            turns = _turns(stores, [], parts, repeats, "measuring without caps")
            _add_rows(report, "not capped", turns, prefix)
            shares = [each.taken[FULL].orchestration_s / each.taken[FULL].wall_s for each in turns]
            report.ratio("orchestration_share_uncapped", shares, "none; of devices that are memory")
            _judge_partial(report, turns, "_uncapped")
        _judge_cpu(report, turns)
    report.finish(output)


def _open_full(stack: ExitStack, shared: Sequence[Disk], memory: int, prefix: Prefix, size: int) -> OurPool:
    """Open the pool on all devices, and let it measure their bandwidths with reads of another prefix."""
    kept = prefix.size * memory // (memory + sum(disk.cap for disk in shared))
    full = stack.enter_context(closing(OurPool(shared, None, memory, 2 * kept + _ARENA_BYTES, size)))
    other = Prefix(max(len(prefix.names) // _LEARNING_SHARE, 1), prefix.chunk_bytes, seed=3)
    full.put(other)
    for _ in tracked(range(_LEARNING_ROUNDS), "learning bandwidths"):
        full.cool()
        full.retrieve(other)
    return full


def _open(
    stack: ExitStack, disks: Disks, full: OurPool, prefix: Prefix, size: int, speeds: Sequence[int]
) -> dict[str, Store]:
    """Open the other systems, with equal devices and the shares that the pool has measured."""
    fastest = max(speeds)
    found = full.statistics()
    shares = [found.memory_share, *(device.share for device in found.devices)]
    single = disks.make("single", size, fastest)
    folders = [disks.make_folder(f"files{number}", size, speed) for number, speed in enumerate(speeds)]
    folder = disks.make_folder("files", size, fastest)

    def opened(store: Store) -> Store:
        stack.enter_context(closing(store))
        return store

    return {
        FULL: full,
        POOL_ONLY: opened(Files(folders, shares)),
        PASSTHROUGH_ONLY: opened(OurPool([single], [1 << 50], 1, _ARENA_BYTES, size)),
        NEITHER: opened(Files([folder], [0, 1])),
    }


def _turns(
    stores: dict[str, Store], shared: Sequence[Disk], parts: dict[str, Prefix], repeats: int, description: str
) -> list[_Turn]:
    turns = []
    for _ in tracked(range(repeats), description):
        taken = {}
        for name, store in stores.items():
            store.cool()
            taken[name] = store.retrieve(parts[name])
        read = taken[FULL].device_bytes // _ALONE_SHARE
        total = sum(disk.cap for disk in shared)
        turns.append(_Turn(taken, [plain_rate(disk, read * disk.cap // total) for disk in shared]))
    return turns


def _add_rows(report: Report, devices: str, turns: Sequence[_Turn], prefix: Prefix) -> None:
    def median(name: str, value: Callable[[Retrieval], float]) -> float:
        return statistics.median(value(each.taken[name]) for each in turns)

    for name in SYSTEMS:
        orchestration = median(name, lambda each: each.orchestration_s / each.size * prefix.chunk_bytes * 1e6)
        report.row(
            devices=devices,
            system=name,
            seconds=median(name, lambda each: prefix.size / each.size * each.wall_s),
            GB_per_s=median(name, lambda each: each.size / each.wall_s / 1e9),
            cpu_s_per_GB=median(name, lambda each: each.cpu_s / each.device_bytes * 1e9),
            orchestration_us_per_chunk=orchestration or "",
        )
    for number in range(len(turns[0].alone)):
        rate = statistics.median(each.alone[number] for each in turns)
        report.row(devices=devices, system=f"device {number + 1} alone", GB_per_s=rate / 1e9)


def _judge(report: Report, turns: Sequence[_Turn], prefix: Prefix, memory: int) -> None:
    full = [each.taken[FULL] for each in turns]
    sums = [sum(each.alone) for each in turns]
    report.ratio(
        "aggregate_over_sum",
        [prefix.size / own.wall_s / (alone + memory) for own, alone in zip(full, sums, strict=True)],
        "at least 0.95",
    )
    report.ratio(
        "devices_over_sum",
        [own.device_bytes / own.wall_s / alone for own, alone in zip(full, sums, strict=True)],
        "the same without memory",
    )
    report.ratio(
        "orchestration_share",
        [own.orchestration_s / own.wall_s for own in full],
        "at most 0.008 of its time",
    )
    report.ratio(
        "control_share", [own.control_s / own.wall_s for own in full], "with handing reads over and taking them back"
    )
    _judge_partial(report, turns, "")


def _judge_partial(report: Report, turns: Sequence[_Turn], suffix: str) -> None:
    """Compare with the two halves of the design, as figure 10 of the paper."""
    for name, system in (("pool_only_over_full", POOL_ONLY), ("passthrough_only_over_full", PASSTHROUGH_ONLY)):
        ratios = [each.seconds(system, 1) / each.seconds(FULL, 1) for each in turns]
        paper = {POOL_ONLY: "1.8", PASSTHROUGH_ONLY: "2.3"}[system]
        report.ratio(name + suffix, ratios, f"the paper's, of TTFT: {paper}")


def _judge_cpu(report: Report, turns: Sequence[_Turn]) -> None:
    def cost(each: _Turn, name: str) -> float:
        return each.taken[name].cpu_s / each.taken[name].device_bytes

    gains = [cost(each, NEITHER) / cost(each, PASSTHROUGH_ONLY) for each in turns]
    report.ratio("cpu_gain_over_filesystem", gains, "at least 1.8")


def _judge_placement(report: Report, before: Statistics, after: Statistics) -> None:
    """Compare the placed bytes with the shares that the pool had decided on, memory first."""
    shares = [before.memory_share, *(device.share for device in before.devices)]
    used = [new.used_bytes - old.used_bytes for new, old in zip(after.devices, before.devices, strict=True)]
    placed = [after.used_bytes - before.used_bytes - sum(used), *used]
    errors = [abs(own / sum(placed) / share - 1) for own, share in zip(placed, shares, strict=True)]
    report.ratio("placement_error", [max(errors)], "at most 0.01 of a share")


def _judge_organizer(report: Report, shared: Sequence[Disk], learned: Statistics) -> None:
    """Compare the bandwidths that the pool measured with the caps."""
    rates = [device.bandwidth_bytes_per_s for device in learned.devices]
    errors = [abs(rate / disk.cap - 1) for rate, disk in zip(rates, shared, strict=True)]
    report.ratio("organizer_error", [max(errors)], "none; of a bandwidth, as the organizer measured it")
