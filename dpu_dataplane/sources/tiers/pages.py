"""Chunks of pages on devices of the tiers, brought straight into an engine's paged memory.

A record whose slices are as the engine's pages are (``StoreRequest.plain``) is an object of the pool like any other: it
is found, evicted and recovered with the others. What is special is how it is read. All chunks are one request to each
device, whatever the number of layers and blocks; the device's thread goes through them layer by layer, spreads them
over pages, compares what came with the record's checksums, and tells the engine of layers that are in place. No byte
passes through memory of the pool, and no core copies any.

A request can be stopped, but what a device has begun cannot be called back. It has to be waited for: until then it may
still land.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dpu_dataplane.interference import TURN_S, InterferenceBudget
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.placing import PageOrder, Placed, Placing
from dpu_dataplane.sources.source import Stored
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.tiers import Tiers, begins_in_blocks, parts_of
from shadowserve import native
from shadowserve.block import Operation, OperationKind, Pages, Priority
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import RecordError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.pool.arena import BLOCK_BYTES
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.disk import Disk
from shadowserve.record import parse_head

__all__ = ["DevicePages"]

_KNOWN_MAX: Final = 65_536
"""Records of which it is remembered how to read them: 16 Mi tokens at 256 a chunk."""


class _Known(NamedTuple):
    """How to read a record: layout and length, where its body begins, and the checksum of each layer, of 4 bytes."""

    layout: ChunkLayout
    length: int
    body: int
    checksums: bytes


class DevicePages(Placing):
    """Reads for paged memory. To be used on the event loop.

    Args:
        tiers: with the pool.
        prefetching: into its memory: it gives way to these reads, too.
        budget: that they are held to.
        metrics: to count in.
    """

    def __init__(self, tiers: Tiers, prefetching: Prefetcher, budget: InterferenceBudget, metrics: Metrics) -> None:
        self._tiers = tiers
        self._prefetcher = prefetching
        self._budget = budget
        self._metrics = metrics
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def register(self, memory: memoryview) -> None:
        if isinstance(pool := self._tiers.pool, DevicePool):
            pool.register(memory)

    def unregister(self, memory: memoryview) -> None:
        if isinstance(pool := self._tiers.pool, DevicePool):
            pool.unregister(memory)

    async def place(self, job: Job, order: PageOrder) -> Placed:
        known = await self._learn(order)
        lent = self._lend(order.keys, known)
        try:
            async with self._prefetcher.giving_way(job, order.keys):
                placed = await self._read(job, order, lent, known)
            for index in placed.rotten:  # or it is another record by now, of the same key
                self._known.pop(order.keys[index], None)
            return placed
        finally:
            self._return(lent)

    async def _read(
        self, job: Job, order: PageOrder, lent: Sequence[native.IndexPlace], known: Sequence[_Known]
    ) -> Placed:
        """Read what is lent by turns of the budget: all chunks together, or, beside an engine that decodes, some."""
        delivered: Flags = np.zeros((order.layout.layers, len(order.keys)), np.bool_)
        rotten = list[int]()
        first = 0
        while first < len(lent):
            rate = self._budget.rate
            count = max(int(rate * TURN_S) // order.layout.raw_bytes, 1) if rate else len(lent)
            end = min(first + count, len(lent))
            try:
                async with self._budget.turn(Mover.PAGE_LOAD, (end - first) * order.layout.raw_bytes, job) as turn:
                    some = order if end - first == len(order.keys) else order.part(first, end)
                    placed = await _Reading(
                        self._tiers, self._metrics, job, some, lent[first:end], known[first:end]
                    ).run()
                    turn.moved_bytes = int(placed.delivered.sum()) * order.layout.raw_bytes // order.layout.layers
            except Stop as stop:
                return Placed(delivered, rotten, stop)
            delivered[:, first:end] = placed.delivered[:, : end - first]
            rotten += [first + index for index in placed.rotten]
            if placed.stop is not None or not placed.delivered[:, : end - first].all():
                return Placed(delivered, rotten, placed.stop)
            first = end
        return Placed(delivered, rotten, None)

    async def _learn(self, order: PageOrder) -> list[_Known]:
        """Return how to read the leading ones that are there as pages; find out what is not known."""
        known = self._leading(order)
        if len(known) < len(order.keys) and isinstance(self._tiers.pool, DevicePool):
            unknown = [key for key in order.keys if self._knows(key, order.layout) is None]
            found, reads = await self._tiers.look(unknown)
            await self._tiers.await_heads(reads)
            for key, stored in zip(unknown, found, strict=True):
                if isinstance(stored, Stored) and (learnt := _described(key, stored, order.layout)) is not None:
                    self._known[key] = learnt
            while len(self._known) > max(_KNOWN_MAX, len(order.keys)):
                self._known.popitem(last=False)
            known = self._leading(order)
        return known

    def _leading(self, order: PageOrder) -> list[_Known]:
        """Return how to read those before the first of which that is not known; each is used now."""
        leading, layout = list[_Known](), order.layout
        for key in order.keys:
            if (known := self._knows(key, layout)) is None:
                break
            self._known.move_to_end(key)
            layout = known.layout  # the same object, most often, of the next one
            leading.append(known)
        return leading

    def _knows(self, key: bytes, layout: ChunkLayout) -> _Known | None:
        """Return how to read a record, if that is known for who expects this layout: any key may be asked for."""
        known = self._known.get(key)
        return known if known is not None and (known.layout is layout or known.layout == layout) else None

    def _lend(self, keys: Sequence[bytes], known: Sequence[_Known]) -> list[native.IndexPlace]:
        """Keep the leading records that are on devices where they are."""
        pool, lent = self._tiers.pool, list[native.IndexPlace]()
        for part in parts_of(len(known)):
            assert isinstance(pool, DevicePool)
            lengths = [each.length for each in known[part.start : part.stop]]
            with self._tiers.lock:
                lent += pool.lend_extents(keys[part.start : part.stop], lengths)
            if len(lent) < part.stop:
                break
        return lent

    def _return(self, lent: Sequence[native.IndexPlace]) -> None:
        pool = self._tiers.pool
        for part in parts_of(len(lent)):
            assert isinstance(pool, DevicePool)
            with self._tiers.lock:
                pool.return_extents(lent[part.start : part.stop])


def _described(key: bytes, stored: Stored, layout: ChunkLayout) -> _Known | None:
    """Return how to read a record; None of one that devices cannot bring to where it is used."""
    try:
        head = parse_head(stored.head)
        head.expect(key, layout)
        slices = head.slices
    except RecordError:
        return None
    row_bytes = layout.tokens * layout.vector_length
    whole = len(slices) == layout.layers and bool((slices["encoded_length"] == row_bytes).all())
    if head.codec != native.Codec.NONE or not whole or not begins_in_blocks(head.head_length):
        return None
    return _Known(layout, stored.length, head.head_length, slices["checksum"].astype(np.uint32).tobytes())


@dataclass(frozen=True)
class _Share:
    """What one device has of an order: which chunks, and the read of all their layers."""

    disk: Disk
    chunks: npt.NDArray[np.int64]
    pages: Pages


class _Reading:
    """One order on its way: one request to each device."""

    def __init__(
        self,
        tiers: Tiers,
        metrics: Metrics,
        job: Job,
        order: PageOrder,
        lent: Sequence[native.IndexPlace],
        known: Sequence[_Known],
    ) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._job = job
        self._order = order
        self._part_bytes = order.layout.tokens * order.layout.vector_length
        self._left = np.full(order.layout.layers, len(order.keys), np.uint32)
        self._stop = np.zeros(1, np.uint32)
        self._shares = self._divided(lent, known)
        self._under_way = 0
        self._quiet = asyncio.Event()

    def _divided(self, lent: Sequence[native.IndexPlace], known: Sequence[_Known]) -> list[_Share]:
        order, pool, shares = self._order, self._tiers.pool, list[_Share]()
        layers = np.array(order.first, np.uint64)
        bodies = [
            entry.extent * BLOCK_BYTES + native.OBJECT_HEADER_BYTES + each.body
            for entry, each in zip(lent, known, strict=True)
        ]
        extents, devices = np.array(bodies, np.uint64), np.array([entry.device for entry in lent], np.uint8)
        every = np.frombuffer(b"".join([each.checksums for each in known]), np.uint32).reshape(-1, len(layers))
        for disk in pool.disks if isinstance(pool, DevicePool) else ():
            mine = np.flatnonzero(devices == disk.number)
            if not len(mine):
                continue
            checksums = np.ascontiguousarray(every[mine].T)
            pages = Pages(
                size=order.layout.vector_length,
                stride=order.stride,
                layers=layers,
                extents=extents[mine],
                blocks=order.blocks[mine],
                checksums=checksums,
                verdicts=np.full_like(checksums, Result.SKIPPED),
                left=self._left,
                word=order.word,
                stop=self._stop,
            )
            shares.append(_Share(disk, mine, pages))
        return shares

    async def run(self) -> Placed:
        """Read, and return once nothing is under way, whatever the time: until then it may still land."""
        with self._job.interruptible(self._give_up):
            for share in self._shares:
                self._request(share)
            left_s = (self._job.deadline_ns - time.monotonic_ns()) / 1e9
            late = asyncio.get_running_loop().call_later(left_s, self._give_up)
            try:
                if self._under_way:
                    await self._quiet.wait()
            finally:
                late.cancel()
        delivered: Flags = np.zeros((self._order.layout.layers, len(self._order.keys)), np.bool_)
        rotten = []
        for share in self._shares:
            delivered[:, share.chunks] = share.pages.verdicts == Result.OK
            rotten += share.chunks[(share.pages.verdicts == Result.CHECKSUM).any(axis=0)].tolist()
        size = int(delivered.sum()) * self._part_bytes
        self._metrics.tier_bytes += size
        self._metrics.page_bytes += size
        stop = None
        if not delivered.all():
            try:
                self._job.check()
            except Stop as error:
                stop = error
        return Placed(delivered, rotten, stop)

    def _give_up(self) -> None:
        """Have no further part begun."""
        self._stop[0] = 1

    def _request(self, share: _Share) -> None:
        """Have a device bring all of what it has."""
        operation = Operation(
            OperationKind.READ, 0, self._part_bytes, self._order.address, Priority.FOREGROUND,
            partial(self._note_end, share), pages=share.pages,
        )  # fmt: skip
        self._under_way += 1
        with self._tiers.lock:
            share.disk.submit_read(operation)
        self._metrics.page_requests += 1

    def _note_end(self, share: _Share, operation: Operation) -> None:
        """Count what a device has brought; in the pool's thread, with its lock held."""
        share.disk.note_read(operation)
        self._tiers.later(self._ended)

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()
