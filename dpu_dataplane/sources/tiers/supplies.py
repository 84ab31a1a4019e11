"""What a pool has of an order, brought into the batches that deliver it.

What is in memory is held there and read where it lies. What is on devices is asked for once for each record, all at the
same time, and goes into the batch as it comes, while everything else goes on. The pool checks what devices bring before
anybody sees it. All of it stays where it is until the order is over.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.source import Delivered, Order
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of, parts_of
from shadowserve import native
from shadowserve.native import Origin, Result
from shadowserve.pool.terms import Item, Lease

__all__ = ["Supplies"]


@dataclass(eq=False)
class _Record:
    """A record that the pool has.

    Attributes:
        indexes: of its pieces in the order.
        item: that is held, of one in memory.
        begin: where ``view`` begins in the record.
        view: its bytes, as soon as they are there.
        come: nothing more comes: without a view, it is not to be had.
    """

    key: bytes
    item: Item
    length: int
    indexes: list[int] = field(default_factory=list)
    is_held: bool = False
    begin: int = 0
    view: memoryview | None = None
    lease: Lease | None = None
    come: bool = False


class Supplies:
    """An order's leading pieces, and those of them that the pool has: for as long as it is entered.

    Args:
        tiers: with the pool.
        order: to be delivered.
        metrics: to count in.

    Attributes:
        order: the leading pieces of it that can be had at one time.
        near: of each of these, whether the pool has its record.
        places: by their index, where bodies that others have are to be left.
    """

    def __init__(self, tiers: Tiers, order: Order, metrics: Metrics) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._whole = order
        self._records: list[_Record] = []
        self._lock = threading.Lock()  # of what follows
        self._batch: native.Batch | None = None
        self._positions: dict[int, int] = {}
        self._over = False
        self._patience: asyncio.TimerHandle | None = None
        self.order = order
        self.near = np.zeros(len(order.pieces), np.bool_)
        self.places: dict[int, memoryview] = {}

    def __enter__(self) -> Self:
        try:
            self._find()
        except BaseException:
            self._end()
            raise
        self._watch(self._missing())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _find(self) -> None:
        """Look what the pool has, hold what is in memory, and have devices bring the rest."""
        pool, lock = self._tiers.pool, self._tiers.lock
        pieces: dict[bytes, list[int]] = {}
        for index, key in enumerate(self._whole.keys):
            pieces.setdefault(key, []).append(index)
        keys = list(pieces)
        for part in parts_of(len(keys)):
            with lock:
                for key in keys[part.start : part.stop]:
                    item = pool.get(address_of(key))
                    if item is not None and item.head_bytes:
                        record = _Record(key, item, item.length, pieces[key])
                        self._records.append(record)
                        if item.value is not None:
                            pool.hold(item)
                            record.is_held, record.view, record.come = True, memoryview(item.value), True
        self._cut()
        self.order.pieces["origin"] = np.where(self.near, Origin.AWAITED, Origin.SERVER)
        waiting = [record for record in self._records if not record.come and record.indexes]
        for part in parts_of(len(waiting)):
            with lock:
                for record in waiting[part.start : part.stop]:
                    self._read(record)
        self._metrics.tier_records["memory"] += len(self.resident)
        self._metrics.tier_records["device"] += len(waiting)

    def _cut(self) -> None:
        """Leave out what does not fit its record, and what is more than a batch may hold that waits for devices.

        With more of the memory in its hands it might wait for itself: devices read to where nothing else is.
        """
        table = self._whole.pieces
        ends = (table["record_offset"] + table["body_length"]).astype(np.int64)
        held = np.zeros(len(table), np.int64)  # from this piece on
        for record in self._records:
            if int(ends[record.indexes].max()) > record.length:
                record.indexes = []  # it is another record than the one that was found
                continue
            self.near[record.indexes] = True
            held[record.indexes[0]] = record.length
        count = len(table)
        if not all(record.come for record in self._records):
            least = int((held > 0).argmax()) + 1
            count = max(least, int(np.searchsorted(np.cumsum(held), self._tiers.batch_bytes_max, "right")))
        if count < len(table):
            self.near = self.near[:count]
            self.order = replace(self._whole, keys=self._whole.keys[:count], pieces=table[:count])
            for record in self._records:
                record.indexes = [index for index in record.indexes if index < count]

    def _read(self, record: _Record) -> None:
        """Have a device bring the record's pieces, with the pool's lock held."""
        table, pool = self.order.pieces, self._tiers.pool
        item = pool.peek(address_of(record.key))
        if item is None or item.length != record.length:
            record.come = True
            return
        first, last = min(record.indexes), max(record.indexes)
        record.begin = int(table[first]["record_offset"])
        end = int(table[last]["record_offset"]) + int(table[last]["body_length"])
        pool.read(item, record.begin, end, lambda lease: self._take(record, lease))

    def _take(self, record: _Record, lease: Lease | None) -> None:
        """Pass on what a device has brought; from any thread."""
        with self._lock:
            if not (self._over or record.come):
                record.come = True
                record.lease = lease
                record.view = None if lease is None else lease.view
                self._supply(record)
                return
        self._tiers.later(self._tiers.release, [lease])

    def _missing(self) -> int:
        return sum(not record.come for record in self._records if record.indexes)

    def _watch(self, missing: int) -> None:
        if missing:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._tiers.patience, self._give_up, missing)

    def _give_up(self, missed: int) -> None:
        """Take for lost what devices that bring nothing any more have not brought: another source may still have it."""
        with self._lock:
            missing = self._missing()
            if missing == missed:
                for record in self._records:
                    if record.indexes and not record.come:
                        record.come = True
                        self._supply(record)
                return
        self._watch(missing)

    def _supply(self, record: _Record) -> None:
        """Tell the batch where a record's pieces are, with our lock held."""
        if self._batch is None:
            return
        table = self.order.pieces
        for index in record.indexes:
            position = self._positions.get(index)
            if position is None:
                continue
            body: memoryview | None = None
            if record.view is not None:
                begin = int(table[index]["record_offset"]) - record.begin
                body = record.view[begin : begin + int(table[index]["body_length"])]
            self._batch.supply(position, body)

    def make_batch(self, pieces: npt.NDArray[np.void]) -> native.Batch:
        """Make a batch of some of the order's pieces: the pool's come by themselves, also while it runs.

        A batch that was made before is over then.
        """
        of = {int(first): index for index, first in enumerate(self.order.pieces["slice_first"].tolist())}
        indexes = [of[int(first)] for first in pieces["slice_first"].tolist()]
        with self._lock:
            self._batch = None
            pieces["origin"] = np.where(self.near[indexes], Origin.AWAITED, Origin.SERVER)
            made = self._whole.make_batch(pieces)
            self._positions = {index: position for position, index in enumerate(indexes)}
            for index, place in self.places.items():
                if index in self._positions:
                    made.leave(self._positions[index], place)
            self._batch = made
            for record in self._records:
                if record.come:
                    self._supply(record)
        return made

    @property
    def resident(self) -> list[bytes]:
        """Keys of the order's records that were in memory."""
        return [record.key for record in self._records if record.is_held and record.indexes]

    def count(self, done: Delivered) -> None:
        """Add to what was read what came from the pool."""
        in_place = self.near & (done.results == Result.OK)
        size = int(self.order.pieces["body_length"][in_place].sum())
        done.received_bytes += size
        self._metrics.tier_bytes += size

    def lost(self, results: npt.NDArray[np.uint32]) -> list[int]:
        """Return indexes of the pool's pieces that were not to be had, or not sound; the pool loses their records."""
        bad = (Result.NOT_FOUND, Result.CHECKSUM, Result.BAD_DATA)
        found: list[int] = np.flatnonzero(self.near & np.isin(results, bad)).tolist()
        for key in {self.order.keys[index] for index in found}:
            self._tiers.drop(key)
            self._metrics.tier_records["lost"] += 1
        return found

    def _end(self) -> None:
        """Give everything back; what is still on its way, as it comes."""
        if self._patience is not None:
            self._patience.cancel()
        with self._lock:
            self._over, self._batch = True, None
            leases = [record.lease for record in self._records]
        held: Sequence[_Record] = [record for record in self._records if record.is_held]
        self._tiers.release(leases)
        for part in parts_of(len(held)):
            with self._tiers.lock:
                for record in held[part.start : part.stop]:
                    self._tiers.pool.release(record.item)
        for record in self._records:
            record.view = record.lease = None
