"""Groups SGLang's pages into the records that hold them, and names the records.

SGLang names a page by a chained hash: equal hashes mean equal tokens, equal extra keys and an equal prefix. A *block*
is consecutive pages in one record. Blocks have a few sizes: a chunk's pages, then a quarter of that, down to one page.
A block of ``n`` pages begins at a multiple of ``n``, so that calls that begin and end anywhere cover their pages with
few records, and find them again. The record's name has the hash of the block's last page and the number of pages: it
says all of the content. A call's pages follow each other, and only they are taken from a block that the call finds:
so a wrong position costs a hit and never gives wrong KV.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shadowserve.keys import KEY_BYTES, SEGMENT_CHUNKS

PAGES_MAX: Final = 64
"""Most pages of a block. SGLang stores and fetches 128 pages in one call."""
_STEP: Final = 4
_PREFIX: Final = b"shadowserve sglang block 1\0"
_SEGMENT_BYTES: Final = 8
_REMEMBERED_MAX: Final = 32768
_ASKED_MAX: Final = 256


def levels(page_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    """Return the pages of a block of each level, from the largest down to one page."""
    sizes = [min(max(-(-chunk_tokens // page_tokens), 1), PAGES_MAX)]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // _STEP if sizes[-1] % _STEP == 0 else 1)
    return tuple(sizes)


@dataclass(frozen=True)
class Block:
    """Consecutive pages of a prompt in one record: its level, its first page's index in the prompt, its hashes."""

    level: int
    first: int
    hashes: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.hashes)


@dataclass(frozen=True)
class Pages:
    """Pages of one call: hashes of the prompt's pages from its first page on, of which those from ``first`` count."""

    hashes: Sequence[str]
    first: int

    @classmethod
    def of(cls, keys: Sequence[str], prefix: Sequence[str] | None) -> "Pages":
        before = list(prefix or ())
        return cls([*before, *keys], len(before))

    @property
    def end(self) -> int:
        return len(self.hashes)

    def blocks(self, level: int, size: int, begin: int, end: int) -> Iterator[Block]:
        """Yield the aligned blocks of ``size`` pages whose last page is in ``[begin, end)``."""
        for last in range(begin - begin % size + size, end + 1, size):
            yield Block(level, last - size, tuple(self.hashes[last - size : last]))

    def cover(self, sizes: Sequence[int]) -> list[Block]:
        """Return the fewest blocks that hold exactly the pages that count."""
        found, begin = [], self.first
        while begin < self.end:
            level = next(i for i, size in enumerate(sizes) if begin % size == 0 and begin + size <= self.end)
            found.append(Block(level, begin, tuple(self.hashes[begin : begin + sizes[level]])))
            begin = found[-1].end
        return found


class BlockKeys:
    """Names blocks. ``model``: digest of the engine's model. ``largest``: pages of the largest blocks."""

    def __init__(self, model: bytes, largest: int) -> None:
        self._start = _PREFIX + model
        self._segment_pages = largest * SEGMENT_CHUNKS

    def __call__(self, block: Block, pages: Pages) -> bytes:
        """Return a block's key, 32 bytes, which ends with the name of its segment (:mod:`shadowserve.keys`)."""
        count = len(block.hashes).to_bytes(4, "little")
        segment = pages.hashes[block.first - block.first % self._segment_pages]
        name = hashlib.sha256(self._start + count + bytes.fromhex(block.hashes[-1])).digest()
        end = hashlib.sha256(self._start + b"segment" + bytes.fromhex(segment)).digest()
        return name[: KEY_BYTES - _SEGMENT_BYTES] + end[:_SEGMENT_BYTES]


class AskedPages:
    """Pages of lookups, by the first page of each fetch that follows.

    With pipeline parallelism, SGLang 0.5.23 tells lookups of a prompt's first page where it is, and not all fetches.
    """

    def __init__(self) -> None:
        self._asked: OrderedDict[str, tuple[Pages, int]] = OrderedDict()

    def add(self, pages: Pages, step: int) -> None:
        """Remember a lookup, whose pages are fetched ``step`` at a time. The oldest ones are forgotten."""
        for index in range(pages.first + step, pages.end, step):
            self._asked[pages.hashes[index]] = pages, index
            self._asked.move_to_end(pages.hashes[index])
        while len(self._asked) > _ASKED_MAX:
            self._asked.popitem(last=False)

    def placed(self, pages: Pages) -> Pages:
        """Return pages that come without those before them with these, if a lookup had them."""
        if pages.first or pages.hashes[0] not in self._asked:
            return pages
        asked, index = self._asked[pages.hashes[0]]
        return Pages.of(pages.hashes, asked.hashes[:index])


class FoundBlocks:
    """Stored blocks by page. One lookup of a prompt serves the fetches that follow."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, Block] = OrderedDict()

    def add(self, block: Block, first: int = 0) -> None:
        """Remember a block for those of its pages from ``first`` on that no other block holds.

        Pages before those of a call may not be those of the record, if SGLang leaves some out.
        """
        for page in block.hashes[max(first - block.first, 0) :]:
            self._blocks.setdefault(page, block)

    def update(self, others: "FoundBlocks") -> None:
        """Remember newer blocks instead of older ones. The oldest pages are forgotten."""
        for page, block in others._blocks.items():
            self._blocks[page] = block
            self._blocks.move_to_end(page)
        while len(self._blocks) > _REMEMBERED_MAX:
            self._blocks.popitem(last=False)

    def forget(self, block: Block) -> None:
        for page in block.hashes:
            if self._blocks.get(page) == block:
                del self._blocks[page]

    def holding(self, pages: Pages, index: int) -> Block | None:
        """Return a block that holds a prompt's page, and the pages around it as far as they are known."""
        block = self._blocks.get(pages.hashes[index])
        if block is None or not block.first <= index < block.end:
            return None
        known = tuple(pages.hashes[block.first : block.end])
        return block if known == block.hashes[: len(known)] else None

    def run(self, pages: Pages, index: int) -> int:
        """Return the first page from ``index`` on that no block holds."""
        while index < pages.end and (block := self.holding(pages, index)) is not None:
            index = min(block.end, pages.end)
        return index
