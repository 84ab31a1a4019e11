"""An engine's paged memory. A data plane's devices load chunks into it (host.pages), and each byte is checked."""

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from callers import Host, Prompt
from machine import WAIT_MAX_S
from outcomes import BOUND_S, Outcome, Tally

from host_control.client import DataPlaneClient, FetchAnswer
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.pages import PageDelivery, SharedPages
from host_control.registered_memory import RegisteredMemory
from host_control.vllm.paging import PagePlacer
from host_control.vllm.weights_watch import WeightsWatch
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import KVNamespace, ModelIdentity

CHUNKS: Final = 6
"""Chunks of a prompt."""
_BLOCKS, _CHUNK_BLOCKS = 128, 4
_DAMAGED: Final = {"absent", "corrupt", "mismatch", "not_a_record"}
"""Reasons of incomplete loads that count as wrong unless a fault explains them."""


class Shape:
    """A model of engines: the shape of its chunks, and prompts."""

    def __init__(self, model: str = "pages", layers: int = 3, page_bytes: int = 8192) -> None:
        self.model = ModelIdentity(model=model, dtype="bfloat16", chunk_tokens=64)
        self.layers, self.page_bytes = layers, page_bytes
        layout = ChunkLayout(
            dtype=DType.UINT8,
            layers=layers,
            kinds=1,
            vector_length=page_bytes,
            tokens=_CHUNK_BLOCKS,
            quantizer=Quantizer.PASSTHROUGH,
        )
        self.chunk = KVNamespace(model=self.model, layers=(0, layers), heads=(0, 1)).name(layout)

    def prompt(self, seed: str) -> Prompt:
        return Prompt(seed, CHUNKS, self.chunk, self.model)


class _Placer(PagePlacer):
    """Counts the bytes that devices have loaded into pages."""

    straight_bytes = 0

    def place(self, *arguments: Any) -> FetchAnswer | None:
        answer = super().place(*arguments)
        if answer is not None and answer.quiet:
            self.straight_bytes += answer.delivered_bytes
        return answer


