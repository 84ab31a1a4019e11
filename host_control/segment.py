"""Shared memory that the data plane writes fetched chunks into, or reads chunks to be stored from.

A segment is a file under ``/dev/shm``. It has a name only while it is being registered: the data plane maps it, then
the name goes, so that nothing is left behind however the two processes end. (Killed within that moment, the file
remains; it is locked by its owner, so the next process that makes a segment sees that the owner is gone and removes
it.)
"""

import ctypes
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb

if TYPE_CHECKING:
    from shadowserve import native


_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108
_PREFIX: Final = "shadowserve-05e1f00d"
"""The data plane takes ``shadowserve-`` and hexadecimal digits; the first eight tell our files from others'."""


_MADV_POPULATE_WRITE: Final = 23
"""Since Linux 5.14; elsewhere pages come when they are first touched, as slowly as without."""
_POPULATE_BYTES: Final = 16 << 20
"""At once: no thread of the engine can map memory meanwhile."""


class _Mapping(mmap.mmap):
    """A mapping that this process survives; guarded for as long as anybody has a view of it."""

    guard: "native.Guard | None" = None

    def __del__(self) -> None:
        if self.guard is not None:
            self.guard.close()


class Segment:
    """A mapped file under ``/dev/shm``, with every page reserved: a :class:`~host_control.registered_memory.Memory`.

    Attributes:
        name: of the file, without its directory.
        memory: the mapping, writable, ``size`` bytes.
        size: bytes.
    """

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        from shadowserve import native  # an engine loads the C core only where it has to

        self.name = name
        self.size = size
        self._descriptor = descriptor
        self._mapping = _Mapping(descriptor, size)
        self._mapping.guard = self._guard = native.Guard(self._mapping)
        self.memory = memoryview(self._mapping)
        self._populate()

    def _populate(self) -> None:
        """Enter the pages into this process's page table, which else costs the engine's thread half of a first copy."""
        library, start = ctypes.CDLL(None), ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for begin in range(0, self.size, _POPULATE_BYTES):
            size = ctypes.c_size_t(min(_POPULATE_BYTES, self.size - begin))
            if library.madvise(ctypes.c_void_p(start + begin), size, _MADV_POPULATE_WRITE) != 0:
                return

    @classmethod
    def create(cls, size: int) -> Self:
        """Make a segment of ``size`` bytes.

        Raises:
            ConfigurationError: ``/dev/shm`` has no room for it.
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
            if abandoned:  # another process took it for that before it was locked, and removes it or has
                os.close(descriptor)
                continue
            try:
                # Reserve now: a page that cannot be had later would be SIGBUS in the serving process.
                os.posix_fallocate(descriptor, 0, size)
                return cls(name, descriptor, size)
            except OSError as error:
                (_DIRECTORY / name).unlink(missing_ok=True)
                os.close(descriptor)
                raise ConfigurationError(
                    f"cannot reserve {size >> 20} MiB of shared memory in {_DIRECTORY}: {error.strerror}; enlarge it "
                    "(containers: --shm-size) or lower host.fetch_buffer_bytes and host.store_buffer_bytes"
                ) from error
        raise ConfigurationError(f"cannot make a segment in {_DIRECTORY}: other processes keep removing it")

    outlives_us = True

    @property
    def descriptor(self) -> int:
        """Of the file, while it is open."""
        return self._descriptor

    def message(self) -> pb.SharedMemory:
        """Return what the data plane is told."""
        return pb.SharedMemory(name=self.name, size=self.size)

    def published(self) -> None:
        """Take note that the data plane has mapped it: the name is of no more use."""
        self.unlink()

    def arrived(self, offset: int, length: int) -> memoryview:
        """Return what was delivered there."""
        return self.memory[offset : offset + length]

    def flush(self) -> None:
        """Nothing: the data plane writes where it is read."""

    def whole(self) -> bool:
        """Return whether nothing of it was gone, to the last access."""
        shorter = self._descriptor >= 0 and os.fstat(self._descriptor).st_size < self.size
        return not shorter and not self._guard.lost

    def unlink(self) -> None:
        """Remove the name; the memory stays for those who have mapped it."""
        (_DIRECTORY / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the name and let go; the memory is given back with the last view of it (a tensor, a slice)."""
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
        except OSError:  # its owner lives
            pass
        finally:
            os.close(descriptor)
