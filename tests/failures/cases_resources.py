"""Unusual machines: clock jumps and little memory."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from cases import Context, Unavailable, case
from nodes import ENGINES, MIB, Storage

_HOUR_NS = 3600 * 10**9


@case(
    "clock jump",
    "the server's wall clock goes hours forth and back under load, with and without expiry; then a restart",
    engines=ENGINES,
    repetitions=2,
    short=("pool",),
)
def clock_jumps(context: Context) -> None:
    storage = context.storage(faulty=True)
    lasting = [f"lasting {number}" for number in range(10)]
    expiring = [f"expiring {number}" for number in range(10)]
    caller = context.caller(storage.port)
    context.fill(storage, lasting)
    for key in expiring:
        assert caller.set(key, ex=3600)
    for key in lasting[:3]:
        caller.redis.expire(key, 36_000)
        caller.redis.persist(key)
    with context.load(storage.port):
        for hours in (-5, 3, -1, 48, 0):
            if hours > 0:
                for key in expiring:
                    context.expected.may_be_lost(key, "expired by the server's clock")
            storage.faults.set(clock_offset_ns=hours * _HOUR_NS)
            context.pause(0.15, 0.3)
            caller.verify(lasting + expiring)
    storage.faults.set(clock_offset_ns=-2 * _HOUR_NS)
    storage.kill()
    context.restart(storage)
    context.verify(storage)
    storage.faults.clear()
    context.verify(storage)


@case(
    "clock jump",
    "an expiry passes while the server is down, or its clock comes back before the time of the last run",
    engines=("pool",),
    repetitions=2,
)
def clock_jumps_while_down(context: Context) -> None:
    storage = context.storage(faulty=True)
    expiring = [f"expiring {number}" for number in range(10)]
    lasting = [f"lasting {number}" for number in range(10)]
    context.fill(storage, lasting)
    caller = context.caller(storage.port)
    for key in expiring:
        assert caller.set(key, ex=3600)
    for hours in (-24 * 365, 2, -3):
        storage.kill()
        storage.faults.set(clock_offset_ns=hours * _HOUR_NS)
        storage.start()
        if hours > 0:
            for key in expiring:
                context.expected.may_be_lost(key, "expired by the server's clock")
        context.verify(storage)
    with context.load(storage.port):
        context.pause(0.2, 0.3)
    context.verify(storage)


@case(
    "out of memory",
    "no more address space than 40 MiB beyond what it has, while clients store values of 8 MB",
    engines=ENGINES,
    repetitions=2,
)
def little_address_space(context: Context) -> None:
    memory = 64 * MIB if context.engine == "pool" else 4 << 30
    storage = context.storage(device_bytes=256 * MIB, memory_bytes=memory)
    size = int(Path(f"/proc/{storage.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    context.expected.sizes = (300_000, 8_000_000, 8_000_000)
    context.expected.losable = "the engine evicted it, or had no memory to read it into"
    resource.prlimit(storage.pid, resource.RLIMIT_AS, (size + 40 * MIB, -1))
    with context.load(storage.port, keys=[f"key {number}" for number in range(60)], deadline_s=30):
        context.pause(3.0, 4.0)
    resource.prlimit(storage.pid, resource.RLIMIT_AS, (-1, -1))
    context.verify(storage)


@case(
    "out of memory",
    "a cgroup limit of 40 MiB more than it has: the kernel may kill it; then a restart with enough",
    engines=("memory", "pool"),
    repetitions=2,
)
def killed_for_memory(context: Context) -> None:
    memory = 16 * MIB if context.engine == "pool" else 1 << 30
    storage = context.storage(device_bytes=256 * MIB, memory_bytes=memory)
    context.expected.sizes = (300_000, 3_000_000)
    with _memory_group(storage, storage.resident_bytes() + 40 * MIB):
        context.expected.losable = "evicted to make room"
        with context.load(storage.port, keys=[f"key {number}" for number in range(120)], deadline_s=30):
            ends = time.monotonic() + context.chance.uniform(2.0, 3.0)
            while storage.alive and time.monotonic() < ends:
                time.sleep(0.05)
        storage.kill()
    if context.engine != "memory":
        context.expected.losable = "evicted to make room" if storage.engine == "pool" else ""
    context.restart(storage)
    context.verify(storage)


@contextlib.contextmanager
def _memory_group(storage: Storage, limit: int) -> Iterator[None]:
    """Run a process in its own cgroup (v1 or v2) with a memory limit in bytes."""
    name = f"shadowserve-{os.getpid()}-{storage.pid}"
    old, new = Path("/sys/fs/cgroup/memory") / name, Path("/sys/fs/cgroup") / name
    group = old if old.parent.is_dir() else new
    try:
        group.mkdir()
        limits = group / ("memory.limit_in_bytes" if group is old else "memory.max")
        limits.write_text(str(limit))
        (group / "cgroup.procs").write_text(str(storage.pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Unavailable(f"no cgroup for the process: {error.strerror}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
