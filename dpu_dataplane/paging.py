"""Paged memory of an engine: where its pages are, as it says, and whether that can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["PAGE_ALIGNMENT", "Paging", "PagingError"]

PAGE_ALIGNMENT: Final = 4096
"""Of pages and of what lies between them: any device reaches memory in such pieces past the page cache."""


class PagingError(ShadowServeError):
    """Pages that cannot be where they are said to be, or cannot be reached there."""


@dataclass(frozen=True)
class Paging:
    """Where pages are in a segment of shared memory. A page is what a layer keeps of a block.

    Attributes:
        first: of each layer, where block 0's page begins, in bytes.
        stride: bytes from one block's page to the next one's.
        blocks: of each layer.
        page_bytes: of a page.
    """

    first: tuple[int, ...]
    stride: int
    blocks: int
    page_bytes: int

    @classmethod
    def of(cls, message: pb.PagedMemory, layout: ChunkLayout, size: int) -> Self:
        """Return what a message says of a segment of ``size`` bytes that takes chunks of ``layout``.

        Raises:
            PagingError: it cannot be so.
        """
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
        """Return [chunk, block] of a call, every one of which is there.

        Raises:
            PagingError: there are not as many as chunks take, or one of them is not there.
        """
        numbers = np.array(blocks, np.uint32)
        if len(numbers) != chunks * chunk_blocks or (numbers >= self.blocks).any():
            raise PagingError(
                f"blocks has {len(numbers)} numbers up to {numbers.max(initial=0)}; {chunks} chunks take {chunk_blocks}"
                f" each, of {self.blocks} that there are"
            )
        return numbers.reshape(chunks, chunk_blocks)
