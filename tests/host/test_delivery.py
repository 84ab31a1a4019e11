"""All deliveries of KV to an engine: which one is selected, and that the real daemon uses it.

The daemon and the storage node are separate processes. The GPU is the fake driver's or a real one (gpu_support.py),
and the DPU is the DOCA emulator.
"""

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, REAL, first_gpu
from machine import PATIENT, WAIT_MAX_S, wait_for

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.cuda import CudaError
from host_control.delivery import Delivery, Gpu, SideStream, choose, on_gpu
from host_control.layer_fetch import LayerWindow
from host_control.layouts import PagedLayout
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.store import StoreQueue
from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.keys import KVNamespace, ModelIdentity, prefix_chain, record_keys
from shadowserve_tools.processes import Child, start_data_plane, start_storage

LAYERS, BLOCKS, HEADS, BLOCK, SIZE, CHUNK_BLOCKS = 2, 16, 2, 4, 8, 2
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK
STAGE_BY_STAGE = ("--fused", "false")
DPU = ("--backend", "doca")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)


# ---- Selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "data_plane", "device", "chosen"),
    [
        ("auto", "127.0.0.1:50151", CPU, "shared_memory"),
        ("auto", "dpu:50151", CPU, "shared_memory"),
        ("auto", "127.0.0.1:50151", CUDA, "pinned"),
        ("auto", "[::1]:50151", CUDA, "pinned"),
        ("auto", "localhost:50151", CUDA, "pinned"),
        ("auto", "unix:/run/dpu.sock", CUDA, "pinned"),
        ("auto", "192.168.100.2:50151", CUDA, "exported"),
        ("auto", "dpu{rank}:50151", CUDA, "exported"),
        ("shared_memory", "127.0.0.1:50151", CUDA, "shared_memory"),
        ("cuda_ipc", "127.0.0.1:50151", CUDA, "cuda_ipc"),
        ("exported", "127.0.0.1:50151", CPU, "exported"),
    ],
)
def test_delivery_is_chosen_by_engine_and_data_plane(
    fake_driver: Path, configured: str, data_plane: str, device: Any, chosen: str
) -> None:
    config = HostConfig.from_engine({"delivery": configured, "data_plane": data_plane})
    found: list[int] = []

    def find(ordinal: int) -> Gpu:
        found.append(ordinal)
        return first_gpu(fake_driver)

    delivery = choose(config, device, find)
    assert delivery.kind == chosen
    assert found == ([3] if device is CUDA and chosen != "shared_memory" else [])
    assert (delivery.gpu is not None) == bool(found)


@pytest.mark.parametrize("configured", ["pinned", "cuda_ipc"])
def test_gpu_delivery_is_refused_for_an_engine_on_cpus(configured: str) -> None:
    with pytest.raises(ConfigurationError, match="computes on cpu; use auto, shared_memory or exported"):
        choose(HostConfig.from_engine({"delivery": configured}), CPU)


def test_without_a_driver_auto_uses_shared_memory_and_others_fail(caplog: pytest.LogCaptureFixture) -> None:
    def find(ordinal: int) -> Gpu:
        raise CudaError("there is no CUDA driver here")

    assert choose(HostConfig.from_engine({}), CUDA, find).kind == "shared_memory"
    assert "slower" in caplog.text
    with pytest.raises(CudaError):
        choose(HostConfig.from_engine({"delivery": "pinned"}), CUDA, find)
    with pytest.raises(CudaError):
        choose(HostConfig.from_engine({"data_plane": "dpu:50151"}), CUDA, find)


def test_scattering_waits_for_launched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a step of an ended request wrote into a load's blocks. Streams and events are fakes."""
    said: list[str] = []
    step = 0

    class Stream(contextlib.AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: "Event") -> None:
            said.append(f"{self.name} waits for {event.after}")

        def synchronize(self) -> None:
            said.append(f"wait for {self.name}")

        def __exit__(self, *exception: object) -> None:
            pass

    class Event:
        after = ""

        def record(self, stream: Stream) -> None:
            self.after = f"{stream.name} up to step {step}"

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("ours"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("the engine's"))
    side = SideStream(CUDA, None)
    for _ in range(2):
        step += 1
        side.follow()
    step += 1
    with side:
        said.append("scatter")
    assert said == ["ours waits for the engine's up to step 2", "scatter", "wait for ours"]


