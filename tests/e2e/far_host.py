"""A host without an engine: a process that runs commands from standard input.

python far_host.py CONFIGURATION      each command and each answer is one line of JSON
"""

import json
import sys
from contextlib import closing
from typing import Any

import numpy as np

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.store import StoreQueue
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import leading

SHAPE = ChunkLayout(
    namespace=b"n" * 32,
    dtype=DType.FLOAT32,
    layers=4,
    kinds=2,
    vector_length=64,
    tokens=16,
    quantizer=Quantizer.LOSSLESS,
)


def key(seed: int) -> bytes:
    return bytes([seed]) * 32


def chunk(seed: int) -> bytes:
    return np.random.default_rng(seed).normal(size=SHAPE.raw_bytes // 4).astype("<f4").tobytes()


class Host:
    def __init__(self, client: DataPlaneClient, timeout: float) -> None:
        self.client = client
        self.placed: dict[int, bytes] = {}
        size = 8 * SHAPE.raw_bytes
        self.registration = RegisteredMemory(client, [SHAPE], size)
        self.manager = KVCacheManager(client, self.registration, self.scatter, fetch_timeout_s=timeout)
        self.queue = StoreQueue(client, RegisteredMemory(client, [SHAPE], size), timeout=timeout, retry_interval=0.2)

    def scatter(self, job: FetchJob, part: int, first: int, chunks: memoryview) -> None:
        for index in range(len(chunks) // SHAPE.raw_bytes):
            self.placed[first + index] = bytes(chunks[index * SHAPE.raw_bytes : (index + 1) * SHAPE.raw_bytes])

    def connect(self, timeout: float) -> dict[str, Any]:
        try:
            return {"backend": self.client.connect(timeout).backend}
        except DataPlaneError as error:
            return {"reason": error.outcome, "detail": str(error)}

    def store(self, seeds: list[int]) -> dict[str, Any]:
        def gather(index: int, memory: memoryview) -> None:
            memory[:] = chunk(seeds[index])

        assert self.queue.wait_tried(60) or self.queue.last_error
        self.queue.offer([key(seed) for seed in seeds], gather)
        return {"idle": self.queue.flush(60), **self.queue.take_counts()}

    def lookup(self, seeds: list[int]) -> dict[str, Any]:
        try:
            (chain,) = self.client.find([(SHAPE.namespace, [key(seed) for seed in seeds])], 10.0)()
            return {"hits": [leading(chain.stored)]}
        except DataPlaneError as error:
            return {"reason": error.outcome}

    def fetch(self, seeds: list[int]) -> dict[str, Any]:
        self.placed.clear()
        self.manager.exchange([FetchJob(request_id="request", keys=(tuple(key(seed) for seed in seeds),))])
        self.manager.wait({"request"})
        (result,) = self.manager.exchange()
        exact = [self.placed[index] == chunk(seeds[index]) for index in range(result.chunks[0])]
        return {
            "chunks": result.chunks[0],
            "reason": result.reason,
            "exact": all(exact) and len(self.placed) == result.chunks[0],
            "retired": self.registration.retired,
        }


def main() -> None:
    config = HostConfig.load(sys.argv[1])
    with closing(config.client(0)) as client:
        host = Host(client, config.fetch_timeout_s)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(host, order.pop("do"))(**order)), flush=True)
        host.queue.close(1)
        host.manager.close(1)


if __name__ == "__main__":
    main()
