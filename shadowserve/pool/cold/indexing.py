"""Reads, writes and merges the index objects of the bucket (:mod:`shadowserve.pool.cold.index_objects`)."""

import logging
import threading
import time
from collections.abc import Collection, Container, Iterable
from math import inf
from typing import Final

from shadowserve.pool.cold.bucket import BucketError, Listed
from shadowserve.pool.cold.index_objects import (
    INDEX_BYTES_MAX,
    NO_ENTRIES,
    IndexEntries,
    index_name,
    pack,
    parse_index,
    parse_index_name,
)
from shadowserve.pool.cold.layout import ColdObjectError, Contents, partition_in
from shadowserve.pool.cold.part import Part, Shared

_log = logging.getLogger(__name__)

_ENTRIES: Final = 16
"""Objects of a partition that are enough for an index object: it costs a request, as does the end of each object."""
_ENTRIES_BYTES: Final = 64 << 10
_AGE_S: Final = 3_600.0
"""Time after which fewer are enough. A node that starts reads the ends of objects that are younger."""
_WAITING_BYTES_MAX: Final = 64 << 20
"""Most bytes of footers that wait. Objects beyond are learnt from their ends."""
MERGED: Final = 8
"""Index objects of a partition that are merged into one, if each is smaller than ``_MERGED_BYTES``."""
_MERGED_BYTES: Final = 1 << 20
_NEWS_S: Final = 86_400.0
"""Age at which any node deletes news: the partition's node has listed the objects since."""
_NEWS_BYTES_MAX: Final = 8 << 20
"""Most bytes of a partition's news that become one part of the index."""
_TAKEN_MAX: Final = 100_000
_REFUSED_MAX: Final = 10_000


class _Waiting:
    """Footers of a partition's objects that no index object has, by name."""

    __slots__ = ("bytes", "footers", "since_s")

    def __init__(self, now_s: float) -> None:
        self.footers: dict[str, bytes] = {}
        self.bytes = 0
        self.since_s = now_s


