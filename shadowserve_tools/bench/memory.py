"""Measures the data plane's memory, and the CPU time of control, with prompts of 4K, 32K and 128K tokens.

Method: each prompt is fetched through a segment of 64 MiB, in batches, while the resident size is sampled. Shared
memory is the engine's and does not count. Chunks have two layers of Llama-3.1-8B's shape, so that the run is short:
only the number of chunks could make the size grow.

Then prompts of 8K, 32K and 128K tokens, with all 32 layers, are fetched in layer order through a ring of 512 MiB, by
the manager that an engine uses. All values of a layer of a chunk are the same number, so that 128K tokens (17 GB of KV)
fit a small store. The first and the last value of each piece are checked. *Control* is the CPU time of the manager's
process and of the data plane's main thread.

Prediction: the buffers plus 80 MiB for Python with gRPC and numpy, independent of the prompt. The limit is the buffers
plus 200 MiB. In layer order the ring's size, and 10 to 30 ms of control per GiB, independent of the prompt.
"""

import functools
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from host_control.client import DataPlaneClient
from host_control.layer_fetch import LayerWindow
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve import native, record
from shadowserve.chunk import Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.loads import background
from shadowserve_tools.bench.parts.options import benchmark, repeats_option, whole
from shadowserve_tools.bench.parts.target import Target, fetch_job
from shadowserve_tools.bench.parts.workload import Workload, keys_of, llama_8b, named_layout, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, tracked

ALLOWANCE_BYTES: Final = 200 << 20
SEGMENT_BYTES: Final = 64 << 20
RING_BYTES: Final = 512 << 20
_TIMEOUT_S: Final = 300.0


