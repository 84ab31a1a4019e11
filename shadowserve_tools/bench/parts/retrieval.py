"""Prefixes stored in pools or files, and read back chunk by chunk, for ``bench pool``.

All chunks of a prefix are requested at once and in order. A chunk has arrived when its bytes are in memory and checked.
"""

import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from shadowserve import native
from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.pool.buffers import allocate
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.interleaver import Interleaver
from shadowserve.pool.statistics import Statistics
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import BusyError
from shadowserve_tools.bench.parts.disks import Disk, drop_cached
from shadowserve_tools.bench.parts.loads import background
from shadowserve_tools.report import Cost, measure
from storage_kv.config import StorageConfig

_POLL_MS: Final = 100
_STALLED_S: Final = 120.0
_TENANT: Final = 0
_DROPPED_PAUSE_S: Final = 0.005
"""Pause after a dropped chunk. Offering more at once only takes time from the other threads."""
_READERS: Final = 16
"""Threads that read files."""


class Prefix:
    """The chunks of one prompt: keys, and incompressible bytes.

    Attributes:
        names: 32 bytes for each chunk, in order.
    """

    def __init__(self, chunks: int, chunk_bytes: int, *, seed: int = 1) -> None:
        self.chunk_bytes = chunk_bytes
        self.names: list[bytes] = [np.random.default_rng([seed, number]).bytes(32) for number in range(chunks)]
        self._block = np.random.default_rng(2).bytes(chunk_bytes)
        self._sums: dict[int, int] = {}

    @property
    def size(self) -> int:
        return len(self.names) * self.chunk_bytes

    def beginning(self, chunks: int) -> "Prefix":
        part = copy(self)
        part.names = self.names[:chunks]
        return part

    def key(self, number: int) -> Address:
        return _TENANT, storage_key(self.names[number])

    def parent(self, number: int) -> bytes:
        return self.names[number - 1] if number else b""

    def fill(self, number: int, memory: memoryview) -> None:
        """Write a chunk's bytes: one random block, rotated differently for each chunk."""
        turn = (number * 4096 + number) % self.chunk_bytes
        memory[: self.chunk_bytes - turn] = self._block[turn:]
        memory[self.chunk_bytes - turn :] = self._block[:turn]
        self._sums[number] = native.crc32(memory)

    def check(self, number: int, memory: memoryview) -> None:
        """Raise ShadowServeError if ``memory`` does not have a chunk's bytes."""
        if native.crc32(memory) != self._sums[number]:
            raise ShadowServeError(f"chunk {number} came back with other bytes; please report this")


@dataclass(frozen=True)
class Retrieval(Cost):
    """Cost of reading a prefix back.

    Attributes:
        size: Bytes of the prefix.
        device_bytes: Bytes that came from devices; the rest was in memory.
        orchestration_s: CPU time of looking up, planning and finding memory, as the pool counts it.
        control_s: The same with submitting and completing reads.
    """

    size: int
    device_bytes: int
    orchestration_s: float = 0.0
    control_s: float = 0.0


@dataclass
class Offered:
    """Outcome of chunks that were offered for writing.

    Attributes:
        written: Bytes of the taken ones that were written by the end.
    """

    taken: int = 0
    dropped: int = 0
    written: int = 0
    seconds: float = 0.0


class _CoolingPool(DevicePool):
    def drop_copies(self) -> None:
        """Drop the unused copies in memory of what devices hold."""
        while self._core.memory_cache.make_room():
            pass


