"""Types that a pool and its users share: values, lent memory, limits, and the interface of the lower tier."""

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from shadowserve.errors import ShadowServeError
from shadowserve.pool.volume.tickets import Ticket

Address = tuple[int, bytes]
"""Id of a tenant, and a key of that tenant."""

TENANTS_MAX: Final = 1 << 16

DEFAULT_TENANT: Final = 0
"""The tenant without a name, of clients without authentication."""

ENTRIES_PER_HOLD: Final = 250
"""Most entries that one hold of the pool's lock processes, so that it takes at most 10 ms: the longest operation on one
entry is its eviction, with up to 30 us."""

ENTRY_OVERHEAD_BYTES: Final = 640
"""Bytes of an entry besides key and value, the largest measured with CPython 3.11: its places in the index and in two
dictionaries, the item, object headers, the key's text, the allocator's rounding. A test checks it."""

KEY_BYTES_MAX: Final = (64 << 10) - 64
"""Most bytes of a key: an object on a device has room for a name of 64 KiB, and the pool uses 64 bytes of that."""


class PinShareError(ShadowServeError):
    """A pin would exceed the share of its tenant, or of all tenants."""


class Kept(Protocol):
    """Memory that holds a value; ``users`` is the number of its users."""

    users: int


class Item:
    """Facts about a value that need no device access; valid until the pool's lock is released.

    Each pool derives its own class. An item with a value stays valid longer between hold() and release().

    Attributes:
        value: The bytes, which never change; None if they are not in memory: ``Pool.read()`` reads them.
    """

    __slots__ = ("expires_at_ms", "header_bytes", "length", "value")

    length: int  # bytes of the value
    header_bytes: int  # length of the record's header if the value is a valid record, else 0
    expires_at_ms: int | None  # Unix time in milliseconds, or None
    value: bytes | memoryview | None
    is_cold: ClassVar[bool] = False
    """Only the lower tier has it."""

    @property
    def kept(self) -> Kept | None:
        """Memory that hold() keeps, the same for all that share it; None for an item without a value."""
        return None


class Lease:
    """Bytes of a value in memory, valid until ``release()``."""

    __slots__ = ("_arguments", "_released", "view")

    def __init__(self, view: memoryview, released: Callable[..., None] | None = None, *arguments: Any) -> None:
        """release() calls ``released(*arguments)`` with the pool's lock held."""
        self.view = view
        self._released = released
        self._arguments = arguments

    @property
    def kept(self) -> object:
        return self

    def release(self) -> None:
        """Release the bytes: once, with the pool's lock held."""
        released, self._released = self._released, None
        if released is not None:
            released(*self._arguments)


class PinnedEntries(NamedTuple):
    """Number and bytes of a tenant's pins, including those that have ended without notice, and the most bytes."""

    keys: int
    bytes: int
    bytes_max: int


class LowerTier(Protocol):
    """A tier below a pool, which does not know its class. :class:`shadowserve.pool.cold.tier.ColdTier` documents it."""

    @property
    def idle(self) -> bool: ...
    def start(self, pool: Any, lock: Any) -> None: ...
    def hurry(self) -> None: ...
    def close(self) -> None: ...
    def join(self) -> None: ...
    def find(self, address: Address) -> Item | None: ...
    def read(
        self, item: Item, start: int, end: int, done: Callable[[Lease | None], None], *, in_parts: bool, ahead: bool
    ) -> None: ...
    def report_damage(self, item: Item) -> None: ...
    def expected_s(self, size: int) -> float: ...
    def set_quota(self, tenant: str, bytes_max: int | None, keys_max: int | None) -> None: ...
    def stored(
        self, address: Address, *, header_bytes: int, expires: bool, parent: bytes, length: int
    ) -> Ticket | None: ...
    def settling(self, address: Address) -> Ticket | None: ...
    def holds_back(self, address: Address) -> bool: ...
    def removed(self, address: Address) -> bool: ...
    def cleared(self, tenant: int | None) -> None: ...
    def barrier(self) -> Ticket | None: ...
    def statistics(self) -> Any: ...
