"""Measures the data plane's resident size with prompts of 4K, 32K and 128K tokens.

Method: each prompt is fetched through a segment of 64 MiB, in batches, while the resident size is sampled. Shared
memory is the engine's and does not count. Chunks have two layers of Llama-3.1-8B's shape, so that the run is short:
only the number of chunks could make the size grow.

Prediction: the buffers plus 80 MiB for Python with gRPC and numpy, independent of the prompt. The limit is the buffers
plus 200 MiB.
"""

import functools
import threading
from contextlib import closing
from pathlib import Path
from typing import Final

from host_control.client import DataPlaneClient
from shadowserve_tools.bench.parts.loads import background
from shadowserve_tools.bench.parts.options import benchmark
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report

ALLOWANCE_BYTES: Final = 200 << 20
SEGMENT_BYTES: Final = 64 << 20


@benchmark("prompt_tokens", "batches", "resident_MiB", "buffers_MiB")
def memory(report: Report, programs: Programs) -> None:
    """Fetch prompts of 4K, 32K and 128K tokens and measure the data plane's resident size."""
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
            prompt_tokens=tokens, batches=statistics.batches, resident_MiB=resident >> 20, buffers_MiB=buffers >> 20
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
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        sizes.append(sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")))
        if stop.wait(0.01):
            return
