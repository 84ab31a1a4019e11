"""Snapshots: the index of a volume's objects, written in slices while the volume works, so that the log may wrap.

A snapshot is fuzzy: the index changes while slices are taken. That is harmless: replay begins with the block of the log
that was next when the snapshot began, and replaying a change that a slice already has changes nothing. Its header is
written only after all slices are durable, and the log up to every change that a slice may have, including writes that
were in progress: no snapshot is ahead of the log. It goes into the region that the last complete one is not in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.native import INDEX_RECORD_DTYPE, Index, RecordKind
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    RECORD_BYTES,
    RECORDS_BYTES,
    RECORDS_PER_BLOCK,
    SNAPSHOT_MAGIC,
    BlockHeader,
    SnapshotHeader,
    Superblock,
    pack_blocks,
    pack_name,
)
from shadowserve.pool.volume.log import Log, Submit

Living = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns those PUT records that are kept."""

SLICE_BLOCKS: Final = 64
"""About 2,000 objects: half a millisecond with the pool's lock held."""

_RETRY_STEPS: Final = 64
"""Steps of the volume between a failed snapshot and the next attempt."""
_DUMPS_PER_STEP: Final = 4
"""Parts of the index that one step examines for a slice; the next step continues."""


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Content of all snapshots of a volume, and how they are written.

    Attributes:
        held: Records of objects that only the log still has, by tenant and key.
        living: Returns which records to keep.
        settle_writes: Calls back when all present writes have their record in the log.
    """

    superblock: Superblock
    submit: Submit
    log: Log
    index: Index
    number: int  # the index's number of the device
    tenants: dict[int, bytes]
    notes: dict[bytes, bytes]
    held: dict[tuple[int, bytes], bytes]
    living: Living
    settle_writes: Callable[[Callable[[], None]], None]
    clock_ms: Callable[[], int]


class _IndexDump:
    """The records of a volume's objects, read from the index in parts, until it has ``ended``."""

    def __init__(self, source: SnapshotSource) -> None:
        self.ended = False
        self._source = source
        self._cursor = 0
        self._part = np.zeros(SLICE_BLOCKS * RECORDS_PER_BLOCK, INDEX_RECORD_DTYPE)

    def next(self) -> bytes:
        """Return the records of the next part; none if it has no object of this device."""
        source = self._source
        self._cursor, count = source.index.dump(self._cursor, self._part, source.number)
        self.ended = self._cursor == 0
        records = source.living(self._part[:count])
        records["device"] = 0  # the device's number may change at the next start
        found = self._with_names(records)
        if self.ended and source.held:
            # Behind the index's records of the same keys, which may not be durable yet.
            found += self._with_names(np.frombuffer(b"".join(source.held.values()), INDEX_RECORD_DTYPE))
        return found

    def _with_names(self, records: npt.NDArray[Any]) -> bytes:
        return records.tobytes() + self._source.index.dump_names(records)


