"""What the bucket holds, as far as this node knows: by tails of objects, and by what it has written itself."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable

from shadowserve.pool.cold.bucket import Listed
from shadowserve.pool.cold.layout import Contents

__all__ = ["Catalog"]

_REFUSED_MAX = 10_000


class Catalog:
    """Objects by name, and by the records that they have. Methods may be called from any thread; none waits.

    Attributes:
        bytes: of all objects known.
    """

    def __init__(self, chunks_max: int) -> None:
        """Know of so many records at most; objects beyond that are left out."""
        self.bytes = 0
        self._chunks_max = chunks_max
        self._lock = threading.Lock()
        self._objects: dict[str, Contents] = {}
        self._holders: dict[tuple[str, bytes], tuple[Contents, ...]] = {}
        self._doomed: dict[str, None] = {}
        self._refused: OrderedDict[Listed, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def chunks(self) -> int:
        """How many records it knows of."""
        return len(self._holders)

    def find(self, tenant: str, key: bytes) -> Contents | None:
        """Return an object that has a record; None where none is known."""
        holders = self._holders.get((tenant, key))
        return None if holders is None else holders[0]

    def add(self, contents: Contents) -> bool:
        """Know of an object; return whether it does: not where it is to be deleted, or there is no room for more."""
        with self._lock:
            if contents.name in self._objects:
                return True
            if contents.name in self._doomed or len(self._holders) + len(contents.places) > self._chunks_max:
                return False
            self._objects[contents.name] = contents
            self.bytes += contents.size
            for key in contents.places:
                at = contents.tenant, key
                self._holders[at] = (*self._holders.get(at, ()), contents)
            return True

    def drop(self, name: str) -> None:
        """Forget an object."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        contents = self._objects.pop(name, None)
        if contents is None:
            return
        self.bytes -= contents.size
        for key in contents.places:
            at = contents.tenant, key
            left = tuple(other for other in self._holders[at] if other is not contents)
            if left:
                self._holders[at] = left
            else:
                del self._holders[at]

    def refuse(self, listed: Listed) -> None:
        """Forget an object that is not sound, and do not look at it again until it is another one."""
        with self._lock:
            self._drop(listed.name)
            self._refused[listed] = None
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    def wants(self, listed: Listed) -> bool:
        """Return whether the tail of an object is to be read: it is not known, nor refused, nor to be deleted."""
        with self._lock:
            known = listed.name in self._objects or listed in self._refused or listed.name in self._doomed
            return not known and len(self._holders) < self._chunks_max

    def keep_only(self, names: Collection[str], *, among: Iterable[str]) -> None:
        """Forget objects ``among`` those known when the bucket was asked, which it had not."""
        gone = [name for name in among if name not in names]
        for name in gone:
            self.drop(name)

    def names(self) -> list[str]:
        """Return the names of all objects known."""
        with self._lock:
            return list(self._objects)

    def doom(self, tenant: str | None, key: bytes | None) -> list[str]:
        """Forget what has a tenant's record, or any record of a tenant or, with None, of all; return the names.

        They stay forgotten until spare(), whatever the bucket says: they are to be deleted.
        """
        with self._lock:
            if tenant is not None and key is not None:
                found = [contents.name for contents in self._holders.get((tenant, key), ())]
            else:
                found = [name for name, each in self._objects.items() if tenant is None or each.tenant == tenant]
            for name in found:
                self._drop(name)
                self._doomed[name] = None
            return found

    def condemn(self, name: str) -> None:
        """Have an object forgotten until spare(), known or not."""
        with self._lock:
            self._drop(name)
            self._doomed[name] = None

    def spare(self, name: str) -> None:
        """Say that an object has been deleted."""
        with self._lock:
            self._doomed.pop(name, None)

    def doomed(self) -> list[str]:
        """Return what is still to be deleted."""
        with self._lock:
            return list(self._doomed)