class OurPool:
    """ShadowServe's pool on some devices.

    Args:
        disks: Devices to use. Their contents are lost.
        bandwidths: Bandwidths of the devices in bytes per second; None lets the pool measure them.
        memory_bandwidth: Bandwidth of memory for the placement.
        size: Size of a device that is a file.
        strict: True if devices never read and write at the same time.
    """

    def __init__(
        self,
        disks: Sequence[Disk],
        bandwidths: Sequence[int] | None,
        memory_bandwidth: int,
        memory_bytes: int,
        size: int,
        *,
        strict: bool = False,
    ) -> None:
        config = StorageConfig.model_validate(
            {
                "devices": [
                    {
                        "path": disk.path,
                        # A whole device has no configured size.
                        "bytes_max" if Path(disk.path).is_block_device() else "size": size,
                        "bandwidth": bandwidths[number] if bandwidths else None,
                    }
                    for number, disk in enumerate(disks)
                ],
                "memory_budget_bytes": memory_bytes,
                "memory_homes": True,
                "memory_bandwidth": memory_bandwidth,
                "scrub_bytes_per_s": 0,
                "strict_order": strict,
            }
        )
        self._lock = threading.Lock()
        # CPU time of this thread, since others use the machine, too.
        self._pool = _CoolingPool(config, ticks=time.thread_time_ns)
        self._pool.start(self._lock)
        self._poll = select.poll()
        for descriptor in self._pool.descriptors():
            self._poll.register(descriptor, select.POLLIN)

    def statistics(self) -> Statistics:
        with self._lock:
            return self._pool.statistics()

    def put(self, prefix: Prefix) -> None:
        left = [len(prefix.names)]
        failures: list[Exception] = []

        def settled(error: Exception | None) -> None:
            left[0] -= 1
            if error is not None:
                failures.append(error)

        for number in range(len(prefix.names)):
            memory = self._memory(prefix.chunk_bytes)
            prefix.fill(number, memory)
            while True:
                try:
                    with self._lock:
                        ticket = self._pool.put(prefix.key(number), memory, parent=prefix.parent(number))
                    break
                except BusyError:
                    self._step()
            if ticket is None:
                settled(None)
            else:
                ticket.then(settled)
        self._wait(lambda: not left[0])
        if failures:
            raise ShadowServeError(f"a chunk could not be stored: {failures[0]}")

    @contextmanager
    def written(self, prefix: Prefix) -> Iterator["Offered"]:
        """Write the chunks of a prefix repeatedly, from another thread, while the context lasts.

        A chunk without space is dropped, as in tiers. The caller has to drive the pool meanwhile by reading.
        """
        offered = Offered()

        def loop(stop: threading.Event) -> None:
            for number in itertools.cycle(range(len(prefix.names))):
                if stop.is_set():
                    return
                with self._lock:
                    memory = self._pool.allocate(prefix.chunk_bytes, lambda: None)
                if memory is not None:
                    prefix.fill(number, memory)
                    with self._lock:
                        try:
                            self._pool.remove(prefix.key(number))
                            self._pool.put(prefix.key(number), memory)
                            offered.taken += 1
                            continue
                        except BusyError:
                            self._pool.discard(memory)
                offered.dropped += 1
                stop.wait(_DROPPED_PAUSE_S)

        before, began = self.statistics(), time.perf_counter()
        with background(loop):
            yield offered
        offered.seconds = time.perf_counter() - began
        pairs = zip(self.statistics().devices, before.devices, strict=True)
        offered.written = sum(after.written_bytes - old.written_bytes for after, old in pairs)

    def _memory(self, size: int) -> memoryview:
        while True:
            with self._lock:
                memory = self._pool.allocate(size, lambda: None)
            if memory is not None:
                return memory
            self._step()

    def cool(self) -> None:
        self._wait(lambda: not self._pool.busy)
        with self._lock:
            self._pool.drop_copies()

    def retrieve(self, prefix: Prefix, *, check: bool = False) -> Retrieval:
        keys = [prefix.key(number) for number in range(len(prefix.names))]
        engine, lock = self._pool, self._lock
        missing: list[int] = []
        left = [len(keys)]

        def taken(number: int, view: memoryview | None) -> None:
            left[0] -= 1
            if view is None:
                missing.append(number)
            elif check:
                prefix.check(number, view)

        def done_with(number: int) -> Callable[[Lease | None], None]:
            def done(lease: Lease | None) -> None:
                taken(number, None if lease is None else lease.view)
                if lease is not None:
                    with lock:
                        lease.release()

            return done

        def run() -> None:
            for number, key in enumerate(keys):
                with lock:
                    item: Item | None = engine.get(key)
                    if item is not None and item.value is None:
                        engine.read(item, 0, item.length, done_with(number))
                        continue
                taken(number, None if item is None else memoryview(item.value or b""))
            self._wait(lambda: not left[0])

        before = self.statistics()
        cost = measure(run)
        after = self.statistics()
        if missing:
            raise ShadowServeError(f"{len(missing)} chunks of the prefix were not there; please report this")
        orchestration_s = (after.orchestration_ns - before.orchestration_ns) / 1e9
        read = sum(device.read_bytes for device in after.devices) - sum(device.read_bytes for device in before.devices)
        control_s = orchestration_s + (after.submission_ns - before.submission_ns) / 1e9
        return Retrieval(cost.wall_s, cost.cpu_s, prefix.size, read, orchestration_s, control_s)

    def _wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _STALLED_S
        while not condition():
            self._step()
            if time.monotonic() > until:
                raise ShadowServeError(f"the pool has not come to an end in {_STALLED_S:g} s; please report this")

    def _step(self) -> None:
        self._poll.poll(_POLL_MS)
        self._pool.poll()

    def close(self) -> None:
        self._pool.close()


