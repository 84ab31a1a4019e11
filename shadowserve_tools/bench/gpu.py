"""Measures the load on a serving GPU: scattering KV into paged memory, and decoding beside it.

Method: a batch of 256 MiB of Llama-3.1-8B's KV is scattered into paged memory with the Triton kernel and with torch,
and compared with a copy of the same bytes within the GPU, each eight times in a row, so that the GPU does not wait for
the host. Then the matrix products of four Llama layers at batch 32
run on a stream of their own while KV arrives at 11 GB/s: alone, with scattering, with a stand-in for
decompressing on the GPU (65,536 lanes with dependent table lookups), and with fetches through shared memory.
``--cpu`` runs the code on CPU tensors for tests; its figures mean nothing.

Prediction: scattering reaches 0.7 of the copy's speed. A decode step is at most 2 % slower: 11 GB/s are 1.5 % of the
GPU's memory bandwidth.
"""

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import click
import numpy as np
import torch

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.delivery import SideStream, choose
from host_control.layouts import PagedLayout
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.gpu_kernels import HAS_TRITON, decompress, table
from shadowserve_tools.bench.parts.loads import background
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.target import fetch_job
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, in_turns, over

HEADS: Final = 8
HEAD_SIZE: Final = 128
BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
CHUNK_BLOCKS: Final = CHUNK_TOKENS // BLOCK_TOKENS
LANES: Final = 65536
"""Streams that a chunk is decoded in: one for each token and 4 elements of a vector, as many as keep a GPU busy."""
ORDERS: Final = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's names for tokens before heads, and heads before tokens: docs/guides/gpu.md."""
ROW: Final = 8
"""Scatters in a row."""
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class _Plan:
    device: Any
    layers: int
    chunks: int
    batch: int
    hidden: int
    kv_rate: float
    steps: int
    repeats: int

    @property
    def mover(self) -> Any:
        return "triton" if HAS_TRITON else "torch"

    @property
    def chunk_bytes(self) -> int:
        return self.layers * 2 * CHUNK_TOKENS * HEADS * HEAD_SIZE * 2

    @property
    def batch_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


Load = tuple[Callable[[], object], int]
"""Work beside decode steps, and the bytes of KV that it handles."""


@benchmark("what", "how", "GB_per_s", "ms", "note", bars=["GB_per_s", "ms"])
@whole("--layers", 32, "Layers of the model, Llama-3.1-8B's by default.")
@whole("--chunks", 8, "Chunks of 256 tokens in a batch.")
@whole("--batch", 32, "Sequences in a decode step.")
@whole("--hidden", 4096, "Size of a decode step.", 64)
@real(
    "--kv-rate", 11.0,
    "GB of KV that arrive in a second beside decode steps: 20 Gbit/s, times 4.4 for the compression.", 1e-6, 1e6,
)  # fmt: skip
@whole("--steps", 200, "Decode steps in a window.")
@repeats_option(7, "Turns that count.", 100)
@click.option("--cpu", is_flag=True, help="Run it on the CPU: that shows that it works; no figure means a thing.")
def gpu(report: Report, programs: Programs, cpu: bool, **options: Any) -> None:
    """Scatter fetched KV into a GPU's paged memory, alone and beside decode steps."""
    if not cpu and not torch.cuda.is_available():
        raise ShadowServeError(
            f"bench gpu needs a GPU, and torch {torch.__version__} finds none here; run it where there is one (a CUDA "
            "build of torch, NVIDIA's driver), or add --cpu to see that it works, on figures that mean nothing"
        )
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    plan = _Plan(device, **options)
    with torch.inference_mode():
        _scatter(report, plan)
        _decode_beside_scattering(report, plan)
        ways = {"shared_memory": ()} if cpu else {"pinned": (), "cuda_ipc": ("--fused", "false")}
        for delivery, flags in ways.items():
            with Programs() as running:
                _fetch(report, running, plan, delivery, *flags)


class _Paged:
    """An engine's paged memory, and one batch of KV to scatter into it."""

    def __init__(self, plan: _Plan, order: str, mover: Any, chunks: int) -> None:
        blocks = chunks * CHUNK_BLOCKS
        extent = {"L": plan.layers, "B": blocks, "H": HEADS, "N": BLOCK_TOKENS, "C": 2 * HEAD_SIZE}
        memory = torch.zeros([extent[name] for name in order], dtype=torch.bfloat16, device=plan.device)
        self.caches = list(memory.permute([order.index(name) for name in "LBHNC"]).unbind(0))
        self.layout = PagedLayout(self.caches, "kv_cells", mover, reshaping_bytes=512 << 20)
        self.blocks = np.random.default_rng(1).permutation(blocks).tolist()

    def scatter(self, chunks: Any) -> None:
        count = len(chunks) // self.layout.chunk_bytes(CHUNK_TOKENS) * CHUNK_BLOCKS
        self.layout.scatter(chunks, self.blocks[:count], CHUNK_BLOCKS)


