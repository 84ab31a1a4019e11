"""Memory that can be registered with a data plane, and its most frequent kind: shared memory.

A segment is a file in ``/dev/shm``. It has a name only until the data plane has mapped it. Then the name is removed, so
that no file is left behind when the processes end. If a process is killed before, its file remains, without the lock
of its owner; the next process that creates a segment removes it.
"""

import abc
import ctypes
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, Final, Self

from host_control.client import MemoryMessage
from shadowserve import native
from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb

_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108
_PREFIX: Final = "shadowserve-05e1f00d"
"""The data plane accepts ``shadowserve-`` and hexadecimal digits. The first eight mark files of this module."""


_MADV_POPULATE_WRITE: Final = 23
"""Since Linux 5.14. On older kernels, pages are mapped when they are first accessed."""
_POPULATE_BYTES: Final = 16 << 20
"""Bytes per call: during a call no other thread of the process can map memory."""


class Memory(abc.ABC):
    """Memory that can be registered with the data plane.

    Attributes:
        size: Size in bytes.
        memory: The memory in this process: a memoryview, or a uint8 tensor on the GPU.
        peer_keeps_mapping: The data plane has its own mapping, so the memory can be closed here while it is still
            written there. Without one, writes after the close could hit memory that was allocated again.
    """

    size: int
    memory: Any
    peer_keeps_mapping = False

    @abc.abstractmethod
    def message(self) -> MemoryMessage:
        """Return the description for the Register call."""

    def on_registered(self) -> None:  # noqa: B027  # most memory has nothing to do
        """Called when the data plane has registered the memory."""

    def view(self, offset: int, length: int) -> Any:
        """Return a view of delivered bytes that :class:`~host_control.layouts.PagedLayout` can read.

        Called on the scattering thread after the Fetch call has ended. On a GPU, copies may still run on the delivery's
        stream.
        """
        return self.memory[offset : offset + length]

    def flush(self) -> None:  # noqa: B027  # most memory has nothing to do
        """Make delivered bytes visible to readers of :attr:`memory`.

        Called on the scattering thread while a Fetch call runs; :meth:`view` includes it.
        """

    def intact(self) -> bool:
        """Return False if another process has truncated the memory. Bytes that were read before are then invalid."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory. It is freed with the last view of it."""


class _Mapping(mmap.mmap):
    """A mapping that is guarded against SIGBUS as long as a view of it exists."""

    guard: native.Guard | None = None

    def __del__(self) -> None:
        if self.guard is not None:
            self.guard.close()


class Segment(Memory):
    """A mapped file in ``/dev/shm`` with all pages reserved. ``name`` is the file's, without its directory."""

    memory: memoryview
    peer_keeps_mapping = True

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        self.name = name
        self.size = size
        self._descriptor = descriptor
        self._mapping = _Mapping(descriptor, size)
        self._mapping.guard = self._guard = native.Guard(self._mapping)
        self.memory = memoryview(self._mapping)
        self._populate()

    def _populate(self) -> None:
        """Fill this process's page table. Otherwise this would take half of the time of the engine's first copies."""
        library, start = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for begin in range(0, self.size, _POPULATE_BYTES):
            size = ctypes.c_size_t(min(_POPULATE_BYTES, self.size - begin))
            if library.madvise(ctypes.c_void_p(start + begin), size, _MADV_POPULATE_WRITE) != 0:
                return

    @classmethod
    def create(cls, size: int) -> Self:
        """Create a segment of ``size`` bytes.

        Raises:
            ConfigurationError: ``/dev/shm`` has not enough free space.
        """
        _remove_abandoned()
        for _ in range(8):
            name = f"{_PREFIX}{os.getpid():08x}{secrets.token_hex(8)}"
            descriptor = os.open(_DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                abandoned = os.fstat(descriptor).st_nlink == 0
            except OSError:
                abandoned = True
            if abandoned:  # another process removes the file, because it saw it before it was locked
                os.close(descriptor)
                continue
            try:
                # Reserve all pages now. A page that is missing later would raise SIGBUS in the serving process.
                os.posix_fallocate(descriptor, 0, size)
                return cls(name, descriptor, size)
            except OSError as error:
                (_DIRECTORY / name).unlink(missing_ok=True)
                os.close(descriptor)
                raise ConfigurationError(
                    f"cannot reserve {size >> 20} MiB of shared memory in {_DIRECTORY}: {error.strerror}; enlarge it "
                    "(containers: --shm-size) or lower host.fetch_buffer_bytes and host.store_buffer_bytes"
                ) from error
        raise ConfigurationError(f"cannot create a segment in {_DIRECTORY}: other processes keep removing it")

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def message(self) -> pb.SharedMemory:
        return pb.SharedMemory(name=self.name, size=self.size)

    def on_registered(self) -> None:
        self.unlink()  # the data plane has mapped the file

    def intact(self) -> bool:
        truncated = self._descriptor >= 0 and os.fstat(self._descriptor).st_size < self.size
        return not truncated and not self._guard.lost

    def unlink(self) -> None:
        (_DIRECTORY / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_abandoned() -> None:
    for path in _DIRECTORY.glob(_PREFIX + "*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its owner still runs
            pass
        finally:
            os.close(descriptor)
