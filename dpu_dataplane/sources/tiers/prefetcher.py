"""What waiting requests will fetch, brought into memory before they run (TierKV, sections 3.2 to 3.4).

What is prefetched, and when, says :class:`~shadowserve.pool.prefetch_policy.PrefetchPolicy`, from what each hop really
carries: from a device into memory; from the source below, as stored bytes that nobody decodes; and from behind that,
where it has to fetch them itself. What goes meanwhile says :class:`~shadowserve.pool.next_use.NextUse`. A record enters
the pool once all of its checksums are right.

Whoever waits for a fetch goes first: nothing new is begun meanwhile, and what is under way stops at its next part,
unless it is what that fetch wants; for that it waits, rather than have it come twice.

Nothing stays for long that nobody comes for: what was prefetched for a request, and not fetched soon after that has
left its queue, is let go, and counted as wasted. All of it together takes no more of the memory than one batch may.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Final

from dpu_dataplane.interference import Granted, InterferenceBudget
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover, Turn
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Cold, Expected, Source, Stored
from dpu_dataplane.sources.tiers.hops import UNKNOWN, Carried, Carrier
from dpu_dataplane.sources.tiers.tiers import Tiers, address_of, begins_in_blocks, parts_of
from shadowserve.errors import RecordError, StorageError
from shadowserve.native import Result
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.pool.prefetch_policy import Hop, PrefetchPolicy, Waiting
from shadowserve.pool.terms import DEFAULT_TENANT, Item, Lease
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import verify

__all__ = ["Prefetcher"]

_TURN_S: Final = 0.05
"""Between two looks at what has become late, or fits by now."""
_LOOK_S: Final = 1.0
"""After so long it is looked anew where a request's records are: some have come, some have gone."""
_LINGER_S: Final = 10.0
"""From a request's leaving its queue to its fetch: as long as hosts wait for a load by default."""
_PART_BYTES: Final = 1 << 20
"""Received at a time: what a fetch that comes meanwhile may have to wait for, 8 ms at 1 Gbit/s."""
_READS: Final = 4
_RECEIVED: Final = 2
"""Records under way from devices, and from below: enough to hide one's latency behind the other."""
_HELD_AT_A_TIME: Final = 64
"""Requests whose records are held from eviction in one turn, some milliseconds of it."""
_COLD: Final = Hop(1e8)
"""What a bucket is taken for: looked for so much further ahead than storage, or nobody would know that it is slower."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """A request that waits, or has left its queue a moment ago.

    Attributes:
        keys: of its records, chunk by chunk.
        below: for each hop, records that may be prefetched over it, and their bytes.
        looked_at: when they were looked for.
        held_until: end of what keeps its records from eviction; 0: they are to be held anew.
        left_at: when it left its queue.
        prefetched: records that were prefetched for it, and were not fetched yet.
        unsound: records whose checksums are wrong.
    """

    expected: Expected
    keys: list[bytes]
    below: list[dict[bytes, int]]
    looked_at: float = -math.inf
    held_until: float = 0.0
    left_at: float = math.inf
    prefetched: set[bytes] = field(default_factory=set)
    unsound: set[bytes] = field(default_factory=set)


@dataclass(eq=False)
class _Prefetched:
    """A record that is in memory ahead of its fetch; ``item`` is held, of one that devices have as well."""

    request: _Request
    size: int
    item: Item | None


class Prefetcher:
    """Prefetches what waiting requests will fetch. To be used on the event loop.

    Args:
        tiers: with the pool, which has to be started before this.
        below: the source that has what the pool has not; None for none.
        prefetch: says what, and when.
        metrics: to count in.
        budget: that prefetch is held to.
        patience: seconds that a device, or the source below, may take for one part of a record.
    """

    def __init__(
        self,
        tiers: Tiers,
        below: Source | None,
        prefetch: PrefetchPolicy,
        metrics: Metrics,
        budget: InterferenceBudget,
        patience: float,
    ) -> None:
        self._tiers = tiers
        self._below = below
        self._policy = prefetch
        self._metrics = metrics
        self._budget = budget
        self._turns: dict[bytes, Turn] = {}  # that records under way wait for
        self._patience = patience
        self._device = Carrier("device", _READS)
        self._storage, self._cold = Carrier("storage", _RECEIVED), Carrier("cold", _RECEIVED)
        self._cold.assumed = _COLD
        self._hops = [self._device] if tiers.has_devices else []
        self._hops += [] if below is None else [self._storage, self._cold]
        self._requests: dict[Hashable, _Request] = {}
        self._order: list[_Request] = []  # of those that wait
        self._prefetched: dict[bytes, _Prefetched] = {}
        self._ahead_bytes = 0  # of these, and of what is on its way
        self._moving: dict[bytes, asyncio.Future[None] | None] = {}  # a future once it is under way
        self._fetches = 0
        self._urgent: set[bytes] = set()
        self._gate = asyncio.Condition()
        self._wake = asyncio.Event()
        self._closing = False
        self._jobs: set[Job] = set()
        self._tasks: list[asyncio.Task[None]] = []
        metrics.prefetches = lambda: {hop.label: (hop.carried_bytes, hop.carried_s) for hop in self._hops}
        metrics.gauges["tier_expected_requests"] = (
            "Requests that wait in engines' queues, as hosts say",
            lambda: float(len(self._order)),
        )

    # ---- Life

    def start(self) -> None:
        """Begin, once the pool is open."""
        self._tasks = [asyncio.create_task(self._run(), name="prefetch")]
        self._tasks += [
            asyncio.create_task(self._carry(hop), name=f"prefetch from {hop.label}")
            for hop in self._hops
            for _ in range(hop.at_a_time)
        ]

    async def close(self) -> None:
        """End what is under way, and let everything go; before the pool and the source below are closed."""
        self._closing = True
        self._wake.set()
        for hop in self._hops:
            hop.end()
        for job in self._jobs:
            job.cancel()
        async with self._gate:
            self._gate.notify_all()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for request in list(self._requests.values()):
            self._forget(request)

    # ---- What is told

    def expect(self, requests: Sequence[Expected]) -> None:
        """Take what waits, in its order; see :meth:`Source.expect`."""
        now, named = time.monotonic(), {each.name for each in requests}
        for request in self._order:
            if request.expected.name not in named:
                request.left_at = now
        self._order = []
        for each in requests:
            known = self._requests.get(each.name)
            if known is None and len(self._requests) >= REQUESTS_MAX:
                continue
            if known is None or known.expected.chains != each.chains:
                known = self._requests[each.name] = self._new(each, known)
            known.expected, known.left_at = each, math.inf
            self._order.append(known)
        with self._tiers.lock:
            self._tiers.pool.next_use.order(request.expected.name for request in self._order)
        self._wake.set()

    def _new(self, expected: Expected, old: _Request | None) -> _Request:
        """Return a request, which wants something else than before if it is known; what came for it stays its own."""
        request = _Request(expected, _side_by_side(expected), [{} for _ in self._hops])
        if old is not None:
            request.prefetched, request.unsound = old.prefetched, old.unsound
            for key in request.prefetched:
                self._prefetched[key].request = request
        return request

    @contextlib.asynccontextmanager
    async def giving_way(self, job: Job, keys: Iterable[bytes]) -> AsyncIterator[None]:
        """While somebody waits for a fetch, prefetch nothing; first wait for what is under way of these keys.

        Raises:
            Stop: cancelled, or out of time.
        """
        self._fetches += 1
        try:
            if self._moving:
                await job.within(self._arrive(set(keys)), "waiting for what is being prefetched")
            yield
        finally:
            self._fetches -= 1
            async with self._gate:
                self._gate.notify_all()

    async def _arrive(self, keys: set[bytes]) -> None:
        mine = {key: moving for key, moving in self._moving.items() if moving is not None and key in keys}
        if not mine:
            return
        self._urgent |= mine.keys()
        for key in mine.keys() & self._turns.keys():
            self._budget.hasten(self._turns[key])
        try:
            async with self._gate:
                self._gate.notify_all()
            await asyncio.wait([moving for moving in mine.values() if moving is not None])
        finally:
            self._urgent -= mine.keys()

    async def _allowed(self, key: bytes) -> None:
        """Wait while somebody waits for a fetch of something else."""
        async with self._gate:
            await self._gate.wait_for(lambda: not self._fetches or key in self._urgent or self._closing)

    @contextlib.asynccontextmanager
    async def _turn_of(self, request: _Request, key: bytes, size: int, *, first: bool = True) -> AsyncIterator[Granted]:
        """Wait for a turn to move bytes of a record within the budget; before others, where a fetch waits for them.

        Raises:
            Stop: it did not come in time, or this ends, or the request began before the first bytes of the record.
        """
        job = Job("", "", self._patience)
        self._jobs.add(job)

        def asked(turn: Turn) -> None:
            self._turns[key] = turn
            if key in self._urgent:
                self._budget.hasten(turn)

        try:
            async with self._budget.turn(Mover.PREFETCH, size, job, asked) as turn:
                if first and turn.waited and request.left_at < math.inf and key not in self._urgent:
                    turn.moved_bytes = 0
                    self._budget.drop(Mover.PREFETCH, "request_begun")
                    raise Stop(pb.OUTCOME_CANCELLED, "its request has begun")
                yield turn
        finally:
            self._jobs.discard(job)
            self._turns.pop(key, None)

    def note_use(self, keys: Iterable[bytes]) -> None:
        """Take note that records were fetched from memory: whoever did that holds them himself."""
        for key in keys:
            if key in self._prefetched:
                self._let_go(key)

    def _let_go(self, key: bytes) -> int:
        prefetched = self._prefetched.pop(key)
        prefetched.request.prefetched.discard(key)
        self._ahead_bytes -= prefetched.size
        if prefetched.item is not None:
            with self._tiers.lock:
                self._tiers.pool.release(prefetched.item)
        return prefetched.size

    # ---- Each turn

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                await self._turn()
            except Exception:  # a bug must cost hits their speed, and nothing else
                logger.exception("prefetch met a bug, please report it")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TURN_S if self._requests else None):
                    await self._wake.wait()

    async def _turn(self) -> None:
        now = time.monotonic()
        self._order = [request for request in self._order if self._still_waits(request, now)]
        for request in [each for each in self._requests.values() if each.left_at + _LINGER_S <= now]:
            self._forget(request)
        due = [request for request in self._order if request.held_until - now < _LOOK_S]
        for request in due[:_HELD_AT_A_TIME]:
            self._hold(request, now)
            await asyncio.sleep(0)
        if self._hops:
            await self._prefetch(now)

    async def _prefetch(self, now: float) -> None:
        """Promise to the hops what arrives before its request runs."""
        hops = [self._within(hop.hop) for hop in self._hops]
        count, ahead_s = self._policy.reach(hops)
        near = [
            request
            for place, request in enumerate(self._order)
            if place < count and (ahead_s == math.inf or request.expected.begins_at - now <= ahead_s)
        ]
        for request in near:
            if now - request.looked_at >= _LOOK_S and not self._closing:
                request.looked_at = now
                await self._look(request)
        now = time.monotonic()
        waiting = [
            Waiting(request, max(request.expected.begins_at - now, 0.0), [sum(each.values()) for each in request.below])
            for request in near
            if request.left_at == math.inf
        ]
        for move in self._policy.plan(waiting, hops, [hop.promised for hop in self._hops]):
            assert isinstance(move.request, _Request)
            self._begin(move.request, move.hop, move.size)

    def _within(self, hop: Hop) -> Hop:
        """Return what a hop carries within the budget."""
        rate = self._budget.rate
        return hop._replace(bytes_per_s=min(hop.bytes_per_s, rate)) if rate else hop

    def _still_waits(self, request: _Request, now: float) -> bool:
        if request.left_at == math.inf and request.expected.until <= now:
            request.left_at = now
        return request.left_at == math.inf

    def _hold(self, request: _Request, now: float) -> None:
        """Keep a request's records from eviction, until it is forgotten or soon after that."""
        request.held_until = min(request.expected.until, now + 4 * _LOOK_S) + _LINGER_S
        until_s = int(time.time() + request.held_until - now) + 1
        name = request.expected.name
        with self._tiers.lock:
            self._tiers.pool.next_use.publish(name, DEFAULT_TENANT, request.keys, until_s)

    def _forget(self, request: _Request) -> None:
        """Let go what is held for a request; what nobody has fetched was prefetched in vain."""
        name = request.expected.name
        if self._requests.get(name) is request:
            del self._requests[name]
            with self._tiers.lock:
                self._tiers.pool.next_use.withdraw(name)
        for key in list(request.prefetched):
            self._metrics.prefetch_wasted_bytes += self._let_go(key)

    async def _look(self, request: _Request) -> None:
        """Find out from where a request's records can be prefetched."""
        below: list[dict[bytes, int]] = [{} for _ in self._hops]
        absent, in_blocks = list[bytes](), list[bytes]()
        for part in parts_of(len(request.keys)):
            with self._tiers.lock:
                for key in request.keys[part.start : part.stop]:
                    item = self._tiers.pool.peek(address_of(key))
                    if key in self._moving or key in request.unsound:
                        continue
                    if item is None or not item.head_bytes:
                        absent.append(key)
                    elif item.value is None:
                        below[0][key] = item.length
                        if begins_in_blocks(item.head_bytes):
                            in_blocks.append(key)
            await asyncio.sleep(0)
        for key in await self._tiers.paged(in_blocks) if in_blocks else ():
            below[0].pop(key, None)
        if self._below is not None and absent:
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._look_below(self._below, absent, below[-2], below[-1])
        request.below = below

    async def _look_below(
        self, source: Source, keys: Sequence[bytes], there: dict[bytes, int], behind: dict[bytes, int]
    ) -> None:
        """Sort records into those that the source below has, and those that it has to fetch itself."""
        for first in range(0, len(keys), QUESTION_KEYS_MAX):
            question = list(keys[first : first + QUESTION_KEYS_MAX])
            far: dict[bytes, int] = {}
            expected_ms = 1
            for key, found in zip(question, await source.find(question), strict=True):
                if isinstance(found, Stored):
                    there[key] = found.length
                elif isinstance(found, Cold):
                    far[key], expected_ms = found.length, max(expected_ms, found.ms)
            if far:
                behind.update(far)
                self._cold.assumed = Hop(max(1.0, 1e3 * sum(far.values()) / expected_ms))
            elif self._cold.assumed is _COLD:
                self._cold.assumed = UNKNOWN  # as long as nothing is seen to be behind it

    def _begin(self, request: _Request, number: int, size: float) -> None:
        """Promise so many bytes of a request to a hop, those of its first records; of one not measured yet, one."""
        hop, below = self._hops[number], request.below[number]
        for key, length in list(below.items()):
            if hop.promised and not hop.measured:
                return
            if length > size or self._ahead_bytes + length > self._tiers.batch_bytes_max:
                return
            del below[key]
            if key in self._moving:
                continue
            size -= length
            self._ahead_bytes += length
            self._moving[key] = None
            hop.promise(Carried(request.expected.name, key, length))

    # ---- Carrying

    async def _carry(self, hop: Carrier) -> None:
        """Carry one record after the other."""
        while (record := await hop.next()) is not None:
            request = self._requests.get(record.name)
            try:
                if request is not None and request.left_at == math.inf:
                    await self._allowed(record.key)
                    if request.left_at == math.inf and not self._closing:
                        self._moving[record.key] = asyncio.get_running_loop().create_future()
                        await (self._read if hop is self._device else self._receive)(hop, request, record)
            except (StorageError, Stop, TimeoutError, RecordError, MemoryError) as error:
                logger.debug("record %s was not prefetched: %s", record.key.hex(), error)
                if request is not None and isinstance(error, RecordError):
                    request.unsound.add(record.key)
            except Exception:  # as in _run()
                logger.exception("prefetch met a bug, please report it")
            finally:
                hop.promised -= record.size
                self._ahead_bytes -= record.size
                moving = self._moving.pop(record.key)
                if moving is not None:
                    moving.set_result(None)
                self._wake.set()

    def _keep(self, request: _Request, key: bytes, size: int) -> None:
        """Keep a record in memory that was prefetched, for the request to fetch."""
        if key in self._prefetched:
            self._let_go(key)
        item: Item | None = None
        if self._tiers.has_devices:  # else NextUse keeps it: there is nowhere else to go to from memory
            with self._tiers.lock:
                item = self._tiers.pool.peek(address_of(key))
                if item is None or item.value is None:
                    return
                self._tiers.pool.hold(item)
        self._prefetched[key] = _Prefetched(request, size, item)
        self._ahead_bytes += size
        request.prefetched.add(key)
        request.held_until = 0.0
        if self._requests.get(request.expected.name) is not request:
            self._forget(request)  # it was forgotten meanwhile

    async def _read(self, hop: Carrier, request: _Request, record: Carried) -> None:
        """Have a device bring a record.

        Raises:
            TimeoutError, Stop: it takes too long, or its turn does not come.
        """
        async with self._turn_of(request, record.key, record.size) as turn:
            turn.moved_bytes = await self._read_now(hop, request, record)

    async def _read_now(self, hop: Carrier, request: _Request, record: Carried) -> int:
        """Have a device bring a record; return the bytes that have come."""
        tiers, loop = self._tiers, asyncio.get_running_loop()
        brought: asyncio.Future[Lease | None] = loop.create_future()

        def take(lease: Lease | None) -> None:
            if brought.done():
                tiers.release([lease])
            else:
                brought.set_result(lease)

        with tiers.lock:
            item = tiers.pool.peek(address_of(record.key))
            if item is None or item.value is not None:
                return 0
            tiers.pool.read(item, 0, item.length, partial(tiers.later, take))
            length = item.length
        hop.begin()
        lease: Lease | None = None
        try:
            lease = await asyncio.wait_for(brought, self._patience)
        finally:
            hop.ended(0 if lease is None else length)
        if lease is None:
            return 0
        self._keep(request, record.key, length)
        tiers.release([lease])
        return length

    async def _receive(self, hop: Carrier, request: _Request, record: Carried) -> None:
        """Have the source below bring a record, if it still has it, and there is room for it just now.

        Raises:
            StorageError, Stop, RecordError, MemoryError: why it does not come.
        """
        assert self._below is not None
        if self._tiers.has(record.key):  # a fetch has brought it meanwhile
            return
        if (memory := self._tiers.room(record.size)) is None:
            return
        try:
            for first in range(0, record.size, _PART_BYTES):
                await self._allowed(record.key)
                part = memory[first : first + _PART_BYTES]
                async with self._turn_of(request, record.key, len(part), first=not first) as turn:
                    if not await self._receive_part(hop, record.key, first, part):
                        turn.moved_bytes = 0
                        return
            head = await asyncio.to_thread(verify, memory, record.key)
            if self._tiers.enter(record.key, memory, bytes(memory[: head.head_length])) is None:
                self._keep(request, record.key, record.size)
        finally:
            self._tiers.discard(memory)

    async def _receive_part(self, hop: Carrier, key: bytes, first: int, memory: memoryview) -> bool:
        assert self._below is not None
        job = Job("", "", self._patience)
        if self._closing:
            return False
        self._jobs.add(job)
        hop.begin()
        came = 0
        try:
            if await self._below.receive(job, key, first, memory) is Result.OK:
                came = len(memory)
        finally:
            hop.ended(came)
            self._jobs.discard(job)
        return came > 0


def _side_by_side(expected: Expected) -> list[bytes]:
    """Return the keys of all chains, the first chunk of each, then the second."""
    return [key for keys in zip_longest(*(keys for _, keys in expected.chains)) for key in keys if key is not None]
