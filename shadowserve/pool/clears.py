"""What was cleared and is in the index still: nobody finds it any more, and it goes bit by bit.

Every put has a number that grows, its generation. So one number for each tenant that was cleared tells what is gone:
all that was put before. The logs have a CLEAR record each, and snapshots leave out what it covers, so that a restart
finds none of it either.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.native import ANY, Index

SCAN_LINES: Final = 4_000
"""Lines of the index that are looked at in one hold of the lock, some ten objects each: about 2 ms."""
_GENERATIONS: Final = 1 << 32


@dataclass(slots=True)
class _Job:
    """A walk through the index for what one clear has left.

    Attributes:
        tenant: whose, or :data:`ANY`.
        generation: of the last put that it covers.
        cursor: where the walk goes on.
        slots: that it has come to, not looked at yet.
    """

    tenant: int
    generation: int
    cursor: int = 0
    ended: bool = False
    slots: deque[int] = field(default_factory=deque)


class Clears:
    """The clears that are not done with yet.

    Attributes:
        under_way: whether there may be entries that are covered.
    """

    def __init__(self, index: Index) -> None:
        self.under_way = False
        self._index = index
        self._marks: dict[int, int] = {}
        self._jobs: deque[_Job] = deque()
        self._living: defaultdict[int, int] = defaultdict(int)

    def begin(self, tenant: int, generation: int) -> None:
        """Cover all of a tenant's entries (:data:`ANY`: of all tenants) up to the one that was put last."""
        if tenant == ANY:
            self._marks.clear()
            self._jobs.clear()
            self._living.clear()
        else:
            self._jobs = deque(job for job in self._jobs if job.tenant != tenant)
            self._living[tenant] = 0
        self._marks[tenant] = generation
        self.under_way = True
        self._jobs.append(_Job(tenant, generation))

    def covers(self, tenant: int, generation: int) -> bool:
        """Return whether an entry is gone."""
        for whose in (tenant, ANY):
            mark = self._marks.get(whose)
            if mark is not None and (mark - generation) % _GENERATIONS < _GENERATIONS // 2:
                return True
        return False

    def next_slot(self) -> int | None:
        """Return a slot that may have a covered entry; 0: ask again, the walk has looked at much; None: all is done."""
        while self._jobs:
            job = self._jobs[0]
            if job.slots:
                return job.slots.popleft()
            if job.ended:
                self._end(self._jobs.popleft())
                continue
            job.cursor, slots = self._index.scan(job.tenant, job.cursor, 256, SCAN_LINES)
            job.slots.extend(slots)
            job.ended = job.cursor == 0
            if not slots:
                return 0
        return None

    def _end(self, job: _Job) -> None:
        if self._marks.get(job.tenant) == job.generation:
            del self._marks[job.tenant]
            self.under_way = bool(self._marks)
        if job.tenant == ANY:
            self._living = defaultdict(int, {tenant: self._living[tenant] for tenant in self._marks})
        elif ANY not in self._marks:
            self._living.pop(job.tenant, None)

    # ---- What is left of a tenant

    def count_change(self, tenant: int, change: int) -> None:
        """Count an entry that came after the clear, or went again."""
        if ANY in self._marks or tenant in self._marks:
            self._living[tenant] += change

    def count(self, tenant: int) -> int | None:
        """Return how many entries a tenant has; None where nothing of it is covered, and the index says so."""
        if ANY in self._marks or tenant in self._marks:
            return self._living[tenant]
        return None

    def count_all(self) -> int:
        """Return how many entries there are that nothing covers."""
        if ANY in self._marks:
            return sum(self._living.values())
        totals = self._index.totals
        covered = sum(totals(tenant).objects - self._living[tenant] for tenant in self._marks)
        return totals().objects - covered

    def living(self, records: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return those of some PUT records, as :meth:`Index.dump` gives them, that nothing covers."""
        if not self._marks:
            return records
        kept = np.ones(len(records), dtype=bool)
        marks = [*np.unique(records["tenant"]).tolist(), ANY]
        for whose in marks:
            mark = self._marks.get(whose)
            if mark is not None:
                behind = np.uint32(mark) - records["generation"]
                covered = behind < _GENERATIONS // 2
                kept &= ~(covered if whose == ANY else covered & (records["tenant"] == whose))
        left: npt.NDArray[Any] = records[kept]
        return left
