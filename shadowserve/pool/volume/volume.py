"""One device of a pool: its objects in extents, its log and its snapshots (docs/reference/volume-format.md).

An object is written in this order: its bytes; then its record in a block of the log; then one flush for all blocks and
objects of the group; then its ticket settles. The extent of a removed or replaced object is free once the record that
says so is durable. Everything runs with the pool's lock held and never waits. :meth:`Volume.step` drives it, completes
reads, and returns calls to make without the lock: settled tickets.
"""

import os
import time
from collections import deque
from collections.abc import Callable

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.clock import wall_clock_ms
from shadowserve.errors import BusyError as DeviceBusyError
from shadowserve.errors import ShadowServeError
from shadowserve.native import Extents, Index, ObjectFields, RecordFlag, RecordKind
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.device import BlockDevice, RetryPolicy
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    Superblock,
    blocks_of,
    pack_name,
    pack_record,
)
from shadowserve.pool.volume.formatting import check_superblock, format_volume, grown, write_blocks
from shadowserve.pool.volume.log import Log
from shadowserve.pool.volume.recovery import Recovery, RecoveryReport
from shadowserve.pool.volume.repair import Repaired, repair_log
from shadowserve.pool.volume.snapshot import Living, SnapshotSchedule, SnapshotSource
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError, Ticket
from shadowserve.pool.volume.writes_in_flight import Key, Write, WritesInFlight, log_blocks_of

Call = Callable[[], None]


