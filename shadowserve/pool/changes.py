"""Which chunk keys came and went: a bounded log for each tenant that has a reader.

A reader that knows the present keys (by scan()) and reads the log from the position before the scan knows the keys at
any later time. Each entry is a sign and a key: ``+`` stored, ``-`` removed, ``!`` everything cleared. Where the log has
dropped what a reader lacks, or is another one, the reader starts over.
"""

import secrets
from collections import deque
from typing import Final, NamedTuple

KEY_BYTES: Final = 32
ENTRY_BYTES: Final = 1 + KEY_BYTES
STORED, REMOVED, CLEARED = b"+", b"-", b"!" + bytes(KEY_BYTES)
_SEGMENT_BYTES: Final = 1_024 * ENTRY_BYTES
ENTRIES_MAX: Final = 8_192
"""Most entries of one read: 270 KB."""


class Read(NamedTuple):
    """An answer: name of the log, the next position, and entries; None for the entries: start over from there."""

    name: bytes
    position: int
    entries: bytes | None


class _Log:
    """The last entries of a tenant, in segments of equal length but for the last."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8).encode()
        self.first = 0  # position of the first entry that is kept
        self.last = bytearray()  # the last segment
        self._segments: deque[bytearray] = deque([self.last])

    @property
    def size(self) -> int:
        return (len(self._segments) - 1) * _SEGMENT_BYTES + len(self.last)

    @property
    def end(self) -> int:
        return self.first + self.size // ENTRY_BYTES

    def begin_segment(self, bytes_max: int) -> None:
        """Begin a segment, and drop the oldest ones beyond ``bytes_max``."""
        self.last = bytearray()
        self._segments.append(self.last)
        while len(self._segments) > 2 and self.size + _SEGMENT_BYTES > bytes_max:
            self.first += len(self._segments.popleft()) // ENTRY_BYTES

    def read(self, position: int) -> bytes:
        number, begin = divmod((position - self.first) * ENTRY_BYTES, _SEGMENT_BYTES)
        found = bytearray()
        while number < len(self._segments) and len(found) < ENTRIES_MAX * ENTRY_BYTES:
            found += memoryview(self._segments[number])[begin:]
            number, begin = number + 1, 0
        return bytes(found[: ENTRIES_MAX * ENTRY_BYTES])


class Changes:
    """The logs of all tenants; with the pool's lock held. A tenant has a log from its first read() on.

    Attributes:
        missed: Reads of which the log had dropped entries.
    """

    def __init__(self, bytes_max: int) -> None:
        """``bytes_max``: most bytes of all logs, each with an equal share; 0 for no logs."""
        self.bytes_max = bytes_max
        self.missed = 0
        self._logs: dict[int, _Log] = {}

    @property
    def entries(self) -> int:
        """Entries that were logged so far."""
        return sum(log.end for log in self._logs.values())

    @property
    def size(self) -> int:
        return sum(log.size for log in self._logs.values())

    def note(self, tenant: int, sign: bytes, key: bytes) -> None:
        """Log that a chunk key of a tenant came or went. Hot path: for each put and eviction."""
        log = self._logs.get(tenant)
        if log is not None:
            last = log.last
            last += sign
            last += key
            if len(last) == _SEGMENT_BYTES:
                log.begin_segment(self.bytes_max // len(self._logs))

    def cleared(self, tenant: int | None) -> None:
        """Log that all keys of a tenant, or of all tenants, are gone."""
        for each in self._logs if tenant is None else (tenant,):
            self.note(each, CLEARED[:1], CLEARED[1:])

    def read(self, tenant: int, name: bytes, position: int, losses: int) -> Read:
        """Return the entries of a tenant's log, of that name, from a position on.

        ``losses``: losses of many keys that are not logged one by one, so far; after each the log has another name.
        """
        log = self._logs.get(tenant)
        if log is None:
            log = self._logs[tenant] = _Log()
        current = b"%b.%d" % (log.name, losses)
        if name != current or not log.first <= position <= log.end:
            self.missed += name == current
            return Read(current, log.end, None)
        entries = log.read(position)
        return Read(current, position + len(entries) // ENTRY_BYTES, entries)
