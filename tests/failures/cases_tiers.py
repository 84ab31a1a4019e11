"""A data plane's tiers, above a storage server that has everything: a device fails or rots, the daemon is killed.

Likewise while they are filled ahead of requests that wait.
"""

import contextlib
import errno
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import images
from callers import SHAPE
from cases import Context, case
from cases_dataplane import Work, await_storage, prompts_of
from faults import Faults
from machine import wait_for
from nodes import DataPlane

from host_control.client import DataPlaneClient
from host_control.waiting import WaitingQueue
from shadowserve.proto import dataplane_pb2 as pb

_PROMPTS = 10


def _tiers(context: Context, memory: str = "2MiB", size: str = "32MiB") -> dict[str, Any]:
    """Options of a data plane whose tiers hold all prompts on a file, and few of them in memory."""
    folder = context.folder / "tier"
    folder.mkdir(exist_ok=True)
    device = {"path": str(folder / "disk"), "size": size, "objects_max": 600, "access": "threads"}
    tiers = {"memory_budget_bytes": memory, "memory_bandwidth": 1, "scrub_bytes_per_s": 0, "devices": [device]}
    return {"tiers": json.dumps(tiers)}


def _filled(
    context: Context, prompts_count: int = _PROMPTS, tiers: Mapping[str, Any] | None = None, **options: Any
) -> tuple[DataPlane, Work]:
    storage = context.storage(memory_bytes=64 << 20)
    plane = context.data_plane(storage.port, **(tiers or _tiers(context)), **options)
    prompts = prompts_of(context, prompts_count)
    work = Work(context, plane.address, prompts)
    host = context.host(plane.address)
    for prompt in prompts:
        work.stored[id(prompt)] = host.store(prompt)
    return plane, work


@case(
    "device I/O error",
    "one read in three of a data plane's tier fails with EIO while hosts store and fetch: storage has what it had",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def tier_reads_fail(context: Context) -> None:
    (context.folder / "tier").mkdir()
    faults = Faults(context.folder, context.folder / "tier")
    try:
        plane, work = _filled(context, environment=faults.environment)
        faults.set(read_error=errno.EIO, one_in=3)
        host = context.host(plane.address)
        with work.running():
            work.verify(host)
            context.pause(0.3, 0.6)
            wait_for(lambda: faults.met)
        faults.clear()
        work.verify(host)
    finally:
        faults.close()


@case(
    "device I/O error",
    "a data plane's tier cannot be written any more while hosts store and fetch: storage takes it all",
    engines=("memory",),
    repetitions=2,
)
def tier_writes_fail(context: Context) -> None:
    (context.folder / "tier").mkdir()
    faults = Faults(context.folder, context.folder / "tier")
    try:
        plane, work = _filled(context, environment=faults.environment)
        faults.set(write_error=errno.EIO, flush_error=errno.EIO)
        host, more = context.host(plane.address), prompts_of(context, 2 * _PROMPTS)[_PROMPTS:]
        with work.running():
            stored = [host.store(prompt) for prompt in more]
            wait_for(lambda: faults.met)
            context.pause(0.4, 0.8)
        work.verify(host)
        for prompt, chunks in zip(more, stored, strict=True):
            host.fetch(prompt, stored=chunks)
    finally:
        faults.close()


@case(
    "daemon loss",
    "SIGKILL of a data plane with a tier while hosts store, fetch, and records are kept; restarted on the same file",
    engines=("memory",),
    repetitions=2,
)
def tier_daemon_killed(context: Context) -> None:
    plane, work = _filled(context)
    with work.running():
        _kill_again_and_again(context, plane)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


def _kill_again_and_again(context: Context, plane: DataPlane) -> None:
    for _ in range(3):
        context.pause(0.2, 0.6)
        plane.kill()
        plane.start()
    context.pause(0.3, 0.6)


@case(
    "bit rot on disk",
    "a bit of each of twenty records on a data plane's tier: storage has them",
    engines=("memory",),
    repetitions=2,
)
def tier_rotten(context: Context) -> None:
    plane, work = _filled(context)
    plane.stop()
    stored = list(images.objects([context.folder / "tier" / "disk"]))
    for chosen in context.chance.sample(stored, 20):
        images.rot(chosen, context.chance)
    plane.start()
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))
    with work.running():
        context.pause(0.4, 0.8)
    work.verify(context.host(plane.address))


@case(
    "disk full",
    "more is stored through a data plane than its tier has room for, while hosts store and fetch: storage has it all",
    engines=("memory",),
    repetitions=2,
)
def tier_full(context: Context) -> None:
    plane, work = _filled(context, 4 * _PROMPTS, _tiers(context, size="8MiB"))
    with work.running():
        context.pause(0.6, 1.0)
    work.verify(context.host(plane.address))


