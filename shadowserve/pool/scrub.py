"""The scrubber: reads and checks objects that no client reads, so that damage is found early.

It goes round each device at a bounded rate with the lowest priority. Damaged objects are dropped and counted as after a
client's read, and their extents go into quarantine. An extent is free again if a pattern that is written to it can be
read back; otherwise it stays out of use until the next start. Tests run whether devices are scrubbed or not: one extent
of each device at a time, at most one a second, in pieces.
"""

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import is_passing
from shadowserve.native import ANY, OBJECT_HEADER_BYTES, Result, object_unit
from shadowserve.pool.arena import Buffer
from shadowserve.pool.clears import SCAN_LINES
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk, Quarantined
from shadowserve.pool.entries import Entry
from shadowserve.pool.reads import failure_of
from shadowserve.pool.volume.device import Pages
from shadowserve.pool.volume.format import BLOCK_BYTES

_BETWEEN_MS: Final = 1_000
_WAIT_LONGEST_MS: Final = 3_600_000
_PIECE_BYTES: Final = 256 << 10
_PATTERN_BYTES: Final = 251  # prime, so that the pattern differs in each block
_PATTERN: Final = bytes(range(1, _PATTERN_BYTES + 1)) * (_PIECE_BYTES // _PATTERN_BYTES + 2)


@dataclass(slots=True, eq=False)
class _Test:
    disk: Disk
    place: Quarantined
    pages: Pages
    reading: bool = False
    done_bytes: int = 0

    @property
    def expected(self) -> bytes:
        shift = (self.place.extent + self.done_bytes // _PIECE_BYTES) % _PATTERN_BYTES
        return _PATTERN[shift : shift + min(self.place.size - self.done_bytes, _PIECE_BYTES)]


class Tester:
    """Tests the extents in quarantine. With the pool's lock held."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pages: dict[int, Pages] = {}
        self._next_ms = [0] * len(core.disks)

    def turn(self, now_ms: int) -> None:
        for disk in self._core.disks:
            if disk.quarantine.waiting and disk.quarantine.tested is None and disk.gone is None:
                if not 0 <= self._next_ms[disk.number] - now_ms <= _BETWEEN_MS:
                    self._look_at_one(disk, now_ms)

    def _look_at_one(self, disk: Disk, now_ms: int) -> None:
        place = disk.quarantine.waiting[0]
        if now_ms - place.since_ms < place.wait_ms or disk.is_used(place.extent):
            disk.quarantine.waiting.rotate(-1)
            return
        disk.quarantine.tested = disk.quarantine.waiting.popleft()
        self._next_ms[disk.number] = now_ms + _BETWEEN_MS
        pages = self._pages.get(disk.number)
        if pages is None:
            pages = self._pages[disk.number] = Pages(_PIECE_BYTES)
        self._continue(_Test(disk, place, pages))

    def _continue(self, test: _Test) -> None:
        expected = test.expected
        test.pages.view[: len(expected)] = bytes(len(expected)) if test.reading else expected
        test.disk.volume.submit(
            [
                Operation(
                    OperationKind.READ if test.reading else OperationKind.WRITE,
                    test.place.extent * BLOCK_BYTES + test.done_bytes,
                    len(expected),
                    test.pages.address,
                    Priority.BACKGROUND,
                    lambda ended: self._ended(test, ended),  # called by the volume's step(), with the lock
                )
            ]
        )

    def _ended(self, test: _Test, operation: Operation) -> None:
        disk, place = test.disk, test.place
        if operation.error is not None and is_passing(operation.error):
            disk.quarantine.tested = None
            place.since_ms = self._core.clock_ms()
            place.wait_ms = min(2 * place.wait_ms, _WAIT_LONGEST_MS)
            disk.quarantine.waiting.append(place)
        elif operation.error is not None or (test.reading and test.pages.view[: operation.length] != test.expected):
            disk.quarantine.tested = None
            disk.quarantine.bad.append(place)
        else:
            test.done_bytes += operation.length
            if test.done_bytes >= place.size and not test.reading:
                test.reading, test.done_bytes = True, 0
            if test.done_bytes < place.size:
                self._continue(test)
                return
            disk.quarantine.tested = None
            disk.free((place.extent, place.size))


_OBJECTS_PER_TURN: Final = 16
_PASSED_PER_TURN: Final = 256
"""Entries examined in one turn."""


class _Own:
    """The scrubber's own memory for one object, with the interface of :class:`Buffer`."""

    def __init__(self, blocks: int) -> None:
        self._pages = Pages(blocks * BLOCK_BYTES)
        self.address = self._pages.address
        self.size = blocks * BLOCK_BYTES

    def view(self, begin: int, end: int) -> memoryview:
        return self._pages.view[begin:end]


@dataclass(slots=True, eq=False)
class _Check:
    disk: Disk
    entry: Entry
    buffer: Buffer | _Own
    verdict: Result | None = None
    failure: str | None = None
    error: Exception | None = None


class Scrubber:
    """Checks devices in the background. turn() and finish() with the pool's lock held, verify() without."""

    def __init__(self, core: Core, bytes_per_s: int) -> None:
        self._core = core
        self._tester = Tester(core)
        self.bytes_per_s = bytes_per_s  # rate for each device; 0 for no scrubbing
        self._cursor = 0
        self._slots: deque[int] = deque()  # scanned, not examined yet
        self._credit = [0.0] * len(core.disks)
        self._last_ms: int | None = None
        self._under_way = 0
        self._read: deque[_Check] = deque()
        self.rounds = 0  # completed rounds through all entries
        self.found = 0  # damaged objects

    def turn(self, now_ms: int) -> None:
        self._tester.turn(now_ms)
        if not self.bytes_per_s:
            return
        elapsed_ms = 0 if self._last_ms is None else min(max(now_ms - self._last_ms, 0), 1_000)
        self._last_ms = now_ms
        for disk in self._core.disks:
            # Unused credit expires: the rate is a limit, not a target.
            credit = self._credit[disk.number] + self.bytes_per_s * elapsed_ms / 1000
            self._credit[disk.number] = min(credit, self.bytes_per_s)
        if not self._slots:
            self._look()
        for _ in range(len(self._slots)):
            if self._under_way >= _OBJECTS_PER_TURN or not self._next():
                return

    def _look(self) -> None:
        was = self._cursor
        self._cursor, slots = self._core.index.scan(ANY, was, _PASSED_PER_TURN, SCAN_LINES)
        self._slots.extend(slots)
        self.rounds += self._cursor == 0 and bool(was or slots)

    def _next(self) -> bool:
        """Examine the next entry; return whether there is time for one more."""
        core = self._core
        slot = self._slots[0]
        entry = core.entry(slot)
        disk = None if entry is None else core.disk_of(entry)
        if entry is None or disk is None or disk.gone is not None or core.memory_cache.is_kept(slot):
            self._slots.popleft()
            return True
        if self._credit[disk.number] <= 0:
            return False
        buffer = self._memory(entry.blocks)
        if buffer is None:
            return False
        if not core.may_scrub(entry.size):
            if isinstance(buffer, Buffer):
                core.arenas.release(buffer)
            return False
        self._slots.popleft()
        self._credit[disk.number] -= entry.size
        self._begin(_Check(disk, entry, buffer))
        return True

    def _memory(self, blocks: int) -> Buffer | _Own | None:
        """Return free memory, without dropping copies; if there is none, own memory for one object at a time."""
        buffer = self._core.arenas.take(blocks)
        if buffer is None and not self._under_way:
            with contextlib.suppress(MemoryError):
                return _Own(blocks)
        return buffer

    def _begin(self, check: _Check) -> None:
        def done(operation: Operation) -> None:
            check.error, check.verdict = operation.error, operation.verdict
            self._read.append(check)

        self._under_way += 1
        check.disk.use(check.entry.extent)
        entry, address = check.entry, check.buffer.address
        check.disk.volume.read(
            entry.extent, 0, entry.size, address, Priority.BACKGROUND, done, entry.header, _units(entry)
        )

    @property
    def has_read(self) -> bool:
        return bool(self._read)

    def take_read(self) -> list[_Check]:
        return [self._read.popleft() for _ in range(len(self._read))]

    def verify(self, checks: list[_Check]) -> None:
        for check in checks:
            if check.error is not None:
                check.failure = "io_error"
                continue
            entry, buffer = check.entry, check.buffer
            header, data = buffer.view(0, OBJECT_HEADER_BYTES), buffer.view(OBJECT_HEADER_BYTES, buffer.size)
            check.failure = failure_of(entry, check.verdict, header, 0, _units(entry), data)

    def finish(self, checks: list[_Check]) -> None:
        core = self._core
        for check in checks:
            self._under_way -= 1
            check.disk.unuse(check.entry.extent)
            if isinstance(check.buffer, Buffer):
                core.arenas.release(check.buffer)
            check.disk.scrubbed_bytes += check.entry.size
            if check.error is not None:
                check.disk.note_error(check.error, core.clock_ms(), writing=False)
            busy = check.error is not None and is_passing(check.error)
            if check.failure is None or busy or not core.is_current(check.entry):
                continue
            self.found += 1
            core.drop_lost(check.entry, check.failure if check.disk.gone is None else "device_gone")


def _units(entry: Entry) -> int:
    return -(-entry.length // object_unit(entry.length))
