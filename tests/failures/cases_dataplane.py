"""Hosts over a data plane, its storage server and its local tiers: each fails, also during prefetches."""

import contextlib
import errno
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import faults
import grpc
from callers import SHAPE, Host, Prompt
from cases import ENGINES, MEMORY, POOL, Context, add, case
from machine import wait_for
from nodes import DataPlane, tiers
from outcomes import Tally

from host_control.client import DataPlaneClient
from host_control.waiting import WaitingQueue
from shadowserve.proto import dataplane_pb2 as pb

CHUNKS = 6
_PROMPTS = 10


def prompts_of(context: Context, count: int = 5) -> list[Prompt]:
    return [Prompt(f"{context.seed}/{number}", CHUNKS) for number in range(count)]


class Work:
    """Hosts that store and fetch at random, and count the acknowledged chunks of each prompt.

    With ``queued`` an engine meanwhile sends its queue, which has these prompts and others, for prefetches.
    """

    def __init__(
        self, context: Context, plane: DataPlane, prompts: list[Prompt] | None = None, *, queued: bool = False
    ) -> None:
        self.losable = ""
        self.storing = True
        self._queued = queued
        self.prompts = prompts_of(context) if prompts is None else prompts
        self.stored = {id(prompt): 0 for prompt in self.prompts}
        self._context, self.plane = context, plane
        self._hosts = [context.host(plane.address) for _ in range(2)]
        self.host = context.host(plane.address)

    def fill(self) -> None:
        self.host.store_whole(self.prompts)
        self.stored = dict.fromkeys(self.stored, CHUNKS)

    def step(self, host: Host, prompt: Prompt, luck: float) -> None:
        if self.storing and luck < 0.3:
            # An acknowledged chunk stays: records are immutable.
            self.stored[id(prompt)] = max(self.stored[id(prompt)], host.store(prompt))
        else:
            host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:

        def working(number: int, host: Host) -> Callable[[], None]:
            own = self.prompts[number :: len(self._hosts)]
            chance = random.Random(f"{self._context.seed}/{number}")
            return lambda: self.step(host, chance.choice(own), chance.random())

        works = [working(*pair) for pair in enumerate(self._hosts)]
        with self._queue() if self._queued else contextlib.nullcontext(), self._context.beside(*works):
            yield

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        client = DataPlaneClient(self.plane.address, backoff=0.02, backoff_max_s=0.2)
        keys = {f"{prompt.keys[0].hex()} {turn}": prompt.keys for turn in range(40) for prompt in self.prompts}
        queue = WaitingQueue(lambda name: {client: [(SHAPE.namespace, keys[name])]}, [client])
        names = itertools.cycle(self._context.chance.sample(list(keys), len(keys)))
        waits: list[str] = []

        def tell() -> None:
            time.sleep(0.02)
            if client.peer is None:
                client.wait_ready(0.2)
            waits.append(next(names))
            queue.enqueue(waits[-1])
            if len(waits) > 6:
                begun = waits.pop(0)
                queue.begun(begun)
                queue.ended(begun)

        with contextlib.closing(client), contextlib.closing(queue), self._context.beside(tell):
            yield

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Run the hosts until the context ends; then check as soon as all programs are connected again."""
        with self.running():
            yield
        self.verify_again()

    def verify(self) -> None:
        """Check that all acknowledged chunks are present."""
        for prompt in self.prompts:
            self.host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)

    def verify_again(self) -> None:
        """Wait until the data plane reaches its storage again. Then check that all acknowledged chunks are present."""
        with contextlib.closing(Host(self.plane.address, Tally())) as quiet:
            quiet.store_whole([Prompt(f"{self._context.seed}/probe", 1)])
        self.verify()


@case("server SIGKILL", ENGINES, short=POOL)
def storage_killed_under_hosts(context: Context) -> None:
    """While hosts store and fetch through a data plane; restarted."""
    storage = context.storage()
    work = Work(context, context.data_plane(storage.port))
    with work.surviving():
        context.pause(0.4, 1.0)
        if context.engine == "memory":
            work.losable = "the engine memory ends with its process"
        context.kills(storage, 1, (0.0, 0.0), (0.1, 0.3))
        context.pause(0.6, 1.0)


@case("daemon loss", ENGINES)
def daemon_killed(context: Context) -> None:
    """SIGKILL while hosts store and fetch; restarted."""
    work = Work(context, context.data_plane(context.storage().port))
    with work.surviving():
        context.kills(work.plane, 2, (0.3, 0.8), (0.1, 0.3))
        context.pause(0.5, 0.8)


@case("daemon loss", MEMORY, repetitions=1)
def daemon_frozen(context: Context) -> None:
    """SIGSTOP for three seconds while hosts store and fetch."""
    work = Work(context, context.data_plane(context.storage().port))
    with work.surviving():
        context.pause(0.3, 0.6)
        with work.plane.frozen():
            time.sleep(3.5)
        context.pause(0.3, 0.6)


def _be_a_host(address: str, seed: int) -> None:
    """Store and fetch until a signal kills this process."""
    host = Host(address, Tally())
    prompts = [Prompt(f"{seed}/{number}", CHUNKS) for number in range(5)]
    while True:
        for prompt in prompts:
            host.store(prompt)
            host.fetch(prompt)


@case("host loss", ENGINES, short=MEMORY)
def host_killed(context: Context) -> None:
    """A host's process is killed while it stores and fetches; another host goes on, and finds sound chunks or none."""
    storage = context.storage()
    plane = context.data_plane(storage.port, hosts_max=8)
    prompts = prompts_of(context)
    other = context.host(plane.address)
    spawn = multiprocessing.get_context("spawn")
    for _ in range(2):
        process = spawn.Process(target=_be_a_host, args=(plane.address, context.seed), daemon=True)
        process.start()
        wait_for(storage.stored)
        context.pause(0.0, 0.5)
        process.kill()
        process.join()
        for prompt in prompts:
            other.fetch(prompt)
    other.store_whole(prompts)
    for prompt in prompts:
        other.fetch(prompt, stored=CHUNKS)


