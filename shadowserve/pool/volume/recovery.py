"""Recovery: replays a volume's newest sound snapshot and the log behind it, however the volume was left.

The log ends at the first block that is not the successor of the one before. If a later block says that it was durable
(``durable``), it was damaged in both copies, and acknowledged records are missing. Then replay continues behind the
gap. Of the objects before it only records stay, since their key proves their bytes; values of other keys may have been
replaced or removed in the gap, so they are dropped and counted. The same holds for a snapshot that the log does not
reach back to. The puts of the last group are read before they are believed (log_tail.py).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shadowserve.native import INDEX_RECORD_DTYPE, Extents, Index, IndexPurge, RecordKind
from shadowserve.pool.volume.block_reader import BlockReader, Bytes
from shadowserve.pool.volume.format import (
    BLOCK_BYTES,
    LOG_MAGIC,
    NAME_PIECE_BYTES,
    RECORD_BYTES,
    RECORDS_PER_BLOCK,
    SNAPSHOT_MAGIC,
    BlockHeader,
    SnapshotHeader,
    Superblock,
    unpack_block,
    unpack_name,
)
from shadowserve.pool.volume.log import GROUP_BLOCKS_MAX, LogEnd
from shadowserve.pool.volume.log_tail import LogTail

_WINDOW_BLOCKS: Final = 4 * GROUP_BLOCKS_MAX
"""Blocks behind the log's end that are searched for proof that it is no end: damage hits a page or an erase block."""

_TENANTS: Final = 1 << 16
_RECORDS_OFFSET: Final = BLOCK_BYTES - RECORDS_PER_BLOCK * RECORD_BYTES


