"""Device loads into an engine's pages (host.pages): devices fail, are full, damaged, foreign, or do not answer.

The data plane has only its local tiers, so a missing chunk can have no other cause than the fault.
"""

import contextlib
import errno
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import faults
from callers import Prompt
from cases import POOL, Context, T, case
from machine import wait_for
from nodes import tiers
from paged import CHUNKS, PagedEngine, Shape

_PROMPTS = 8
_SHAPE = Shape()
_SILENT_S = 1.0
"""Deadline of loads that a device, or the daemon, does not answer."""


class _Served:
    """A data plane with a device, an engine with prompts on that device, and faults of the device if ``faulty``."""

    def __init__(
        self,
        context: Context,
        *,
        place: str = "disk",
        size: str = "32MiB",
        deadline_s: float = 3.0,
        faulty: bool = True,
    ) -> None:
        self.context, self.device = context, context.folder / place / "one"
        self.faults = context.faults(self.device.parent)
        own = tiers("4MiB", self.device, size, access="threads" if faulty else "auto")
        self.plane = context.data_plane(0, self.faults if faulty else None, tiers=own)
        self.prompts = [_SHAPE.prompt(f"{context.seed}/{place}/{number}") for number in range(_PROMPTS)]
        self.engine = self.engine_with(self.prompts, _SHAPE, deadline_s=deadline_s)

    def engine_with(self, prompts: Sequence[Prompt], shape: Shape, *, deadline_s: float = 3.0) -> PagedEngine:
        """Start an engine, let it store prompts, and wait until devices have them."""
        seed = f"{self.context.seed}/{shape.model.model}"
        engine = PagedEngine(self.plane.address, self.context.tally, seed, shape, deadline_s=deadline_s)
        self.context.enter(contextlib.closing(engine))
        engine.stores.store_whole(prompts)
        await_devices(engine, prompts)
        return engine

    def some(self, count: int = 3) -> list[Prompt]:
        return self.context.chance.sample(self.prompts, count)

    def load_for(self, seconds: float, losable: str) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.engine.load(self.some(), losable=losable)

    def load_held(self, then: Callable[[], object], losable: str = "") -> None:
        """Load prompts. Call ``then`` once, while the device does not answer a running read; then it answers."""
        done: list[bool] = []

        def meanwhile() -> None:
            if self.faults.held and not done:
                done.append(True)
                then()
                self.faults.set(hold=0)

        self.faults.set(hold=1)
        self.engine.load(self.some(), losable=losable, meanwhile=meanwhile)

    def verify(self, losable: str = "") -> None:
        for pair in _pairs(self.prompts):
            self.engine.load(pair, losable=losable)

    def repair(self, losable: str = "") -> None:
        """Store all prompts again, and check them all. With latent damage, a read meets all of the damage first."""
        for _ in range(CHUNKS + 1 if losable else 1):
            self.engine.stores.store_whole(self.prompts)
            self.verify(losable)
        self.verify()


def _pairs(each: Sequence[T]) -> Iterator[tuple[T, T]]:
    return zip(each[::2], each[1::2], strict=True)


def await_devices(engine: PagedEngine, prompts: Sequence[Prompt]) -> None:
    """Wait until devices load the prompts directly: new records reach them with a short delay."""

    def straight(prompt: Prompt) -> bool:
        before = engine.straight_bytes
        engine.load([prompt])
        return engine.straight_bytes - before == CHUNKS * engine.shape.chunk.raw_bytes

    for prompt in prompts:
        wait_for(lambda prompt=prompt: straight(prompt))


# ---- The device


@case("device I/O error", POOL, short=POOL)
def pages_reads_fail(context: Context) -> None:
    """One read in three into an engine's pages fails with EIO; then all is stored again."""
    served = _Served(context)
    served.faults.set(read_error=errno.EIO, one_in=3)
    served.load_for(0.5, "its device fails to read")
    assert served.faults.met
    served.faults.clear()
    served.verify("its device has failed to read")
    served.repair()


@case("device gone", POOL)
def pages_device_gone(context: Context) -> None:
    """In the middle of reads into an engine's pages: every operation fails with ENODEV; then a restart with it."""
    served = _Served(context)

    gone = dict.fromkeys(("read_error", "write_error", "flush_error"), errno.ENODEV)
    served.load_held(lambda: served.faults.set(**gone), "its device is gone")
    served.verify("its device is gone")
    assert served.faults.met
    served.plane.kill()
    served.faults.clear()
    served.plane.start()
    served.verify("its device was gone")
    served.repair()


@case("disk full", POOL)
def pages_device_full(context: Context) -> None:
    """More pages are stored than the device has room for, while others are read into an engine's pages."""
    served = _Served(context, size="12MiB", faulty=False)
    more = (_SHAPE.prompt(f"{context.seed}/more/{number}") for number in itertools.count())
    host = context.host(served.plane.address, shape=_SHAPE.chunk, plain=True)
    kept: list[Prompt] = []

    def store() -> None:
        kept.append(next(more))
        host.store(kept[-1])

    with context.beside(store):
        served.load_for(1.0, "evicted to make room")
    served.engine.load(kept[-2:], losable="evicted to make room")
    served.verify("evicted to make room")
    served.repair()


@case("disk full", POOL)
def pages_no_space(context: Context) -> None:
    """Every write of pages fails with ENOSPC while others are read; then a restart."""
    served = _Served(context)
    more = [_SHAPE.prompt(f"{context.seed}/more/{number}") for number in range(_PROMPTS)]
    served.faults.set(write_error=errno.ENOSPC)
    for prompt in more:
        served.engine.stores.store(prompt)
        served.engine.load([prompt], losable="it could not be written")
        served.engine.load(served.some(1), losable="its device could not be written")
    assert served.faults.met
    served.verify("its device could not be written")
    assert served.plane.stop()
    served.faults.clear()
    served.plane.start()
    served.verify("its device could not be written")
    served.repair()


