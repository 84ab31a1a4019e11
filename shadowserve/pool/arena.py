"""Memory arenas: where objects are received, read into, kept and sent from.

An arena is one mapping, on huge pages if possible, near one NUMA node, and registered with every device: a device
writes what it reads straight to where the socket sends it from. Objects have the same layout as on a device: a header
of 2 KiB, then the value, rounded to blocks of 4 KiB. So a read is a copy in memory as soon as it is complete, and a
received value is written from where it was received. All calls are made with the pool's lock held.
"""

import contextlib
import ctypes
import logging
import mmap
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shadowserve.errors import ConfigurationError, DeviceError
from shadowserve.native import OBJECT_HEADER_BYTES, Extents
from shadowserve.pool.interleaver import Interleaver
from shadowserve.pool.volume.device import BlockDevice
from shadowserve.pool.volume.format import BLOCK_BYTES

_HUGE_PAGE_BYTES: Final = 2 << 20
_MEASURED_BYTES: Final = 8 << 20
_MAP_HUGETLB: Final = 0x40000
_MPOL_PREFERRED: Final = 1
_MBIND_NUMBERS: Final = {"x86_64": 237, "aarch64": 235}
_NODES: Final = Path("/sys/devices/system/node")


def memory_nodes(folder: Path = _NODES) -> list[int]:
    """Return the NUMA nodes that have memory; [0] where the kernel does not say."""
    try:
        text = (folder / "has_memory").read_text().strip()
    except OSError:
        return [0]
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes or [0]


