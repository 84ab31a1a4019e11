"""The connector's half in a vLLM worker: moves KV between paged memory and the data plane."""

import contextlib
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.delivery import Delivery, SideStream, choose
from host_control.interference.layers import LayerTimes
from host_control.layouts import NOWHERE
from host_control.lookup import SAVED
from host_control.manager import ORDERS, FetchJob, FetchResult, KVCacheManager
from host_control.pages import PageDelivery, SharedPages
from host_control.registered_memory import Memory, RegisteredMemory
from host_control.store import StoreQueue
from host_control.vllm.groups import Groups
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.identity.namespace import model_identity
from host_control.vllm.loaded_weights import LoadedWeights
from host_control.vllm.metadata import (
    LoadOperation,
    ShadowServeMetadata,
    StoreOperation,
    WorkerHandshake,
    WorkerReport,
)
from host_control.vllm.metrics import Counts, FailureLog, SlowerPaths
from host_control.vllm.paging import PagePlacer, share_pages
from host_control.vllm.parts import Part, Rank, find_parts
from host_control.vllm.support import UncacheableError, offloading_problem
from host_control.vllm.weights_watch import WeightsWatch
from shadowserve.chunk import ChunkLayout, Quantizer
from shadowserve.errors import ConfigurationError
from shadowserve.keys import record_keys
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import engine_message

__all__ = ["WorkerSide"]

_BUFFER_CHUNKS_MAX: Final = 128
"""Larger buffers do not pay: a batch of 64 chunks hides its round trip many times over."""
_OTHERS: Final = 1
"""Key of the manager that fetches records of all other shard layouts."""
_IDLE_S: Final = 0.002
"""That a step without work waits for the end of a load, and what arrives meanwhile for the next step: between two such
steps vLLM sleeps half as long."""


