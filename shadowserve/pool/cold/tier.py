"""The tier below a pool: finds, reads, writes and removes records in a bucket that other nodes use as well.

No method waits for the bucket. What the bucket holds is known from listing it every ``index_ttl_s`` and reading the
tails of objects that are new; nothing is asked of it to find a record, or not to find one.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final, NamedTuple

from shadowserve.errors import ShadowServeError
from shadowserve.pool.cold.bucket import Bucket, BucketError, Listed
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.layout import ColdObjectError, parse_name
from shadowserve.pool.cold.outage import Outage
from shadowserve.pool.cold.reads import ColdItem, ColdReader
from shadowserve.pool.cold.writes import ColdWriter, read_contents
from shadowserve.pool.keys import parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.statistics import ColdStatistics
from shadowserve.pool.terms import DEFAULT_TENANT, Address, Item, Lease
from shadowserve.pool.volume.changes import Ticket

__all__ = ["ColdTier"]

_log = logging.getLogger(__name__)

_STEP_S: Final = 0.05
_TAILS_AT_ONCE: Final = 8
_SWEPT_SHARE: Final = 0.95
"""Of bytes_max, what a sweep leaves: so that it does not delete an object after each that is written."""


class _Deletion(NamedTuple):
    """Objects to delete; with ``clears``, also what a list shows of ``tenant`` (None: of all)."""

    names: list[str]
    ticket: Ticket
    clears: bool = False
    tenant: str | None = None


class ColdTier:
    """The records of a bucket, for one pool. Methods are called with the pool's lock held, but start(), close()."""

    def __init__(self, config: S3Config, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Make what start() begins.

        Raises:
            ConfigurationError: credentials or certificates cannot be read.
            NotInstalledError: the client is not there.
        """
        self._config = config
        self._bucket = Bucket(config)
        self._catalog = Catalog(config.chunks_max)
        self._outage = Outage("read", clock_s)
        self._reader = ColdReader(config, self._bucket, self._catalog, self._outage, clock_s)
        self._write_outage = Outage("write", clock_s)
        self._writer = ColdWriter(config, self._bucket, self._catalog, self._write_outage, clock_s)
        self._deletions: SimpleQueue[_Deletion | None] = SimpleQueue()
        self._new: list[Ticket] = []  # since the last barrier
        self._told: list[Ticket] = []  # that a barrier waits for
        self._tenants: dict[int, str] = {DEFAULT_TENANT: ""}
        self._ended = threading.Event()
        self._look = threading.Event()
        self._tried = threading.Event()  # a list has ended, well or not
        self._refreshes = self._swept = 0
        self._threads: list[threading.Thread] = []
        self._pool: Pool

    # ---- Life

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        """Begin, without the lock. ``pool``: what is above; ``lock``: its.

        Waits for the first list, for ``timeout_s`` at most: who asks a node that has just started should not be told
        that nothing is there.
        """
        self._pool = pool
        self._reader.start(pool, lock)
        self._writer.start(pool, lock, self._name_of)
        for name, function in (("step", self._steps), ("index", self._index), ("delete", self._delete)):
            thread = threading.Thread(target=function, name=f"s3-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._tried.wait(self._config.timeout_s)

    def hurry(self) -> None:
        """Write all that waits to be written."""
        self._writer.hurry()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be written."""
        return self._writer.idle

    def close(self) -> None:
        """End, without the lock: whoever waits for a record gets nothing, and the pool is not touched any more.

        Requests that are under way may go on till their time is over; join() waits for that.
        """
        self._ended.set()
        self._look.set()
        self._deletions.put(None)
        self._reader.close()
        self._writer.close()

    def join(self) -> None:
        """Wait till no thread is left, for as long as a read may take at most."""
        ends = time.monotonic() + self._config.timeout_s
        for thread in (*self._threads, *self._reader.threads, *self._writer.threads):
            thread.join(max(0.0, ends - time.monotonic()))

    # ---- Finding and reading

    def find(self, address: Address) -> Item | None:
        """Return what is known of a record in the bucket; None where there is none, or the bucket is away."""
        if self._outage.away:
            return None
        tenant, key, text = parse_key(address)
        name = self._name_of(tenant)
        contents = None if text is not None or name is None else self._catalog.find(name, key)
        return None if contents is None else ColdItem(address, key, contents)

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """As :meth:`Pool.read`, of an item of find()."""
        assert isinstance(item, ColdItem)
        self._reader.read(item, start, end, done)

    def expected_s(self, size: int) -> float:
        """Return how long records of so many bytes are expected to take if they are asked for now."""
        return self._reader.expected_s(size)

    def _name_of(self, tenant: int) -> str | None:
        name = self._tenants.get(tenant)
        if name is None:
            self._tenants = {number: each for each, number in self._pool.tenants().items()}
            self._tenants[DEFAULT_TENANT] = ""
            name = self._tenants.get(tenant)
        return name

    # ---- Changing

    def stored(self, address: Address, *, head_bytes: int, expires: bool, parent: bytes, length: int) -> None:
        """Hear of a value that the pool has been given.

        Records that stay get into the bucket. Anything else under a record's key has to be what is found from now on.
        """
        tenant, key, text = parse_key(address)
        if text is not None:
            return
        if not head_bytes or expires:
            self.removed(address)
            return
        name = self._name_of(tenant)
        if name is not None and self._catalog.find(name, key) is None:
            self._writer.stored(address, key, parent, length)

    def holds_back(self, address: Address) -> bool:
        """Return whether a record may not be evicted yet, see :meth:`ColdWriter.holds_back`."""
        return self._writer.holds_back(address)

    def removed(self, address: Address) -> bool:
        """Have nobody find a record any more, and delete the objects that have it; return whether there were any.

        What else they have goes with them.
        """
        tenant, key, text = parse_key(address)
        name = self._name_of(tenant)
        if text is not None or name is None:
            return False
        names = self._catalog.doom(name, key)
        self._wait_for(self._writer.removed(address))
        if names:
            self._enqueue(_Deletion(names, Ticket()))
        return bool(names)

    def cleared(self, tenant: int | None) -> None:
        """Have nobody find anything of a tenant any more, or of all, and delete all of it that the bucket has."""
        name = None if tenant is None else self._name_of(tenant)
        if tenant is not None and name is None:
            return
        names = self._catalog.doom_all(name)
        self._wait_for(self._writer.cleared(tenant))
        self._enqueue(_Deletion(names, Ticket(), clears=True, tenant=name))

    def _enqueue(self, deletion: _Deletion) -> None:
        self._wait_for(deletion.ticket)
        self._deletions.put(deletion)

    def _wait_for(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            # One that has failed already is for the barrier that follows; of several it tells the first.
            failed = [each for each in self._new if each.failed][:1]
            self._new = [*failed, *(each for each in self._new if not each.settled), ticket]

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when what was removed is gone from the bucket; None if it is.

        A failure from before is told to one caller: who has removed something asks while it still holds the lock.
        """
        waited = [each for each in self._told if not each.settled]
        waited += [each for each in self._new if not each.settled or each.failed]
        self._told, self._new = [each for each in waited if not each.settled], []
        return Ticket.of(*waited) if waited else None

    # ---- Threads

    def _steps(self) -> None:
        while not self._ended.wait(_STEP_S):
            self._reader.step()

    def _delete(self) -> None:
        while (deletion := self._deletions.get()) is not None:
            failure: ShadowServeError | None = None
            try:
                names = list(deletion.names)
                if deletion.clears:
                    for listed in self._bucket.list():
                        tenant = parse_name(listed.name)
                        if tenant is not None and deletion.tenant in (None, tenant):
                            self._catalog.condemn(listed.name)
                            names.append(listed.name)
                for name in names:
                    self._delete_one(name)
            except BucketError as error:
                # They stay forgotten here, and are deleted with the next list; a restart before that finds them again.
                failure = error
                self._write_outage.failed(error.reason, error)
            deletion.ticket.settle(failure)

    def _delete_one(self, name: str) -> None:
        self._bucket.delete(name)
        self._catalog.spare(name)

    def _delete_some(self, names: list[str]) -> int:
        """Delete objects until one cannot be, which says nothing of reading; return how many were."""
        for count, name in enumerate(names):
            try:
                self._delete_one(name)
            except BucketError as error:
                self._write_outage.failed(error.reason, error)
                return count
        return len(names)

    def _index(self) -> None:
        while not self._ended.is_set():
            self._look.clear()
            try:
                self._list()
                self._outage.succeeded()
            except BucketError as error:
                self._outage.failed(error.reason, error)
                self._tried.set()
                self._look.wait(min(self._config.index_ttl_s, 1.0))
                continue
            except Exception:  # a bug of ours must not leave the tier without its index
                _log.exception("s3_index_failed")
            self._refreshes += 1
            self._tried.set()
            self._look.wait(self._config.index_ttl_s)

    def _list(self) -> None:
        """Take over what the bucket has."""
        known = self._catalog.names()
        found: dict[str, Listed] = {}
        for listed in self._bucket.list():
            if parse_name(listed.name) is not None:
                found[listed.name] = listed
            if len(found) > self._config.chunks_max or self._ended.is_set():
                break
        self._catalog.keep_only(found, among=known)
        self._delete_some(self._catalog.doomed())
        newest_first = sorted(found.values(), key=lambda listed: listed.written_s, reverse=True)
        wanted = [listed for listed in self._sweep(newest_first) if self._catalog.wants(listed)]
        with ThreadPoolExecutor(_TAILS_AT_ONCE, thread_name_prefix="s3-tail") as tails:
            for _ in tails.map(self._learn, wanted):
                pass

    def _sweep(self, newest_first: list[Listed]) -> list[Listed]:
        """Delete the oldest objects beyond ``bytes_max``; return the others. All nodes choose the same ones."""
        bytes_max = self._config.bytes_max
        if bytes_max is None or sum(listed.size for listed in newest_first) <= bytes_max:
            return newest_first
        left, kept = int(bytes_max * _SWEPT_SHARE), 0
        for listed in newest_first:
            if listed.size > left:
                break
            left -= listed.size
            kept += 1
        for listed in newest_first[kept:]:
            self._catalog.condemn(listed.name)
        self._swept += self._delete_some([listed.name for listed in newest_first[kept:]])
        return newest_first[:kept]

    def _learn(self, listed: Listed) -> None:
        """Know of an object by its tail, if that is sound."""
        if self._ended.is_set() or self._outage.away:
            return
        try:
            contents = read_contents(self._bucket, listed.name, listed.size)
            if max(place.length for place in contents.places.values()) > self._config.read_bytes_under_way_max:
                raise ColdObjectError("a record of it is larger than read_bytes_under_way_max")
        except ColdObjectError as error:
            _log.warning("s3_object_refused name=%s error=%r", listed.name, str(error))
            self._outage.failed("damaged", error)
            self._catalog.refuse(listed)
        except BucketError as error:
            self._outage.failed(error.reason, error)
        else:
            self._catalog.learn(contents)

    # ---- What it tells

    def statistics(self) -> ColdStatistics:
        """Return counters and sizes."""
        reader, writer = self._reader, self._writer
        return ColdStatistics(
            state="away" if self._outage.away else "ok" if self._refreshes else "unknown",
            lists=self._refreshes,
            objects=self._catalog.objects,
            records=self._catalog.chunks,
            bytes=self._catalog.bytes,
            requests=reader.requests,
            read_records=reader.records,
            read_bytes=reader.bytes,
            reading=reader.under_way,
            failed_reads=dict(self._outage.failures),
            written_objects=writer.objects,
            written_bytes=writer.bytes,
            present_objects=writer.present,
            failed_writes=dict(self._write_outage.failures),
            waiting_records=writer.gathering.waiting,
            held_back=writer.held_back,
            missed_records=writer.missed + writer.gathering.dropped,
            swept_objects=self._swept,
        )
