"""The interface for loading chunks of pages straight into an engine's paged memory; a source may implement it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpu_dataplane.jobs import Job, Stop
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags


@dataclass(frozen=True)
class PageRequest:
    """Chunks to load into paged memory."""

    keys: Sequence[bytes]  # keys of the chunks' records, a chain
    layout: ChunkLayout
    address: int  # address of the paged memory in this process
    first: Sequence[int]  # for each layer, the offset of block 0's page in bytes
    stride: int  # bytes from one block's page to the next block's page
    blocks: npt.NDArray[np.uint32]  # block numbers by chunk and position in the chunk
    word: int  # address of the word for the number of leading layers in place; 0 for none

    def part(self, first: int, end: int) -> "PageRequest":
        """Return the request of some chunks. It reports no layers: those of the other chunks are not in place yet."""
        return replace(self, keys=self.keys[first:end], blocks=self.blocks[first:end], word=0)


class LoadedPages(NamedTuple):
    """Result of a page request."""

    delivered: Flags  # pieces in place, by layer and chunk
    corrupt: list[int]  # indexes of chunks that differ from their checksums
    stop: Stop | None  # why the job ended before the request was done


class PageLoader(ABC):
    """Loads whole chunks from devices into paged memory, without a buffer between. The caller fetches other chunks.

    *Quiet.* Once :meth:`load` has returned, nothing is written to the paged memory any more. A read that a device has
    begun cannot be cancelled, so :meth:`load` waits for it, however long the device takes.
    """

    @abstractmethod
    def register(self, memory: memoryview) -> None:
        """Register paged memory with all devices. This pins its pages, which takes long: not on the event loop."""

    @abstractmethod
    def unregister(self, memory: memoryview) -> None: ...

    @abstractmethod
    async def load(self, job: Job, request: PageRequest) -> LoadedPages:
        """Load the leading chunks that devices hold as pages, layer by layer, and verify their checksums."""
