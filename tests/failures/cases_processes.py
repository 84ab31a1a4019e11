"""Processes that end or stop: killed, restarted, frozen."""

import time

from cases import KEYS, Context, case
from nodes import ENGINES


@case(
    "server SIGKILL",
    "at a random moment while three clients store, fetch and remove; restarted on the same devices",
    engines=ENGINES,
    repetitions=4,
    short=("pool",),
)
def killed(context: Context) -> None:
    storage = context.storage()
    for _ in range(2):
        with context.load(storage.port):
            context.pause(0.1, 1.0)
            storage.kill()
        context.restart(storage)
        context.verify(storage)


@case(
    "server SIGKILL",
    "while snapshots are written all the time: short values fill a small log",
    engines=("pool",),
    repetitions=3,
)
def killed_in_a_snapshot(context: Context) -> None:
    storage = context.storage(devices=1)
    context.expected.sizes = (9, 60, 300)
    for _ in range(2):
        with context.load(storage.port, threads=4, keys=[f"small {number}" for number in range(200)]):
            context.pause(0.5, 1.5)
            storage.kill()
        context.restart(storage)
        context.verify(storage)


@case("server SIGKILL", "while it recovers from the SIGKILL before", engines=("pool",), repetitions=2)
def killed_in_recovery(context: Context) -> None:
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.3, 0.8)
        storage.kill()
    for _ in range(3):
        storage.start_only()
        context.pause(0.3, 1.2)
        storage.kill()
    context.restart(storage)
    context.verify(storage)


@case(
    "restart under load",
    "SIGTERM while three clients store, fetch and remove, who go on when it is back",
    engines=ENGINES,
    repetitions=2,
)
def restarted(context: Context) -> None:
    storage = context.storage()
    with context.load(storage.port):
        context.pause(0.2, 0.6)
        assert storage.stop(), "the server does not stop on SIGTERM"
        if context.engine == "memory":
            context.expected.losable = "the engine memory ends with its process"
        storage.start()
        context.pause(0.2, 0.6)
    context.verify(storage)


@case("server frozen", "SIGSTOP for a second under load, then SIGCONT", engines=("memory", "pool"), repetitions=2)
def frozen(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    with context.load(storage.port, deadline_s=0.5, silence="the server stands still"):
        context.pause(0.1, 0.3)
        with storage.frozen():
            time.sleep(1.2)
        context.pause(0.1, 0.3)
    context.verify(storage, KEYS)
