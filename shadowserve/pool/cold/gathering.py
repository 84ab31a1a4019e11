"""Which records go into an object together: those that follow each other in a chain, as they come to be stored.

A record names the record before it in its prompt. What names the last record of a run continues the run, whoever stored
it and whatever came in between; anything else begins one. A run that is long enough is an object; what has waited for
more goes with other runs of its tenant, a run in one piece.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from shadowserve.pool.terms import Address

__all__ = ["BACKLOG_MAX", "Batch", "Gathering"]

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


class Gathering:
    """Runs of records that wait. Not for several threads at once.

    Attributes:
        waiting: records in all runs.
        dropped: records that were left out because too many waited.
    """

    def __init__(self, object_bytes: int, gather_s: float, records_max: int, backlog_max: int = BACKLOG_MAX) -> None:
        """Make objects of about ``object_bytes`` and at most ``records_max`` records."""
        self._object_bytes = object_bytes
        self._gather_s = gather_s
        self._records_max = records_max
        self._backlog_max = backlog_max
        self._open: OrderedDict[tuple[int, bytes], _Run] = OrderedDict()  # by tenant and last key; oldest first
        self._full: list[_Run] = []
        self._runs: dict[tuple[int, bytes], _Run] = {}  # of each record that waits, by tenant and key
        self.waiting = 0
        self.dropped = 0

    def add(self, address: Address, key: bytes, parent: bytes, length: int, now_s: float) -> None:
        """Have a record wait. ``key``: its 32 bytes; ``parent``: of the record before it, empty for none."""
        tenant = address[0]
        if (tenant, key) in self._runs:
            return  # it waits already, and was evicted and stored again
        run = self._open.pop((tenant, parent), None) or _Run(tenant)
        run.records.append((address, key))
        run.bytes += length
        run.last_s = now_s
        self._runs[tenant, key] = run
        self.waiting += 1
        if run.bytes >= self._object_bytes or len(run.records) >= self._records_max:
            run.is_full = True
            self._full.append(run)
        else:
            self._open[tenant, key] = run
        while self.waiting > self._backlog_max:
            self._drop(self._full.pop(0) if self._full else self._open.popitem(last=False)[1])

    def _drop(self, run: _Run) -> None:
        self._leave(run)
        self.dropped += len(run.records)

    def _leave(self, run: _Run) -> None:
        self.waiting -= len(run.records)
        for address, key in run.records:
            self._runs.pop((address[0], key), None)

    def urge(self, tenant: int, key: bytes) -> bool:
        """Have the run of a record be the next to be taken; return whether it waits."""
        run = self._runs.get((tenant, key))
        if run is None:
            return False
        if run.is_full:
            self._full.remove(run)
        else:
            run.is_full = True
            del self._open[tenant, run.records[-1][1]]
        self._full.insert(0, run)
        return True

    def take(self, now_s: float, *, hurry: bool = False) -> Batch | None:
        """Return what is to be written next; None while all wait for more. ``hurry``: nothing waits."""
        if self._full:
            taken = [self._full.pop(0)]
        else:
            ripe = [
                (at, run)
                for at, run in self._open.items()
                if hurry or not 0 <= now_s - run.last_s < self._gather_s  # a clock that was set back ends the waiting
            ]
            if not ripe:
                return None
            taken, size, count = [], 0, 0
            tenant = ripe[0][1].tenant
            for at, run in ripe:
                if run.tenant != tenant or (taken and size + run.bytes > self._object_bytes):
                    continue
                if taken and count + len(run.records) > self._records_max:
                    continue
                taken.append(run)
                size, count = size + run.bytes, count + len(run.records)
                del self._open[at]
        for run in taken:
            self._leave(run)
        records = [record for run in taken for record in run.records]
        return Batch(taken[0].tenant, records)

    def put_back(self, batch: Batch) -> None:
        """Have a batch wait again, as it was: it could not be written."""
        run = _Run(batch.tenant)
        run.records, run.is_full = batch.records, True
        self._runs.update(((batch.tenant, key), run) for _, key in batch.records)
        self._full.append(run)
        self.waiting += len(run.records)
        if self.waiting > self._backlog_max:
            self._drop(self._full.pop(0))

    def forget(self, tenant: int | None) -> None:
        """Leave out everything of a tenant, or of all."""
        self._full = [run for run in self._full if tenant is not None and run.tenant != tenant]
        kept = [(at, run) for at, run in self._open.items() if tenant is not None and run.tenant != tenant]
        self._open = OrderedDict(kept)
        runs = [*self._full, *self._open.values()]
        self._runs = {(run.tenant, key): run for run in runs for _, key in run.records}
        self.waiting = sum(len(run.records) for run in runs)
