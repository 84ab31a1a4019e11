"""The lower tier of a pool: finds, reads, writes and removes records in a bucket that other nodes use too.

No method waits for the bucket: the tier knows its contents from lists every ``index_ttl_s``, and from its footers.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.placement import partition_of
from shadowserve.pool.cold.bucket import Bucket
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.deletions import DelayedRemovals, Deletions
from shadowserve.pool.cold.indexing import Indexer
from shadowserve.pool.cold.listing import BucketLister
from shadowserve.pool.cold.part import Breakers, Part, Shared
from shadowserve.pool.cold.partitions import Partitions
from shadowserve.pool.cold.reads import ColdItem, ColdReader
from shadowserve.pool.cold.shares import Shares
from shadowserve.pool.cold.writes import ColdWriter
from shadowserve.pool.entries import chunk_of
from shadowserve.pool.pool import Pool
from shadowserve.pool.statistics import ColdStatistics
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import Ticket, joined

_STEP_S: Final = 0.05


class ColdTier(Part):
    """The records of a bucket, for one pool. Methods are called with the pool's lock held, except set_quota(),
    report_damage(), start(), close() and join(); none of the others waits."""

    def __init__(
        self,
        config: S3Config,
        clock_s: Callable[[], float] = time.monotonic,
        serves: Callable[[int], bool] | None = None,
    ) -> None:
        """Prepare the tier; start() begins. ConfigurationError: credentials or certificates cannot be read.

        ``serves`` returns whether this node is the first choice of its fleet for a partition, in any thread and at any
        time; None: it has no fleet.
        """
        shared = Shared(config, Bucket(config), Catalog(Shares(config.chunks_max)), Breakers(clock_s), clock_s)
        super().__init__(shared)
        indexer = Indexer(shared)
        self._reader = ColdReader(shared)
        self._writer = ColdWriter(shared, indexer)
        self._deletions = Deletions(shared)
        partitions = Partitions(serves, config.index_ttl_s, clock_s)
        self._lister = BucketLister(shared, self._deletions, indexer, partitions, self._on_listed, self._on_forgotten)
        self._listed: set[int] = set()  # partitions whose objects are known
        self._delayed_removals = DelayedRemovals(config.timeout_s, clock_s)  # until the first list
        self._new: list[tuple[int | None, Ticket]] = []  # removals since the last barrier, with their tenants
        self._in_barrier: list[tuple[int | None, Ticket]] = []
        self._removing: set[int | None] = set()  # tenants that have removed something since the last barrier
        self._is_news_left = False
        self._ended = threading.Event()
        self._stepper = threading.Thread(target=self._run_steps, name="s3-step", daemon=True)
        self._pool: Pool
        self._lock: threading.Lock

    def set_quota(self, tenant: str, bytes_max: int | None, keys_max: int | None) -> None:
        """Limit a tenant's share of the bucket when it has no room for all. All nodes of a bucket need the same."""
        self._catalog.set_share(tenant, keys_max)
        self._lister.set_quota(tenant, bytes_max)

    # ---- Life

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        """Begin to serve ``pool``; wait at most ``timeout_s`` for the first list, to spare first clients misses."""
        self._pool, self._lock = pool, lock
        self._reader.start(pool, lock)
        self._writer.start(pool, lock)
        self._deletions.start()
        self._stepper.start()
        self._lister.thread.start()
        self._lister.tried.wait(self._config.timeout_s)

    def hurry(self) -> None:
        """Write everything that waits to be written: the pool is about to close."""
        self._writer.hurry()
        self._is_news_left = True

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written: records, and after hurry() also news, which are tried once."""
        return self._writer.idle and not self._is_news_left

    def close(self) -> None:
        """End: clients that wait get nothing, and the pool is not used any more once its lock was free. Requests in
        progress may continue until their deadlines; join() waits for them."""
        self._ended.set()
        self._lister.close()
        self._deletions.close()
        self._reader.close()
        self._writer.close()

    def join(self) -> None:
        """Wait for the threads, at most as long as a read may take."""
        ends = time.monotonic() + self._config.timeout_s
        own = [thread for thread in (self._stepper, self._lister.thread) if thread.ident is not None]
        for thread in (*own, *self._reader.threads, *self._writer.threads, *self._deletions.threads):
            thread.join(max(0.0, ends - time.monotonic()))
        self._bucket.close()

    # ---- Finding and reading

    def find(self, address: Address) -> Item | None:
        """Return a record of the bucket; None if it is unknown, or the bucket is away."""
        record = None if self._breakers.read.away else self._record_of(address)
        if record is None:
            return None
        self._lister.partitions.ask(partition_of(record[1]))
        found = self._catalog.find(*record)
        return None if found is None else ColdItem(address, *record, found)

    def read(
        self, item: Item, start: int, end: int, done: Callable[[Lease | None], None], *, in_parts: bool, ahead: bool
    ) -> None:
        assert isinstance(item, ColdItem)
        self._catalog.touch(item.found, self._clock_s())
        self._reader.read(item, start, end, done, in_parts=in_parts, ahead=ahead)

    def report_damage(self, item: Item) -> None:
        assert isinstance(item, ColdItem)
        self._reader.report_damage(item.name, "a range has wrong bytes")

    def expected_s(self, size: int) -> float:
        return self._reader.expected_s(size)

    def _record_of(self, address: Address) -> tuple[str, bytes] | None:
        """Return a tenant's name and the index's key of a record; None for keys that no record has."""
        key = chunk_of(address[1])
        name = None if key is None else self._pool.tenant_name(address[0])
        return None if key is None or name is None else (name, key)

    # ---- Changing

    def stored(
        self, address: Address, *, header_bytes: int, expires: bool, parent: bytes, length: int
    ) -> Ticket | None:
        """Receive a value that the pool has stored; return a ticket if its client has to wait.

        Records without an expiry are written to the bucket. Any other value replaces the record of its key, also after
        a restart: the ticket settles when the bucket has no record of the key any more.
        """
        record = self._record_of(address)
        if record is None:
            return None
        self._lister.partitions.ask(partition_of(record[1]))
        if not header_bytes or expires:
            return self._remove(address, *record)[1]
        if self._catalog.find(*record) is None:
            self._writer.stored(address, record[1], parent, length)
        return self._replaced(*record)

    def settling(self, address: Address) -> Ticket | None:
        """Return a ticket that settles when no restart can bring back a record that the present value has replaced."""
        record = self._record_of(address)
        return None if record is None else self._replaced(*record)

    def _replaced(self, tenant: str, key: bytes) -> Ticket | None:
        """Return a ticket for the deletion of objects with an older record of a key."""
        names = self._catalog.marked_with(tenant, key)
        return self._deletions.delete(tenant, names) if names else None

    def holds_back(self, address: Address) -> bool:
        """Return whether a record may not be evicted yet, since it is being written here, for a limited time.

        A record that leaves the pool has been used: the bucket goes on with the pool's order of eviction.
        """
        is_held = self._writer.holds_back(address)
        if not is_held and self._config.bytes_max is not None:
            record = self._record_of(address)
            found = None if record is None else self._catalog.find(*record)
            if found is not None:
                self._catalog.touch(found, self._clock_s())
        return is_held

    def removed(self, address: Address) -> bool:
        """Make a record absent and delete the objects that have it; return whether there were any.

        The other records of these objects are deleted with them.
        """
        self._removing.add(address[0])
        record = self._record_of(address)
        if record is None:
            return False
        was_there, ticket = self._remove(address, *record)
        self._add_to_barrier(address[0], ticket)
        return was_there

    def _remove(self, address: Address, tenant: str, key: bytes) -> tuple[bool, Ticket | None]:
        """Return whether a record was known, and a ticket for its removal; None if it is removed."""
        was_there = self._catalog.find(tenant, key) is not None
        tickets = [self._writer.removed(address), self._delete(tenant, key)]
        if partition_of(key) not in self._listed:
            self._lister.partitions.ask(partition_of(key))
            tickets.append(self._delayed_removals.add(tenant, key))
        return was_there, joined(tickets)

    def _delete(self, tenant: str, key: bytes) -> Ticket | None:
        """Begin to delete the objects that have, or may have, a record; None if there are none."""
        marked = self._catalog.mark_for_deletion(tenant, key)
        return joined(
            (
                self._deletions.delete(tenant, marked.names) if marked.names else None,
                self._deletions.delete_unread(tenant) if marked.may_be_elsewhere else None,
            )
        )

    def cleared(self, tenant: int | None) -> None:
        """Make all records of a tenant, or of all tenants, absent, and delete all their objects from the bucket."""
        self._removing.add(tenant)
        name = None if tenant is None else self._pool.tenant_name(tenant)
        if tenant is not None and name is None:
            return
        self._catalog.mark_all(name)
        self._add_to_barrier(tenant, self._writer.cleared(tenant))
        self._add_to_barrier(tenant, self._deletions.clear(name))

    def _add_to_barrier(self, tenant: int | None, ticket: Ticket | None) -> None:
        if ticket is not None:
            # Keep one failed ticket for the next barrier, which reports the first error.
            failed = [each for each in self._new if each[1].failed][:1]
            self._new = [*failed, *(each for each in self._new if not each[1].settled), (tenant, ticket)]

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when all removed records are gone from the bucket; None if they are.

        They are those of the tenants that have removed something since the last barrier, or else of all tenants. An
        earlier failure is reported to one caller: a client's command calls this in the same hold of the lock.
        """
        removing, self._removing = self._removing | {None}, set()
        is_of_all = len(removing) == 1
        waited = [each for tenant, each in self._in_barrier if not each.settled and (is_of_all or tenant in removing)]
        waited += [each for _, each in self._new if not each.settled or each.failed]
        self._in_barrier = [each for each in (*self._in_barrier, *self._new) if not each[1].settled]
        self._new = []
        return joined(waited)

    # ---- Threads

    def _run_steps(self) -> None:
        while not self._ended.wait(_STEP_S):
            self._reader.step()
            self._deletions.step()
            if self._is_news_left and self._writer.idle:
                self._lister.scanner.write_news()
                self._is_news_left = False
            list_breaker = self._breakers.list
            error = f"the bucket was not listed since the start and may have the key: {list_breaker.last_error}"
            self._delayed_removals.expire(ShadowServeError(error), all_of_them=list_breaker.away)

    def _on_listed(self, partitions: Iterable[int]) -> None:
        if not self._listed.issuperset(partitions):
            # With the lock that removals hold: none is delayed after the delayed ones were begun.
            with self._lock:
                self._listed.update(partitions)
            self._delayed_removals.begin(self._delete, lambda key: partition_of(key) in self._listed)

    def _on_forgotten(self, partition: int) -> None:
        with self._lock:
            self._listed.discard(partition)

    # ---- Statistics

    def statistics(self) -> ColdStatistics:
        reader, writer, lister = self._reader, self._writer, self._lister
        failing = self._breakers
        breakers = failing.read, failing.list, failing.write, failing.delete
        return ColdStatistics(
            state="away" if failing.read.away or failing.list.away else "ok" if lister.lists else "unknown",
            failing_s=max(each.failing_s for each in breakers),
            last_error=next((each.last_error for each in breakers if each.failing_s), ""),
            lists=lister.lists,
            objects=self._catalog.objects,
            records=self._catalog.chunks,
            bytes=self._catalog.bytes,
            requests=reader.requests,
            read_records=reader.records,
            read_bytes=reader.bytes,
            reading=reader.under_way,
            failed_reads=dict(failing.read.failures | failing.list.failures),
            written_objects=writer.objects,
            written_bytes=writer.bytes,
            present_objects=writer.present,
            failed_writes=dict(failing.write.failures + failing.delete.failures + failing.clear.failures),
            waiting_records=writer.gathering.waiting,
            held_back=writer.held_back,
            missed_records=writer.missed + writer.gathering.dropped,
            swept_objects=lister.swept,
            deleting=self._deletions.waiting,
            foreign_objects=lister.scanner.foreign,
            left_out_objects=self._catalog.left_out,
            crowded_out_reads=reader.crowded_out,
        )
