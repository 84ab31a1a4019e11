"""Registered memory: memory of clients that KV is delivered into and stored from.

*Shared memory* is a file in /dev/shm of the daemon's own user. All pages are allocated and mapped at registration, so
that a full /dev/shm is an error then, and batches have no page faults. A client can still truncate the file: an access
beyond its end is caught (:class:`shadowserve.native.Guard`), and every job checks at its end, and before it passes on
bytes that it has read, that the memory is whole. *Exported memory* of the host or its GPU is written by a DPU's
accelerators over PCIe, *GPU memory* of this machine by its driver, by CUDA IPC. Their owner may end at any time:
deliveries then fail, and the registration is removed.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import grpc
import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import CallError
from shadowserve import native
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.proto import dataplane_pb2 as pb

SHARED_MEMORY: Final = "/dev/shm"
DESCRIPTOR_MAX: Final = 4096  # most bytes of an export descriptor; one of a contiguous region has a few hundred
CUDA_HANDLE_BYTES: Final = 64
PAGE_ALIGNMENT: Final = 4096
"""Alignment of pages and strides in bytes: direct I/O of any device can read into such memory."""
_NAME: Final = re.compile(r"shadowserve-[0-9a-f]{8,64}\Z")
_PCI_ADDRESS: Final = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\Z")

logger = logging.getLogger(__name__)


class RegistrationError(CallError):
    """Memory cannot be registered, or a region of it cannot be used."""


class TooManyError(RegistrationError):
    """A limit on registrations, on their bytes, or of /dev/shm is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OverlapError(RegistrationError):
    """Another job uses the region."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class DeviceGivenUpError(CallError):
    """The device hangs: it may write to the memory until this process has ended."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self) -> None:
        super().__init__(
            "the accelerator hangs and was given up; this data plane ends, and until then the accelerator may write to "
            "the region: give the memory up"
        )


@dataclass(frozen=True)
class Paging:
    """The positions of pages in a segment of shared memory. A page holds one block of one layer."""

    first: tuple[int, ...]  # for each layer, the offset of block 0's page in bytes
    stride: int  # bytes from one block's page to the next block's page
    blocks: int  # number of blocks in each layer
    page_bytes: int  # size of a page in bytes

    @classmethod
    def of(cls, message: pb.PagedMemory, layout: ChunkLayout, size: int) -> Self:
        """Convert a message about a segment of ``size`` bytes; RegistrationError if the pages are impossible."""
        paging = cls(tuple(message.first), message.stride, message.blocks, layout.vector_length)
        row_bytes = layout.tokens * layout.vector_length
        if layout.dtype is not DType.UINT8 or layout.quantizer is not Quantizer.PASSTHROUGH or layout.kinds != 1:
            raise RegistrationError(
                "pages: a chunk of pages is of uint8 and one kind, by passthrough: a vector for each page"
            )
        if len(paging.first) != layout.layers or not paging.blocks:
            layers = len(paging.first)
            raise RegistrationError(f"pages has {layers} layers of {paging.blocks} blocks, layout {layout.layers}")
        if any(number % PAGE_ALIGNMENT for number in (*paging.first, paging.stride, paging.page_bytes)):
            raise RegistrationError(f"pages do not begin and end at multiples of {PAGE_ALIGNMENT} bytes")
        if row_bytes > DECODED_BYTES_MAX:
            most = DECODED_BYTES_MAX
            raise RegistrationError(f"pages of one layer and chunk have {row_bytes} bytes; {most} are the most")
        if paging.stride < paging.page_bytes and paging.blocks > 1:
            raise RegistrationError(f"pages of {paging.page_bytes} bytes overlap: stride is {paging.stride}")
        if max(paging.first) + (paging.blocks - 1) * paging.stride + paging.page_bytes > size:
            raise RegistrationError(f"pages end outside the segment, which has {size} bytes")
        return paging

    def rows(self, blocks: Sequence[int], chunks: int, chunk_blocks: int) -> npt.NDArray[np.uint32]:
        """Return the block numbers of a call by chunk and position in the chunk."""
        numbers = np.array(blocks, np.uint32)
        if len(numbers) != chunks * chunk_blocks or (numbers >= self.blocks).any():
            raise RegistrationError(
                f"blocks has {len(numbers)} numbers up to {numbers.max(initial=0)}; {chunks} chunks take {chunk_blocks}"
                f" each, and the segment has {self.blocks}"
            )
        return numbers.reshape(chunks, chunk_blocks)


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(frozen=True)
class ChannelsOfLayouts:
    """The channels of the layouts of ``weighted``, and the bytes that they take once they are made."""

    nbytes: int = 0
    make: Callable[[], Mapping[ChunkLayout, native.Channels]] = dict


