"""One tenant's entries in memory, in the order of their use, and which of them may go."""

from collections import OrderedDict
from collections.abc import Iterator

from storage_kv.engine import Item
from storage_kv.engines.key_index import KeyIndex

__all__ = ["Account", "MemoryItem", "Walk"]

_NAME_KEY_BYTES = 2 + 3 + 64  # of the qualified key of a chunk: tenant, "kv:", the name in hexadecimal digits


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


class Account:
    """What one tenant has.

    Attributes:
        evicted_for_quota: of the evicted keys those that went because of its own quota.
        items: by qualified key, the least recently used first.
        index: clients' keys in the order of their creation.
        children: how many present entries name a chunk as their parent, by the name; only for those with any.
        quota_bytes: most that it may use, None for no bound.
        quota_keys: most entries that it may have, None for no bound.
    """

    __slots__ = (
        "children",
        "evicted_bytes",
        "evicted_for_quota",
        "evicted_keys",
        "expired_keys",
        "expiring_keys",
        "has_quota",
        "held_bytes",
        "index",
        "items",
        "peak_bytes",
        "pinned_keys",
        "quota_bytes",
        "quota_keys",
        "record_bytes",
        "records",
        "used_bytes",
    )

    def __init__(self) -> None:
        """Make one that has nothing."""
        self.items: OrderedDict[bytes, MemoryItem] = OrderedDict()
        self.index = KeyIndex()
        self.children: dict[bytes, int] = {}
        self.quota_bytes: int | None = None
        self.quota_keys: int | None = None
        self.has_quota = False
        self.used_bytes = self.held_bytes = self.peak_bytes = 0
        self.records = self.record_bytes = 0
        self.evicted_keys = self.evicted_for_quota = self.evicted_bytes = self.expired_keys = 0
        self.expiring_keys = self.pinned_keys = 0

    def adopt(self, parent: bytes) -> None:
        """Count a new child of the chunk of that name."""
        self.children[parent] = self.children.get(parent, 0) + 1

    def disown(self, parent: bytes) -> None:
        """Count a child less."""
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
        else:
            del self.children[parent]


def _name_of(key: bytes) -> bytes:
    """Return the name of the chunk that a qualified key is of; empty if it is of none."""
    if len(key) != _NAME_KEY_BYTES or key[2:5] != b"kv:":
        return b""
    try:
        return bytes.fromhex(key[5:].decode("ascii"))
    except ValueError:
        return b""


class Walk:
    """Goes through an account's entries from the least recently used, naming those that may be evicted.

    Nothing is changed; what was taken counts as gone. An entry that had to stay for its children's sake is named as
    soon as the last of them has been taken: then it is the oldest again.

    Attributes:
        account: whose.
        taken: with their keys.
        taken_bytes: what they cost.
        for_quota: how many of them, the first ones, were taken because of the tenant's own quota.
    """

    def __init__(self, account: Account, now_ms: int, spared: MemoryItem | None) -> None:
        """Begin at the oldest. ``spared`` is passed over, for it is being replaced."""
        self.account = account
        self.taken_bytes = self.for_quota = 0
        self.taken: list[tuple[bytes, MemoryItem]] = []
        self._now_ms = now_ms
        self._spared = spared
        self._items: Iterator[tuple[bytes, MemoryItem]] = iter(account.items.items())
        self._gone: dict[bytes, int] = {}  # children that were taken, by the parent's name
        self._passed: dict[bytes, tuple[bytes, MemoryItem]] = {}  # parents that stayed, by their name
        self._next: tuple[bytes, MemoryItem] | None = None

    def peek(self) -> MemoryItem | None:
        """Return the entry that take() would take; None if none may go."""
        if self._next is None:
            self._next = self._find()
        return None if self._next is None else self._next[1]

    def take(self) -> int:
        """Take what peek() returned; return its cost."""
        assert self._next is not None
        key, item = self._next
        self._next = None
        self.taken.append((key, item))
        self.taken_bytes += item.cost
        if item.parent:
            gone = self._gone[item.parent] = self._gone.get(item.parent, 0) + 1
            if gone == self.account.children[item.parent]:
                self._next = self._passed.pop(item.parent, None)  # None too when it went first, from a ring
        return item.cost

    def _find(self) -> tuple[bytes, MemoryItem] | None:
        children = self.account.children
        for key, item in self._items:
            if item.holds or item is self._spared:
                continue
            if item.pinned_until_ms > self._now_ms:
                continue
            if children:
                name = _name_of(key)
                present = children.get(name, 0) if name else 0
                if present and present != self._gone.get(name, 0):
                    self._passed[name] = (key, item)
                    continue
            return key, item
        return self._find_in_a_ring()

    def _find_in_a_ring(self) -> tuple[bytes, MemoryItem] | None:
        """Return one of those entries that stay only because they name each other as parents in a ring.

        No honest client makes such, since names are digests. Left alone, they would stay for ever.
        """
        if not self._passed:
            return None
        items = self.account.items
        wanted: set[bytes] = set()  # by what is not going, or by what is wanted by it
        for item in items.values():
            if item.holds or item is self._spared or item.pinned_until_ms > self._now_ms:
                parent = item.parent
                while parent and parent not in wanted:
                    wanted.add(parent)
                    found = self._passed.get(parent)
                    parent = b"" if found is None else found[1].parent
        for name in self._passed:
            if name not in wanted:
                return self._passed.pop(name)
        return None
