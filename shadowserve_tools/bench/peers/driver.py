"""Other systems' clients, and the stores that are libraries rather than programs: one of them in each process.

This file runs by its path in the peers' environment (scripts/setup-peers), where ShadowServe is not installed, so it
imports the standard library and numpy only, and a peer's library when that peer is used. A client keeps chunks in
its store, then answers lines on standard input, each a JSON object, with one line each:

    {"do": "fetch", "count": N}    bring the first N chunks from the store into this process's memory
    {"do": "clear"}                overwrite that memory, and empty every cache on the way
    {"do": "verify", "count": N}   compare the memory with what was stored

The answer is ``{}``, or ``{"error": ...}``, after which no more commands may follow, unless chunks are missing. Output
of libraries goes to standard error. A chunk's bytes are those of the file ``--values``, turned by another number of
bytes for each chunk.
"""

import argparse
import asyncio
import dataclasses
import functools
import importlib.metadata
import json
import os
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

CLEARED = 0xA5
"""Byte that memory is overwritten with, so that an earlier fetch's bytes cannot pass the comparison."""
DISTRIBUTIONS = {"lmcache": "lmcache", "mooncake": "mooncake-transfer-engine-non-cuda"}
TURN_BYTES = 8 * 513
"""No multiple of a page, but of the words that are compared."""
LAYER_BYTES = 1 << 20
"""K and V of 256 tokens, 8 heads of 128, in two bytes each: one layer of a chunk of Llama-3.1-8B."""
STORED_TIMEOUT_S = 120.0
LOSS_MAX = 0.05
"""Largest relative error (root mean square): a little more than that of eight-bit floats with three bits of
mantissa.
"""


class MissingError(Exception):
    """The store lacks chunks, or has them damaged."""


class Values:
    """The chunks: one chunk's bytes, rotated by another number of bytes for each."""

    def __init__(self, file: str | Path) -> None:
        self._first: Bytes = np.fromfile(file, np.uint8)

    @property
    def chunk_bytes(self) -> int:
        return len(self._first)

    def write(self, index: int, target: Bytes) -> None:
        turn = index * TURN_BYTES % len(self._first)
        target[: len(target) - turn] = self._first[turn:]
        target[len(target) - turn :] = self._first[:turn]

    def matches(self, index: int, found: Bytes) -> bool:
        turn = index * TURN_BYTES % len(self._first)
        words = self._first.view(np.uint64), found.view(np.uint64)
        first, whole = (
            np.split(each, [place // 8]) for each, place in zip(words, (turn, len(found) - turn), strict=True)
        )
        return np.array_equal(whole[0], first[1]) and np.array_equal(whole[1], first[0])

    def error(self, index: int, found: Bytes) -> float:
        """Return the difference between ``found``, as bfloat16, and chunk ``index``: relative root mean square."""
        wanted = np.empty_like(found)
        self.write(index, wanted)
        before, after = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (wanted, found))
        return float(np.linalg.norm(after - before) / np.linalg.norm(before))


class Client(Protocol):
    """A peer's client; the module describes its methods."""

    def fetch(self, count: int) -> None: ...
    def clear(self) -> None: ...
    def matches(self, index: int) -> bool: ...


class LMCacheRemote:
    """LMCache's in-process engine with a remote store: ``lm://`` (its own server) in its naive, raw form."""

    def __init__(self, values: Values, chunks: int, address: str) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=(chunks + 4) * values.chunk_bytes / (1 << 30),
            remote_url=f"lm://{address}",
            remote_serde="naive",
            blocking_timeout_secs=60,
        )
        layers = values.chunk_bytes // LAYER_BYTES
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, (layers, 2, 256, 8, 128))
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        local = LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
        self._backend = RemoteBackend(
            config=config, metadata=metadata, loop=loop, local_cpu_backend=local, dst_device="cpu"
        )
        self._values = values
        self._keys = [CacheEngineKey("bench", 1, 0, index + 1, torch.bfloat16) for index in range(chunks)]
        self._held: list[Any] = []
        for index, key in enumerate(self._keys):
            held = local.allocate(metadata.get_shapes(), metadata.get_dtypes())
            values.write(index, self._bytes(held))
            self._backend.submit_put_task(key, held).result(60)
            held.ref_count_down()

    @staticmethod
    def _bytes(held: Any) -> Bytes:
        return np.frombuffer(held.byte_array, np.uint8)

    def fetch(self, count: int) -> None:
        """Get them as a batch, which is what LMCache's engine does."""
        self._held = self._backend.batched_get_blocking(self._keys[:count])

    def clear(self) -> None:
        """Overwrite what was fetched and give it back."""
        for held in self._held:
            self._bytes(held).fill(CLEARED)
            held.ref_count_down()
        self._held = []

    def matches(self, index: int) -> bool:
        return self._held[index] is not None and self._values.matches(index, self._bytes(self._held[index]))