@dataclass(eq=False)
class Registration:
    """Registered memory."""

    layouts: Sequence[ChunkLayout]  # of its chunks; calls name one by its index
    size: int  # bytes
    identity: object  # equal for two registrations of the same memory
    registered: native.RegisteredMemory
    segment: "_Segment | None"
    owner: str = ""  # host that has registered it
    session: bytes = b""  # of that host; no other one may use it
    paging: Paging | None = None  # positions of an engine's pages, for paged memory
    channels: Mapping[ChunkLayout, native.Channels] = field(default_factory=dict)  # steps of layouts of ``weighted``
    memory_id: int = field(default_factory=lambda: secrets.randbits(64) or 1)
    used_at: float = field(default_factory=time.monotonic)
    users: int = 0
    released: bool = False
    quiet: asyncio.Event = field(default_factory=_set_event)
    closing: list[Callable[[], None]] = field(default_factory=list)  # called before the memory is closed

    @property
    def memory(self) -> memoryview:
        assert self.segment is not None
        return memoryview(self.segment.memory)

    @property
    def address(self) -> int:
        return self.registered.address

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory, and of the steps that this process keeps for it."""
        return self.size + sum(each.nbytes for each in self.channels.values())

    @property
    def shared(self) -> bool:
        return self.segment is not None

    def region(self, offset: int, length: int) -> native.Region:
        return self.registered.region(offset, length)

    def group(self, layout: ChunkLayout, offset: int, length: int) -> native.Group:
        """Return the group of chunks of a layout in a region."""
        return native.Group.of(layout, self.region(offset, length), self.channels.get(layout))

    def check_whole(self) -> None:
        """Mark the memory as released and raise RegistrationError if it was truncated: its bytes are void."""
        if self.segment is not None and not self.segment.is_whole():
            lost = f"the segment had {self.size} bytes when it was registered and is shorter now"
            if not self.released:
                logger.warning("registered memory %016x is removed: %s", self.memory_id, lost)
            self.released = True
            raise RegistrationError(f"{lost}; register it again")

    def is_abandoned(self) -> bool:
        return self.segment is not None and self.segment.is_abandoned()

    def close(self) -> None:
        """Unmap the memory. No job may use it."""
        for function in self.closing:
            function()
        self.closing.clear()  # they may hold views of the memory
        self.registered.close()
        if self.segment is not None:
            self.segment.close()


@dataclass(frozen=True)
class _Segment:
    """A file under /dev/shm, open, mapped and guarded."""

    file: int
    memory: mmap.mmap
    guard: native.Guard

    def is_whole(self) -> bool:
        """Return whether the file still has its size, and had it at every access."""
        return not self.guard.lost and os.fstat(self.file).st_size >= len(self.memory)

    def is_abandoned(self) -> bool:
        """Return whether the client has released its lock: it locks the segment as long as it uses it."""
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
        except BufferError:  # a view is still alive: the mapping ends with it
            logger.warning("a segment of %d bytes is still referenced; it is unmapped later", len(self.memory))
        os.close(self.file)


class Registrations:
    """All registered memory."""

    def __init__(self, config: DataPlaneConfig, pipeline: native.Pipeline) -> None:
        self._backend = config.backend
        self._pipeline = pipeline
        self._kinds = {
            name: (kind, connect) for name, (kind, connect) in _KINDS.items() if kind in pipeline.memory_kinds
        }
        self._count_max = config.registrations_max
        self._bytes_max = int(config.registered_bytes_max)
        self._idle_max = config.registration_idle_s
        self.device_lost = asyncio.Event()  # set once a job has found that the device was given up
        self._registrations: dict[int, Registration] = {}
        self._shares = config.hosts_max
        self._pending: list[tuple[str, int]] = []  # owner and size of registrations in progress
        self._claims: defaultdict[object, list[tuple[int, int, bool]]] = defaultdict(list)

    @property
    def kinds(self) -> list[str]:
        return list(self._kinds)

    @property
    def given_up(self) -> bool:
        return self._pipeline.given_up

    def __len__(self) -> int:
        return len(self._registrations)

    @property
    def total_bytes(self) -> int:
        return sum(registration.size for registration in self._registrations.values())

    def count(self, owner: str) -> int:
        return sum(registration.owner == owner for registration in self._registrations.values())

    def has_any(self, session: bytes) -> bool:
        return any(registration.session == session for registration in self._registrations.values())

    def get(self, memory_id: int, session: bytes) -> Registration | None:
        """Return a session's registration by its id; None if there is none (any more), or another session's."""
        registration = self._registrations.get(memory_id)
        if registration is None or registration.released or registration.session != session:
            return None
        return registration

    def other_layout(self, layout: ChunkLayout) -> ChunkLayout | None:
        for registration in self._registrations.values():
            for other in registration.layouts:
                if other.namespace == layout.namespace and other != layout:
                    return other
        return None

    def namespaces(self) -> set[bytes]:
        return {layout.namespace for registration in self._registrations.values() for layout in registration.layouts}

    async def register(
        self,
        request: pb.RegisterMemoryRequest,
        layouts: Sequence[ChunkLayout],
        channels: ChannelsOfLayouts,
        owner: str,
        session: bytes,
    ) -> Registration:
        """Register the memory that a request names for a session of a host, for chunks of at least one layout.

        RegistrationError if it is unusable, or not for this backend; TooManyError if a limit is reached.
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
        held_bytes = size + channels.nbytes
        if size < (largest := max(layout.raw_bytes for layout in layouts)):
            raise RegistrationError(f"{field}.size is {size}; one chunk of these layouts takes up to {largest}")
        try:
            self._check_room(held_bytes, owner)
        except TooManyError:
            self._remove_abandoned()
            self._check_room(held_bytes, owner)
        if request.HasField("pages") and (field != "shared_memory" or len(layouts) != 1):
            raise RegistrationError(f"pages are of shared_memory with one layout, not of {field} with {len(layouts)}")
        _, connect = self._kinds[field]

        def prepare() -> Registration:
            made = channels.make()
            registration = connect(self._pipeline, memory, layouts)
            registration.channels = made
            return registration

        pending = (owner, held_bytes)
        self._pending.append(pending)
        try:
            connecting = asyncio.ensure_future(asyncio.to_thread(prepare))
            try:
                registration = await asyncio.shield(connecting)
            except asyncio.CancelledError:  # the caller has disconnected: drop what the thread prepares
                connecting.add_done_callback(_discard)
                raise
            try:
                if request.HasField("pages"):
                    registration.paging = Paging.of(request.pages, layouts[0], size)
            except RegistrationError:
                registration.close()
                raise
            registration.owner, registration.session = owner, session
            self._registrations[registration.memory_id] = registration
        finally:
            self._pending.remove(pending)
        return registration

    def _remove_abandoned(self) -> None:
        """Remove memory whose process has ended, to make room for an engine that restarts."""
        for registration in list(self._registrations.values()):
            if registration.users == 0 and registration.is_abandoned():
                logger.info("registered memory %016x is removed: its process has ended", registration.memory_id)
                self._remove(registration)

    def _check_room(self, size: int, owner: str) -> None:
        taken = [(each.owner, each.held_bytes) for each in self._registrations.values()] + self._pending
        mine = [bytes_ for whose, bytes_ in taken if whose == owner]
        self._check_limit("registrations_max", self._count_max, len(taken), len(mine), 1, "regions of memory")
        all_bytes, my_bytes = sum(bytes_ for _, bytes_ in taken), sum(mine)
        self._check_limit("registered_bytes_max", self._bytes_max, all_bytes, my_bytes, size, "bytes of memory")

    def _check_limit(self, key: str, limit: int, all_: int, mine: int, more: int, what: str) -> None:
        """Raise TooManyError if ``more`` exceeds a host's share of a limit, or the limit."""
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
        """Claim a region while in this context. Two jobs may share bytes only to read them.

        Raises:
            RegistrationError: The region ends outside the memory; or the memory is not whole, before or after.
            OverlapError: Another job uses a part of the region.
            DeviceGivenUpError: The device may still write to the region, so the job must not be answered.
        """
        if offset + length > registration.size:
            raise RegistrationError(
                f"offset {offset} and {length} bytes end outside the registered memory of {registration.size} bytes"
            )
        registration.check_whole()
        claims = self._claims[registration.identity]
        for begin, end, theirs_writing in claims:
            if offset < end and begin < offset + length and (writing or theirs_writing):
                raise OverlapError(
                    f"another job uses bytes {begin} to {end} of the registered memory, this one claims {offset} to "
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
            if self.given_up:  # the claim stays, so that the memory is never unmapped
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
        """Remove a registration, and wait for its jobs; new jobs do not find it. Unknown ids are no error."""
        registration = self._registrations.get(memory_id)
        if registration is None or registration.session != session:
            return
        registration.released = True
        await registration.quiet.wait()
        self._remove(registration)

    def expire(self, now: float) -> None:
        """Remove registrations that were idle for too long, or whose release was interrupted."""
        for registration in list(self._registrations.values()):
            idle = now - registration.used_at >= self._idle_max
            if registration.users == 0 and (idle or registration.released):
                if idle:
                    logger.info(
                        "registered memory %016x was idle for %g s: removed", registration.memory_id, self._idle_max
                    )
                self._remove(registration)

    def _remove(self, registration: Registration) -> None:
        if self._registrations.pop(registration.memory_id, None) is not None:
            registration.close()

    def close(self) -> None:
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
        registered = _registered(lambda: native.RegisteredMemory.local(pipeline, segment.memory))
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
        raise RegistrationError(f"exported_memory: {memory.size} bytes at {memory.address:#x} are no valid range")
    address, descriptor = memory.address, memory.descriptor
    registered = _registered(lambda: native.RegisteredMemory.exported(pipeline, address, memory.size, descriptor))
    return Registration(layouts, memory.size, descriptor, registered, None)


def _cuda(pipeline: native.Pipeline, memory: pb.CudaIpcMemory, layouts: Sequence[ChunkLayout]) -> Registration:
    if len(memory.handle) != CUDA_HANDLE_BYTES:
        raise RegistrationError(f"cuda_ipc.handle has {len(memory.handle)} bytes; it has {CUDA_HANDLE_BYTES}")
    if not _PCI_ADDRESS.match(memory.device):
        raise RegistrationError(f"cuda_ipc.device is {memory.device[:40]!r}; it is a PCI address, such as 0000:3b:00.0")
    handle, device = memory.handle, memory.device
    registered = _registered(lambda: native.RegisteredMemory.cuda_ipc(pipeline, handle, memory.size, device))
    return Registration(layouts, memory.size, handle, registered, None)


_Connect = Callable[[native.Pipeline, Any, Sequence[ChunkLayout]], Registration]
_KINDS: Final[dict[str, tuple[native.MemoryKind, _Connect]]] = {
    "shared_memory": (native.MemoryKind.LOCAL, _shared),
    "exported_memory": (native.MemoryKind.EXPORTED, _exported),
    "cuda_ipc": (native.MemoryKind.CUDA_IPC, _cuda),
}


def _registered(register: Callable[[], native.RegisteredMemory]) -> native.RegisteredMemory:
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
            f"cannot open {path}: {error.strerror}; is it on this machine, and created by this user?"
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
        except ValueError as error:  # mmap checks the file's size again
            raise RegistrationError(f"{path} became shorter than {size} bytes while it was registered") from error
        return _Segment(file, memory, native.Guard(memory))
    except BaseException:
        os.close(file)
        raise