def _seconds(plan: _Plan, work: Callable[[], object]) -> float:
    """Return the duration of ROW runs: by events on a GPU, by the clock on a CPU."""
    if plan.device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(ROW):
            work()
        return time.perf_counter() - begin
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(ROW):
        work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000


def _scatter(report: Report, plan: _Plan) -> None:
    source = torch.randint(0, 255, (plan.batch_bytes,), dtype=torch.uint8, device=plan.device)
    copy, ours = ("device copy", ""), ("scatter", f"NHD, {plan.mover}")
    works: dict[tuple[str, str], Callable[[], object]] = {
        copy: functools.partial(torch.empty_like(source).copy_, source)
    }
    for name, order in ORDERS.items():
        for mover in dict.fromkeys((plan.mover, "torch")):
            paged = _Paged(plan, order, mover, plan.chunks)
            works["scatter", f"{name}, {mover}"] = functools.partial(paged.scatter, source)
    runs = {key: functools.partial(_seconds, plan, work) for key, work in works.items()}
    taken = in_turns(plan.repeats, runs, "scattering")  # the first turn compiles
    for (what, how), own in taken.items():
        _add_transfer(report, what, how, ROW * plan.batch_bytes, own, f"{ROW} times {plan.batch_bytes >> 20} MiB")
    report.ratio("scatter_over_device_copy", over(taken[copy], taken[ours]), "at least 0.7")


def _add_transfer(report: Report, what: str, how: str, size: int, seconds: list[float], note: str) -> None:
    median = statistics.median(seconds)
    report.row(what=what, how=how, GB_per_s=size / median / 1e9, ms=median * 1e3, note=note)


