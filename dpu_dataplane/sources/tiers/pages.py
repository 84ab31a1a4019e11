"""Chunks of pages on devices of the tiers, brought straight into an engine's paged memory.

A record whose slices are as the engine's pages are (``StoreRequest.plain``) is an object of the pool like any other: it
is found, evicted and recovered with the others. What is special is how it is read. A layer of all chunks is one request
to each device, whatever the number of blocks; the device's thread spreads it over pages, and compares what came with
the record's checksums. No byte passes through memory of the pool, and no core copies any.

A layer is requested when one before it has come, so that only few are under way when a job ends early: what is under
way cannot be called back, and has to be waited for, since until then it may still land.
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

_LAYERS_AHEAD: Final = 4
"""Requested at a time: a device has the next when it is done with one, and a job that ends waits for no more."""
_KNOWN_MAX: Final = 65_536
"""Records of which it is remembered how to read them: 16 Mi tokens at 256 a chunk."""


class _Known(NamedTuple):
    """How to read a record: its length, where its body begins, and the checksum of each layer."""

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
            return await _Reading(self._tiers, self._metrics, job, order, extents, known).run()
        finally:
            self._return(extents)

    async def _learn(self, order: PageOrder) -> int:
        """Find out how to read records that are not known; return how many leading ones are, as pages."""
        for key in order.keys:
            if key in self._known:
                self._known.move_to_end(key)
        unknown = [key for key in order.keys if key not in self._known]
        if unknown and isinstance(self._tiers.pool, DevicePool):
            found, reads = await self._tiers.look(unknown)
            await self._tiers.await_heads(reads)
            for key, stored in zip(unknown, found, strict=True):
                if isinstance(stored, Stored) and (known := _described(key, stored, order.layout)) is not None:
                    self._known[key] = known
            while len(self._known) > max(_KNOWN_MAX, len(order.keys)):
                self._known.popitem(last=False)
        return next((index for index, key in enumerate(order.keys) if key not in self._known), len(order.keys))

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
    return _Known(stored.length, head.head_length, slices["checksum"].astype(np.uint32))


@dataclass(frozen=True)
class _Share:
    """What one device has of an order: which chunks, and how to read a layer of all of them.

    Attributes:
        checksums, verdicts: [layer, chunk of these].
    """

    disk: Disk
    chunks: npt.NDArray[np.int64]
    pages: Pages
    checksums: npt.NDArray[np.uint32]
    verdicts: npt.NDArray[np.uint32]


class _Reading:
    """One order on its way."""

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
        self._row_bytes = order.layout.tokens * order.layout.vector_length
        self.delivered: Flags = np.zeros((order.layout.layers, len(order.keys)), np.bool_)
        self._shares = [self._share(disk, extents, known) for disk in dict.fromkeys(each.disk for each in extents)]
        self._left = [len(self._shares)] * order.layout.layers
        self._layers = 0  # leading ones that have come
        self._failed = False
        self._event = asyncio.Event()

    def _share(self, disk: Disk, extents: Sequence[Extent], known: Sequence[_Known]) -> _Share:
        chunks = np.array([index for index, extent in enumerate(extents) if extent.disk is disk], np.int64)
        bodies = [extents[index].offset + native.OBJECT_HEADER_BYTES + known[index].body for index in chunks]
        paging = self._order.paging
        pages = Pages(paging.page_bytes, paging.stride, np.array(bodies, np.uint64), self._order.blocks[chunks])
        checksums = np.ascontiguousarray(np.stack([known[index].checksums for index in chunks], axis=1))
        return _Share(disk, chunks, pages, checksums, np.full_like(checksums, Result.SKIPPED))

    async def run(self) -> Placed:
        """Read layer after layer; return once nothing is under way."""
        requested, count = 0, self._order.layout.layers
        while True:
            while requested < count and requested - self._layers < _LAYERS_AHEAD and not self._is_over():
                self._request(requested)
                requested += 1
            if self._layers == requested:
                break
            self._event.clear()
            await self._event.wait()  # whatever the time: until all has come, it may still land
        whole = sum(len(share.chunks) for share in self._shares) == len(self._order.keys)
        rotten = [
            int(chunk)
            for share in self._shares
            for chunk in share.chunks[(share.verdicts == Result.CHECKSUM).any(axis=0)]
        ]
        size = int(self.delivered.sum()) * self._row_bytes
        self._metrics.tier_bytes += size
        self._metrics.page_bytes += size
        if self.delivered.all() and whole:
            return Placed(self.delivered, rotten, None)
        try:
            self._job.check()
        except Stop as stop:
            return Placed(self.delivered, rotten, stop)
        return Placed(self.delivered, rotten, None)

    def _is_over(self) -> bool:
        return self._failed or self._job.cancelled or time.monotonic_ns() >= self._job.deadline_ns

    def _request(self, layer: int) -> None:
        """Have every device bring a layer of what it has: one request each."""
        order = self._order
        for share in self._shares:
            operation = Operation(
                OperationKind.READ,
                layer * self._row_bytes,
                self._row_bytes,
                order.address + order.paging.first[layer],
                Priority.FOREGROUND,
                partial(self._note_end, layer, share),
                pages=share.pages,
                checksums=share.checksums[layer],
                verdicts=share.verdicts[layer],
            )
            with self._tiers.lock:
                share.disk.submit_read(operation)
            self._metrics.page_requests += 1

    def _note_end(self, layer: int, share: _Share, operation: Operation) -> None:
        """Count what a device has brought; in the pool's thread, with its lock held."""
        share.disk.note_read(operation)
        self._tiers.later(self._take, layer, share, operation.error is None)

    def _take(self, layer: int, share: _Share, came: bool) -> None:
        sound = share.verdicts[layer] == Result.OK if came else np.zeros(len(share.chunks), np.bool_)
        self.delivered[layer, share.chunks] = sound
        self._failed |= not sound.all()
        self._left[layer] -= 1
        before = self._layers
        while self._layers < len(self._left) and not self._left[self._layers]:
            self._layers += 1
        if self._layers > before:
            self._tell()
        self._event.set()

    def _tell(self) -> None:
        """Say how many leading layers are in place of all chunks."""
        there = self.delivered[: self._layers].all(axis=1)
        if self._order.word is not None and (leading := int(np.logical_and.accumulate(there).sum())):
            native.progress_tell(self._order.word, leading)
