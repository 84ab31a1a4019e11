"""The scheduler of a simulation: a virtual clock, and events in an order that a seed decides.

Every event belongs to an actor: a thread of the server, the network, a device, a client. Events run one after the
other, with one exception: when a thread releases the node's lock, events of other actors may run before it continues
(preemption). The product's modules see this clock instead of ``time``.
"""

import hashlib
import heapq
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

US: Final = 1_000
MS: Final = 1_000_000
S: Final = 1_000_000_000
_WALL_BEGIN_NS: Final = 1_800_000_000 * S
_PREEMPTION_NS: Final = 5 * MS
"""Longest time that a thread is preempted."""
_CREEP_NS: Final = 100 * US


class World:
    """Time, randomness and order.

    Attributes:
        random: The only source of decisions.
        wall_offset_ns: Error of the wall clock.
        creeps: True if each read of the clock takes time, for code that polls the clock.
        preempts: Probability of a preemption at each release of the lock.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ns = 0
        self.wall_offset_ns = 0
        self.creeps = False
        self.preempts = self.random.choice((0.0, 0.1, 0.5))
        self.events = 0
        self.log: list[str] | None = None
        self.failure: Exception | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[int, int, str, Callable[[], None]]] = []
        self._number = 0
        self._running: list[str] = []

    # ---- Events

    def after(self, delay_ns: float, actor: str, function: Callable[[], None]) -> None:
        """Call a function later, as a step of an actor."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ns + max(int(delay_ns), 0), self._number, actor, function))

    def soon(self, actor: str, function: Callable[[], None], most_ns: int = 20 * US) -> None:
        self.after(self.random.randrange(most_ns), actor, function)

    def step(self) -> bool:
        """Run the next event. Return True if there was one."""
        if not self._queue:
            return False
        due, _, actor, function = heapq.heappop(self._queue)
        self.now_ns = max(self.now_ns, due)
        self.events += 1
        self._running.append(actor)
        try:
            function()
        finally:
            self._running.pop()
        return True

    def run(self, condition: Callable[[], Any], limit_s: float) -> bool:
        """Run events until a condition holds. Return True if it holds within ``limit_s``."""
        ends = self.now_ns + int(limit_s * S)
        while not condition():
            if not self._queue or self._queue[0][0] > ends:
                self.now_ns = max(self.now_ns, ends)
                return bool(condition())
            self.step()
            if self.failure is not None:
                raise self.failure
        return True

    def preempt(self) -> None:
        """Run events of other actors at a thread's release of a lock."""
        while self._running and self._queue and self.random.random() < self.preempts:
            due, _, actor, _ = self._queue[0]
            if due > self.now_ns + _PREEMPTION_NS or actor in self._running or actor == "world":
                return
            try:
                self.step()
            except Exception as error:  # of another thread: it must not reach the interrupted thread
                self.failure = self.failure or error

    # ---- Trace

    def note(self, what: str) -> None:
        """Add to the trace, which is the same in each run of a seed."""
        line = f"{self.now_ns} {what}\n"
        self._hash.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()

    # ---- Clocks

    def wall_ms(self) -> int:
        """Return Unix time in milliseconds, as the server sees it."""
        return (_WALL_BEGIN_NS + self.now_ns + self.wall_offset_ns) // MS

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


class SimulatedLock:
    """The node's lock. Only one thread really runs, so a wait for the lock would be a deadlock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert not self._held, "a thread waits for its own lock of the node"
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False
        self._world.preempt()

    def locked(self) -> bool:
        return self._held


class VirtualTime:
    """Replaces ``time`` in modules."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_ns(self) -> int:
        if self._world.creeps:
            self._world.now_ns += _CREEP_NS
        return self._world.now_ns + 1000 * S

    def monotonic(self) -> float:
        return self.monotonic_ns() / S

    perf_counter_ns = monotonic_ns
    perf_counter = monotonic

    def time_ns(self) -> int:
        return _WALL_BEGIN_NS + self._world.now_ns + self._world.wall_offset_ns

    def time(self) -> float:
        return self.time_ns() / S

    def sleep(self, seconds: float) -> None:
        """Fail: simulated code must not sleep."""
        raise AssertionError(f"simulated code sleeps for {seconds} s")


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """Replace ``time`` in the product's modules for a while."""
    clock = VirtualTime(world)
    changed = [
        module
        for name, module in sorted(sys.modules.items())
        if name.split(".")[0] in ("storage_kv", "dpu_dataplane") and getattr(module, "time", None) is time
    ]
    for module in changed:
        setattr(module, "time", clock)  # noqa: B010
    try:
        yield
    finally:
        for module in changed:
            setattr(module, "time", time)  # noqa: B010
