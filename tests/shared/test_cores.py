"""A process can confine all of its threads to cores, including those of libraries."""

import os
import subprocess
import sys

import pytest
from machine import NEVER_S

from shadowserve.cores import chosen_cores, usable_cores
from shadowserve.errors import ConfigurationError

CONFINED = """
import os, threading
from pathlib import Path
import numpy  # its linear algebra library may start threads of its own

def tasks():
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]

stop = threading.Event()
for _ in range(4):
    threading.Thread(target=stop.wait).start()
from shadowserve.cores import confine
core = max(os.sched_getaffinity(0))
confine([core])
later = threading.Thread(target=stop.wait)
later.start()
assert len(tasks()) >= 6
print(all(os.sched_getaffinity(task) == {core} for task in tasks()))
stop.set()
"""


def test_every_thread_is_confined_whenever_it_was_started() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=NEVER_S)
    assert done.stdout == "True\n", done.stderr


def test_auto_is_what_the_process_was_given() -> None:
    assert chosen_cores("cores", "auto") == usable_cores() == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("cores", [[], [4095], [max(os.sched_getaffinity(0)) + 1]])
def test_cores_that_cannot_be_had_are_named(cores: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="section.cores: .*this process may use cores"):
        chosen_cores("section.cores", cores)


def test_a_core_named_twice_counts_once() -> None:
    core = usable_cores()[0]
    assert chosen_cores("cores", [core, core]) == [core]
