"""Writes records to the bucket: gathered along their chains, packed into objects, each written once."""

import logging
import threading
from concurrent.futures import Future, wait
from math import inf
from typing import Final

from shadowserve.pool.cold.bucket import Bucket, BucketError
from shadowserve.pool.cold.gathering import BACKLOG_MAX, Batch, Gathering
from shadowserve.pool.cold.indexing import Indexer
from shadowserve.pool.cold.layout import (
    RECORDS_MAX,
    ColdObjectError,
    Contents,
    Place,
    finish,
    footer_bytes,
    parse_footer,
)
from shadowserve.pool.cold.part import Shared, ThreadedPart
from shadowserve.pool.entries import parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import Address, Lease
from shadowserve.pool.volume.tickets import Ticket, joined

_log = logging.getLogger(__name__)

FOOTER_READ_BYTES: Final = 64 << 10
"""Bytes of an object's end that are read at once: entries of 1,300 records."""
_PAUSE_S: Final = 0.1
_PRESSING_S: Final = 1.0
"""Time after a held-back eviction in which records are written that would be evicted next."""


def read_contents(bucket: Bucket, name: str, size: int) -> Contents:
    """Return the contents of an object, by its footer; ColdObjectError: it is unsound."""
    if size <= 0:
        raise ColdObjectError("it is empty")
    footer = bytes(bucket.read(name, max(0, size - FOOTER_READ_BYTES), size))
    needed = footer_bytes(footer, size)
    if needed > len(footer):
        footer = bytes(bucket.read(name, size - needed, size))
    return parse_footer(name, footer, size)


class _Packing:
    """A batch that is being written, its records, and the tickets of removals that wait for it."""

    def __init__(self, batch: Batch) -> None:
        self.tenant = batch.tenant
        self.addresses = {address for address, _ in batch.records}
        self.removal_tickets: list[Ticket] = []  # removals of its records
        self.contents: Contents | None = None  # set once the object may be in the bucket


