"""Listing keys: a walk through a tenant's entries in the order of their keys' hashes, a bounded part at a time.

A key that stays is returned exactly once, whatever else changes. But hashes of chosen keys reveal the index's seed, and
with the seed a client could choose keys that collide. So clients get enciphered cursors.
"""

import hashlib
from typing import Final

from shadowserve.keys import storage_key
from shadowserve.native import Index
from shadowserve.pool.clears import SCAN_LINES
from shadowserve.pool.core import Core
from shadowserve.pool.entries import Entry
from shadowserve.pool.types import ENTRIES_PER_HOLD

_ROUNDS: Final = 4
_HALF: Final = 32
_MASK: Final = (1 << _HALF) - 1


class Cursors:
    """A permutation of the 64-bit numbers by four Feistel rounds. 0, where a scan begins and ends, stays 0."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def shown(self, position: int) -> int:
        return position and (self._permuted(position) or self._permuted(0))

    def position(self, cursor: int) -> int:
        return cursor and (self._restored(cursor) or self._restored(0))

    def _permuted(self, number: int) -> int:
        left, right = number >> _HALF, number & _MASK
        for number_of_round in range(_ROUNDS):
            left, right = right, left ^ self._digest(number_of_round, right)
        return left << _HALF | right

    def _restored(self, number: int) -> int:
        left, right = number >> _HALF, number & _MASK
        for number_of_round in reversed(range(_ROUNDS)):
            left, right = right ^ self._digest(number_of_round, left), left
        return left << _HALF | right

    def _digest(self, number_of_round: int, half: int) -> int:
        data = bytes([number_of_round]) + half.to_bytes(4, "big")
        return int.from_bytes(hashlib.blake2b(data, digest_size=4, key=self._key).digest(), "big")


def scan_keys(core: Core, tenant: int, position: int, count: int) -> tuple[int, list[bytes]]:
    """Return the next position and some keys of a tenant; see :meth:`Pool.scan`."""
    index: Index = core.index
    found: list[bytes] = []
    now_ms = core.clock_ms()
    position, slots = index.scan(tenant, position, min(count, ENTRIES_PER_HOLD), SCAN_LINES)
    for slot in slots:
        fields = index.read(slot)
        if core.clears.under_way and core.clears.covers(tenant, fields.generation):
            continue
        if fields.expires_at_ms and fields.expires_at_ms <= now_ms:
            core.expire(Entry(slot, fields))
            continue
        disk = core.disk_of(entry := Entry(slot, fields))
        if disk is not None and disk.gone is not None and core.memory_cache.peek(slot) is None:
            core.drop_lost(entry, "device_gone")
            continue
        name = index.name(slot)
        found.append(storage_key(fields.key) if name is None else name)
    return position, found
