"""The log of a volume: a ring of blocks in two copies, written in groups, each made durable by one flush.

Records that are appended while a group is being written form the next group, so any number of writers share a flush. A
group begins with a new block, and a durable block is written again only when a snapshot covers it, so no torn write can
damage acknowledged records. A block is valid only behind its predecessor: it has the epoch of the run that wrote that
one (``previous_epoch``). So blocks that a crashed run left behind a gap are no part of the log, even after later runs
have filled the gap.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    LOG_MAGIC,
    RECORD_BYTES,
    RECORDS_BYTES,
    BlockHeader,
    Superblock,
    pack_blocks,
)
from shadowserve.pool.volume.log_tail import Key

GROUP_BLOCKS_MAX: Final = 256
"""Most blocks of a group in the format: one MiB, which takes an SSD as long as the flush that follows."""

_WRITTEN_BLOCKS_MAX: Final = 64
"""Most blocks of a group that this code writes: its tickets are settled in one hold of the pool's lock."""

Submit = Callable[[list[Operation]], None]
"""Passes operations to the device, later if it accepts no more now; calls ``done`` with the pool's lock held."""

_Callback = Callable[[Exception | None], None]


@dataclass(slots=True, kw_only=True)
class LogEnd:
    """The end of the log, where writing continues."""

    first: int  # oldest block that is still needed
    sequence: int  # number of the next block
    epoch: int  # epoch of the last block
    durable: int  # last block that is known to be durable
    torn: tuple[Key, ...] = ()  # keys of puts that were not believed; the log's next records must say so


class Log:
    """Writes the log. With the pool's lock held, like everything in a volume."""

    def __init__(self, superblock: Superblock, submit: Submit, end: LogEnd, epoch: int) -> None:
        """Continue behind the ``end`` that recovery has found, as the run ``epoch``."""
        self.error: Exception | None = None  # error after which nothing is written; None while all is well
        self.sequence = end.sequence  # number of the next block
        self.durable = end.durable  # last block that is known to be durable
        self.first = end.first  # oldest block that is still needed
        self.records = 0  # appended records since it was opened
        self.written_bytes = 0  # bytes of both copies
        self.blocks = superblock.layout.log_blocks  # blocks of each copy
        self._superblock = superblock
        self._layout = superblock.layout
        self._submit = submit
        self._epoch = epoch
        self._previous_epoch = end.epoch
        self._pending = bytearray()
        self._buffer = Pages(min(_WRITTEN_BLOCKS_MAX, self.blocks) * BLOCK_BYTES)
        self._durable_records = 0
        self._group_records = 0
        self._writes = 0
        self._busy = False
        self._callbacks: deque[tuple[int, _Callback]] = deque()
        self._flushes: list[_Callback] = []
        self._flushing: list[_Callback] = []

    @property
    def epoch(self) -> int:
        return self._previous_epoch

    @property
    def blocks_free(self) -> int:
        """Blocks that may still be written, without those for appended records."""
        pending = -(-len(self._pending) // RECORDS_BYTES)
        return self.blocks - (self.sequence - self.first) - pending

    @property
    def idle(self) -> bool:
        """True if everything appended is durable and no flush is in progress."""
        return not self._busy and not self._pending and not self._flushes

    @property
    def is_durable(self) -> bool:
        return self._durable_records == self.records

    def append(self, records: bytes) -> None:
        """Add records to the next group; the caller has checked for room."""
        self._pending += records
        self.records += len(records) // RECORD_BYTES

    def when_durable(self, callback: _Callback) -> None:
        """Call back when everything appended so far is durable, or with the error; at once if it is durable."""
        if self.error is not None or self.is_durable:
            callback(self.error)
        else:
            self._callbacks.append((self.records, callback))

    def flush(self, callback: _Callback) -> None:
        """Call back when the device has flushed all operations completed by now: after the next group's flush."""
        if self.error is not None:
            callback(self.error)
        else:
            self._flushes.append(callback)

    def step(self) -> None:
        """Begin the next group if none is being written."""
        if self._busy or self.error is not None or not (self._pending or self._flushes):
            return
        self._busy = True
        self._flushing, self._flushes = self._flushes, []
        count = min(len(self._pending), RECORDS_BYTES * (self._buffer.size // BLOCK_BYTES))
        if not count:
            self._flush()
            return
        with memoryview(self._pending) as pending:
            blocks = pack_blocks(
                self._buffer.view, LOG_MAGIC, self._superblock.volume_id, pending[:count], self._header
            )
        del self._pending[:count]
        self._group_records = self._durable_records + count // RECORD_BYTES
        self._write(blocks)

    def _header(self, block: int, count: int) -> BlockHeader:
        """Return the header of the next block of a group; called for each in order."""
        previous_epoch, self._previous_epoch = self._previous_epoch, self._epoch
        return BlockHeader(count, self.sequence + block, self._epoch, previous_epoch, self.durable)

    def _write(self, blocks: int) -> None:
        place = self.sequence % self.blocks
        until_end = min(blocks, self.blocks - place)
        parts = [(place, 0, until_end), (0, until_end, blocks - until_end)]
        operations = [
            Operation(
                OperationKind.WRITE,
                (first + at) * BLOCK_BYTES,
                count * BLOCK_BYTES,
                self._buffer.address + begin * BLOCK_BYTES,
                Priority.WRITE,
                self._written,
            )
            for first in self._layout.log_firsts
            for at, begin, count in parts
            if count
        ]
        self.sequence += blocks
        self.written_bytes += len(self._layout.log_firsts) * blocks * BLOCK_BYTES
        self._writes = len(operations)
        self._submit(operations)

    def _written(self, operation: Operation) -> None:
        self._writes -= 1
        if operation.error is not None:
            self.fail(operation.error)
        if not self._writes and self.error is None:
            self._flush()

    def _flush(self) -> None:
        self._submit([Operation(OperationKind.FLUSH, 0, 0, 0, Priority.WRITE, self._flushed)])

    def _flushed(self, operation: Operation) -> None:
        if operation.error is not None:
            self.fail(operation.error)
        if self.error is not None:
            return
        self._busy = False
        self.durable = self.sequence - 1
        self._durable_records = max(self._durable_records, self._group_records)
        flushing, self._flushing = self._flushing, []
        for callback in flushing:
            callback(None)
        while self._callbacks and self._callbacks[0][0] <= self._durable_records:
            self._callbacks.popleft()[1](None)

    def fail(self, error: Exception) -> None:
        """Stop writing: after a failed flush, a later one may succeed without the bytes."""
        if self.error is not None:
            return
        self.error = error
        waiting = [*self._flushing, *self._flushes, *(callback for _, callback in self._callbacks)]
        self._flushing, self._flushes = [], []
        self._callbacks.clear()
        for callback in waiting:
            callback(error)
