"""How fetched chunks get to where the engine computes: one kind of memory for each way, and which way when.

==================  ==================================================  =============================================
``delivery``        the data plane writes into                          scattered from
==================  ==================================================  =============================================
``shared_memory``   a file under /dev/shm that both have mapped         there
``pinned``          the same, page-locked for CUDA                      the GPU's buffer, after one copy by the GPU
``cuda_ipc``        the GPU's buffer, by the CUDA driver's copies       the GPU's buffer
``exported``        the GPU's buffer, or the host's memory, by a DPU    the GPU's buffer, or the host's memory
==================  ==================================================  =============================================

The GPU's buffer is the paper's DMA registration buffer (ShadowServe section 4.3). What is to be stored always waits in
the host's memory, shared or exported: it is not urgent, and the GPU's memory is dear.

**When bytes may be read.** The data plane answers once a batch is quiet: its copies have ended. What a DPU has written
over PCIe into a GPU is then ordered against that GPU's kernels where the platform does so by itself, and is flushed by
the host where it does not (``Device.flush_remote_writes``). Copies and scattering share one stream, and whoever
scatters waits for that stream before anybody hears that a request's KV is in place.

**When bytes may be written.** A load's blocks may have been another request's a moment ago. With asynchronous
scheduling vLLM hears that a request has ended when its next step is launched already, and that step still writes into
its blocks. So scattering waits for all that the engine had launched when the load was handed over
(``SideStream.follow``).
"""

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from host_control.client import MemoryMessage
from host_control.config import HostConfig
from host_control.cuda import CudaError, Device, DeviceBuffer, Driver
from host_control.registered_memory import Memory
from host_control.segment import Segment
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.proto import dataplane_pb2 as pb

_logger = logging.getLogger(__name__)


def device_tensor(buffer: DeviceBuffer) -> Any:
    """Return a tensor of uint8 over a GPU's memory, which holds on to it.

    Raises:
        CudaError: torch copies the memory instead: it numbers GPUs otherwise than the driver.
    """
    tensor = torch.as_tensor(buffer, device=torch.device("cuda", buffer.device.ordinal))
    if tensor.data_ptr() != buffer.address:
        raise CudaError(f"torch does not take memory of {buffer.device.name} for its GPU {buffer.device.ordinal}")
    return tensor


class Gpu:
    """The GPU that an engine computes on, as deliveries use it.

    Args:
        device: of the driver.
        tensor: makes a tensor over a buffer.

    Attributes:
        device: as given.
        stream: of copies and scattering.
    """

    def __init__(self, device: Device, tensor: Callable[[DeviceBuffer], Any] = device_tensor) -> None:
        self.device = device
        self.stream = device.stream()
        self.tensor = tensor


@dataclass(frozen=True)
class Delivery:
    """The chosen way.

    Attributes:
        kind: ``"shared_memory"``, ``"pinned"``, ``"cuda_ipc"`` or ``"exported"``.
        fetch: makes memory of so many bytes to fetch into.
        store: makes memory of so many bytes that chunks wait in to be stored.
        gpu: that chunks are scattered on with our stream; ``None`` on CPUs, and for plain shared memory.
    """

    kind: str
    fetch: Callable[[int], Memory]
    store: Callable[[int], Memory]
    gpu: Gpu | None = None

    @property
    def shared(self) -> bool:
        """Whether the data plane has mapped what is fetched into, and can say there how far it is."""
        return self.kind in ("shared_memory", "pinned")


def choose(config: HostConfig, device: Any, find: Callable[[int], Gpu] | None = None) -> Delivery:
    """Return how chunks are delivered to an engine whose paged memory is on ``device`` (of torch).

    Args:
        config: of the host.
        device: of torch.
        find: returns the GPU with a number; by default through the CUDA driver.

    Raises:
        ConfigurationError: the configured way does not lead there; the message says which do.
    """
    kind = config.delivery
    if device.type != "cuda":
        if kind in ("pinned", "cuda_ipc"):
            raise ConfigurationError(
                f"host.delivery is {kind}, but the engine computes on {device.type}; "
                "use auto, shared_memory or exported"
            )
        if kind == "exported":
            return _exported_to_host(config.device)
        return Delivery("shared_memory", Segment.create, Segment.create)
    if kind == "shared_memory":
        return Delivery(kind, Segment.create, Segment.create)
    try:
        gpu = (find or _find)(device.index or 0)
    except CudaError as error:
        if kind == "auto" and config.data_plane_is_local:
            _logger.warning("shadowserve: delivering through plain shared memory, which is slower: %s", error)
            return Delivery("shared_memory", Segment.create, Segment.create)
        raise
    if kind == "auto":
        kind = "pinned" if config.data_plane_is_local else "exported"
    return on_gpu(kind, gpu, config.device)


