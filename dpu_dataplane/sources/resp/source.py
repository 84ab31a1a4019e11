"""Servers that speak RESP as a source: requests go over control connections, bytes over data connections."""

import asyncio
import contextlib
import functools
import time
from abc import abstractmethod
from collections import defaultdict
from typing import Final

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.jobs import Job
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.resp.layers import Threshold
from dpu_dataplane.sources.resp.links import DataLinks, Dialer, Link, Node
from dpu_dataplane.sources.resp.ranges import REDIRECTIONS_MAX, PieceReader, Router
from dpu_dataplane.sources.resp.receiving import receive_answer
from dpu_dataplane.sources.source import Delivered, Encoded, Resources, Source
from shadowserve import resp
from shadowserve.errors import StorageUnavailableError
from shadowserve.keys import storage_key
from shadowserve.native import Result

_AVOID_S: Final = 2.0
"""Seconds for which a failed node is avoided: by then its control connection knows whether it is down."""


class AvoidedNodes:
    """Nodes that failed a moment ago, by address."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int], float] = {}

    def add(self, node: Node) -> None:
        now = time.monotonic()
        self._until = {address: end for address, end in self._until.items() if end > now}
        self._until[node.host, node.port] = now + _AVOID_S

    def __contains__(self, node: Node) -> bool:
        return self._until.get((node.host, node.port), 0.0) > time.monotonic()


class RespSource(Source, Router):
    """One server, or the nodes of a cluster. A subclass implements the requests, this class moves the bytes."""

    def __init__(self, name: str, config: DataPlaneConfig, metrics: Metrics) -> None:
        self.name = name
        self.dialer = Dialer(config)
        self._config = config
        self._metrics = metrics
        # Each receive has its own connection: one that is given up half-way breaks no batch's connection.
        self._idle: defaultdict[Node, list[Link]] = defaultdict(list)
        self._links: list[DataLinks] = []
        self._last_node: Node | None = None  # that a record was put on
        self._resources: Resources
        self._reader: PieceReader

    def attach(self, resources: Resources) -> None:
        """Prepare to move bytes; once, before :meth:`start`."""
        config, metrics = self._config, self._metrics
        count = len(config.stage_cores()["net"])
        reading, self._writing = DataLinks(self.dialer, count, metrics), DataLinks(self.dialer, 1, metrics)
        self._links = [reading, self._writing]
        self._resources = resources
        # A cluster does not know the request.
        threshold = None if config.storage_cluster else Threshold(config.layer_request_bytes_min)
        self._reader = PieceReader(resources, self, reading, threshold)

    async def close(self) -> None:
        for links in self._links:
            links.close()
        for link in [link for links in self._idle.values() for link in links]:
            link.close()
        self._idle.clear()
        await self._disconnect()

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the control connections, and stop to reconnect."""

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        return await self._reader.deliver(job, plan)

    def _unknown_slot(self) -> StorageUnavailableError:
        return StorageUnavailableError(f"storage {self.name}: no node has the slot of this key")

    # ---- Parts of records, as they are stored

    async def receive(self, job: Job, key: bytes, first: int, memory: memoryview) -> Result:
        self.check()
        [node] = self.route([key], master=False)
        for _ in range(REDIRECTIONS_MAX + 1):
            if node is None:
                raise self._unknown_slot()
            result, text = await self._receive_from(job, node, key, first, memory)
            redirect = self.redirect(node, text) if result is Result.REFUSED else None
            if redirect is None or redirect.asking:
                return result
            self._metrics.totals["storage_redirections"] += 1
            node = redirect.node
        return Result.REFUSED

    async def _receive_from(
        self, job: Job, node: Node, key: bytes, first: int, memory: memoryview
    ) -> tuple[Result, str]:
        link = await job.within(self._idle_link(node), "connecting to storage")
        result, text = Result.CANCELLED, ""
        try:
            with job.interruptible(link.shut_down):
                last = first + len(memory) - 1
                command = resp.encode_command(b"GETRANGE", storage_key(key), b"%d" % first, b"%d" % last)
                result, text = await asyncio.to_thread(receive_answer, link, command, memory, job.deadline_ns)
        finally:
            if result in (Result.OK, Result.REFUSED, Result.NOT_FOUND) and node in self.nodes():
                self._idle[node].append(link)
            else:
                link.close()
        job.check()
        if result is Result.DISCONNECTED:
            with contextlib.suppress(StorageUnavailableError):
                await job.within(self.recover(node), "looking for a node of the cluster")
            raise StorageUnavailableError(f"storage {node}: {text}")
        return result, text

    async def _idle_link(self, node: Node) -> Link:
        while self._idle[node]:
            link = self._idle[node].pop()
            if link.is_idle():
                return link
            link.close()
        link = await self.dialer.open(node)
        self._metrics.totals["data_connections"] += 1
        return link

    # ---- New records: one SET each, sent by the C core from the store buffer

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        """SET a record on its node. A broken connection is made again once."""
        result, text = Result.CANCELLED, ""
        for last in (False, True):
            [node] = self.route([key], master=True)
            try:
                result, text = await self._put_redirected(job, node, record)
            except StorageUnavailableError:
                if last or not self.clustered:
                    raise
                result = Result.DISCONNECTED
            if job.cancelled or result is not Result.DISCONNECTED or last:
                break
            await job.within(self.recover(self._last_node), "looking for a node of the cluster")
        return result, text

    async def _put_redirected(self, job: Job, node: Node | None, record: Encoded) -> tuple[Result, str]:
        asking, text = False, ""
        for _ in range(REDIRECTIONS_MAX + 1):
            self._last_node = node
            if node is None:
                raise self._unknown_slot()
            [link] = await job.within(self._writing.open(node), "connecting to storage")
            if asking:
                await job.within(self._send_asking(link), "sending ASKING")
            result, text = await self._put_on(job, record, link)
            redirect = self.redirect(node, text) if result is Result.REFUSED else None
            if redirect is None:
                return result, text
            self._metrics.totals["storage_redirections"] += 1
            node, asking = redirect
        return Result.REFUSED, f"redirected {REDIRECTIONS_MAX} times, last with: {text}"

    async def _send_asking(self, link: Link) -> None:
        async with self.dialer.deadline("ASKING", str(link.node)):
            await link.exchange([[b"ASKING"]])

    async def _put_on(self, job: Job, record: Encoded, link: Link) -> tuple[Result, str]:
        resources, result, text = self._resources, Result.CANCELLED, ""
        put = functools.partial(
            resources.pipeline.put,
            record.batch,
            record.position,
            record.header,
            link.fileno(),
            job.deadline_ns,
            lasts_ms=record.lasts_ms,
            session=link.session,
        )
        try:
            with job.interruptible(link.shut_down):
                result, text = await asyncio.get_running_loop().run_in_executor(resources.storing, put)
        finally:
            if result not in (Result.OK, Result.REFUSED):
                self._writing.close()
        return result, text
