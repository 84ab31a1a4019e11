"""Measures hits in the data plane's memory, on its SSD, in a storage node, and in all three at once.

Method: 24 chunks of Llama-3.1-8B's shape (32 MiB each, lossless) are fetched into memory that an engine shares. The
data plane is restarted before each fetch, and the memory overwritten; every byte is compared after it. The mixture
has a third in each tier. LMCache's multiprocess server is the peer, from its memory and from files (O_DIRECT).
"Device alone" reads as many stored bytes with io_uring and does nothing with them. ``ssd_over_limit`` compares with
the device alone or with the fetch from memory, whichever is slower; ``mixed_over_sum`` with the slowest third alone,
or all CPU time over the cores. ``--folder`` selects another device than that of temporary files.

Prediction: memory 5 to 7 GB/s on two cores, 6 to 12 times LMCache at a fifth of its CPU time. ``ssd_over_limit`` 0.9,
``ssd_over_lmcache_disk`` 4 to 6, ``mixed_over_sum`` 0.9.
"""

import functools
import json
import os
import select
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click
import psutil

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.native import BlockDevice
from shadowserve_tools.bench.fetch import Target, add_row, peers_option, raw_values, runs_of, wall_gains
from shadowserve_tools.bench.parts.kernels import memory
from shadowserve_tools.bench.parts.options import folder_option
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.bench.peers.contender import Contender
from shadowserve_tools.bench.peers.installed import Bed, Start, lmcache_server, start_installed
from shadowserve_tools.processes import Child, Programs, start_data_plane, start_storage, until
from shadowserve_tools.report import Cost, Output, Report, measure, output_options, repeat

MEMORY, SSD, REMOTE, MIXED = "memory", "SSD", "storage node", "memory + SSD + storage node"
PARTS: Final = (MEMORY, SSD, REMOTE)
PEER_MEMORY, PEER_DISK = "LMCache, memory", "LMCache, files"
DEVICE: Final = "device alone"
BOUND: Final = "what the three parts allow"
IN_FLIGHT: Final = 32
"""Requests in flight at the device alone."""
PIECE_BYTES: Final = 1 << 20
POLL_MS: Final = 100
LINE_TIMEOUT_S: Final = 60.0
MORE: Final = 2
"""Additional chunks: one to touch memory with, and one that only the storage node has."""
SPARE: Final = 5
"""Records that fit in the tiers' memory, in all records: a quarter of it receives reads of devices."""


