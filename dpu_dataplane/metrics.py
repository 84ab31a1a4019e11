"""Counters and gauges, for Prometheus and for the Statistics call."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shadowserve import native
from shadowserve.proto.dataplane_pb2 import Outcome

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

TOTALS: Final = {
    "lookup_keys": "Keys looked up",
    "lookup_hits": "Keys that lookups found stored",
    "batches": "Batches run by the pipeline",
    "layer_batches": "Batches that storage has answered as one stream in layer order",
    "fetched_bytes": "Stored bytes that batches read from storage or local tiers",
    "tier_bytes": "Bytes of fetched_bytes from local tiers",
    "prefetch_wasted_bytes": "Prefetched bytes that were not fetched",
    "page_bytes": "Bytes of tier_bytes that devices read straight into engines' pages",
    "page_requests": "Page reads: one for each fetch and device",
    "delivered_bytes": "Bytes delivered into registered memory",
    "stored_raw_bytes": "Bytes of stored chunks before encoding",
    "stored_bytes": "Bytes of stored chunks as records",
    "quantized_vectors": "Token vectors stored with the steps of a calibration",
    "exact_vectors": "Of them, stored exactly: first tokens, and those with elements outside of all steps",
    "storage_connections": "Control connections opened to storage",
    "data_connections": "Data connections opened to storage",
    "storage_nodes_refused": "Lists of storage nodes that cannot be used, so the old one stays",
    "storage_redirections": "Chunks redirected by a cluster's node",
    "deleted_records": "Corrupt records deleted from storage",
    "publications_refused": "Keys refused because a host exceeded its share of publications",
    "pins_refused": "Records that were stored and that storage then refused to pin",
}
"""Counters without a label, with their help texts."""

COUNTS: Final = {
    "fetches": ("Fetch calls", "outcome"),
    "stores": ("Store calls", "outcome"),
    "lookups": ("Lookup calls", "outcome"),
    "queries": ("Queries of routers", "status"),
    "integrity_failures": ("Faulty records", "reason"),
    "tier_records": ("Records in local tiers: fetched, kept, dropped or lost", "what"),
    "storage_nodes_reads": ("Records read from the first choice of several storage nodes, or another one", "choice"),
    "storage_nodes_copies": ("Hot records to copy to another storage node", "result"),
    "slower_paths": ("Fetches on a slower path than configured", "reason"),
    "prefetch_bytes": ("Stored bytes prefetched into memory, by their origin", "hop"),
    "prefetch_seconds": ("Seconds with prefetches in progress, by their origin", "hop"),
    "moved_bytes": ("Bytes moved on this host, by mover", "mover"),
    "interference_wait_seconds": ("Seconds that movers waited for the interference budget", "mover"),
    "interference_delayed": ("Turns that waited for the interference budget", "mover"),
}
"""Counters with a label, with their help texts and labels."""

_DROPPED: Final = "Moves given up while they waited for the interference budget, by reason"
_STAGES: Final = {
    "stage_busy_seconds": "CPU time of a stage; a fused stage counts as decompress",
    "stage_items": "Slices that a stage has processed; put: records",
    "stage_input_bytes": "Bytes into a stage",
    "stage_output_bytes": "Bytes out of a stage",
}

_PACE_HALF_LIFE_S: Final = 30.0

_logger = logging.getLogger(__name__)

Gauges = dict[str, tuple[str, Callable[[], float]]]


def outcome_name(outcome: int) -> str:
    """Return an Outcome's name for metrics: lower case, without its prefix."""
    return Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


class Pace:
    """How fast recent fetches were, waiting included: decayed sums."""

    def __init__(self) -> None:
        self._bytes = self._seconds = self._at_s = 0.0

    def add(self, size: int, seconds: float, now_s: float) -> None:
        kept = 0.5 ** ((now_s - self._at_s) / _PACE_HALF_LIFE_S)
        self._bytes, self._seconds, self._at_s = self._bytes * kept + size, self._seconds * kept + seconds, now_s

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first fetch."""
        return self._bytes / self._seconds if self._seconds > 0 else None


@dataclass(eq=False)
class Metrics:
    """All counters. The event loop's thread writes them; the exporter's thread reads them.

    ``tier_records`` has what local tiers did: records fetched from ``memory`` or from a ``device``, ``kept``,
    ``dropped`` for lack of room, ``lost`` because of damage or a failed device. ``storage_nodes_reads``: from the
    ``first`` choice; from the ``second``, because of load or a changed map; or because the first one was ``away``.
    docs/reference/combinations.md has the reasons of ``slower_paths``.
    """

    local_pace: Pace = field(default_factory=Pace)  # of fetches most of whose bytes came from local tiers
    storage_pace: Pace = field(default_factory=Pace)  # of the others
    pipeline: native.Pipeline | None = None  # whose stages are counted
    fetches: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)
    queries: Counter[str] = field(default_factory=Counter)
    integrity_failures: Counter[str] = field(default_factory=Counter)
    tier_records: Counter[str] = field(default_factory=Counter)
    storage_nodes_reads: Counter[str] = field(default_factory=Counter)
    storage_nodes_copies: Counter[str] = field(default_factory=Counter)
    slower_paths: Counter[str] = field(default_factory=Counter)
    prefetch_bytes: Counter[str] = field(default_factory=Counter)
    prefetch_seconds: dict[str, float] = field(default_factory=dict)
    moved_bytes: Counter[str] = field(default_factory=Counter)
    interference_wait_seconds: dict[str, float] = field(default_factory=dict)
    interference_delayed: Counter[str] = field(default_factory=Counter)
    interference_dropped: Counter[tuple[str, str]] = field(default_factory=Counter)  # by mover and reason
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))  # the counters of TOTALS
    gauges: Gauges = field(default_factory=dict)  # help text and reader of each gauge

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.fetch_seconds = self._histogram("fetch", "Time of a Fetch call, waiting included")
        self.lookup_seconds = self._histogram("lookup", "Time of a Lookup call")
        self.store_seconds = self._histogram("store", "Time of a Store call, waiting included")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"shadowserve_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def add_slower_path(self, reason: str, detail: str) -> None:
        """Count a fetch on a slower path than configured, and log each reason once, with the remedy."""
        self.slower_paths[reason] += 1
        if self.slower_paths[reason] == 1:
            _logger.warning("a slower path than configured is taken (%s): %s", reason, detail)

    def collect(self) -> Iterator[Metric]:
        for name, (text, label) in COUNTS.items():
            counts = {(value,): count for value, count in list(getattr(self, name).items())}
            yield _family(name, text, [label], counts)
        dropped = dict(list(self.interference_dropped.items()))
        yield _family("interference_dropped", _DROPPED, ["mover", "reason"], dropped)
        for name, text in TOTALS.items():
            yield CounterMetricFamily(f"shadowserve_{name}", text, value=self.totals[name])
        stages = {} if self.pipeline is None else self.pipeline.statistics()
        for name, text in _STAGES.items():
            counts = {
                (stage.name.lower(),): getattr(count, name.removeprefix("stage_"), count.busy_ns / 1e9)
                for stage, count in stages.items()
            }
            yield _family(name, text, ["stage"], counts)
        for name, (text, read) in list(self.gauges.items()):
            yield GaugeMetricFamily(f"shadowserve_{name}", text, value=read())


def _family(name: str, text: str, labels: list[str], counts: Mapping[Any, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"shadowserve_{name}", text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def resident_bytes() -> int:
    """Return the daemon's own resident memory in bytes, without clients' shared segments."""
    total = 0
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                total += int(line.split()[1]) * 1024
    return total
