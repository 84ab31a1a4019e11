"""The catalog: what this node knows of the bucket, from lists, index objects, footers, and its own writes."""

import itertools
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowserve.native import ColdFound, ColdRow, ColdState, ColdSums, ColdTable
from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.index_objects import IndexEntries
from shadowserve.pool.cold.layout import Contents, ObjectName, join_name, parse_name, partition_in
from shadowserve.pool.cold.shares import Shares, most_beyond

_REFUSED_MAX = 10_000
_LEFT_OUT_MAX: Final = 100_000
_SKIPPED_MAX = 1024
"""Most lists that skip an unsound object; the number doubles each time that it is still unsound."""
_LEARNT_AT_ONCE: Final = 1024
"""Objects of an index object that are added before other threads get their turn."""
_OLDEST_SHARE: Final = 64
"""Part of a tenant's objects that are chosen at once as its oldest ones: choosing takes milliseconds per million."""
SWEPT_SHARE: Final = 0.95
"""Share of bytes_max that a sweep leaves, so that not every write is followed by a deletion."""


class Marked(NamedTuple):
    """Objects to delete from the bucket so that a record is not found again."""

    names: list[str]  # objects with the record
    may_be_elsewhere: bool  # objects of the tenant with unknown contents, which may have it too, are being deleted


class _LeftOut(NamedTuple):
    """An object that the catalog has no room for."""

    records: int
    seen: int  # last list with it
    size: int
    written_s: float


class _Tenant:
    """A tenant's numbers. A cleared tenant gets another one of these: its number finds none of its objects."""

    __slots__ = ("bytes", "chunks", "is_cleared", "name", "number", "objects", "oldest", "stored")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.is_cleared = False
        self.objects = self.chunks = self.bytes = 0  # known ones
        self.stored = 0  # known and hidden objects
        self.oldest: list[tuple[float, int]] = []  # some, newest first; those that have changed are stale


