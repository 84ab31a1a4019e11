"""INFO's section Tenants: what each tenant holds and may, for those who run the server."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Final
from urllib.parse import quote

from storage_kv.config import TenantLimits
from storage_kv.node import Node

_SHOWN_MAX: Final = 256
"""Some 3 ms of the node's lock."""
_PLAIN: Final = "".join(map(chr, range(33, 127))).translate(dict.fromkeys(map(ord, "%,=")))
"""What a tenant's name shows as it is, among pairs that stand between commas; the rest as in URLs."""


def tenant_fields(node: Node) -> list[tuple[str, object]]:
    """Return a field for each tenant: those with limits first, then those with clients, then others by their ids."""
    known = node.store.tenants()
    clients = Counter(session.user.tenant for session in node.sessions.values())
    names = dict.fromkeys(islice(_in_order(node, clients, known), _SHOWN_MAX))
    fields: list[tuple[str, object]] = [("tenants_known", len(known))]
    for number, name in enumerate(names):
        pairs = _pairs(node, name, known[name], clients[name])
        fields.append((f"tenant{number}", ",".join(f"{key}={value}" for key, value in pairs.items())))
    return fields


def _in_order(node: Node, clients: Counter[str], known: Mapping[str, int]) -> Iterator[str]:
    seen: set[str] = set()
    for name in chain(node.config.tenants, clients, known):
        if name in known and name not in seen:
            seen.add(name)
            yield name


def _pairs(node: Node, name: str, tenant: int, clients: int) -> dict[str, object]:
    """Return what is told of a tenant; limits that there are not are left out."""
    found = node.store.statistics(tenant)
    limits = node.config.tenants.get(name, TenantLimits())
    pairs: dict[str, object] = {
        "name": quote(name, safe=_PLAIN),
        "clients": clients,
        "keys": found.keys,
        "used_bytes": found.used_bytes,
        "pinned_keys": found.pinned_keys,
        "evicted_keys": found.evicted_keys,
    }
    bounds = {
        "keys_max": limits.keys_max,
        "bytes_max": limits.bytes_max,
        "commands_per_s": limits.commands_per_s,
        "bytes_per_s": limits.bytes_per_s,
    }
    pairs |= {key: f"{value:g}" if isinstance(value, float) else int(value) for key, value in bounds.items() if value}
    limiter = node.limiters.get(name)
    if limiter is not None and limiter.limits:
        pairs |= {"commands": limiter.commands, "bytes": limiter.moved_bytes, "throttled": limiter.throttled}
    return pairs
