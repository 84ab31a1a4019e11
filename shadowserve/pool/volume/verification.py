"""Offline check of a volume without changes: superblocks, log, snapshots, and every object."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shadowserve import record
from shadowserve.errors import RecordError
from shadowserve.native import (
    OBJECT_HEADER_BYTES,
    Index,
    IndexEntry,
    RecordFlag,
    Result,
    check_object,
    check_object_name,
    object_header,
    object_units,
)
from shadowserve.pool.volume.block_reader import BlockReader, read_superblocks
from shadowserve.pool.volume.device import BlockDevice
from shadowserve.pool.volume.format import BLOCK_BYTES, SUPERBLOCK_OFFSETS, FormatError, Superblock, object_fields
from shadowserve.pool.volume.formatting import find_objection
from shadowserve.pool.volume.recovery import Recovery, RecoveryReport
from shadowserve.pool.volume.repair import BadCopies, find_bad_copies
from shadowserve.pool.volume.signature_check import DAMAGED_VOLUME, describe_content

_SLICE_RECORDS: Final = 8192
_OBJECTS_MAX: Final = 1 << 30
"""Most objects of an index."""

Progress = Callable[[int, int], None]
"""Called with the number of checked bytes, and of all bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem."""

    part: str  # device, superblock, size, log, snapshot, index or object
    where: str  # block or key
    what: str  # description


@dataclass(slots=True)
class Verification:
    """Result of a check of one volume; ``superblock`` is None if there is no volume."""

    superblock: Superblock | None = None
    report: RecoveryReport | None = None
    objects: int = 0
    object_bytes: int = 0
    snapshot_generation: int = 0
    log_blocks_used: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.findings


def verify_volume(device: BlockDevice, *, objects: bool = True, progress: Progress | None = None) -> Verification:
    """Check a volume that no server uses; with ``objects`` every object too, which calls ``progress``."""
    found = Verification()
    try:
        damaged = _check_superblocks(found, device)
        if damaged is not None:
            _check_volume(found, device, damaged, progress or (lambda _done, _total: None) if objects else None)
    except (FormatError, OSError) as error:  # the same message as a server's
        part = "device" if isinstance(error, OSError) else "superblock"
        found.findings.append(Finding(part, "", str(error)))
    return found


def _check_superblocks(found: Verification, device: BlockDevice) -> list[int] | None:
    """Check the superblocks; return the damaged copies, None if the check ends here."""
    found.superblock, damaged = read_superblocks(BlockReader(device), device)
    if found.superblock is None:
        content = describe_content(device) or "nothing"
        hint = "; neither copy of its superblock is sound" if DAMAGED_VOLUME in content else ""
        problem = f"there is no volume; the device holds {content}{hint}"
        found.findings.append(Finding("superblock", device.name, problem))
        return None
    objection = find_objection(found.superblock, damaged, device)
    if objection is not None:
        found.findings.append(Finding(objection.part, "", objection.what))
        return None
    return damaged


def _check_volume(found: Verification, device: BlockDevice, damaged: list[int], progress: Progress | None) -> None:
    """Check log and snapshots, and with ``progress`` the objects."""
    assert found.superblock is not None
    reader = BlockReader(device)
    for copy in damaged:
        where = f"block {SUPERBLOCK_OFFSETS[copy] // BLOCK_BYTES}"
        found.findings.append(Finding("superblock", where, "this copy is not sound; opening the volume repairs it"))
    index = Index(min(found.superblock.layout.objects_max * 2 + 1024, _OBJECTS_MAX))
    recovery = Recovery(reader, found.superblock, index, 0)
    end = recovery.run()
    index.replayed()
    recovery.drop_nameless()
    found.report = recovery.report
    found.snapshot_generation = recovery.generation_newest
    found.log_blocks_used = end.sequence - end.first
    _check_recovery(found, recovery.report, find_bad_copies(reader, found.superblock, recovery.epochs))
    found.objects = index.totals().objects
    found.object_bytes = index.totals().bytes
    if progress is not None:
        for tenant, key in end.torn:
            where = f"key {key.hex()} of tenant {tenant}"
            problem = "its bytes are not those that were stored, or a crash cut them short; opening the volume drops it"
            found.findings.append(Finding("object", where, problem))
        _check_objects(found, reader, index, progress)


def _check_recovery(found: Verification, report: RecoveryReport, bad_copies: Iterable[BadCopies]) -> None:
    for note in report.notes:
        found.findings.append(Finding("log" if "of the log" in note else "snapshot", "", note))
    for bad in bad_copies:
        for sequence in range(bad.sequence, bad.sequence + bad.count):
            where = f"block {sequence}, copy {bad.copy}"
            problem = "this copy is not sound, the other one is; opening the volume repairs it"
            found.findings.append(Finding("log", where, problem))
    if report.refused:
        found.findings.append(Finding("index", "", f"{report.refused} records have impossible fields"))
    if report.dropped:
        found.findings.append(Finding("index", "", f"{report.dropped} objects cannot be kept"))


def _check_objects(found: Verification, reader: BlockReader, index: Index, progress: Progress) -> None:
    everything = np.concatenate([records.copy() for records in index.dump_all(_SLICE_RECORDS)])
    done = 0
    for each in everything[np.argsort(everything["extent"], kind="stable")]:
        entry = IndexEntry.unpack(each.tobytes())
        problem = _check_object(reader, entry)
        if problem is not None:
            where = f"key {entry.key.hex()} of tenant {entry.tenant}, block {entry.extent}"
            found.findings.append(Finding("object", where, problem))
        done += entry.blocks * BLOCK_BYTES
        progress(done, found.object_bytes)


def _check_object(reader: BlockReader, entry: IndexEntry) -> str | None:
    blocks = range(entry.extent, entry.extent + entry.blocks)
    content = memoryview(reader.array(blocks.start, len(blocks)))
    if reader.unreadable.intersection(blocks):
        return f"it cannot be read: {reader.unreadable_error()}"
    end = OBJECT_HEADER_BYTES + entry.length
    value = content[OBJECT_HEADER_BYTES:end]
    first, count = object_units(entry.length, 0, entry.length)
    result = check_object(content, object_fields(entry), value, first, count)
    if result is Result.OK:
        result = check_object_name(content, content[end : end + object_header(content).name_length])
    if result is not Result.OK:
        return _PROBLEMS.get(result, result.name.lower())
    if entry.flags & RecordFlag.RECORD:
        try:
            record.verify(value, entry.key)
        except RecordError as error:
            return f"its bytes are those that were stored, but no sound record: {error}"
    return None


_PROBLEMS: Final = {
    Result.BAD_DATA: "there is no object",
    Result.CHECKSUM: "its bytes are not those that were stored",
    Result.NOT_FOUND: "another object is there",
}
