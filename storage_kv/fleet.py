"""The fleet that a node belongs to: which partitions of a common bucket it serves."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from shadowserve import members
from shadowserve.placement import PARTITIONS, Placement
from storage_kv.config import FleetConfig

_log = logging.getLogger(__name__)

_CHOICES: Final = 2
"""Nodes that serve a partition: data planes read it from its second choice if the first one is away or loaded."""

_APPEARS_S: Final = 60.0
"""Time after the start until a name has the node's address; before, the node counts itself as a member."""


class Fleet:
    """The members, which may change; without a configuration the node serves everything.

    Attributes:
        refused: Number of lists that could not be read or used.
        share: Share of the partitions whose first choice is this node; 1 without members.
    """

    def __init__(self, config: FleetConfig | None) -> None:
        """ConfigurationError: the file of members cannot be used."""
        self.refused, self.share = 0, 1.0
        self._address = "" if config is None else config.address
        self._known: Mapping[str, float] = {}
        self._placement: Placement | None = None
        is_service = config is not None and bool(members.service_of(config.members))
        self._appears_until_s = time.monotonic() + _APPEARS_S if is_service else 0.0
        self._follower: members.Follower | None = None
        if config is not None:
            self._set(members.first(config.members))
            self._follower = members.Follower(config.members, config.ttl_s, self._follow, self._refuse)

    async def start(self) -> None:
        """Know the members before the first list of the bucket, unless DNS does not answer."""
        if self._follower is not None:
            await self._follower.start()

    async def stop(self) -> None:
        if self._follower is not None:
            await self._follower.stop()

    @property
    def nodes(self) -> int:
        """Number of members; 0 if the node is none of them."""
        return 0 if self._placement is None else len(self._placement.weights)

    def serves(self, partition: int) -> bool:
        """Return True if the node is among the first choices of a partition. From any thread."""
        placement = self._placement
        return placement is None or self._address in placement.ranking(partition)[:_CHOICES]

    def _set(self, weights: Mapping[str, float]) -> None:
        if self._address not in weights and time.monotonic() < self._appears_until_s:
            weights = {**weights, self._address: 1.0}
        if weights == self._known:
            return
        self._known = dict(weights)
        placement, self.share = None, 1.0
        if self._address in weights:
            placement = Placement(weights)
            firsts = [placement.ranking(each)[0] for each in range(PARTITIONS)]
            self.share = firsts.count(self._address) / PARTITIONS
        self._placement = placement
        if placement is not None:
            _log.info("fleet address=%s members=%d", self._address, len(weights))
        else:
            _log.warning(
                "not_a_member address=%s hint='fleet.members has no such address: the node serves everything'",
                self._address,
            )

    async def _follow(self, weights: Mapping[str, float]) -> None:
        await asyncio.to_thread(self._set, weights)  # a second for the most members

    def _refuse(self) -> None:
        self.refused += 1
