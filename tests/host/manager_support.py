"""A KV cache manager over the scripted data plane, its jobs, and the paged memory that it fills."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from machine import WAIT_MAX_S, wait_for
from scripted import ScriptedDataPlane

from host_control.client import DataPlaneClient
from host_control.disaggregation import Available
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout


@dataclass
class Paged:
    """Paged KV memory: the scattered chunks, by request, shard and chunk, in their order.

    ``fails_at``: shard whose chunks cannot be scattered.
    """

    chunk_bytes: list[int]
    chunks: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    fails_at: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: bool = False

    def __call__(self, job: FetchJob, part: int, first: int, chunks: memoryview) -> None:
        self.waiting = True
        assert self.gate.wait(WAIT_MAX_S)
        if part == self.fails_at:
            raise RuntimeError("no such block")
        size = self.chunk_bytes[part]
        assert len(chunks) % size == 0
        for index in range(len(chunks) // size):
            place = (job.request_id, part, first + index)
            assert place not in self.chunks, "scattered twice"
            self.chunks[place] = bytes(chunks[index * size : (index + 1) * size])

    def of(self, name: str) -> dict[tuple[int, int], bytes]:
        """Return one request's chunks, by shard and chunk."""
        return {place[1:]: data for place, data in self.chunks.items() if place[0] == name}


class Kit:
    """A manager with its registered memory of ``room`` bytes, and jobs for it."""

    def __init__(
        self,
        client: DataPlaneClient,
        plane: ScriptedDataPlane,
        shapes: Sequence[ChunkLayout],
        room: int,
        *,
        progress: bool = False,
        **options: Any,
    ) -> None:
        self.plane, self.shapes = plane, shapes
        self.paged = Paged([shape.raw_bytes for shape in shapes])
        self.paged.gate.set()
        self.registration = RegisteredMemory(client, shapes, room, connect_timeout_s=WAIT_MAX_S, progress=progress)
        if "fetch_timeout_s" in options:
            self.registration.acquire(WAIT_MAX_S)  # then a short timeout applies to fetches only
        options = {"fetch_timeout_s": WAIT_MAX_S} | options
        self.manager = KVCacheManager(client, self.registration, self.paged, **options)
        self.early: list[FetchResult] = []  # outcomes for the next collect()

    def job(self, name: str, *counts: int, stored: Sequence[int] | None = None, **options: Any) -> FetchJob:
        """Return a job for a number of chunks of each shard, of which the leading ones are stored: by default all."""
        keys = tuple(
            tuple(bytes([part, chunk]) + name.encode().ljust(30) for chunk in range(count))
            for part, count in enumerate(counts)
        )
        for part, count in enumerate(stored or counts):
            self.store(*keys[part][:count])
        return FetchJob(request_id=name, keys=keys, **options)

    def pending(self, name: str, count: int, there: int) -> FetchJob:
        """Return a job for chunks of one shard, of which only some are stored by now."""
        return self.job(name, count, stored=[there], available=Available(there, ""))

    def store(self, *keys: bytes) -> None:
        """Store records; their bytes differ."""
        for key in keys:
            part, chunk = key[:2]
            self.plane.records[key] = bytes([(1 + sum(key)) % 251, part, chunk, 7]) * (self.shapes[part].raw_bytes // 4)

    def collect(self, count: int) -> list[FetchResult]:
        """Return the next ``count`` outcomes, and keep those after them for the next call."""
        ends = time.monotonic() + WAIT_MAX_S
        while len(self.early) < count:
            self.early += self.manager.exchange()
            assert time.monotonic() < ends, f"only {self.early}"
            time.sleep(0.001)
        results, self.early = self.early[:count], self.early[count:]
        return results

    def ended(self) -> FetchResult:
        """Return the next outcome; its chunks, and no others, must be in place."""
        (result,) = self.collect(1)
        there = self.paged.of(result.job.request_id)
        if result.reason != "scatter_failed":
            assert set(there) == {(part, chunk) for part, count in enumerate(result.chunks) for chunk in range(count)}
        assert all(data == self.plane.records[result.job.keys[part][chunk]] for (part, chunk), data in there.items())
        return result

    def fetched(self, job: FetchJob) -> FetchResult:
        assert self.manager.exchange([job]) == []
        return self.ended()

    def waits(self, fetches: int) -> None:
        """Wait until a job has fetched the stored chunks and waits for others."""
        self.plane.wait_for_call("Fetch", fetches)
        wait_for(lambda: any(fetch.waits() for fetch in self.manager._queue))

    def asked(self) -> list[tuple[int, int]]:
        """Return the shard and the number of chunks of each part of each Fetch."""
        return [(each.layout, len(each.keys)) for each in self.plane.fetches]


MakeKit = Callable[..., Kit]


def small(shape: ChunkLayout) -> ChunkLayout:
    """Return a shape whose chunks have a fourth of the bytes."""
    return replace(shape, namespace=b"s" * 32, vector_length=shape.vector_length // 4)
