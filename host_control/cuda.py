"""The calls of the CUDA driver that moving KV needs, by ctypes, without CUDA's toolkit.

torch uses each device's primary context, and so does this module, so that memory, streams and events can be shared.
Every method that uses a device first makes its context current in the thread. Calls release the GIL.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final

from shadowserve.errors import ConfigurationError

LIBRARY: Final = "libcuda.so.1"
"""Part of NVIDIA's kernel driver."""
GPU_PAGE_BYTES: Final = 64 << 10
"""Unit in which nvidia-peermem pins memory; buffers are multiples of it."""

_SUCCESS: Final = 0
_ALREADY_REGISTERED: Final = 712
_FLUSH_OPTIONS: Final = 117  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
_WRITES_ORDERING: Final = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_DMA_BUF_SUPPORTED: Final = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_ORDERED_FOR_OWNER: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER; above it: for all devices
_FLUSH_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_FLUSH_CURRENT_CONTEXT: Final = 0
_FLUSH_TO_OWNER: Final = 100
_RANGE_DMA_BUF: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_REGISTER_PORTABLE: Final = 1
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_NO_TIMING: Final = 1 | 2
_IPC_HANDLE_BYTES: Final = 64
_PCI_TEXT_BYTES: Final = 32
_NAME_BYTES: Final = 256

_VOID = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_ADDRESS = ctypes.c_uint64
_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [_INT, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(_INT), _INT],
    "cuDeviceGetName": [ctypes.c_char_p, _INT, _INT],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, _INT, _INT],
    "cuDeviceGetAttribute": [ctypes.POINTER(_INT), _INT, _INT],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_VOID), _INT],
    "cuCtxSetCurrent": [_VOID],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [ctypes.POINTER(_ADDRESS), _SIZE],
    "cuMemFree_v2": [_ADDRESS],
    "cuMemHostRegister_v2": [_VOID, _SIZE, ctypes.c_uint],
    "cuMemHostUnregister": [_VOID],
    "cuIpcGetMemHandle": [_VOID, _ADDRESS],
    "cuMemGetHandleForAddressRange": [_VOID, _ADDRESS, _SIZE, _INT, ctypes.c_ulonglong],
    "cuFlushGPUDirectRDMAWrites": [_INT, _INT],
    "cuStreamCreate": [ctypes.POINTER(_VOID), ctypes.c_uint],
    "cuMemcpyHtoDAsync_v2": [_ADDRESS, _VOID, _SIZE, _VOID],
    "cuEventCreate": [ctypes.POINTER(_VOID), ctypes.c_uint],
    "cuEventRecord": [_VOID, _VOID],
    "cuEventSynchronize": [_VOID],
}


