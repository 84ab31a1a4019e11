"""Destinations: memory segments of clients that KV is delivered into and stored from.

A segment is a file directly under /dev/shm that belongs to the daemon's own user; the client may unlink it once it is
registered. The daemon maps it for as long as it is registered and used. Its pages are allocated and mapped at
registration, so that a full /dev/shm is an error then, and no page fault slows a round.
"""

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from shadowserve.errors import ShadowServeError
from shadowserve.record import ChunkLayout

__all__ = ["Destination", "DestinationError", "DestinationTable", "OverlapError", "TooManyError"]

SHARED_MEMORY: Final = "/dev/shm"
_NAME: Final = re.compile(r"shadowserve-[0-9a-f]{8,64}\Z")

logger = logging.getLogger(__name__)


class DestinationError(ShadowServeError):
    """A segment cannot be registered, or a region of it cannot be used; the message says what the caller did wrong."""


class TooManyError(DestinationError):
    """A limit on segments, on their bytes, or on /dev/shm itself is reached."""


class OverlapError(DestinationError):
    """Another job is using the region."""


class Destination:
    """One registered segment.

    Attributes:
        destination_id: random, 64 bits.
        owner: the host that registered it, and alone may use it.
        layout: of the chunks that move through it.
        size: bytes.
        identity: device and inode of the file: the same for two registrations of one file.
        memory: the segment's bytes, shared with the client.
    """

    def __init__(self, destination_id: int, owner: str, layout: ChunkLayout, file: int, memory: mmap.mmap) -> None:
        status = os.fstat(file)
        self.destination_id = destination_id
        self.owner = owner
        self.layout = layout
        self.size = len(memory)
        self.identity = (status.st_dev, status.st_ino)
        self.used_at = time.monotonic()
        self.users = 0
        self.released = False
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._file = file
        self._mapping = memory
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def check_whole(self) -> None:
        """Raise DestinationError if the file has shrunk: to touch what is gone would kill the daemon (SIGBUS)."""
        if os.fstat(self._file).st_size < self.size:
            raise DestinationError(
                f"the segment had {self.size} bytes when it was registered and is shorter now; register it again"
            )

    def close(self) -> None:
        """Unmap. Nobody may be using the memory."""
        del self.memory
        try:
            self._mapping.close()
        except BufferError:  # a view is still alive somewhere: the mapping then goes with it
            logger.warning("destination %016x is still referenced; it is unmapped later", self.destination_id)
        os.close(self._file)


