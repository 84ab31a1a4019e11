"""Loads of a worker: jobs for the KV cache managers, and the reports of their outcomes."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from host_control.config import HostConfig
from host_control.delivery import SideStream
from host_control.interference.table import LayerTimes, LayerWait
from host_control.layer_fetch import LayerWindow
from host_control.layouts import NOWHERE
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.pages import SharedPages
from host_control.store import StoreQueue
from host_control.transfer import Reason
from host_control.vllm.groups import Groups
from host_control.vllm.metadata import LoadOperation, ShadowServeMetadata, WorkerReport
from host_control.vllm.metrics import Counts, FailureLog
from host_control.vllm.shards import Shard, WorkerShards, manager_key
from host_control.vllm.weights_watch import WeightsWatch
from shadowserve.keys import record_keys

_IDLE_S: Final = 0.002
"""Time that a step without work waits for the end of a load. vLLM sleeps half as long between two such steps."""


@dataclass
class _LayerLoads:
    """Loads that the current step waits for layer by layer.

    Attributes:
        numbers: Number of each layer that can be loaded alone, by name; empty where none can.
        keys: Keys of the managers that run them.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)
    keys: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    waits: list[LayerWait] = field(default_factory=list)
    times: LayerTimes = field(default_factory=LayerTimes)


