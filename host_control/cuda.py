"""The few calls of the CUDA driver that moving KV takes, by ctypes: nothing here needs CUDA's toolkit, or torch's.

torch computes in each device's primary context, and so do we: memory, streams and events are the same to both. A
context is *current* in a thread; whatever touches the device here makes it so first. Calls release the interpreter's
lock. Names and numbers are those of NVIDIA's CUDA driver API reference; docs/gpu.md says what has run on a GPU.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final

from shadowserve.errors import ConfigurationError

LIBRARY: Final = "libcuda.so.1"
"""Comes with NVIDIA's kernel driver."""
GPU_PAGE_BYTES: Final = 64 << 10
"""What nvidia-peermem pins at a time; buffers are whole ones."""

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
    "cuDeviceGetCount": [ctypes.POINTER(_INT)],
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
    """The driver refused; the message says what was tried, the driver's words, and what to do.

    Attributes:
        code: ``CUresult``; 0 where no call was made.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def find(library: str = LIBRARY) -> "Driver | None":
    """Return the driver, started; ``None`` where this machine has none, or no GPU that this process may use."""
    try:
        driver = Driver(library)
    except CudaError:
        return None
    return driver if driver.count else None


class Driver:
    """The CUDA driver of this process.

    Args:
        library: to load.

    Raises:
        CudaError: there is none, it is too old, or it does not start.

    Attributes:
        count: of GPUs that this process may use (``CUDA_VISIBLE_DEVICES``).
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"there is no CUDA driver here ({error}); install NVIDIA's") from error
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
        count = _INT()
        self.call("cuDeviceGetCount", ctypes.byref(count), doing="counting GPUs")
        self.count = count.value

    def call(self, name: str, *arguments: Any, doing: str, allowed: int = _SUCCESS) -> int:
        """Call a function of the driver.

        Args:
            name: of the function.
            arguments: for it.
            doing: what this is for, as in "allocating 4 bytes".
            allowed: an error that is none.

        Returns:
            0, or ``allowed``.

        Raises:
            CudaError: any other result.
        """
        code = int(self._functions[name](*arguments))
        if code not in (_SUCCESS, allowed):
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](code, ctypes.byref(text))
            said = (text.value or b"an unknown error").decode("utf-8", "replace")
            raise CudaError(f"{doing}: {name} failed with {code}, {said}; see nvidia-smi and docs/gpu.md", code)
        return code

    def device(self, ordinal: int) -> "Device":
        """Return a GPU by its number, which is torch's, too."""
        return Device(self, ordinal)