@case("bit rot on disk", POOL, repetitions=3, short=POOL)
def pages_rotten(context: Context) -> None:
    """A bit of each of twenty records of pages, while they are read into an engine's pages."""
    served = _Served(context, faulty=False)
    for chosen in context.chance.sample(list(faults.objects([served.device])), 20):
        faults.rot(chosen, context.chance)
        served.engine.load(served.some(2), losable="damaged on its device")
    served.repair("damaged on its device")


@case("misdirected read", POOL)
def pages_misdirected(context: Context) -> None:
    """Twelve records of pages lie in each other's places, while an engine reads them into its pages."""
    served = _Served(context, faulty=False)
    stored = list(faults.objects([served.device]))
    for one, other in _pairs(context.chance.sample(stored, 12)):
        faults.exchange(one, other)
        served.engine.load(served.some(2), losable="another record is in its place")
    served.repair("another record is in its place")


@case("device of another machine", POOL)
def pages_of_another_machine(context: Context) -> None:
    """Between two runs it is exchanged for one on which another machine keeps pages of the same model; then it is
    back."""
    served, other = (_Served(context, place=place, faulty=False) for place in ("disk", "another"))

    def exchange() -> None:
        for each in (served.plane, other.plane):
            assert each.stop()
        aside = other.device.with_name("aside")
        served.device.rename(aside)
        other.device.rename(served.device)
        aside.rename(other.device)
        for each in (served.plane, other.plane):
            each.start()

    exchange()
    served.verify("its device is another machine's")
    for pair in _pairs(other.prompts):
        served.engine.load(pair)
    exchange()
    served.verify()


@case("silent device", POOL, repetitions=3, short=POOL)
def pages_device_silent(context: Context) -> None:
    """Reads into an engine's pages stand still beyond the load's deadline; its blocks are given away; then they
    come."""
    served = _Served(context, deadline_s=_SILENT_S)
    before = served.engine.pages.segment
    served.faults.set(hold=1)
    served.engine.load(served.some(), losable="its device does not answer")
    assert served.faults.held and served.engine.pages.segment is not before, "the memory must be replaced"
    served.faults.set(hold=0)
    wait_for(lambda: not served.faults.held)
    context.pause(0.1, 0.4)
    served.engine.check()
    served.repair()


# ---- The engine, and the daemon


@case("blocks given away", POOL, repetitions=3, short=POOL)
def pages_given_away(context: Context) -> None:
    """Requests are aborted, and their blocks given to others, while a device reads into them."""
    served = _Served(context)
    for _ in range(3):
        aborted: list[float] = []
        served.faults.set(hold=1)

        def let_go(aborted: list[float] = aborted) -> None:
            if aborted and time.monotonic() > aborted[0]:
                served.faults.set(hold=0)

        def abort(aborted: list[float] = aborted) -> bool:
            if served.faults.held and not aborted:
                aborted.append(time.monotonic() + context.chance.uniform(0.05, 0.5))
            return bool(aborted)

        served.engine.load(served.some(), meanwhile=let_go, abort=abort)
        assert aborted
        served.faults.set(hold=0)
        context.pause(0.05, 0.2)
        served.engine.check()
    served.verify()


@case("daemon loss", POOL)
def pages_daemon_killed(context: Context) -> None:
    """SIGKILL in the middle of reads into an engine's pages; restarted on the same device."""
    served = _Served(context)
    for _ in range(3):
        served.load_held(served.plane.kill)
        served.faults.set(held=0)
        served.engine.check()
        served.plane.start()
        context.pause(0.0, 0.3)
        served.load_for(0.3, "")
    served.engine.stores.store_whole(served.prompts[:1])
    served.verify()
    await_devices(served.engine, served.prompts)


@case("daemon loss", POOL)
def pages_daemon_frozen(context: Context) -> None:
    """SIGSTOP in the middle of reads into an engine's pages, beyond their deadline; then it goes on."""
    served = _Served(context, deadline_s=_SILENT_S)
    served.load_held(lambda: served.plane.signal(signal.SIGSTOP))
    context.pause(0.0, 0.5)
    served.plane.signal(signal.SIGCONT)
    context.pause(0.1, 0.4)
    served.engine.check()
    served.repair()


@case("two engines on one device", POOL)
def pages_of_two_models(context: Context) -> None:
    """Of different models, whose pages one device has, each load and store while one read in five fails; each also asks
    for the other's keys."""
    served = _Served(context)
    shape = Shape("another model", layers=2, page_bytes=12288)  # with the same number of bytes per chunk
    theirs = [shape.prompt(f"{context.seed}/{number}") for number in range(_PROMPTS)]
    other = served.engine_with(theirs, shape)
    served.faults.set(read_error=errno.EIO, one_in=5)
    turns = itertools.cycle(theirs)

    def work() -> None:
        mine = next(turns)
        other.stores.store(mine)
        other.load([mine, theirs[0]], losable="its device fails to read")

    with context.beside(work):
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            (prompt,) = served.some(1)
            served.engine.stores.store(prompt)
            served.engine.load([prompt], losable="its device fails to read")
    served.faults.clear()
    served.repair()
    other.stores.store_whole(theirs)
    other.load(theirs[:4])
    for mine, its in zip(served.prompts[:2], theirs, strict=False):
        asked = _SHAPE.prompt("of no owner")
        asked.keys, asked.parents = its.keys, mine.parents
        served.engine.load([asked], losable="it is of another model")
