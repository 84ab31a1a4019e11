"""Commands on the server: INFO and CONFIG."""

import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Final

from shadowserve import __version__
from shadowserve.resp import Map, Value, Verbatim, encode
from storage_kv.commands._arguments import OK
from storage_kv.commands._connection import REDIS_VERSION
from storage_kv.commands._glob import Glob
from storage_kv.node import Argument, Counters, Node, Reply, Session

__all__ = ["config_get", "config_resetstat", "info"]

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
        ("connected_clients", len(node.sessions)),
        ("maxclients", node.config.connections_max),
        ("client_recent_max_output_buffer", max((s.pending_output_bytes for s in node.sessions.values()), default=0)),
        ("blocked_clients", 0),
    ]


def _info_memory(node: Node) -> _Fields:
    engine = node.engine.statistics()
    resident = _resident_bytes()
    return [
        ("used_memory", engine.used_bytes),
        ("used_memory_human", _human(engine.used_bytes)),
        ("used_memory_rss", resident),
        ("used_memory_rss_human", _human(resident)),
        ("used_memory_peak", engine.peak_bytes),
        ("used_memory_peak_human", _human(engine.peak_bytes)),
        ("maxmemory", engine.budget_bytes),
        ("maxmemory_human", _human(engine.budget_bytes)),
        ("maxmemory_policy", "allkeys-lru"),
        ("mem_fragmentation_ratio", f"{resident / engine.used_bytes if engine.used_bytes else 0:.2f}"),
    ]


def _info_stats(node: Node) -> _Fields:
    counters, engine = node.counters, node.engine.statistics()
    return [
        ("total_connections_received", counters.connections),
        ("total_commands_processed", counters.commands),
        ("total_net_input_bytes", counters.input_bytes),
        ("total_net_output_bytes", counters.output_bytes),
        ("rejected_connections", counters.connections_rejected),
        ("expired_keys", engine.expired_keys),
        ("evicted_keys", engine.evicted_keys),
        ("keyspace_hits", counters.hits),
        ("keyspace_misses", counters.misses),
        ("total_error_replies", counters.errors),
        ("acl_access_denied_auth", counters.authentication_failures),
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


def _info_keyspace(node: Node) -> _Fields:
    engine = node.engine.statistics()
    return [("db0", f"keys={engine.keys},expires={engine.expiring_keys},avg_ttl=0")] if engine.keys else []


def _info_shadowserve(node: Node) -> _Fields:
    counters, engine = node.counters, node.engine.statistics()
    return [
        ("version", __version__),
        ("engine", type(node.engine).__name__),
        ("records", engine.records),
        ("record_bytes", engine.record_bytes),
        ("records_stored", counters.records_stored),
        ("records_kept", counters.records_kept),
        ("records_refused", counters.records_refused),
        ("meta_keys", counters.meta_keys),
        ("evicted_bytes", engine.evicted_bytes),
        ("held_bytes", engine.held_bytes),
        ("connections_denied", counters.connections_denied),
        ("idle_clients_closed", counters.idle_clients),
        ("stalled_clients_closed", counters.stalled_clients),
        ("protocol_errors", counters.protocol_errors),
    ]


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


def info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """INFO [section ...]."""
    wanted = {bytes(argument).decode("utf-8", "replace").lower() for argument in arguments[1:]}
    if not wanted or wanted & {"all", "everything", "default"}:
        wanted = {name.lower() for name in _SECTIONS}
    texts = []
    for name, fields in _SECTIONS.items():
        if name.lower() in wanted:
            lines = [f"# {name}", *(f"{key}:{value}" for key, value in fields(node))]
            texts.append("".join(f"{line}\r\n" for line in lines))
    return encode(Verbatim("\r\n".join(texts).encode()), session.protocol)


def _parameters(node: Node) -> dict[bytes, object]:
    """What CONFIG GET can show: parameters of Redis by which clients choose what to do."""
    config = node.config
    return {
        b"appendonly": "no",
        b"bind": config.host,
        b"databases": 1,
        b"maxclients": config.connections_max,
        b"maxmemory": config.memory_budget_bytes,
        b"maxmemory-policy": "allkeys-lru",
        b"port": node.port,
        b"proto-max-bulk-len": config.bulk_bytes_max,
        b"protected-mode": "yes" if config.protected_mode else "no",
        b"save": "",
        b"tcp-keepalive": 300,
        b"timeout": int(config.idle_timeout_s),
    }


def config_get(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CONFIG GET pattern [pattern ...]."""
    found: dict[bytes, object] = {}
    parameters = _parameters(node)
    for pattern in map(bytes, arguments[2:]):
        if pattern.lower() in parameters:  # no pattern but a name: comes back as it was spelt
            found[pattern] = parameters[pattern.lower()]
            continue
        glob = Glob(pattern, ignore_case=True)
        found |= {name: value for name, value in parameters.items() if glob.matches(name)}
    fields: list[Value] = []
    for name, value in found.items():
        fields += [name, str(value).encode()]
    return encode(Map(fields), session.protocol)


def config_resetstat(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """CONFIG RESETSTAT: the node's counters start anew. The engine's, which Prometheus reads too, do not."""
    node.counters = Counters()
    return OK
