"""Compares engine pages that come from an SSD as they are with compressed records.

Method: KV of 8,192 tokens as one of four ranks of Llama-3.1-8B has it: 512 blocks of 16 tokens, 256 MiB. ``pages``
are stored as they are, and the device brings them into paged memory. ``compressed`` are lossless records, fetched
into shared memory and scattered. Paged memory is overwritten before, and compared after. ``control_growth`` is device
requests for 512 blocks over those for 16; ``control_cpu_growth`` the CPU time of all threads of the data plane but
the device's own. Below the data plane, the device alone reads all layers in one vectored request each, as a request
for each page, and page by page.

Prediction: ``control_growth`` 1, ``control_cpu_growth`` 1.12 (31 more key lookups of 8 us). Vectored requests are 40
times as cheap as page by page for the calling thread. ``pages_over_compressed`` 0.8 at a quarter of the CPU time.
"""

import functools
import mmap
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import numpy as np

from host_control.client import FetchPart
from host_control.layouts import PagedLayout
from host_control.registered_memory import RegisteredMemory
from shadowserve import native
from shadowserve.block import Operation, OperationKind, Pages, Priority
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.disks import run_operations
from shadowserve_tools.bench.parts.options import benchmark, folder_option, repeats_option, whole
from shadowserve_tools.bench.parts.paged import (
    BLOCK_TOKENS,
    CHUNK_BLOCKS,
    MANY,
    TIMEOUT_S,
    DevicePlane,
    PagedKv,
    PagedMemory,
)
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Cost, Report, cpus, in_turns, measure, over, repeat, walls

FEW: Final = CHUNK_BLOCKS
"""Blocks of the smaller retrieval: one chunk."""
SLOT: Final = 1.2
"""Length of a time slot for measuring control, in longest retrievals."""
ASKED: Final = 8
"""Slots of a pair, in turns: the CPU time of idle threads comes in bursts, ten times a second."""
PAGES, COMPRESSED = "pages", "compressed"
VECTORED, PAGE_BY_PAGE, ONE_BY_ONE = "vectored, a layer", "page by page, a layer", "one page after the other"
BANDWIDTHS: Final = (1, 2, 4, 8, 16, 32)
"""GB/s of devices in the table of the faster form: from one SATA SSD to several of PCIe 5."""
CORES: Final = (1, 2, 4, 8)


@benchmark("what", "blocks", "wall_ms", "GB_per_s", "cpu_s_per_GB", "control_ms", "requests")
@whole("--layers", 32, "Layers of the model.", most=128)
@whole("--heads", 2, "KV heads of one rank; Llama has 8.", 2, 8)
@repeats_option(7)
@folder_option("Folder on the device to measure. [default: folder of temporary files]")
def pages(report: Report, programs: Programs, layers: int, heads: int, repeats: int, folder: Path | None) -> None:
    """Compare an engine's pages from an SSD with compressed records."""
    disk = programs.disk(folder)
    kv = PagedKv(layers, heads)
    paged = PagedMemory(programs, programs.logs, disk / PAGES, kv)
    compressed = _Compressed(programs, programs.logs, disk / COMPRESSED, kv)
    requests: dict[int, list[float]] = {FEW: [], MANY: []}
    runs = [functools.partial(_measured, paged, count, requests) for count in (FEW, MANY)]
    few_pages, plain, coded = repeat(repeats, *runs, compressed.measured, description="pages")
    slot_s = SLOT * max(walls(plain))
    slots = (functools.partial(_control, paged, count, slot_s) for count in (0, FEW, MANY))
    idle, few, many = repeat(repeats * ASKED, *slots, description="control")
    by = _by_pages(disk / "alone", kv, repeats)
    block_bytes = kv.page_bytes * layers
    control = {FEW: _control_ms(few, idle), MANY: _control_ms(many, idle)}
    for what, count, own in ((PAGES, FEW, few_pages), (PAGES, MANY, plain), (COMPRESSED, MANY, coded)):
        wall_s, cpu_s, raw = statistics.median(walls(own)), statistics.median(cpus(own)), count * block_bytes
        report.row(
            what=what, blocks=count, wall_ms=1e3 * wall_s, GB_per_s=raw / wall_s / 1e9, cpu_s_per_GB=cpu_s / raw * 1e9,
            control_ms=statistics.median(control[count]) if what == PAGES else "",
            requests=statistics.median(requests[count]) if what == PAGES else "",
        )  # fmt: skip
    for what, own in by.items():
        wall_s = statistics.median(walls(own))
        report.row(
            what=what, blocks=MANY, wall_ms=1e3 * wall_s, GB_per_s=MANY * block_bytes / wall_s / 1e9,
            control_ms=1e3 * statistics.median(cpus(own)),
        )  # fmt: skip
    report.ratio("control_growth", over(requests[MANY], requests[FEW]), "exactly 1")
    report.ratio("control_cpu_growth", over(control[MANY], control[FEW]), "at most 1.05; 512 blocks over 16")
    idle_ms = [1e3 * ratio for ratio in over(cpus(idle), walls(idle))]
    report.more["idle_ms_per_s"] = {"median": statistics.median(idle_ms), "from": min(idle_ms), "to": max(idle_ms)}
    vectored, page_by_page, one_by_one = by.values()
    goal = "at least 3; CPU time of the thread that asks"
    report.ratio("vectored_over_page_by_page", over(cpus(page_by_page), cpus(vectored)), goal)
    report.ratio("vectored_over_page_by_page_time", over(walls(page_by_page), walls(vectored)), "none")
    report.ratio("vectored_over_one_by_one_time", over(walls(one_by_one), walls(vectored)), "none")
    report.ratio("pages_over_compressed", over(walls(coded), walls(plain)), "none")
    report.ratio("pages_cpu_over_compressed", over(cpus(plain), cpus(coded)), "none")
    _what_wins(report, plain, coded, MANY * block_bytes, compressed.stored_share)


