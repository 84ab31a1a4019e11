"""Several storage servers over one bucket: each prefix has one server, and another one while that is unreachable.

Rendezvous hashing (Thaler and Ravishankar, 1998) maps the chain name in a key to a server: the same map on all data
planes with the same addresses; a server that comes or goes moves its own prefixes only. A server reads records that it
lacks from the bucket; nothing is copied between servers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.found import Found
from dpu_dataplane.sources.resp.links import Node
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.source import AvoidedNodes, RespSource
from shadowserve.errors import StorageError
from shadowserve.keys import segment_of
from shadowserve.pieces import Flags
from shadowserve.placement import Placement, partition_of

_Answer = TypeVar("_Answer")


def ranking(chain: bytes, names: Iterable[str]) -> list[str]:
    """Rank servers for a chain: the first one that is reachable has the chain."""
    return list(Placement(dict.fromkeys(names, 1.0)).ranking(partition_of(chain)))


class SeveralServers(RespSource):
    """Several servers, each with its share of the prefixes."""

    clustered = True

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        assert not isinstance(config.storage_nodes, str)
        super().__init__(",".join(config.storage_nodes), config, metrics)
        self._servers = {
            address: OneServer(config, metrics, address, meanwhile="other servers have its prefixes")
            for address in config.storage_nodes
        }
        self._nodes = {address: node for address, server in self._servers.items() for node in server.nodes()}
        self._avoided = AvoidedNodes()
        metrics.gauges["storage_nodes_away"] = (
            "Unreachable storage servers; other servers have their prefixes meanwhile",
            lambda: float(sum(not server.connected for server in self._servers.values())),
        )

    async def start(self) -> None:
        for server in self._servers.values():
            await server.start()

    async def _disconnect(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def set_members(self, weights: Mapping[str, float]) -> None:
        removed = [self._servers.pop(address) for address in list(self._servers) if address not in weights]
        for address in weights:
            if address not in self._servers:
                self._servers[address] = OneServer(self._config, self._metrics, address)
                await self._servers[address].start()
        self._nodes = {address: node for address, server in self._servers.items() for node in server.nodes()}
        for server in removed:
            await server.close()

    @property
    def connected(self) -> bool:
        return any(server.connected for server in self._servers.values())

    def check(self) -> None:
        if all(self._is_away(address) for address in self._servers):
            for server in self._servers.values():
                server.check()

    def _is_away(self, address: str) -> bool:
        try:
            self._servers[address].check()
        except StorageError:
            return True
        return False

    # ---- Routing

    def nodes(self) -> Sequence[Node]:
        return list(self._nodes.values())

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        return [self._nodes[address] for address in self._addresses_of(keys)]

    def _addresses_of(self, keys: Sequence[bytes]) -> list[str]:
        """Return the best reachable server for each key; the best of all if none is reachable."""
        usable = [
            address for address, node in self._nodes.items() if node not in self._avoided and not self._is_away(address)
        ]
        best = {chain: ranking(chain, usable or self._servers)[0] for chain in {segment_of(key) for key in keys}}
        return [best[segment_of(key)] for key in keys]

    async def recover(self, node: Node | None) -> None:
        """Avoid a server until its control connection knows whether it is down."""
        if node is not None:
            self._avoided.add(node)

    # ---- Requests

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        return await self._find(keys, lambda server, mine: server.find(mine))

    async def _find(
        self, keys: Sequence[bytes], question: Callable[[OneServer, Sequence[bytes]], Awaitable[Sequence[Found]]]
    ) -> Sequence[Found]:
        found: list[Found] = [None] * len(keys)
        for some, answer in await self._ask(keys, question):
            for index, each in zip(some, answer, strict=True):
                found[index] = each
        return found

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        answers = await self._ask(keys, lambda server, mine: server.publish(mine, lasts_ms))
        return any(taken for _, taken in answers)

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        answers = await self._ask(keys, lambda server, mine: server.published(mine))
        if all(flags is None for _, flags in answers):
            return None
        published = np.zeros(len(keys), np.bool_)
        for some, flags in answers:
            if flags is not None:
                published[some] = flags
        return published

    async def find_warm(self, keys: Sequence[bytes], *, headers: bool) -> Sequence[Found]:
        return await self._find(keys, lambda server, mine: server.find_warm(mine, headers=headers))

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        await self._ask(keys, lambda server, mine: server.prefetch(mine))

    async def delete(self, key: bytes) -> None:
        await self._ask([key], lambda server, mine: server.delete(mine[0]))

    async def expire(self, key: bytes, lasts_ms: int) -> None:
        await self._ask([key], lambda server, mine: server.expire(mine[0], lasts_ms))

    async def _ask(
        self, keys: Sequence[bytes], question: Callable[[OneServer, Sequence[bytes]], Awaitable[_Answer]]
    ) -> list[tuple[list[int], _Answer]]:
        """Ask each key's server, and the next one if it fails; return each answer with the indexes of its keys."""
        answers: list[tuple[list[int], _Answer]] = []
        left = list(range(len(keys)))
        for last in [False] * (len(self._servers) - 1) + [True]:
            by_server: dict[str, list[int]] = {}
            for index, address in zip(left, self._addresses_of([keys[index] for index in left]), strict=True):
                by_server.setdefault(address, []).append(index)
            results = await asyncio.gather(
                *(
                    question(self._servers[address], [keys[index] for index in some])
                    for address, some in by_server.items()
                ),
                return_exceptions=True,
            )
            left = []
            for (address, some), result in zip(by_server.items(), results, strict=True):
                if not isinstance(result, BaseException):
                    answers.append((some, result))
                elif last or not isinstance(result, StorageError):
                    raise result
                else:
                    await self.recover(self._nodes[address])
                    left += some
            if not left:
                break
        return answers
