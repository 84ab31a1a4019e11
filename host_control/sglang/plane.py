"""Moves pages of one rank's host pool: lookups, fetches and stores at the data plane."""

import itertools
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from host_control.answers import StoreAnswer
from host_control.config import HostConfig
from host_control.manager import FetchJob, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.sglang.blocks import AskedPages, Block, BlockKeys, FoundBlocks, Pages, levels
from host_control.sglang.engine import Engine
from host_control.sglang.pools import HostPages
from host_control.transfer import Reason
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.keys import record_keys
from shadowserve.proto import dataplane_pb2 as pb

_CALL_PAGES: Final = 128
"""Most pages of one call of SGLang that moves pages."""
_STORE_S: Final = 5.0
"""Longest time of a call that stores."""
_NODE_S: Final = 8.0
"""Longest time of all calls that store a node's pages. If these go on 10 s after a flush, SGLang ends the engine."""

_SCATTER_PARTS: Final = 8
"""Scattering begins with the first eighth: beside SGLang's polling scheduler, it takes longer than a fetch."""


class Moved(NamedTuple):
    """Pages of a call that moved, and why others did not."""

    pages: list[bool]
    reason: str = Reason.COMPLETE
    detail: str = ""


class _Part(NamedTuple):
    """A stored block, and the range of the prompt's pages that are taken from it."""

    block: Block
    begin: int
    end: int


