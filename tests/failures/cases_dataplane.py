"""The whole way: host's client, data plane, storage; each of them lost."""

import contextlib
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Iterator

import images
from callers import Host, Prompt
from cases import Context, case
from machine import wait_for
from outcomes import Outcome, Tally

CHUNKS = 6


def prompts_of(context: Context, count: int = 5) -> list[Prompt]:
    return [Prompt(f"{context.seed}/{number}", CHUNKS) for number in range(count)]


class Work:
    """Hosts that store and fetch at random, and know how much of each prompt was acknowledged."""

    def __init__(self, context: Context, address: str, prompts: list[Prompt], hosts: int = 2) -> None:
        self.losable = ""
        self.storing = True
        self.stored = {id(prompt): 0 for prompt in prompts}
        self._context, self.prompts = context, prompts
        self._hosts = [context.host(address) for _ in range(hosts)]
        self._stopped = threading.Event()

    def step(self, host: Host, prompt: Prompt, luck: float) -> None:
        if self.storing and luck < 0.3:
            # What was acknowledged once stays: records are immutable.
            self.stored[id(prompt)] = max(self.stored[id(prompt)], host.store(prompt))
        else:
            host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        def work(number: int) -> None:
            own = self.prompts[number :: len(self._hosts)]
            chance = random.Random(f"{self._context.seed}/{number}")
            while not self._stopped.is_set():
                self.step(self._hosts[number], chance.choice(own), chance.random())

        self._stopped.clear()
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(self._hosts))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(60)
                if thread.is_alive():
                    self._context.tally.note(Outcome.HANG, "a host's thread does not end")

    def verify(self, host: Host) -> None:
        for prompt in self.prompts:
            host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)


@case(
    "server SIGKILL",
    "while hosts store and fetch through a data plane; restarted",
    engines=("memory", "pool"),
    repetitions=2,
    short=("pool",),
)
def storage_killed_under_hosts(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address, prompts_of(context))
    with work.running():
        context.pause(0.4, 1.0)
        if context.engine == "memory":
            work.losable = "the engine memory ends with its process"
        storage.kill()
        context.pause(0.1, 0.3)
        storage.start()
        context.pause(0.6, 1.0)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


def await_storage(context: Context, address: str) -> None:
    """Wait until a data plane has found its storage again."""
    quiet = Host(address, Tally())
    probe = Prompt(f"{context.seed}/probe", 1)
    try:
        wait_for(lambda: quiet.store(probe) == 1)
    finally:
        quiet.close()


@case("daemon loss", "SIGKILL while hosts store and fetch; restarted", engines=("memory", "pool"), repetitions=2)
def daemon_killed(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address, prompts_of(context))
    with work.running():
        for _ in range(2):
            context.pause(0.3, 0.8)
            plane.kill()
            context.pause(0.1, 0.3)
            plane.start()
        context.pause(0.5, 0.8)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


@case("daemon loss", "SIGSTOP for three seconds while hosts store and fetch", engines=("memory",), repetitions=1)
def daemon_frozen(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address, prompts_of(context))
    with work.running():
        context.pause(0.3, 0.6)
        assert plane.process is not None
        plane.process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        plane.process.send_signal(signal.SIGCONT)
        context.pause(0.3, 0.6)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


def _be_a_host(address: str, seed: int) -> None:
    """Store and fetch until killed."""
    tally = Tally()
    host = Host(address, tally)
    prompts = [Prompt(f"{seed}/{number}", CHUNKS) for number in range(5)]
    while True:
        for prompt in prompts:
            host.store(prompt)
            host.fetch(prompt)


@case(
    "host loss",
    "a host's process is killed while it stores and fetches; another host goes on, and finds sound chunks or none",
    engines=("memory", "pool"),
    repetitions=2,
    short=("memory",),
)
def host_killed(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port, hosts_max=8)
    prompts = prompts_of(context)
    other = context.host(plane.address)
    spawn = multiprocessing.get_context("spawn")
    for _ in range(2):
        process = spawn.Process(target=_be_a_host, args=(plane.address, context.seed), daemon=True)
        process.start()
        ends = time.monotonic() + 20
        while storage.stored() == 0 and time.monotonic() < ends:
            time.sleep(0.02)
        context.pause(0.0, 0.5)
        process.kill()
        process.join()
        for prompt in prompts:
            other.fetch(prompt)
    for prompt in prompts:
        assert other.store(prompt) == CHUNKS
        other.fetch(prompt, stored=CHUNKS)


@case(
    "half-open TCP",
    "between data plane and storage, for three seconds, while hosts store and fetch",
    engines=("memory", "pool"),
    repetitions=2,
)
def half_open_under_hosts(context: Context) -> None:
    storage = context.storage()
    proxy = context.proxy(storage.port)
    plane = context.data_plane(proxy.port, command_timeout=1.0)
    work = Work(context, plane.address, prompts_of(context))
    with work.running():
        context.pause(0.3, 0.6)
        proxy.silent = True
        time.sleep(3)
        proxy.silent = False
        context.pause(0.3, 0.6)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


@case(
    "bit rot on disk",
    "a bit of each of twelve records on the devices, while hosts fetch through a data plane",
    engines=("pool",),
    repetitions=2,
)
def rotten_under_hosts(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address, prompts_of(context))
    host = context.host(plane.address)
    for prompt in prompts_of(context):
        assert host.store(prompt) == CHUNKS
    assert storage.stop()
    for chosen in context.chance.sample(storage.objects(), 12):
        images.rot(chosen, context.chance)
    storage.start()
    await_storage(context, plane.address)
    work.losable = "damaged on its device"
    work.verify(host)
    with work.running():
        context.pause(0.5, 0.8)
    work.losable = ""
    for prompt in prompts_of(context):
        assert host.store(prompt) == CHUNKS
        host.fetch(prompt, stored=CHUNKS)
