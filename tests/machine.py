"""What a test may expect of the machine that it runs on: little. It may stand still for seconds, at any moment.

So a test waits for what must happen, with a bound that nothing that works comes near, and gives every deadline of the
product that is not meant to be hit the same bound. A deadline that is meant to be hit is short, and what shows that it
was kept is that the call came back at all: without it, it would wait for something that never comes.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

WAIT_MAX_S: Final = 60.0
"""For what must happen. No longer than the longest timeout that any configuration takes."""
WAIT_MAX_MS: Final = int(1000 * WAIT_MAX_S)
NEVER_S: Final = 600.0
"""For what must not be what ends a wait: so long that WAIT_MAX_S tells the two apart."""
NEVER_MS: Final = int(1000 * NEVER_S)
PATIENT: Final = ("--command-timeout-s", str(WAIT_MAX_S), "--connect-timeout-s", str(WAIT_MAX_S))
"""Flags of a data plane whose storage server may be slow, and is not away for it."""


def wait_for(condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> Any:
    """Return the first true value of ``condition()``."""
    ends = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.002)
    return value


def drive(step: Callable[[], Any], condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> None:
    """Call ``step()``, which makes things happen, again and again until ``condition()`` is true.

    The wait is for a time and never for a number of steps: a machine that is busy takes more of them.
    """
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        for _ in range(16):
            step()
            if condition():
                return
        time.sleep(0)  # lets a thread that works for it have the core


async def until(condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> None:
    """Wait on the event loop until ``condition()`` is true."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


def frozen(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread of a process: until then it may do something yet."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) <= {"T", "Z"}


def ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def cores_of_threads(pid: int) -> list[set[int]]:
    """Return which cores each thread of a process may use, leaving out threads that have just ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free, and that the system gives to nobody unasked.

    One of those that it does give could be anybody's before it is used, or again while its server is down: even the
    client's that looks for that server, which then finds itself. Of several processes of tests side by side each has
    ports of its own: what one has found free, no other takes before it is used.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(10_000 + worker % workers, first_given, workers)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
