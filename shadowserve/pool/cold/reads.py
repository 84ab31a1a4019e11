"""Reads records from the bucket into the pool: in ranges, many at a time, each with a deadline."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from shadowserve import native, record, spans
from shadowserve.errors import CorruptRecordError, RecordError
from shadowserve.fair_queue import FairQueue
from shadowserve.pool.buffers import allocate
from shadowserve.pool.cold.bucket import BucketError
from shadowserve.pool.cold.layout import ObjectName, Place, join_name
from shadowserve.pool.cold.part import Shared, ThreadedPart
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError

_log = logging.getLogger(__name__)

_RANGE_BYTES: Final = 8 << 20
"""Most bytes of neighbours that are read together: S3 is fastest with ranges of 8 to 16 MiB, several at a time."""

PART_BYTES: Final = 1 << 20
"""Least bytes of a part of a record that is read in order. ``PARTS_MAX``: most parts, as each costs a request."""
_PARTS_AT_ONCE: Final = 4
"""Parts that are read at a time before each record has only one of them: more would share the rate, and all be late."""
PARTS_MAX: Final = 8

_KEPT_SHARE: Final = 4
"""Part of the pool's memory budget that the records of one tenant may have which are read in parts; of all, twice that.
It is not part of the pool."""
_COPIED_BYTES: Final = 64 << 10
"""Bytes that come before the rest of their record are copied up to this size, so that they do not keep all of it."""
_WAITING_MAX: Final = 16_384
"""Most records of one tenant that wait to be read: some 10 MB. Further reads of this tenant are misses."""
_COST_BYTES: Final = 256 << 10
"""Cost of a request besides its bytes, in the fair queue: S3 takes about as long to begin as to send as many bytes."""

Done = Callable[[Lease | None], None]


_REQUESTS: Final = 8
"""Number of requests after which earlier measurements count half."""
_KEPT: Final = 0.9
_FIRST_S: Final = 0.05
_FIRST_BYTES_PER_S: Final = 100e6
"""Expected rate before the first measurement: S3 in its own region (docs/guides/object-storage.md)."""


class ThroughputEstimate:
    """Expected time of reads, from recent requests, several of which overlap. For one thread at a time."""

    def __init__(self) -> None:
        self._busy_s, self._bytes = _FIRST_S, _FIRST_S * _FIRST_BYTES_PER_S  # of the time with requests in progress
        self._request_s = _FIRST_S  # mean latency of a request
        self._ended = self._under_way = 0
        self._seen_s = 0.0

    def begin(self, now_s: float) -> None:
        self._pass(now_s)
        self._under_way += 1

    def end(self, now_s: float, began_s: float, size: int) -> None:
        """A request ends with ``size`` bytes; 0 for a failed one, which counts as busy time."""
        self._pass(now_s)
        self._under_way -= 1
        self._bytes += size
        self._ended += 1
        if size:
            self._request_s = _KEPT * self._request_s + (1 - _KEPT) * (now_s - began_s)
        if self._ended % _REQUESTS == 0:
            self._busy_s, self._bytes = self._busy_s / 2, self._bytes / 2

    def _pass(self, now_s: float) -> None:
        if self._under_way:
            self._busy_s += max(0.0, now_s - self._seen_s)
        self._seen_s = now_s

    def expected_s(self, size: int) -> float:
        """Return the expected time for ``size`` bytes, queued ones included; at least that of one request."""
        return max(self._request_s, size * self._busy_s / max(self._bytes, 1.0))


class ColdItem(Item):
    """A record that only the bucket has."""

    __slots__ = ("address", "found", "key", "tenant")

    is_cold = True

    def __init__(self, address: Address, tenant: str, key: bytes, found: native.ColdFound) -> None:
        self.length = found.length
        self.header_bytes = found.header_bytes
        self.expires_at_ms = None
        self.value = None
        self.address = address
        self.tenant = tenant
        self.key = key
        self.found = found

    @property
    def name(self) -> str:
        """Name of the object that has it."""
        return join_name(ObjectName(self.found.partition, self.tenant, self.found.digest))


class _Waiter(NamedTuple):
    start: int
    end: int
    done: Done
    ends_s: float
    """When it is a miss, although the parts of the record come."""


class _Read:
    """One record, or a range of one, that is being read in one part or more, and its waiting clients.

    Attributes:
        begin, size: The range in the record.
        at: Its key among all reads.
        start, end: The part to read next, in the object; it is queued while ``is_queued``.
        arrived: Bytes of each part that has arrived, by its first byte in the record.
        memory: The record, where it has several parts; those in ``arrived`` are in it.
        sound: Leading bytes that were checked.
        lock: Protects ``memory``, ``arrived`` and ``slices`` of threads with parts of this read.
        users: Leases of ``memory``.
        is_late: Clients have waited too long, and none has come since.
    """

    __slots__ = ("address", "arrived", "at", "begin", "client", "context", "deadline_s", "end", "is_late",
                 "is_queued", "key", "lock", "memory", "name", "place", "size", "slices", "sound", "start",
                 "step", "users", "waiting")  # fmt: skip

    def __init__(self, item: ColdItem, begin: int, size: int, client: int, *, ahead: bool) -> None:
        self.client = client
        self.context = spans.current()
        self.address = item.address
        self.key = item.key
        self.name = item.name
        self.place = Place(item.found.offset, item.length, item.header_bytes)
        self.begin, self.size = begin, size
        self.at = self.name, self.key, begin, size
        self.step = max(PART_BYTES, -(-size // PARTS_MAX)) if ahead else size
        self.start = self.end = self.place.offset + begin
        self.advance()
        self.deadline_s = 0.0
        self.is_queued = self.is_late = False
        self.lock = threading.Lock()
        self.users = 0
        self.arrived: dict[int, int] = {}
        self.memory: memoryview | None = None
        self.sound = 0
        self.slices: list[tuple[int, int]] | None = None  # end and checksum of those that were not checked
        self.waiting: list[_Waiter] = []

    @property
    def is_record(self) -> bool:
        return self.size == self.place.length

    def advance(self) -> None:
        self.start = self.end
        self.end = min(self.start + self.step, self.place.offset + self.begin + self.size)

    @property
    def kept_bytes(self) -> int:
        """Memory that it has from the first part to the last."""
        return self.size if self.step < self.size else 0

    @property
    def has_more(self) -> bool:
        return self.start < self.end

    def arrives(self, start: int, data: memoryview) -> memoryview | None:
        """Take a part that begins at ``start`` in the object; return all bytes once they are here."""
        if len(data) == self.size:
            return data
        if self.memory is None:
            self.memory = allocate(self.size)
        at = start - self.place.offset - self.begin
        self.memory[at : at + len(data)] = data
        self.arrived[at] = len(data)
        return self.memory if sum(self.arrived.values()) == self.size else None

    def check(self) -> None:
        """Check the header and the slices of a record that have arrived in order; RecordError if one is unsound."""
        assert self.memory is not None
        there, header_bytes = 0, self.place.header_bytes
        while there in self.arrived:
            there += self.arrived[there]
        if self.slices is None and there >= header_bytes:
            header = record.parse_header(self.memory[:header_bytes])
            header.expect(self.key)
            if (header.header_length, header.record_length) != (header_bytes, self.size):
                raise CorruptRecordError(f"its header has {header.header_length} bytes, its entry says {header_bytes}")
            ends = [*header.slices["offset"][1:].tolist(), self.size]
            self.slices = list(zip(ends, header.slices["checksum"].tolist(), strict=True))
            self.sound = header_bytes
        while self.slices and self.slices[0][0] <= there:
            end, checksum = self.slices.pop(0)
            if native.crc32(self.memory[self.sound : end]) != checksum:
                raise CorruptRecordError(f"the slice at {self.sound} has a wrong checksum")
            self.sound = end

    def take_answered(self) -> list[_Waiter]:
        """Return the waiting clients whose bytes are sound."""
        answered = [each for each in self.waiting if each.end <= self.sound]
        if answered:
            self.waiting = [each for each in self.waiting if each.end > self.sound]
        return answered


_Part = tuple[_Read, int, int]
"""A part of a read: its first byte in the object, and its end."""


class ColdReader(ThreadedPart):
    """Reads records, checks them, and puts them into the pool, which sends them and finds them again.

    :class:`ColdStatistics` describes the counters.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.requests = self.bytes = self.records = self.crowded_out = 0
        self._reads: dict[tuple[str, bytes, int, int], _Read] = {}
        self._queue: FairQueue[_Read] = FairQueue()
        self._by_object: dict[str, dict[int, _Read]] = {}  # queued reads by object and offset
        self._bytes_under_way = self._bytes_wanted = 0  # in requests, and of all waiting records
        self._parts_under_way = 0
        self._kept_bytes: Counter[int] = Counter()  # of reads in parts, by tenant
        self._throughput = ThroughputEstimate()
        self._pool: Pool
        self._lock: threading.Lock

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        self._pool, self._lock = pool, lock
        self._start_threads("read", self._config.reads_at_once, self._run)

    @property
    def under_way(self) -> int:
        """Number of records, or ranges of one, that clients wait for."""
        return len(self._reads)

    def expected_s(self, size: int) -> float:
        """Return the expected time to read records of ``size`` bytes in total now."""
        return self._throughput.expected_s(self._bytes_wanted + size)

    def read(self, item: ColdItem, start: int, end: int, done: Done, *, in_parts: bool, ahead: bool) -> None:
        """Read bytes of an item, as :meth:`Pool.read`; with the pool's lock held."""
        begin, size = (start, end - start) if in_parts else (0, item.length)
        with self._changed:
            read = self._reads.get((item.name, item.key, 0, item.length))
            read = read or self._reads.get((item.name, item.key, begin, size))
            refused = self._closed or self._breakers.read.away
            if not refused and read is None and self._queue.waiting(item.address[0]) >= _WAITING_MAX:
                refused = True
                self.crowded_out += 1
            answered: Lease | None = None
            if not refused:
                if read is None:
                    in_order = ahead and self._has_room(item.address[0], size)
                    read = _Read(item, begin, size, self._pool.client, ahead=in_order)
                    self._reads[read.at] = read
                    self._kept_bytes[item.address[0]] += read.kept_bytes
                    self._bytes_wanted += read.size
                    self._enqueue(read)
                    self._changed.notify()
                ends_s = inf if ahead else self._clock_s() + self._config.timeout_s
                waiter = _Waiter(start - read.begin, end - read.begin, done, ends_s)
                read.is_late = False
                if (ahead or in_parts) and waiter.end <= read.sound:
                    answered = self._lease(read, waiter)
                else:  # other clients' callbacks may take the pool's lock
                    read.waiting.append(waiter)
        if refused or answered is not None:
            done(answered)

    def _has_room(self, tenant: int, size: int) -> bool:
        """Return whether a record may be kept until all of its parts are here; otherwise it is read at once."""
        room = self._pool.memory_budget_bytes // _KEPT_SHARE
        return self._kept_bytes[tenant] + size <= room and self._kept_bytes.total() + size <= 2 * room

    def step(self) -> None:
        """End reads whose deadline has passed, and those that wait for a bucket that is away; called often."""
        now_s, away = self._clock_s(), self._breakers.read.away
        ended: list[Done] = []
        late = 0
        with self._changed:
            for read in list(self._reads.values()):
                if read.deadline_s > now_s and not (away and read.is_queued):
                    if slow := [each for each in read.waiting if each.ends_s <= now_s]:
                        ended += [each.done for each in slow]
                        read.waiting = [each for each in read.waiting if each.ends_s > now_s]
                        read.is_late = not read.waiting
                    continue
                if not away:  # a read that was only queued says nothing about the bucket
                    late += bool(read.waiting) and not read.is_queued
                    self.crowded_out += bool(read.waiting) and read.is_queued
                ended += [each.done for each in read.waiting]
                read.waiting.clear()
                read.is_late = True
                if read.is_queued:
                    self._forget(read)
        if late:
            self._breakers.read.failed("timeout", f"{late} reads were not done within {self._config.timeout_s:g} s")
        for done in ended:
            done(None)

    def _forget(self, read: _Read) -> None:
        if self._reads.get(read.at) is read:
            del self._reads[read.at]
            self._bytes_wanted -= read.size
            if read.is_queued:
                self._unqueue(read)
            self._uncount(read)

    def _uncount(self, read: _Read) -> None:
        """Stop counting the memory of a read that has ended, unless clients use it."""
        if not read.users and self._reads.get(read.at) is not read and not self._closed:
            self._kept_bytes[read.address[0]] -= read.kept_bytes

    def _lease(self, read: _Read, waiter: _Waiter) -> Lease:
        """Return bytes that have come before the rest of their record."""
        assert read.memory is not None
        view = read.memory[waiter.start : waiter.end]
        if len(view) <= _COPIED_BYTES:
            return Lease(memoryview(bytes(view)))
        read.users += 1
        return Lease(view, self._release, read)

    def _release(self, read: _Read) -> None:
        with self._changed:
            read.users -= 1
            self._uncount(read)

    def _enqueue(self, read: _Read) -> None:
        """Let a read wait for its next part, behind the next parts of its client's other reads."""
        read.is_queued, read.deadline_s = True, self._clock_s() + self._config.timeout_s
        self._queue.add(read.address[0], read.client, read)
        self._by_object.setdefault(read.name, {}).setdefault(read.start, read)

    def _unqueue(self, read: _Read) -> None:
        read.is_queued = False
        self._queue.discard(read.address[0], read.client, read)
        of_object = self._by_object.get(read.name, {})
        if of_object.get(read.start) is read:
            del of_object[read.start]
            if not of_object:
                del self._by_object[read.name]

    def close(self) -> None:
        """End: waiting clients get nothing. The threads end after their requests."""
        with self._changed:
            self._closed = True
            ended = [each.done for read in self._reads.values() for each in read.waiting]
            self._reads.clear()
            self._queue, self._by_object = FairQueue(), {}
            self._bytes_wanted = 0
            self._kept_bytes.clear()
            self._changed.notify_all()
        for done in ended:
            done(None)

    # ---- The threads that read

    def _run(self) -> None:
        while not self._closed:
            batch: list[_Part] = []
            try:
                batch = self._next()
                if batch:
                    self._read_range(batch, batch[0][1], batch[-1][2])
            except Exception:  # a bug, or no memory, must not end this thread or leave clients waiting
                _log.exception("s3_read_failed")
                for read, *_ in batch:
                    for each in self._take(read):
                        each.done(None)
            with self._changed:
                if not batch and not self._closed:
                    self._changed.wait(1.0)
                self._bytes_under_way -= sum(end - start for _, start, end in batch)
                for read, *_ in batch:
                    self._parts_under_way -= read.step < read.size
                    if read.has_more and not read.is_queued and self._reads.get(read.at) is read:
                        if read.is_late:
                            self._forget(read)
                        else:
                            self._enqueue(read)
                self._changed.notify_all()

    def _read_range(self, batch: list[_Part], start: int, end: int) -> None:
        began_s = self._clock_s()
        with self._changed:
            self._throughput.begin(began_s)
        size = 0
        first = batch[0][0]
        try:
            context = next((read.context for read, _, _ in batch if read.context), "")
            with spans.span("s3.read", context, kind="client", bytes=end - start, records=len(batch)):
                data = self._bucket.read(first.name, start, end)
            size = end - start
        except BucketError as error:
            self._fail(batch, error)
        finally:
            with self._changed:
                self._throughput.end(self._clock_s(), began_s, size)
        if size:
            self._breakers.read.succeeded()
            self._process(batch, data)

    def _next(self) -> list[_Part]:
        """Return neighbours to read together when there is room for them; none at the end."""
        with self._changed:
            while not self._closed:
                batch = self._next_batch()
                size = sum(read.end - read.start for read in batch)
                fits = self._bytes_under_way + size <= self._config.read_bytes_under_way_max
                if batch and (fits or not self._bytes_under_way):
                    self._bytes_under_way += size
                    self._queue.charge(batch[0].address[0], size + _COST_BYTES, done=False)
                    return [self._begin(read) for read in batch]
                self._changed.wait(1.0)
        return []

    def _begin(self, read: _Read) -> _Part:
        """Begin a part. The next one waits behind those of other records, so that records come side by side."""
        self._unqueue(read)
        part = read, read.start, read.end
        read.advance()
        self._parts_under_way += read.step < read.size
        if read.has_more and read.arrived and self._parts_under_way < _PARTS_AT_ONCE:
            self._enqueue(read)
        if self._queue:
            self._changed.notify()
        return part

    def _next_batch(self) -> list[_Read]:
        """Return the next read, and the reads that follow it in the same object."""
        found = self._queue.peek()
        if found is None:
            return []
        _, first = found
        of_object = self._by_object.get(first.name, {})  # several reads may begin at the same byte
        batch, size = [first], first.end - first.start
        while (read := of_object.get(batch[-1].end)) is not None:
            size += read.end - read.start
            if size > _RANGE_BYTES:
                break
            batch.append(read)
        return batch

    def _fail(self, batch: list[_Part], error: BucketError) -> None:
        if error.reason in ("absent", "damaged"):
            self._catalog.hide(batch[0][0].name)  # the next list finds out
        self._breakers.read.failed(error.reason, error)
        for read, _, _ in batch:
            for each in self._take(read):
                each.done(None)

    def _take(self, read: _Read) -> list[_Waiter]:
        with self._changed:
            self._forget(read)
            waiting, read.waiting = read.waiting, []
            return waiting

    def _process(self, batch: list[_Part], data: memoryview) -> None:
        self.requests += 1
        self.bytes += len(data)
        first = batch[0][1]
        for read, start, end in batch:
            with self._changed:
                if self._reads.get(read.at) is not read:
                    continue  # another part was damaged or failed
                read.deadline_s = self._clock_s() + self._config.timeout_s
            try:
                with read.lock:
                    whole = read.arrives(start, data[start - first : end - first])
                    if whole is None:
                        read.check()
            except RecordError as error:
                self._drop_damaged(read, error)
                continue
            if whole is not None and read.is_record:
                self._complete(read, whole)
            elif whole is not None:
                for each in self._take(read):
                    each.done(Lease(whole[each.start : each.end]))
            else:
                with self._changed:
                    answered = [(each.done, self._lease(read, each)) for each in read.take_answered()]
                for done, lease in answered:
                    done(lease)

    def _drop_damaged(self, read: _Read, error: RecordError) -> None:
        self.report_damage(read.name, error)
        for each in self._take(read):
            each.done(None)

    def report_damage(self, name: str, error: object) -> None:
        self._catalog.hide(name)  # the next list finds out
        self._breakers.read.failed("damaged", error)

    def _complete(self, read: _Read, data: memoryview) -> None:
        """Check a record, put it into the pool, and answer the waiting clients."""
        buffer = self._buffer(len(data))
        try:
            if buffer is not None:
                buffer[:] = data
            head = record.verify(data if buffer is None else buffer, read.key)
            if head.header_length != read.place.header_bytes:
                raise RecordError(
                    f"its header has {head.header_length} bytes, the entry says {read.place.header_bytes}"
                )
        except RecordError as error:
            self._give_back(buffer)
            self._drop_damaged(read, error)
            return
        self.records += 1
        leases: list[tuple[Done, Lease]] = []
        with self._lock:
            item = None if self._closed else self._keep_in_pool(read, buffer, head)
            for start, end, done, _ in self._take(read):
                if item is None:
                    leases.append((done, Lease(data[start:end])))
                else:
                    self._pool.hold(item)
                    assert item.value is not None
                    leases.append((done, Lease(memoryview(item.value)[start:end], self._pool.release, item)))
        for done, lease in leases:
            done(lease)

    def _buffer(self, size: int) -> memoryview | None:
        """Return memory of the pool; None if there is none now."""
        with self._lock:
            if self._closed:
                return None
            try:
                return self._pool.allocate(size, lambda: None)
            except MemoryError:
                return None

    def _give_back(self, buffer: memoryview | None) -> None:
        with self._lock:
            if buffer is not None and not self._closed:
                self._pool.discard(buffer)

    def _keep_in_pool(self, read: _Read, buffer: memoryview | None, head: record.Header) -> Item | None:
        """Put a record into the pool; return its item with its value, None if the pool does not have it.

        A record that was removed in the meantime is not stored.
        """
        pool = self._pool
        if buffer is None:
            return None
        found = pool.peek(read.address)
        if found is not None and found.is_cold:
            try:
                pool.put(read.address, buffer, header_bytes=head.header_length, parent=head.parent)
                found = pool.peek(read.address)
            except (BusyError, OutOfBudgetError):
                found = None
        pool.discard(buffer)
        if found is None or found.is_cold or found.value is None or found.length != read.place.length:
            return None
        return found if found.header_bytes else None
