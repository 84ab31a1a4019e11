"""The pool in a plan: local hits, supplied to its batches, and the fill with records that another source delivers.

Records in memory are held and read in place. Records on devices are read all at the same time, each at once, or in
layer order in parts of some layers: the first layers of all records come first. Each part goes into the batch when it
comes. All records stay in place until the plan is done.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Stored
from dpu_dataplane.sources.source import Delivered
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of, ranges_of
from shadowserve import native
from shadowserve.native import Origin, Result
from shadowserve.pieces import Flags
from shadowserve.pool.types import Item, Lease

_READ_BYTES: Final = 1 << 20
"""Bytes of a record that one read in layer order brings at least: a device reads larger parts no faster."""


@dataclass(eq=False)
class _Record:
    key: bytes
    item: Item
    length: int
    piece_ids: list[int]  # its pieces in the plan
    is_held: bool = False  # the item is held in memory


@dataclass(eq=False)
class _Part:
    """Consecutive pieces of a record that come together."""

    record: _Record
    piece_ids: list[int]
    begin: int = 0  # offset of ``view`` in the record
    view: memoryview | None = None  # its bytes, once they are there
    lease: Lease | None = None
    is_read: bool = False  # nothing more comes: without a view, it could not be read


class LocalHits:
    """The leading pieces of a plan, and those of them that the pool has; a context manager and a BatchHook."""

    def __init__(self, tiers: Tiers, plan: FetchPlan, metrics: Metrics) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._records: list[_Record] = []
        self._parts: list[_Part] = []  # of all records
        self._lock = threading.Lock()  # guards the next three and each part's state: devices' threads report reads
        self._batch: native.Batch | None = None
        self._rows: dict[int, int] = {}  # row in the batch of each piece
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.plan = plan  # the leading pieces that can be delivered at the same time
        self.local = np.zeros(len(plan.pieces), np.bool_)  # for each piece of ``plan``, whether the pool has its record

    def __enter__(self) -> Self:
        try:
            self._find()
        except BaseException:
            self._close()
            raise
        self._watch(self._missing())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _find(self) -> None:
        """Look the records up, hold those in memory, limit the plan, and start to read the others from devices."""
        pool, lock = self._tiers.pool, self._tiers.lock
        pieces: dict[bytes, list[int]] = {}
        for piece, key in enumerate(self.plan.keys):
            pieces.setdefault(key, []).append(piece)
        keys = list(pieces)
        for some in ranges_of(len(keys)):
            with lock:
                for key in keys[some.start : some.stop]:
                    item = pool.get(address_of(key))
                    if item is not None and item.header_bytes:
                        record = _Record(key, item, item.length, pieces[key], is_held=item.value is not None)
                        self._records.append(record)
                        if record.is_held:
                            pool.hold(item)
        self._limit()
        self.plan.pieces["origin"] = np.where(self.local, Origin.AWAITED, Origin.SERVER)
        for record in self._records:
            if record.is_held and record.piece_ids:
                value = memoryview(record.item.value)  # type: ignore[arg-type]
                self._parts.append(_Part(record, record.piece_ids, view=value, is_read=True))
        waiting = self._parts_to_read()
        self._parts += waiting
        for some in ranges_of(len(waiting)):
            with lock:
                for part in waiting[some.start : some.stop]:
                    self._read(part)
        self._metrics.tier_records["memory"] += len(self.resident)
        self._metrics.tier_records["device"] += len({id(part.record) for part in waiting})

    def _parts_to_read(self) -> list[_Part]:
        """Return the parts of records on devices, in the order in which they are wanted."""
        sizes, parts = self.plan.pieces["body_length"].tolist(), []
        for record in self._records:
            if record.is_held or not record.piece_ids:
                continue
            some: list[int] = []
            total = 0
            for piece in record.piece_ids:
                some.append(piece)
                total += sizes[piece]
                if self.plan.layerwise and total >= _READ_BYTES:
                    parts.append(_Part(record, some))
                    some, total = [], 0
            if some:
                parts.append(_Part(record, some))
        return sorted(parts, key=lambda part: part.piece_ids[0])

    def _limit(self) -> None:
        """Drop records of another length, and limit a plan that waits for devices to ``batch_bytes_max``.

        Without that limit the batch could hold all memory that devices read into, and wait for itself.
        """
        table = self.plan.pieces
        ends = (table["record_offset"] + table["body_length"]).astype(np.int64)
        held = np.zeros(len(table), np.int64)  # bytes that reads hold: of pieces, or of the record with its first piece
        for record in self._records:
            if int(ends[record.piece_ids].max()) > record.length:
                record.piece_ids = []  # the record was replaced since it was found
                continue
            self.local[record.piece_ids] = True
            if self.plan.layerwise and record.length > 2 * _READ_BYTES:  # smaller ones may be read whole
                held[record.piece_ids] = table["body_length"][record.piece_ids]
            else:
                held[record.piece_ids[0]] = record.length
        count = len(table)
        if not all(record.is_held for record in self._records):
            least = int((held > 0).argmax()) + 1
            count = max(least, int(np.searchsorted(np.cumsum(held), self._tiers.batch_bytes_max, "right")))
        if count < len(table):
            self.local = self.local[:count]
            self.plan = self.plan.leading(count)
            for record in self._records:
                record.piece_ids = [piece for piece in record.piece_ids if piece < count]

    def _read(self, part: _Part) -> None:
        """Start to read a part from a device, with the pool's lock held."""
        table, pool = self.plan.pieces, self._tiers.pool
        item = pool.peek(address_of(part.record.key))
        if item is None or item.length != part.record.length:
            part.is_read = True
            return
        first, last = part.piece_ids[0], part.piece_ids[-1]
        part.begin = int(table[first]["record_offset"])
        end = int(table[last]["record_offset"]) + int(table[last]["body_length"])
        in_parts = self.plan.layerwise and 2 * (end - part.begin) < item.length
        pool.read(item, part.begin, end, lambda lease: self._finish_read(part, lease), in_parts=in_parts)

    def _finish_read(self, part: _Part, lease: Lease | None) -> None:
        """Supply what a device has read; from any thread."""
        with self._lock:
            if not (self._closed or part.is_read):
                part.is_read = True
                part.lease = lease
                part.view = None if lease is None else lease.view
                self._supply(part)
                return
        self._tiers.later(self._tiers.release, [lease])

    def _missing(self) -> int:
        return sum(not part.is_read for part in self._parts)

    def _watch(self, missing: int) -> None:
        if missing:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._tiers.read_timeout_s, self._give_up, missing)

    def _give_up(self, missing_before: int) -> None:
        """Give up the missing reads if none has ended since the last check: another source may have the records."""
        with self._lock:
            missing = self._missing()
            if missing == missing_before:
                for part in self._parts:
                    if not part.is_read:
                        part.is_read = True
                        self._supply(part)
                return
        self._watch(missing)

    def _supply(self, part: _Part) -> None:
        """Pass a part's pieces to the batch, with our lock held."""
        if self._batch is None:
            return
        table = self.plan.pieces
        for piece in part.piece_ids:
            row = self._rows.get(piece)
            if row is None:
                continue
            body: memoryview | None = None
            if part.view is not None:
                begin = int(table[piece]["record_offset"]) - part.begin
                body = part.view[begin : begin + int(table[piece]["body_length"])]
            self._batch.supply(row, body)

    def attach(self, batch: native.Batch, piece_ids: Sequence[int]) -> None:
        """Supply local pieces to a batch: those already read now, the others as they come."""
        with self._lock:
            self._rows = {piece: row for row, piece in enumerate(piece_ids)}
            self._batch = batch
            for part in self._parts:
                if part.is_read:
                    self._supply(part)

    @property
    def resident(self) -> list[bytes]:
        return [record.key for record in self._records if record.is_held and record.piece_ids]

    def count(self, done: Delivered) -> None:
        """Add the delivered bytes of the pool to the result and to the metrics."""
        in_place = self.local & (done.results == Result.OK)
        size = int(self.plan.pieces["body_length"][in_place].sum())
        done.received_bytes += size
        done.tier_bytes += size
        self._metrics.totals["tier_bytes"] += size

    def drop_lost(self, results: npt.NDArray[np.uint32]) -> list[int]:
        """Drop records that could not be read or were unsound from the pool; return their pieces."""
        bad = (Result.NOT_FOUND, Result.CHECKSUM, Result.BAD_DATA)
        lost: list[int] = np.flatnonzero(self.local & np.isin(results, bad)).tolist()
        for key in {self.plan.keys[piece] for piece in lost}:
            self._tiers.drop(key)
            self._metrics.tier_records["lost"] += 1
        return lost

    def _close(self) -> None:
        """Release all records; those still being read are released when they come."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed, self._batch = True, None
            leases = [part.lease for part in self._parts]
        held: Sequence[_Record] = [record for record in self._records if record.is_held]
        self._tiers.release(leases)
        for some in ranges_of(len(held)):
            with self._tiers.lock:
                for record in held[some.start : some.stop]:
                    self._tiers.pool.release(record.item)
        for part in self._parts:
            part.view = part.lease = None


@dataclass(frozen=True)
class _Fill:
    key: bytes
    piece_ids: list[int]
    memory: memoryview
    header: bytes


class ReadThroughFill:
    """Memory of the pool for a plan's records from another source; a BatchHook.

    A record that the plan reads completely is received into memory of the pool, decoded from there, and enters the pool
    once all of its pieces were sound. Nothing is copied. A record without room is delivered and not kept.
    """

    def __init__(self, tiers: Tiers, plan: FetchPlan, local: Flags) -> None:
        self._tiers = tiers
        self._fills: list[_Fill] = []
        self._memory: dict[int, memoryview] = {}  # of pieces
        pieces: dict[bytes, list[int]] = {}
        for piece in np.flatnonzero(~local).tolist():
            pieces.setdefault(plan.keys[piece], []).append(piece)
        for index, (key, piece_ids) in enumerate(pieces.items()):
            stored = plan.records.get(key)
            if stored is not None and not self._prepare(key, piece_ids, stored, plan.pieces):
                tiers.note_dropped(len(pieces) - index)  # there is no memory for later records, either
                break

    def _prepare(self, key: bytes, piece_ids: list[int], stored: Stored, table: npt.NDArray[np.void]) -> bool:
        """Allocate memory for a record if the plan reads all of it; return False if there is none."""
        size = stored.header_bytes
        if not size or int(table["body_length"][piece_ids].sum()) != stored.length - size:
            return True
        try:
            memory = self._tiers.allocate(stored.length)
        except MemoryError:
            memory = None
        if memory is None:
            return False
        header = bytes(stored.header[:size])
        memory[:size] = header
        self._fills.append(_Fill(key, piece_ids, memory, header))
        for piece in piece_ids:
            first = int(table[piece]["record_offset"])
            self._memory[piece] = memory[first : first + int(table[piece]["body_length"])]
        return True

    def attach(self, batch: native.Batch, piece_ids: Sequence[int]) -> None:
        """Make the batch leave the bodies in the pool's memory."""
        if self._memory:
            for row, piece in enumerate(piece_ids):
                if (memory := self._memory.get(piece)) is not None:
                    batch.leave(row, memory)

    def finish(self, results: npt.NDArray[np.uint32] | None) -> None:
        """Add the complete records to the pool and free the memory of the others; None: nothing was delivered."""
        for fill in self._fills:
            complete = results is not None and bool((results[fill.piece_ids] == Result.OK).all())
            if complete and self._tiers.add(fill.key, fill.memory, fill.header) is not None:
                self._tiers.note_dropped()
            self._tiers.free(fill.memory)
        self._fills.clear()
