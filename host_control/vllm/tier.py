"""``ShadowServeTier``: a secondary tier for vLLM's ``OffloadingConnector``.

vLLM copies KV between the GPU and the rows of a CPU tier, and calls this class in the scheduler's process to store rows
and to load them again. One record holds one row: the bytes of all ranks as vLLM's workers wrote them. No method blocks
the scheduler: threads look rows up and store them (:mod:`host_control.vllm.tier_work`), the KV cache manager fetches
them, all by deadlines. docs/guides/offloading-tier.md describes configuration and identity.
"""

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.interference.slowdown import Interference
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.step_reports import StepReports
from host_control.vllm.epochs import WORKER_CALLS, counted_calls
from host_control.vllm.events import EventQueue, publishes
from host_control.vllm.identity.canonical import canonical, digest
from host_control.vllm.identity.content import content_hashes
from host_control.vllm.identity.namespace import computation
from host_control.vllm.identity.weights import weight_digests
from host_control.vllm.metrics import FailureLog
from host_control.vllm.start_check import tier_settings
from host_control.vllm.support import UncacheableError
from host_control.vllm.tier_work import RowLookups, Rows, RowStores
from shadowserve.chunk import TOKENS_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import ConfigurationError
from shadowserve.keys import ModelIdentity, record_keys
from shadowserve.proto import dataplane_pb2 as pb

_logger = init_logger("vllm.shadowserve")
_LOSSLESS: Final = {"float16", "bfloat16", "float32"}
_PAGE: Final = 4096
_PAGE_LAYOUT_VARIABLES: Final = ("VLLM_ATTENTION", "VLLM_FLASH", "VLLM_KV_CACHE", "VLLM_ROCM")
"""Prefixes of environment variables that can change the layout of a page."""
_BUFFER_ROWS_MAX: Final = 128
_STEP_S: Final = 2.0
"""Longer than a step of an engine. vLLM does not notify a tier of a step's end."""
_PREFIX: Final = "vllm:shadowserve_tier_"
_COUNTERS: Final = {
    "fetched_bytes": "Bytes that the data plane received from the store for loaded rows.",
    "stored_raw_bytes": "Uncompressed bytes of stored rows.",
    "stored_bytes": "Bytes of stored rows as records.",
    "dropped_events": "KV events that were lost because too many waited.",
}
_BY_REASON: Final = {
    "lookup_failures": "Rows whose lookup had no answer, by reason.",
    "load_failures": "Rows that were not loaded, by reason.",
    "store_failures": "Rows that were not stored, by reason.",
}


