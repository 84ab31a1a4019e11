"""The metrics of the storage node, for Prometheus: read at scrape time, nothing is kept twice.

Labels are commands, devices, arenas, operations and causes: few, and ours. Never a key, a client or a tenant: they are
many, and other people's. Units are seconds and bytes; counters end in ``_total``.
"""

import resource
import time
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from shadowserve import __version__
from shadowserve.latency import LatencyHistogram
from shadowserve.pool.statistics import DeviceStatistics, Statistics
from storage_kv.node import Node
from storage_kv.operate.command_statistics import SAMPLE_EVERY
from storage_kv.operate.health import Condition

_PREFIX: Final = "shadowserve_storage_"

_Table = tuple[tuple[str, str, str], ...]

_NODE_COUNTERS: Final[_Table] = (
    # metric, attribute of Counters, help
    ("connections", "connections", "Connections accepted."),
    ("connections_rejected", "connections_rejected", "Connections beyond connections_max."),
    ("connections_denied", "connections_denied", "Connections refused by protected mode."),
    ("commands", "commands", "Commands executed."),
    ("command_errors", "errors", "Commands answered with an error."),
    ("busy_refusals", "busy", "Writes told to wait because too many were under way."),
    ("unknown_commands", "unknown_commands", "Commands that there are not."),
    ("protocol_errors", "protocol_errors", "Connections closed because of malformed input."),
    ("http_refused", "http_refused", "Connections closed because they spoke HTTP."),
    ("strangers_closed", "strangers_closed", "Connections closed because they did not authenticate in time."),
    ("strangers_displaced", "strangers_displaced", "Connections closed, before they authenticated, for newcomers."),
    ("clients_greedy", "greedy_clients", "Connections closed because others needed the memory that they held."),
    ("authentication_failures", "authentication_failures", "Wrong passwords."),
    ("tls_failures", "tls_failures", "TLS handshakes that failed."),
    ("commands_denied", "denied_commands", "Commands refused because the user may not run them."),
    ("keys_denied", "denied_keys", "Commands refused because the user may not use their keys."),
    ("throttled", "throttled", "Times that a client had to wait because its tenant was beyond its rates."),
    ("received_bytes", "input_bytes", "Bytes received."),
    ("sent_bytes", "output_bytes", "Bytes sent."),
    ("hits", "hits", "Keys found by commands that read."),
    ("misses", "misses", "Keys not found by commands that read."),
    ("lookup_hits", "lookup_hits", "Of the keys found, those of commands that do not answer with the value."),
    ("lookup_misses", "lookup_misses", "Of the keys not found, those of commands that do not answer with the value."),
    ("lost", "lost", "Keys found, whose bytes could then not be read: answered as misses."),
    ("meta_keys", "meta_keys", "Keys asked for by KV.META."),
    ("layer_streams", "layer_streams", "Requests for layers (KV.LAYERS)."),
    ("layer_streams_failed", "layer_streams_failed", "Of these, answered with an error because of a bug of ours."),
    ("layer_streams_closed", "layer_streams_closed", "Of these, refused or ended because they took too long."),
    ("layers_sent", "layers_sent", "Layers sent, each of a whole prefix."),
    ("layer_bytes_sent", "layer_bytes_sent", "Bytes of them."),
    ("records_stored", "records_stored", "Records stored."),
    ("records_kept", "records_kept", "Records that were there already."),
    ("records_refused", "records_refused", "Records refused because they do not verify."),
    ("clients_stalled", "stalled_clients", "Connections closed because they stood still."),
    ("clients_idle", "idle_clients", "Connections closed because they were idle."),
)
_AUDIT_COUNTERS: Final[_Table] = (
    ("audit_lines", "written", "Lines written to the audit log."),
    ("audit_lines_lost", "lost", "Lines that the audit log could not take."),
)
_STORE_COUNTERS: Final[_Table] = (
    ("evicted_keys", "evicted_keys", "Keys removed to make room."),
    ("evicted_bytes", "evicted_bytes", "Bytes of keys and values removed to make room."),
    ("expired_keys", "expired_keys", "Keys removed because their time had come."),
    ("lost_keys", "lost_keys", "Keys dropped because their bytes could not be read, or were not what was stored."),
    ("failed_writes", "failed_writes", "Values that could not be made durable; their writers were told."),
)
_STORE_GAUGES: Final[_Table] = (
    ("keys", "keys", "Keys."),
    ("expiring_keys", "expiring_keys", "Keys with an expiry."),
    ("pinned_keys", "pinned_keys", "Keys that are pinned."),
    ("pinned_bytes", "pinned_bytes", "Bytes of keys that are pinned."),
    ("records", "records", "Keys whose values are records."),
    ("record_bytes", "record_bytes", "Bytes of records."),
    ("memory_budget_bytes", "budget_bytes", "Bytes that may be used."),
    ("memory_used_bytes", "used_bytes", "Bytes used, overheads and held values included."),
    ("memory_held_bytes", "held_bytes", "Bytes of removed values that are still being sent."),
    ("memory_peak_bytes", "peak_bytes", "Most bytes that were ever used."),
)
_DEVICE_COUNTERS: Final[_Table] = (
    ("device_read_bytes", "read_bytes", "Bytes read from a device."),
    ("device_written_bytes", "written_bytes", "Bytes written to a device."),
    ("device_errors", "errors", "Requests that a device failed."),
)
_DEVICE_GAUGES: Final[_Table] = (
    ("device_healthy", "healthy", "Whether a device is in use: 1 or 0."),
    ("device_capacity_bytes", "capacity_bytes", "Bytes that a device can hold."),
    ("device_used_bytes", "used_bytes", "Bytes that a device holds."),
    ("device_queue_depth", "reading", "Requests that a device has."),
    ("device_bandwidth_bytes_per_second", "bandwidth_bytes_per_s", "Bandwidth of a device as last measured."),
    ("device_wear_bytes", "written_today_bytes", "Bytes written in the present day of the wear budget."),
    ("device_wear_budget_bytes", "wear_budget_bytes", "Bytes that may be written a day; absent without a budget."),
)
_ARENA_GAUGES: Final[_Table] = (
    ("arena_capacity_bytes", "memory_bytes", "Bytes of an arena."),
    ("arena_used_bytes", "memory_used_bytes", "Bytes of an arena in use."),
    ("arena_copies", "memory_objects", "Objects of which an arena holds a copy."),
)
_ARENA_COUNTERS: Final[_Table] = (
    ("arena_promotions", "prefetches", "Objects copied into an arena because they were hot."),
    (
        "arena_copies_dropped",
        "copies_dropped",
        "Copies in an arena that went to make room; their devices have the objects.",
    ),
)
_WAITING_GAUGES: Final[_Table] = (
    ("quarantined_bytes", "quarantined_bytes", "Bytes of extents kept out of use because they are faulty."),
    ("writing_bytes", "writing_bytes", "Bytes of values that are not durable yet."),
    ("reads_pending", "waiting_reads", "Reads that devices have not answered."),
)
_SCRUB_COUNTERS: Final[_Table] = (
    ("scrub_bytes", "scrubbed_bytes", "Bytes verified by the background scrub."),
    ("scrub_rotten", "scrub_rotten", "Objects that the scrub found to differ from what was stored."),
    ("scrub_passes", "scrub_passes", "Rounds of the scrub over everything."),
)