class WorkerSide:
    """Moves KV between paged memory and the data plane. All methods run on the worker's main thread.

    Args:
        config: of the host.
        vllm_config, kv_cache_config: of vLLM.
        groups: that are stored; ``None`` where there is a problem.
        rank: this worker's.
        fetch, store: whether this engine does either at all.
        problem: why this engine is served without the cache, or empty.
        logger: where failures are logged.

    Attributes:
        layerwise: requests whose loads this step waits for layer by layer.
    """

    def __init__(
        self,
        config: HostConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        groups: Groups | None,
        rank: Rank,
        *,
        fetch: bool,
        store: bool,
        problem: str,
        logger: logging.Logger,
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._groups = groups
        self._rank = rank
        self._fetch = fetch
        self._store_enabled = store
        self._logger = logger
        self._failures = FailureLog(logger)
        self._model = b""
        self._engine: pb.Engine | None = None
        self._parts: dict[int, list[Part]] = {}
        self._shapes: dict[int, list[ChunkLayout]] = {}
        self._client: DataPlaneClient | None = None
        self._device = torch.device("cpu")
        self._delivery: Delivery
        self._stream = SideStream(torch.device("cpu"), None)
        self._managers: dict[int, KVCacheManager] = {}  # by _manager_key() of the records' shard layout
        self._store: StoreQueue | None = None
        self._moving = False  # some manager has a job, or an outcome that nobody has taken
        self._results: list[FetchResult] = []
        self._synchronous: set[str] = set()
        self._layers: dict[str, int] = {}  # numbers of those that can be loaded one by one; none where none can
        self._awaited: set[int] = set()  # layers, by this step
        self._layer_times, self._layer_seconds = LayerTimes(), 0.0
        self._window_s = 0.0
        self._pages: SharedPages | None = None
        self._page_delivery: PageDelivery | None = None
        self._bad_blocks: set[int] = set()
        self._failed_loads: set[str] = set()
        self._ended: dict[str, int] = {}
        self._seconds: dict[str, float] = {}  # of loads, for whoever predicts how long the next one takes
        self._saves: dict[str, int] = {}  # request -> how much had been staged when it was saved
        self._watch = WeightsWatch(None)
        self._doubted_s: float | None = None  # since when results wait for the weights to be known
        self.layerwise: set[str] = set()
        self.counts = Counts()
        self.problem = problem

    # ------------------------------------------------------------------ start

    def register(self, caches: dict[str, Any]) -> None:
        """Take the KV caches, make sure that their layout is understood, and connect.

        Raises:
            ConfigurationError: an ability is configured that these caches cannot have.
        """
        if self.problem or self._groups is None:
            return
        self._pages = share_pages(self._config, self._kv_cache_config, self._groups, caches, self._logger)
        try:
            parts = find_parts(
                self._vllm_config,
                self._kv_cache_config,
                self._groups,
                caches,
                self._config,
                self._rank,
                paged=self._pages is not None,
            )
            self._device = parts[0].layout.device
            self._delivery = choose(self._config, self._device)
            weights = self._loaded_weights()
            hashes = content_hashes(self._config, self._logger)
            model = model_identity(self._vllm_config, self._kv_cache_config, self._groups.chunk_tokens, hashes)
            for part in parts:
                self._parts.setdefault(part.cut, []).append(part)
                self._shapes.setdefault(part.cut, []).append(part.described(model, self._config))
            if any(shape.quantizer is Quantizer.BINNED for shape in self._shapes[0]):
                self._parts[SAVED] = [replace(part, cut=SAVED) for part in self._parts[0]]
                self._shapes[SAVED] = [part.described(model, self._config, saved=True) for part in self._parts[0]]
        except (UncacheableError, ConfigurationError) as error:
            self.problem = str(error)  # the scheduler's half hears of it, and says so
            return
        self._stream = SideStream(self._device, self._delivery.gpu)
        self._watch = WeightsWatch(weights, ranks=self._rank.tp_size * self._rank.pp_size)
        self._model = model.digest()
        self._engine = engine_message(model, self._shapes[0][0], paged=self._pages is not None)
        self._layers = self._single_layers()
        self.connect()

    def connect(self) -> None:
        """Begin to move chunks: after the start, and again after :meth:`close`, with the same caches and names."""
        if not self._model or self._client is not None or self.problem:
            return
        try:
            self._client = self._config.client(self._rank.number, self._engine)
        except ConfigurationError as error:
            self.problem = str(error)  # the scheduler's half hears of it, and says so
            return
        self._watch.resume()
        if self._fetch:
            self._managers[0] = self._make_manager(0)
        if self._store_enabled:
            self._store = StoreQueue(
                self._client,
                self._registration([0], self._config.store_buffer_bytes, self._delivery.store, self._shapes.get(SAVED)),
                parts=len(self._parts[0]),
                timeout=self._config.store_timeout_s,
                plain=self._pages is not None,
            )
            # An engine starts once; without this its first prompts would not be stored.
            if not self._store.wait_tried(self._config.connect_timeout_s):
                reason = self._store.last_error
                detail = self._store.details.get(reason, self._client.address)
                self._failures.warn("not connected at start, trying on", reason, detail)
        self._log_start()

    def _log_start(self) -> None:
        assert self._client is not None and self._groups is not None
        self._logger.info(
            "ShadowServe: data plane %s, rank %d, chunks of %d tokens by %s: %s",
            self._client.address,
            self._rank.number,
            self._groups.chunk_tokens,
            self._delivery.kind,
            ", ".join(
                f"{part.group.kind} group {part.group.index} ({part.layout.layers} layers x {part.layout.heads} x "
                f"{part.layout.head_size}, {shape.raw_bytes} bytes of {shape.tokens} rows, {shape.quantizer.label})"
                for part, shape in zip(self._parts[0], self._shapes[0], strict=True)
            ),
        )
        if (peer := self._client.peer) is not None and self._rank.number == 0:
            for difference in peer.differences:
                self._logger.warning("ShadowServe: %s", difference)

    def _cuts(self, key: int) -> list[int]:
        """Return the shard layouts whose records the manager with this key fetches."""
        return [cut for cut in self._parts if _manager_key(cut) == key]

    def _make_manager(self, key: int) -> KVCacheManager:
        """Return what fetches records of one or several shard layouts into one region of memory."""
        assert self._client is not None
        cuts = self._cuts(key)
        # What comes back after a preemption is fetched beside all else, and seldom.
        configured = self._config.fetch_buffer_bytes // (4 if key == SAVED else 1)
        return KVCacheManager(
            self._client,
            self._registration(cuts, configured, self._delivery.fetch),
            self._scatter,
            scatter_layers=lambda job, chunks, layers: self._scatter(job, 0, 0, chunks, layers),
            layers=[part.wanted for cut in cuts for part in self._parts[cut]],
            order=ORDERS[self._config.order],
            placer=self._make_placer() if key == 0 else None,
            fetch_timeout_s=self._config.fetch_timeout_s,
        )

    def _make_placer(self) -> PagePlacer | None:
        if self._pages is None:
            return None
        assert self._client is not None
        timeout = self._config.connect_timeout_s
        self._page_delivery = PageDelivery(self._client, self._pages, self._shapes[0][0], timeout)
        slower = SlowerPaths(self.counts, self._logger) if self._rank.number == 0 else None
        return PagePlacer(self._page_delivery, self._parts[0][0], lambda: self._watch, slower)

    def _registration(
        self,
        cuts: Sequence[int],
        configured: int,
        make: Callable[[int], Memory],
        others: Sequence[ChunkLayout] | None = None,
    ) -> RegisteredMemory:
        """Return memory for chunks of some shard layouts, which are also stored as ``others``, where there are any."""
        assert self._client is not None
        shapes = [shape for cut in cuts for shape in self._shapes[cut]]
        size = max(self._buffer_chunks(cut, configured) * self._row_bytes(cut) for cut in cuts)
        timeout, progress = self._config.connect_timeout_s, self._delivery.shared
        known = [*shapes, *(others or ())]
        return RegisteredMemory(self._client, known, size, timeout, make=make, progress=progress)

    def _row_bytes(self, cut: int) -> int:
        """Return the bytes of one chunk of each part."""
        return sum(shape.raw_bytes for shape in self._shapes[cut])

    def _buffer_chunks(self, cut: int, configured: int) -> int:
        """Return how many chunks a buffer of so many bytes is made for."""
        return min(max(configured // self._row_bytes(cut), 2), _BUFFER_CHUNKS_MAX)

    def _single_layers(self) -> dict[str, int]:
        """Return the numbers of layers that can be loaded one by one.

        Raises:
            ConfigurationError: they are not alike.
        """
        assert self._groups is not None
        if not (self._config.layer_order and self._fetch):
            return {}
        if len(self._parts[0]) > 1:
            raise ConfigurationError(
                "layer_order: true needs layers whose KV caches are alike; this engine has others; remove layer_order"
            )
        names = self._kv_cache_config.kv_cache_groups[self._groups.groups[0].index].layer_names
        return {name: number for number, name in enumerate(names)}

    def _loaded_weights(self) -> LoadedWeights:
        """Return the weights of all models that have KV here.

        Raises:
            UncacheableError: they cannot be seen, so a change of them would go unnoticed.
        """
        if (problem := offloading_problem(self._vllm_config)) is not None:
            raise UncacheableError(problem)
        known = self._vllm_config.compilation_config.static_forward_context
        groups = self._kv_cache_config.kv_cache_groups
        layers = [known[name] for group in groups for name in group.layer_names if name in known]
        # Experts that are balanced change places all the time, and compute the same.
        balanced = bool(getattr(self._vllm_config.parallel_config, "enable_eplb", False))
        weights = LoadedWeights.of_engine(layers, experts=not balanced)
        if weights is None:
            raise UncacheableError("the model that its layers belong to is not to be found, so changes of its weights")
        return weights

    def handshake(self) -> WorkerHandshake:
        """Return what the scheduler's half needs to know."""
        namespaces = tuple(
            (cut, part.group.index, shape.namespace)
            for cut, parts in self._parts.items()
            for part, shape in zip(parts, self._shapes[cut], strict=True)
        )
        chunks = self._buffer_chunks(0, self._config.fetch_buffer_bytes) if self._layers else 0
        machine, chunk_bytes = machine_name(self._device), sum(shape.raw_bytes for shape in self._shapes.get(0, ()))
        layers, plain = len(self._layers), self._pages is not None
        return WorkerHandshake(self._model, namespaces, self.problem, chunks, layers, machine, plain, chunk_bytes)

    # ------------------------------------------------------------------ each step

    def exchange(self, metadata: ShadowServeMetadata) -> None:
        """Hand this step's loads to the manager, wait for those of ``in_step``, and take those that have ended."""
        self._watch.follow(metadata.epoch, metadata.doubts, metadata.agreed)
        if not metadata.loads and not self._moving:
            return  # as in most steps
        if metadata.loads:
            self._stream.follow()
        self.layerwise = {load.request_id for load in metadata.loads if load.layerwise}
        self._awaited = set()
        self._window_s = metadata.window_s
        in_step = {load.request_id for load in metadata.loads if load.in_step}
        self._synchronous |= self.layerwise | in_step
        if not self._managers:
            self._results += [self._failed(load, "disabled") for load in metadata.loads]
            return
        for key in {_manager_key(load.cut) for load in metadata.loads} - self._managers.keys():
            self._managers[key] = self._make_manager(key)
        for key, manager in self._managers.items():
            loads = [load for load in metadata.loads if _manager_key(load.cut) == key]
            try:
                self._results += manager.exchange(map(self._job, loads), metadata.cancels, metadata.arrived)
                if in_step:
                    manager.wait(in_step)
                    self._results += manager.exchange()
            except ValueError as error:  # vLLM handed over a request twice; computing it is always right
                self._results += [self._failed(load, "internal", str(error)) for load in loads]
        if metadata.idle and not self._results:
            self._await_end()
        self._moving = not all(manager.idle for manager in self._managers.values())

    def _await_end(self) -> None:
        """Wait for a load's end for a moment: seen at once it is seen sooner than by the next step, and steps take time
        from the core that scatters."""
        manager = next((manager for manager in self._managers.values() if not manager.idle), None)
        # Engines that step together wait for each other, and the others may have work.
        if manager is not None and self._vllm_config.parallel_config.data_parallel_size == 1:
            manager.wait_any(_IDLE_S)
            self._results += manager.exchange()

    def _job(self, load: LoadOperation) -> FetchJob:
        keys: list[tuple[bytes, ...]] = []
        places: list[list[int]] = []
        for cut in self._cuts(_manager_key(load.cut)):
            for part, shape in zip(self._parts[cut], self._shapes[cut], strict=True):
                group = load.groups[part.group.index] if load.groups and cut == load.cut else None
                keys.append(tuple(record_keys(shape.namespace, group.chunk_keys)) if group is not None else ())
                places.append(group.chunks if group is not None else [])
        return FetchJob(
            request_id=load.request_id,
            keys=tuple(keys),
            places=tuple(places) if load.groups else (),
            target=load,
            arrived=load.arrived,
            layerwise=load.layerwise,
            window_s=self._window_s,
        )

    def _first_place(self, cut: int) -> int:
        """Return the number of the first part of a shard layout among those of its manager."""
        return sum(len(self._parts[each]) for each in self._cuts(_manager_key(cut)) if each < cut)

    def _failed(self, load: LoadOperation, reason: str, detail: str = "") -> FetchResult:
        job = self._job(load)
        return FetchResult(job=job, chunks=(0,) * len(job.keys), reason=reason, detail=detail)

    def wait_layer(self, name: str) -> None:
        """Wait until a layer is in place of this step's loads that go layer by layer, or they have ended."""
        if (layer := self._layers.get(name)) is not None and self._managers:
            began_s = time.monotonic()
            self._managers[0].wait_layer(self.layerwise, layer)
            self._awaited.add(layer)
            if self._device.type == "cpu":
                self._layer_times.waited(began_s, time.monotonic())

    def _end_layerwise(self) -> None:
        """Take the results of this step's loads that went layer by layer.

        An engine that did not ask for each layer has computed on what was not there: nothing of it is used.
        """
        layerwise, self.layerwise = self.layerwise, set()
        if not layerwise or not self._managers:
            return
        self._managers[0].wait(layerwise)
        self._layer_seconds = self._layer_times.take()
        self._results += self._managers[0].exchange()
        if len(self._awaited) < len(self._layers):
            for number, result in enumerate(self._results):
                if result.job.request_id in layerwise:
                    detail = f"the engine waited for {len(self._awaited)} of {len(self._layers)} layers"
                    self._results[number] = replace(result, chunks=(0,), reason="not_awaited", detail=detail)

    def gather(self, operations: Sequence[StoreOperation], purpose: Any = pb.PURPOSE_REQUEST) -> None:
        """Copy finished chunks to where they wait to be stored, before their blocks can change."""
        if self._store is None or not operations:
            return
        self._watch.look()
        epoch, sample = self._watch.epoch, cache(self._watch.sample)
        if self._device.type == "cuda":
            sample()  # in the order of the step's kernels; on a CPU the storing thread is soon enough

        def lasts() -> str:
            if not self._watch.known(self._config.store_timeout_s, everywhere=True):
                return "weights_unknown"
            return "" if self._watch.check(epoch, sample()) else "weights_changed"

        with self._store.together():
            for operation in operations:
                for place, part in enumerate(self._parts[0]):
                    if part.group.index == operation.group and not self._another_stores(part):
                        self._offer(operation, place, lasts, purpose)

    def save(self, metadata: ShadowServeMetadata) -> None:
        """Copy what preempted requests hold to where it waits to be stored, before their blocks can change."""
        if not metadata.saves:
            return
        self._watch.follow(metadata.epoch, metadata.doubts, metadata.agreed)
        for request_id, operations in metadata.saves.items():
            self.gather(operations, pb.PURPOSE_PREEMPTION)
            self._saves[request_id] = self._store.staged if self._store is not None else 0

    def _another_stores(self, part: Part) -> bool:
        """Return whether another rank stores what all of them hold: they have one data plane, so one is enough."""
        return part.whole and self._rank.tp_rank > 0 and self._config.data_plane_address(0) == self._config.data_plane

    def _offer(self, operation: StoreOperation, place: int, lasts: Callable[[], str], purpose: Any) -> None:
        assert self._store is not None
        part, namespace = self._parts[0][place], self._shapes[SAVED if operation.exact else 0][place].namespace
        blocks = part.kernel_blocks(operation.blocks)
        each, rows = part.record_blocks, None
        if operation.tail_tokens:  # a row is a token, or, where nobody knows what pages hold, a page
            assert self._groups is not None
            rows = -(-operation.tail_tokens * self._shapes[0][place].tokens // self._groups.chunk_tokens)

        def copy(index: int, chunk: Any) -> Callable[[], str]:
            part.layout.gather(chunk, blocks[index * each : (index + 1) * each], rows)
            return _finished(self._device, lasts)

        absent = operation.absent_seconds
        self._store.offer(
            record_keys(namespace, operation.chunk_keys),
            copy,
            part=place,
            shape=place + (len(self._parts[0]) if operation.exact else 0),
            chained=part.group.kind == "full",
            previous=record_keys(namespace, [operation.previous])[0] if operation.previous is not None else None,
            anchored=operation.anchored,
            published=operation.published,
            lasts_s=operation.lasts_s,
            purpose=purpose,
            absent_since=float("-inf") if absent is None else time.monotonic() - absent,
        )

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended since the last call, and those of them that got nothing of it.

        Without those that were loaded synchronously: vLLM never took them for waiting. With one group, what a load has
        brought can be used though it fell short, and vLLM is told of the blocks that have to be computed
        (:meth:`take_bad_blocks`); with several it takes all of them.
        """
        self._end_layerwise()
        if self._pages is not None:
            self._pages.renew()  # before anybody hears of a load into them that ended without an answer
        if not self._results and not self._synchronous:
            return set(), set()  # as in most steps
        results = self._counting()
        for result in results:
            self._account(result)
        synchronous, self._synchronous = self._synchronous, set()
        failed, self._failed_loads = self._failed_loads, set()
        return {result.job.request_id for result in results} - synchronous, failed

    def _counting(self) -> list[FetchResult]:
        """Return the results that count by now: while the weights are in doubt none does, up to a deadline."""
        results, self._results = self._results, []
        if not any(any(result.chunks) for result in results):
            return results
        self._watch.look()
        waited = any(result.job.request_id in self._synchronous for result in results)
        if self._watch.known(self._config.fetch_timeout_s if waited else 0.0):
            self._doubted_s = None
            return results
        self._doubted_s = time.monotonic() if self._doubted_s is None else self._doubted_s
        if not waited and time.monotonic() - self._doubted_s < self._config.fetch_timeout_s:
            self._results = results
            return []
        self._doubted_s = None
        detail = "whether the engine computes with the same weights is not known yet"
        none = [replace(one, chunks=(0,) * len(one.chunks), reason="weights_unknown", detail=detail) for one in results]
        return [bare if any(one.chunks) else one for one, bare in zip(results, none, strict=True)]

    def _account(self, result: FetchResult) -> None:
        load: LoadOperation = result.job.target
        if any(result.chunks) and not self._watch.lasts(load.epoch):
            nothing = (0,) * len(result.chunks)
            result = replace(
                result, chunks=nothing, reason="weights_changed", detail="the engine computes with other weights"
            )
        assert self._groups is not None
        complete = result.complete and bool(load.groups)
        if self._config.fetch_or_recompute and (complete or result.reason == "deadline"):
            self._seconds[load.request_id] = result.seconds - result.waited
        # Parts of one group have the same chunks; what several groups have of a prompt is of use as a whole.
        placed = result.chunks[self._first_place(load.cut) :][: len(self._parts[load.cut])]
        chunks = min(placed) if self._groups.one else max(placed) if complete else 0
        self.counts.add("load_seconds", result.seconds)
        self.counts.add("fetched_bytes", result.fetched_bytes)
        self.counts.add("delivered_bytes", result.delivered_bytes)
        self.counts.add("loaded_tokens", self._placed(load, chunks))
        self.counts.add("load_requests", 1 if chunks else 0)
        if self._store is not None:
            for keys, there in zip(result.job.keys, result.chunks, strict=True):
                self._store.remember(keys[:there])
        if complete:
            if load.request_id in self._synchronous:
                self._ended[load.request_id] = chunks
            return
        self.counts.add("load_failures", reason=result.reason)
        if result.reason == "cancelled":
            return  # aborted: nobody waits for these blocks
        self._failures.warn("a prompt was not loaded in full, the rest is computed", result.reason, result.detail)
        if self._store is not None:
            for keys, there in zip(result.job.keys, result.chunks, strict=True):
                self._store.forget(keys[there:])
        self._ended[load.request_id] = chunks
        if not self._groups.one or not load.groups:
            self._failed_loads.add(load.request_id)
            return
        (group,) = self._groups.groups
        blocks = load.groups[group.index].blocks[chunks * group.record_blocks :]
        self._bad_blocks.update(block for block in blocks if block != NOWHERE)

    def _placed(self, load: LoadOperation, chunks: int) -> int:
        """Return how many tokens a load has brought that were not there: of the group that keeps most of them."""
        assert self._groups is not None
        tokens = 0
        for group in self._groups.groups if chunks else ():
            placed = load.groups[group.index].blocks[: chunks * group.record_blocks]
            tokens = max(tokens, group.block_tokens * sum(block != NOWHERE for block in placed))
        return tokens

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that loads left without valid KV, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler has to know of the loads that ended since the last call, and of the weights."""
        outlived = self._watch.outlived
        loads = self._ended or self._seconds or self._layer_seconds
        settled_doubt = self._watch.take_settled()
        if not (loads or self._saves or outlived or settled_doubt):
            return None  # as in most steps
        ended, self._ended = self._ended, {}
        seconds, self._seconds = self._seconds, {}
        layer_seconds, self._layer_seconds = self._layer_seconds, 0.0
        settled = self._store.settled if self._store is not None else 1 << 62
        saved = {name: 1 for name, staged in self._saves.items() if staged <= settled}
        for name in saved:
            del self._saves[name]
        doubts = {settled_doubt: 1} if settled_doubt else {}
        report = WorkerReport(ended, outlived, seconds, layer_seconds, saved, doubts)
        return report if report != WorkerReport() else None

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
        """Store what waits, end what runs, give memory back; at most ``close_timeout_s`` seconds."""
        ends = time.monotonic() + self._config.close_timeout_s
        if self._store is not None:
            self._store.close(self._config.close_timeout_s)
            self.take_store_counts()
        for manager in self._managers.values():
            self._results += manager.close(max(0.1, ends - time.monotonic()))
        if self._page_delivery is not None and self._pages is not None:
            self._page_delivery.close()
            self._pages.renew()
            self._pages.close()
            self._page_delivery = None
        if self._client is not None:
            self._client.close()
        self._store = self._client = None
        self._managers = {}
        self._watch.close()

    # ------------------------------------------------------------------ in the manager's thread

    def _scatter(
        self, job: FetchJob, part: int, first: int, chunks: Any, layers: tuple[int, int] | None = None
    ) -> None:
        load = job.target
        place = part - self._first_place(load.cut)
        made, chunk_bytes = self._parts[load.cut][place], self._shapes[load.cut][place].raw_bytes
        each = made.group.record_blocks
        count = len(chunks) // chunk_bytes
        blocks = load.groups[made.group.index].blocks[first * each : (first + count) * each]
        writing = self._pages.writing if self._pages is not None else contextlib.nullcontext()
        with writing, torch.inference_mode(), self._stream:
            made.layout.scatter(chunks, made.kernel_blocks(blocks), made.record_blocks, layers)
            if layers is not None and layers[1] < made.layout.layers:
                return  # weights are looked at once for all layers
            sample = self._watch.sample()
        self._watch.check(load.epoch, sample)


def _manager_key(cut: int) -> int:
    """Return which manager fetches records of a shard layout: 0 this engine's own, ``SAVED`` or all others together."""
    return cut if cut in (0, SAVED) else _OTHERS


def machine_name(device: Any) -> str:
    """Return what a device is: engines on alike ones take as long."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    names = [line.partition(":")[2].strip() for line in _processors() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _processors() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []


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
