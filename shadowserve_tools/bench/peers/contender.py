"""A measured system: it brings chunks from its store into memory of its client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from shadowserve_tools.report import Cost, measure


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """A way to bring the leading chunks of a workload from its store into memory.

    Attributes:
        name: Name in tables.
        kind: ``ours``; ``raw``, a peer that moves uncompressed values; ``compressing``, any other peer; ``limit``,
            no system but a bound of all.
        fetch: Brings this number of leading chunks and returns when all are in memory.
        clear: Overwrites the memory, and empties caches on the way to it.
        verify: Raises ShadowServeError unless the memory has this number of leading chunks.
        processes: All processes that take part, without this one.
        note: Note in tables, such as its version.
    """

    name: str
    kind: Literal["ours", "raw", "compressing", "limit"]
    fetch: Callable[[int], None]
    clear: Callable[[], None]
    verify: Callable[[int], None]
    processes: Sequence[psutil.Process] = ()
    note: str = ""

    def run(self, count: int) -> Cost:
        """Fetch ``count`` chunks into cleared memory; return the cost, without clearing and verifying."""
        self.clear()
        cost = measure(lambda: self.fetch(count), self.processes)
        self.verify(count)
        return cost


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