class Files:
    """A file for each chunk in some folders; with shares, placed as by the pool, memory first.

    With several folders this is the pool's placement over the kernel's file system; with one, the file system alone.
    """

    def __init__(self, folders: Sequence[tuple[Path, Disk]], shares: Sequence[float]) -> None:
        self._folders = [folder for folder, _ in folders]
        self._disks = [disk for _, disk in folders]
        self._readers = ThreadPoolExecutor(_READERS, "files")
        self._interleaver = Interleaver(shares)
        self._paths: dict[int, Path] = {}  # paths of the chunks that are not in memory

    def put(self, prefix: Prefix) -> None:
        available = [True] * (1 + len(self._folders))
        value = allocate(prefix.chunk_bytes)
        for number, name in enumerate(prefix.names):
            place = prefix.chunk_bytes, prefix.parent(number)
            home = self._interleaver.order(*place, available)[0]
            self._interleaver.place(home, *place, name, available)
            prefix.fill(number, value)
            if home:
                path = self._paths[number] = self._folders[home - 1] / name.hex()
                with path.open("wb", buffering=0) as file:
                    file.write(value)
                    os.fsync(file.fileno())

    def cool(self) -> None:
        for folder in self._folders:
            drop_cached(folder)

    def retrieve(self, prefix: Prefix, *, check: bool = False) -> Retrieval:
        """See :meth:`Store.retrieve`. Bytes from files are always compared, because the pool also checks its reads."""
        numbers = [number for number in range(len(prefix.names)) if number in self._paths]

        def read(number: int) -> None:
            memory = allocate(prefix.chunk_bytes)
            with self._paths[number].open("rb", buffering=0) as file:
                filled = 0
                while filled < len(memory) and (count := file.readinto(memory[filled:])):
                    filled += count
            prefix.check(number, memory)

        before = self._read_bytes()
        cost = measure(lambda: list(self._readers.map(read, numbers, timeout=_STALLED_S)))
        after = self._read_bytes()
        wanted = len(numbers) * prefix.chunk_bytes
        if before is not None and after is not None and after - before < wanted:
            raise ShadowServeError(
                f"of {wanted} bytes {after - before} came from the devices, the others from the page cache: it could "
                "not be emptied"
            )
        return Retrieval(cost.wall_s, cost.cpu_s, prefix.size, wanted)

    def _read_bytes(self) -> int | None:
        counts = [disk.read_bytes for disk in self._disks]
        return None if None in counts else sum(count for count in counts if count is not None)

    def close(self) -> None:
        self._readers.shutdown()


Store = OurPool | Files