@case(
    "device that never answers",
    "reads of a data plane's tier stand still for some seconds while hosts store and fetch; then they come",
    engines=("memory",),
    repetitions=2,
)
def tier_silent(context: Context) -> None:
    (context.folder / "tier").mkdir()
    faults = Faults(context.folder, context.folder / "tier")
    try:
        plane, work = _filled(context, environment=faults.environment)
        faults.set(hold=1)
        with work.running():
            wait_for(lambda: faults.held)
            context.pause(2.0, 4.0)
            faults.clear()
            context.pause(0.3, 0.6)
        work.verify(context.host(plane.address))
    finally:
        faults.clear()
        faults.close()


@contextlib.contextmanager
def _waiting(context: Context, work: Work, address: str) -> Iterator[None]:
    """Have an engine's queue told to a data plane, of prompts that are fetched meanwhile, or never are."""
    client = DataPlaneClient(address, backoff=0.02, backoff_max=0.2)
    prompts = [prompt for prompt in work.prompts if work.stored[id(prompt)]]
    keys = {f"{prompt.keys[0].hex()} {turn}": prompt.keys for turn in range(40) for prompt in prompts}
    queue = WaitingQueue(lambda name: {client: [(SHAPE.namespace, keys[name])]}, [client])
    stopped = threading.Event()

    def tell() -> None:
        waits: list[str] = []
        for name in itertools.cycle(context.chance.sample(list(keys), len(keys))):
            if stopped.wait(0.02):
                return
            if client.peer is None:
                client.wait_ready(0.2)
            queue.arrived(name)
            waits.append(name)
            if len(waits) > 6:
                begun = waits.pop(0)
                queue.begun(begun)
                queue.ended(begun)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        with work.running():
            yield
    finally:
        stopped.set()
        telling.join(60)
        queue.close()
        client.close()


@case(
    "device I/O error",
    "one read in three fails while a data plane brings records from its device into memory ahead of their fetches",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def promoting_device_fails(context: Context) -> None:
    (context.folder / "tier").mkdir()
    faults = Faults(context.folder, context.folder / "tier")
    try:
        plane, work = _filled(context, environment=faults.environment)
        faults.set(read_error=errno.EIO, one_in=3)
        with _waiting(context, work, plane.address):
            context.pause(0.4, 0.8)
            wait_for(lambda: faults.met)
        faults.clear()
        work.verify(context.host(plane.address))
    finally:
        faults.close()


@case(
    "memory taken back",
    "what a data plane brings into memory ahead of fetches has to give way to what hosts store and fetch meanwhile",
    engines=("memory",),
    repetitions=2,
)
def promoting_memory_short(context: Context) -> None:
    plane, work = _filled(context, 3 * _PROMPTS, _tiers(context, "1MiB"))
    with _waiting(context, work, plane.address):
        context.pause(0.8, 1.2)
    work.verify(context.host(plane.address))


@case(
    "announcements that lie",
    "of requests that never come, out of order, twice, for keys of another engine's model, while hosts store and fetch",
    engines=("memory",),
    repetitions=2,
    short=("memory",),
)
def promoting_told_lies(context: Context) -> None:
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
                with contextlib.suppress(grpc.RpcError):  # absurd ones are refused
                    answer.result(timeout=60)
        work.verify(context.host(plane.address))
    finally:
        client.close()


@case(
    "daemon loss",
    "SIGKILL while a data plane brings records into memory ahead of their fetches; restarted on the same file",
    engines=("memory",),
    repetitions=2,
)
def promoting_daemon_killed(context: Context) -> None:
    plane, work = _filled(context)
    with _waiting(context, work, plane.address):
        _kill_again_and_again(context, plane)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))


@case(
    "server SIGKILL",
    "while a data plane with little memory brings records from it ahead of their fetches; restarted",
    engines=("pool",),
    repetitions=2,
)
def promoting_storage_killed(context: Context) -> None:
    storage = context.storage()
    plane = context.data_plane(storage.port, tiers=json.dumps({"memory_budget_bytes": "1MiB"}))
    prompts = prompts_of(context, _PROMPTS)
    work, host = Work(context, plane.address, prompts), context.host(plane.address)
    for prompt in prompts:
        work.stored[id(prompt)] = host.store(prompt)
    with _waiting(context, work, plane.address):
        for _ in range(2):
            context.pause(0.3, 0.6)
            storage.kill()
            context.pause(0.1, 0.3)
            storage.start()
        context.pause(0.4, 0.8)
    await_storage(context, plane.address)
    work.verify(context.host(plane.address))
