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

import functools
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import click

from shadowserve.pool.statistics import Statistics
from shadowserve_tools.bench.parts.disks import Disk, Disks, plain_rate, working_folder
from shadowserve_tools.bench.parts.options import benchmark, folder_option, numbers_option, repeats_option, whole
from shadowserve_tools.bench.parts.retrieval import Files, OurPool, Prefix, Retrieval, Store
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, in_turns, over, tracked, walls

FULL: Final = "pool and passthrough"
POOL_ONLY: Final = "pool only"
PASSTHROUGH_ONLY: Final = "passthrough only"
NEITHER: Final = "plain files"
Runs = dict[str, list[Retrieval]]

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


@benchmark(
    "devices", "system", "seconds", "GB_per_s", "cpu_s_per_GB", "orchestration_us_per_chunk",
    bars=["seconds", "cpu_s_per_GB"],
)  # fmt: skip
@whole("--chunks", 512, "Chunks of the prefix, 256 tokens each.", 8)
@whole("--chunk-kib", 7424, "KiB of a chunk.", 64, 1 << 20)
@numbers_option("--caps", "200,120,80", "MB/s of the devices, with commas between.", most=100_000, count=range(2, 17))
@whole("--memory", 100, "MB/s that memory counts with.")
@repeats_option(3, "Number of turns.")
@folder_option("Folder of the devices' files. [default: memory, if it has space]")
def pool(
    report: Report, programs: Programs, chunks: int, chunk_kib: int, caps: list[int], memory: int, repeats: int,
    folder: Path | None,
) -> None:  # fmt: skip
    """Store a prefix over memory and devices of different speed, and read it back cold."""
    speeds = [speed * _MEGA for speed in caps]
    prefix = Prefix(chunks, chunk_kib << 10)
    size = prefix.size + prefix.size // 8 + _SPARE_BYTES
    disks = programs.enter_context(Disks(programs.enter_context(working_folder(5 * prefix.size // 2, folder))))
    if disks.why_not:
        click.echo(f"the devices are files, as fast as they are: {disks.why_not}", err=True)
    shared = [disks.make(f"pool{number}", size, speed) for number, speed in enumerate(speeds)]
    with disks.capped():
        full = _open_full(programs, shared, memory * _MEGA, prefix, size)
    learned = full.statistics()
    if not disks.why_not:
        rates = [device.bandwidth_bytes_per_s for device in learned.devices]
        errors = [abs(rate / disk.cap - 1) for rate, disk in zip(rates, shared, strict=True)]
        report.ratio("organizer_error", [max(errors)], "none; of a bandwidth, as the organizer measured it")
    stores = _open(programs, disks, full, size, speeds)
    part = prefix.beginning(max(chunks // _ONE_DEVICE_SHARE, 1))
    parts = {FULL: prefix, POOL_ONLY: prefix, PASSTHROUGH_ONLY: part, NEITHER: part}
    for name, store in tracked(stores.items(), "storing"):
        store.put(parts[name])
    _judge_placement(report, learned, full.statistics())
    for name, store in tracked(stores.items(), "comparing"):
        store.cool()
        store.retrieve(parts[name], check=True)
    runs = {name: functools.partial(_cold, store, parts[name]) for name, store in stores.items()}
    alone: list[list[float]] = []

    def full_and_devices() -> Retrieval:
        retrieval = runs[FULL]()
        read, total = retrieval.device_bytes // _ALONE_SHARE, sum(disk.cap for disk in shared)
        alone.append([plain_rate(disk, read * disk.cap // total) for disk in shared])
        return retrieval

    with disks.capped():
        taken = in_turns(repeats, runs | {FULL: full_and_devices}, warm_up=0)
    devices = "files" if disks.why_not else "capped"
    _add_rows(report, devices, taken, prefix)
    for number, device_rates in enumerate(zip(*alone, strict=True), 1):
        rate = statistics.median(device_rates)
        report.row(devices=devices, system=f"device {number} alone", GB_per_s=rate / 1e9)
    sums, own = list(map(sum, alone)), taken[FULL]
    together = [total + memory * _MEGA for total in sums]
    aggregates = over([prefix.size / each for each in walls(own)], together)
    report.ratio("aggregate_over_sum", aggregates, "at least 0.95")
    rates = [each.device_bytes / each.wall_s for each in own]
    report.ratio("devices_over_sum", over(rates, sums), "the same without memory")
    orchestration, control = ([getattr(each, name) for each in own] for name in ("orchestration_s", "control_s"))
    report.ratio("orchestration_share", over(orchestration, walls(own)), "at most 0.008 of its time")
    report.ratio("control_share", over(control, walls(own)), "with handing reads over and taking them back")
    _judge_partial(report, taken, "")
    if not disks.why_not:
        taken = in_turns(repeats, runs, "measuring without caps", warm_up=0)
        _add_rows(report, "not capped", taken, prefix)
        shares = over([each.orchestration_s for each in taken[FULL]], walls(taken[FULL]))
        report.ratio("orchestration_share_uncapped", shares, "none; of devices that are memory")
        _judge_partial(report, taken, "_uncapped")
    simple, ours = ([each.cpu_s / each.device_bytes for each in taken[name]] for name in (NEITHER, PASSTHROUGH_ONLY))
    report.ratio("cpu_gain_over_filesystem", over(simple, ours), "at least 1.8")


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


def _open(stack: ExitStack, disks: Disks, full: OurPool, size: int, speeds: Sequence[int]) -> dict[str, Store]:
    """Open the other systems, with equal devices and the shares that the pool has measured."""
    fastest = max(speeds)
    found = full.statistics()
    shares = [found.memory_share, *(device.share for device in found.devices)]
    single = disks.make("single", size, fastest)
    folders = [disks.make_folder(f"files{number}", size, speed) for number, speed in enumerate(speeds)]
    folder = disks.make_folder("files", size, fastest)

    others: dict[str, Store] = {
        POOL_ONLY: Files(folders, shares),
        PASSTHROUGH_ONLY: OurPool([single], [1 << 50], 1, _ARENA_BYTES, size),
        NEITHER: Files([folder], [0, 1]),
    }
    for store in others.values():
        stack.enter_context(closing(store))
    return {FULL: full} | others


def _cold(store: Store, prefix: Prefix) -> Retrieval:
    store.cool()
    return store.retrieve(prefix)


def _add_rows(report: Report, devices: str, taken: Runs, prefix: Prefix) -> None:
    for name, own in taken.items():
        size = own[0].size
        orchestration = statistics.median(each.orchestration_s for each in own) / size * prefix.chunk_bytes * 1e6
        report.row(
            devices=devices,
            system=name,
            seconds=prefix.size / size * statistics.median(walls(own)),
            GB_per_s=size / statistics.median(walls(own)) / 1e9,
            cpu_s_per_GB=statistics.median(each.cpu_s / each.device_bytes for each in own) * 1e9,
            orchestration_us_per_chunk=orchestration or "",
        )


def _judge_partial(report: Report, taken: Runs, suffix: str) -> None:
    """Compare with the two halves of the design, as figure 10 of the paper."""
    each_s = {name: [run.wall_s / run.size for run in own] for name, own in taken.items()}
    for name, system, paper in (
        ("pool_only_over_full", POOL_ONLY, "1.8"),
        ("passthrough_only_over_full", PASSTHROUGH_ONLY, "2.3"),
    ):
        report.ratio(name + suffix, over(each_s[system], each_s[FULL]), f"the paper's, of TTFT: {paper}")


def _judge_placement(report: Report, before: Statistics, after: Statistics) -> None:
    """Compare the placed bytes with the shares that the pool had decided on, memory first."""
    shares = [before.memory_share, *(device.share for device in before.devices)]
    used = [new.used_bytes - old.used_bytes for new, old in zip(after.devices, before.devices, strict=True)]
    placed = [after.used_bytes - before.used_bytes - sum(used), *used]
    errors = [abs(own / sum(placed) / share - 1) for own, share in zip(placed, shares, strict=True)]
    report.ratio("placement_error", [max(errors)], "at most 0.01 of a share")
