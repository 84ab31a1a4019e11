"""One device of the pool: its volume, and what the pool knows of it beside what lies on it."""

import errno
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation
from shadowserve.errors import is_passing
from shadowserve.native import IndexEntry
from shadowserve.pool.arena import BLOCK_BYTES
from shadowserve.pool.organizer import BandwidthMeter
from shadowserve.pool.terms import ENTRIES_PER_HOLD
from shadowserve.pool.volume.changes import BusyError, Ticket
from shadowserve.pool.volume.format import RecordFlag, RecordKind, pack_record
from shadowserve.pool.volume.volume import Volume
from shadowserve.pool.wear import Wear

_log = logging.getLogger(__name__)

_GONE_ERRORS: Final = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ESHUTDOWN, errno.EBADF})
_AVOIDED_FIRST_MS: Final = 1_000
_AVOIDED_LONGEST_MS: Final = 600_000
_QUARANTINE_MS: Final = 60_000
_SESSION_NOTE: Final = b"session"
_SESSION_BYTES: Final = 16
_WEAR_NOTE: Final = b"wear"
_WEAR_STEP_BYTES: Final = 64 << 20
"""Written between two notes of it: what a crash may forget of the day's budget."""

_EVERYTHING: Final = b""
_EVERYBODY: Final = -1

Key = tuple[int, bytes]
Place = tuple[int, int]
"""First block, and bytes of the object."""


@dataclass(slots=True)
class Quarantined:
    """An extent that did not return what was written to it, or could not be written: kept out of use.

    Attributes:
        since_ms: Unix time when it was put there, or was last to be tested.
        wait_ms: from then until it is tested.
    """

    extent: int
    size: int
    reason: str
    since_ms: int
    wait_ms: int = _QUARANTINE_MS


