"""The pool of a data plane: start and stop, the headers of its records, and how records enter it.

The pool holds the records of all engines that this data plane serves, as records of one tenant: a key is derived from
everything that changes KV, the tenant's salt included, so only engines that may read a record can name it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import Job
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.found import HEADER_CACHE_BYTES, Found, HeaderCache, Stored, Unanswered
from dpu_dataplane.sources.source import Encoded, Resources
from shadowserve import native
from shadowserve.clock import wall_clock_ms
from shadowserve.errors import RecordError, StorageRefusedError
from shadowserve.keys import storage_key
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.pool import Pool
from shadowserve.pool.thread import PoolThread
from shadowserve.pool.types import DEFAULT_TENANT, ENTRIES_PER_HOLD, Address, Lease, PinShareError
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError
from shadowserve.record import parse_header
from shadowserve.tier import Tier

_BATCH_SHARE: Final = 4
"""A batch that waits for devices holds at most a quarter of the memory: half of the memory may receive records or wait
to be written, and the rest covers fragmentation."""
_PIN_SHARE: Final = 0.5  # most of the pool that pins may take, as on a storage node by default

logger = logging.getLogger(__name__)


def address_of(key: bytes) -> Address:
    """Return the pool's name of a record."""
    return DEFAULT_TENANT, storage_key(key)


def begins_in_blocks(header_bytes: int) -> bool:
    """Return whether a record's slices are aligned to device blocks, as an engine's pages must be."""
    return (native.OBJECT_HEADER_BYTES + header_bytes) % 4096 == 0


def ranges_of(count: int) -> Iterator[range]:
    """Split ``range(count)`` into ranges for one hold of the pool's lock each."""
    for first in range(0, count, ENTRIES_PER_HOLD):
        yield range(first, min(first + ENTRIES_PER_HOLD, count))


def _is_paged(stored: Stored) -> bool:
    try:
        header = parse_header(stored.header)
        return header.codec == native.Codec.NONE and begins_in_blocks(header.header_length)
    except RecordError:
        return False


