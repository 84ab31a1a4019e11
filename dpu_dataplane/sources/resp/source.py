"""Servers that speak RESP as a source: requests go over control connections, bytes over the pipeline's connections."""

from abc import abstractmethod
from concurrent.futures import Executor

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.links import DataLinks, Dialer
from dpu_dataplane.sources.resp.puts import RecordWriter
from dpu_dataplane.sources.resp.ranges import PieceReader
from dpu_dataplane.sources.resp.receiving import RecordReceiver
from dpu_dataplane.sources.resp.routing import Router
from dpu_dataplane.sources.source import Delivered, Encoded, Source
from shadowserve import native
from shadowserve.native import Result


class RespSource(Source, Router):
    """One server, or the nodes of a cluster. A subclass implements the requests, this class moves the bytes.

    Args:
        name: Name for messages.

    Raises:
        ConfigurationError: TLS is configured and cannot be used.
    """

    def __init__(self, name: str, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = name
        self.dialer = Dialer(config)
        self._metrics = metrics
        self._receiver = RecordReceiver(self, metrics)
        self._links: list[DataLinks] = []
        self._reader: PieceReader
        self._writer: RecordWriter

    def attach(
        self,
        pipeline: native.Pipeline,
        fetch_executor: Executor,
        store_executor: Executor,
        connections: int,
        threshold: Threshold | None,
    ) -> None:
        """Prepare to move bytes; once, before :meth:`start`.

        Args:
            pipeline: Pipeline that sends and receives.
            fetch_executor: Thread for its calls that fetch.
            store_executor: Thread for its calls that store.
            connections: Connections to each node for fetches.
            threshold: Size from which a fetch in layer order is one request; None for range requests only.
        """
        reading, writing = DataLinks(self.dialer, connections, self._metrics), DataLinks(self.dialer, 1, self._metrics)
        self._links = [reading, writing]
        self._reader = PieceReader(pipeline, fetch_executor, self, reading, self._metrics, threshold)
        self._writer = RecordWriter(pipeline, store_executor, self, writing, self._metrics)

    async def close(self) -> None:
        for links in self._links:
            links.close()
        self._receiver.close()
        await self._disconnect()

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the control connections, and stop to reconnect."""

    @abstractmethod
    async def expire(self, key: bytes, lasts_ms: int) -> None:
        """Limit the lifetime of a record."""

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        return await self._reader.deliver(job, plan)

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        return await self._receiver.receive(job, key, first, memory)

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """SET a record on its node; PEXPIRE one with an end."""
        result, text = await self._writer.put(job, key, record)
        if result is Result.OK and record.lasts_ms:
            await job.within(self.expire(key, record.lasts_ms), "setting the lifetime of a record")
        return result, text