class ShadowServeTier(SecondaryTierManager):  # type: ignore[misc]
    """Stores rows of vLLM's CPU tier through a data plane.

    Args:
        locality: ``LOCAL`` or ``REMOTE``, for requests that select tiers by locality.
        enable_kv_events: Publish events for stored rows.
        trust_names: Also serve engines with adapters or images, which vLLM's hashes only identify by name.
        **config: Keys of section ``host``. Keys that the tier does not use are refused.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        enable_kv_events: bool = False,
        trust_names: bool = False,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        settings = tier_settings(config)
        self._close_timeout = settings.close_timeout_s
        enabled = enable_kv_events and publishes(offloading_spec)
        self._events = EventQueue() if enabled else None
        self._lock = threading.Lock()
        self._finished: list[JobResult] = []
        self._stats = OffloadingConnectorStats()
        self._failures = FailureLog(_logger)
        self._epoch = b""
        self._workers_called = _change_detector(counted_calls(WORKER_CALLS) or (lambda: 0))
        self._loading: set[str] = set()
        self._client: DataPlaneClient | None = None
        self._lookups: RowLookups | None = None
        self._loads: KVCacheManager | None = None
        self._stores: RowStores | None = None
        self._reports: StepReports | None = None
        self._rate = 0
        self._requests: set[str] = set()
        self.problem = ""
        try:
            engine = _engine_config()
            shape = _shape(offloading_spec, self.block_size_bytes, engine, settings, trust_names=trust_names)
            self._start(shape, settings, engine.kv_transfer_config)
        except (UncacheableError, ConfigurationError) as error:
            self.problem = str(error)
        except Exception as error:  # an unknown release of vLLM; a cache must not stop the engine
            _logger.exception("ShadowServe: starting the offloading tier failed")
            self.problem = f"it failed at the start with {error!r}; please report it with the log"
        if self.problem:
            _logger.error("ShadowServe's tier is off, so rows are neither stored nor loaded: %s", self.problem)

    def _start(self, shape: ChunkLayout, settings: HostConfig, transfer: Any) -> None:
        self._client = client = settings.client(0)
        self._namespace = shape.namespace

        def memory(configured: int, rows_min: int) -> RegisteredMemory:
            rows = min(max(configured // shape.raw_bytes, rows_min), _BUFFER_ROWS_MAX)
            return RegisteredMemory(client, [shape], rows * shape.raw_bytes, settings.connect_timeout_s)

        if settings.fetch and transfer.is_kv_consumer:
            self._lookups = RowLookups(client, shape.namespace, self._key, settings.lookup_timeout_s, self._failed)
            self._loads = KVCacheManager(
                client,
                memory(settings.fetch_buffer_bytes, 2),
                self._scatter,
                order=settings.order,
                fetch_timeout_s=settings.fetch_timeout_s,
                purpose=pb.PURPOSE_OFFLOADING_TIER,
            )
        if settings.store and transfer.is_kv_producer:
            self._stores = RowStores(
                memory(settings.store_buffer_bytes, 1), self._row, self._stored, self._count, settings
            )
        if budget := settings.interference_budget:
            self._rate = Interference(budget).rate
            self._reports = StepReports([client], budget, linger_s=_STEP_S)
        _logger.info(
            "ShadowServe's tier: data plane %s, rows of %d bytes, %s %s",
            client.address, shape.raw_bytes, shape.dtype.label, shape.quantizer.label,
        )  # fmt: skip

    # ---- vLLM's interface, on the scheduler's thread -----------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Use vLLM's default: offload computed chunks one by one."""
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Look a row up. ``RETRY`` until the answer is known, at most for ``lookup_timeout_s``."""
        if self._lookups is None:
            return LookupResult.MISS
        self._check_calls()
        found = self._lookups.find(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Send the lookups of this step, and report a step that may decode.

        vLLM does not tell a tier what a step computes. A step without a new request counts as a decode step.
        """
        if self._lookups is not None:
            self._lookups.send()
        if self._reports is not None and self._requests and not context.new_req_ids:
            self._reports.decodes(self._rate)
            self._reports.rests()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.discard(req_context.req_id)
        if self._lookups is not None:
            self._lookups.forget(req_context.req_id)

    def submit_load(self, job_metadata: Any) -> None:
        self._check_calls()
        rows = Rows.of(job_metadata, self._key)
        if self._loads is None:
            self._end_load(rows, 0, "disabled", self.problem)
            return
        job = FetchJob(request_id=str(rows.job_id), keys=(rows.records,), target=rows)
        self._loading.add(job.request_id)
        for result in self._loads.exchange([job]):
            self._loaded(result)

    def submit_store(self, job_metadata: Any) -> None:
        self._check_calls()
        rows = Rows.of(job_metadata, self._key)
        if self._stores is None:
            self._stored(rows, (), "disabled", self.problem)
            return
        self._stores.submit(rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in self._loads.exchange() if self._loads is not None else ():
            self._loaded(result)
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Wait until no job accesses vLLM's rows; jobs that have not started fail.

        vLLM calls this when it resets its caches, as after a change of weights. So a new, random epoch becomes part of
        the keys, and rows that were stored before are not found any more.
        """
        self._epoch = secrets.token_bytes(16)
        if self._lookups is not None:
            self._lookups.reset()
        if self._stores is not None:
            self._stores.drain()
        if self._loads is not None:
            for result in self._loads.exchange(cancel=self._loading):
                self._loaded(result)
            self._loads.wait(self._loading)

    def _check_calls(self) -> None:
        """Start a new epoch if the engine's workers were called: their weights may have changed."""
        if self._workers_called():
            _logger.warning(
                "ShadowServe's tier: this engine's workers were called (collective_rpc, wake_up), so their weights may "
                "have changed; rows that were stored before are not loaded any more"
            )
            self.drain_jobs()

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, dropped = ([], 0) if self._events is None else self._events.take()
        self._count("dropped_events", dropped)
        return events

    def shutdown(self) -> None:
        """End the threads within ``close_timeout_s``, plus ``connect_timeout_s`` per registered memory."""
        deadline = time.monotonic() + self._close_timeout
        if self._reports is not None:
            self._reports.close()
        if self._lookups is not None:
            self._lookups.close()
        if self._stores is not None:
            self._stores.close(self._close_timeout)
        if self._loads is not None:
            for result in self._loads.close(max(0.1, deadline - time.monotonic())):
                self._loaded(result)
        if self._client is not None:
            self._client.close()
        self._lookups = self._stores = self._loads = self._client = self._reports = None

    # ---- Metrics -----------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        plain = {f"{_PREFIX}{name}": OffloadingCounterMetadata(text) for name, text in _COUNTERS.items()}
        reasons = {
            f"{_PREFIX}{name}": OffloadingCounterMetadata(text, labelnames=("reason",))
            for name, text in _BY_REASON.items()
        }
        return plain | reasons

    def get_stats(self) -> OffloadingConnectorStats | None:
        with self._lock:
            stats, self._stats = self._stats, OffloadingConnectorStats()
        return None if stats.is_empty() else stats

    def _count(self, name: str, count: int, *reason: str) -> None:
        if count:
            with self._lock:
                self._stats.increase_counter(_PREFIX + name, count, reason)

    def _failed(self, what: str, rows: int, reason: str, detail: str) -> None:
        self._count(f"{what}_failures", rows, reason)
        if rows and reason not in ("cancelled", "closed", "disabled"):
            self._failures.warn(f"rows of the CPU tier: {what}", reason, detail)

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def _key(self, key: bytes) -> bytes:
        """Return the record key for vLLM's key of a row: a block hash and a group."""
        return record_keys(self._namespace, [self._epoch + key])[0] if self._client is not None else b""

    def _row(self, chunk_id: int) -> npt.NDArray[np.uint8]:
        row: npt.NDArray[np.uint8] = np.asarray(self._primary_kv_view)[chunk_id].view(np.uint8)
        return row

    def _scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        """Copy delivered rows into vLLM's rows, on the manager's thread."""
        delivered = np.frombuffer(chunks, np.uint8).reshape(-1, self.block_size_bytes)
        for chunk_id, row in zip(job.target.chunk_ids[first:], delivered, strict=False):
            np.copyto(self._row(chunk_id), row)  # releases the GIL; assigning to a memoryview would not

    def _loaded(self, result: FetchResult) -> None:
        self._loading.discard(result.job.request_id)
        self._count("fetched_bytes", result.fetched_bytes)
        self._end_load(result.job.target, result.chunks[0], result.reason, result.detail, result.seconds)

    def _end_load(self, rows: Rows, count: int, reason: str, detail: str, seconds: float | None = None) -> None:
        loaded, missing = rows.keys[:count], rows.keys[count:]
        self._failed("load", len(missing), reason, detail)
        if self._lookups is not None:
            self._lookups.set_missing(missing)  # otherwise vLLM would try to load the same rows forever
        self._end(rows.job_id, not missing, count, seconds, successful_keys=loaded if loaded and missing else None)

    def _stored(
        self, rows: Rows, stored: Sequence[bytes], reason: str, detail: str, seconds: float | None = None
    ) -> None:
        missing = len(rows.keys) - len(stored)
        self._failed("store", missing, reason, detail)
        if stored and self._events is not None:
            event = OffloadingEvent(keys=list(stored), medium=self.medium, removed=False, locality=self.locality)
            self._events.add(event)
        self._end(rows.job_id, not missing, len(stored), seconds)

    def _end(self, job_id: int, success: bool, rows: int, seconds: float | None, **more: Any) -> None:
        moved = rows * self.block_size_bytes
        result = JobResult(job_id=job_id, success=success, transfer_time=seconds, transfer_bytes=moved, **more)
        with self._lock:
            self._finished.append(result)


def _change_detector(count: Callable[[], int]) -> Callable[[], bool]:
    """Return a function that returns True if ``count()`` has changed since its last call."""
    last = count()

    def changed() -> bool:
        nonlocal last
        before, last = last, count()
        return last != before

    return changed


# ---- Identity --------------------------------------------------------------------------------------------------------


def _engine_config() -> Any:
    """Return the configuration of the engine that is being created.

    vLLM creates a tier in its connector's constructor and does not pass the engine's configuration. So this looks for
    the constructor's argument on the stack.
    """
    from vllm.config import VllmConfig

    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(found := frame.f_locals.get("vllm_config"), VllmConfig):
            return found
    raise UncacheableError("the tier was not created by one of vLLM's connectors, so the engine's model is not known")


def _shape(spec: Any, row_bytes: int, vllm_config: Any, config: HostConfig, *, trust_names: bool) -> ChunkLayout:
    """Return the layout and namespace of the records of this engine's rows."""
    _check(vllm_config, trust_names=trust_names)
    hashes = content_hashes(config, _logger)
    model = ModelIdentity(
        model=digest(computation(vllm_config, hashes)),
        weights=digest(weight_digests(vllm_config, hashes)),
        dtype=spec.config.model.dtype,
        chunk_tokens=spec.tokens_per_hash * spec.blocks_per_chunk,
    )
    # vLLM treats rows of one full-attention group as independent of ranks. But ranks write their layers and blocks one
    # after the other, so only canonical rows, and rows that are the same on all ranks, are independent of them.
    same_from_any = spec.config.canonical_layout or spec.replicated_layout
    rows = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=same_from_any)
    layout = _row_layout(row_bytes, spec.config.model.dtype, config.quantizer)
    named = {
        "tier": 1,
        "model": model.digest().hex(),
        # The model is identified by content, not by name.
        "rows": {name: value for name, value in rows.get_run_config().items() if name != "model_name"},
        "pages": _pages(spec, vllm_config),
        "layout": layout.described(),
    }
    return replace(layout, namespace=bytes.fromhex(digest(named)))


