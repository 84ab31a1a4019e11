"""Keeps the catalog up to date: lists the bucket, reads what describes new objects, and deletes what is too much."""

import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from math import inf
from typing import Final

from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.breaker import Breaker
from shadowserve.pool.cold.bucket import Bucket, BucketError, Listed
from shadowserve.pool.cold.catalog import SWEPT_SHARE, Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.deletions import Deletions
from shadowserve.pool.cold.fair import Shares
from shadowserve.pool.cold.index_objects import NEWS_FOLDER, parse_index_name
from shadowserve.pool.cold.indexing import MERGED, Indexer
from shadowserve.pool.cold.layout import ColdObjectError, folder_of, partition_in, tenant_of
from shadowserve.pool.cold.writes import read_contents

_log = logging.getLogger(__name__)

_PARTITIONS_AT_ONCE: Final = 48
"""A node that starts asks for the lists and the index objects of thousands of partitions, 20 to 50 ms each."""
_FOOTERS_AT_ONCE: Final = 16
_BATCH: Final = 192
"""Partitions that are listed before those that clients have asked for in the meantime."""
_SMALL: Final = 10_000
"""Most objects of a bucket that a node of a fleet lists as a whole at its start, instead of each partition."""
_OF_ONE_OBJECT: Final = frozenset({"absent", "damaged", "denied"})
"""Failures to read a footer that another try does not change."""
_OF_LISTS: Final = frozenset({"bad_list", "busy"})
"""Failures of lists that say nothing about reads of known objects."""
_LISTED_MIN: Final = 100_000
"""New objects of a list that are examined in any case: some 30 MB."""
_USE_S: Final = 86_400.0
"""Time after which the last use of objects is written into a partition's index objects."""
_OWN_TIMES: Final = 60
"""Intervals between two lists of a partition that the node serves: it learns of others' objects by their news."""
_FORGOTTEN_TIMES: Final = 10
"""Intervals after which a partition of another node is forgotten if no client has asked for its records."""