class _Engine:
    """The matrix products of decode steps, with a Llama layer's weights used repeatedly, on its own stream."""

    def __init__(self, plan: _Plan) -> None:
        hidden, wide = plan.hidden, plan.hidden * 7 // 2
        shapes = [(hidden, hidden * 3 // 2), (hidden * 3 // 2, hidden), (hidden, 2 * wide), (2 * wide, hidden)]
        # Several layers, so that no cache of the GPU holds the weights.
        self._weights = [
            torch.randn(shape, dtype=torch.bfloat16, device=plan.device) / 64 for _ in range(4) for shape in shapes
        ]
        self._input = torch.randn(plan.batch, hidden, dtype=torch.bfloat16, device=plan.device)
        self._stream = torch.cuda.Stream(plan.device) if plan.device.type == "cuda" else None

    def step(self) -> float:
        """Run one decode step and return its seconds: an engine waits for each, since it samples from it."""
        begin = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            state = self._input
            for weight in self._weights:
                state = state @ weight
        if self._stream is not None:
            self._stream.synchronize()
        return time.perf_counter() - begin


def _keep_moving(plan: _Plan, work: Callable[[], object], each_bytes: int, ending: threading.Event) -> None:
    """Run ``work``, which handles ``each_bytes`` of KV, at the planned rate in this thread and its own stream."""
    stream, due = SideStream(plan.device, None), time.perf_counter()
    with torch.inference_mode():
        while not ending.is_set():
            with stream:
                work()
            due += each_bytes / (plan.kv_rate * 1e9)
            ending.wait(max(0.0, due - time.perf_counter()))


def _decode(report: Report, plan: _Plan, loads: dict[str, Load | None], ratios: dict[str, tuple[str, str]]) -> None:
    """Measure decode steps alone and beside each load; ``ratios`` has the name and goal of each load."""
    engine = _Engine(plan)

    def window(load: Load | None) -> float:
        with background(functools.partial(_keep_moving, plan, *load)) if load else nullcontext():
            return statistics.median(engine.step() for _ in range(plan.steps))

    runs = {name: functools.partial(window, load) for name, load in ({"nothing": None} | loads).items()}
    medians = in_turns(plan.repeats, runs, "decoding")
    for name, own in medians.items():
        note = f"batch {plan.batch}"
        how = f"alone, in turns with {', '.join(loads)}" if name == "nothing" else f"beside {name}"
        report.row(what="decode step", how=how, ms=statistics.median(own) * 1e3, note=note)
    for name, (ratio, goal) in ratios.items():
        slowdowns = [each - 1 for each in over(medians[name], medians["nothing"])]
        report.ratio(f"decode_step_slowdown_by_{ratio}", slowdowns, goal)


def _decode_beside_scattering(report: Report, plan: _Plan) -> None:
    source = torch.randint(0, 255, (plan.batch_bytes,), dtype=torch.uint8, device=plan.device)
    paged = _Paged(plan, ORDERS["NHD"], plan.mover, plan.chunks)
    symbols = torch.randint(0, 255, (plan.chunk_bytes // 2 // LANES or 1, LANES), dtype=torch.uint8, device=plan.device)
    elements = torch.empty(symbols.shape, dtype=torch.bfloat16, device=plan.device)
    states = table(plan.device)
    loads: dict[str, Load | None] = {
        "scattering": (lambda: paged.scatter(source), plan.batch_bytes),
        "decompressing": (lambda: decompress(symbols, states, elements), plan.chunk_bytes),
    }
    ratios = {
        "scattering": ("scatter", "at most 0.02"),
        "decompressing": ("decompression", "none; a stand-in for decompression on the GPU"),
    }
    _decode(report, plan, loads, ratios)


def _fetch(report: Report, programs: Programs, plan: _Plan, delivery: str, *flags: str) -> None:
    workload = llama_8b(2 * plan.chunks, layers=plan.layers)
    storage = programs.storage()
    put(workload, storage.address)
    address = programs.data_plane(storage.address, *flags).address
    target = programs.enter_context(_Target.opened(plan, address, delivery, workload))
    seconds = [target.fetch() for _ in range(plan.repeats + 1)][1:]
    what = f"fetches, {delivery}"
    _decode(report, plan, {what: (target.fetch, workload.raw_bytes)}, {what: (f"{delivery}_fetches", "at most 0.02")})
    target.verify()
    _add_transfer(report, "fetch", delivery, workload.raw_bytes, seconds, f"{workload.raw_bytes >> 20} MiB of KV")


class _Target:
    """Paged memory that whole fetches end in, through the manager that an engine uses."""

    def __init__(self, plan: _Plan, manager: KVCacheManager, paged: _Paged, workload: Workload) -> None:
        self._plan, self._paged, self._workload = plan, paged, workload
        self.fetch = functools.partial(fetch_job, manager, workload.keys)

    @classmethod
    @contextmanager
    def opened(cls, plan: _Plan, address: str, delivery_kind: str, workload: Workload) -> Iterator["_Target"]:
        config = HostConfig.from_engine({"delivery": delivery_kind, "data_plane": address})
        delivery = choose(config, plan.device)
        paged = _Paged(plan, ORDERS["NHD"], plan.mover, len(workload.keys))
        shape = workload.layout
        stream = SideStream(plan.device, delivery.gpu)

        def scatter(job: FetchJob, part: int, first: int, chunks: Any) -> None:
            count = len(chunks) // shape.raw_bytes * CHUNK_BLOCKS
            begin = first * CHUNK_BLOCKS
            with torch.inference_mode(), stream:
                paged.layout.scatter(chunks, paged.blocks[begin : begin + count], CHUNK_BLOCKS)

        with closing(DataPlaneClient(address, connect_timeout_s=TIMEOUT_S)) as client:
            size, progress = 2 * plan.chunks * shape.raw_bytes, delivery.shared
            registration = RegisteredMemory(client, [shape], size, TIMEOUT_S, make=delivery.fetch, progress=progress)
            manager = KVCacheManager(client, registration, scatter, fetch_timeout_s=TIMEOUT_S)
            with closing(manager):
                yield cls(plan, manager, paged, workload)

    def verify(self) -> None:
        chunk = torch.empty(self._workload.layout.raw_bytes, dtype=torch.uint8)
        for index, crc in enumerate(self._workload.crcs):
            blocks = self._paged.blocks[index * CHUNK_BLOCKS : (index + 1) * CHUNK_BLOCKS]
            self._paged.layout.gather(chunk, blocks)
            if self._plan.device.type == "cuda":
                torch.cuda.synchronize(self._plan.device)
            if native.crc32(chunk.numpy()) != crc:
                raise ShadowServeError(f"chunk {index} was not delivered as it was stored")
