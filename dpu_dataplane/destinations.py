"""Destinations: memory segments of clients that KV is delivered into and stored from.

A segment is a file directly under /dev/shm that belongs to the daemon's own user; the client may unlink it once it is
registered. The daemon maps it for as long as it is registered and used. Its pages are allocated and mapped at
registration, so that a full /dev/shm is an error then, and no page fault slows a round; and made known to the
pipeline's device, where it has one.
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

from dpu_dataplane.config import DataPlaneConfig
from shadowserve import native
from shadowserve.errors import NativeError, ShadowServeError
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
        layout: of the chunks that move through it.
        size: bytes.
        identity: device and inode of the file: the same for two registrations of one file.
    """

    def __init__(self, destination_id: int, layout: ChunkLayout, segment: "_Segment") -> None:
        status = os.fstat(segment.file)
        self.destination_id = destination_id
        self.layout = layout
        self.size = len(segment.mapping)
        self.identity = (status.st_dev, status.st_ino)
        self.used_at = time.monotonic()
        self.users = 0
        self.released = False
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._segment = segment

    def region(self, offset: int, length: int) -> native.Region:
        """Return a part of the segment, as rounds take it."""
        return self._segment.registered.region(offset, length)

    def check_whole(self) -> None:
        """Raise DestinationError if the file has shrunk: to touch what is gone would kill the daemon (SIGBUS)."""
        if os.fstat(self._segment.file).st_size < self.size:
            raise DestinationError(
                f"the segment had {self.size} bytes when it was registered and is shorter now; register it again"
            )

    def close(self) -> None:
        """Unmap. Nobody may be using the memory."""
        self._segment.close()


class DestinationTable:
    """All registered segments."""

    def __init__(self, config: DataPlaneConfig, pipeline: native.Pipeline) -> None:
        self._pipeline = pipeline
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

    def get(self, destination_id: int) -> Destination | None:
        """Return a segment by its id, None where there is none (any more)."""
        destination = self._destinations.get(destination_id)
        return None if destination is None or destination.released else destination

    async def register(self, name: str, size: int, layout: ChunkLayout) -> Destination:
        """Map the file ``name`` under /dev/shm.

        Raises:
            DestinationError: a name, owner, type or size that is not as it must be, or memory that the device refuses.
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
            opening = asyncio.ensure_future(asyncio.to_thread(_open, self._pipeline, name, size))
            try:
                segment = await asyncio.shield(opening)
            except asyncio.CancelledError:  # the caller is gone: nobody will use what the thread is still mapping
                opening.add_done_callback(_discard)
                raise
            destination = Destination(secrets.randbits(64) or 1, layout, segment)
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

    async def release(self, destination_id: int) -> None:
        """Forget a segment: at once for new jobs; return once those in progress have ended. Unknown ids are fine."""
        destination = self._destinations.get(destination_id)
        if destination is None:
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


class _Segment:
    """A file that is mapped, and registered with the pipeline."""

    def __init__(self, file: int, mapping: mmap.mmap, registered: native.Destination) -> None:
        self.file, self.mapping, self.registered = file, mapping, registered

    def close(self) -> None:
        self.registered.close()
        self.mapping.close()
        os.close(self.file)


def _discard(opening: "asyncio.Future[_Segment]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _open(pipeline: native.Pipeline, name: str, size: int) -> _Segment:
    file, mapping = _map(name, size)
    try:
        return _Segment(file, mapping, native.Destination.local(pipeline, mapping))
    except NativeError as error:
        mapping.close()
        os.close(file)
        kind = TooManyError if error.result is native.Result.NO_MEMORY else DestinationError
        raise kind(f"the segment cannot be used: {error}") from error


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