class ColdWriter(ThreadedPart):
    """Writes stored records as fast as the bucket accepts them.

    With ``write: at_once`` no client waits: if the bucket is slower, records that are evicted meanwhile, and those
    beyond the backlog, are not written. With ``write: evicted`` nothing is written before the pool needs room, or half
    of the backlog is waiting. Then a record stays in the pool until it is written; unless the bucket is away, or
    nothing was written for ``timeout_s``. :class:`ColdStatistics` describes the counters.
    """

    def __init__(self, shared: Shared, indexer: Indexer) -> None:
        super().__init__(shared)
        self.objects = self.bytes = self.present = self.missed = self.held_back = 0
        self.gathering = Gathering(int(self._config.object_bytes), self._config.gather_s, RECORDS_MAX)
        self._indexer = indexer
        self._packing: list[_Packing] = []
        self._hurry = False
        self._held_back_since_s: float | None = None  # time of the first held-back eviction since the last write
        self._held_back_last_s = -inf
        self._pool: Pool
        self._lock: threading.Lock

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        """``lock`` is the pool's."""
        self._pool, self._lock = pool, lock
        if self._config.write != "never":
            self._start_threads("write", self._config.writes_at_once, self._run)

    def stored(self, address: Address, key: bytes, parent: bytes, length: int) -> None:
        """Add a record to be written; with the pool's lock held."""
        if self._config.write == "never" or length > self._config.read_bytes_under_way_max:
            return
        with self._changed:
            self.gathering.add(address, key, parent, length, self._clock_s())

    def holds_back(self, address: Address) -> bool:
        """Return whether the pool must keep a record until it is written; with the pool's lock held."""
        if self._config.write != "evicted":
            return False
        tenant, key, _ = parse_key(address)
        with self._changed:
            waits = self.gathering.prioritize(tenant, key) or any(address in each.addresses for each in self._packing)
            if not waits:
                self._held_back_since_s = None
            if not waits or self._closed or self._breakers.write.away:
                return False
            now_s = self._clock_s()
            if self._held_back_since_s is None:
                self._held_back_since_s = now_s
            if now_s - self._held_back_since_s > self._config.timeout_s:
                return False
            self.held_back += 1
            self._held_back_last_s = now_s
            self._changed.notify()
            return True

    def removed(self, address: Address) -> Ticket | None:
        """Keep a record out of the bucket; return a ticket if an object with it is being written, None otherwise."""
        with self._changed:
            return self._await_end([each for each in self._packing if address in each.addresses])

    def cleared(self, tenant: int | None) -> Ticket | None:
        """Keep all records of a tenant, or of all tenants, out of the bucket, as removed()."""
        with self._changed:
            self.gathering.forget(tenant)
            return self._await_end([each for each in self._packing if tenant is None or each.tenant == tenant])

    @staticmethod
    def _await_end(packing: list[_Packing]) -> Ticket | None:
        for each in packing:
            each.removal_tickets.append(Ticket())
        return joined(each.removal_tickets[-1] for each in packing)

    def hurry(self) -> None:
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written, or the bucket is away."""
        return self._breakers.write.away or not (self.gathering.waiting or self._packing) or not self.threads

    # ---- The threads that write

    def _take(self) -> Batch | None:
        now_s = self._clock_s()
        evicting = self._config.write == "evicted"
        pressed = now_s - self._held_back_last_s < _PRESSING_S or self.gathering.waiting > BACKLOG_MAX // 2
        if self._breakers.write.away or (evicting and not (pressed or self._hurry)):
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
                self._breakers.write.failed(error.reason, error)
                if packing.contents is not None and not packing.removal_tickets:
                    self._catalog.add_hidden(packing.contents)  # the write may have succeeded
                with self._changed:
                    self.gathering.put_back(batch)
            except Exception:  # a bug must not end this thread
                _log.exception("s3_write_failed")
            finally:
                self._end(packing)

    def _write(self, batch: Batch, packing: _Packing) -> None:
        packed = self._pack(batch)
        if packed is None or packing.removal_tickets:
            return
        contents, body = packed
        packing.contents = contents
        is_new = self._bucket.create(contents.name, body)
        if is_new:
            self.objects += 1
            self.bytes += len(body)
        else:
            self.present += 1
            try:  # of another node: the same records, perhaps with other bytes
                contents = read_contents(self._bucket, contents.name, len(body))
            except ColdObjectError:
                return  # of another size, or unsound: the next list handles it
        self._breakers.write.succeeded()
        self._held_back_since_s = None
        if not packing.removal_tickets and self._catalog.add(contents) and is_new:
            self._indexer.note(contents)

    def _end(self, packing: _Packing) -> None:
        """End a batch. If one of its records was removed during the write, delete the object."""
        with self._changed:
            self._packing.remove(packing)
        if not packing.removal_tickets:
            return
        failure: BucketError | None = None
        if packing.contents is not None:
            name = packing.contents.name
            self._catalog.add_hidden(packing.contents)
            self._catalog.mark_object(name)
            try:
                self._bucket.delete(name)
                self._catalog.note_deleted(name)
            except BucketError as error:
                failure = error
        for ticket in packing.removal_tickets:
            ticket.settle(failure)

    def _pack(self, batch: Batch) -> tuple[Contents, bytearray] | None:
        """Return an object of those records that the pool has and the bucket has not; None if there are none."""
        with self._lock:
            tenant = None if self._closed else self._pool.tenant_name(batch.tenant)
        if tenant is None:
            return None
        body, records, seen = bytearray(), [], set()
        for address, key in batch.records:
            if key in seen or self._catalog.find(tenant, key) is not None:
                continue
            seen.add(key)
            begin = len(body)
            header_bytes = self._append(body, address)
            if header_bytes:
                records.append((key, Place(begin, len(body) - begin, header_bytes)))
            else:
                self.missed += 1
        return (finish(body, tenant, records), body) if records else None

    def _append(self, body: bytearray, address: Address) -> int:
        """Append a record's bytes; return the length of its header, 0 if the pool does not have it any more."""
        leased: Future[Lease | None] = Future()
        with self._lock:
            item = None if self._closed else self._pool.peek(address)
            if item is None or item.is_cold or not item.header_bytes or item.expires_at_ms is not None:
                return 0
            header_bytes, length = item.header_bytes, item.length
            if item.value is not None:
                self._pool.hold(item)
                leased.set_result(Lease(memoryview(item.value), self._pool.release, item))
            else:
                self._pool.read(item, 0, length, leased.set_result)
        while not wait([leased], _PAUSE_S).done:  # the pool's devices have their own deadline
            if self._closed:
                return 0
        lease = leased.result()
        if lease is None:
            return 0
        body += lease.view
        with self._lock:
            if not self._closed:
                lease.release()
        return header_bytes
