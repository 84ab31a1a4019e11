"""A case of the failure matrix, and the list of all cases."""

import contextlib
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from callers import Caller, Host, going_on, load
from faults import Faults, Proxy
from nodes import DataPlane, Storage
from outcomes import Expected, Outcome, Tally

KEYS: Final = [f"key {number}" for number in range(36)]
MEMORY: Final = ("memory",)
POOL: Final = ("pool",)
ENGINES: Final = (*MEMORY, *POOL)

T = TypeVar("T")
N = TypeVar("N", Storage, DataPlane)
Span = tuple[float, float]
"""Minimum and maximum number of seconds."""


class Unavailable(Exception):
    """The machine lacks a requirement of a case. The text names it."""


class Context:
    """One repetition of a case: its seed, folder, started processes, oracle and tally."""

    def __init__(self, seed: int, engine: str, folder: Path, tally: Tally) -> None:
        self.seed, self.engine, self.folder, self.tally = seed, engine, folder, tally
        self.chance = random.Random(seed)
        self.expected = Expected(seed)
        self.complaints: list[str] = []
        self._stack = contextlib.ExitStack()
        self._nodes: list[Storage | DataPlane] = []

    def storage(self, *, filled: Sequence[str] = (), **options: Any) -> Storage:
        """Start a server with the case's engine, and store the keys ``filled`` in it."""
        node = self._started(Storage(self.engine, self.folder / f"storage{len(self._nodes)}", **options))
        self.fill(node, filled)
        return node

    def data_plane(self, port: int, faults: Faults | None = None, **options: Any) -> DataPlane:
        """Start a data plane over the storage server at a port, or (0) with its local tiers only."""
        if faults is not None:
            options["environment"] = faults.environment
        return self._started(DataPlane(port, self.folder / f"dataplane{len(self._nodes)}", **options))

    def _started(self, node: N) -> N:
        self._nodes.append(node)
        self._stack.callback(node.close)
        return node.start()

    def enter(self, manager: contextlib.AbstractContextManager[T]) -> T:
        """Keep a context open until the end of this repetition; it ends after all nodes."""
        return self._stack.enter_context(manager)

    def proxy(self, port: int) -> Proxy:
        return self.enter(contextlib.closing(Proxy(port, self.seed)))

    def caller(self, port: int, **options: Any) -> Caller:
        return self.enter(contextlib.closing(Caller(port, self.expected, self.tally, **options)))

    def host(self, address: str, **options: Any) -> Host:
        return self.enter(contextlib.closing(Host(address, self.tally, **options)))

    def faults(self, folder: Path) -> Faults:
        """Create a folder, and return faults of file operations in it for a data plane."""
        folder.mkdir()
        return self.enter(contextlib.closing(Faults(self.folder, folder)))

    def load(
        self, port: int, *, threads: int = 3, keys: Sequence[str] = KEYS, **options: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Run ``threads`` clients with random operations until the context ends."""
        return load([self.caller(port, **options) for _ in range(threads)], keys, self.seed)

    def beside(self, *works: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        """Run each function repeatedly in its own thread until the context ends."""
        return going_on(self.tally, works)

    def fill(self, storage: Storage, keys: Sequence[str]) -> None:
        """Store each key once, and check that no fault occurs yet."""
        caller = self.caller(storage.port)
        for key in keys:
            assert caller.set(key), "a healthy server refused a value"

    def verify(self, storage: Storage, keys: Sequence[str] | None = None) -> list[str]:
        """Read all keys. Return the keys with a wrong or missing answer."""
        return self.caller(storage.port).verify(keys)

    def pause(self, least_s: float, most_s: float) -> None:
        """Wait for a time that the seed chooses."""
        time.sleep(self.chance.uniform(least_s, most_s))

    def kills(self, node: Storage | DataPlane, times: int, up: Span, down: Span = (0.0, 0.0)) -> None:
        """Kill and restart a node several times. The seed chooses how long it is up and how long it is down."""
        for _ in range(times):
            self.pause(*up)
            node.kill()
            self.pause(*down)
            node.start()

    def restart(self, storage: Storage) -> None:
        """Start a server again. Values that were only in memory may be lost."""
        if self.engine == "memory":
            self.expected.all_may_be_lost("the engine memory ends with its process")
        storage.start()

    def close(self) -> None:
        """Stop all processes in order. A process that does not stop is a hang."""
        for node in self._nodes:
            if isinstance(node, Storage) and node.alive and not node.stop():
                self.tally.note(Outcome.HANG, "the server does not stop on SIGTERM")
            self.complaints += node.complaints()
        self._stack.close()


Run = Callable[[Context], None]


@dataclass(frozen=True)
class Case:
    """One row of the matrix: a function that makes a fault, an engine, and the number of runs with other seeds."""

    name: str
    fault: str
    what: str  # place and time of the fault, and the clients of the store during it
    engine: str
    repetitions: int
    run: Run
    short: bool = False  # the case is part of the tests


CASES: list[Case] = []


def add(
    name: str,
    fault: str,
    what: str,
    engines: Sequence[str],
    run: Run,
    *,
    repetitions: int = 2,
    short: Sequence[str] = (),
) -> None:
    """Register a case, once for each engine. ``short`` lists the engines of the tests."""
    CASES.extend(Case(f"{name}-{each}", fault, what, each, repetitions, run, each in short) for each in engines)


def case(fault: str, engines: Sequence[str], **options: Any) -> Callable[[Run], Run]:
    """Register a function as a case, whose docstring says what happens; options as of :func:`add`."""

    def register(run: Run) -> Run:
        add(run.__name__, fault, " ".join((run.__doc__ or "").split()), engines, run, **options)
        return run

    return register


@dataclass
class Row:
    """Result of a case."""

    case: Case
    tally: Tally = field(default_factory=Tally)
    repetitions: int = 0
    seconds: float = 0.0
    broken: str = ""  # why the case itself failed; empty if it did not
    unavailable: str = ""  # why the case cannot run on this machine
    complaints: list[str] = field(default_factory=list)  # log lines that no fault should cause

    @property
    def failed(self) -> bool:
        return self.tally.failed or bool(self.broken) or bool(self.complaints)


def run_case(chosen: Case, folder: Path, *, seed: int = 0, repetitions: int | None = None) -> Row:
    """Run a case once for each repetition, each time with another seed."""
    row = Row(chosen)
    began = time.monotonic()
    for number in range(chosen.repetitions if repetitions is None else repetitions):
        place = folder / f"{chosen.name}-{seed + number}"
        place.mkdir(parents=True)
        context = Context(seed + number, chosen.engine, place, row.tally)
        try:
            try:
                chosen.run(context)
            finally:
                context.close()
        except Unavailable as error:
            row.unavailable = str(error)
            break
        except Exception as error:
            traceback.print_exc(limit=-3, file=sys.stderr)
            row.broken = f"seed {seed + number}: {type(error).__name__}: {str(error)[:300]}"
            break
        finally:
            row.complaints += context.complaints
        row.repetitions += 1
        if row.tally.failed:
            break
    row.seconds = time.monotonic() - began
    return row