def _control_ms(own: Sequence[Cost], idle: Sequence[Cost]) -> list[float]:
    """Return the milliseconds of a retrieval's control beyond those of an idle slot; means of ASKED slots."""
    more = [1e3 * (with_.cpu_s - without.cpu_s) for with_, without in zip(own, idle, strict=True)]
    return [statistics.mean(more[first : first + ASKED]) for first in range(0, len(more), ASKED)]


def _what_wins(report: Report, plain: Sequence[Cost], coded: Sequence[Cost], raw: int, stored: float) -> None:
    """Add a chart of the device rate from which pages are faster, by number of cores: device or cores are the limit."""
    plain_s, coded_s = (statistics.median(cpus(own)) / raw * 1e9 for own in (plain, coded))
    report.more["model"] = {"stored_share": stored, "pages_cpu_s_per_GB": plain_s, "compressed_cpu_s_per_GB": coded_s}
    series: dict[str, list[tuple[float, float]]] = {
        f"{cores} cores": [
            (rate, max(stored / rate, coded_s / cores) / max(1 / rate, plain_s / cores)) for rate in BANDWIDTHS
        ]
        for cores in CORES
    }
    title, limits = "pages over compressed, by what binds", {"as fast": 1.0}
    report.charts.append(Chart(title, x="GB/s of devices", y="times as fast", series=series, limits=limits, x_log=True))


def _measured(paged: PagedMemory, count: int, requests: dict[int, list[float]]) -> Cost:
    """Retrieve ``count`` blocks, compare every byte, and record the number of device requests."""
    paged.clear()
    before = paged.plane.count("page_requests_total")
    cost = measure(lambda: paged.retrieve(count), [paged.plane.process])
    requests[count].append(paged.plane.count("page_requests_total") - before)
    paged.verify(count)
    return cost


def _control(paged: PagedMemory, count: int, slot_s: float) -> Cost:
    """Return the control's CPU time in a slot of fixed length, in which ``count`` blocks are retrieved."""
    begin_s, before_s = time.perf_counter(), paged.plane.control_s()
    if count:
        paged.retrieve(count)
    time.sleep(max(begin_s + slot_s - time.perf_counter(), 0.0))
    return Cost(time.perf_counter() - begin_s, paged.plane.control_s() - before_s)


