"""Shared memory that the data plane writes fetched chunks into, or reads chunks to be stored from.

A segment is a file under ``/dev/shm``. It has a name only while it is being registered: the data plane maps it, then
the name goes, so that nothing is left behind however the two processes end. (Killed within that moment, the file
remains; it is locked by its owner, so the next process that makes a segment sees that the owner is gone and removes
it.)

Memory that the data plane may still be using is never used for anything else. When a call ends without an answer, or
the data plane does not know the segment any more, :meth:`Destination.retire` gives the memory up, and the next
:meth:`Destination.acquire` makes and registers another.
"""

import fcntl
import mmap
import os
import secrets
import threading
from pathlib import Path
from typing import Final, Self

from host_control.client import ChunkShape, DataPlaneClient
from shadowserve.errors import ConfigurationError, DataPlaneError

__all__ = ["Destination", "Segment"]

_DIRECTORY: Final = Path("/dev/shm")  # noqa: S108
_PREFIX: Final = "shadowserve-05e1f00d"
"""The data plane takes ``shadowserve-`` and hexadecimal digits; the first eight tell our files from others'."""


class Segment:
    """A mapped file under ``/dev/shm``, with every page reserved.

    Attributes:
        name: of the file, without its directory.
        memory: the mapping, writable, ``size`` bytes.
        size: bytes.
    """

    def __init__(self, name: str, descriptor: int, size: int) -> None:
        self.name = name
        self.size = size
        self._descriptor = descriptor
        self.memory = memoryview(mmap.mmap(descriptor, size))

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
            except OSError:  # another process just took it for abandoned and removes it
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


class Destination:
    """A segment that the data plane knows, made when first needed and again whenever it was given up.

    One thread calls :meth:`acquire` and :meth:`retire`; any may read :attr:`current`.

    Args:
        client: of the data plane.
        shape: of the chunks.
        size: bytes of the segment.
        connect_timeout: seconds that :meth:`acquire` waits for a connection.
    """

    def __init__(self, client: DataPlaneClient, shape: ChunkShape, size: int, connect_timeout: float = 2.0) -> None:
        self.shape = shape
        self.size = size
        self._client = client
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._destination_id = 0
        self.retired = 0

    @property
    def current(self) -> Segment | None:
        """The registered segment, if there is one now."""
        with self._lock:
            return self._segment

    @property
    def destination_id(self) -> int:
        """What the data plane calls :attr:`current`."""
        with self._lock:
            return self._destination_id

    def acquire(self, timeout: float) -> Segment:
        """Return the registered segment, making and registering one if there is none.

        Raises:
            DataPlaneError: the data plane cannot be reached, or refuses.
            ConfigurationError: no room in ``/dev/shm``.
        """
        segment = self.current
        if segment is not None:
            return segment
        breaker = self._client.breakers["register"]
        if not breaker.allow():
            raise DataPlaneError(
                f"registering memory at the data plane {self._client.address} is paused after repeated failures",
                "breaker_open",
            )
        try:
            # Without a connection a segment would be made, page by page, for nothing.
            self._client.connect(min(timeout, self._connect_timeout), self.shape)
        except DataPlaneError:
            breaker.report(success=False)
            raise
        try:
            segment = Segment.create(self.size)
        except ConfigurationError:
            breaker.report(success=False)
            raise
        try:
            registration = self._client.register(self.shape, segment.name, segment.size)
        except DataPlaneError:
            segment.close()
            raise
        segment.unlink()
        with self._lock:
            self._segment, self._destination_id = segment, registration.destination_id
        return segment

    def retire(self, *, release: bool, wait: bool = False) -> None:
        """Give the segment up: whatever the data plane still does to it, it does to memory that nobody reads.

        Args:
            release: ask the data plane to forget it too (where it may still know it).
            wait: for its answer.
        """
        with self._lock:
            segment, destination_id = self._segment, self._destination_id
            self._segment = None
        if segment is None:
            return
        self.retired += 1
        if release:
            self._client.release(destination_id, wait=wait)
        segment.close()

    def close(self) -> None:
        """Give the segment up for good."""
        self.retire(release=True, wait=True)
