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

from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.placing import PageOrder, Placed, Placing
from dpu_dataplane.sources.source import Stored
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of, parts_of
from shadowserve import native
from shadowserve.block import Operation, OperationKind, Pages, Priority
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import RecordError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.disk import Disk, Extent
from shadowserve.record import parse_head

__all__ = ["DevicePages"]

_KNOWN_MAX: Final = 65_536
"""Records of which it is remembered how to read them: 16 Mi tokens at 256 a chunk."""


class _Known(NamedTuple):
    """How to read a record of chunks of a layout: its length, where its body begins, the checksum of each layer."""

    layout: ChunkLayout
    length: int
    body: int
    checksums: npt.NDArray[np.uint32]


class DevicePages(Placing):
    """Reads for paged memory. To be used on the event loop.

    Args:
        tiers: with the pool.
        metrics: to count in.
    """

    def __init__(self, tiers: Tiers, metrics: Metrics) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def register(self, memory: memoryview) -> None:
        if isinstance(pool := self._tiers.pool, DevicePool):
            pool.register(memory)

    def unregister(self, memory: memoryview) -> None:
        if isinstance(pool := self._tiers.pool, DevicePool):
            pool.unregister(memory)

    async def place(self, job: Job, order: PageOrder) -> Placed:
        extents = self._lend(order.keys[: await self._learn(order)])
        try:
            known = [self._known[key] for key in order.keys[: len(extents)]]
            placed = await _Reading(self._tiers, self._metrics, job, order, extents, known).run()
            for index in placed.rotten:  # or it is another record by now, of the same key
                self._known.pop(order.keys[index], None)
            return placed
        finally:
            self._return(extents)

    def _knows(self, key: bytes, layout: ChunkLayout) -> bool:
        """Whether it is known how to read a record for who expects that layout: any key may be asked for."""
        return (known := self._known.get(key)) is not None and known.layout == layout

    async def _learn(self, order: PageOrder) -> int:
        """Find out how to read records that are not known; return how many leading ones are, as pages."""
        unknown = []
        for key in order.keys:
            if self._knows(key, order.layout):
                self._known.move_to_end(key)
            else:
                unknown.append(key)
        if unknown and isinstance(self._tiers.pool, DevicePool):
            found, reads = await self._tiers.look(unknown)
            await self._tiers.await_heads(reads)
            for key, stored in zip(unknown, found, strict=True):
                if isinstance(stored, Stored) and (known := _described(key, stored, order.layout)) is not None:
                    self._known[key] = known
            while len(self._known) > max(_KNOWN_MAX, len(order.keys)):
                self._known.popitem(last=False)
        strange = (index for index, key in enumerate(order.keys) if not self._knows(key, order.layout))
        return next(strange, len(order.keys))

    def _lend(self, keys: Sequence[bytes]) -> list[Extent]:
        """Keep the leading records that are on devices where they are, and count this as a use of them."""
        pool, extents = self._tiers.pool, list[Extent]()
        if not isinstance(pool, DevicePool):
            return extents
        for part in parts_of(len(keys)):
            with self._tiers.lock:
                for index in part:
                    item = pool.get(address_of(keys[index]))
                    extent = None if item is None else pool.lend_extent(item)
                    if item is None or extent is None or item.length != self._known[keys[index]].length:
                        if extent is not None:
                            pool.return_extent(extent)
                        return extents
                    extents.append(extent)
        return extents

    def _return(self, extents: Sequence[Extent]) -> None:
        pool = self._tiers.pool
        assert isinstance(pool, DevicePool) or not extents
        for part in parts_of(len(extents)):
            with self._tiers.lock:
                for index in part:
                    pool.return_extent(extents[index])  # type: ignore[attr-defined]


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
    if head.codec != native.Codec.NONE or not whole or (native.OBJECT_HEADER_BYTES + head.head_length) % 4096:
        return None
    return _Known(layout, stored.length, head.head_length, slices["checksum"].astype(np.uint32))


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
        extents: Sequence[Extent],
        known: Sequence[_Known],
    ) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._job = job
        self._order = order
        self._part_bytes = order.layout.tokens * order.layout.vector_length
        self._layers = np.array(order.first, np.uint64)
        self._left = np.full(order.layout.layers, len(order.keys), np.uint32)
        self._stop = np.zeros(1, np.uint32)
        self._shares = [self._share(disk, extents, known) for disk in dict.fromkeys(each.disk for each in extents)]
        self._under_way = 0
        self._quiet = asyncio.Event()

    def _share(self, disk: Disk, extents: Sequence[Extent], known: Sequence[_Known]) -> _Share:
        mine = [index for index, extent in enumerate(extents) if extent.disk is disk]
        bodies = [extents[index].offset + native.OBJECT_HEADER_BYTES + known[index].body for index in mine]
        checksums = np.ascontiguousarray(np.array([known[index].checksums for index in mine], np.uint32).T)
        chunks = np.array(mine, np.int64)
        pages = Pages(
            size=self._order.layout.vector_length,
            stride=self._order.stride,
            layers=self._layers,
            extents=np.array(bodies, np.uint64),
            blocks=self._order.blocks[chunks],
            checksums=checksums,
            verdicts=np.full_like(checksums, Result.SKIPPED),
            left=self._left,
            word=self._order.word,
            stop=self._stop,
        )
        return _Share(disk, chunks, pages)

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
