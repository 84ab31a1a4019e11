"""Prefetcher: brings the records of waiting requests into memory before the requests run (TierKV, sections 3.2 to 3.4).

:class:`~shadowserve.pool.prefetch_policy.PrefetchPolicy` decides what is prefetched and when, from the measured
throughput of each link: from a device; from the source below, as stored bytes; and from a bucket behind it. A record
enters the pool once all of its checksums are right. Fetches go first: while one waits, no prefetch begins, and one in
progress stops at its next part, unless the fetch wants this record. Records that are not fetched soon after their
request has left its queue are released, and counted as wasted.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Final, NamedTuple

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover, Turn
from dpu_dataplane.sources.found import Cold, Stored
from dpu_dataplane.sources.source import Resources, Source, WaitingRequest, questions
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of, begins_in_blocks, ranges_of
from shadowserve.errors import RecordError, StorageError
from shadowserve.native import Result
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.pool.prefetch_policy import Hop, PrefetchPolicy, Waiting
from shadowserve.pool.types import DEFAULT_TENANT, Item, Lease
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import verify

_TURN_S: Final = 0.05  # seconds between two checks for requests that are due, or that fit by now
_LOCATE_S: Final = 1.0  # seconds after which a request's records are located again
_LINGER_S: Final = 10.0
"""Seconds from a request's leaving its queue to its fetch: as long as hosts wait for a load by default."""
_PART_BYTES: Final = 1 << 20
"""Size of one part of a record. A fetch may have to wait for one part: 8 ms at 1 Gbit/s."""
_READS: Final = 4  # concurrent reads of devices: enough to hide the latency
_RECEIVED: Final = 2  # concurrent receives from below: enough to hide the latency
_PROTECTED_PER_TURN: Final = 64
"""Requests whose records are protected from eviction in one turn; that takes some milliseconds."""
_COLD_ASSUMED: Final = Hop(1e8)
"""Assumed throughput of a bucket: slow, so that requests are located early enough to find cold records."""
_WINDOW_S: Final = 2.0
"""Seconds of transfer after which older measurements count half: throughput and competing users change in seconds."""
UNKNOWN: Final = Hop(1e9)
"""Assumed throughput before the first measurement; a link that is not measured carries one record first."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """A request that waits, or has left its queue a moment ago."""

    waiting: WaitingRequest  # the host's information on the request
    keys: list[bytes]  # keys of its records, chunk by chunk
    candidates: list[dict[bytes, int]]  # for each link, the records that may be prefetched over it, with their bytes
    located_at: float = -math.inf  # time at which its records were located
    protected_until: float = 0.0  # time until which its records are protected from eviction; 0 to protect them again
    left_at: float = math.inf  # time at which it left its queue
    prefetched: set[bytes] = field(default_factory=set)  # records that were prefetched for it, and not fetched yet
    unsound: set[bytes] = field(default_factory=set)  # records whose checksums are wrong


@dataclass(eq=False)
class _Prefetched:
    """A prefetched record in memory; ``item`` is held if devices have the record as well."""

    request: _Request
    size: int
    item: Item | None


class _FetchGate:
    """Fetches in progress, which prefetches wait for, and the records that fetches wait for."""

    def __init__(self) -> None:
        self.fetches = 0
        self.urgent: set[bytes] = set()
        self._changed = asyncio.Condition()

    async def check(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)


class QueuedRecord(NamedTuple):
    """A record that waits for a link: the request that it is prefetched for, its key, and its size in bytes."""

    request: Hashable
    key: bytes
    size: int


class LinkEstimator:
    """A queue of records for one link, and an estimate of the link's throughput."""

    def __init__(self, metrics: Metrics, label: str, concurrency: int) -> None:
        self._metrics = metrics
        self.label = label
        self.concurrency = concurrency
        self.queued_bytes = 0  # bytes of records that wait or are in progress
        self.assumed = UNKNOWN  # throughput until the first measurement
        self._queue: asyncio.Queue[QueuedRecord | None] = asyncio.Queue()
        self._transfers = 0
        self._measured_at = 0.0
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def measured(self) -> bool:
        return self._bytes > 0 and self._seconds > 0

    @property
    def throughput(self) -> Hop:
        return Hop(self._bytes / self._seconds) if self.measured else self.assumed

    def enqueue(self, record: QueuedRecord) -> None:
        self.queued_bytes += record.size
        self._queue.put_nowait(record)

    async def next(self) -> QueuedRecord | None:
        """Wait for the next record; None after :meth:`close`."""
        return await self._queue.get()

    def close(self) -> None:
        """Drop the queue and end its readers. Transfers in progress continue."""
        while not self._queue.empty():
            self._queue.get_nowait()
        for _ in range(self.concurrency):
            self._queue.put_nowait(None)

    def begin_transfer(self) -> None:
        if not self._transfers:
            self._measured_at = time.monotonic()
        self._transfers += 1

    def end_transfer(self, size: int) -> None:
        now = time.monotonic()
        passed, self._measured_at = now - self._measured_at, now
        self._transfers -= 1
        self._metrics.prefetch_seconds[self.label] += passed
        self._metrics.prefetch_bytes[self.label] += size
        self._seconds += passed
        self._bytes += size
        if self._seconds > _WINDOW_S:
            self._seconds, self._bytes = self._seconds / 2, self._bytes / 2


