"""A volume's interface to its device (``shadowserve.block``), and retries of operations that it was too busy for.

Real devices are :class:`shadowserve.native.BlockDevice`. A busy device, or a kernel short of memory, has not failed.
Such an error is reported after a time: a short one for a read, which its client can do without; a long one for a write
or flush, whose failure may end the use of the device.
"""

import ctypes
import mmap
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shadowserve.block import Operation, OperationKind
from shadowserve.errors import DeviceError, is_passing
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


_FIRST_NS: Final = 1_000_000
_LONGEST_NS: Final = 500_000_000
_READ_NS: Final = 1_000_000_000
_WRITE_NS: Final = 10_000_000_000


@dataclass(slots=True, eq=False)
class _Tried:
    operation: Operation
    since_ns: int
    pause_ns: int
    due_ns: int


class RetryPolicy:
    """Operations of one device that wait to be tried again. The device's driver calls ended() and due() in turns."""

    def __init__(self) -> None:
        self.met = 0  # number of passing errors
        self._tried: dict[int, _Tried] = {}
        self._waiting: deque[_Tried] = deque()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def ended(self, operations: list[Operation]) -> list[Operation]:
        if not self._tried and all(operation.error is None for operation in operations):
            return operations
        return [operation for operation in operations if not self._waits(operation)]

    def due(self) -> list[Operation]:
        if not self._waiting:
            return []
        now_ns = time.monotonic_ns()
        due = [tried for tried in self._waiting if tried.due_ns <= now_ns]
        for tried in due:
            self._waiting.remove(tried)
            tried.operation.error = None
        return [tried.operation for tried in due]

    def _waits(self, operation: Operation) -> bool:
        tried = self._tried.pop(id(operation), None)
        flushing = operation.kind is OperationKind.FLUSH
        # A read into pages has reported its progress already: a retry would report it twice.
        if operation.error is None or operation.pages is not None:
            return False
        if not is_passing(operation.error, flushing=flushing):
            return False
        self.met += 1
        now_ns = time.monotonic_ns()
        if tried is None:
            tried = _Tried(operation, now_ns, _FIRST_NS, 0)
        elif now_ns - tried.since_ns > (_READ_NS if operation.kind is OperationKind.READ else _WRITE_NS):
            return False
        tried.due_ns = now_ns + tried.pause_ns
        tried.pause_ns = min(2 * tried.pause_ns, _LONGEST_NS)
        self._tried[id(operation)] = tried
        self._waiting.append(tried)
        return True