@case("half-open TCP", ENGINES)
def half_open_under_hosts(context: Context) -> None:
    """Between data plane and storage, for three seconds, while hosts store and fetch."""
    proxy = context.proxy(context.storage().port)
    with Work(context, context.data_plane(proxy.port, command_timeout_s=1.0)).surviving():
        context.pause(0.3, 0.6)
        with proxy.silenced():
            time.sleep(3)
        context.pause(0.3, 0.6)


@case("bit rot on disk", POOL)
def rotten_under_hosts(context: Context) -> None:
    """A bit of each of twelve records on the devices, while hosts fetch through a data plane."""
    storage = context.storage()
    work = Work(context, context.data_plane(storage.port))
    work.fill()
    assert storage.stop()
    faults.rot_some(storage.objects(), 12, context.chance)
    storage.start()
    work.losable = "damaged on its device"
    work.verify_again()
    with work.running():
        context.pause(0.5, 0.8)
    work.losable = ""
    work.fill()
    work.verify()


@case("bit rot on the wire", ENGINES, short=MEMORY)
def flips_under_a_data_plane(context: Context) -> None:
    """Between data plane and storage: the host gets sound chunks or fewer of them."""
    storage = context.storage()
    prompts = prompts_of(context, 4)
    writer = context.host(context.data_plane(storage.port).address)
    writer.store_whole(prompts)
    proxy = context.proxy(storage.port)
    plane = context.data_plane(proxy.port, command_timeout_s=0.7, delete_corrupt="false")
    host = context.host(plane.address, deadline_s=2)
    proxy.flip_one_in = 8
    for _ in range(12):
        host.fetch(context.chance.choice(prompts), stored=CHUNKS, losable="bits flip on the wire")
    assert proxy.flipped
    for prompt in prompts:
        writer.fetch(prompt, stored=CHUNKS)


# ---- Local tiers


class _Tiered(Work):
    """Hosts over a data plane whose tiers have all prompts in a file with ``faults``, few of them in memory."""

    def __init__(
        self,
        context: Context,
        prompts: int = _PROMPTS,
        *,
        memory: str = "2MiB",
        size: str = "32MiB",
        queued: bool = False,
    ) -> None:
        self.disk = context.folder / "tier" / "disk"
        self.faults = context.faults(self.disk.parent)
        own = tiers(memory, self.disk, size, access="threads")
        plane = context.data_plane(context.storage(memory_bytes=64 << 20).port, self.faults, tiers=own)
        super().__init__(context, plane, prompts_of(context, prompts), queued=queued)
        self.fill()


def _reads_fail(context: Context, *, queued: bool) -> None:
    work = _Tiered(context, queued=queued)
    work.faults.set(read_error=errno.EIO, one_in=3)
    with work.running():
        work.verify()
        context.pause(0.3, 0.6)
        wait_for(lambda: work.faults.met)
    work.faults.clear()
    work.verify()


@case("device I/O error", MEMORY)
def tier_writes_fail(context: Context) -> None:
    """A data plane's tier cannot be written any more while hosts store and fetch: storage takes it all."""
    work = _Tiered(context)
    work.faults.set(write_error=errno.EIO, flush_error=errno.EIO)
    more = Work(context, work.plane, prompts_of(context, 2 * _PROMPTS)[_PROMPTS:])
    with work.running():
        more.fill()
        wait_for(lambda: work.faults.met)
        context.pause(0.4, 0.8)
    work.verify()
    more.verify()


