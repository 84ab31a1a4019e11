"""``ShadowServeConnector``: vLLM's calls, forwarded to the scheduler side or the worker side.

Loads are asynchronous: a request waits for its KV outside the running batch. :mod:`host_control.vllm.loads` has the
other ways. Every KV cache group is stored that vLLM's own prefix cache has. Without ``SupportsHMA`` vLLM would give
each model a single group, whose windows keep the whole context, or not start where that is impossible. Wherever
``support.py`` finds a reason, both sides are off: nothing is hashed, looked up or sent, so that the engine is as
without the plugin.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from host_control.config import HostConfig
from host_control.transfer import Reason
from host_control.vllm.epochs import counted_calls
from host_control.vllm.events import StoreEvents, publishes
from host_control.vllm.groups import Groups
from host_control.vllm.identity.adapters import Adapters
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.identity.requests import RequestInputs
from host_control.vllm.loads import LAYERS_OFF, has_own_logits_processors
from host_control.vllm.metadata import ShadowServeMetadata, WorkerHandshake, WorkerReport
from host_control.vllm.metrics import ShadowServePromMetrics, ShadowServeStats
from host_control.vllm.scheduler_side import SchedulerSide
from host_control.vllm.shards import Rank
from host_control.vllm.start_check import connector_settings, needs_one_group, why_not_layers
from host_control.vllm.support import UncacheableError, uncacheable
from host_control.vllm.worker_side import WorkerSide
from shadowserve import spans
from shadowserve.errors import ConfigurationError

# Under vLLM's own logger, so that its format and level apply.
_logger = init_logger("vllm.shadowserve")


class ShadowServeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads prompts' KV from the remote store and stores what the engine computes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = connector_settings(transfer.kv_connector_extra_config, vllm_config)
        spans.start(config.otlp_endpoint, "shadowserve-engine")
        groups, problem = _groups(vllm_config, kv_cache_config, config)
        fetch = config.fetch and transfer.is_kv_consumer
        if groups is not None and not groups.one:
            needs_one_group(config, ", ".join(group.kind for group in groups.groups), loads=fetch)
        if groups is not None and config.layer_order == "auto":
            if why_not := why_not_layers(config, vllm_config, groups, loads=fetch):
                config = config.model_copy(update={"layer_order": False})
                if fetch and role == KVConnectorRole.SCHEDULER:
                    _logger.info(LAYERS_OFF, why_not)
        store = config.store and transfer.is_kv_producer
        self._groups = groups
        self._events: StoreEvents | None = None
        self._scheduler: SchedulerSide  # in the scheduler's process alone
        self._worker: WorkerSide  # in workers alone
        self._schedules = role == KVConnectorRole.SCHEDULER
        if self._schedules:
            self._warn(transfer, problem)
            lora = vllm_config.lora_config
            if groups is not None and store and publishes(vllm_config):
                self._events = StoreEvents(kv_cache_config, groups.chunk_tokens)
            self._scheduler = SchedulerSide(
                config,
                groups,
                fetch=fetch,
                store=store,
                problem=problem,
                logger=_logger,
                inputs=RequestInputs(Adapters(lora, content_hashes(config, _logger)) if lora is not None else None),
                recomputes=transfer.kv_load_failure_policy == "recompute",
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                by_priority=vllm_config.scheduler_config.policy == "priority",
                sampling_state=has_own_logits_processors(vllm_config),
                events=self._events,
            )
            self._watch_calls(vllm_config)
        else:
            self._worker = WorkerSide(
                config,
                vllm_config,
                kv_cache_config,
                groups,
                _rank(vllm_config),
                fetch=fetch,
                store=store,
                problem=problem,
                logger=_logger,
            )

    def _watch_calls(self, vllm_config: Any) -> None:
        if (calls := counted_calls()) is None:
            _logger.warning(
                "ShadowServe does not see calls to this vLLM's engine core; after a change of weights call "
                "reset_prefix_cache(reset_connector=True)"
            )
            return
        # Balanced experts change places all the time, so a change of their weights stays unnoticed.
        self._scheduler.epochs.watch(calls, blind=bool(getattr(vllm_config.parallel_config, "enable_eplb", False)))

    @staticmethod
    def _warn(transfer: Any, problem: str) -> None:
        if problem:
            _logger.error("ShadowServe is off, every prompt is computed: %s", problem)
        elif transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            _logger.warning(
                'ShadowServe: kv_load_failure_policy is "%s": vLLM will fail requests whose KV cannot be loaded; set '
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config, and it computes them instead',
                transfer.kv_load_failure_policy,
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Tell if steps wait for layers, which a CUDA graph of the whole model would not do.

        An engine that cannot load layer by layer refuses to start, so none gives up such graphs for nothing.
        ``layer_order: auto`` never changes graphs.
        """
        config = HostConfig.from_engine(extra_config)
        return config.layer_order is True and config.fetch

    @property
    def requires_kv_delivery(self) -> bool:
        """Tell vLLM that no engine depends on the chunks of another: this is a cache."""
        return False

    # ------------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Start with the workers' handshakes, keyed by pipeline stage and tensor-parallel rank.

        vLLM's own method takes handshakes of later stages for an error and ends the start.
        """
        # Among several connectors (MultiConnector) vLLM passes on the handshake of the first that has one.
        silent = "a worker's handshake is missing; beside other connectors, name ShadowServe first"
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        shakes = {number: WorkerHandshake(b"", (), silent) for number in range(ranks * parallel.pipeline_parallel_size)}
        for (stage, rank), shake in metadata.items():
            if isinstance(shake, WorkerHandshake):
                shakes[stage * ranks + rank] = shake
        self._scheduler.start(shakes)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._groups is not None:
            self._groups.bind(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._schedules:
            self._scheduler.epochs.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler.problem:
            self._scheduler.counts.add("off_requests")
            self._scheduler.counts.add("prompts")
            self._scheduler.counts.add("prompt_tokens", request.num_prompt_tokens, reason=Reason.OFF)
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the local prefix can be loaded, and True if that is asynchronous."""
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and self._scheduler.waits(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load a request's KV into its new blocks."""
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = self._scheduler.step(scheduler_output)
        if self._events is not None:
            self._events.follow(metadata.epoch)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        finished, report = connector_output.finished_recving, connector_output.kv_connector_worker_meta
        if finished or report is not None:  # as in few steps
            report = report if isinstance(report, WorkerReport) else WorkerReport()
            self._scheduler.worker_output(finished, report)
            if self._events is not None:
                self._events.stored(report.stored)

    def take_events(self) -> Iterable[Any]:
        """Return the KV events since the last step: which records of this engine are stored, or gone."""
        return () if self._events is None else self._events.take()

    def has_pending_push_work(self) -> bool:
        """Tell an idle engine to go on stepping for a moment, so that the workers can report what they have stored."""
        return self._events is not None and self._events.due

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. vLLM may free its blocks, after the load of an aborted one has ended."""
        return False, self._scheduler.finished(request)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, for a ``MultiConnector`` whose other connectors limit vLLM to one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Stop serving KV that was stored before."""
        if self._schedules:
            self._scheduler.reset()
        return True

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        try:
            self._worker.register(kv_caches)
        except ConfigurationError:
            self._worker.close()
            raise
        except Exception as error:  # a cache must not stop a service, whatever the error is
            _logger.exception("ShadowServe: the KV caches cannot be registered")
            self._worker.close()
            self._worker.problem = _unexpected(error)

    def unregister_kv_caches(self) -> None:
        """Release the caches and all other memory: the engine goes to sleep (vLLM 0.33)."""
        self._worker.close()

    def restore_kv_caches(self) -> None:
        """Connect again: the engine has woken, with its caches at the same addresses (vLLM 0.33)."""
        self._worker.connect()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy what preempted requests hold, before this step writes to their blocks."""
        assert isinstance(kv_connector_metadata, ShadowServeMetadata)
        self._worker.save(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads and take those that have ended; in-step loads have ended on return."""
        self._worker.exchange(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer of this step's layerwise loads is in place, or they have ended, by their deadline."""
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: chunks are gathered after the step, all layers at once."""

    def wait_for_save(self) -> None:
        """Gather the chunks that this step completed."""
        self._worker.stores.gather(self._metadata().stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load has ended, and those of them that vLLM computes from the start."""
        finished, failed = self._worker.loads.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that a load left without valid KV."""
        return self._worker.loads.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report loads that fell short or that this step waited for, and weights that have changed."""
        return self._worker.take_report()

    def _metadata(self) -> ShadowServeMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ShadowServeMetadata)
        return metadata

    # ------------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> ShadowServeStats | None:
        """Return the metrics since the last step. In the scheduler this is the last call for each step."""
        if self._schedules:
            self._scheduler.stepped()
            return self._scheduler.counts.take()
        self._worker.stores.take_counts()
        return self._worker.counts.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ShadowServeStats:
        return ShadowServeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ShadowServePromMetrics:
        return ShadowServePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End threads and release shared memory, within a bounded time."""
        (self._scheduler if self._schedules else self._worker).close()
        spans.stop()


def _groups(vllm_config: Any, kv_cache_config: Any, config: HostConfig) -> tuple[Groups | None, str]:
    """Return the KV cache groups of this engine, or why it is served without the cache."""
    try:
        if problem := uncacheable(vllm_config, kv_cache_config):
            return None, problem
        return Groups(vllm_config, kv_cache_config, config), ""
    except UncacheableError as error:
        return None, str(error)
    except Exception as error:  # an engine of an unknown kind
        _logger.exception("ShadowServe: this engine's configuration cannot be read")
        return None, _unexpected(error)


def _rank(vllm_config: Any) -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    stage = get_pp_group().rank_in_group
    return Rank(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size, stage, parallel.pipeline_parallel_size)


def _unexpected(error: Exception) -> str:
    return f"it failed at the start with {error!r}; please report it with the log"
