"""Which records go into an object together: those that follow each other in a chain, as they come to be stored.

A record names the record before it in its prompt. What names the last record of a run continues the run, whoever stored
it and whatever came in between; anything else begins one. A run that is long enough is an object; what has waited for
more goes with other runs of its tenant, a run in one piece.
"""

from collections import OrderedDict
from itertools import takewhile
from typing import Final, NamedTuple

from shadowserve.pool.terms import Address

BACKLOG_MAX: Final = 65_536
"""Records that wait to be written. They wait as keys, not as bytes: what is evicted meanwhile is left out."""


class Batch(NamedTuple):
    """Records of one tenant that make an object, in their order."""

    tenant: int
    records: list[tuple[Address, bytes]]


class _Run:
    __slots__ = ("bytes", "is_full", "last_s", "records", "tenant")

    def __init__(self, tenant: int) -> None:
        self.tenant = tenant
        self.records: list[tuple[Address, bytes]] = []
        self.bytes = 0
        self.last_s = 0.0
        self.is_full = False


class _Waiting:
    """A tenant's runs: those that are long enough, in their order, and the others by their last key, oldest first."""

    __slots__ = ("count", "full", "open")

    def __init__(self) -> None:
        self.full: list[_Run] = []
        self.open: OrderedDict[bytes, _Run] = OrderedDict()
        self.count = 0

    def pop(self) -> _Run:
        """Take the run that is the first to go."""
        return self.full.pop(0) if self.full else self.open.popitem(last=False)[1]

    def ripe(self, now_s: float, gather_s: float) -> list[tuple[bytes, _Run]]:
        """Return the runs that have waited for long enough; a clock that was set back ends the waiting."""
        return list(takewhile(lambda each: not 0 <= now_s - each[1].last_s < gather_s, self.open.items()))


class Gathering:
    """Runs of records that wait; tenants have turns. Not for several threads at once.

    Attributes:
        waiting: records in all runs.
        dropped: records that were left out because too many waited, of the tenant that has most.
    """

    def __init__(self, object_bytes: int, gather_s: float, records_max: int, backlog_max: int = BACKLOG_MAX) -> None:
        """Make objects of about ``object_bytes`` and at most ``records_max`` records."""
        self._object_bytes = object_bytes
        self._gather_s = gather_s
        self._records_max = records_max
        self._backlog_max = backlog_max
        self._tenants: OrderedDict[int, _Waiting] = OrderedDict()  # whose turn it is comes first
        self._runs: dict[tuple[int, bytes], _Run] = {}  # of each record that waits, by tenant and key
        self.waiting = 0
        self.dropped = 0

    def add(self, address: Address, key: bytes, parent: bytes, length: int, now_s: float) -> None:
        """Have a record wait. ``key``: its 32 bytes; ``parent``: of the record before it, empty for none."""
        tenant = address[0]
        if (tenant, key) in self._runs:
            return  # it waits already, and was evicted and stored again
        own = self._tenants.setdefault(tenant, _Waiting())
        run = own.open.pop(parent, None) or _Run(tenant)
        run.records.append((address, key))
        run.bytes += length
        run.last_s = now_s
        self._runs[tenant, key] = run
        own.count += 1
        self.waiting += 1
        if run.bytes >= self._object_bytes or len(run.records) >= self._records_max:
            run.is_full = True
            own.full.append(run)
        else:
            own.open[key] = run
        self._bound()

    def _bound(self) -> None:
        while self.waiting > self._backlog_max:
            run = max(self._tenants.values(), key=lambda own: own.count).pop()
            self._leave(run)
            self.dropped += len(run.records)

    def _leave(self, run: _Run) -> None:
        own = self._tenants[run.tenant]
        own.count -= len(run.records)
        self.waiting -= len(run.records)
        if not own.count:
            del self._tenants[run.tenant]
        for address, key in run.records:
            self._runs.pop((address[0], key), None)

    def urge(self, tenant: int, key: bytes) -> bool:
        """Have the run of a record be the next of its tenant to be taken; return whether it waits."""
        run = self._runs.get((tenant, key))
        if run is None:
            return False
        own = self._tenants[tenant]
        if run.is_full:
            own.full.remove(run)
        else:
            run.is_full = True
            del own.open[run.records[-1][1]]
        own.full.insert(0, run)
        return True

    def take(self, now_s: float, *, hurry: bool = False) -> Batch | None:
        """Return what is to be written next; None while all wait for more. ``hurry``: nothing waits."""
        gather_s = 0.0 if hurry else self._gather_s
        tenant = next((each for each, own in self._tenants.items() if own.full or own.ripe(now_s, gather_s)), None)
        if tenant is None:
            return None
        self._tenants.move_to_end(tenant)
        own = self._tenants[tenant]
        ripe = [] if own.full else own.ripe(now_s, gather_s)
        taken, size, count = ([own.full.pop(0)] if own.full else []), 0, 0
        for at, run in ripe:
            fits = size + run.bytes <= self._object_bytes and count + len(run.records) <= self._records_max
            if fits or not taken:
                taken.append(run)
                size, count = size + run.bytes, count + len(run.records)
                del own.open[at]
        for run in taken:
            self._leave(run)
        return Batch(tenant, [record for run in taken for record in run.records])

    def put_back(self, batch: Batch) -> None:
        """Have a batch wait again, as it was: it could not be written."""
        run = _Run(batch.tenant)
        run.records, run.is_full = batch.records, True
        self._runs.update(((batch.tenant, key), run) for _, key in batch.records)
        own = self._tenants.setdefault(batch.tenant, _Waiting())
        own.full.append(run)
        own.count += len(run.records)
        self.waiting += len(run.records)
        self._bound()

    def forget(self, tenant: int | None) -> None:
        """Leave out everything of a tenant, or of all."""
        for each in list(self._tenants) if tenant is None else [tenant] if tenant in self._tenants else []:
            self.waiting -= self._tenants.pop(each).count
        self._runs = {at: run for at, run in self._runs.items() if run.tenant in self._tenants}