class VolumeError(ShadowServeError):
    """A device could not make a change durable; ``errno``: the system's error number, or None."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.errno: int | None = getattr(cause, "errno", None)


class Volume:
    """An open volume."""

    def __init__(self, device: BlockDevice, index: Index, number: int, superblock: Superblock) -> None:
        """Call :meth:`open` instead."""
        self.device = device  # the device that holds it
        self.number = number  # the index's number of the device
        self.superblock = superblock  # identity and layout
        self.report = RecoveryReport()  # results of the recovery
        self.tenants: dict[int, bytes] = {}  # names of tenants by id
        self.notes: dict[bytes, bytes] = {}  # values that the pool has logged with note(), by name
        self.generation_last = 0  # generation of the newest put that was recovered
        self._index = index
        self._layout = superblock.layout
        self._extents = Extents(self._layout.data_first + self._layout.data_blocks)
        self._extents.reserve(0, self._layout.data_first)
        self._log: Log
        self._recovery: Recovery | None = None  # until ready()
        self._torn: tuple[Key, ...] = ()
        self.snapshots: SnapshotSchedule
        self._writing = WritesInFlight()
        self._held: dict[Key, bytes] = {}  # records that snapshots still need, of objects that the index has no more
        self._outbox: deque[Operation] = deque()  # operations that the device has not taken yet
        self._retry_policy = RetryPolicy()
        self._calls: list[Call] = []  # to make without the pool's lock
        self._room: Ticket | None = None  # settles when the log has room again
        # Blocks of removed objects; they become free when the removal is durable, after one group of the log.
        self.freeing_blocks = 0

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
        """Bring a volume's objects into the index. After all volumes of the pool: ``index.replayed()``, then ready().

        Args:
            device: Device with the volume; no other program uses it.
            number: The index's number of the device.
            pool_id: Id of the pool; None accepts any.
            living: Returns those PUT records that snapshots keep: the index may still have cleared objects.

        Raises:
            FormatError: There is no volume, or one that is damaged, of another pool or of a newer version.
            OSError, DeviceError: The device has failed.
        """
        begin = time.perf_counter()
        reader = BlockReader(device)
        superblock, damaged = read_superblocks(reader, device)
        formatted = check_superblock(superblock, damaged, device, pool_id)
        superblock = grown(formatted, device)
        volume = cls(device, index, number, superblock)
        recovery = volume._recovery = Recovery(reader, superblock, index, number)
        end = recovery.run()
        volume.tenants, volume.notes = recovery.names.tenants, recovery.names.notes
        volume.report = recovery.report
        volume.report.superblocks_damaged = len(damaged)
        volume._torn = end.torn
        volume._log = Log(superblock, volume.submit, end, epoch=int.from_bytes(entropy(8), "little") | 1)
        volume._note_repair(repair_log(reader, superblock, recovery.epochs))
        volume.snapshots = volume._schedule_snapshots(recovery, living, clock_ms or wall_clock_ms)
        # From here on the volume relies on what was read, which may have been in a cache only: write the superblocks
        # that are not sound, or all of them where the volume has grown, and flush the device.
        stale = damaged if superblock == formatted else range(len(SUPERBLOCK_OFFSETS))
        write_blocks(reader, [(SUPERBLOCK_OFFSETS[copy], superblock.pack()) for copy in stale])
        volume.report.grown_bytes = superblock.device_bytes - formatted.device_bytes
        volume.report.seconds = time.perf_counter() - begin
        return volume

    def _schedule_snapshots(self, recovery: Recovery, living: Living, clock_ms: Callable[[], int]) -> SnapshotSchedule:
        source = SnapshotSource(
            self.superblock,
            self.submit,
            self._log,
            self._index,
            self.number,
            tenants=self.tenants,
            notes=self.notes,
            held=self._held,
            living=living,
            settle_writes=self._writing.after_all,
            clock_ms=clock_ms,
        )
        return SnapshotSchedule(source, recovery.generation_next, wanted=bool(recovery.report.notes))

    def _note_repair(self, repaired: Repaired) -> None:
        self.report.log_blocks_repaired = repaired.written
        self.report.log_blocks_unrepaired = repaired.refused
        if repaired.refused:
            self.report.notes.append(
                f"{repaired.refused} blocks of the log are sound in one copy only, and the device does not accept "
                f"writes of the other copy ({repaired.error}). A snapshot that begins now replaces them"
            )

    def ready(self) -> None:
        """End the recovery, after ``index.replayed()`` for all volumes of the index; the volume then takes writes."""
        begin = time.perf_counter()
        recovery, self._recovery = self._recovery, None
        assert recovery is not None, "ready() was called twice"
        recovery.drop_nameless()
        recovery.reserve(self._extents)
        self.generation_last = recovery.generation_last
        self._log_torn_keys()
        self.report.objects = self._index.totals(device=self.number).objects
        self.report.seconds += time.perf_counter() - begin

    def _log_torn_keys(self) -> None:
        """Log the present state of keys whose last put is torn, before any other record."""
        for key in self._torn:
            slot = self._index.find(*key)
            entry = self._index.read(slot) if slot else None
            if entry is not None and entry.device == self.number:
                self._log.append(_name_records(key, self._index.name(slot)) + _without_device(entry.pack()))
            else:
                self._log.append(pack_record(RecordKind.REMOVE, *key))

    # ---- Room

    def reserve(self, length: int) -> int | None:
        """Return the first block of an extent for ``length`` bytes, header included; None if there is no room."""
        return self._extents.allocate(-(-length // BLOCK_BYTES))

    def free(self, extent: int, length: int) -> None:
        """Free an extent once the removal or replacement of its object, which was logged, is durable. No operation may
        read or write it any more."""
        blocks = -(-length // BLOCK_BYTES)
        self.freeing_blocks += blocks

        def free(error: Exception | None) -> None:
            if error is None:
                self.freeing_blocks -= blocks
                self._extents.free(extent, blocks)

        self._writing.after_all(lambda: self._log.when_durable(free))

    @property
    def data_blocks(self) -> int:
        return self._layout.data_blocks

    @property
    def free_blocks(self) -> int:
        """Free blocks of 4 KiB, in any number of pieces."""
        return self._extents.free_blocks

    @property
    def objects_max(self) -> int:
        """Most objects. An object with a name takes more of the records, of which there are two for each object."""
        return self._layout.objects_max

    @property
    def error(self) -> Exception | None:
        """Error after which the volume accepts no writes; reads still work. None while all is well."""
        return self._log.error

    @property
    def idle(self) -> bool:
        """True if no operation is in progress whose result a restart would need."""
        rests = self.error is not None or (self._log.idle and not self.snapshots.is_writing)
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
        """Write an object and then its record; the ticket settles when both are durable, or with the error.

        After an error the caller removes the object from the index, logs that, and frees the extent or puts it into
        quarantine. A write that a later write or a removal of the same key overtakes settles without an error.

        Args:
            address: Address of the sealed object, whole blocks; unchanged until the ticket settles.
            extent: Extent of reserve().
            record: The PUT record of ``IndexEntry.pack()``; the index has it already.
            name: Text of the key, if the record has the flag NAMED.

        Raises:
            BusyError: The log is nearly full; nothing has changed.
            OutOfBudgetError: The volume has as many objects as it was made for; nothing has changed.
            VolumeError: The volume has failed before.
        """
        if self.error is not None:
            raise VolumeError(
                f"device {self.device.name} takes no more writes since one failed ({self.error}); "
                "replace the device, or restart the server to try it again"
            )
        if self._log.blocks_free - self._writing.log_blocks - log_blocks_of(name) < self._layout.log_blocks // 8:
            raise BusyError(f"the log of device {self.device.name} is nearly full", self._room_ticket())
        totals = self._index.totals(device=self.number)
        if totals.objects + totals.name_records > self._layout.records_max:
            raise OutOfBudgetError(
                f"device {self.device.name} has as many objects and names as it was formatted for "
                f"({self._layout.objects_max} objects); evict some, or format it with a larger objects_max"
            )
        key = _key_of(record)
        size = blocks_of(int.from_bytes(record[12:16], "little"), record[3]) * BLOCK_BYTES
        write = self._writing.begin(key, _without_device(record), name, size)
        self._held.pop(key, None)
        operation = Operation(
            OperationKind.WRITE,
            extent * BLOCK_BYTES,
            size,
            address,
            Priority.WRITE,
            lambda ended: self._written(write, ended.error),
        )
        self.submit([operation])
        return write.ticket

    def hold(self, record: bytes) -> None:
        """Keep an object (its PUT record) in snapshots that the index has no more, until it is removed or replaced.

        The object that replaces it is not durable yet, or is being written to another volume.
        """
        self._held[_key_of(record)] = _without_device(record)

    def log(self, record: bytes) -> None:
        """Log a REMOVE, EXPIRE, PIN or CLEAR record; barrier() tells when it is durable. BusyError: the log is full."""
        if self.error is not None:
            return
        self._need_room(None)
        kind, key = record[0], _key_of(record)
        if kind in (RecordKind.EXPIRE, RecordKind.PIN) and self._writing.follow(key, _without_device(record)):
            return
        if kind == RecordKind.REMOVE:
            self._held.pop(key, None)
            self._writing.supersede(key)
        elif kind == RecordKind.CLEAR:
            self._cleared(None if record[1] & RecordFlag.EVERY_TENANT else key[0])
        self._log.append(_without_device(record))

    def name_tenant(self, tenant: int, name: bytes) -> None:
        """Log the name of a tenant's id; barrier() tells when it is durable. BusyError: the log is full."""
        if self.tenants.get(tenant) != name and self.error is None:
            self._need_room(name)
            self.tenants[tenant] = name
            self._log.append(pack_name(RecordKind.TENANT, tenant, b"", name))

    def note(self, name: bytes, text: bytes) -> None:
        """Log a value that the pool needs after a restart, under a name of 1 to 32 bytes, as name_tenant()."""
        if self.notes.get(name) != text and self.error is None:
            self._need_room(text)
            self.notes[name] = text
            self._log.append(pack_name(RecordKind.TENANT, 0, name, text))

    def barrier(self) -> Ticket | None:
        """Return a ticket that settles when all changes logged so far are durable; None if they are."""
        ticket = Ticket()
        if self._writing.followers:
            self._writing.after_all(lambda: self._log.when_durable(self._settling(ticket)))
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
        """Read whole blocks of an object; ``expected``: as of :class:`Operation`, for bytes from the header on."""
        begin = extent * BLOCK_BYTES + offset
        self._outbox.append(
            Operation(OperationKind.READ, begin, length, address, priority, done, expected, expected_units)
        )
        self._send()

    # ---- What drives it

    def step(self) -> list[Call]:
        """Process completions of the device and continue; return calls to make without the lock, in this order."""
        for operation in self._retry_policy.ended(self.device.completed()):
            operation.done(operation)
        if again := self._retry_policy.due():
            self.submit(again)
        if not self.idle or self.snapshots.wanted or self._room is not None:
            self._log.step()
            self.snapshots.step()
            self._log.step()  # for flushes that the snapshot needs
            self._send()
            if self._room is not None and (self.error is not None or self._has_room()):
                room, self._room = self._room, None
                self._calls.append(room.settle)
        calls, self._calls = self._calls, []
        return calls

    @property
    def wants_step(self) -> bool:
        """True if step() has more to do that the device does not signal."""
        return self.snapshots.wants_step

    def snapshot(self) -> None:
        """Begin a snapshot with the next step, although the log has room: the next start is then quicker."""
        self.snapshots.wanted = True

    @property
    def written_bytes(self) -> int:
        """Bytes written since it was opened: objects, both copies of the log, snapshots."""
        return self._writing.written_bytes + self._log.written_bytes + self.snapshots.written_bytes

    @property
    def busy(self) -> int:
        """Operations that were tried again since the device was too busy."""
        return self._retry_policy.met

    def close(self) -> None:
        self._extents.close()

    def submit(self, operations: list[Operation]) -> None:
        """Pass operations to the device as soon as it accepts them; step() calls ``done`` of each."""
        self._outbox.extend(operations)
        self._send()

    def _send(self) -> None:
        while self._outbox:
            try:
                self.device.submit([self._outbox[0]])
            except DeviceBusyError:
                return
            self._outbox.popleft()

    def _written(self, write: Write, error: OSError | None) -> None:
        """Log the record of an object whose bytes are on the device, or its removal where they are not."""
        older = self._writing.end(write)
        if write.superseded:
            self._log.when_durable(self._settling(write.ticket))
        elif error is not None:
            self._held.pop(write.key, None)
            self._log.append(pack_record(RecordKind.REMOVE, *write.key))
            failure = VolumeError(f"writing an object to device {self.device.name} failed: {error}", error)
            self._calls.append(lambda: write.ticket.settle(failure))
        else:
            for each in older:
                each.superseded = True
            self._writing.written_bytes += write.size
            self._log.append(_name_records(write.key, write.name) + write.record + b"".join(write.followers))
            self._log.when_durable(self._settling(write.ticket))
        self._writing.call_waiting(write)

    def _settling(self, ticket: Ticket) -> Callable[[Exception | None], None]:
        def settle(error: Exception | None) -> None:
            failure = None
            if error is not None:
                failure = VolumeError(f"device {self.device.name} could not make a change durable: {error}")
            self._calls.append(lambda: ticket.settle(failure))

        return settle

    def _cleared(self, tenant: int | None) -> None:
        self._writing.supersede_tenant(tenant)
        for key in [key for key in self._held if tenant is None or key[0] == tenant]:
            del self._held[key]

    def _need_room(self, text: bytes | None) -> None:
        """Raise BusyError unless the log has room for one more record, or a text, besides the reserved ones."""
        if self._log.blocks_free - self._writing.log_blocks <= log_blocks_of(text):
            raise BusyError(f"the log of device {self.device.name} is full", self._room_ticket())

    def _room_ticket(self) -> Ticket:
        if self._room is None:
            self._room = Ticket()
        return self._room

    def _has_room(self) -> bool:
        return self._log.blocks_free - self._writing.log_blocks - log_blocks_of(None) >= self._layout.log_blocks // 8


def _key_of(record: bytes) -> Key:
    return int.from_bytes(record[4:6], "little"), record[40:72]


def _without_device(record: bytes) -> bytes:
    """Return the record without the device's number, which may change at the next start."""
    return record if record[2] == 0 else record[:2] + b"\0" + record[3:]


def _name_records(key: Key, name: bytes | None) -> bytes:
    return b"" if name is None else pack_name(RecordKind.NAME, *key, name)
