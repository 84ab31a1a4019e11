"""Writing: from where a value was received, through its checksums, to a device.

put() only takes note. The checksums are made in the pool's thread, apart from the pool's lock; then the volume writes
the object, its record, and flushes. The entry can be read from memory all the while. ``writing`` has the states that a
put goes through; here is what moves it on, and who hears of it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from shadowserve.errors import ShadowServeError, is_passing
from shadowserve.native import seal_object
from shadowserve.pool.arena import Buffer
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk, Extent
from shadowserve.pool.entries import Entry
from shadowserve.pool.terms import ENTRIES_PER_HOLD
from shadowserve.pool.volume.changes import BusyError, Ticket
from shadowserve.pool.write_states import ENDS, Left, State, Write

_SEALED_PER_TURN: Final = 32
"""Objects whose checksums are made between two looks at the devices."""
_SEALED_MAX: Final = 256
"""Objects that wait for their device with their checksums made: each is looked at in every turn."""


@dataclass(slots=True, eq=False)
class _Unsure:
    """Tickets of a value that is where it belongs, while a power cut could still bring back an older one.

    Attributes:
        own: the device that has it; None for memory alone.
        removed: it was removed before it was written: that has to be durable as well.
    """

    tenant: int
    key: bytes
    own: Disk | None
    removed: bool
    tickets: list[Ticket]


class Writer:
    """Writes what is put. With the pool's lock held, but for :meth:`seal`.

    Attributes:
        bytes_under_way: of objects that are not durable yet.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._writes = core.writes
        self._unsealed: deque[Write] = deque()
        self._sealed: deque[Write] = deque()
        self._ended: deque[Write] = deque()
        self._unsure: deque[_Unsure] = deque()
        self._settled: deque[tuple[Ticket, Exception | None]] = deque()
        self._count = 0
        self._may_settle_more = False
        self.bytes_under_way = 0

    def __len__(self) -> int:
        return self._count + len(self._unsure)

    @property
    def has_more(self) -> bool:
        """Whether poll() has something to do, now or when a device has done its part."""
        return bool(self._count or self._unsure or self._settled)

    @property
    def waiting(self) -> bool:
        """Whether poll() has something to do that no device publishes."""
        is_full = len(self._sealed) >= _SEALED_MAX
        return bool((self._unsealed and not is_full) or self._ended or self._settled or self._may_settle_more)

    def ticket(self, slot: int) -> Ticket | None:
        """Return the ticket of an entry that is not durable yet."""
        write = self._writes.of(slot)
        return None if write is None else write.ticket

    def begin(
        self,
        entry: Entry,
        disk: Disk,
        buffer: Buffer,
        name: bytes | None,
        *,
        placed: bool,
        replaced: Extent | None = None,
        left: list[Left] | None = None,
    ) -> Ticket:
        """Take note of an object to write; the buffer gets a user more."""
        buffer.users += 1
        disk.use(entry.extent)
        write = Write(entry, disk, buffer, name, placed, replaced, left or [], Ticket(), [])
        self._writes.begin(write)
        self._unsealed.append(write)
        self._count += 1
        self.bytes_under_way += entry.size
        self._core.waker.wake()
        return write.ticket

    def is_unsubmitted(self, slot: int) -> bool:
        """Return whether an entry's record is yet to be made: it will say what the index says then."""
        write = self._writes.of(slot)
        return write is not None and write.state is not State.WRITING

    # ---- In the pool's thread

    def take_unsealed(self) -> list[Write]:
        """Return writes to seal, the first few."""
        count = min(len(self._unsealed), _SEALED_PER_TURN) if len(self._sealed) < _SEALED_MAX else 0
        return [self._unsealed.popleft() for _ in range(count)]

    def seal(self, writes: list[Write]) -> None:
        """Make header and checksums; without the pool's lock."""
        for write in writes:
            if write.state is State.TAKEN:
                seal_object(write.buffer.view(0, write.entry.size), write.entry.header)

    def submit(self, writes: list[Write]) -> None:
        """Hand sealed writes to their volumes, as far as those take them; the rest waits for the next time."""
        for write in writes:
            if write.state is State.TAKEN:
                write.go(State.SEALED)
        self._sealed.extend(writes)
        waiting: deque[Write] = deque()
        while self._sealed:
            write = self._sealed.popleft()
            entry = write.entry
            if write.state is State.SEALED and self._core.clears.covers(entry.tenant, entry.generation):
                self._core.forget(entry)  # behind the log's CLEAR its record would bring it back
            if write.state is State.TAKEN_BACK:
                self._end(write)
                continue
            if any(other.disk is write.disk for other in waiting) or not self._core.may_write(entry.size):
                waiting.append(write)
                continue
            # What has changed since the put, an expiry or a pin, belongs to the record.
            fields = self._core.index.read(write.entry.slot)
            try:
                ticket = write.disk.write(write.buffer.address, fields, write.name)
            except BusyError:
                waiting.append(write)
            except ShadowServeError as error:
                write.error = error
                self._ended.append(write)
            else:
                write.go(State.WRITING)
                if write.replaced is not None:
                    write.disk.free(write.replaced)
                self._await(write, ticket)
        self._sealed = waiting

    def _await(self, write: Write, ticket: Ticket) -> None:
        def note_end(error: Exception | None) -> None:
            write.error = error
            self._ended.append(write)
            self._core.waker.wake()

        ticket.then(note_end)

    def finish(self) -> None:
        """Deal with writes that have ended, so many at a time."""
        for _ in range(min(len(self._ended), ENTRIES_PER_HOLD)):
            write = self._ended.popleft()
            if write.error is None:
                write.disk.note_written()
            if write.state not in ENDS:
                write.go(State.DURABLE if write.error is None else State.FAILED)
            if write.state is State.FAILED and write.error is not None:
                for counters in self._core.counters.of(write.entry.tenant):
                    counters.failed_writes += 1
                write.disk.note_error(write.error, self._core.clock_ms(), writing=True)
            self._end(write)
        self._settle_sure()

    def _end(self, write: Write) -> None:
        entry, core, end = write.entry, self._core, ENDS[write.state]
        self.bytes_under_way -= entry.size
        self._count -= 1
        if end.has_entry:
            self._writes.end(entry.slot)
            core.leave(entry.tenant, entry.key, write.left)
            if write.error is None:
                core.copies.written(entry.slot, placed=write.placed)
            else:
                core.forget(entry, quarantine=None if is_passing(write.error) else "write_error")
        core.arenas.release(write.buffer)
        write.disk.unuse(entry.extent)
        if end.fails:
            for ticket in write.tickets:
                self.settle_later(ticket, write.error)
        elif write.tickets:
            self._unsure.append(_Unsure(entry.tenant, entry.key, write.disk, end.removal, write.tickets))

    def _settle_sure(self) -> None:
        """Tell of values that no power cut can take back any more.

        Such a one could bring back what a value replaced on another device, or, where it was removed before it was
        written, on its own.
        """
        waiting, self._may_settle_more = len(self._unsure), False
        for _ in range(min(waiting, ENTRIES_PER_HOLD)):
            unsure = self._unsure.popleft()
            disks = self._core.unsure(unsure.tenant, unsure.key, but=unsure.own)
            if unsure.removed and unsure.own is not None and unsure.own.gone is None and unsure.own not in disks:
                disks.append(unsure.own)
            if any(disk.log.is_pending for disk in disks):
                self._unsure.append(unsure)
                continue
            self._may_settle_more = waiting > ENTRIES_PER_HOLD
            durable = joined(disk.log.barrier() for disk in disks)
            if durable is None:
                self._settle_all(unsure, None)
            else:
                durable.then(partial(self._settle_all, unsure))

    def _settle_all(self, unsure: _Unsure, error: Exception | None) -> None:
        """Settle the tickets; where a device has failed meanwhile, the others' logs have to say so first."""
        if error is not None and (unsure.own is None or unsure.own.gone is None):
            self._unsure.append(unsure)
            self._core.waker.wake()
            return
        for ticket in unsure.tickets:
            self.settle_later(ticket, error)

    def memory_alone(self, slot: int, tenant: int, key: bytes) -> Ticket | None:
        """Return a ticket for a value that is in memory alone, and so has nothing to wait for but what was before it.

        Those whose values it replaced hear of it at the same time.
        """
        ticket = self.sure(tenant, key)
        inherited = self._writes.inherit(slot)
        if ticket is not None:
            self._unsure[-1].tickets.extend(inherited)
            return ticket
        for each in inherited:
            self.settle_later(each)
        return None

    def sure(self, tenant: int, key: bytes) -> Ticket | None:
        """Return a ticket that settles when no power cut can bring back an older value of a key; None if none can."""
        if not self._core.unsure(tenant, key):
            return None
        ticket = Ticket()
        self._unsure.append(_Unsure(tenant, key, None, False, [ticket]))
        self._core.waker.wake()
        return ticket

    def refused(self, error: Exception) -> Ticket:
        """Return a ticket that poll() settles with an error."""
        ticket = Ticket()
        self.settle_later(ticket, error)
        return ticket

    def settle_later(self, ticket: Ticket, error: Exception | None = None) -> None:
        """Have a ticket settled by poll(), without the lock. From any thread."""
        self._settled.append((ticket, error))
        self._core.waker.wake()

    def take_settled(self) -> list[tuple[Ticket, Exception | None]]:
        """Return the tickets to settle, now that the lock is given up."""
        return [self._settled.popleft() for _ in range(len(self._settled))]


def joined(tickets: Iterable[Ticket | None]) -> Ticket | None:
    """Return a ticket that settles with the last of those given, and with the first error; None if there are none."""
    waiting = [ticket for ticket in tickets if ticket is not None]
    if len(waiting) < 2:
        return waiting[0] if waiting else None
    return Ticket.of(*waiting)
