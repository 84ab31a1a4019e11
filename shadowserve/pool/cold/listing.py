"""Keeps the catalog up to date: lists the bucket, reads the footers of new objects, and deletes what is too much."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Final

from shadowserve.pool.cold.breaker import Breaker
from shadowserve.pool.cold.bucket import Bucket, BucketError, Listed
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.deletions import Deletions
from shadowserve.pool.cold.fair import Shares, most_beyond
from shadowserve.pool.cold.layout import ColdObjectError, tenant_of
from shadowserve.pool.cold.writes import read_contents
from shadowserve.placement import PARTITIONS

_log = logging.getLogger(__name__)

_FOOTERS_AT_ONCE: Final = 8
_FOOTERS_PER_BATCH: Final = 1_024
_OF_ONE_OBJECT: Final = frozenset({"absent", "damaged", "denied"})
"""Failures to read a footer that another try does not change."""
_LISTED_MIN: Final = 100_000
"""Objects of a list that are examined in any case: some 30 MB."""
_SWEPT_SHARE: Final = 0.95
"""Share of bytes_max that a sweep leaves, so that not every write is followed by a deletion."""


class BucketLister:
    """Lists the bucket every ``index_ttl_s``, in a thread of its own.

    Attributes:
        lists: Complete lists.
    """

    def __init__(
        self,
        config: S3Config,
        bucket: Bucket,
        catalog: Catalog,
        deletions: Deletions,
        read_breaker: Breaker,
        clock_s: Callable[[], float],
        on_complete: Callable[[], None],
    ) -> None:
        """``on_complete`` is called after each complete list: the catalog has all objects of it."""
        self.lists = self.swept = self.foreign = 0
        self.breaker = Breaker("list", clock_s)  # failures of lists
        self.tried = threading.Event()  # set after the first list, also a failed one
        self._config = config
        self._bucket = bucket
        self._catalog = catalog
        self._deletions = deletions
        self._read_breaker = read_breaker
        self._on_complete = on_complete
        self._shares = Shares(int((config.bytes_max or 0) * _SWEPT_SHARE))
        self._shares_lock = threading.Lock()
        self._ended = threading.Event()
        self._warned_of_foreign = False
        self.thread = threading.Thread(target=self._run, name="s3-index", daemon=True)

    def set_quota(self, tenant: str, bytes_max: int | None) -> None:
        """Limit a tenant's bytes in the bucket when ``bytes_max`` has no room for all tenants."""
        with self._shares_lock:
            self._shares.set_quota(tenant, bytes_max)

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            pause_s = min(self._config.index_ttl_s, 1.0)
            try:
                self._list()
                self.breaker.succeeded()
                self._read_breaker.succeeded()
                if self.lists:
                    pause_s = self._config.index_ttl_s
            except BucketError as error:
                self.breaker.failed(error.reason, error)
                if error.reason != "bad_list":  # a bad list says nothing about reads of known objects
                    self._read_breaker.failed(error.reason, error)
            except Exception:  # a bug must not end this thread
                _log.exception("s3_index_failed")
                if self.lists:
                    pause_s = self._config.index_ttl_s
            self.tried.set()
            self._ended.wait(pause_s)

    def _list(self) -> None:
        """Bring the catalog up to date: forget objects that a new list does not have, delete those that are marked or
        beyond ``bytes_max``, and read the footers of new ones."""
        number = self._catalog.begin_list(range(PARTITIONS))
        found: defaultdict[str, list[Listed]] = defaultdict(list)
        count = foreign = 0
        first_foreign, listed_max = "", max(self._config.chunks_max, _LISTED_MIN)
        for listed in self._bucket.list():
            tenant = tenant_of(listed.name)
            if tenant is None:
                foreign, first_foreign = foreign + 1, first_foreign or listed.name
                continue
            found[tenant].append(listed)
            count += 1
            if self._ended.is_set():
                return
            if count > 1.25 * listed_max:
                count = _keep_newest(found, listed_max)
        self._note_foreign(foreign, first_foreign)
        for objects in found.values():
            objects.sort(key=lambda listed: (-listed.written_s, listed.name))
        wanted = [listed for listed in _in_turns(found) if self._catalog.wants(listed)]
        self._catalog.end_list(number)
        self._deletions.delete_some(self._catalog.marked())
        self._sweep(found)
        if self._learn_all(wanted):
            self.lists += 1
            self._on_complete()

    def _note_foreign(self, count: int, name: str) -> None:
        self.foreign = count  # objects under the prefix that ShadowServe has not written
        if count and not self._warned_of_foreign:
            self._warned_of_foreign = True
            _log.warning("s3_foreign_objects count=%d first=%r hint='they are left alone; move them'", count, name)

    def _sweep(self, found: Mapping[str, list[Listed]]) -> None:
        """Delete objects beyond ``bytes_max``, and remove them from ``found``, which is newest first: the oldest of
        the tenant that is furthest beyond its share. All nodes choose the same objects."""
        bytes_max = self._config.bytes_max
        used: dict[str, float] = {name: sum(listed.size for listed in each) for name, each in found.items() if each}
        total = sum(used.values())
        if bytes_max is None or total <= bytes_max:
            return
        with self._shares_lock:
            shares = dict(self._shares.among(used))
        swept: list[str] = []
        while total > bytes_max * _SWEPT_SHARE:
            tenant = most_beyond(used, shares)
            oldest = found[tenant].pop()
            used[tenant] -= oldest.size
            total -= oldest.size
            if not found[tenant]:
                del used[tenant]
            swept.append(oldest.name)
            self._catalog.mark_object(oldest.name)
        self.swept += self._deletions.delete_some(swept)  # objects that were deleted because of bytes_max

    def _learn_all(self, wanted: Sequence[Listed]) -> bool:
        """Add objects to the catalog by their footers, for at most ``list_timeout_s``; return whether that is done."""
        ends_s = time.monotonic() + self._config.list_timeout_s
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE, thread_name_prefix="s3-footer") as footers:
            for begin in range(0, len(wanted), _FOOTERS_PER_BATCH):
                batch = wanted[begin : begin + _FOOTERS_PER_BATCH]
                if not all([*footers.map(lambda listed: self._learn(listed, ends_s), batch)]):
                    return False
        return True

    def _learn(self, listed: Listed, ends_s: float) -> bool:
        """Add an object to the catalog if its footer is sound; return False if the next list has to try again."""
        if self._ended.is_set() or self._read_breaker.away or time.monotonic() > ends_s:
            return False
        try:
            contents = read_contents(self._bucket, listed.name, listed.size)
            if max(place.length for place in contents.places.values()) > self._config.read_bytes_under_way_max:
                raise ColdObjectError("it has a record that is larger than read_bytes_under_way_max")
        except ColdObjectError as error:
            _log.warning("s3_object_refused name=%s error=%r", listed.name, str(error))
            self._read_breaker.failed("damaged", error)
            self._catalog.refuse(listed)
        except BucketError as error:
            self._read_breaker.failed(error.reason, error)
            return error.reason in _OF_ONE_OBJECT
        else:
            self._catalog.learn(contents, listed.written_s)
        return True


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