class PagedEngine:
    """An engine's memory with loads and stores. One thread at a time, which is the engine's thread.

    A block belongs to a load until the engine receives the load's end. The test then checks the block and releases it:
    another request writes to it at once. So each block without a load has the bytes of its owner. Other bytes mean a
    write into memory that its writer no longer owned.
    """

    def __init__(self, address: str, tally: Tally, seed: str, shape: Shape, *, deadline_s: float = 3.0) -> None:
        self.tally, self.shape, self._deadline_s = tally, shape, deadline_s
        self._chance = random.Random(seed)
        whole = torch.zeros(_BLOCKS, shape.layers, shape.page_bytes, dtype=torch.uint8)
        self.pages = SharedPages([whole[:, layer] for layer in range(shape.layers)], _CHUNK_BLOCKS)
        self._blocks = whole.numpy()  # [block, layer, byte]; the same addresses for every mapping
        self._owners = np.zeros(_BLOCKS, np.uint64)
        self._free = set(range(_BLOCKS))
        self._number = 0
        self._client = DataPlaneClient(address, connect_timeout_s=deadline_s, backoff=0.02, backoff_max_s=0.2)
        self._delivery = PageDelivery(self._client, self.pages, shape.chunk, deadline_s)
        part: Any = SimpleNamespace(kernel_blocks=list, group=SimpleNamespace(index=0), record_blocks=_CHUNK_BLOCKS)
        watch = WeightsWatch(None)
        self._placer = _Placer(self._delivery, part, lambda: watch)
        self._manager = KVCacheManager(
            self._client,
            RegisteredMemory(
                self._client, [shape.chunk], 2 * CHUNKS * shape.chunk.raw_bytes, connect_timeout_s=deadline_s
            ),
            self._scatter,
            placer=self._placer,
            fetch_timeout_s=deadline_s,
        )
        self.stores = Host(address, tally, deadline_s=deadline_s, shape=shape.chunk, plain=True)
        self.give(list(self._free))

    def close(self) -> None:
        self._manager.close(WAIT_MAX_S)
        self._delivery.close()
        self.pages.renew()
        self.pages.close()
        self.stores.close()
        self._client.close()

    @property
    def straight_bytes(self) -> int:
        """Bytes that devices have loaded into pages."""
        return self._placer.straight_bytes

    def give(self, blocks: Sequence[int]) -> None:
        """Write to blocks as other requests."""
        for block in blocks:
            self._number += 1
            self._owners[block] = self._number
            self._blocks[block].reshape(-1).view(np.uint64)[:] = self._number
        self._free.update(blocks)

    def check(self) -> None:
        """Check that no load has changed blocks without a load."""
        free = sorted(self._free)
        words = self._blocks[free].reshape(len(free), -1).view(np.uint64)
        if (words != self._owners[free, None]).any():
            self.tally.note(Outcome.WRONG, "load: a write changed released blocks")

    # ---- The manager's thread

    def _scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        count = len(chunks) // self.shape.chunk.raw_bytes
        blocks = job.target.groups[0].blocks[first * _CHUNK_BLOCKS : (first + count) * _CHUNK_BLOCKS]
        found = np.frombuffer(chunks, np.uint8).reshape(count, self.shape.layers, _CHUNK_BLOCKS, -1)
        with self.pages.writing:
            self._blocks[blocks] = found.transpose(0, 2, 1, 3).reshape(len(blocks), self.shape.layers, -1)

    def _chunk(self, blocks: Sequence[int], index: int) -> bytes:
        own = blocks[index * _CHUNK_BLOCKS : (index + 1) * _CHUNK_BLOCKS]
        return bytes(self._blocks[own].transpose(1, 0, 2).tobytes())

    # ---- Loads

    def load(
        self,
        prompts: Sequence[Prompt],
        *,
        losable: str = "",
        meanwhile: Callable[[], None] = lambda: None,
        abort: Callable[[], bool] = lambda: False,
    ) -> list[FetchResult]:
        """Load at most five stored prompts at once and compare each byte. Return the ended loads.

        Chunks may be absent or damaged if ``losable`` gives a reason. The engine calls ``meanwhile`` after each step,
        and aborts the requests once ``abort`` returns True.
        """
        jobs: dict[str, tuple[FetchJob, Prompt]] = {}
        for prompt in prompts:
            blocks = self._chance.sample(sorted(self._free), CHUNKS * _CHUNK_BLOCKS)
            self._free.difference_update(blocks)
            target = SimpleNamespace(groups=[SimpleNamespace(blocks=blocks)], epoch="")
            self._number += 1
            job = FetchJob(request_id=f"{self._number}", keys=(tuple(prompt.keys),), target=target)
            jobs[job.request_id] = job, prompt
        began, results = time.monotonic(), list[FetchResult]()
        self._manager.exchange([job for job, _ in jobs.values()])
        while len(results) < len(jobs):
            ended = self._manager.exchange(cancel=list(jobs) if abort() else ())
            self.pages.renew()  # before any client can receive it
            for result in ended:
                self._judge(result, jobs[result.job.request_id][1], losable)
                self.give(result.job.target.groups[0].blocks)
            results += ended
            # Other requests compute meanwhile, in their own blocks.
            self.give(self._chance.sample(sorted(self._free), 4))
            meanwhile()
            if time.monotonic() - began > self._deadline_s + BOUND_S:
                self.tally.note(Outcome.HANG, f"load: no end after {time.monotonic() - began:.1f} s")
                break
            time.sleep(0.002)
        self.check()
        return results

    def _judge(self, result: FetchResult, prompt: Prompt, losable: str) -> None:
        blocks = result.job.target.groups[0].blocks
        arrived = [self._chunk(blocks, index) for index in range(result.chunks[0])]
        lost = result.reason in _DAMAGED
        self.tally.note_chunks("load", prompt.chunks, arrived, result.reason, lost=lost, losable=losable)