class CudaError(ConfigurationError):
    """A call of the CUDA driver failed. ``code``: ``CUresult``; 0 if no call was made."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The CUDA driver of this process.

    Raises:
        CudaError: The driver is missing or too old, or its initialization fails.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"cannot load the CUDA driver ({error}); install NVIDIA's driver") from error
        self.library = loaded
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(loaded, name)
            except AttributeError as error:
                raise CudaError(f"{library} has no {name}; install NVIDIA's driver 515 or newer") from error
            function.argtypes, function.restype = arguments, _INT
            self._functions[name] = function
        self.call("cuInit", 0, doing="starting the CUDA driver")

    def call(self, name: str, *arguments: Any, doing: str, allowed: int = _SUCCESS) -> int:
        """Call a function of the driver; return 0, or the error code that is ``allowed``.

        ``doing``: operation for error messages, such as "allocating 4 bytes".

        Raises:
            CudaError: Any other result.
        """
        code = int(self._functions[name](*arguments))
        if code not in (_SUCCESS, allowed):
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](code, ctypes.byref(text))
            message = (text.value or b"an unknown error").decode("utf-8", "replace")
            raise CudaError(
                f"{doing}: {name} failed with {code}, {message}; see nvidia-smi and docs/guides/gpu.md", code
            )
        return code

    def device(self, ordinal: int) -> "Device":
        return Device(self, ordinal)


class Device:
    """One GPU.

    Raises:
        CudaError: There is no such GPU, or it does not respond.

    Attributes:
        ordinal: Index of the GPU, the same as torch's.
        pci_address: PCI address, such as ``"0000:3b:00.0"``.
        exports_dmabuf: Memory can be exported as a DMA-BUF (NVIDIA's open kernel modules).
        flush_needed: Kernels see writes of other devices over PCIe only after :meth:`flush_remote_writes`.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.ordinal = ordinal
        self._call = driver.call
        number, context = _INT(), _VOID()
        self._call("cuDeviceGet", ctypes.byref(number), ordinal, doing=f"finding GPU {ordinal}")
        self._number = number.value
        self.name = self._text("cuDeviceGetName", _NAME_BYTES)
        self.pci_address = self._text("cuDeviceGetPCIBusId", _PCI_TEXT_BYTES)
        doing = f"using {self.name}"
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._number, doing=doing)
        self._context = context
        self.exports_dmabuf = bool(self._attribute(_DMA_BUF_SUPPORTED))
        self.flush_needed = self._attribute(_WRITES_ORDERING) < _ORDERED_FOR_OWNER
        self._can_flush = bool(self._attribute(_FLUSH_OPTIONS) & _FLUSH_BY_HOST)

    def _text(self, name: str, size: int) -> str:
        text = ctypes.create_string_buffer(size)
        self._call(name, text, size, self._number, doing=f"describing GPU {self._number}")
        return text.value.decode("utf-8", "replace")

    def _attribute(self, attribute: int) -> int:
        value = _INT()
        doing = f"querying attribute {attribute} of {self.name}"
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._number, doing=doing)
        return value.value

    def activate(self) -> None:
        self._call("cuCtxSetCurrent", self._context, doing=f"using {self.name}")

    def call(self, name: str, *arguments: Any, doing: str, allowed: int = _SUCCESS) -> int:
        """Make the device's context current and call a function of the driver; see :meth:`Driver.call`."""
        self.activate()
        return self._call(name, *arguments, doing=f"{doing} on {self.name}", allowed=allowed)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize", doing="waiting for all work")

    def allocate(self, size: int) -> "DeviceBuffer":
        """Allocate GPU memory, rounded up to whole GPU pages."""
        return DeviceBuffer(self, -(-size // GPU_PAGE_BYTES) * GPU_PAGE_BYTES)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Page-lock host memory, so that the GPU copies it by DMA. Return a function that unlocks it."""
        doing = f"page-locking {size >> 20} MiB of host memory"
        again = self.call(
            "cuMemHostRegister_v2", address, size, _REGISTER_PORTABLE, doing=doing, allowed=_ALREADY_REGISTERED
        )
        if again:
            return lambda: None
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", address, doing="unlocking host memory")

    def flush_remote_writes(self) -> None:
        """Make writes of other devices into this GPU's memory visible to its kernels, unless the platform orders them.

        Raises:
            CudaError: The platform neither orders nor flushes such writes.
        """
        if not self.flush_needed:
            return
        if not self._can_flush:
            raise CudaError(
                f"{self.name} neither orders writes of other devices nor flushes them from the host, so KV written by "
                "a DPU could be read too early; set host.delivery to pinned or shared_memory"
            )
        doing = "flushing writes of other devices"
        self.call("cuFlushGPUDirectRDMAWrites", _FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER, doing=doing)

    def stream(self) -> "Stream":
        """Return a new stream that does not synchronize with the default stream."""
        return Stream(self)


class DeviceBuffer:
    """Memory of a GPU. It is freed with the last reference to this object; torch tensors over it hold one."""

    def __init__(self, device: Device, size: int) -> None:
        address = _ADDRESS()
        device.call("cuMemAlloc_v2", ctypes.byref(address), size, doing=f"allocating {size >> 20} MiB")
        self.device = device
        self.address = address.value
        self.size = size
        weakref.finalize(self, _free, device, self.address).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Description for torch, which creates a uint8 tensor without a copy."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def ipc_handle(self) -> bytes:
        """Return the 64-byte handle with which another process on this machine can map the memory."""
        handle = ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
        self.device.call("cuIpcGetMemHandle", handle, self.address, doing="sharing memory with another process")
        return handle.raw

    def dmabuf(self) -> int:
        """Return a file descriptor of the memory as a DMA-BUF. The caller closes it."""
        descriptor = _INT(-1)
        self.device.call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(descriptor),
            self.address,
            self.size,
            _RANGE_DMA_BUF,
            0,
            doing="exporting memory as a DMA-BUF",
        )
        return descriptor.value


class Stream:
    """A CUDA stream, with the ``CUstream`` in ``handle``. Not thread-safe."""

    def __init__(self, device: Device) -> None:
        stream, event = _VOID(), _VOID()
        device.call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING, doing="creating a stream")
        # Waiting for this event sleeps. Waiting for a stream would spin on a core that the engine may need.
        device.call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING_NO_TIMING, doing="creating an event")
        self._device = device
        self._event = event
        self.handle = int(stream.value or 0)

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        """Start a copy of ``size`` bytes from host address ``source`` to GPU address ``target``."""
        doing = f"copying {size} bytes to the GPU"
        self._device.call("cuMemcpyHtoDAsync_v2", target, source, size, self.handle, doing=doing)

    def synchronize(self) -> None:
        self._device.call("cuEventRecord", self._event, self.handle, doing="recording an event")
        self._device.call("cuEventSynchronize", self._event, doing="waiting for copies and kernels")


def _free(device: Device, address: int) -> None:
    # At exit the driver may be unloaded first; it has then freed all memory.
    with contextlib.suppress(CudaError):
        device.call("cuMemFree_v2", address, doing="freeing memory")
