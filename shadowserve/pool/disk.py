"""One device of the pool: its volume, its extents in use, its write budget, and its failures."""

import errno
import logging
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shadowserve.block import Operation
from shadowserve.errors import is_passing
from shadowserve.native import IndexEntry
from shadowserve.pool.config import DeviceConfig
from shadowserve.pool.disk_log import DiskLog
from shadowserve.pool.interleaver import BandwidthMeter
from shadowserve.pool.types import ENTRIES_PER_HOLD
from shadowserve.pool.volume.format import BLOCK_BYTES
from shadowserve.pool.volume.tickets import BusyError, Ticket
from shadowserve.pool.volume.volume import Volume

_log = logging.getLogger(__name__)

_GONE_ERRORS: Final = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ESHUTDOWN, errno.EBADF})
_AVOIDED_FIRST_MS: Final = 1_000
_AVOIDED_LONGEST_MS: Final = 600_000
_QUARANTINE_MS: Final = 60_000
_WEAR_NOTE: Final = b"wear"
_WEAR_STEP_BYTES: Final = 64 << 20
"""Bytes written between two notes of the write budget in the log: a crash may forget as many."""
_WEAR_STATE: Final = struct.Struct("<QQQ")
_DAY_MS: Final = 24 * 3600 * 1000

Extent = tuple[int, int]
"""First block, and bytes of the object."""


@dataclass(slots=True)
class WriteBudget:
    """Bytes written to one SSD in a day (UTC), and the limit: makers state how many full writes a day an SSD lasts for.

    Beyond the budget the device takes no new objects until midnight. Objects, log and snapshots all count. The count is
    kept in the volume, so it survives a restart.
    """

    budget_bytes: int | None = None  # most bytes written in one day; None for no limit
    day: int = 0  # day of ``day_bytes``, in days since 1970
    day_bytes: int = 0
    total_bytes: int = 0
    refused: int = 0  # objects that went to another device, or to memory alone, because of the budget
    _volume_bytes: int = 0  # value of the volume's counter at the last count
    _logged_day_bytes: int = 0

    def count(self, volume_bytes: int, now_ms: int) -> bool:
        """Count up to the volume's counter of written bytes; return whether the log should note the budget again."""
        if volume_bytes == self._volume_bytes:
            return False
        self.note(volume_bytes - self._volume_bytes, now_ms)
        self._volume_bytes = volume_bytes
        return abs(self.day_bytes - self._logged_day_bytes) >= _WEAR_STEP_BYTES

    def note(self, length: int, now_ms: int) -> None:
        self._turn(now_ms)
        self.day_bytes += length
        self.total_bytes += length

    def allows(self, length: int, now_ms: int) -> bool:
        """Return whether today's budget has room for ``length`` more bytes."""
        if self.budget_bytes is None:
            return True
        self._turn(now_ms)
        return self.day_bytes + length <= self.budget_bytes

    def pack(self) -> bytes:
        return _WEAR_STATE.pack(self.day, self.day_bytes, self.total_bytes)

    def unpack(self, state: bytes, volume_bytes: int = 0) -> None:
        """Continue from a packed state, or as new from anything else. ``volume_bytes``: the volume's counter now."""
        if len(state) == _WEAR_STATE.size:
            self.day, self.day_bytes, self.total_bytes = _WEAR_STATE.unpack(state)
        self._logged_day_bytes, self._volume_bytes = self.day_bytes, volume_bytes

    def note_logged(self) -> None:
        self._logged_day_bytes = self.day_bytes

    def _turn(self, now_ms: int) -> None:
        """Begin a new day if it is one. A clock that was set back gives no second budget for a day."""
        day = now_ms // _DAY_MS
        if day > self.day:
            self.day, self.day_bytes = day, 0


@dataclass(slots=True)
class Quarantined:
    """An extent that is kept out of use: reading it gave other bytes than were written, or writing it failed."""

    extent: int
    size: int
    reason: str
    since_ms: int  # Unix time of its quarantine, or of its last test
    wait_ms: int = _QUARANTINE_MS  # time from then to its next test


@dataclass(slots=True)
class QuarantineList:
    """Extents of one device that are kept out of use."""

    waiting: deque[Quarantined] = field(default_factory=deque)  # extents that wait for a test
    tested: Quarantined | None = None  # the extent that is being tested
    bad: list[Quarantined] = field(default_factory=list)  # extents that have failed their test

    @property
    def bytes(self) -> int:
        extents = [*self.waiting, *self.bad, *([self.tested] if self.tested is not None else [])]
        return sum(each.size for each in extents)


