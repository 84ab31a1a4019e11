"""The table of the node's counters and gauges. INFO, Prometheus and ``shadowserve stats`` show its rows.

A row's name is the metric's name without the prefix ``shadowserve_storage_``. INFO uses the same name, or Redis' name
where Redis has one. Values are read when they are shown.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from shadowserve.pool.statistics import Statistics
from storage_kv.access.audit import AuditLog
from storage_kv.counters import Counters
from storage_kv.node import Node

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class View:
    """The objects that rows read their values from."""

    node: Node
    counters: Counters
    audit: AuditLog
    store: Statistics

    @classmethod
    def of(cls, node: Node) -> "View":
        return cls(node, node.counters, node.audit, node.store.statistics())


class Row(NamedTuple):
    """One counter or gauge."""

    kind: Kind
    source: str | Callable[[View], float | None]  # path of the attribute in a :class:`View`, or a function of it
    name: str
    help: str
    info: str = ""  # section of INFO; with a colon, its name there. Empty for none

    def value(self, view: Any) -> float | None:
        found: float | None = self.source(view) if callable(self.source) else attrgetter(self.source)(view)
        return found

    @property
    def info_name(self) -> str:
        return self.info.partition(":")[2] or self.name


_counter: Final = partial(Row, "counter")
_gauge: Final = partial(Row, "gauge")


def _unsent_bytes(view: View) -> float:
    return sum(session.info.pending_output_bytes for session in view.node.sessions.values())


def _streams(attribute: str) -> Callable[[View], float]:
    return lambda view: getattr(view.node.streams, attribute) if view.node.streams else 0


def _changes(attribute: str) -> Callable[[View], float]:
    return lambda view: getattr(view.node.changes, attribute) if view.node.changes else 0


# fmt: off
NODE: Final = (
    *(_counter(f"counters.{each.name}", each.name, **each.metadata) for each in fields(Counters) if each.metadata),
    _counter("audit.written", "audit_lines", "Lines written to the audit log.", "ShadowServe"),
    _counter("audit.lost", "audit_lines_lost", "Lines that could not be written to the audit log.", "ShadowServe"),
    _gauge(lambda view: len(view.node.sessions), "clients", "Open connections."),
    _gauge(lambda view: len(view.node.limiters), "tenants", "Tenants with limits."),
    _gauge(lambda view: len(view.node.users.by_name), "users", "Users."),
    _gauge("node.config.connections_max", "connections_max", "Limit of open connections.", "Clients:maxclients"),
    _gauge("node.slots.unauthenticated", "unauthenticated", "Open connections that have not authenticated."),
    _gauge("node.memory.used", "clients_memory_bytes", "Memory of requests and replies in progress.", "ShadowServe"),
    _gauge("node.config.clients_memory_bytes", "clients_memory_max_bytes",
           "Limit of clients_memory_bytes.", "ShadowServe"),
    _gauge("node.lent.used", "lent_bytes", "Bytes of stored values that are being sent.", "ShadowServe"),
    _gauge(lambda view: view.node.memory.waiting + view.node.lent.waiting, "memory_waits",
           "Clients that wait for memory.", "ShadowServe"),
    _gauge(_streams("active"), "layer_streams_active", "Requests for layers that are being answered.", "ShadowServe"),
    _gauge(_streams("waiting"), "layer_streams_waiting",
           "Requests for layers that wait for their turn.", "ShadowServe"),
    _gauge(_unsent_bytes, "replies_waiting_bytes", "Bytes of replies that clients have not received yet."),
    _counter(_changes("entries"), "events", "Stored and removed keys in the logs of KV.EVENTS.", "ShadowServe"),
    _counter(_changes("missed"), "events_missed",
             "Readers of KV.EVENTS that had to start over because they came too late.", "ShadowServe"),
    _gauge(_changes("size"), "events_bytes", "Bytes of the logs of KV.EVENTS.", "ShadowServe"),
    _gauge(lambda view: view.node.load_us / 1e6, "load_seconds",
           "Time that the bytes waiting for clients need on the link (KV.LOAD).", "ShadowServe"),
    _gauge("node.fleet.nodes", "fleet_nodes", "Members of the fleet; 0 if the node is none.", "ShadowServe"),
    _gauge("node.fleet.share", "fleet_share_ratio",
           "Share of the fleet's segments whose first choice is this node.", "ShadowServe"),
    _counter("node.fleet.refused", "fleet_refused",
             "Lists of members that could not be read or used; the old ones stayed.", "ShadowServe"),
    _gauge(lambda view: time.monotonic() - view.node.server.started_s, "up_seconds", "Time since the start."),
    _gauge("node.server.certificate_expires_s", "tls_certificate_expiry_timestamp_seconds",
           "Expiry of the TLS certificate; 0 without TLS."),
)
"""Rows of the node."""

STORE: Final = (
    _gauge("store.keys", "keys", "Keys."),
    _gauge("store.expiring_keys", "expiring_keys", "Keys with an expiry."),
    _gauge("store.pinned_keys", "pinned_keys", "Pinned keys.", "ShadowServe"),
    _gauge("store.pinned_bytes", "pinned_bytes", "Bytes of pinned keys.", "ShadowServe"),
    _gauge("store.records", "records", "Keys whose values are records.", "ShadowServe"),
    _gauge("store.record_bytes", "record_bytes", "Bytes of records.", "ShadowServe"),
    _gauge("store.budget_bytes", "memory_budget_bytes", "Limit of memory_used_bytes.", "Memory:maxmemory"),
    _gauge("store.used_bytes", "memory_used_bytes",
           "Bytes used by keys and values, with overheads and held values.", "Memory:used_memory"),
    _gauge("store.held_bytes", "memory_held_bytes",
           "Bytes of removed values that are still being sent.", "ShadowServe"),
    _gauge("store.peak_bytes", "memory_peak_bytes", "Highest memory_used_bytes so far.", "Memory:used_memory_peak"),
    _gauge("store.quarantined_bytes", "quarantined_bytes",
           "Bytes of faulty extents that are not used any more.", "Devices"),
    _gauge("store.writing_bytes", "writing_bytes", "Bytes of values that are not durable yet.", "Devices"),
    _gauge("store.waiting_reads", "reads_pending", "Reads that devices have not answered.", "Devices"),
    _counter("store.evicted_keys", "evicted_keys", "Keys evicted to make room.", "Stats"),
    _counter("store.evicted_bytes", "evicted_bytes", "Bytes of evicted keys and values.", "ShadowServe"),
    _counter("store.expired_keys", "expired_keys", "Keys removed at their expiry.", "Stats"),
    _counter("store.lost_keys", "lost_keys", "Keys dropped because their bytes could not be read or were wrong."),
    _counter("store.failed_writes", "failed_writes",
             "Values that could not be made durable; their writers got errors."),
    _counter("store.scrubbed_bytes", "scrub_bytes", "Bytes verified by the background scrub.", "Devices"),
    _counter("store.scrub_rotten", "scrub_rotten", "Objects whose bytes the scrub found to be wrong.", "Devices"),
    _counter("store.scrub_passes", "scrub_passes", "Complete passes of the scrub."),
)
"""Rows of the store; not shown before it has recovered."""

BUCKET: Final = (
    _gauge("away", "s3_away", "1 while the bucket is not tried again after failures, otherwise 0."),
    _gauge("up", "s3_up", "1 if the bucket was listed and its requests do not fail, otherwise 0."),
    _gauge("failing_s", "s3_failing_s", "Time since requests to the bucket fail; 0 if they do not."),
    _gauge("deleting", "s3_deletions_pending", "Deletions that wait for the bucket."),
    _gauge("foreign_objects", "s3_foreign_objects",
           "Objects under the prefix that this software did not write; they are left alone."),
    _gauge("left_out_objects", "s3_left_out_objects", "Objects that are not in the index because of chunks_max."),
    _gauge("objects", "s3_objects", "Objects of the bucket in the index."),
    _gauge("records", "s3_records", "Records in s3_objects."),
    _gauge("bytes", "s3_bytes", "Bytes of s3_objects."),
    _gauge("reading", "s3_reads_pending", "Reads that wait for the bucket."),
    _gauge("waiting_records", "s3_writes_pending", "Records that wait to be written to the bucket."),
    _counter("lists", "s3_lists", "Listings of the bucket."),
    _counter("requests", "s3_read_requests", "Ranges read from the bucket."),
    _counter("read_bytes", "s3_read_bytes", "Bytes read from the bucket."),
    _counter("read_records", "s3_read_records", "Valid records read from the bucket."),
    _counter("written_objects", "s3_written_objects", "Objects written to the bucket."),
    _counter("written_bytes", "s3_written_bytes", "Bytes written to the bucket."),
    _counter("present_objects", "s3_present_objects", "Objects not written because another node had written them."),
    _counter("held_back", "s3_held_back", "Evictions that waited until the bucket had the record."),
    _counter("missed_records", "s3_missed_records",
             "Records not written because the bucket was slower than evictions."),
    _counter("crowded_out_reads", "s3_crowded_out_reads",
             "Reads answered as misses because too many reads of their tenant waited."),
    _counter("swept_objects", "s3_swept_objects", "Objects deleted because of bytes_max."),
)
"""Rows of a bucket; their sources are attributes of ColdStatistics."""

DEVICE: Final = (
    _gauge("healthy", "device_healthy", "1 if the device is in use, otherwise 0."),
    _gauge("capacity_bytes", "device_capacity_bytes", "Capacity of the device for values."),
    _gauge("used_bytes", "device_used_bytes", "Bytes used on the device."),
    _gauge("reading", "device_queue_depth", "Requests that the device has not answered."),
    _gauge("bandwidth_bytes_per_s", "device_bandwidth_bytes_per_second", "Last measured bandwidth of the device."),
    _gauge("written_today_bytes", "device_wear_bytes", "Bytes written in the present day of the write budget."),
    _gauge("wear_budget_bytes", "device_wear_budget_bytes",
           "Bytes that may be written a day; absent without a budget."),
    _counter("read_bytes", "device_read_bytes", "Bytes read from the device."),
    _counter("written_bytes", "device_written_bytes", "Bytes written to the device."),
    _counter("errors", "device_errors", "Failed requests to the device."),
)
"""Rows of each device; their sources are attributes of DeviceStatistics."""

ARENA: Final = (
    _gauge("memory_bytes", "arena_capacity_bytes", "Size of the arena."),
    _gauge("memory_used_bytes", "arena_used_bytes", "Used bytes of the arena."),
    _gauge("memory_objects", "arena_copies", "Objects of which the arena holds a copy."),
    _counter("promotions", "arena_promotions", "Copies moved to the arena's main queue because they were read again."),
    _counter("copies_dropped", "arena_copies_dropped", "Copies dropped to make room; their devices have the objects."),
)
"""Rows of memory above devices; their sources are attributes of Statistics."""
# fmt: on


def info_fields(section: str, view: View) -> list[tuple[str, float | None]]:
    """Return the names and values of a section of INFO."""
    return [(row.info_name, row.value(view)) for row in (*NODE, *STORE) if row.info.partition(":")[0] == section]


def info_name(name: str) -> str:
    """Return the name in INFO of the metric ``name``."""
    return next(row.info_name for row in (*NODE, *STORE) if row.name == name)
