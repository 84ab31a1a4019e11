"""Counts of everything that an operator asks for, as a Prometheus registry and for the Statistics call."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shadowserve.proto.dataplane_pb2 import Outcome

__all__ = ["Metrics", "StageCount", "outcome_name", "resident_bytes"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_logger = logging.getLogger(__name__)

Gauges = dict[str, tuple[str, Callable[[], float]]]


def outcome_name(outcome: int) -> str:
    """Return an Outcome's name as it stands in metrics and statistics: lower case, without its prefix."""
    return Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


@dataclass(frozen=True, slots=True)
class StageCount:
    """Work done by one stage of the pipeline since the daemon started."""

    stage: str
    items: int
    input_bytes: int
    output_bytes: int
    busy_ns: int


@dataclass(eq=False)
class Metrics:
    """All counts. Owned by the event loop's thread; the exporter's thread only reads them.

    Attributes:
        fetches: calls by outcome.
        stores: calls by outcome.
        lookups: calls by outcome.
        integrity_failures: records found faulty, by outcome.
        tier_records: by what tiers did: had them in ``memory`` or on a ``device`` as they were fetched, ``kept`` them,
            ``dropped`` them for want of room, ``lost`` them since they were damaged or a device failed.
        slower_paths: fetches that took a slower path than configured, by reason: docs/combinations.md.
        prefetches: reads what hops have carried into the tiers' memory: bytes and seconds, by where they begin.
        prefetch_wasted_bytes: of records that were prefetched, and that nobody has fetched.
        stages: reads the pipeline's counters.
        gauges: name to (help, reader) of what is measured when asked.
        families: readers of families that parts keep themselves.
    """

    fetches: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    lookups: Counter[str] = field(default_factory=Counter)
    integrity_failures: Counter[str] = field(default_factory=Counter)
    tier_records: Counter[str] = field(default_factory=Counter)
    slower_paths: Counter[str] = field(default_factory=Counter)
    lookup_keys: int = 0
    lookup_hits: int = 0
    batches: int = 0
    layer_batches: int = 0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    tier_bytes: int = 0
    page_bytes: int = 0
    page_requests: int = 0
    stored_raw_bytes: int = 0
    stored_bytes: int = 0
    storage_connections: int = 0
    data_connections: int = 0
    storage_redirections: int = 0
    deleted_records: int = 0
    publications_refused: int = 0
    prefetch_wasted_bytes: int = 0
    prefetches: Callable[[], Mapping[str, tuple[int, float]]] = dict
    stages: Callable[[], list[StageCount]] = list
    gauges: Gauges = field(default_factory=dict)
    families: list[Callable[[], list[Metric]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.fetch_seconds = self._histogram("fetch", "Time of a Fetch call, waiting included")
        self.lookup_seconds = self._histogram("lookup", "Time of a Lookup call")
        self.store_seconds = self._histogram("store", "Time of a Store call, waiting included")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"shadowserve_{name}_seconds", text, buckets=_SECONDS, registry=self.registry)

    def add_slower_path(self, reason: str, detail: str) -> None:
        """Count a fetch that takes a slower path than configured, and log each reason once.

        Args:
            reason: label of the counter, from a fixed set.
            detail: the path that was configured, the path that is taken, and what to do about it.
        """
        self.slower_paths[reason] += 1
        if self.slower_paths[reason] == 1:
            _logger.warning("a slower path than configured is taken (%s): %s", reason, detail)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family; called by the registry."""
        yield from self._by_label()
        for name, text, value in (
            ("lookup_keys", "Keys asked for by lookups", self.lookup_keys),
            ("lookup_hits", "Keys that lookups found present", self.lookup_hits),
            ("batches", "Batches run by the pipeline", self.batches),
            ("layer_batches", "Batches that storage answered in one stream, layer after layer", self.layer_batches),
            ("fetched_bytes", "Stored bytes that batches took from storage or tiers", self.fetched_bytes),
            ("tier_bytes", "Of these, those that tiers had", self.tier_bytes),
            ("prefetch_wasted_bytes", "Bytes prefetched that nobody has fetched", self.prefetch_wasted_bytes),
            ("page_bytes", "Of these, those that devices brought straight into engines' pages", self.page_bytes),
            ("page_requests", "Requests to devices for such: one for a layer and device", self.page_requests),
            ("delivered_bytes", "Bytes delivered into registrations", self.delivered_bytes),
            ("stored_raw_bytes", "Bytes of stored chunks before encoding", self.stored_raw_bytes),
            ("stored_bytes", "Bytes of stored chunks as records", self.stored_bytes),
            ("storage_connections", "Control connections made to storage", self.storage_connections),
            ("data_connections", "Data connections made to storage", self.data_connections),
            ("storage_redirections", "Chunks that a cluster's node said another one has", self.storage_redirections),
            ("deleted_records", "Corrupt records deleted from storage", self.deleted_records),
            ("publications_refused", "Keys that a host published beyond its share", self.publications_refused),
        ):
            yield CounterMetricFamily(f"shadowserve_{name}", text, value=value)
        for families in self.families:
            yield from families()
        for name, (text, read) in list(self.gauges.items()):
            yield GaugeMetricFamily(f"shadowserve_{name}", text, value=read())

    def _by_label(self) -> Iterator[Metric]:
        for name, text, label, counts in (
            ("fetches", "Fetch calls", "outcome", self.fetches),
            ("stores", "Store calls", "outcome", self.stores),
            ("lookups", "Lookup calls", "outcome", self.lookups),
            ("integrity_failures", "Records found faulty", "reason", self.integrity_failures),
            ("tier_records", "Records that tiers had as they were fetched, or kept", "what", self.tier_records),
            ("slower_paths", "Fetches that took a slower path than configured", "reason", self.slower_paths),
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=[label])
            for value, count in list(counts.items()):
                family.add_metric([value], count)
            yield family
        prefetches = self.prefetches()
        for index, (name, text) in enumerate(
            (
                ("prefetch_bytes", "Stored bytes brought into memory ahead, by where they were"),
                ("prefetch_seconds", "Seconds in which some of them were under way"),
            )
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=["hop"])
            for hop, carried in prefetches.items():
                family.add_metric([hop], carried[index])
            yield family
        stages = self.stages()
        for name, text in (
            ("stage_busy_seconds", "CPU time of a stage; of decompress and dequantize in one go: decompress"),
            ("stage_items", "Slices (put: records) that a stage has handled"),
            ("stage_input_bytes", "Bytes into a stage"),
            ("stage_output_bytes", "Bytes out of a stage"),
        ):
            family = CounterMetricFamily(f"shadowserve_{name}", text, labels=["stage"])
            for stage in stages:
                amount = stage.busy_ns / 1e9 if name == "stage_busy_seconds" else getattr(stage, name[len("stage_") :])
                family.add_metric([stage.stage], amount)
            yield family


def resident_bytes() -> int:
    """Return the daemon's own resident memory: without clients' shared segments, which are theirs and counted there."""
    total = 0
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssFile:")):
                total += int(line.split()[1]) * 1024
    return total
