"""An engine's paged memory, and a data plane with one device that has its pages, or compressed chunks."""

import contextlib
import json
import secrets
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil

from host_control.client import DataPlaneClient
from host_control.pages import PageDelivery, SharedPages
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.workload import keys_of, kv_patterns, named_layout
from shadowserve_tools.bench.tiers import await_line
from shadowserve_tools.processes import free_port, http_request, start_data_plane, until
from shadowserve_tools.report import cpu_s

BLOCK_TOKENS: Final = 16
CHUNK_BLOCKS: Final = DEFAULT_CHUNK_TOKENS // BLOCK_TOKENS
MANY: Final = 512
"""Stored blocks: 8,192 tokens."""
TIMEOUT_S: Final = 60.0
WRITTEN_S: Final = 60.0


class PagedKv:
    """A prompt's KV as an engine's pages, and as compressed chunks: the same values in two orders."""

    def __init__(self, layers: int, heads: int) -> None:
        self.layers, self.heads = layers, heads
        self.page_bytes = BLOCK_TOKENS * heads * 128 * 2 * 2
        chunks = MANY // CHUNK_BLOCKS
        tokens = np.random.default_rng(7).integers(0, 128_000, chunks * DEFAULT_CHUNK_TOKENS)
        self.paged = named_layout(
            layers, heads, "full in pages", dtype=DType.UINT8, kinds=1, vector_length=self.page_bytes,
            tokens=CHUNK_BLOCKS, quantizer=Quantizer.PASSTHROUGH,
        )  # fmt: skip
        self.compressed = named_layout(layers, heads, kinds=2, vector_length=heads * 128, quantizer=Quantizer.LOSSLESS)
        self.keys = {each.namespace: keys_of(each, tokens) for each in (self.paged, self.compressed)}
        self._patterns = kv_patterns(np.random.default_rng(11), self.compressed)

    def chunk(self, index: int) -> npt.NDArray[np.uint8]:
        """Return a chunk's bytes in the order layer, kind, token, element."""
        return np.roll(self._patterns, index * 7, axis=2).reshape(-1).view(np.uint8)


class DevicePlane:
    """A data plane with one device that has chunks."""

    def __init__(
        self, stack: ExitStack, logs: Path, disk: Path, shape: ChunkLayout, kv: PagedKv, *flags: str, plain: bool
    ) -> None:
        disk.mkdir()
        self._logs, self._shape, self._kv = logs, shape, kv
        size = len(kv.keys[shape.namespace]) * shape.raw_bytes
        device = {"path": str(disk / "tier"), "size": size + size // 4 + (64 << 20)}
        tiers = {"memory_budget_bytes": 4 * size, "devices": [device], "scrub_bytes_per_s": 0}
        self._port = free_port()
        self._flags = ["--tiers", json.dumps(tiers), "--metrics-port", str(self._port)]
        self._flags += ["--decompression-buffer-bytes", str(size + (64 << 20)), "--shutdown-timeout-s", "60", *flags]
        self._running = stack.enter_context(ExitStack())
        self.client: DataPlaneClient
        self.process: psutil.Process
        self.restart()
        self._store(plain=plain)

    def restart(self) -> None:
        """Restart the data plane: its memory is empty then."""
        self._running.close()
        child = self._running.enter_context(start_data_plane(self._logs, "", *self._flags))
        await_line(child, "memory_registered")  # registering takes cores for a moment after a start
        self.process = psutil.Process(child.process.pid)
        self.client = self._running.enter_context(closing(DataPlaneClient(child.address, connect_timeout_s=TIMEOUT_S)))

    def _store(self, *, plain: bool) -> None:
        keys = self._kv.keys[self._shape.namespace]
        with closing(RegisteredMemory(self.client, [self._shape], self._shape.raw_bytes, TIMEOUT_S)) as registration:
            memory = registration.acquire(TIMEOUT_S).memory
            for index, key in enumerate(keys):
                np.frombuffer(memory, np.uint8)[:] = self._kv.chunk(index)
                parent = keys[index - 1] if index else b""
                where = registration.memory_id
                stored = self.client.store(secrets.token_hex(8), where, 0, [key], [parent], TIMEOUT_S, plain=plain)
                if stored.reason != "complete":
                    raise ShadowServeError(f"storing chunk {index} ended with {stored.reason}: {stored.detail}")

    def count(self, name: str) -> float:
        with http_request(f"http://127.0.0.1:{self._port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(f"shadowserve_{name} "))

    def control_s(self) -> float:
        """Return the CPU time of all threads, ended ones included, except those of devices."""
        devices = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if (task / "comm").read_text().startswith("ss-block"):
                    devices += int((task / "schedstat").read_text().split()[0])
        return cpu_s(self.process) - devices / 1e9


class PagedMemory:
    """Pages on a device, and paged memory that they are retrieved into, in a random order of blocks."""

    def __init__(self, stack: ExitStack, logs: Path, disk: Path, kv: PagedKv, *flags: str) -> None:
        import torch

        self._kv = kv
        self.plane = DevicePlane(stack, logs, disk, kv.paged, kv, *flags, plain=True)
        blocks = 2 * MANY
        self._memory = torch.zeros((kv.layers, blocks, kv.page_bytes), dtype=torch.uint8)
        caches = [each.view(blocks, 1, 1, kv.page_bytes) for each in self._memory]
        self._pages = SharedPages(caches, CHUNK_BLOCKS)
        stack.callback(self._pages.close)
        self._delivery = PageDelivery(self.plane.client, self._pages, kv.paged, TIMEOUT_S)
        stack.callback(self._delivery.close)
        self._order = np.random.default_rng(3).permutation(blocks)[:MANY]
        until(lambda: self._retrieve(MANY) == MANY // CHUNK_BLOCKS, "the device has not written all chunks", WRITTEN_S)

    def _retrieve(self, count: int) -> int:
        keys = self._kv.keys[self._kv.paged.namespace][: count // CHUNK_BLOCKS]
        blocks = self._order[:count].tolist()
        ends = time.monotonic() + TIMEOUT_S
        answer = self._delivery.fetch(keys, blocks, ends, lambda: False, lambda layers: None)
        return 0 if answer is None else answer.chunks[0]

    def retrieve(self, count: int) -> None:
        """Retrieve ``count`` blocks, a multiple of a chunk's blocks."""
        if (chunks := self._retrieve(count)) != count // CHUNK_BLOCKS:
            raise ShadowServeError(f"{chunks} chunks of {count // CHUNK_BLOCKS} came from the device")

    def clear(self) -> None:
        """Overwrite all pages, so that an earlier run's bytes cannot pass the comparison."""
        self._memory.fill_(0xA5)

    def verify(self, count: int) -> None:
        """Compare every byte of ``count`` blocks with what was stored."""
        for index in range(count // CHUNK_BLOCKS):
            place = self._order[index * CHUNK_BLOCKS : (index + 1) * CHUNK_BLOCKS]
            if self._memory[:, place].numpy().tobytes() != self._kv.chunk(index).tobytes():
                raise ShadowServeError(f"chunk {index} in pages is not what was stored; please report this")
