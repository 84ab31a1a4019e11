"""What a volume needs of a device: bytes at offsets, and a flush. Real ones are :class:`shadowserve.native.BlockDevice`.

Operations are not ordered among each other: they end in any order, and after a loss of power any part of what was
written since the last flush may be there, in pieces of a sector. A flush makes durable what had been *completed* before
it was submitted. Whoever wants order waits for completions and flushes; docs/storage-format.md says where volumes do.
"""

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from shadowserve.errors import ShadowServeError

__all__ = ["BlockDevice", "DeviceError", "Operation", "OperationKind", "Priority", "wait_for_operations"]

_SLICE_S = 0.05


class OperationKind(IntEnum):
    """What to do (``enum ss_block_kind``)."""

    READ = 0
    WRITE = 1
    FLUSH = 2
    DISCARD = 3


class Priority(IntEnum):
    """Whose operation goes first (``enum ss_block_priority``)."""

    FOREGROUND = 0
    WRITE = 1
    BACKGROUND = 2


class DeviceError(ShadowServeError):
    """A device did not do what was asked of it."""


@dataclass(slots=True, eq=False)
class Operation:
    """One read or write, or a flush.

    Attributes:
        kind: what.
        offset: in bytes, a multiple of 4096; 0 for a flush.
        length: in bytes, a multiple of 4096; 0 for a flush.
        address: of the memory, which must stay, and stay as it is, until completion; 0 for a flush.
        priority: whose turn it is.
        done: called with the operation by whoever takes it back from the device.
        error: why it failed; None if it did not.
        begin_ns: monotonic clock when the device got its first part.
        end_ns: when it was complete.
    """

    kind: OperationKind
    offset: int
    length: int
    address: int
    priority: Priority
    done: Callable[["Operation"], None]
    error: OSError | None = None
    begin_ns: int = 0
    end_ns: int = 0


class BlockDevice(Protocol):
    """A block device or a preallocated file, for one process."""

    name: str
    capacity_bytes: int

    def register(self, memory: memoryview) -> None:
        """Make memory known to the kernel, which makes operations on it cheaper; without effect where it cannot be."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue operations, all or none; never blocks.

        Raises:
            BusyError: there are too many already.
        """

    def completed(self) -> list[Operation]:
        """Take back what has ended, ``error`` set; the caller calls ``done``. Never blocks."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to take back."""

    def statistics(self) -> Any:
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
                f"device {device.name} has not answered for {timeout_s:.0f} s; look into the kernel's log for its errors"
            )
        select.select([device.fileno()], [], [], _SLICE_S)
        waited += _SLICE_S
    return ended
