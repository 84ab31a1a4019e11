"""What a pool and those who use it meet in: values, memory that is lent, and what a hold of the lock may do."""

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from shadowserve.errors import ShadowServeError
from shadowserve.pool.volume.changes import Ticket

Address = tuple[int, bytes]
"""What an object is called: its tenant's id, and its key among those of that tenant."""

TENANTS_MAX: Final = 1 << 16

DEFAULT_TENANT: Final = 0
"""The tenant of what belongs to nobody; its name is empty."""

ENTRIES_PER_HOLD: Final = 250
"""Entries that one hold of the pool's lock touches at most, so that it is no longer than 10 ms: the longest that is
done to one is its eviction, which takes the pool up to 30 us."""

KEY_BYTES_MAX: Final = (64 << 10) - 64
"""Of a key: an object on a device has room for a name of 64 KiB, of which 64 bytes are left to the pool."""


class PinShareError(ShadowServeError):
    """A pin would take more than its tenant, or all together, may have pinned."""


class Kept(Protocol):
    """Memory that has a value.

    Attributes:
        users: who needs it.
    """

    users: int


class Item:
    """What is known of a stored value without touching a device; good until the pool's lock is released.

    A pool derives its own from it. An item with a value stays valid for longer between hold() and release().

    Attributes:
        length: bytes of the value.
        head_bytes: length of the record's head if the value is a valid record, else 0.
        expires_at_ms: Unix time in milliseconds, or None.
        value: the bytes, never changed after they were stored; None where they are not in memory: ``Store.read()``
            brings them.
    """

    __slots__ = ("expires_at_ms", "head_bytes", "length", "value")

    length: int
    head_bytes: int
    expires_at_ms: int | None
    value: bytes | memoryview | None
    is_cold: ClassVar[bool] = False
    """Whether the pool itself does not have it: it lies in the tier below."""

    @property
    def kept(self) -> Kept | None:
        """What hold() keeps in memory, the same for all that share it; None of an item without a value."""
        return None


class Lease:
    """Bytes of a value in memory, valid until ``release()``.

    Attributes:
        view: the bytes.
    """

    __slots__ = ("_arguments", "_released", "view")

    def __init__(self, view: memoryview, released: Callable[..., None] | None = None, *arguments: Any) -> None:
        """release() calls ``released`` with ``arguments``, with the pool's lock held."""
        self.view = view
        self._released = released
        self._arguments = arguments

    @property
    def kept(self) -> object:
        """What it keeps in memory."""
        return self

    def release(self) -> None:
        """Give the bytes back: once, with the pool's lock held."""
        released, self._released = self._released, None
        if released is not None:
            released(*self._arguments)


class PinnedEntries(NamedTuple):
    """What a tenant keeps from eviction, ended pins that were not noticed yet included; and how much it may."""

    keys: int
    bytes: int
    bytes_max: int


class Below(Protocol):
    """A tier below a pool. All methods but those of its life are called with the pool's lock held; none waits."""

    def start(self, pool: Any, lock: Any) -> None:
        """Begin to serve a pool, whose lock it takes for itself; without the lock."""

    def hurry(self) -> None:
        """Write all that waits to be written: the end is near."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be written."""

    def close(self) -> None:
        """End, without the lock: the pool is not touched any more as soon as the lock was free once."""

    def join(self) -> None:
        """Wait, not long, for what close() could not end; without the lock."""

    def find(self, address: Address) -> Item | None:
        """Return the item of what the pool itself does not have."""

    def read(self, item: Item, start: int, end: int, done: Callable[[Lease | None], None]) -> None:
        """Bring bytes of an item of find(), as ``Pool.read()``."""

    def expected_s(self, size: int) -> float:
        """Return how many seconds items of find() of so many bytes are expected to take, asked for together now."""

    def set_quota(self, tenant: str, bytes_max: int | None, keys_max: int | None) -> None:
        """Bound a tenant's share, by its name, for when there is no room for all tenants' records."""

    def stored(self, address: Address, *, head_bytes: int, expires: bool, parent: bytes, length: int) -> Ticket | None:
        """Take over a value of the pool; return a ticket for when the record that it replaces is gone; None if so."""

    def settling(self, address: Address) -> Ticket | None:
        """Return a ticket for when the record that ``address``'s present value replaced is gone; None if it is."""

    def holds_back(self, address: Address) -> bool:
        """Return whether a record may not be evicted yet: it is being written here, for so long as that may take."""

    def removed(self, address: Address) -> bool:
        """Have nobody find ``address`` here any more; return whether it was here."""

    def cleared(self, tenant: int | None) -> None:
        """Have nobody find anything of a tenant any more, or of all."""

    def barrier(self) -> Ticket | None:
        """Return a ticket for what removed() and cleared() have begun; None if it has ended."""

    def statistics(self) -> Any:
        """Return counters and sizes."""
