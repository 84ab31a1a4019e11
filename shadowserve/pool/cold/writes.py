"""Records on their way into the bucket: gathered along their chains, packed, written once."""

import logging
import threading
from collections.abc import Callable
from math import inf
from typing import Final

from shadowserve.pool.cold.bucket import Bucket, BucketError
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.gathering import BACKLOG_MAX, Batch, Gathering
from shadowserve.pool.cold.layout import RECORDS_MAX, ColdObjectError, Contents, Place, finish, parse_tail, tail_bytes
from shadowserve.pool.cold.outage import Outage
from shadowserve.pool.keys import parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.terms import Address, Lease
from shadowserve.pool.volume.changes import Ticket

_log = logging.getLogger(__name__)

TAIL_BYTES: Final = 64 << 10
"""Of an object's end, read at once: the entries of 1,300 records."""
_PAUSE_S: Final = 0.1
_PRESSING_S: Final = 1.0
"""How long room is made for others once something had to be held back: what is next to be evicted is written then."""


def read_contents(bucket: Bucket, name: str, size: int) -> Contents:
    """Return what an object has, by its tail.

    Raises:
        BucketError: it cannot be read.
        ColdObjectError: it is not sound.
    """
    if size <= 0:
        raise ColdObjectError("it is empty")
    tail = bytes(bucket.read(name, max(0, size - TAIL_BYTES), size))
    needed = tail_bytes(tail, size)
    if needed > len(tail):
        tail = bytes(bucket.read(name, size - needed, size))
    return parse_tail(name, tail, size)


class _Packing:
    """A batch that is being written, the records that it may have, and who wants it gone again."""

    def __init__(self, batch: Batch) -> None:
        self.tenant = batch.tenant
        self.addresses = {address for address, _ in batch.records}
        self.spoiled: list[Ticket] = []  # by whoever removes one of the records
        self.contents: Contents | None = None  # of the object, from when it may be in the bucket


