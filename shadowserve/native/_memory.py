"""Memory beyond the pipeline's own buffers: registered memory, guards of mappings, and exports to a DPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from shadowserve.errors import NativeError
from shadowserve.native._library import Closing, MemoryKind, Result, check, ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["RegisteredMemory", "Export", "Guard", "Region", "StridedCopy", "progress_wait"]


class _Pipeline(Protocol):
    """The part of a pipeline that registered memory needs."""

    @property
    def backend(self) -> str: ...

    def _open(self) -> Any: ...


class RegisteredMemory(Closing):
    """Memory that is registered with a pipeline's backend, for any number of batches (``ss_memory_register()``).

    Close it before the pipeline, and while no batch uses it. From any thread. ``address`` is the first one, as groups
    name it; in the exporting process for exported memory.
    """

    def __init__(self, pipeline: _Pipeline, fields: dict[str, Any], keep: Any) -> None:
        """Register memory (the fields of a ``struct ss_memory``); keep ``keep`` alive until :meth:`close`."""
        memory = ffi.new("struct ss_memory *", fields)
        pointer = ffi.new("struct ss_registered_memory **")
        self.kind = MemoryKind(memory.kind)
        self.size = int(memory.size)
        self._keep = keep
        self._registered: Any = ffi.NULL
        code = lib.ss_memory_register(pipeline._open(), memory, pointer)
        check(
            code,
            f"registering {self.size} bytes of {self.kind.name.lower()} memory with the pipeline's backend",
            device=pipeline.backend != "software",
        )
        self._registered = pointer[0]
        self._pipeline = pipeline
        self.address = int(ffi.cast("uintptr_t", lib.ss_memory_address(self._registered)))

    @classmethod
    def local(cls, pipeline: _Pipeline, memory: "WriteableBuffer") -> Self:
        """Register memory of this process, and keep it alive until the registration is closed."""
        buffer = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
        described = {"kind": MemoryKind.LOCAL, "address": buffer, "size": len(buffer)}
        try:
            return cls(pipeline, described, buffer)
        except BaseException:
            ffi.release(buffer)
            raise

    @classmethod
    def exported(cls, pipeline: _Pipeline, address: int, size: int, descriptor: bytes) -> Self:
        """Register memory that another process exported (:class:`Export`); ``address`` is its address in that process.

        NativeError with ``Result.NOT_SUPPORTED``: the backend reaches only memory of its own process.
        """
        described = {"kind": MemoryKind.EXPORTED, "address": ffi.cast("uint8_t *", address), "size": size}
        content = ffi.from_buffer("uint8_t[]", descriptor)
        return cls(pipeline, described | {"descriptor": content, "descriptor_size": len(descriptor)}, None)

    @classmethod
    def cuda_ipc(cls, pipeline: _Pipeline, handle: bytes, size: int, device: str) -> Self:
        """Register memory of a GPU of this machine, a whole allocation of another process.

        ``handle`` is its ``CUipcMemHandle``, ``device`` the PCI address of the GPU. NativeError with
        ``Result.NOT_SUPPORTED``: no CUDA driver, another backend, or a fused pipeline; with ``Result.BAD_ARGUMENT``:
        the GPU or the handle does not exist (any longer).
        """
        described = {"kind": MemoryKind.CUDA_IPC, "size": size, "device": ffi.new("char[]", device.encode())}
        content = ffi.from_buffer("uint8_t[]", handle)
        return cls(pipeline, described | {"descriptor": content, "descriptor_size": len(handle)}, None)

    def close(self) -> None:
        """End the registration. No batch may use the memory. A second call does nothing."""
        registered, self._registered = self._registered, ffi.NULL
        if registered != ffi.NULL:
            lib.ss_memory_release(registered)
        keep, self._keep = self._keep, None
        if keep is not None:
            ffi.release(keep)

    def region(self, offset: int, length: int) -> "Region":
        if self._registered == ffi.NULL:
            raise NativeError("the registered memory is closed; register it again", Result.BAD_ARGUMENT)
        if not 0 <= offset <= offset + length <= self.size:
            raise NativeError(
                f"bytes {offset} to {offset + length} do not lie within {self.size} bytes", Result.BAD_ARGUMENT
            )
        return Region(self, offset, length)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of registered memory: ``length`` bytes from ``offset``."""

    registered: RegisteredMemory
    offset: int
    length: int