class DestinationTable:
    """All registered segments."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._count_max = config.destinations_max
        self._bytes_max = int(config.destination_bytes_max)
        self._idle_max = config.destination_idle
        self._destinations: dict[int, Destination] = {}
        self._pending = 0  # registrations in progress
        self._pending_bytes = 0
        self._claims: defaultdict[tuple[int, int], list[tuple[int, int, bool]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._destinations)

    @property
    def total_bytes(self) -> int:
        """Bytes of all registered segments."""
        return sum(destination.size for destination in self._destinations.values())

    def count(self, owner: str) -> int:
        """Return how many segments a host has registered."""
        return sum(destination.owner == owner for destination in self._destinations.values())

    def get(self, destination_id: int, owner: str) -> Destination | None:
        """Return a host's segment by its id, None where there is none (any more), or where it is another host's."""
        destination = self._destinations.get(destination_id)
        if destination is None or destination.released or destination.owner != owner:
            return None
        return destination

    def other_layout(self, layout: ChunkLayout) -> ChunkLayout | None:
        """Return the layout of a registered segment with the same namespace and another shape, if there is one."""
        for destination in self._destinations.values():
            if destination.layout.namespace == layout.namespace and destination.layout != layout:
                return destination.layout
        return None

    async def register(self, name: str, size: int, layout: ChunkLayout, owner: str) -> Destination:
        """Map the file ``name`` under /dev/shm, for a host.

        Raises:
            DestinationError: a name, owner, type or size that is not as it must be.
            TooManyError: a limit is reached.
        """
        if not _NAME.match(name):
            raise DestinationError(f"shared_memory.name is {name[:100]!r}; it is 'shadowserve-' and 8 to 64 hex digits")
        if size < layout.raw_bytes:
            raise DestinationError(f"shared_memory.size is {size}; one chunk of this layout takes {layout.raw_bytes}")
        if len(self._destinations) + self._pending >= self._count_max:
            raise TooManyError(f"{self._count_max} segments are registered; release one, or raise destinations_max")
        if self.total_bytes + self._pending_bytes + size > self._bytes_max:
            raise TooManyError(f"the segments would exceed destination_bytes_max, {self._bytes_max} bytes")
        self._pending += 1
        self._pending_bytes += size
        try:
            mapping = asyncio.ensure_future(asyncio.to_thread(_map, name, size))
            try:
                file, memory = await asyncio.shield(mapping)
            except asyncio.CancelledError:  # the caller is gone: nobody will use what the thread is still mapping
                mapping.add_done_callback(_discard)
                raise
            destination = Destination(secrets.randbits(64) or 1, owner, layout, file, memory)
            self._destinations[destination.destination_id] = destination
        finally:
            self._pending -= 1
            self._pending_bytes -= size
        return destination

    @contextlib.contextmanager
    def claim(self, destination: Destination, offset: int, length: int, *, writing: bool) -> Iterator[None]:
        """Use a region for the length of a job. Two jobs may share bytes only to read them.

        Raises:
            DestinationError: the region is not inside the segment, or the segment is not whole.
            OverlapError: another job uses a part of it.
        """
        if offset + length > destination.size:
            raise DestinationError(
                f"offset {offset} and {length} bytes end outside the segment, which has {destination.size} bytes"
            )
        destination.check_whole()
        claims = self._claims[destination.identity]
        for begin, end, theirs_writing in claims:
            if offset < end and begin < offset + length and (writing or theirs_writing):
                raise OverlapError(
                    f"another job uses bytes {begin} to {end} of the segment, this one wants {offset} to "
                    f"{offset + length}; wait for its answer first"
                )
        claim = (offset, offset + length, writing)
        claims.append(claim)
        destination.users += 1
        destination.quiet.clear()
        try:
            yield
        finally:
            claims.remove(claim)
            if not claims:
                del self._claims[destination.identity]
            destination.used_at = time.monotonic()
            destination.users -= 1
            if destination.users == 0:
                destination.quiet.set()

    async def release(self, destination_id: int, owner: str) -> None:
        """Forget a segment: at once for new jobs; return once those in progress have ended. Unknown ids are fine."""
        destination = self._destinations.get(destination_id)
        if destination is None or destination.owner != owner:
            return
        destination.released = True
        await destination.quiet.wait()
        self._forget(destination)

    def expire(self, now: float) -> None:
        """Forget segments that nobody has used for too long, or whose release was not waited for."""
        for destination in list(self._destinations.values()):
            idle = now - destination.used_at >= self._idle_max
            if destination.users == 0 and (idle or destination.released):
                if idle:
                    logger.info(
                        "destination %016x was idle for %g s: forgotten", destination.destination_id, self._idle_max
                    )
                self._forget(destination)

    def _forget(self, destination: Destination) -> None:
        if self._destinations.pop(destination.destination_id, None) is not None:
            destination.close()

    def close(self) -> None:
        """Forget all that are quiet; for the end of the daemon."""
        for destination in self._destinations.values():
            if destination.users == 0:
                destination.close()
        self._destinations.clear()


def _discard(mapping: "asyncio.Future[tuple[int, mmap.mmap]]") -> None:
    if not mapping.cancelled() and mapping.exception() is None:
        file, memory = mapping.result()
        memory.close()
        os.close(file)


def _map(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Open, check, allocate and map a segment; blocks for about 0.1 s for each GiB."""
    path = f"{SHARED_MEMORY}/{name}"
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DestinationError(
            f"cannot open {path}: {error.strerror}; is it on this machine, made by this user?"
        ) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise DestinationError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise DestinationError(f"{path} belongs to user {status.st_uid}, the data plane runs as {os.geteuid()}")
        if status.st_size != size:
            raise DestinationError(f"{path} has {status.st_size} bytes, shared_memory.size says {size}")
        try:
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            kind = TooManyError if error.errno in (errno.ENOSPC, errno.ENOMEM) else DestinationError
            raise kind(f"cannot allocate {size} bytes for {path}: {error.strerror}; is /dev/shm full?") from error
    except BaseException:
        os.close(file)
        raise
    return file, memory
