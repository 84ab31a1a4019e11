"""The log of a volume: a ring of blocks in two copies, written by groups, each made durable by one flush.

Whatever is appended while one group is on its way is the next group, so that any number of writers share a flush. A
group begins with a fresh block: a block that was acknowledged is never written again before the ring comes round to
it, which it may only once a snapshot covers it. So no torn write can reach what somebody relies on.

A block is valid only behind its predecessor: it names the run that wrote that one (``previous_epoch``). Blocks that a
crashed run left behind a gap are thus no part of the log, even after later runs have filled the gap.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    LOG_MAGIC,
    RECORD_BYTES,
    RECORDS_PER_BLOCK,
    BlockHeader,
    Superblock,
    pack_block,
)

GROUP_BLOCKS_MAX: Final = 256
"""Of the format: a MiB, which at an SSD's speed takes as long as the flush that follows."""

_WRITTEN_BLOCKS_MAX: Final = 64
"""Of a group that this writes: as many records as are told durable in one hold of the pool's lock."""

Submit = Callable[[list[Operation]], None]
"""Gives operations to the device, later if it takes no more now; ``done`` comes with the pool's lock held."""

_Callback = Callable[[Exception | None], None]


class Log:
    """Writes the log. With the pool's lock held, like everything in a volume.

    Attributes:
        error: why nothing can be written any more; None while it can.
        sequence: of the next block.
        durable: last block that is known durable.
        first: oldest block that is still needed.
        records: appended since it was opened.
        groups: written.
        written_bytes: both copies.
    """

    def __init__(
        self,
        superblock: Superblock,
        submit: Submit,
        *,
        epoch: int,
        previous_epoch: int,
        first: int,
        sequence: int,
        durable: int,
    ) -> None:
        """Go on with block ``sequence`` behind one of the run ``previous_epoch``; from ``first`` on all are needed.

        Up to ``durable`` blocks may be believed: this run's say so.
        """
        self.error: Exception | None = None
        self.sequence = sequence
        self.durable = durable
        self.first = first
        self.records = 0
        self.groups = 0
        self.written_bytes = 0
        self._superblock = superblock
        self._layout = superblock.layout
        self._submit = submit
        self._epoch = epoch
        self._previous_epoch = previous_epoch
        self._pending = bytearray()
        self._buffer = Pages(min(_WRITTEN_BLOCKS_MAX, self._layout.log_blocks) * BLOCK_BYTES)
        self._durable_records = 0
        self._group_records = 0
        self._writes = 0
        self._busy = False
        self._callbacks: deque[tuple[int, _Callback]] = deque()
        self._flushes: list[_Callback] = []
        self._flushing: list[_Callback] = []

    @property
    def epoch(self) -> int:
        """The number of this run; of a block before its first, that of the run before."""
        return self._previous_epoch

    @property
    def blocks(self) -> int:
        """Blocks of one copy."""
        return self._layout.log_blocks

    @property
    def blocks_free(self) -> int:
        """How many more blocks may be written; what is appended but not written yet has its share taken off."""
        pending = -(-len(self._pending) // (RECORD_BYTES * RECORDS_PER_BLOCK))
        return self._layout.log_blocks - (self.sequence - self.first) - pending

    @property
    def idle(self) -> bool:
        """Whether everything that was appended is durable, and no flush is under way."""
        return not self._busy and not self._pending and not self._flushes

    @property
    def is_durable(self) -> bool:
        """Whether everything that was appended is durable."""
        return self._durable_records == self.records

    def append(self, records: bytes) -> None:
        """Add records to the next group. The caller has seen that there is room for them."""
        self._pending += records
        self.records += len(records) // RECORD_BYTES

    def when_durable(self, callback: _Callback) -> None:
        """Call back when all that was appended so far is durable, or with why it is not; at once if it is already."""
        if self.error is not None or self.is_durable:
            callback(self.error)
        else:
            self._callbacks.append((self.records, callback))

    def flush(self, callback: _Callback) -> None:
        """Call back when the device has flushed what has been completed by now: after the next group's flush."""
        if self.error is not None:
            callback(self.error)
        else:
            self._flushes.append(callback)

    def step(self) -> None:
        """Begin the next group if none is on its way."""
        if self._busy or self.error is not None or not (self._pending or self._flushes):
            return
        self._busy = True
        self._flushing, self._flushes = self._flushes, []
        count = min(len(self._pending), RECORD_BYTES * RECORDS_PER_BLOCK * (self._buffer.size // BLOCK_BYTES))
        if not count:
            self._flush()
            return
        with memoryview(self._pending) as pending:
            blocks = self._pack(pending[:count])
        del self._pending[:count]
        self._group_records = self._durable_records + count // RECORD_BYTES
        self._write(blocks)

    def _pack(self, records: memoryview) -> int:
        step = RECORD_BYTES * RECORDS_PER_BLOCK
        blocks = 0
        for start in range(0, len(records), step):
            part = records[start : start + step]
            header = BlockHeader(
                count=len(part) // RECORD_BYTES,
                sequence=self.sequence + blocks,
                epoch=self._epoch,
                previous_epoch=self._previous_epoch,
                durable=self.durable,
            )
            block = pack_block(LOG_MAGIC, self._superblock.volume_id, header, part)
            self._buffer.view[blocks * BLOCK_BYTES : (blocks + 1) * BLOCK_BYTES] = block
            self._previous_epoch = self._epoch
            blocks += 1
        return blocks

    def _write(self, blocks: int) -> None:
        place = self.sequence % self._layout.log_blocks
        until_end = min(blocks, self._layout.log_blocks - place)
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
        self.groups += 1
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
        """End it: what is durable is not known any more, and must not be said of anything that comes later.

        After a flush that failed, a later one may succeed although the bytes are gone (fsync's well-known trap).
        """
        if self.error is not None:
            return
        self.error = error
        waiting = [*self._flushing, *self._flushes, *(callback for _, callback in self._callbacks)]
        self._flushing, self._flushes = [], []
        self._callbacks.clear()
        for callback in waiting:
            callback(error)