class Device:
    """One GPU.

    Args:
        driver: of this process.
        ordinal: its number.

    Raises:
        CudaError: there is no such GPU, or it does not answer.

    Attributes:
        ordinal: as given.
        name: as the driver calls it.
        pci_address: such as ``"0000:3b:00.0"``.
        exports_dmabuf: its memory can be shared as a DMA-BUF (NVIDIA's open kernel modules).
        flush_needed: what another device has written over PCIe is visible to kernels only after
            :meth:`flush_remote_writes`.
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
        doing = f"asking {self.name} for attribute {attribute}"
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._number, doing=doing)
        return value.value

    def activate(self) -> None:
        """Make the device's primary context current in this thread."""
        self._call("cuCtxSetCurrent", self._context, doing=f"using {self.name}")

    def call(self, name: str, *arguments: Any, doing: str, allowed: int = _SUCCESS) -> int:
        """Call a function of the driver with this device current: see :meth:`Driver.call`."""
        self.activate()
        return self._call(name, *arguments, doing=f"{doing} on {self.name}", allowed=allowed)

    def synchronize(self) -> None:
        """Wait until the GPU has done all that this process has started on it."""
        self.call("cuCtxSynchronize", doing="waiting for everything")

    def allocate(self, size: int) -> "DeviceBuffer":
        """Return ``size`` bytes of the GPU's memory, or a little more: whole pages.

        Raises:
            CudaError: there is no room.
        """
        return DeviceBuffer(self, -(-size // GPU_PAGE_BYTES) * GPU_PAGE_BYTES)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Page-lock host memory, so that copies from it are the GPU's own work; return what ends that.

        Raises:
            CudaError: the driver cannot lock so much.
        """
        doing = f"page-locking {size >> 20} MiB of host memory"
        again = self.call(
            "cuMemHostRegister_v2", address, size, _REGISTER_PORTABLE, doing=doing, allowed=_ALREADY_REGISTERED
        )
        return _nothing if again else lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", address, doing="unlocking host memory")

    def flush_remote_writes(self) -> None:
        """Wait until whatever other devices have written into this GPU's memory is visible to its kernels.

        Does nothing where the platform orders such writes by itself (``flush_needed`` is false).

        Raises:
            CudaError: the platform neither orders them nor can be made to.
        """
        if not self.flush_needed:
            return
        if not self._can_flush:
            raise CudaError(
                f"{self.name} neither orders writes of other devices nor can flush them from the host, so that KV "
                "written by a DPU could be read too early; set host.delivery to pinned or shared_memory"
            )
        doing = "flushing writes of other devices"
        self.call("cuFlushGPUDirectRDMAWrites", _FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER, doing=doing)

    def stream(self) -> "Stream":
        """Return a new stream, which waits for no other."""
        return Stream(self)


class DeviceBuffer:
    """Memory of a GPU, given back with the last reference to this object; a torch tensor over it holds one.

    Attributes:
        device: that it is of.
        address: of the GPU.
        size: bytes.
    """

    def __init__(self, device: Device, size: int) -> None:
        address = _ADDRESS()
        device.call("cuMemAlloc_v2", ctypes.byref(address), size, doing=f"allocating {size >> 20} MiB")
        self.device = device
        self.address = address.value
        self.size = size
        weakref.finalize(self, _free, device, self.address).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch makes a tensor of uint8 from, without a copy."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}

    def ipc_handle(self) -> bytes:
        """Return the handle by which another process on this machine can map the memory, 64 bytes."""
        handle = ctypes.create_string_buffer(_IPC_HANDLE_BYTES)
        self.device.call("cuIpcGetMemHandle", handle, self.address, doing="sharing memory with another process")
        return handle.raw

    def dmabuf(self) -> int:
        """Return a file descriptor of the memory as a DMA-BUF, to be closed by the caller.

        Raises:
            CudaError: this GPU, or its driver, cannot do that.
        """
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
    """A queue of copies and kernels. One thread uses it at a time.

    Attributes:
        handle: ``CUstream``; ``torch.cuda.ExternalStream`` takes it.
    """

    def __init__(self, device: Device) -> None:
        stream, event = _VOID(), _VOID()
        device.call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING, doing="making a stream")
        # Waiting for this event sleeps; waiting for a stream spins, on a core that the engine may want.
        device.call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING_NO_TIMING, doing="making an event")
        self._device = device
        self._event = event
        self.handle = int(stream.value or 0)

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        """Start to copy ``size`` bytes of host memory at ``source`` to the GPU's address ``target``."""
        doing = f"copying {size} bytes to the GPU"
        self._device.call("cuMemcpyHtoDAsync_v2", target, source, size, self.handle, doing=doing)

    def synchronize(self) -> None:
        """Wait until all that was started on this stream is done.

        Raises:
            CudaError: some of it has failed.
        """
        self._device.call("cuEventRecord", self._event, self.handle, doing="recording an event")
        self._device.call("cuEventSynchronize", self._event, doing="waiting for copies and kernels")


def _free(device: Device, address: int) -> None:
    # At the end of the process the driver may be gone before us, and frees everything by itself.
    with contextlib.suppress(CudaError):
        device.call("cuMemFree_v2", address, doing="freeing memory")


def _nothing() -> None:
    pass
