"""Counters and gauges, for Prometheus and for the Statistics call."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

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
    "storage_connections": "Control connections opened to storage",
    "data_connections": "Data connections opened to storage",
    "storage_redirections": "Chunks redirected by a cluster's node",
    "deleted_records": "Corrupt records deleted from storage",
    "publications_refused": "Keys refused because a host exceeded its share of publications",
}
"""Counters without a label, with their help texts."""

_logger = logging.getLogger(__name__)

Gauges = dict[str, tuple[str, Callable[[], float]]]


def outcome_name(outcome: int) -> str:
    """Return an Outcome's name for metrics: lower case, without its prefix."""
    return Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


@dataclass(frozen=True, slots=True)
class StageCount:
    """Counters of one stage of the pipeline since the start."""

    stage: str
    items: int
    input_bytes: int
    output_bytes: int
    busy_ns: int


@dataclass(eq=False)
class Metrics:
    """All counters. The event loop's thread writes them; the exporter's thread reads them.

    Attributes:
        tier_records: Records by what local tiers did: fetched from ``memory`` or from a ``device``, ``kept``,
            ``dropped`` for lack of room, ``lost`` because of damage or a failed device.
        slower_paths: Fetches on a slower path than configured, by reason; see docs/reference/combinations.md.
        prefetches: Returns bytes and seconds of prefetches, by their origin.
    """

    fetches: Counter[str] = field(default_factory=Counter)  # calls by outcome
    stores: Counter[str] = field(default_factory=Counter)  # calls by outcome
    lookups: Counter[str] = field(default_factory=Counter)  # calls by outcome
    integrity_failures: Counter[str] = field(default_factory=Counter)  # faulty records, by outcome
    tier_records: Counter[str] = field(default_factory=Counter)
    slower_paths: Counter[str] = field(default_factory=Counter)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))  # the counters of TOTALS
    prefetches: Callable[[], Mapping[str, tuple[int, float]]] = dict
    stages: Callable[[], list[StageCount]] = list  # returns the pipeline's counters
    gauges: Gauges = field(default_factory=dict)  # help text and reader of each gauge
    families: list[Callable[[], list[Metric]]] = field(default_factory=list)  # readers of further metric families

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
        yield from self._by_label()
        for name, text in TOTALS.items():
            yield CounterMetricFamily(f"shadowserve_{name}", text, value=self.totals[name])
        for families in self.families:
            yield from families()
        for name, (text, read) in list(self.gauges.items()):
            yield GaugeMetricFamily(f"shadowserve_{name}", text, value=read())

    def _by_label(self) -> Iterator[Metric]:
        for name, text, label, counts in (
            ("fetches", "Fetch calls", "outcome", self.fetches),
            ("stores", "Store calls", "outcome", self.stores),
            ("lookups", "Lookup calls", "outcome", self.lookups),
            ("integrity_failures", "Faulty records", "reason", self.integrity_failures),
            ("tier_records", "Records in local tiers: fetched, kept, dropped or lost", "what", self.tier_records),
            ("slower_paths", "Fetches on a slower path than configured", "reason", self.slower_paths),
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=[label])
            for value, count in list(counts.items()):
                family.add_metric([value], count)
            yield family
        prefetches = self.prefetches()
        for index, (name, text) in enumerate(
            (
                ("prefetch_bytes", "Stored bytes prefetched into memory, by their origin"),
                ("prefetch_seconds", "Seconds with prefetches in progress, by their origin"),
            )
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=["hop"])
            for hop, carried in prefetches.items():
                family.add_metric([hop], carried[index])
            yield family
        stages = self.stages()
        for name, text in (
            ("stage_busy_seconds", "CPU time of a stage; a fused stage counts as decompress"),
            ("stage_items", "Slices that a stage has processed; put: records"),
            ("stage_input_bytes", "Bytes into a stage"),
            ("stage_output_bytes", "Bytes out of a stage"),
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=["stage"])
            for stage in stages:
                amount = stage.busy_ns / 1e9 if name == "stage_busy_seconds" else getattr(stage, name[len("stage_") :])
                family.add_metric([stage.stage], amount)
            yield family


def resident_bytes() -> int:
    """Return the daemon's own resident memory in bytes, without clients' shared segments."""
    total = 0
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                total += int(line.split()[1]) * 1024
    return total
