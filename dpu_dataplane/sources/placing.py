"""What brings chunks of pages straight into an engine's paged memory: a part that a source may have."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpu_dataplane.jobs import Job, Stop
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags

__all__ = ["PageOrder", "Placed", "Placing"]


@dataclass(frozen=True)
class PageOrder:
    """Chunks that are wanted.

    Attributes:
        keys: of their records, a chain.
        layout: that they have.
        address: of the paged memory, here.
        first: of each layer, where block 0's page begins in it, in bytes.
        stride: bytes from one block's page to the next one's.
        blocks: [chunk, block]: where each chunk goes.
        word: address of the word that is told how many leading layers are in place meanwhile; 0 for none.
    """

    keys: Sequence[bytes]
    layout: ChunkLayout
    address: int
    first: Sequence[int]
    stride: int
    blocks: npt.NDArray[np.uint32]
    word: int

    def part(self, first: int, end: int) -> "PageOrder":
        """Return the order of some of the chunks, which tells of no layers: those of other chunks are not there yet."""
        return replace(self, keys=self.keys[first:end], blocks=self.blocks[first:end], word=0)


class Placed(NamedTuple):
    """What became of an order.

    Attributes:
        delivered: by layer and chunk, what is in place.
        rotten: indexes of chunks that are not what was stored.
        stop: the job ended before the order was done.
    """

    delivered: Flags
    rotten: list[int]
    stop: Stop | None


class Placing(ABC):
    """Brings whole chunks from devices, with no other memory between. What it lacks may be had another way.

    *Quiet.* Once :meth:`place` has returned nothing lands in the paged memory any more; it waits for that however long
    a device takes, since what a device has been asked for cannot be called back.
    """

    @abstractmethod
    def register(self, memory: memoryview) -> None:
        """Make paged memory known to all devices, which takes as long as finding its pages: not on the event loop."""

    @abstractmethod
    def unregister(self, memory: memoryview) -> None:
        """Have devices forget it."""

    @abstractmethod
    async def place(self, job: Job, order: PageOrder) -> Placed:
        """Bring the leading chunks that lie on devices as pages, layer after layer, and compare them with checksums."""
