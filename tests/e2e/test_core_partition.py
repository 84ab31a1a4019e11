"""The engine's cores are the engine's: no thread of the data plane may run there, or ever does, while KV is fetched.

Real vLLM on one half of the cores, the real data plane on the other, fetches at full speed. This is the part of the
promise not to disturb serving that holds on any machine; what is left, memory and power, is ``bench interference``'s.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from machine import wait_for

from shadowserve.cores import on_cores
from shadowserve_tools.bench.fetch import Target
from shadowserve_tools.bench.parts.loads import FetchLoop
from shadowserve_tools.bench.parts.serving import Load, Model, Partition, Stack
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

EVERYWHERE = os.sched_getaffinity(0)
MODEL = Model(layers=8, hidden=64, heads=16, head_size=128)
LOAD = Load(chunks=2, documents=2, output=8, requests=8)


class Watch:
    """Looks at every thread of a process over and over: which cores may it use, and where was it when it last ran?

    Attributes:
        strays: (thread's name, "may run" or "ran", core) of every look that found one of the forbidden cores.
        looks: at one thread each.
    """

    def __init__(self, pid: int, forbidden: set[int]) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._forbidden = forbidden
        self._ran: dict[str, str] = {}
        self.strays: set[tuple[str, str, int]] = set()
        self.looks = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.0005):
                self._look()

        self._look()
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _look(self) -> None:
        for task in self._tasks.iterdir():
            try:
                allowed = os.sched_getaffinity(int(task.name))
                stat = (task / "stat").read_text()
                ran = (task / "schedstat").read_text().split()[0]
            except (ProcessLookupError, FileNotFoundError):  # it has just ended
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            core = int(rest.split()[36])  # field 39 of the line: where it runs, or last did
            self.strays |= {(name, "may run", one) for one in allowed & self._forbidden}
            # A thread that has slept since before it was confined still names the core of that time.
            if self._ran.setdefault(task.name, ran) != ran and core in self._forbidden:
                self.strays.add((name, "ran", core))
            self._ran[task.name] = ran
            self.looks += 1


@pytest.fixture(scope="module")
def workload() -> Workload:
    return llama_8b(4, layers=4)


@pytest.fixture(scope="module")
def stack(workload: Workload) -> Iterator[Stack]:
    with Stack(Partition.halves(), MODEL, LOAD, 4) as stack:
        put(workload, stack.storage.address)
        yield stack


def strays(stack: Stack, workload: Workload, *flags: str) -> set[tuple[str, str, int]]:
    """Start the data plane from a process that may run anywhere; return what was where it must not be, in fetches."""
    with on_cores(EVERYWHERE):
        stack.restart_data_plane(*flags)
    watch = Watch(stack.data_plane.process.pid, set(stack.partition.engine))
    with Target.opened(stack.data_plane.address, workload) as target, watch.running():
        with FetchLoop(target, workload.raw_bytes).running():
            stack.engine.serve(LOAD, fetched=True)
            wait_for(lambda: watch.looks > 1000)
    return watch.strays


def test_no_thread_of_the_data_plane_may_or_does_run_on_the_engines_cores(stack: Stack, workload: Workload) -> None:
    assert strays(stack, workload) == set()


def test_a_data_plane_that_is_not_confined_is_caught(stack: Stack, workload: Workload) -> None:
    """The test above can fail: this is what it sees of a data plane that takes what it is given."""
    found = strays(stack, workload, "--cores", "auto")
    assert {(how, core) for _, how, core in found} >= {("may run", core) for core in stack.partition.engine}
    assert any(how == "ran" for _, how, _ in found)
    assert {name for name, _, _ in found} >= {"ss-net-0", "ss-decomp-0"}


def test_decoding_moves_into_the_engine_and_the_network_stays_where_it_is(stack: Stack) -> None:
    stack.restart_data_plane()
    plane, engine = stack.data_plane.process.pid, set(stack.partition.engine)
    moved, back = Watch(plane, engine), Watch(plane, engine)
    with stack.decoding_in_engine(), moved.running():
        stack.engine.serve(LOAD, fetched=True)
        wait_for(lambda: moved.looks > 1000)
    with back.running():
        stack.engine.serve(LOAD, fetched=True)
        wait_for(lambda: back.looks > 1000)
    assert {name for name, how, _ in moved.strays if how == "may run"} == {"ss-decomp-0"}
    assert back.strays == set()


def test_the_engine_and_the_plugin_stay_on_the_engines_cores(stack: Stack) -> None:
    watch = Watch(stack.engine.process.pid, set(stack.partition.data_plane))
    with watch.running():
        stack.engine.serve(LOAD, fetched=True)
    assert watch.strays == set()


def _cpu_s(pid: int, tasks: set[int] | None = None) -> float:
    """CPU seconds of a process's threads so far, of some or of all."""
    folder = Path(f"/proc/{pid}/task")
    numbers = {int(task.name) for task in folder.iterdir()} if tasks is None else tasks
    return sum(int((folder / str(number) / "schedstat").read_text().split()[0]) for number in numbers) / 1e9


def _pipeline_threads(pid: int) -> set[str]:
    """Return the names of a process's threads that the C core has started."""
    names = {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}
    return {name for name in names if name.startswith("ss-")}


def test_the_engine_decompresses_nothing(stack: Stack, workload: Workload) -> None:
    stack.restart_data_plane()
    engine, plane = stack.engine.process.pid, stack.data_plane.process.pid
    assert not _pipeline_threads(engine), "the C core guards the engine's memory, and decodes nothing there"
    assert _pipeline_threads(plane), "that is where they would be seen"
    threads = {name: number for name, number in stack.engine.ask("threads").items() if name.startswith("shadowserve-")}
    assert {name.split("-")[1].rstrip("_0123456789") for name in threads} == {"fetch", "lookup", "queue", "store"}
    # The fetching thread copies what has arrived into the engine's blocks. The others have next to nothing to do.
    others = {number for name, number in threads.items() if not name.startswith("shadowserve-fetch")}
    stack.engine.serve(LOAD, fetched=True)  # which finds the data plane again
    shares = []
    for _ in range(5):
        before = _cpu_s(engine, others), _cpu_s(plane)
        stack.engine.serve(LOAD, fetched=True)
        shares.append((_cpu_s(engine, others) - before[0]) / (_cpu_s(plane) - before[1]))
    # A serving takes a few hundredths of a second: what the interpreter does on whichever thread is at hand, like
    # collecting garbage, may be most of one serving's share, but not of most servings'.
    assert median(shares) < 0.25, shares
