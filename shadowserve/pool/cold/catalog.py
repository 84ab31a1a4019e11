"""What the bucket holds, as far as this node knows: by tails of objects, and by what it has written itself."""

import heapq
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from math import inf
from typing import Final, NamedTuple

from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.layout import Contents, parse_name
from shadowserve.pool.cold.shares import Shares, most_beyond

_REFUSED_MAX = 10_000
_LEFT_OUT_MAX: Final = 100_000
_SKIPPED_MAX = 1024
"""Lists that leave an object out which was not sound; twice as many each time that it is not."""


class Doomed(NamedTuple):
    """The objects to delete from the bucket so that a record is not found again.

    Attributes:
        names: of objects that have the record.
        may_be_elsewhere: objects of its tenant are to be deleted of which nothing is known: they may have it, too.
    """

    names: list[str]
    may_be_elsewhere: bool


class _Tenant:
    """A tenant's objects by name, when they were written, and the objects by the records that they have."""

    __slots__ = ("ages", "holders", "objects", "written_s")

    def __init__(self) -> None:
        self.objects: dict[str, Contents] = {}
        self.holders: dict[bytes, tuple[Contents, ...]] = {}
        self.written_s: dict[str, float] = {}
        self.ages: list[tuple[float, str]] = []  # a heap; an entry that written_s does not have any more is stale

    def date(self, name: str, written_s: float) -> None:
        if self.written_s.get(name) != written_s:
            self.written_s[name] = written_s
            heapq.heappush(self.ages, (written_s, name))

    def oldest(self) -> tuple[float, str] | None:
        while self.ages and self.written_s.get(self.ages[0][1]) != self.ages[0][0]:
            heapq.heappop(self.ages)
        return self.ages[0] if self.ages else None


