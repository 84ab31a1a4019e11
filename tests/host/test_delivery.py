"""Every way that KV takes to an engine: which is chosen when, and that the real daemon delivers by it.

The daemon and the storage server are processes of their own; the GPU is the fake driver's, or a real one
(gpu_support.py), the DPU the DOCA emulator's.
"""

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from gpu_support import DEVICE, REAL, first_gpu
from machine import PATIENT, WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.cuda import CudaError
from host_control.delivery import Delivery, Gpu, SideStream, choose, on_gpu
from host_control.layouts import PagedLayout
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import Memory, RegisteredMemory
from host_control.segment import Segment
from host_control.store import StoreQueue
from shadowserve import native
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ConfigurationError, DataPlaneError, NativeError
from shadowserve.keys import KVNamespace, ModelIdentity, prefix_chain, record_keys
from shadowserve_tools.processes import Child, start_data_plane, start_storage

LAYERS, BLOCKS, HEADS, BLOCK, SIZE, CHUNK_BLOCKS = 2, 16, 2, 4, 8, 2
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK
STAGE_BY_STAGE = ("--fused", "false")
DPU = ("--backend", "doca")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# ---- Which way -------------------------------------------------------------------------------------------------------


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
def test_the_way_goes_by_where_engine_and_data_plane_are(
    fake_driver: Path, configured: str, data_plane: str, device: Any, chosen: str
) -> None:
    config = HostConfig.from_engine({"delivery": configured, "data_plane": data_plane})
    found: list[int] = []

    def find(ordinal: int) -> Gpu:
        found.append(ordinal)
        return first_gpu(fake_driver)

    delivery = choose(config, device, find)
    assert delivery.kind == chosen
    assert found == ([0] if device is CUDA and chosen != "shared_memory" else [])
    assert (delivery.gpu is not None) == bool(found)


@pytest.mark.parametrize("configured", ["pinned", "cuda_ipc"])
def test_a_way_to_gpus_is_refused_for_an_engine_on_cpus(configured: str) -> None:
    with pytest.raises(ConfigurationError, match="computes on cpu; use auto, shared_memory or exported"):
        choose(HostConfig.from_engine({"delivery": configured}), CPU)


def test_without_a_driver_auto_is_slower_and_anything_else_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def find(ordinal: int) -> Gpu:
        raise CudaError("there is no CUDA driver here")

    assert choose(HostConfig.from_engine({}), CUDA, find).kind == "shared_memory"
    assert "slower" in caplog.text
    with pytest.raises(CudaError):
        choose(HostConfig.from_engine({"delivery": "pinned"}), CUDA, find)
    with pytest.raises(CudaError):
        choose(HostConfig.from_engine({"data_plane": "dpu:50151"}), CUDA, find)


