"""Every structure of a volume except objects (docs/reference/volume-format.md).

The format is frozen: a golden volume in tests/assets must stay readable, and a change of a structure needs a new
:data:`VERSION`. Parsers take bytes that may be anything: they never trust a length or a count, and return None, or
raise :class:`FormatError` for a message to the user.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from shadowserve.errors import ShadowServeError
from shadowserve.native import NO_PARENT, OBJECT_HEADER_BYTES, IndexEntry, ObjectFields, RecordKind

VERSION: Final = 1
BLOCK_BYTES: Final = 4096
RECORD_BYTES: Final = 128
RECORDS_PER_BLOCK: Final = 31
RECORDS_BYTES: Final = RECORD_BYTES * RECORDS_PER_BLOCK
"""Bytes of the records of a full block."""
SUPERBLOCK_OFFSETS: Final = (0, 1 << 20)
"""The copies are so far apart that overwriting a device's beginning (a partition table, mkfs) leaves one."""
NAME_PIECE_BYTES: Final = 80
NAME_BYTES_MAX: Final = 64 << 10
"""Most bytes of a key's text (``shadowserve.pool.types.KEY_BYTES_MAX``) and of a tenant's name."""
LOG_MAGIC: Final = b"SSLG"
SNAPSHOT_MAGIC: Final = b"SSSN"

_SUPERBLOCK_MAGIC: Final = b"SSVOLUME"
_HEADER_MAGIC: Final = b"SSSH"
HEADER_MAGICS: Final = (_SUPERBLOCK_MAGIC, LOG_MAGIC, SNAPSHOT_MAGIC, _HEADER_MAGIC, b"SSOBJECT")
"""First bytes of all blocks of a volume, including those of an object's header (``native/src/block/object.c``)."""

_SUPERBLOCK: Final = struct.Struct("<8sHHI16s16sQQQIIQQQQQQQQ")
_BLOCK: Final = struct.Struct("<4sHHI4x16sQQQQ")
_SNAPSHOT: Final = struct.Struct("<4sHHI4x16sQQQQQQQ")
_NAME: Final = struct.Struct("<BBBxHHII32s80s")
_RECORDS_OFFSET: Final = 128
_CRC_AT_SUPERBLOCK: Final = 12
_CRC_AT_BLOCK: Final = 8


class FormatError(ShadowServeError):
    """The content of a device cannot be used; the message says what it is and what to do."""