class WorkerLoads:
    """Runs the loads of one worker, on its main thread; :meth:`scatter` runs on the managers' threads.

    Attributes:
        managers: Managers by key; none where nothing is fetched.
        store: Queue that remembers which chunks are stored; None where nothing is stored.
        pages: Paged memory that is shared with the data plane, or None.
        steps_alone: No other engine waits for this engine's steps.
    """

    def __init__(
        self,
        config: HostConfig,
        groups: Groups | None,
        shards: WorkerShards,
        watch: WeightsWatch,
        counts: Counts,
        logger: logging.Logger,
        make_manager: Callable[[int], KVCacheManager],
    ) -> None:
        self._config = config
        self._groups = groups
        self._shards = shards
        self._watch = watch
        self._counts = counts
        self._failures = FailureLog(logger)
        self._make_manager = make_manager
        self.managers: dict[int, KVCacheManager] = {}
        self.layers = _LayerLoads()
        self.store: StoreQueue | None = None
        self.stream = SideStream(torch.device("cpu"), None)
        self.pages: SharedPages | None = None
        self.steps_alone = True
        self._moving = False  # some manager has a job, or an outcome that was not taken
        self._window_s = 0.0
        self._results: list[FetchResult] = []
        self._doubted_at: float | None = None  # time since which results wait for the weights to be known
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._report = WorkerReport()

    # ------------------------------------------------------------------ jobs

    def exchange(self, metadata: ShadowServeMetadata) -> None:
        """Hand this step's loads to the managers, wait for in-step loads, and take outcomes."""
        if not metadata.loads and not self._moving:
            return  # as in most steps
        if metadata.loads:
            self.stream.follow()
        self.layers.requests = {load.request_id for load in metadata.loads if load.layerwise}
        self.layers.keys = {manager_key(load.shard_layout) for load in metadata.loads if load.layerwise}
        self.layers.awaited = set()
        self._window_s = metadata.window_s
        if not self.managers:
            self._results += [self._failed_load(load, Reason.DISABLED) for load in metadata.loads]
            return
        for key in {manager_key(load.shard_layout) for load in metadata.loads} - self.managers.keys():
            self.managers[key] = self._make_manager(key)
        for key, manager in self.managers.items():
            loads = [load for load in metadata.loads if manager_key(load.shard_layout) == key]
            self._exchange_with(manager, loads, metadata)
        if metadata.idle and not self._results:
            self._await_end()
        self._moving = not all(manager.idle for manager in self.managers.values())

    def _exchange_with(
        self, manager: KVCacheManager, loads: list[LoadOperation], metadata: ShadowServeMetadata
    ) -> None:
        in_step = {load.request_id for load in metadata.loads if load.in_step}
        try:
            self._results += manager.exchange(map(self._job, loads), metadata.cancels, metadata.available)
            if in_step:
                manager.wait(in_step)
                self._results += manager.exchange()
        except ValueError as error:  # vLLM handed over a request twice; computing it is always right
            self._results += [self._failed_load(load, Reason.INTERNAL, str(error)) for load in loads]

    def _await_end(self) -> None:
        """Wait a moment for a load's end.

        The outcome is taken sooner than by the next step, and steps take time from the core that scatters.
        """
        manager = next((manager for manager in self.managers.values() if not manager.idle), None)
        if manager is not None and self.steps_alone:
            manager.wait_any(_IDLE_S)
            self._results += manager.exchange()

    def _job(self, load: LoadOperation) -> FetchJob:
        keys: list[tuple[bytes, ...]] = []
        places: list[list[int]] = []
        first_layers: list[int] = []
        for layout in self._shards.layouts_of(manager_key(load.shard_layout)):
            for part, shape in zip(self._shards.parts[layout], self._shards.shapes[layout], strict=True):
                group = load.groups[part.group.index] if load.groups and layout == load.shard_layout else None
                keys.append(tuple(record_keys(shape.namespace, group.chunk_keys)) if group is not None else ())
                places.append(group.chunks if group is not None else [])
                first_layers.append(part.first_layer)
        return FetchJob(
            request_id=load.request_id,
            keys=tuple(keys),
            places=tuple(places) if load.groups else (),
            target=load,
            available=load.available,
            layerwise=load.layerwise,
            first_layers=tuple(first_layers),
            window_s=self._window_s,
            context=load.context,
        )

    def _failed_load(self, load: LoadOperation, reason: str, detail: str = "") -> FetchResult:
        job = self._job(load)
        return FetchResult(job=job, chunks=(0,) * len(job.keys), reason=reason, detail=detail)

    def close(self, ends: float) -> None:
        """End all jobs, by a time of the monotonic clock."""
        for manager in self.managers.values():
            self._results += manager.close(max(0.1, ends - time.monotonic()))
        self.managers = {}

    # ------------------------------------------------------------------ layer by layer

    def wait_layer(self, name: str, *, measure: bool) -> None:
        """Wait until a layer of this step's layerwise loads is in place, or they have ended."""
        if (layer := self.layers.numbers.get(name)) is not None and self.managers:
            began_s = time.monotonic()
            ahead = min(self.managers[key].wait(self.layers.requests, layer) for key in self.layers.keys)
            ended_s = time.monotonic()
            self.layers.awaited.add(layer)
            self.layers.waits.append(LayerWait(began_s, ended_s - began_s, ahead))
            if measure:
                self.layers.times.waited(began_s, ended_s)
            self._counts.add("layer_waits")
            self._counts.add("layer_wait_seconds", ended_s - began_s)
            self._counts.add("layers_ahead", ahead)

    def _end_layerwise(self) -> None:
        """Take the outcomes of this step's layerwise loads.

        An engine that did not wait for each layer has computed on invalid KV: nothing of these loads counts.
        """
        requests, self.layers.requests = self.layers.requests, set()
        if not requests or not self.managers:
            return
        for key in self.layers.keys:
            self.managers[key].wait(requests)
            self._results += self.managers[key].exchange()
        self._report.layer_seconds = self.layers.times.take()
        waits, self.layers.waits = self.layers.waits, []
        self._report.layer_waits |= dict.fromkeys(requests, waits)
        awaited, layers = len(self.layers.awaited), len(self.layers.numbers)
        if awaited < layers:
            detail = f"the engine waited for {awaited} of {layers} layers"
            self._results = [
                _without_chunks(result, Reason.NOT_AWAITED, detail) if result.job.request_id in requests else result
                for result in self._results
            ]

    # ------------------------------------------------------------------ outcomes

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended since the last call, and those of them that got no KV.

        Without loads that a step waited for: vLLM does not expect these. With one group, the chunks of a load that fell
        short are used, and vLLM computes the other blocks (:meth:`take_bad_blocks`); with several it takes all or none.
        """
        self._end_layerwise()
        if self.pages is not None:
            self.pages.renew()  # before vLLM learns of a load into pages that ended without an answer
        if not self._results:
            return set(), set()  # as in most steps
        results = self._certain()
        for result in results:
            self._account(result)
        failed, self._failed = self._failed, set()
        return {result.job.request_id for result in results if not _is_synchronous(result)}, failed

    def _certain(self) -> list[FetchResult]:
        """Return the results that count by now: none while the weights are in doubt, up to a deadline."""
        results, self._results = self._results, []
        if not any(any(result.chunks) for result in results):
            return results
        self._watch.look()
        synchronous = any(map(_is_synchronous, results))
        if self._watch.known(self._config.fetch_timeout_s if synchronous else 0.0):
            self._doubted_at = None
            return results
        self._doubted_at = time.monotonic() if self._doubted_at is None else self._doubted_at
        if not synchronous and time.monotonic() - self._doubted_at < self._config.fetch_timeout_s:
            self._results = results
            return []
        self._doubted_at = None
        detail = "whether the engine computes with the same weights is not known yet"
        return [_without_chunks(one, Reason.WEIGHTS_UNKNOWN, detail) if any(one.chunks) else one for one in results]

    def _account(self, result: FetchResult) -> None:
        """Count an outcome, and add it to the reports to vLLM and to the scheduler side."""
        load: LoadOperation = result.job.target
        if any(result.chunks) and not self._watch.lasts(load.epoch):
            result = _without_chunks(result, Reason.WEIGHTS_CHANGED, "the engine computes with other weights")
        complete = result.complete and bool(load.groups)
        chunks = self._usable_chunks(result, complete=complete)
        predicts = self._config.fetch_or_recompute or self._config.layer_order
        if predicts and (complete or result.reason == Reason.DEADLINE):
            self._report.seconds[load.request_id] = result.seconds - result.waited
        self._counts.add("load_seconds", result.seconds)
        self._counts.add("layerwise_loads", load.layerwise)
        self._counts.add("fetched_bytes", result.fetched_bytes)
        self._counts.add("delivered_bytes", result.delivered_bytes)
        self._counts.add("loaded_tokens", self._loaded_tokens(load, chunks))
        self._counts.add("load_requests", 1 if chunks else 0)
        self._remember(result, complete=complete)
        if complete:
            if _is_synchronous(result):
                self._report.loaded[load.request_id] = chunks
            return
        self._counts.add("load_failures", reason=result.reason)
        if result.reason == Reason.CANCELLED:
            return  # aborted: vLLM does not use these blocks
        self._failures.warn("a prompt was not loaded in full, the rest is computed", result.reason, result.detail)
        self._report.loaded[load.request_id] = chunks
        self._report.reasons[load.request_id] = result.reason
        self._fail_blocks(load, chunks)

    def _usable_chunks(self, result: FetchResult, *, complete: bool) -> int:
        """Return the leading chunks that vLLM can use."""
        assert self._groups is not None
        load: LoadOperation = result.job.target
        first = self._shards.first_of(load.shard_layout)
        placed = result.chunks[first : first + len(self._shards.parts[load.shard_layout])]
        # The shards of one group have the same chunks; several groups are used all or none.
        return min(placed) if self._groups.one else max(placed) if complete else 0

    def _remember(self, result: FetchResult, *, complete: bool) -> None:
        """Record which chunks are stored, so that they are not stored again."""
        if self.store is None:
            return
        for keys, placed in zip(result.job.keys, result.chunks, strict=True):
            self.store.remember(keys[:placed])
            if not complete and result.reason != Reason.CANCELLED:
                self.store.forget(keys[placed:])

    def _fail_blocks(self, load: LoadOperation, chunks: int) -> None:
        """Note the blocks that a load left without valid KV, or all of the load where vLLM takes no single blocks."""
        assert self._groups is not None
        if not self._groups.one or not load.groups:
            self._failed.add(load.request_id)
            return
        (group,) = self._groups.groups
        blocks = load.groups[group.index].blocks[chunks * group.record_blocks :]
        self._bad_blocks.update(block for block in blocks if block != NOWHERE)

    def _loaded_tokens(self, load: LoadOperation, chunks: int) -> int:
        """Return how many tokens a load brought that were not there: of the group that keeps most of them."""
        assert self._groups is not None
        tokens = 0
        for group in self._groups.groups if chunks else ():
            placed = load.groups[group.index].blocks[: chunks * group.record_blocks]
            tokens = max(tokens, group.block_tokens * sum(block != NOWHERE for block in placed))
        return tokens

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport:
        """Return the report of the loads that ended since the last call."""
        report, self._report = self._report, WorkerReport()
        return report

    @property
    def has_report(self) -> bool:
        """Some load has ended since the last report."""
        return bool(self._report.loaded or self._report.seconds or self._report.layer_seconds)

    # ------------------------------------------------------------------ in a manager's thread

    def scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        """Move chunks from registered memory into the engine's blocks."""
        load: LoadOperation = job.target
        number = part - self._shards.first_of(load.shard_layout)
        made = self._shards.parts[load.shard_layout][number]
        count = len(chunks) // self._shards.shapes[load.shard_layout][number].raw_bytes
        with self._writing():
            made.layout.scatter(chunks, self._blocks(load, made, first, count), made.record_blocks)
            sample = self._watch.sample()
        self._watch.check(load.epoch, sample)

    def scatter_layers(
        self, job: FetchJob, part: int, chunks: Any, window: LayerWindow, layers: tuple[int, int]
    ) -> None:
        """Move some layers of a window from registered memory into the engine's blocks."""
        load: LoadOperation = job.target
        number = part - self._shards.first_of(load.shard_layout)
        made, shape = self._shards.parts[load.shard_layout][number], self._shards.shapes[load.shard_layout][number]
        count = len(chunks) // (shape.raw_bytes // shape.layers * (window.layers_end - window.layer))
        first = job.first_layers[part]
        with self._writing():
            blocks, held = self._blocks(load, made, window.chunk, count), (window.layer, window.layers_end)
            shown, there = ((begin - first, end - first) for begin, end in (layers, held))
            made.layout.scatter(chunks, blocks, made.record_blocks, shown, there)
            if layers[1] < len(self.layers.numbers):
                return  # weights are checked with the last layer
            sample = self._watch.sample()
        self._watch.check(load.epoch, sample)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """While the context lasts, this thread may write into the engine's blocks."""
        with (
            self.pages.writing if self.pages is not None else contextlib.nullcontext(),
            torch.inference_mode(),
            self.stream,
        ):
            yield

    @staticmethod
    def _blocks(load: LoadOperation, made: Shard, first: int, count: int) -> list[int]:
        """Return the kernel blocks of some chunks of a load."""
        each = made.group.record_blocks
        return made.kernel_blocks(load.groups[made.group.index].blocks[first * each : (first + count) * each])


def _is_synchronous(result: FetchResult) -> bool:
    """Tell if a step waited for a load, so that vLLM never took its request for waiting."""
    return bool(result.job.target.layerwise or result.job.target.in_step)


def _without_chunks(result: FetchResult, reason: str, detail: str) -> FetchResult:
    return replace(result, chunks=(0,) * len(result.chunks), reason=reason, detail=detail)
