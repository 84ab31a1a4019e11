"""What is measured: a system that brings chunks from its store into memory of its client."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from shadowserve_tools.report import Cost, measure

__all__ = ["Contender", "family", "paused"]


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
        spins: processes among them that burn a core even when they have nothing to do: stopped between fetches.
        note: for tables, such as its version.
    """

    name: str
    kind: Literal["ours", "raw", "compressing", "limit"]
    fetch: Callable[[int], None]
    clear: Callable[[], None]
    verify: Callable[[int], None]
    processes: Sequence[psutil.Process] = ()
    spins: Sequence[psutil.Process] = ()
    note: str = ""

    def run(self, count: int) -> Cost:
        """Fetch ``count`` chunks into cleared memory; return the cost of that, without clearing and verifying."""
        with paused(self.spins, invert=True):
            self.clear()
            cost = measure(lambda: self.fetch(count), self.processes)
            self.verify(count)
        return cost


@contextlib.contextmanager
def paused(processes: Sequence[psutil.Process], *, invert: bool = False) -> Iterator[None]:
    """Stop processes while the context lasts; inverted, let stopped ones run just as long."""
    first, last = (signal.SIGCONT, signal.SIGSTOP) if invert else (signal.SIGSTOP, signal.SIGCONT)
    _signal(processes, first)
    try:
        yield
    finally:
        _signal(processes, last)


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
