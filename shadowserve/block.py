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
    """Fields of an object's header on a device."""

    key: bytes  # key, 32 bytes
    tenant: int  # number of the owning tenant
    length: int  # bytes of the value
    generation: int = 0  # number of the write; in an expectation 0 means any
    header_length: int = 0  # bytes of the record's header; 0 if the value is not a record
    name_length: int = 0  # bytes of the key's text after the value
    flags: int = 0  # flags of the index


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pages:
    """A read of several layers and extents into an engine's pages (``struct ss_block_pages``).

    A *part* is one layer of one extent: it goes to the pages of some blocks, and has one checksum. Arrays are
    C-contiguous. Reads of one prefix from several devices share ``left``, ``word`` and ``stop``.
    """

    size: int  # bytes of a page, a multiple of 4096
    stride: int  # bytes from one block's page to the next, a multiple of 512
    layers: npt.NDArray[np.uint64]  # offset of each layer's page of block 0 in the memory, uint64
    extents: npt.NDArray[np.uint64]  # offset of each extent on the device, uint64
    blocks: npt.NDArray[np.uint32]  # target blocks, uint32 [extent, block]. The caller has checked their range
    checksums: npt.NDArray[np.uint32]  # CRC-32 of the parts, uint32 [layer, extent]
    verdicts: npt.NDArray[np.uint32]  # result of each part after the read, uint32 [layer, extent]
    left: npt.NDArray[np.uint32]  # missing parts of each layer, uint32; counts down
    word: int  # address of the progress word for the number of leading complete layers; 0 if none
    stop: npt.NDArray[np.uint32]  # one uint32. If it is not 0, no further part begins, and the read ends with ECANCELED


@dataclass(slots=True, eq=False)
class Operation:
    """One read, write, flush or discard.

    A read into ``pages`` covers all parts of a prefix on one device. Its ``length`` is that of one part; in each extent
    the layers follow each other from ``offset`` on.

    Attributes:
        address: Address of the memory, a multiple of 512; it must stay valid and unchanged until completion. 0 for a
            flush or a discard.
        expected: Expected header of the object, for a read that begins with one. The device's thread may check it and
            set ``verdict``; otherwise the reader checks it.
    """

    kind: OperationKind
    offset: int  # offset in bytes, a multiple of 4096; 0 for a flush
    length: int  # bytes, a multiple of 4096; 0 for a flush; of one part for a read into pages
    address: int
    priority: Priority
    done: Callable[["Operation"], None]  # called with the operation on completion
    expected: ObjectFields | None = None
    expected_units: int = 0  # number of leading units of the value that the read contains
    pages: Pages | None = None  # target of a read into pages; ``address`` is that of the memory
    error: OSError | None = None  # error of a failed operation; None if it succeeded
    begin_ns: int = 0  # monotonic time when the device received the first request
    end_ns: int = 0  # monotonic time of completion, before the check
    verdict: "Result | None" = None  # result of ``check_object``; None if the device did not check, or failed

    @property
    def moved_bytes(self) -> int:
        """Total bytes of the operation."""
        return self.length if self.pages is None else self.length * self.pages.verdicts.size


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Counters of one device since it was opened."""

    operations: tuple[int, ...] = (0, 0, 0, 0)  # successful operations, by kind
    bytes: tuple[int, ...] = (0, 0, 0, 0)  # bytes of successful operations, by kind
    errors: tuple[int, ...] = (0, 0, 0, 0)  # failed operations, by kind
    wait_ns: tuple[int, ...] = (0, 0, 0)  # total time from submission to the first request to the device, by priority
    service_ns: tuple[int, ...] = (0, 0, 0)  # total time from the first request to completion, by priority
    busy_ns: int = 0  # time with at least one request in flight
    oldest_ns: int = 0  # monotonic time when the oldest request in flight was sent; 0 if none is in flight
    waiting: tuple[int, ...] = (0, 0, 0)  # current operations with requests that were not sent yet, by priority
    in_flight: int = 0  # current requests in flight
    registered: int = 0  # number of memory regions registered with the kernel
    last_error: int = 0  # errno of the last failure; 0 if none
    gone: bool = False  # true if the device was removed
