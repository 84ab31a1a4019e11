"""Listing keys: a walk over the index's slots, a bounded part of it at a time."""

from typing import Final

from storage_kv.pool.core import Core, Entry
from storage_kv.pool.keys import chunk_key

__all__ = ["scan_keys"]

_SCAN_ENTRIES_MAX: Final = 10_000
"""Entries of other tenants that one SCAN passes over: about 10 ms."""


def scan_keys(core: Core, tenant: int, cursor: int, count: int) -> tuple[int, list[bytes]]:
    """Return some of a tenant's keys, and the slot that came last; see :meth:`storage_kv.engine.Engine.scan`."""
    index = core.index
    found: list[bytes] = []
    now_ms = core.clock_ms()
    slot = index.next(cursor) if cursor < 1 << 32 else 0
    for _ in range(_SCAN_ENTRIES_MAX):
        if not slot:
            return 0, found
        fields = index.read(slot)
        if fields.tenant == tenant:
            if fields.expires_at_ms and fields.expires_at_ms <= now_ms:
                core.expire(Entry(slot, fields))
            else:
                name = index.name(slot)
                found.append(chunk_key(fields.key) if name is None else name)
                if len(found) >= count:
                    break
        slot, last = index.next(slot), slot
    else:
        return last, found
    return (slot if index.next(slot) else 0), found