class Catalog:
    """Objects by name, and by the records that they have. Methods may be called from any thread; none waits.

    An object is known, hidden, or neither. A hidden one is not found, but it is in the bucket, or may be: a command
    that removes one of its records has to delete it. It is hidden because it is to be deleted (doomed), because it
    could not be read, or because a write of it has failed with an unknown result.

    Attributes:
        objects: that are known.
        chunks: records in them.
        bytes: of all of them.
        left_out: objects that are in the bucket, and not known because ``chunks_max`` has no room for them.
    """

    def __init__(self, shares: Shares) -> None:
        """Know of so many records at most as ``shares`` divides; objects beyond that are left out."""
        self.objects = self.chunks = self.bytes = 0
        self._shares = shares
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._hidden: dict[str, Contents] = {}
        self._hidden_by_key: dict[tuple[str, bytes], set[str]] = {}
        self._doomed: dict[str, None] = {}
        self._doomed_unread: dict[str, dict[str, None]] = {}  # by tenant, of the doomed those of unknown contents
        self._wanted: set[str] = set()  # by this list, and not deleted since
        self._left_out: OrderedDict[str, int] = OrderedDict()  # their records
        self._refused: OrderedDict[Listed, tuple[int, int]] = OrderedDict()  # lists to leave it out of, and those left

    @property
    def left_out(self) -> int:
        return len(self._left_out)

    def find(self, tenant: str, key: bytes) -> Contents | None:
        """Return an object that has a record; None where none is known."""
        own = self._tenants.get(tenant)
        holders = None if own is None else own.holders.get(key)
        return None if holders is None else holders[0]

    def set_share(self, tenant: str, records: int | None) -> None:
        """Bound how many records of a tenant are known when there is no room for all; None for no quota."""
        with self._lock:
            self._shares.set_quota(tenant, records)

    # ---- Known objects

    def add(self, contents: Contents, written_s: float = inf) -> bool:
        """Know of an object; return whether it does: not where it is to be deleted, or there is no room for it."""
        with self._lock:
            return self._add(contents, written_s)

    def learn(self, contents: Contents, written_s: float) -> bool:
        """The same by a tail that wants() asked for: nor where the object was deleted while the tail was read."""
        with self._lock:
            return contents.name in self._wanted and self._add(contents, written_s)

    def _add(self, contents: Contents, written_s: float) -> bool:
        if self._knows(contents.name):
            return True
        if contents.name in self._doomed:
            return False
        if not self._make_room(contents.tenant, len(contents.places), written_s):
            self._leave_out(contents.name, len(contents.places))
            return False
        self._left_out.pop(contents.name, None)
        self._unhide(contents.name)
        own = self._tenants.setdefault(contents.tenant, _Tenant())
        own.objects[contents.name] = contents
        own.date(contents.name, written_s)
        before = len(own.holders)
        for key in contents.places:
            own.holders[key] = (*own.holders.get(key, ()), contents)
        self.objects += 1
        self.bytes += contents.size
        self.chunks += len(own.holders) - before
        return True

    def _leave_out(self, name: str, records: int) -> None:
        self._left_out[name] = records
        if len(self._left_out) > _LEFT_OUT_MAX:
            self._left_out.popitem(last=False)

    def _make_room(self, tenant: str, records: int, written_s: float) -> bool:
        """Forget the oldest objects of tenants beyond their shares, till there is room; return whether there is."""
        while self.chunks + records > self._shares.total:
            oldest = self._oldest_beyond(tenant, records)
            if oldest is None or (parse_name(oldest[1]) == tenant and oldest[0] >= written_s):
                return False
            contents = self._drop(oldest[1])
            assert contents is not None, "an object that is known was not there"
            self._leave_out(contents.name, len(contents.places))
        return True

    def _oldest_beyond(self, tenant: str, records: int) -> tuple[float, str] | None:
        """Return the oldest object of the tenant furthest beyond its share, with ``records`` more of ``tenant``."""
        used: dict[str, float] = {name: len(own.holders) for name, own in self._tenants.items() if own.objects}
        used[tenant] = used.get(tenant, 0) + records
        victim = self._tenants.get(most_beyond(used, self._shares.among(used)))
        return None if victim is None else victim.oldest()

    def _knows(self, name: str) -> bool:
        own = self._tenants.get(parse_name(name) or "")
        return own is not None and name in own.objects

    def _drop(self, name: str) -> Contents | None:
        """Forget an object; return its contents, None if it was not known."""
        own = self._tenants.get(parse_name(name) or "")
        contents = None if own is None else own.objects.pop(name, None)
        if own is None or contents is None:
            return None
        del own.written_s[name]
        before = len(own.holders)
        for key in contents.places:
            left = tuple(other for other in own.holders[key] if other is not contents)
            if left:
                own.holders[key] = left
            else:
                del own.holders[key]
        self.objects -= 1
        self.bytes -= contents.size
        self.chunks -= before - len(own.holders)
        return contents

    # ---- Hidden objects

    def hide(self, contents: Contents) -> None:
        """Have an object not be found that is, or may be, in the bucket; until add(), or a list without it."""
        with self._lock:
            self._drop(contents.name)
            self._hide(contents)

    def _hide(self, contents: Contents) -> None:
        self._hidden[contents.name] = contents
        for key in contents.places:
            self._hidden_by_key.setdefault((contents.tenant, key), set()).add(contents.name)

    def _unhide(self, name: str) -> None:
        contents = self._hidden.pop(name, None)
        if contents is None:
            return
        for key in contents.places:
            names = self._hidden_by_key[contents.tenant, key]
            names.discard(name)
            if not names:
                del self._hidden_by_key[contents.tenant, key]

    def refuse(self, listed: Listed) -> None:
        """Hide an object that is not sound, and look at it again ever more rarely until it is another one."""
        with self._lock:
            if (contents := self._drop(listed.name)) is not None:
                self._hide(contents)
            skipped = min(2 * self._refused.pop(listed, (1, 0))[0], _SKIPPED_MAX)
            self._refused[listed] = skipped, skipped
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    # ---- Lists

    def wants(self, listed: Listed) -> bool:
        """Return whether the tail of an object is to be read: it is not known, nor refused, nor to be deleted.

        To be asked once of each object in a list.
        """
        with self._lock:
            if listed in self._refused:
                skipped, left = self._refused[listed]
                self._refused[listed] = skipped, max(0, left - 1)
                if left:
                    return False
            tenant = parse_name(listed.name)
            if tenant is None or listed.name in self._doomed:
                return False
            if self._knows(listed.name):
                self._tenants[tenant].date(listed.name, listed.written_s)
                return False
            if not self._has_room(tenant, listed):
                self._leave_out(listed.name, self._left_out.get(listed.name, 1))
                return False
            self._wanted.add(listed.name)
            return True

    def _has_room(self, tenant: str, listed: Listed) -> bool:
        records = self._left_out.get(listed.name, 1)
        if self.chunks + records <= self._shares.total:
            return True
        oldest = self._oldest_beyond(tenant, records)
        return oldest is not None and (parse_name(oldest[1]) != tenant or oldest[0] < listed.written_s)

    def begin_list(self) -> set[str]:
        """Return the names that a list which begins now has to have, if they are still there."""
        with self._lock:
            self._wanted.clear()
            known = {name for own in self._tenants.values() for name in own.objects}
            return known | self._hidden.keys() | self._left_out.keys()

    def end_list(self, missing: Iterable[str]) -> None:
        """Forget objects of begin_list() that the bucket has not listed; those to be deleted are as good as deleted."""
        for name in missing:
            with self._lock:
                self._drop(name)
                self._left_out.pop(name, None)
                if name not in self._doomed:
                    self._unhide(name)

    # ---- Objects to delete

    def doom(self, tenant: str, key: bytes) -> Doomed:
        """Have the objects not be found any more that have a tenant's record, until spare(): they are to be deleted."""
        with self._lock:
            own = self._tenants.get(tenant)
            names = [] if own is None else [contents.name for contents in own.holders.get(key, ())]
            names += self._hidden_by_key.get((tenant, key), ())
            for name in names:
                self._condemn(name)
            return Doomed(names, bool(self._doomed_unread.get(tenant)))

    def doomed_with(self, tenant: str, key: bytes) -> list[str]:
        """Return the objects that have a tenant's record and are still to be deleted."""
        with self._lock:
            return [name for name in self._hidden_by_key.get((tenant, key), ()) if name in self._doomed]

    def doom_all(self, tenant: str | None) -> list[str]:
        """Have all objects of a tenant be deleted, or of all with None; return their names.

        Not record by record, since these are many.
        """
        with self._lock:
            if tenant is None:
                gone, self._tenants = list(self._tenants.items()), {}
            else:
                gone = [(tenant, own) for own in (self._tenants.pop(tenant, None),) if own is not None]
            for whose, own in gone:
                self.objects -= len(own.objects)
                self.chunks -= len(own.holders)
                self.bytes -= sum(contents.size for contents in own.objects.values())
                names = dict.fromkeys(own.objects)
                self._doomed.update(names)
                self._doomed_unread.setdefault(whose, {}).update(names)
            hidden = [name for name, each in self._hidden.items() if tenant in (None, each.tenant)]
            self._doomed.update(dict.fromkeys(hidden))
            return [*(name for _, own in gone for name in own.objects), *hidden]

    def condemn(self, name: str) -> None:
        """Have an object be deleted, known or not."""
        with self._lock:
            self._condemn(name)

    def _condemn(self, name: str) -> None:
        if (contents := self._drop(name)) is not None:
            self._hide(contents)
        self._left_out.pop(name, None)
        self._doomed[name] = None
        if name not in self._hidden:
            self._doomed_unread.setdefault(parse_name(name) or "", {})[name] = None

    def is_doomed(self, name: str) -> bool:
        """Return whether an object is still to be deleted."""
        return name in self._doomed

    def spare(self, name: str) -> None:
        """Say that an object has been deleted."""
        with self._lock:
            self._doomed.pop(name, None)
            self._unhide(name)
            self._wanted.discard(name)
            tenant = parse_name(name) or ""
            unread = self._doomed_unread.get(tenant)
            if unread is not None:
                unread.pop(name, None)
                if not unread:
                    del self._doomed_unread[tenant]

    def doomed(self) -> list[str]:
        """Return what is still to be deleted."""
        with self._lock:
            return list(self._doomed)

    def doomed_unread(self, tenant: str) -> Collection[str]:
        """Return a tenant's objects of unknown contents that are still to be deleted."""
        with self._lock:
            return list(self._doomed_unread.get(tenant, ()))
