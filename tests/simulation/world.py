"""The scheduler of a simulation: a clock that nobody waits for, and events in an order that a seed decides.

Whatever happens is an event of an actor: a thread of the server, the network, a device, a client. One event runs after
the other, but for preemption: where a thread gives up the node's lock, events of other actors may run before it goes
on, as they may on a real machine. The product's modules see this clock in place of ``time``.
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
"""What a thread misses at most while it stands between two of its steps."""
_CREEP_NS: Final = 100 * US


class World:
    """Time, chance and order.

    Attributes:
        random: decides everything; nothing else may.
        now_ns: since the beginning.
        wall_offset_ns: of the wall clock from where it should be.
        creeps: each look at the clock costs time: for code that looks until it is late.
        preempts: how likely a thread is interrupted where it gives up the lock.
        events: that have run.
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
        """Have a function called later, as a step of an actor."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ns + max(int(delay_ns), 0), self._number, actor, function))

    def soon(self, actor: str, function: Callable[[], None], most_ns: int = 20 * US) -> None:
        """Have a function called after a little while."""
        self.after(self.random.randrange(most_ns), actor, function)

    def step(self) -> bool:
        """Run the next event; return whether there was one."""
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
        """Run events until something is so; return whether it is, within so many seconds."""
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
        """Let others run, where the thread that runs gives up a lock."""
        while self._running and self._queue and self.random.random() < self.preempts:
            due, _, actor, _ = self._queue[0]
            if due > self.now_ns + _PREEMPTION_NS or actor in self._running or actor == "world":
                return
            try:
                self.step()
            except Exception as error:  # of another thread: it must not become that of the one that was interrupted
                self.failure = self.failure or error

    # ---- What happened

    def note(self, what: str) -> None:
        """Add to the trace, which is the same in each run of a seed."""
        line = f"{self.now_ns} {what}\n"
        self._hash.update(line.encode())
        if self.log is not None:
            self.log.append(line)

    @property
    def trace(self) -> str:
        """A digest of all that happened."""
        return self._hash.hexdigest()

    # ---- Clocks

    def wall_ms(self) -> int:
        """Return Unix time in milliseconds, as the server sees it."""
        return (_WALL_BEGIN_NS + self.now_ns + self.wall_offset_ns) // MS

    def chance(self, probability: float) -> bool:
        """Return True as often as that."""
        return self.random.random() < probability


class SimulatedLock:
    """The node's lock where only one thread really runs: whoever finds it taken would wait for ever."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        assert not self._held, "a thread waits for the node's lock that it holds"
        self._held = True
        return True

    def release(self) -> None:
        """Give it up."""
        assert self._held
        self._held = False
        self._world.preempt()

    def locked(self) -> bool:
        """Whether it is held."""
        return self._held


class VirtualTime:
    """What modules see in place of ``time``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic_ns(self) -> int:
        """Return the world's clock."""
        if self._world.creeps:
            self._world.now_ns += _CREEP_NS
        return self._world.now_ns + 1000 * S

    def monotonic(self) -> float:
        """Return the world's clock in seconds."""
        return self.monotonic_ns() / S

    perf_counter_ns = monotonic_ns
    perf_counter = monotonic

    def time_ns(self) -> int:
        """Return Unix time."""
        return _WALL_BEGIN_NS + self._world.now_ns + self._world.wall_offset_ns

    def time(self) -> float:
        """Return Unix time in seconds."""
        return self.time_ns() / S

    def sleep(self, seconds: float) -> None:
        """Refuse: nothing that is simulated may sleep."""
        raise AssertionError(f"somebody sleeps for {seconds} s")


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """Show the product's modules the world's clock for a while, where they take ``time`` from their module."""
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
