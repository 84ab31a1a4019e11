"""A pool of memory alone: each value has memory of its own, or is the object that brought it.

The index counts, orders and evicts these entries as it does those on devices. But a value is found by its key's text,
and uses are reported to the index many at a time.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from shadowserve.native import RecordFlag
from shadowserve.pool import buffers
from shadowserve.pool.changes import REMOVED
from shadowserve.pool.core import Core
from shadowserve.pool.entries import MEMORY_ONLY, Entry, chunk_of, parse_key
from shadowserve.pool.pool import Pool
from shadowserve.pool.types import ENTRY_OVERHEAD_BYTES, Address, Item
from shadowserve.pool.volume.tickets import OutOfBudgetError, Ticket


class HeapItem(Item):
    """An entry of a pool without devices.

    Attributes:
        is_plain: It never had a record header, parent, expiry or pin.
    """

    __slots__ = ("is_plain", "key", "names", "size", "slot", "tenant", "users")

    slot: int  # slot in the index
    names: "dict[bytes, HeapItem]"  # dictionary that has the entry by its key

    def __init__(
        self,
        tenant: int,
        key: bytes,
        value: bytes | memoryview,
        header_bytes: int,
        expires_at_ms: int | None,
        parent: bytes,
    ) -> None:
        """Make an item that is not stored yet; OutOfBudgetError if the index cannot count as many bytes."""
        length = self.length = len(value)
        if length >= 1 << 32:
            raise OutOfBudgetError(f"a value of {length} bytes does not fit an entry, which has 4 GiB at most")
        self.header_bytes = header_bytes
        self.expires_at_ms = expires_at_ms
        self.value = value
        self.tenant = tenant
        self.key = key
        self.size = length + len(key) + ENTRY_OVERHEAD_BYTES  # bytes that it counts for
        self.users = 1  # users of the value: the entry while it is stored, and each holder
        self.is_plain = not (header_bytes or parent) and expires_at_ms is None

    @property
    def kept(self) -> "HeapItem":
        return self


class Heap(Core):
    """The state of a pool without devices: items by tenant and key, and by slot.

    Attributes:
        uses: Slots of used entries, in order, that the index does not know of yet: a call for each would cost more than
            the rest of a look-up.
        turn_s: Unix time at the last turn, used for uses and puts: reading the clock for each would cost too much.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.held_bytes = 0
        self.taken_bytes = 0  # bytes of all values, ``held_bytes`` included
        self.uses = array("I")
        self.turn_s = self.now_s()
        self.tenants: dict[int, dict[bytes, HeapItem]] = {}  # items of each tenant by key, until a clear()
        self._slots: dict[int, HeapItem] = {}
        self._held: defaultdict[int, int] = defaultdict(int)

    @property
    def objects(self) -> int:
        return len(self._slots)

    def turn(self) -> None:
        self.turn_s = self.now_s()

    def used_bytes(self) -> int:
        return self.taken_bytes

    def held_bytes_of(self, tenant: int) -> int:
        return self._held.get(tenant, 0)

    def freed_bytes(self, entry: Entry) -> int:
        return 0 if self._slots[entry.slot].users > 1 else entry.size

    def count_uses(self) -> None:
        if self.uses:
            self.index.touch_each(self.uses, self.turn_s)
            del self.uses[:]

    def keep(self, slot: int, item: HeapItem) -> None:
        item.slot = slot
        names = self.tenants.get(item.tenant)
        if names is None:
            names = self.tenants[item.tenant] = {}
        item.names = names
        names[item.key] = self._slots[slot] = item
        self.taken_bytes += item.size

    def resize(self, item: HeapItem, length: int) -> None:
        self.index.resize(item.slot, length)
        more = length - item.length
        item.length, item.size = length, item.size + more
        self.taken_bytes += more
        self.usage_ranking.note(item.tenant)

    def release(self, item: HeapItem) -> None:
        assert item.users > 0, "released more often than held"
        item.users -= 1
        if not item.users:
            self.held_bytes -= item.size
            self.taken_bytes -= item.size
            self._held[item.tenant] -= item.size
            if not self._held[item.tenant]:
                del self._held[item.tenant]

    def clear(self, tenant: int | None) -> None:
        super().clear(tenant)
        if tenant is None:
            self.tenants.clear()
        else:
            self.tenants.pop(tenant, None)

    def evict(self, slot: int, cause: str) -> bool:
        item = self._slots[slot]
        if item.users > 1:
            return False
        self.count_eviction(item.tenant, cause, item.length + len(item.key))
        if self.clears.under_way or not item.is_plain:
            self.forget(Entry(slot, self.index.read(slot)), remember=True)
            return True
        if self.changes is not None and (key := chunk_of(item.key)) is not None:
            self.changes.note(item.tenant, REMOVED, key)
        del self._slots[slot], item.names[item.key]
        self.taken_bytes -= item.size
        self.index.evict(slot)
        self.usage_ranking.note(item.tenant)
        return True

    def pin(self, slot: int, until_s: int) -> None:
        self._slots[slot].is_plain = False
        self.count_uses()
        super().pin(slot, until_s)

    def set_expiry(self, slot: int, expires_at_ms: int | None) -> None:
        item = self._slots[slot]
        item.expires_at_ms, item.is_plain = expires_at_ms, False
        super().set_expiry(slot, expires_at_ms)

    def _drop(self, slot: int) -> None:
        item = self._slots.pop(slot)
        del item.names[item.key]
        item.users -= 1
        if item.users:
            self.held_bytes += item.size
            self._held[item.tenant] += item.size
        else:
            self.taken_bytes -= item.size


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
        parsed = parse_key((item.tenant, item.key))
        slot = self._index.insert(
            *parsed,
            device=MEMORY_ONLY,
            extent=item.size - item.length,
            length=item.length,
            now_s=core.turn_s,
            header_length=item.header_bytes,
            flags=RecordFlag.RECORD if item.header_bytes else 0,
            expires_at_ms=item.expires_at_ms or 0,
            generation=core.next_generation(),
            parent=parent,
        )
        if old is not None:
            core.replace(old, None)
        self._entered(parsed, item.length, item.header_bytes, old)
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
