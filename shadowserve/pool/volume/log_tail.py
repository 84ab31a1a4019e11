"""The end of a log: blocks of which nothing says that their flush was complete when their run died.

One flush makes a group's blocks and its objects durable. Cut short by a power cut, it may have kept a block and lost
the bytes of an object in it. Nobody was told that such an object is stored; but what it would have replaced may have
been acknowledged, and lies untouched where it was. So what these blocks put is read: a put without its bytes is none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowserve.native import INDEX_RECORD_DTYPE, IndexEntry, ObjectFields, Result, check_object, object_units
from shadowserve.pool.volume.format import BLOCK_BYTES, OBJECT_HEADER_BYTES, RecordFlag, RecordKind, blocks_of

Key = tuple[int, bytes]
"""Tenant and key, as the index has them."""
Records = npt.NDArray[Any]
ReadBlocks = Callable[[int, int], npt.NDArray[np.uint8] | None]
"""Returns so many blocks of the device from one on; None if some cannot be read."""


@dataclass(slots=True)
class LogTail:
    """Records that are held back until it is known whether they count.

    Attributes:
        proven: the last block of the log that is known to have been durable.
        torn: keys whose last put in the tail never was.
    """

    proven: int = 0
    torn: dict[Key, None] = field(default_factory=dict)
    _blocks: list[tuple[int, Records]] = field(default_factory=list)

    def hold(self, sequence: int, records: Records) -> None:
        """Keep the records of a block that is not proven."""
        self._blocks.append((sequence, records))

    def take_proven(self) -> Records:
        """Return the records of blocks that have been proven meanwhile."""
        count = 0
        while count < len(self._blocks) and self._blocks[count][0] <= self.proven:
            count += 1
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        return _joined([records for _, records in taken])

    def judge(self, blocks: int, read: ReadBlocks) -> Records:
        """Return the records of all that is left, without those of puts whose objects are not there.

        Args:
            blocks: that the device has.
            read: reads blocks of it.
        """
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
                kept[at] = key not in self.torn  # they are about the put that never was
        return np.ascontiguousarray(records[kept])


def _joined(parts: list[Records]) -> Records:
    return np.concatenate(parts) if parts else np.zeros(0, INDEX_RECORD_DTYPE)


def _is_complete(entry: IndexEntry, blocks: int, read: ReadBlocks) -> bool:
    """Return whether the object that a put names is where it says, for all that is known.

    Where it cannot be read, nobody knows: it is believed, and whoever reads it checks it.
    """
    count = blocks_of(entry.length, entry.name_blocks)
    if entry.extent + count > blocks:
        return True  # the index refuses it
    blocks_read = read(entry.extent, count)
    if blocks_read is None:
        return True
    content = memoryview(blocks_read)
    expected = ObjectFields(
        key=entry.key,
        tenant=entry.tenant,
        length=entry.length,
        generation=entry.generation,
        head_length=entry.head_length,
        flags=entry.flags,
    )
    first, units = object_units(entry.length, 0, entry.length)
    value = content[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + entry.length]
    return check_object(content[: count * BLOCK_BYTES], expected, value, first, units) is Result.OK
