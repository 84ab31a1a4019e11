"""Repairs the two copies of a volume's log: writes unsound blocks again from the other copy, at a start.

Recovery accepts either copy of a block. But a block with one sound copy is lost with that copy, and a power cut leaves
such blocks, since it may keep any part of a group that was not flushed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from shadowserve.pool.volume.block_reader import BlockReader, Bytes
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import BLOCK_BYTES, LOG_MAGIC, Superblock, unpack_block

_SPAN_BLOCKS: Final = 1024
"""Blocks that are compared at a time: 4 MiB of each copy."""
_REFUSED_MAX: Final = 8
"""Failed writes after which no more are tried: each may take a second."""


@dataclass(frozen=True, slots=True)
class BadCopies:
    """Consecutive blocks that are sound in the other copy and not in this one."""

    copy: int  # number of this copy
    sequence: int  # sequence of the first block
    place: int  # first block on the device
    content: Bytes  # the sound content

    @property
    def count(self) -> int:
        return len(self.content) // BLOCK_BYTES


@dataclass(slots=True)
class Repaired:
    """Result: number of ``written`` and ``refused`` blocks, and the last error."""

    written: int = 0
    refused: int = 0
    error: OSError | None = None


def find_bad_copies(reader: BlockReader, superblock: Superblock, epochs: Mapping[int, int]) -> Iterator[BadCopies]:
    """Yield the unsound blocks of each copy of a log. ``epochs``: of its blocks by sequence; blocks of other runs in
    their place are unsound."""
    layout = superblock.layout
    last = max(epochs, default=0)
    needed = sorted(sequence for sequence in epochs if sequence > last - layout.log_blocks)
    for first, count in _spans(needed, layout.log_blocks):
        place = first % layout.log_blocks
        copies = [reader.array(begin + place, count).reshape(count, BLOCK_BYTES) for begin in layout.log_firsts]
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
    """Write the unsound blocks of each copy again from the other copy; the caller flushes the device.

    A failed write does no harm: the block was unsound before, and the other copy is not touched.
    """
    repaired = Repaired()
    for bad in find_bad_copies(reader, superblock, epochs):
        page = Pages(len(bad.content))
        page.array[: len(bad.content)] = bad.content
        if repaired.refused < _REFUSED_MAX and _write(reader, bad.place, bad.count, page.address, repaired):
            repaired.written += bad.count
            continue
        for at in range(bad.count):  # a single block may succeed where the whole write has failed
            asked = repaired.refused < _REFUSED_MAX
            taken = asked and _write(reader, bad.place + at, 1, page.address + at * BLOCK_BYTES, repaired)
            repaired.written += taken
            repaired.refused += not taken
    return repaired


def _write(reader: BlockReader, place: int, blocks: int, address: int, repaired: Repaired) -> bool:
    try:
        reader.write(place, blocks, address)
    except OSError as error:
        repaired.error = error
        return False
    return True


def _is_block(superblock: Superblock, data: Bytes, sequence: int, epoch: int) -> bool:
    header = unpack_block(LOG_MAGIC, superblock.volume_id, memoryview(data))
    return header is not None and header.sequence == sequence and header.epoch == epoch


def _spans(sequences: list[int], log_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of consecutive blocks that are adjacent on the device, at most :data:`_SPAN_BLOCKS`."""
    for first, count in _runs(sequences):
        begin = first
        while begin < first + count:
            span = min(first + count - begin, _SPAN_BLOCKS, log_blocks - begin % log_blocks)
            yield begin, span
            begin += span


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of consecutive numbers in an ascending list."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], at - begin
            begin = at
