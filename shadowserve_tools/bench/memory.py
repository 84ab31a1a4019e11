"""Measures the data plane's resident size with prompts of 4K, 32K and 128K tokens.

Method: each prompt is fetched through a segment of 64 MiB, in batches, while the resident size is sampled. Shared
memory is the engine's and does not count. Chunks have two layers of Llama-3.1-8B's shape, so that the run is short:
only the number of chunks could make the size grow.

Prediction: the buffers plus 80 MiB for Python with gRPC and numpy, independent of the prompt. The limit is the buffers
plus 200 MiB.
"""

import threading
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from host_control.client import DataPlaneClient
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import llama_8b, put
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options

ALLOWANCE_BYTES = 200 << 20
SEGMENT_BYTES = 64 << 20


@click.command()
@output_options
def memory(output: Output) -> None:
    """Fetch prompts of 4K, 32K and 128K tokens and measure the data plane's resident size."""
    report = Report("memory", ["prompt_tokens", "batches", "resident_MiB", "buffers_MiB"])
    over = []
    with Programs() as programs:
        storage = programs.storage()
        data_plane = programs.data_plane(storage.address)
        plane = programs.enter_context(closing(DataPlaneClient(data_plane.address, connect_timeout_s=10)))
        for chunks in (16, 128, 512):
            workload = llama_8b(chunks, layers=2)
            put(workload, storage.address)
            with (
                Target.opened(data_plane.address, workload, SEGMENT_BYTES) as target,
                _Watch(data_plane.process.pid) as watch,
            ):
                target.fetch_through()
            statistics = plane.statistics()
            resident = watch.peak_bytes
            report.row(
                prompt_tokens=chunks * workload.layout.tokens,
                batches=statistics.batches,
                resident_MiB=resident >> 20,
                buffers_MiB=statistics.buffer_bytes >> 20,
            )
            over.append(resident / (statistics.buffer_bytes + ALLOWANCE_BYTES))
    report.ratio("resident_over_allowed", over, "at most 1 for every prompt")
    report.charts.append(
        Chart(
            "The data plane's memory over the prompt's length",
            x="prompt tokens",
            y="MiB",
            series={"resident": [(float(row["prompt_tokens"]), float(row["resident_MiB"])) for row in report.rows]},
            limits={
                "buffers": float(report.rows[-1]["buffers_MiB"]),
                "allowed": float(report.rows[-1]["buffers_MiB"] + (ALLOWANCE_BYTES >> 20)),
            },
            x_log=True,
        )
    )
    report.finish(output)


class _Watch:
    """Samples the largest resident size of a process, without shared memory."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
            resident = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
            self.peak_bytes = max(self.peak_bytes, resident)
            if self._stop.wait(0.01):
                return