class Indexer(Part):
    """Index objects of all partitions. Methods may be called by any thread; note() alone does not wait."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._writes = self._config.write != "never"
        self._record_bytes_max = self._config.read_bytes_under_way_max
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._refused: dict[str, None] = {}  # names of unsound index objects
        self._taken_s: dict[str, float] = {}  # news that were taken, with the time
        self._merges_again_s = 0.0
        self._ended = False
        self._learnt: dict[int, frozenset[str]] = {}  # index objects of each partition that were read or written here

    # ---- Learning

    def learn(self, partition: int, index: Collection[Listed], wanted: dict[str, Listed], ends_s: float) -> bool:
        """Add objects that the catalog wants, and that new index objects describe; remove them from ``wanted``.

        ``index`` are all index objects of the partition. Return False if some could not be read now, until ``ends_s``.
        """
        with self._lock:
            read = self._learnt.get(partition, frozenset()) & {listed.name for listed in index}
            self._learnt[partition] = read
        is_done = True
        for listed in index:
            if not wanted:
                return True
            if listed.name in read:
                continue
            if not self._may_read(ends_s):
                return False
            try:
                entries = self._read(listed)
            except BucketError:
                is_done = False
                continue
            if entries is not None:
                self._note_learnt(partition, listed.name)
                self._learn(entries, wanted)
        return is_done

    def _learn(self, entries: IndexEntries, wanted: dict[str, Listed]) -> None:
        """Add objects that the catalog wants, and that an index object describes; remove them from ``wanted``."""
        sizes = entries.objects["size"].tolist()
        is_readable = (entries.objects["longest"] <= self._record_bytes_max).tolist()
        positions, written_s = [], []
        for at, name in enumerate(entries.names):
            found = wanted.get(name)
            if found is not None and found.size == sizes[at] and is_readable[at]:
                positions.append(at)
                written_s.append(found.written_s)
                del wanted[name]
        self._catalog.learn_all(entries, positions, written_s)

    def _may_read(self, ends_s: float) -> bool:
        return not self._ended and not self._breakers.read.away and time.monotonic() < ends_s

    def close(self) -> None:
        """Read and write nothing more."""
        self._ended = True

    def _note_learnt(self, partition: int, name: str) -> None:
        with self._lock:
            self._learnt[partition] = self._learnt.get(partition, frozenset()) | {name}

    def forget(self, partition: int) -> None:
        """Forget which index objects of a partition were read."""
        with self._lock:
            self._learnt.pop(partition, None)

    def _read(self, listed: Listed) -> IndexEntries | None:
        """Return the entries of an index object; none of an unsound one, which is left alone.

        None: it is absent or unreadable, and perhaps will not be later. BucketError: the same for all objects.
        """
        name = parse_index_name(listed.name)
        if name is None or listed.name in self._refused:
            return NO_ENTRIES
        try:
            if not 0 < listed.size <= INDEX_BYTES_MAX:
                raise ColdObjectError(f"it has {listed.size} bytes")
            return parse_index(name, bytes(self._bucket.read(listed.name, 0, listed.size)))
        except ColdObjectError as error:
            self._refuse(listed.name, error)
            return NO_ENTRIES
        except BucketError as error:
            self._breakers.read.failed(error.reason, error)
            if error.reason not in ("absent", "damaged", "denied"):
                raise
            return None

    def _refuse(self, name: str, error: ColdObjectError) -> None:
        with self._lock:
            if len(self._refused) >= _REFUSED_MAX:
                self._refused.clear()
            self._refused[name] = None
        _log.warning(
            "s3_index_refused name=%s error=%r hint='its objects are learnt from their ends'", name, str(error)
        )

    def new_of(self, news: Iterable[Listed]) -> list[Listed]:
        """Return those of ``news`` that were not taken here lately."""
        now_s = self._clock_s()
        return [listed for listed in news if self._taken_s.get(listed.name, -inf) + _AGE_S <= now_s]

    def take_news(self, partition: int, news: Iterable[Listed], ends_s: float) -> bool:
        """Learn what others have written in a partition of this node; return whether anything was new.

        The news become a part of the index. If that fails they are taken again after an hour.
        """
        is_new, size = False, 0
        entries: dict[bytes, int] = {}
        taken: list[str] = []
        for listed in news:
            size += listed.size
            if not self._may_read(ends_s) or (taken and size > _NEWS_BYTES_MAX):
                break
            try:
                found = self._read(listed)
            except BucketError:
                continue
            with self._lock:
                if len(self._taken_s) >= _TAKEN_MAX:
                    self._taken_s.clear()
                self._taken_s[listed.name] = self._clock_s()
            for contents, used_h in found or ():
                entries[contents.footer] = max(used_h, entries.get(contents.footer, 0))
                if contents.longest <= self._record_bytes_max:
                    is_new |= self._catalog.add_of_news(contents, listed.written_s, used_h)
            if found:
                taken.append(listed.name)
        if taken:
            self._replace(partition, [(used_h, footer) for footer, used_h in sorted(entries.items())], taken)
        return is_new

    def drop_news(self, partition: int, news: Iterable[Listed]) -> None:
        """Delete news that the partition's node has not taken for a long time."""
        old = [listed.name for listed in news if time.time() - listed.written_s > _NEWS_S]
        if old:
            self._replace(partition, (), old)

    # ---- Writing

    def note(self, contents: Contents) -> None:
        """Let the footer of an object wait for an index object."""
        if not self._writes:
            return
        footer = contents.footer
        with self._lock:
            if self._waiting_bytes + len(footer) > _WAITING_BYTES_MAX:
                return
            partition = partition_in(contents.name)
            waiting = self._waiting.get(partition) or self._waiting.setdefault(partition, _Waiting(self._clock_s()))
            if contents.name not in waiting.footers:
                waiting.footers[contents.name] = footer
                waiting.bytes += len(footer)
                self._waiting_bytes += len(footer)

    def due(self, own: Container[int]) -> list[int]:
        """Return the partitions with enough footers, or old ones; of partitions of other nodes, with any."""
        now_s = self._clock_s()
        with self._lock:
            return [
                partition
                for partition, waiting in self._waiting.items()
                if len(waiting.footers) >= _ENTRIES
                or waiting.bytes >= _ENTRIES_BYTES
                or now_s - waiting.since_s >= _AGE_S
                or partition not in own
            ]

    def write(self, partition: int, *, is_news: bool) -> None:
        """Write the waiting footers of a partition; if that fails they wait again."""
        with self._lock:
            waiting = self._waiting.pop(partition, None)
            if waiting is None:
                return
            self._waiting_bytes -= waiting.bytes
        # An object whose record was removed, or of which nothing is known any more, is left out.
        entries = [
            (used_h, footer)
            for name, footer in waiting.footers.items()
            if (used_h := self._catalog.used_h(name)) is not None
        ]
        if not self._replace(partition, entries, (), is_news=is_news):
            with self._lock:
                newer = self._waiting.get(partition)
                if newer is not None:
                    self._waiting_bytes -= newer.bytes
                    waiting.footers |= newer.footers
                    waiting.bytes += newer.bytes
                self._waiting[partition] = waiting
                self._waiting_bytes += waiting.bytes

    def _replace(
        self, partition: int, entries: Collection[tuple[int, bytes]], old: Iterable[str], *, is_news: bool = False
    ) -> bool:
        """Write index objects with these entries, then delete old ones; return whether that was possible."""
        if not self._writes or self._ended:
            return False
        breaker = self._breakers.write
        try:
            if entries:
                if breaker.away:
                    return False
                written = self._create(partition, entries, is_news=is_news)
                breaker.succeeded()
            breaker = self._breakers.delete
            for name in set(old) - (written if entries else set()):
                if breaker.away:
                    return False
                self._bucket.delete(name)
                breaker.succeeded()
        except BucketError as error:
            breaker.failed(error.reason, error)
            return False
        return True

    def _create(self, partition: int, entries: Iterable[tuple[int, bytes]], *, is_news: bool = False) -> set[str]:
        """Write index objects with these entries; return their names."""
        names: set[str] = set()
        chunks: list[list[tuple[int, bytes]]] = []
        size = INDEX_BYTES_MAX
        for entry in entries:
            size += len(entry[1])
            if size > INDEX_BYTES_MAX // 2:
                chunks.append([])
                size = len(entry[1])
            chunks[-1].append(entry)
        for chunk in chunks:
            body = pack(chunk)
            names.add(name := index_name(partition, body, is_news=is_news))
            self._bucket.create(name, body)
            self._note_learnt(partition, name)
        return names

    def small(self, index: Iterable[Listed]) -> list[Listed]:
        """Return those index objects that may be merged."""
        return [listed for listed in index if listed.size < _MERGED_BYTES and listed.name not in self._refused]

    def merge(self, partition: int, index: Iterable[Listed]) -> None:
        """Replace a partition's index objects by one with the last use of each object. They have just been listed."""
        small = self.small(index)
        now_s = self._clock_s()
        if not self._writes or self._ended or now_s < self._merges_again_s:
            return
        self._catalog.forget_touches(partition)
        footers: dict[str, tuple[int, bytes]] = {}
        merged = []
        try:
            for listed in small:
                if entries := self._read(listed):
                    merged.append(listed.name)
                for contents, used_h in entries or ():
                    if (known_h := self._catalog.used_h(contents.name)) is not None:
                        footers[contents.name] = max(used_h, known_h), contents.footer
        except BucketError:
            return
        if not self._replace(partition, [footers[name] for name in sorted(footers)], merged):
            self._merges_again_s = now_s + _AGE_S  # perhaps it may not delete; reading all of them has a cost
