"""The pool of a data plane: its life, the heads of what it holds, and how records come into it.

Its records are those of every engine that this data plane serves. Nobody's are another's: a key is made of all that
changes KV, the tenant's salt included, so whoever names a key knows what is under it. All of them are of one tenant of
the pool.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.source import Encoded, Found, Stored, Unanswered
from dpu_dataplane.sources.tiers.device_pace import DevicePace
from shadowserve import native
from shadowserve.clock import wall_clock_ms
from shadowserve.errors import RecordError
from shadowserve.keys import storage_key
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.pool import Pool
from shadowserve.pool.terms import DEFAULT_TENANT, ENTRIES_PER_HOLD, Address, Lease
from shadowserve.pool.thread import PoolThread
from shadowserve.pool.volume.changes import BusyError, OutOfBudgetError
from shadowserve.record import parse_head
from shadowserve.tier import Tier

__all__ = ["Tiers", "address_of", "begins_in_blocks", "parts_of"]

_ENTRY_OVERHEAD: Final = 300  # bytes of objects around one remembered head
_ROUND_SHARE: Final = 4
"""Of the memory, a quarter is held by one batch that waits for devices: a half may receive and wait to be written, and
what is left makes up for places that are too small."""

logger = logging.getLogger(__name__)


def address_of(key: bytes) -> Address:
    """Return what a record is called in the pool."""
    return DEFAULT_TENANT, storage_key(key)


def begins_in_blocks(head_bytes: int) -> bool:
    """Return whether a record's slices begin where a device's blocks do, as those of an engine's pages have to."""
    return (native.OBJECT_HEADER_BYTES + head_bytes) % 4096 == 0


def parts_of(count: int) -> Iterator[range]:
    """Yield ranges that cover so many, each no more than is done in one hold of the pool's lock."""
    for first in range(0, count, ENTRIES_PER_HOLD):
        yield range(first, min(first + ENTRIES_PER_HOLD, count))


def _is_paged(stored: Stored) -> bool:
    try:
        head = parse_head(stored.head)
        return head.codec == native.Codec.NONE and begins_in_blocks(head.head_length)
    except RecordError:
        return False


