"""Objects of a volume whose bytes are on their way to the device, and the calls that wait for them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shadowserve.pool.volume.format import NAME_PIECE_BYTES, RECORDS_PER_BLOCK
from shadowserve.pool.volume.tickets import Ticket

Call = Callable[[], None]
Key = tuple[int, bytes]


@dataclass(slots=True, eq=False)
class Write:
    """An object that is being written.

    Attributes:
        followers: Records about the object that must be logged behind its own record.
    """

    key: Key
    record: bytes
    name: bytes | None
    size: int
    ticket: Ticket
    number: int
    followers: list[bytes] = field(default_factory=list)
    superseded: bool = False  # a later write or a removal of the same key has overtaken this one

    @property
    def log_blocks(self) -> int:
        """Blocks of the log that are reserved for it."""
        return log_blocks_of(self.name) + len(self.followers)


class WritesInFlight:
    """Objects whose bytes are on their way to the device: their records are not in the log yet."""

    def __init__(self) -> None:
        self.written_bytes = 0  # bytes of objects that were written
        self.log_blocks = 0  # blocks of the log that are reserved for their records
        self.followers = 0  # number of records that wait for the record of their object
        self._by_key: dict[Key, list[Write]] = {}
        self._numbers: dict[int, None] = {}  # in ascending order
        self._last_number = 0
        self._waiting: deque[tuple[int, Call]] = deque()  # calls, each with the last write that it waits for

    def __len__(self) -> int:
        return len(self._by_key)

    def begin(self, key: Key, record: bytes, name: bytes | None, size: int) -> Write:
        self._last_number += 1
        write = Write(key, record, name, size, Ticket(), self._last_number)
        self._by_key.setdefault(key, []).append(write)
        self._numbers[write.number] = None
        self.log_blocks += write.log_blocks
        return write

    def end(self, write: Write) -> list[Write]:
        """Forget a write; return the older ones of the same key. call_waiting() follows when its record is logged."""
        writes = self._by_key[write.key]
        older = writes[: writes.index(write)]
        writes.remove(write)
        if not writes:
            del self._by_key[write.key]
        self.log_blocks -= write.log_blocks
        self.followers -= len(write.followers)
        return older

    def call_waiting(self, write: Write) -> None:
        """Make the calls that have waited for this write and for no other one."""
        del self._numbers[write.number]
        oldest = next(iter(self._numbers), self._last_number + 1)
        while self._waiting and self._waiting[0][0] < oldest:
            self._waiting.popleft()[1]()

    def after_all(self, call: Call) -> None:
        """Call when each present write has its record in the log, or has failed; at once if there is none."""
        if self._numbers:
            self._waiting.append((self._last_number, call))
        else:
            call()

    def follow(self, key: Key, record: bytes) -> bool:
        """Log a record behind that of the newest write of its key; return False if no such write is in flight."""
        if key not in self._by_key:
            return False
        self._by_key[key][-1].followers.append(record)
        self.followers += 1
        self.log_blocks += 1
        return True

    def supersede(self, key: Key) -> None:
        for write in self._by_key.get(key, ()):
            write.superseded = True

    def supersede_tenant(self, tenant: int | None) -> None:
        """Supersede all writes of a tenant, or of all tenants."""
        for key in self._by_key:
            if tenant is None or key[0] == tenant:
                self.supersede(key)


def log_blocks_of(name: bytes | None) -> int:
    """Return the most blocks of the log that an object's records take in a group of their own."""
    pieces = 0 if name is None else max(-(-len(name) // NAME_PIECE_BYTES), 1)
    return -(-(1 + pieces) // RECORDS_PER_BLOCK)
