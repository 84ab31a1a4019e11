"""The connector's half in a vLLM worker: moves KV between paged memory and the data plane."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.delivery import SideStream, choose
from host_control.destination import Destination, Memory
from host_control.layouts import LayoutKind, PagedLayout
from host_control.manager import ORDERS, FetchJob, FetchResult, KVCacheManager
from host_control.store import StoreQueue
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.identity.namespace import chunk_layout, rank_namespace
from host_control.vllm.loaded_weights import LoadedWeights, WeightsWatch
from host_control.vllm.metadata import (
    LoadOperation,
    ShadowServeMetadata,
    StoreOperation,
    WorkerHandshake,
    WorkerReport,
)
from host_control.vllm.metrics import Counts, FailureLog
from host_control.vllm.probe import find_layout
from host_control.vllm.support import UncacheableError
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError
from shadowserve.keys import record_keys

__all__ = ["WorkerSide"]

_BUFFER_CHUNKS_MAX: Final = 128
"""Larger buffers do not pay: a round of 64 chunks hides its round trip many times over."""


class WorkerSide:
    """Moves KV between paged memory and the data plane. All methods run on the worker's main thread.

    Args:
        config: of the host.
        vllm_config, kv_cache_config: of vLLM.
        tp_rank: tensor-parallel rank.
        fetch, store: whether this engine does either at all.
        problem: why this engine is served without the cache, or empty.
        logger: where failures are logged.
    """

    def __init__(
        self,
        config: HostConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        tp_rank: int,
        *,
        fetch: bool,
        store: bool,
        problem: str,
        logger: logging.Logger,
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._tp_rank = tp_rank
        self._fetch = fetch
        self._store_enabled = store
        self._logger = logger
        self._failures = FailureLog(logger)
        self._model = self._namespace = b""
        self._client: DataPlaneClient | None = None
        self._layout: PagedLayout | None = None
        self._stream = SideStream(torch.device("cpu"), None)
        self._manager: KVCacheManager | None = None
        self._store: StoreQueue | None = None
        self._chunk_blocks = 0
        self._block_ratio = 1
        self._results: list[FetchResult] = []
        self._synchronous: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._ended: dict[str, int] = {}
        self._watch = WeightsWatch(None)
        self.counts = Counts()
        self.problem = problem

    # ------------------------------------------------------------------ start

    def register(self, caches: dict[str, Any]) -> None:
        """Take the KV caches, make sure that their layout is understood, and connect."""
        if self.problem:
            return
        try:
            self._layout = self._understand(caches)
            delivery = choose(self._config, self._layout.device)
            hashes = content_hashes(self._config, self._logger)
            namespace = rank_namespace(self._vllm_config, self._kv_cache_config, self._config, self._tp_rank, hashes)
            shape = chunk_layout(namespace, self._layout, self._config)
        except (UncacheableError, ConfigurationError) as error:
            self.problem = str(error)  # the scheduler's half hears of it, and says so
            return
        self._stream = SideStream(self._layout.device, delivery.gpu)
        self._watch = WeightsWatch(self._loaded_weights())
        self._model, self._namespace = namespace.model.digest(), shape.namespace
        try:
            self._client = self._config.client(self._tp_rank)
        except ConfigurationError as error:
            self.problem = str(error)  # the scheduler's half hears of it, and says so
            return
        if self._fetch:
            self._manager = KVCacheManager(
                self._client,
                self._destination(shape, self._config.fetch_buffer_bytes, 2, delivery.fetch),
                self._scatter,
                order=ORDERS[self._config.order],
                fetch_timeout=self._config.fetch_timeout,
            )
        if self._store_enabled:
            self._store = StoreQueue(
                self._client,
                self._destination(shape, self._config.store_buffer_bytes, 1, delivery.store),
                batch_chunks=self._config.store_batch_chunks,
                timeout=self._config.store_timeout,
                recent_keys=self._config.recent_keys,
            )
            # An engine starts once; without this its first prompts would not be stored.
            if not self._store.wait_tried(self._config.connect_timeout):
                reason = self._store.last_error
                detail = self._store.details.get(reason, self._client.address)
                self._failures.warn("not connected at start, trying on", reason, detail)
        self._logger.info(
            "ShadowServe: data plane %s, rank %d, %d layers x %d heads x %d, %d-byte chunks of %d tokens, %s, by %s",
            self._client.address,
            self._tp_rank,
            self._layout.layers,
            self._layout.heads,
            self._layout.head_size,
            shape.raw_bytes,
            shape.tokens,
            shape.quantizer.label,
            delivery.kind,
        )

    def _destination(
        self, shape: ChunkLayout, configured: int, chunks_min: int, make: Callable[[int], Memory]
    ) -> Destination:
        assert self._client is not None
        chunks = min(max(configured // shape.raw_bytes, chunks_min), _BUFFER_CHUNKS_MAX)
        return Destination(self._client, shape, chunks * shape.raw_bytes, self._config.connect_timeout, make=make)

    def _understand(self, caches: dict[str, Any]) -> PagedLayout:
        group = self._kv_cache_config.kv_cache_groups[0]
        names = list(group.layer_names)
        missing = [name for name in names if name not in caches]
        if missing:
            raise UncacheableError(f"layer {missing[0]} has no KV cache of its own")
        tensors = [caches[name] for name in names]
        latent = type(group.kv_cache_spec).__name__ == "MLAAttentionSpec"
        kinds: tuple[LayoutKind, ...] = ("kv_cells",)
        if latent:
            kinds = ("latent",)
        elif tensors[0].device.type == "cpu":
            kinds = ("cpu_pages", "cpu_tiles")
        kind = find_layout(self._vllm_config, names[0], tensors[0], kinds)
        try:
            layout = PagedLayout(tensors, kind, reshaping_bytes=int(self._config.reshaping_buffer_bytes))
        except ValueError as error:
            raise UncacheableError(f"the KV cache's layout is not known: {error}") from error
        block_size = group.kv_cache_spec.block_size
        if block_size % layout.block_tokens:
            raise UncacheableError(f"blocks of {block_size} tokens do not divide into {layout.block_tokens}")
        self._block_ratio = block_size // layout.block_tokens
        self._chunk_blocks = self._config.chunk_tokens // layout.block_tokens
        return layout

    def _loaded_weights(self) -> LoadedWeights | None:
        if getattr(self._vllm_config.parallel_config, "enable_eplb", False):
            return None  # experts change places all the time, and compute the same
        name = self._kv_cache_config.kv_cache_groups[0].layer_names[0]
        layer = self._vllm_config.compilation_config.static_forward_context.get(name)
        weights = LoadedWeights.of_engine(layer)
        if weights is None:
            self._logger.warning(
                "ShadowServe cannot see this engine's weights: whoever changes them while it runs has to call "
                "reset_prefix_cache(reset_connector=True)"
            )
        return weights

    def handshake(self) -> WorkerHandshake:
        """Return what the scheduler's half needs to know."""
        return WorkerHandshake(self._model, self._namespace, self.problem)

    # ------------------------------------------------------------------ each step

    def exchange(self, metadata: ShadowServeMetadata) -> None:
        """Hand this step's loads to the manager and take those that have ended: all, where fetching is synchronous."""
        self._watch.follow(metadata.epoch)
        if metadata.loads:
            self._stream.follow()
        if not self._config.asynchronous_fetch:
            self._synchronous.update(load.request_id for load in metadata.loads)
        if self._manager is None:
            self._results += [self._failed(load, "disabled") for load in metadata.loads]
            return
        jobs = [self._job(load) for load in metadata.loads]
        try:
            self._results += self._manager.exchange(jobs, metadata.cancels)
            if self._synchronous:
                self._manager.wait(self._synchronous)
                self._results += self._manager.exchange()
        except ValueError as error:  # vLLM handed over a request twice; computing it is always right
            self._results += [self._failed(load, "internal", str(error)) for load in metadata.loads]

    def _job(self, load: LoadOperation) -> FetchJob:
        keys = tuple(record_keys(self._namespace, load.links))
        return FetchJob(request_id=load.request_id, keys=keys, target=load)

    def _failed(self, load: LoadOperation, reason: str, detail: str = "") -> FetchResult:
        return FetchResult(job=self._job(load), chunks=0, reason=reason, detail=detail)

    def gather(self, operations: Sequence[StoreOperation]) -> None:
        """Copy finished chunks to where they wait to be stored, before their blocks can change."""
        if self._store is None or not operations:
            return
        assert self._layout is not None
        epoch, sample = self._watch.epoch, cache(self._watch.sample)
        if self._layout.device.type == "cuda":
            sample()  # in the order of the step's kernels; on a CPU the storing thread is soon enough

        def lasts() -> str:
            return "" if self._watch.check(epoch, sample()) else "weights_changed"

        for operation in operations:
            blocks = self._kernel_blocks(operation.blocks)
            previous = record_keys(self._namespace, [operation.previous])[0] if operation.previous is not None else None

            def copy(index: int, chunk: Any, blocks: list[int] = blocks) -> Callable[[], str]:
                assert self._layout is not None
                self._layout.gather(chunk, blocks[index * self._chunk_blocks : (index + 1) * self._chunk_blocks])
                return _finished(self._layout.device, lasts)

            absent = operation.absent_seconds
            self._store.offer(
                record_keys(self._namespace, operation.links),
                copy,
                previous=previous,
                anchored=operation.anchored,
                absent_since=float("-inf") if absent is None else time.monotonic() - absent,
            )

    def take_finished(self) -> set[str]:
        """Return the requests whose load has ended, one way or the other, since the last call.

        Without those that were loaded synchronously: vLLM never took them for waiting.
        """
        results, self._results = self._results, []
        for result in results:
            self._account(result)
        synchronous, self._synchronous = self._synchronous, set()
        return {result.job.request_id for result in results} - synchronous

    def _account(self, result: FetchResult) -> None:
        load: LoadOperation = result.job.target
        if result.chunks and not self._watch.lasts(load.epoch):
            result = replace(
                result, chunks=0, reason="weights_changed", detail="the engine computes with other weights"
            )
        loaded = result.chunks
        self.counts.add("load_seconds", result.seconds)
        self.counts.add("fetched_bytes", result.fetched_bytes)
        self.counts.add("delivered_bytes", result.delivered_bytes)
        self.counts.add("loaded_tokens", loaded * self._config.chunk_tokens)
        self.counts.add("load_requests", 1 if loaded else 0)
        if self._store is not None:
            self._store.remember(result.job.keys[:loaded])
        if result.complete:
            if load.request_id in self._synchronous:
                self._ended[load.request_id] = loaded
            return
        self.counts.add("load_failures", reason=result.reason)
        if result.reason == "cancelled":
            return  # aborted: nobody waits for these blocks
        self._failures.warn("a prompt was not loaded in full, the rest is computed", result.reason, result.detail)
        if self._store is not None:
            self._store.forget(result.job.keys[loaded:])
        self._ended[load.request_id] = loaded
        intact = max(loaded * self._chunk_blocks // self._block_ratio, load.skip_blocks)
        self._bad_blocks.update(load.blocks[intact:])

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that loads left without valid KV, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler has to know of the loads that ended since the last call, and of the weights."""
        ended, self._ended = self._ended, {}
        outlived = self._watch.outlived
        return WorkerReport(ended, outlived) if ended or outlived else None

    def take_store_counts(self) -> None:
        """Move what the store queue counted into :attr:`counts`."""
        if self._store is None:
            return
        for name, count in self._store.take_counts().items():
            if name.startswith("dropped_"):
                self.counts.add("dropped_stores", count, reason=name.removeprefix("dropped_"))
                reason = name.removeprefix("dropped_")
                self._failures.warn("chunks were not stored", reason, self._store.details.get(reason, ""))
            else:
                self.counts.add("stored_chunks" if name == "stored" else name, count)

    def close(self) -> None:
        """Store what waits, end what runs; at most ``close_timeout`` seconds."""
        ends = time.monotonic() + self._config.close_timeout
        if self._store is not None:
            self._store.close(self._config.close_timeout)
        if self._manager is not None:
            self._manager.close(max(0.1, ends - time.monotonic()))
        if self._client is not None:
            self._client.close()
        self._store = self._manager = self._client = None

    # ------------------------------------------------------------------ in the manager's thread

    def _scatter(self, job: FetchJob, first: int, chunks: Any) -> None:
        layout, load = self._layout, job.target
        assert layout is not None
        blocks = self._kernel_blocks(load.blocks)
        begin = first * self._chunk_blocks
        end = begin + len(chunks) // layout.chunk_bytes(self._config.chunk_tokens) * self._chunk_blocks
        skip = min(max(load.skip_blocks * self._block_ratio - begin, 0), end - begin)
        with torch.inference_mode(), self._stream:
            layout.scatter(chunks, blocks[begin:end], skip, self._chunk_blocks)
            sample = self._watch.sample()
        self._watch.check(load.epoch, sample)

    def _kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Return the numbers of the blocks that the kernels use, which may be parts of the manager's."""
        ratio = self._block_ratio
        if ratio == 1:
            return list(blocks)
        return [block * ratio + part for block in blocks for part in range(ratio)]


def _finished(device: Any, then: Callable[[], str]) -> Callable[[], str]:
    """Return what waits for the copies that this thread has started on a device, and calls ``then``."""
    if device.type != "cuda":
        return then  # they are done
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))

    def wait() -> str:
        event.synchronize()
        return then()

    return wait
