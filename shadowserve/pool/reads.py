"""Reading: from a device into memory that the socket sends from, after a check.

Reads of a whole object become copies in the memory cache without copying bytes, and requests for an object that is
being read share that read. A client that needs its beginning first gets it read in order, in parts of its memory. A
small part of a large object (a record's header) is read alone: the object's header and the units around the part.

The check compares the object's identity, the number of the put, and the checksum of each unit. The device's own thread
checks. The pool's thread checks without the lock what no device has checked: reads of two operations, and devices that
never check. After a failed check the object is dropped, its extent goes into quarantine, the reason is counted, and the
client gets None: a miss.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from shadowserve.block import Operation, Priority
from shadowserve.errors import is_passing
from shadowserve.native import OBJECT_HEADER_BYTES, Result, check_object, object_unit
from shadowserve.pool.arena import Buffer
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk
from shadowserve.pool.entries import Entry
from shadowserve.pool.space import Space
from shadowserve.pool.types import ENTRIES_PER_HOLD, Lease
from shadowserve.pool.volume.format import BLOCK_BYTES

_WHOLE_BYTES: Final = 256 << 10
"""Objects up to this size are read whole: on any SSD the time is the same."""
_WHOLE_SHARE: Final = 8
"""A request for an eighth of an object or more reads it whole, unless the caller reads it in parts: requests for the
rest usually follow."""
_PART_BYTES: Final = 1 << 20
_PARTS_MAX: Final = 8
"""Least bytes, and most number, of the parts of an object that is read in order: a device reads larger ones no
faster."""
_PARTS_AT_ONCE: Final = 2
"""Parts that are read at a time of an object that is read alone. Of several, each has one, so that all first ones come
first."""
_GROUP: Final = 8
"""Waiting reads that begin together, since beginning several in a row costs least..."""
_BUSY_READS: Final = 16
"""...unless their device has fewer reads than this in progress."""
_SOUND: Final = Result.OK

Done = Callable[[Lease | None], None]
Completion = tuple[Done, Lease | None]


_Waiter = tuple[int, int, Done]
"""First byte, end, and callback."""


@dataclass(slots=True, eq=False)
class _Read:
    entry: Entry
    disk: Disk
    whole: bool
    first_unit: int
    units: int
    parts: list[tuple[int, int]]  # offsets and lengths to read; several parts of a whole object are read in order
    size: int  # bytes of all parts
    waiters: list[_Waiter] = field(default_factory=list)
    buffer: Buffer | None = None
    left: int = 0  # parts whose operation has not ended; in order, of those that have begun
    begun_parts: int = 0  # in order
    ended: set[int] = field(default_factory=set)  # parts, in order
    sound: int = 0  # leading units that were checked, in order
    depth: int = 0  # reads of the device in progress when this one began
    begun: bool = False
    verdict: Result | None = None
    failure: str | None = None
    error: OSError | None = None

    @property
    def in_order(self) -> bool:
        return self.whole and len(self.parts) > 1

    @property
    def units_there(self) -> int:
        """Leading units whose parts have ended."""
        for number, (offset, _) in enumerate(self.parts):
            if number not in self.ended:
                return max(0, offset - OBJECT_HEADER_BYTES) // object_unit(self.entry.length)
        return self.units

    def has(self, end: int) -> bool:
        return self.in_order and -(-end // object_unit(self.entry.length)) <= self.sound


class Reader:
    """Reads for clients. With the pool's lock held, except :meth:`verify`."""

    def __init__(self, core: Core, space: Space) -> None:
        self._core = core
        self._space = space
        self._whole: dict[int, _Read] = {}  # the newest read of each slot
        self._waiting: deque[_Read] = deque()
        self._ended: deque[tuple[_Read, int, Operation]] = deque()
        self._spare_bytes = 0  # freed since the last failed search for memory
        self.unverified: list[_Read] = []  # ended reads that have failed, or that their device has not checked
        self.under_way = 0  # reads that are not completed
        self.wants_poll = False  # more of the waiting reads can begin than one hold of the lock allows

    @property
    def waiting(self) -> int:
        """Reads that wait for memory, or for their device to accept more."""
        return len(self._waiting)

    def read(self, entry: Entry, start: int, end: int, done: Done, *, in_parts: bool, ahead: bool) -> None:
        began = self._core.ticks()
        under_way = self._whole.get(entry.slot)
        if under_way is not None and under_way.entry.generation == entry.generation:
            self._core.counters.shared_reads += 1
            if under_way.has(end) and under_way.failure is None:
                assert under_way.buffer is not None
                done(self._lease(under_way, under_way.buffer, start, end))
                return
            under_way.waiters.append((start, end, done))
            return
        read = self._plan(entry, start, end, in_parts=in_parts, ahead=ahead)
        read.waiters.append((start, end, done))
        read.disk.use(entry.extent)
        self.under_way += 1
        if read.whole and self._core.is_current(entry):
            self._whole[entry.slot] = read
        if self._waiting or not self._begin(read):
            self._waiting.append(read)
        self._core.counters.grouping_ns += self._core.ticks() - began

    def pump(self) -> None:
        """Begin waiting reads in their order, as far as there is memory."""
        self.wants_poll = False
        if self._waiting:
            self._spare_bytes = self._core.arenas.size
            self._use_spare()

    def _use_spare(self) -> None:
        """Begin waiting reads while the freed memory may be enough: a failed search for memory takes long."""
        began, left = self._core.ticks(), ENTRIES_PER_HOLD
        while left and self._waiting and self._waiting[0].size <= self._spare_bytes and self._begin(self._waiting[0]):
            self._waiting.popleft()
            left -= 1
        if not left:
            self.wants_poll = True
            self._core.waker.wake()
        self._core.counters.grouping_ns += self._core.ticks() - began

    def _plan(self, entry: Entry, start: int, end: int, *, in_parts: bool, ahead: bool) -> _Read:
        disk = self._core.disks[entry.device]
        unit = object_unit(entry.length)
        units = -(-entry.length // unit)
        share = 1 if in_parts else _WHOLE_SHARE
        if ahead or entry.length <= _WHOLE_BYTES or (end - start) * share >= entry.length:
            step = max(_PART_BYTES, -(-entry.blocks // _PARTS_MAX) * BLOCK_BYTES) if ahead else entry.size
            parts = [(at, min(step, entry.size - at)) for at in range(0, entry.size, step)]
            return _Read(entry, disk, True, 0, units, parts, entry.size)
        self._core.counters.partial_reads += 1
        first = start // unit
        units = -(-end // unit) - first
        parts = _parts(entry.length, first, units)
        return _Read(entry, disk, False, first, units, parts, sum(length for _, length in parts))

    def _begin(self, read: _Read) -> bool:
        """Pass a read to its device; return False if there is no memory now."""
        entry = read.entry
        gone, too_large = read.disk.gone is not None, read.size > self._core.arenas.largest_bytes
        if gone or too_large:
            read.failure = "device_gone" if gone else "no_memory"
            self.unverified.append(read)
            self._core.waker.wake()
            return True
        parts = read.parts
        read.buffer = self._space.memory(read.size // BLOCK_BYTES)
        if read.buffer is None:
            self._spare_bytes = 0
            return False
        self._spare_bytes -= read.size
        read.disk.reading += 1
        read.begun = True
        read.depth = read.disk.reading
        address = read.buffer.address

        began = self._core.ticks()
        done = partial(self._on_read_end, read, 0)
        volume = read.disk.volume
        if read.in_order:
            for _ in range(_PARTS_AT_ONCE if read.depth == 1 else 1):
                self._begin_part(read)
        elif len(parts) == 1:
            read.left = 1
            expected = entry.header
            volume.read(entry.extent, 0, parts[0][1], address, Priority.FOREGROUND, done, expected, read.units)
        else:  # a device checks single operations only
            read.left = len(parts)
            for offset, length in parts:
                volume.read(entry.extent, offset, length, address, Priority.FOREGROUND, done)
                address += length
        took = self._core.ticks() - began
        self._core.counters.submission_ns += took
        self._core.counters.grouping_ns -= took  # calls into the kernel count as I/O
        return True

    def _begin_part(self, read: _Read) -> None:
        """Pass the next part of a read in order to its device, unless all have begun or one has failed."""
        if read.failure is not None or read.begun_parts == len(read.parts):
            return
        assert read.buffer is not None
        offset, length = read.parts[read.begun_parts]
        done = partial(self._on_read_end, read, read.begun_parts)
        read.begun_parts += 1
        read.left += 1
        read.disk.volume.read(
            read.entry.extent, offset, length, read.buffer.address + offset, Priority.FOREGROUND, done
        )

    def _on_read_end(self, read: _Read, number: int, operation: Operation) -> None:
        self._ended.append((read, number, operation))

    @property
    def has_ended(self) -> bool:
        return bool(self._ended or self.unverified)

    def take_ended(self, completions: list[Completion]) -> None:
        """Finish ended reads that their device has found sound; the others become unverified.

        Adds callbacks to ``completions``, to be called without the lock.
        """
        while self._ended:
            read, number, operation = self._ended.popleft()
            if operation.error is not None:
                read.failure, read.error = "io_error", operation.error
            else:
                disk = read.disk
                disk.read_bytes += operation.length
                disk.reads += 1
                disk.meter.note(operation.length, operation.begin_ns, operation.end_ns, read.depth)
                read.verdict = operation.verdict
            read.left -= 1
            if read.in_order:
                read.ended.add(number)
                self._begin_part(read)
            if not read.in_order and read.verdict is _SOUND:
                self._finish(read, completions)
            elif (read.left == 0 or read.in_order) and read not in self.unverified:
                self.unverified.append(read)

    def take_unverified(self) -> list[_Read]:
        reads, self.unverified = self.unverified, []
        return reads

    def verify(self, reads: list[_Read]) -> None:
        for read in reads:
            if read.failure is None:
                read.failure = self._verified(read)

    @staticmethod
    def _verified(read: _Read) -> str | None:
        entry, buffer = read.entry, read.buffer
        assert buffer is not None
        if read.in_order:
            first, end = read.sound, read.units_there
            if first == end:
                return None
            data = buffer.view(OBJECT_HEADER_BYTES + first * object_unit(entry.length), buffer.size)
            failure = failure_of(entry, None, buffer.view(0, OBJECT_HEADER_BYTES), first, end - first, data)
            read.sound = first if failure else end  # last: other threads give out units that were checked
            return failure
        data = buffer.view(
            OBJECT_HEADER_BYTES if read.first_unit == 0 else BLOCK_BYTES + OBJECT_HEADER_BYTES, buffer.size
        )
        return failure_of(entry, read.verdict, buffer.view(0, OBJECT_HEADER_BYTES), read.first_unit, read.units, data)

    def finish(self, reads: list[_Read], completions: list[Completion]) -> None:
        for read in reads:
            if read.left == 0:
                self._finish(read, completions)
            elif read.failure is None:
                self._answer(read, completions)

    def _answer(self, read: _Read, completions: list[Completion]) -> None:
        """Answer the clients of a read in order whose bytes are there."""
        assert read.buffer is not None
        for each in [each for each in read.waiters if read.has(each[1])]:
            read.waiters.remove(each)
            completions.append((each[2], self._lease(read, read.buffer, each[0], each[1])))

    def _finish(self, read: _Read, completions: list[Completion]) -> None:
        core, entry, buffer, disk = self._core, read.entry, read.buffer, read.disk
        self.under_way -= 1
        disk.reading -= read.begun
        if read.error is not None:
            disk.note_error(read.error, core.clock_ms(), writing=False)
            read.failure = "io_error" if disk.gone is None else "device_gone"
        disk.unuse(entry.extent)
        if self._whole.get(entry.slot) is read:
            del self._whole[entry.slot]
        if read.failure is not None:
            if buffer is not None:
                core.arenas.release(buffer)
            if core.is_current(entry) and (read.error is None or not is_passing(read.error)):
                core.drop_lost(entry, read.failure)
            completions += [(done, None) for _, _, done in read.waiters]
            return
        assert buffer is not None
        for start, end, done in read.waiters:
            completions.append((done, self._lease(read, buffer, start, end)))
        if read.whole and core.is_current(entry):  # otherwise it was removed or replaced during the read
            buffer.hits += 1 if read.in_order else len(read.waiters)
            core.memory_cache.add(entry.slot, buffer)
        else:
            core.arenas.release(buffer)

    def _lease(self, read: _Read, buffer: Buffer, start: int, end: int) -> Lease:
        buffer.users += 1
        shift = 0
        if read.first_unit:  # the buffer begins with a later unit of the value
            shift = BLOCK_BYTES - read.first_unit * object_unit(read.entry.length)
        return Lease(buffer.value(shift + start, shift + end), self._release, buffer)

    def _release(self, buffer: Buffer) -> None:
        self._core.arenas.release(buffer)
        self._spare_bytes += buffer.size
        if self._waiting:
            first = self._waiting[0]
            group = _GROUP if first.disk.reading >= _BUSY_READS else 1
            if group * first.size <= self._spare_bytes:
                self._use_spare()


def failure_of(
    entry: Entry, verdict: Result | None, header: memoryview, first_unit: int, units: int, data: memoryview
) -> str | None:
    """Return why bytes in memory are not the object of ``entry``; None if they are. Without a device's ``verdict`` they
    are checked here."""
    result = check_object(header, entry.header, data, first_unit, units) if verdict is None else verdict
    if result is Result.OK:
        return None
    return "misdirected" if result is Result.NOT_FOUND else "rotten"


def _parts(length: int, first_unit: int, units: int) -> list[tuple[int, int]]:
    """Return offsets and lengths to read for some units of an object, in blocks. The object's header comes first."""
    unit = object_unit(length)
    end = min(OBJECT_HEADER_BYTES + (first_unit + units) * unit, OBJECT_HEADER_BYTES + length)
    end = -(-end // BLOCK_BYTES) * BLOCK_BYTES
    if first_unit == 0:
        return [(0, end)]
    begin = first_unit * unit  # units begin half a block later, like the value
    return [(0, BLOCK_BYTES), (begin, end - begin)]
