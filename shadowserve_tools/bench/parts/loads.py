"""Loads beside a decoding engine: fetches at full speed, and controls that separate ShadowServe's effect from the
machine's.

A control keeps a core busy without ShadowServe's code. ``spin`` uses no memory, so it slows down only what shares the
core's execution units or clock. ``copy`` copies as many bytes per second as fetches deliver, and ``write`` only writes
as many, which is unavoidable for any delivery. ``python -m shadowserve_tools.bench.parts.loads spin|copy|write`` is one
of them, as a process.
"""

import contextlib
import ctypes
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from shadowserve_tools.processes import Programs, started

COPY_BYTES: Final = 32 << 20
"""Twice this size fills the last-level cache of most machines: a copy goes through memory."""
SLICE_BYTES: Final = 1 << 20
"""Bytes between two readings of the clock."""


@contextlib.contextmanager
def background(loop: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a loop in a thread. At the context's end its event is set, and its error raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop, stop)
        try:
            yield
        finally:
            stop.set()
        running.result()


class Fetcher(Protocol):
    """Fetches the leading chunks of a workload; None fetches all."""

    def fetch(self, count: int | None = None) -> None: ...


class FetchLoop:
    """Fetches a workload repeatedly while the context lasts, from a thread that only waits for the data plane.

    Attributes:
        bytes: Bytes of the fetches that ended while the loop ran.
    """

    def __init__(self, target: Fetcher, fetch_bytes: int, count: int | None = None) -> None:
        self._target = target
        self._count = count
        self._fetch_bytes = fetch_bytes
        self.bytes = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start and end with a complete fetch."""

        def loop(stop: threading.Event) -> None:
            while True:
                begin = time.perf_counter()
                self._target.fetch(self._count)
                self.seconds += time.perf_counter() - begin
                self.bytes += self._fetch_bytes
                if stop.is_set():
                    return

        self._target.fetch(self._count)
        with background(loop):
            yield


class Control:
    """A process that keeps one core busy while :meth:`running`, and is stopped otherwise.

    Args:
        kind: ``"spin"``, ``"copy"`` or ``"write"``.
        rate: Bytes per second to copy or write.
    """

    def __init__(self, programs: Programs, kind: str, rate: float = 0.0) -> None:
        command = [sys.executable, "-m", __name__, kind, str(rate)]
        # It is ready when its memory has been touched.
        child = started(f"control-{kind}", command, programs.logs, ready=re.compile("ready"))
        self._process = programs.enter_context(child).process
        self._process.send_signal(signal.SIGSTOP)
        programs.callback(self._process.send_signal, signal.SIGCONT)  # otherwise it would not take SIGTERM

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run while the context lasts."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)


def _move(rate: float, writes_only: bool) -> None:
    source, target = np.ones((2, COPY_BYTES), np.uint8)
    print("ready", flush=True)
    position, due = 0, time.perf_counter()
    while True:
        if writes_only:  # memset's string stores do not read what they overwrite
            ctypes.memset(target.ctypes.data + position, 1, SLICE_BYTES)
        else:
            target[position : position + SLICE_BYTES] = source[position : position + SLICE_BYTES]
        position = (position + SLICE_BYTES) % COPY_BYTES
        now = time.perf_counter()
        # Time in which the process was stopped is not compensated.
        due = max(due + SLICE_BYTES / rate, now - 0.01)
        if due > now:
            time.sleep(due - now)


def main(kind: str, rate: float) -> None:
    """Run a control until it is killed."""
    if kind != "spin":
        _move(rate, writes_only=kind == "write")
    print("ready", flush=True)
    while True:
        pass


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
