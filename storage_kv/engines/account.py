"""One tenant's entries in memory, and which of them may go."""

from collections import OrderedDict
from dataclasses import dataclass

from shadowserve.pool.terms import Item
from storage_kv.engines.key_index import KeyIndex

__all__ = ["Account", "Counts", "MemoryItem"]

_NAME_KEY_BYTES = 3 + 64  # of the key of a chunk: "kv:", the name in hexadecimal digits


class MemoryItem(Item):
    """An entry of an engine that keeps its table in Python.

    Attributes:
        account: the tenant's.
        cost: bytes that it counts for.
        holds: hold() without release().
        parent: the name of the chunk before it, or empty.
        pinned_until_ms: end of its pin, 0 for none.
        serial: in the key index.
        stored: whether it is in the table.
        used: larger for what was used later.
    """

    __slots__ = ("account", "cost", "holds", "parent", "pinned_until_ms", "serial", "stored", "used")

    def __init__(
        self,
        account: "Account",
        length: int,
        head_bytes: int,
        expires_at_ms: int | None,
        value: bytes | memoryview | None,
        cost: int,
        parent: bytes,
        used: int,
    ) -> None:
        """Make an item that is in no table yet."""
        self.length = length
        self.head_bytes = head_bytes
        self.expires_at_ms = expires_at_ms
        self.value = value
        self.account = account
        self.cost = cost
        self.holds = 0
        self.parent = parent
        self.pinned_until_ms = 0
        self.serial = 0
        self.stored = False
        self.used = used


@dataclass(slots=True)
class Counts:
    """What a tenant has and what has become of its entries; or all tenants together, so that nobody has to add it up.

    Attributes:
        evicted_for_quota: of the evicted keys those that went because of the tenant's own quota.
        stuck_bytes: of stored entries that may not be evicted now: pinned ones, and those that are being sent.
        stuck_keys: how many these are.
    """

    keys: int = 0
    used_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    stuck_bytes: int = 0
    stuck_keys: int = 0
    records: int = 0
    record_bytes: int = 0
    expiring_keys: int = 0
    evicted_keys: int = 0
    evicted_for_quota: int = 0
    evicted_bytes: int = 0
    expired_keys: int = 0


class Account:
    """What one tenant has.

    Attributes:
        both: its own counts, and those of all.
        children: how many present entries name a chunk as their parent, by the name; only for those with any.
        counts: its own.
        index: clients' keys in the order of their creation.
        items: what may be evicted, by key, the least recently used first.
        number: of the tenant.
        parents: those that stay because they have present children; they go when nothing else may.
        pinned: those with a pin.
        quota_bytes: most that it may use, None for no bound.
        quota_keys: most entries that it may have, None for no bound.
    """

    __slots__ = (
        "both",
        "children",
        "counts",
        "has_quota",
        "index",
        "items",
        "number",
        "parents",
        "pinned",
        "quota_bytes",
        "quota_keys",
    )

    def __init__(self, number: int, everybody: Counts) -> None:
        """Make one that has nothing, and counts for everybody."""
        self.counts = Counts()
        self.both = (self.counts, everybody)
        self.number = number
        self.index = KeyIndex()
        self.quota_bytes: int | None = None
        self.quota_keys: int | None = None
        self.has_quota = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Let go of all entries; whoever had taken them has to deal with them."""
        self.items: OrderedDict[bytes, MemoryItem] = OrderedDict()
        self.parents: OrderedDict[bytes, MemoryItem] = OrderedDict()
        self.pinned: OrderedDict[bytes, MemoryItem] = OrderedDict()
        self.children: dict[bytes, int] = {}
        self.index = self.index.successor()

    # ---- Where an entry is

    def find(self, key: bytes) -> MemoryItem | None:
        """Return the entry of a key."""
        return self.items.get(key) or self.parents.get(key) or self.pinned.get(key)

    def use(self, key: bytes) -> None:
        """Put an entry behind those that were used before."""
        if key in self.items:
            self.items.move_to_end(key)
        elif key in self.parents:
            self.parents.move_to_end(key)

    def add(self, key: bytes, item: MemoryItem) -> None:
        """Add an entry as used last."""
        (self.pinned if item.pinned_until_ms else self.parents if self._has_children(key) else self.items)[key] = item

    def take(self, key: bytes) -> None:
        """Take an entry out, wherever it is."""
        if self.items.pop(key, None) is None and self.parents.pop(key, None) is None:
            del self.pinned[key]

    def _has_children(self, key: bytes) -> bool:
        return bool(self.children) and _name_of(key) in self.children

    def adopt(self, parent: bytes) -> None:
        """Count a new child of the chunk of that name."""
        known = self.children.get(parent, 0)
        self.children[parent] = known + 1
        if not known:
            key = self._key_of(parent)
            item = self.items.pop(key, None)
            if item is not None:
                self.parents[key] = item

    def disown(self, parent: bytes) -> None:
        """Count a child less; a parent without any may go again, as one of the oldest if nobody has used it since."""
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
            return
        del self.children[parent]
        key = self._key_of(parent)
        item = self.parents.pop(key, None)
        if item is not None:
            oldest = next(iter(self.items.values()), None)
            self.items[key] = item
            if oldest is not None and item.used < oldest.used:
                self.items.move_to_end(key, last=False)

    def _key_of(self, name: bytes) -> bytes:
        return b"kv:" + name.hex().encode()

    # ---- What goes

    def victim(self, looks: int, spared: MemoryItem | None) -> tuple[bytes, MemoryItem] | None:
        """Return what is to be evicted next, among the first ``looks``; None: nothing of these may go.

        What is being sent is passed over, and ``spared``; both are looked at last the next time.
        """
        for queue in (self.items, self.parents):
            for _ in range(min(len(queue), looks)):
                key, item = next(iter(queue.items()))
                if not item.holds and item is not spared:
                    return key, item
                queue.move_to_end(key)
        return None


def _name_of(key: bytes) -> bytes:
    """Return the name of the chunk that a key is of; empty if it is of none."""
    if len(key) != _NAME_KEY_BYTES or key[:3] != b"kv:":
        return b""
    try:
        return bytes.fromhex(key[3:].decode("ascii"))
    except ValueError:
        return b""