def _tiers_killed(context: Context, *, queued: bool) -> None:
    work = _Tiered(context, queued=queued)
    with work.surviving():
        context.kills(work.plane, 3, (0.2, 0.6))
        context.pause(0.3, 0.6)


@case("bit rot on disk", MEMORY)
def tier_rotten(context: Context) -> None:
    """A bit of each of twenty records on a data plane's tier: storage has them."""
    work = _Tiered(context)
    assert work.plane.stop()
    faults.rot_some(faults.objects([work.disk]), 20, context.chance)
    work.plane.start()
    work.verify_again()
    _used_for(context, work, 0.4, 0.8)


def _used_for(context: Context, work: Work, least_s: float, most_s: float) -> None:
    with work.running():
        context.pause(least_s, most_s)
    work.verify()


def _full(context: Context) -> None:
    _used_for(context, _Tiered(context, 4 * _PROMPTS, size="8MiB"), 0.6, 1.0)


def _memory_short(context: Context) -> None:
    _used_for(context, _Tiered(context, 3 * _PROMPTS, memory="1MiB", queued=True), 0.8, 1.2)


for _name, _fault, _what, _run in (
    ("tier_reads_fail", "device I/O error", "One read in three of its device fails with EIO",
        partial(_reads_fail, queued=False)),
    ("prefetching_device_fails", "device I/O error", "One read in three fails while it prefetches for a queue",
        partial(_reads_fail, queued=True)),
    ("tier_daemon_killed", "daemon loss", "SIGKILL of a data plane with a tier; restarted on the same file",
        partial(_tiers_killed, queued=False)),
    ("prefetching_daemon_killed", "daemon loss", "SIGKILL while it prefetches for a queue; restarted on the same file",
        partial(_tiers_killed, queued=True)),
    ("tier_full", "disk full", "More is stored than its tier has room for", _full),
    ("prefetching_memory_short", "memory taken back", "Prefetched records give way to what is used", _memory_short),
):  # fmt: skip
    _short = MEMORY if _name == "prefetching_device_fails" else ()
    add(_name, _fault, f"{_what}, while hosts store and fetch.", MEMORY, _run, short=_short)


@case("silent device", MEMORY)
def tier_silent(context: Context) -> None:
    """Reads of a data plane's tier stand still for some seconds while hosts store and fetch; then they come."""
    work = _Tiered(context)
    work.faults.set(hold=1)
    with work.running():
        wait_for(lambda: work.faults.held)
        context.pause(2.0, 4.0)
        work.faults.clear()
        context.pause(0.3, 0.6)
    work.verify()


@case("false publications", MEMORY, short=MEMORY)
def wrong_prefetch_hints(context: Context) -> None:
    """Of requests that never come, out of order, twice, for keys of another engine's model, while hosts work."""
    work, chance = _Tiered(context), context.chance
    with contextlib.closing(DataPlaneClient(work.plane.address)) as client:
        client.connect(5, SHAPE)
        with work.running():
            for number in range(200):
                prompts = chance.sample(work.prompts, 3)
                namespace = chance.choice([SHAPE.namespace, chance.randbytes(32)])
                request = pb.ExpectRequest(
                    queue=b"%d" % chance.randrange(3),
                    number=chance.choice([number, chance.randrange(1, 2**40)]),
                    whole=chance.random() < 0.5,
                    order=chance.choices(range(10), k=5),
                    gone=chance.choices(range(10), k=2),
                    lasts_ms=chance.choice([1, 60_000]),
                    arrivals=[
                        pb.Arrival(
                            request=chance.randrange(10),
                            chains=[pb.KeyChain(keys=chance.sample(prompt.keys, 4), namespace=namespace)],
                        )
                        for prompt in prompts
                    ],
                )
                answer = client.expect(request)
                assert answer is not None
                with contextlib.suppress(grpc.RpcError):  # the data plane refuses invalid queues
                    answer.result(timeout=60)
        work.verify()


@case("server SIGKILL", POOL)
def prefetching_storage_killed(context: Context) -> None:
    """While a data plane with little memory brings records from it ahead of their fetches; restarted."""
    storage = context.storage()
    plane = context.data_plane(storage.port, tiers=tiers("1MiB"))
    work = Work(context, plane, prompts_of(context, _PROMPTS), queued=True)
    work.fill()
    with work.surviving():
        context.kills(storage, 2, (0.3, 0.6), (0.1, 0.3))
        context.pause(0.4, 0.8)
