"""A volume's interface to its device: reads and writes of bytes at offsets, and a flush (``shadowserve.block``).

Real devices are :class:`shadowserve.native.BlockDevice`.
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
    """A block device or a preallocated file, used by one process.

    It may check the expectation of an operation and set ``verdict``; otherwise that stays None.
    """

    name: str
    capacity_bytes: int

    @property
    def latencies(self) -> Mapping[str, LatencyHistogram]:
        """Latencies of completed operations by ``read``, ``write``...; empty where the device does not count them."""

    def register(self, memory: memoryview) -> bool:
        """Register memory with the kernel, which makes operations on it cheaper; return whether that succeeded."""

    def unregister(self, memory: memoryview) -> None:
        """Unregister memory that no operation uses."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue all operations or none; never blocks.

        Raises:
            BusyError: Too many operations are queued.
        """

    def completed(self) -> list[Operation]:
        """Return ended operations, with ``error`` set; the caller calls ``done``. Never blocks."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while completed() has something."""

    def statistics(self) -> BlockStatistics:
        """Return counters since it was opened."""

    def close(self) -> None:
        """Close; waits for operations in progress, with a limit."""


def wait_for_operations(device: BlockDevice, timeout_s: float) -> list[Operation]:
    """Wait for ended operations and return them. DeviceError: none has ended in time."""
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
    """Zeroed memory pages for reads and writes of a device. They live as long as this object or a view of them."""

    def __init__(self, size: int) -> None:
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot map {self.size} bytes: {error}") from error
        self.view = memoryview(mapping)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