def test_scattering_waits_for_what_the_engine_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a request that has ended may still write into a load's blocks. Streams and events are stand-ins."""
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
    """An engine's paged memory, and what moves KV in and out of it, as the worker of a serving engine puts it together.

    Args:
        address: of the data plane.
        delivery: of chunks.
        chunks: that a batch of a fetch may hold.
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
        self.layers: list[tuple[int, int]] = []  # that were scattered at a time, of loads layer by layer
        self.manager = KVCacheManager(
            self.client, self.fetched, self._scatter, scatter_layers=self._scatter_layers, fetch_timeout_s=WAIT_MAX_S
        )  # fmt: skip
        stored = RegisteredMemory(self.client, [shape], 8 * shape.raw_bytes, WAIT_MAX_S, delivery.store)
        self.queue = StoreQueue(self.client, stored, timeout=WAIT_MAX_S)

    def _scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        count = len(chunks) // self.layout.chunk_bytes(CHUNK_TOKENS) * CHUNK_BLOCKS
        blocks = job.target[first * CHUNK_BLOCKS :][:count]
        if self.delivery.gpu is not None and not REAL:
            # A kernel on a GPU runs behind the copies. The fake driver's is a CPU's code, which has to wait for them.
            self.delivery.gpu.stream.synchronize()
        with self._side:
            self.layout.scatter(chunks, blocks, CHUNK_BLOCKS)

    def _scatter_layers(self, job: FetchJob, chunks: Any, layers: tuple[int, int]) -> None:
        self.layers.append(layers)
        with self._side:
            self.layout.scatter(chunks, job.target, CHUNK_BLOCKS, layers)

    def store(self) -> None:
        """Fill the paged memory with numbers, and have all of it stored."""
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE))

        def gather(index: int, chunk: Any) -> None:
            self.layout.gather(chunk, range(index * CHUNK_BLOCKS, (index + 1) * CHUNK_BLOCKS))

        assert self.queue.wait_tried(WAIT_MAX_S)
        assert self.queue.offer(self.keys, gather) == len(self.keys) == BLOCKS // CHUNK_BLOCKS
        assert self.queue.flush(2 * WAIT_MAX_S)
        assert self.queue.take_counts()["stored"] == len(self.keys)

    def fetch(self, blocks: list[int], *, layerwise: bool = False) -> FetchResult:
        """Fetch everything into these blocks."""
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


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with start_storage(tmp_path_factory.mktemp("storage")) as child:
        yield child


@pytest.fixture
def start(tmp_path: Path, storage: Child, fake_driver: Path) -> Iterator[Callable[..., Child]]:
    """Return a function that starts a data plane which finds the fake driver; flags as for ``shadowserve dpu``."""
    with contextlib.ExitStack() as stack:

        def begin(*flags: str, **environment: str) -> Child:
            small = [
                f"--{name}-buffer-bytes=4MiB" for name in ("decompression", "dequantization", "dma-source", "store")
            ]
            if not REAL:
                environment = {"LD_LIBRARY_PATH": str(fake_driver.parent)} | environment
            return stack.enter_context(
                start_data_plane(tmp_path, storage.address, *PATIENT, *small, *flags, environment=environment)
            )

        yield begin


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Return a function that makes an engine, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def engine(*arguments: Any) -> Engine:
            made = Engine(*arguments)
            stack.callback(made.close)
            return made

        yield engine


def both_ways(delivery: Delivery) -> Delivery:
    """Return a delivery that stores from the GPU, too, as any client of the daemon may."""
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
def test_kv_that_one_engine_stored_is_delivered_to_another(
    way: str, start: Any, make: Callable[..., Engine], fake_driver: Path
) -> None:
    """In several batches, each through the buffer that it arrives in, into other blocks than it came from."""
    flags, delivery = WAYS[way]
    address, gpu = start(*flags).address, first_gpu(fake_driver)
    writer, reader = make(address, delivery(gpu)), make(address, delivery(gpu))
    writer.store()
    blocks = list(reversed(range(BLOCKS)))
    result = reader.fetch(blocks)
    assert (result.complete, result.reason, result.chunks) == (True, "complete", (len(reader.keys),)), result.detail
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read[blocks], wrote)
    in_gpu = isinstance(reader.fetched.acquire(1).memory, torch.Tensor)
    assert in_gpu == (way not in ("pinned", "exported, engine on a CPU"))


@pytest.mark.parametrize("way", [name for name in WAYS if "stored" not in name])
def test_kv_is_delivered_layer_by_layer_wherever_it_arrives(
    way: str, start: Any, make: Callable[..., Engine], fake_driver: Path
) -> None:
    """How far it is stands in a word where the data plane shares the memory, and comes in a stream where not."""
    flags, delivery = WAYS[way]
    address, gpu = start(*flags).address, first_gpu(fake_driver)
    writer, reader = make(address, delivery(gpu)), make(address, delivery(gpu), BLOCKS // CHUNK_BLOCKS // 2)
    writer.store()
    blocks = list(reversed(range(BLOCKS)))
    result = reader.fetch(blocks, layerwise=True)
    assert (result.reason, result.chunks) == ("complete", (len(reader.keys),)), result.detail
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read[blocks], wrote)
    assert [first for first, _ in reader.layers] == [0, *(end for _, end in reader.layers[:-1])]
    assert reader.layers[-1][1] == LAYERS
    assert (reader.fetched.progress_offset is not None) == (way == "pinned")


@pytest.mark.parametrize("way", ["pinned", "cuda_ipc"])
def test_engines_that_register_memory_again_after_an_idle_time_are_served(
    way: str, start: Any, make: Callable[..., Engine], fake_driver: Path
) -> None:
    """Between the two no memory is registered, so only the data plane's own threads hold the GPU's context."""
    flags, delivery = WAYS[way]
    address, gpu = start(*flags, "--registration-idle-s", "0.2").address, first_gpu(fake_driver)
    writer, reader = make(address, delivery(gpu)), make(address, delivery(gpu))
    writer.store()
    for blocks in (list(range(BLOCKS)), list(reversed(range(BLOCKS)))):
        result = reader.fetch(blocks)
        while result.reason == "unknown_memory":  # forgotten before it was used
            result = reader.fetch(blocks)
        assert result.complete, f"{result.reason}: {result.detail}"
        for wrote, read in zip(writer.caches, reader.caches, strict=True):
            assert torch.equal(read[blocks], wrote)
        wait_for(lambda: reader.client.statistics().registrations == 0)


@pytest.mark.parametrize("dmabuf", ["0", "1"])
def test_layers_that_a_dpu_wrote_into_a_gpu_are_flushed_before_each_is_read(
    start: Any, make: Callable[..., Engine], fake_driver: Path, monkeypatch: pytest.MonkeyPatch, dmabuf: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
    monkeypatch.setenv("FAKE_CUDA_DMABUF", dmabuf)
    address, delivery = start(*DPU).address, on_gpu("exported", first_gpu(fake_driver), "")
    writer, reader = make(address, delivery), make(address, delivery, BLOCKS // CHUNK_BLOCKS // 2)
    writer.store()
    flushes = ctypes.CDLL(str(fake_driver)).fake_cuda_flushes
    seen: list[int] = []
    scatter = reader._scatter_layers

    def scattered(*arguments: Any) -> None:
        seen.append(flushes())
        scatter(*arguments)

    reader.manager._scatter_layers = scattered
    before = flushes()
    assert reader.fetch(list(range(BLOCKS)), layerwise=True).complete
    assert seen and seen == list(range(before + 1, before + 1 + len(seen)))
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read, wrote)


@pytest.mark.parametrize("dmabuf", ["0", "1"])
def test_what_a_dpu_wrote_into_a_gpu_is_flushed_before_it_is_read(
    start: Any, make: Callable[..., Engine], fake_driver: Path, monkeypatch: pytest.MonkeyPatch, dmabuf: str
) -> None:
    """Exported as a DMA-BUF or by address, where the platform does not order such writes by itself."""
    monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
    monkeypatch.setenv("FAKE_CUDA_DMABUF", dmabuf)
    address, delivery = start(*DPU).address, on_gpu("exported", first_gpu(fake_driver), "")
    writer, reader = make(address, delivery), make(address, delivery)
    writer.store()
    flushes = ctypes.CDLL(str(fake_driver)).fake_cuda_flushes
    before = flushes()
    assert reader.fetch(list(range(BLOCKS))).complete
    assert flushes() - before == 3  # one for each batch
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read, wrote)


def test_a_gpu_that_cannot_be_exported_copies_from_the_host(
    start: Any, make: Callable[..., Engine], fake_driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """No DMA-BUF, no nvidia-peermem: the DPU writes into host memory."""
    opened = native.Export

    def only_host(address: int, size: int, *, device: str = "", dmabuf: int = -1) -> native.Export:
        if "fake GPU memory" in mapping_of(address):
            raise NativeError("exporting: this build or this CPU does not have it", native.Result.NOT_SUPPORTED)
        return opened(address, size, device=device, dmabuf=dmabuf)

    address, gpu = start(*DPU).address, first_gpu(fake_driver)
    writer = make(address, on_gpu("exported", gpu, ""))
    writer.store()
    monkeypatch.setattr(native, "Export", only_host)
    reader = make(address, on_gpu("exported", gpu, ""))
    assert reader.fetch(list(range(BLOCKS))).complete
    assert "writes into host memory" in caplog.text
    for wrote, read in zip(writer.caches, reader.caches, strict=True):
        assert torch.equal(read, wrote)


def mapping_of(address: int) -> str:
    """Return what /proc says of the mapping that an address of this process lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError("not mapped")