class Disk:
    """A device in use.

    Attributes:
        number: the index's number of it.
        name: its path.
        gone: why no more is asked of it; None while it works.
        session: of the pool, as the log has been told: a device with an older one has missed changes.
        reading: foreground reads under way.
        reads: reads for clients that it has done.
        read_bytes: that they brought.
        scrubbed_bytes: that were checked in the background.
        errors: operations that failed; not those that it was too busy for.
        quarantine: extents that are kept out of use until a test.
        tested: the one that is being tested.
        bad: those that did not pass.
    """

    def __init__(
        self,
        number: int,
        volume: Volume,
        meter: BandwidthMeter,
        wear: Wear,
        bytes_max: int | None,
        objects_max: int | None,
        *,
        wake: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        """Take a volume that was opened into use.

        Args:
            number: the index's.
            volume: that is on it.
            meter: of its bandwidth.
            wear: what is written to it.
            bytes_max: most that it holds; None for all that it has room for.
            objects_max: most objects; None likewise.
            wake: has step() called soon.
            on_gone: called once when it is given up.
        """
        self.number = number
        self.volume = volume
        self.name = volume.device.name
        self.meter = meter
        self.wear = wear
        self.set_budget(bytes_max, objects_max)
        self.gone: str | None = None
        self._wake = wake
        self._on_gone = on_gone
        self.reading = 0
        self.reads = 0
        self.read_bytes = 0
        self.scrubbed_bytes = 0
        self.errors = 0
        self.quarantine: deque[Quarantined] = deque()
        self.tested: Quarantined | None = None
        self.bad: list[Quarantined] = []
        self.avoided_until_ms = 0
        self._avoided_for_ms = _AVOIDED_FIRST_MS
        self._data_bytes = volume.statistics().capacity_bytes
        self._uses: dict[int, int] = {}
        self._freed_later: dict[int, int] = {}
        self._freeable: deque[Place] = deque()
        self._unlogged: deque[bytes] = deque()
        self._leaving: set[Key] = set()
        self._leaving_soon: set[Key] = set()
        self._noted_bytes = self.volume.written_bytes
        self.session = volume.notes.get(_SESSION_NOTE, b"")
        self._session_wanted = self.session
        self._session_durable = b""
        self._sessions = [self.session]  # of these, the log knows one of the last that is durable
        wear.unpack(volume.notes.get(_WEAR_NOTE, b""))
        self._logged_bytes = wear.day_bytes

    def set_budget(self, bytes_max: int | None, objects_max: int | None) -> None:
        """Bound what it holds; None for all that it has room for."""
        self.bytes_max = bytes_max
        self.objects_max = min(objects_max or self.volume.objects_max, self.volume.objects_max)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that objects may take."""
        return self._data_bytes if self.bytes_max is None else min(self._data_bytes, self.bytes_max)

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, or will be with the next group of the log."""
        return (self.volume.free_blocks + self.volume.freeing_blocks) * BLOCK_BYTES

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of extents that are kept out of use."""
        places = [*self.quarantine, *self.bad, *([self.tested] if self.tested is not None else [])]
        return sum(place.size for place in places)

    @property
    def is_freeing(self) -> bool:
        """Whether extents of evicted objects will be free soon."""
        return self.gone is None and (self.volume.freeing_blocks > 0 or bool(self._freed_later or self._freeable))

    def takes_objects(self, size: int, now_ms: int, *, avoided: bool = False) -> bool:
        """Return whether an object of so many bytes may be put here now, if there is room.

        With ``avoided`` also where a write has failed lately.
        """
        if self.gone is not None or (now_ms < self.avoided_until_ms and not avoided):
            return False
        if not self.wear.allows(size, now_ms):
            self.wear.refused += 1
            return False
        return True

    def step(self, now_ms: int) -> list[Callable[[], None]]:
        """Drive the volume; return what to call without the lock."""
        calls = self.volume.step()
        if self.volume.wants_step:
            self._wake()
        for _ in range(min(len(self._unlogged), ENTRIES_PER_HOLD)):
            if not self._append(self._unlogged[0]):
                break
            self._unlogged.popleft()
            self._wake()
        for _ in range(0 if self._unlogged else min(len(self._freeable), ENTRIES_PER_HOLD)):
            self.volume.free(*self._freeable.popleft())
            self._wake()
        if self.gone is None and self.volume.error is not None:
            self.give_up(str(self.volume.error))
        if self.session != self._session_wanted:
            self._note_session()
        if self._leaving and not self._leaving_soon and not self._unlogged:
            self._await_removals()
        if self._noted_bytes != self.volume.written_bytes:
            self._note_wear(now_ms)
        return calls

    # ---- What must be durable before somebody may rely on what is elsewhere

    def is_sure_of(self, tenant: int, key: bytes, *, own: bool) -> bool:
        """Return whether a power cut now could not have its log bring back an older value of a key.

        Nor could one have the next start take a device for one that missed nothing of this session. ``own``: its log
        has a new value as well, behind the older one's removal.
        """
        if self.gone is not None:
            return True
        if self._session_durable != self._session_wanted:
            return False
        if own or not (self._leaving or self._leaving_soon):
            return True
        keys = ((tenant, key), (tenant, _EVERYTHING), (_EVERYBODY, _EVERYTHING))
        return not any(each in self._leaving or each in self._leaving_soon for each in keys)

    def _await_removals(self) -> None:
        self._leaving_soon, self._leaving = self._leaving, set()
        ticket = self.volume.barrier()
        if ticket is None:
            self._leaving_soon = set()
        else:
            ticket.then(self._removals_are_durable)

    def _removals_are_durable(self, error: Exception | None) -> None:
        if error is None:  # else the device is given up
            self._leaving_soon = set()

    # ---- Sessions

    def enter_session(self, session: bytes) -> None:
        """Have the log know a new session of the pool."""
        self._session_wanted = session
        self._note_session()
        self._wake()

    def _note_session(self) -> None:
        session = self._session_wanted
        if self.session == session or self.gone is not None:
            return
        try:
            self.volume.note(_SESSION_NOTE, session)
        except BusyError:
            return
        self.session = session
        self._sessions.append(session)
        ticket = self.volume.barrier()
        if ticket is None:
            self._session_is_durable(session, None)
        else:
            ticket.then(lambda error: self._session_is_durable(session, error))

    def _session_is_durable(self, session: bytes, error: Exception | None) -> None:
        if error is None:
            self._sessions = self._sessions[self._sessions.index(session) :]
            self._session_durable = session

    @property
    def memberships(self) -> list[bytes]:
        """What says that this device takes part in a session: its id, with each session that its log may know."""
        return [self._membership(session) for session in self._sessions]

    def took_part(self, session: bytes) -> bool:
        """Return whether nothing was done in a session without this device, as far as its log goes."""
        members = session[_SESSION_BYTES:]
        own = self._membership(self.session)
        listed = any(members.startswith(own, at) for at in range(0, len(members), len(own)))
        return self.session == session or listed

    def log_recovered(self, rivals: list[Key], *, stale: bool) -> None:
        """Log what opening it has changed.

        Args:
            rivals: keys of which its log has a value, and another device a later one.
            stale: it was away, and all of it was dropped; until its log knows a session in which that was so.
        """
        if stale:
            self._sessions.clear()
            self.log_clear(None)
        for key in rivals:
            self.log_removal(*key)

    def _membership(self, session: bytes) -> bytes:
        return self.volume.superblock.volume_id + session[:_SESSION_BYTES].ljust(_SESSION_BYTES, b"\0")

    def _note_wear(self, now_ms: int) -> None:
        """Count what was written, and have the log remember it every now and then."""
        written = self.volume.written_bytes
        if written != self._noted_bytes:
            self.wear.note(written - self._noted_bytes, now_ms)
            self._noted_bytes = written
        if abs(self.wear.day_bytes - self._logged_bytes) >= _WEAR_STEP_BYTES and self.gone is None:
            self.remember_wear()

    def remember_wear(self) -> None:
        """Have the log remember what was written today."""
        try:
            self.volume.note(_WEAR_NOTE, self.wear.pack())
        except BusyError:
            return
        self._logged_bytes = self.wear.day_bytes

    # ---- The log

    def write(self, address: int, fields: IndexEntry, name: bytes | None) -> Ticket:
        """Write a sealed object and its record."""
        if self._unlogged:
            raise BusyError(f"the log of device {self.name} is full", Ticket())
        return self.volume.write(address, fields.extent, fields.pack(), name=name)

    def log_removal(self, tenant: int, key: bytes) -> None:
        """Log that an object is gone."""
        if self.gone is None:
            self._leaving.add((tenant, key))
            self._log(pack_record(RecordKind.REMOVE, tenant, key))

    def log_clear(self, tenant: int | None) -> None:
        """Log that everything of a tenant is gone, or of all."""
        if self.gone is None:
            self._leaving.add((_EVERYBODY if tenant is None else tenant, _EVERYTHING))
            flags = RecordFlag.EVERY_TENANT if tenant is None else 0
            self._log(pack_record(RecordKind.CLEAR, tenant or 0, b"", flags=flags))

    def log_expiry(self, tenant: int, key: bytes, expires_at_ms: int) -> None:
        """Log a new expiry."""
        self._log(pack_record(RecordKind.EXPIRE, tenant, key, expires_at_ms=expires_at_ms))

    def log_pin(self, tenant: int, key: bytes, until_s: int) -> None:
        """Log a pin."""
        self._log(pack_record(RecordKind.PIN, tenant, key, pinned_until_s=until_s))

    def name_tenant(self, tenant: int, name: str) -> None:
        """Log what a tenant's id stands for."""
        if self.gone is None:
            self.volume.name_tenant(tenant, name.encode(errors="surrogateescape"))
            self._wake()

    def barrier(self) -> Ticket | None:
        """Return a ticket for what is in the log; None where it is durable, or the device is gone."""
        return None if self.gone is not None else self.volume.barrier()

    @property
    def is_logging(self) -> bool:
        """Whether records wait for room in the log."""
        return self.gone is None and (bool(self._unlogged) or self.session != self._session_wanted)

    def _log(self, record: bytes) -> None:
        if self._unlogged or not self._append(record):
            self._unlogged.append(record)
        self._wake()

    def _append(self, record: bytes) -> bool:
        try:
            self.volume.log(record)
        except BusyError:
            self.volume.snapshot()
            return False
        return True

    # ---- Reads of others

    def submit_read(self, operation: Operation) -> None:
        """Begin a read of a lent extent, or of several, into memory that is not the pool's; step() calls ``done``."""
        self.reading += 1
        self.volume.submit([operation])

    def note_read(self, operation: Operation) -> None:
        """Count such a read, which has ended."""
        self.reading -= 1
        if operation.error is not None:
            if operation.error.errno not in (errno.ECANCELED, errno.EFAULT):  # EFAULT: memory of others, gone meanwhile
                self.note_error(operation.error, 0, writing=False)
            return
        self.reads += 1
        self.read_bytes += operation.moved_bytes
        self.meter.note(operation.moved_bytes, operation.begin_ns, operation.end_ns, self.reading + 1)

    # ---- Extents in use

    def is_used(self, extent: int) -> bool:
        """Return whether an operation reads or writes it."""
        return extent in self._uses

    def use(self, extent: int) -> None:
        """Keep an extent from being used again while an operation reads or writes it."""
        self._uses[extent] = self._uses.get(extent, 0) + 1

    def unuse(self, extent: int) -> None:
        """Undo one use(); the last one frees an extent that was to be freed meanwhile."""
        uses = self._uses[extent] - 1
        if uses:
            self._uses[extent] = uses
            return
        del self._uses[extent]
        size = self._freed_later.pop(extent, None)
        if size is not None:
            self.free((extent, size))

    def free(self, place: Place) -> None:
        """Give an extent back, after what removes or replaces its object was logged or written.

        It is free when that is durable, and nothing reads or writes it any more.
        """
        if self.gone is not None:
            return
        if place[0] in self._uses:
            self._freed_later[place[0]] = place[1]
        elif self._unlogged:
            self._freeable.append(place)
        else:
            self.volume.free(*place)
            self._wake()

    # ---- Failures

    def note_error(self, error: Exception, now_ms: int, *, writing: bool) -> None:
        """Count a failed operation; a device that is gone, or fails writes, gets no new objects.

        One that was too busy for longer than :class:`Patience` waits has not failed: others are preferred to it for a
        moment, which does not grow.
        """
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
        """Trust a device that writes."""
        self._avoided_for_ms = _AVOIDED_FIRST_MS

    def give_up(self, why: str) -> None:
        """Ask nothing more of the device until the next start; what is on it is missed."""
        if self.gone is None:
            self.gone = why
            self._unlogged.clear()
            _log.error("device_gone device=%s reason=%r", self.name, why)
            self._on_gone()