class Prefetcher:
    """Prefetches the records of waiting requests. Used on the event loop.

    ``part_timeout_s``: seconds that a device, or the source below, may take for one part of a record.
    """

    def __init__(self, tiers: Tiers, below: Source | None, config: DataPlaneConfig, resources: Resources) -> None:
        assert config.tiers is not None
        self._tiers = tiers
        self._below = below
        ahead_s = math.inf if config.tiers.ahead_s is None else config.tiers.ahead_s
        self._policy = PrefetchPolicy(config.tiers.ahead_requests, ahead_s)
        self._metrics, self._budget = resources.metrics, resources.budget
        self._turns: dict[bytes, Turn] = {}  # of records in progress
        self._part_timeout_s = config.command_timeout_s
        self._device = LinkEstimator(self._metrics, "device", _READS)
        self._cold = LinkEstimator(self._metrics, "cold", _RECEIVED)
        self._cold.assumed = _COLD_ASSUMED
        self._links = [self._device] if tiers.has_devices else []
        if below is not None:
            self._links += [LinkEstimator(self._metrics, "storage", _RECEIVED), self._cold]
        for link in self._links:
            self._metrics.prefetch_bytes[link.label] = 0
            self._metrics.prefetch_seconds[link.label] = 0.0
        self._requests: dict[Hashable, _Request] = {}
        self._order: list[_Request] = []  # of requests that wait
        self._prefetched: dict[bytes, _Prefetched] = {}
        self._prefetched_bytes = 0  # of these and of records in progress
        self._moving: dict[bytes, asyncio.Future[None] | None] = {}  # a future once the transfer has begun
        self._gate = _FetchGate()
        self._wake = asyncio.Event()
        self._closing = False
        self._jobs: set[Job] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics.gauges["tier_expected_requests"] = (
            "Requests that wait in engines' queues, as hosts report them",
            lambda: float(len(self._order)),
        )

    # ---- Start and stop

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(), name="prefetch")]
        self._tasks += [
            asyncio.create_task(self._transfer_all(link), name=f"prefetch from {link.label}")
            for link in self._links
            for _ in range(link.concurrency)
        ]

    async def close(self) -> None:
        """End all transfers and release all records; before the pool and the source below are closed."""
        self._closing = True
        self._wake.set()
        for link in self._links:
            link.close()
        for job in self._jobs:
            job.cancel()
        await self._gate.check()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for request in list(self._requests.values()):
            self._forget(request)

    # ---- Waiting requests and fetches

    def expect(self, requests: Sequence[WaitingRequest]) -> None:
        """Replace the waiting requests; see :meth:`Source.expect`."""
        now, named = time.monotonic(), {each.name for each in requests}
        for request in self._order:
            if request.waiting.name not in named:
                request.left_at = now
        self._order = []
        for each in requests:
            known = self._requests.get(each.name)
            if known is None and len(self._requests) >= REQUESTS_MAX:
                continue
            if known is None or known.waiting.chains != each.chains:
                known = self._requests[each.name] = self._new(each, known)
            known.waiting, known.left_at = each, math.inf
            self._order.append(known)
        with self._tiers.lock:
            self._tiers.pool.next_use.order(request.waiting.name for request in self._order)
        self._wake.set()

    def _new(self, waiting: WaitingRequest, old: _Request | None) -> _Request:
        """Make a request; an ``old`` one with other chains passes its prefetched records on."""
        request = _Request(waiting, _interleaved(waiting), [{} for _ in self._links])
        if old is not None:
            request.prefetched, request.unsound = old.prefetched, old.unsound
            for key in request.prefetched:
                self._prefetched[key].request = request
        return request

    @contextlib.asynccontextmanager
    async def pausing_for(self, job: Job, keys: Iterable[bytes]) -> AsyncIterator[None]:
        """Pause for a fetch while in this context, after prefetches in progress of its keys; Stop ends the wait."""
        self._gate.fetches += 1
        try:
            if self._moving:
                await job.within(self._finish(set(keys)), "waiting for a prefetch in progress")
            yield
        finally:
            self._gate.fetches -= 1
            await self._gate.check()

    async def _finish(self, keys: set[bytes]) -> None:
        mine = {key: moving for key, moving in self._moving.items() if moving is not None and key in keys}
        if not mine:
            return
        self._gate.urgent |= mine.keys()
        for key in mine.keys() & self._turns.keys():
            self._budget.shared.hasten(self._turns[key])
        try:
            await self._gate.check()
            await asyncio.wait([moving for moving in mine.values() if moving is not None])
        finally:
            self._gate.urgent -= mine.keys()

    async def _wait_for_fetches(self, key: bytes) -> None:
        await self._gate.wait_for(lambda: not self._gate.fetches or key in self._gate.urgent or self._closing)

    @contextlib.asynccontextmanager
    async def _turn_of(self, request: _Request, key: bytes, size: int, *, first: bool = True) -> AsyncIterator[Turn]:
        """Wait for the budget to grant bytes of a record; with the precedence of a fetch if one waits for the record.

        Stop if there is no grant in time, or the request began before the first bytes of the record.
        """

        def note_turn(turn: Turn) -> None:
            self._turns[key] = turn
            if key in self._gate.urgent:
                self._budget.shared.hasten(turn)

        try:
            with self._job() as job:
                async with self._budget.turn(Mover.PREFETCH, size, job, note_turn) as turn:
                    if first and turn.waited and request.left_at < math.inf and key not in self._gate.urgent:
                        turn.moved_bytes = 0
                        self._budget.drop(Mover.PREFETCH, "request_begun")
                        raise Stop(pb.OUTCOME_CANCELLED, "its request has begun")
                    yield turn
        finally:
            self._turns.pop(key, None)

    @contextlib.contextmanager
    def _job(self) -> Iterator[Job]:
        """Make a job for one part of a record; :meth:`close` cancels it."""
        job = Job("", "", self._part_timeout_s)
        self._jobs.add(job)
        try:
            yield job
        finally:
            self._jobs.discard(job)

    def note_use(self, keys: Iterable[bytes]) -> None:
        """Release prefetched records that a fetch uses: the fetch holds them itself."""
        for key in keys:
            if key in self._prefetched:
                self._release(key)

    def _release(self, key: bytes) -> int:
        prefetched = self._prefetched.pop(key)
        prefetched.request.prefetched.discard(key)
        self._prefetched_bytes -= prefetched.size
        if prefetched.item is not None:
            with self._tiers.lock:
                self._tiers.pool.release(prefetched.item)
        return prefetched.size

    # ---- Planning

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                await self._plan()
            except Exception:  # a bug may cost speed, and nothing else
                logger.exception("a bug in prefetching, please report it")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TURN_S if self._requests else None):
                    await self._wake.wait()

    async def _plan(self) -> None:
        now = time.monotonic()
        self._order = [request for request in self._order if self._still_waits(request, now)]
        for request in [each for each in self._requests.values() if each.left_at + _LINGER_S <= now]:
            self._forget(request)
        due = [request for request in self._order if request.protected_until - now < _LOCATE_S]
        for request in due[:_PROTECTED_PER_TURN]:
            self._protect(request, now)
            await asyncio.sleep(0)
        if self._links:
            await self._prefetch(now)

    async def _prefetch(self, now: float) -> None:
        """Locate the records of the next requests, and queue those that can arrive before their requests run."""
        links = [self._limited(link.throughput) for link in self._links]
        count, ahead_s = self._policy.reach(links)
        due = [
            request
            for index, request in enumerate(self._order)
            if index < count and (ahead_s == math.inf or request.waiting.begins_at - now <= ahead_s)
        ]
        for request in due:
            if now - request.located_at >= _LOCATE_S and not self._closing:
                request.located_at = now
                await self._locate(request)
        now = time.monotonic()
        waiting = [
            Waiting(
                request, max(request.waiting.begins_at - now, 0.0), [sum(each.values()) for each in request.candidates]
            )
            for request in due
            if request.left_at == math.inf
        ]
        for move in self._policy.plan(waiting, links, [link.queued_bytes for link in self._links]):
            assert isinstance(move.request, _Request)
            self._enqueue(move.request, move.hop, move.size)

    def _limited(self, throughput: Hop) -> Hop:
        rate = self._budget.rate
        return throughput._replace(bytes_per_s=min(throughput.bytes_per_s, rate)) if rate else throughput

    def _still_waits(self, request: _Request, now: float) -> bool:
        if request.left_at == math.inf and request.waiting.until <= now:
            request.left_at = now
        return request.left_at == math.inf

    def _protect(self, request: _Request, now: float) -> None:
        request.protected_until = min(request.waiting.until, now + 4 * _LOCATE_S) + _LINGER_S
        until_s = int(time.time() + request.protected_until - now) + 1
        name = request.waiting.name
        with self._tiers.lock:
            self._tiers.pool.next_use.publish(name, DEFAULT_TENANT, request.keys, until_s)

    def _forget(self, request: _Request) -> None:
        """Forget a request; prefetched records that were not fetched are wasted."""
        name = request.waiting.name
        if self._requests.get(name) is request:
            del self._requests[name]
            with self._tiers.lock:
                self._tiers.pool.next_use.withdraw(name)
        for key in list(request.prefetched):
            self._metrics.totals["prefetch_wasted_bytes"] += self._release(key)

    async def _locate(self, request: _Request) -> None:
        """Find the links over which a request's records can be prefetched."""
        candidates: list[dict[bytes, int]] = [{} for _ in self._links]
        absent, in_blocks = list[bytes](), list[bytes]()
        for part in ranges_of(len(request.keys)):
            with self._tiers.lock:
                for key in request.keys[part.start : part.stop]:
                    item = self._tiers.pool.peek(address_of(key))
                    if key in self._moving or key in request.unsound:
                        continue
                    if item is None or not item.header_bytes:
                        absent.append(key)
                    elif item.value is None:
                        candidates[0][key] = item.length
                        if begins_in_blocks(item.header_bytes):
                            in_blocks.append(key)
            await asyncio.sleep(0)
        for key in await self._tiers.paged(in_blocks) if in_blocks else ():
            candidates[0].pop(key, None)
        if self._below is not None and absent:
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(self._part_timeout_s):
                    await self._locate_below(self._below, absent, candidates[-2], candidates[-1])
        request.candidates = candidates

    async def _locate_below(
        self, source: Source, keys: Sequence[bytes], stored: dict[bytes, int], cold: dict[bytes, int]
    ) -> None:
        """Divide records into those that the source below has at hand, and those that it has in object storage."""
        for question in questions(keys):
            far: dict[bytes, int] = {}
            expected_ms = 1
            for key, found in zip(question, await source.find(question), strict=True):
                if isinstance(found, Stored):
                    stored[key] = found.length
                elif isinstance(found, Cold):
                    far[key], expected_ms = found.length, max(expected_ms, found.ms)
            if far:
                cold.update(far)
                self._cold.assumed = Hop(max(1.0, 1e3 * sum(far.values()) / expected_ms))
            elif self._cold.assumed is _COLD_ASSUMED:
                self._cold.assumed = UNKNOWN  # until a cold record is found

    def _enqueue(self, request: _Request, index: int, size: float) -> None:
        """Queue the first ``size`` bytes of a request's records for a link; only one record before a measurement."""
        link, candidates = self._links[index], request.candidates[index]
        for key, length in list(candidates.items()):
            if link.queued_bytes and not link.measured:
                return
            if length > size or self._prefetched_bytes + length > self._tiers.batch_bytes_max:
                return
            del candidates[key]
            if key in self._moving:
                continue
            size -= length
            self._prefetched_bytes += length
            self._moving[key] = None
            link.enqueue(QueuedRecord(request.waiting.name, key, length))

    # ---- Transfers

    async def _transfer_all(self, link: LinkEstimator) -> None:
        while (record := await link.next()) is not None:
            request = self._requests.get(record.request)
            try:
                if request is not None and request.left_at == math.inf:
                    await self._wait_for_fetches(record.key)
                    if request.left_at == math.inf and not self._closing:
                        self._moving[record.key] = asyncio.get_running_loop().create_future()
                        await (self._read if link is self._device else self._receive)(link, request, record)
            except (StorageError, Stop, TimeoutError, RecordError, MemoryError) as error:
                logger.debug("record %s was not prefetched: %s", record.key.hex(), error)
                if request is not None and isinstance(error, RecordError):
                    request.unsound.add(record.key)
            except Exception:  # as above
                logger.exception("a bug in prefetching, please report it")
            finally:
                link.queued_bytes -= record.size
                self._prefetched_bytes -= record.size
                moving = self._moving.pop(record.key)
                if moving is not None:
                    moving.set_result(None)
                self._wake.set()

    def _keep(self, request: _Request, key: bytes, size: int) -> None:
        if key in self._prefetched:
            self._release(key)
        item: Item | None = None
        if self._tiers.has_devices:  # without devices, NextUse alone protects it
            with self._tiers.lock:
                item = self._tiers.pool.peek(address_of(key))
                if item is None or item.value is None:
                    return
                self._tiers.pool.hold(item)
        self._prefetched[key] = _Prefetched(request, size, item)
        self._prefetched_bytes += size
        request.prefetched.add(key)
        request.protected_until = 0.0
        if self._requests.get(request.waiting.name) is not request:
            self._forget(request)  # the request ended meanwhile

    async def _read(self, link: LinkEstimator, request: _Request, record: QueuedRecord) -> None:
        async with self._turn_of(request, record.key, record.size) as turn:
            turn.moved_bytes = await self._read_now(link, request, record)

    async def _read_now(self, link: LinkEstimator, request: _Request, record: QueuedRecord) -> int:
        tiers, loop = self._tiers, asyncio.get_running_loop()
        read: asyncio.Future[Lease | None] = loop.create_future()

        def finish(lease: Lease | None) -> None:
            if read.done():
                tiers.release([lease])
            else:
                read.set_result(lease)

        with tiers.lock:
            item = tiers.pool.peek(address_of(record.key))
            if item is None or item.value is not None:
                return 0
            tiers.pool.read(item, 0, item.length, partial(tiers.later, finish))
            length = item.length
        link.begin_transfer()
        lease: Lease | None = None
        try:
            lease = await asyncio.wait_for(read, self._part_timeout_s)
        finally:
            link.end_transfer(0 if lease is None else length)
        if lease is None:
            return 0
        self._keep(request, record.key, length)
        tiers.release([lease])
        return length

    async def _receive(self, link: LinkEstimator, request: _Request, record: QueuedRecord) -> None:
        """Receive a record from the source below, part by part, if the pool has room for it now."""
        assert self._below is not None
        if self._tiers.has(record.key):  # a fetch was faster
            return
        if (memory := self._tiers.allocate(record.size)) is None:
            return
        try:
            for first in range(0, record.size, _PART_BYTES):
                await self._wait_for_fetches(record.key)
                part = memory[first : first + _PART_BYTES]
                async with self._turn_of(request, record.key, len(part), first=not first) as turn:
                    if not await self._receive_part(link, record.key, first, part):
                        turn.moved_bytes = 0
                        return
            header = await asyncio.to_thread(verify, memory, record.key)
            if self._tiers.add(record.key, memory, bytes(memory[: header.header_length])) is None:
                self._keep(request, record.key, record.size)
        finally:
            self._tiers.free(memory)

    async def _receive_part(self, link: LinkEstimator, key: bytes, first: int, memory: memoryview) -> bool:
        assert self._below is not None
        if self._closing:
            return False
        link.begin_transfer()
        size = 0
        try:
            with self._job() as job:
                if await self._below.receive(job, key, first, memory) is Result.OK:
                    size = len(memory)
        finally:
            link.end_transfer(size)
        return size > 0


def _interleaved(request: WaitingRequest) -> list[bytes]:
    """Return the keys of all chains: the first chunk of each, then the second."""
    return [key for keys in zip_longest(*(keys for _, keys in request.chains)) for key in keys if key is not None]
