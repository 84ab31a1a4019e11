"""Delivery of fetched chunks to the engine: the kinds of registered memory, and the choice among them.

==================  ==================================================  =============================================
``delivery``        the data plane writes into                          chunks are scattered from
==================  ==================================================  =============================================
``shared_memory``   a file in /dev/shm, mapped by both processes        the same
``pinned``          the same, page-locked for CUDA                      a GPU buffer, after one copy by the GPU
``cuda_ipc``        a GPU buffer, by copies of the CUDA driver          the GPU buffer
``exported``        a GPU buffer or host memory, written by a DPU       the GPU buffer or host memory
==================  ==================================================  =============================================

The GPU buffer is the paper's DMA destination buffer (ShadowServe section 4.3). Chunks to be stored always wait in host
memory, shared or exported: stores are not urgent, and GPU memory is scarce.

**When bytes may be read.** The data plane answers when its copies have ended. Writes of a DPU into a GPU are ordered
against the GPU's kernels by the platform, or else flushed by the host (``Device.flush_remote_writes``). Copies and
scattering use one stream. The scattering thread waits for it before it reports that a request's KV is in place.

**When bytes may be written.** With asynchronous scheduling, vLLM learns that a request has ended after it has launched
the next step, which still writes into the request's blocks. These may be the blocks of a load by now. So scattering
waits for all work that the engine had launched when the load was submitted (``SideStream.follow``).
"""

import contextlib
import ctypes
import functools
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
from host_control.segment import Memory, Segment
from shadowserve import native
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.proto import dataplane_pb2 as pb

_logger = logging.getLogger(__name__)


def device_tensor(buffer: DeviceBuffer) -> Any:
    """Return a uint8 tensor over GPU memory that keeps the memory allocated."""
    tensor = torch.as_tensor(buffer, device=torch.device("cuda", buffer.device.ordinal))
    if tensor.data_ptr() != buffer.address:
        raise CudaError(f"torch copied memory of {buffer.device.name}: its GPU {buffer.device.ordinal} is another one")
    return tensor


class Gpu:
    """The GPU that an engine computes on, and its stream for copies and scattering.

    ``tensor`` returns a tensor over a buffer.
    """

    def __init__(self, device: Device, tensor: Callable[[DeviceBuffer], Any] = device_tensor) -> None:
        self.device = device
        self.stream = device.stream()
        self.tensor = tensor


@dataclass(frozen=True)
class Delivery:
    """A kind of delivery: how it allocates memory for fetched chunks and for chunks to be stored.

    ``gpu``: the GPU whose stream scatters chunks; ``None`` on CPUs and for plain shared memory.
    """

    kind: str
    fetch: Callable[[int], Memory]
    store: Callable[[int], Memory]
    gpu: Gpu | None = None

    @property
    def shared(self) -> bool:
        """True if the data plane maps the memory, so that it can write a progress word there."""
        return self.kind in ("shared_memory", "pinned")


def choose(config: HostConfig, device: Any, find: Callable[[int], Gpu] | None = None) -> Delivery:
    """Return the delivery to an engine whose paged memory is on a device of torch.

    ``find`` returns a GPU by index; by default from the CUDA driver.

    Raises:
        ConfigurationError: The configured delivery is not possible for this device.
    """
    kind = config.delivery
    shared_memory = Delivery("shared_memory", Segment.create, Segment.create)
    if device.type != "cuda":
        if kind in ("pinned", "cuda_ipc"):
            raise ConfigurationError(
                f"host.delivery is {kind}, but the engine computes on {device.type}; "
                "use auto, shared_memory or exported"
            )
        if kind == "exported":
            make = functools.partial(ExportedHostMemory, device=config.device)
            return Delivery(kind, make, make)
        return shared_memory
    if kind == "shared_memory":
        return shared_memory
    try:
        gpu = (find or _find)(device.index or 0)
    except CudaError as error:
        if kind == "auto" and config.data_plane_is_local:
            _logger.warning("shadowserve: delivery uses shared memory without page-locking, which is slower: %s", error)
            return shared_memory
        raise
    if kind == "auto":
        kind = "pinned" if config.data_plane_is_local else "exported"
    return on_gpu(kind, gpu, config.device)


def _find(ordinal: int) -> Gpu:
    return Gpu(Driver().device(ordinal))


def on_gpu(kind: str, gpu: Gpu, export_device: str) -> Delivery:
    """Return a delivery to a GPU: ``pinned``, ``cuda_ipc``, or ``exported`` to the DPU's function on this host."""

    def pinned(size: int) -> Memory:
        return _Locked(Segment.create(size), gpu)

    def exported(size: int) -> Memory:
        return _Locked(ExportedHostMemory(size, export_device), gpu)

    def exported_to_gpu(size: int) -> Memory:
        try:
            return _ExportedGpuMemory(size, gpu, export_device)
        except NativeError as error:
            _logger.warning("shadowserve: the DPU writes into host memory, and the GPU copies from there: %s", error)
        return _Copied(ExportedHostMemory(size, export_device), gpu)

    if kind == "pinned":
        return Delivery(kind, lambda size: _Copied(Segment.create(size), gpu), pinned, gpu)
    if kind == "cuda_ipc":
        return Delivery(kind, lambda size: _IpcMemory(size, gpu), pinned, gpu)
    return Delivery(kind, exported_to_gpu, exported, gpu)


