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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import psutil

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.native import BlockDevice
from shadowserve_tools.bench.fetch import peers_option, raw_values
from shadowserve_tools.bench.parts.disks import run_operations
from shadowserve_tools.bench.parts.kernels import memory
from shadowserve_tools.bench.parts.options import benchmark, folder_option, repeats_option, whole
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.bench.peers.contender import Contender, Costs, Field, add_row
from shadowserve_tools.bench.peers.installed import L2, Bed, Starts, add_installed, lmcache_server
from shadowserve_tools.processes import Child, Programs, start_data_plane, start_storage, until
from shadowserve_tools.report import Cost, Report, cpus, measure, over, walls

MEMORY, SSD, REMOTE, MIXED = "memory", "SSD", "storage node", "memory + SSD + storage node"
PARTS: Final = (MEMORY, SSD, REMOTE)
PEER_MEMORY, PEER_DISK = "LMCache, memory", "LMCache, files"
DEVICE: Final = "device alone"
BOUND: Final = "what the three parts allow"
IN_FLIGHT: Final = 32
"""Requests in flight at the device alone."""
PIECE_BYTES: Final = 1 << 20
LINE_TIMEOUT_S: Final = 60.0
MORE: Final = 2
"""Additional chunks: one to touch memory with, and one that only the storage node has."""
SPARE: Final = 5
"""Records that fit in the tiers' memory, in all records: a quarter of it receives reads of devices."""


@benchmark("system", "GB_per_s", "cpu_s_per_GB", "wall_s", "runs", "note", bars=["GB_per_s"])
@whole("--chunks", 24, "Chunks of 256 tokens.", 3, 96)
@repeats_option(5)
@folder_option("Folder on the device to measure. [default: folder of temporary files]")
@peers_option
def tiers(
    report: Report, programs: Programs, chunks: int, repeats: int, folder: Path | None, peers_python: Path
) -> None:
    """Fetch from memory, from an SSD, from a storage node, and from all at once."""
    chunks -= chunks % 3
    workload = llama_8b(chunks + MORE)
    disk = programs.disk(folder)
    field = Field(_ours(programs, programs.logs, disk, workload))
    thirds = {_third(each.name): functools.partial(each.run, chunks // 3) for each in field.contenders[: len(PARTS)]}
    bed = Bed(peers_python, programs.logs, raw_values(programs.logs, workload), chunks)
    files = disk / "lmcache"
    files.mkdir()
    starts: Starts = {
        PEER_MEMORY: ("lmcache", lmcache_server),
        PEER_DISK: ("lmcache", functools.partial(lmcache_server, l2=L2(folder=files))),
    }
    peers = add_installed(field, programs, bed, starts)
    stored = workload.stored_bytes * chunks // len(workload.keys)
    device = functools.partial(measure, _Device(disk / "alone", stored).read)
    costs = field.measure(repeats, chunks, "tiers", **thirds, **{DEVICE: device})
    raw_bytes = chunks * workload.layout.raw_bytes
    field.add_rows(report, costs, raw_bytes)
    bounds = _bounds(costs, [costs[_third(name)] for name in PARTS])
    add_row(report, raw_bytes, bounds, system=BOUND, note="the slowest third, or all CPU time over the cores")
    add_row(report, stored, costs[DEVICE], system=DEVICE, note="of stored bytes")
    _ratios(report, costs, bounds, peers)


def _third(name: str) -> str:
    return f"a third of {name}"


class _Plane:
    """A data plane with tiers that is restarted before each run.

    Args:
        workload: Chunks to fetch, with MORE at the end.
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
        address = self._memory.ctypes.data
        reads = [
            Operation(
                kind=OperationKind.READ, offset=offset, length=PIECE_BYTES, address=address + offset,
                priority=Priority.FOREGROUND, done=lambda _: None,
            )
            for offset in range(0, len(self._memory), PIECE_BYTES)
        ]  # fmt: skip
        with closing(BlockDevice(self._file, queue_depth=IN_FLIGHT)) as device:
            run_operations(device, reads)


def _bounds(costs: Costs, thirds: Sequence[list[Cost]]) -> list[Cost]:
    """Return the least cost of a call with a third from each part.

    Such a call takes no less than the slowest third alone, nor than a third of all parts' CPU time over the cores.
    """
    cores = len(psutil.Process().cpu_affinity() or [0])
    bounds = []
    for *parts, first, second, last in zip(*(costs[name] for name in PARTS), *thirds, strict=True):
        cpu_s = sum(cpus(parts)) / len(parts)
        bounds.append(Cost(max(cpu_s / cores, *walls((first, second, last))), cpu_s))
    return bounds


def _ratios(report: Report, costs: Costs, bounds: list[Cost], peers: set[str]) -> None:
    resident, ssd, mixed, limits = (costs[name] for name in (MEMORY, SSD, MIXED, DEVICE))
    if PEER_MEMORY in peers:
        theirs = costs[PEER_MEMORY]
        report.ratio("memory_over_best_peer", over(walls(theirs), walls(resident)), f"at least 1.5; of {PEER_MEMORY}")
        words = f"at most 1; CPU seconds, of {PEER_MEMORY}"
        report.ratio("memory_cpu_over_best_peer", over(cpus(resident), cpus(theirs)), words)
    if PEER_DISK in peers:
        gains, most = (over(walls(costs[PEER_DISK]), walls(own)) for own in (ssd, limits))
        report.ratio("ssd_over_lmcache_disk", gains, "at least 4", most)
    slower = map(max, walls(limits), walls(resident))
    report.ratio("ssd_over_limit", over(slower, walls(ssd)), "at least 0.9; the device's, or decoding's")
    cores = len(psutil.Process().cpu_affinity() or [0])
    busy = {name: [cost.cpu_s / cores / cost.wall_s for cost in costs[name]] for name in (MEMORY, MIXED)}
    # The limit is a call with everything in memory: it does not keep its cores busy all the time, either.
    goal = "at least 0.9; its slowest third alone, or the CPU time of all over the cores"
    report.ratio("mixed_over_sum", over(walls(bounds), walls(mixed)), goal, busy[MEMORY])
    divided = _bounds(costs, [[Cost(own.wall_s / 3, own.cpu_s / 3) for own in costs[name]] for name in PARTS])
    goal = "none; a third of the time of its slowest part"
    report.ratio("mixed_over_divided", over(walls(divided), walls(mixed)), goal)
    for name, label in ((MEMORY, "memory"), (MIXED, "mixed")):
        report.ratio(f"{label}_busy", busy[name], "none; its CPU time over the cores, of its time")
