"""Operations on block devices: types shared by the pool and the C core's device threads.

Operations complete in any order. After a power failure any sectors written since the last flush may be on the device. A
flush makes operations durable that had *completed* before it was submitted. A caller that needs an order waits for
completions and flushes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shadowserve.native._library import Result


class OperationKind(IntEnum):
    """Kind of an operation (``enum ss_block_kind``)."""

    READ = 0
    WRITE = 1
    FLUSH = 2
    DISCARD = 3
    """Hint that bytes are no longer needed; later reads there are undefined."""


class Priority(IntEnum):
    """Priority of an operation, highest first (``enum ss_block_priority``)."""

    FOREGROUND = 0
    WRITE = 1
    BACKGROUND = 2


class ObjectFields(NamedTuple):
    """Fields of an object's header on a device.

    Attributes:
        key: Key, 32 bytes.
        tenant: Number of the owning tenant.
        length: Bytes of the value.
        generation: Number of the write; in an expectation 0 means any.
        header_length: Bytes of the record's header; 0 if the value is not a record.
        name_length: Bytes of the key's text after the value.
        flags: Flags of the index.
    """

    key: bytes
    tenant: int
    length: int
    generation: int = 0
    header_length: int = 0
    name_length: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pages:
    """A read of several layers and extents into an engine's pages (``struct ss_block_pages``).

    A *part* is one layer of one extent: it goes to the pages of some blocks, and has one checksum. Arrays are
    C-contiguous. Reads of one prefix from several devices share ``left``, ``word`` and ``stop``.

    Attributes:
        size: Bytes of a page, a multiple of 4096.
        stride: Bytes from one block's page to the next, a multiple of 512.
        layers: Offset of each layer's page of block 0 in the memory, uint64.
        extents: Offset of each extent on the device, uint64.
        blocks: Target blocks, uint32 [extent, block]. The caller has checked their range.
        checksums: CRC-32 of the parts, uint32 [layer, extent].
        verdicts: Result of each part after the read, uint32 [layer, extent].
        left: Missing parts of each layer, uint32; counts down.
        word: Address of the progress word for the number of leading complete layers; 0 if none.
        stop: One uint32. If it is not 0, no further part begins, and the read ends with ECANCELED.
    """

    size: int
    stride: int
    layers: npt.NDArray[np.uint64]
    extents: npt.NDArray[np.uint64]
    blocks: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint32]
    verdicts: npt.NDArray[np.uint32]
    left: npt.NDArray[np.uint32]
    word: int
    stop: npt.NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class Operation:
    """One read, write, flush or discard.

    A read into ``pages`` covers all parts of a prefix on one device. Its ``length`` is that of one part; in each extent
    the layers follow each other from ``offset`` on.

    Attributes:
        kind: Kind of the operation.
        offset: Offset in bytes, a multiple of 4096; 0 for a flush.
        length: Bytes, a multiple of 4096; 0 for a flush; of one part for a read into pages.
        address: Address of the memory, a multiple of 512; it must stay valid and unchanged until completion. 0 for a
            flush or a discard.
        priority: Priority of the operation.
        done: Called with the operation on completion.
        expected: Expected header of the object, for a read that begins with one. The device's thread may check it and
            set ``verdict``; otherwise the reader checks it.
        expected_units: Number of leading units of the value that the read contains.
        pages: Target of a read into pages; ``address`` is that of the memory.
        error: Error of a failed operation; None if it succeeded.
        begin_ns: Monotonic time when the device received the first request.
        end_ns: Monotonic time of completion, before the check.
        verdict: Result of ``check_object``; None if the device did not check, or failed.
    """

    kind: OperationKind
    offset: int
    length: int
    address: int
    priority: Priority
    done: Callable[["Operation"], None]
    expected: ObjectFields | None = None
    expected_units: int = 0
    pages: Pages | None = None
    error: OSError | None = None
    begin_ns: int = 0
    end_ns: int = 0
    verdict: "Result | None" = None

    @property
    def moved_bytes(self) -> int:
        """Total bytes of the operation."""
        return self.length if self.pages is None else self.length * self.pages.verdicts.size


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Counters of one device since it was opened.

    Attributes:
        operations: Successful operations, by kind.
        bytes: Bytes of successful operations, by kind.
        errors: Failed operations, by kind.
        wait_ns: Total time from submission to the first request to the device, by priority.
        service_ns: Total time from the first request to completion, by priority.
        busy_ns: Time with at least one request in flight.
        oldest_ns: Monotonic time when the oldest request in flight was sent; 0 if none is in flight.
        waiting: Current operations with requests that were not sent yet, by priority.
        in_flight: Current requests in flight.
        registered: Number of memory regions registered with the kernel.
        last_error: errno of the last failure; 0 if none.
        gone: True if the device was removed.
    """

    operations: tuple[int, ...] = (0, 0, 0, 0)
    bytes: tuple[int, ...] = (0, 0, 0, 0)
    errors: tuple[int, ...] = (0, 0, 0, 0)
    wait_ns: tuple[int, ...] = (0, 0, 0)
    service_ns: tuple[int, ...] = (0, 0, 0)
    busy_ns: int = 0
    oldest_ns: int = 0
    waiting: tuple[int, ...] = (0, 0, 0)
    in_flight: int = 0
    registered: int = 0
    last_error: int = 0
    gone: bool = False
