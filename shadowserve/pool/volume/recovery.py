"""What a volume held when it was left, however it was left: the newest sound snapshot, and the log from there on.

The log ends at the first block that is not the successor of the one before. Normally nobody was ever told that what
lies beyond is durable. Where a later block says that it was (``durable``), it has rotted in both copies: then records
are missing that somebody relies on. Replay goes on behind the gap, and of what was there before it only those objects
stay that carry their own proof: records, whose key says what their bytes are. Values of other keys may have been
replaced or removed in the gap, so they are dropped and counted. The same holds where a snapshot has to be taken that
the log does not reach back to any more.

Of the last group nothing says that its flush was complete: what it put is read before it is believed (tail.py).
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.block import Operation, OperationKind, Priority
from shadowserve.errors import is_passing
from shadowserve.native import INDEX_RECORD_DTYPE, Extents, Index, IndexSift
from shadowserve.pool.volume.device import BlockDevice, wait_for_operations
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    LOG_MAGIC,
    RECORD_BYTES,
    RECORDS_PER_BLOCK,
    SNAPSHOT_MAGIC,
    SUPERBLOCK_OFFSETS,
    BlockHeader,
    FormatError,
    RecordKind,
    SnapshotHeader,
    Superblock,
    unpack_block,
)
from shadowserve.pool.volume.log import GROUP_BLOCKS_MAX
from shadowserve.pool.volume.pages import Pages
from shadowserve.pool.volume.tail import Key, Tail
from shadowserve.pool.volume.texts import TextReader

ANSWER_S: Final = 60.0
"""A device that has not answered for a minute when it is opened will not."""

_PAUSE_FIRST_S: Final = 0.01
_PAUSES_S: Final = 10.0
"""A device that is busy is asked again, after pauses that double; all of a reader's together are no longer."""

_PIECE_BLOCKS: Final = 256
_DEPTH: Final = 4
_WINDOW_BLOCKS: Final = 4 * GROUP_BLOCKS_MAX
"""How far behind the log's end is looked for blocks that say it is none: what rots is a page or an erase block."""

