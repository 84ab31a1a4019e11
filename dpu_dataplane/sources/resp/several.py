"""Several storage servers of their own over one bucket: each prefix has one of them, and another while that is away.

Who has a prefix is decided by rendezvous hashing (Thaler and Ravishankar, 1998) of the servers' addresses with what all
keys of a chain have in common: every data plane with the same addresses decides alike, and a server that comes or goes
moves its own prefixes and no others. What a server has not got itself it takes from the bucket; nothing is copied
between servers.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.links import Node
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.servers import Redirect
from dpu_dataplane.sources.source import Found
from shadowserve.errors import StorageError
from shadowserve.keys import chain_of
from shadowserve.pieces import Flags

__all__ = ["SeveralServers", "ranking"]

_AVOID_TIME: Final = 2.0
"""Seconds for which a server is left alone whose data connection broke: by then its control connection has told."""

_Answer = TypeVar("_Answer")


def ranking(chain: bytes, names: Iterable[str]) -> list[str]:
    """Return names in the order in which they are to have a chain, the next one where all before it are away."""
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), key=chain, digest_size=8).digest())


class SeveralServers:
    """Knows who has which prefix, and asks them questions.

    Raises:
        ConfigurationError: TLS is wanted and cannot be had.
    """

    clustered = True
    not_by_layers = "several_nodes"

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = ",".join(config.storage_nodes)
        self._servers = {
            address: OneServer(config, metrics, address, meanwhile="the others have its prefixes")
            for address in config.storage_nodes
        }
        self._nodes = {address: node for address, server in self._servers.items() for node in server.nodes()}
        self.dialer = next(iter(self._servers.values())).dialer
        self._avoided: dict[str, float] = {}  # to the time of its end
        metrics.gauges["storage_nodes_away"] = (
            "Storage servers that cannot be reached, while others have their prefixes",
            lambda: float(sum(not server.connected for server in self._servers.values())),
        )

    async def start(self) -> None:
        """Begin to connect to all."""
        for server in self._servers.values():
            await server.start()

    async def close(self) -> None:
        """Close the connections and stop trying."""
        for server in self._servers.values():
            await server.close()

    @property
    def connected(self) -> bool:
        """Whether one of them can be asked."""
        return any(server.connected for server in self._servers.values())

    def check(self) -> None:
        """Raise the StorageError of an outage of all of them, if there is one."""
        if all(self._is_away(address) for address in self._servers):
            for server in self._servers.values():
                server.check()

    def _is_away(self, address: str) -> bool:
        try:
            self._servers[address].check()
        except StorageError:
            return True
        return False

    # ---- Who has what

    def nodes(self) -> Sequence[Node]:
        """Return all of them."""
        return list(self._nodes.values())

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        """Return who has each key now."""
        return [self._nodes[address] for address in self._whose(keys)]

    def _whose(self, keys: Sequence[bytes]) -> list[str]:
        """Return the best of those that can be asked, for each key; where none can, the best of all."""
        now = time.monotonic()
        usable = [
            address
            for address in self._servers
            if self._avoided.get(address, now) <= now and not self._is_away(address)
        ]
        best = {chain: ranking(chain, usable or self._servers)[0] for chain in {chain_of(key) for key in keys}}
        return [best[chain_of(key)] for key in keys]

    def redirect(self, asked: Node, text: str) -> Redirect | None:
        """Return ``None``: these servers do not know each other."""
        return None

    async def recover(self, node: Node | None) -> None:
        """Leave a server alone for a while; whether it is away its control connection will tell."""
        for address, each in self._nodes.items():
            if each == node:
                self._avoided[address] = time.monotonic() + _AVOID_TIME

    # ---- Questions

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return what is stored under each key, asking all servers at the same time.

        Raises:
            StorageUnavailableError, StorageRefusedError: none of them can be asked.
        """
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
        """Tell each server of its keys; return whether one of them takes publications."""
        answers = await self._ask(keys, lambda server, mine: server.publish(mine, lasts_ms))
        return any(taken for _, taken in answers)

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Return which keys are published; None where no server takes publications."""
        answers = await self._ask(keys, lambda server, mine: server.published(mine))
        if all(flags is None for _, flags in answers):
            return None
        published = np.zeros(len(keys), np.bool_)
        for some, flags in answers:
            if flags is not None:
                published[some] = flags
        return published

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Return as find() does, but wait for what is cold."""
        return await self._find(keys, lambda server, mine: server.heads(mine))

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have each server begin to bring what is cold of its keys."""
        await self._ask(keys, lambda server, mine: server.prefetch(mine))

    async def delete(self, key: bytes) -> None:
        """Delete a record where it is now.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        await self._ask([key], lambda server, mine: server.delete(mine[0]))

    async def expire(self, key: bytes, lasts_ms: int) -> None:
        """Have a record end by itself after so long, where it is now.

        Raises:
            StorageUnavailableError, StorageRefusedError: as for :meth:`find`.
        """
        await self._ask([key], lambda server, mine: server.expire(mine[0], lasts_ms))

    async def _ask(
        self, keys: Sequence[bytes], question: Callable[[OneServer, Sequence[bytes]], Awaitable[_Answer]]
    ) -> list[tuple[list[int], _Answer]]:
        """Ask each key's server, and who comes next where one fails; return the indexes of keys with each answer."""
        answers: list[tuple[list[int], _Answer]] = []
        left = list(range(len(keys)))
        for last in [False] * (len(self._servers) - 1) + [True]:
            asked: dict[str, list[int]] = {}
            for index, address in zip(left, self._whose([keys[index] for index in left]), strict=True):
                asked.setdefault(address, []).append(index)
            results = await asyncio.gather(
                *(question(self._servers[address], [keys[index] for index in some]) for address, some in asked.items()),
                return_exceptions=True,
            )
            left = []
            for (address, some), result in zip(asked.items(), results, strict=True):
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