@dataclass(slots=True, kw_only=True)
class RecoveryReport:
    """Results of opening a volume.

    Attributes:
        lost: Dropped objects by reason (``unproven``, ``unnamed``, ``overlapping``) and tenant; 0 for tenants without a
            name.
    """

    objects: int = 0  # present objects
    snapshot_records: int = 0  # replayed records of the snapshot
    log_blocks: int = 0  # replayed blocks of the log
    log_records: int = 0  # records in them
    seconds: float = 0.0  # duration
    superblocks_damaged: int = 0  # damaged copies of the superblock; they are written again
    grown_bytes: int = 0  # bytes by which the volume has grown with its device
    snapshots_damaged: int = 0  # snapshots with a damaged header or block
    log_blocks_damaged: int = 0  # acknowledged blocks of the log that are damaged in both copies
    log_blocks_repaired: int = 0  # blocks of the log with one sound copy; the other copy was written again
    log_blocks_unrepaired: int = 0  # such blocks where that failed: they have one copy until the next snapshot
    unproven: int = 0  # objects dropped since a gap may have had their removal
    unnamed: int = 0  # objects dropped since the text of their key is missing
    overlapping: int = 0  # objects dropped since a later object overlaps them
    refused: int = 0  # records with impossible fields
    torn: int = 0  # puts of the last group without their bytes; they were never acknowledged
    lost: dict[str, Counter[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # problems, in words

    @property
    def dropped(self) -> int:
        return self.unproven + self.unnamed + self.overlapping


class NameReader:
    """Joins names of tenants and notes of the pool from records that may be anything. The index has keys' texts."""

    def __init__(self) -> None:
        self.tenants: dict[int, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self.refused = 0
        self._pieces: dict[tuple[int, bytes], dict[int, bytes]] = {}

    def read(self, records: npt.NDArray[Any]) -> None:
        """Process TENANT records in the order of the log."""
        content = np.ascontiguousarray(records).tobytes()
        for at in range(0, len(content), RECORD_BYTES):
            self._read(content[at : at + RECORD_BYTES])

    def _read(self, record: bytes) -> None:
        text = unpack_name(record)
        if text is None or text[0] is not RecordKind.TENANT:
            self.refused += 1
            return
        _, tenant, key, start, length, piece = text
        if start == 0:  # a new text begins: drop the pieces of the old one
            self._pieces[tenant, key] = {}
        pieces = self._pieces.setdefault((tenant, key), {})
        pieces[start] = piece
        if len(pieces) >= -(-length // NAME_PIECE_BYTES):
            del self._pieces[tenant, key]
            self._keep(tenant, key, b"".join(pieces[each] for each in sorted(pieces)))

    def _keep(self, tenant: int, key: bytes, text: bytes) -> None:
        if not any(key):
            self.tenants[tenant] = text
        else:
            self.notes[key.rstrip(b"\0")] = text


class Recovery:
    """Recovers the objects of one volume into an index."""

    def __init__(self, reader: BlockReader, superblock: Superblock, index: Index, number: int) -> None:
        """``number`` is the index's number of the device."""
        self.report = RecoveryReport()
        self.names = NameReader()
        self.epochs: dict[int, int] = {}  # of the replayed blocks by sequence: these are the log, nothing else is
        self._tail = LogTail()
        self.generation_last = 0
        self.generation_newest = 0  # of the newest snapshot that has a sound header; 0: there is none
        self._generation_seen = 0
        self._used: SnapshotHeader | None = None
        self._reader = reader
        self._volume_id = superblock.volume_id
        self._layout = superblock.layout
        self._index = index
        self._number = number
        self._blocks = superblock.layout.data_first + superblock.layout.data_blocks

    def run(self) -> LogEnd:
        """Replay the best snapshot and the log; return the end of the log."""
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
            self.report.notes.append("a snapshot is damaged, and the log does not reach back to an older one")
            return self._replay(partial.log_first, partial.log_epoch, durable)
        return self._salvage(headers, durable)

    @property
    def generation_next(self) -> int:
        """Generation of the next snapshot: a new number, and not of the region that the volume was recovered from."""
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
            # The header may become readable again. Its generation must not be used for another snapshot's blocks.
            block = unpack_block(SNAPSHOT_MAGIC, self._volume_id, self._reader.block(first + 1))
            self._generation_seen = max(self._generation_seen, block.epoch if block is not None else 0)
            if any(data):
                self.report.snapshots_damaged += 1
                self.report.notes.append(f"the header of snapshot region {region} is damaged")
        return sorted(found, key=lambda header: -header.generation)

    def _reaches(self, header: SnapshotHeader) -> bool:
        """Return whether the log still has, or never had, the first block to replay."""
        if header.log_last < header.log_first:
            return True
        return self._log_block(header.log_first, header.log_epoch) is not None

    def _load(self, header: SnapshotHeader) -> bool:
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
        self.names = NameReader()
        self.report.snapshot_records = 0

    # ---- The log

    def _log_block(self, sequence: int, epoch: int | None = None) -> tuple[BlockHeader, bytes] | None:
        """Return a block of the log from either copy, behind a block of the run ``epoch`` (None: of any)."""
        for first in self._layout.log_firsts:
            data = self._reader.block(first + sequence % self._layout.log_blocks)
            header = unpack_block(LOG_MAGIC, self._volume_id, memoryview(data))
            if header is not None and _follows(header, sequence, header.previous_epoch if epoch is None else epoch):
                return header, data
        return None

    def _replay(self, sequence: int, epoch: int, durable: int) -> LogEnd:
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
        # An unreadable block leaves open whether the log ends here.
        self._must_have_read_one(*self._log_places(sequence, sequence + 1))
        self.report.log_records += self._apply_records(tail.judge(self._blocks, self._read_blocks))
        self.report.torn = len(tail.torn)
        durable = tail.proven if tail.torn else sequence - 1
        return LogEnd(first=first, sequence=sequence, epoch=epoch, durable=durable, torn=tuple(tail.torn))

    def _log_places(self, sequence: int, end: int) -> list[int]:
        """Return the device's blocks of both copies of the log's blocks ``[sequence, end)``."""
        places = [number % self._layout.log_blocks for number in range(sequence, end)]
        return [first + place for first in self._layout.log_firsts for place in places]

    def _must_have_read_one(self, *copies: int) -> None:
        if self._reader.unreadable.issuperset(copies):
            self._reader.must_have_read(copies)

    def _replay_chain(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Replay blocks while each is its predecessor's successor; return the next sequence and the last epoch."""
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
        data = data.copy()  # the log tail keeps parts of it
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

    def _read_blocks(self, first: int, count: int) -> Bytes | None:
        data = self._reader.array(first, count)
        return None if self._reader.unreadable.intersection(range(first, first + count)) else data

    def _after_gap(self, sequence: int, durable: int) -> int | None:
        """Return the next block of the log behind a gap at ``sequence``; None if the log ends there."""
        window = range(sequence + 1, sequence + 1 + min(_WINDOW_BLOCKS, self._layout.log_blocks - 1))
        found = self._sound_blocks(window.start % self._layout.log_blocks, len(window))
        known = {number: header for number, header in found.items() if number in window}
        proven = {block for block, header in known.items() if header.durable >= sequence or block <= durable}
        for start in sorted(known):
            at = start
            while at not in proven and _follows(known.get(at + 1), at + 1, known[at].epoch):
                at += 1
            if at in proven:
                return start
        return None

    def _sound_blocks(self, place: int, count: int) -> dict[int, BlockHeader]:
        """Return the headers of all sound blocks of the log by sequence, in both copies, whatever precedes them.

        ``place`` and ``count``: the part of the ring to read.
        """
        known: dict[int, BlockHeader] = {}
        blocks = self._layout.log_blocks
        until_end = min(count, blocks - place)
        for first in self._layout.log_firsts:
            for number, data in self._reader.runs([(first + place, until_end), (first, count - until_end)]):
                view = memoryview(data)
                for at in range(len(data) // BLOCK_BYTES):
                    block = view[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]
                    header = unpack_block(LOG_MAGIC, self._volume_id, block)
                    if header is not None and header.sequence % blocks == number - first + at:
                        known[header.sequence] = header
        return known

    # ---- Without a snapshot that the log reaches back to

    def _salvage(self, headers: list[SnapshotHeader], durable: int) -> LogEnd:
        """Keep what can be proven: of an old snapshot, and of all blocks of the log."""
        self.report.notes.append("the log does not reach back to a sound snapshot")
        if headers:
            self._load(headers[0])
            self._used = headers[0]
        known = self._sound_blocks(0, self._layout.log_blocks)
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

    # ---- Records

    def _apply(self, data: Bytes, counts: list[int]) -> int:
        """Replay the first ``counts`` records of the blocks; return their number."""
        if not any(counts):
            return 0
        return self._apply_records(_chosen(data, counts))

    def _apply_records(self, chosen: npt.NDArray[Any]) -> int:
        if not len(chosen):
            return 0
        self.names.read(chosen[chosen["kind"] == RecordKind.TENANT])
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
        """Drop what a gap may have replaced or removed: everything except records, whose key proves their bytes."""
        before = self._census()
        self.report.unproven += self._index.purge(self._number, IndexPurge.UNPROVEN)
        self._note_lost("unproven", before)

    def drop_nameless(self) -> None:
        """Drop objects of named keys without a name, and those of unknown tenants."""
        before = self._census()
        for tenant in before.keys() - {0, *self.names.tenants}:
            self.report.unnamed += self._index.clear(tenant, self._number)
        self.report.unnamed += self._index.purge(self._number, IndexPurge.NAMELESS)
        self.report.refused += self.names.refused
        self._note_lost("unnamed", before)

    def reserve(self, extents: Extents) -> None:
        before = self._census()
        self.report.overlapping += self._index.reserve(self._number, extents)
        self._note_lost("overlapping", before)

    def _census(self) -> Counter[int]:
        found = Counter({tenant: self._objects(tenant) for tenant in (0, *self.names.tenants)})
        if found.total() < self._index.totals(device=self._number).objects:
            found = Counter({tenant: self._objects(tenant) for tenant in range(_TENANTS)})
        return +found

    def _objects(self, tenant: int) -> int:
        return self._index.totals(tenant, self._number).objects

    def _note_lost(self, reason: str, before: Counter[int]) -> None:
        for tenant, count in (before - self._census()).items():
            whose = tenant if tenant in self.names.tenants else 0
            self.report.lost.setdefault(reason, Counter())[whose] += count


def _chosen(data: Bytes, counts: list[int]) -> npt.NDArray[Any]:
    blocks = data.reshape(-1, BLOCK_BYTES)[: len(counts), _RECORDS_OFFSET:]
    records = np.ascontiguousarray(blocks).view(INDEX_RECORD_DTYPE).reshape(len(counts), RECORDS_PER_BLOCK)
    if min(counts) == RECORDS_PER_BLOCK:
        return records.reshape(-1)
    return records[np.arange(RECORDS_PER_BLOCK) < np.array(counts)[:, None]]


def _follows(header: BlockHeader | None, sequence: int, epoch: int) -> bool:
    """Return whether a block has that sequence and follows a block of the run ``epoch``."""
    return header is not None and header.sequence == sequence and header.previous_epoch == epoch
