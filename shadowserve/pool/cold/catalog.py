"""What the bucket holds, as far as this node knows: by tails of objects, and by what it has written itself."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable

from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.layout import Contents, parse_name

__all__ = ["Catalog"]

_REFUSED_MAX = 10_000
_SKIPPED_MAX = 1024
"""Lists that leave an object out which was not sound; twice as many each time that it is not."""


class _Tenant:
    """A tenant's objects by name, and by the records that they have."""

    __slots__ = ("holders", "objects")

    def __init__(self) -> None:
        self.objects: dict[str, Contents] = {}
        self.holders: dict[bytes, tuple[Contents, ...]] = {}


class Catalog:
    """Objects by name, and by the records that they have. Methods may be called from any thread; none waits.

    Attributes:
        objects: that are known.
        chunks: records in them.
        bytes: of all of them.
    """

    def __init__(self, chunks_max: int) -> None:
        """Know of so many records at most; objects beyond that are left out."""
        self.objects = self.chunks = self.bytes = 0
        self._chunks_max = chunks_max
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._doomed: dict[str, None] = {}
        self._wanted: set[str] = set()  # by this list, and not deleted since
        self._refused: OrderedDict[Listed, tuple[int, int]] = OrderedDict()  # lists to leave it out of, and those left

    def find(self, tenant: str, key: bytes) -> Contents | None:
        """Return an object that has a record; None where none is known."""
        own = self._tenants.get(tenant)
        holders = None if own is None else own.holders.get(key)
        return None if holders is None else holders[0]

    def add(self, contents: Contents) -> bool:
        """Know of an object; return whether it does: not where it is to be deleted, or there is no room for more."""
        with self._lock:
            return self._add(contents)

    def learn(self, contents: Contents) -> bool:
        """The same by a tail that wants() asked for: nor where the object was deleted since, which a tail outlives."""
        with self._lock:
            return contents.name in self._wanted and self._add(contents)

    def _add(self, contents: Contents) -> bool:
        if self._knows(contents.name):
            return True
        if contents.name in self._doomed or self.chunks + len(contents.places) > self._chunks_max:
            return False
        own = self._tenants.setdefault(contents.tenant, _Tenant())
        own.objects[contents.name] = contents
        before = len(own.holders)
        for key in contents.places:
            own.holders[key] = (*own.holders.get(key, ()), contents)
        self.objects += 1
        self.bytes += contents.size
        self.chunks += len(own.holders) - before
        return True

    def _knows(self, name: str) -> bool:
        own = self._tenants.get(parse_name(name) or "")
        return own is not None and name in own.objects

    def drop(self, name: str) -> None:
        """Forget an object."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        own = self._tenants.get(parse_name(name) or "")
        contents = None if own is None else own.objects.pop(name, None)
        if own is None or contents is None:
            return
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

    def refuse(self, listed: Listed) -> None:
        """Forget an object that is not sound, and look at it again ever more rarely until it is another one."""
        with self._lock:
            self._drop(listed.name)
            skipped = min(2 * self._refused.pop(listed, (1, 0))[0], _SKIPPED_MAX)
            self._refused[listed] = skipped, skipped
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

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
            known = self._knows(listed.name) or listed.name in self._doomed
            if known or self.chunks >= self._chunks_max:
                return False
            self._wanted.add(listed.name)
            return True

    def keep_only(self, names: Collection[str], *, among: Iterable[str]) -> None:
        """Forget objects ``among`` those known when the bucket was asked, which it had not; wants() begins anew."""
        with self._lock:
            self._wanted.clear()
        gone = [name for name in among if name not in names]
        for name in gone:
            self.drop(name)

    def names(self) -> list[str]:
        """Return the names of all objects known."""
        with self._lock:
            return [name for own in self._tenants.values() for name in own.objects]

    def doom(self, tenant: str, key: bytes) -> list[str]:
        """Forget the objects that have a tenant's record; return their names.

        They stay forgotten until spare(), whatever the bucket says: they are to be deleted.
        """
        with self._lock:
            own = self._tenants.get(tenant)
            found = [] if own is None else [contents.name for contents in own.holders.get(key, ())]
            for name in found:
                self._drop(name)
                self._doomed[name] = None
            return found

    def doom_all(self, tenant: str | None) -> list[str]:
        """The same for all of a tenant, or of all with None: not record by record, since these are many."""
        with self._lock:
            if tenant is None:
                gone, self._tenants = list(self._tenants.values()), {}
            else:
                gone = [own for own in (self._tenants.pop(tenant, None),) if own is not None]
            names = [name for own in gone for name in own.objects]
            for own in gone:
                self.objects -= len(own.objects)
                self.chunks -= len(own.holders)
                self.bytes -= sum(contents.size for contents in own.objects.values())
            self._doomed.update(dict.fromkeys(names))
            return names

    def condemn(self, name: str) -> None:
        """Have an object forgotten until spare(), known or not."""
        with self._lock:
            self._drop(name)
            self._doomed[name] = None

    def spare(self, name: str) -> None:
        """Say that an object has been deleted."""
        with self._lock:
            self._doomed.pop(name, None)
            self._wanted.discard(name)

    def doomed(self) -> list[str]:
        """Return what is still to be deleted."""
        with self._lock:
            return list(self._doomed)