class Snapshot:
    """One snapshot in progress. With the pool's lock held."""

    def __init__(self, source: SnapshotSource, generation: int) -> None:
        self.header: SnapshotHeader | None = None  # its header, once it is complete
        self.error: Exception | None = None  # why it has failed
        self.written_bytes = 0  # bytes written so far
        self.wants_step = False  # step() must be called again without a completion of the device
        self._source = source
        self._superblock = source.superblock
        self._log = source.log
        self._generation = generation
        self._log_first, self._log_epoch = source.log.sequence, source.log.epoch
        self._dump = _IndexDump(source)
        self._blocks = 0
        self._records = 0
        self._pending = bytearray()  # records that are not written yet: first tenants and notes
        for tenant, name in sorted(source.tenants.items()):
            self._pending += pack_name(RecordKind.TENANT, tenant, b"", name)
        for name, text in sorted(source.notes.items()):
            self._pending += pack_name(RecordKind.TENANT, 0, name, text)
        self._buffer = Pages(SLICE_BLOCKS * BLOCK_BYTES)

    @property
    def ended(self) -> bool:
        """True if it is complete or has failed."""
        return self.header is not None or self.error is not None

    @property
    def _region(self) -> int:
        return self._superblock.layout.snapshot_firsts[self._generation % 2]

    def step(self) -> None:
        self.wants_step = False
        for _ in range(_DUMPS_PER_STEP):
            if self._dump.ended or len(self._pending) >= RECORDS_BYTES:
                break
            self._pending += self._dump.next()
        if not self._dump.ended and len(self._pending) < RECORDS_BYTES:
            self.wants_step = True
        elif self._pending:
            self._write_slice()
        else:
            # Every change that a slice may have comes into the log; then log and slices become durable.
            self._source.settle_writes(lambda: self._log.when_durable(self._unless_failed(self._flush_slices)))

    def _write_slice(self) -> None:
        # Only the last block of a snapshot may be partly filled: the rest waits for the next slice.
        count = min(len(self._pending), SLICE_BLOCKS * RECORDS_BYTES)
        if not self._dump.ended:
            count -= count % RECORDS_BYTES
        blocks = -(-count // RECORDS_BYTES)
        if 1 + self._blocks + blocks > self._superblock.layout.snapshot_blocks:
            self._fail(OSError(f"snapshot {self._generation} does not fit its region: too many changes"))
            return
        with memoryview(self._pending) as pending, pending[:count] as records:
            pack_blocks(self._buffer.view, SNAPSHOT_MAGIC, self._superblock.volume_id, records, self._header)
        del self._pending[:count]
        place = self._region + 1 + self._blocks
        self._blocks += blocks
        self._records += count // RECORD_BYTES
        self._write(place, blocks, self.step)

    def _header(self, block: int, count: int) -> BlockHeader:
        return BlockHeader(count, self._blocks + block, self._generation, previous_epoch=0, durable=0)

    def _write(self, place: int, blocks: int, proceed: Callable[[], None]) -> None:
        self.written_bytes += blocks * BLOCK_BYTES
        written = self._unless_failed(proceed)
        where = place * BLOCK_BYTES, blocks * BLOCK_BYTES, self._buffer.address
        self._source.submit(
            [Operation(OperationKind.WRITE, *where, Priority.BACKGROUND, lambda ended: written(ended.error))]
        )

    def _unless_failed(self, proceed: Callable[[], None]) -> Callable[[Exception | None], None]:
        """Return a callback for the end of a step: it proceeds if there was no error."""

        def ended(error: Exception | None) -> None:
            if error is None:
                proceed()
            else:
                self._fail(error)

        return ended

    def _flush_slices(self) -> None:
        self._log.flush(self._unless_failed(self._write_header))

    def _write_header(self) -> None:
        header = SnapshotHeader(
            generation=self._generation,
            blocks=self._blocks,
            records=self._records,
            log_first=self._log_first,
            log_epoch=self._log_epoch,
            log_last=self._log.durable,
            created_ms=self._source.clock_ms(),
        )
        self._buffer.view[:BLOCK_BYTES] = header.pack(self._superblock.volume_id)

        def complete() -> None:
            self.header = header

        self._write(self._region, 1, lambda: self._log.flush(self._unless_failed(complete)))

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error


class SnapshotSchedule:
    """Writes snapshots of a volume, one after the other: when a third of the log is used, or when one is wanted."""

    def __init__(self, source: SnapshotSource, generation: int, *, wanted: bool) -> None:
        """``generation`` is that of the first snapshot."""
        self.wanted = wanted  # a snapshot begins with the next step, although the log has room
        self.completed = 0
        self.failed = 0
        self.written_bytes = 0  # bytes of all snapshots, failed ones included
        self._source = source
        self._log = source.log
        self._generation = generation
        self._snapshot: Snapshot | None = None
        self._steps_to_retry = 0

    @property
    def is_writing(self) -> bool:
        return self._snapshot is not None

    @property
    def wants_step(self) -> bool:
        return self._snapshot is not None and self._snapshot.wants_step

    def step(self) -> None:
        snapshot = self._snapshot
        if snapshot is not None and snapshot.ended:
            self._end(snapshot)
        elif snapshot is not None and snapshot.wants_step:
            snapshot.step()
        used = self._log.sequence - self._log.first
        if self._snapshot is None and (self.wanted or 3 * used >= self._log.blocks):
            if self._steps_to_retry or self._log.error is not None:
                self._steps_to_retry -= self._steps_to_retry > 0
                return
            self.wanted = False
            self._snapshot = Snapshot(self._source, self._generation)
            self._snapshot.step()

    def _end(self, snapshot: Snapshot) -> None:
        self.written_bytes += snapshot.written_bytes
        if snapshot.header is not None:
            self._log.first = snapshot.header.log_first
            self._generation = snapshot.header.generation + 1
            self.completed += 1
        else:
            self.failed += 1
            self.wanted = True
            self._steps_to_retry = _RETRY_STEPS
        self._snapshot = None
