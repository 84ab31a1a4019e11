"""CPU cores of a process: the usable ones, and how to limit all threads to some of them.

The kernel reports the cores that ``taskset``, a cgroup's cpuset or a parent process allows. A limit must cover *every*
thread: libraries such as OpenBLAS start threads during import, before any of our code runs.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shadowserve.errors import ConfigurationError

ProcessCores = Literal["auto"] | list[Annotated[int, Field(ge=0, le=4095)]]
"""Cores of a process; ``auto``: all cores that taskset and cgroups allow."""


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


def chosen_cores(key: str, cores: ProcessCores) -> list[int]:
    """Return the core numbers of a configured ``cores`` value, ascending; ``key`` is for messages."""
    usable = usable_cores()
    if cores == "auto":
        return usable
    absent = [core for core in cores if core not in usable]
    if absent or not cores:
        problem = f"core {absent[0]} is not usable" if absent else "the list is empty"
        known = ", ".join(map(str, usable))
        raise ConfigurationError(f"{key}: {problem}; this process may use cores {known} (see taskset and cgroups)")
    return sorted(set(cores))


def confine(cores: Iterable[int]) -> None:
    """Limit all threads of this process to ``cores``, including later threads.

    New threads inherit the limit of their parent. So the loop repeats until no thread has other cores: it then also
    covers threads that were started during the loop.
    """
    wanted = set(cores)
    while loose := [task for task in _tasks() if _cores_of(task) - wanted]:
        for task in loose:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(task, wanted)


@contextlib.contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Context in which the calling thread, and threads and processes that it starts, run on ``cores``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tasks() -> Sequence[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _cores_of(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:
        return set()
