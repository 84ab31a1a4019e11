"""The full path of host's client, data plane and storage, with the loss of each."""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable

import images
from callers import Host, Prompt
from cases import Context, case
from machine import wait_for
from outcomes import Tally

CHUNKS = 6


def prompts_of(context: Context, count: int = 5) -> list[Prompt]:
    return [Prompt(f"{context.seed}/{number}", CHUNKS) for number in range(count)]


class Work:
    """Hosts that store and fetch at random, and count the acknowledged chunks of each prompt."""

    def __init__(self, context: Context, address: str, prompts: list[Prompt] | None = None) -> None:
        self.losable = ""
        self.storing = True
        self.prompts = prompts_of(context) if prompts is None else prompts
        self.stored = {id(prompt): 0 for prompt in self.prompts}
        self._context, self._address = context, address
        self._hosts = [context.host(address) for _ in range(2)]
        self.host = context.host(address)

    def fill(self) -> None:
        """Store all prompts."""
        self.host.store_whole(self.prompts)
        self.stored = dict.fromkeys(self.stored, CHUNKS)

    def step(self, host: Host, prompt: Prompt, luck: float) -> None:
        if self.storing and luck < 0.3:
            # An acknowledged chunk stays: records are immutable.
            self.stored[id(prompt)] = max(self.stored[id(prompt)], host.store(prompt))
        else:
            host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Run the hosts until the context ends."""

        def working(number: int, host: Host) -> Callable[[], None]:
            own = self.prompts[number :: len(self._hosts)]
            chance = random.Random(f"{self._context.seed}/{number}")
            return lambda: self.step(host, chance.choice(own), chance.random())

        return self._context.beside(*[working(*pair) for pair in enumerate(self._hosts)])

    def verify(self) -> None:
        """Check that all acknowledged chunks are present."""
        for prompt in self.prompts:
            self.host.fetch(prompt, stored=self.stored[id(prompt)], losable=self.losable)

    def verify_again(self) -> None:
        """Wait until the data plane reaches its storage again. Then check that all acknowledged chunks are present."""
        with contextlib.closing(Host(self._address, Tally())) as quiet:
            quiet.store_whole([Prompt(f"{self._context.seed}/probe", 1)])
        self.verify()


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
    work = Work(context, plane.address)
    with work.running():
        context.pause(0.4, 1.0)
        if context.engine == "memory":
            work.losable = "the engine memory ends with its process"
        storage.kill()
        context.pause(0.1, 0.3)
        storage.start()
        context.pause(0.6, 1.0)
    work.verify_again()


@case("daemon loss", "SIGKILL while hosts store and fetch; restarted", engines=("memory", "pool"), repetitions=2)
def daemon_killed(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address)
    with work.running():
        context.kills(plane, 2, (0.3, 0.8), (0.1, 0.3))
        context.pause(0.5, 0.8)
    work.verify_again()


@case("daemon loss", "SIGSTOP for three seconds while hosts store and fetch", engines=("memory",), repetitions=1)
def daemon_frozen(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address)
    with work.running():
        context.pause(0.3, 0.6)
        with plane.frozen():
            time.sleep(3.5)
        context.pause(0.3, 0.6)
    work.verify_again()


def _be_a_host(address: str, seed: int) -> None:
    """Store and fetch until a signal kills this process."""
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
        wait_for(storage.stored)
        context.pause(0.0, 0.5)
        process.kill()
        process.join()
        for prompt in prompts:
            other.fetch(prompt)
    other.store_whole(prompts)
    for prompt in prompts:
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
    plane = context.data_plane(proxy.port, command_timeout_s=1.0)
    work = Work(context, plane.address)
    with work.running():
        context.pause(0.3, 0.6)
        proxy.silent = True
        time.sleep(3)
        proxy.silent = False
        context.pause(0.3, 0.6)
    work.verify_again()


@case(
    "bit rot on disk",
    "a bit of each of twelve records on the devices, while hosts fetch through a data plane",
    engines=("pool",),
    repetitions=2,
)
def rotten_under_hosts(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port)
    work = Work(context, plane.address)
    work.fill()
    assert storage.stop()
    for chosen in context.chance.sample(storage.objects(), 12):
        images.rot(chosen, context.chance)
    storage.start()
    work.losable = "damaged on its device"
    work.verify_again()
    with work.running():
        context.pause(0.5, 0.8)
    work.losable = ""
    work.fill()
    work.verify()