class PageMover:
    """The data plane, as the pages of one rank use it.

    Args:
        pool: SGLang's host pool of the KV cache.
        ranks: SGLang's HiCacheStorageConfig.

    Raises:
        UncacheableError, ConfigurationError: The pool is not supported, or a buffer is too small for it.
    """

    def __init__(self, config: HostConfig, engine: Engine, pool: Any, ranks: Any) -> None:
        self._config = config
        self._pages = HostPages(pool)
        self._sizes = levels(self._pages.page_tokens, config.chunk_tokens)
        self._layouts = [engine.layout(self._pages.layout(size), pool, ranks) for size in self._sizes]
        self._keys = BlockKeys(engine.identity.digest(), self._sizes[0])
        self._found, self._asked, self._lock = FoundBlocks(), AskedPages(), threading.Lock()
        self._fetching = threading.Lock()
        largest, most = self._layouts[0].raw_bytes, _CALL_PAGES * self._layouts[-1].raw_bytes
        if config.store_buffer_bytes < largest:
            raise ConfigurationError(
                f"{self._layouts[0].tokens} tokens have {largest} bytes, host.store_buffer_bytes is "
                f"{int(config.store_buffer_bytes)}; raise it"
            )
        described = pb.Engine(
            model=engine.identity.digest(), chunk_tokens=self._layouts[0].tokens, quantizer=config.quantizer
        )
        self._client = config.client(ranks.pp_rank * ranks.tp_size + ranks.tp_rank, described)
        self._store_memory = RegisteredMemory(
            self._client, self._layouts, min(config.store_buffer_bytes, most), config.connect_timeout_s
        )
        fetch_memory = RegisteredMemory(
            self._client,
            self._layouts,
            min(config.fetch_buffer_bytes, 2 * most),
            config.connect_timeout_s,
            progress=True,
        )
        seconds = min(config.fetch_timeout_s, engine.fetch_timeout_s(_CALL_PAGES * self._pages.page_tokens))
        try:
            self._manager = KVCacheManager(
                self._client, fetch_memory, self._scatter, fetch_timeout_s=seconds, scatter_parts=_SCATTER_PARTS
            )
        except BaseException:
            self._client.close()
            raise
        self._numbers = itertools.count(1)
        self._node = (("", 0), 0.0)
        self._job = secrets.token_hex(8)

    def close(self) -> None:
        """End all calls and release the memory."""
        self._manager.close(self._config.close_timeout_s)
        self._pages.close()
        self._store_memory.close()
        self._client.close()

    # ------------------------------------------------------------------ lookups

    def find(self, pages: Pages) -> int:
        """Return the first page from ``pages.first`` on that is not stored.

        The largest blocks are looked up all at once; smaller ones only where they continue the prompt.

        Raises:
            DataPlaneError: There is no answer in time.
        """
        ends, found = time.monotonic() + self._config.lookup_timeout_s, FoundBlocks()
        self._look(pages, [0], pages.first, pages.end, ends, found)
        index = asked = pages.first
        while pages.end > (index := found.run(pages, index)) >= asked and len(self._sizes) > 1:
            # So that no block begins before this page and ends after it.
            asked = min(index - index % self._sizes[1] + _CALL_PAGES, pages.end)
            self._look(pages, range(1, len(self._sizes)), index, asked, ends, found)
        with self._lock:
            self._found.update(found)
            self._asked.add(pages, _CALL_PAGES)
        return index

    def _look(self, pages: Pages, wanted: Iterable[int], begin: int, end: int, ends: float, found: FoundBlocks) -> None:
        """Look up the blocks of some levels whose last page is in a range."""
        asked = [list(pages.blocks(level, self._sizes[level], begin, end)) for level in wanted]
        for blocks, stored in self._stored(pages, asked, ends, prefetch=True):
            for block in itertools.compress(blocks, stored):
                found.add(block, pages.first)

    def _stored(
        self, pages: Pages, asked: Iterable[list[Block]], ends: float, *, prefetch: bool
    ) -> list[tuple[list[Block], Any]]:
        """Return blocks, each list of one level, with flags of those that are stored."""
        asked = [blocks for blocks in asked if blocks]
        if not asked:
            return []
        chains = [(self._layouts[blocks[0].level].namespace, self._names(pages, blocks)) for blocks in asked]
        left = max(ends - time.monotonic(), 0.001)
        answers = self._client.find(chains, left, published=False, prefetch=prefetch)()
        return [(blocks, answer.stored) for blocks, answer in zip(asked, answers, strict=True)]

    def _names(self, pages: Pages, blocks: Sequence[Block]) -> list[bytes]:
        """Return the record keys of blocks of one level."""
        if not blocks:
            return []
        return record_keys(self._layouts[blocks[0].level].namespace, [self._keys(block, pages) for block in blocks])

    # ------------------------------------------------------------------ fetches

    def fetch(self, pages: Pages, indices: Any) -> Moved:
        """Fetch pages into the host pool.

        Raises:
            DataPlaneError: There is no answer to the lookup in time.
        """
        numbers = self._pages.numbers(indices, pages.end - pages.first)
        with self._lock:
            pages = self._asked.placed(pages)
        plan = self._plan(pages)
        shards = [[part for part in plan if part.block.level == level] for level in range(len(self._sizes))]
        moved = [False] * len(numbers)
        if not plan:
            return Moved(moved, Reason.ABSENT)
        name = f"{self._job}-{next(self._numbers)}"
        job = FetchJob(
            request_id=name,
            keys=tuple(tuple(self._names(pages, [part.block for part in shard])) for shard in shards),
            places=tuple([plan.index(part) for part in shard] for shard in shards),
            target=(pages.first, numbers, shards),
        )
        with self._fetching:
            self._manager.exchange([job])
            self._manager.wait([name])  # the job ends by its deadline
            (result,) = self._manager.exchange()
        for shard, count in zip(shards, result.chunks, strict=True):
            for part in shard[:count]:
                moved[part.begin - pages.first : part.end - pages.first] = [True] * (part.end - part.begin)
            with self._lock:
                for part in shard[count:]:
                    self._found.forget(part.block)
        return Moved(moved, Reason.ABSENT if result.complete else result.reason, result.detail)

    def _plan(self, pages: Pages) -> list[_Part]:
        """Return the stored blocks that hold the leading pages."""
        with self._lock:
            known = self._found.run(pages, pages.first)
        if known < pages.end:
            self.find(pages)
        plan, index = list[_Part](), pages.first
        with self._lock:
            while index < pages.end and (block := self._found.holding(pages, index)) is not None:
                plan.append(_Part(block, index, min(block.end, pages.end)))
                index = plan[-1].end
        return plan

    def _scatter(self, job: FetchJob, shard: int, first: int, chunks: Any) -> None:
        begin, numbers, shards = job.target
        size = self._layouts[shard].raw_bytes
        for index, part in enumerate(shards[shard][first : first + len(chunks) // size]):
            target = numbers[part.begin - begin : part.end - begin]
            chunk = chunks[index * size : (index + 1) * size]
            self._pages.scatter(chunk, self._sizes[shard], part.begin - part.block.first, target)

    # ------------------------------------------------------------------ stores

    def store(self, pages: Pages, indices: Any) -> Moved:
        """Store pages of the host pool, without those that are stored.

        Raises:
            DataPlaneError: The data plane cannot be reached, or does not answer in time.
        """
        numbers = self._pages.numbers(indices, pages.end - pages.first)
        ends = self._store_ends(pages, indices)
        blocks = pages.cover(self._sizes)
        asked = [[block for block in blocks if block.level == level] for level in range(len(self._sizes))]
        lookup_ends = min(time.monotonic() + self._config.lookup_timeout_s, ends)
        answers = self._stored(pages, asked, lookup_ends, prefetch=False)
        parents = self._parents(pages, blocks)
        moved, reason, detail = [False] * len(numbers), str(Reason.COMPLETE), ""
        for level_blocks, stored in answers:
            new = [block for block, there in zip(level_blocks, stored, strict=True) if not there]
            done = list(itertools.compress(level_blocks, stored))
            for batch in self._batches(new):
                if reason != Reason.COMPLETE:
                    break
                answer = self._store(pages, batch, [parents[block.first] for block in batch], numbers, ends)
                done += itertools.compress(batch, answer.stored)
                reason, detail = answer.reason, answer.detail
            for block in done:
                moved[block.first - pages.first : block.end - pages.first] = [True] * len(block.hashes)
        self._remember(blocks, pages, moved)
        return Moved(moved, reason, detail)

    def _store_ends(self, pages: Pages, indices: Any) -> float:
        """Return when a store ends. Calls for a node have slices of its indices, one after the other."""
        now, address = time.monotonic(), indices.data_ptr()
        following, ends = self._node
        if following != (pages.hashes[pages.first - 1] if pages.first else "", address):
            ends = now + _NODE_S
        self._node = ((pages.hashes[-1], address + indices.nbytes), ends)
        if now >= ends:
            raise DataPlaneError(f"stores of one node's pages take over {_NODE_S:.0f} s", Reason.DEADLINE)
        return min(now + min(self._config.store_timeout_s, _STORE_S), ends)

    def _parents(self, pages: Pages, blocks: Sequence[Block]) -> dict[int, bytes]:
        """Return the record key of the block before each block, by first page; empty where that is not known."""
        with self._lock:
            before = self._found.holding(pages, pages.first - 1) if pages.first else None
        keys = [self._names(pages, [block])[0] if block is not None else b"" for block in (before, *blocks[:-1])]
        return {block.first: key for block, key in zip(blocks, keys, strict=True)}

    def _batches(self, blocks: Sequence[Block]) -> Iterable[Sequence[Block]]:
        if not blocks:
            return
        room = self._store_memory.size // self._layouts[blocks[0].level].raw_bytes
        for begin in range(0, len(blocks), room):
            yield blocks[begin : begin + room]

    def _store(
        self, pages: Pages, blocks: Sequence[Block], parents: Sequence[bytes], numbers: Sequence[int], ends: float
    ) -> StoreAnswer:
        """Store blocks of one level."""
        level = blocks[0].level
        size = self._layouts[level].raw_bytes

        def fill(memory: Any) -> None:
            for index, block in enumerate(blocks):
                begin, end = block.first - pages.first, block.end - pages.first
                self._pages.gather(memory[index * size : (index + 1) * size], numbers[begin:end])

        return self._store_memory.store(fill, self._names(pages, blocks), parents, ends, layout=level)

    def _remember(self, blocks: Iterable[Block], pages: Pages, moved: Sequence[bool]) -> None:
        found = FoundBlocks()
        for block in blocks:
            if moved[block.first - pages.first]:
                found.add(block)
        with self._lock:
            self._found.update(found)
