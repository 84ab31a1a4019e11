"""A pool of memory alone: it finds each value by its key's text, and keeps it where it was received."""

from collections.abc import Callable
from typing import Final

from shadowserve.native import IndexFlag
from shadowserve.pool import buffers
from shadowserve.pool.entries import MEMORY_ONLY, Entry, parse_key
from shadowserve.pool.heap import ENTRY_OVERHEAD_BYTES, Heap, HeapItem
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import Address, Item, Lease
from shadowserve.pool.volume.tickets import Ticket

_USES_MAX: Final = 1_000
"""Uses of entries that are reported to the index together: 50 us."""


class MemoryPool(Pool):
    """A pool without devices."""

    core_class = Heap
    _core: Heap

    # ---- Reading

    def get(self, address: Address) -> Item | None:
        core = self._core
        if len(core.uses) >= _USES_MAX:
            core.count_uses()
        names = core.tenants.get(address[0])
        item = None if names is None else names.get(address[1])
        if item is None or (item.expires_at_ms is not None and self._is_expired(item)):
            return self._find_in_lower_tier(address)
        core.uses.append(item.slot)
        return item

    def peek(self, address: Address) -> Item | None:
        return self._item_of(address) or self._find_in_lower_tier(address)

    def _item_of(self, address: Address) -> HeapItem | None:
        names = self._core.tenants.get(address[0])
        item = None if names is None else names.get(address[1])
        return None if item is None or (item.expires_at_ms is not None and self._is_expired(item)) else item

    def _is_expired(self, item: HeapItem) -> bool:
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        self._core.expire(Entry(item.slot, self._index.read(item.slot)))
        return True

    def _entry_of(self, address: Address) -> Entry | None:
        item = self._item_of(address)
        return None if item is None else self._core.entry(item.slot)

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        if item.is_cold:
            assert self._lower_tier is not None
            self._lower_tier.read(item, start, end, done)
            return
        assert item.value is not None
        done(Lease(memoryview(item.value)[start:end]))

    def release(self, item: Item) -> None:
        assert isinstance(item, HeapItem)
        self._core.release(item)

    # ---- Writing

    def allocate(self, size: int, ready: Callable[[], None]) -> memoryview | None:
        if size + ENTRY_OVERHEAD_BYTES > self._space.capacity_bytes:
            raise MemoryError("command not allowed when used memory > 'maxmemory'.")
        return buffers.allocate(size)

    def discard(self, buffer: memoryview) -> None:
        """No-op: the garbage collector frees the buffer with its last view."""

    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        header_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        core = self._core
        tenant, key = address
        names = core.tenants.get(tenant)
        found = None if names is None else names.get(key)
        plain = not (header_bytes or parent or expires_at_ms)
        if found is not None and plain and self._replace_value(found, value):
            return self._put_in_lower_tier(address, len(value), 0, False, b"")
        item = HeapItem(tenant, key, value, header_bytes, expires_at_ms, parent)
        core.count_uses()
        # The item that was found may have expired, and one that was not found may be cleared but present.
        old = self._present(parse_key(address)) if found is not None or core.clears.under_way else None
        old = self._make_room(item, old)
        self._insert(item, parent, old)
        if core.taken_bytes > self._peak_bytes:
            self._peak_bytes = core.taken_bytes
        return self._put_in_lower_tier(address, item.length, header_bytes, expires_at_ms is not None, parent)

    def _replace_value(self, item: HeapItem, value: bytes | memoryview) -> bool:
        """Give a plain entry another value, which costs much less than another entry; return False if it cannot be."""
        if not item.is_plain or item.users > 1:
            return False
        if item.length != len(value) and not self._resize(item, len(value)):
            return False
        core = self._core
        item.value = value
        core.uses.append(item.slot)
        if len(core.uses) >= _USES_MAX:
            core.count_uses()
        return True

    def _make_room(self, item: HeapItem, old: Entry | None) -> Entry | None:
        """Evict until an item fits; return the entry that it replaces, None if that was evicted too."""
        core, space = self._core, self._space
        used = core.taken_bytes + item.size
        if used <= space.capacity_bytes and core.objects < space.objects_max and item.tenant not in space.quotas:
            return old
        space.begin_hold()
        if not space.make_room_for(item.tenant, item.size, old):
            raise self._waiting.busy_error("more has to be evicted than one hold of the lock allows")
        return old if old is not None and core.is_current(old) else None

    def _insert(self, item: HeapItem, parent: bytes, old: Entry | None) -> None:
        core = self._core
        slot = self._index.insert(
            *parse_key((item.tenant, item.key)),
            device=MEMORY_ONLY,
            extent=item.size - item.length,
            length=item.length,
            now_s=core.turn_s,
            header_length=item.header_bytes,
            flags=IndexFlag.RECORD if item.header_bytes else 0,
            expires_at_ms=item.expires_at_ms or 0,
            generation=core.next_generation(),
            parent=parent,
        )
        if old is not None:
            core.replace(old, None)
        self._entered(item.tenant, item.length, item.header_bytes, is_new=old is None)
        core.keep(slot, item)

    def _resize(self, item: HeapItem, length: int) -> bool:
        """Change the length of an entry, if there is room without an eviction."""
        core, more = self._core, length - item.length
        used = core.taken_bytes + more
        if item.tenant in self._space.quotas or (more > 0 and used > self._space.capacity_bytes):
            return False
        core.resize(item, length)
        self._peak_bytes = max(self._peak_bytes, used)
        return True

    def settling(self, address: Address) -> Ticket | None:
        return None if self._lower_tier is None else self._lower_tier.settling(address)

    def _bound_memory(self, size: int) -> None:
        self._space.budget_bytes = size
