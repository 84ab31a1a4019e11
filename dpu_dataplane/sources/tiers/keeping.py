"""Records of another source that are kept in the pool as they are delivered.

A record of which all is ordered is received in memory of the pool, decoded from there, and is the pool's when every
piece of it was sound: nothing is copied, and nobody waits for more. Where the pool has no memory to spare, it is
delivered and not kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpu_dataplane.sources.source import Stored, head_size
from dpu_dataplane.sources.tiers.supplies import Supplies
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve.native import Result

__all__ = ["Keeping"]


@dataclass(frozen=True)
class _Kept:
    key: bytes
    indexes: list[int]
    memory: memoryview
    head: bytes


class Keeping:
    """Memory for what an order brings from below.

    Args:
        tiers: with the pool.
        supplies: of the order.
        found: what is known of the order's records.
    """

    def __init__(self, tiers: Tiers, supplies: Supplies, found: Mapping[bytes, Stored]) -> None:
        self._tiers = tiers
        self._kept: list[_Kept] = []
        order = supplies.order
        pieces: dict[bytes, list[int]] = {}
        for index in np.flatnonzero(~supplies.near).tolist():
            pieces.setdefault(order.keys[index], []).append(index)
        for place, (key, indexes) in enumerate(pieces.items()):
            stored = found.get(key)
            if stored is not None and not self._take(key, indexes, stored, order.pieces, supplies.places):
                tiers.note_dropped(len(pieces) - place)  # there is no memory for those behind, either
                break

    def _take(
        self,
        key: bytes,
        indexes: list[int],
        stored: Stored,
        table: npt.NDArray[np.void],
        places: dict[int, memoryview],
    ) -> bool:
        """Find memory for one record, if all of it is ordered; return False where there is none."""
        size = head_size(stored)
        if not size or int(table["body_length"][indexes].sum()) != stored.length - size:
            return True
        try:
            memory = self._tiers.room(stored.length)
        except MemoryError:
            memory = None
        if memory is None:
            return False
        head = bytes(stored.head[:size])
        memory[:size] = head
        self._kept.append(_Kept(key, indexes, memory, head))
        for index in indexes:
            first = int(table[index]["record_offset"])
            places[index] = memory[first : first + int(table[index]["body_length"])]
        return True

    def settle(self, results: npt.NDArray[np.uint32] | None) -> None:
        """Take in the records that have come, by the results of the order's pieces; None: none has."""
        for kept in self._kept:
            has_come = results is not None and bool((results[kept.indexes] == Result.OK).all())
            if has_come and self._tiers.enter(kept.key, kept.memory, kept.head) is not None:
                self._tiers.note_dropped()
            self._tiers.discard(kept.memory)
        self._kept.clear()