class Guard:
    """Protects this process against SIGBUS, if the file of a mapping shrinks or its file system is full.

    An access to a lost page replaces the whole mapping with private memory of zeros; :attr:`lost` is then true. The
    first guard installs a SIGBUS handler, which passes on signals that do not concern guarded memory. ``memory`` is a
    whole mapping, from its first byte; it must exist until :meth:`close`.
    """

    def __init__(self, memory: "WriteableBuffer") -> None:
        self._guard: Any = ffi.NULL
        pointer = ffi.new("struct ss_guard **")
        with ffi.from_buffer("uint8_t[]", memory, require_writable=True) as buffer:
            check(lib.ss_guard_open(buffer, len(buffer), pointer), f"guarding {len(buffer)} bytes of memory")
        self._guard = pointer[0]
        self._lost = False

    @property
    def lost(self) -> bool:
        """True if a page was lost when it was accessed. Check this after the last access."""
        return bool(lib.ss_guard_lost(self._guard)) if self._guard != ffi.NULL else self._lost

    def close(self) -> None:
        """End the protection; no thread may access the memory. A second call does nothing."""
        guard, self._guard = self._guard, ffi.NULL
        if guard != ffi.NULL:
            self._lost = bool(lib.ss_guard_lost(guard))
            lib.ss_guard_close(guard)


def progress_wait(word: "ReadableBuffer", seen: int, timeout: float) -> int:
    """Wait until a batch's progress may differ from ``seen``, at most ``timeout`` seconds; return the progress.

    ``word`` has 4 bytes (:class:`Progress`), in this process or another.
    """
    with ffi.from_buffer("uint8_t[]", word) as memory:
        return int(lib.ss_progress_wait(ffi.cast("uint32_t *", memory), seen, max(0, int(timeout * 1e9))))


class StridedCopy:
    """Copies blocks of one shape, at most six dimensions, which are in different orders in source and target.

    Strides are the bytes from one element of a dimension to the next. ``element_bytes`` is 1, 2, 4 or 8.
    """

    def __init__(
        self, sizes: Sequence[int], to_strides: Sequence[int], from_strides: Sequence[int], element_bytes: int
    ) -> None:
        self._shape = (
            len(sizes),
            ffi.new("uint64_t[]", list(sizes)),
            ffi.new("int64_t[]", list(to_strides)),
            ffi.new("int64_t[]", list(from_strides)),
            element_bytes,
        )

    def __call__(self, to: NDArray[np.uint64], source: NDArray[np.uint64]) -> None:
        """Copy one block for each pair of addresses; the caller must ensure that the addresses are valid."""
        assert to.shape == source.shape and to.flags.c_contiguous and source.flags.c_contiguous
        targets, sources = ffi.from_buffer("void *[]", to), ffi.from_buffer("void *[]", source)
        check(lib.ss_copy_strided(targets, sources, to.size, *self._shape), f"copying {to.size} blocks")


class Export(Closing):
    """Memory of the serving process, or of a GPU, that a DPU's pipeline may read and write.

    The memory, and ``dmabuf``, must exist until :meth:`close`.

    Args:
        address: Address of the memory, in this process (for a GPU: its device address).
        size: Bytes.
        device: PCI address or name of one of the DPU's functions on this host; empty: the first suitable one.
        dmabuf: File descriptor of the DMA-BUF of GPU memory; -1 for host memory, or with nvidia-peermem.
    """

    def __init__(self, address: int, size: int, *, device: str = "", dmabuf: int = -1) -> None:
        self._export: Any = ffi.NULL
        pointer = ffi.new("struct ss_export **")
        code = lib.ss_export_open(device.encode(), ffi.cast("void *", address), size, dmabuf, pointer)
        where = f"DPU {device!r}" if device else "the DPU"
        check(code, f"exporting {size} bytes to {where}", device=True)
        self._export = pointer[0]
        self.address = address
        self.size = size
        content = ffi.new("const void **")
        content_size = ffi.new("size_t *")
        lib.ss_export_descriptor(self._export, content, content_size)
        self.descriptor = bytes(ffi.buffer(content[0], content_size[0]))
        """Descriptor for :meth:`RegisteredMemory.exported`. Any process that has it can access the memory."""

    def close(self) -> None:
        """End the export: later transfers fail. A second call does nothing."""
        exported, self._export = self._export, ffi.NULL
        if exported != ffi.NULL:
            lib.ss_export_close(exported)
