"""The memory of a pool without devices: each value has memory of its own, or is the object that brought it.

The index counts, orders and evicts these entries as it does those on devices. But a value is found by its key's text,
and uses are reported to the index many at a time.
"""

from array import array
from collections import defaultdict
from typing import Any, Final

from shadowserve.pool.core import Core
from shadowserve.pool.entries import Entry
from shadowserve.pool.types import Item
from shadowserve.pool.volume.tickets import OutOfBudgetError

ENTRY_OVERHEAD_BYTES: Final = 640
"""Bytes of an entry besides key and value, the largest measured with CPython 3.11: its places in the index and in two
dictionaries, the item, object headers, the key's text, the allocator's rounding. A test checks it."""


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
