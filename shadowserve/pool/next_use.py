"""Which object goes when all that nobody waits for has gone: what runs last (TierKV, section 3.4).

A scheduler knows its queue. Objects that a waiting request needs are held as if they were pinned, so that the index's
own policy takes what nobody waits for first. When that is used up, the request that runs last gives, the end of its
chain first, as of any chain; what an earlier request needs as well stays for that one.

No clock and no I/O: callers say when, in seconds of the index. A publication ends by itself, so that a request that
never comes keeps nothing. A call takes as long as what it names; a victim is found by looking at each key once in all,
and at the requests behind it that other tenants, or other devices, have.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from shadowserve.native import ANY, Index

REQUESTS_MAX: Final = 4_096
"""Requests that are waited for at a time; more are not noted. Engines have some hundreds in their queues."""


@dataclass(slots=True)
class _Request:
    """Keys that it gives up from their end; those that a search for another device has met, by device."""

    tenant: int
    keys: list[bytes]
    met: dict[int, list[bytes]]


class NextUse:
    """Lies over an index, and says what goes.

    One index, or one device of it, is one tier. Calls come from one thread at a time, as the index's.
    """

    def __init__(self, index: Index, is_pinned: Callable[[int, int], bool] = lambda tenant, slot: False) -> None:
        """``is_pinned`` says of a tenant's slot whether somebody else has pinned it: then it is left alone."""
        self._index = index
        self._is_pinned = is_pinned
        self._requests: dict[Hashable, _Request] = {}  # what runs first, first
        self._places: dict[Hashable, int] = {}
        self._givers: list[Hashable] | None = None  # those that may have something to give; None, places too: not known
        self._waiting: Counter[tuple[int, bytes]] = Counter()  # requests that would give it up

    def __len__(self) -> int:
        return len(self._requests)

    def publish(self, request: Hashable, tenant: int, keys: Iterable[bytes], until_s: int) -> bool:
        """Hold what a request needs, of that what is there; behind all others, unless it has its place already.

        Args:
            request: its name; what was published under it before is replaced, so that what has come since is held, too.
            tenant: whose objects.
            keys: the index's, in the order of the chain.
            until_s: when this ends if nobody withdraws it.

        Returns:
            Whether it was noted: not beyond :data:`REQUESTS_MAX`.
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
        """Forget a request, which runs or never will: what it alone waited for is the index's to choose from again."""
        known = self._requests.pop(request, None)
        if known is not None:
            self._release(known)

    def _release(self, request: _Request) -> None:
        for keys in (request.keys, *request.met.values()):
            for key in keys:
                self._leave(request.tenant, key)

    def _leave(self, tenant: int, key: bytes) -> int:
        """Have one request less wait for a key; return the slot that nobody waits for any more, else 0."""
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
        """Say in which order they run. Unknown ones are passed over; those that are not named come last."""
        known = self._requests
        ordered = {request: known[request] for request in requests if request in known}
        if len(ordered) < len(known):
            ordered.update({request: its for request, its in known.items() if request not in ordered})
        self._requests = ordered
        self._givers = None

    def victim(self, now_s: int, device: int = ANY, tenant: int = ANY, *, sake: Hashable | None = None) -> int:
        """Return the slot of what goes next, which is held no more; 0: nothing. As :meth:`Index.victim`.

        ``sake`` is the request that room is made for: it gives nothing itself, nor does what runs before it.
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
        """Return the last object of a request on a device that no other one would give; 0: none."""
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
