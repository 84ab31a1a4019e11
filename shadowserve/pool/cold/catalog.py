"""The catalog: what this node knows of the bucket, from lists, index objects, footers, and its own writes."""

import itertools
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.fair import Shares, most_beyond
from shadowserve.pool.cold.layout import Contents, ObjectName, join_name, parse_name, partition_in
from shadowserve.pool.cold.objects import FREE, HIDDEN, KNOWN, Found, ObjectTable, Row, keyed_hash, keyed_hashes

_REFUSED_MAX = 10_000
_LEFT_OUT_MAX: Final = 100_000
_SKIPPED_MAX = 1024
"""Most lists that skip an unsound object; the number doubles each time that it is still unsound."""
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
    """A tenant's numbers. A cleared tenant gets another one of these: its hashes find none of its objects."""

    __slots__ = ("bytes", "chunks", "is_cleared", "name", "number", "objects", "oldest", "salt", "stored")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.salt = os.urandom(16)
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
        self._table = ObjectTable()
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

    def find(self, tenant: str, key: bytes) -> Found | None:
        own = self._tenants.get(tenant)
        return None if own is None else self._table.find(keyed_hash(own.salt, key))

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
            return self._table.number_of(contents.parts) is None and self._add(contents, written_s, used_h)

    def learn(self, contents: Contents, written_s: float, used_h: int = 0) -> bool:
        """Add an object that wants() has returned True for; also False if it was deleted since."""
        with self._lock:
            wanted = self._wanted.get(contents.parts.partition, ())
            return contents.name in wanted and self._add(contents, written_s, used_h)

    def _add(self, contents: Contents, written_s: float, used_h: int) -> bool:
        number = self._table.number_of(contents.parts)
        if number is not None and self._table.states[number] == KNOWN:
            return not self._is_cleared(number)
        if contents.name in self._marked or (number is not None and self._is_cleared(number)):
            return False
        if not self._make_room(contents.tenant, len(contents.keys), written_s):
            self._leave_out(contents.name, len(contents.keys), contents.size, written_s)
            return False
        self._let_in(contents.name)
        if number is not None:
            self._remove(number)
        self._insert(contents, KNOWN, written_s, used_h)
        return True

    def _insert(self, contents: Contents, state: int, written_s: float = inf, used_h: int = 0) -> None:
        own = self._tenants.get(contents.tenant)
        if own is None:
            own = _Tenant(contents.tenant, next(self._numbers))
            self._tenants[contents.tenant] = self._by_number[own.number] = own
        hashes = keyed_hashes(own.salt, contents.keys)
        number, shared = self._table.insert(own.number, contents, hashes, (written_s, self._list, used_h))
        own.stored += 1
        self._set_state(number, state, alone=len(hashes) - len(shared), shared=shared)

    def _set_state(self, number: int, state: int, *, alone: int = 0, shared: Sequence[int] | None = None) -> None:
        """Set an object's state, and count known objects. A record of several ones is counted once.

        Of its records, ``alone`` are in no other object, and ``shared`` perhaps; by default all.
        """
        table = self._table
        before, table.states[number] = table.states[number], state
        if KNOWN not in (before, state) or before == state:
            return
        is_new = state == KNOWN
        own, sign = self._by_number[table.tenant(number)], 1 if is_new else -1
        for hashed in table.hashes(number) if shared is None else shared:
            alone += sum(table.states[each] == KNOWN for each in table.holders(hashed)) == is_new
        if not own.is_cleared:
            for counted in (self, own):
                counted.objects += sign
                counted.chunks += sign * alone
                counted.bytes += sign * table.sizes[number]

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
            if oldest is None or (oldest[2].name == tenant and oldest[0] >= written_s):
                return False
            written_s, number, _ = oldest
            records, size = len(self._table.hashes(number)), self._table.sizes[number]
            self._leave_out(self._name(self._table.row(number)), records, size, written_s)
            self._remove(number)
        return True

    def _oldest_beyond(self, tenant: str, records: int) -> tuple[float, int, _Tenant] | None:
        """Return the oldest object of the tenant furthest beyond its share, if ``tenant`` had ``records`` more."""
        used: dict[str, float] = {name: own.chunks for name, own in self._tenants.items() if own.objects}
        used[tenant] = used.get(tenant, 0) + records
        victim = self._tenants.get(most_beyond(used, self._shares.among(used)))
        oldest = None if victim is None else self._oldest(victim)
        return None if victim is None or oldest is None else (*oldest, victim)

    def _oldest(self, own: _Tenant) -> tuple[float, int] | None:
        """Return the time and the number of a tenant's oldest known object."""
        table = self._table
        while own.objects:
            while own.oldest:
                written_s, number = own.oldest[-1]
                is_same = table.states[number] == KNOWN and table.tenant(number) == own.number
                if is_same and table.written_s[number] == written_s:
                    return written_s, number
                own.oldest.pop()
            numbers = [each for each in table.select(tenant=own.number).tolist() if table.states[each] == KNOWN]
            by_age = sorted((table.written_s[each], each) for each in numbers)
            own.oldest = by_age[: len(by_age) // _OLDEST_SHARE + 1][::-1]
        return None

    def _name(self, row: Row) -> str:
        return join_name(ObjectName(row.partition, self._by_number[row.tenant].name, row.digest))

    def _is_cleared(self, number: int) -> bool:
        return self._by_number[self._table.tenant(number)].is_cleared

    def _remove(self, number: int) -> None:
        """Forget an object, whether it is known or hidden."""
        own = self._by_number[self._table.tenant(number)]
        self._set_state(number, HIDDEN)
        self._table.remove(number)
        own.stored -= 1
        if own.is_cleared and not own.stored:
            del self._by_number[own.number]

    def used_h(self, name: str) -> int | None:
        """Return the hour in which a known object was used last, 0 for never; None for another object."""
        with self._lock:
            number = self._table.number_of(_parts(name))
            is_known = number is not None and self._table.states[number] == KNOWN and not self._is_cleared(number)
            return self._table.used_h[number] if is_known and number is not None else None

    def forget(self, partition: int) -> None:
        """Forget the known objects of a partition that this node does not serve."""
        with self._lock:
            self.left_out -= len(self._left_out.pop(partition, ()))
            self._uncounted.pop(partition, None)
            numbers = self._table.select(partitions=(partition,)).tolist()
        for number in numbers:
            with self._lock:
                if self._table.states[number] == KNOWN and self._table.row(number).partition == partition:
                    self._remove(number)

    # ---- Hidden objects

    def hide(self, name: str) -> None:
        """Hide an object that is, or may be, in the bucket; until add(), or a list without it."""
        with self._lock:
            self._hide(name)

    def _hide(self, name: str) -> bool:
        number = self._table.number_of(_parts(name))
        if number is None:
            return False
        self._set_state(number, HIDDEN)
        return True

    def add_hidden(self, contents: Contents) -> None:
        """Add an object whose write may have succeeded, as hide() does."""
        with self._lock:
            if not self._hide(contents.name):
                self._insert(contents, HIDDEN)

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
            number = self._table.number_of(parts)
            if number is not None:
                self._table.seen[number] = self._list
                if self._is_cleared(number):
                    self._mark(listed.name)
            if listed in self._refused:
                skipped, left = self._refused[listed]
                self._refused[listed] = skipped, max(0, left - 1)
                if left:
                    return False
            if listed.name in self._marked:
                return False
            if number is not None and self._table.states[number] == KNOWN:
                self._table.written_s[number] = listed.written_s
                return False
            if not self._has_room(parts.tenant, listed):
                self._leave_out(listed.name, self._records_left_out(listed.name), listed.size, listed.written_s)
                return False
            self._wanted.setdefault(parts.partition, set()).add(listed.name)
            return True

    def _records_left_out(self, name: str) -> int:
        left_out = self._left_out.get(partition_in(name), {}).get(name)
        return 1 if left_out is None else left_out.records

    def _has_room(self, tenant: str, listed: Listed) -> bool:
        records = self._records_left_out(listed.name)
        if self.chunks + records <= self._shares.total:
            return True
        oldest = self._oldest_beyond(tenant, records)
        return oldest is not None and (oldest[2].name != tenant or oldest[0] < listed.written_s)

    def end_list(self, number: int, partitions: Collection[int]) -> None:
        """Forget objects that list ``number`` of partitions did not show. Marked ones stay marked."""
        with self._lock:
            missing = self._table.select(partitions=partitions, seen_before=number).tolist()
            for partition in partitions:
                gone = [name for name, each in self._left_out.get(partition, {}).items() if each.seen < number]
                for name in gone:
                    self._let_in(name)
        for each in missing:
            with self._lock:
                # It may have changed since.
                if self._table.states[each] != FREE and self._table.seen[each] < number:
                    if self._name(self._table.row(each)) not in self._marked:
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
            uses = self._table.uses(partitions)
            owners = {number: own.name for number, own in self._by_number.items() if not own.is_cleared}
        uses = uses[np.isin(uses["tenant"], list(owners))]
        total = int(uses["size"].sum()) + unknown
        if total <= bytes_max:
            return []
        sizes: dict[str, list[tuple[int, int | str]]] = defaultdict(list)  # of each tenant, the first to delete last
        uses = uses[np.argsort(uses["used_s"], kind="stable")[::-1]]
        for number, tenant_number, size, _ in uses.tolist():
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
                    is_same = self._table.states[which] == KNOWN and self._table.sizes[which] == size
                    which = self._name(self._table.row(which)) if is_same else ""
                if which and _parts(which).tenant == tenant:
                    self._mark(which)
                    names.append(which)
        return names

    def touch(self, found: Found, now_s: float) -> None:
        """Note that a record of an object is used now; ``now_s`` is monotonic."""
        self._table.used_h[found.number] = int(time.time() / 3600)
        self._touched_s.setdefault(found.row.partition, now_s)

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
        found = () if own is None else self._table.holders(keyed_hash(own.salt, key))
        return [self._name(self._table.row(number)) for number in found]

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
        number = self._table.number_of(parts)
        if number is not None:
            self._set_state(number, HIDDEN)
        self._let_in(name)
        self._marked[name] = None
        if number is None or self._is_cleared(number):
            self._marked_unread.setdefault(parts.tenant, {})[name] = None

    def is_marked(self, name: str) -> bool:
        return name in self._marked

    def note_deleted(self, name: str) -> None:
        with self._lock:
            self._marked.pop(name, None)
            parts = _parts(name)
            if (number := self._table.number_of(parts)) is not None:
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
            numbers = [each for number in cleared for each in self._table.select(tenant=number).tolist()]
        for each in numbers:
            with self._lock:
                if self._table.states[each] != FREE and self._is_cleared(each):
                    self._mark(self._name(self._table.row(each)))
        with self._lock:
            return list(self._marked_unread.get(tenant, ()))


def _parts(name: str) -> ObjectName:
    parts = parse_name(name)
    assert parts is not None, f"{name} is no name of an object"
    return parts
