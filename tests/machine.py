"""A test's assumptions about its machine. There are few: the machine may pause for seconds at any moment.

So a test waits for an event with a bound far above the time of any correct run. Deadlines of the product that must not
expire have the same bound. A deadline that must expire is short. The return of the call then proves the deadline:
without it, the call would wait for an event that never occurs.
"""

import asyncio
import contextlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

WAIT_MAX_S: Final = 60.0
"""Bound of a wait for an event. No longer than the longest timeout of any configuration."""
WAIT_MAX_MS: Final = int(1000 * WAIT_MAX_S)
NEVER_S: Final = 600.0
"""Bound of a deadline that must not expire: long enough to be distinguished from WAIT_MAX_S."""
NEVER_MS: Final = int(1000 * NEVER_S)
PATIENT: Final = ("--command-timeout-s", str(WAIT_MAX_S), "--connect-timeout-s", str(WAIT_MAX_S))
"""Flags of a data plane with a slow storage server that must not count as down."""


def python_path() -> str:
    """Return PYTHONPATH for a program to start: this checkout, behind what the tests themselves have there."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*([before] if before else []), str(Path(__file__).parents[1])])


@contextlib.contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run an HTTP server on a free port; its ``host:port``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Clock:
    """A clock that only tests move."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def http_get(port: int, path: str) -> tuple[int, str]:
    """Return status and text of a GET from this machine."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_MAX_S)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def wait_for(condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> Any:
    """Return the first true value of ``condition()``, which may ask another process: a long wait asks less often."""
    ends, pause_s = time.monotonic() + timeout, 0.002
    while not (value := condition()):
        assert time.monotonic() < ends, "the condition did not become true in time"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.02)
    return value


def drive(step: Callable[[], Any], condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> None:
    """Call ``step()``, which causes progress, repeatedly until ``condition()`` is true.

    The wait has a bound in time, not in steps: a busy machine takes more steps.
    """
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, "the condition did not become true in time"
        for _ in range(16):
            step()
            if condition():
                return
        time.sleep(0)  # yields the core to the thread that works for it


async def until(condition: Callable[[], Any], timeout: float = WAIT_MAX_S) -> None:
    """Wait on the event loop until ``condition()`` is true."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


def frozen(pid: int) -> bool:
    """True if SIGSTOP has stopped every thread of a process; until then a thread may still run."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) <= {"T", "Z"}


def ignores(pid: int, number: signal.Signals) -> bool:
    """True if a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def cores_of_threads(pid: int) -> list[set[int]]:
    """Return the permitted cores of each thread of a process, without threads that have just ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


_GIVEN_PORTS: Final[set[int]] = set()


def free_port() -> int:
    """Return a free TCP port of the loopback interface that the system does not assign automatically.

    Another process could get an automatically assigned port before its use, or while its server is down. Even a client
    that connects to the server could get it, and connect to itself. Each of several parallel test processes has its own
    range of ports, and gets each port once, so nothing takes a free port before its use.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(10_000 + worker % workers, first_given, workers)
        if port in _GIVEN_PORTS:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN_PORTS.add(port)
        return port