@benchmark("order", "prompt_tokens", "batches", "resident_MiB", "buffers_MiB", "GiB_per_s", "control_ms_per_GiB")
@whole("--longest", 131072, "Tokens of the longest prompt in layer order.", 8192)
@repeats_option(3)
def memory(report: Report, programs: Programs, longest: int, repeats: int) -> None:
    """Fetch prompts of 4K to 128K tokens and measure the data plane's memory and the cost of control."""
    _measure_chunks(report, programs)
    _measure_layers(report, programs, longest // DEFAULT_CHUNK_TOKENS, repeats)


def _measure_chunks(report: Report, programs: Programs) -> None:
    ratios, points, buffers = [], [], 0
    storage = programs.storage()
    data_plane = programs.data_plane(storage.address)
    plane = programs.enter_context(closing(DataPlaneClient(data_plane.address, connect_timeout_s=10)))
    for chunks in (16, 128, 512):
        workload = llama_8b(chunks, layers=2)
        put(workload, storage.address)
        sizes = [0]
        sample = functools.partial(_sample, data_plane.process.pid, sizes)
        with Target.opened(data_plane.address, workload, SEGMENT_BYTES) as target, background(sample):
            target.fetch_through()
        tokens, resident = chunks * workload.layout.tokens, max(sizes)
        statistics = plane.statistics()
        buffers = statistics.buffer_bytes
        report.row(
            order="chunks",
            prompt_tokens=tokens,
            batches=statistics.batches,
            resident_MiB=resident >> 20,
            buffers_MiB=buffers >> 20,
        )
        ratios.append(resident / (buffers + ALLOWANCE_BYTES))
        points.append((float(tokens), float(resident >> 20)))
    report.ratio("resident_over_allowed", ratios, "at most 1 for every prompt")
    limits = {"buffers": float(buffers >> 20), "allowed": float(buffers + ALLOWANCE_BYTES >> 20)}
    title = "The data plane's memory over the prompt's length"
    report.charts.append(
        Chart(title, x="prompt tokens", y="MiB", series={"resident": points}, limits=limits, x_log=True)
    )


def _sample(pid: int, sizes: list[int], stop: threading.Event) -> None:
    """Append resident sizes of a process, without shared memory."""
    while True:
        sizes.append(_resident_bytes(pid, "RssAnon", "RssFile"))
        if stop.wait(0.01):
            return


def _measure_layers(report: Report, programs: Programs, longest: int, repeats: int) -> None:
    storage = programs.storage()
    data_plane = programs.data_plane(storage.address)
    plane = programs.enter_context(closing(DataPlaneClient(data_plane.address, connect_timeout_s=10)))
    workload = _uniform(longest)
    put(workload, storage.address)
    ring = RegisteredMemory(plane, [workload.layout], RING_BYTES, _TIMEOUT_S, progress=True)
    target = _Layers(workload)
    manager = KVCacheManager(
        plane, ring, target.scatter, scatter_layers=target.scatter_layers, fetch_timeout_s=_TIMEOUT_S
    )
    programs.enter_context(closing(manager))
    control, resident = dict[int, list[float]](), dict[int, list[float]]()
    for chunks in sorted({longest, min(128, longest), min(32, longest)}):
        before, gib = plane.statistics(), chunks * workload.layout.raw_bytes / (1 << 30)
        costs = [target.fetch(manager, chunks, data_plane.process.pid) for _ in range(repeats + 1)][1:]
        control[chunks] = [spent_s * 1e3 / gib for _, spent_s in costs]
        resident[chunks] = [float(_resident_bytes(data_plane.process.pid, "RssShmem"))]
        report.row(
            order="layers", prompt_tokens=chunks * DEFAULT_CHUNK_TOKENS, buffers_MiB=before.buffer_bytes >> 20,
            batches=(plane.statistics().batches - before.batches) // (repeats + 1),
            resident_MiB=int(resident[chunks][0]) >> 20, GiB_per_s=gib * len(costs) / sum(each for each, _ in costs),
            control_ms_per_GiB=float(np.median(control[chunks])),
        )  # fmt: skip
    shortest = min(control)
    for name, values, goal in (("control_growth", control, "at most 1.2"), ("ring_growth", resident, "at most 1.05")):
        ratios = [long / short for long, short in zip(values[longest], values[shortest], strict=True)]
        report.ratio(name, ratios, f"{goal}; longest over shortest prompt")


def _uniform(chunks: int) -> Workload:
    """Return chunks of Llama-3.1-8B's shape; each value of layer ``l`` of chunk ``c`` is ``32 c + l + 1``."""
    layout = named_layout(32, 8, kinds=2, vector_length=8 * 128, quantizer=Quantizer.LOSSLESS)
    tokens = list(range(chunks * DEFAULT_CHUNK_TOKENS))
    keys, records = keys_of(layout, tokens), []
    piece = layout.raw_bytes // layout.layers // 2
    for chunk, key in enumerate(tracked(keys, "making KV", chunks)):
        numbers = np.arange(layout.layers, dtype=np.uint16) + 32 * chunk + 1
        records.append(record.encode(key, native.Codec.LZ4, layout, memoryview(np.repeat(numbers, piece)).cast("B")))
    return Workload(layout, native.Codec.LZ4, tokens, keys, records, [])


class _Layers:
    """Takes layers out of the ring, and checks that each piece is the right one."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._pieces = workload, 0

    def scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        raise ShadowServeError("a chunk was delivered that was requested in layer order; please report this")

    def scatter_layers(
        self, job: FetchJob, part: int, chunks: Any, window: LayerWindow, layers: tuple[int, int]
    ) -> None:
        held = window.layers_end - window.layer
        pieces = np.frombuffer(chunks, np.uint16).reshape(-1, held, self._workload.layout.raw_bytes // 64)
        for layer in range(*layers):
            expected = 32 * (window.chunk + np.arange(len(pieces))) + layer + 1
            if not all((pieces[:, layer - window.layer, end] == expected).all() for end in (0, -1)):
                raise ShadowServeError(f"layer {layer} from chunk {window.chunk} on is not what is stored")
        self._pieces += len(pieces) * (layers[1] - layers[0])

    def fetch(self, manager: KVCacheManager, chunks: int, plane: int) -> tuple[float, float]:
        """Fetch leading chunks; return the seconds, and the CPU seconds of control."""
        self._pieces, before_s = 0, _control_s(plane)
        seconds = fetch_job(manager, self._workload.keys[:chunks], layerwise=True)
        spent_s = _control_s(plane) - before_s
        if self._pieces != 32 * chunks:
            raise ShadowServeError(f"{self._pieces} of {32 * chunks} layers of chunks came; please report this")
        return seconds, spent_s


def _control_s(plane: int) -> float:
    """Return the CPU seconds of this process, and of the main thread of the data plane."""
    (main,) = [thread for thread in psutil.Process(plane).threads() if thread.id == plane]
    return time.process_time() + main.user_time + main.system_time


def _resident_bytes(pid: int, *kinds: str) -> int:
    """Return the resident size of some kinds of a process's memory, as the kernel calls them."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[kind].split()[0]) << 10 for kind in kinds)
