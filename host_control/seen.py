"""What a lookup has found: as the data plane answers, of one rank's records, and of all records that a chunk has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shadowserve.pieces import Flags, leading, unpack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier

__all__ = ["Chain", "Found", "Seen", "Tiers", "found_of"]

Tiers = npt.NDArray[np.uint8]
"""A :class:`~shadowserve.tier.Tier` for each chunk."""


class Found(NamedTuple):
    """Of each chain that was looked up, which records are there, which are published (None where nobody can say), the
    bytes of those that are there, all together, in how many seconds storage expects to have those of them nearer that
    are cold, and the :class:`~shadowserve.tier.Tier` of each record."""

    present: list[Flags]
    published: list[Flags] | None
    stored_bytes: list[int]
    cold_seconds: list[float]
    tiers: list[Tiers]


def found_of(answer: pb.LookupResponse, counts: Sequence[int]) -> Found:
    """Return what a lookup's answer says of chains of so many records.

    Raises:
        ValueError: no data plane answers that.
    """

    def sets(packed: Sequence[bytes]) -> list[Flags]:
        return [unpack(data, count) for data, count in zip(packed, counts, strict=True)]

    present = sets(answer.present)
    published = sets(answer.published) if answer.published else None
    for numbers, what in (answer.stored_bytes, "bytes"), (answer.cold_ms, "times"), (answer.tiers, "tiers"):
        if len(numbers) != len(counts):
            raise ValueError(f"{what} of {len(numbers)} chains where {len(counts)} were asked for")
    tiers = [np.frombuffer(each, np.uint8) for each in answer.tiers]
    for each, there in zip(tiers, present, strict=True):
        if len(each) != len(there) or not np.array_equal(each > Tier.NONE, there) or (each > Tier.COLD).any():
            raise ValueError("the tiers are not those of the chunks that are there")
    return Found(present, published, list(answer.stored_bytes), [ms / 1e3 for ms in answer.cold_ms], tiers)


class Chain(NamedTuple):
    """What is known of one rank's records of one group: which are there, which are published, bytes of the first, in
    how many seconds storage has those nearer that are cold, and where each is."""

    there: Flags
    soon: Flags | None
    stored_bytes: int
    cold_seconds: float
    tiers: Tiers

    @property
    def chunk_bytes(self) -> float:
        """Mean bytes of a record that is there."""
        return self.stored_bytes / max(int(self.there.sum()), 1)


@dataclass(frozen=True)
class Seen:
    """What a question about some chunk keys has found of the records of one shard_layout.

    Attributes:
        shard_layout: whose.
        present: of each group, which are there.
        there: which of them every group that keeps every chunk has.
        coming: which of the others are published; ``None`` where nobody can say.
        tiers: of each group, where each chunk is, the farthest of its records; 0 where it is not there.
        chunk_bytes: mean bytes of a chunk's records, of all groups and ranks together; 0 where nobody can say.
        cold_seconds: in how many storage expects to have nearer what is cold of them.
    """

    shard_layout: int
    present: list[Flags]
    there: Flags
    coming: Flags | None
    tiers: list[Tiers]
    chunk_bytes: float
    cold_seconds: float

    @classmethod
    def of(cls, shard_layout: int, count: int, answers: Sequence[Sequence[Chain]], every: Sequence[bool]) -> Self:
        """Return what the chains of each group say of so many chunks together.

        KV that one rank lacks is of no use, and so is a group's of which one part is missing.

        Args:
            shard_layout: whose.
            count: of chunks.
            answers: of each group, its chains.
            every: of each group, whether it keeps every chunk.
        """
        present = [np.logical_and.reduce([chain.there for chain in group]) for group in answers]
        waited = [group for group, each in zip(answers, every, strict=True) if each]
        all_of = np.ones(count, np.bool_)  # where no group keeps every chunk, there is none to wait for
        there = np.logical_and.reduce([all_of, *(chain.there for group in waited for chain in group)])
        usable = [all_of, *(each.there | each.soon for group in waited for each in group if each.soon is not None)]
        said = all(chain.soon is not None for group in waited for chain in group)
        coming = np.logical_and.reduce(usable) & ~there if said else None
        stored = [chain for group in answers for chain in group if chain.there.any()]
        each_bytes = sum(chain.chunk_bytes for chain in stored) if all(chain.stored_bytes for chain in stored) else 0.0
        # Storage counts what is asked for together, and several do it side by side.
        cold_seconds = max((chain.cold_seconds for chain in stored), default=0.0)
        tiers = [
            np.maximum.reduce([chain.tiers for chain in group]) * flags
            for group, flags in zip(answers, present, strict=True)
        ]
        return cls(shard_layout, present, there, coming, tiers, each_bytes, cold_seconds)

    @property
    def extent(self) -> int:
        """Leading chunks that are there or published."""
        return leading(self.there if self.coming is None else self.there | self.coming)

    @property
    def has_cold(self) -> bool:
        """Whether anything of it is cold."""
        return any((tiers == Tier.COLD).any() for tiers in self.tiers)

    def near(self, every: Sequence[bool]) -> "Seen":
        """Return the same as if what is cold were not there; ``every``: as of :meth:`of`."""
        present = [flags & (tiers != Tier.COLD) for flags, tiers in zip(self.present, self.tiers, strict=True)]
        kept = [flags for flags, each in zip(present, every, strict=True) if each]
        return replace(self, present=present, there=np.logical_and.reduce([self.there, *kept]))

    def farthest(self, needed: Sequence[int], before: int = 0) -> Tiers:
        """Return where each chunk is: the farthest of its records that a load needs; 0 where the chunk is not there.

        Args:
            needed: of each group, the first chunk that a load needs of it.
            before: the chunk that this begins with.
        """
        tiers = [each.copy() for each in self.tiers]
        for each, first in zip(tiers, needed, strict=True):
            each[: max(first - before, 0)] = Tier.NONE
        farthest: Tiers = np.maximum.reduce(tiers) * self.there
        return farthest