class SideStream:
    """A CUDA stream next to the engine's, so that copies do not queue behind the engine's kernels. No-op on CPUs.

    As a context manager: on entry the stream becomes current and waits for the work seen by :meth:`follow`; on exit all
    work on it is waited for.

    Args:
        device: Device from torch.
        gpu: GPU whose stream is used; ``None`` for a new stream.
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
        """Make later work on this stream wait for all work in the calling thread's current stream so far."""
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


class ExportedHostMemory(Memory):
    """Anonymous memory of this process that a DPU can read and write; its writes are ordered before its answer.

    ``device``: the DPU's function on this host; empty for the first suitable one.

    Raises:
        ConfigurationError: There is no DPU, or the memory cannot be exported.
    """

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        try:
            self.memory = memoryview(mmap.mmap(-1, size, flags))
            self._export = native.Export(address_of(self.memory), size, device=device)
        except (OSError, NativeError) as error:
            raise ConfigurationError(
                f"cannot export {size >> 20} MiB of host memory to a DPU: {error}; see host.delivery, host.device and "
                "docs/guides/gpu.md"
            ) from error

    def message(self) -> MemoryMessage:
        export = self._export
        return pb.ExportedMemory(address=export.address, size=self.size, descriptor=export.descriptor)

    def close(self) -> None:
        self._export.close()


class _Locked(Memory):
    """Page-locked host memory, which the GPU copies by DMA."""

    def __init__(self, memory: Memory, gpu: Gpu) -> None:
        self.size = memory.size
        self.memory = memory.memory
        self.peer_keeps_mapping = memory.peer_keeps_mapping
        self._under = memory
        self._gpu = gpu
        self._address = address_of(self.memory)
        try:
            self._unlock = gpu.device.pin(self._address, self.size)
        except CudaError:
            memory.close()
            raise

    def message(self) -> MemoryMessage:
        return self._under.message()

    def on_registered(self) -> None:
        self._under.on_registered()

    def intact(self) -> bool:
        return self._under.intact()

    def close(self) -> None:
        self._gpu.device.synchronize()  # copies may still run, also on the engine's stream
        self._unlock()
        self._under.close()


class _Copied(_Locked):
    """Page-locked host memory whose delivered bytes are copied to a GPU buffer."""

    def __init__(self, memory: Memory, gpu: Gpu) -> None:
        super().__init__(memory, gpu)
        try:
            self._buffer = gpu.device.allocate(self.size)
        except CudaError:
            self.close()
            raise
        self._tensor = gpu.tensor(self._buffer)

    def view(self, offset: int, length: int) -> Any:
        self._gpu.stream.copy_to_device(self._buffer.address + offset, self._address + offset, length)
        return self._tensor[offset : offset + length]


# ---- Memory of the GPU -----------------------------------------------------------------------------------------------


class _IpcMemory(Memory):
    """A GPU buffer that a process on this machine writes with the CUDA driver. It waits for its copies."""

    def __init__(self, size: int, gpu: Gpu) -> None:
        self.size = size
        self._gpu = gpu
        self._buffer = gpu.device.allocate(size)
        self.memory = gpu.tensor(self._buffer)

    def message(self) -> MemoryMessage:
        return pb.CudaIpcMemory(handle=self._buffer.ipc_handle(), size=self.size, device=self._gpu.device.pci_address)

    def close(self) -> None:
        pass  # freed with the last tensor over it


class _ExportedGpuMemory(_IpcMemory):
    """A GPU buffer exported to a DPU: as a DMA-BUF, or by address, which needs nvidia-peermem.

    Only the allocation is that of :class:`_IpcMemory`.

    Raises:
        NativeError: Neither works.
    """

    def __init__(self, size: int, gpu: Gpu, device: str) -> None:
        super().__init__(size, gpu)
        self._descriptor = -1
        self._export: native.Export | None = None
        if gpu.device.exports_dmabuf:
            try:
                self._descriptor = self._buffer.dmabuf()
                self._export = native.Export(self._buffer.address, size, device=device, dmabuf=self._descriptor)
            except (CudaError, NativeError) as error:
                _logger.info("shadowserve: exporting GPU memory as a DMA-BUF failed, trying nvidia-peermem: %s", error)
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

    def view(self, offset: int, length: int) -> Any:
        self.flush()
        return super().view(offset, length)

    def close(self) -> None:
        assert self._export is not None
        self._export.close()
        self._close_descriptor()


def address_of(memory: memoryview) -> int:
    """Return the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
