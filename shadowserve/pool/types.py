"""Types that a pool and its users share: values, lent memory, limits."""

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
    """A tier below a pool. All methods except start(), close() and join() are called with the pool's lock held; none
    waits.
    """

    def start(self, pool: Any, lock: Any) -> None:
        """Begin to serve a pool; ``lock`` is the pool's. Called without the lock."""

    def hurry(self) -> None:
        """Write everything that waits to be written: the pool is about to close."""

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written."""

    def close(self) -> None:
        """End. Called without the lock; the pool is not used any more once the lock was free."""

    def join(self) -> None:
        """Wait a short time for what close() could not end; without the lock."""

    def find(self, address: Address) -> Item | None:
        """Return the item of a record that the pool does not have."""

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """Read bytes of an item of find(), as ``Pool.read()``."""

    def expected_s(self, size: int) -> float:
        """Return the expected time to read items of find() with ``size`` bytes in total now."""

    def set_quota(self, tenant: str, bytes_max: int | None, keys_max: int | None) -> None:
        """Limit a tenant's share, by its name, when there is no room for the records of all tenants."""

    def stored(
        self, address: Address, *, header_bytes: int, expires: bool, parent: bytes, length: int
    ) -> Ticket | None:
        """Receive a value of the pool; return a ticket for the removal of the record that it replaces; None if that
        is done.
        """

    def settling(self, address: Address) -> Ticket | None:
        """Return a ticket for the removal of the record that the present value has replaced; None if that is done."""

    def holds_back(self, address: Address) -> bool:
        """Return whether a record may not be evicted yet, since it is being written here, for a limited time."""

    def removed(self, address: Address) -> bool:
        """Make a record absent here; return whether it was present."""

    def cleared(self, tenant: int | None) -> None:
        """Make all records of a tenant, or of all tenants, absent."""

    def barrier(self) -> Ticket | None:
        """Return a ticket for the removals that removed() and cleared() have begun; None if they are done."""

    def statistics(self) -> Any:
        """Return counters and sizes."""