class Tiers:
    """A pool, its lock, and its thread. To be used on the event loop, but for the pool itself, under the lock.

    Args:
        config: of the pool.
        metrics: to count in.
        pipeline: that has encoded what is stored.
        storing: thread that copies it.
        budget: that writes and scrubs of devices are held to.
        heads_bytes: of heads to remember: those of what lies on devices alone would have to be read for each lookup.
        patience: see below.

    Attributes:
        name: for people.
        has_devices: whether the pool has more than memory.
        pool: once started.
        lock: of the pool.
        patience: seconds that a device may take to bring heads, or the next record of a batch.
        batch_bytes_max: of records that a batch holds which waits for devices.
    """

    pool: Pool

    def __init__(
        self,
        config: PoolConfig,
        metrics: Metrics,
        pipeline: native.Pipeline,
        storing: Executor,
        budget: InterferenceBudget,
        *,
        heads_bytes: int,
        patience: float,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._pipeline = pipeline
        self._storing = storing
        self._budget = budget
        self._paces: list[DevicePace] = []
        self.patience = patience
        self._heads: OrderedDict[bytes, Stored] = OrderedDict()
        self._heads_left = heads_bytes
        self._thread: PoolThread | None = None
        self._loop: asyncio.AbstractEventLoop
        self.lock = threading.Lock()
        self.has_devices = bool(config.devices)
        self.batch_bytes_max = int(config.memory_budget_bytes) // _ROUND_SHARE
        devices = ", ".join(str(device.path) for device in config.devices)
        self.name = f"tiers of {int(config.memory_budget_bytes) >> 20} MiB{devices and ' and '}{devices}"

    # ---- Life

    async def start(self) -> None:
        """Open the pool, with what its devices hold.

        Raises:
            ConfigurationError: a device cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        self.pool = (DevicePool if self._config.devices else MemoryPool)(self._config)
        await asyncio.to_thread(self.pool.start, self.lock)
        if isinstance(pool := self.pool, DevicePool):
            movers = Mover.DEVICE_WRITE, Mover.SCRUB
            self._paces = [DevicePace(self._budget, mover, self.later, pool.wake) for mover in movers]
            writes, scrubs = self._paces
            with self.lock:
                pool.hold_back(writes.allows, scrubs.allows)
        self._thread = PoolThread(self.pool)
        gauges: dict[str, tuple[str, str]] = {
            "tier_objects": ("Records in the tiers", "keys"),
            "tier_used_bytes": ("Bytes of the tiers that are used", "used_bytes"),
            "tier_capacity_bytes": ("Bytes that the tiers have room for", "budget_bytes"),
        }
        self._metrics.gauges |= {
            name: (text, partial(self._statistic, attribute)) for name, (text, attribute) in gauges.items()
        }
        self._metrics.gauges["tier_devices_gone"] = ("Devices of the tiers that have failed", self._gone)

    def _statistic(self, attribute: str) -> float:
        with self.lock:
            return float(getattr(self.pool.statistics(), attribute))

    def _gone(self) -> float:
        with self.lock:
            return sum(not device.healthy for device in self.pool.statistics().devices)

    async def close(self, drain_s: float) -> None:
        """Have written what waits for it, within ``drain_s``, and close the pool. No job may be in progress."""
        thread, self._thread = self._thread, None
        for pace in self._paces:
            await pace.close()
        if thread is not None and not await asyncio.to_thread(thread.stop, drain_s):
            logger.warning("%s: a device does not end what it was given; a start recovers what it has", self.name)

    # ---- What is there

    def has(self, key: bytes) -> bool:
        """Return whether the pool has a record; no device is asked."""
        with self.lock:
            return self.pool.peek(address_of(key)) is not None

    async def look(self, keys: Sequence[bytes]) -> "tuple[list[Found], list[asyncio.Future[None]]]":
        """Return what the pool has under each key, and reads of heads: Unanswered until :meth:`await_heads`."""
        found: list[Found] = [None] * len(keys)
        reads: list[asyncio.Future[None]] = []
        for part in parts_of(len(keys)):
            with self.lock:
                for index in part:
                    self._find(keys, index, found, reads)
            await asyncio.sleep(0)
        return found, reads

    async def paged(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these records hold an engine's pages as they are: devices bring them to where they are used.

        Nobody needs them in memory.
        """
        found, reads = await self.look(keys)
        await self.await_heads(reads)
        return {
            key for key, stored in zip(keys, found, strict=True) if isinstance(stored, Stored) and _is_paged(stored)
        }

    async def await_heads(self, reads: "Collection[asyncio.Future[None]]") -> None:
        """Wait until devices have brought heads, or have taken too long."""
        if reads:
            _, late = await asyncio.wait(reads, timeout=self.patience)
            for read in late:
                read.cancel()

    def _find(self, keys: Sequence[bytes], index: int, found: list[Found], reads: "list[asyncio.Future[None]]") -> None:
        """Find one key, with the lock held; what a device has to bring is found later."""
        key = keys[index]
        item = self.pool.peek(address_of(key))
        if item is None or not item.head_bytes:
            return
        known = self._heads.get(key)
        if known is not None and known.length == item.length:
            tier = Tier.DEVICE if item.value is None else Tier.MEMORY
            if known.tier is not tier:
                known = self._heads[key] = known._replace(tier=tier)
            self._heads.move_to_end(key)
            found[index] = known
        elif item.value is not None:
            found[index] = self._remember(key, item.length, bytes(memoryview(item.value)[: item.head_bytes]))
        else:
            found[index] = Unanswered(f"{self.name}: a device has not answered within {self.patience:g} s")
            read: asyncio.Future[None] = self._loop.create_future()
            reads.append(read)
            length = item.length

            def take(lease: Lease | None) -> None:
                head = b"" if lease is None else bytes(lease.view)
                self.release([lease])
                if not read.done():
                    found[index] = self._remember(key, length, head, Tier.DEVICE) if head else None
                    read.set_result(None)

            self.pool.read(item, 0, item.head_bytes, lambda lease: self.later(take, lease))

    def _remember(self, key: bytes, length: int, head: bytes, tier: Tier = Tier.MEMORY) -> Stored:
        self._forget(key)
        stored = self._heads[key] = Stored(length, head, tier)
        self._heads_left -= len(head) + _ENTRY_OVERHEAD
        while self._heads_left < 0:
            self._forget(next(iter(self._heads)))
        return stored

    def _forget(self, key: bytes) -> None:
        known = self._heads.pop(key, None)
        if known is not None:
            self._heads_left += len(known.head) + _ENTRY_OVERHEAD

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have something called on the event loop, from any thread, unless that has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def release(self, leases: Iterable[Lease | None]) -> None:
        """Give back what was read."""
        held = [lease for lease in leases if lease is not None]
        for part in parts_of(len(held)):
            with self.lock:
                for index in part:
                    held[index].release()

    def drop(self, key: bytes) -> None:
        """Remove a record, if there is one."""
        self._forget(key)
        with self.lock:
            self.pool.remove(address_of(key))

    # ---- What comes

    def room(self, size: int, ready: Callable[[], None] = lambda: None) -> memoryview | None:
        """Return memory for a record, until :meth:`discard`; None: there is none now, ``ready`` is called when to ask.

        Raises:
            MemoryError: there will never be so much.
        """
        with self.lock:
            return self.pool.allocate(size, ready)

    def discard(self, memory: memoryview) -> None:
        """Be done with memory of :meth:`room`, whether something came of it or not."""
        with self.lock:
            self.pool.discard(memory)

    def enter(self, key: bytes, memory: memoryview, head: bytes, lasts_ms: int = 0) -> BusyError | None:
        """Take in a record that lies in memory of :meth:`room`, if it is admitted; for so long, or 0: for good.

        Returns:
            None, or that there is too much to do just now.
        """
        self._forget(key)
        parent = parse_head(head).parent
        ends_ms = wall_clock_ms() + lasts_ms if lasts_ms else None
        try:
            with self.lock:
                ticket = self.pool.put(
                    address_of(key), memory, head_bytes=len(head), expires_at_ms=ends_ms, parent=parent
                )  # fmt: skip
        except BusyError as error:
            return error
        except OutOfBudgetError as error:
            logger.debug("record %s is not kept: %s", key.hex(), error)
            self.note_dropped()
        else:
            self._remember(key, len(memory), head)
            self._metrics.tier_records["kept"] += 1
            if ticket is not None:
                ticket.then(lambda error: None if error is None else self.later(self._note_failure, key, error))
        return None

    def note_dropped(self, count: int = 1) -> None:
        """Count records that the pool did not take for want of room; and why, where writes wait for the budget."""
        self._metrics.tier_records["dropped"] += count
        if self._paces and self._paces[0].waits:
            for _ in range(count):
                self._budget.drop(Mover.DEVICE_WRITE, "no_room")

    def _note_failure(self, key: bytes, error: Exception) -> None:
        logger.debug("record %s was not written: %s", key.hex(), error)
        self._metrics.tier_records["dropped"] += 1

    async def put(self, job: Job, key: bytes, record: Encoded, *, wait: bool) -> bool:
        """Take in a record that was encoded; one that is there stays. Return whether there is one then.

        Args:
            job: whose.
            key: of the record.
            record: that was encoded.
            wait: for room, within the job's time; else what there is no room for now is dropped.
        """
        if not self.has(key):
            length = int(record.batch.pieces[record.position]["body_length"])
            memory = await self._await_room(job, len(record.head) + length, wait)
            if memory is None:
                self.note_dropped()
                return False
            try:
                await self._copy(record, memory)
                await self._await_entry(job, key, memory, record, wait)
            finally:
                self.discard(memory)
        return self.has(key)

    async def _copy(self, record: Encoded, memory: memoryview) -> None:
        memory[: len(record.head)] = record.head
        copy = partial(self._pipeline.copy_body, record.batch, record.position, memory[len(record.head) :])
        await self._loop.run_in_executor(self._storing, copy)

    async def _await_room(self, job: Job, size: int, wait: bool) -> memoryview | None:
        while True:
            event = asyncio.Event()
            try:
                memory = self.room(size, partial(self.later, event.set))
            except MemoryError:
                return None
            if memory is not None or not wait:
                return memory
            await job.within(event.wait(), "waiting for room in the tiers")

    async def _await_entry(self, job: Job, key: bytes, memory: memoryview, record: Encoded, wait: bool) -> None:
        while (busy := self.enter(key, memory, record.head, record.lasts_ms)) is not None:
            if not wait:
                self.note_dropped()
                return
            event = asyncio.Event()
            busy.again.then(lambda _, event=event: self.later(event.set))  # type: ignore[misc]
            await job.within(event.wait(), "waiting for room in the tiers")
