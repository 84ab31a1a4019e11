"""The operation of a storage node: health checks, metrics for Prometheus, systemd, recovery, and reloading.

Keys, clients and tenants are no labels of metrics: they are many, and other people's.
"""

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from shadowserve import __version__, systemd
from shadowserve.errors import ConfigurationError
from shadowserve.health import HEALTH_TIMEOUT_S, Check, Endpoint, Watchdog, answers, check
from shadowserve.latency import LatencyHistogram
from shadowserve.pool.statistics import Statistics
from storage_kv.counters import SAMPLE_EVERY, CommandCounters
from storage_kv.metric_table import ARENA, BUCKET, DEVICE, NODE, STORE, Row, View
from storage_kv.node import Node

_log = logging.getLogger(__name__)

_PREFIX: Final = "shadowserve_storage_"
_FAMILIES: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class NodeCollector:
    """Turns a node's values into metrics. Called from the endpoint's thread; it changes nothing."""

    def __init__(self, operations: "Operations") -> None:
        self._operations = operations

    def collect(self) -> Iterator[Metric]:
        state, node = self._operations, self._operations.node
        with node.lock:
            view = View.of(node) if state.recovered else View(node, node.counters, node.audit, Statistics())
            of_node = list(_unlabelled(NODE, view))  # some rows iterate over what clients change
            by_command = dict(node.counters.by_command)
        yield InfoMetricFamily(
            _PREFIX + "build", "Version and store of the node.", {"version": __version__, "engine": node.config.kind}
        )
        yield from of_node
        for name, value, text in (
            ("recovered", state.recovered, "1 if the store has recovered its keys, otherwise 0."),
            ("recovery_seconds", state.recovery_s, "Duration of the recovery at the start."),
            ("recovered_keys", state.recovered_keys, "Keys recovered at the start."),
            ("draining", state.draining, "1 if the server is stopping, otherwise 0."),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        yield CounterMetricFamily(_PREFIX + "cpu_seconds", "CPU time.", value=usage.ru_utime + usage.ru_stime)
        yield from _commands(by_command)
        if state.recovered:
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


class Operations:
    """Operation of a server, and its state for health checks, which run in threads of their own.

    ``loops``: loops and threads that must answer, by name: a function that makes them call a function soon.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.recovered = self.draining = False
        self.recovery_s = 0.0
        self.recovered_keys = 0
        self.listening = ""  # addresses
        self.loops: dict[str, Callable[[Callable[[], None]], Any]] = {}
        self._endpoint: Endpoint | None = None
        self._watchdog: Watchdog | None = None

    @property
    def metrics_port(self) -> int | None:
        return self._endpoint.port if self._endpoint else None

    def start(self) -> None:
        """Serve the HTTP endpoint, if configured. Call it before recovery."""
        config = self.node.config
        if config.metrics_port is None:
            return
        registry = CollectorRegistry()
        registry.register(NodeCollector(self))
        try:
            self._endpoint = Endpoint(
                config.metrics_host, config.metrics_port, registry, health=self.health, ready=self.readiness
            )
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {config.metrics_host} port {config.metrics_port}: {error}; choose "
                "another metrics_port, or none"
            ) from error

    def health(self, timeout_s: float = HEALTH_TIMEOUT_S) -> list[Check]:
        """Check within ``timeout_s`` that every loop answers and the node's lock becomes free."""
        found: dict[str, Check] = {}

        def check_loop(name: str, hand: Callable[[Callable[[], None]], Any]) -> None:
            found[name] = answers(name, hand, timeout_s)

        # In parallel, so that several blocked loops do not exceed a probe's timeout.
        threads = [threading.Thread(target=check_loop, args=each, daemon=True) for each in list(self.loops.items())]
        for thread in threads:
            thread.start()
        free = self.node.lock.acquire(timeout=timeout_s)
        if free:
            self.node.lock.release()
        for thread in threads:
            thread.join()
        lock = check("lock", free, "comes free", f"held for more than {timeout_s:g} s")
        return [*(found[name] for name in sorted(found)), lock]

    def readiness(self) -> list[Check]:
        """Check that clients are served: healthy, recovered, listening, not draining, with a healthy device."""
        healthy = self.health()
        store = self.node.store.statistics() if self.recovered else None
        devices = () if store is None else store.devices
        bucket = None if store is None else store.cold
        healthy_devices = [device.name for device in devices if device.healthy]
        return [
            *healthy,
            check("recovery", self.recovered, "done", "in progress"),
            check("listening", bool(self.listening), f"on {self.listening}", "no"),
            check("draining", not self.draining, "no", "yes: the server is stopping"),
            check(
                "devices",
                bool(healthy_devices) or not devices,
                f"{len(healthy_devices)} of {len(devices)} healthy"
                if devices
                else "none configured: values are in memory",
                f"none of {len(devices)} is healthy",
            ),
            *(Check(f"device {each.name}", False, "out of use", fatal=False) for each in devices if not each.healthy),
            *([] if bucket is None else [Check("bucket", bucket.up, str(bucket), fatal=False)]),
        ]

    def recover(self) -> None:
        """Start the store, which recovers its keys: seconds for millions of objects."""
        systemd.notify("STATUS=recovering")
        node = self.node
        begin_s = time.monotonic()
        node.store.start(node.lock)
        self.recovery_s = time.monotonic() - begin_s
        with node.lock:
            self.recovered_keys = node.store.statistics().keys
        self.recovered = True
        if self.recovered_keys:
            _log.info("recovered keys=%d seconds=%.3f", self.recovered_keys, self.recovery_s)

    def serving(self, where: str) -> None:
        self.listening = where
        self._watchdog = Watchdog(self.health)
        systemd.notify("READY=1", f"STATUS=serving on {where}")

    def drain(self) -> None:
        self.draining = True
        systemd.notify("STOPPING=1", "STATUS=draining")

    def reload(self) -> None:
        """Read the configuration again in another thread, and log the result."""
        threading.Thread(target=self._reload, name="reload", daemon=True).start()

    def _reload(self) -> None:
        systemd.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            if not self.recovered:
                raise ConfigurationError("the store is recovering; send the signal again when the server is ready")
            applied, kept = self.node.reconfiguration.reload(self.node.lock)
        except ConfigurationError as error:
            _log.error("configuration_refused error=%r hint='nothing has changed'", str(error))
        else:
            _log.info("configuration_reloaded applied=%r needs_restart=%r", ",".join(applied), ",".join(kept))
        systemd.notify("READY=1")

    def close(self) -> None:
        """Stop the endpoint. Must not run in a loop that health checks wait for."""
        self.listening = ""
        if self._watchdog is not None:
            self._watchdog.close()
        if self._endpoint is not None:
            self._endpoint.close()
