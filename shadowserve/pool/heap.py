"""The memory of a pool without devices: each value lies in memory of its own, or is the object that brought it.

The index counts, orders and evicts what is here as it does what lies on devices. But who looks a value up finds it by
its key's text, without a digest of it and without a description made of the index's entry; and the index hears of uses
many at a time.
"""

from array import array
from typing import Final

from shadowserve.native import Index
from shadowserve.pool.terms import Address, Item
from shadowserve.pool.volume.changes import OutOfBudgetError

__all__ = ["ENTRY_OVERHEAD_BYTES", "Heap", "HeapItem"]

ENTRY_OVERHEAD_BYTES: Final = 640
"""What an entry costs beside its key and value: its places in the index and in two dictionaries, the item, object
headers, the key's text in the index, the allocator's rounding and a possible expiry. Measured with CPython 3.11: at
most so many, depending on how full the tables are; ``tests/pool/test_pool_of_memory.py`` holds it."""


class HeapItem(Item):
    """An entry of a pool without devices.

    Attributes:
        key: its text.
        size: bytes that it counts for.
        users: who needs the value: the entry while it is stored, and whoever holds it.
        slot: in the index.
        names: where it is found.
        is_plain: whether there is not, and was not, more to it than a value: no head, parent, expiry or pin.
    """

    __slots__ = ("is_plain", "key", "names", "size", "slot", "users")

    def __init__(
        self,
        key: bytes,
        value: bytes | memoryview,
        head_bytes: int,
        expires_at_ms: int | None,
        parent: bytes,
    ) -> None:
        """Make an item that is stored nowhere yet.

        Raises:
            OutOfBudgetError: the index cannot count so many bytes.
        """
        self.length = len(value)
        if self.length >= 1 << 32:
            raise OutOfBudgetError(f"a value of {self.length} bytes does not fit an entry, which has 4 GiB at most")
        self.head_bytes = head_bytes
        self.expires_at_ms = expires_at_ms
        self.value = value
        self.key = key
        self.size = self.length + len(key) + ENTRY_OVERHEAD_BYTES
        self.users = 1
        self.slot = 0
        self.names: dict[bytes, HeapItem] = {}
        self.is_plain = not (head_bytes or parent) and expires_at_ms is None

    @property
    def kept(self) -> "HeapItem":
        """See :attr:`Item.kept`."""
        return self


class Heap:
    """Values by tenant and key, and by their slots in the index.

    Attributes:
        tenants: their items by their keys, until a clear().
        held_bytes: of values whose entries are gone, but that are being sent.
        uses: slots of entries that were used, in order, and that the index has yet to hear of: a call into it for each
            would be dearer than all the rest of a look-up.
        now_s: Unix time when uses are counted, as of the last turn: nobody looks at the clock for a use.
    """

    def __init__(self, index: Index, now_s: int) -> None:
        """Make it empty."""
        self._index = index
        self.held_bytes = 0
        self.uses = array("I")
        self.now_s = now_s
        self.tenants: dict[int, dict[bytes, HeapItem]] = {}
        self._slots: dict[int, HeapItem] = {}

    def __len__(self) -> int:
        """Return how many entries there are, those that were cleared and are not gone yet included."""
        return len(self._slots)

    def count_uses(self) -> None:
        """Have the index count the uses so far: before an entry comes, before one goes, where there are many."""
        if self.uses:
            self._index.touch_each(self.uses, self.now_s)
            del self.uses[:]

    def find(self, address: Address) -> HeapItem | None:
        """Return an item, expired or not."""
        names = self.tenants.get(address[0])
        return None if names is None else names.get(address[1])

    def at(self, slot: int) -> HeapItem:
        """Return the item of an entry of the index."""
        return self._slots[slot]

    def keep(self, tenant: int, slot: int, item: HeapItem) -> None:
        """Store the item of a new entry."""
        item.slot = slot
        item.names = self.tenants.setdefault(tenant, {})
        item.names[item.key] = self._slots[slot] = item

    def drop(self, slot: int) -> None:
        """Forget the item of an entry that goes; its value stays for those who hold it."""
        item = self._slots.pop(slot)
        del item.names[item.key]
        item.users -= 1
        if item.users:
            self.held_bytes += item.size

    def release(self, item: HeapItem) -> None:
        """Take one user away that is not the entry."""
        assert item.users > 0, "released more often than held"
        item.users -= 1
        if not item.users:
            self.held_bytes -= item.size

    def clear(self, tenant: int | None) -> None:
        """Have nobody find a tenant's items any more, or anyone's; the entries still have them."""
        if tenant is None:
            self.tenants.clear()
        else:
            self.tenants.pop(tenant, None)
