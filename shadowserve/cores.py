"""Which cores a process may use: what it was given, and how to give up all but some of them.

What ``taskset``, a cgroup's cpuset or a parent process allows is what the kernel reports for the process, so respecting
those takes no more than asking it. A partition keeps only if it holds for *every* thread: a library that starts threads
while it is imported (OpenBLAS does) has started them before any of our code runs.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shadowserve.errors import ConfigurationError

__all__ = ["ProcessCores", "chosen_cores", "confine", "on_cores", "usable_cores"]

ProcessCores = Literal["auto"] | list[Annotated[int, Field(ge=0, le=4095)]]
"""Cores of a whole process; ``auto``: those that it was given (taskset, cgroup)."""


def usable_cores() -> list[int]:
    """Return the cores that this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


def chosen_cores(key: str, cores: ProcessCores) -> list[int]:
    """Return what a configured ``cores`` stands for, ascending.

    Args:
        key: its name, for messages.
        cores: as configured.

    Raises:
        ConfigurationError: a core that this process may not use, or an empty list.
    """
    usable = usable_cores()
    if cores == "auto":
        return usable
    absent = [core for core in cores if core not in usable]
    if absent or not cores:
        raise ConfigurationError(
            f"{key}: " + (f"core {absent[0]} is not" if absent else "an empty list; give some of")
            + f" among the cores this process may use: {', '.join(map(str, usable))} (see taskset and cgroups)"
        )  # fmt: skip
    return sorted(set(cores))


def confine(cores: Iterable[int]) -> None:
    """Let no thread of this process run anywhere but on ``cores``, those included that are started later.

    New threads inherit from the one that starts them. So the threads are gone through until none is left that had
    more; one that is started meanwhile by a thread not seen yet is found in the next turn.
    """
    wanted = set(cores)
    while loose := [task for task in _tasks() if _cores_of(task) - wanted]:
        for task in loose:
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
                os.sched_setaffinity(task, wanted)


@contextlib.contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Run the calling thread on ``cores`` while the context lasts, and the threads and processes that it starts."""
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