class _Compressed:
    """The same KV as records on a device: fetched, decoded, and scattered into pages."""

    def __init__(self, stack: ExitStack, logs: Path, disk: Path, kv: PagedKv) -> None:
        import torch

        self._kv = kv
        self._plane = DevicePlane(stack, logs, disk, kv.compressed, kv, plain=False)
        shape, blocks = kv.compressed, 2 * MANY
        caches = torch.zeros((kv.layers, blocks, kv.heads, BLOCK_TOKENS, 2 * 128), dtype=torch.bfloat16)
        self._layout = PagedLayout(list(caches), "cpu_pages")
        self._blocks = np.random.default_rng(3).permutation(blocks)[:MANY].tolist()
        self._size = len(kv.keys[shape.namespace]) * shape.raw_bytes
        self.stored_share = self._plane.count("stored_bytes_total") / self._size

    def measured(self) -> Cost:
        """Retrieve all blocks from the device, with nothing in memory."""
        self._plane.restart()
        shape = self._kv.compressed
        keys = self._kv.keys[shape.namespace]
        with closing(RegisteredMemory(self._plane.client, [shape], self._size, TIMEOUT_S)) as registration:
            memory = registration.acquire(TIMEOUT_S).memory
            where = registration.memory_id

            def retrieve() -> None:
                done = 0
                while done < len(keys):
                    part = FetchPart.whole(shape, where, keys[done:], done * shape.raw_bytes)
                    answer = self._plane.client.start_fetch(secrets.token_hex(8), [part], TIMEOUT_S).result()
                    if not (chunks := answer.chunks[0]):
                        raise ShadowServeError(f"fetching stopped at chunk {done}: {answer.reason}: {answer.detail}")
                    held = memory[done * shape.raw_bytes : (done + chunks) * shape.raw_bytes]
                    at = self._blocks[done * CHUNK_BLOCKS : (done + chunks) * CHUNK_BLOCKS]
                    self._layout.scatter(held, at, CHUNK_BLOCKS)
                    done += chunks

            cost = measure(retrieve, [self._plane.process])
            for index in range(len(keys)):
                held = memory[index * shape.raw_bytes : (index + 1) * shape.raw_bytes]
                if bytes(held) != self._kv.chunk(index).tobytes():
                    raise ShadowServeError(f"chunk {index} in memory is not what was stored; please report this")
        return cost


def _by_pages(file: Path, kv: PagedKv, repeats: int) -> dict[str, list[Cost]]:
    """Read all layers of 512 blocks with a device alone: vectored, page by page, and one page after the other.

    Costs are elapsed time and CPU time of the calling thread. Only vectored requests check checksums, on the device's
    thread.
    """
    row = MANY * kv.page_bytes
    with closing(native.BlockDevice(file, size=kv.layers * row)) as device:
        memory = mmap.mmap(-1, row)
        device.register(memoryview(memory))
        view = np.frombuffer(memory, np.uint8)
        address = view.ctypes.data
        for layer in range(kv.layers):
            view[:] = np.resize(kv.chunk(layer), row)
            run_operations(device, [_operation(OperationKind.WRITE, layer * row, row, address)])
        blocks = np.random.default_rng(5).permutation(MANY).astype(np.uint32)
        extents = np.arange(0, row, CHUNK_BLOCKS * kv.page_bytes, dtype=np.uint64)

        def vectored(layer: int) -> None:
            parts = np.zeros((1, len(extents)), np.uint32)
            table = Pages(
                size=kv.page_bytes, stride=kv.page_bytes, layers=np.zeros(1, np.uint64), extents=extents,
                blocks=blocks.reshape(-1, CHUNK_BLOCKS), checksums=parts, verdicts=parts.copy(), word=0,
                left=np.full(1, len(extents), np.uint32), stop=np.zeros(1, np.uint32),
            )  # fmt: skip
            operation = _operation(OperationKind.READ, layer * row, CHUNK_BLOCKS * kv.page_bytes, address)
            operation.pages = table
            run_operations(device, [operation])

        def read(index: int, layer: int) -> Operation:
            place = address + int(blocks[index]) * kv.page_bytes
            return _operation(OperationKind.READ, layer * row + index * kv.page_bytes, kv.page_bytes, place)

        def page_by_page(layer: int) -> None:
            run_operations(device, [read(index, layer) for index in range(MANY)])

        def one_by_one(layer: int) -> None:
            for index in range(MANY):
                run_operations(device, [read(index, layer)])

        runs = {VECTORED: vectored, PAGE_BY_PAGE: page_by_page, ONE_BY_ONE: one_by_one}
        timed = {name: functools.partial(_timed, run, kv.layers) for name, run in runs.items()}
        costs = in_turns(repeats, timed, "a device alone")
        del view
    return costs


def _operation(kind: OperationKind, offset: int, length: int, address: int) -> Operation:
    return Operation(kind, offset, length, address, Priority.FOREGROUND, lambda operation: None)


def _timed(run: Callable[[int], None], layers: int) -> Cost:
    begin_s, before_s = time.perf_counter(), time.thread_time()
    for layer in range(layers):
        run(layer)
    return Cost(time.perf_counter() - begin_s, time.thread_time() - before_s)
