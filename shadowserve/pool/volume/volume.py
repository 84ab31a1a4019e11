"""One device of a pool: objects in extents, and what makes them survive. docs/storage-format.md has every byte.

An object is written in this order: its bytes; then, when they are written, its record in a block of the log; then one
flush for all blocks and objects of the group; then the writer hears of it. Nothing is reused before what it was used
for is gone for good: an extent whose object was removed or replaced is free once the record that says so is durable.

Everything here runs with the pool's lock held and never waits. :meth:`Volume.step` drives it, tells of reads that have
ended, and returns calls to be made without the lock: settled tickets.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.clock import wall_clock_ms
from shadowserve.errors import BusyError as DeviceBusyError
from shadowserve.errors import ShadowServeError
from shadowserve.native import Extents, Index, ObjectFields
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.changes import BusyError, OutOfBudgetError, Ticket
from shadowserve.pool.volume.device import BlockDevice
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    NAME_PIECE_BYTES,
    RECORDS_PER_BLOCK,
    SUPERBLOCK_OFFSETS,
    RecordFlag,
    RecordKind,
    Superblock,
    blocks_of,
    pack_name,
    pack_record,
)
from shadowserve.pool.volume.formatting import check_superblock, format_volume, write_blocks
from shadowserve.pool.volume.log import Log
from shadowserve.pool.volume.recovery import Recovery, RecoveryReport
from shadowserve.pool.volume.repair import Repaired, repair_log
from shadowserve.pool.volume.resizing import grown
from shadowserve.pool.volume.retry_policy import RetryPolicy
from shadowserve.pool.volume.snapshot import Living, Snapshot

Call = Callable[[], None]
Key = tuple[int, bytes]

_RETRY_STEPS: Final = 64
"""After a snapshot that failed, so many groups or steps later the next is tried."""


class VolumeError(ShadowServeError):
    """A device could not make something durable.

    Attributes:
        errno: why, as far as the system said so; else None.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.errno: int | None = getattr(cause, "errno", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeStatistics:
    """Of one volume; counters are since it was opened.

    Attributes:
        objects: that it holds.
        capacity_bytes: for objects.
        free_bytes: for objects, now.
        freeing_bytes: of removed objects whose removal is not durable yet.
        log_bytes: of one copy of the log.
        log_used_bytes: of these, what no snapshot covers yet.
        log_groups: groups of records that were written and flushed.
        log_written_bytes: in both copies.
        snapshots: that were completed.
        snapshots_failed: that were not.
        snapshot_written_bytes: by both kinds.
        writes: objects that are durable.
        writes_failed: objects that the device refused.
        written_bytes: of objects.
        busy: writes that were turned away because the log was nearly full.
        failed: whether nothing can be written any more.
    """

    objects: int
    capacity_bytes: int
    free_bytes: int
    freeing_bytes: int
    log_bytes: int
    log_used_bytes: int
    log_groups: int
    log_written_bytes: int
    snapshots: int
    snapshots_failed: int
    snapshot_written_bytes: int
    writes: int
    writes_failed: int
    written_bytes: int
    busy: int
    failed: bool


@dataclass(slots=True, eq=False)
class _Write:
    """An object on its way: ``followers`` are records about it that must come behind its own."""

    key: Key
    record: bytes
    name: bytes | None
    size: int
    ticket: Ticket
    followers: list[bytes] = field(default_factory=list)
    superseded: bool = False


@dataclass(slots=True)
class _Counters:
    snapshots: int = 0
    snapshots_failed: int = 0
    snapshot_written_bytes: int = 0
    writes: int = 0
    writes_failed: int = 0
    written_bytes: int = 0
    busy: int = 0
    freeing_blocks: int = 0


class Volume:
    """An open volume.

    Attributes:
        device: that it is on.
        number: of the device in the index.
        superblock: what it is.
        report: what opening it found.
        tenants: names by id, as the volume knows them.
        notes: the pool's own, by name, as note() left them.
        generation_last: of the newest put that it knows of.
    """

    def __init__(self, device: BlockDevice, index: Index, number: int, superblock: Superblock, living: Living) -> None:
        """Use :meth:`open`."""
        self.device = device
        self.number = number
        self.superblock = superblock
        self.report = RecoveryReport()
        self.tenants: dict[int, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self.generation_last = 0
        self._living = living
        self._index = index
        self._layout = superblock.layout
        self._clock_ms: Callable[[], int] = wall_clock_ms
        self._extents = Extents(self._layout.data_first + self._layout.data_blocks)
        self._extents.reserve(0, self._layout.data_first)
        self._log: Log
        self._torn: tuple[Key, ...] = ()
        self._recovery: Recovery | None = None
        self._snapshot: Snapshot | None = None
        self._snapshot_generation = 1
        self._snapshot_wanted = False
        self._steps_to_retry = 0
        self._writing: dict[Key, list[_Write]] = {}
        self._in_flight: dict[int, None] = {}  # numbers of writes, in their order
        self._write_number = 0
        self._followers = 0  # of all writes
        self._held: dict[Key, bytes] = {}
        self._waits: deque[tuple[int, Callable[[], None]]] = deque()
        self._reserved_blocks = 0
        self._outbox: deque[Operation] = deque()
        self._retry_policy = RetryPolicy()
        self._calls: list[Call] = []
        self._room: Ticket | None = None
        self._counters = _Counters()

    # ---- Making and opening

    format = staticmethod(format_volume)

    @classmethod
    def open(
        cls,
        device: BlockDevice,
        index: Index,
        number: int,
        *,
        pool_id: bytes | None = None,
        living: Living = lambda records: records,
        clock_ms: Callable[[], int] | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> "Volume":
        """Bring a volume's objects into the index. When all volumes are there: ``index.replayed()``, then ready().

        Args:
            device: that holds it; nobody else uses it.
            index: of the pool.
            number: that the device has in the index.
            pool_id: of the pool; None for any.
            living: returns those PUT records that snapshots are to have: the index may have some that were cleared.
            clock_ms: Unix time.
            entropy: gives random bytes.

        Raises:
            FormatError: there is no volume, or one of another pool or of a newer version, or a damaged one.
            OSError, DeviceError: the device failed.
        """
        begin = time.perf_counter()
        reader = BlockReader(device)
        superblock, damaged = read_superblocks(reader, device)
        formatted = check_superblock(superblock, damaged, device, pool_id)
        superblock = grown(formatted, device)
        volume = cls(device, index, number, superblock, living)
        volume._clock_ms = clock_ms or wall_clock_ms
        recovery = volume._recovery = Recovery(reader, superblock, index, number)
        end = recovery.run()
        volume.report = recovery.report
        volume.report.superblocks_damaged = len(damaged)
        volume._log = Log(
            superblock,
            volume.submit,
            epoch=int.from_bytes(entropy(8), "little") | 1,
            previous_epoch=end.epoch,
            first=end.first,
            sequence=end.sequence,
            durable=end.durable,
        )
        volume._torn = end.torn
        volume._snapshot_generation = recovery.generation_next
        volume._repair_log(repair_log(reader, superblock, recovery.epochs))
        volume._snapshot_wanted = bool(recovery.report.notes)
        # Whatever was read may have been in a cache only: from here on it is built upon.
        stale = damaged if superblock == formatted else range(len(SUPERBLOCK_OFFSETS))
        write_blocks(reader, [(SUPERBLOCK_OFFSETS[copy], superblock.pack()) for copy in stale])
        volume.report.grown_bytes = superblock.device_bytes - formatted.device_bytes
        volume.report.seconds = time.perf_counter() - begin
        return volume

    def _repair_log(self, repaired: Repaired) -> None:
        """Note what came of repairing the log."""
        self.report.log_blocks_repaired = repaired.written
        self.report.log_blocks_unrepaired = repaired.refused
        if repaired.refused:
            self.report.notes.append(
                f"blocks of the log that are sound in one copy only: {repaired.refused}; the device does not take the "
                f"other one ({repaired.error}). They are needed until a snapshot is written, which begins now"
            )

    @property
    def recovered_tenants(self) -> list[int]:
        """Tenants whose objects may be on it, before it is ready."""
        assert self._recovery is not None
        return [0, *self._recovery.names.tenants]

    def ready(self) -> None:
        """End the recovery, after ``index.replayed()`` for all volumes of the index: from now on it takes writes."""
        begin = time.perf_counter()
        recovery, self._recovery = self._recovery, None
        assert recovery is not None, "a volume gets ready once"
        recovery.drop_nameless()
        recovery.reserve(self._extents)
        names = recovery.names
        self.tenants, self.notes = names.tenants, names.notes
        self.generation_last = recovery.generation_last
        self._repair(self._torn)
        self.report.objects = self._index.totals(device=self.number).objects
        self.report.seconds += time.perf_counter() - begin

    def _repair(self, torn: tuple[Key, ...]) -> None:
        """Log what is so of keys whose last put in the log never was, before anything else."""
        for key in torn:
            slot = self._index.find(*key)
            entry = self._index.read(slot) if slot else None
            if entry is not None and entry.device == self.number:
                self._log.append(_texts(key, self._index.name(slot)) + _anonymous(entry.pack()))
            else:
                self._log.append(pack_record(RecordKind.REMOVE, *key))

    # ---- Room

    def reserve(self, length: int) -> int | None:
        """Return the first block for an object of ``length`` bytes, header included; None: no room, free something."""
        return self._extents.allocate(-(-length // BLOCK_BYTES))

    def free(self, extent: int, length: int) -> None:
        """Give an extent back, after what removes or replaces its object was logged or written.

        It can be reserved again when that is durable: whatever happens, what the log names is not overwritten. Nothing
        may be reading or writing it any more.
        """
        blocks = -(-length // BLOCK_BYTES)
        self._counters.freeing_blocks += blocks

        def free(error: Exception | None) -> None:
            if error is None:
                self._counters.freeing_blocks -= blocks
                self._extents.free(extent, blocks)

        self._after_writes(lambda: self._log.when_durable(free))

    @property
    def data_blocks(self) -> int:
        """Blocks of 4 KiB for objects."""
        return self._layout.data_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of 4 KiB that reserve() may give, if they lie together."""
        return self._extents.free_blocks

    @property
    def freeing_blocks(self) -> int:
        """Blocks of removed objects: free as soon as their removal is durable, which takes one group of the log."""
        return self._counters.freeing_blocks

    @property
    def objects_max(self) -> int:
        """Most objects; named ones count for as many records as their name takes, and one, of two for each object."""
        return self._layout.objects_max

    @property
    def error(self) -> Exception | None:
        """Why nothing can be written any more; what is there can still be read. None while all is well."""
        return self._log.error

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that a restart would have to do without."""
        rests = self.error is not None or (self._log.idle and self._snapshot is None)
        return rests and not self._writing and not self._outbox and not self._retry_policy.waiting

    # ---- Changes

    def write(
        self,
        address: int,
        extent: int,
        record: bytes,
        *,
        name: bytes | None = None,
    ) -> Ticket:
        """Write an object and then its record; the ticket is settled when both are durable, or with the error.

        With an error the caller removes the object from the index, logs that, and frees the extent or keeps it from
        being used again. A write that a later one of the same key or a removal overtakes is settled without an error.

        Args:
            address: of the sealed object, whole blocks; it stays as it is until the ticket is settled.
            extent: from reserve().
            record: a PUT, as ``IndexEntry.pack()`` makes it; it is in the index already.
            name: the key's text, if it has the flag NAMED.

        Raises:
            BusyError: the log is nearly full; nothing has changed.
            OutOfBudgetError: there are as many objects as the volume was made for; nothing has changed.
            VolumeError: the volume failed before.
        """
        if self.error is not None:
            raise VolumeError(
                f"device {self.device.name} takes no more writes since one failed ({self.error}); "
                "replace the device, or restart to try it again"
            )
        need = _log_blocks(name)
        if self._log.blocks_free - self._reserved_blocks - need < self._layout.log_blocks // 8:
            self._counters.busy += 1
            raise BusyError(f"the log of device {self.device.name} is nearly full", self._room_ticket())
        key = _key_of(record)
        totals = self._index.totals(device=self.number)
        if totals.objects + totals.name_records > self._layout.records_max:
            raise OutOfBudgetError(
                f"device {self.device.name} has as many objects and names as it was formatted for "
                f"({self._layout.objects_max} objects); evict some, or format it with a larger objects_max"
            )
        size = blocks_of(int.from_bytes(record[12:16], "little"), record[3]) * BLOCK_BYTES
        write = _Write(key, _anonymous(record), name, size, Ticket())
        self._held.pop(key, None)
        self._reserved_blocks += need
        self._writing.setdefault(key, []).append(write)
        self._write_number += 1
        number = self._write_number
        self._in_flight[number] = None
        self.submit(
            [
                Operation(
                    OperationKind.WRITE,
                    extent * BLOCK_BYTES,
                    size,
                    address,
                    Priority.WRITE,
                    lambda operation: self._written(number, write, operation.error),
                )
            ]
        )
        return write.ticket

    def hold(self, record: bytes) -> None:
        """Have snapshots go on naming an object that the index has no more, until it is removed or replaced here.

        What replaces it is not durable yet, or is on its way to another volume.

        Args:
            record: its PUT, as ``IndexEntry.pack()`` makes it.
        """
        self._held[_key_of(record)] = _anonymous(record)

    def log(self, record: bytes) -> None:
        """Log a change of the index: REMOVE, EXPIRE, PIN or CLEAR, 128 bytes; barrier() tells when it is durable.

        Raises:
            BusyError: the log is full; nothing has changed.
        """
        if self.error is not None:
            return
        self._need_room(None)
        kind, key = record[0], _key_of(record)
        if kind in (RecordKind.EXPIRE, RecordKind.PIN) and key in self._writing:
            self._reserved_blocks += 1
            self._writing[key][-1].followers.append(_anonymous(record))
            self._followers += 1
            return
        if kind == RecordKind.REMOVE:
            self._held.pop(key, None)
            for write in self._writing.get(key, ()):
                write.superseded = True
        elif kind == RecordKind.CLEAR:
            self._cleared(None if record[1] & RecordFlag.EVERY_TENANT else key[0])
        self._log.append(_anonymous(record))

    def name_tenant(self, tenant: int, name: bytes) -> None:
        """Log what a tenant's id stands for; barrier() tells when it is durable.

        Raises:
            BusyError: the log is full; nothing has changed.
        """
        if self.tenants.get(tenant) != name and self.error is None:
            self._need_room(name)
            self.tenants[tenant] = name
            self._log.append(pack_name(RecordKind.TENANT, tenant, b"", name))

    def note(self, name: bytes, text: bytes) -> None:
        """Log something that the pool wants to know again, such as a count, under a name of 1 to 32 bytes.

        Raises:
            BusyError: the log is full; nothing has changed.
        """
        if self.notes.get(name) != text and self.error is None:
            self._need_room(text)
            self.notes[name] = text
            self._log.append(pack_name(RecordKind.TENANT, 0, name, text))

    def barrier(self) -> Ticket | None:
        """Return a ticket that is settled when all changes logged so far are durable; None if they are."""
        ticket = Ticket()
        if self._followers:
            self._after_writes(lambda: self._log.when_durable(self._settling(ticket)))
        elif self.error is None and self._log.is_durable:
            return None
        else:
            self._log.when_durable(self._settling(ticket))
        return ticket

    def read(
        self,
        extent: int,
        offset: int,
        length: int,
        address: int,
        priority: Priority,
        done: Callable[[Operation], None],
        expected: ObjectFields | None = None,
        expected_units: int = 0,
    ) -> None:
        """Read bytes of an object in whole blocks; step() calls ``done``.

        ``expected`` and ``expected_units`` are :class:`Operation`'s, for bytes from the header on.
        """
        begin = extent * BLOCK_BYTES + offset
        self._outbox.append(
            Operation(OperationKind.READ, begin, length, address, priority, done, expected, expected_units)
        )
        self._send()

    # ---- What drives it

    def step(self) -> list[Call]:
        """Take what the device has completed and go on; return what to call without the lock, in this order."""
        for operation in self._retry_policy.ended(self.device.completed()):
            operation.done(operation)
        if again := self._retry_policy.due():
            self.submit(again)
        if not self.idle or self._snapshot_wanted or self._room is not None:
            self._log.step()
            self._step_snapshot()
            self._log.step()
            self._send()
            if self._room is not None and (self.error is not None or self._has_room()):
                room, self._room = self._room, None
                self._calls.append(room.settle)
        calls, self._calls = self._calls, []
        return calls

    @property
    def wants_step(self) -> bool:
        """Whether step() has more to do that the device does not publish."""
        return self._snapshot is not None and self._snapshot.wants_step

    def snapshot(self) -> None:
        """Begin a snapshot with the next step although the log has room: the next start is then quicker."""
        self._snapshot_wanted = True

    @property
    def written_bytes(self) -> int:
        """Bytes that were written since it was opened: objects, both copies of the log, snapshots."""
        counters = self._counters
        return counters.written_bytes + self._log.written_bytes + counters.snapshot_written_bytes

    @property
    def busy(self) -> int:
        """How often the device was too busy for an operation, which was then begun again."""
        return self._retry_policy.met

    def statistics(self) -> VolumeStatistics:
        """Return counters and sizes."""
        counters, log = self._counters, self._log
        return VolumeStatistics(
            objects=self._index.totals(device=self.number).objects,
            capacity_bytes=self._layout.data_blocks * BLOCK_BYTES,
            free_bytes=self._extents.free_blocks * BLOCK_BYTES,
            freeing_bytes=counters.freeing_blocks * BLOCK_BYTES,
            log_bytes=self._layout.log_blocks * BLOCK_BYTES,
            log_used_bytes=(log.sequence - log.first) * BLOCK_BYTES,
            log_groups=log.groups,
            log_written_bytes=log.written_bytes,
            snapshots=counters.snapshots,
            snapshots_failed=counters.snapshots_failed,
            snapshot_written_bytes=counters.snapshot_written_bytes,
            writes=counters.writes,
            writes_failed=counters.writes_failed,
            written_bytes=counters.written_bytes,
            busy=counters.busy,
            failed=log.error is not None,
        )

    def close(self) -> None:
        """Give memory back; the device is the caller's. What is not durable yet is as after a crash."""
        self._extents.close()

    # ---- Inside

    def submit(self, operations: list[Operation]) -> None:
        """Hand operations to the device as soon as it takes them; step() calls what is to be done with each."""
        self._outbox.extend(operations)
        self._send()

    def _send(self) -> None:
        while self._outbox:
            try:
                self.device.submit([self._outbox[0]])
            except DeviceBusyError:
                return
            self._outbox.popleft()

    def _written(self, number: int, write: _Write, error: OSError | None) -> None:
        """Go on with an object whose bytes are on the device, or are not."""
        writes = self._writing[write.key]
        older = writes[: writes.index(write)]
        writes.remove(write)
        if not writes:
            del self._writing[write.key]
        self._reserved_blocks -= _log_blocks(write.name) + len(write.followers)
        self._followers -= len(write.followers)
        if write.superseded:
            self._log.when_durable(self._settling(write.ticket))
        elif error is not None:
            self._counters.writes_failed += 1
            self._held.pop(write.key, None)
            self._log.append(pack_record(RecordKind.REMOVE, *write.key))
            failure = VolumeError(f"writing an object to device {self.device.name} failed: {error}", error)
            self._calls.append(lambda: write.ticket.settle(failure))
        else:
            for each in older:
                each.superseded = True
            self._counters.writes += 1
            self._counters.written_bytes += write.size
            self._log.append(_texts(write.key, write.name) + write.record + b"".join(write.followers))
            self._log.when_durable(self._settling(write.ticket))
        del self._in_flight[number]
        oldest = next(iter(self._in_flight), self._write_number + 1)
        while self._waits and self._waits[0][0] < oldest:
            self._waits.popleft()[1]()

    def _settling(self, ticket: Ticket) -> Callable[[Exception | None], None]:
        def settle(error: Exception | None) -> None:
            failure = None
            if error is not None:
                failure = VolumeError(f"device {self.device.name} could not make a change durable: {error}")
            self._calls.append(lambda: ticket.settle(failure))

        return settle

    def _cleared(self, tenant: int | None) -> None:
        for key, writes in self._writing.items():
            if tenant is None or key[0] == tenant:
                for write in writes:
                    write.superseded = True
        for key in [key for key in self._held if tenant is None or key[0] == tenant]:
            del self._held[key]

    def _need_room(self, text: bytes | None) -> None:
        """Raise BusyError unless the log takes one more record, or that of a text, beside what it must take anyway."""
        if self._log.blocks_free - self._reserved_blocks <= _log_blocks(text):
            self._counters.busy += 1
            raise BusyError(f"the log of device {self.device.name} is full", self._room_ticket())

    def _room_ticket(self) -> Ticket:
        if self._room is None:
            self._room = Ticket()
        return self._room

    def _has_room(self) -> bool:
        return self._log.blocks_free - self._reserved_blocks - _log_blocks(None) >= self._layout.log_blocks // 8

    def _step_snapshot(self) -> None:
        snapshot = self._snapshot
        if snapshot is not None and snapshot.ended:
            self._counters.snapshot_written_bytes += snapshot.written_bytes
            if snapshot.header is not None:
                self._log.first = snapshot.header.log_first
                self._snapshot_generation = snapshot.header.generation + 1
                self._counters.snapshots += 1
            else:
                self._counters.snapshots_failed += 1
                self._snapshot_wanted = True
                self._steps_to_retry = _RETRY_STEPS
            self._snapshot = None
        elif snapshot is not None and snapshot.wants_step:
            snapshot.step()
        used = self._log.sequence - self._log.first
        if self._snapshot is None and (self._snapshot_wanted or 3 * used >= self._layout.log_blocks):
            if self._steps_to_retry or self.error is not None:
                self._steps_to_retry -= self._steps_to_retry > 0
                return
            self._snapshot_wanted = False
            self._snapshot = self._new_snapshot()
            self._snapshot.step()

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(
            self.superblock,
            self.submit,
            self._log,
            self._index,
            self.number,
            self._snapshot_generation,
            tenants=self.tenants,
            notes=self.notes,
            held=self._held,
            living=self._living,
            settle_writes=self._after_writes,
            clock_ms=self._clock_ms,
        )

    def _after_writes(self, call: Callable[[], None]) -> None:
        """Call when every write that is under way now has its record in the log, or has failed."""
        if self._in_flight:
            self._waits.append((self._write_number, call))
        else:
            call()


def _key_of(record: bytes) -> Key:
    return int.from_bytes(record[4:6], "little"), record[40:72]


def _anonymous(record: bytes) -> bytes:
    """Return the record without the device's number, which is the pool's of today."""
    return record if record[2] == 0 else record[:2] + b"\0" + record[3:]


def _texts(key: Key, name: bytes | None) -> bytes:
    """Return the records of a key's text, if it has one."""
    return b"" if name is None else pack_name(RecordKind.NAME, *key, name)


def _log_blocks(name: bytes | None) -> int:
    """Return how many blocks of the log an object's records may take at most, in a group of their own."""
    pieces = 0 if name is None else max(-(-len(name) // NAME_PIECE_BYTES), 1)
    return -(-(1 + pieces) // RECORDS_PER_BLOCK)
