"""Which object is evicted when all others are gone: the one that is needed last (TierKV, section 3.4).

A scheduler knows its queue. Objects that a waiting request needs are pinned in the index, so the index's policy evicts
all others first. After that, the request that runs last gives up its objects, beginning with the end of its chain; an
object that an earlier request needs too stays.

No clock and no I/O: callers pass the time, in seconds.
The time of a call grows with what it names. A search for a victim looks at each key once in all, and at the later
requests of other tenants or devices. A published request expires, so one that never runs keeps nothing.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from shadowserve.native import ANY, Index

REQUESTS_MAX: Final = 4_096
"""Most waiting requests; further ones are refused. Engines have some hundreds in their queues."""


@dataclass(slots=True)
class _Request:
    tenant: int
    keys: list[bytes]  # keys of the chain, given up from the end
    met: dict[int, list[bytes]]  # keys that a search for another device has skipped, by device


class NextUse:
    """Chooses victims over an index. One index, or one device of it, is one tier. Called by one thread at a time."""

    def __init__(self, index: Index, is_pinned: Callable[[int, int], bool] = lambda tenant, slot: False) -> None:
        """``is_pinned`` returns whether a tenant's slot has a client's pin, which must stay."""
        self._index = index
        self._is_pinned = is_pinned
        self._requests: dict[Hashable, _Request] = {}  # in the order in which they run
        self._places: dict[Hashable, int] = {}
        self._givers: list[Hashable] | None = None  # requests with keys left; None, as places, until they are needed
        self._waiting: Counter[tuple[int, bytes]] = Counter()  # number of requests that need a key

    def __len__(self) -> int:
        return len(self._requests)

    def publish(self, request: Hashable, tenant: int, keys: Iterable[bytes], until_s: int) -> bool:
        """Hold the present entries that a request needs until ``until_s``; False if there are too many requests.

        A new request is the last one; a known one keeps its position, and its entries are replaced. ``keys``: the
        index's, in the order of the chain.
        """
        known = self._requests.get(request)
        if known is None and len(self._requests) >= REQUESTS_MAX:
            return False
        wanted, present = list(keys), []
        for key, slot in zip(wanted, self._index.find_many(tenant, b"".join(wanted)).tolist(), strict=True):
            if slot and not self._is_pinned(tenant, slot):
                self._index.pin(slot, until_s)
                self._waiting[tenant, key] += 1
                present.append(key)
        if known is not None:
            self._release(known)
        self._requests[request] = _Request(tenant, present, {})
        self._givers = None
        return True

    def withdraw(self, request: Hashable) -> None:
        """Forget a request that runs or was cancelled, and release the entries that it alone needed."""
        known = self._requests.pop(request, None)
        if known is not None:
            self._release(known)

    def _release(self, request: _Request) -> None:
        for keys in (request.keys, *request.met.values()):
            for key in keys:
                self._leave(request.tenant, key)

    def _leave(self, tenant: int, key: bytes) -> int:
        """Remove one request's need of a key; return the slot if no request needs it any more, else 0."""
        self._waiting[tenant, key] -= 1
        if self._waiting[tenant, key]:
            return 0
        del self._waiting[tenant, key]
        slot = self._index.find(tenant, key)
        if not slot or self._is_pinned(tenant, slot):
            return 0
        self._index.pin(slot, 0)
        return slot

    def order(self, requests: Iterable[Hashable]) -> None:
        """Set the order in which requests run. Unknown requests are ignored; requests that are not named come last."""
        known = self._requests
        ordered = {request: known[request] for request in requests if request in known}
        if len(ordered) < len(known):
            ordered.update({request: its for request, its in known.items() if request not in ordered})
        self._requests = ordered
        self._givers = None

    def victim(self, now_s: int, device: int = ANY, tenant: int = ANY, *, sake: Hashable | None = None) -> int:
        """Return the slot of the next victim, which is released; 0 for none. Arguments as of :meth:`Index.victim`.

        ``sake`` is the request that needs the room: neither it nor earlier requests give up anything.
        """
        slot = self._index.victim(now_s, device, tenant)
        if slot or not self._requests:
            return slot
        if self._givers is None:
            self._givers = list(self._requests)
            self._places = {name: place for place, name in enumerate(self._givers)}
        first = self._places.get(sake, -1)
        for at in range(len(self._givers) - 1, -1, -1):
            name = self._givers[at]
            if self._places[name] <= first:
                break
            request = self._requests.get(name)
            if request is None or not (request.keys or any(request.met.values())):
                del self._givers[at]
            elif tenant in (ANY, request.tenant) and (slot := self._last_of(request, device)):
                return slot
        return 0

    def _last_of(self, request: _Request, device: int) -> int:
        """Return the last entry of a request on a device that no other request needs; 0 for none."""
        met = request.met
        for own in list(met) if device == ANY else [device]:
            while met.get(own):
                if slot := self._leave(request.tenant, met[own].pop()):
                    return slot
        while request.keys:
            key = request.keys.pop()
            slot = self._index.find(request.tenant, key)
            own = self._index.read(slot).device if slot and device != ANY else device
            if own != device:
                met.setdefault(own, []).append(key)
            elif slot := self._leave(request.tenant, key):
                return slot
        return 0
