"""The two copies of a volume's log: which of them is not sound, and writing it again from the other one.

A block is as good as one copy of it: recovery takes either. But a block with one copy is lost with that copy, and a
power cut leaves such blocks: of a group that was not flushed yet it may keep what it likes. So once a start has found
out which blocks are the log, it compares the copies and writes the bad ones again, before anybody builds upon them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.pool.volume.block_reader import BlockReader
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import BLOCK_BYTES, LOG_MAGIC, Superblock, unpack_block

_SPAN_BLOCKS: Final = 1024
"""Compared at a time: 4 MiB of each copy."""
_REFUSED_MAX: Final = 8
"""A device that has refused so many writes is asked for no more: it may take a second for each of them."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BadCopies:
    """Blocks in a row that are sound in the other copy, and not in this one.

    Attributes:
        copy: this one.
        sequence: of the first of them.
        place: of it, on the device.
        content: that they should have.
    """

    copy: int
    sequence: int
    place: int
    content: Bytes

    @property
    def count(self) -> int:
        """How many blocks."""
        return len(self.content) // BLOCK_BYTES


@dataclass(slots=True)
class Repaired:
    """What came of it: blocks that were ``written`` again, those that were ``refused``, and the last error."""

    written: int = 0
    refused: int = 0
    error: OSError | None = None


def find_bad_copies(reader: BlockReader, superblock: Superblock, epochs: Mapping[int, int]) -> Iterator[BadCopies]:
    """Yield what is not sound in one copy of a log.

    Args:
        reader: of the device.
        superblock: of the volume.
        epochs: of the blocks that are the log, by their sequence: a block that another run left in their place is none.
    """
    layout = superblock.layout
    last = max(epochs, default=0)
    needed = sorted(sequence for sequence in epochs if sequence > last - layout.log_blocks)
    for first, count in _spans(needed, layout.log_blocks):
        place = first % layout.log_blocks
        copies = [_read(reader, begin + place, count) for begin in layout.log_firsts]
        differ = np.flatnonzero((copies[0] != copies[1]).any(axis=1))
        bad: list[list[int]] = [[], []]
        for at in map(int, differ):
            sound = [_is_block(superblock, copy[at], first + at, epochs[first + at]) for copy in copies]
            if sound[0] != sound[1]:
                bad[sound[0]].append(at)
        for copy, blocks in enumerate(bad):
            for begin, length in _runs(blocks):
                content = copies[1 - copy][begin : begin + length].reshape(-1)
                yield BadCopies(copy, first + begin, layout.log_firsts[copy] + place + begin, content)


def repair_log(reader: BlockReader, superblock: Superblock, epochs: Mapping[int, int]) -> Repaired:
    """Write again what is not sound in one copy of a log, from the other one; the caller flushes the device.

    A write that fails harms nothing: what it should have repaired was not sound, and the other copy is not touched.

    Raises:
        DeviceError: the device does not answer.
    """
    repaired = Repaired()
    for bad in find_bad_copies(reader, superblock, epochs):
        page = Pages(len(bad.content))
        page.array[: len(bad.content)] = bad.content
        if repaired.refused < _REFUSED_MAX and _write(reader, bad.place, bad.count, page.address, repaired):
            repaired.written += bad.count
            continue
        for at in range(bad.count):  # what a device refuses as a whole it may take in part, or the second time
            asked = repaired.refused < _REFUSED_MAX
            taken = asked and _write(reader, bad.place + at, 1, page.address + at * BLOCK_BYTES, repaired)
            repaired.written += taken
            repaired.refused += not taken
    return repaired


def _write(reader: BlockReader, place: int, blocks: int, address: int, repaired: Repaired) -> bool:
    try:
        reader.run(
            Operation(OperationKind.WRITE, place * BLOCK_BYTES, blocks * BLOCK_BYTES, address, Priority.WRITE, _nothing)
        )
    except OSError as error:
        repaired.error = error
        return False
    return True


def _read(reader: BlockReader, first: int, count: int) -> Bytes:
    return np.concatenate([data.copy() for _, data in reader.pieces(first, count)]).reshape(count, BLOCK_BYTES)


def _is_block(superblock: Superblock, data: Bytes, sequence: int, epoch: int) -> bool:
    header = unpack_block(LOG_MAGIC, superblock.volume_id, memoryview(data))
    return header is not None and header.sequence == sequence and header.epoch == epoch


def _spans(sequences: list[int], log_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of blocks in a row that lie together, of no more than are compared at a time."""
    for first, count in _runs(sequences):
        begin = first
        while begin < first + count:
            span = min(first + count - begin, _SPAN_BLOCKS, log_blocks - begin % log_blocks)
            yield begin, span
            begin += span


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of numbers in a row, of numbers in ascending order."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], at - begin
            begin = at


def _nothing(_operation: Operation) -> None:
    """Nothing: whoever runs an operation by a BlockReader waits for it."""
