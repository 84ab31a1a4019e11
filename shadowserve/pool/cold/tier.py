"""The tier below a pool: finds, reads, writes and removes records in a bucket that other nodes use as well.

No method waits for the bucket. What the bucket holds is known from listing it every ``index_ttl_s`` and reading the
tails of objects that are new; nothing is asked of it to find a record, or not to find one.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.pool.cold.bucket import Bucket, BucketError, Listed
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.deletions import Awaited, Deletions
from shadowserve.pool.cold.layout import ColdObjectError, parse_name
from shadowserve.pool.cold.outage import Outage
from shadowserve.pool.cold.reads import ColdItem, ColdReader
from shadowserve.pool.cold.shares import Shares, most_beyond
from shadowserve.pool.cold.writes import ColdWriter, read_contents
from shadowserve.pool.keys import is_chunk_key, parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.statistics import ColdStatistics
from shadowserve.pool.terms import DEFAULT_TENANT, Address, Item, Lease
from shadowserve.pool.volume.changes import Ticket

_log = logging.getLogger(__name__)

_STEP_S: Final = 0.05
_TAILS_AT_ONCE: Final = 8
_TAILS_IN_HAND: Final = 1_024
_OF_ONE_OBJECT: Final = frozenset({"absent", "damaged", "denied"})
"""Failures to read a tail that trying again does not change."""
_LISTED_MIN: Final = 100_000
"""Objects of a list that are looked at in any case: some 30 MB."""
_SWEPT_SHARE: Final = 0.95
"""Of bytes_max, what a sweep leaves: so that it does not delete an object after each that is written."""


class ColdTier:
    """The records of a bucket, for one pool. Methods are called with the pool's lock held, but start(), close()."""

    def __init__(self, config: S3Config, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Make what start() begins.

        Raises:
            ConfigurationError: there are no credentials, or they or certificates cannot be read.
        """
        self._config = config
        self._bucket = Bucket(config)
        self._catalog = Catalog(Shares(config.chunks_max))
        self._bytes = Shares(int((config.bytes_max or 0) * _SWEPT_SHARE))
        self._outage = Outage("read", clock_s)
        self._list_outage = Outage("list", clock_s)
        self._reader = ColdReader(config, self._bucket, self._catalog, self._outage, clock_s)
        self._write_outage = Outage("write", clock_s)
        self._writer = ColdWriter(config, self._bucket, self._catalog, self._write_outage, clock_s)
        self._delete_outage = Outage("delete", clock_s)
        self._deletions = Deletions(config, self._bucket, self._catalog, self._delete_outage, clock_s)
        self._shares_lock = threading.Lock()
        self._awaited = Awaited(config.timeout_s, clock_s)
        self._new: list[Ticket] = []  # since the last barrier
        self._told: list[Ticket] = []  # that a barrier waits for
        self._tenants: dict[int, str] = {DEFAULT_TENANT: ""}
        self._ended = threading.Event()
        self._look = threading.Event()
        self._tried = threading.Event()  # a list has ended, well or not
        self._refreshes = self._swept = self._foreign = 0
        self._told_foreign = False
        self._threads: list[threading.Thread] = []
        self._pool: Pool
        self._lock: threading.Lock

    def set_quota(self, tenant: str, bytes_max: int | None, keys_max: int | None) -> None:
        """Bound a tenant's share of the bucket where ``bytes_max`` or ``chunks_max`` has no room for all; also before
        start(), and without the lock. All nodes over a bucket have to be given the same."""
        self._catalog.set_share(tenant, keys_max)
        with self._shares_lock:
            self._bytes.set_quota(tenant, bytes_max)

    # ---- Life

    def start(self, pool: Pool, lock: threading.Lock) -> None:
        """Begin, without the lock. ``pool``: what is above; ``lock``: its.

        Waits for the first list, for ``timeout_s`` at most: who asks a node that has just started should not be told
        that nothing is there.
        """
        self._pool, self._lock = pool, lock
        self._reader.start(pool, lock)
        self._writer.start(pool, lock, self._name_of)
        self._deletions.start()
        for name, function in (("step", self._steps), ("index", self._index)):
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
        self._deletions.close()
        self._reader.close()
        self._writer.close()

    def join(self) -> None:
        """Wait till no thread is left, for as long as a read may take at most."""
        ends = time.monotonic() + self._config.timeout_s
        for thread in (*self._threads, *self._reader.threads, *self._writer.threads, *self._deletions.threads):
            thread.join(max(0.0, ends - time.monotonic()))
        self._bucket.close()

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

    def stored(self, address: Address, *, head_bytes: int, expires: bool, parent: bytes, length: int) -> Ticket | None:
        """Take over a value that the pool has stored; return a ticket if its client has to wait.

        Records that stay get into the bucket. Any other value replaces the record of its key, also after a restart: the
        ticket settles when the bucket has no record of the key any more.
        """
        if not is_chunk_key(address[1]):
            return None
        tenant, key, text = parse_key(address)
        if text is not None:
            return None
        if not head_bytes or expires:
            return self._remove(address, key)[1]
        name = self._name_of(tenant)
        if name is None:
            return None
        if self._catalog.find(name, key) is None:
            self._writer.stored(address, key, parent, length)
        return self._replaced(name, key)

    def settling(self, address: Address) -> Ticket | None:
        """Return a ticket for when a restart cannot bring back a record that the present value replaced; None if so."""
        tenant, key, text = parse_key(address)
        name = None if text is not None else self._name_of(tenant)
        return None if name is None else self._replaced(name, key)

    def _replaced(self, tenant: str, key: bytes) -> Ticket | None:
        """Return a ticket for objects with an older record of a key, which are to be deleted."""
        names = self._catalog.doomed_with(tenant, key)
        return self._deletions.delete(tenant, names) if names else None

    def holds_back(self, address: Address) -> bool:
        """Return whether a record may not be evicted yet, see :meth:`ColdWriter.holds_back`."""
        return self._writer.holds_back(address)

    def removed(self, address: Address) -> bool:
        """Have nobody find a record any more, and delete the objects that have it; return whether there were any.

        What else they have goes with them.
        """
        if not is_chunk_key(address[1]):
            return False
        _, key, text = parse_key(address)
        if text is not None:
            return False
        was_there, ticket = self._remove(address, key)
        self._wait_for(ticket)
        return was_there

    def _remove(self, address: Address, key: bytes) -> tuple[bool, Ticket | None]:
        """Return whether a record was found in the bucket, and a ticket for when it is gone; None where it is."""
        name = self._name_of(address[0])
        if name is None:
            return False, None
        was_there = self._catalog.find(name, key) is not None
        tickets = [self._writer.removed(address), self._delete(name, key)]
        if not self._refreshes:
            tickets.append(self._awaited.add(name, key))
        waiting = [ticket for ticket in tickets if ticket is not None]
        return was_there, Ticket.of(*waiting) if waiting else None

    def _delete(self, tenant: str, key: bytes) -> Ticket | None:
        """Begin to delete what the bucket has of a record; return a ticket for that, None where there is nothing."""
        doomed = self._catalog.doom(tenant, key)
        tickets = [self._deletions.delete(tenant, doomed.names)] if doomed.names else []
        if doomed.may_be_elsewhere:
            tickets.append(self._deletions.delete_unread(tenant))
        return Ticket.of(*tickets) if tickets else None

    def cleared(self, tenant: int | None) -> None:
        """Have nobody find anything of a tenant any more, or of all, and delete all of it that the bucket has."""
        name = None if tenant is None else self._name_of(tenant)
        if tenant is not None and name is None:
            return
        names = self._catalog.doom_all(name)
        self._wait_for(self._writer.cleared(tenant))
        self._wait_for(self._deletions.clear(name, names))

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
            self._deletions.step()
            error = f"the bucket was not listed since the start, and may have the key: {self._list_outage.last_error}"
            self._awaited.expire(ShadowServeError(error), all_of_them=self._list_outage.away)

    def _delete_some(self, names: list[str]) -> int:
        """Delete objects until one cannot be, which says nothing of reading; return how many were."""
        for count, name in enumerate(names):
            try:
                self._deletions.delete_one(name)
            except BucketError as error:
                self._delete_outage.failed(error.reason, error)
                return count
        return len(names)

    def _index(self) -> None:
        while not self._ended.is_set():
            self._look.clear()
            try:
                self._list()
                self._list_outage.succeeded()
                self._outage.succeeded()
            except BucketError as error:
                self._list_outage.failed(error.reason, error)
                if error.reason != "bad_list":  # it says nothing of reading known objects
                    self._outage.failed(error.reason, error)
                self._tried.set()
                self._look.wait(min(self._config.index_ttl_s, 1.0))
                continue
            except Exception:  # a bug of ours must not leave the tier without its index
                _log.exception("s3_index_failed")
            self._tried.set()
            self._look.wait(self._config.index_ttl_s if self._refreshes else min(self._config.index_ttl_s, 1.0))

    def _list(self) -> None:
        """Take over what the bucket has."""
        missing = self._catalog.begin_list()
        found: defaultdict[str, list[Listed]] = defaultdict(list)
        count = foreign = 0
        odd, listed_max = "", max(self._config.chunks_max, _LISTED_MIN)
        for listed in self._bucket.list():
            tenant = parse_name(listed.name)
            if tenant is None:
                foreign, odd = foreign + 1, odd or listed.name
                continue
            missing.discard(listed.name)
            found[tenant].append(listed)
            count += 1
            if self._ended.is_set():
                return
            if count > 1.25 * listed_max:
                count = _keep_newest(found, listed_max)
        self._note_foreign(foreign, odd)
        self._catalog.end_list(missing)
        self._delete_some(self._catalog.doomed())
        for objects in found.values():
            objects.sort(key=lambda listed: (-listed.written_s, listed.name))
        self._sweep(found)
        wanted = [listed for listed in _in_turns(found) if self._catalog.wants(listed)]
        if self._learn_all(wanted):
            self._note_known()

    def _learn_all(self, wanted: Sequence[Listed]) -> bool:
        """Know of objects by their tails, for ``list_timeout_s`` at most; return whether that is done."""
        ends_s = time.monotonic() + self._config.list_timeout_s
        with ThreadPoolExecutor(_TAILS_AT_ONCE, thread_name_prefix="s3-tail") as tails:
            for begin in range(0, len(wanted), _TAILS_IN_HAND):
                if not all(
                    [*tails.map(lambda listed: self._learn(listed, ends_s), wanted[begin : begin + _TAILS_IN_HAND])]
                ):
                    return False
        return True

    def _note_known(self) -> None:
        """Take note that all that a list shows is known."""
        if self._refreshes:
            self._refreshes += 1
        else:
            with self._lock:  # which removals are begun with: none comes to wait after those that wait were begun
                self._refreshes = 1
            self._awaited.begin(self._delete)

    def _note_foreign(self, count: int, name: str) -> None:
        """Take note of objects under the prefix that are none of ours; they are left alone."""
        self._foreign = count
        if count and not self._told_foreign:
            self._told_foreign = True
            _log.warning("s3_foreign_objects count=%d first=%r hint='they are left alone; move them'", count, name)

    def _sweep(self, found: Mapping[str, list[Listed]]) -> None:
        """Delete objects beyond ``bytes_max``, and take them out of ``found``, which is newest first.

        The oldest of the tenant that is furthest beyond its share go first. All nodes choose the same ones.
        """
        bytes_max = self._config.bytes_max
        used: dict[str, float] = {name: sum(listed.size for listed in each) for name, each in found.items() if each}
        total = sum(used.values())
        if bytes_max is None or total <= bytes_max:
            return
        with self._shares_lock:
            shares = dict(self._bytes.among(used))
        swept: list[str] = []
        while total > bytes_max * _SWEPT_SHARE:
            tenant = most_beyond(used, shares)
            oldest = found[tenant].pop()
            used[tenant] -= oldest.size
            total -= oldest.size
            if not found[tenant]:
                del used[tenant]
            swept.append(oldest.name)
            self._catalog.condemn(oldest.name)
        self._swept += self._delete_some(swept)

    def _learn(self, listed: Listed, ends_s: float) -> bool:
        """Know of an object by its tail, if that is sound; return False where the next list has to try again."""
        if self._ended.is_set() or self._outage.away or time.monotonic() > ends_s:
            return False
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
            return error.reason in _OF_ONE_OBJECT
        else:
            self._catalog.learn(contents, listed.written_s)
        return True

    # ---- What it tells

    def statistics(self) -> ColdStatistics:
        """Return counters and sizes."""
        reader, writer = self._reader, self._writer
        outages = self._outage, self._list_outage, self._write_outage, self._delete_outage
        away = self._outage.away or self._list_outage.away
        return ColdStatistics(
            state="away" if away else "ok" if self._refreshes else "unknown",
            failing_s=max(each.failing_s for each in outages),
            last_error=next((each.last_error for each in outages if each.failing_s), ""),
            lists=self._refreshes,
            objects=self._catalog.objects,
            records=self._catalog.chunks,
            bytes=self._catalog.bytes,
            requests=reader.requests,
            read_records=reader.records,
            read_bytes=reader.bytes,
            reading=reader.under_way,
            failed_reads=dict(self._outage.failures | self._list_outage.failures),
            written_objects=writer.objects,
            written_bytes=writer.bytes,
            present_objects=writer.present,
            failed_writes=dict(self._write_outage.failures + self._delete_outage.failures),
            waiting_records=writer.gathering.waiting,
            held_back=writer.held_back,
            missed_records=writer.missed + writer.gathering.dropped,
            swept_objects=self._swept,
            deleting=self._deletions.waiting,
            foreign_objects=self._foreign,
            left_out_objects=self._catalog.left_out,
            crowded_out_reads=reader.crowded_out,
        )


def _keep_newest(found: Mapping[str, list[Listed]], most: int) -> int:
    """Leave the newest of each tenant's objects, as many as all tenants may have alike; return how many are left."""
    of_each = most // len(found) + 1
    for objects in found.values():
        if len(objects) > of_each:
            objects.sort(key=lambda listed: -listed.written_s)
            del objects[of_each:]
    return sum(map(len, found.values()))


def _in_turns(found: Mapping[str, list[Listed]]) -> Iterable[Listed]:
    """Yield the newest object of each tenant, then the next of each: none waits for all of another's."""
    for objects in zip_longest(*found.values()):
        yield from (listed for listed in objects if listed is not None)
