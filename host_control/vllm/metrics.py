"""Statistics of the connector, as vLLM wants them: counted per step, summed over workers, shown at ``/metrics``."""

import logging
import threading
import time
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS: Final = {
    "off_requests": "Requests served without the cache, since the plugin is off: the engine's log says why.",
    "lookup_requests": "Requests looked up in the remote store.",
    "lookup_tokens": "Prompt tokens in complete chunks that were looked up.",
    "hit_tokens": "Of those, tokens that the remote store holds.",
    "load_requests": "Requests whose KV was loaded, at least in part.",
    "loaded_tokens": "Tokens whose KV was loaded, in whole blocks, summed over ranks.",
    "load_seconds": "Seconds from hand-over to outcome of loads, summed over requests and ranks.",
    "fetched_bytes": "Bytes that the data plane received from the store for loads.",
    "delivered_bytes": "Bytes that the data plane delivered for loads.",
    "beside_fetching_seconds": "Seconds of decode steps that KV was fetched beside.",
    "beside_fetching_predicted_seconds": "Seconds that these were predicted to take beside nothing.",
    "preempted_tokens": "Tokens whose KV preempted requests held.",
    "saved_tokens": "Of those, tokens that were saved or are stored.",
    "restored_tokens": "Tokens that preempted requests were to load when they ran again.",
    "stored_chunks": "Chunks that the data plane stored.",
    "stored_raw_bytes": "Bytes of those chunks as the engine holds them.",
    "stored_bytes": "Bytes of those chunks as records.",
}
_BY_REASON: Final = {
    "tier_hit_tokens": "Of hits, tokens by the tier that they were in: memory, device, storage, cold.",
    "lookup_failures": "Requests whose lookup had no answer, by reason.",
    "load_failures": "Loads that ended before their last chunk, by reason.",
    "dropped_stores": "Chunks that were not stored, by reason.",
    "decisions": "Requests with a hit, or that no hit would serve, by decision: see docs/fetch-or-recompute.md.",
    "cold_seconds": "Seconds in which storage expected to have nearer what was cold of hits, by the decision.",
    "predicted_seconds": "Seconds to the first token that decisions were predicted to bring, where one was predicted.",
    "first_token_seconds": "Seconds to the first token that came of those decisions.",
    "slower_paths": "Requests that took a slower path than configured, by reason (docs/combinations.md).",
}
_SEPARATOR: Final = "/"


class ShadowServeStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step: ``name`` or ``name/reason`` -> number."""

    def reset(self) -> None:
        """Start over."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "ShadowServeStats":
        """Add the counts of another worker or step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs once in each interval."""
        return {name: round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not self.data


class Counts:
    """A thread-safe bag of counts that is emptied each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, float] = {}

    def add(self, name: str, count: float = 1, reason: str = "") -> None:
        """Count something; ``reason`` for the counters that have one."""
        if count:
            key = f"{name}{_SEPARATOR}{reason}" if reason else name
            with self._lock:
                self._data[key] = self._data.get(key, 0) + count

    def take(self) -> ShadowServeStats | None:
        """Return the counts since the last call, ``None`` if there are none."""
        if not self._data:
            return None
        with self._lock:
            data, self._data = self._data, {}
        return ShadowServeStats(data=data)


class FailureLog:
    """Logs each reason at once, then at most once in ``interval`` seconds, with the number left out in between."""

    def __init__(self, logger: logging.Logger, interval: float = 60.0) -> None:
        self._logger = logger
        self._interval = interval
        self._seen: dict[str, tuple[float, int]] = {}

    def warn(self, what: str, reason: str, detail: str) -> None:
        """Log that ``what`` failed for ``reason``."""
        now = time.monotonic()
        last, left_out = self._seen.get(f"{what}/{reason}", (float("-inf"), 0))
        if now - last < self._interval:
            self._seen[f"{what}/{reason}"] = (last, left_out + 1)
            return
        self._seen[f"{what}/{reason}"] = (now, 0)
        more = f" ({left_out} more since the last such line)" if left_out else ""
        self._logger.warning("ShadowServe: %s: %s%s%s", what, reason, f": {detail}" if detail else "", more)


class SlowerPaths:
    """Counts each request that takes a slower path than configured, and logs each reason once.

    Args:
        counts: of the connector, where the counter ``slower_paths`` is kept.
        logger: for the line that each reason gets.
    """

    def __init__(self, counts: Counts, logger: logging.Logger) -> None:
        self._counts = counts
        self._logger = logger
        self._logged: set[str] = set()

    def add(self, reason: str, detail: str) -> None:
        """Count one request.

        Args:
            reason: label of the counter: a few lower-case words joined by ``_``, from a fixed set.
            detail: the path that was configured, the path that is taken, and what to do about it.
        """
        self._counts.add("slower_paths", reason=reason)
        if reason not in self._logged:
            self._logged.add(reason)
            self._logger.warning("ShadowServe: a slower path than configured is taken (%s): %s", reason, detail)


class ShadowServePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:shadowserve_*`` counters at vLLM's own ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter_cls(name=f"vllm:shadowserve_{name}", documentation=text, labelnames=labelnames)
            for name, text in _COUNTERS.items()
        }
        self._reasoned = {
            name: self._counter_cls(
                name=f"vllm:shadowserve_{name}", documentation=text, labelnames=[*labelnames, "reason"]
            )
            for name, text in _BY_REASON.items()
        }
        for counter in self._plain.values():
            for values in per_engine_labelvalues.values():
                counter.labels(*values)  # shown as 0 from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's counts."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            name, _, reason = key.partition(_SEPARATOR)
            if reason and name in self._reasoned:
                self._reasoned[name].labels(*values, reason).inc(count)
            elif name in self._plain:
                self._plain[name].labels(*values).inc(count)
