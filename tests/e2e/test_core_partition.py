"""No thread of the data plane runs on the engine's cores while KV is fetched at full speed.

Real vLLM runs on one half of the cores, the data plane on the other. ``bench interference`` measures the effects that
remain: shared memory bandwidth and power.
"""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pytest
from machine import wait_for
from preloaded import Preloaded

from shadowserve.cores import on_cores
from shadowserve_tools.bench.parts.loads import FetchLoop
from shadowserve_tools.bench.parts.serving import Load, Model, Stack
from shadowserve_tools.bench.parts.target import Target
from shadowserve_tools.bench.parts.workload import Workload, llama_8b, put

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

EVERYWHERE = os.sched_getaffinity(0)
MODEL = Model(layers=8, hidden=64, heads=16, head_size=128)
LOAD = Load(chunks=2, documents=2, output=8, requests=8, running_max=4)


class Watch:
    """Samples all threads of a process: their allowed cores, and the core on which each last ran."""

    def __init__(self, pid: int, forbidden: set[int]) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._forbidden = forbidden
        self._ran: dict[str, str] = {}
        self.strays: set[tuple[str, str, int]] = set()  # thread, "may run" or "ran", and forbidden core
        self.looks = 0  # number of samples of single threads

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
            except (ProcessLookupError, FileNotFoundError):  # the thread has ended
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            core = int(rest.split()[36])  # field 39: the core on which it last ran
            self.strays |= {(name, "may run", one) for one in allowed & self._forbidden}
            # A thread that has not run since it was confined still has its old core.
            if self._ran.setdefault(task.name, ran) != ran and core in self._forbidden:
                self.strays.add((name, "ran", core))
            self._ran[task.name] = ran
            self.looks += 1


@pytest.fixture(scope="module")
def workload() -> Workload:
    return llama_8b(4, layers=4)


@pytest.fixture(scope="module")
def stack(workload: Workload) -> Iterator[Stack]:
    with ExitStack() as running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", Preloaded)
            stack = Stack(running, MODEL, LOAD)
        put(workload, stack.storage.address)
        yield stack


def strays(stack: Stack, workload: Workload, *flags: str) -> set[tuple[str, str, int]]:
    """Start the data plane from a process that can use all cores; return threads on the engine's cores in fetches."""
    with on_cores(EVERYWHERE):
        stack.restart_data_plane(*flags)
    watch = Watch(stack.data_plane.process.pid, set(stack.partition.engine))
    with Target.opened(stack.data_plane.address, workload) as target, watch.running():
        with FetchLoop(target, workload.raw_bytes).running():
            stack.engine.serve(LOAD, fetched=True)
            wait_for(lambda: watch.looks > 1000)
    return watch.strays


def test_the_data_plane_does_not_use_the_engines_cores(stack: Stack, workload: Workload) -> None:
    assert strays(stack, workload) == set()


def test_an_unconfined_data_plane_is_detected(stack: Stack, workload: Workload) -> None:
    """The control for the test above."""
    found = strays(stack, workload, "--cores", "auto")
    assert {(how, core) for _, how, core in found} >= {("may run", core) for core in stack.partition.engine}
    assert any(how == "ran" for _, how, _ in found)
    assert {name for name, _, _ in found} >= {"ss-net-0", "ss-decomp-0"}


def test_decoding_in_the_engine_moves_only_the_decompression_thread(stack: Stack) -> None:
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
    """Return the CPU seconds of a process's threads, or of some of them."""
    folder = Path(f"/proc/{pid}/task")
    numbers = {int(task.name) for task in folder.iterdir()} if tasks is None else tasks
    return sum(int((folder / str(number) / "schedstat").read_text().split()[0]) for number in numbers) / 1e9


def _pipeline_threads(pid: int) -> set[str]:
    """Return the names of the threads that the C core has started in a process."""
    names = {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}
    return {name for name in names if name.startswith("ss-")}


def test_the_engine_decompresses_nothing(stack: Stack, workload: Workload) -> None:
    stack.restart_data_plane()
    engine, plane = stack.engine.process.pid, stack.data_plane.process.pid
    assert not _pipeline_threads(engine), "the C core must not decode in the engine"
    assert _pipeline_threads(plane), "control: the data plane has such threads"
    threads = {name: number for name, number in stack.engine.call("threads").items() if name.startswith("shadowserve-")}
    assert {name.split("-")[1].rstrip("_0123456789") for name in threads} == {"fetch", "lookup", "queue", "store"}
    # The fetching thread scatters chunks. The other threads do almost no work.
    others = {number for name, number in threads.items() if not name.startswith("shadowserve-fetch")}
    stack.engine.serve(LOAD, fetched=True)  # it connects to the data plane again
    shares = []
    for _ in range(5):
        before = _cpu_s(engine, others), _cpu_s(plane)
        stack.engine.serve(LOAD, fetched=True)
        shares.append((_cpu_s(engine, others) - before[0]) / (_cpu_s(plane) - before[1]))
    # A serving takes a few hundredths of a second, so the garbage collector may dominate one serving, but not most.
    assert median(shares) < 0.25, shares