_COLD_GAUGES: Final[_Table] = (
    ("s3_away", "away", "Whether the bucket has failed and is left alone for a while: 1 or 0."),
    ("s3_up", "up", "Whether the bucket was listed, and reads, writes and deletions do not fail: 1 or 0."),
    ("s3_failing_s", "failing_s", "For how long reads, writes or deletions have failed; 0 where they do not."),
    ("s3_deletions_pending", "deleting", "Removals that wait for the bucket."),
    ("s3_foreign_objects", "foreign_objects", "Objects under the prefix that are none of ours; they are left alone."),
    ("s3_left_out_objects", "left_out_objects", "Objects that are not known because of chunks_max."),
    ("s3_objects", "objects", "Objects of the bucket that are known."),
    ("s3_records", "records", "Records in them."),
    ("s3_bytes", "bytes", "Bytes of them."),
    ("s3_reads_pending", "reading", "Records that are waited for from the bucket."),
    ("s3_writes_pending", "waiting_records", "Records that wait to be written to the bucket."),
)
_COLD_COUNTERS: Final[_Table] = (
    ("s3_lists", "lists", "Times that the bucket was listed."),
    ("s3_read_requests", "requests", "Ranges read from the bucket."),
    ("s3_read_bytes", "read_bytes", "Bytes read from the bucket."),
    ("s3_read_records", "read_records", "Records read from the bucket, sound."),
    ("s3_written_objects", "written_objects", "Objects written to the bucket."),
    ("s3_written_bytes", "written_bytes", "Bytes written to the bucket."),
    ("s3_present_objects", "present_objects", "Objects that another node had written already."),
    ("s3_held_back", "held_back", "Evictions that had to wait until the bucket had the record."),
    ("s3_missed_records", "missed_records", "Records that did not get into the bucket: it was slower than evictions."),
    ("s3_crowded_out_reads", "crowded_out_reads", "Reads that were a miss: too many of their tenant were before them."),
    ("s3_swept_objects", "swept_objects", "Objects deleted because of bytes_max."),
)


