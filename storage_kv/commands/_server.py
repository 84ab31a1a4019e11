"""INFO: what the server is and has done, by sections as Redis's."""

import dataclasses
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from shadowserve import __version__
from shadowserve.resp import Verbatim, encode
from storage_kv.commands._connection import REDIS_VERSION
from storage_kv.commands._tenants import tenant_fields
from storage_kv.node import Node, Reply
from storage_kv.session import Argument, Session

_Fields = list[tuple[str, object]]


def _human(size: int) -> str:
    value = float(size)
    for unit in ("B", "K", "M", "G"):
        if value < 1024:
            return f"{value:.2f}{unit}" if unit != "B" else f"{size}B"
        value /= 1024
    return f"{value:.2f}T"


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak is the best there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _info_server(node: Node) -> _Fields:
    uptime_s = int(time.monotonic() - node.started_s)
    return [
        ("redis_version", REDIS_VERSION),
        ("redis_mode", "standalone"),
        ("os", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("arch_bits", 64 if sys.maxsize > 1 << 32 else 32),
        ("multiplexing_api", "epoll"),
        ("process_id", node.process_id),
        ("run_id", node.run_id),
        ("tcp_port", node.port),
        ("server_time_usec", time.time_ns() // 1000),
        ("uptime_in_seconds", uptime_s),
        ("uptime_in_days", uptime_s // 86400),
        ("executable", sys.executable),
        ("shadowserve_version", __version__),
    ]


def _info_clients(node: Node) -> _Fields:
    return [
        ("connected_clients", len(node.open_sessions())),
        ("maxclients", node.config.connections_max),
        ("client_recent_max_output_buffer", max((s.pending_output_bytes for s in node.sessions.values()), default=0)),
        ("blocked_clients", 0),
    ]


def _info_memory(node: Node) -> _Fields:
    seen = node.store.statistics()
    resident = _resident_bytes()
    return [
        ("used_memory", seen.used_bytes),
        ("used_memory_human", _human(seen.used_bytes)),
        ("used_memory_rss", resident),
        ("used_memory_rss_human", _human(resident)),
        ("used_memory_peak", seen.peak_bytes),
        ("used_memory_peak_human", _human(seen.peak_bytes)),
        ("maxmemory", seen.budget_bytes),
        ("maxmemory_human", _human(seen.budget_bytes)),
        ("maxmemory_policy", "allkeys-lru"),
        ("mem_fragmentation_ratio", f"{resident / seen.used_bytes if seen.used_bytes else 0:.2f}"),
    ]


def _info_stats(node: Node) -> _Fields:
    counters, seen = node.counters, node.store.statistics()
    return [
        ("total_connections_received", counters.connections),
        ("total_commands_processed", counters.commands),
        ("total_net_input_bytes", counters.input_bytes),
        ("total_net_output_bytes", counters.output_bytes),
        ("rejected_connections", counters.connections_rejected),
        ("expired_keys", seen.expired_keys),
        ("evicted_keys", seen.evicted_keys),
        ("keyspace_hits", counters.hits),
        ("keyspace_misses", counters.misses),
        ("lookup_hits", counters.lookup_hits),
        ("lookup_misses", counters.lookup_misses),
        ("total_error_replies", counters.errors),
        ("acl_access_denied_auth", counters.authentication_failures),
        ("acl_access_denied_cmd", counters.denied_commands),
        ("acl_access_denied_key", counters.denied_keys),
    ]


def _info_cpu(node: Node) -> _Fields:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return [("used_cpu_sys", f"{own.ru_stime:.6f}"), ("used_cpu_user", f"{own.ru_utime:.6f}")]


def _info_persistence(node: Node) -> _Fields:
    return [("loading", 0), ("rdb_changes_since_last_save", 0), ("aof_enabled", 0)]


def _info_replication(node: Node) -> _Fields:
    return [("role", "master"), ("connected_slaves", 0)]


def _info_cluster(node: Node) -> _Fields:
    return [("cluster_enabled", 0)]


def _info_keyspace(node: Node, tenant: int | None = None) -> _Fields:
    seen = node.store.statistics(tenant)
    return [("db0", f"keys={seen.keys},expires={seen.expiring_keys},avg_ttl=0")] if seen.keys else []


def _info_shadowserve(node: Node) -> _Fields:
    counters, seen = node.counters, node.store.statistics()
    return [
        ("version", __version__),
        ("engine", node.config.kind),
        ("records", seen.records),
        ("record_bytes", seen.record_bytes),
        ("records_stored", counters.records_stored),
        ("records_kept", counters.records_kept),
        ("records_refused", counters.records_refused),
        ("meta_keys", counters.meta_keys),
        ("layer_streams", counters.layer_streams),
        ("layer_streams_failed", counters.layer_streams_failed),
        ("layer_streams_closed", counters.layer_streams_closed),
        ("layer_streams_active", node.streams.active if node.streams else 0),
        ("layer_streams_waiting", node.streams.waiting if node.streams else 0),
        ("layers_sent", counters.layers_sent),
        ("layer_bytes_sent", counters.layer_bytes_sent),
        ("lost_values", counters.lost),
        ("evicted_bytes", seen.evicted_bytes),
        ("evictions", _counts(seen.evictions)),
        ("lost_objects", _counts(seen.lost)),
        ("held_bytes", seen.held_bytes),
        ("pinned_keys", seen.pinned_keys),
        ("pinned_bytes", seen.pinned_bytes),
        ("pinned_bytes_max", int(node.config.pin_share * seen.budget_bytes)),
        ("connections_denied", counters.connections_denied),
        ("idle_clients_closed", counters.idle_clients),
        ("stalled_clients_closed", counters.stalled_clients),
        ("protocol_errors", counters.protocol_errors),
        ("http_requests_refused", counters.http_refused),
        ("strangers_closed", counters.strangers_closed),
        ("strangers_displaced", counters.strangers_displaced),
        ("greedy_clients_closed", counters.greedy_clients),
        ("clients_memory_bytes", node.memory.used),
        ("clients_memory_bytes_max", node.config.clients_memory_bytes),
        ("lent_bytes", node.lent.used),
        ("memory_waits", node.memory.waiting + node.lent.waiting),
        ("tls_failures", counters.tls_failures),
        ("throttled", counters.throttled),
        ("audit_lines", node.audit.written),
        ("audit_lines_lost", node.audit.lost),
    ]


def _counts(found: Mapping[str, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in sorted(found.items()))


def _info_commandstats(node: Node) -> _Fields:
    """Redis's lines. Time is that of the sample, scaled to all calls."""
    return [
        (
            f"cmdstat_{name}",
            f"calls={found.calls},usec={found.mean_ns * found.calls / 1000:.0f},"
            f"usec_per_call={found.mean_ns / 1000:.2f},rejected_calls={found.rejected},failed_calls={found.failed}",
        )
        for name, found in sorted(node.counters.by_command.items())
    ]


def _info_latencystats(node: Node) -> _Fields:
    return [
        (
            f"latency_percentiles_usec_{name}",
            ",".join(f"p{share:g}={found.durations.quantile_ns(share / 100) / 1000:.3f}" for share in (50, 99, 99.9)),
        )
        for name, found in sorted(node.counters.by_command.items())
        if found.calls
    ]


def _info_devices(node: Node) -> _Fields:
    seen = node.store.statistics()
    fields: _Fields = [
        ("writing_bytes", seen.writing_bytes),
        ("reads_pending", seen.waiting_reads),
        ("busy_refusals", node.counters.busy),
        ("quarantined_bytes", seen.quarantined_bytes),
        ("scrub_bytes", seen.scrubbed_bytes),
        ("scrub_rotten", seen.scrub_rotten),
    ]
    for number, device in enumerate(seen.devices):
        shown = {
            "name": device.name,
            "healthy": int(device.healthy),
            "capacity_bytes": device.capacity_bytes,
            "used_bytes": device.used_bytes,
            "read_bytes": device.read_bytes,
            "written_bytes": device.written_bytes,
            "errors": device.errors,
            "queue_depth": device.reading,
        }
        for kind, histogram in sorted(device.latencies.items()):
            shown[f"{kind}_p99_usec"] = round(histogram.quantile_ns(0.99) / 1000)
        fields.append((f"device{number}", ",".join(f"{key}={value}" for key, value in shown.items())))
    if seen.memory_bytes:
        shown = {"name": "memory", "capacity_bytes": seen.memory_bytes, "used_bytes": seen.memory_used_bytes}
        fields.append(("arena0", ",".join(f"{key}={value}" for key, value in shown.items())))
    return fields


def _info_s3(node: Node) -> _Fields:
    seen = node.store.statistics().cold
    if seen is None:
        return []
    fields = {item.name: getattr(seen, item.name) for item in dataclasses.fields(seen)}
    shown = [(name, _counts(value) if isinstance(value, Mapping) else value) for name, value in fields.items()]
    return [("up", int(seen.up)), *shown]


_SECTIONS: Final[dict[str, Callable[[Node], _Fields]]] = {
    "Server": _info_server,
    "Clients": _info_clients,
    "Memory": _info_memory,
    "Persistence": _info_persistence,
    "Stats": _info_stats,
    "Replication": _info_replication,
    "CPU": _info_cpu,
    "Cluster": _info_cluster,
    "Keyspace": _info_keyspace,
    "ShadowServe": _info_shadowserve,
}

_SECTIONS_OF_TENANTS: Final = frozenset({"Server", "Persistence", "Replication", "Cluster", "Keyspace"})
"""Those that tell nothing of what others do."""

_SECTIONS_ON_DEMAND: Final[dict[str, Callable[[Node], _Fields]]] = {
    "Commandstats": _info_commandstats,
    "Latencystats": _info_latencystats,
    "Devices": _info_devices,
    "S3": _info_s3,
    "Tenants": tenant_fields,
}
"""Those that come when they are named, or all are asked for: they are long."""


def info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """INFO [section ...]; users who do not run the server see what concerns them, and their own tenant's keys."""
    wanted = {bytes(argument).decode("utf-8", "replace").lower() for argument in arguments[1:]}
    sections = _SECTIONS | _SECTIONS_ON_DEMAND
    if wanted & {"all", "everything"}:
        wanted = {name.lower() for name in sections}
    elif not wanted or "default" in wanted:
        wanted |= {name.lower() for name in _SECTIONS}
    is_operator = session.user.is_operator
    texts = []
    for name, fields in sections.items():
        if name.lower() in wanted and (is_operator or name in _SECTIONS_OF_TENANTS):
            found = (
                _info_keyspace(node, None if is_operator else session.tenant) if name == "Keyspace" else fields(node)
            )
            lines = [f"# {name}", *(f"{key}:{value}" for key, value in found)]
            texts.append("".join(f"{line}\r\n" for line in lines))
    return encode(Verbatim("\r\n".join(texts).encode()), session.protocol)