class Arena:
    """One mapping.

    Attributes:
        pages: ``"huge"`` (reserved huge pages), ``"transparent"`` or ``"small"``.
    """

    def __init__(self, size: int, node: int | None) -> None:
        """Map ``size`` bytes, rounded up to huge pages; ConfigurationError if there is not as much memory."""
        size = -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.node = node  # NUMA node that the memory was requested from; None if there is only one
        self._mapping, self.pages = _map(size)
        self.memory = memoryview(self._mapping)  # all bytes
        self.readable = self.memory.toreadonly()  # the same, read-only
        self.address = address_of(self._mapping)
        self.bound = node is not None and _bind(self.address, size, node)
        self.extents = Extents(size // BLOCK_BYTES)
        self.bytes_per_s = 0.0  # copy rate of one core; 0 before it was measured

    @property
    def size(self) -> int:
        return len(self.memory)

    def measure(self) -> None:
        """Measure the copy rate, before the arena has objects."""
        size = min(_MEASURED_BYTES, self.size // 2)
        source, target = self.memory[:size], self.memory[size : 2 * size]
        target[:] = source  # this also makes the pages
        began_ns = time.perf_counter_ns()
        target[:] = source
        self.bytes_per_s = size / max(time.perf_counter_ns() - began_ns, 1) * 1e9


class Buffer:
    """Blocks of an arena that hold one object, or a part of one."""

    __slots__ = ("address", "arena", "blocks", "detached", "first", "hits", "size", "users")

    def __init__(self, arena: Arena, first: int, blocks: int) -> None:
        self.arena = arena
        self.first = first
        self.blocks = blocks
        self.size = blocks * BLOCK_BYTES  # bytes of all blocks
        self.address = arena.address + first * BLOCK_BYTES  # address of the first block
        self.users = 1  # number of users; :meth:`Arenas.release` of the last one frees the blocks
        self.hits = 0  # requests for it, until it enters the main queue of copies
        self.detached = False  # its entry is gone; only senders use it

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes ``[start, end)``, writable."""
        begin = self.first * BLOCK_BYTES
        return self.arena.memory[begin + start : begin + end]

    def value(self, start: int, end: int) -> memoryview:
        """Return the bytes ``[start, end)`` of the value of the object that begins here, read-only."""
        begin = self.first * BLOCK_BYTES + OBJECT_HEADER_BYTES
        return self.arena.readable[begin + start : begin + end]


class _Loan:
    """A buffer that a value is received into."""

    __slots__ = ("buffer", "ended", "reference")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.ended = False
        self.reference: weakref.ref[Any] | None = None


class Arenas:
    """All arenas of a pool. Blocks are taken from them in proportion to their rates.

    Attributes:
        size: Bytes of all arenas.
        budget_bytes: Most bytes of buffers.
    """

    def __init__(self, size: int, nodes: Sequence[int] | None = None) -> None:
        """Map ``size`` bytes (0 for none), evenly on the given NUMA nodes, by default on all that have memory."""
        chosen = list(nodes) if nodes else memory_nodes()
        bind = len(chosen) > 1
        self.arenas = [Arena(size // len(chosen), node if bind else None) for node in chosen if size]
        self._available = [True] * len(self.arenas)
        self._interleaver = Interleaver([1.0] * len(chosen))
        self._loans: dict[int, _Loan] = {}
        self._returned: deque[_Loan] = deque()
        self.used_bytes = 0  # bytes of buffers
        self.held_bytes = 0  # bytes of detached buffers
        self.lent_bytes = 0  # bytes of buffers that values are being received into
        self.size = self.budget_bytes = sum(arena.size for arena in self.arenas)
        self.largest_bytes = max((arena.size for arena in self.arenas), default=0)  # bytes of the largest arena

    def measure(self) -> None:
        for arena in self.arenas:
            arena.measure()
        if len(self.arenas) > 1:
            self._interleaver.set_shares([arena.bytes_per_s for arena in self.arenas])

    def take(self, blocks: int, parent: bytes = b"", key: bytes = b"") -> Buffer | None:
        """Return a buffer with one user; None if the budget or the arenas have no room for it."""
        if self._returned:
            self.settle()
        if self.used_bytes + blocks * BLOCK_BYTES > self.budget_bytes:
            return None
        order = [0] if len(self.arenas) == 1 else self._interleaver.order(blocks, parent, self._available)
        for number in order:
            arena = self.arenas[number]
            first = arena.extents.allocate(blocks)
            if first is not None:
                if len(order) > 1:
                    self._interleaver.place(number, blocks, parent, key, self._available)
                buffer = Buffer(arena, first, blocks)
                self.used_bytes += buffer.size
                return buffer
        return None

    def release(self, buffer: Buffer) -> None:
        assert buffer.users > 0, "released more often than used"
        buffer.users -= 1
        if buffer.users == 0:
            buffer.arena.extents.free(buffer.first, buffer.blocks)
            self.used_bytes -= buffer.size
            if buffer.detached:
                self.held_bytes -= buffer.size

    def detach(self, buffer: Buffer) -> None:
        if buffer.users > 1 and not buffer.detached:
            buffer.detached = True
            self.held_bytes += buffer.size
        self.release(buffer)

    def lend(self, buffer: Buffer, length: int) -> memoryview:
        """Return a view for receiving a value of ``length`` bytes. The buffer's one user becomes the loan.

        The loan ends with :meth:`end_loan`, or with the last view. So the memory of a value that was refused, or whose
        client has left, is freed without any call.
        """
        address = buffer.address + OBJECT_HEADER_BYTES
        loan = self._loans[address] = _Loan(buffer)
        self.lent_bytes += buffer.size
        returned = self._returned  # not self: the views must not keep the pool alive

        def give_back(_: Any) -> None:
            returned.append(loan)  # runs in any thread with any lock held, so it does nothing else

        array = np.frombuffer(buffer.view(OBJECT_HEADER_BYTES, OBJECT_HEADER_BYTES + length), dtype=np.uint8)
        loan.reference = weakref.ref(array, give_back)
        return memoryview(array)

    def lent(self, value: memoryview) -> Buffer | None:
        """Return the buffer of the loan that begins with ``value``; None for other memory."""
        if not len(value):
            return None
        loan = self._loans.get(address_of(value))
        return None if loan is None else loan.buffer

    def end_loan(self, value: memoryview) -> None:
        loan = self._loans.get(address_of(value)) if len(value) else None
        if loan is not None:
            self._end(loan)

    def settle(self) -> bool:
        """End loans that have no views any more; return whether there were any."""
        if not self._returned:
            return False
        with contextlib.suppress(IndexError):
            while True:
                self._end(self._returned.popleft())
        return True

    def _end(self, loan: _Loan) -> None:
        if not loan.ended:
            loan.ended = True
            del self._loans[loan.buffer.address + OBJECT_HEADER_BYTES]
            self.lent_bytes -= loan.buffer.size
            self.release(loan.buffer)


def address_of(memory: Any) -> int:
    """Return the address of memory with the buffer protocol; 0 for empty memory."""
    array = np.frombuffer(memory, dtype=np.uint8)
    return int(array.__array_interface__["data"][0])


def _map(size: int) -> tuple[mmap.mmap, str]:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, size, flags=flags | _MAP_HUGETLB), "huge"
    except OSError:
        pass
    try:
        mapping = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise ConfigurationError(
            f"cannot map {size} bytes for an arena: {error}; give memory_budget_bytes less than the machine has"
        ) from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # the kernel has no huge pages
        return mapping, "small"
    return mapping, "transparent"


def _bind(address: int, size: int, node: int) -> bool:
    """Prefer a node's memory, though a full node uses another's; return whether the kernel accepts that."""
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        return False
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    result = library.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * bits + 1),
        ctypes.c_uint(0),
    )
    return int(result) == 0


_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; on older kernels, registering makes the pages
_STEP_BYTES: Final = 32 << 20
"""Bytes of pages that are made at a time: it bounds the time to stop."""
_REGION_BYTES_MIN: Final = 128 << 20
_REGIONS_MAX: Final = 192
"""A device accepts 256 regions. It serves no requests while one is registered, so regions are small."""


class Registration:
    """Registers every arena with every device, in a thread of its own."""

    def __init__(self, arenas: Sequence[Arena], devices: Sequence[BlockDevice]) -> None:
        self._arenas = arenas
        self._devices = list(devices)
        total = sum(arena.size for arena in arenas)
        region = max(_REGION_BYTES_MIN, -(-total // _REGIONS_MAX))
        self._region_bytes = -(-region // BLOCK_BYTES) * BLOCK_BYTES
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        registered = 0
        for arena in self._arenas:
            for begin in range(0, arena.size, self._region_bytes):
                end = min(begin + self._region_bytes, arena.size)
                self._populate(arena, begin, end)
                for device in list(self._devices):
                    if self._stopped.is_set():
                        return
                    registered += self._register(device, arena.memory[begin:end])
        _log.info("memory_registered bytes=%d devices=%d", registered, len(self._devices))

    def _populate(self, arena: Arena, begin: int, end: int) -> None:
        """Make the pages, so that registering blocks a device for a shorter time."""
        library = ctypes.CDLL(None)
        while begin < end and not self._stopped.is_set():
            size = min(_STEP_BYTES, end - begin)
            address = ctypes.c_void_p(arena.address + begin)
            if library.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return
            begin += size

    def _register(self, device: BlockDevice, memory: memoryview) -> int:
        try:
            if device.register(memory):
                return len(memory)
            reason = "the limit of locked memory, or how the device is accessed"
        except (DeviceError, OSError) as error:
            reason = str(error)
        # Other regions would fail in the same way.
        self._devices.remove(device)
        _log.info("memory_not_registered device=%s reason=%r", device.name, reason)
        return 0