# ---- End to end ------------------------------------------------------------------------------------------------------


class Engine:
    """An engine's paged memory and its transfers, connected as in the worker of a serving engine.

    Args:
        address: Address of the data plane.
        delivery: Delivery of chunks.
        chunks: Number of chunks in a batch of a fetch.
    """

    def __init__(self, address: str, delivery: Delivery, chunks: int = 3) -> None:
        memory = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16, device=DEVICE)
        self.caches = list(memory)
        self.layout = PagedLayout(self.caches, "kv_cells", "torch", 1 << 20)
        self.delivery = delivery
        self._side = SideStream(DEVICE, delivery.gpu if REAL else None)
        model = ModelIdentity(model="delivery", weights="1", dtype="bfloat16", chunk_tokens=CHUNK_TOKENS)
        shape = KVNamespace(model=model, layers=(0, LAYERS), heads=(0, HEADS)).name(
            ChunkLayout(
                dtype=DType.BFLOAT16, layers=LAYERS, kinds=2, vector_length=HEADS * SIZE,
                tokens=CHUNK_TOKENS, quantizer=Quantizer.LOSSLESS,
            )
        )  # fmt: skip
        chunk_keys = prefix_chain(model.digest(), list(range(BLOCKS * BLOCK)), chunk_tokens=CHUNK_TOKENS)
        self.keys = record_keys(shape.namespace, chunk_keys)
        self.client = DataPlaneClient(address, connect_timeout_s=WAIT_MAX_S)
        self.fetched = RegisteredMemory(
            self.client, [shape], 2 * chunks * shape.raw_bytes, WAIT_MAX_S, delivery.fetch, progress=delivery.shared
        )
        self.layers: list[tuple[int, int]] = []  # layers of each scatter, in loads layer by layer
        self.manager = KVCacheManager(
            self.client, self.fetched, self._scatter, scatter_layers=self._scatter_layers, fetch_timeout_s=WAIT_MAX_S
        )  # fmt: skip
        stored = RegisteredMemory(self.client, [shape], 8 * shape.raw_bytes, WAIT_MAX_S, delivery.store)
        self.queue = StoreQueue(self.client, stored, timeout=WAIT_MAX_S)

    def _scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        count = len(chunks) // self.layout.chunk_bytes(CHUNK_TOKENS) * CHUNK_BLOCKS
        blocks = job.target[first * CHUNK_BLOCKS :][:count]
        if self.delivery.gpu is not None and not REAL:
            # A kernel on a GPU runs after the copies. The fake driver's kernel is CPU code, which must wait for the
            # copies.
            self.delivery.gpu.stream.synchronize()
        with self._side:
            self.layout.scatter(chunks, blocks, CHUNK_BLOCKS)

    def _scatter_layers(
        self, job: FetchJob, shard: int, chunks: Any, window: LayerWindow, layers: tuple[int, int]
    ) -> None:
        self.layers.append(layers)
        held = (window.layer, window.layers_end)
        size = self.layout.chunk_bytes(CHUNK_TOKENS) // LAYERS * (held[1] - held[0])
        blocks = job.target[window.chunk * CHUNK_BLOCKS :][: len(chunks) // size * CHUNK_BLOCKS]
        with self._side:
            self.layout.scatter(chunks, blocks, CHUNK_BLOCKS, layers, held)

    def store(self) -> None:
        """Fill the paged memory with numbers, and store all of it."""
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE))

        def gather(index: int, chunk: Any) -> None:
            self.layout.gather(chunk, range(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS))

        assert self.queue.wait_tried(WAIT_MAX_S)
        staged = self.queue.offer(self.keys, gather)
        assert self.queue.flush(2 * WAIT_MAX_S)
        assert staged == len(self.keys) == BLOCKS // CHUNK_BLOCKS, (self.queue.take_counts(), self.queue.details)
        assert self.queue.take_counts()["stored"] == len(self.keys)

    def fetch(self, blocks: list[int], *, layerwise: bool = False) -> FetchResult:
        """Fetch all chunks into these blocks."""
        job = FetchJob(
            request_id=f"request {time.monotonic_ns()}", keys=(tuple(self.keys),), target=blocks, layerwise=layerwise
        )
        results = self.manager.exchange([job])
        self.manager.wait([job.request_id])
        (result,) = results + self.manager.exchange()
        return result

    def close(self) -> None:
        self.queue.close(WAIT_MAX_S)
        self.manager.close(WAIT_MAX_S)
        self.client.close()


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, fake_driver: Path) -> Iterator[Callable[..., str]]:
    """Return a function (flags) that returns the address of a data plane with the fake driver; equal ones are shared.

    All data planes have the same storage.
    """
    folder, running = tmp_path_factory.mktemp("processes"), dict[Any, Child]()
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(start_storage(folder))

        def begin(*flags: str, **environment: str) -> str:
            small = [
                f"--{name}-buffer-bytes=4MiB" for name in ("decompression", "dequantization", "dma-source", "store")
            ]
            if not REAL:
                environment = {"LD_LIBRARY_PATH": str(fake_driver.parent)} | environment
            key = (flags, *environment.items())
            if key not in running:
                running[key] = stack.enter_context(
                    start_data_plane(folder, storage.address, *PATIENT, *small, *flags, environment=environment)
                )
            return running[key].address

        yield begin


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that creates an engine, which is closed after the test."""
    with contextlib.ExitStack() as stack:

        def engine(*arguments: Any) -> Engine:
            made = Engine(*arguments)
            stack.callback(made.close)
            return made

        yield engine


def assert_fetched(writer: Engine, reader: Engine, *, layerwise: bool = False, again: Sequence[str] = ()) -> None:
    """Check that a reader gets all of the writer's KV, in other blocks. Some outcomes are tried again."""
    blocks = list(reversed(range(BLOCKS)))
    result = reader.fetch(blocks, layerwise=layerwise)
    while result.reason in again:
        result = reader.fetch(blocks, layerwise=layerwise)
    assert (result.complete, result.reason, result.chunks) == (True, "complete", (len(reader.keys),)), result.detail
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read[blocks], wrote)


