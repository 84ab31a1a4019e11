"""The catalog: what this node knows of the bucket, from footers of objects and from its own writes."""

import heapq
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from math import inf
from typing import Final, NamedTuple

from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.fair import Shares, most_beyond
from shadowserve.pool.cold.layout import Contents, tenant_of

_REFUSED_MAX = 10_000
_LEFT_OUT_MAX: Final = 100_000
_SKIPPED_MAX = 1024
"""Most lists that skip an unsound object; the number doubles each time that it is still unsound."""


class Marked(NamedTuple):
    """Objects to delete from the bucket so that a record is not found again."""

    names: list[str]  # objects with the record
    may_be_elsewhere: bool  # objects of the tenant with unknown contents, which may have it too, are being deleted


class _Tenant:
    """A tenant's objects by name, their times, and the objects of each record."""

    __slots__ = ("ages", "holders", "objects", "written_s")

    def __init__(self) -> None:
        self.objects: dict[str, Contents] = {}
        self.holders: dict[bytes, tuple[Contents, ...]] = {}
        self.written_s: dict[str, float] = {}
        self.ages: list[tuple[float, str]] = []  # a heap; entries that differ from written_s are stale

    def date(self, name: str, written_s: float) -> None:
        if self.written_s.get(name) != written_s:
            self.written_s[name] = written_s
            heapq.heappush(self.ages, (written_s, name))

    def oldest(self) -> tuple[float, str] | None:
        while self.ages and self.written_s.get(self.ages[0][1]) != self.ages[0][0]:
            heapq.heappop(self.ages)
        return self.ages[0] if self.ages else None


