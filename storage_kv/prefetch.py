"""Records that the bucket has and the node has not, on their way into the node before their bytes are asked for."""

import threading
from collections import defaultdict
from typing import Any, Final

from shadowserve.pool.terms import Address, Item, Lease

_AHEAD_S: Final = 1.0
"""A tenant's prefetches take at most so much of the bucket's time at once: whoever wants more asks again. So what they
take of memory is bounded, and no read waits for long behind them, nor for longer than it may (``s3.timeout_s``)."""


class Prefetches:
    """Reads from the bucket that no reply waits for. Methods are called with the node's lock held.

    Args:
        node: whose store is read.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._lock = threading.Lock()  # of what follows: reads end in other threads
        self._under_way: set[Address] = set()
        self._bytes: defaultdict[int, int] = defaultdict(int)  # of these, by tenant

    def begin(self, address: Address, item: Item) -> bool:
        """Begin to read a cold record, unless it is under way; return False where its tenant has enough under way."""
        tenant, size = address[0], item.length
        with self._lock:
            if address in self._under_way:
                return True
            mine = self._bytes[tenant]
            if mine and self._seconds(mine + size) > _AHEAD_S:
                return False
            self._under_way.add(address)
            self._bytes[tenant] = mine + size
        self._node.store.read(item, 0, 1, lambda lease: self._ended(address, size, lease))
        return True

    def _seconds(self, size: int) -> float:
        """Return how much longer the bucket takes for what it is asked for with so many more bytes."""
        store = self._node.store
        return float((store.expected_s(size) or 0.0) - (store.expected_s(0) or 0.0))

    def _ended(self, address: Address, size: int, lease: Lease | None) -> None:
        """Take note that a record has come, or will not; in any thread."""
        with self._lock:
            self._under_way.discard(address)
            self._bytes[address[0]] -= size
            if not self._bytes[address[0]]:
                del self._bytes[address[0]]
        if lease is not None:  # never from within read(), which holds the node's lock
            with self._node.lock:
                lease.release()
