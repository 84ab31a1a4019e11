"""Operations on block devices: what is shared by who asks for them (``storage_kv``) and who does them (the C core).

Operations are not ordered among each other: they end in any order, and after a loss of power any part of what was
written since the last flush may be there, in pieces of a sector. A flush makes durable what had been *completed* before
it was submitted. Whoever wants order waits for completions and flushes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shadowserve.native._library import Result

__all__ = ["BlockStatistics", "ObjectFields", "Operation", "OperationKind", "Pages", "Priority"]


class OperationKind(IntEnum):
    """What to do (``enum ss_block_kind``)."""

    READ = 0
    WRITE = 1
    FLUSH = 2
    DISCARD = 3
    """Advice that bytes are not needed any more; what is read there afterwards is not defined."""


class Priority(IntEnum):
    """Whose operation goes first (``enum ss_block_priority``)."""

    FOREGROUND = 0
    WRITE = 1
    BACKGROUND = 2


class ObjectFields(NamedTuple):
    """What an object's header says.

    Attributes:
        key: 32 bytes.
        tenant: whose it is.
        length: bytes of the value.
        generation: of the write that made it. Where it is expected: 0 for any.
        head_length: bytes of a record's head; 0 for what is no record.
        name_length: bytes of the key's text behind the value.
        flags: of the index.
    """

    key: bytes
    tenant: int
    length: int
    generation: int = 0
    head_length: int = 0
    name_length: int = 0
    flags: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pages:
    """A read into pages: layers of extents, and which pages they go to (``struct ss_block_pages``).

    A *part* is a layer of an extent: what goes to the pages of some blocks, and has one checksum. Arrays are
    C-contiguous. Those of one prefix on several devices share ``left``, ``word`` and ``stop``.

    Attributes:
        size: bytes of a page, a multiple of 4096.
        stride: bytes from one block's page to the next one's, a multiple of 512.
        layers: where each layer's page of block 0 begins in the memory, uint64.
        extents: where each begins on the device, uint64.
        blocks: [extent, block]: whose pages they go to, uint32. Whoever makes it knows that they are there.
        checksums: [layer, extent]: CRC-32 of the parts, uint32.
        verdicts: [layer, extent]: what each part was found to be, a Result as uint32, once the read has ended.
        left: of layers, the sound parts that each still lacks, uint32; counts down.
        word: address of the word that is told how many leading layers lack none; 0 for none.
        stop: one uint32: once it is not 0, no further part is begun, and the read ends with ECANCELED.
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
    """One read or write, a flush, or a discard.

    A read into ``pages`` is all of a prefix that one device has, however many layers and blocks it goes to. ``length``
    is then that of one part; in each extent layers follow each other from ``offset`` on.

    Attributes:
        kind: what.
        offset: in bytes, a multiple of 4096; 0 for a flush.
        length: in bytes, a multiple of 4096; 0 for a flush. Of a read into pages, of a part.
        address: of the memory, a multiple of 512, which must stay, and stay as it is, until completion; 0 for a flush
            or a discard.
        priority: whose turn it is.
        done: called with the operation by whoever takes it back from the device.
        expected: of a read that begins with an object's header: what must have come. A device may check that, in a
            thread of its own, and tell by ``verdict``; who reads checks what the device has not.
        expected_units: how many units of the value, from the first on, come with the header.
        pages: of a read into pages; ``address`` is that of the memory.
        error: why it failed; None if it did not.
        begin_ns: monotonic clock when the device got its first part.
        end_ns: when it was complete, but for a check.
        verdict: what ``check_object`` says of what came; None where the device did not check it, or failed.
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
        """Bytes that it moves in all."""
        return self.length if self.pages is None else self.length * self.pages.verdicts.size


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Counters of one device since it was opened.

    Attributes:
        operations: done without error, by kind.
        bytes: of these, by kind.
        errors: operations that failed, by kind.
        wait_ns: between submission and the first request to the device, summed, by priority.
        service_ns: between the first request and completion, summed, by priority.
        busy_ns: time in which the device had something to do.
        oldest_ns: monotonic clock when the request that the device has for the longest went out; 0: it has none.
        waiting: operations now, by priority, that have not gone out in full.
        in_flight: requests that the device has now.
        registered: memory regions that the kernel took.
        last_error: errno of the last failure; 0 before there was one.
        gone: the device answered as one that was removed.
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
