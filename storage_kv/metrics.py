"""The Prometheus endpoint of the storage node: read at scrape time, nothing is kept twice."""

from collections.abc import Iterator
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from storage_kv.node import Node

__all__ = ["MetricsEndpoint", "NodeCollector"]

_PREFIX = "shadowserve_storage_"


class NodeCollector:
    """Turns a node's counters into metrics. Called from the endpoint's thread; it only reads integers."""

    def __init__(self, node: Node) -> None:
        """Make the collector of one node."""
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. No keys and no client names in labels: they are unbounded, and other people's."""
        counters, engine = self._node.counters, self._node.engine.statistics()
        for name, value, help_text in (
            ("connections", counters.connections, "Connections accepted."),
            ("connections_rejected", counters.connections_rejected, "Connections beyond connections_max."),
            ("connections_denied", counters.connections_denied, "Connections refused by protected mode."),
            ("commands", counters.commands, "Commands executed."),
            ("command_errors", counters.errors, "Commands answered with an error."),
            ("protocol_errors", counters.protocol_errors, "Connections closed because of malformed input."),
            ("authentication_failures", counters.authentication_failures, "Wrong passwords."),
            ("received_bytes", counters.input_bytes, "Bytes received."),
            ("sent_bytes", counters.output_bytes, "Bytes sent."),
            ("hits", counters.hits, "Keys found by commands that read."),
            ("misses", counters.misses, "Keys not found by commands that read."),
            ("meta_keys", counters.meta_keys, "Keys asked for by KV.META."),
            ("records_stored", counters.records_stored, "Records stored."),
            ("records_kept", counters.records_kept, "Records that were there already."),
            ("records_refused", counters.records_refused, "Records refused because they do not verify."),
            ("clients_stalled", counters.stalled_clients, "Connections closed because they stood still."),
            ("clients_idle", counters.idle_clients, "Connections closed because they were idle."),
            ("evicted_keys", engine.evicted_keys, "Keys removed to make room."),
            ("evicted_bytes", engine.evicted_bytes, "Bytes of keys and values removed to make room."),
            ("expired_keys", engine.expired_keys, "Keys removed because their time had come."),
        ):
            counter = CounterMetricFamily(_PREFIX + name, help_text)
            counter.add_metric([], value)
            yield counter
        for name, value, help_text in (
            ("clients", len(self._node.sessions), "Connected clients."),
            ("keys", engine.keys, "Keys."),
            ("records", engine.records, "Keys whose values are records."),
            ("record_bytes", engine.record_bytes, "Bytes of records."),
            ("memory_budget_bytes", engine.budget_bytes, "Bytes that may be used."),
            ("memory_used_bytes", engine.used_bytes, "Bytes used, overheads and held values included."),
            ("memory_held_bytes", engine.held_bytes, "Bytes of removed values that are still being sent."),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, help_text)
            gauge.add_metric([], value)
            yield gauge


class MetricsEndpoint:
    """An HTTP server for Prometheus, on a thread of its own."""

    def __init__(self, node: Node, host: str, port: int) -> None:
        """Start serving; port 0 takes a free one.

        Raises:
            OSError: the address cannot be listened on.
        """
        registry = CollectorRegistry()
        registry.register(NodeCollector(node))
        self._server: Any
        self._thread: Thread
        self._server, self._thread = start_http_server(port, host, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
