"""Cleared entries that are still in the index: they are absent for clients, and are removed bit by bit.

Each put has a growing number, its generation, so one number for each cleared tenant tells which entries are cleared.
The logs have a CLEAR record each, and snapshots leave cleared entries out, so a restart finds none.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.native import ANY, Index

SCAN_LINES: Final = 4_000
"""Lines of the index that one hold of the lock scans, with about ten objects each: about 2 ms."""
_GENERATIONS: Final = 1 << 32


@dataclass(slots=True)
class _Job:
    """A walk through the index for the entries of one clear."""

    tenant: int  # the cleared tenant, or :data:`ANY`
    generation: int  # generation of the last covered put
    cursor: int = 0  # position of the walk in the index
    ended: bool = False
    slots: deque[int] = field(default_factory=deque)  # found slots that are not examined yet


class Clears:
    """Clears whose entries are not all removed yet."""

    def __init__(self, index: Index) -> None:
        self.under_way = False  # there may be covered entries
        self._index = index
        self._marks: dict[int, int] = {}
        self._jobs: deque[_Job] = deque()
        self._living: defaultdict[int, int] = defaultdict(int)

    def begin(self, tenant: int, generation: int) -> None:
        """Cover all present entries of a tenant (:data:`ANY`: of all tenants)."""
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
        for whose in (tenant, ANY):
            mark = self._marks.get(whose)
            if mark is not None and (mark - generation) % _GENERATIONS < _GENERATIONS // 2:
                return True
        return False

    def next_slot(self) -> int | None:
        """Return a slot that may have a covered entry; 0 to ask again in the next hold; None at the end."""
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
        if ANY in self._marks or tenant in self._marks:
            self._living[tenant] += change

    def count(self, tenant: int) -> int | None:
        """Return the number of a tenant's entries; None if none are covered, so that the index knows the number."""
        if ANY in self._marks or tenant in self._marks:
            return self._living[tenant]
        return None

    def count_all(self) -> int:
        if ANY in self._marks:
            return sum(self._living.values())
        totals = self._index.totals
        covered = sum(totals(tenant).objects - self._living[tenant] for tenant in self._marks)
        return totals().objects - covered

    def living(self, records: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return those PUT records, in the form of :meth:`Index.dump`, that are not covered."""
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
