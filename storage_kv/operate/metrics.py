"""The metrics of the storage node for Prometheus, read at scrape time.

Keys, clients and tenants are no labels: they are many, and other people's.
"""

import resource
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from shadowserve import __version__
from shadowserve.latency import LatencyHistogram
from shadowserve.pool.statistics import Statistics
from storage_kv.counters import SAMPLE_EVERY, CommandCounters
from storage_kv.metric_table import ARENA, BUCKET, DEVICE, NODE, STORE, Row, View
from storage_kv.node import Node
from storage_kv.operate.health import Condition

_PREFIX: Final = "shadowserve_storage_"
_FAMILIES: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class NodeCollector:
    """Turns a node's values into metrics. Called from the endpoint's thread; it changes nothing."""

    def __init__(self, node: Node, condition: Condition) -> None:
        self._node = node
        self._condition = condition

    def collect(self) -> Iterator[Metric]:
        node, condition = self._node, self._condition
        with node.lock:
            view = View.of(node) if condition.recovered else View(node, node.counters, node.audit, Statistics())
            of_node = list(_unlabelled(NODE, view))  # some rows iterate over what clients change
            by_command = dict(node.counters.by_command)
        yield InfoMetricFamily(
            _PREFIX + "build", "Version and store of the node.", {"version": __version__, "engine": node.config.kind}
        )
        yield from of_node
        for name, value, text in (
            ("recovered", condition.recovered, "1 if the store has recovered its keys, otherwise 0."),
            ("recovery_seconds", condition.recovery_s, "Duration of the recovery at the start."),
            ("recovered_keys", condition.recovered_keys, "Keys recovered at the start."),
            ("draining", condition.draining, "1 if the server is stopping, otherwise 0."),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield CounterMetricFamily(_PREFIX + "cpu_seconds", "CPU time.", value=usage.ru_utime + usage.ru_stime)
        yield from _commands(by_command)
        if condition.recovered:
            yield from _unlabelled(STORE, view)
            yield from _store(view.store)


def _unlabelled(rows: Iterable[Row], source: Any) -> Iterator[Metric]:
    for row in rows:
        yield _FAMILIES[row.kind](_PREFIX + row.name, row.help, value=float(row.value(source) or 0))


def _labelled(rows: Iterable[Row], label: str, sources: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield a metric for each row, with a sample for each source that has a value."""
    for row in rows:
        metric = _FAMILIES[row.kind](_PREFIX + row.name, row.help, labels=[label])
        for name, source in sources.items():
            value = row.value(source)
            if value is not None:
                metric.add_metric([name], float(value))
        yield metric


def _by_label(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for value, count in sorted(counts.items()):
        metric.add_metric([value], count)
    return metric


def _histogram(
    name: str, text: str, labels: list[str], found: Mapping[tuple[str, ...], LatencyHistogram]
) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(_PREFIX + name, text, labels=labels)
    for values, histogram in found.items():
        metric.add_metric(list(values), histogram.cumulative(), histogram.sum_ns / 1e9)
    return metric


def _commands(found: Mapping[str, CommandCounters]) -> Iterator[Metric]:
    for name, text, attribute in (
        ("command_calls", "Calls by command.", "calls"),
        ("command_refusals", "Commands refused before execution.", "rejected"),
        ("command_failures", "Calls that failed.", "failed"),
    ):
        yield _by_label(name, text, "command", {command: getattr(each, attribute) for command, each in found.items()})
    yield _histogram(
        "command_duration_seconds",
        f"Execution time of one call in {SAMPLE_EVERY}.",
        ["command"],
        {(command,): each.durations for command, each in sorted(found.items())},
    )


def _store(store: Statistics) -> Iterator[Metric]:
    yield _by_label("evictions", "Keys evicted to make room, by cause.", "cause", store.evictions)
    yield _by_label("lost_objects", "Objects dropped because of their bytes, by reason.", "reason", store.lost)
    if store.cold is not None:
        yield from _unlabelled(BUCKET, store.cold)
        yield _by_label("s3_failed_reads", "Failed reads by reason.", "reason", store.cold.failed_reads)
        yield _by_label(
            "s3_failed_writes", "Failed writes and deletions by reason.", "reason", store.cold.failed_writes
        )
    admissions, arenas = {}, {}
    if store.memory_bytes:
        admissions = {"held_back": store.held_back, "wear_refused": store.wear_refused}
        arenas = {"memory": store}
    yield _by_label("admissions", "Values that were not written to a device, by reason.", "outcome", admissions)
    devices = {device.name: device for device in store.devices}
    yield from _labelled(DEVICE, "device", devices)
    yield _histogram(
        "device_operation_duration_seconds",
        "Duration of operations of a device.",
        ["device", "operation"],
        {(name, kind): one for name, each in devices.items() for kind, one in sorted(each.latencies.items())},
    )
    yield from _labelled(ARENA, "arena", arenas)
