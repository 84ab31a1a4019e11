"""Writing: from the memory that received a value, through its checksums, to a device.

put() only enqueues. The pool's thread makes the checksums without the pool's lock; then the volume writes the object
and its record, and flushes. The entry can be read from memory all the time. ``write_states`` has the states of a put.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from shadowserve.errors import ShadowServeError, is_passing
from shadowserve.native import seal_object
from shadowserve.pool.arena import Buffer
from shadowserve.pool.core import Core
from shadowserve.pool.disk import Disk, Extent
from shadowserve.pool.entries import Entry
from shadowserve.pool.types import ENTRIES_PER_HOLD
from shadowserve.pool.volume.tickets import BusyError, Ticket, joined, when_settled
from shadowserve.pool.write_states import ENDS, OldCopy, State, Write

_SEALED_PER_TURN: Final = 32
"""Objects whose checksums are made before devices are polled again."""
_SEALED_MAX: Final = 256
"""Most objects that are sealed and wait for their device. Each is examined in every turn."""


WRITABLE_SHARE: Final = 2
"""Received values and waiting writes have at most 1 / WRITABLE_SHARE of the memory; the rest is for reads."""


@dataclass(slots=True, eq=False)
class _Undurable:
    """Tickets of a value that is written, while a power cut could still bring back an older one."""

    tenant: int
    key: bytes
    own: Disk | None  # the device of the value; None for memory alone
    removed: bool  # the value was removed before it was written; the removal has to be durable too
    tickets: list[Ticket]


class Writer:
    """Writes the values of put(). With the pool's lock held, except :meth:`seal`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._writes = core.writes
        self._unsealed: deque[Write] = deque()
        self._sealed: deque[Write] = deque()
        self._ended: deque[Write] = deque()
        self._undurable: deque[_Undurable] = deque()
        self._barriers: list[Ticket] = []  # waiting for room in a log
        self._settled: deque[tuple[Ticket, Exception | None]] = deque()
        self._count = 0
        self._may_settle_more = False
        self.bytes_under_way = 0  # bytes of objects that are not durable yet

    def __len__(self) -> int:
        return self._count + len(self._undurable)

    @property
    def has_more(self) -> bool:
        """True if poll() has something to do now, or when a device completes an operation."""
        return bool(self._count or self._undurable or self._settled or self._barriers)

    @property
    def has_barriers(self) -> bool:
        return bool(self._barriers)

    @property
    def waiting(self) -> bool:
        """True if poll() has something to do that no device signals."""
        is_full = len(self._sealed) >= _SEALED_MAX
        return bool((self._unsealed and not is_full) or self._ended or self._settled or self._may_settle_more)

    def ticket(self, slot: int) -> Ticket | None:
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
        old_copies: list[OldCopy] | None = None,
    ) -> Ticket:
        """Enqueue an object. The buffer gets one more user."""
        buffer.users += 1
        disk.use(entry.extent)
        write = Write(entry, disk, buffer, name, placed, replaced, old_copies or [], Ticket(), [])
        self._writes.begin(write)
        self._unsealed.append(write)
        self._count += 1
        self.bytes_under_way += entry.size
        self._core.waker.wake()
        return write.ticket

    def is_unsubmitted(self, slot: int) -> bool:
        """Return whether the entry's record is not made yet: it will have the index's fields of that time."""
        write = self._writes.of(slot)
        return write is not None and write.state is not State.WRITING

    # ---- Barriers

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when all logged changes, and those that wait for their log, are durable."""
        if any(disk.log.is_pending for disk in self._core.disks):
            ticket = Ticket()
            self._barriers.append(ticket)
            self._core.waker.wake()
            return ticket
        return self._when_logs_are_durable()

    def _when_logs_are_durable(self) -> Ticket | None:
        return joined(disk.log.barrier() for disk in self._core.disks)

    def _continue_barriers(self) -> None:
        """Go on with barriers that have waited for room in a log."""
        if not self._barriers or any(disk.log.is_pending for disk in self._core.disks):
            return
        durable = self._when_logs_are_durable()
        for ticket in self._barriers:
            when_settled(durable, partial(self.settle_later, ticket))
        self._barriers.clear()

    # ---- In the pool's thread

    def take_unsealed(self) -> list[Write]:
        count = min(len(self._unsealed), _SEALED_PER_TURN) if len(self._sealed) < _SEALED_MAX else 0
        return [self._unsealed.popleft() for _ in range(count)]

    def seal(self, writes: list[Write]) -> None:
        for write in writes:
            if write.state is State.TAKEN:
                seal_object(write.buffer.view(0, write.entry.size), write.entry.header)

    def submit(self, writes: list[Write]) -> None:
        """Pass sealed writes to their volumes as far as these accept them; keep the rest for the next time."""
        for write in writes:
            if write.state is State.TAKEN:
                write.move_to(State.SEALED)
        self._sealed.extend(writes)
        waiting: deque[Write] = deque()
        while self._sealed:
            write = self._sealed.popleft()
            entry = write.entry
            if write.state is State.SEALED and self._core.clears.covers(entry.tenant, entry.generation):
                self._core.forget(entry)  # its record behind the log's CLEAR would bring it back
            if write.state is State.TAKEN_BACK:
                self._end(write)
                continue
            if any(other.disk is write.disk for other in waiting) or not self._core.may_write(entry.size):
                waiting.append(write)
                continue
            # The record gets changes since the put: expiry and pin.
            fields = self._core.index.read(write.entry.slot)
            try:
                ticket = write.disk.write(write.buffer.address, fields, write.name)
            except BusyError:
                waiting.append(write)
            except ShadowServeError as error:
                write.error = error
                self._ended.append(write)
            else:
                write.move_to(State.WRITING)
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
        for _ in range(min(len(self._ended), ENTRIES_PER_HOLD)):
            write = self._ended.popleft()
            if write.error is None:
                write.disk.note_written()
            if write.state not in ENDS:
                write.move_to(State.DURABLE if write.error is None else State.FAILED)
            if write.state is State.FAILED and write.error is not None:
                for counters in self._core.counters.of(write.entry.tenant):
                    counters.failed_writes += 1
                write.disk.note_error(write.error, self._core.clock_ms(), writing=True)
            self._end(write)
        self._settle_durable()
        self._continue_barriers()

    def _end(self, write: Write) -> None:
        entry, core, end = write.entry, self._core, ENDS[write.state]
        self.bytes_under_way -= entry.size
        self._count -= 1
        if end.has_entry:
            self._writes.end(entry.slot)
            core.free_old_copies(entry.tenant, entry.key, write.old_copies)
            if write.error is None:
                core.memory_cache.written(entry.slot, placed=write.placed)
            else:
                core.forget(entry, quarantine=None if is_passing(write.error) else "write_error")
        core.arenas.release(write.buffer)
        write.disk.unuse(entry.extent)
        if end.fails:
            for ticket in write.tickets:
                self.settle_later(ticket, write.error)
        elif write.tickets:
            self._undurable.append(_Undurable(entry.tenant, entry.key, write.disk, end.removal, write.tickets))

    def _settle_durable(self) -> None:
        """Settle the tickets of values that no power cut can undo any more.

        A power cut could bring back the value that was replaced on another device or, where the new value was removed
        before it was written, on its own device.
        """
        waiting, self._may_settle_more = len(self._undurable), False
        for _ in range(min(waiting, ENTRIES_PER_HOLD)):
            undurable = self._undurable.popleft()
            own = undurable.own
            disks = self._core.undurable_disks(undurable.tenant, undurable.key, but=own)
            if undurable.removed and own is not None and own.gone is None and own not in disks:
                disks.append(own)
            if any(disk.log.is_pending for disk in disks):
                self._undurable.append(undurable)
                continue
            self._may_settle_more = waiting > ENTRIES_PER_HOLD
            when_settled(joined(disk.log.barrier() for disk in disks), partial(self._settle_all, undurable))

    def _settle_all(self, undurable: _Undurable, error: Exception | None) -> None:
        """Settle the tickets. Where another device has failed, wait until the remaining logs have the new session."""
        if error is not None and (undurable.own is None or undurable.own.gone is None):
            self._undurable.append(undurable)
            self._core.waker.wake()
            return
        for ticket in undurable.tickets:
            self.settle_later(ticket, error)

    def finish_memory_only(self, slot: int, tenant: int, key: bytes) -> Ticket | None:
        """Return a ticket for a value in memory alone, which only waits for the removal of older values; None if there
        are none. The tickets of the values that it replaced settle with it."""
        ticket = self.await_old_removed(tenant, key)
        inherited = self._writes.inherit(slot)
        if ticket is not None:
            self._undurable[-1].tickets.extend(inherited)
            return ticket
        for each in inherited:
            self.settle_later(each)
        return None

    def await_old_removed(self, tenant: int, key: bytes) -> Ticket | None:
        """Return a ticket that settles when no power cut can bring back an older value of a key; None if none can."""
        if not self._core.undurable_disks(tenant, key):
            return None
        ticket = Ticket()
        self._undurable.append(_Undurable(tenant, key, None, False, [ticket]))
        self._core.waker.wake()
        return ticket

    def refused(self, error: Exception) -> Ticket:
        """Return a ticket that poll() settles with an error."""
        ticket = Ticket()
        self.settle_later(ticket, error)
        return ticket

    def settle_later(self, ticket: Ticket, error: Exception | None = None) -> None:
        """Let poll() settle a ticket without the lock. From any thread."""
        self._settled.append((ticket, error))
        self._core.waker.wake()

    def take_settled(self) -> list[tuple[Ticket, Exception | None]]:
        return [self._settled.popleft() for _ in range(len(self._settled))]


class WaitingWriters:
    """Writers that wait for memory or for free extents. With the pool's lock held."""

    def __init__(self, core: Core, writer: Writer, bytes_max: int) -> None:
        self._core = core
        self._writer = writer
        self._bytes_max = bytes_max
        self._ready: list[Callable[[], None]] = []
        self._busy: list[Ticket] = []
        self._free_blocks = 0  # when the last busy write began to wait

    def __bool__(self) -> bool:
        return bool(self._busy or self._ready)

    def may_receive(self, size: int) -> bool:
        """Return whether writers may have ``size`` more bytes of memory. A single writer always may."""
        self._core.arenas.settle()
        in_use = self._core.arenas.lent_bytes + self._writer.bytes_under_way
        return in_use == 0 or in_use + size <= min(self._bytes_max, self._core.arenas.size // WRITABLE_SHARE)

    def await_memory(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` when there may be memory."""
        self._ready.append(ready)

    def busy_error(self, why: str) -> BusyError:
        again = Ticket()
        self._busy.append(again)
        self._free_blocks = self._count_free_blocks()
        self._core.waker.wake()
        return BusyError(f"too many writes are in progress: {why}", again)

    def take_ready(self) -> list[Callable[[], None]]:
        if not self._ready or not self.may_receive(0):
            return []
        taken, self._ready = self._ready, []
        return taken

    def take_busy(self) -> list[Ticket]:
        """Return the tickets of writes to try again: bytes were written, or extents became free."""
        if not self._busy or self._writer.bytes_under_way >= self._bytes_max:
            return []
        if self._count_free_blocks() <= self._free_blocks and any(disk.is_freeing for disk in self._core.disks):
            return []
        taken, self._busy = self._busy, []
        return taken

    def _count_free_blocks(self) -> int:
        return sum(disk.volume.free_blocks for disk in self._core.disks if disk.gone is None)
