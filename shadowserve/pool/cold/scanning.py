"""Lists of the bucket and of partitions: finds new objects, and reads what describes them."""

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from typing import Final

from shadowserve.pool.cold.bucket import BucketError, Listed
from shadowserve.pool.cold.index_objects import parse_index_name
from shadowserve.pool.cold.indexing import MERGED, Indexer
from shadowserve.pool.cold.layout import ColdObjectError, parse_name, partition_in
from shadowserve.pool.cold.part import Part, Shared
from shadowserve.pool.cold.partitions import Partitions
from shadowserve.pool.cold.writes import read_contents

_log = logging.getLogger(__name__)

_FOOTERS_AT_ONCE: Final = 16
_OF_ONE_OBJECT: Final = frozenset({"absent", "damaged", "denied"})
"""Failures to read a footer that another try does not change."""
_LISTED_MIN: Final = 100_000
"""New objects of a list that are examined in any case: some 30 MB."""
_LISTED_MAX: Final = 500_000
"""Most new objects of a list; the following lists have the others. They would take some gigabytes."""
_USE_S: Final = 86_400.0
"""Time after which the last use of objects is written into a partition's index objects."""


class Scanner(Part):
    """Brings the catalog up to date with lists.

    Attributes:
        foreign: Objects under the prefix that ShadowServe has not written, of the last list of the whole bucket.
    """

    def __init__(self, shared: Shared, indexer: Indexer, partitions: Partitions) -> None:
        super().__init__(shared)
        self.foreign = 0
        self._indexer = indexer
        self._partitions = partitions
        self._merges: dict[int, Sequence[Listed]] = {}  # index objects of partitions that have many
        self._ended = False
        self._warned_of_foreign = False
        self._footers = ThreadPoolExecutor(_FOOTERS_AT_ONCE, thread_name_prefix="s3-footer")
        self._workers: ThreadPoolExecutor

    def start(self, workers: ThreadPoolExecutor) -> None:
        """``workers`` run what concerns different partitions."""
        self._workers = workers

    def forget(self, partition: int) -> None:
        """Forget the objects of a partition that this node does not serve."""
        self._catalog.forget(partition)
        self._indexer.forget(partition)

    def close(self) -> None:
        """End lists soon, without a result."""
        self._ended = True
        self._indexer.close()
        self._footers.shutdown(wait=False, cancel_futures=True)

    def scan(self, partitions: Collection[int], folder: str, objects_max: int | None = None) -> bool:
        """Bring the catalog up to date with a list of partitions; return False if that has to be repeated.

        Objects that the list does not have are forgotten, and new ones are added. A list of ``folder`` has all objects
        of the partitions; beyond ``objects_max`` it ends without a result.
        """
        if self._ended:
            return False
        number = self._catalog.begin_list(partitions)
        try:
            return self._list(partitions, folder, number, objects_max)
        finally:
            self._catalog.forget_wanted(partitions)

    def _list(self, partitions: Collection[int], folder: str, number: int, objects_max: int | None) -> bool:
        found: defaultdict[str, list[Listed]] = defaultdict(list)
        index: defaultdict[int, list[Listed]] = defaultdict(list)
        news: defaultdict[int, list[Listed]] = defaultdict(list)
        count = foreign = total = 0
        first_foreign, is_cut = "", False
        listed_max = min(max(self._config.chunks_max, _LISTED_MIN), _LISTED_MAX)
        for listed in self._bucket.list(folder):
            total += 1
            if self._ended or (objects_max is not None and total > objects_max):
                return False
            if listed.name.endswith(".ix") and (name := parse_index_name(listed.name)) is not None:
                (news if name.is_news else index)[name.partition].append(listed)
            elif (parts := parse_name(listed.name)) is None:
                foreign, first_foreign = foreign + 1, first_foreign or listed.name
            elif parts.partition in partitions and self._catalog.wants(listed, parts):
                found[parts.tenant].append(listed)
                count += 1
                if count > 1.25 * listed_max:
                    count = _keep_newest(found, listed_max)
                    is_cut = listed_max < self._config.chunks_max
        self._catalog.end_list(number, partitions)
        self._note_foreign(foreign, first_foreign)
        wanted: defaultdict[int, dict[str, Listed]] = defaultdict(dict)
        for objects in found.values():
            objects.sort(key=lambda listed: (-listed.written_s, listed.name))
        for listed in _in_turns(found):
            wanted[partition_in(listed.name)][listed.name] = listed
        ends_s = time.monotonic() + self._config.list_timeout_s
        jobs = [
            (each, wanted.get(each, {}), index.get(each, []), news.get(each, []), ends_s)
            for each in {**wanted, **index}
            if each in wanted or (each in partitions and self._is_to_merge(each, index[each]))
        ]
        run = map if folder else self._workers.map  # one of a folder runs in such a thread itself
        is_done = all([*run(lambda job: self._learn_partition(*job), jobs)])
        if self._partitions.serves is None:
            self.take_news(chain.from_iterable(news.values()))
        return is_done and not is_cut

    def _note_foreign(self, count: int, name: str) -> None:
        self.foreign = count  # objects under the prefix that ShadowServe has not written
        if count and not self._warned_of_foreign:
            self._warned_of_foreign = True
            _log.warning("s3_foreign_objects count=%d first=%r hint='they are left alone; move them'", count, name)

    def _learn_partition(
        self, partition: int, wanted: dict[str, Listed], index: Sequence[Listed], news: Sequence[Listed], ends_s: float
    ) -> bool:
        """Add new objects of a partition: those of its index objects and news, then the others by their footers."""
        is_done = self._indexer.learn(partition, (*index, *news), wanted, ends_s)
        if partition in self._partitions.own and self._is_to_merge(partition, index):
            self._merges[partition] = index
        return all([is_done, *self._footers.map(lambda listed: self._learn(listed, ends_s), wanted.values())])

    def _is_to_merge(self, partition: int, index: Sequence[Listed]) -> bool:
        """Return whether the index objects are many, or have long lacked the last use of their objects."""
        small = len(self._indexer.small(index)) if index else 0
        is_used = self._config.bytes_max is not None and self._catalog.touched_s(partition) < self._clock_s() - _USE_S
        return small >= MERGED or (small > 0 and is_used)

    def _learn(self, listed: Listed, ends_s: float) -> bool:
        """Add an object to the catalog if its footer is sound; return False if the next list has to try again."""
        if self._ended or self._breakers.read.away or time.monotonic() > ends_s:
            return False
        try:
            contents = read_contents(self._bucket, listed.name, listed.size)
            if contents.longest > self._config.read_bytes_under_way_max:
                raise ColdObjectError("it has a record that is larger than read_bytes_under_way_max")
        except ColdObjectError as error:
            _log.warning("s3_object_refused name=%s error=%r", listed.name, str(error))
            self._breakers.read.failed("damaged", error)
            self._catalog.refuse(listed)
        except BucketError as error:
            self._breakers.read.failed(error.reason, error)
            return error.reason in _OF_ONE_OBJECT
        else:
            if self._catalog.learn(contents, listed.written_s) and partition_in(listed.name) in self._partitions.own:
                self._indexer.note(contents)
        return True

    # ---- Index objects

    def take_news(self, news: Iterable[Listed]) -> None:
        """Take news of partitions that the node serves, which a list then confirms; delete old ones of others."""
        ends_s = time.monotonic() + self._config.list_timeout_s
        of_each: defaultdict[int, list[Listed]] = defaultdict(list)
        for listed in self._indexer.new_of(news):
            if (name := parse_index_name(listed.name)) is not None:
                of_each[name.partition].append(listed)

        def take(partition: int, listed: Sequence[Listed]) -> None:
            if partition not in self._partitions.own:
                self._indexer.drop_news(partition, listed)
            elif self._indexer.take_news(partition, listed, ends_s):
                self._partitions.list_again(partition)

        list(self._workers.map(take, of_each.keys(), of_each.values()))

    def write_news(self) -> None:
        """Write what this node has written in partitions of other nodes, which would not learn of it."""
        due = [each for each in self._indexer.due(self._partitions.own) if each not in self._partitions.own]
        list(self._workers.map(lambda each: self._indexer.write(each, is_news=True), due))

    def write_index(self) -> None:
        """Write index objects of what this node has written, and merge those of partitions that have many."""
        own = self._partitions.own
        due = self._indexer.due(own)
        list(self._workers.map(lambda each: self._indexer.write(each, is_news=each not in own), due))
        merges, self._merges = self._merges, {}
        list(self._workers.map(self._indexer.merge, merges.keys(), merges.values()))


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