def blocks_of(length: int, name_blocks: int = 0) -> int:
    """Return the blocks of an object with a value of ``length`` bytes and ``name_blocks`` for its name."""
    return -(-(OBJECT_HEADER_BYTES + length) // BLOCK_BYTES) + name_blocks


def object_fields(entry: IndexEntry) -> ObjectFields:
    """Return the expected fields of an object's header."""
    return ObjectFields(
        key=entry.key,
        tenant=entry.tenant,
        length=entry.length,
        generation=entry.generation,
        header_length=entry.header_length,
        flags=entry.flags,
    )


def _checksum(data: bytes | bytearray | memoryview, at: int) -> int:
    """Return the CRC-32 of ``data``, with zeros for the four bytes at ``at``, where the CRC itself is."""
    view = memoryview(data)
    return zlib.crc32(view[at + 4 :], zlib.crc32(b"\0\0\0\0", zlib.crc32(view[:at])))


def _pack_block(form: struct.Struct, crc_at: int, *fields: Any, records: bytes | bytearray | memoryview = b"") -> bytes:
    """Return a block that begins with ``fields``, with its checksum at ``crc_at``."""
    data = bytearray(BLOCK_BYTES)
    form.pack_into(data, 0, *fields)
    data[_RECORDS_OFFSET : _RECORDS_OFFSET + len(records)] = records
    struct.pack_into("<I", data, crc_at, _checksum(data, crc_at))
    return bytes(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Position of the parts of a volume, in blocks of 4 KiB."""

    log_firsts: tuple[int, int]  # first block of each of the log's two copies
    log_blocks: int  # blocks of each copy
    snapshot_firsts: tuple[int, int]  # first block of each of the two snapshot regions: the snapshot's header
    snapshot_blocks: int  # blocks of each region, header included
    data_first: int  # first block of the objects
    data_blocks: int  # blocks for objects
    objects_max: int  # most objects

    @classmethod
    def plan(cls, capacity_bytes: int, objects_max: int, log_bytes: int | None = None) -> "Layout":
        """Lay out a device. ``log_bytes``: of each copy of the log; None for half a snapshot's size, 1 to 256 MiB.

        Raises:
            FormatError: The device is too small for as many objects, or too large.
        """
        capacity = capacity_bytes // BLOCK_BYTES
        if capacity > 0xFFFF_FFFF:
            raise FormatError(f"a device of {capacity_bytes} bytes is more than a volume can be: 16 TiB; partition it")
        if not 0 < objects_max < 1 << 32:
            raise FormatError(f"objects_max is {objects_max}; it must be from 1 to 4294967295")
        # Besides objects: names of keys, and objects that move during a snapshot and so occur twice (records_max).
        snapshot = 34 + -(-objects_max * 5 // (2 * RECORDS_PER_BLOCK))
        if log_bytes is None:
            log_bytes = min(max(snapshot * BLOCK_BYTES // 2, 1 << 20), 256 << 20)
        log = max(log_bytes // BLOCK_BYTES, LOG_BLOCKS_MIN)
        first = SUPERBLOCK_OFFSETS[1] // BLOCK_BYTES + 1
        snapshot_firsts = (first + log, first + log + snapshot)
        second_log = snapshot_firsts[1] + snapshot
        data_first = second_log + log
        if data_first + 1 > capacity:
            raise FormatError(
                f"a device of {capacity_bytes} bytes cannot hold the log and the snapshots of {objects_max} objects, "
                f"which take {data_first * BLOCK_BYTES} bytes; give it more room, or set objects_max lower"
            )
        return cls(
            log_firsts=(first, second_log),
            log_blocks=log,
            snapshot_firsts=snapshot_firsts,
            snapshot_blocks=snapshot,
            data_first=data_first,
            data_blocks=capacity - data_first,
            objects_max=objects_max,
        )

    @property
    def records_max(self) -> int:
        """Most records of objects and names; the rest of a region is for objects that change during a snapshot."""
        return (self.snapshot_blocks - 34) * RECORDS_PER_BLOCK * 5 // 6

    def check(self, device_bytes: int) -> bool:
        """Return whether the parts are inside a device of that size and do not overlap."""
        parts = [
            (SUPERBLOCK_OFFSETS[1] // BLOCK_BYTES, 1),
            *((first, self.log_blocks) for first in self.log_firsts),
            *((first, self.snapshot_blocks) for first in self.snapshot_firsts),
            (self.data_first, self.data_blocks),
        ]
        parts.sort()
        apart = all(first + count <= after for (first, count), (after, _) in zip(parts, parts[1:], strict=False))
        last, count = parts[-1]
        whole = min(self.log_blocks - LOG_BLOCKS_MIN, self.snapshot_blocks - 35, self.data_blocks - 1) >= 0
        return apart and whole and self.objects_max > 0 and (last + count) * BLOCK_BYTES <= device_bytes


LOG_BLOCKS_MIN: Final = 64
"""The reserve for removals and two groups of the largest names must leave room for a snapshot in between."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """Identity and layout of a volume. Written when it is formatted, and when it grows.

    Attributes:
        volume_id: 16 random bytes. Each block and header has them, so that an earlier volume's blocks are not accepted.
    """

    volume_id: bytes
    pool_id: bytes  # id of the pool, 16 bytes
    device_bytes: int  # used bytes of the device
    created_ms: int  # Unix time
    layout: Layout  # position of the parts
    incompatible: int = 0  # a bit for each change that readers of this version must not ignore; 0

    def with_size_of(self, other: "Superblock") -> "Superblock":
        """Return this volume's superblock after growing to the size of another superblock."""
        layout = replace(self.layout, data_blocks=other.layout.data_blocks)
        return replace(self, device_bytes=other.device_bytes, layout=layout)

    def pack(self) -> bytes:
        layout = self.layout
        beginning = _SUPERBLOCK_MAGIC, VERSION, _SUPERBLOCK.size, 0
        identity = self.volume_id, self.pool_id, self.device_bytes, self.created_ms, self.incompatible
        sizes = BLOCK_BYTES, layout.objects_max
        log = *layout.log_firsts, layout.log_blocks
        snapshots = *layout.snapshot_firsts, layout.snapshot_blocks
        fields = *beginning, *identity, *sizes, *log, *snapshots, layout.data_first, layout.data_blocks
        return _pack_block(_SUPERBLOCK, _CRC_AT_SUPERBLOCK, *fields)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Superblock | None":
        """Return a block's superblock; None for other content, and for a damaged block.

        Raises:
            FormatError: The block is sound but of a newer version.
        """
        if len(data) != BLOCK_BYTES or bytes(data[:8]) != _SUPERBLOCK_MAGIC:
            return None
        fields = _SUPERBLOCK.unpack_from(data)
        _, version, _, crc, volume_id, pool_id, device_bytes, created_ms, incompatible, block_bytes = fields[:10]
        if crc != _checksum(data, _CRC_AT_SUPERBLOCK):
            return None
        if version != VERSION or incompatible:
            raise FormatError(
                f"a volume of format version {version} with features {incompatible:#x}: this build reads version "
                f"{VERSION} without any; use the build that wrote it, or format the device again, which drops it all"
            )
        layout = Layout(
            objects_max=fields[10],
            log_firsts=fields[11:13],
            log_blocks=fields[13],
            snapshot_firsts=fields[14:16],
            snapshot_blocks=fields[16],
            data_first=fields[17],
            data_blocks=fields[18],
        )
        if block_bytes != BLOCK_BYTES or not layout.check(device_bytes):
            return None
        return cls(volume_id, pool_id, device_bytes, created_ms, layout)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The header of a block of records, in the log or in a snapshot."""

    count: int  # number of records, at most 31
    sequence: int  # log: number since the volume was formatted, from 1. Snapshot: position in the snapshot, from 0
    epoch: int  # log: random number of the process run that wrote it. Snapshot: the snapshot's generation
    previous_epoch: int  # log: epoch of the previous block. Snapshot: 0
    durable: int  # log: last block that was known to be durable when this one was written. Snapshot: 0


def pack_block(magic: bytes, volume_id: bytes, header: BlockHeader, records: bytes | bytearray | memoryview) -> bytes:
    """Return a block with up to 31 records."""
    numbers = header.sequence, header.epoch, header.previous_epoch, header.durable
    return _pack_block(_BLOCK, _CRC_AT_BLOCK, magic, VERSION, header.count, 0, volume_id, *numbers, records=records)


def pack_blocks(
    target: memoryview,
    magic: bytes,
    volume_id: bytes,
    records: memoryview,
    header_of: Callable[[int, int], BlockHeader],
) -> int:
    """Write blocks with these records into ``target``; return their number.

    ``header_of`` returns the header of a block by its position and its number of records.
    """
    blocks = -(-len(records) // RECORDS_BYTES)
    for block in range(blocks):
        part = records[block * RECORDS_BYTES : (block + 1) * RECORDS_BYTES]
        packed = pack_block(magic, volume_id, header_of(block, len(part) // RECORD_BYTES), part)
        target[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = packed
    return blocks


def unpack_block(magic: bytes, volume_id: bytes, data: memoryview | bytes) -> BlockHeader | None:
    """Return the header of a block of this volume; None for other content, and for a damaged block."""
    found, version, count, crc, volume, *numbers = _BLOCK.unpack_from(data)
    if found != magic or volume != volume_id or version != VERSION or count > RECORDS_PER_BLOCK:
        return None
    if crc != _checksum(data, _CRC_AT_BLOCK):
        return None
    return BlockHeader(count, *numbers)


class SnapshotHeader(NamedTuple):
    """Completes a snapshot: it is written after the blocks behind it."""

    generation: int  # number of the snapshot, from 1; it is in region ``generation % 2``
    blocks: int  # number of blocks that follow
    records: int  # number of records in them
    log_first: int  # first block of the log to replay
    log_epoch: int  # epoch of the block before that; 0 if there is none
    log_last: int  # the log was durable up to this block: the last one whose changes the snapshot may have
    created_ms: int  # Unix time

    def pack(self, volume_id: bytes) -> bytes:
        return _pack_block(_SNAPSHOT, _CRC_AT_BLOCK, _HEADER_MAGIC, VERSION, _SNAPSHOT.size, 0, volume_id, *self)

    @classmethod
    def unpack(cls, data: memoryview | bytes, volume_id: bytes, layout: Layout, region: int) -> "SnapshotHeader | None":
        """Return the header of a snapshot of this volume; None for other content, and for a damaged block."""
        magic, version, _, crc, volume, *numbers = _SNAPSHOT.unpack_from(data)
        header = cls(*numbers)
        if magic != _HEADER_MAGIC or volume != volume_id or version != VERSION or crc != _checksum(data, _CRC_AT_BLOCK):
            return None
        if header.generation % 2 != region or not 0 < header.log_first <= header.log_last + 1:
            return None
        if header.blocks > layout.snapshot_blocks - 1 or header.records > header.blocks * RECORDS_PER_BLOCK:
            return None
        return header


def pack_record(
    kind: RecordKind,
    tenant: int,
    key: bytes,
    *,
    flags: int = 0,
    extent: int = 0,
    length: int = 0,
    pinned_until_s: int = 0,
    generation: int = 0,
    expires_at_ms: int = 0,
) -> bytes:
    """Return one record of 128 bytes (``struct ss_index_record``); ``key`` has 32 bytes, or none."""
    fields = tenant, extent, length, 0, 0, pinned_until_s, generation, expires_at_ms, key, NO_PARENT
    return IndexEntry(kind, flags, 0, 0, *fields).pack()


def pack_name(kind: RecordKind, tenant: int, key: bytes, name: bytes) -> bytes:
    """Return the records of a text of any length (kind NAME or TENANT), in pieces of 80 bytes."""
    starts = range(0, max(len(name), 1), NAME_PIECE_BYTES)
    pieces = [(start, name[start : start + NAME_PIECE_BYTES]) for start in starts]
    return b"".join(_NAME.pack(kind, 0, 0, tenant, len(piece), start, len(name), key, piece) for start, piece in pieces)


def unpack_name(record: bytes | memoryview) -> tuple[RecordKind, int, bytes, int, int, bytes] | None:
    """Return kind, tenant, key, start of the piece, length of the text, and the piece; None for impossible fields."""
    kind, _, _, tenant, count, start, length, key, piece = _NAME.unpack_from(record)
    if kind not in (RecordKind.NAME, RecordKind.TENANT) or start % NAME_PIECE_BYTES or length > NAME_BYTES_MAX:
        return None
    if count != min(NAME_PIECE_BYTES, length - start) or (start >= length and start > 0):
        return None
    return RecordKind(kind), tenant, key, start, length, piece[:count]