class Disk:
    """A device in use."""

    def __init__(
        self, volume: Volume, config: DeviceConfig, *, wake: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        """Take an open volume into use.

        ``wake`` makes the pool call step() soon; ``on_gone`` is called once, when the device is given up.
        """
        self.volume = volume
        self.number = volume.number
        self.name = volume.device.name
        self.log = DiskLog(volume, wake)  # changes that the pool logs there
        self.meter = BandwidthMeter(config.bandwidth)
        self.write_budget = WriteBudget(config.write_bytes_per_day)
        self.write_budget.unpack(volume.notes.get(_WEAR_NOTE, b""), volume.written_bytes)
        self.set_budget(config.bytes_max, config.objects_max)
        self.gone: str | None = None  # reason why the device is not used any more; None while it works
        self._wake = wake
        self._on_gone = on_gone
        self.reading = 0  # number of foreground reads in progress
        self.reads = 0  # reads for clients that have ended
        self.read_bytes = 0  # bytes of these reads
        self.scrubbed_bytes = 0  # bytes that were checked in the background
        self.errors = 0  # failed operations, without those that the device was only too busy for
        self.quarantine = QuarantineList()
        self.avoided_until_ms = 0  # Unix time until which the device gets no new objects, since a write failed
        self._avoided_for_ms = _AVOIDED_FIRST_MS
        self._uses: dict[int, int] = {}  # number of operations by extent
        self._freed_later: dict[int, int] = {}  # bytes of extents to free after their last operation
        self._freeable: deque[Extent] = deque()  # extents to free when the log has the records that free them

    def set_budget(self, bytes_max: int | None, objects_max: int | None) -> None:
        """Limit what the device holds; None for the volume's own limit."""
        self.bytes_max = bytes_max
        self.objects_max = min(objects_max or self.volume.objects_max, self.volume.objects_max)

    @property
    def capacity_bytes(self) -> int:
        data_bytes = self.volume.data_blocks * BLOCK_BYTES
        return data_bytes if self.bytes_max is None else min(data_bytes, self.bytes_max)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, or will be with the next group of the log."""
        return (self.volume.free_blocks + self.volume.freeing_blocks) * BLOCK_BYTES

    @property
    def is_freeing(self) -> bool:
        """True if extents of evicted objects will become free soon."""
        return self.gone is None and (self.volume.freeing_blocks > 0 or bool(self._freed_later or self._freeable))

    def takes_objects(self, size: int, now_ms: int, *, avoided: bool = False) -> bool:
        """Return whether the device may get an object of ``size`` bytes now, if there is room.

        ``avoided``: also where a write has failed lately.
        """
        if self.gone is not None or (now_ms < self.avoided_until_ms and not avoided):
            return False
        if not self.write_budget.allows(size, now_ms):
            self.write_budget.refused += 1
            return False
        return True

    def step(self, now_ms: int) -> list[Callable[[], None]]:
        """Drive the volume; return calls to make without the pool's lock.

        Waiting records go into the log before extents that they free are given back.
        """
        calls = self.volume.step()
        if self.volume.wants_step:
            self._wake()
        self.log.write_waiting()
        for _ in range(0 if self.log.is_full else min(len(self._freeable), ENTRIES_PER_HOLD)):
            self.volume.free(*self._freeable.popleft())
            self._wake()
        if self.gone is None and self.volume.error is not None:
            self.give_up(str(self.volume.error))
        self.log.step()
        if self.write_budget.count(self.volume.written_bytes, now_ms) and self.gone is None:
            self.log_write_budget()
        return calls

    def write(self, address: int, fields: IndexEntry, name: bytes | None) -> Ticket:
        """Write a sealed object and its record.

        Raises:
            BusyError: The log is full.
        """
        if self.log.is_full:
            raise BusyError(f"the log of device {self.name} is full", Ticket())
        return self.volume.write(address, fields.extent, fields.pack(), name=name)

    def log_write_budget(self) -> None:
        """Log the count of written bytes, if the log has room."""
        try:
            self.volume.note(_WEAR_NOTE, self.write_budget.pack())
        except BusyError:
            return
        self.write_budget.note_logged()

    # ---- Reads into memory that is not the pool's

    def submit_read(self, operation: Operation) -> None:
        self.reading += 1
        self.volume.submit([operation])

    def note_read(self, operation: Operation) -> None:
        self.reading -= 1
        if operation.error is not None:
            # EFAULT: the reader has freed its memory. That is no failure of the device.
            if operation.error.errno not in (errno.ECANCELED, errno.EFAULT):
                self.note_error(operation.error, 0, writing=False)
            return
        self.reads += 1
        self.read_bytes += operation.moved_bytes
        self.meter.note(operation.moved_bytes, operation.begin_ns, operation.end_ns, self.reading + 1)

    # ---- Extents in use

    def is_used(self, extent: int) -> bool:
        return extent in self._uses

    def use(self, extent: int) -> None:
        self._uses[extent] = self._uses.get(extent, 0) + 1

    def unuse(self, extent: int) -> None:
        """Undo one use(). The last one frees an extent that was freed in the meantime."""
        uses = self._uses[extent] - 1
        if uses:
            self._uses[extent] = uses
            return
        del self._uses[extent]
        size = self._freed_later.pop(extent, None)
        if size is not None:
            self.free((extent, size))

    def free(self, extent: Extent) -> None:
        """Free an extent when that change is durable, and no operation reads or writes it any more."""
        if self.gone is not None:
            return
        if extent[0] in self._uses:
            self._freed_later[extent[0]] = extent[1]
        elif self.log.is_full:
            self._freeable.append(extent)
        else:
            self.volume.free(*extent)
            self._wake()

    # ---- Failures

    def note_error(self, error: Exception, now_ms: int, *, writing: bool) -> None:
        """Count a failed operation. After a failed write the device gets no new objects for a while; a device that was
        only too busy has not failed, and is avoided for a moment that does not grow."""
        if is_passing(error):
            if writing:
                self.avoided_until_ms = now_ms + _AVOIDED_FIRST_MS
            return
        self.errors += 1
        if isinstance(error, OSError) and error.errno in _GONE_ERRORS:
            self.give_up(str(error))
        elif writing:
            self.avoided_until_ms = now_ms + self._avoided_for_ms
            self._avoided_for_ms = min(2 * self._avoided_for_ms, _AVOIDED_LONGEST_MS)
            _log.warning("device_write_failed device=%s error=%r", self.name, str(error))

    def note_written(self) -> None:
        self._avoided_for_ms = _AVOIDED_FIRST_MS

    def give_up(self, why: str) -> None:
        """Stop using the device until the next start. Reads of its objects are misses."""
        if self.gone is None:
            self.gone = why
            self.log.close()
            _log.error("device_gone device=%s reason=%r", self.name, why)
            self._on_gone()
