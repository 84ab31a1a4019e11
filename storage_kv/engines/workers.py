"""Threads that do what takes a device's time, one call after another."""

import logging
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Workers"]

_log = logging.getLogger(__name__)


class Workers:
    """Some threads and the calls that they have to make.

    They are daemons: a device that never answers must not keep a process, as a ThreadPoolExecutor would.
    """

    def __init__(self, count: int, name: str) -> None:
        """Make a group that grows to ``count`` threads as there is work for them."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._under_way = 0  # calls, about: it decides nothing but when to start a thread
        self._add_thread()  # one there must be; where it cannot be had, whoever makes the group hears of it

    def submit(self, call: Callable[[], None]) -> None:
        """Have ``call`` made, soon, by one of the threads; from one thread at a time."""
        self._calls.put(call)
        self._under_way += 1
        if self._under_way > len(self._threads) < self._count:
            try:
                self._add_thread()
            except RuntimeError as error:  # no memory for one more; those that there are do it
                _log.warning("thread_not_started group=%s error=%r", self._name, str(error))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def stop(self, timeout_s: float) -> bool:
        """End the threads when everything submitted so far is done; return whether they ended in time."""
        for _ in self._threads:
            self._calls.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # a bug of ours must not take the thread from the others
                _log.exception("work_failed call=%r", call)
            self._under_way -= 1
