"""Paged memory of an engine: the positions of its pages, and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb

PAGE_ALIGNMENT: Final = 4096
"""Alignment of pages and strides in bytes: direct I/O of any device can read into such memory."""


class PagingError(ShadowServeError):
    """The described pages are impossible, or devices cannot read into them."""


@dataclass(frozen=True)
class Paging:
    """The positions of pages in a segment of shared memory. A page holds one block of one layer."""

    first: tuple[int, ...]  # for each layer, the offset of block 0's page in bytes
    stride: int  # bytes from one block's page to the next block's page
    blocks: int  # number of blocks in each layer
    page_bytes: int  # size of a page in bytes

    @classmethod
    def of(cls, message: pb.PagedMemory, layout: ChunkLayout, size: int) -> Self:
        """Convert a message about a segment of ``size`` bytes; PagingError if the pages are impossible."""
        paging = cls(tuple(message.first), message.stride, message.blocks, layout.vector_length)
        row_bytes = layout.tokens * layout.vector_length
        if layout.dtype is not DType.UINT8 or layout.quantizer is not Quantizer.PASSTHROUGH or layout.kinds != 1:
            raise PagingError(
                "pages: a chunk of pages is of uint8 and one kind, by passthrough: a vector for each page"
            )
        if len(paging.first) != layout.layers or not paging.blocks:
            raise PagingError(f"pages has {len(paging.first)} layers of {paging.blocks} blocks, layout {layout.layers}")
        if any(number % PAGE_ALIGNMENT for number in (*paging.first, paging.stride, paging.page_bytes)):
            raise PagingError(f"pages do not begin and end at multiples of {PAGE_ALIGNMENT} bytes")
        if row_bytes > DECODED_BYTES_MAX:
            raise PagingError(f"pages of one layer and chunk have {row_bytes} bytes; {DECODED_BYTES_MAX} are the most")
        if paging.stride < paging.page_bytes and paging.blocks > 1:
            raise PagingError(f"pages of {paging.page_bytes} bytes overlap: stride is {paging.stride}")
        if max(paging.first) + (paging.blocks - 1) * paging.stride + paging.page_bytes > size:
            raise PagingError(f"pages end outside the segment, which has {size} bytes")
        return paging

    def rows(self, blocks: Sequence[int], chunks: int, chunk_blocks: int) -> npt.NDArray[np.uint32]:
        """Return the block numbers of a call by chunk and position in the chunk; PagingError if they are impossible."""
        numbers = np.array(blocks, np.uint32)
        if len(numbers) != chunks * chunk_blocks or (numbers >= self.blocks).any():
            raise PagingError(
                f"blocks has {len(numbers)} numbers up to {numbers.max(initial=0)}; {chunks} chunks take {chunk_blocks}"
                f" each, and the segment has {self.blocks}"
            )
        return numbers.reshape(chunks, chunk_blocks)
