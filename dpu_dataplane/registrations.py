"""Destinations: memory of clients that KV is delivered into and stored from.

Three kinds, of which the pipeline's backend takes some:

- *shared memory*: a file directly under /dev/shm that belongs to the daemon's own user; the client may unlink it once
  it is registered. The daemon maps it for as long as it is registered and used. Its pages are allocated and mapped at
  registration, so that a full /dev/shm is an error then, and no page fault slows a batch. The client may shrink the
  file at any moment all the same. Whoever touches what is gone survives it (:class:`shadowserve.native.Guard`), and
  every job looks at its end, and before it passes on what it has read, whether its memory was whole to the last;
- *exported memory* of the host, or of its GPU, which a DPU's accelerators write over PCIe: never read or written here;
- *memory of a GPU* of this machine, by CUDA IPC: only the driver's copies reach it.

Memory of the last two kinds is its owner's, who may end. What is delivered then fails, and the registration is dropped.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.paging import Paging, PagingError
from shadowserve import native
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import NativeError, ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = [
    "Registration",
    "RegistrationError",
    "Registrations",
    "DeviceGivenUpError",
    "OverlapError",
    "TooManyError",
]

SHARED_MEMORY: Final = "/dev/shm"
DESCRIPTOR_MAX: Final = 4096
"""Bytes of an export's description: a few hundred, of a region in one piece."""
CUDA_HANDLE_BYTES: Final = 64
_NAME: Final = re.compile(r"shadowserve-[0-9a-f]{8,64}\Z")
_PCI_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\Z")

logger = logging.getLogger(__name__)


class RegistrationError(ShadowServeError):
    """Memory cannot be registered, or a region of it cannot be used; the message says what the caller did wrong."""


class TooManyError(RegistrationError):
    """A limit on registrations, on their bytes, or on /dev/shm itself is reached."""


class OverlapError(RegistrationError):
    """Another job is using the region."""


class DeviceGivenUpError(ShadowServeError):
    """The device never ended what it was given: nobody can say that memory is quiet before the process has ended."""

    def __init__(self) -> None:
        super().__init__(
            "the accelerator does not end what it was given and was given up; this data plane ends, and until then the "
            "region may still be written: give the memory up"
        )


class Registration:
    """Registered memory.

    Attributes:
        memory_id: random, 64 bits.
        owner: the host that registered it.
        session: of that host, which alone may use it.
        layouts: of the chunks that move through it; calls name one by its index.
        size: bytes.
        identity: the same for two registrations of the same memory.
        paging: where an engine's pages are in it, if it is paged memory.
    """

    def __init__(
        self,
        layouts: Sequence[ChunkLayout],
        size: int,
        identity: object,
        registered: native.Destination,
        segment: "_Segment | None",
    ) -> None:
        self.memory_id = secrets.randbits(64) or 1
        self.owner, self.session = "", b""
        self.layouts = tuple(layouts)
        self.size = size
        self.identity = identity
        self.used_at = time.monotonic()
        self.users = 0
        self.released = False
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._registered = registered
        self._segment = segment
        self.paging: Paging | None = None
        self._at_end: list[Callable[[], None]] = []

    @property
    def memory(self) -> memoryview:
        """Shared memory, as this process has mapped it."""
        assert self._segment is not None
        return memoryview(self._segment.memory)

    @property
    def address(self) -> int:
        """Where it begins, here or wherever it is."""
        return self._registered.address

    def at_end(self, function: Callable[[], None]) -> None:
        """Have something called before the memory is let go."""
        self._at_end.append(function)

    @property
    def shared(self) -> bool:
        """Whether it is memory of this machine that this process has mapped."""
        return self._segment is not None

    def region(self, offset: int, length: int) -> native.Region:
        """Return a part of the memory, as a batch takes it."""
        return self._registered.region(offset, length)

    def check_whole(self) -> None:
        """Raise RegistrationError if a part of the memory is gone: what was read from there, or written, is void.

        It is of no more use then: jobs that come later do not find it.
        """
        if self._segment is not None and not self._segment.is_whole():
            lost = f"the segment had {self.size} bytes when it was registered and is shorter now"
            if not self.released:
                logger.warning("registration %016x is forgotten: %s", self.memory_id, lost)
            self.released = True
            raise RegistrationError(f"{lost}; register it again")

    def is_abandoned(self) -> bool:
        """Return whether no process but this one has it; false where that cannot be known."""
        return self._segment is not None and self._segment.is_abandoned()

    def close(self) -> None:
        """Let go. Nobody may be using the memory."""
        for function in self._at_end:
            function()
        self._at_end.clear()  # with what they hold of the memory
        self._registered.close()
        if self._segment is not None:
            self._segment.close()


