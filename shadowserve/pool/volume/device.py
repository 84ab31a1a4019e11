"""What a volume needs of a device: bytes at offsets, and a flush.

Real devices are :class:`shadowserve.native.BlockDevice`; operations and what they promise are in ``shadowserve.block``.

Whoever wants order waits for completions and flushes; docs/storage-format.md says where volumes do.
"""

import ctypes
import mmap
import select
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shadowserve.block import BlockStatistics, Operation
from shadowserve.errors import DeviceError
from shadowserve.latency import LatencyHistogram

_SLICE_S = 0.05


class BlockDevice(Protocol):
    """A block device or a preallocated file, for one process.

    It may check what operations say that they expect, and set ``verdict``; one that does not leaves it None.
    """

    name: str
    capacity_bytes: int

    @property
    def latencies(self) -> Mapping[str, LatencyHistogram]:
        """Times of what has been taken back, by ``read``, ``write``...; empty where it does not count them."""

    def register(self, memory: memoryview) -> bool:
        """Make memory known to the kernel, which makes operations on it cheaper; whether it took it."""

    def unregister(self, memory: memoryview) -> None:
        """Have the kernel forget memory that nothing under way uses."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue operations, all or none; never blocks.

        Raises:
            BusyError: there are too many already.
        """

    def completed(self) -> list[Operation]:
        """Take back what has ended, ``error`` set; the caller calls ``done``. Never blocks."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to take back."""

    def statistics(self) -> BlockStatistics:
        """Return counters since it was opened."""

    def close(self) -> None:
        """End; what is under way is waited for, with a bound."""


def wait_for_operations(device: BlockDevice, timeout_s: float) -> list[Operation]:
    """Return what has ended, after waiting for something to; for programs that have nothing else to do.

    Raises:
        DeviceError: nothing ended in time.
    """
    waited = 0.0
    while not (ended := device.completed()):
        if waited >= timeout_s:
            raise DeviceError(
                f"device {device.name} has not answered for {timeout_s:.0f} s; see the kernel's log for its errors"
            )
        select.select([device.fileno()], [], [], _SLICE_S)
        waited += _SLICE_S
    return ended


class Pages:
    """Zeroed pages of this process; they live as long as this, or a view of them, does.

    Attributes:
        size: in bytes.
        address: where they begin.
        view: of all bytes.
        array: the same bytes as numbers.
    """

    def __init__(self, size: int) -> None:
        """Take at least ``size`` bytes.

        Raises:
            MemoryError: there are not as many.
        """
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot map {self.size} bytes: {error}") from error
        self.view = memoryview(mapping)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
