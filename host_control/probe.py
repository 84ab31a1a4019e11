"""Probes: which records of some chunks are stored, pending or cold, of all ranks and groups together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self

import numpy as np

from host_control.answers import Chain, Tiers
from host_control.client import DataPlaneClient
from shadowserve.errors import DataPlaneError
from shadowserve.keys import record_keys
from shadowserve.pieces import Flags, leading
from shadowserve.tier import Tier

Records = Sequence[Sequence[tuple[DataPlaneClient, bytes]]]
"""Of each group, where its records are: for each rank and shard the client of its data plane (the same one as often as
it serves) and the namespace of the records."""


@dataclass(frozen=True)
class Probe:
    """State of some chunks in the records of one shard layout.

    Attributes:
        present: Flags of each group: chunks that are stored.
        stored: Chunks that are stored in every group that keeps all chunks.
        pending: Flags of chunks that are pending; None: not known.
        tiers: Tier of each chunk, per group: the farthest of its records; 0 where it is not stored.
        chunk_bytes: Mean bytes of a chunk's records, of all groups and ranks together; 0 if unknown.
        cold_seconds: Seconds after which storage expects to have the cold ones nearer.
    """

    shard_layout: int
    present: list[Flags]
    stored: Flags
    pending: Flags | None
    tiers: list[Tiers]
    chunk_bytes: float
    cold_seconds: float

    @classmethod
    def of(cls, shard_layout: int, count: int, groups: Sequence[Sequence[Chain]], every: Sequence[bool]) -> Self:
        """Combine the chains of each group. A chunk that one rank or shard lacks is of no use.

        ``every``: flag per group: it keeps every chunk.
        """
        present = [np.logical_and.reduce([chain.stored for chain in group]) for group in groups]
        kept = [chain for group, each in zip(groups, every, strict=True) if each for chain in group]
        stored = np.logical_and.reduce([np.ones(count, np.bool_), *(chain.stored for chain in kept)])
        with_bytes = [chain for group in groups for chain in group if chain.stored.any()]
        known = all(chain.stored_bytes for chain in with_bytes)
        return cls(
            shard_layout,
            present,
            stored,
            _pending(kept, stored),
            [
                np.maximum.reduce([chain.tiers for chain in group]) * flags
                for group, flags in zip(groups, present, strict=True)
            ],
            sum(chain.chunk_bytes for chain in with_bytes) if known else 0.0,
            # Storage brings the cold records of one question together, and several questions side by side.
            max((chain.cold_seconds for chain in with_bytes), default=0.0),
        )

    @property
    def extent(self) -> int:
        return leading(self.stored if self.pending is None else self.stored | self.pending)

    def within(self, farthest: Tier, every: Sequence[bool]) -> "Probe":
        """Return the probe as if chunks beyond a tier were not stored; ``every`` as in :meth:`of`."""
        present = [flags & (tiers <= farthest) for flags, tiers in zip(self.present, self.tiers, strict=True)]
        kept = [flags for flags, each in zip(present, every, strict=True) if each]
        return replace(self, present=present, stored=np.logical_and.reduce([self.stored, *kept]))

    def farthest(self, needed: Sequence[int], before: int = 0) -> Tiers:
        """Return the farthest tier of the records that a load needs of each chunk; 0 where a chunk is not stored.

        ``needed``: first chunk that a load needs of each group; ``before``: number of the probe's first chunk.
        """
        tiers = [each.copy() for each in self.tiers]
        for each, first in zip(tiers, needed, strict=True):
            each[: max(first - before, 0)] = Tier.NONE
        farthest: Tiers = np.maximum.reduce(tiers) * self.stored
        return farthest


def _pending(kept: Sequence[Chain], stored: Flags) -> Flags | None:
    """Return the chunks whose missing records are all pending; None if some chain does not know."""
    usable = [np.ones(len(stored), np.bool_)]
    for chain in kept:
        if chain.pending is None:
            return None
        usable.append(chain.stored | chain.pending)
    pending: Flags = np.logical_and.reduce(usable) & ~stored
    return pending


class Prober:
    """Asks all data planes at once for chunks.

    Args:
        layouts: Records that this engine can read, by shard layout; 0 is its own.
        saved: Key, among shard layouts, of the records of preempted requests, and these records.
        every: Flag per group: it keeps every chunk.
    """

    def __init__(self, layouts: Mapping[int, Records], saved: tuple[int, Records], every: Sequence[bool]) -> None:
        self.layouts = layouts
        self.records = {saved[0]: saved[1], **layouts}
        self.every = list(every)

    def best(self, chunk_keys: Sequence[bytes], timeout: float, *, published: bool) -> tuple[Probe, Probe]:
        """Probe this engine's own records; return that probe, and the one of the shard layout with the longest prefix.

        Exact copies in local tiers are preferred to lossy records of the same prefix, and those to exact copies far
        away. Of other shard layouts only the first chunk is asked for at first: most prompts have no records there.

        Raises:
            DataPlaneError: Some data plane did not answer.
        """
        ends = monotonic() + timeout
        counts = {layout: 1 if layout > 0 else len(chunk_keys) for layout in self.layouts}
        own, *others = self.ask(counts, chunk_keys, timeout, published=published)
        exact = [each for each in others if each.shard_layout < 0]
        near = [each.within(Tier.DEVICE, self.every) for each in exact]
        best = max([*near, own, *exact], key=lambda probe: probe.extent)  # the first one of the longest
        if not best.stored.all():
            for layout in [probe.shard_layout for probe in others if probe.extent and probe.shard_layout > 0]:
                left = max(ends - monotonic(), 0.001)
                (other,) = self.ask({layout: len(chunk_keys)}, chunk_keys, left, published=published)
                best = max(best, other, key=lambda probe: probe.extent)
        return own, best

    def of_any(self, chunk_keys: Sequence[bytes], layouts: Iterable[int], timeout: float) -> tuple[Flags, Flags | None]:
        """Return flags of stored and of pending chunks, in any of some shard layouts."""
        probes = self.ask(dict.fromkeys(layouts, len(chunk_keys)), chunk_keys, timeout, published=True)
        stored = np.logical_or.reduce([probe.stored for probe in probes])
        known = [probe.pending for probe in probes if probe.pending is not None]
        return stored, np.logical_or.reduce(known) & ~stored if len(known) == len(probes) else None

    def ask(
        self,
        counts: Mapping[int, int],
        chunk_keys: Sequence[bytes],
        timeout: float,
        *,
        published: bool,
        prefetch: bool = False,
    ) -> list[Probe]:
        """Probe the first chunks of some shard layouts; ``counts`` has their number. Options as of the client's `find`.

        Raises:
            DataPlaneError: Some data plane did not answer.
        """
        # Ranks that hold the same shard need the same records.
        asked = dict.fromkeys(
            (client, namespace, count)
            for layout, count in counts.items()
            for group in self.records[layout]
            for client, namespace in group
        )
        calls: list[tuple[list[tuple[DataPlaneClient, bytes, int]], Callable[[], list[Chain]]]] = []
        problem = None
        for client in dict.fromkeys(client for client, _, _ in asked):
            chains = [each for each in asked if each[0] is client]
            try:
                keys = [(namespace, record_keys(namespace, chunk_keys[:count])) for _, namespace, count in chains]
                calls.append((chains, client.find(keys, timeout, published=published, prefetch=prefetch)))
            except DataPlaneError as error:
                problem = problem or error
        found: dict[tuple[DataPlaneClient, bytes, int], Chain] = {}
        for chains, call in calls:  # every answer is taken: its data plane's breaker counts it
            try:
                found |= zip(chains, call(), strict=True)
            except DataPlaneError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return [
            Probe.of(
                layout, count, [[found[*each, count] for each in group] for group in self.records[layout]], self.every
            )
            for layout, count in counts.items()
        ]