_TENANTS: Final = 1 << 16
_SEQUENCE_OFFSET: Final = 32
_RECORDS_OFFSET: Final = BLOCK_BYTES - RECORDS_PER_BLOCK * RECORD_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """What opening a volume found.

    Attributes:
        objects: that it holds.
        snapshot_records: replayed from the snapshot.
        log_blocks: replayed.
        log_records: in them.
        seconds: that it took.
        superblocks_damaged: copies of the superblock that were not sound; they are written anew.
        grown_bytes: by which the volume has grown, as its device had.
        snapshots_damaged: headers, or blocks of a snapshot, that were not sound.
        log_blocks_damaged: gaps in what had been acknowledged, in blocks, both copies.
        log_blocks_repaired: blocks of the log that were sound in one copy only; the other one was written anew.
        log_blocks_unrepaired: likewise, but the device refused to write it: there is one copy until the next snapshot.
        unproven: objects dropped because a gap may have held their removal.
        unnamed: objects dropped because the text of their key is not there.
        overlapping: objects dropped because another one, stored later, lies where they lay.
        refused: records with impossible fields.
        torn: puts of the last group whose bytes are not there: their writers were never told that they are.
        lost: the objects that were dropped, by reason (three fields above) and tenant; 0 for one without a name.
        notes: what went wrong, in words.
    """

    objects: int = 0
    snapshot_records: int = 0
    log_blocks: int = 0
    log_records: int = 0
    seconds: float = 0.0
    superblocks_damaged: int = 0
    grown_bytes: int = 0
    snapshots_damaged: int = 0
    log_blocks_damaged: int = 0
    log_blocks_repaired: int = 0
    log_blocks_unrepaired: int = 0
    unproven: int = 0
    unnamed: int = 0
    overlapping: int = 0
    refused: int = 0
    torn: int = 0
    lost: dict[str, Counter[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        """Objects that were stored and are not there any more."""
        return self.unproven + self.unnamed + self.overlapping


@dataclass(slots=True, kw_only=True)
class LogEnd:
    """Where the log goes on: ``sequence`` is the next block's, ``epoch`` the last one's, ``first`` still needed.

    Attributes:
        durable: the last block that may be believed without looking.
        torn: keys of puts that are not to be believed: the log's next records say so.
    """

    first: int
    sequence: int
    epoch: int
    durable: int
    torn: tuple[Key, ...] = ()


class Reader:
    """Reads blocks of a device that nobody else uses yet, several requests at a time.

    What fails is tried once more; while the device is just busy, or the system short of something, again and again,
    and then it is an error. What cannot be read for another reason comes as zeros.

    Attributes:
        unreadable: blocks that came as zeros since they could not be read.
    """

    def __init__(self, device: BlockDevice) -> None:
        """Read from ``device``."""
        self._device = device
        self._buffers = [Pages(_PIECE_BLOCKS * BLOCK_BYTES) for _ in range(_DEPTH)]
        self._single = Pages(BLOCK_BYTES)
        self._ended: set[int] = set()
        self.unreadable: set[int] = set()
        self._error: OSError | None = None
        self._pause_s, self._paused_s = _PAUSE_FIRST_S, 0.0

    def run(self, operation: Operation) -> None:
        """Do one operation and wait for it.

        Raises:
            OSError: it failed.
            DeviceError: the device does not answer.
        """
        while True:
            operation.error = None
            self._submit(operation)
            self._wait(operation)
            if operation.error is None:
                return
            self._pause(operation)

    def block(self, number: int) -> bytes:
        """Return one block; zeros if it cannot be read. Also while pieces are being read: theirs are other buffers.

        Raises:
            OSError: the device was busy all the time.
        """
        operation = self._read(number, 1, self._single.address)
        self._wait(operation)
        if operation.error is not None and not self._read_again(number, self._single.address):
            return bytes(BLOCK_BYTES)
        return bytes(self._single.view[:BLOCK_BYTES])

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, Bytes]]:
        """Yield (number of its first block, bytes), in order; what cannot be read is zeros. Good until the next one.

        Raises:
            OSError: the device was busy all the time.
        """
        return self.runs([(first, count)])

    def runs(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Bytes]]:
        """Yield what pieces() does of several runs, each a first block and a count."""
        parts = [
            (start, min(_PIECE_BLOCKS, first + count - start))
            for first, count in runs
            for start in range(first, first + count, _PIECE_BLOCKS)
        ]
        waiting: list[Operation] = []
        try:
            for turn in range(len(parts) + _DEPTH - 1):
                if turn < len(parts):
                    waiting.append(self._read(*parts[turn], self._buffers[turn % _DEPTH].address))
                if turn >= _DEPTH - 1 and waiting:
                    yield self._take(waiting.pop(0), turn - _DEPTH + 1)
        except GeneratorExit:
            # Whoever has seen enough leaves reads behind: into buffers that the next ones use, and under identities
            # that the next ones may be given.
            for operation in waiting:
                self._wait(operation)
            raise

    def _take(self, operation: Operation, turn: int) -> tuple[int, Bytes]:
        self._wait(operation)
        first, blocks = operation.offset // BLOCK_BYTES, operation.length // BLOCK_BYTES
        if operation.error is not None:
            for block in range(blocks):
                if not self._read_again(first + block, operation.address + block * BLOCK_BYTES):
                    self._buffers[turn % _DEPTH].view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes(
                        BLOCK_BYTES
                    )
        return first, self._buffers[turn % _DEPTH].array[: operation.length]

    def _read_again(self, number: int, address: int) -> bool:
        """Read a block that could not be read the first time; return whether it could now."""
        while True:
            single = self._read(number, 1, address)
            self._wait(single)
            if single.error is None:
                return True
            if not is_passing(single.error):
                self.unreadable.add(number)
                self._error = self._error or single.error
                return False
            self._pause(single)

    def _pause(self, operation: Operation) -> None:
        """Wait before what has failed is tried again; raise its error where that would not help."""
        error = operation.error
        assert error is not None
        flushing = operation.kind is OperationKind.FLUSH
        if not is_passing(error, flushing=flushing) or self._paused_s + self._pause_s > _PAUSES_S:
            raise error
        time.sleep(self._pause_s)
        self._paused_s += self._pause_s
        self._pause_s = min(2 * self._pause_s, 1.0)

    def unreadable_error(self) -> OSError:
        """Return why the first of the blocks that are unreadable could not be read."""
        assert self._error is not None
        return self._error

    def must_have_read(self, blocks: Iterable[int]) -> None:
        """See that blocks of which nothing sound was found were read, and not just taken for zeros.

        Raises:
            OSError: one was not, with what to do about it.
        """
        missing = self.unreadable.intersection(blocks)
        if missing:
            error = self.unreadable_error()
            raise OSError(
                error.errno,
                f"block {min(missing)} of device {self._device.name} cannot be read ({error.strerror}), and there is "
                "no sound copy of it; nothing was dropped. Try again: what was stored may be there then. If it never "
                "can be read, take the device out of the configuration, or drop what is on it: shadowserve pool "
                f"format --force {self._device.name}",
            )

    def _read(self, first: int, blocks: int, address: int) -> Operation:
        operation = Operation(
            OperationKind.READ, first * BLOCK_BYTES, blocks * BLOCK_BYTES, address, Priority.FOREGROUND, self._done
        )
        self._submit(operation)
        return operation

    def _submit(self, operation: Operation) -> None:
        self._device.submit([operation])

    def _wait(self, operation: Operation) -> None:
        while id(operation) not in self._ended:
            for ended in wait_for_operations(self._device, ANSWER_S):
                self._ended.add(id(ended))
        self._ended.discard(id(operation))

    def _done(self, operation: Operation) -> None:
        """Nothing: completions are taken in _wait()."""


