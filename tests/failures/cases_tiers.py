"""A data plane's local tiers above a storage server with all records: failing or damaged device, killed daemon.

The same faults occur during prefetch for waiting requests.
"""

import contextlib
import errno
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import images
from callers import SHAPE
from cases import Context, case
from cases_dataplane import Work, prompts_of
from faults import Faults
from machine import wait_for
from nodes import DataPlane, tiers

from host_control.client import DataPlaneClient
from host_control.waiting import WaitingQueue
from shadowserve.proto import dataplane_pb2 as pb

_PROMPTS = 10


def _filled(
    context: Context, prompts: int = _PROMPTS, memory: str = "2MiB", size: str = "32MiB", faults: Faults | None = None
) -> tuple[DataPlane, Work]:
    """Return a data plane whose tiers have prompts in a file, few of them in memory; and its clients."""
    plane = context.data_plane(
        context.storage(memory_bytes=64 << 20).port,
        faults,
        tiers=tiers(memory, _disk(context), size, access="threads"),
    )
    work = Work(context, plane.address, prompts_of(context, prompts))
    work.fill()
    return plane, work


def _disk(context: Context) -> Path:
    return context.folder / "tier" / "disk"


@case(
    "device I/O error",
    "one read in three of a data plane's tier fails with EIO while hosts store and fetch: storage has what it had",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def tier_reads_fail(context: Context) -> None:
    faults = context.faults(_disk(context).parent)
    _, work = _filled(context, faults=faults)
    faults.set(read_error=errno.EIO, one_in=3)
    with work.running():
        work.verify()
        context.pause(0.3, 0.6)
        wait_for(lambda: faults.met)
    faults.clear()
    work.verify()


@case(
    "device I/O error",
    "a data plane's tier cannot be written any more while hosts store and fetch: storage takes it all",
    engines=("memory",),
    repetitions=2,
)
def tier_writes_fail(context: Context) -> None:
    faults = context.faults(_disk(context).parent)
    plane, work = _filled(context, faults=faults)
    faults.set(write_error=errno.EIO, flush_error=errno.EIO)
    more = Work(context, plane.address, prompts_of(context, 2 * _PROMPTS)[_PROMPTS:])
    with work.running():
        more.fill()
        wait_for(lambda: faults.met)
        context.pause(0.4, 0.8)
    work.verify()
    more.verify()


@case(
    "daemon loss",
    "SIGKILL of a data plane with a tier while hosts store, fetch, and records are kept; restarted on the same file",
    engines=("memory",),
    repetitions=2,
)
def tier_daemon_killed(context: Context) -> None:
    plane, work = _filled(context)
    with work.running():
        context.kills(plane, 3, (0.2, 0.6))
        context.pause(0.3, 0.6)
    work.verify_again()


@case(
    "bit rot on disk",
    "a bit of each of twenty records on a data plane's tier: storage has them",
    engines=("memory",),
    repetitions=2,
)
def tier_rotten(context: Context) -> None:
    plane, work = _filled(context)
    assert plane.stop()
    stored = list(images.objects([_disk(context)]))
    for chosen in context.chance.sample(stored, 20):
        images.rot(chosen, context.chance)
    plane.start()
    work.verify_again()
    with work.running():
        context.pause(0.4, 0.8)
    work.verify()


@case(
    "disk full",
    "more is stored through a data plane than its tier has room for, while hosts store and fetch: storage has it all",
    engines=("memory",),
    repetitions=2,
)
def tier_full(context: Context) -> None:
    _, work = _filled(context, 4 * _PROMPTS, size="8MiB")
    with work.running():
        context.pause(0.6, 1.0)
    work.verify()


@case(
    "device that never answers",
    "reads of a data plane's tier stand still for some seconds while hosts store and fetch; then they come",
    engines=("memory",),
    repetitions=2,
)
def tier_silent(context: Context) -> None:
    faults = context.faults(_disk(context).parent)
    _, work = _filled(context, faults=faults)
    faults.set(hold=1)
    with work.running():
        wait_for(lambda: faults.held)
        context.pause(2.0, 4.0)
        faults.clear()
        context.pause(0.3, 0.6)
    work.verify()


@contextlib.contextmanager
def _waiting(context: Context, work: Work, address: str) -> Iterator[None]:
    """Send an engine's queue to a data plane. The queue has prompts that hosts fetch meanwhile, and others."""
    client = DataPlaneClient(address, backoff=0.02, backoff_max_s=0.2)
    keys = {f"{prompt.keys[0].hex()} {turn}": prompt.keys for turn in range(40) for prompt in work.prompts}
    queue = WaitingQueue(lambda name: {client: [(SHAPE.namespace, keys[name])]}, [client])
    names = itertools.cycle(context.chance.sample(list(keys), len(keys)))
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

    try:
        with context.beside(tell), work.running():
            yield
    finally:
        queue.close()
        client.close()


@case(
    "device I/O error",
    "one read in three fails while a data plane brings records from its device into memory ahead of their fetches",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def prefetching_device_fails(context: Context) -> None:
    faults = context.faults(_disk(context).parent)
    plane, work = _filled(context, faults=faults)
    faults.set(read_error=errno.EIO, one_in=3)
    with _waiting(context, work, plane.address):
        context.pause(0.4, 0.8)
        wait_for(lambda: faults.met)
    faults.clear()
    work.verify()


@case(
    "memory taken back",
    "what a data plane brings into memory ahead of fetches has to give way to what hosts store and fetch meanwhile",
    engines=("memory",),
    repetitions=2,
)
def prefetching_memory_short(context: Context) -> None:
    plane, work = _filled(context, 3 * _PROMPTS, "1MiB")
    with _waiting(context, work, plane.address):
        context.pause(0.8, 1.2)
    work.verify()


@case(
    "publications that lie",
    "of requests that never come, out of order, twice, for keys of another engine's model, while hosts store and fetch",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def prefetching_told_lies(context: Context) -> None:
    plane, work = _filled(context)
    client = DataPlaneClient(plane.address)
    try:
        client.connect(5, SHAPE)
        with work.running():
            for number in range(200):
                prompts = context.chance.sample(work.prompts, 3)
                namespace = context.chance.choice([SHAPE.namespace, context.chance.randbytes(32)])
                told = pb.ExpectRequest(
                    queue=b"%d" % context.chance.randrange(3),
                    number=context.chance.choice([number, context.chance.randrange(1, 2**40)]),
                    whole=context.chance.random() < 0.5,
                    order=context.chance.choices(range(10), k=5),
                    gone=context.chance.choices(range(10), k=2),
                    lasts_ms=context.chance.choice([1, 60_000]),
                    arrivals=[
                        pb.Arrival(
                            request=context.chance.randrange(10),
                            chains=[pb.KeyChain(keys=context.chance.sample(prompt.keys, 4), namespace=namespace)],
                        )
                        for prompt in prompts
                    ],
                )
                answer = client.expect(told)
                assert answer is not None
                with contextlib.suppress(grpc.RpcError):  # the data plane refuses invalid queues
                    answer.result(timeout=60)
        work.verify()
    finally:
        client.close()


@case(
    "daemon loss",
    "SIGKILL while a data plane brings records into memory ahead of their fetches; restarted on the same file",
    engines=("memory",),
    repetitions=2,
)
def prefetching_daemon_killed(context: Context) -> None:
    plane, work = _filled(context)
    with _waiting(context, work, plane.address):
        context.kills(plane, 3, (0.2, 0.6))
        context.pause(0.3, 0.6)
    work.verify_again()


@case(
    "server SIGKILL",
    "while a data plane with little memory brings records from it ahead of their fetches; restarted",
    engines=("pool",),
    repetitions=2,
)
def prefetching_storage_killed(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port, tiers=tiers("1MiB"))
    work = Work(context, plane.address, prompts_of(context, _PROMPTS))
    work.fill()
    with _waiting(context, work, plane.address):
        context.kills(storage, 2, (0.3, 0.6), (0.1, 0.3))
        context.pause(0.4, 0.8)
    work.verify_again()