def on_gpu(kind: str, gpu: Gpu, export_device: str) -> Delivery:
    """Return the delivery of a kind to a GPU; ``export_device`` is this side's function of the DPU."""

    def pinned(size: int) -> Memory:
        return _Locked(Segment.create(size), gpu)

    def exported(size: int) -> Memory:
        return _Locked(ExportedHostMemory(size, export_device), gpu)

    if kind == "pinned":
        return Delivery(kind, lambda size: _Copied(Segment.create(size), gpu), pinned, gpu)
    if kind == "cuda_ipc":
        return Delivery(kind, lambda size: _IpcMemory(size, gpu), pinned, gpu)
    return Delivery(kind, lambda size: _exported_to_gpu(size, gpu, export_device), exported, gpu)


def _find(ordinal: int) -> Gpu:
    return Gpu(Driver().device(ordinal))


def _exported_to_host(export_device: str) -> Delivery:
    def make(size: int) -> Memory:
        return ExportedHostMemory(size, export_device)

    return Delivery("exported", make, make)


def _exported_to_gpu(size: int, gpu: Gpu, export_device: str) -> Memory:
    """Return memory of the GPU that a DPU can write, or where there is none, of the host, and a copy to the GPU."""
    try:
        return _ExportedGpuMemory(size, gpu, export_device)
    except NativeError as error:
        _logger.warning("shadowserve: the DPU writes into the host's memory, from where the GPU copies: %s", error)
    return _Copied(ExportedHostMemory(size, export_device), gpu)


