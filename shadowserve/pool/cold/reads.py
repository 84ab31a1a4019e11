"""Reads records from the bucket into the pool: in ranges, many at a time, each with a deadline."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from shadowserve import record, spans
from shadowserve.errors import RecordError
from shadowserve.pool.cold.breaker import Breaker
from shadowserve.pool.cold.bucket import Bucket, BucketError
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.fair import FairQueue
from shadowserve.pool.cold.layout import Contents, Place
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError

_log = logging.getLogger(__name__)

_RANGE_BYTES: Final = 8 << 20
"""Most bytes of neighbours that are read together: S3 is fastest with ranges of 8 to 16 MiB, several at a time."""

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

    __slots__ = ("address", "contents", "key")

    is_cold = True

    def __init__(self, address: Address, key: bytes, contents: Contents) -> None:
        place = contents.places[key]
        self.length = place.length
        self.header_bytes = place.header_bytes
        self.expires_at_ms = None
        self.value = None
        self.address = address
        self.key = key
        self.contents = contents


class _Read:
    """One record that is being read, and its waiting clients."""

    __slots__ = ("address", "begun", "client", "context", "contents", "deadline_s", "key", "place", "waiting")

    def __init__(self, item: ColdItem, client: int, deadline_s: float) -> None:
        self.client = client
        self.context = spans.current()
        self.address = item.address
        self.key = item.key
        self.contents = item.contents
        self.place: Place = item.contents.places[item.key]
        self.deadline_s = deadline_s
        self.begun = False
        self.waiting: list[tuple[int, int, Done]] = []


class ColdReader:
    """Reads records, checks them, and puts them into the pool, which sends them and finds them again.

    Attributes:
        requests: Ranges that were read.
        bytes: Bytes of these.
        records: Sound records.
        crowded_out: Reads that were a miss because other reads of their tenant came first.
    """

    def __init__(
        self, config: S3Config, bucket: Bucket, catalog: Catalog, breaker: Breaker, clock_s: Callable[[], float]
    ) -> None:
        self.requests = self.bytes = self.records = self.crowded_out = 0
        self._config = config
        self._bucket = bucket
        self._catalog = catalog
        self._breaker = breaker
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._reads: dict[tuple[str, bytes], _Read] = {}
        self._queue: FairQueue[_Read] = FairQueue()
        self._by_object: dict[str, dict[int, _Read]] = {}  # queued reads by object and offset
        self._bytes_under_way = self._bytes_wanted = 0  # in requests, and of all waiting records
        self._throughput = ThroughputEstimate()
        self._closed = False
        self._pool: Pool
        self._lock: threading.Lock
        self.threads: list[threading.Thread] = []

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        self._pool, self._lock = pool, lock
        for number in range(self._config.reads_at_once):
            thread = threading.Thread(target=self._run, name=f"s3-read-{number}", daemon=True)
            thread.start()
            self.threads.append(thread)

    @property
    def under_way(self) -> int:
        """Number of records that clients wait for."""
        return len(self._reads)

    def expected_s(self, size: int) -> float:
        """Return the expected time to read records of ``size`` bytes in total now."""
        return self._throughput.expected_s(self._bytes_wanted + size)

    def read(self, item: ColdItem, start: int, end: int, done: Done) -> None:
        """Read bytes of an item, as :meth:`Pool.read`; with the pool's lock held."""
        with self._changed:
            at = item.contents.name, item.key
            read = self._reads.get(at)
            refused = self._closed or self._breaker.away
            if not refused and read is None and self._queue.waiting(item.address[0]) >= _WAITING_MAX:
                refused = True
                self.crowded_out += 1
            if not refused:
                if read is None:
                    client = self._pool.client
                    read = self._reads[at] = _Read(item, client, self._clock_s() + self._config.timeout_s)
                    self._bytes_wanted += read.place.length
                    self._queue.push(item.address[0], client, read)
                    self._by_object.setdefault(item.contents.name, {})[read.place.offset] = read
                    self._changed.notify()
                read.waiting.append((start, end, done))
        if refused:
            done(None)

    def step(self) -> None:
        """End reads whose deadline has passed, and those that wait for a bucket that is away; called often."""
        now_s, away = self._clock_s(), self._breaker.away
        ended: list[Done] = []
        late = 0
        with self._changed:
            for at, read in list(self._reads.items()):
                if read.deadline_s > now_s and not (away and not read.begun):
                    continue
                if not away:  # a read that was only queued says nothing about the bucket
                    late += bool(read.waiting) and read.begun
                    self.crowded_out += bool(read.waiting) and not read.begun
                ended += [done for _, _, done in read.waiting]
                read.waiting.clear()
                if not read.begun:
                    self._forget(at)
                    self._unqueue(read)
        if late:
            self._breaker.failed("timeout", f"{late} reads were not done within {self._config.timeout_s:g} s")
        for done in ended:
            done(None)

    def _forget(self, at: tuple[str, bytes]) -> None:
        read = self._reads.pop(at, None)
        if read is not None:
            self._bytes_wanted -= read.place.length

    def _unqueue(self, read: _Read) -> None:
        self._queue.discard(read.address[0], read.client, read)
        of_object = self._by_object[read.contents.name]
        del of_object[read.place.offset]
        if not of_object:
            del self._by_object[read.contents.name]

    def close(self) -> None:
        """End: waiting clients get nothing. The threads end after their requests."""
        with self._changed:
            self._closed = True
            ended = [done for read in self._reads.values() for _, _, done in read.waiting]
            self._reads.clear()
            self._queue, self._by_object = FairQueue(), {}
            self._bytes_wanted = 0
            self._changed.notify_all()
        for done in ended:
            done(None)

    # ---- The threads that read

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            start, end = batch[0].place.offset, batch[-1].place.offset + batch[-1].place.length
            try:
                self._read_range(batch, start, end)
            except Exception:  # a bug must not end this thread
                _log.exception("s3_read_failed")
            with self._changed:
                self._bytes_under_way -= end - start
                self._changed.notify_all()

    def _read_range(self, batch: list[_Read], start: int, end: int) -> None:
        began_s = self._clock_s()
        with self._changed:
            self._throughput.begin(began_s)
        size = 0
        try:
            context = next((read.context for read in batch if read.context), "")
            with spans.span("s3.read", context, kind="client", bytes=end - start, records=len(batch)):
                data = self._bucket.read(batch[0].contents.name, start, end)
            size = end - start
        except BucketError as error:
            self._fail(batch, error)
        finally:
            with self._changed:
                self._throughput.end(self._clock_s(), began_s, size)
        if size:
            self._breaker.succeeded()
            self._process(batch, data)

    def _next(self) -> list[_Read] | None:
        """Return neighbours to read together when there is room for them; None at the end."""
        with self._changed:
            while not self._closed:
                batch = self._next_batch()
                size = sum(read.place.length for read in batch)
                fits = self._bytes_under_way + size <= self._config.read_bytes_under_way_max
                if batch and (fits or not self._bytes_under_way):
                    self._bytes_under_way += size
                    self._queue.charge(batch[0].address[0], batch[0].client, size + _COST_BYTES)
                    for read in batch:
                        read.begun = True
                        self._unqueue(read)
                    if self._queue:
                        self._changed.notify()
                    return batch
                self._changed.wait(1.0)
        return None

    def _next_batch(self) -> list[_Read]:
        """Return the next read, and the reads that follow it in the same object."""
        found = self._queue.peek()
        if found is None:
            return []
        _, _, first = found
        of_object = self._by_object[first.contents.name]
        batch, size = [first], first.place.length
        while (read := of_object.get(batch[-1].place.offset + batch[-1].place.length)) is not None:
            size += read.place.length
            if size > _RANGE_BYTES:
                break
            batch.append(read)
        return batch

    def _fail(self, batch: list[_Read], error: BucketError) -> None:
        if error.reason in ("absent", "damaged"):
            self._catalog.hide(batch[0].contents)  # the next list finds out
        self._breaker.failed(error.reason, error)
        for read in batch:
            for _, _, done in self._take(read):
                done(None)

    def _take(self, read: _Read) -> list[tuple[int, int, Done]]:
        with self._changed:
            self._forget((read.contents.name, read.key))
            waiting, read.waiting = read.waiting, []
            return waiting

    def _process(self, batch: list[_Read], data: memoryview) -> None:
        self.requests += 1
        self.bytes += len(data)
        first = batch[0].place.offset
        for read in batch:
            begin = read.place.offset - first
            self._complete(read, data[begin : begin + read.place.length])

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
            self._catalog.hide(read.contents)
            self._breaker.failed("damaged", error)
            for _, _, done in self._take(read):
                done(None)
            return
        self.records += 1
        leases: list[tuple[Done, Lease]] = []
        with self._lock:
            item = None if self._closed else self._keep_in_pool(read, buffer, head)
            for start, end, done in self._take(read):
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