class Catalog:
    """Objects by name and by their records. Methods may be called by any thread; none waits.

    An object is known, hidden, or neither. A hidden object is not found, but it is, or may be, in the bucket: a command
    that removes one of its records must delete it. It is hidden because it is marked for deletion, because it could not
    be read, or because a write of it has failed with an unknown result.

    Attributes:
        objects: Known objects.
        chunks: Records in them.
        bytes: Bytes of the objects.
        left_out: Objects of the bucket that are unknown because ``chunks_max`` has no room for them, 100,000 at most.
    """

    def __init__(self, shares: Shares) -> None:
        """``shares`` limits the number of known records, and divides it among tenants; further objects are left out."""
        self.objects = self.chunks = self.bytes = self.left_out = 0
        self._shares = shares
        self._lock = threading.Lock()
        self._table = ColdTable()
        self._tenants: dict[str, _Tenant] = {}
        self._by_number: dict[int, _Tenant] = {}  # also cleared ones that have objects
        self._numbers = itertools.count()
        self._list = 0  # number of the last list
        self._marked: dict[str, None] = {}
        self._marked_unread: dict[str, dict[str, None]] = {}  # marked objects of unknown contents, by tenant
        self._wanted: dict[int, set[str]] = {}  # of each partition, in this list, if not deleted since
        self._left_out: dict[int, dict[str, _LeftOut]] = {}  # by partition and name
        self._uncounted: dict[int, Counter[str]] = {}  # bytes of further ones in the last list, by partition and tenant
        self._touched_s: dict[int, float] = {}  # first use of each partition that its index objects do not have
        self._refused: OrderedDict[Listed, tuple[int, int]] = OrderedDict()  # lists to skip, in all and left

    def find(self, tenant: str, key: bytes) -> ColdFound | None:
        own = self._tenants.get(tenant)
        return None if own is None else self._table.find(own.number, key)

    def set_share(self, tenant: str, records: int | None) -> None:
        """Limit the known records of a tenant when there is no room for all; None for no quota."""
        with self._lock:
            self._shares.set_quota(tenant, records)

    # ---- Known objects

    def add(self, contents: Contents, written_s: float = inf) -> bool:
        """Add an object; return False if it is marked for deletion, or has no room."""
        with self._lock:
            return self._add(contents, written_s, 0)

    def add_of_news(self, contents: Contents, written_s: float, used_h: int) -> bool:
        """Add an object of another node, used last in an hour since 1970; return False if it was not added.

        Hidden ones stay hidden. A list has to confirm the others: they may have been deleted since.
        """
        with self._lock:
            return not self._table.number_of(contents.parts.digest) and self._add(contents, written_s, used_h)

    def learn(self, contents: Contents, written_s: float, used_h: int = 0) -> bool:
        """Add an object that wants() has returned True for; also False if it was deleted since."""
        with self._lock:
            wanted = self._wanted.get(contents.parts.partition, ())
            return contents.name in wanted and self._add(contents, written_s, used_h)

    def learn_all(self, entries: IndexEntries, positions: Sequence[int], written_s: Sequence[float]) -> None:
        """Add objects of an index object, at ``positions``, that wants() has returned True for."""
        for begin in range(0, len(positions), _LEARNT_AT_ONCE):
            part = slice(begin, begin + _LEARNT_AT_ONCE)
            with self._lock:
                others = self._learn_new(entries, positions[part], written_s[part])
            for at, each_s in others:
                self.learn(entries.contents(at), each_s, entries.used_h[at])

    def _learn_new(
        self, entries: IndexEntries, positions: Sequence[int], written_s: Sequence[float]
    ) -> list[tuple[int, float]]:
        """Add what is new, in a few calls of the C core; return the others: all, if there may be no room."""
        if self.chunks + int(entries.objects["records"][positions].sum()) > self._shares.total:
            return [*zip(positions, written_s, strict=True)]
        wanted = self._wanted.get(entries.partition, ())
        of_each: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for at, each_s in zip(positions, written_s, strict=True):
            name = entries.names[at]
            if name in wanted and name not in self._marked:
                self._let_in(name)
                of_each[entries.tenants[at]].append((at, each_s))
        others: list[tuple[int, float]] = []
        for tenant, found in of_each.items():
            numbers = self._put(tenant, (entries.body, entries.objects), found, ColdState.KNOWN)
            others += [each for each, number in zip(found, numbers, strict=True) if not number]
        return others

    def _add(self, contents: Contents, written_s: float, used_h: int) -> bool:
        row = self._row_of(contents.parts)
        if row is not None and row.state == ColdState.KNOWN:
            return not self._is_cleared(row)
        if contents.name in self._marked or (row is not None and self._is_cleared(row)):
            return False
        if not self._make_room(contents.tenant, contents.records, written_s):
            self._leave_out(contents.name, contents.records, contents.size, written_s)
            return False
        self._let_in(contents.name)
        if row is not None:
            self._remove(row.number)
        self._insert(contents, ColdState.KNOWN, written_s, used_h)
        return True

    def _insert(self, contents: Contents, state: ColdState, written_s: float = inf, used_h: int = 0) -> None:
        [number] = self._put(contents.tenant, (contents.footer, contents.described), [(0, written_s)], state)
        self._table.use(number, used_h)

    def _put(
        self,
        tenant: str,
        described: tuple[bytes, bytes | npt.NDArray[np.void]],
        which: Sequence[tuple[int, float]],
        state: ColdState,
    ) -> list[int]:
        """Put objects of a tenant into the table; return their numbers, 0 for those that it had.

        ``which`` are their positions in what is ``described``, and when each was written.
        """
        own = self._tenants.get(tenant)
        if own is None:
            own = _Tenant(tenant, next(self._numbers))
            self._tenants[tenant] = self._by_number[own.number] = own
        positions, written_s = zip(*which, strict=True)
        numbers, sums = self._table.insert(own.number, *described, positions, written_s, seen=self._list, state=state)
        own.stored += int(np.count_nonzero(numbers))
        self._count(own, 1, sums)
        return [*map(int, numbers)]

    def _count(self, own: _Tenant, sign: int, sums: ColdSums) -> None:
        """Count objects that are known now, or no longer. A record of several ones is counted once."""
        for counted in () if own.is_cleared else (self, own):
            counted.objects += sign * sums.objects
            counted.chunks += sign * sums.records
            counted.bytes += sign * sums.bytes

    def _hide_number(self, number: int) -> None:
        row, alone = self._table.set_state(number, ColdState.HIDDEN)
        if row.state == ColdState.KNOWN:
            self._count(self._by_number[row.tenant], -1, ColdSums(1, alone, row.size))

    def _row_of(self, parts: ObjectName) -> ColdRow | None:
        """Return the row of the object whose name has this digest, which no other name has."""
        return self._table.row(number) if (number := self._table.number_of(parts.digest)) else None

    def _leave_out(self, name: str, records: int, size: int, written_s: float) -> None:
        partition = partition_in(name)
        left_out = self._left_out.setdefault(partition, {})
        if name not in left_out:
            if self.left_out >= _LEFT_OUT_MAX:
                self._uncounted.setdefault(partition, Counter())[_parts(name).tenant] += size
                return
            self.left_out += 1
        left_out[name] = _LeftOut(records, self._list, size, written_s)

    def _let_in(self, name: str) -> None:
        if self.left_out:
            self.left_out -= self._left_out.get(partition_in(name), {}).pop(name, None) is not None

    def _make_room(self, tenant: str, records: int, written_s: float) -> bool:
        """Forget the oldest objects of tenants beyond their shares until there is room; False if there is none."""
        while self.chunks + records > self._shares.total:
            oldest = self._oldest_beyond(tenant, records)
            if oldest is None or (oldest[0].name == tenant and oldest[1].written_s >= written_s):
                return False
            row = oldest[1]
            self._leave_out(self._name(row), self._table.records(row.number), row.size, row.written_s)
            self._remove(row.number)
        return True

    def _oldest_beyond(self, tenant: str, records: int) -> tuple[_Tenant, ColdRow] | None:
        """Return the oldest object of the tenant furthest beyond its share, if ``tenant`` had ``records`` more."""
        used: dict[str, float] = {name: own.chunks for name, own in self._tenants.items() if own.objects}
        used[tenant] = used.get(tenant, 0) + records
        victim = self._tenants.get(most_beyond(used, self._shares.among(used)))
        oldest = None if victim is None else self._oldest(victim)
        return None if victim is None or oldest is None else (victim, oldest)

    def _oldest(self, own: _Tenant) -> ColdRow | None:
        """Return a tenant's oldest known object."""
        while own.objects:
            while own.oldest:
                written_s, number = own.oldest[-1]
                row = self._table.row(number)
                is_same = row is not None and row.state == ColdState.KNOWN and row.tenant == own.number
                if row is not None and is_same and row.written_s == written_s:
                    return row
                own.oldest.pop()
            rows = self._table.select(tenant=own.number, is_known=True)
            by_age = rows[np.argsort(rows["written_s"], kind="stable")[: len(rows) // _OLDEST_SHARE + 1]][::-1]
            own.oldest = [*zip(by_age["written_s"].tolist(), by_age["number"].tolist(), strict=True)]
        return None

    def _name(self, row: ColdRow) -> str:
        return join_name(ObjectName(row.partition, self._by_number[row.tenant].name, row.digest))

    def _is_cleared(self, row: ColdRow) -> bool:
        return self._by_number[row.tenant].is_cleared

    def _remove(self, number: int) -> None:
        """Forget an object, whether it is known or hidden."""
        self._hide_number(number)
        row = self._table.row(number)
        assert row is not None
        self._table.remove(number)
        own = self._by_number[row.tenant]
        own.stored -= 1
        if own.is_cleared and not own.stored:
            del self._by_number[own.number]

    def used_h(self, name: str) -> int | None:
        """Return the hour in which a known object was used last, 0 for never; None for another object."""
        with self._lock:
            row = self._row_of(_parts(name))
            is_known = row is not None and row.state == ColdState.KNOWN and not self._is_cleared(row)
            return row.used_h if row is not None and is_known else None

    def forget(self, partition: int) -> None:
        """Forget the known objects of a partition that this node does not serve."""
        with self._lock:
            self.left_out -= len(self._left_out.pop(partition, ()))
            self._uncounted.pop(partition, None)
        for number in self._table.select(partitions=(partition,), is_known=True)["number"].tolist():
            with self._lock:
                row = self._table.row(number)
                if row is not None and row.state == ColdState.KNOWN and row.partition == partition:
                    self._remove(number)

    # ---- Hidden objects

    def hide(self, name: str) -> None:
        """Hide an object that is, or may be, in the bucket; until add(), or a list without it."""
        with self._lock:
            self._hide(name)

    def _hide(self, name: str) -> bool:
        number = self._table.number_of(_parts(name).digest)
        if number:
            self._hide_number(number)
        return number != 0

    def add_hidden(self, contents: Contents) -> None:
        """Add an object whose write may have succeeded, as hide() does."""
        with self._lock:
            if not self._hide(contents.name):
                self._insert(contents, ColdState.HIDDEN)

    def refuse(self, listed: Listed) -> None:
        """Hide an unsound object, and examine it again ever more rarely until it changes."""
        with self._lock:
            self._hide(listed.name)
            skipped = min(2 * self._refused.pop(listed, (1, 0))[0], _SKIPPED_MAX)
            self._refused[listed] = skipped, skipped
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    # ---- Lists

    def begin_list(self, partitions: Iterable[int]) -> int:
        """Begin a list of partitions, after which end_list() forgets what it did not show; return its number."""
        self.forget_wanted(partitions)
        with self._lock:
            for partition in partitions:
                self._uncounted.pop(partition, None)
            self._list += 1
            return self._list

    def forget_wanted(self, partitions: Iterable[int]) -> None:
        """End a list: learn() adds nothing more of these partitions."""
        with self._lock:
            for partition in partitions:
                self._wanted.pop(partition, None)

    def wants(self, listed: Listed, parts: ObjectName) -> bool:
        """Return whether to read the contents of a listed object: it is not known, refused, or marked for deletion.

        Called once for each object of a list.
        """
        with self._lock:
            number, state = self._table.see(parts.digest, self._list, listed.written_s)
            if number and len(self._by_number) > len(self._tenants):  # some tenants are cleared
                row = self._table.row(number)
                if row is not None and self._is_cleared(row):
                    self._mark(listed.name)
            if self._refused and listed in self._refused:
                skipped, left = self._refused[listed]
                self._refused[listed] = skipped, max(0, left - 1)
                if left:
                    return False
            if listed.name in self._marked:
                return False
            if state == ColdState.KNOWN:
                return False
            if not self._has_room(parts.tenant, listed):
                self._leave_out(listed.name, self._records_left_out(listed.name), listed.size, listed.written_s)
                return False
            self._wanted.setdefault(parts.partition, set()).add(listed.name)
            return True

    def _records_left_out(self, name: str) -> int:
        if not self.left_out:
            return 1
        left_out = self._left_out.get(partition_in(name), {}).get(name)
        return 1 if left_out is None else left_out.records

    def _has_room(self, tenant: str, listed: Listed) -> bool:
        records = self._records_left_out(listed.name)
        if self.chunks + records <= self._shares.total:
            return True
        oldest = self._oldest_beyond(tenant, records)
        return oldest is not None and (oldest[0].name != tenant or oldest[1].written_s < listed.written_s)

    def end_list(self, number: int, partitions: Collection[int]) -> None:
        """Forget objects that list ``number`` of partitions did not show. Marked ones stay marked."""
        with self._lock:
            missing = self._table.select(partitions=partitions, seen_before=number)["number"].tolist()
            for partition in partitions:
                gone = [name for name, each in self._left_out.get(partition, {}).items() if each.seen < number]
                for name in gone:
                    self._let_in(name)
        for each in missing:
            with self._lock:
                row = self._table.row(each)  # it may have changed since
                if row is not None and row.seen < number and self._name(row) not in self._marked:
                    self._remove(each)

    # ---- Objects to delete

    def mark_excess(self, bytes_max: float, shares: Shares, partitions: Collection[int]) -> list[str]:
        """Mark objects in partitions for deletion if they have more than ``bytes_max``; return their names.

        They are the objects of the tenants furthest beyond their shares that were not used for longest.
        """
        with self._lock:
            left_out = [(*each, name) for at in partitions for name, each in self._left_out.get(at, {}).items()]
            uncounted = sum((self._uncounted[at] for at in partitions if at in self._uncounted), Counter())
            unknown = sum(size for _, _, size, *_ in left_out) + uncounted.total()
            if self.bytes + unknown <= bytes_max:
                return []
            rows = self._table.select(partitions=partitions, is_known=True)
            owners = {number: own.name for number, own in self._by_number.items() if not own.is_cleared}
        rows = rows[np.isin(rows["tenant"], list(owners))]
        total = int(rows["size"].sum(dtype=np.int64)) + unknown
        if total <= bytes_max:
            return []
        sizes: dict[str, list[tuple[int, int | str]]] = defaultdict(list)  # of each tenant, the first to delete last
        used_s = np.maximum(rows["written_s"], rows["used_h"] * 3600.0)
        rows = rows[np.argsort(used_s, kind="stable")[::-1]]
        columns = (rows[field].tolist() for field in ("number", "tenant", "size"))
        for number, tenant_number, size in zip(*columns, strict=True):
            sizes[owners[tenant_number]].append((size, number))
        for *_, size, _, name in sorted(left_out, key=lambda each: -each[3]):  # they were left out as the oldest ones
            sizes[_parts(name).tenant].append((size, name))
        used: dict[str, float] = {
            tenant: sum(size for size, _ in each) + uncounted[tenant] for tenant, each in sizes.items()
        }
        names: list[str] = []
        while used and total > bytes_max * SWEPT_SHARE:
            tenant = most_beyond(used, shares.among(used))
            size, which = sizes[tenant].pop()
            used[tenant] -= size
            total -= size
            if not sizes[tenant]:
                del used[tenant]
            with self._lock:
                if isinstance(which, int):
                    row = self._table.row(which)
                    is_same = row is not None and row.state == ColdState.KNOWN and row.size == size
                    which = self._name(row) if row is not None and is_same else ""
                if which and _parts(which).tenant == tenant:
                    self._mark(which)
                    names.append(which)
        return names

    def touch(self, found: ColdFound, now_s: float) -> None:
        """Note that a record of an object is used now; ``now_s`` is monotonic."""
        self._table.use(found.number, int(time.time() / 3600))
        self._touched_s.setdefault(found.partition, now_s)

    def touched_s(self, partition: int) -> float:
        """Return the time of the first use of a partition's records since forget_touches(); infinite for none."""
        return self._touched_s.get(partition, inf)

    def forget_touches(self, partition: int) -> None:
        self._touched_s.pop(partition, None)

    def mark_for_deletion(self, tenant: str, key: bytes) -> Marked:
        """Mark the objects with a tenant's record for deletion: they are hidden until note_deleted()."""
        with self._lock:
            names = self._names_with(tenant, key)
            for name in names:
                self._mark(name)
            unread = tenant in self._marked_unread or any(
                each.is_cleared and each.name == tenant for each in self._by_number.values()
            )
            return Marked(names, unread)

    def _names_with(self, tenant: str, key: bytes) -> list[str]:
        own = self._tenants.get(tenant)
        rows = map(self._table.row, () if own is None else self._table.holders(own.number, key))
        return [self._name(row) for row in rows if row is not None]

    def marked_with(self, tenant: str, key: bytes) -> list[str]:
        with self._lock:
            return [name for name in self._names_with(tenant, key) if name in self._marked]

    def mark_all(self, tenant: str | None) -> None:
        """Mark all objects of a tenant, or of all tenants, for deletion."""
        with self._lock:
            for name in list(self._tenants) if tenant is None else [tenant]:
                own = self._tenants.pop(name, None)
                if own is None:
                    continue
                own.is_cleared = True
                self.objects -= own.objects
                self.chunks -= own.chunks
                self.bytes -= own.bytes
                if not own.stored:
                    del self._by_number[own.number]

    def mark_object(self, name: str) -> None:
        with self._lock:
            self._mark(name)

    def _mark(self, name: str) -> None:
        parts = _parts(name)
        row = self._row_of(parts)
        if row is not None:
            self._hide_number(row.number)
        self._let_in(name)
        self._marked[name] = None
        if row is None or self._is_cleared(row):
            self._marked_unread.setdefault(parts.tenant, {})[name] = None

    def is_marked(self, name: str) -> bool:
        return name in self._marked

    def note_deleted(self, name: str) -> None:
        with self._lock:
            self._marked.pop(name, None)
            parts = _parts(name)
            if number := self._table.number_of(parts.digest):
                self._remove(number)
            self._wanted.get(parts.partition, set()).discard(name)
            unread = self._marked_unread.get(parts.tenant)
            if unread is not None:
                unread.pop(name, None)
                if not unread:
                    del self._marked_unread[parts.tenant]

    def marked(self) -> list[str]:
        with self._lock:
            return list(self._marked)

    def marked_unread(self, tenant: str) -> Collection[str]:
        """Mark and return all objects of a tenant that are to be deleted and have unknown contents; it takes long."""
        with self._lock:
            cleared = [each.number for each in self._by_number.values() if each.is_cleared and each.name == tenant]
        for each in (each for number in cleared for each in self._table.select(tenant=number)["number"].tolist()):
            with self._lock:
                row = self._table.row(each)
                if row is not None and self._is_cleared(row):
                    self._mark(self._name(row))
        with self._lock:
            return list(self._marked_unread.get(tenant, ()))


def _parts(name: str) -> ObjectName:
    parts = parse_name(name)
    assert parts is not None, f"{name} is no name of an object"
    return parts
