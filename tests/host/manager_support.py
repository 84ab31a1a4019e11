"""Paged memory, prompts and jobs for tests of the KV cache manager."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from machine import WAIT_MAX_S

from host_control.manager import FetchJob, FetchResult, KVCacheManager
from shadowserve.keys import prefix_chain, record_keys

CHUNK = 4
MODEL = b"m" * 32


@dataclass
class Paged:
    """Paged KV memory: the scattered chunks, by request and chunk."""

    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    chunk_bytes: int = 0
    failure: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: bool = False

    def __call__(self, job: FetchJob, part: int, first: int, chunks: memoryview) -> None:
        self.waiting = True
        assert self.gate.wait(WAIT_MAX_S)
        if self.failure is not None:
            raise self.failure
        for index in range(len(chunks) // self.chunk_bytes):
            begin = index * self.chunk_bytes
            assert (job.request_id, first + index) not in self.chunks, "scattered twice"
            self.chunks[job.request_id, first + index] = bytes(chunks[begin : begin + self.chunk_bytes])
        if job.request_id not in self.order:
            self.order.append(job.request_id)


def prompt(tokens: int, seed: int) -> list[int]:
    return [seed * 1000 + position for position in range(tokens)]


def keys_of(tokens: list[int]) -> list[bytes]:
    return record_keys(b"n" * 32, prefix_chain(MODEL, tokens, chunk_tokens=CHUNK))


def job(name: str, count: int, fill: Callable[[list[bytes]], None] | None = None) -> FetchJob:
    keys = keys_of(prompt(count * CHUNK, sum(name.encode())))
    if fill is not None:
        fill(keys)
    return FetchJob(request_id=name, keys=(tuple(keys),))


def collect(manager: KVCacheManager, count: int, timeout: float = WAIT_MAX_S) -> list[FetchResult]:
    results: list[FetchResult] = []
    ends = time.monotonic() + timeout
    while len(results) < count:
        results += manager.exchange()
        assert time.monotonic() < ends, f"only {results}"
        time.sleep(0.001)
    return results