class Catalog:
    """Objects by name and by their records. Methods may be called by any thread; none waits.

    An object is known, hidden, or neither. A hidden object is not found, but it is, or may be, in the bucket: a command
    that removes one of its records must delete it. It is hidden because it is marked for deletion, because it could not
    be read, or because a write of it has failed with an unknown result.

    Attributes:
        objects: Known objects.
        chunks: Records in them.
        bytes: Bytes of the objects.
    """

    def __init__(self, shares: Shares) -> None:
        """``shares`` limits the number of known records, and divides it among tenants; further objects are left out."""
        self.objects = self.chunks = self.bytes = 0
        self._shares = shares
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._hidden: dict[str, Contents] = {}
        self._hidden_by_key: dict[tuple[str, bytes], set[str]] = {}
        self._marked: dict[str, None] = {}
        self._marked_unread: dict[str, dict[str, None]] = {}  # marked objects of unknown contents, by tenant
        self._wanted: set[str] = set()  # wants() was True in this list, and not deleted since
        self._left_out: OrderedDict[str, int] = OrderedDict()  # number of records by name
        self._refused: OrderedDict[Listed, tuple[int, int]] = OrderedDict()  # lists to skip, in all and left

    @property
    def left_out(self) -> int:
        """Objects of the bucket that are unknown because ``chunks_max`` has no room for them."""
        return len(self._left_out)

    def find(self, tenant: str, key: bytes) -> Contents | None:
        own = self._tenants.get(tenant)
        holders = None if own is None else own.holders.get(key)
        return None if holders is None else holders[0]

    def set_share(self, tenant: str, records: int | None) -> None:
        """Limit the known records of a tenant when there is no room for all; None for no quota."""
        with self._lock:
            self._shares.set_quota(tenant, records)

    # ---- Known objects

    def add(self, contents: Contents, written_s: float = inf) -> bool:
        """Add an object; return False if it is marked for deletion, or there is no room."""
        with self._lock:
            return self._add(contents, written_s)

    def learn(self, contents: Contents, written_s: float) -> bool:
        """Add an object that wants() has returned True for; also False if it was deleted since."""
        with self._lock:
            return contents.name in self._wanted and self._add(contents, written_s)

    def _add(self, contents: Contents, written_s: float) -> bool:
        if self._knows(contents.name):
            return True
        if contents.name in self._marked:
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
        """Forget the oldest objects of tenants beyond their shares until there is room; False if there is none."""
        while self.chunks + records > self._shares.total:
            oldest = self._oldest_beyond(tenant, records)
            if oldest is None or (tenant_of(oldest[1]) == tenant and oldest[0] >= written_s):
                return False
            contents = self._drop(oldest[1])
            assert contents is not None, "an object that is known was not there"
            self._leave_out(contents.name, len(contents.places))
        return True

    def _oldest_beyond(self, tenant: str, records: int) -> tuple[float, str] | None:
        """Return the oldest object of the tenant furthest beyond its share, if ``tenant`` had ``records`` more."""
        used: dict[str, float] = {name: len(own.holders) for name, own in self._tenants.items() if own.objects}
        used[tenant] = used.get(tenant, 0) + records
        victim = self._tenants.get(most_beyond(used, self._shares.among(used)))
        return None if victim is None else victim.oldest()

    def _knows(self, name: str) -> bool:
        own = self._tenants.get(tenant_of(name) or "")
        return own is not None and name in own.objects

    def _drop(self, name: str) -> Contents | None:
        own = self._tenants.get(tenant_of(name) or "")
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
        """Hide an object that is, or may be, in the bucket; until add(), or a list without it."""
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
        """Hide an unsound object, and examine it again ever more rarely until it changes."""
        with self._lock:
            if (contents := self._drop(listed.name)) is not None:
                self._hide(contents)
            skipped = min(2 * self._refused.pop(listed, (1, 0))[0], _SKIPPED_MAX)
            self._refused[listed] = skipped, skipped
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    # ---- Lists

    def wants(self, listed: Listed) -> bool:
        """Return whether to read the footer of a listed object: it is not known, refused, or marked for deletion.

        Called once for each object of a list.
        """
        with self._lock:
            if listed in self._refused:
                skipped, left = self._refused[listed]
                self._refused[listed] = skipped, max(0, left - 1)
                if left:
                    return False
            tenant = tenant_of(listed.name)
            if tenant is None or listed.name in self._marked:
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
        return oldest is not None and (tenant_of(oldest[1]) != tenant or oldest[0] < listed.written_s)

    def begin_list(self) -> set[str]:
        """Return the names that a list which begins now must have, if the objects still exist."""
        with self._lock:
            self._wanted.clear()
            known = {name for own in self._tenants.values() for name in own.objects}
            return known | self._hidden.keys() | self._left_out.keys()

    def end_list(self, missing: Iterable[str]) -> None:
        """Forget objects of begin_list() that the bucket has not listed. Marked ones stay marked."""
        for name in missing:
            with self._lock:
                self._drop(name)
                self._left_out.pop(name, None)
                if name not in self._marked:
                    self._unhide(name)

    # ---- Objects to delete

    def mark_for_deletion(self, tenant: str, key: bytes) -> Marked:
        """Mark the objects with a tenant's record for deletion: they are hidden until note_deleted()."""
        with self._lock:
            own = self._tenants.get(tenant)
            names = [] if own is None else [contents.name for contents in own.holders.get(key, ())]
            names += self._hidden_by_key.get((tenant, key), ())
            for name in names:
                self._mark(name)
            return Marked(names, bool(self._marked_unread.get(tenant)))

    def marked_with(self, tenant: str, key: bytes) -> list[str]:
        with self._lock:
            return [name for name in self._hidden_by_key.get((tenant, key), ()) if name in self._marked]

    def mark_all(self, tenant: str | None) -> list[str]:
        """Mark all objects of a tenant, or of all tenants, for deletion; return their names."""
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
                self._marked.update(names)
                self._marked_unread.setdefault(whose, {}).update(names)
            hidden = [name for name, each in self._hidden.items() if tenant in (None, each.tenant)]
            self._marked.update(dict.fromkeys(hidden))
            return [*(name for _, own in gone for name in own.objects), *hidden]

    def mark_object(self, name: str) -> None:
        with self._lock:
            self._mark(name)

    def _mark(self, name: str) -> None:
        if (contents := self._drop(name)) is not None:
            self._hide(contents)
        self._left_out.pop(name, None)
        self._marked[name] = None
        if name not in self._hidden:
            self._marked_unread.setdefault(tenant_of(name) or "", {})[name] = None

    def is_marked(self, name: str) -> bool:
        return name in self._marked

    def note_deleted(self, name: str) -> None:
        with self._lock:
            self._marked.pop(name, None)
            self._unhide(name)
            self._wanted.discard(name)
            tenant = tenant_of(name) or ""
            unread = self._marked_unread.get(tenant)
            if unread is not None:
                unread.pop(name, None)
                if not unread:
                    del self._marked_unread[tenant]

    def marked(self) -> list[str]:
        with self._lock:
            return list(self._marked)

    def marked_unread(self, tenant: str) -> Collection[str]:
        with self._lock:
            return list(self._marked_unread.get(tenant, ()))