@click.command()
@click.option("--chunks", default=24, show_default=True, type=click.IntRange(3, 96), help="Chunks of 256 tokens.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@folder_option("Folder on the device to measure. [default: folder of temporary files]")
@peers_option
@output_options
def tiers(chunks: int, repeats: int, folder: Path | None, peers_python: Path, output: Output) -> None:
    """Fetch from memory, from an SSD, from a storage node, and from all at once."""
    chunks -= chunks % 3
    report = Report("tiers", ["system", "GB_per_s", "cpu_s_per_GB", "wall_s", "runs", "note"], bars=["GB_per_s"])
    workload = llama_8b(chunks + MORE)
    with Programs() as programs:
        disk = programs.disk(folder)
        contenders = _ours(programs, programs.logs, disk, workload)
        bed = Bed(peers_python, programs.logs, raw_values(programs.logs, workload), chunks)
        files = disk / "lmcache"
        files.mkdir()
        starts: dict[str, tuple[str, Start]] = {
            PEER_MEMORY: ("lmcache", lmcache_server),
            PEER_DISK: ("lmcache", functools.partial(lmcache_server, folder=files)),
        }
        peers, absent = start_installed(programs, bed, starts)
        contenders += peers
        stored = workload.stored_bytes * chunks // len(workload.keys)
        device = functools.partial(measure, _Device(disk / "alone", stored).read)
        runs = [functools.partial(each.run, chunks) for each in contenders]
        shares = [functools.partial(each.run, chunks // 3) for each in contenders if each.name in PARTS]
        *costs, limits = repeat(repeats, *runs, *shares, device, description="tiers")
    found = dict(zip(contenders, costs, strict=False))
    raw_bytes = chunks * workload.layout.raw_bytes
    for each, own in found.items():
        add_row(report, raw_bytes, own, system=each.name, note=each.note)
    parts = [runs_of(found, name) for name in PARTS]
    bounds = _bounds(parts, costs[len(contenders) :])
    add_row(report, raw_bytes, bounds, system=BOUND, note="the slowest third, or all CPU time over the cores")
    add_row(report, stored, limits, system=DEVICE, note="of stored bytes")
    for name, reason in absent.items():
        report.row(system=name, note=reason)
    _ratios(report, found, limits, bounds, {each.name for each in peers})
    report.finish(output)


class _Plane:
    """A data plane with tiers that is restarted before each run.

    Args:
        logs: Folder of its logs.
        storage: Its storage node.
        workload: Chunks to fetch, with MORE at the end.
        tiers: Configuration of its tiers; None for none.
        alone: True to run without the storage node.
        prime: Leading chunks that are fetched after each start, after one chunk was fetched to every place.
        connects: True to fetch the last chunk once, too, which opens the connections to the storage node.
    """

    def __init__(
        self,
        logs: Path,
        storage: Child,
        workload: Workload,
        tiers: dict[str, Any] | None,
        *,
        alone: bool = False,
        prime: int = 0,
        connects: bool = False,
    ) -> None:
        self._logs = logs
        self._storage = storage
        self._workload = workload
        self._prime = prime
        self._connects = connects
        self._has_devices = tiers is not None and "devices" in tiers
        self._address = "" if alone else storage.address
        room = f"{workload.stored_bytes + (64 << 20)}"
        self._flags = ["--decompression-buffer-bytes", room, "--shutdown-timeout-s", "60"]
        self._flags += ["--tiers", json.dumps(tiers)] if tiers is not None else []
        self._stack = ExitStack()
        self._processes: list[psutil.Process] = []
        self._target: Target
        logs.mkdir(exist_ok=True)

    def restart(self) -> None:
        """Restart the data plane, with only the primed chunks in memory."""
        self.close()
        plane = self._stack.enter_context(start_data_plane(self._logs, self._address, *self._flags))
        self._processes[:] = [psutil.Process(child.process.pid) for child in (plane, self._storage)]
        self._target = self._stack.enter_context(Target.opened(plane.address, self._workload))
        if self._has_devices:
            await_line(plane, "memory_registered")  # registering takes cores for a moment after a start
        chunks = len(self._workload.keys) - MORE
        self._target.touch(chunks)
        if self._connects:
            self._target.touch(chunks + 1, places=1)
        if self._prime:
            self._target.fetch(self._prime)
        self._target.clear()

    def close(self) -> None:
        self._stack.close()

    def contender(self, name: str) -> Contender:
        return Contender(
            name=name,
            kind="ours",
            fetch=lambda count: self._target.fetch(count),
            clear=self.restart,
            verify=lambda count: self._target.verify(count),
            processes=self._processes,
        )


def _ours(stack: ExitStack, logs: Path, disk: Path, workload: Workload) -> list[Contender]:
    """Fill the tiers, and return the contender of each."""
    storage = stack.enter_context(start_storage(logs))
    put(workload, storage.address)
    chunks = len(workload.keys) - MORE
    room = {"memory_budget_bytes": SPARE * workload.stored_bytes, "scrub_bytes_per_s": 0}
    room |= {"write_bytes_under_way_max": 2 * workload.stored_bytes}  # one fetch must fill the device

    def on_disk(name: str, **more: Any) -> dict[str, Any]:
        (disk / name).mkdir(exist_ok=True)
        device = {"path": str(disk / name / "tier"), "size": 2 * workload.stored_bytes + (64 << 20)}
        return room | {"devices": [device]} | more

    for name, count in ((SSD, chunks), (MIXED, chunks // 3 * 2)):
        filler = _Plane(logs / "filler", storage, workload, on_disk(name), prime=count)
        filler.restart()
        filler.close()
    mixed = on_disk(MIXED, admission="second_hit")
    planes = {
        MEMORY: _Plane(logs / "memory", storage, workload, room, prime=chunks),
        SSD: _Plane(logs / "ssd", storage, workload, on_disk(SSD), alone=True),
        REMOTE: _Plane(logs / "remote", storage, workload, None),
        # Records from the storage node are not written to the device, where the next run would find them.
        MIXED: _Plane(logs / "mixed", storage, workload, mixed, prime=chunks // 3, connects=True),
    }
    for plane in planes.values():
        stack.callback(plane.close)
    return [plane.contender(name) for name, plane in planes.items()]


def await_line(child: Child, text: str) -> None:
    """Wait until a program has logged ``text``."""
    until(lambda: text in child.log.read_text(), f"{child.log} has no line '{text}'", LINE_TIMEOUT_S)


class _Device:
    """Reads a file past the page cache with many requests in flight, as the pool does, and discards the bytes."""

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        pieces = -(-size // PIECE_BYTES)
        with file.open("wb", buffering=0) as written:
            for _ in range(pieces):
                written.write(os.urandom(PIECE_BYTES))
            os.fsync(written.fileno())
        self._memory = memory(pieces * PIECE_BYTES)

    def read(self) -> None:
        """Read the whole file."""
        address = self._memory.ctypes.data
        reads = [
            Operation(
                kind=OperationKind.READ, offset=offset, length=PIECE_BYTES, address=address + offset,
                priority=Priority.FOREGROUND, done=lambda _: None,
            )
            for offset in range(0, len(self._memory), PIECE_BYTES)
        ]  # fmt: skip
        with closing(BlockDevice(self._file, queue_depth=IN_FLIGHT)) as device:
            waiting = select.poll()
            waiting.register(device.fileno(), select.POLLIN)
            device.submit(reads)
            left = len(reads)
            while left:
                waiting.poll(POLL_MS)
                for ended in device.completed():
                    if ended.error is not None:
                        raise ended.error
                    left -= 1


def _bounds(parts: Sequence[list[Cost]], thirds: Sequence[list[Cost]]) -> list[Cost]:
    """Return the least cost of a call with a third from each part.

    Such a call takes no less than the slowest third alone, nor than a third of all parts' CPU time over the cores.

    Args:
        parts: Costs of calls with everything from one part.
        thirds: Costs of calls with a third from one part. They begin and end like a whole call.
    """
    cores = len(psutil.Process().cpu_affinity() or [0])
    bounds = []
    for whole, third in zip(zip(*parts, strict=True), zip(*thirds, strict=True), strict=True):
        cpu_s = sum(cost.cpu_s for cost in whole) / len(whole)
        bounds.append(Cost(max(cpu_s / cores, *(cost.wall_s for cost in third)), cpu_s))
    return bounds


def _ratios(
    report: Report, costs: dict[Contender, list[Cost]], limits: list[Cost], bounds: list[Cost], peers: set[str]
) -> None:
    resident, ssd, mixed = (runs_of(costs, name) for name in (MEMORY, SSD, MIXED))
    if PEER_MEMORY in peers:
        theirs = runs_of(costs, PEER_MEMORY)
        report.ratio("memory_over_best_peer", wall_gains(resident, theirs), f"at least 1.5; of {PEER_MEMORY}")
        cpus = [own.cpu_s / other.cpu_s for own, other in zip(resident, theirs, strict=True)]
        report.ratio("memory_cpu_over_best_peer", cpus, f"at most 1; CPU seconds, of {PEER_MEMORY}")
    if PEER_DISK in peers:
        theirs = runs_of(costs, PEER_DISK)
        report.ratio("ssd_over_lmcache_disk", wall_gains(ssd, theirs), "at least 4", wall_gains(limits, theirs))
    walls = [
        max(device.wall_s, decoded.wall_s) / own.wall_s
        for own, decoded, device in zip(ssd, resident, limits, strict=True)
    ]
    report.ratio("ssd_over_limit", walls, "at least 0.9; the device's, or decoding's")
    goal = "at least 0.9; its slowest third alone, or the CPU time of all over the cores"
    cores = len(psutil.Process().cpu_affinity() or [0])
    busy = {name: [cost.cpu_s / cores / cost.wall_s for cost in runs_of(costs, name)] for name in (MEMORY, MIXED)}
    # The limit is a call with everything in memory: it does not keep its cores busy all the time, either.
    report.ratio("mixed_over_sum", wall_gains(mixed, bounds), goal, busy[MEMORY])
    parts = (resident, ssd, runs_of(costs, REMOTE))
    divided = _bounds(parts, [[Cost(own.wall_s / 3, own.cpu_s / 3) for own in each] for each in parts])
    report.ratio("mixed_over_divided", wall_gains(mixed, divided), "none; a third of the time of its slowest part")
    for name, label in ((MEMORY, "memory"), (MIXED, "mixed")):
        report.ratio(f"{label}_busy", busy[name], "none; its CPU time over the cores, of its time")