def test_an_export_that_has_ended_is_a_miss_and_is_made_anew(
    start: Any, make: Callable[..., Engine], fake_driver: Path
) -> None:
    address, delivery = start(*DPU).address, on_gpu("exported", first_gpu(fake_driver), "")
    writer, reader = make(address, delivery), make(address, delivery)
    writer.store()
    memory: Any = reader.fetched.acquire(30)
    memory._export.close()
    result = reader.fetch(list(range(BLOCKS)))
    assert (result.reason, result.chunks) == ("device", (0,)), result.detail
    assert reader.fetch(list(range(BLOCKS))).complete, "registered again"
    assert reader.fetched.current is not memory


def test_a_copy_into_the_gpu_that_fails_is_a_miss_with_its_reason(
    start: Any, make: Callable[..., Engine], fake_driver: Path
) -> None:
    address = start(*STAGE_BY_STAGE, FAKE_CUDA_FAIL="cuMemcpyHtoDAsync_v2:9=700").address
    gpu = first_gpu(fake_driver)
    writer, reader = make(address, on_gpu("pinned", gpu, "")), make(address, on_gpu("cuda_ipc", gpu, ""))
    writer.store()
    first = reader.fetch(list(range(BLOCKS)))
    assert first.reason == "device" and first.chunks < (len(reader.keys),)
    assert "accelerator failed" in first.detail
    # The daemon has dropped the memory; a host that lives registers it again, and fails again as the driver does.
    assert reader.fetch(list(range(BLOCKS))).reason == "device"


