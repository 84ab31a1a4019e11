"""The worker side of the connector: moves KV between paged memory and the data plane."""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.delivery import Delivery, SideStream, choose
from host_control.lookup import EXACT, SAVED
from host_control.manager import KVCacheManager
from host_control.pages import PageDelivery, SharedPages
from host_control.registered_memory import Memory, RegisteredMemory
from host_control.store import StoreQueue
from host_control.vllm.calibrated import PresetSteps, preset_steps
from host_control.vllm.events import EVENTS_MAX, publishes
from host_control.vllm.groups import Groups
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.identity.namespace import model_identity
from host_control.vllm.loaded_weights import LoadedWeights
from host_control.vllm.loads import LAYERS_OFF
from host_control.vllm.metadata import ShadowServeMetadata, WorkerHandshake, WorkerReport
from host_control.vllm.metrics import Counts, FailureLog, SlowerPaths
from host_control.vllm.paging import PagePlacer, share_pages
from host_control.vllm.shards import LOSSY, Rank, WorkerShards, find_shards
from host_control.vllm.support import UncacheableError, offloading_problem
from host_control.vllm.weights_watch import WeightsWatch
from host_control.vllm.worker_loads import WorkerLoads
from host_control.vllm.worker_stores import WorkerStores
from shadowserve.calibration import PlacedSteps
from shadowserve.chunk import Quantizer
from shadowserve.errors import ConfigurationError
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import engine_message


@dataclass(frozen=True)
class _Engine:
    """Facts of the worker's engine that do not change."""

    config: HostConfig
    vllm_config: Any
    kv_cache_config: Any
    groups: Groups | None
    rank: Rank
    fetch: bool
    store: bool


