"""The fleet that a node belongs to: the partitions of a common bucket whose first choice the node is."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final

from shadowserve import members
from shadowserve.placement import PARTITIONS, Placement
from storage_kv.config import FleetConfig

_log = logging.getLogger(__name__)

_APPEARS_S: Final = 60.0
"""Time after the start until a name has the node's address; before, the node counts itself as a member."""


class Fleet:
    """The members, which may change while the node runs."""

    def __init__(self, config: FleetConfig | None) -> None:
        """ConfigurationError: the file of members cannot be used."""
        self.nodes = 0  # number of members; 0 if the node is none of them
        self.refused = 0  # number of lists that could not be read or used
        self._own: frozenset[int] = frozenset()
        self._known: Mapping[str, float] = {}
        self._address, self._appears_until_s = "", 0.0
        self._follower: members.Follower | None = None
        if config is not None:
            self._address = config.address
            if members.service_of(config.members):
                self._appears_until_s = time.monotonic() + _APPEARS_S
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
    def share(self) -> float:
        """Share of the partitions whose first choice is this node."""
        return len(self._own) / PARTITIONS

    def serves(self, partition: int) -> bool:
        """Return True if the node is the first choice for a partition. From any thread."""
        return partition in self._own

    def _set(self, weights: Mapping[str, float]) -> None:
        if self._address not in weights and time.monotonic() < self._appears_until_s:
            weights = {**weights, self._address: 1.0}
        if weights == self._known:
            return
        self._known, firsts = dict(weights), Placement(weights).firsts()
        self._own = frozenset(each for each, first in enumerate(firsts) if first == self._address)
        self.nodes = len(weights) if self._address in weights else 0
        if self.nodes:
            _log.info("fleet address=%s members=%d share=%.3f", self._address, self.nodes, self.share)
        else:
            _log.warning("not_a_member address=%s hint='fleet.members has no such address'", self._address)

    async def _follow(self, weights: Mapping[str, float]) -> None:
        await asyncio.to_thread(self._set, weights)  # a second for the most members

    def _refuse(self) -> None:
        self.refused += 1
