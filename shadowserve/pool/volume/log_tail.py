"""The tail of a log: blocks that no later block proves to be flushed, of a run that has died.

One flush makes a group's blocks and its objects durable together. A power cut may keep a block and lose the bytes of
one of its objects, which was never acknowledged; but the value that it would have replaced may have been, and is still
in place. So the objects of these blocks are read, and a put without its bytes is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowserve.native import (
    INDEX_RECORD_DTYPE,
    OBJECT_HEADER_BYTES,
    IndexEntry,
    RecordFlag,
    RecordKind,
    Result,
    check_object,
    object_units,
)
from shadowserve.pool.volume.format import object_fields

Key = tuple[int, bytes]
"""Tenant and key, as in the index."""
Records = npt.NDArray[Any]
ReadBlocks = Callable[[int, int], npt.NDArray[np.uint8] | None]
"""Returns blocks of the device, by first block and count; None if some cannot be read."""


@dataclass(slots=True)
class LogTail:
    """Records that wait for proof that they are durable."""

    proven: int = 0  # last block of the log that is known to be durable
    torn: dict[Key, None] = field(default_factory=dict)  # keys whose last put in the tail has lost its bytes
    _blocks: list[tuple[int, Records]] = field(default_factory=list)

    def hold(self, sequence: int, records: Records) -> None:
        self._blocks.append((sequence, records))

    def take_proven(self) -> Records:
        count = 0
        while count < len(self._blocks) and self._blocks[count][0] <= self.proven:
            count += 1
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        return _joined([records for _, records in taken])

    def judge(self, blocks: int, read: ReadBlocks) -> Records:
        """Return all remaining records, without the puts whose objects are not there; ``blocks``: of the device."""
        records = _joined([each for _, each in self._blocks])
        self._blocks.clear()
        kept = np.ones(len(records), dtype=np.bool_)
        for at, record in enumerate(records):
            kind = int(record["kind"])
            key = int(record["tenant"]), record["key"].tobytes()
            if kind == RecordKind.PUT:
                kept[at] = _is_complete(IndexEntry.unpack(record.tobytes()), blocks, read)
                self.torn.pop(key, None)
                if not kept[at]:
                    self.torn[key] = None
            elif kind == RecordKind.REMOVE:
                self.torn.pop(key, None)
            elif kind == RecordKind.CLEAR:
                everybody = bool(record["flags"] & RecordFlag.EVERY_TENANT)
                self.torn = {key: None for key in self.torn if not everybody and key[0] != record["tenant"]}
            elif kind in (RecordKind.EXPIRE, RecordKind.PIN):
                kept[at] = key not in self.torn  # they belong to a put that is dropped
        return np.ascontiguousarray(records[kept])


def _joined(parts: list[Records]) -> Records:
    return np.concatenate(parts) if parts else np.zeros(0, INDEX_RECORD_DTYPE)


def _is_complete(entry: IndexEntry, blocks: int, read: ReadBlocks) -> bool:
    """Return whether the object of a put is in its extent. One that cannot be read counts: each read checks it."""
    if entry.extent + entry.blocks > blocks:
        return True  # the index refuses its record
    blocks_read = read(entry.extent, entry.blocks)
    if blocks_read is None:
        return True
    content = memoryview(blocks_read)
    first, units = object_units(entry.length, 0, entry.length)
    value = content[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + entry.length]
    return check_object(content, object_fields(entry), value, first, units) is Result.OK