def read_superblocks(reader: Reader, device: BlockDevice) -> tuple[Superblock | None, list[int]]:
    """Return what the sound copy says, and which copies are not sound.

    Raises:
        FormatError: of a newer version, or two sound copies that differ.
        OSError: there is no sound copy, and one could not be read.
    """
    sound: dict[int, Superblock] = {}
    for number, offset in enumerate(SUPERBLOCK_OFFSETS):
        if offset + BLOCK_BYTES <= device.capacity_bytes:
            found = Superblock.unpack(reader.block(offset // BLOCK_BYTES))
            if found is not None:
                sound[number] = found
    largest = max(sound.values(), key=lambda each: each.device_bytes, default=None)
    for number, found in list(sound.items()):
        if largest is not None and found != largest and found.with_size_of(largest) == largest:
            del sound[number]  # the volume was growing: this copy had not been written yet
    damaged = [number for number in range(len(SUPERBLOCK_OFFSETS)) if number not in sound]
    if not sound:
        reader.must_have_read(offset // BLOCK_BYTES for offset in SUPERBLOCK_OFFSETS)
    if len(set(sound.values())) > 1:
        raise FormatError(
            f"device {device.name} has the superblocks of two volumes; parts of another device were copied onto it: "
            "restore it, or format it again, which drops all its objects"
        )
    return next(iter(sound.values()), None), damaged


class Recovery:
    """Brings the objects of one volume into an index."""

    def __init__(self, reader: Reader, superblock: Superblock, index: Index, number: int) -> None:
        """Recover the volume of ``superblock`` as device ``number`` of ``index``."""
        self.report = RecoveryReport()
        self.texts = TextReader()
        self.epochs: dict[int, int] = {}
        """Of the blocks of the log that were replayed, by sequence: these are the log, and nothing else is."""
        self._tail = Tail()
        self.generation_last = 0
        self.generation_newest = 0
        """Of the newest snapshot that has a sound header; 0: there is none."""
        self._generation_seen = 0
        self._used: SnapshotHeader | None = None
        self._reader = reader
        self._volume_id = superblock.volume_id
        self._layout = superblock.layout
        self._index = index
        self._number = number
        self._blocks = superblock.layout.data_first + superblock.layout.data_blocks

    def run(self) -> LogEnd:
        """Replay the best snapshot and the log; return where the log goes on."""
        headers = self._headers()
        self.generation_newest = headers[0].generation if headers else 0
        durable = headers[0].log_last if headers else 0
        partial: SnapshotHeader | None = None
        for header in headers:
            if not self._reaches(header):
                continue
            if self._load(header):
                self._used = header
                return self._replay(header.log_first, header.log_epoch, durable)
            partial = partial or header
            self._forget()
        for first in self._layout.snapshot_firsts:
            self._reader.must_have_read(range(first, first + self._layout.snapshot_blocks))
        if partial is not None:
            self._load(partial)
            self._used = partial
            self.report.notes.append("a snapshot is damaged, and there is no older one that the log reaches back to")
            return self._replay(partial.log_first, partial.log_epoch, durable)
        return self._salvage(headers, durable)

    @property
    def generation_next(self) -> int:
        """The number of the next snapshot: a new one, and not of the region that the volume was recovered from."""
        after = max(self.generation_newest, self._generation_seen) + 1
        return after + (self._used is not None and after % 2 == self._used.generation % 2)

    # ---- Snapshots

    def _headers(self) -> list[SnapshotHeader]:
        found = []
        for region, first in enumerate(self._layout.snapshot_firsts):
            data = self._reader.block(first)
            header = SnapshotHeader.unpack(data, self._volume_id, self._layout, region)
            if header is not None:
                found.append(header)
                continue
            # The next time it may be read. It must not vouch for blocks of another snapshot with its number.
            block = unpack_block(SNAPSHOT_MAGIC, self._volume_id, self._reader.block(first + 1))
            self._generation_seen = max(self._generation_seen, block.epoch if block is not None else 0)
            if any(data):
                self.report.snapshots_damaged += 1
                self.report.notes.append(f"the header of snapshot region {region} is damaged")
        return sorted(found, key=lambda header: -header.generation)

    def _reaches(self, header: SnapshotHeader) -> bool:
        """Whether the log still has, or never had, the block that replay begins with."""
        if header.log_last < header.log_first:
            return True
        return self._log_block(header.log_first, header.log_epoch) is not None

    def _load(self, header: SnapshotHeader) -> bool:
        """Replay a snapshot; return whether all of it was there."""
        first = self._layout.snapshot_firsts[header.generation % 2] + 1
        damaged = 0
        for number, data in self._reader.pieces(first, header.blocks):
            view = memoryview(data)
            counts = []
            for at in range(len(data) // BLOCK_BYTES):
                block = unpack_block(SNAPSHOT_MAGIC, self._volume_id, view[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES])
                sound = block is not None and block.epoch == header.generation and block.sequence == number - first + at
                counts.append(block.count if block is not None and sound else 0)
                damaged += not sound
            self.report.snapshot_records += self._apply(data, counts)
        if damaged:
            self.report.snapshots_damaged += 1
            self.report.notes.append(f"snapshot {header.generation}: {damaged} of {header.blocks} blocks are damaged")
        return not damaged

    def _forget(self) -> None:
        self._index.clear(-1, self._number)
        self.texts = TextReader()
        self.report.snapshot_records = 0

    # ---- The log

    def _log_block(self, sequence: int, epoch: int | None = None) -> tuple[BlockHeader, bytes] | None:
        """Return a block of the log from whichever copy has it, behind one of the run ``epoch``; None: whatever was."""
        for first in self._layout.log_firsts:
            data = self._reader.block(first + sequence % self._layout.log_blocks)
            header = unpack_block(LOG_MAGIC, self._volume_id, memoryview(data))
            if header is not None and _follows(header, sequence, header.previous_epoch if epoch is None else epoch):
                return header, data
        return None

    def _replay(self, sequence: int, epoch: int, durable: int) -> LogEnd:
        """Replay the log from a block on, and behind gaps."""
        first = sequence
        tail = self._tail
        tail.proven = max(tail.proven, durable)
        sequence, epoch = self._replay_chain(sequence, epoch)
        while (after := self._after_gap(sequence, durable)) is not None:
            self.report.log_blocks_damaged += after - sequence
            self._reader.must_have_read(self._log_places(sequence, after))
            tail.proven = max(tail.proven, after - 1)
            self.report.log_records += self._apply_records(tail.take_proven())
            self.report.notes.append(f"blocks {sequence} to {after - 1} of the log are damaged in both copies")
            self._drop_unproven()
            found = self._log_block(after)
            sequence, epoch = self._replay_chain(after, found[0].previous_epoch if found is not None else 0)
        if sequence <= durable:
            self._reader.must_have_read(self._log_places(sequence, durable + 1))
            self.report.log_blocks_damaged += durable + 1 - sequence
            self.report.notes.append(f"blocks {sequence} to {durable} of the log are damaged in both copies")
            self._drop_unproven()
            sequence = durable + 1
        self._must_have_read_one(*self._log_places(sequence, sequence + 1))  # else nobody knows whether it is the end
        self._judge_tail()
        durable = tail.proven if tail.torn else sequence - 1
        return LogEnd(first=first, sequence=sequence, epoch=epoch, durable=durable, torn=tuple(tail.torn))

    def _log_places(self, sequence: int, end: int) -> list[int]:
        """Return the blocks of the device for those of the log from ``sequence`` until ``end``, of both copies."""
        places = [number % self._layout.log_blocks for number in range(sequence, end)]
        return [first + place for first in self._layout.log_firsts for place in places]

    def _must_have_read_one(self, *copies: int) -> None:
        if self._reader.unreadable.issuperset(copies):
            self._reader.must_have_read(copies)

    def _replay_chain(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Replay blocks while each is the successor of the one before; return the next sequence and the last epoch."""
        begin = sequence
        while sequence - begin < self._layout.log_blocks:
            place = sequence % self._layout.log_blocks
            span = min(self._layout.log_blocks - place, self._layout.log_blocks - (sequence - begin))
            reached = sequence
            for number, data in self._reader.pieces(self._layout.log_firsts[0] + place, span):
                at = sequence + number - self._layout.log_firsts[0] - place
                reached, epoch = self._replay_piece(data, at, epoch)
                if reached != at + len(data) // BLOCK_BYTES:
                    break
            if reached != sequence + span:
                return reached, epoch
            sequence = reached
        return sequence, epoch

    def _replay_piece(self, data: Bytes, sequence: int, epoch: int) -> tuple[int, int]:
        tail = self._tail
        data = data.copy()  # the tail keeps parts of it
        view = memoryview(data)
        counts: list[int] = []
        for at in range(len(data) // BLOCK_BYTES):
            place = slice(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES)
            header = unpack_block(LOG_MAGIC, self._volume_id, view[place])
            if not _follows(header, sequence + at, epoch):
                found = self._log_block(sequence + at, epoch)
                if found is None:
                    break
                header, view[place] = found[0], found[1]
            assert header is not None
            epoch = self.epochs[sequence + at] = header.epoch
            counts.append(header.count)
            tail.proven = max(tail.proven, header.durable)
        self.report.log_blocks += len(counts)
        self.report.log_records += self._apply_records(tail.take_proven())
        proven = min(max(tail.proven + 1 - sequence, 0), len(counts))
        self.report.log_records += self._apply(data[: proven * BLOCK_BYTES], counts[:proven])
        for at in range(proven, len(counts)):
            block = data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
            tail.hold(sequence + at, _chosen(block, counts[at : at + 1]))
        return sequence + len(counts), epoch

    def _judge_tail(self) -> None:
        """Replay what nothing has proven, as far as it is there."""
        self.report.log_records += self._apply_records(self._tail.judge(self._blocks, self._read_blocks))
        self.report.torn = len(self._tail.torn)

    def _read_blocks(self, first: int, count: int) -> Bytes | None:
        data = np.concatenate([data.copy() for _, data in self._reader.pieces(first, count)])
        return None if self._reader.unreadable.intersection(range(first, first + count)) else data

    def _after_gap(self, sequence: int, durable: int) -> int | None:
        """Return the next block of the log behind a gap at ``sequence``; None if the log ends there."""
        known = self._known(sequence + 1, min(_WINDOW_BLOCKS, self._layout.log_blocks - 1))
        proven = {block for block, header in known.items() if header.durable >= sequence or block <= durable}
        for start in sorted(known):
            at = start
            while at not in proven and _follows(known.get(at + 1), at + 1, known[at].epoch):
                at += 1
            if at in proven:
                return start
        return None

    def _known(self, sequence: int, count: int) -> dict[int, BlockHeader]:
        """Return the headers of all sound blocks with these sequences, whatever was before them."""
        known: dict[int, BlockHeader] = {}
        for copy in range(len(self._layout.log_firsts)):
            known |= self._known_of(copy, sequence, count)
        return known

    def _known_of(self, copy: int, sequence: int, count: int) -> dict[int, BlockHeader]:
        known: dict[int, BlockHeader] = {}
        first, blocks = self._layout.log_firsts[copy], self._layout.log_blocks
        begin = sequence
        while begin < sequence + count:
            place = begin % blocks
            span = min(blocks - place, sequence + count - begin)
            for number, data in self._reader.pieces(first + place, span):
                at = begin + number - first - place
                found = np.frombuffer(data, "<u8").reshape(-1, BLOCK_BYTES // 8)[:, _SEQUENCE_OFFSET // 8]
                for index in np.flatnonzero(found == np.arange(at, at + len(found), dtype=np.uint64)):
                    view = memoryview(data)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                    header = unpack_block(LOG_MAGIC, self._volume_id, view)
                    if header is not None:
                        known[at + int(index)] = header
            begin += span
        return known

    # ---- Without a snapshot that the log reaches back to

    def _salvage(self, headers: list[SnapshotHeader], durable: int) -> LogEnd:
        """Keep what can be proven: of an old snapshot, and of all that the log still has."""
        self.report.notes.append("no snapshot is sound that the log reaches back to")
        if headers:
            self._load(headers[0])
            self._used = headers[0]
        known = self._ring()
        first, second = self._layout.log_firsts
        for place in range(self._layout.log_blocks):
            self._must_have_read_one(first + place, second + place)
        if not known:
            self._drop_unproven()
            return LogEnd(first=durable + 1, sequence=durable + 1, epoch=0, durable=durable)
        first = max(known, key=lambda block: (known[block].durable, block))
        while first - 1 in known and known[first - 1].epoch == known[first].previous_epoch:
            first -= 1
        if first > 1 or headers:
            self._drop_unproven()
        return self._replay(first, known[first].previous_epoch, durable)

    def _ring(self) -> dict[int, BlockHeader]:
        known: dict[int, BlockHeader] = {}
        for first in self._layout.log_firsts:
            for number, data in self._reader.pieces(first, self._layout.log_blocks):
                view = memoryview(data)
                for at in range(len(data) // BLOCK_BYTES):
                    block = view[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
                    header = unpack_block(LOG_MAGIC, self._volume_id, block)
                    if header is not None and header.sequence % self._layout.log_blocks == number - first + at:
                        known[header.sequence] = header
        return known

    # ---- Records

    def _apply(self, data: Bytes, counts: list[int]) -> int:
        """Replay the first so many records of each block; return how many."""
        if not any(counts):
            return 0
        return self._apply_records(_chosen(data, counts))

    def _apply_records(self, chosen: npt.NDArray[Any]) -> int:
        if not len(chosen):
            return 0
        self.texts.read(chosen[chosen["kind"] == RecordKind.TENANT])
        self._note_generation(chosen["generation"][chosen["kind"] == RecordKind.PUT])
        applied = self._index.replay(self._number, self._blocks, chosen)
        self.report.refused += applied.refused
        return len(chosen)

    def _note_generation(self, generations: npt.NDArray[np.uint32]) -> None:
        if not len(generations):
            return
        self.generation_last = self.generation_last or int(generations[0])
        ahead = (generations - np.uint32(self.generation_last)).view(np.int32).max()
        self.generation_last = (self.generation_last + max(int(ahead), 0)) & 0xFFFF_FFFF

    # ---- What cannot stay

    def _drop_unproven(self) -> None:
        """Drop what a gap may have replaced or removed: all but records, whose key says what their bytes are."""
        before = self._census()
        self.report.unproven += self._index.sift(self._number, IndexSift.UNPROVEN)
        self._note_lost("unproven", before)

    def drop_nameless(self) -> None:
        """Drop objects of named keys without a name, and those of unknown tenants."""
        before = self._census()
        for tenant in before.keys() - {0, *self.texts.tenants}:
            self.report.unnamed += self._index.clear(tenant, self._number)
        self.report.unnamed += self._index.sift(self._number, IndexSift.NAMELESS)
        self.report.refused += self.texts.refused
        self._note_lost("unnamed", before)

    def reserve(self, extents: Extents) -> None:
        """Reserve the extents of all objects; drop those that lie where later ones do."""
        before = self._census()
        self.report.overlapping += self._index.reserve(self._number, extents)
        self._note_lost("overlapping", before)

    def _census(self) -> Counter[int]:
        """Return how many objects each tenant has."""
        found = Counter({tenant: self._objects(tenant) for tenant in (0, *self.texts.tenants)})
        if found.total() < self._index.totals(device=self._number).objects:
            found = Counter({tenant: self._objects(tenant) for tenant in range(_TENANTS)})
        return +found

    def _objects(self, tenant: int) -> int:
        return self._index.totals(tenant, self._number).objects

    def _note_lost(self, reason: str, before: Counter[int]) -> None:
        for tenant, count in (before - self._census()).items():
            whose = tenant if tenant in self.texts.tenants else 0
            self.report.lost.setdefault(reason, Counter())[whose] += count


def _chosen(data: Bytes, counts: list[int]) -> npt.NDArray[Any]:
    """Return the first so many records of each block."""
    blocks = data.reshape(-1, BLOCK_BYTES)[: len(counts), _RECORDS_OFFSET:]
    records = np.ascontiguousarray(blocks).view(INDEX_RECORD_DTYPE).reshape(len(counts), RECORDS_PER_BLOCK)
    if min(counts) == RECORDS_PER_BLOCK:
        return records.reshape(-1)
    return records[np.arange(RECORDS_PER_BLOCK) < np.array(counts)[:, None]]


def _follows(header: BlockHeader | None, sequence: int, epoch: int) -> bool:
    """Whether a block is the one with that sequence that a run wrote behind one of the run ``epoch``."""
    return header is not None and header.sequence == sequence and header.previous_epoch == epoch
