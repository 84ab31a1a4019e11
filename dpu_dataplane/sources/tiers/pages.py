"""Loads of pages from devices of the local tiers straight into an engine's paged memory.

A record whose slices are an engine's pages (``StoreRequest.plain``) is found, evicted and recovered like any other;
only its reads differ. All chunks on a device are one request: the device's thread reads layer by layer, scatters into
pages, verifies checksums, and reports leading layers. No byte passes through memory of the pool.
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

from dpu_dataplane.interference import TURN_S
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.found import Stored
from dpu_dataplane.sources.source import LoadedPages, PageLoader, PageRequest, Resources
from dpu_dataplane.sources.tiers.prefetcher import Prefetcher
from dpu_dataplane.sources.tiers.tiers import Tiers, begins_in_blocks, ranges_of
from shadowserve import native
from shadowserve.block import Operation, OperationKind, Pages, Priority
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import RecordError
from shadowserve.native import Result
from shadowserve.pieces import Flags
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.disk import Disk
from shadowserve.pool.volume.format import BLOCK_BYTES
from shadowserve.record import parse_header

_KNOWN_MAX: Final = 65_536  # record layouts that are cached: 16 Mi tokens at 256 tokens a chunk


class _Known(NamedTuple):
    """How to read a record: layout, length, offset of the body, and the 4-byte checksum of each layer."""

    layout: ChunkLayout
    length: int
    body: int
    checksums: bytes


class DevicePageLoader(PageLoader):
    """Loads pages from the pool's devices. Used on the event loop."""

    def __init__(self, tiers: Tiers, prefetcher: Prefetcher, resources: Resources) -> None:
        self._tiers = tiers
        self._prefetcher = prefetcher
        self._budget, self._metrics = resources.budget, resources.metrics
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def register(self, memory: memoryview) -> None:
        _pool(self._tiers).register(memory)

    def unregister(self, memory: memoryview) -> None:
        _pool(self._tiers).unregister(memory)

    async def load(self, job: Job, request: PageRequest) -> LoadedPages:
        known = await self._describe(request)
        lent = self._lend(request.keys, known)
        try:
            async with self._prefetcher.pausing_for(job, request.keys):
                loaded = await self._load_in_turns(job, request, lent, known)
            for index in loaded.corrupt:  # or the record was replaced by another one of the same key
                self._known.pop(request.keys[index], None)
            return loaded
        finally:
            self._return(lent)

    async def _load_in_turns(
        self, job: Job, request: PageRequest, lent: Sequence[native.IndexPlace], known: Sequence[_Known]
    ) -> LoadedPages:
        """Load lent records: all at once, or, beside an engine that decodes, as many as a turn of the budget allows."""
        delivered: Flags = np.zeros((request.layout.layers, len(request.keys)), np.bool_)
        corrupt = list[int]()
        first = 0
        while first < len(lent):
            rate = self._budget.rate
            count = max(int(rate * TURN_S) // request.layout.raw_bytes, 1) if rate else len(lent)
            end = min(first + count, len(lent))
            try:
                async with self._budget.turn(Mover.PAGE_LOAD, (end - first) * request.layout.raw_bytes, job) as turn:
                    some = request if end - first == len(request.keys) else request.part(first, end)
                    load = _Load(self._tiers, self._metrics, job, some, lent[first:end], known[first:end])
                    loaded = await load.run()
                    turn.moved_bytes = int(loaded.delivered.sum()) * request.layout.raw_bytes // request.layout.layers
            except Stop as stop:
                return LoadedPages(delivered, corrupt, stop)
            delivered[:, first:end] = loaded.delivered[:, : end - first]
            corrupt += [first + index for index in loaded.corrupt]
            if loaded.stop is not None or not loaded.delivered[:, : end - first].all():
                return LoadedPages(delivered, corrupt, loaded.stop)
            first = end
        return LoadedPages(delivered, corrupt, None)

    async def _describe(self, request: PageRequest) -> list[_Known]:
        """Return how to read the leading chunks that the pool has as pages; look up those that are not cached."""
        known = self._leading(request)
        if len(known) < len(request.keys):
            unknown = [key for key in request.keys if self._cached(key, request.layout) is None]
            found, reads = await self._tiers.look_up(unknown)
            await self._tiers.await_headers(reads)
            for key, stored in zip(unknown, found, strict=True):
                if isinstance(stored, Stored) and (known_now := _describe(key, stored, request.layout)) is not None:
                    self._known[key] = known_now
            while len(self._known) > max(_KNOWN_MAX, len(request.keys)):
                self._known.popitem(last=False)
            known = self._leading(request)
        return known

    def _leading(self, request: PageRequest) -> list[_Known]:
        """Return the cached entries before the first missing one, and mark them as used."""
        leading, layout = list[_Known](), request.layout
        for key in request.keys:
            if (known := self._cached(key, layout)) is None:
                break
            self._known.move_to_end(key)
            layout = known.layout
            leading.append(known)
        return leading

    def _cached(self, key: bytes, layout: ChunkLayout) -> _Known | None:
        """Return the cached entry if it has the layout that the caller expects: callers may name any key."""
        known = self._known.get(key)
        return known if known is not None and (known.layout is layout or known.layout == layout) else None

    def _lend(self, keys: Sequence[bytes], known: Sequence[_Known]) -> list[native.IndexPlace]:
        """Borrow the extents of the leading records on devices, so that they stay in place."""
        pool, lent = _pool(self._tiers), list[native.IndexPlace]()
        for part in ranges_of(len(known)):
            lengths = [each.length for each in known[part.start : part.stop]]
            with self._tiers.lock:
                lent += pool.lend_extents(keys[part.start : part.stop], lengths)
            if len(lent) < part.stop:
                break
        return lent

    def _return(self, lent: Sequence[native.IndexPlace]) -> None:
        pool = _pool(self._tiers)
        for part in ranges_of(len(lent)):
            with self._tiers.lock:
                pool.return_extents(lent[part.start : part.stop])


def _pool(tiers: Tiers) -> DevicePool:
    assert isinstance(tiers.pool, DevicePool), "pages are loaded from devices only"
    return tiers.pool


def _describe(key: bytes, stored: Stored, layout: ChunkLayout) -> _Known | None:
    """Return how to read a record; None if it does not hold pages."""
    try:
        header = parse_header(stored.header)
        header.expect(key, layout)
        slices = header.slices
    except RecordError:
        return None
    row_bytes = layout.tokens * layout.vector_length
    whole = len(slices) == layout.layers and bool((slices["encoded_length"] == row_bytes).all())
    if header.codec != native.Codec.NONE or not whole or not begins_in_blocks(header.header_length):
        return None
    return _Known(layout, stored.length, header.header_length, slices["checksum"].astype(np.uint32).tobytes())


@dataclass(frozen=True)
class _Share:
    """The chunks of a request that one device has, and the read of all their layers."""

    disk: Disk
    chunks: npt.NDArray[np.int64]
    pages: Pages


class _Load:
    """One page request in progress: one read on each device."""

    def __init__(
        self,
        tiers: Tiers,
        metrics: Metrics,
        job: Job,
        request: PageRequest,
        lent: Sequence[native.IndexPlace],
        known: Sequence[_Known],
    ) -> None:
        self._tiers = tiers
        self._metrics = metrics
        self._job = job
        self._request = request
        self._row_bytes = request.layout.tokens * request.layout.vector_length
        self._chunks_left = np.full(request.layout.layers, len(request.keys), np.uint32)
        self._stop = np.zeros(1, np.uint32)
        self._shares = self._divide(lent, known)
        self._pending = 0
        self._quiet = asyncio.Event()

    def _divide(self, lent: Sequence[native.IndexPlace], known: Sequence[_Known]) -> list[_Share]:
        request, shares = self._request, list[_Share]()
        layers = np.array(request.first, np.uint64)
        bodies = [
            entry.extent * BLOCK_BYTES + native.OBJECT_HEADER_BYTES + each.body
            for entry, each in zip(lent, known, strict=True)
        ]
        extents, devices = np.array(bodies, np.uint64), np.array([entry.device for entry in lent], np.uint8)
        every = np.frombuffer(b"".join([each.checksums for each in known]), np.uint32).reshape(-1, len(layers))
        for disk in _pool(self._tiers).disks:
            mine = np.flatnonzero(devices == disk.number)
            if not len(mine):
                continue
            checksums = np.ascontiguousarray(every[mine].T)
            pages = Pages(
                size=request.layout.vector_length,
                stride=request.stride,
                layers=layers,
                extents=extents[mine],
                blocks=request.blocks[mine],
                checksums=checksums,
                verdicts=np.full_like(checksums, Result.SKIPPED),
                left=self._chunks_left,
                word=request.word,
                stop=self._stop,
            )
            shares.append(_Share(disk, mine, pages))
        return shares

    async def run(self) -> LoadedPages:
        """Read, and return once no read is in progress, even after the deadline: a read writes until it has ended."""
        with self._job.interruptible(self._give_up):
            for share in self._shares:
                self._submit(share)
            left_s = (self._job.deadline_ns - time.monotonic_ns()) / 1e9
            late = asyncio.get_running_loop().call_later(left_s, self._give_up)
            try:
                if self._pending:
                    await self._quiet.wait()
            finally:
                late.cancel()
        delivered: Flags = np.zeros((self._request.layout.layers, len(self._request.keys)), np.bool_)
        corrupt = []
        for share in self._shares:
            delivered[:, share.chunks] = share.pages.verdicts == Result.OK
            corrupt += share.chunks[(share.pages.verdicts == Result.CHECKSUM).any(axis=0)].tolist()
        size = int(delivered.sum()) * self._row_bytes
        self._metrics.totals["tier_bytes"] += size
        self._metrics.totals["page_bytes"] += size
        stop = None
        if not delivered.all():
            try:
                self._job.check()
            except Stop as error:
                stop = error
        return LoadedPages(delivered, corrupt, stop)

    def _give_up(self) -> None:
        self._stop[0] = 1

    def _submit(self, share: _Share) -> None:
        operation = Operation(
            OperationKind.READ, 0, self._row_bytes, self._request.address, Priority.FOREGROUND,
            partial(self._note_read, share), pages=share.pages,
        )  # fmt: skip
        self._pending += 1
        with self._tiers.lock:
            share.disk.submit_read(operation)
        self._metrics.totals["page_requests"] += 1

    def _note_read(self, share: _Share, operation: Operation) -> None:
        """Count a finished read; on the pool's thread, with its lock held."""
        share.disk.note_read(operation)
        self._tiers.later(self._end_read)

    def _end_read(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._quiet.set()