def _check(vllm_config: Any, *, trust_names: bool) -> None:
    """Raise UncacheableError if vLLM's block hashes do not identify the contents of pages."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.runner_type != "generate":
        raise UncacheableError(f"only models that generate text are supported, not runner '{model.runner_type}'")
    if str(cache.prefix_caching_hash_algo).startswith("xxhash"):
        raise UncacheableError(
            f"block hashes by {cache.prefix_caching_hash_algo} are not cryptographic; use --prefix-caching-hash-algo "
            "sha256"
        )
    named = "adapters" if vllm_config.lora_config is not None else "images" if model.is_multimodal_model else ""
    if named and not trust_names:
        raise UncacheableError(
            f"the engine accepts {named}, which vLLM's block hashes identify by name. If a name never changes its "
            'content in any engine that shares the store, set "trust_names": true for this tier'
        )


def _pages(spec: Any, vllm_config: Any) -> dict[str, Any]:
    """Return the inputs that the order of bytes in a row may depend on: rows are stored byte for byte."""
    import vllm
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    return {
        "vllm": vllm.__version__,
        "device": current_platform.get_device_name(),
        "attention": canonical(vllm_config.attention_config),
        "fusions": canonical(vllm_config.compilation_config.pass_config),  # some ROCm fusions write pages differently
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_PAGE_LAYOUT_VARIABLES)},
        "layout": spec.config.kv_cache_layout,
        # Rows contain layers of a draft model. Their content needs no identity: the model verifies drafts.
        "draft": None if speculative is None else [str(speculative.method), str(speculative.model)],
    }


def _row_layout(row_bytes: int, dtype: str, quantizer: str) -> ChunkLayout:
    """Return a chunk layout of one layer for a row's bytes, divided into "tokens" of equal length.

    Elements have the cache's dtype if possible, because their exponents compress well. Layers of another dtype are
    stored exactly, too, but compress less.
    """
    kind, how = DType.UINT8, Quantizer.PASSTHROUGH
    if dtype in _LOSSLESS and quantizer != Quantizer.PASSTHROUGH.label:
        kind, how = DType.from_label(dtype), Quantizer.LOSSLESS
    token_bytes = math.gcd(row_bytes, _PAGE)
    while row_bytes // token_bytes > TOKENS_MAX and row_bytes % (2 * token_bytes) == 0:
        token_bytes *= 2
    try:
        return ChunkLayout(
            dtype=kind,
            layers=1,
            kinds=1,
            vector_length=token_bytes // kind.itemsize,
            tokens=row_bytes // token_bytes,
            quantizer=how,
        )
    except ValueError as error:
        raise UncacheableError(f"rows of {row_bytes} bytes cannot be stored: {error}") from error