class SideStream:
    """Our own CUDA stream, so that copies do not queue behind all of the engine's kernels; nothing on CPUs.

    Entered, it is current, behind what :meth:`follow` has seen; left, all that was put into it is done.

    Args:
        device: of torch.
        gpu: whose stream to use; ``None`` for another one.
    """

    def __init__(self, device: Any, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._stream: Any = None
        if gpu is not None:
            self._stream = torch.cuda.ExternalStream(gpu.stream.handle, device)
        elif device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        self._context: Any = None
        self._device = device
        self._launched: Any = None

    def follow(self) -> None:
        """Have what is put in from now on wait for all that the calling thread's current stream was given so far."""
        if self._stream is not None:
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
            self._launched = launched

    def __enter__(self) -> None:
        if self._stream is not None:
            if self._launched is not None:
                self._stream.wait_event(self._launched)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._stream is None:
            return
        self._context.__exit__(*exception)
        if self._gpu is not None:
            self._gpu.stream.synchronize()
        else:
            self._stream.synchronize()


# ---- Memory of the host ----------------------------------------------------------------------------------------------


class ExportedHostMemory:
    """Anonymous memory of this process that a DPU may read and write.

    Args:
        size: bytes.
        device: this side's function of the DPU; empty for the first that can.

    Raises:
        ConfigurationError: there is no DPU here, or it cannot export the memory.

    Attributes:
        size, memory, outlives_us: see :class:`~host_control.registered_memory.Memory`.
    """

    outlives_us = False

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        from shadowserve import native  # an engine loads the C core only where it has to

        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        try:
            self.memory = memoryview(mmap.mmap(-1, size, flags))
            self._export = native.Export(address_of(self.memory), size, device=device)
        except (OSError, NativeError) as error:
            raise ConfigurationError(
                f"cannot export {size >> 20} MiB of the host's memory to a DPU: {error}; see host.delivery, "
                "host.device and docs/gpu.md"
            ) from error

    def message(self) -> MemoryMessage:
        """Return what the data plane is told."""
        export = self._export
        return pb.ExportedMemory(address=export.address, size=self.size, descriptor=export.descriptor)

    def published(self) -> None:
        pass  # it has no name that would now be of no more use

    def arrived(self, offset: int, length: int) -> Any:
        """Return what was delivered there."""
        return self.memory[offset : offset + length]

    def flush(self) -> None:
        """Nothing: a DPU's writes into the host's memory are ordered before its answer."""

    def whole(self) -> bool:
        """Return true: it is nobody else's."""
        return True

    def close(self) -> None:
        """End the export."""
        self._export.close()


class _Locked:
    """Memory of the host that is page-locked, so that the GPU copies from and to it by itself."""

    def __init__(self, memory: Any, gpu: Gpu) -> None:
        self.size: int = memory.size
        self.memory: Any = memory.memory
        self.outlives_us: bool = memory.outlives_us
        self._under = memory
        self._gpu = gpu
        self._address = address_of(self.memory)
        try:
            self._unlock = gpu.device.pin(self._address, self.size)
        except CudaError:
            memory.close()
            raise

    def message(self) -> MemoryMessage:
        message: MemoryMessage = self._under.message()
        return message

    def published(self) -> None:
        self._under.published()

    def arrived(self, offset: int, length: int) -> Any:
        return self._under.arrived(offset, length)

    def flush(self) -> None:
        self._under.flush()

    def whole(self) -> bool:
        return bool(self._under.whole())

    def close(self) -> None:
        self._gpu.device.synchronize()  # the engine's stream may still copy, too
        self._unlock()
        self._under.close()


class _Copied(_Locked):
    """Page-locked memory of the host in front of a buffer of the GPU: what has arrived is copied there."""

    def __init__(self, memory: Any, gpu: Gpu) -> None:
        super().__init__(memory, gpu)
        try:
            self._buffer = gpu.device.allocate(self.size)
        except CudaError:
            self.close()
            raise
        self._tensor = gpu.tensor(self._buffer)

    def arrived(self, offset: int, length: int) -> Any:
        self._gpu.stream.copy_to_device(self._buffer.address + offset, self._address + offset, length)
        return self._tensor[offset : offset + length]


# ---- Memory of the GPU -----------------------------------------------------------------------------------------------


class _GpuMemory:
    """A buffer of the GPU that others write into."""

    outlives_us = False

    def __init__(self, size: int, gpu: Gpu) -> None:
        self.size = size
        self._gpu = gpu
        self._buffer = gpu.device.allocate(size)
        self.memory = gpu.tensor(self._buffer)

    def published(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def whole(self) -> bool:
        return True

    def close(self) -> None:
        pass  # freed with the last tensor over it


class _IpcMemory(_GpuMemory):
    """... a process on this machine, with copies of the CUDA driver, which it has waited for."""

    def message(self) -> MemoryMessage:
        return pb.CudaIpcMemory(handle=self._buffer.ipc_handle(), size=self.size, device=self._gpu.device.pci_address)

    def arrived(self, offset: int, length: int) -> Any:
        return self.memory[offset : offset + length]


class _ExportedGpuMemory(_GpuMemory):
    """... a DPU, over PCIe: exported as a DMA-BUF, or by address, which takes nvidia-peermem.

    Raises:
        NativeError: neither works.
    """

    def __init__(self, size: int, gpu: Gpu, device: str) -> None:
        from shadowserve import native  # see ExportedHostMemory

        super().__init__(size, gpu)
        self._descriptor = -1
        self._export: native.Export | None = None
        if gpu.device.exports_dmabuf:
            try:
                self._descriptor = self._buffer.dmabuf()
                self._export = native.Export(self._buffer.address, size, device=device, dmabuf=self._descriptor)
            except (CudaError, NativeError) as error:
                _logger.info("shadowserve: no DMA-BUF, trying nvidia-peermem: %s", error)
                self._close_descriptor()
        if self._export is None:
            self._export = native.Export(self._buffer.address, size, device=device)

    def _close_descriptor(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def message(self) -> MemoryMessage:
        assert self._export is not None
        return pb.ExportedMemory(address=self._buffer.address, size=self.size, descriptor=self._export.descriptor)

    def flush(self) -> None:
        self._gpu.device.activate()
        self._gpu.device.flush_remote_writes()

    def arrived(self, offset: int, length: int) -> Any:
        self.flush()
        return self.memory[offset : offset + length]

    def close(self) -> None:
        assert self._export is not None
        self._export.close()
        self._close_descriptor()


def address_of(memory: memoryview) -> int:
    """Return where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
