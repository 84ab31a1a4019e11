"""A pool of memory alone: each value is found by its key's text, and is where it was received."""

from collections.abc import Callable
from typing import Final

from shadowserve.native import IndexFlag
from shadowserve.pool import buffers
from shadowserve.pool.entries import MEMORY_ONLY, Entry
from shadowserve.pool.heap import ENTRY_OVERHEAD_BYTES, Heap, HeapItem
from shadowserve.pool.keys import parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.terms import Address, Item, Lease
from shadowserve.pool.volume.changes import Ticket

_USES_MAX: Final = 1_000
"""Uses of entries that the index hears of together: 50 us."""


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
            return self._find_below(address)
        core.uses.append(item.slot)
        return item

    def peek(self, address: Address) -> Item | None:
        return self._item_of(address) or self._find_below(address)

    def _item_of(self, address: Address) -> HeapItem | None:
        """Return the item of a key, unless it has expired, which removes it."""
        names = self._core.tenants.get(address[0])
        item = None if names is None else names.get(address[1])
        return None if item is None or (item.expires_at_ms is not None and self._is_expired(item)) else item

    def _is_expired(self, item: HeapItem) -> bool:
        """Return whether an item's time has come, which removes it."""
        if item.expires_at_ms is None or item.expires_at_ms > self._clock_ms():
            return False
        self._core.expire(Entry(item.slot, self._index.read(item.slot)))
        return True

    def _entry_of(self, address: Address) -> Entry | None:
        item = self._item_of(address)
        return None if item is None else self._core.entry(item.slot)

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        if item.is_cold:
            assert self._below is not None
            self._below.read(item, start, end, done)
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
        """It goes with the last view of it."""

    def put(
        self,
        address: Address,
        value: bytes | memoryview,
        *,
        head_bytes: int = 0,
        expires_at_ms: int | None = None,
        parent: bytes = b"",
    ) -> Ticket | None:
        core = self._core
        tenant, key = address
        names = core.tenants.get(tenant)
        found = None if names is None else names.get(key)
        if found is not None and found.is_plain and not (found.users > 1 or head_bytes or parent or expires_at_ms):
            # Another value is much less work than another entry in its place.
            if found.length == len(value) or self._resize(found, len(value)):
                found.value = value
                core.uses.append(found.slot)
                if len(core.uses) >= _USES_MAX:
                    core.count_uses()
                return self._put_below(address, len(value), 0, False, b"")
        item = HeapItem(tenant, key, value, head_bytes, expires_at_ms, parent)
        core.count_uses()
        parsed = parse_key(address)
        # What was found may have expired, and what was not may be there still where it was cleared.
        old = self._present(parsed) if found is not None or core.clears.under_way else None
        space = self._space
        used = core.taken_bytes + item.size
        if used > space.capacity_bytes or core.objects >= space.objects_max or tenant in space.quotas:
            space.begin_hold()
            if not space.make_room_for(tenant, item.size, old):
                raise self._busy_error("more has to be evicted than is at a time")
            if old is not None and not core.is_current(old):
                old = None  # making room has evicted it
        slot = self._index.insert(
            *parsed,
            device=MEMORY_ONLY,
            extent=item.size - item.length,
            length=item.length,
            now_s=core.turn_s,
            head_length=head_bytes,
            flags=IndexFlag.RECORD if head_bytes else 0,
            expires_at_ms=expires_at_ms or 0,
            generation=core.next_generation(),
            parent=parent,
        )
        if old is not None:
            core.replace(old, None)
        self._entered(tenant, item.length, head_bytes, is_new=old is None)
        core.keep(slot, item)
        if core.taken_bytes > self._peak_bytes:
            self._peak_bytes = core.taken_bytes
        return self._put_below(address, item.length, head_bytes, expires_at_ms is not None, parent)

    def _resize(self, item: HeapItem, length: int) -> bool:
        """Give an entry another length, if there is room without further ado."""
        core, more = self._core, length - item.length
        used = core.taken_bytes + more
        if item.tenant in self._space.quotas or (more > 0 and used > self._space.capacity_bytes):
            return False
        core.resize(item, length)
        self._peak_bytes = max(self._peak_bytes, used)
        return True

    def settling(self, address: Address) -> Ticket | None:
        return None if self._below is None else self._below.settling(address)

    def _bound_memory(self, size: int) -> None:
        self._space.budget_bytes = size