def both_ways(delivery: Delivery) -> Delivery:
    """Return a delivery that also stores from the GPU."""
    return dataclasses.replace(delivery, store=delivery.fetch)


WAYS: dict[str, tuple[tuple[str, ...], Callable[[Gpu], Delivery]]] = {
    "pinned": ((), lambda gpu: on_gpu("pinned", gpu, "")),
    "cuda_ipc": (STAGE_BY_STAGE, lambda gpu: on_gpu("cuda_ipc", gpu, "")),
    "exported": (DPU, lambda gpu: on_gpu("exported", gpu, "")),
    "cuda_ipc, stored from there": (STAGE_BY_STAGE, lambda gpu: both_ways(on_gpu("cuda_ipc", gpu, ""))),
    "exported, stored from there": (DPU, lambda gpu: both_ways(on_gpu("exported", gpu, ""))),
    "exported, engine on a CPU": (DPU, lambda _: choose(HostConfig.from_engine({"delivery": "exported"}), CPU)),
}


@pytest.mark.parametrize("way", WAYS)
def test_kv_that_one_engine_stored_is_delivered_to_another(way: str, start: Any, make: Make, fake_driver: Path) -> None:
    """In several batches, and then layer by layer: progress is a word in shared memory, or a stream without."""
    flags, delivery = WAYS[way]
    address, gpu = start(*flags), first_gpu(fake_driver)
    writer, reader = make(address, delivery(gpu)), make(address, delivery(gpu))
    writer.store()
    assert_fetched(writer, reader)
    in_gpu = isinstance(reader.fetched.acquire(1).memory, torch.Tensor)
    assert in_gpu == (way not in ("pinned", "exported, engine on a CPU"))
    layerwise = make(address, delivery(gpu), BLOCKS // CHUNK_BLOCKS // 2)
    assert_fetched(writer, layerwise, layerwise=True)
    assert [first for first, _ in layerwise.layers] == [0, *(end for _, end in layerwise.layers[:-1])]
    assert layerwise.layers[-1][1] == LAYERS
    assert bool(layerwise.fetched.progress_offsets) == (way == "pinned")
    ring = make(address, delivery(gpu), 3)
    assert_fetched(writer, ring, layerwise=True)
    assert ring.layers == [(0, 1), (0, 1), (1, 2), (1, 2)], "half the memory holds less than a layer of all chunks"


def test_memory_is_registered_again_after_an_idle_time(start: Any, make: Make, fake_driver: Path) -> None:
    """Between the two fetches no memory is registered, and only the data plane's threads hold the GPU's context."""
    flags, delivery = WAYS["cuda_ipc"]
    gpu = first_gpu(fake_driver)
    writer = make(start(*flags), delivery(gpu))
    reader = make(start(*flags, "--registration-idle-s", "0.2"), delivery(gpu))
    writer.store()
    for _ in range(2):
        # On a slow machine the host is idle for too long between Hello, Register and Fetch.
        assert_fetched(writer, reader, again=("unknown_memory", "refused"))
        wait_for(lambda: reader.client.statistics().registrations == 0)


@pytest.mark.parametrize("dmabuf", ["0", "1"])
def test_writes_of_a_dpu_into_a_gpu_are_flushed_before_they_are_read(
    start: Any, make: Make, fake_driver: Path, monkeypatch: pytest.MonkeyPatch, dmabuf: str
) -> None:
    """One flush per batch or layer, on a platform that does not order such writes; memory is exported in both ways."""
    address = start(*DPU)
    monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
    monkeypatch.setenv("FAKE_CUDA_DMABUF", dmabuf)
    delivery = on_gpu("exported", first_gpu(fake_driver), "")
    writer, reader = make(address, delivery), make(address, delivery)
    layerwise = make(address, delivery, BLOCKS // CHUNK_BLOCKS // 2)
    writer.store()
    flushes = ctypes.CDLL(str(fake_driver)).fake_cuda_flushes
    before, seen = flushes(), list[int]()
    assert_fetched(writer, reader)
    assert flushes() - before == 3, "three batches"
    before, scatter = flushes(), layerwise._scatter_layers

    def scattered(*arguments: Any) -> None:
        seen.append(flushes() - before)
        scatter(*arguments)

    layerwise.manager._layers.scatter = scattered
    assert_fetched(writer, layerwise, layerwise=True)
    assert seen and seen == list(range(1, 1 + len(seen)))


def test_without_gpu_export_the_gpu_copies_from_host_memory(
    start: Any, make: Make, fake_driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Without DMA-BUF and nvidia-peermem, the DPU writes into host memory."""
    opened = native.Export

    def only_host(address: int, size: int, *, device: str = "", dmabuf: int = -1) -> native.Export:
        if "fake GPU memory" in mapping_of(address):
            raise NativeError("exporting: this build or this CPU does not have it", native.Result.NOT_SUPPORTED)
        return opened(address, size, device=device, dmabuf=dmabuf)

    address, gpu = start(*DPU), first_gpu(fake_driver)
    writer = make(address, on_gpu("exported", gpu, ""))
    writer.store()
    monkeypatch.setattr(native, "Export", only_host)
    reader = make(address, on_gpu("exported", gpu, ""))
    assert_fetched(writer, reader)
    assert "writes into host memory" in caplog.text


def mapping_of(address: int) -> str:
    """Return the line of /proc/self/maps for an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError("not mapped")


def test_a_failed_copy_to_the_gpu_is_a_miss(start: Any, make: Make, fake_driver: Path) -> None:
    address = start(*STAGE_BY_STAGE, FAKE_CUDA_FAIL="cuMemcpyHtoDAsync_v2:9=700")
    gpu = first_gpu(fake_driver)
    writer, reader = make(address, on_gpu("pinned", gpu, "")), make(address, on_gpu("cuda_ipc", gpu, ""))
    writer.store()
    first = reader.fetch(list(range(BLOCKS)))
    assert first.reason == "device" and first.chunks < (len(reader.keys),)
    assert "accelerator failed" in first.detail
    # The data plane has dropped the memory. The host registers it again, and the driver fails again.
    assert reader.fetch(list(range(BLOCKS))).reason == "device"


def test_a_data_plane_without_a_driver_refuses_gpu_memory(
    start: Any, make: Make, fake_driver: Path, tmp_path: Path
) -> None:
    (tmp_path / "libcuda.so.1").touch()  # it hides a real driver
    address = start(*STAGE_BY_STAGE, LD_LIBRARY_PATH=str(tmp_path))
    engine = make(address, on_gpu("cuda_ipc", first_gpu(fake_driver), ""))
    assert "needs a CUDA driver" in engine.fetch(list(range(BLOCKS))).detail