@dataclass(frozen=True)
class _Segment:
    """A file under /dev/shm, open, mapped and guarded."""

    file: int
    memory: mmap.mmap
    guard: native.Guard

    def is_whole(self) -> bool:
        """Return whether nothing of it is gone, or was when it was touched."""
        return not self.guard.lost and os.fstat(self.file).st_size >= len(self.memory)

    def is_abandoned(self) -> bool:
        """Return whether no process holds the lock that a client has on its segment as long as it uses it."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.file, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        self.guard.close()
        try:
            self.memory.close()
        except BufferError:  # a view is still alive somewhere: the mapping then goes with it
            logger.warning("a segment of %d bytes is still referenced; it is unmapped later", len(self.memory))
        os.close(self.file)


class Registrations:
    """All registered registrations.

    Args:
        config: of the data plane.
        pipeline: that the memory is made known to.

    Attributes:
        device_lost: set once a job has found that the device was given up.
    """

    def __init__(self, config: DataPlaneConfig, pipeline: native.Pipeline) -> None:
        self._backend = config.backend
        self._pipeline = pipeline
        self._kinds = {
            name: (kind, connect) for name, (kind, connect) in _KINDS.items() if kind in pipeline.memory_kinds
        }
        self._count_max = config.registrations_max
        self._bytes_max = int(config.registered_bytes_max)
        self._idle_max = config.registration_idle_s
        self.device_lost = asyncio.Event()
        self._registrations: dict[int, Registration] = {}
        self._shares = config.hosts_max
        self._pending: list[tuple[str, int]] = []  # owner and bytes of registrations in progress
        self._claims: defaultdict[object, list[tuple[int, int, bool]]] = defaultdict(list)

    @property
    def kinds(self) -> list[str]:
        """The fields of RegisterMemoryRequest.memory that :meth:`register` takes."""
        return list(self._kinds)

    @property
    def given_up(self) -> bool:
        """Whether the device was given up, over whatever job."""
        return self._pipeline.given_up

    def __len__(self) -> int:
        return len(self._registrations)

    @property
    def total_bytes(self) -> int:
        """Bytes of all registered registrations."""
        return sum(registration.size for registration in self._registrations.values())

    def count(self, owner: str) -> int:
        """Return how many registrations a host has registered."""
        return sum(registration.owner == owner for registration in self._registrations.values())

    def has_any(self, session: bytes) -> bool:
        """Return whether a session has registered memory."""
        return any(registration.session == session for registration in self._registrations.values())

    def get(self, memory_id: int, session: bytes) -> Registration | None:
        """Return a session's registration by its id, None where there is none (any more), or it is another one's."""
        registration = self._registrations.get(memory_id)
        if registration is None or registration.released or registration.session != session:
            return None
        return registration

    def other_layout(self, layout: ChunkLayout) -> ChunkLayout | None:
        """Return the layout of a registered registration with the same namespace and another shape, if there is one."""
        for registration in self._registrations.values():
            for other in registration.layouts:
                if other.namespace == layout.namespace and other != layout:
                    return other
        return None

    def namespaces(self) -> set[bytes]:
        """Return the namespaces of the chunks that registered memory is for."""
        return {layout.namespace for registration in self._registrations.values() for layout in registration.layouts}

    async def register(
        self, request: pb.RegisterMemoryRequest, layouts: Sequence[ChunkLayout], owner: str, session: bytes
    ) -> Registration:
        """Make the memory that ``request`` names ready for batches, for a session of a host.

        Args:
            request: names the memory.
            layouts: of the chunks that move through it, at least one.
            owner: the host.
            session: of it.

        Raises:
            RegistrationError: memory of a kind that the backend does not take, or not as it must be.
            TooManyError: a limit is reached.
        """
        field = request.WhichOneof("memory")
        if field not in self._kinds:
            raise RegistrationError(
                f"memory is {field or 'not given'}; this data plane, with backend {self._backend}, takes "
                + " or ".join(self._kinds)
                + ("; cuda_ipc needs a CUDA driver and fused: false" if field == "cuda_ipc" else "")
            )
        memory = getattr(request, field)
        size = int(memory.size)
        if size < (largest := max(layout.raw_bytes for layout in layouts)):
            raise RegistrationError(f"{field}.size is {size}; one chunk of these layouts takes up to {largest}")
        try:
            self._check_room(size, owner)
        except TooManyError:
            self._forget_abandoned()
            self._check_room(size, owner)
        if request.HasField("pages") and (field != "shared_memory" or len(layouts) != 1):
            raise RegistrationError(f"pages are of shared_memory with one layout, not of {field} with {len(layouts)}")
        _, connect = self._kinds[field]
        pending = (owner, size)
        self._pending.append(pending)
        try:
            connecting = asyncio.ensure_future(asyncio.to_thread(connect, self._pipeline, memory, layouts))
            try:
                registration = await asyncio.shield(connecting)
            except asyncio.CancelledError:  # the caller is gone: nobody will use what the thread is still preparing
                connecting.add_done_callback(_discard)
                raise
            try:
                if request.HasField("pages"):
                    registration.paging = Paging.of(request.pages, layouts[0], size)
            except PagingError as error:
                registration.close()
                raise RegistrationError(str(error)) from error
            registration.owner, registration.session = owner, session
            self._registrations[registration.memory_id] = registration
        finally:
            self._pending.remove(pending)
        return registration

    def _forget_abandoned(self) -> None:
        """Forget memory whose process has ended: an engine that is started again and again needs its room."""
        for registration in list(self._registrations.values()):
            if registration.users == 0 and registration.is_abandoned():
                logger.info("registration %016x is forgotten: its process has ended", registration.memory_id)
                self._forget(registration)

    def _check_room(self, size: int, owner: str) -> None:
        """Raise TooManyError unless a host may register so many bytes more; several hosts have equal shares."""
        taken = [(each.owner, each.size) for each in self._registrations.values()] + self._pending
        mine = [bytes_ for whose, bytes_ in taken if whose == owner]
        self._check_limit("registrations_max", self._count_max, len(taken), len(mine), 1, "regions of memory")
        all_bytes, my_bytes = sum(bytes_ for _, bytes_ in taken), sum(mine)
        self._check_limit("registered_bytes_max", self._bytes_max, all_bytes, my_bytes, size, "bytes of memory")

    def _check_limit(self, key: str, limit: int, all_: int, mine: int, more: int, what: str) -> None:
        """Raise TooManyError if a host's share of a limit, or all of it, does not hold so many more."""
        share = max(1, limit // self._shares)
        if mine + more > share:
            raise TooManyError(
                f"this host has registered {mine} {what} and asks for {more} more; its share is {share}: {key} "
                f"({limit}) divided by hosts_max ({self._shares}); raise {key} of the data plane"
            )
        if all_ + more > limit:
            raise TooManyError(
                f"all hosts have registered {all_} {what} and this one asks for {more} more; {key} is {limit}; raise "
                f"{key} of the data plane"
            )

    @contextlib.contextmanager
    def claim(self, registration: Registration, offset: int, length: int, *, writing: bool) -> Iterator[None]:
        """Use a region for the length of a job. Two jobs may share bytes only to read them.

        Raises:
            RegistrationError: the region is not inside the registration; or a segment is not whole, before or after.
            OverlapError: another job uses a part of it.
            DeviceGivenUpError: the region is never quiet any more, and no job is to be answered as if it were.
        """
        if offset + length > registration.size:
            raise RegistrationError(
                f"offset {offset} and {length} bytes end outside the registration, which has {registration.size} bytes"
            )
        registration.check_whole()
        claims = self._claims[registration.identity]
        for begin, end, theirs_writing in claims:
            if offset < end and begin < offset + length and (writing or theirs_writing):
                raise OverlapError(
                    f"another job uses bytes {begin} to {end} of the registration, this one wants {offset} to "
                    f"{offset + length}; wait for its answer first"
                )
        claim = (offset, offset + length, writing)
        claims.append(claim)
        registration.users += 1
        registration.quiet.clear()
        try:
            yield
            if not self.given_up:
                registration.check_whole()
        finally:
            if self.given_up:  # the claim stays: neither a release nor the end of the table touches the memory
                self.device_lost.set()
                raise DeviceGivenUpError
            claims.remove(claim)
            if not claims:
                del self._claims[registration.identity]
            registration.used_at = time.monotonic()
            registration.users -= 1
            if registration.users == 0:
                registration.quiet.set()

    async def release(self, memory_id: int, session: bytes) -> None:
        """Forget a registration: at once for new jobs; return once those running have ended. Unknown ids are fine."""
        registration = self._registrations.get(memory_id)
        if registration is None or registration.session != session:
            return
        registration.released = True
        await registration.quiet.wait()
        self._forget(registration)

    def lost(self, registration: Registration) -> None:
        """Take note that memory is out of reach: its owner has ended, or its device was reset. Jobs find it gone."""
        registration.released = True

    def expire(self, now: float) -> None:
        """Forget registrations that nobody has used for too long, or whose release was not waited for."""
        for registration in list(self._registrations.values()):
            idle = now - registration.used_at >= self._idle_max
            if registration.users == 0 and (idle or registration.released):
                if idle:
                    logger.info(
                        "registration %016x was idle for %g s: forgotten", registration.memory_id, self._idle_max
                    )
                self._forget(registration)

    def _forget(self, registration: Registration) -> None:
        if self._registrations.pop(registration.memory_id, None) is not None:
            registration.close()

    def close(self) -> None:
        """Forget all that are quiet; for the end of the daemon."""
        for registration in self._registrations.values():
            if registration.users == 0:
                registration.close()
        self._registrations.clear()


def _discard(connecting: "asyncio.Future[Registration]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


# ---- Each kind of memory; all block, and run in threads -----------------------------------------------------------


def _shared(pipeline: native.Pipeline, memory: pb.SharedMemory, layouts: Sequence[ChunkLayout]) -> Registration:
    if not _NAME.match(memory.name):
        raise RegistrationError(
            f"shared_memory.name is {memory.name[:100]!r}; it is 'shadowserve-' and 8 to 64 hex digits"
        )
    segment = _map(memory.name, memory.size)
    try:
        status = os.fstat(segment.file)
        registered = _registered(lambda: native.Destination.local(pipeline, segment.memory))
    except BaseException:
        segment.close()
        raise
    return Registration(layouts, memory.size, (status.st_dev, status.st_ino), registered, segment)


def _exported(pipeline: native.Pipeline, memory: pb.ExportedMemory, layouts: Sequence[ChunkLayout]) -> Registration:
    if not 0 < len(memory.descriptor) <= DESCRIPTOR_MAX:
        raise RegistrationError(
            f"exported_memory.descriptor has {len(memory.descriptor)} bytes; it has 1 to {DESCRIPTOR_MAX}"
        )
    if memory.address == 0 or memory.address + memory.size > 2**64:
        raise RegistrationError(f"exported_memory: {memory.size} bytes at {memory.address:#x} are no memory")
    address, descriptor = memory.address, memory.descriptor
    registered = _registered(lambda: native.Destination.exported(pipeline, address, memory.size, descriptor))
    return Registration(layouts, memory.size, descriptor, registered, None)


def _cuda(pipeline: native.Pipeline, memory: pb.CudaIpcMemory, layouts: Sequence[ChunkLayout]) -> Registration:
    if len(memory.handle) != CUDA_HANDLE_BYTES:
        raise RegistrationError(f"cuda_ipc.handle has {len(memory.handle)} bytes; it has {CUDA_HANDLE_BYTES}")
    if not _PCI_ADDRESS.match(memory.device):
        raise RegistrationError(f"cuda_ipc.device is {memory.device[:40]!r}; it is a PCI address, such as 0000:3b:00.0")
    handle, device = memory.handle, memory.device
    registered = _registered(lambda: native.Destination.cuda_ipc(pipeline, handle, memory.size, device))
    return Registration(layouts, memory.size, handle, registered, None)


_Connect = Callable[[native.Pipeline, Any, Sequence[ChunkLayout]], Registration]
_KINDS: Final[dict[str, tuple[native.MemoryKind, _Connect]]] = {
    "shared_memory": (native.MemoryKind.LOCAL, _shared),
    "exported_memory": (native.MemoryKind.EXPORTED, _exported),
    "cuda_ipc": (native.MemoryKind.CUDA_IPC, _cuda),
}


def _registered(register: Callable[[], native.Destination]) -> native.Destination:
    try:
        return register()
    except NativeError as error:
        kind = TooManyError if error.result == native.Result.NO_MEMORY else RegistrationError
        raise kind(f"the memory cannot be used: {error}") from error


def _map(name: str, size: int) -> _Segment:
    """Open, check, allocate and map a segment; blocks for about 0.1 s for each GiB."""
    path = f"{SHARED_MEMORY}/{name}"
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RegistrationError(
            f"cannot open {path}: {error.strerror}; is it on this machine, made by this user?"
        ) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise RegistrationError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise RegistrationError(f"{path} belongs to user {status.st_uid}, the data plane runs as {os.geteuid()}")
        if status.st_size != size:
            raise RegistrationError(f"{path} has {status.st_size} bytes, shared_memory.size says {size}")
        try:
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            kind = TooManyError if error.errno in (errno.ENOSPC, errno.ENOMEM) else RegistrationError
            raise kind(f"cannot allocate {size} bytes for {path}: {error.strerror}; is /dev/shm full?") from error
        except ValueError as error:  # mmap looks at the file's size once more
            raise RegistrationError(f"{path} became shorter than {size} bytes while it was registered") from error
        return _Segment(file, memory, native.Guard(memory))
    except BaseException:
        os.close(file)
        raise
