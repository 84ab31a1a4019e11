"""Tests of extents in quarantine: one is free again if a pattern that is written to it can be read back.

Otherwise it stays out of use until the next start; a device that was too busy is tested again later. Tests run whether
devices are scrubbed or not: one extent of each device at a time, at most one a second, in pieces, with the lowest
priority and memory of their own.
"""

from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import is_passing
from shadowserve.pool.arena import BLOCK_BYTES
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk, Quarantined
from shadowserve.pool.volume.device import Pages

_BETWEEN_MS: Final = 1_000
_WAIT_LONGEST_MS: Final = 3_600_000
_PIECE_BYTES: Final = 256 << 10
_PATTERN_BYTES: Final = 251  # prime, so that the pattern differs in each block
_PATTERN: Final = bytes(range(1, _PATTERN_BYTES + 1)) * (_PIECE_BYTES // _PATTERN_BYTES + 2)


@dataclass(slots=True, eq=False)
class _Test:
    """An extent that is being written, and then read."""

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
