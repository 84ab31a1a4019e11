"""Metrics of the connector. vLLM collects them after each step, sums them over workers and exports ``/metrics``."""

import logging
import os
import threading
import time
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from host_control.config import HostConfig
from shadowserve.health import Endpoint

_COUNTERS: Final = {
    "off_requests": "Requests served without the cache because the plugin is off. The engine's log says why.",
    "prompts": "Prompts that got blocks, each once.",
    "saved_prefill_seconds": "Predicted seconds to compute the loaded tokens, by the engine's own steps.",
    "lookup_requests": "Requests looked up in the store.",
    "lookup_tokens": "Looked-up prompt tokens, in complete chunks.",
    "hit_tokens": "Looked-up tokens that are stored.",
    "load_requests": "Requests whose KV was loaded, completely or in part.",
    "loaded_tokens": "Tokens whose KV was loaded, in whole blocks, summed over ranks.",
    "load_seconds": "Seconds from the start of a load to its outcome, summed over requests and ranks.",
    "layerwise_loads": "Loads that went layer by layer, summed over ranks.",
    "layer_waits": "Waits of steps for a layer of such loads.",
    "layer_wait_seconds": "Seconds of these waits.",
    "layers_ahead": "Layers in place beyond the awaited one, summed over the waits.",
    "fetched_bytes": "Bytes that the data plane received from the store for loads.",
    "delivered_bytes": "Bytes that the data plane delivered for loads.",
    "decode_during_fetch_seconds": "Measured seconds of decode steps that ran during fetches.",
    "decode_during_fetch_predicted_seconds": "Predicted seconds of the same steps without fetches.",
    "preempted_tokens": "Tokens whose KV preempted requests held.",
    "saved_tokens": "Tokens of preempted requests that were saved or already stored.",
    "restored_tokens": "Tokens that resumed requests were to load.",
    "stored_chunks": "Chunks that the data plane stored.",
    "exact_copies": "Exact copies of chunks that local tiers took.",
    "stored_raw_bytes": "Uncompressed bytes of stored chunks.",
    "stored_bytes": "Bytes of stored chunks as records.",
    "events": "KV events that the connector gave to vLLM.",
    "dropped_events": "KV events that were lost because too many waited.",
}
_BY_REASON: Final = {
    "prompt_tokens": "Prompt tokens: loaded, local (the engine's own prefix cache), or the reason they were computed.",
    "tier_hit_tokens": "Tokens of hits by tier: memory, device, storage, cold.",
    "lookup_failures": "Requests whose lookup had no answer, by reason.",
    "load_failures": "Loads that ended before their last chunk, by reason.",
    "dropped_stores": "Chunks that were not stored, by reason.",
    "dropped_copies": "Exact copies that were not stored, by reason.",
    "decisions": "Requests by the decision of the fetch-or-recompute policy, or of layer order (fetch, layers).",
    "cold_seconds": "Predicted seconds to read cold parts of hits from object storage, by decision.",
    "predicted_seconds": "Predicted seconds to the first token, by decision.",
    "first_token_seconds": "Measured seconds to the first token of requests with a prediction, by decision.",
    "whole_loads": "Loads that did not go layer by layer in an engine with layer order, by reason "
    "(docs/reference/combinations.md).",
    "slower_paths": "Requests that took a slower path than configured, by reason (docs/reference/combinations.md).",
}
_SEPARATOR: Final = "/"
_LOG_INTERVAL_S: Final = 60.0

_logger = logging.getLogger("vllm.shadowserve")


class ShadowServeStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step, keyed by ``name`` or ``name/reason``."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "ShadowServeStats":
        """Add the counts of another worker or step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's periodic log line."""
        return {name: round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class Counts:
    """Thread-safe counters that are emptied after each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, float] = {}

    def add(self, name: str, count: float = 1, reason: str = "") -> None:
        """Add to a counter; ``reason`` for counters with that label."""
        if count:
            key = f"{name}{_SEPARATOR}{reason}" if reason else name
            with self._lock:
                self._data[key] = self._data.get(key, 0) + count

    def take(self) -> ShadowServeStats | None:
        """Return and reset the counts; ``None`` if there are none."""
        if not self._data:
            return None
        with self._lock:
            data, self._data = self._data, {}
        return ShadowServeStats(data=data)


class FailureLog:
    """Logs failures, each kind at most once a minute, with the number of suppressed lines."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: dict[str, tuple[float, int]] = {}  # time of the last line, and lines suppressed since

    def warn(self, what: str, reason: str, detail: str) -> None:
        """Log that ``what`` failed for ``reason``."""
        key, now = f"{what}/{reason}", time.monotonic()
        last, suppressed = self._last.get(key, (float("-inf"), 0))
        if now - last < _LOG_INTERVAL_S:
            self._last[key] = (last, suppressed + 1)
            return
        self._last[key] = (now, 0)
        more = f" ({suppressed} more since the last such line)" if suppressed else ""
        self._logger.warning("ShadowServe: %s: %s%s%s", what, reason, f": {detail}" if detail else "", more)


class SlowerPaths:
    """Counts each request that takes a slower path than configured, and logs each reason once."""

    def __init__(self, counts: Counts, logger: logging.Logger) -> None:
        self.counts = counts
        self._logger = logger
        self._logged: set[str] = set()

    def add(self, reason: str, detail: str) -> None:
        """Count one request.

        Args:
            detail: The configured path, the path taken, and what to do about it.
        """
        self.counts.add("slower_paths", reason=reason)
        if reason not in self._logged:
            self._logged.add(reason)
            self._logger.warning("ShadowServe: requests take a slower path than configured (%s): %s", reason, detail)


class ShadowServePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:shadowserve_*`` counters in vLLM's ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:shadowserve_{name}",
                documentation=text,
                labelnames=[*labelnames, "reason"] if name in _BY_REASON else labelnames,
            )
            for name, text in (_COUNTERS | _BY_REASON).items()
        }
        config = HostConfig.from_engine(vllm_config.kv_transfer_config.kv_connector_extra_config)
        budget = self._gauge_cls(
            name="vllm:shadowserve_interference_budget_ratio",
            documentation="Configured interference budget: by how much transfers may slow down decode steps.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        for values in per_engine_labelvalues.values():
            budget.labels(*values).set(config.interference_budget)
            for name in _COUNTERS:
                self._counters[name].labels(*values)  # export 0 from the start
        self._page = _page(config.metrics_port)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one step."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            name, _, reason = key.partition(_SEPARATOR)
            if name in (_BY_REASON if reason else _COUNTERS):
                self._counters[name].labels(*values, *([reason] if reason else ())).inc(count)


def _page(port: int | None) -> Endpoint | None:
    """Serve the page of this engine's metrics, if a port is configured. A server process of vLLM's serves it."""
    if port is None:
        return None
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # several server processes share their metrics by files
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    try:
        endpoint = Endpoint("127.0.0.1", port, registry)
    except OSError as error:  # another server process of this engine, or another program
        _logger.warning("ShadowServe: metrics_port: cannot listen on %d: %s", port, error)
        return None
    _logger.info("ShadowServe: page and metrics: http://127.0.0.1:%d/", endpoint.port)
    return endpoint
