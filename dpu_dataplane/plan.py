"""A fetch's plan: the pieces that one call delivers, and the batches that move them.

A piece is consecutive layers of one chunk of one group. Its id is its row in the plan's tables, for the fetcher, the
sources and the local tiers; :meth:`FetchPlan.batch` maps ids to rows of the C core's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from dpu_dataplane.registrations import Registration
from dpu_dataplane.sources.found import Fault, Found, Stored, Unanswered
from shadowserve import native
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, leading_chunks, leading_layers, unpack

PROGRESS_BYTES: Final = 4  # size of the word that receives a fetch's progress


class FetchPart:
    """The wanted pieces of one group, where they go, and which of them are delivered.

    Args:
        length: Bytes from ``offset`` on that may be written.
        wanted: Wanted pieces as on the wire; empty for all. ValueError if it is of other layers or chunks.
        window: Layers of each chunk that the region holds; by default all.

    Attributes:
        wanted, delivered, remaining: Pieces by layer and chunk; those that this call may still deliver remain.
        truncated: Some wanted pieces are not delivered by this call: they do not fit the region or the budget.
        found: Answers of the source for chunks with remaining pieces; chunks without an entry were not looked up yet.
    """

    def __init__(
        self,
        registration: Registration,
        layout: ChunkLayout,
        offset: int,
        length: int,
        keys: Sequence[bytes],
        wanted: bytes,
        window: range | None = None,
    ) -> None:
        self.registration, self.offset, self.length = registration, offset, length
        self.layout = layout
        self.keys = keys
        self.window = window or range(layout.layers)
        self._wanted = wanted
        pieces = unpack(wanted, layout.layers, len(keys))
        if pieces[: self.window.start].any() or pieces[self.window.stop :].any():
            raise ValueError(f"pieces of other layers than {self.window.start} to {self.window.stop - 1}")
        self.wanted = self.delivered = self.remaining = np.zeros((0, 0), np.bool_)
        self.truncated = False
        self.found: Mapping[int, Found] = {}

    def start(self, chunks_max: int, layers_max: int) -> None:
        """Allocate the sets, and limit the call to the first wanted chunks and layers.

        Called in the fetch's turn: fetches in the queue take no memory for their sets.
        """
        shape = self.layout.layers, len(self.keys)
        self.wanted = unpack(self._wanted, *shape)
        if not self._wanted:
            self.wanted[self.window.start : self.window.stop] = True
        self.delivered = np.zeros(shape, np.bool_)
        self.remaining = self.wanted.copy()
        self.drop_from(self.length // self.chunk_bytes)
        wanted = np.flatnonzero(self.wanted.any(axis=0))
        if len(wanted) > chunks_max:
            self.drop_from(int(wanted[chunks_max]))
        wanted = np.flatnonzero(self.wanted.any(axis=1))
        if len(wanted) > layers_max:
            self.remaining[int(wanted[layers_max]) :] = False
        self.truncated = bool((self.wanted & ~self.remaining).any())

    @property
    def piece_bytes(self) -> int:
        """Bytes of one layer of a chunk in the registered memory."""
        return self.layout.raw_bytes // self.layout.layers

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in the registered memory: of the window's layers."""
        return len(self.window) * self.piece_bytes

    def drop_from(self, chunk: int) -> None:
        self.remaining[:, chunk:] = False

    def delivered_with(self, layers: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint32]) -> Flags:
        """Return ``delivered`` plus some pieces, given by a row [first layer, end) and a chunk for each."""
        delivered = self.delivered.copy()
        counts = layers[:, 1] - layers[:, 0]
        piece = np.repeat(np.arange(len(layers)), counts)
        before = np.cumsum(counts) - counts
        delivered[layers[piece, 0] + np.arange(len(piece)) - before[piece], chunks[piece]] = True
        return delivered

    def mark_delivered(self, layers: npt.NDArray[np.int64], chunks: npt.NDArray[np.uint32]) -> None:
        self.delivered = self.delivered_with(layers, chunks)
        self.remaining &= ~self.delivered

    def native_group(self) -> native.Group:
        return self.registration.group(self.layout, self.offset, self.length)


