"""Read-through fill: records that another source delivers are kept in the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Stored
from dpu_dataplane.sources.tiers.tiers import Tiers
from shadowserve import native
from shadowserve.native import Result
from shadowserve.pieces import Flags


@dataclass(frozen=True)
class _Fill:
    key: bytes
    piece_ids: list[int]
    memory: memoryview
    header: bytes


class ReadThroughFill:
    """Memory of the pool for a plan's records from another source; a BatchHook.

    A record that the plan reads completely is received into memory of the pool, decoded from there, and enters the pool
    once all of its pieces were sound. Nothing is copied. A record without room is delivered and not kept.
    """

    def __init__(self, tiers: Tiers, plan: FetchPlan, local: Flags) -> None:
        self._tiers = tiers
        self._fills: list[_Fill] = []
        self._memory: dict[int, memoryview] = {}  # of pieces
        pieces: dict[bytes, list[int]] = {}
        for piece in np.flatnonzero(~local).tolist():
            pieces.setdefault(plan.keys[piece], []).append(piece)
        for index, (key, piece_ids) in enumerate(pieces.items()):
            stored = plan.records.get(key)
            if stored is not None and not self._prepare(key, piece_ids, stored, plan.pieces):
                tiers.note_dropped(len(pieces) - index)  # there is no memory for later records, either
                break

    def _prepare(self, key: bytes, piece_ids: list[int], stored: Stored, table: npt.NDArray[np.void]) -> bool:
        """Allocate memory for a record if the plan reads all of it; return False if there is none."""
        size = stored.header_bytes
        if not size or int(table["body_length"][piece_ids].sum()) != stored.length - size:
            return True
        try:
            memory = self._tiers.allocate(stored.length)
        except MemoryError:
            memory = None
        if memory is None:
            return False
        header = bytes(stored.header[:size])
        memory[:size] = header
        self._fills.append(_Fill(key, piece_ids, memory, header))
        for piece in piece_ids:
            first = int(table[piece]["record_offset"])
            self._memory[piece] = memory[first : first + int(table[piece]["body_length"])]
        return True

    def attach(self, batch: native.Batch, piece_ids: Sequence[int]) -> None:
        """Make the batch leave the bodies in the pool's memory."""
        if self._memory:
            for row, piece in enumerate(piece_ids):
                if (memory := self._memory.get(piece)) is not None:
                    batch.leave(row, memory)

    def finish(self, results: npt.NDArray[np.uint32] | None) -> None:
        """Add the complete records to the pool and free the memory of the others; None: nothing was delivered."""
        for fill in self._fills:
            complete = results is not None and bool((results[fill.piece_ids] == Result.OK).all())
            if complete and self._tiers.add(fill.key, fill.memory, fill.header) is not None:
                self._tiers.note_dropped()
            self._tiers.free(fill.memory)
        self._fills.clear()
