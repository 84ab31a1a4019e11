"""INFO: sections as in Redis, and ShadowServe's own."""

import dataclasses
import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Final
from urllib.parse import quote

from shadowserve import __version__
from shadowserve.resp import Verbatim, encode
from storage_kv.commands._connection import REDIS_VERSION
from storage_kv.config import TenantLimits
from storage_kv.metric_table import ARENA, DEVICE, Row, View, info_fields
from storage_kv.node import Node
from storage_kv.reply import Reply
from storage_kv.session import Argument, Session

_Fields = list[tuple[str, object]]

_TENANTS_SHOWN_MAX: Final = 256  # limit of the tenants in INFO: about 3 ms of the node's lock
_PLAIN: Final = "".join(map(chr, range(33, 127))).translate(dict.fromkeys(map(ord, "%,=")))
"""Characters of a tenant's name that need no percent-encoding in a list of pairs."""


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
    except OSError:  # no descriptor is free: the peak is the next best
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _table_fields(section: str, node: Node) -> _Fields:
    return [(name, _number(value)) for name, value in info_fields(section, View.of(node))]


def _number(value: float | None) -> float:
    return int(value or 0) if value is None or isinstance(value, bool) else value


def _counts(found: Mapping[str, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in sorted(found.items()))


def _pairs(pairs: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in pairs.items())


def _info_server(node: Node) -> _Fields:
    uptime_s = int(time.monotonic() - node.server.started_s)
    return [
        ("redis_version", REDIS_VERSION),
        ("redis_mode", "standalone"),
        ("os", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("arch_bits", 64 if sys.maxsize > 1 << 32 else 32),
        ("multiplexing_api", "epoll"),
        ("process_id", os.getpid()),
        ("run_id", node.run_id),
        ("tcp_port", node.server.port),
        ("server_time_usec", time.time_ns() // 1000),
        ("uptime_in_seconds", uptime_s),
        ("uptime_in_days", uptime_s // 86400),
        ("executable", sys.executable),
        ("shadowserve_version", __version__),
    ]


def _info_clients(node: Node) -> _Fields:
    largest = max((session.info.pending_output_bytes for session in node.sessions.values()), default=0)
    return [
        ("connected_clients", len(node.open_sessions())),
        *_table_fields("Clients", node),
        ("client_recent_max_output_buffer", largest),
        ("blocked_clients", 0),
    ]


def _info_memory(node: Node) -> _Fields:
    store, resident = node.store.statistics(), _resident_bytes()
    return [
        *_table_fields("Memory", node),
        ("used_memory_human", _human(store.used_bytes)),
        ("used_memory_rss", resident),
        ("used_memory_rss_human", _human(resident)),
        ("used_memory_peak_human", _human(store.peak_bytes)),
        ("maxmemory_human", _human(store.budget_bytes)),
        ("maxmemory_policy", "allkeys-lru"),
        ("mem_fragmentation_ratio", f"{resident / store.used_bytes if store.used_bytes else 0:.2f}"),
    ]


def _info_cpu(node: Node) -> _Fields:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return [("used_cpu_sys", f"{own.ru_stime:.6f}"), ("used_cpu_user", f"{own.ru_utime:.6f}")]


def _info_keyspace(node: Node, tenant: int | None = None) -> _Fields:
    store = node.store.statistics(tenant)
    return [("db0", f"keys={store.keys},expires={store.expiring_keys},avg_ttl=0")] if store.keys else []


def _info_shadowserve(node: Node) -> _Fields:
    store = node.store.statistics()
    return [
        ("version", __version__),
        ("engine", node.config.kind),
        *_table_fields("ShadowServe", node),
        ("pinned_bytes_max", int(node.config.pin_share * store.budget_bytes)),
        ("evictions", _counts(store.evictions)),
        ("lost_objects", _counts(store.lost)),
    ]


def _info_commandstats(node: Node) -> _Fields:
    """Return Redis' lines; the time of the sample is scaled to all calls."""
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
    store = node.store.statistics()
    fields = _table_fields("Devices", node)
    for number, device in enumerate(store.devices):
        pairs = {"name": device.name} | _row_pairs(DEVICE, "device_", device)
        for kind, histogram in sorted(device.latencies.items()):
            pairs[f"{kind}_p99_usec"] = round(histogram.quantile_ns(0.99) / 1000)
        fields.append((f"device{number}", _pairs(pairs)))
    if store.memory_bytes:
        fields.append(("arena0", _pairs({"name": "memory"} | _row_pairs(ARENA, "arena_", store))))
    return fields


def _row_pairs(rows: Iterable[Row], prefix: str, source: object) -> dict[str, object]:
    values = {row.name.removeprefix(prefix): row.value(source) for row in rows}
    return {name: _number(value) for name, value in values.items() if value is not None}


def _info_s3(node: Node) -> _Fields:
    bucket = node.store.statistics().cold
    if bucket is None:
        return []
    fields = {item.name: getattr(bucket, item.name) for item in dataclasses.fields(bucket)}
    shown = [(name, _counts(value) if isinstance(value, Mapping) else value) for name, value in fields.items()]
    return [("up", int(bucket.up)), *shown]


def _info_tenants(node: Node) -> _Fields:
    """Return a field for each tenant: those with limits, then those with clients, then others by their ids."""
    known = node.store.tenants()
    clients = Counter(session.user.tenant for session in node.sessions.values())
    names = (name for name in dict.fromkeys(chain(node.config.tenants, clients, known)) if name in known)
    fields: _Fields = [("tenants_known", len(known))]
    for number, name in enumerate(islice(names, _TENANTS_SHOWN_MAX)):
        fields.append((f"tenant{number}", _pairs(_tenant_pairs(node, name, known[name], clients[name]))))
    return fields


def _tenant_pairs(node: Node, name: str, tenant: int, clients: int) -> dict[str, object]:
    """Return the values of a tenant, and those limits that it has."""
    store = node.store.statistics(tenant)
    limits = node.config.tenants.get(name, TenantLimits())
    pairs: dict[str, object] = {
        "name": quote(name, safe=_PLAIN),
        "clients": clients,
        "keys": store.keys,
        "used_bytes": store.used_bytes,
        "pinned_keys": store.pinned_keys,
        "evicted_keys": store.evicted_keys,
    }
    for key in ("keys_max", "bytes_max", "commands_per_s", "bytes_per_s"):
        limit = getattr(limits, key)
        if limit:
            pairs[key] = f"{limit:g}" if isinstance(limit, float) else int(limit)
    limiter = node.limiters.get(name)
    if limiter is not None and limiter.has_limits:
        pairs |= {"commands": limiter.commands, "bytes": limiter.moved_bytes, "throttled": limiter.throttled}
    return pairs


_SECTIONS: Final[dict[str, Callable[[Node], _Fields]]] = {
    "Server": _info_server,
    "Clients": _info_clients,
    "Memory": _info_memory,
    "Persistence": lambda node: [("loading", 0), ("rdb_changes_since_last_save", 0), ("aof_enabled", 0)],
    "Stats": lambda node: _table_fields("Stats", node),
    "Replication": lambda node: [("role", "master"), ("connected_slaves", 0)],
    "CPU": _info_cpu,
    "Cluster": lambda node: [("cluster_enabled", 0)],
    "Keyspace": _info_keyspace,
    "ShadowServe": _info_shadowserve,
}

_SECTIONS_OF_TENANTS: Final = frozenset({"Server", "Persistence", "Replication", "Cluster", "Keyspace"})
"""Sections that users without @admin see: they show nothing of other tenants."""

_SECTIONS_ON_DEMAND: Final[dict[str, Callable[[Node], _Fields]]] = {
    "Commandstats": _info_commandstats,
    "Latencystats": _info_latencystats,
    "Devices": _info_devices,
    "S3": _info_s3,
    "Tenants": _info_tenants,
}
"""Long sections, shown only by name or with ``all``."""


def info(node: Node, session: Session, arguments: list[Argument]) -> Reply:
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