class NodeCollector:
    """Turns a node's counters into metrics. Called from the endpoint's thread; it only reads."""

    def __init__(self, node: Node, condition: Condition) -> None:
        self._node = node
        self._condition = condition

    def collect(self) -> Iterator[Metric]:
        node = self._node
        with node.lock:
            store = node.store.statistics() if self._condition.recovered else None
            by_command = dict(node.counters.by_command)
            waiting = sum(session.pending_output_bytes for session in node.sessions.values())
        yield from _each(CounterMetricFamily, _NODE_COUNTERS, node.counters)
        yield from _each(CounterMetricFamily, _AUDIT_COUNTERS, node.audit)
        yield from self._process(waiting)
        calls = CounterMetricFamily(_PREFIX + "command_calls", "Calls by command.", labels=["command"])
        refused = CounterMetricFamily(_PREFIX + "command_refusals", "Commands refused unexecuted.", labels=["command"])
        failed = CounterMetricFamily(_PREFIX + "command_failures", "Calls that failed.", labels=["command"])
        durations: dict[tuple[str, ...], LatencyHistogram] = {}
        for name, statistics in sorted(by_command.items()):
            calls.add_metric([name], statistics.calls)
            refused.add_metric([name], statistics.rejected)
            failed.add_metric([name], statistics.failed)
            durations[name,] = statistics.durations
        yield from (calls, refused, failed)
        yield _histogram(
            "command_duration_seconds", f"Time in the store of one call in {SAMPLE_EVERY}.", ["command"], durations
        )
        if store is not None:
            yield from _held(store)

    def _process(self, waiting_bytes: int) -> Iterator[Metric]:
        node, condition, usage = self._node, self._condition, resource.getrusage(resource.RUSAGE_SELF)
        yield InfoMetricFamily(_PREFIX + "build", "What runs.", {"version": __version__, "engine": node.config.kind})
        for name, value, text in (
            ("clients", len(node.sessions), "Connected clients."),
            ("tenants", len(node.limiters), "Tenants with limits."),
            ("users", len(node.users.by_name), "Users."),
            ("connections_max", node.config.connections_max, "Clients that may be connected."),
            ("strangers", node.places.strangers, "Connected clients that have yet to authenticate."),
            ("clients_memory_bytes", node.memory.used, "Bytes that requests and replies under way cost."),
            ("clients_memory_max_bytes", node.config.clients_memory_bytes, "Most bytes that they may cost."),
            ("lent_bytes", node.lent.used, "Bytes of stored values that are being sent."),
            ("memory_waits", node.memory.waiting + node.lent.waiting, "Clients that wait for room to be served."),
            ("layer_streams_active", node.streams.active if node.streams else 0, "Requests for layers under way."),
            ("layer_streams_waiting", node.streams.waiting if node.streams else 0, "Those that wait for their turn."),
            ("replies_waiting_bytes", waiting_bytes, "Bytes of replies that clients have not taken yet."),
            ("up_seconds", time.monotonic() - node.started_s, "Time since the start."),
            ("tls_certificate_expiry_timestamp_seconds", node.certificate_expires_s, "When it ends; 0 without TLS."),
            ("recovered", condition.recovered, "Whether the store has found again what it kept: 1 or 0."),
            ("recovery_seconds", condition.recovery_s, "What finding everything again took at the start."),
            ("recovered_keys", condition.recovered_keys, "Keys found again at the start."),
            ("draining", condition.draining, "Whether the server has been told to stop: 1 or 0."),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=float(value))
        yield CounterMetricFamily(_PREFIX + "cpu_seconds", "CPU time.", value=usage.ru_utime + usage.ru_stime)


