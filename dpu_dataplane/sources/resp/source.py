"""Servers as a source: their questions, and the bytes that go over connections of the pipeline's own."""

from collections.abc import Sequence
from concurrent.futures import Executor

from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.links import DataLinks
from dpu_dataplane.sources.resp.puts import Puts
from dpu_dataplane.sources.resp.ranges import Ranges
from dpu_dataplane.sources.resp.receiving import Receiving
from dpu_dataplane.sources.resp.servers import Servers
from dpu_dataplane.sources.source import Delivered, Encoded, Found, Order, Source
from shadowserve import native
from shadowserve.native import Result
from shadowserve.pieces import Flags

__all__ = ["RespSource"]


class RespSource(Source):
    """One server, or the nodes of a cluster.

    Args:
        servers: to ask.
        pipeline: that bytes go to and come from.
        fetching: thread for its calls that fetch.
        storing: thread for its calls that store.
        connections: to fetch over, to each server.
        metrics: to count in.
        threshold: of what is asked for in one request, layer after layer; None to ask for ranges alone.
    """

    def __init__(
        self,
        servers: Servers,
        pipeline: native.Pipeline,
        fetching: Executor,
        storing: Executor,
        connections: int,
        metrics: Metrics,
        threshold: Threshold | None,
    ) -> None:
        self.name = servers.name
        self._servers = servers
        self._links = DataLinks(servers.dialer, connections, metrics), DataLinks(servers.dialer, 1, metrics)
        self._ranges = Ranges(pipeline, fetching, servers, self._links[0], metrics, threshold)
        self._puts = Puts(pipeline, storing, servers, self._links[1], metrics)
        self._receiving = Receiving(servers, servers.dialer, metrics)

    @property
    def connected(self) -> bool:
        """Whether questions can be asked."""
        return self._servers.connected

    async def start(self) -> None:
        """Begin to connect."""
        await self._servers.start()

    async def close(self) -> None:
        """Close all connections."""
        for links in self._links:
            links.close()
        self._receiving.close()
        await self._servers.close()

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Ask for lengths and heads, all nodes at the same time."""
        return await self._servers.find(keys)

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Say KV.PUBLISH, where that is known."""
        return await self._servers.publish(keys, lasts_ms)

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        """Ask with KV.PUBLISHED, where that is known."""
        return await self._servers.published(keys)

    async def heads(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Ask for lengths and heads, and wait for what a node reads from object storage."""
        return await self._servers.heads(keys)

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        """Say KV.PREFETCH, where that is known."""
        await self._servers.prefetch(keys)

    async def deliver(self, job: Job, order: Order) -> Delivered:
        """Fetch from whoever has each chunk."""
        return await self._ranges.run(job, order)

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        """GETRANGE, apart from all batches."""
        return await self._receiving.run(job, key, first, memory)

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """SET a record where it belongs; PEXPIRE one that is not for long."""
        result, text = await self._puts.run(job, key, record)
        if result is Result.OK and record.lasts_ms:
            await job.within(self._servers.expire(key, record.lasts_ms), "saying how long a record lasts")
        return result, text

    async def delete(self, key: bytes) -> None:
        """DEL a record."""
        await self._servers.delete(key)