def test_a_data_plane_says_which_memory_it_takes(start: Any, make: Callable[..., Engine], fake_driver: Path) -> None:
    address = start().address  # fused: the CPU writes elements itself, which a GPU's memory does not allow
    engine = make(address, on_gpu("cuda_ipc", first_gpu(fake_driver), ""))
    result = engine.fetch(list(range(BLOCKS)))
    assert result.reason == "refused" and result.chunks == (0,)
    assert "takes shared_memory; cuda_ipc needs a CUDA driver and fused: false" in result.detail


def test_a_data_plane_without_a_driver_refuses_a_gpu_s_memory(
    start: Any, make: Callable[..., Engine], fake_driver: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "libcuda.so.1").touch()  # hides a real one
    address = start(*STAGE_BY_STAGE, LD_LIBRARY_PATH=str(tmp_path / "empty")).address
    engine = make(address, on_gpu("cuda_ipc", first_gpu(fake_driver), ""))
    assert "needs a CUDA driver" in engine.fetch(list(range(BLOCKS))).detail


# ---- Memory that the data plane has no hold of its own on ------------------------------------------------------------


class Borrowed(Segment):
    """Memory that must not go before the data plane has let go of it."""

    outlives_us = False
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def borrowed(client: DataPlaneClient, shape: ChunkLayout) -> RegisteredMemory:
    make: Callable[[int], Memory] = Borrowed.create
    return RegisteredMemory(client, [shape], 8 * shape.raw_bytes, make=make)


def test_memory_stays_until_its_release_was_answered(
    plane: ScriptedDataPlane, borrowed: RegisteredMemory, client: DataPlaneClient
) -> None:
    first: Any = borrowed.acquire(5)
    plane.script.abort["ReleaseMemory"] = grpc.StatusCode.UNAVAILABLE
    borrowed.retire(release=True)
    assert not first.closed and borrowed.current is None
    with pytest.raises(DataPlaneError, match="does not answer the release of old memory"):
        borrowed.acquire(5)
    assert not first.closed, "nobody has said that it is quiet"
    plane.script.abort.clear()
    second = borrowed.acquire(5)
    assert first.closed and second is not first
    borrowed.close()


def test_memory_of_a_data_plane_that_is_another_now_goes_at_once(borrowed: RegisteredMemory) -> None:
    first: Any = borrowed.acquire(5)
    borrowed.retire(release=False)
    assert first.closed
    borrowed.close()


def test_kept_memory_outlives_its_registration(plane: ScriptedDataPlane, borrowed: RegisteredMemory) -> None:
    first: Any = borrowed.acquire(5)
    plane.script.abort["ReleaseMemory"] = grpc.StatusCode.UNAVAILABLE
    borrowed.close()
    assert not first.closed
    first.close()


def test_a_choice_is_made_for_the_engine_s_own_gpu() -> None:
    seen = []

    def find(ordinal: int) -> Gpu:
        seen.append(ordinal)
        raise CudaError("seen")

    with contextlib.suppress(CudaError):
        choose(HostConfig.from_engine({"delivery": "cuda_ipc"}), SimpleNamespace(type="cuda", index=3), find)
    assert seen == [3]