class LMCacheServer:
    """A worker of LMCache's multiprocess mode: shared memory, ``lmcache server``, and a store behind it (L2).

    A fetch is the start of a request: LOOKUP, which brings the chunks from L2 into the server's memory (L1), then
    RETRIEVE into the worker's KV blocks. L1 is emptied between fetches, unless there is no L2. A store is ``host:port``
    of a Redis server, or a folder.
    """

    def __init__(self, values: Values, chunks: int, address: str, http: str, store: str, *, lossy: bool) -> None:
        import torch
        from lmcache.cli.commands.bench.server_bench import helpers
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        # LMCache's own benchmark asks every 50 ms whether a lookup is done.
        helpers._poll_prefetch_status = functools.partial(
            helpers._poll_prefetch_status, max_polls=60_000, poll_interval=0.001
        )
        self._values, self._chunks, self._http, self._lossy = values, chunks, http, lossy
        self._has_store = bool(store)
        tokens, layers = chunks * 256, values.chunk_bytes // LAYER_BYTES
        shape = f"(2,{chunks * 16 + 2},16,8,128):bfloat16:{layers}"
        self._client = ServerBenchClient(
            BenchConfig(f"tcp://{address}", http, "cpu", "engine_driven", 1, False, tokens, shape, 0, 16),
            lambda _: None,
        )
        self._client.start()
        (worker,) = self._client._workers
        self._layers = [tensor.view(torch.uint8).numpy() for tensor in worker.kv_caches.values()]
        self._request_count = 0
        buffer = np.empty(values.chunk_bytes, np.uint8)
        for index in range(chunks):
            values.write(index, buffer)
            rows = buffer.reshape(layers, 2, 16, -1)
            for layer, row in zip(self._layers, rows, strict=True):
                self._blocks(layer, index).reshape(2, 16, -1)[:] = row
        request = self._request(chunks)
        self._client.lookup(request)
        self._client.store(request, 0, tokens)
        self._client.end_session(request)
        self._await_stored(store)

    @staticmethod
    def _blocks(layer: Any, index: int) -> Any:
        """Return the 16 blocks of chunk ``index``; block 0 means "no block" in LMCache."""
        return layer[:, 1 + index * 16 : 1 + (index + 1) * 16]

    def _request(self, count: int) -> Any:
        self._request_count += 1
        whole = self._client.create_request(1, f"bench-{self._request_count}", "bench")
        return dataclasses.replace(
            whole, token_ids=whole.token_ids[: count * 256], num_full_tokens=count * 256, total_chunks=count,
            block_offset=1, num_blocks=count * 16,
        )  # fmt: skip

    def _await_stored(self, store: str) -> None:
        """Wait until everything has reached the store behind the server."""
        deadline = time.monotonic() + STORED_TIMEOUT_S
        while store and self._stored(store) < self._chunks:
            if time.monotonic() > deadline:
                raise TimeoutError("LMCache's server has not stored everything in its L2")
            time.sleep(0.1)

    def _stored(self, store: str) -> int:
        if os.path.isdir(store):
            return len(list(Path(store).rglob("*.data")))  # named so when they are complete
        import redis

        host, _, port = store.rpartition(":")
        with redis.Redis(host=host, port=int(port)) as server:
            return sum(b"@" in key for key in server.scan_iter(count=1000))

    def fetch(self, count: int) -> None:
        request = self._request(count)
        found = self._client.lookup(request)
        if not found.is_full_hit:
            self._client.end_session(request)
            raise MissingError(f"LOOKUP found {found.hit_chunks} of {count} chunks: {found.error}")
        result = self._client.retrieve(request, 0, count * 256)
        if result is None or not result.succeeded:
            raise RuntimeError(f"RETRIEVE failed: {result}")
        self._client.end_session(request)

    def clear(self) -> None:
        """Overwrite the blocks, and empty L1 if there is an L2."""
        for layer in self._layers:
            layer.fill(CLEARED)
        if not self._has_store:
            return
        request = urllib.request.Request(
            f"{self._http}/cache/clear", b'{"tier": "l1"}', {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def matches(self, index: int) -> bool:
        """Return True if the blocks have chunk ``index``, approximately if the store is lossy."""
        found = np.stack([self._blocks(layer, index).reshape(2, -1) for layer in self._layers]).reshape(-1)
        if self._lossy:
            return self._values.error(index, found) < LOSS_MAX
        return self._values.matches(index, found)


class Mooncake:
    """A reader of Mooncake's store over TCP, into registered memory."""

    def __init__(self, values: Values, chunks: int, address: str, *, holds: bool = False) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._values = values
        self._memory = np.full((chunks, values.chunk_bytes), CLEARED, np.uint8)
        self._store = MooncakeDistributedStore()
        segment = chunks * values.chunk_bytes * 5 // 4 + (64 << 20) if holds else 0
        host = address.rpartition(":")[0]
        self._check(self._store.setup(host, "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", address), "setup")
        self._check(self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes), "register_buffer")
        self._keys = [f"chunk-{index}" for index in range(chunks)]
        if holds:
            for index, key in enumerate(self._keys):
                values.write(index, self._memory[index])
                self._check(self._store.put_from(key, self._memory[index].ctypes.data, values.chunk_bytes), "put_from")

    @staticmethod
    def _check(code: int, call: str) -> None:
        if code < 0:
            raise RuntimeError(f"Mooncake: {call} answered {code}")

    def fetch(self, count: int) -> None:
        addresses = [self._memory[index].ctypes.data for index in range(count)]
        sizes = [self._values.chunk_bytes] * count
        for code in self._store.batch_get_into(self._keys[:count], addresses, sizes):
            self._check(code, "batch_get_into")

    def clear(self) -> None:
        self._memory.fill(CLEARED)

    def matches(self, index: int) -> bool:
        return self._values.matches(index, self._memory[index])


def _installed() -> dict[str, str]:
    found = {}
    for peer, distribution in DISTRIBUTIONS.items():
        try:
            found[peer] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run(arguments: argparse.Namespace, answer: Callable[[dict[str, Any]], None]) -> None:
    if arguments.role == "installed":
        answer(_installed())
        return
    common = Values(arguments.values), arguments.chunks, arguments.address
    client: Client
    match arguments.role:
        case "lmcache":
            client = LMCacheRemote(*common)
        case "lmcache-server":
            client = LMCacheServer(*common, arguments.http, arguments.store, lossy=arguments.lossy)
        case "mooncake" | "mooncake-store":
            client = Mooncake(*common, holds=arguments.role == "mooncake-store")
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "fetch":
                try:
                    client.fetch(request["count"])
                except MissingError as error:
                    answer({"error": str(error)})
                    continue
            case "clear":
                client.clear()
            case "verify":
                wrong = [index for index in range(request["count"]) if not client.matches(index)]
                if wrong:
                    raise RuntimeError(f"chunk {wrong[0]} in memory is not what was stored")
            case other:
                raise RuntimeError(f"unknown command '{other}'")
        answer({})


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    roles = ("installed", "lmcache", "lmcache-server", "mooncake", "mooncake-store")
    parser.add_argument("role", choices=roles)
    parser.add_argument("--values", help="file that holds one chunk")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--address", default="", help="host:port of the peer's server")
    parser.add_argument("--http", default="", help="URL of LMCache's server")
    parser.add_argument("--store", default="", help="what is behind LMCache's server: host:port, or a folder")
    parser.add_argument("--lossy", action="store_true", help="what comes back may differ by a few percent")
    arguments = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: dict[str, Any]) -> None:
        channel.write(json.dumps(what) + "\n")

    try:
        _run(arguments, answer)
    except Exception as error:  # the other end reports it; the traceback is in the log
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    channel.flush()
    # Some of these libraries hang in their destructors.
    os._exit(0)


if __name__ == "__main__":
    _main()
