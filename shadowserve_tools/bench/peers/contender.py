"""What is measured: a system that brings chunks from its store into memory of its client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from shadowserve_tools.report import Cost, measure


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """One way to bring the leading chunks of a workload from its store into memory.

    Attributes:
        name: for tables.
        kind: ``ours``; ``raw``, a peer that moves values as they are; ``compressing``, a peer that does not; ``limit``,
            which is no system but what no system can beat.
        fetch: brings so many leading chunks; returns when all are in memory.
        clear: overwrites the memory, and empties caches on the way to it.
        verify: raises ShadowServeError unless the memory holds so many leading chunks.
        processes: all that take part beside this one.
        note: for tables, such as its version.
    """

    name: str
    kind: Literal["ours", "raw", "compressing", "limit"]
    fetch: Callable[[int], None]
    clear: Callable[[], None]
    verify: Callable[[int], None]
    processes: Sequence[psutil.Process] = ()
    note: str = ""

    def run(self, count: int) -> Cost:
        """Fetch ``count`` chunks into cleared memory; return the cost of that, without clearing and verifying."""
        self.clear()
        cost = measure(lambda: self.fetch(count), self.processes)
        self.verify(count)
        return cost


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
