"""Keeps the catalog up to date: lists the bucket or the node's partitions, and deletes what is too much."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Final

from shadowserve.placement import PARTITIONS
from shadowserve.pool.cold.bucket import BucketError
from shadowserve.pool.cold.catalog import SWEPT_SHARE
from shadowserve.pool.cold.deletions import Deletions
from shadowserve.pool.cold.index_objects import NEWS_FOLDER
from shadowserve.pool.cold.indexing import Indexer
from shadowserve.pool.cold.layout import folder_of
from shadowserve.pool.cold.part import Part, Shared
from shadowserve.pool.cold.partitions import Partitions
from shadowserve.pool.cold.scanning import Scanner
from shadowserve.pool.cold.shares import Shares

_log = logging.getLogger(__name__)

_PARTITIONS_AT_ONCE: Final = 48
"""A node that starts asks for the lists and the index objects of thousands of partitions, 20 to 50 ms each."""
_BATCH: Final = 192
"""Partitions that are listed before those that clients have asked for in the meantime."""
_SMALL: Final = 10_000
"""Most objects of a bucket that a node of a fleet lists as a whole, instead of each partition."""
_OF_LISTS: Final = frozenset({"bad_list", "busy"})
"""Failures of lists that say nothing about reads of known objects."""


class BucketLister(Part):
    """Lists the bucket every ``index_ttl_s``, in a thread of its own.

    A node of a fleet lists the partitions that it serves, rarely, those of other nodes while clients ask for them, and
    the news of what other nodes have written.

    Attributes:
        lists: Complete lists: of the bucket, or of the news while all partitions that the node serves are known.
        partitions: Partitions that the node knows.
        scanner: Lists and their results.
    """

    def __init__(
        self,
        shared: Shared,
        deletions: Deletions,
        indexer: Indexer,
        partitions: Partitions,
        on_listed: Callable[[Iterable[int]], None],
        on_forgotten: Callable[[int], None],
    ) -> None:
        """``on_listed`` is called after a list of partitions: the catalog has all of their objects."""
        super().__init__(shared)
        self.lists = self.swept = 0
        self.tried = threading.Event()  # set after the first list, also a failed one
        self.scanner = Scanner(shared, indexer, partitions)
        self._deletions = deletions
        self.partitions = partitions
        self._on_listed = on_listed
        self._on_forgotten = on_forgotten
        self._tick_s = -inf
        self._news: Future[None] | None = None  # the news that are being taken
        self._is_small = True  # one list of the whole bucket takes fewer requests than one of each partition
        self._shares = Shares(int((self._config.bytes_max or 0) * SWEPT_SHARE))
        self._shares_lock = threading.Lock()
        self._ended = False
        self.thread = threading.Thread(target=self._run, name="s3-index", daemon=True)

    def set_quota(self, tenant: str, bytes_max: int | None) -> None:
        """Limit a tenant's bytes in the bucket when ``bytes_max`` has no room for all tenants."""
        with self._shares_lock:
            self._shares.set_quota(tenant, bytes_max)

    def close(self) -> None:
        self._ended = True
        self.scanner.close()
        self.partitions.changed.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(_PARTITIONS_AT_ONCE, thread_name_prefix="s3-partition") as workers:
            self.scanner.start(workers)
            while not self._ended:
                pause_s = min(self._config.index_ttl_s, 1.0)
                try:
                    pause_s = self._list_bucket() if self.partitions.serves is None else self._list_due(workers)
                except BucketError as error:
                    self._fail(error)
                except Exception:  # a bug must not end this thread
                    if not self._ended:
                        _log.exception("s3_index_failed")
                    self.tried.set()
                self.partitions.changed.wait(pause_s)
                self.partitions.changed.clear()

    def _fail(self, error: BucketError) -> None:
        self._breakers.list.failed(error.reason, error)
        if error.reason not in _OF_LISTS:
            self._breakers.read.failed(error.reason, error)
        self.tried.set()

    def _succeed(self) -> None:
        self._breakers.list.succeeded()
        self._breakers.read.succeeded()

    def _scan(self, partitions: Collection[int], folder: str, objects_max: int | None = None) -> bool:
        if not self.scanner.scan(partitions, folder, objects_max):
            return False
        self._on_listed(partitions)
        return True

    # ---- Without a fleet

    def _list_bucket(self) -> float:
        """List the whole bucket; return the time until the next list."""
        if self._scan(range(PARTITIONS), ""):
            self.lists += 1
        self._succeed()
        self.tried.set()
        self._deletions.delete_some(self._catalog.marked())
        self.scanner.write_index()
        self._sweep()
        return self._config.index_ttl_s if self.lists else min(self._config.index_ttl_s, 1.0)

    # ---- With a fleet

    def _list_due(self, workers: ThreadPoolExecutor) -> float:
        """List partitions that are due; return the time until the next ones are."""
        now_s, ttl_s = self._clock_s(), self._config.index_ttl_s
        if now_s >= self._tick_s:
            for partition in self.partitions.follow():
                self._on_forgotten(partition)
                self.scanner.forget(partition)
        due, done = self.partitions.due(), [True]
        if len(due) <= _BATCH or not self._is_small or not self._scan_due(frozenset(due), ""):
            self._is_small = self._is_small and len(due) <= _BATCH
            done = [*workers.map(lambda each: self._scan_due((each,), folder_of(each)), due[:_BATCH])]
            if all(done) and len(due) > _BATCH and (not self.lists or now_s < self._tick_s):
                return 0.0
        is_complete = self.partitions.is_complete
        if is_complete:
            self.tried.set()
        if now_s >= self._tick_s:
            self._tick_s = now_s + ttl_s
            self._tick(is_complete, workers)
        return max(0.0, self._tick_s - self._clock_s()) if is_complete and all(done) else min(ttl_s, 1.0)

    def _scan_due(self, partitions: Collection[int], folder: str) -> bool:
        began_s = self._clock_s()
        try:
            is_done = not self._breakers.list.away and self._scan(partitions, folder, None if folder else _SMALL)
        except BucketError as error:
            self._fail(error)
            is_done = False
        if is_done:
            self._breakers.list.succeeded()
            self.partitions.note_listed(partitions, began_s)
        elif folder:
            self.partitions.note_failed(partitions)
        return is_done

    def _tick(self, is_complete: bool, workers: ThreadPoolExecutor) -> None:
        """Do what is done once in each interval, with one list for all partitions."""
        self._deletions.delete_some(self._catalog.marked())
        self.scanner.write_index()
        news = list(self._bucket.list(NEWS_FOLDER))
        if self._news is None or self._news.done():
            before, self._news = self._news, workers.submit(self.scanner.take_news, news)  # they may be thousands
            if before is not None:
                before.result()
        self._succeed()
        if is_complete:
            self.lists += 1
            self._sweep()

    def _sweep(self) -> None:
        """Delete objects beyond the ``bytes_max`` of the node's partitions: those that were not used for longest."""
        if self._config.bytes_max is None:
            return
        own = self.partitions.own
        with self._shares_lock:
            swept = self._catalog.mark_excess(self._config.bytes_max * len(own) / PARTITIONS, self._shares, own)
        self.swept += self._deletions.delete_some(swept)  # objects that were deleted because of bytes_max