def _each(family: type[Metric], table: _Table, source: object) -> Iterator[Metric]:
    """Yield a metric without labels for each row, of the source's attribute of that name."""
    for name, attribute, text in table:
        yield family(_PREFIX + name, text, value=float(getattr(source, attribute)))


def _labelled(
    family: type[Metric], table: _Table, label: str, sources: Mapping[str, DeviceStatistics | Statistics]
) -> Iterator[Metric]:
    """Yield a metric for each row, with a sample for each source that has a value."""
    for name, attribute, text in table:
        metric = family(_PREFIX + name, text, labels=[label])
        for called, source in sources.items():
            value = getattr(source, attribute)
            if value is not None:
                metric.add_metric([called], float(value))
        yield metric


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
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


def _held(store: Statistics) -> Iterator[Metric]:
    """Yield what the store tells of itself."""
    for table in (_STORE_GAUGES, _WAITING_GAUGES):
        yield from _each(GaugeMetricFamily, table, store)
    for table in (_STORE_COUNTERS, _SCRUB_COUNTERS):
        yield from _each(CounterMetricFamily, table, store)
    yield _by("evictions", "Keys removed to make room, by cause.", "cause", store.evictions)
    yield _by("lost_objects", "Objects dropped because of their bytes, by reason.", "reason", store.lost)
    if store.cold is not None:
        yield from _each(GaugeMetricFamily, _COLD_GAUGES, store.cold)
        yield from _each(CounterMetricFamily, _COLD_COUNTERS, store.cold)
        yield _by("s3_failed_reads", "Requests and records that failed, by reason.", "reason", store.cold.failed_reads)
        yield _by("s3_failed_writes", "Writes and deletions that failed.", "reason", store.cold.failed_writes)
    admissions, arenas = {}, {}
    if store.memory_bytes:
        admissions = {"held_back": store.held_back, "wear_refused": store.wear_refused}
        arenas = {"memory": store}
    yield _by("admissions", "Values by what became of them on their way to a device.", "outcome", admissions)
    devices = {device.name: device for device in store.devices}
    yield from _labelled(CounterMetricFamily, _DEVICE_COUNTERS, "device", devices)
    yield from _labelled(GaugeMetricFamily, _DEVICE_GAUGES, "device", devices)
    yield _histogram(
        "device_operation_duration_seconds",
        "Time from when a device gets an operation to its end.",
        ["device", "operation"],
        {(name, kind): one for name, each in devices.items() for kind, one in sorted(each.latencies.items())},
    )
    yield from _labelled(GaugeMetricFamily, _ARENA_GAUGES, "arena", arenas)
    yield from _labelled(CounterMetricFamily, _ARENA_COUNTERS, "arena", arenas)