@dataclass(frozen=True)
class GroupEnd:
    """The chunk from which on a group cannot be delivered: it is faulty, unanswered, or (with neither) not stored."""

    chunk: int
    fault: Fault | None = None
    unanswered: Unanswered | None = None


class BatchHook(Protocol):
    """A supplier or receiver of record bytes beside the source: local hits, read-through fill."""

    def attach(self, batch: native.Batch, piece_ids: Sequence[int]) -> None:
        """Connect a new batch, whose rows are these pieces. The batch of an earlier call is released by then."""
        ...


@dataclass(frozen=True)
class FetchPlan:
    """The pieces of one batch on paper, in the order in which they are wanted, and how to deliver them.

    A piece whose ``origin`` is not SERVER is supplied by a hook: the source only has to include it in a batch.
    """

    parts: Sequence[FetchPart]  # the fetch's parts; a piece's ``group`` is an index into them
    keys: Sequence[bytes]  # key of each piece's record
    pieces: npt.NDArray[np.void]  # PIECE_DTYPE array, a row for each piece
    slices: npt.NDArray[np.void]  # SLICE_DTYPE array
    layers: npt.NDArray[np.int64]  # for each piece the first layer and the end of its layers
    full: bool = False  # the buffers hold no more, though more pieces are wanted
    ends: Mapping[int, GroupEnd] = field(default_factory=dict)  # of groups that cannot be delivered completely
    layerwise: bool = False  # pieces come layer by layer, one layer in each piece
    deadline_ns: int = 0  # deadline of a batch, on the clock of ``time.monotonic_ns()``
    rate: int = 0  # bytes per second that are delivered at most; 0 for no limit
    word: native.Region | None = None  # receives the number of leading layers in place, or of chunks in their order
    authoritative: bool = False  # read from the master of each key, not from a replica that may lag behind
    window_s: float = 0.0  # seconds that the engine computes with each layer; 0 if not known
    records: Mapping[bytes, Stored] = field(default_factory=dict)  # found ones, for a source that keeps them
    hooks: Sequence[BatchHook] = ()  # connected to each batch

    def leading(self, count: int) -> Self:
        if count == len(self.pieces):
            return self
        return replace(self, keys=self.keys[:count], pieces=self.pieces[:count], layers=self.layers[:count])

    def batch(self, piece_ids: Sequence[int]) -> native.Batch:
        """Make the pipeline's batch of some pieces, in ascending order. The caller releases it before the next one."""
        whole = len(piece_ids) == len(self.pieces)
        batch = native.Batch(
            pieces=self.pieces if whole else self.pieces[list(piece_ids)],
            slices=self.slices,
            groups=[part.native_group() for part in self.parts],
            deadline_ns=self.deadline_ns,
            progress=None if self.word is None else self._progress(self.word, piece_ids),
            rate=self.rate,
        )
        for hook in self.hooks:
            hook.attach(batch, piece_ids)
        return batch

    def _progress(self, word: native.Region, piece_ids: Sequence[int]) -> native.Progress:
        """Return how far the fetch is before a batch, and how far the batch can bring it."""
        included = np.zeros(len(self.pieces), np.bool_)
        included[list(piece_ids)] = True
        after = []
        for group, part in enumerate(self.parts):
            mine = included & (self.pieces["group"] == group)
            after.append(part.delivered_with(self.layers[mine], self.pieces["chunk"][mine]))
        before = [part.delivered for part in self.parts]
        return native.Progress(word=word, first=self._leading_count(before), end=self._leading_count(after))

    def _leading_count(self, delivered: Sequence[Flags]) -> int:
        """Return the number of leading layers or chunks that are in place of every part."""
        if self.layerwise:
            return min(leading_layers(each, part.wanted) for each, part in zip(delivered, self.parts, strict=True))
        counts = [leading_chunks(each, part.wanted) for each, part in zip(delivered, self.parts, strict=True)]
        ends = [len(part.keys) for part in self.parts]
        return min((count for count, end in zip(counts, ends, strict=True) if count < end), default=max(ends))