class WorkerSide:
    """Moves KV between paged memory and the data plane. All methods run on the worker's main thread.

    Attributes:
        loads, stores: Loads and stores of this worker.
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
        self._engine = _Engine(config, vllm_config, kv_cache_config, groups, rank, fetch, store)
        self._logger = logger
        self.problem = problem
        self.counts = Counts()
        self._model = b""
        self._engine_message: pb.Engine | None = None
        self._client: DataPlaneClient | None = None
        self._device = torch.device("cpu")
        self._delivery: Delivery
        self._preset: PresetSteps | None = None
        self._pages: SharedPages | None = None
        self._page_delivery: PageDelivery | None = None
        self._shards = WorkerShards()
        self._watch = WeightsWatch(None)
        self._make_sides()

    def _make_sides(self) -> None:
        """Make the halves that load and store, for the shards, the device and the watch as they are now."""
        config, groups, counts, logger = self._engine.config, self._engine.groups, self.counts, self._logger
        self.loads = WorkerLoads(config, groups, self._shards, self._watch, counts, logger, self._make_manager)
        self.stores = WorkerStores(
            config, groups, self._engine.rank, self._shards, self._device, self._watch, counts, logger
        )

    # ------------------------------------------------------------------ start

    def register(self, caches: dict[str, Any]) -> None:
        """Check that the layout of the KV caches is known, and connect.

        Raises:
            ConfigurationError: An ability is configured that these caches cannot have.
        """
        engine, config, groups = self._engine, self._engine.config, self._engine.groups
        if self.problem or groups is None:
            return
        self._pages = share_pages(config, engine.kv_cache_config, groups, caches, self._logger)
        try:
            parts = find_shards(
                engine.vllm_config,
                engine.kv_cache_config,
                groups,
                caches,
                config,
                engine.rank,
                paged=self._pages is not None,
            )
            self._device = parts[0].layout.device
            self._delivery = choose(config, self._device)
            weights = self._loaded_weights()
            hashes = content_hashes(config, self._logger)
            model = model_identity(engine.vllm_config, engine.kv_cache_config, groups.chunk_tokens, hashes)
            self._preset = preset = preset_steps(config, engine.vllm_config)
            described = [(part, part.described(model, config, preset)) for part in parts]
            own = [(part, shape) for part, shape in described if part.shard_layout == 0]
            if any(shape.quantizer in LOSSY for _, shape in own):
                saved = [replace(part, shard_layout=SAVED) for part, _ in own]
                described += [(part, part.described(model, config, preset, saved=True)) for part in saved]
                exact = [replace(part, shard_layout=EXACT) for part, _ in own if config.exact_copies]
                described[:0] = [(part, part.described(model, config, preset, exact=True)) for part in exact]
        except (UncacheableError, ConfigurationError) as error:
            self.problem = str(error)  # the scheduler side learns of it and logs it
            return
        shards = self._shards
        for part, shape in described:
            shards.parts.setdefault(part.shard_layout, []).append(part)
            shards.shapes.setdefault(part.shard_layout, []).append(shape)
        self._watch = WeightsWatch(weights, ranks=engine.rank.tp_size * engine.rank.pp_size)
        self._make_sides()
        self.loads.stream = SideStream(self._device, self._delivery.gpu)
        self.loads.pages = self._pages
        self.loads.layers.numbers = self._single_layers(groups)
        # Engines that step together wait for each other, and another one may have work.
        self.loads.steps_alone = engine.vllm_config.parallel_config.data_parallel_size == 1
        self._model = model.digest()
        steps = self._preset.label if self._preset is not None else ""
        self._engine_message = engine_message(model, shards.shapes[0][0], paged=self._pages is not None, steps=steps)
        self._engine_message.index.CopyFrom(self._index())
        self.connect()

    def connect(self) -> None:
        """Connect to the data plane: at the start, and again after :meth:`close`, with the same caches and names."""
        if not self._model or self._client is not None or self.problem:
            return
        config = self._engine.config
        try:
            self._client = config.client(self._engine.rank.number, self._engine_message)
        except ConfigurationError as error:
            self.problem = str(error)  # the scheduler side learns of it and logs it
            return
        self._watch.resume()
        if self._engine.fetch:
            self.loads.managers[0] = self._make_manager(0)
        if self._engine.store:
            queue = self.loads.store = self.stores.queue = self._make_queue(self._client)
            # An engine starts once; without this its first prompts would not be stored.
            if not queue.wait_tried(config.connect_timeout_s):
                reason = queue.last_error
                detail = queue.details.get(reason, self._client.address)
                FailureLog(self._logger).warn("not connected at start, trying on", reason, detail)
        self._log_start(self._client)

    def _log_start(self, client: DataPlaneClient) -> None:
        assert self._engine.groups is not None
        self._logger.info(
            "ShadowServe: data plane %s, rank %d, chunks of %d tokens by %s: %s",
            client.address,
            self._engine.rank.number,
            self._engine.groups.chunk_tokens,
            self._delivery.kind,
            ", ".join(
                f"{part.group.kind} group {part.group.index} ({part.layout.layers} layers x {part.layout.heads} x "
                f"{part.layout.head_size}, {shape.raw_bytes} bytes of {shape.tokens} rows, {shape.quantizer.label})"
                for part, shape in zip(self._shards.parts[0], self._shards.shapes[0], strict=True)
            ),
        )
        if (peer := client.peer) is not None and self._engine.rank.number == 0:
            for difference in peer.differences:
                self._logger.warning("ShadowServe: %s", difference)

    def _make_queue(self, client: DataPlaneClient) -> StoreQueue:
        config, shards = self._engine.config, self._shards
        size = config.store_buffer_bytes
        return StoreQueue(
            client,
            self._registration(client, shards.stored_layouts, size, self._delivery.store),
            parts=len(shards.parts[0]),
            timeout=config.store_timeout_s,
            plain=self._pages is not None,
            reports_max=EVENTS_MAX if publishes(self._engine.vllm_config) else 0,
        )

    def _make_manager(self, key: int) -> KVCacheManager:
        """Return the manager that fetches records of some shard layouts into one region of memory."""
        assert self._client is not None
        config, shards, loads = self._engine.config, self._shards, self.loads
        layouts = shards.layouts_of(key)
        # Loads after a preemption are rare, and other loads run at the same time.
        size = config.fetch_buffer_bytes // (4 if key == SAVED else 1)
        return KVCacheManager(
            self._client,
            self._registration(self._client, layouts, size, self._delivery.fetch),
            loads.scatter,
            scatter_layers=loads.scatter_layers,
            layers=[part.wanted for layout in layouts for part in shards.parts[layout]],
            order=config.order,
            placer=self._make_placer(self._client) if key == 0 else None,
            fetch_timeout_s=config.fetch_timeout_s,
        )

    def _make_placer(self, client: DataPlaneClient) -> PagePlacer | None:
        if self._pages is None:
            return None
        timeout = self._engine.config.connect_timeout_s
        self._page_delivery = PageDelivery(client, self._pages, self._shards.shapes[0][0], timeout)
        slower = SlowerPaths(self.counts, self._logger) if self._engine.rank.number == 0 else None
        return PagePlacer(self._page_delivery, self._shards.parts[0][0], lambda: self._watch, slower)

    def _registration(
        self,
        client: DataPlaneClient,
        layouts: Sequence[int],
        configured: int,
        make: Callable[[int], Memory],
    ) -> RegisteredMemory:
        """Return memory for chunks of some shard layouts."""
        shapes = [shape for layout in layouts for shape in self._shards.shapes[layout]]
        size, timeout = self._shards.buffer_bytes(layouts, configured), self._engine.config.connect_timeout_s
        steps = None
        if self._preset is not None and any(shape.quantizer is Quantizer.WEIGHTED for shape in shapes):
            starts = [(part.layers[0], part.heads[0]) for layout in layouts for part in self._shards.parts[layout]]
            steps = PlacedSteps(self._preset.steps, starts)
        return RegisteredMemory(client, shapes, size, timeout, make, progress=self._delivery.shared, steps=steps)

    def _single_layers(self, groups: Groups) -> dict[str, int]:
        """Return the number of each layer that can be loaded alone."""
        if not (self._engine.config.layer_order and self._engine.fetch):
            return {}
        if len(self._shards.parts[0]) > 1:
            if self._engine.config.layer_order is True:
                raise ConfigurationError(
                    "layer_order: true needs layers whose KV caches are alike; this engine has others; remove "
                    "layer_order"
                )
            if self._engine.rank.number == 0:
                self._logger.info(LAYERS_OFF, "the KV caches of its layers differ")
            return {}
        names = self._engine.kv_cache_config.kv_cache_groups[groups.groups[0].index].layer_names
        return {name: number for number, name in enumerate(names)}

    def _loaded_weights(self) -> LoadedWeights:
        """Return the weights of all models that have KV here."""
        vllm_config = self._engine.vllm_config
        if (problem := offloading_problem(vllm_config)) is not None:
            raise UncacheableError(problem)
        known = vllm_config.compilation_config.static_forward_context
        groups = self._engine.kv_cache_config.kv_cache_groups
        layers = [known[name] for group in groups for name in group.layer_names if name in known]
        # Balanced experts change places all the time, and compute the same.
        balanced = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
        weights = LoadedWeights.of_engine(layers, experts=not balanced)
        if weights is None:
            raise UncacheableError("the model that its layers belong to is not to be found, so changes of its weights")
        return weights

    def _index(self) -> pb.EngineIndex:
        """Return how tokens become the keys of this rank's records, for queries of routers."""
        vllm_config, shards = self._engine.vllm_config, self._shards
        named = list(zip(shards.parts[0], shards.shapes[0], strict=True))
        return pb.EngineIndex(
            model=str(vllm_config.model_config.served_model_name or "model")[:256],
            instance=str(vllm_config.kv_transfer_config.engine_id or "engine")[:128],
            chain=self._model,
            namespaces=[shape.namespace for part, shape in named if part.group.kind == "full"],
            last_namespaces=[shape.namespace for part, shape in named if part.group.kind != "full"],
            last_chunks=[part.group.last_chunks for part, _ in named if part.group.kind != "full"],
        )

    def handshake(self) -> WorkerHandshake:
        shards = self._shards
        namespaces = tuple(
            (layout, part.group.index, shape.namespace)
            for layout, parts in shards.parts.items()
            for part, shape in zip(parts, shards.shapes[layout], strict=True)
        )
        return WorkerHandshake(
            self._model,
            namespaces,
            self.problem,
            layers=len(self.loads.layers.numbers),
            machine=machine_name(self._device),
            plain=self._pages is not None,
            chunk_bytes=shards.chunk_bytes(),
        )

    # ------------------------------------------------------------------ each step

    def save(self, metadata: ShadowServeMetadata) -> None:
        if metadata.saves:
            self._watch.follow(metadata.epoch, metadata.doubts, metadata.agreed)
            self.stores.save(metadata)

    def exchange(self, metadata: ShadowServeMetadata) -> None:
        self._watch.follow(metadata.epoch, metadata.doubts, metadata.agreed)
        self.loads.exchange(metadata)

    def wait_layer(self, name: str) -> None:
        if self.loads.layers.requests:
            self.loads.wait_layer(name, measure=self._device.type == "cpu")

    def take_report(self) -> WorkerReport | None:
        """Return the report to the scheduler side, None where there is nothing to report."""
        outlived, settled_doubt = self._watch.outlived, self._watch.take_verified()
        stores = self.stores
        if not (self.loads.has_report or stores.saves or stores.has_stored or outlived or settled_doubt):
            return None  # as in most steps
        report = self.loads.take_report()
        report.outlived = outlived
        report.saved, report.stored = stores.take_saved(), stores.take_stored()
        report.settled = {settled_doubt: 1} if settled_doubt else {}
        return report if report != WorkerReport() else None

    def close(self) -> None:
        """Store what waits, end the loads, release memory; at most ``close_timeout_s`` seconds."""
        ends = time.monotonic() + self._engine.config.close_timeout_s
        self.stores.close()
        self.loads.close(ends)
        self.loads.store = None
        if self._page_delivery is not None and self._pages is not None:
            self._page_delivery.close()
            self._pages.renew()
            self._pages.close()
            self._page_delivery = None
        if self._client is not None:
            self._client.close()
            self._client = None
        self._watch.close()


def machine_name(device: Any) -> str:
    """Return the name of a device; engines on devices of one name take the same time."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    names = [line.partition(":")[2].strip() for line in _processors() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _processors() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
