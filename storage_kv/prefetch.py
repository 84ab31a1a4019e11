"""Reads records from the bucket into the node before their bytes are requested."""

import threading
from collections import defaultdict
from typing import Any, Final

from shadowserve.pool.types import Address, Item, Lease

_AHEAD_S: Final = 1.0
"""Limit of the bucket's time that a tenant's running prefetches may take. It bounds their memory, and how long reads
wait behind them, well within ``s3.timeout_s``. A client repeats its request for more."""


class Prefetches:
    """Reads from the bucket that no reply waits for. Needs the node's lock."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._lock = threading.Lock()  # protects the next two: reads end in other threads
        self._running: set[Address] = set()
        self._bytes: defaultdict[int, int] = defaultdict(int)  # of the running reads, by tenant

    def begin(self, address: Address, item: Item) -> bool:
        """Start to read a cold record unless that runs already; return False if its tenant has reached the limit."""
        tenant, size = address[0], item.length
        with self._lock:
            if address in self._running:
                return True
            mine = self._bytes[tenant]
            if mine and self._seconds(mine + size) > _AHEAD_S:
                return False
            self._running.add(address)
            self._bytes[tenant] = mine + size
        self._node.store.read(item, 0, 1, lambda lease: self._ended(address, size, lease))
        return True

    def _seconds(self, size: int) -> float:
        """Return by how much more bytes lengthen the bucket's queue."""
        store = self._node.store
        return float((store.expected_s(size) or 0.0) - (store.expected_s(0) or 0.0))

    def _ended(self, address: Address, size: int, lease: Lease | None) -> None:
        """Record the end of a read, in any thread."""
        with self._lock:
            self._running.discard(address)
            self._bytes[address[0]] -= size
            if not self._bytes[address[0]]:
                del self._bytes[address[0]]
        if lease is not None:  # read() never calls this with a lease, so the lock is free
            with self._node.lock:
                lease.release()