class BucketLister:
    """Lists the bucket every ``index_ttl_s``, in a thread of its own.

    A node of a fleet lists the partitions that it serves, each once in ``_OWN_TIMES`` intervals, and those of other
    nodes while clients ask for them.

    Attributes:
        lists: Complete lists: of the bucket, or of all partitions that the node serves.
        own: Partitions that the node serves.
    """

    def __init__(
        self,
        config: S3Config,
        bucket: Bucket,
        catalog: Catalog,
        deletions: Deletions,
        indexer: Indexer,
        read_breaker: Breaker,
        clock_s: Callable[[], float],
        on_listed: Callable[[Iterable[int]], None],
        on_forgotten: Callable[[int], None],
        serves: Callable[[int], bool] | None,
    ) -> None:
        """``on_listed`` is called after a list of partitions: the catalog has all of their objects.

        ``serves`` returns whether this node is the first choice for a partition; None: it has no fleet.
        """
        self.lists = self.swept = self.foreign = 0
        self.breaker = Breaker("list", clock_s)  # failures of lists
        self.tried = threading.Event()  # set after the first list, also a failed one
        self.own: Collection[int] = range(PARTITIONS) if serves is None else frozenset()
        self._config = config
        self._bucket = bucket
        self._catalog = catalog
        self._deletions = deletions
        self._indexer = indexer
        self._read_breaker = read_breaker
        self._clock_s = clock_s
        self._on_listed = on_listed
        self._on_forgotten = on_forgotten
        self._serves = serves
        self._due_s: dict[int, float] = {}  # when to list each partition that the node knows
        self._asked_s: dict[int, float] = {}  # last question about each partition of another node
        self._merges: dict[int, Sequence[Listed]] = {}  # index objects of partitions that have many
        self._tick_s = -inf
        self._is_complete = False
        self._is_small = True  # one list of the whole bucket takes fewer requests than one of each partition
        self._shares = Shares(int((config.bytes_max or 0) * SWEPT_SHARE))
        self._shares_lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._warned_of_foreign = False
        self._partitions: ThreadPoolExecutor
        self._footers: ThreadPoolExecutor
        self.thread = threading.Thread(target=self._run, name="s3-index", daemon=True)

    def set_quota(self, tenant: str, bytes_max: int | None) -> None:
        """Limit a tenant's bytes in the bucket when ``bytes_max`` has no room for all tenants."""
        with self._shares_lock:
            self._shares.set_quota(tenant, bytes_max)

    def ask(self, partition: int) -> None:
        """Keep a partition of another node known for a while: a client asks for its records. It does not wait."""
        if partition in self.own:
            return
        now_s = self._clock_s()
        self._asked_s[partition] = now_s
        if self._due_s.setdefault(partition, now_s) <= now_s:
            self._wake.set()

    def close(self) -> None:
        self._ended = True
        self._wake.set()

    def _run(self) -> None:
        with (
            ThreadPoolExecutor(_PARTITIONS_AT_ONCE, thread_name_prefix="s3-partition") as self._partitions,
            ThreadPoolExecutor(_FOOTERS_AT_ONCE, thread_name_prefix="s3-footer") as self._footers,
        ):
            while not self._ended:
                pause_s = min(self._config.index_ttl_s, 1.0)
                try:
                    pause_s = self._list_bucket() if self._serves is None else self._list_due()
                except BucketError as error:
                    self._fail(error)
                except Exception:  # a bug must not end this thread
                    _log.exception("s3_index_failed")
                    self.tried.set()
                self._wake.wait(pause_s)
                self._wake.clear()

    def _fail(self, error: BucketError) -> None:
        self.breaker.failed(error.reason, error)
        if error.reason not in _OF_LISTS:
            self._read_breaker.failed(error.reason, error)
        self.tried.set()

    def _succeed(self) -> None:
        self.breaker.succeeded()
        self._read_breaker.succeeded()

    # ---- Without a fleet

    def _list_bucket(self) -> float:
        """List the whole bucket; return the time until the next list."""
        if self._scan(range(PARTITIONS), ""):
            self.lists += 1
        self._succeed()
        self.tried.set()
        self._deletions.delete_some(self._catalog.marked())
        self._write_index()
        self._sweep()
        return self._config.index_ttl_s if self.lists else min(self._config.index_ttl_s, 1.0)

    # ---- With a fleet

    def _list_due(self) -> float:
        """List partitions that are due; return the time until the next ones are."""
        now_s, ttl_s = self._clock_s(), self._config.index_ttl_s
        if now_s >= self._tick_s:
            self._follow_members(now_s)
        due = [
            (partition in self.own, due_s, partition)
            for partition, due_s in list(self._due_s.items())
            if due_s <= now_s and (partition in self.own or self._asked_s.get(partition, -inf) >= due_s - ttl_s)
        ]
        batch = [partition for *_, partition in sorted(due)[: len(due) if self._is_small else _BATCH]]
        if len(batch) <= _BATCH or not self._scan_due(frozenset(batch), ""):
            self._is_small = self._is_small and len(batch) <= _BATCH
            done = [*self._partitions.map(lambda each: self._scan_due((each,), folder_of(each)), batch[:_BATCH])]
            if all(done) and len(due) > _BATCH:
                return 0.0
        self._is_complete = all(self._due_s[partition] > now_s for partition in self.own)
        if self._is_complete:
            self.tried.set()
        if now_s >= self._tick_s:
            self._tick_s = now_s + ttl_s
            self._tick()
        return max(0.0, self._tick_s - self._clock_s()) if self._is_complete else min(ttl_s, 1.0)

    def _scan_due(self, partitions: Collection[int], folder: str) -> bool:
        now_s, ttl_s = self._clock_s(), self._config.index_ttl_s
        try:
            is_done = not self.breaker.away and self._scan(partitions, folder, None if folder else _SMALL)
        except BucketError as error:
            self._fail(error)
            return False
        if is_done:
            self.breaker.succeeded()
            for partition in partitions:
                pause_s = ttl_s * _OWN_TIMES * random.uniform(0.75, 1.25) if partition in self.own else ttl_s
                self._due_s[partition] = now_s + pause_s
        return is_done

    def _follow_members(self, now_s: float) -> None:
        """Find out which partitions the node serves, and forget those that no client asks for."""
        assert self._serves is not None
        before, self.own = self.own, frozenset(filter(self._serves, range(PARTITIONS)))
        for partition in self.own - frozenset(before):
            self._due_s[partition] = min(self._due_s.get(partition, now_s), now_s)
            self._asked_s.pop(partition, None)
        for partition in frozenset(before) - self.own:
            self._asked_s[partition] = now_s
            self._due_s[partition] = min(self._due_s[partition], now_s + self._config.index_ttl_s)
        for partition, asked_s in list(self._asked_s.items()):
            if now_s - asked_s > _FORGOTTEN_TIMES * self._config.index_ttl_s:
                self._asked_s.pop(partition, None)
                self._due_s.pop(partition, None)
                self._on_forgotten(partition)
                self._catalog.forget(partition)
                self._indexer.forget(partition)

    def _tick(self) -> None:
        """Do what is done once in each interval, with one list for all partitions."""
        self._deletions.delete_some(self._catalog.marked())
        self._write_index()
        for listed in self._bucket.list(NEWS_FOLDER):
            self._take_news(listed)
        self._succeed()
        if self._is_complete:
            self.lists += 1
            self._sweep()

    def _take_news(self, listed: Listed) -> None:
        name = parse_index_name(listed.name)
        if name is not None and name.partition in self.own:
            self._indexer.take_news(listed)
        elif name is not None:
            self._indexer.drop_news(listed)

    def _write_index(self) -> None:
        due = self._indexer.due(self.own)
        list(self._partitions.map(lambda each: self._indexer.write(each, is_news=each not in self.own), due))
        merges, self._merges = self._merges, {}
        list(self._partitions.map(self._indexer.merge, merges.keys(), merges.values()))

    # ---- Lists

    def _scan(self, partitions: Collection[int], folder: str, objects_max: int | None = None) -> bool:
        """Bring the catalog up to date with a list of partitions; return False if that has to be repeated.

        Objects that the list does not have are forgotten, and new ones are added. A list of ``folder`` has all objects
        of the partitions; beyond ``objects_max`` it ends without a result.
        """
        number = self._catalog.begin_list(partitions)
        try:
            is_done = self._list(partitions, folder, number, objects_max)
        finally:
            self._catalog.forget_wanted(partitions)
        if is_done:
            self._on_listed(partitions)
        return is_done

    def _list(self, partitions: Collection[int], folder: str, number: int, objects_max: int | None) -> bool:
        found: defaultdict[str, list[Listed]] = defaultdict(list)
        index: defaultdict[int, list[Listed]] = defaultdict(list)
        news: list[Listed] = []
        count = foreign = total = 0
        first_foreign, listed_max = "", max(self._config.chunks_max, _LISTED_MIN)
        for listed in self._bucket.list(folder):
            total += 1
            if self._ended or (objects_max is not None and total > objects_max):
                return False
            if listed.name.endswith(".ix") and (name := parse_index_name(listed.name)) is not None:
                (news if name.is_news else index[name.partition]).append(listed)
            elif (tenant := tenant_of(listed.name)) is None:
                foreign, first_foreign = foreign + 1, first_foreign or listed.name
            elif partition_in(listed.name) in partitions and self._catalog.wants(listed):
                found[tenant].append(listed)
                count += 1
                if count > 1.25 * listed_max:
                    count = _keep_newest(found, listed_max)
        self._catalog.end_list(number, partitions)
        self._note_foreign(foreign, first_foreign)
        wanted: defaultdict[int, dict[str, Listed]] = defaultdict(dict)
        for objects in found.values():
            objects.sort(key=lambda listed: (-listed.written_s, listed.name))
        for listed in _in_turns(found):
            wanted[partition_in(listed.name)][listed.name] = listed
        ends_s = time.monotonic() + self._config.list_timeout_s
        jobs = [
            (each, wanted.get(each, {}), index.get(each, []), ends_s)
            for each in {**wanted, **index}
            if each in wanted or (each in partitions and self._is_to_merge(each, index[each]))
        ]
        for listed in news:
            self._take_news(listed)
        run = map if folder else self._partitions.map  # one of a folder runs in such a thread itself
        return all([*run(lambda job: self._learn_partition(*job), jobs)])

    def _note_foreign(self, count: int, name: str) -> None:
        self.foreign = count  # objects under the prefix that ShadowServe has not written
        if count and not self._warned_of_foreign:
            self._warned_of_foreign = True
            _log.warning("s3_foreign_objects count=%d first=%r hint='they are left alone; move them'", count, name)

    def _learn_partition(
        self, partition: int, wanted: dict[str, Listed], index: Sequence[Listed], ends_s: float
    ) -> bool:
        """Add new objects of a partition: those of its index objects, then the others by their footers."""
        try:
            self._indexer.learn(partition, index, wanted)
        except BucketError as error:
            self._read_breaker.failed(error.reason, error)
            return False
        if partition in self.own and self._is_to_merge(partition, index):
            self._merges[partition] = index
        return all([*self._footers.map(lambda listed: self._learn(listed, ends_s), wanted.values())])

    def _is_to_merge(self, partition: int, index: Sequence[Listed]) -> bool:
        """Return whether the index objects are many, or have long lacked the last use of their objects."""
        small = len(self._indexer.small(index)) if index else 0
        is_used = self._config.bytes_max is not None and self._catalog.touched_s(partition) < self._clock_s() - _USE_S
        return small >= MERGED or (small > 0 and is_used)

    def _learn(self, listed: Listed, ends_s: float) -> bool:
        """Add an object to the catalog if its footer is sound; return False if the next list has to try again."""
        if self._ended or self._read_breaker.away or time.monotonic() > ends_s:
            return False
        try:
            contents = read_contents(self._bucket, listed.name, listed.size)
            if max(contents.lengths) > self._config.read_bytes_under_way_max:
                raise ColdObjectError("it has a record that is larger than read_bytes_under_way_max")
        except ColdObjectError as error:
            _log.warning("s3_object_refused name=%s error=%r", listed.name, str(error))
            self._read_breaker.failed("damaged", error)
            self._catalog.refuse(listed)
        except BucketError as error:
            self._read_breaker.failed(error.reason, error)
            return error.reason in _OF_ONE_OBJECT
        else:
            if self._catalog.learn(contents, listed.written_s) and partition_in(listed.name) in self.own:
                self._indexer.note(contents)
        return True

    def _sweep(self) -> None:
        """Delete objects beyond the ``bytes_max`` of the node's partitions: those that were not used for longest."""
        if self._config.bytes_max is None:
            return
        with self._shares_lock:
            bytes_max = self._config.bytes_max * len(self.own) / PARTITIONS
            swept = self._catalog.mark_excess(bytes_max, self._shares, self.own)
        self.swept += self._deletions.delete_some(swept)  # objects that were deleted because of bytes_max


def _keep_newest(found: Mapping[str, list[Listed]], most: int) -> int:
    """Keep the newest objects of each tenant, at most the same number for each; return the number of all."""
    of_each = most // len(found) + 1
    for objects in found.values():
        if len(objects) > of_each:
            objects.sort(key=lambda listed: -listed.written_s)
            del objects[of_each:]
    return sum(map(len, found.values()))


def _in_turns(found: Mapping[str, list[Listed]]) -> Iterable[Listed]:
    """Yield the newest object of each tenant, then the next of each: no tenant waits for all objects of another."""
    for objects in zip_longest(*found.values()):
        yield from (listed for listed in objects if listed is not None)