class ColdWriter:
    """Writes what is stored, as fast as the bucket takes it.

    What waits, waits as keys. Written at once, no client waits for it: when the bucket is slower than the clients, what
    the pool has evicted meanwhile, and what is beyond the backlog, does not get into the bucket. Written when evicted,
    nothing is written before the pool needs room or half of the backlog waits; a record then stays in the pool until it
    is written, so that whoever stores gets no further than the bucket does, but while the bucket is away, or nothing
    was written for ``timeout_s``.

    Attributes:
        objects: that were written.
        bytes: that they have.
        present: objects that another node had written.
        missed: records that were evicted before they were written.
        held_back: evictions that had to wait for a record to be written.
    """

    def __init__(
        self, config: S3Config, bucket: Bucket, catalog: Catalog, outage: Outage, clock_s: Callable[[], float]
    ) -> None:
        self.objects = self.bytes = self.present = self.missed = self.held_back = 0
        self.gathering = Gathering(int(config.object_bytes), config.gather_s, RECORDS_MAX)
        self._config = config
        self._bucket = bucket
        self._catalog = catalog
        self._outage = outage
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._packing: list[_Packing] = []
        self._hurry = self._closed = False
        self._held_s: float | None = None  # when the first eviction had to wait since something was written
        self._pressed_s = -inf  # when the last one had to
        self._pool: Pool
        self._lock: threading.Lock
        self._name_of: Callable[[int], str | None]
        self.threads: list[threading.Thread] = []

    def start(self, pool: Pool, lock: threading.Lock, name_of: Callable[[int], str | None]) -> None:
        """Begin. ``lock``: the pool's; ``name_of``: the name of a tenant, with that held."""
        self._pool, self._lock, self._name_of = pool, lock, name_of
        if self._config.write == "never":
            return
        for number in range(self._config.writes_at_once):
            thread = threading.Thread(target=self._run, name=f"s3-write-{number}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def stored(self, address: Address, key: bytes, parent: bytes, length: int) -> None:
        """Have a record written; with the pool's lock held."""
        if self._config.write == "never" or length > self._config.read_bytes_under_way_max:
            return
        with self._changed:
            self.gathering.add(address, key, parent, length, self._clock_s())

    def holds_back(self, address: Address) -> bool:
        """Return whether a record waits to be written and the pool has to keep it for that; with its lock held."""
        if self._config.write != "evicted":
            return False
        tenant, key, _ = parse_key(address)
        with self._changed:
            waits = self.gathering.urge(tenant, key) or any(address in each.addresses for each in self._packing)
            if not waits:
                self._held_s = None
            if not waits or self._closed or self._outage.away:
                return False
            now_s = self._clock_s()
            self._held_s = now_s if self._held_s is None else self._held_s
            if now_s - self._held_s > self._config.timeout_s:
                return False
            self.held_back += 1
            self._pressed_s = now_s
            self._changed.notify()
            return True

    def removed(self, address: Address) -> Ticket | None:
        """Have no object get into the bucket that would bring a record back; return when that is sure, None for now."""
        with self._changed:
            return self._spoil([each for each in self._packing if address in each.addresses])

    def cleared(self, tenant: int | None) -> Ticket | None:
        """The same for all records of a tenant, or all."""
        with self._changed:
            self.gathering.forget(tenant)
            return self._spoil([each for each in self._packing if tenant is None or each.tenant == tenant])

    @staticmethod
    def _spoil(packing: list[_Packing]) -> Ticket | None:
        tickets = []
        for each in packing:
            tickets.append(Ticket())
            each.spoiled.append(tickets[-1])
        return Ticket.of(*tickets) if tickets else None

    def hurry(self) -> None:
        """Let nothing wait for more of its chain any longer."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be written, or the bucket takes nothing."""
        return self._outage.away or not (self.gathering.waiting or self._packing) or not self.threads

    def close(self) -> None:
        """End; what is not written is not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- The threads that write

    def _take(self) -> Batch | None:
        now_s = self._clock_s()
        evicting = self._config.write == "evicted"
        pressed = now_s - self._pressed_s < _PRESSING_S or self.gathering.waiting > BACKLOG_MAX // 2
        if self._outage.away or (evicting and not (pressed or self._hurry)):
            return None
        return self.gathering.take(now_s, hurry=self._hurry or evicting)

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                batch = self._take()
                if batch is None:
                    self._changed.wait(_PAUSE_S)
                    continue
                packing = _Packing(batch)
                self._packing.append(packing)
            try:
                self._write(batch, packing)
            except BucketError as error:
                self._outage.failed(error.reason, error)
                if packing.contents is not None and not packing.spoiled:
                    self._catalog.hide(packing.contents)  # it may have got there all the same
                with self._changed:
                    self.gathering.put_back(batch)
            except Exception:  # a bug of ours must not leave the tier without this thread
                _log.exception("s3_write_failed")
            finally:
                self._end(packing)

    def _write(self, batch: Batch, packing: _Packing) -> None:
        packed = self._pack(batch)
        if packed is None or packing.spoiled:
            return
        contents, body = packed
        packing.contents = contents
        if self._bucket.create(contents.name, body):
            self.objects += 1
            self.bytes += len(body)
        else:
            self.present += 1
            try:  # another node's: the same records, but maybe not the same bytes
                contents = read_contents(self._bucket, contents.name, len(body))
            except ColdObjectError:
                return  # of another size, or not sound: the next list tells
        self._outage.succeeded()
        self._held_s = None
        if not packing.spoiled:
            self._catalog.add(contents)

    def _end(self, packing: _Packing) -> None:
        """Take leave of a batch. An object that was written meanwhile is deleted if one of its records was removed."""
        with self._changed:
            self._packing.remove(packing)
        if not packing.spoiled:
            return
        failure: BucketError | None = None
        if packing.contents is not None:
            name = packing.contents.name
            self._catalog.hide(packing.contents)
            self._catalog.condemn(name)
            try:
                self._bucket.delete(name)
                self._catalog.spare(name)
            except BucketError as error:
                failure = error
        for ticket in packing.spoiled:
            ticket.settle(failure)

    def _pack(self, batch: Batch) -> tuple[Contents, bytearray] | None:
        """Return an object of a batch's records that the pool has and the bucket has not; None if there are none."""
        with self._lock:
            tenant = None if self._closed else self._name_of(batch.tenant)
        if tenant is None:
            return None
        body, records, seen = bytearray(), [], set()
        for address, key in batch.records:
            if key in seen or self._catalog.find(tenant, key) is not None:
                continue
            seen.add(key)
            begin = len(body)
            head_bytes = self._append(body, address)
            if head_bytes:
                records.append((key, Place(begin, len(body) - begin, head_bytes)))
            else:
                self.missed += 1
        return (finish(body, tenant, records), body) if records else None

    def _append(self, body: bytearray, address: Address) -> int:
        """Append a record's bytes; return the length of its head, or 0 where the pool does not have it any more."""
        arrived = threading.Event()
        leases: list[Lease | None] = []

        def done(lease: Lease | None) -> None:
            leases.append(lease)
            arrived.set()

        with self._lock:
            item = None if self._closed else self._pool.peek(address)
            if item is None or item.is_cold or not item.head_bytes or item.expires_at_ms is not None:
                return 0
            head_bytes, length = item.head_bytes, item.length
            if item.value is not None:
                self._pool.hold(item)
                leases.append(Lease(memoryview(item.value), self._pool.release, item))
                arrived.set()
            else:
                self._pool.read(item, 0, length, done)
        while not arrived.wait(_PAUSE_S):  # the pool's devices have a deadline of their own
            if self._closed:
                return 0
        if leases[0] is None:
            return 0
        body += leases[0].view
        with self._lock:
            if not self._closed:
                leases[0].release()
        return head_bytes
