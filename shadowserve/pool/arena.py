"""Memory arenas: where objects are received, read to, kept and sent from.

An arena is one mapping of memory, on huge pages where there are any, near one NUMA node where there are several, and
registered with every device, so that a device writes what it read straight to where the socket sends it from. Objects
lie in it as they lie on a device: a header of 2 KiB, then the value, rounded to blocks of 4 KiB. So a read of a whole
object is a copy in memory the moment it is complete, and a received one is written from where it was received.

Nothing here takes a lock: the pool calls it with the pool's lock held.
"""

import contextlib
import ctypes
import mmap
import platform
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shadowserve.errors import ConfigurationError
from shadowserve.native import Extents
from shadowserve.pool.placement import Interleaver

BLOCK_BYTES: Final = 4096
HEADER_BYTES: Final = 2048
_HUGE_PAGE_BYTES: Final = 2 << 20
_MEASURED_BYTES: Final = 8 << 20
_MAP_HUGETLB: Final = 0x40000
_MPOL_PREFERRED: Final = 1
_MBIND_NUMBERS: Final = {"x86_64": 237, "aarch64": 235}
_NODES: Final = Path("/sys/devices/system/node")


def object_blocks(length: int) -> int:
    """Return how many blocks an object with a value of ``length`` bytes takes, in memory or on a device."""
    return -(-(HEADER_BYTES + length) // BLOCK_BYTES)


def memory_nodes(folder: Path = _NODES) -> list[int]:
    """Return the NUMA nodes that have memory; one, 0, where the kernel does not tell."""
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
        node: the NUMA node that its memory was asked of; None where there is but one.
        memory: all of it.
        readable: the same, for reading.
        address: where it begins.
        pages: ``"huge"`` (reserved huge pages), ``"transparent"`` or ``"small"``.
        bytes_per_s: how fast one core copies out of it; 0 before it was measured.
    """

    def __init__(self, size: int, node: int | None) -> None:
        """Map ``size`` bytes, rounded up to huge pages.

        Raises:
            ConfigurationError: there is not that much memory.
        """
        size = -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.node = node
        self._mapping, self.pages = _map(size)
        self.memory = memoryview(self._mapping)
        self.readable = self.memory.toreadonly()
        self.address = address_of(self._mapping)
        self.bound = node is not None and _bind(self.address, size, node)
        self.extents = Extents(size // BLOCK_BYTES)
        self.bytes_per_s = 0.0

    @property
    def size(self) -> int:
        """Bytes of it."""
        return len(self.memory)

    def measure(self) -> None:
        """Measure how fast it is read; it must be free of objects still."""
        size = min(_MEASURED_BYTES, self.size // 2)
        source, target = self.memory[:size], self.memory[size : 2 * size]
        target[:] = source  # which also makes the pages
        began_ns = time.perf_counter_ns()
        target[:] = source
        self.bytes_per_s = size / max(time.perf_counter_ns() - began_ns, 1) * 1e9


class Buffer:
    """Blocks of an arena that hold one object, or part of one, for as long as somebody uses them.

    Attributes:
        address: of the first block.
        blocks: how many.
        size: bytes of these.
        users: who needs them; :meth:`Arenas.release` frees them with the last.
        hits: times that it was asked for on its way into the main queue of copies.
        detached: whether its entry is gone, and only those who send it keep it.
    """

    __slots__ = ("address", "arena", "blocks", "detached", "first", "hits", "size", "users")

    def __init__(self, arena: Arena, first: int, blocks: int) -> None:
        self.arena = arena
        self.first = first
        self.blocks = blocks
        self.size = blocks * BLOCK_BYTES
        self.address = arena.address + first * BLOCK_BYTES
        self.users = 1
        self.hits = 0
        self.detached = False

    def view(self, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end`` of it, writable."""
        begin = self.first * BLOCK_BYTES
        return self.arena.memory[begin + start : begin + end]

    def value(self, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end`` of the value of the object that begins with it, for reading."""
        begin = self.first * BLOCK_BYTES + HEADER_BYTES
        return self.arena.readable[begin + start : begin + end]


class _Loan:
    """A buffer that somebody receives a value in."""

    __slots__ = ("buffer", "ended", "reference")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.ended = False
        self.reference: weakref.ref[Any] | None = None


class Arenas:
    """All arenas of a pool: blocks are taken from them in proportion to how fast they are.

    Attributes:
        size: bytes of all arenas.
        largest_bytes: of the largest one.
        budget_bytes: most that buffers may have.
        used_bytes: of buffers.
        held_bytes: of these, those whose entries are gone.
        lent_bytes: of these, those that values are being received in.
    """

    def __init__(self, size: int, nodes: Sequence[int] | None = None) -> None:
        """Map ``size`` bytes in all, the same on each of the NUMA nodes; by default on those that have memory. 0: none.

        Raises:
            ConfigurationError: there is not that much memory.
        """
        chosen = list(nodes) if nodes else memory_nodes()
        bind = len(chosen) > 1
        self.arenas = [Arena(size // len(chosen), node if bind else None) for node in chosen if size]
        self._available = [True] * len(self.arenas)
        self._interleaver = Interleaver([1.0] * len(chosen))
        self._loans: dict[int, _Loan] = {}
        self._returned: deque[_Loan] = deque()
        self.used_bytes = 0
        self.held_bytes = 0
        self.lent_bytes = 0
        self.size = self.budget_bytes = sum(arena.size for arena in self.arenas)
        self.largest_bytes = max((arena.size for arena in self.arenas), default=0)

    def measure(self) -> None:
        """Measure every arena, and share objects out by it from then on."""
        for arena in self.arenas:
            arena.measure()
        if len(self.arenas) > 1:
            self._interleaver.set_shares([arena.bytes_per_s for arena in self.arenas])

    def take(self, blocks: int, parent: bytes = b"", key: bytes = b"") -> Buffer | None:
        """Return a buffer of that many blocks with one user; None if the budget or no arena has room for it."""
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
        """Take one user away; with the last, the blocks are free."""
        assert buffer.users > 0, "released more often than used"
        buffer.users -= 1
        if buffer.users == 0:
            buffer.arena.extents.free(buffer.first, buffer.blocks)
            self.used_bytes -= buffer.size
            if buffer.detached:
                self.held_bytes -= buffer.size

    def detach(self, buffer: Buffer) -> None:
        """Take away the user that was its entry."""
        if buffer.users > 1 and not buffer.detached:
            buffer.detached = True
            self.held_bytes += buffer.size
        self.release(buffer)

    def lend(self, buffer: Buffer, length: int) -> memoryview:
        """Return a view to receive a value's ``length`` bytes in; its one user becomes the loan.

        The loan ends with :meth:`end_loan`, or when the last view of it is gone. So a value that is received and then
        refused, or whose client goes away, gives its memory back by itself.
        """
        address = buffer.address + HEADER_BYTES
        loan = self._loans[address] = _Loan(buffer)
        self.lent_bytes += buffer.size
        returned = self._returned  # not self: the views must not keep the pool alive

        def give_back(_: Any) -> None:
            returned.append(loan)  # in any thread, whatever it holds: so no more than this

        array = np.frombuffer(buffer.view(HEADER_BYTES, HEADER_BYTES + length), dtype=np.uint8)
        loan.reference = weakref.ref(array, give_back)
        return memoryview(array)

    def lent(self, value: memoryview) -> Buffer | None:
        """Return the buffer of a loan that begins with ``value``; None for other memory."""
        if not len(value):
            return None
        loan = self._loans.get(address_of(value))
        return None if loan is None else loan.buffer

    def end_loan(self, value: memoryview) -> None:
        """End the loan that begins with ``value``, if there is one."""
        loan = self._loans.get(address_of(value)) if len(value) else None
        if loan is not None:
            self._end(loan)

    def settle(self) -> bool:
        """Take back what was lent and is not looked at any more; return whether there was something."""
        if not self._returned:
            return False
        with contextlib.suppress(IndexError):
            while True:
                self._end(self._returned.popleft())
        return True

    def _end(self, loan: _Loan) -> None:
        if not loan.ended:
            loan.ended = True
            del self._loans[loan.buffer.address + HEADER_BYTES]
            self.lent_bytes -= loan.buffer.size
            self.release(loan.buffer)


def address_of(memory: Any) -> int:
    """Return where memory begins that has the buffer protocol; 0 for none at all."""
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
    except OSError:  # a kernel built without them
        return mapping, "small"
    return mapping, "transparent"


def _bind(address: int, size: int, node: int) -> bool:
    """Ask for a node's memory; return whether the kernel took it. Preferred, not bound: full, it takes another's."""
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