class Tiers:
    """A pool with its lock and its thread. Used on the event loop, except for the pool itself, under the lock.

    ``read_timeout_s``: seconds that a device may take for headers, or for the next record of a batch;
    ``batch_bytes_max``: most bytes of records that a batch which waits for devices may hold.
    """

    pool: Pool  # the pool, after :meth:`start`

    def __init__(self, config: DataPlaneConfig, resources: Resources) -> None:
        assert config.tiers is not None
        self._config: PoolConfig = config.tiers
        self._resources = resources
        self._metrics, self._budget = resources.metrics, resources.budget
        self._paces: list[DevicePace] = []
        self.read_timeout_s = config.command_timeout_s
        self._drain_s = config.shutdown_timeout_s / 2
        self._headers: HeaderCache[Stored] = HeaderCache(HEADER_CACHE_BYTES)
        self._thread: PoolThread | None = None
        self._loop: asyncio.AbstractEventLoop
        self.lock = threading.Lock()  # guards the pool
        self.has_devices = bool(self._config.devices)  # the pool has devices besides memory
        self.batch_bytes_max = int(self._config.memory_budget_bytes) // _BATCH_SHARE
        devices = ", ".join(str(device.path) for device in self._config.devices)
        self.name = f"tiers of {int(self._config.memory_budget_bytes) >> 20} MiB{devices and ' and '}{devices}"

    # ---- Life

    async def start(self) -> None:
        """Open the pool and recover its devices' records; ConfigurationError if a device cannot be used."""
        self._loop = asyncio.get_running_loop()
        self.pool = (DevicePool if self._config.devices else MemoryPool)(self._config)
        await asyncio.to_thread(self.pool.start, self.lock)
        self.pool.set_pin_shares(_PIN_SHARE, _PIN_SHARE)
        if isinstance(pool := self.pool, DevicePool):
            movers = Mover.DEVICE_WRITE, Mover.SCRUB
            self._paces = [DevicePace(self._budget, mover, self.later, pool.wake) for mover in movers]
            writes, scrubs = self._paces
            with self.lock:
                pool.hold_back(writes.allows, scrubs.allows)
        self._thread = PoolThread(self.pool)
        gauges: dict[str, tuple[str, str]] = {
            "tier_objects": ("Records in the local tiers", "keys"),
            "tier_used_bytes": ("Used bytes of the local tiers", "used_bytes"),
            "tier_capacity_bytes": ("Capacity of the local tiers in bytes", "budget_bytes"),
        }
        self._metrics.gauges |= {
            name: (text, partial(self._statistic, attribute)) for name, (text, attribute) in gauges.items()
        }
        self._metrics.gauges["tier_devices_gone"] = ("Failed devices of the local tiers", self._failed_devices)

    def _statistic(self, attribute: str) -> float:
        with self.lock:
            return float(getattr(self.pool.statistics(), attribute))

    def _failed_devices(self) -> float:
        with self.lock:
            return sum(not device.healthy for device in self.pool.statistics().devices)

    async def close(self) -> None:
        """Finish device writes, within ``drain_s``, and close the pool. No job may be in progress."""
        thread, self._thread = self._thread, None
        for pace in self._paces:
            await pace.close()
        if thread is not None and not await asyncio.to_thread(thread.stop, self._drain_s):
            logger.warning("%s: a device did not finish its writes; the next start recovers what it has", self.name)

    # ---- Lookups

    def has(self, key: bytes) -> bool:
        """Return whether the pool has a record, without reading from a device."""
        with self.lock:
            return self.pool.peek(address_of(key)) is not None

    async def look_up(self, keys: Sequence[bytes]) -> "tuple[list[Found], list[asyncio.Future[None]]]":
        """Look keys up, and start reads of headers that only devices have; return the answers and these reads.

        Headers that are being read are Unanswered until :meth:`await_headers` has returned.
        """
        found: list[Found] = [None] * len(keys)
        reads: list[asyncio.Future[None]] = []
        for part in ranges_of(len(keys)):
            with self.lock:
                for index in part:
                    self._find(keys, index, found, reads)
            await asyncio.sleep(0)
        return found, reads

    async def paged(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys of records that hold an engine's pages: devices read these into paged memory."""
        found, reads = await self.look_up(keys)
        await self.await_headers(reads)
        return {
            key for key, stored in zip(keys, found, strict=True) if isinstance(stored, Stored) and _is_paged(stored)
        }

    async def await_headers(self, reads: "Collection[asyncio.Future[None]]") -> None:
        if reads:
            _, late = await asyncio.wait(reads, timeout=self.read_timeout_s)
            for read in late:
                read.cancel()

    def _find(self, keys: Sequence[bytes], index: int, found: list[Found], reads: "list[asyncio.Future[None]]") -> None:
        """Look one key up, with the lock held, or start a read of its header."""
        key = keys[index]
        item = self.pool.peek(address_of(key))
        if item is None or not item.header_bytes:
            return
        known = self._headers.get(key)
        if known is not None and known.length == item.length:
            tier = Tier.DEVICE if item.value is None else Tier.MEMORY
            found[index] = known if known.tier is tier else self._cache(key, known._replace(tier=tier))
        elif item.value is not None:
            header = bytes(memoryview(item.value)[: item.header_bytes])
            found[index] = self._cache(key, Stored(item.length, header, Tier.MEMORY))
        else:
            found[index] = Unanswered(f"{self.name}: a device has not answered within {self.read_timeout_s:g} s")
            read: asyncio.Future[None] = self._loop.create_future()
            reads.append(read)
            length = item.length

            def finish(lease: Lease | None) -> None:
                header = b"" if lease is None else bytes(lease.view)
                self.release([lease])
                if not read.done():
                    found[index] = self._cache(key, Stored(length, header, Tier.DEVICE)) if header else None
                    read.set_result(None)

            self.pool.read(item, 0, item.header_bytes, lambda lease: self.later(finish, lease))

    def _cache(self, key: bytes, stored: Stored) -> Stored:
        self._headers.put(key, stored, len(stored.header))
        return stored

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, from any thread; does nothing once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def release(self, leases: Iterable[Lease | None]) -> None:
        held = [lease for lease in leases if lease is not None]
        for part in ranges_of(len(held)):
            with self.lock:
                for index in part:
                    held[index].release()

    def drop(self, key: bytes) -> None:
        self._headers.drop(key)
        with self.lock:
            self.pool.remove(address_of(key))

    async def pin(self, keys: Sequence[bytes], seconds: int) -> None:
        """Pin records for some seconds, 0 ends that; StorageRefusedError at the first one beyond the share of pins."""
        until_ms = wall_clock_ms() + 1000 * seconds if seconds else 0
        for part in ranges_of(len(keys)):
            try:
                with self.lock:
                    for index in part:
                        self.pool.pin(address_of(keys[index]), until_ms)
            except PinShareError as error:
                raise StorageRefusedError(f"{self.name}: {error}") from error
            await asyncio.sleep(0)

    # ---- New records

    def allocate(self, size: int, ready: Callable[[], None] = lambda: None) -> memoryview | None:
        """Allocate memory for a record; MemoryError if the pool never has as much.

        None if there is none now: ``ready`` is called when it is worth another try.
        """
        with self.lock:
            return self.pool.allocate(size, ready)

    def free(self, memory: memoryview) -> None:
        """Free memory of :meth:`allocate`, also after :meth:`add`."""
        with self.lock:
            self.pool.discard(memory)

    def add(self, key: bytes, memory: memoryview, header: bytes, lasts_ms: int = 0) -> BusyError | None:
        """Add the record in memory of :meth:`allocate`, if admitted; return the error of a pool that is too busy."""
        self._headers.drop(key)
        parent = parse_header(header).parent
        ends_ms = wall_clock_ms() + lasts_ms if lasts_ms else None
        try:
            with self.lock:
                ticket = self.pool.put(
                    address_of(key), memory, header_bytes=len(header), expires_at_ms=ends_ms, parent=parent
                )  # fmt: skip
        except BusyError as error:
            return error
        except OutOfBudgetError as error:
            logger.debug("record %s is not kept: %s", key.hex(), error)
            self.note_dropped()
        else:
            self._cache(key, Stored(len(memory), header, Tier.MEMORY))
            self._metrics.tier_records["kept"] += 1
            if ticket is not None:
                ticket.then(lambda error: None if error is None else self.later(self._note_failure, key, error))
        return None

    def note_dropped(self, count: int = 1) -> None:
        """Count records that the pool had no room for; as dropped by the interference budget if writes wait for it."""
        self._metrics.tier_records["dropped"] += count
        if self._paces and self._paces[0].waits:
            for _ in range(count):
                self._budget.drop(Mover.DEVICE_WRITE, "no_room")

    def _note_failure(self, key: bytes, error: Exception) -> None:
        logger.debug("record %s was not written: %s", key.hex(), error)
        self._metrics.tier_records["dropped"] += 1

    async def put(self, job: Job, key: bytes, record: Encoded, *, wait: bool) -> bool:
        """Add an encoded record, unless the pool has it. Return whether the pool has it then.

        With ``wait`` it waits for room, within the job's time. Otherwise a record without room is dropped.
        """
        if not self.has(key):
            length = int(record.batch.pieces[record.position]["body_length"])
            memory = await self._wait_for_memory(job, len(record.header) + length, wait)
            if memory is None:
                self.note_dropped()
                return False
            try:
                await self._copy(record, memory)
                await self._wait_for_admission(job, key, memory, record, wait)
            finally:
                self.free(memory)
        return self.has(key)

    async def _copy(self, record: Encoded, memory: memoryview) -> None:
        memory[: len(record.header)] = record.header
        copy = partial(self._resources.pipeline.copy_body, record.batch, record.position, memory[len(record.header) :])
        await self._loop.run_in_executor(self._resources.storing, copy)

    async def _wait_for_memory(self, job: Job, size: int, wait: bool) -> memoryview | None:
        while True:
            event = asyncio.Event()
            try:
                memory = self.allocate(size, partial(self.later, event.set))
            except MemoryError:
                return None
            if memory is not None or not wait:
                return memory
            await job.within(event.wait(), "waiting for room in the tiers")

    async def _wait_for_admission(self, job: Job, key: bytes, memory: memoryview, record: Encoded, wait: bool) -> None:
        while (busy := self.add(key, memory, record.header, record.lasts_ms)) is not None:
            if not wait:
                self.note_dropped()
                return
            event = asyncio.Event()
            busy.again.then(lambda _, event=event: self.later(event.set))  # type: ignore[misc]
            await job.within(event.wait(), "waiting for room in the tiers")


class DevicePace:
    """Allows the bytes of one mover. The pool's thread does not wait: a turn is requested on the event loop.

    ``later`` calls a function on the event loop, ``wake`` wakes the pool's thread once the turn is granted.
    """

    def __init__(
        self,
        budget: InterferenceBudget,
        mover: Mover,
        later: Callable[..., None],
        wake: Callable[[], None],
    ) -> None:
        self._budget = budget
        self._mover = mover
        self._later = later
        self._wake = wake
        self._lock = threading.Lock()  # guards the next two
        self._allowed_bytes = 0
        self._requested = False
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waits(self) -> bool:
        """True if a turn was requested and is not granted yet."""
        return self._requested

    def allows(self, size: int) -> bool:
        """Return whether bytes may move now, and count them. Called on the pool's thread."""
        if self._closed:
            return True
        with self._lock:
            if self._allowed_bytes >= size:
                self._allowed_bytes -= size
                return True
            if self._budget.bounded:
                if not self._requested:
                    self._requested = True
                    self._later(self._request, size - self._allowed_bytes)
                return False
        self._later(self._budget.count, self._mover, size)
        return True

    def _request(self, size: int) -> None:
        if not self._closed:
            self._task = asyncio.ensure_future(self._wait_for_turn(size))

    async def _wait_for_turn(self, size: int) -> None:
        async with self._budget.turn(self._mover, size):
            self._budget.settle_later()
            with self._lock:
                self._allowed_bytes += size
                self._requested = False
        self._wake()

    async def close(self) -> None:
        """Allow all bytes from now on: records that are not written now are lost."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._wake()
